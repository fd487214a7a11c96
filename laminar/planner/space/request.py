"""What is asked of a search: the machine, limits, pins, and which dimensions may be used.

Pins fix a number (`pin={"tp": 8, "stages": 4}`) or how tensors lie (`pin={"blocks.*.mlp.up.weight": "S(0)"}`), `only`
names the dimensions that may be used at all. `memory_bytes` is what a rank may fill; or `margin` is the share of a
device's memory that it leaves free. Everything is checked here, by name, before any work is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.cost.machine import UPDATES
from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.rewrite.apply import Rewrite

DIMENSIONS = ("data", "tensor", "pipeline", "zero", "recompute", "offload", "rewrite")
"""`data`: the batch in parts. `tensor`: any other split of tensors. `pipeline`: stages and micro-batches. `zero`:
state, gradients and parameters in shards. `recompute`: activations recomputed. `offload`: activations in the host's
memory, on GPUs and without stages. `rewrite`: other graphs that compute the same."""
BATCHES = ("fixed", "free")
"""The batch that was captured; or that, or an equal part of it, whichever trains most samples a second."""
PINNABLE = ("dp", "tp", "stages", "micro_batches", "virtual", "zero", "recompute", "offload")
"""Numbers that can be fixed, as users type them."""
STORED_PINS = {"micro_batches": "microbatches", "micro-batches": "microbatches"}
"""What is typed, and the word that requests, accounts and files have for it, which may be typed as well."""
MEMORY_MARGIN = 0.08
"""Share of a device's memory that a plan leaves free unless asked otherwise: fragments, libraries, other processes."""


@dataclass(frozen=True)
class Request:
    """A search to be done."""

    cluster: Cluster
    memory_bytes: float | None = None
    """What a rank may fill; unless given, the device's memory less the margin."""
    budget_s: float = 10.0
    """Processor seconds after which no new cell is begun."""
    optimizer: str = "adamw"
    pin: Mapping[str, int] = field(default_factory=dict)
    only: tuple[str, ...] = DIMENSIONS
    place: Mapping[str, str] = field(default_factory=dict)
    """Placements of tensors by pattern, see `planner/space/pins.py`."""
    proposals: int = 0
    """Random moves around the best plan (`planner/mcmc/improve.py`), behind everything else."""
    margin: float | None = None
    """Share of a device's memory that stays free; unless given `MEMORY_MARGIN`. Where `memory_bytes` is given, it says
    all."""
    batch: str = "fixed"
    """See `BATCHES`."""
    rules: tuple[Rewrite, ...] = ()
    """Rewrite rules of a file, searched with beside Laminar's own."""

    def __post_init__(self) -> None:
        if self.budget_s < 0 or self.proposals < 0:
            raise PlanError(f"a budget of {self.budget_s} s and {self.proposals} proposals", allowed="0 or more")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise PlanError(
                f"a margin of {self.margin}",
                allowed="a share of the memory: 0 or more, less than 1",
                next="margin=0.08 leaves 8 % free",
            )
        if self.margin is not None and self.memory_bytes is not None:
            raise PlanError(
                "memory_bytes and margin both say what a rank may fill",
                next="leave out one: memory_bytes counts bytes, margin is a share left free",
            )
        if self.batch not in BATCHES:
            raise PlanError(
                f"the batch is {self.batch!r}",
                allowed="  ".join(BATCHES),
                next="for a batch of so many samples, capture the model with it",
            )
        if self.optimizer not in UPDATES:
            raise PlanError(f"no prices for optimizer {self.optimizer!r}", allowed="  ".join(UPDATES))
        for name, value in self.pin.items():
            if name not in PINNABLE and name not in STORED_PINS.values():
                raise PlanError(f"nothing called {name!r} can be pinned", allowed="  ".join(PINNABLE))
            least = 0 if name in ("zero", "recompute", "offload") else 1
            if not isinstance(value, int) or value < least:
                raise PlanError(f"{name} pinned to {value!r}", allowed=f"a whole number of at least {least}")
        for name in self.only:
            if name not in DIMENSIONS:
                raise PlanError(f"there is no dimension {name!r}", allowed="  ".join(DIMENSIONS))

    @property
    def room_bytes(self) -> float:
        """What a plan may fill on its fullest rank."""
        if self.memory_bytes is not None:
            return float(self.memory_bytes)
        return self.less_margin(self.cluster)

    def less_margin(self, part: Cluster) -> float:
        """The memory of a device of a cluster, less what stays free."""
        return (1 - (MEMORY_MARGIN if self.margin is None else self.margin)) * part.device.memory_bytes.value

    def allows(self, dimension: str) -> bool:
        """Whether a dimension may be used."""
        return dimension in self.only

    @property
    def recomputes(self) -> bool:
        """Whether blocks may be recomputed."""
        return self.allows("recompute") and self.pin.get("recompute", 1) > 0

    @property
    def offloads(self) -> bool:
        """Whether blocks may wait in the host's memory: on a CPU that is where they are."""
        return self.allows("offload") and self.pin.get("offload", 1) > 0 and self.cluster.device.kind == "gpu"


def texts(rules: Iterable[Rewrite]) -> list[list[str]]:
    """Rules of a file as plain data: name and text."""
    return [[rule.name, rule.text] for rule in rules]


def dimensions(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """`only` as users write it: "data,tensor", a list, or nothing for all."""
    if text is None:
        return DIMENSIONS
    return tuple(t.strip() for t in text.split(",")) if isinstance(text, str) else tuple(text)


def stored_pins(pin: Mapping[str, Any] | None) -> dict[str, Any]:
    """Pins by the names that requests have for them."""
    return {STORED_PINS.get(name, name): value for name, value in (pin or {}).items()}


def asking(
    cluster: Cluster,
    memory_bytes: float | None = None,
    budget_s: float = 10.0,
    optimizer: str = "adamw",
    pin: Mapping[str, int | str] | None = None,
    only: str | Sequence[str] | None = None,
    proposals: int = 0,
    margin: float | None = None,
    batch: str = "fixed",
    rules: Iterable[Rewrite | Sequence[str]] = (),
) -> Request:
    """A request from what users write: pins of numbers and of tensors in one table, dimensions in one text.

    Rules may be given as pairs of name and text, as `texts` gives them.
    """
    read = tuple(r if isinstance(r, Rewrite) else Rewrite.of_file(*r) for r in rules)
    known = {*PINNABLE, *STORED_PINS.values()}
    place = {k: v for k, v in stored_pins(pin).items() if k not in known and isinstance(v, str)}
    numbers = {k: v for k, v in stored_pins(pin).items() if k not in place}
    return Request(
        cluster, memory_bytes, budget_s, optimizer, numbers, dimensions(only), place, proposals, margin, batch, read
    )
