"""Ways to spread a graph over one mesh: those people know by name, and those that the prices ask for.

    data      the batch split over an axis, weights whole
    inner     the same on both axes, where ZeRO cuts pieces along the inner one only: nodes hold the same; with `data`
              on both, pieces are cut along both, and travel between nodes before they do so inside
    tensor    weights split, the residual stream whole (Megatron's way)
    sequence  the same, with the residual stream in shards of the sequence between products: leaner, and nearly as fast
    free      whatever is cheapest: every tensor of the graph is placed at least cost, exactly on each axis
    lean      the same, where a byte of a parameter that is stored costs something: what a byte costs in the mean that
              the leanest placement saves; so of parameters those lie in shards that take least to do so

Each comes without ZeRO, with state in shards, and with everything in shards. A free axis may find any of the others.
Where gradients are reduced while backward is still at work, how much of that is hidden can't be known before the whole
is simulated; so free placements are asked for twice, as if all of it were hidden and as if nothing were. With
micro-batches gradients are reduced once a step (`once`): splitting tokens and keeping weights whole costs little then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from laminar.cost.machine import Machine
from laminar.errors import LaminarError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import Split, local_spec
from laminar.placement import presets
from laminar.placement.complete import Pins, Solved, completed
from laminar.planner.space.axis_prices import PricedAxis
from laminar.planner.space.pins import pinned
from laminar.planner.tuning import HIDDEN_REDUCTION, LEAST_BYTE_S, REDUCED_ONCE, SMALL_PARAMETERS

ZERO_STAGES = (0, 1, 3)
"""Stages of ZeRO that differ: gradients leave a step in shards wherever state is in shards."""


AxisStyle = Literal["data", "inner", "tensor", "sequence", "free", "lean"]
"""What an axis may be used for, see above."""
Overlap = Literal["none", "hidden", "once"]
"""What placing takes of gradients' reduction to cost nothing: nothing; most of it, hidden by other work; nearly all of
it, done once for all micro-batches."""
KeepProducts = Literal["none", "some", "all"]
"""Which of the blocks that are recomputed keep their products. With `some` all blocks are recomputed: as few as can be
as a whole, the others but for their products."""


@dataclass(frozen=True)
class Style:
    """How a graph is spread over a mesh, in words that people know: a style for each axis, and what holds for all."""

    axes: tuple[AxisStyle, ...] = ()
    overlap: Overlap = "none"
    gather_once: bool = False
    """Whether sharded parameters are gathered once: what forward has gathered stays for backward."""
    keep_products: KeepProducts = "none"
    as_preset: bool = False
    """Whether it is as `laminar.plans` writes it."""
    mixed_storage: bool = False
    """Whether tensors are stored each in a way of its own (`planner/estimate/storage_mix.py`)."""

    @staticmethod
    def of(mesh: Mesh, inner: AxisStyle, overlap: Overlap = "none", outer: AxisStyle = "data") -> Style:
        """One style on the axis `tp`, another on what is around it."""
        return Style(tuple(inner if name == "tp" else outer for name in mesh.names), overlap)

    @property
    def words(self) -> tuple[str, ...]:
        """As files hold it: the axes, then what is said besides."""
        products = {"none": (), "some": ("both",), "all": ("sparing",)}
        return (
            *self.axes,
            *(() if self.overlap == "none" else (self.overlap,)),
            *(("kept",) if self.gather_once else ()),
            *products[self.keep_products],
            *(("typed",) if self.as_preset else ()),
            *(("mixed",) if self.mixed_storage else ()),
        )

    @staticmethod
    def from_words(words: Sequence[str]) -> Style:
        """The inverse."""
        known = get_args(AxisStyle)
        return Style(
            axes=tuple(cast(AxisStyle, word) for word in words if word in known),
            overlap="hidden" if "hidden" in words else "once" if "once" in words else "none",
            gather_once="kept" in words,
            keep_products="all" if "sparing" in words else "some" if "both" in words else "none",
            as_preset="typed" in words,
            mixed_storage="mixed" in words,
        )

    def __str__(self) -> str:
        return "+".join(self.words)


def styles(mesh: Mesh, tensor: bool, free: bool, lean: bool = False, parts: bool = False) -> list[Style]:
    """Which style each axis may have, the best known first; with `lean`, also those that only save memory.

    With `parts` for a step of several micro-batches.
    """
    names = mesh.names
    out = [Style.of(mesh, "tensor")] if tensor or "tp" not in names else []
    if lean and tensor and "tp" in names:
        out.append(Style.of(mesh, "sequence"))
    if parts and tensor and "tp" in names:
        out += [Style.of(mesh, "free", "once"), Style.of(mesh, "lean", "once")]
    if len(names) == 2:
        out += [Style(("data", "inner")), Style(("data", "data"))]
    if free and tensor and mesh.ranks > 1:
        if "tp" in names and "dp" in names:
            out += [Style(("data", "free"), "hidden"), Style(("free", "free"), "hidden"), Style(("free", "free"))]
        elif "dp" in names:  # one axis of one size: what it is called makes no difference
            out += [Style(("free",)), Style(("free",), "hidden")]
    return out


def sequence_pins(graph: Graph) -> Pins:
    """What tensor parallel means on one axis if the residual stream is cut along the sequence."""
    pins = presets.tensor_pins(graph)
    for ref in presets.residual_stream(graph):
        dims = len(graph.specs[ref].shape)
        if dims > 2:
            pins.values[ref] = pins.read[ref] = Split(dims - 2)
    return pins


def stored_bytes(graph: Graph, plan: Plan) -> int:
    """Of all parameters, on one rank."""
    return sum(local_spec(i.spec, plan.inputs[i.name], plan.mesh.sizes).nbytes for i in graph.of_kind("param"))


def _completion_s(plan: Plan) -> float:
    """What completion says that a step takes."""
    assert plan.account.completion is not None
    return plan.account.completion.cost_s


class Placer:
    """Placements on one mesh; prices are asked once."""

    def __init__(self, machine: Machine, mesh: Mesh, place: Mapping[str, str] | None = None) -> None:
        """`place` holds placements of tensors that are fixed, by pattern."""
        self.mesh, self.place = mesh, place or {}
        open_ = [PricedAxis(machine, mesh, a) for a in range(len(mesh.sizes))]
        self.costs = {0.0: open_}
        for hidden in (HIDDEN_REDUCTION, REDUCED_ONCE):
            self.costs[hidden] = [PricedAxis(machine, mesh, a, hidden, one) for a, one in enumerate(open_)]
        self.solved: dict[Hashable, Solved] = {}

    def plan(self, graph: Graph, style: Style, byte_s: float | None = None) -> Plan:
        """The graph spread in one style; `byte_s` is what a stored byte costs on lean axes, if that is known."""
        pins = []
        for axis, one in enumerate(style.axes):
            if one in ("data", "inner"):
                pins.append(presets.data_pins(graph, self.mesh, axis))
            elif one == "lean":
                pins.append(Pins(stored_byte_s=self._byte_s(graph, style) if byte_s is None else byte_s))
            else:
                pins.append(
                    {"tensor": presets.tensor_pins, "sequence": sequence_pins}.get(one, lambda _: Pins())(graph)
                )
        for here, fixed in zip(pins, pinned(graph, self.mesh, self.place), strict=True):
            here.inputs.update(fixed)
        hidden = {"none": 0.0, "hidden": HIDDEN_REDUCTION, "once": REDUCED_ONCE}[style.overlap]
        names = []
        for axis in range(len(style.axes)):
            # "inner" pins what "data" does; what is hidden makes no difference where nothing is left open.
            before = tuple("data" if one == "inner" else one for one in style.axes[: axis + 1])
            names.append((graph.hash, before, hidden if {"free", "lean"}.intersection(before) else 0.0, byte_s))
        return completed(graph, self.mesh, pins, "+".join(style.axes), self.costs[hidden], names, self.solved)

    def _byte_s(self, graph: Graph, style: Style) -> float:
        """Seconds of a micro-batch for each byte of parameters that the leanest placement saves, in the mean."""
        (fast_s, most), (lean_s, least) = (
            (_completion_s(plan) - byte_s * stored, stored)
            for byte_s in (0.0, LEAST_BYTE_S)
            for plan in [self.plan(graph, style, byte_s)]
            for stored in [stored_bytes(graph, plan)]
        )
        if least >= most:
            raise PlanError("parameters in shards save nothing on this mesh")
        return float(max(0.0, lean_s - fast_s) / (most - least))

    def pieces(self, graph: Graph, plan: Plan, style: Style, zero: int) -> Plan:
        """The plan with a stage of ZeRO."""
        found = presets.in_pieces(graph, plan, zero, (1,) if "inner" in style.axes else None, SMALL_PARAMETERS)
        found = replace(found, gather_once=zero == 3 and style.gather_once)
        fixed = {n: plan.inputs[n] for here in pinned(graph, self.mesh, self.place) for n in here}
        return replace(found, inputs={**found.inputs, **fixed}) if fixed else found

    def plans(self, graph: Graph, wanted: Sequence[Style]) -> Iterator[tuple[Style, Plan]]:
        """All that can be had; a style that a model has no rules for is left out."""
        seen: set[tuple[str, bool]] = set()
        for style in wanted:
            try:
                found = self.plan(graph, style)
            except LaminarError:
                continue
            if (found.hash, "inner" in style.axes) not in seen:
                seen.add((found.hash, "inner" in style.axes))
                yield style, found
