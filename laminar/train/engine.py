"""From batches to running programs: one compiled step for each shape of batch.

The first shape decides the plan. Later ones (the last, smaller batch of an epoch; evaluation) are
captured when first met and keep the plan's decisions about everything that lives from step to step. So is
a step after something has changed that its code reads (`guards.py`); if the graph is one that is known,
nothing is compiled.

Where several micro-batches make one step, gradients that the plan keeps whole are not reduced after
each of them: they leave the program as this rank's terms of the sum, are added up here, and travel
once at the end. Gradients that the plan keeps in pieces are reduced at once, which is what bounds
their memory. Draws of a micro-batch are those of its samples in the whole batch (`rules/samples.py`).
"""

from __future__ import annotations

import contextlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.batch_sizes import Predictor
from laminar.capture.batches import flatten, refuse_empty, samples_in, unflatten
from laminar.capture.capture import capture
from laminar.capture.losses import Metrics, identity, with_metrics
from laminar.capture.saved_graphs import kept_graph
from laminar.capture.tensor_bytes import as_bytes
from laminar.capture.torch_ops import constant_tensor, spec_of
from laminar.cost.sim.no_gc import uncollected
from laminar.errors import BatchError
from laminar.events import emit
from laminar.ir.graph import RNG, SCALE, Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.program import Program
from laminar.ir.sbp import B, NdSbp, Partial, Split, local_shape
from laminar.lower.lower import lower
from laminar.lower.reshard import Move, moves
from laminar.lower.step import owners
from laminar.placement.presets import like
from laminar.rewrite.variants import rewritten
from laminar.rules.samples import draws_of, in_parts, places_of
from laminar.runtime.check.probe_rules import probe
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null
from laminar.train.captured_graphs import Captures
from laminar.train.guards import Guards
from laminar.train.sharded_model import allowed

MOST = 16
"""Shapes of batches that are kept compiled: each has buffers for its gradients."""
MANY = 12
"""Sizes of batches that had to be traced, none following from the others, before the user is told."""
SOME = 1 << 16
"""How many elements of a leaf are looked at to tell batches apart."""


@dataclass(frozen=True)
class Local:
    """This rank's own share of a batch, instead of the global batch."""

    share: Any


@dataclass(frozen=True)
class Sized:
    """A batch, or a rank's share of it, with the number of samples in each of its micro-batches."""

    batch: Any
    sizes: Sequence[int]


@dataclass(frozen=True)
class Leaves:
    """A batch taken apart: tensors by name, its structure, and whether they are this rank's share only."""

    tensors: dict[str, Tensor]
    tree: str
    local: bool
    sizes: tuple[int, ...] = ()
    """Samples in each micro-batch, where that is given."""

    @staticmethod
    def of(batch: Any) -> Leaves:
        """Take a batch apart: the tensors, or these in `Local`, in `Sized`, or in both."""
        sizes = tuple(batch.sizes) if isinstance(batch, Sized) else ()
        batch = batch.batch if isinstance(batch, Sized) else batch
        local = isinstance(batch, Local)
        tensors, tree = flatten(batch.share if isinstance(batch, Local) else batch)
        return Leaves(tensors, json.dumps(tree), local, sizes)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Leaves:
        """The same batch with every tensor changed."""
        return replace(self, tensors={n: change(t) for n, t in self.tensors.items()})

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Structure and shapes."""
        cut = (f"micro-batches of {', '.join(map(str, self.sizes))}",) if self.sizes else ()
        return (self.tree, *(f"{n}{spec_of(t)}" for n, t in self.tensors.items()), *cut)

    def fingerprint(self) -> str:
        """A few digits of the values: equal batches have equal ones, others hardly ever do."""
        crc = 0
        for t in self.tensors.values():
            crc = zlib.crc32(as_bytes(t.detach().reshape(-1)[:SOME].cpu()).numpy().tobytes(), crc)
        return f"{crc:08x}"

    @property
    def samples(self) -> int:
        """How many samples: the length that most leaves have."""
        return samples_in(self.tensors)

    def like(self, samples: int) -> Leaves:
        """Stand-ins for such a batch with another number of samples."""
        n, out = self.samples, {}
        for name, t in self.tensors.items():
            shape = (samples, *t.shape[1:]) if t.dim() and t.shape[0] == n else t.shape
            out[name] = torch.empty(shape, dtype=t.dtype, device="meta")
        return Leaves(out, self.tree, False)

    def split(self, parts: int) -> list[Leaves]:
        """Micro-batches: consecutive samples, of the sizes given, or as equal in number as they can be."""
        n = self.samples
        if not self.local:
            refuse_empty(self.tensors)
        cuts = list(self.sizes) or [n // parts + (i < n % parts) for i in range(parts)]
        if len(cuts) != parts:
            raise BatchError(f"{len(cuts)} sizes for {parts} micro-batches", next="give one for each")
        if self.sizes and (sum(cuts) != n or min(cuts) < 1):
            raise BatchError(f"micro-batches of {', '.join(map(str, cuts))} samples, of a batch of {n}",
                             allowed="at least one in each, and all of them together")  # fmt: skip
        if n < parts and parts > 1:
            raise BatchError(
                f"{n} samples can't make {parts} micro-batches", next="use a larger batch, or fewer micro-batches"
            )
        if parts == 1:
            return [replace(self, sizes=())]
        pieces = {k: t.split(cuts) if t.dim() and t.shape[0] == n else (t,) * parts for k, t in self.tensors.items()}
        return [Leaves({k: p[i] for k, p in pieces.items()}, self.tree, self.local) for i in range(parts)]


def joined(parts: Sequence[Leaves]) -> Leaves:
    """Micro-batches as one; what belongs to no sample is the first one's."""
    first = parts[0]

    def whole(name: str, t: Tensor) -> Tensor:
        return torch.cat([p.tensors[name] for p in parts]) if t.dim() and t.shape[0] == first.samples else t

    return Leaves({n: whole(n, t) for n, t in first.tensors.items()}, first.tree, first.local)


@dataclass
class Ready:
    """A graph, its plan, its program, and the code that runs it on this rank."""

    graph: Graph
    plan: Plan
    program: Program
    step: Callable[..., list[Tensor]]
    fixed: list[Any]
    """Inputs in order: parameters and buffers stand, the rest is filled in each time."""
    filled: dict[str, int]
    outputs: dict[str, int]
    """Position of each output by `kind:name`."""
    cuts: Mapping[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """For inputs besides the batch that a plan has in pieces: a key of random draws may lie like any other tensor."""

    def __call__(self, leaves: Mapping[str, Tensor], key: Tensor | None, scale: Tensor | None) -> list[Tensor]:
        """Run one (micro-)batch of local leaves; local outputs in order."""
        args = list(self.fixed)
        for name, at in self.filled.items():
            args[at] = key if name == RNG else scale if name == SCALE else leaves[name]
        for at, cut in self.cuts.items():
            args[at] = cut(args[at])
        return self.step(*args)

    @cached_property
    def grads(self) -> list[tuple[str, int]]:
        """Parameters with a gradient, and where it stands among the outputs."""
        return self._of_kind("grad")

    @cached_property
    def buffers(self) -> list[tuple[str, int]]:
        """Buffers with a new value, and where it stands among the outputs."""
        return self._of_kind("buffer")

    @cached_property
    def values(self) -> list[tuple[str, int]]:
        """Loss and metrics as `kind:name`, and where they stand among the outputs."""
        return [(f"{kind}:{n}", i) for kind in ("loss", "metric") for n, i in self._of_kind(kind)]

    def _of_kind(self, kind: str) -> list[tuple[str, int]]:
        return [(n.partition(":")[2], i) for n, i in self.outputs.items() if n.partition(":")[0] == kind]


class Engine:
    """The compiled steps of one model and loss."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        mesh: Mesh,
        transport: Groups | Null,
        micro_batches: int,
        scaled: bool,
        build: Callable[[Program, Groups | Null, Mapping[str, Tensor], tuple[int, ...]], Callable[..., list[Tensor]]],
        unguarded: Sequence[str] = (),
    ) -> None:
        """`build` turns a program into code; it is told which inputs never change their place."""
        self.model, self.loss, self.mesh, self.transport = model, loss, mesh, transport
        self.micro_batches, self.build = micro_batches, build
        self.scaled = scaled or micro_batches > 1
        """Whether gradients are those of the scaled total, to be divided at the end."""
        self.plan: Plan | None = None
        self.whole: dict[str, Tensor] = {}
        """Stand-ins of the model's tensors at full size, once this process holds only parts of them."""
        self.held: dict[str, Tensor] = {}
        """What this rank holds of parameters and buffers, by name."""
        self.captures = Captures(Guards(model, loss, unguarded), self.capture)
        self._predictors: dict[Any, list[tuple[Predictor, dict[str, Any]]]] = {}
        self._places: dict[Any, dict[int, Split | None]] = {}
        self._ready: dict[str, Ready] = {}
        """Compiled steps by the hash of what was captured."""
        self._terms: dict[str, NdSbp] = {}
        """How loss and gradients of micro-batches lie until they are summed up."""
        self._moves: dict[Any, Callable[..., list[Tensor]]] = {}
        self.measured: tuple[Any, ...] = ()
        """Which metrics are computed beside the loss at the moment."""

    @contextlib.contextmanager
    def measuring(self, metrics: Metrics, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Inside, a (micro-)batch's graph has these metrics too; each is a function of model and batch."""
        plain, before = self.loss, self.measured
        if metrics:
            self.loss = with_metrics(plain, {n: around(f) for n, f in metrics.items()})
            self.measured = tuple((n, identity(f)) for n, f in metrics.items())
        try:
            yield
        finally:
            self.loss, self.measured = plain, before

    # --- capture and plan ----------------------------------------------------------------------

    def capture(self, leaves: Leaves, backward: bool = True) -> Graph:
        """The graph of a (micro-)batch at its global shape."""
        graph = self._traced(leaves, backward)
        if self.micro_batches == 1 or not graph.of_kind("rng"):
            return graph
        return in_parts(graph, self._sampled(graph, leaves, backward))

    @uncollected()
    def _traced(self, leaves: Leaves, backward: bool) -> Graph:
        emit("phase", name="capturing")
        batch = unflatten(json.loads(leaves.tree), leaves.tensors)
        # Sizes of a batch aside, graphs are alike: what follows from those of other sizes is not traced again.
        kind = tuple((n, str(t.dtype), t.dim()) for n, t in leaves.tensors.items())
        predictor = self._predictor((kind, leaves.tree, backward, self.measured))
        how = {"scaled": self.scaled and backward, "backward": backward, "wide": True}
        whole = {n: (t.dtype, tuple(t.shape), t.stride()) for n, t in self.whole.items()}

        def traced() -> Graph:
            with allowed(), self.captures.reading():
                found = capture(self.model, self.loss, batch, whole=self.whole, predictor=predictor, **how)
            return probe(found)

        graph = kept_graph(
            self.model, self.loss, leaves.tensors, leaves.tree, {**how, "whole": whole}, traced, predictor
        )
        emit(
            "shape",
            traced=predictor.traced,
            traced_s=predictor.traced_s,
            sizes=[list(t.shape) for t in leaves.tensors.values()],
        )
        if predictor.traced == MANY:
            warnings.warn(
                f"{MANY} sizes of batches had to be captured one by one ({predictor.traced_s:.0f} s so far): pad "
                "sequences to multiples of 64, or put batches of like lengths together",
                stacklevel=2,
            )
        return graph

    def _predictor(self, kind: Any) -> Predictor:
        """What is known of other sizes of such batches, under the values that traces have read."""
        values, read = self.captures.guards.values, self.captures.guards.read
        known = self._predictors.setdefault(kind, [])
        for predictor, then in known:
            if all(then.get(n) == values.get(n) for n in read):
                return predictor
        known.append((Predictor(), dict(values)))
        return known[-1][0]

    def _sampled(self, graph: Graph, leaves: Leaves, backward: bool) -> dict[int, Split | None]:
        """Where draws have the samples of a batch: the same at any size, so found once."""
        known = self._places.setdefault((backward, self.measured, self.captures.state), {})
        if any(d.args[2] not in known for d in draws_of(graph)):

            def traced(samples: int) -> Graph:
                return graph if samples == leaves.samples else self._traced(leaves.like(samples), backward)

            known.update(places_of(traced, leaves.samples))
        return known

    def together(self, leaves: Leaves) -> Leaves:
        """The batch that ranks hold together, from this rank's share: stand-ins, of which split ones are longer."""
        if not leaves.local:
            return leaves
        n, out = leaves.samples, {}
        sizes = [s for s, a in zip(self.mesh.sizes, range(len(self.mesh.sizes)), strict=True) if self._splits(a)]
        for name, t in leaves.tensors.items():
            shape = list(t.shape)
            if t.dim() and t.shape[0] == n:
                for size in sizes:
                    shape[0] *= size
            out[name] = torch.empty(shape, dtype=t.dtype, device="meta")
        return Leaves(out, leaves.tree, False)

    def _splits(self, axis: int) -> bool:
        assert self.plan is not None
        return any(nd[axis] != B for n, nd in self.plan.inputs.items() if n.split(".")[0] == "batch")

    def begin(self, leaves: Leaves) -> Graph:
        """The graph of the first (micro-)batch, for which a plan is to be made."""
        return self.graph(leaves, True)

    def graph(self, leaves: Leaves, backward: bool) -> Graph:
        """The graph of such a (micro-)batch under the values there are, captured on first use."""
        return self.captures(leaves, backward, self.measured)

    def look(self) -> None:
        """See what has changed since the last step; every step begins with this."""
        self.captures.look(self.held)

    def ready(self, leaves: Leaves, backward: bool = True) -> Ready:
        """The compiled step for such a (micro-)batch, made on first use."""
        captured = self.graph(self.together(leaves), backward)
        if captured.hash not in self._ready:
            assert self.plan is not None
            graph = rewritten(captured, self.plan)
            plan = self.plan if graph.hash == self.plan.graph_hash else like(graph, self.plan)
            while len(self._ready) >= MOST:
                del self._ready[next(iter(self._ready))]  # the one used longest ago, the same on every rank
            self._ready[captured.hash] = self.compile(graph, plan)
        self._ready[captured.hash] = self._ready.pop(captured.hash)
        return self._ready[captured.hash]

    @uncollected()
    def compile(self, graph: Graph, plan: Plan) -> Ready:
        """Lower a plan and turn it into code."""
        emit("phase", name="compiling")
        wanted = self.wanted(graph, plan)
        program = lower(graph, replace(plan, outputs={**plan.outputs, **wanted}))
        stays = ("param", "buffer")
        static = tuple(i for i, item in enumerate(program.inputs) if item.kind in stays)
        constants = {c.name: constant_tensor(c) for c in program.constants}
        step = self.build(program, self.transport, constants, static)
        fixed = [self.held.get(i.name) if i.kind in stays else None for i in program.inputs]
        filled = {item.name: i for i, item in enumerate(program.inputs) if item.kind not in stays}
        outputs = {f"{o.kind}:{o.name}": i for i, o in enumerate(program.outputs)}
        cuts = {
            i: partial(shard, nd=item.placed.nd, mesh=self.mesh, rank=self.transport.rank)
            for i, item in enumerate(program.inputs)
            if item.kind in ("rng", "scale") and any(p != B for p in item.placed.nd)
        }
        return Ready(graph, plan, program, step, fixed, filled, outputs, cuts)

    def wanted(self, graph: Graph, plan: Plan) -> dict[str, NdSbp]:
        """How outputs leave the program, where that is not how the plan keeps them.

        A gradient goes to whoever updates that piece. With several micro-batches, sums that would be
        kept whole stay unfinished.
        """
        if self.micro_batches == 1:
            return owners(graph, plan)
        out: dict[str, NdSbp] = {}
        for o in graph.outputs:
            key = f"{o.kind}:{o.name}"
            kept = plan.outputs[key]
            if o.kind == "buffer":
                continue
            node = graph.by_name.get(o.ref.name)
            made = plan.ops[node.name].outs[o.ref.index] if node is not None else kept
            later = tuple(m if isinstance(m, Partial) and m.op == "sum" and k == B else k
                          for m, k in zip(made, kept, strict=True))  # fmt: skip
            # Micro-batches of one step may differ in size, and what they give is added up: it must lie alike.
            out[key] = self._terms.setdefault(key, later)
        return out

    # --- batches and moves ---------------------------------------------------------------------

    def share(self, ready: Ready, leaves: Leaves, device: torch.device) -> dict[str, Tensor]:
        """This rank's part of a batch, on its device."""
        out = {}
        for item in ready.program.inputs:
            if item.kind != "batch":
                continue
            x, placed = leaves.tensors[item.name], item.placed
            if leaves.local:
                want = local_shape(placed.spec.shape, placed.nd, self.mesh.sizes, self.mesh.coords(self.transport.rank))
                if tuple(x.shape) != want:
                    raise BatchError(f"{item.name}: this rank's share is {tuple(x.shape)}, the plan wants {want} of "
                                     f"{placed.spec}",
                                     next="give every rank as many: pad, and mask that in laminar.Loss")  # fmt: skip
            else:
                x = shard(x, placed.nd, self.mesh, self.transport.rank)
            out[item.name] = x.to(device, non_blocking=True)
        return out

    def move(self, items: list[Move], why: str, tensors: list[Tensor]) -> list[Tensor]:
        """Take tensors from one placement to another, all at once; every rank must call this."""
        if all(src == dst for _, _, src, dst in items):
            return tensors
        key = (why, *((n, s, a, b) for n, s, a, b in items))
        if key not in self._moves:
            self._moves[key] = EagerStep(moves(self.mesh, items, why), self.transport)
        return self._moves[key](*tensors)
