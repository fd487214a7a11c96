"""What a plan says about itself: what it costs, what it was searched among, what was measured, why others lost.

Whoever makes a plan writes its account, or adds to it; nothing here is part of the plan's identity. In a plan file it
is one table, `account`. Package code reads fields; users may also read it like that table:

    plan.account.batch.samples            plan.account["batch"]["samples"]            "batch" in plan.account

What a file has besides, from another version or somebody's own, is kept in `more`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from laminar.errors import PlanError
from laminar.ir.plans.certificate import Certificate
from laminar.ir.serial.reading import JsonPart
from laminar.ir.serial.records import Record, always, inline, key

# --- what a step takes


@dataclass(frozen=True, kw_only=True)
class PlacePeak(Record):
    """The fullest rank of one place of a pipeline over devices of different kinds."""

    part: str
    device: str
    peak_bytes: int
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class PredictedStep(Record):
    """What the simulator says of a step."""

    step_s: float
    step_low_s: float
    step_high_s: float
    """The 90 % interval."""
    peak_bytes: int
    """On the fullest rank."""
    cluster: str
    """Its name."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Shares of the work's seconds by how their price is known."""
    bubbles: tuple[float, ...] = ()
    """By place of a pipeline, the share of the step in which it is idle."""
    places: tuple[PlacePeak, ...] = ()
    """By place, where devices differ."""


@dataclass(frozen=True, kw_only=True)
class WholeOp(Record):
    """An op that every rank computes whole, because no rule says how to split it."""

    op: str
    share: float
    """Of the work."""
    where: str


@dataclass(frozen=True, kw_only=True)
class CompletionCost(Record):
    """What completion (`placement/complete.py`) found: seconds on an assumed machine, without overlap."""

    cost_s: float
    replicated_s: float
    """With everything on every rank."""
    solver: str
    """Whether it is the optimum, in words."""
    unsplit: tuple[WholeOp, ...]


# --- what a program moves and holds


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(Record):
    """Collectives of one kind over the same axes and for the same reason."""

    kind: str
    axes: str
    why: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ProgramTraffic(Record):
    """What a program exchanges in a step, and what of the parameters a rank holds."""

    collectives: tuple[CollectiveRow, ...]
    """Those that move most come first."""
    count: int
    bytes: int
    parameter_bytes: int
    parameter_bytes_whole: int


@dataclass(frozen=True, kw_only=True)
class RecomputeSaving(Record):
    """What recompute saves and costs."""

    blocks: int
    values: int
    lines: int
    """Run twice."""
    kept_bytes: int
    whole_bytes: int
    """Activations kept without it."""


@dataclass(frozen=True, kw_only=True)
class OffloadSaving(Record):
    """What offload takes off the device, and what it moves."""

    blocks: int
    tensors: int
    bytes: int
    """There and back."""
    kept_bytes: int
    whole_bytes: int
    """Activations kept without it."""


@dataclass(frozen=True, kw_only=True)
class StageWork(Record):
    """One stage of a pipeline."""

    share: float | None = None
    """Of the work."""
    modules: str | None = None
    """From the first to the last."""
    sends: int | None = None
    """Bytes per micro-batch."""


# --- what a model computes


@dataclass(frozen=True, kw_only=True)
class ModelWork(Record):
    """What a step of the model computes, however it is spread."""

    precision: str
    products: str
    """The dtype in which most of them are done."""
    flops: float
    peak_flops_per_s: float | None = None
    """Of all devices in that dtype, where known."""


# --- what a search has found


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan(Record):
    """A plan that was simulated in full, in the words of a search."""

    plan: str
    step_s: float
    peak_bytes: int
    stages: int | None = None
    micro_batches: int | None = field(default=None, metadata=key("microbatches"))
    virtual: int | None = None
    dp: int | None = None
    tp: int | None = None
    recompute: bool | None = None
    sides: tuple[tuple[int, ...], ...] = ()
    """Over parts of a cluster that differ: stages, dp and tp of each."""
    zero: int | None = None
    recomputed: tuple[int, ...] = field(default=(), metadata=key("again"))
    """Blocks, by stage."""
    spared: int = 0
    """Blocks whose products are kept."""
    offloaded: int = 0
    """Blocks."""
    branches: tuple[int, ...] = ()
    """Devices of each branch, where branches have their own."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by what they are spent on."""


@dataclass(frozen=True, kw_only=True)
class EstimatedPlan(Record):
    """A plan that a search looked at, with its estimate."""

    plan: str
    step_s: float
    peak_bytes: float | None
    fits: bool


@dataclass(frozen=True, kw_only=True)
class KeptOutPlan(Record):
    """A faster plan that memory keeps out."""

    plan: str
    step_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class BindingLimit(Record):
    """What most of a step depends on, and the memory limit."""

    resource: str = ""
    part: str = ""
    share: float = 0.0
    memory_bytes: float | None = None
    """That a rank may fill."""
    kept_out: KeptOutPlan | None = None


@dataclass(frozen=True, kw_only=True)
class ChanceToWin(Record):
    """How sure it is that the plan is the fastest."""

    share: float
    each: tuple[float, ...]
    """Of it and those that come next."""
    assumed: str


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Record):
    """What was asked of a search: options of `laminar.plan`."""

    memory_bytes: float | None = field(default=None, metadata=always())
    margin: float | None = field(default=None, metadata=always())
    budget_s: float = field(default=10.0, metadata=always())
    optimizer: str = field(default="adamw", metadata=always())
    pin: Mapping[str, Any] = field(default_factory=dict, metadata=always())
    only: tuple[str, ...] = field(default=(), metadata=always())
    """Dimensions it may use; none stands for all."""
    rules: tuple[tuple[str, ...], ...] = ()
    """Rewrite rules of a file that were searched with: name and text of each."""


@dataclass(frozen=True, kw_only=True)
class FileRules(Record):
    """Rewrite rules of a file: how many of them a search was given."""

    file: str
    content: str
    """Its hash."""
    rules: int
    loaded: int
    proved: int
    new: int
    """Given to the search."""
    left_out: Mapping[str, int]
    """The others, by reason."""
    used: Mapping[str, int] = field(default_factory=dict, metadata=always())
    """At how many places the plan uses each."""


@dataclass(frozen=True, kw_only=True)
class PartUsed(Record):
    """A plan on a part of a cluster."""

    cluster: str
    of: str
    idle: int
    """Devices."""
    says: str
    devices: tuple[int, ...] = ()
    """The first and the last that are used."""


@dataclass(frozen=True, kw_only=True)
class OtherBatch(Record):
    """A size of batch that was not taken."""

    samples: int
    samples_per_s: float | None
    bound_samples_per_s: float | None
    why: str


@dataclass(frozen=True, kw_only=True)
class BatchTaken(Record):
    """The size of batch that was taken where it was free."""

    samples: int
    captured: int
    """Samples of the batch that was captured."""
    samples_per_s: float
    bound_samples_per_s: float | None
    """No plan trains more."""
    space: str
    """The hash of all plans that the bound is about."""
    others: tuple[OtherBatch, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedAnew(Record):
    """How a plan was made for what is left of a cluster."""

    former: str
    """The hash of the plan before."""
    simulated: int
    idle: int
    """Devices."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ParallelForm(Record):
    """A plan in the words other systems have."""

    ranks: int
    stages: int
    virtual: int
    micro_batches: int
    schedule: str
    data: int
    """Ranks of a stage that work on different samples."""
    tensor: int
    """Ranks of a stage that work on the same samples with different shards of the weights."""
    zero: int
    """Stage of ZeRO: state (1), gradients (2), parameters (3) sharded."""
    once: bool
    """Whether sharded parameters are gathered once, for forward and backward."""
    pieces: int
    """Ranks that hold different shards; fewer than `data` where groups of ranks hold the same."""
    sequence: bool
    """Whether the residual stream is split by token on the tensor axis."""
    samples: int
    recompute: tuple[str, ...]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]
    again: tuple[int, ...] = field(default=(), metadata=always())
    """By stage, blocks that are recomputed in backward, where not all are."""
    layers: tuple[int, ...] = field(default=(), metadata=always())
    """By stage, blocks that there are, where not all are recomputed."""
    leading: bool = field(default=True, metadata=always())
    """Whether those that are recomputed are the first of their stage."""

    @property
    def micro_batch_size(self) -> int:
        """Samples that a rank works on at once."""
        return max(1, self.samples // self.micro_batches // self.data)


# --- what was measured


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan(Record):
    """A plan that was run."""

    plan: str
    step_s: float
    low_s: float
    high_s: float
    """Quartiles."""
    ratio: float
    """Of its time to that of the first, in the same rounds."""
    ahead: bool
    predicted_s: float
    taken: bool


@dataclass(frozen=True, kw_only=True)
class PlanLeftOut(Record):
    """A plan that was not run, or fell out."""

    plan: str
    why: str


@dataclass(frozen=True, kw_only=True)
class MeasuredPlans(Record):
    """A search's finalists, run by turns."""

    rounds: int
    rows: tuple[MeasuredPlan, ...]
    says: str
    out: tuple[PlanLeftOut, ...] = ()
    seconds: float | None = None
    """That all of it took."""
    micro_batches: int = 1
    """Of a step, one of which is predicted."""


# --- all of it


@dataclass(frozen=True, kw_only=True)
class Account(Record, Mapping[str, Any]):
    """What a plan says about itself. All of it may be missing."""

    step: PredictedStep | None = field(default=None, metadata=inline())
    completion: CompletionCost | None = field(default=None, metadata=inline())
    traffic: ProgramTraffic | None = field(default=None, metadata=inline())
    eager: tuple[str, ...] = ()
    """Parts that run as they are, in plain PyTorch, a line each."""
    recompute: RecomputeSaving | None = field(default=None, metadata=key("again"))
    offload: OffloadSaving | None = None
    stages: tuple[StageWork, ...] = ()
    work: ModelWork | None = field(default=None, metadata=inline())
    samples: int | None = None
    """Of a step."""
    tokens: int | None = None
    """Of a step, in a model with attention."""
    devices: int | None = None
    recipe: str | None = None
    """What it was made from, on the command line."""
    cluster_file: str | None = None
    bound_s: float | None = None
    """No plan in the space searched is faster."""
    certificate: Certificate | None = None
    space: Mapping[str, Any] | None = None
    """The data of `planner/space/plan_space.py`."""
    choice: SimulatedPlan | None = None
    """This plan."""
    runners_up: tuple[SimulatedPlan, ...] = ()
    looked_at: tuple[EstimatedPlan, ...] = ()
    searched: str | None = None
    """What the search itself found, where another plan is taken or told in more words."""
    search_s: float | None = None
    budget_s: float | None = None
    binding: BindingLimit | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the fullest rank by what they are."""
    wins: ChanceToWin | None = None
    options: SearchOptions | None = field(default=None, metadata=key("request"))
    rules: FileRules | None = None
    form: ParallelForm | None = None
    formless: str | None = None
    """Why it has no form that others know."""
    uses: PartUsed | None = None
    batch: BatchTaken | None = None
    """Where the batch was free."""
    proof: str | None = None
    """That its rewrites hold; or that nothing is proved."""
    replanned: PlannedAnew | None = None
    measured: MeasuredPlans | None = None
    unmeasured: str | None = None
    """Why nothing was."""
    runs: str | None = None
    """`ddp`: torch's own data parallel runs it."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else a file had there."""

    def to_json(self) -> dict[str, Any]:
        """One table."""
        out = super().to_json()
        out |= out.pop("more", {})
        return out

    @classmethod
    def from_json(cls, data: Any) -> Account:
        """The inverse of `to_json`."""
        return cls.from_part(JsonPart(data, lambda what: PlanError(f"corrupt account: {what}")))

    @classmethod
    def from_part(cls, part: JsonPart) -> Account:
        """Read; keys that are not known are kept."""
        known = cls.keys_in_files() - {"more"}
        inside = part.fields()
        found = {name: value.value for name, value in inside.items() if name in known}
        more = {name: value.value for name, value in inside.items() if name not in known}
        account = super().from_part(JsonPart(found, part.error, part.at))
        return replace(account, more=more) if more else account

    def updated(self, other: Account) -> Account:
        """What another account says takes the place of what this one says of the same."""
        silent = Account()
        pairs = ((one.name, getattr(other, one.name)) for one in fields(Account))
        return replace(self, **{name: value for name, value in pairs if value != getattr(silent, name)})

    # --- read like a table

    @cached_property
    def _table(self) -> dict[str, Any]:
        return self.to_json()

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
