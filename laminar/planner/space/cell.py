"""The outer space as cells: stages, micro-batches, virtual stages, and a mesh for each stage.

A cell leaves open how each tensor lies on the mesh; everything else is fixed. Meshes are factorisations of the ranks of
a stage into two axes, `dp` outside and `tp` inside. With stages or micro-batches `tp` stays within the innermost level
of the machine, unless it has one level only; a batch at once may also have `tp` over up to `TP_NODES` nodes, or over
all of them. A batch is cut into from one micro-batch per stage to `MOST_MICRO_BATCHES` per stage, so that every data
parallel rank gets as many samples of each; there is a power of two of them, or a rank has a power of two of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laminar.errors import PlanError
from laminar.ir.mesh import Mesh
from laminar.planner.space.pins import axes_named
from laminar.planner.space.request import Request

MOST_MICRO_BATCHES = 16
"""Micro-batches per stage beyond which the bubble is below a sixteenth."""
VIRTUAL_STAGES = (1, 2, 3, 4, 6)
"""Virtual stages per place."""
TP_NODES = 8
"""Nodes that `tp` may span where it does not span all."""


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the outer space."""

    stages: int
    micro_batches: int
    virtual: int
    dp: int
    tp: int
    recompute: bool = False
    """Whether blocks may be recomputed, or wait in the host's memory, if that is short on the device."""

    @property
    def mesh(self) -> Mesh:
        """Of each stage."""
        if self.tp == 1:
            return Mesh({"dp": self.dp})
        return Mesh({"dp": self.dp, "tp": self.tp}) if self.dp > 1 else Mesh({"tp": self.tp})

    @property
    def ranks(self) -> int:
        """Of each stage."""
        return self.dp * self.tp

    @property
    def plain(self) -> bool:
        """Whether it has neither stages nor micro-batches."""
        return self.stages == 1 and self.micro_batches == 1

    def __str__(self) -> str:
        out = f"dp={self.dp} tp={self.tp}"
        if not self.plain:
            out += f" stages={self.stages} microbatches={self.micro_batches}"
        if self.virtual > 1:
            out += f" virtual={self.virtual}"
        return out + (" recompute" if self.recompute else "")

    def to_json(self) -> dict[str, int | bool]:
        """Plain data."""
        return {
            "stages": self.stages,
            "microbatches": self.micro_batches,
            "virtual": self.virtual,
            "dp": self.dp,
            "tp": self.tp,
            "recompute": self.recompute,
        }


def divisors(n: int) -> list[int]:
    """Of a number, in order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def cells(request: Request, samples: int, cuts: int, recompute: bool, offload: bool = False) -> list[Cell]:
    """All cells that a request allows for a batch of so many samples and a model of so many possible stages.

    `recompute` and `offload`: whether the model has blocks for that.
    """
    found = list(_cells(request, samples, cuts, recompute and request.recomputes, offload and request.offloads))
    if not found:
        raise PlanError(
            f"no cell is left for {request.cluster.devices} devices: {_asked(request)}",
            next="drop a pin, or allow another dimension",
        )
    return found


def _cells(request: Request, samples: int, cuts: int, recompute: bool, offload: bool) -> Iterator[Cell]:
    devices, pin = request.cluster.devices, request.pin
    inner = request.cluster.levels[0].size if len(request.cluster.levels) > 1 else devices
    deepest = max(1, cuts) if request.allows("pipeline") else 1
    for stages in divisors(devices):
        if stages > deepest or stages != pin.get("stages", stages):
            continue
        ranks = devices // stages
        for tp in divisors(ranks):
            dp = ranks // tp
            if tp != pin.get("tp", tp) or dp != pin.get("dp", dp):
                continue
            if tp > 1 and not request.allows("tensor"):
                continue
            across = tp > inner and "tp" not in pin
            if across and not (stages == 1 and _whole_nodes(tp, inner, devices)):
                continue
            if dp > 1 and not (request.allows("data") or request.allows("zero")):
                continue
            for micro in (m for m in _micro_batches(request, samples, stages, dp) if m == 1 or not across):
                for virtual in VIRTUAL_STAGES if stages > 1 else (1,):
                    if virtual != pin.get("virtual", virtual) or stages * virtual > max(cuts, stages):
                        continue
                    if virtual > 1 and micro % stages:
                        continue
                    away = offload and stages == micro == 1
                    for eased in (False, True) if recompute or away else (False,):
                        asked = pin.get("recompute", 0) > 0 or pin.get("offload", 0) > 0
                        cell = Cell(stages, micro, virtual, dp, tp, eased)
                        if (asked and not eased) or (pin.get("offload", 0) > 0 and not away):
                            continue
                        if axes_named(request.place) <= set(cell.mesh.names):
                            yield cell


def _micro_batches(request: Request, samples: int, stages: int, dp: int) -> list[int]:
    pinned = request.pin.get("microbatches")
    if pinned is not None:
        return [pinned] if samples % pinned == 0 else []
    if not request.allows("pipeline"):
        return [1]
    some = [m for m in divisors(samples) if stages <= m <= stages * MOST_MICRO_BATCHES]
    even = [m for m in some if samples // m % dp == 0 and (_power(m) or _power(samples // m // dp))]
    if stages == 1 and 1 not in even:
        even = [1, *even]  # a batch that does not divide is run at once
    return even or [m for m in some if _power(m)]


def _whole_nodes(tp: int, inner: int, devices: int) -> bool:
    """Whether so many ranks are whole nodes, few of them or all."""
    return tp % inner == 0 and (tp <= TP_NODES * inner or tp == devices)


def _power(n: int) -> bool:
    """Of two."""
    return n & (n - 1) == 0


def _asked(request: Request) -> str:
    pins = ", ".join(f"{k}={v}" for k, v in request.pin.items()) or "no pins"
    return f"{pins}; only {', '.join(request.only)}"
