"""A job whose plan has stages: different ranks hold different parts of the model, and micro-batches pass between them.

A step: every micro-batch goes through all stages and back, driven by actors (`runtime/actors.py`) in the order of the
plan's schedule, or as far from it as its window allows. Then all ranks meet: each place reduces its sums, stages that
share a weight add up their gradients, the norm of the whole gradient is taken over all places, so that clipping and
the decision to skip an fp16 step are one for all, and every rank updates what it owns.

Ranks outside of a weight's places do not hold it. Whole weights are assembled where they are held, and sent to all.

Micro-batches of one step may have different sizes, and those of later steps others: all go through one pipe, whose
registers are large enough for the largest. Each size is captured, lowered and turned into code when first met; one that
does not fit opens a larger pipe in place of the old one. Evaluation has a pipe of its own.

Not covered: moving averages, `bf16` without master weights, GPUs; these are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laminar.capture.torch_ops import DTYPES, constant_tensor, spec_of
from laminar.errors import BatchError, CaptureError, LaminarError, MeshError, PlanError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.net import Net
from laminar.ir.program import Program, ProgramOutput
from laminar.ir.sbp import B, NdSbp, Split
from laminar.ir.staged import Staged
from laminar.lower.moves import Move, moves
from laminar.lower.pipes import together
from laminar.lower.stages import Stages, stages
from laminar.rules.crossing import crossing
from laminar.runtime.actors import Actors
from laminar.runtime.crossings import exchange
from laminar.runtime.edges import Value
from laminar.runtime.joined import join
from laminar.runtime.module import Adding, Step
from laminar.runtime.parts import Parts, Size
from laminar.runtime.pipe_record import PipeTape
from laminar.runtime.record import Tape
from laminar.runtime.shards import shard
from laminar.runtime.transport import Groups, Null
from laminar.staging import again
from laminar.train import optimizer as optim
from laminar.train import storage
from laminar.train.engine import Engine, Leaves
from laminar.train.gradients import scale_and_clip
from laminar.train.job import Result, clock_of
from laminar.train.optimizer import Kept
from laminar.train.precision import Precision, Scaler
from laminar.train.recording import Recorded
from laminar.train.staged_state import StagedState
from laminar.train.world import World

SIZES = 8
"""Sizes of micro-batches that one step may have."""
MOST = 16
"""Sizes that are kept compiled: each has code of its own, and buffers for what its collectives bring."""


@dataclass
class Pipe:
    """Stages ready to run on this rank, for micro-batches up to a size."""

    graph: Graph
    """Of the largest micro-batch, as `made`."""
    made: Stages
    parts: Parts
    actors: Actors
    sizes: dict[Any, Size] = field(default_factory=dict)
    """What is compiled, by the shapes of a micro-batch; that used longest ago comes first."""

    @property
    def net(self) -> Net:
        """Its actors and queues."""
        return self.actors.net

    @cached_property
    def weighted(self) -> bool:
        """Whether the loss is a total over a weight."""
        return any(o.kind == "metric" and o.name == "loss_weight" for o in self.graph.outputs)

    def outputs(self, *kinds: str) -> list[tuple[int, ProgramOutput]]:
        """What the stages of this rank give, with their stages."""
        mine = ((s, part) for s in self.parts.stages for part in self.made.parts[s])
        return [(s, o) for s, part in mine for o in part.program.outputs if o.kind in kinds]


class StagedJob(Recorded, StagedState):
    """See `laminar.parallelize`; the methods of `Job`, for a plan with stages."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        plan: Staged,
        device: torch.device | str | None = None,
        precision: str | Precision = "f32",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        seed: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise CaptureError("the model has no values: it lives on meta", next="make it with real weights")
        self._world = World(device, timeout_s)
        emit("phase", name="preparing")
        self.rank, self.world, self.device = self._world.rank, self._world.size, self._world.device
        if self.device.type != "cpu":
            raise LaminarError("plans with stages run on CPU ranks only", next='device="cpu", or a plan without stages')
        if plan.ranks != self.world:
            raise MeshError(f"the plan has {plan.ranks} ranks, the world has {self.world}",
                            next=f"start {plan.ranks} processes")  # fmt: skip
        self.precision = Precision.of(precision)
        if self.precision.rounding != "nearest":
            raise LaminarError(f"plans with stages have no precision {self.precision.name}", allowed="f32  bf16  fp16")
        self.clip_norm, self.clip_value, self.seed, self.steps = clip_norm, clip_value, seed, 0
        self._scaler = Scaler() if self.precision.scaled else None
        self._ema: dict[str, Tensor] = {}
        self._scale = 1.0
        self._model = model
        self._engine = Engine(
            model, self.precision.around(loss, self.device), Mesh({"dp": 1}), Null(Mesh({"dp": 1})),
            plan.micro_batches, self.precision.scaled, _never,
        )  # fmt: skip
        self._slots = storage.moved(model, self.device, self.precision.weights)
        self._world.broadcast([s.tensor.detach() for s in self._slots])
        self.optimizer = optim.made(optimizer, model.parameters())
        optim.refuse_unknown(self.optimizer, {id(s.tensor): s.name for s in self._slots})
        optim.faster(self.optimizer, self.device)
        first = self._leaves(batch).split(plan.micro_batches)[0]
        self.graph: Graph = self._engine.begin(first)
        emit("phase", name="planning")
        self.plan = again(self.graph, plan)
        made = stages(self.graph, self.plan)
        self._place = next(p for p in self.plan.places if self.rank in p.ranks)
        self.mesh, self.timeout_s = self._place.mesh, timeout_s
        self._transport: Groups | Null = (
            Groups(self.mesh, self.device, timeout_s=timeout_s, ranks=self._place.ranks)
            if self.mesh.ranks > 1
            else Null(self.mesh, 0, self.device)
        )
        self._keep(made)
        self._moves: dict[Any, Step] = {}
        self._micros: list[Leaves] = []
        self._draws = 0
        """What the draws of this step hang on: its number, or that of a batch of an evaluation."""
        self._noted: tuple[str, ...] = ()
        self._graphs: dict[Any, Graph] = {(first.key, True): self.graph}
        self._pipe = self._opened({first.key: made}, self.graph)
        self._pipes: dict[bool, Pipe] = {True: self._pipe}

    def _opened(self, made: Mapping[Any, Stages], graph: Graph) -> Pipe:
        """A pipe for some sizes of micro-batches: code for this rank's parts, and actors that meet those of others."""
        emit("phase", name="compiling")
        pipes = together(list(made.values()))
        parts = Parts(pipes, self.rank, self._held, self._build)
        net = pipes[0].net
        tokens = {q.name: [Value([])] * q.filled for q in net.queues if q.filled}
        actors = join(net, parts.fire, edges=parts.edges(), initial=tokens, device=self.device,
                      timeout_s=self.timeout_s)  # fmt: skip
        assert actors is not None  # every rank is at a place
        out = Pipe(graph, next(iter(made.values())), parts, actors, dict(zip(made, parts.first, strict=True)))
        parts.feed = partial(self._feed, out)
        return out

    def _pipe_for(self, micros: Sequence[Leaves], backward: bool) -> Pipe:
        """The pipe for such micro-batches, made on first use or made larger; all ranks call this alike."""
        kinds = {m.key: m for m in micros}
        if len(kinds) > SIZES:
            raise BatchError(f"micro-batches of {len(kinds)} different sizes in one step", allowed=f"{SIZES} at most",
                             next="make more of them equal: each size is a program of its own")  # fmt: skip
        pipe = self._pipes.get(backward)
        for key in kinds:
            if pipe is not None and key not in pipe.sizes:
                size = pipe.parts.joining(self._lowered(kinds[key], backward, pipe.made))
                if size is None:
                    pipe = None
                else:
                    pipe.sizes[key] = size
        if pipe is None:
            pipe = self._larger(kinds, backward)
        for key in kinds:
            pipe.sizes[key] = pipe.sizes.pop(key)
        for key in list(pipe.sizes)[: max(len(pipe.sizes) - MOST, 0)]:
            del pipe.sizes[key]
        pipe.parts.sizes = [pipe.sizes[m.key] for m in micros]
        return pipe

    def _larger(self, kinds: Mapping[Any, Leaves], backward: bool) -> Pipe:
        """A pipe for these micro-batches in place of the one there is, if any; the largest decides how sums lie."""
        if backward in self._pipes:
            self._pipes.pop(backward).actors.close()
        made: dict[Any, Stages] = {}
        for key in sorted(kinds, key=lambda key: -sum(t.numel() for t in kinds[key].tensors.values())):
            made[key] = self._lowered(kinds[key], backward, next(iter(made.values()), None))
        pipe = self._pipes[backward] = self._opened(made, self._graphs[next(iter(made)), backward])
        return pipe

    def _lowered(self, leaves: Leaves, backward: bool, like: Stages | None) -> Stages:
        """Micro-batches of one size captured and lowered, their sums as those of another."""
        key = leaves.key, backward
        if key not in self._graphs:
            while len(self._graphs) >= MOST:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._engine.capture(leaves, backward)
        graph = self._graphs[key]
        made = stages(graph, again(graph, self.plan), like)
        for s, own in enumerate(made.cut.graphs):
            place = made.staged.stages[s].place
            for item in own.inputs:
                if item.kind in ("param", "buffer") and (item.name, place) not in self._lies:
                    raise PlanError(
                        f"with micro-batches of {leaves.samples} samples stage {s} reads {item.name}, "
                        f"which is not held at its place {place}",
                        next="cut the model at modules (stages=[...]), or use micro-batches of one size",
                    )
        return made

    def _build(self, program: Program, adding: Adding) -> Step:
        constants = {c.name: constant_tensor(c) for c in program.constants}
        return Step(program, self._transport, constants, adding=adding)

    # --- who holds what

    def _keep(self, made: Stages) -> None:
        """Leave this rank's parts in the model, and make the optimizer update what it owns."""
        staged = self.plan
        self._homes, self._lies, self._owned_nd = {}, {}, {}
        for s, own in enumerate(made.cut.graphs):
            p, plan = staged.stages[s].place, staged.stages[s].plan
            for item in own.inputs:
                if item.kind in ("param", "buffer"):
                    homes = self._homes.setdefault(item.name, [])
                    homes += [p] if p not in homes else []
                    self._lies[item.name, p] = plan.inputs[item.name]
                    self._owned_nd[item.name, p] = plan.state.get(item.name, plan.inputs[item.name])
        self._graded = {
            (o.name, staged.stages[s].place) for s, own in enumerate(made.cut.graphs) for o in own.outputs
            if o.kind == "grad"
        }  # fmt: skip
        """Parameters and the places at which a part of their gradient is made."""
        me = staged.places.index(self._place)
        self._at = me
        self._specs = {s.name: spec_of(s.tensor) for s in self._slots}
        self._held, self._kept = {}, []
        away: set[int] = set()
        names = {id(s.tensor): s.name for s in self._slots}
        self._listed = [[names[id(p)] for p in g["params"]] for g in self.optimizer.param_groups]
        for slot in self._slots:
            self._engine.whole[slot.name] = torch.empty_like(slot.tensor, device="meta")
            homes = self._homes.get(slot.name, [])
            everywhere = (B,) * len(self.mesh.sizes)
            if homes and me not in homes:
                slot.tensor.data = torch.empty(0, dtype=slot.tensor.dtype, device=self.device)
                away.add(id(slot.tensor))
                continue
            nd = self._lies.get((slot.name, me), everywhere)
            slot.tensor.data = (
                self._cut(slot.tensor.detach(), nd).clone() if any(x != B for x in nd) else slot.tensor.data
            )
            self._held[slot.name] = slot.tensor.detach()
            if isinstance(slot.tensor, nn.Parameter):
                param = owned = slot.tensor
                state_nd = self._owned_nd.get((slot.name, me), nd) if param.requires_grad else nd
                if state_nd != nd:
                    owned = nn.Parameter(self._cut(param.detach(), state_nd))
                self._kept.append(Kept(slot.name, self._specs[slot.name], param, nd, state_nd, owned))
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in away]
        listed = {id(p) for g in self.optimizer.param_groups for p in g["params"]}
        trained = [k for k in self._kept if id(k.param) in listed]
        optim.refuse_unless_elementwise(self.optimizer, trained)
        optim.adopt(self.optimizer, trained, self._cut)
        self._by_name = {k.name: k for k in trained}

    def _cut(self, whole: Tensor, nd: NdSbp) -> Tensor:
        return shard(whole, nd, self.mesh, self._place.ranks.index(self.rank))

    # --- a step

    def _leaves(self, batch: Any) -> Leaves:
        leaves = Leaves.of(batch)
        if leaves.local:
            raise BatchError("a plan with stages takes the global batch", next="hand every rank all of it")
        return leaves if self.precision.weights is None else leaves.mapped(self.precision.leaf)

    def _agreed(self, batch: Any) -> list[Leaves]:
        """The micro-batches of a batch, which must be alike on all ranks."""
        leaves = self._leaves(batch)
        self._world.agree(" ".join(leaves.key[1:]), leaves.key != self._noted)
        self._noted = leaves.key
        return leaves.split(self.plan.micro_batches)

    def step(self, batch: Any) -> Result:
        """Train on one global batch, or `Sized(batch, sizes)`: with micro-batches of so many samples."""
        return self._recorded_step(batch)  # type: ignore[no-any-return]

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        self._micros = self._agreed(batch)
        self._draws = self.steps
        pipe = self._pipe = self._pipe_for(self._micros, True)
        samples = [m.samples for m in self._micros]
        pipe.parts.weights = [1.0 if pipe.weighted else n / sum(samples) for n in samples]
        self._scale = self._scaler.scale if self._scaler else 1.0
        tape = self._tape if isinstance(self._tape, PipeTape) and self._tape.active else None
        self._mark("batch")
        pipe.actors.record(tape is not None)
        pipe.actors.run(1)
        if tape is not None:
            tape.fired(pipe.actors.spans(), pipe.net)
        grads = self._reduced(pipe)
        self._mark("gradients")
        norm, loss, weight = self._met(pipe, grads)
        self._mark("norm")
        return self._update(pipe, grads, norm, loss, weight, clock)

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The loss over batches with the model in evaluation mode, through the stages."""
        training = [(m, m.training) for m in self._model.modules()]
        self._model.eval()
        total = weight = 0.0
        try:
            for i, batch in enumerate(batches):
                self._micros = self._agreed(batch)
                self._draws = -1 - i
                pipe = self._pipe_for(self._micros, False)
                samples = [m.samples for m in self._micros]
                pipe.parts.weights = [1.0 if pipe.weighted else n for n in samples]
                pipe.actors.run(1)
                _, loss, count = self._met(pipe, {})
                total += float(loss)
                weight += float(count) if pipe.weighted else sum(samples)
        finally:
            for module, mode in training:
                module.training = mode
        return total / weight if weight else math.nan

    def _feed(self, pipe: Pipe, stage: int, k: int) -> dict[str, Tensor]:
        """This rank's share of what a stage reads from outside, of one micro-batch."""
        out: dict[str, Tensor] = {}
        made = pipe.parts.sizes[k].piped.made
        plan = made.staged.stages[stage].plan
        for item in made.cut.graphs[stage].inputs:
            if item.kind == "batch":
                out[item.name] = self._cut(self._micros[k].tensors[item.name], plan.inputs[item.name])
            elif item.kind == "rng":
                samples = [m.samples for m in self._micros]
                key = torch.tensor([self.seed, self._draws, sum(samples[:k]), sum(samples)][: item.spec.numel])
                out[item.name] = self._cut(key, plan.inputs[item.name])
            elif item.kind == "scale":
                scale = torch.tensor(self._scale * pipe.parts.weights[k], dtype=DTYPES[item.spec.dtype])
                out[item.name] = self._cut(scale, plan.inputs[item.name])
        return out

    def _move(self, items: list[Move], why: str, tensors: list[Tensor]) -> list[Tensor]:
        """From one placement to another, inside of this place."""
        if all(a == b for _, _, a, b in items):
            return tensors
        key = (why, *((n, a, b) for n, _, a, b in items))
        if key not in self._moves:
            self._moves[key] = Step(moves(self.mesh, items, why), self._transport)
        return self._moves[key](*tensors)

    def _reduced(self, pipe: Pipe) -> dict[str, Tensor]:
        """Gradients of this step as their owners here need them."""
        items: list[Move] = []
        terms: list[Tensor] = []
        for s, o in pipe.outputs("grad"):
            items.append((o.name, o.placed.spec, o.placed.nd, self._owned_nd[o.name, self._at]))
            terms.append(pipe.parts.sums[s, f"grad:{o.name}"])
        out: dict[str, Tensor] = {}
        for (name, *_), x in zip(items, self._move(items, "micro-batches summed", terms), strict=True):
            out[name] = out[name] + x if name in out else x
        for name in sorted(self._homes):
            homes = self._homes[name]
            if len(homes) > 1 and any((name, p) in self._graded for p in homes):
                self._tie(name, homes, out)
        return out

    def _tie(self, name: str, homes: list[int], grads: dict[str, Tensor]) -> None:
        """Add up a weight's gradients at its home, and give the sum to all places that hold it."""
        if self._at not in homes:
            return
        home, mine = homes[0], grads.get(name)
        for other in homes[1:]:
            if (name, other) in self._graded:
                there = self._across(name, other, home, mine)
                if there is not None:
                    mine = there if mine is None else mine + there
        for other in homes[1:]:
            there = self._across(name, home, other, mine)
            mine = there if self._at == other else mine
        if mine is not None:
            grads[name] = mine

    def _across(self, name: str, src: int, dst: int, x: Tensor | None) -> Tensor | None:
        """A gradient from one place to another, as it is owned on both sides."""
        if self._at not in (src, dst):
            return None
        a, b = self.plan.places[src], self.plan.places[dst]
        way = crossing(self._specs[name], a, self._owned_nd[name, src], b, self._owned_nd[name, dst])
        return exchange(way, x if self._at == src else None)

    def _met(self, pipe: Pipe, grads: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of the whole gradient, the loss and its weight, the same on every rank: one sum over all."""
        found = torch.zeros(3, dtype=torch.float64)
        for name, g in grads.items():
            if self._homes[name][0] == self._at:
                nd = self._owned_nd[name, self._at]
                copies = math.prod(n for p, n in zip(nd, self.mesh.sizes, strict=True) if not isinstance(p, Split))
                found[0] += g.double().square().sum() / copies
        values = self._values(pipe)
        if self._place.ranks[0] == self.rank:
            found[1] = values.get("metric:loss_total", values.get("loss:loss", torch.zeros(()))).double()
            found[2] = values.get("metric:loss_weight", torch.zeros(())).double()
        if self.world > 1:
            dist.all_reduce(found)
        return found[0].sqrt(), found[1], found[2]

    def _values(self, pipe: Pipe) -> dict[str, Tensor]:
        """Loss and metrics of the stages at this place, whole."""
        items: list[Move] = []
        terms: list[Tensor] = []
        for s, o in pipe.outputs("loss", "metric"):
            items.append((f"{o.kind}:{o.name}", o.placed.spec, o.placed.nd, (B,) * len(self.mesh.sizes)))
            terms.append(pipe.parts.sums[s, f"{o.kind}:{o.name}"])
        return dict(zip([n for n, *_ in items], self._move(items, "values summed", terms), strict=True))

    def _update(
        self, pipe: Pipe, grads: dict[str, Tensor], raw: Tensor, loss: Tensor, weight: Tensor, clock: Any
    ) -> Result:
        inverse: Any = 1.0 / self._scale
        if pipe.weighted:
            loss = loss / weight
            inverse = inverse / weight
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        number, self.steps = self.steps, self.steps + 1
        if self._scaler is not None:
            finite = math.isfinite(float(raw))
            self._scaler.update(finite)
            if not finite:
                return Result(number, loss, raw * inverse, lr, clock(), True)
        names = [n for n in self._by_name if n in grads]
        pieces = [grads[n] for n in names]
        norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
        for n, g in zip(names, pieces, strict=True):
            owned = self._by_name[n].owned
            owned.grad = g if g.dtype == owned.dtype else g.to(owned.dtype)
        self.optimizer.step()
        for n in names:
            self._by_name[n].owned.grad = None
        self._mark("optimizer")
        split = [k for k in self._kept if k.gathered]
        if split:
            items = [(k.name, k.spec, k.state_nd, k.nd) for k in split]
            moved = self._move(items, "updated parameters", [k.owned.detach() for k in split])
            for k, x in zip(split, moved, strict=True):
                k.param.detach().copy_(x)
        return Result(number, loss, norm, lr, clock(), False)

    def _new_tape(self, steps: int | None) -> Tape:
        return PipeTape(self.rank, self.world, steps)

    def _about(self) -> dict[str, Any]:
        return {"plan": self.plan.hash, "places": [list(p.ranks) for p in self.plan.places]}

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds from step to step; registers are the most that may lie in queues at once."""
        state = (v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim())
        return {
            "parameters": sum(t.nbytes for t in self._held.values())
            + sum(k.owned.nbytes for k in self._kept if k.gathered),
            "gradients": sum(t.nbytes for (_, key), t in self._pipe.parts.sums.items() if key.startswith("grad:")),
            "state": sum(v.nbytes for v in state),
            "registers": self._pipe.parts.piped.net.bound_bytes(self._at),
        }

    def close(self) -> None:
        """End the actors and leave the process group, if this job made it."""
        for pipe in self._pipes.values():
            pipe.actors.close()
        super().close()


def _never(*_: Any) -> Any:
    raise AssertionError("a job with stages compiles parts, not whole steps")
