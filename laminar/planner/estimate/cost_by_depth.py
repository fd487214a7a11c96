"""What one micro-batch takes and holds on one stage's ranks, as lines over the depth of a model.

Values alone: what they are made of is in `stage_cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from laminar.ir.mesh import Mesh
from laminar.planner.space.styles import Style


@dataclass(frozen=True)
class DepthLine:
    """A quantity by depth: so much for the ends of a model, and so much for each layer."""

    ends: float
    each: float

    def at(self, layers: float) -> float:
        """For so many layers, and the ends."""
        return self.ends + layers * self.each

    def times(self, factor: float) -> DepthLine:
        """In proportion."""
        return DepthLine(self.ends * factor, self.each * factor)


@dataclass(frozen=True)
class Share:
    """What the parts of a micro-batch depend on."""

    micro_batches: int
    """Into how many the batch is cut whose samples all lie on the mesh."""
    mesh: Mesh
    style: Style
    zero: int
    recompute: bool
    samples: int
    """Of a rank and those beside it."""

    def __post_init__(self) -> None:
        # Of blocks of both kinds, those of each are measured; without any it makes no difference what they would be.
        if self.style.keep_products == "some" or not self.recompute:
            object.__setattr__(self, "style", replace(self.style, keep_products="none"))


@dataclass(frozen=True)
class Parts:
    """One micro-batch through a model, all of it on one stage's ranks."""

    share: Share
    """Whose parts they are, or those are that they follow from."""
    forward_s: DepthLine
    backward_s: DepthLine
    kept_bytes: DepthLine
    """By forward, for backward."""
    works_bytes: DepthLine
    """While a part runs."""
    hop_bytes: DepthLine
    """From one layer to the next."""
    weight_bytes: DepthLine
    grad_bytes: DepthLine
    sums_bytes: DepthLine
    """Of gradients, those that the ranks beside have yet to add up."""
    elements: DepthLine
    """Of gradients."""
    update_s: DepthLine

    def scaled(self, factor: float) -> Parts:
        """For so many times as many samples: roughly."""
        grown = ("forward_s", "backward_s", "kept_bytes", "works_bytes", "hop_bytes")
        return replace(self, **{name: getattr(self, name).times(factor) for name in grown})


PART_NAMES = tuple(f.name for f in fields(Parts) if f.name != "share")
