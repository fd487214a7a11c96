"""How a job is to run, as one value: what `laminar.parallelize` is asked for besides what to train and by which plan.

The only place where a default of these is written down; `parallelize` and the command line read theirs from here. Plain
data without torch, so that reading a default costs nothing. What each option means is told at `laminar.parallelize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laminar.errors import LaminarError
from laminar.ir.mesh import Mesh
from laminar.placement.presets import PRESET_NAMES

PLANS = ("auto", *PRESET_NAMES, "ddp")
"""Plans that a job can be given by name."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job; none of them changes what is trained, but for precision, clipping and the seed."""

    mesh: Mesh | None = None
    device: Any = None
    """A `torch.device`, its name, or nothing: this rank's own GPU if every rank has one, else the CPU."""
    precision: Any = "f32"
    """The name of a policy, or a `Precision`."""
    micro_batches: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    ema: float | None = None
    seed: int = 0
    compile: bool | None = None
    """Nothing: on GPUs only."""
    detect_anomaly: bool = False
    timeout_s: float = 600.0
    elementwise: bool = False
    check: bool = True
    unguarded: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise LaminarError(f"micro_batches is {self.micro_batches}", allowed="a whole number of at least 1")

    def compiles(self, device: Any) -> bool:
        """Whether steps on a device go through Inductor: on GPUs, or if asked."""
        return bool(device.type == "cuda") if self.compile is None else self.compile

    def refuse_for_stages(self) -> None:
        """What a plan with stages has decided already is refused by name."""
        asked = {
            "mesh": self.mesh is not None,
            "micro_batches": self.micro_batches != DEFAULTS.micro_batches,
            "detect_anomaly": self.detect_anomaly,
        }
        for name, given in asked.items():
            if given:
                raise LaminarError(f"{name} does not go with a plan that has stages", next="leave it out")


DEFAULTS = JobOptions()
