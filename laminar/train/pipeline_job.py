"""A job whose plan has stages: different ranks hold different parts of the model, and micro-batches pass between them.

A step: every micro-batch goes through all stages and back, driven by actors (`runtime/pipeline/actors.py`) in the
order of the plan's schedule, or as far from it as its window allows. A place whose firings are done reduces its sums,
and stages that share a weight add up their gradients. Then all ranks meet once: the norm of the whole gradient, the
loss and its weight are added up over all places. Where gradients are clipped by norm, the loss is weighted or an fp16
step may be skipped, which is one decision for all, every rank updates what it owns behind that meeting; otherwise
before it, while others are still at work.

Ranks outside of a weight's places do not hold it. Whole weights are assembled where they are held, and sent to all.

On GPUs parts go through Inductor unless asked otherwise, and what one place gives another goes through memory of the
host, or by NCCL where every rank has a GPU of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.losses import Metrics, reported
from laminar.capture.torch_ops import spec_of
from laminar.capture.torch_private import foreach_lerp
from laminar.errors import BatchError, MeshError, OptimizerError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, Split
from laminar.ir.staged import Staged
from laminar.lower.reshard import Move, moves
from laminar.lower.stage_programs import Stages, stages
from laminar.rewrite.variants import rewritten
from laminar.rules.crossing import crossing
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.cross_mesh import exchange
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null
from laminar.runtime.trace.pipeline_tape import PipeTape
from laminar.runtime.trace.tape import Tape
from laminar.staging.coupled_samples import refuse_coupled
from laminar.staging.stage_plans import again
from laminar.train import checkpoint, first_batch_check
from laminar.train import optimizer as optim
from laminar.train.batch_checksum import Sampled
from laminar.train.engine import Engine, Leaves
from laminar.train.gradients import scale_and_clip
from laminar.train.job import clock_of, refuse
from laminar.train.memory_layout import refuse_shared
from laminar.train.metrics import Evaluation, Logs, Result, Sums
from laminar.train.optimizer import Kept
from laminar.train.optimizer_changes import Tracked
from laminar.train.options import DEFAULTS, JobOptions
from laminar.train.pipeline_state import StagedState
from laminar.train.pipeline_steps import Pipe, StagedPipes
from laminar.train.precision import Precision, Scaler, update
from laminar.train.sharded_model import Pieces, released
from laminar.train.timeline import Recorded
from laminar.train.world import World


class StagedJob(Recorded, StagedPipes, StagedState, Logs):
    """See `laminar.parallelize`; the methods of `Job`, for a plan with stages."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        batch: Any,
        plan: Staged,
        options: JobOptions = DEFAULTS,
    ) -> None:
        options.refuse_for_stages()
        refuse(model)
        timeout_s = options.timeout_s
        self._world = World(options.device, timeout_s)
        emit("phase", name="preparing")
        self.rank, self.world, self.device = self._world.rank, self._world.size, self._world.device
        if plan.ranks != self.world:
            raise MeshError(f"the plan has {plan.ranks} ranks, the world has {self.world}",
                            next=f"start {plan.ranks} processes")  # fmt: skip
        self.precision = Precision.of(options.precision)
        self.clip_norm, self.clip_value, self.seed, self.steps = options.clip_norm, options.clip_value, options.seed, 0
        self._scaler = Scaler() if self.precision.scaled else None
        self._scale = 1.0
        self._compile = options.compiles(self.device)
        self._model = model
        self._engine = Engine(
            model, self.precision.around(loss, self.device), Mesh({"dp": 1}), Null(Mesh({"dp": 1})),
            plan.micro_batches, self.precision.scaled, _never, options.unguarded,
        )  # fmt: skip
        released(model)
        self._slots = checkpoint.moved(model, self.device, self.precision.weights)
        self._numbers = {s.name: i for i, s in enumerate(self._slots)}
        self._world.broadcast([s.tensor.detach() for s in self._slots])
        self.optimizer = optim.made(optimizer, model.parameters())
        optim.refuse_unknown(self.optimizer, {id(s.tensor): s.name for s in self._slots})
        optim.refuse_closure(self.optimizer, "the plan has stages, so no rank has all parameters")
        optim.faster(self.optimizer, self.device)
        self._elementwise = options.elementwise
        first = self._leaves(batch).split(plan.micro_batches)[0]
        captured = self._engine.begin(first)
        if plan.micro_batches > 1 and not plan.coupled and first.samples == 1:
            refuse_coupled(self._engine.capture(first.like(2)))  # one sample has nothing to be mixed with
        self.graph: Graph = rewritten(captured, plan)
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
        cut = {id(s.tensor) for s in self._slots if tuple(s.tensor.shape) != self._specs[s.name].shape}
        if cut:
            self._pieces = Pieces(self)
            self._pieces.put_on(model, cut)
        self._engine.captures.adopt(self._slots)
        self._ema_decay = options.ema
        self._ema = {k.name: k.owned.detach().float().clone() for k in self._kept} if options.ema is not None else {}
        self._moves: dict[Any, EagerStep] = {}
        self._micros: list[Leaves] = []
        self._draws = 0
        self._noted: tuple[str, ...] = ()
        self._unchecked = options.check
        self._sampled = Sampled()
        self._graphs: dict[str, Graph] = {captured.hash: self.graph}
        self._pipe = self._opened({captured.hash: made}, self.graph)
        self._pipes: dict[bool, Pipe] = {True: self._pipe}

    # --- who holds what

    def _keep(self, made: Stages) -> None:
        """Leave this rank's parts in the model, and make the optimizer update what it owns."""
        staged = self.plan
        refuse_shared({s.name for s in self._slots}, self._slots)
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
        self._grad_specs = {o.name: g.specs[o.ref] for g in made.cut.graphs for o in g.outputs if o.kind == "grad"}
        me = staged.places.index(self._place)
        self._at = me
        self._specs = {s.name: spec_of(s.tensor) for s in self._slots}
        self._held, self._kept = {}, []
        self._engine.held = self._held
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
        optim.refuse_unless_elementwise(self.optimizer, trained, self._elementwise, len(staged.places))
        optim.adopt(self.optimizer, trained, self._cut)
        self._by_name = {k.name: k for k in trained}
        self._plain = all(k.plain for k in self._kept)
        rounded = self.precision.rounding != "nearest"
        self._tracked = Tracked(self.optimizer, self._kept, rounded, self._elementwise, len(staged.places))
        self._trained = [(s.name, s.tensor, s.tensor.requires_grad) for s in self._slots if s.kind == "param"]

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
        self._engine.look()
        state = self._engine.captures.said
        values = self._sampled(leaves.tensors, self._world.notes + 1) if self.world > 1 else ""
        self._world.agree(" ".join(leaves.key[1:]), (*leaves.key, state) != self._noted, state, values)
        self._noted = (*leaves.key, state)
        return leaves.split(self.plan.micro_batches)

    def step(self, batch: Any) -> Result:
        """Train on one global batch, or `Sized(batch, sizes)`: with micro-batches of so many samples."""
        self._refuse_released()
        return self._recorded_step(batch)  # type: ignore[no-any-return]

    def _step(self, batch: Any) -> Result:
        clock = clock_of(self.device)
        self._micros = self._agreed(batch)
        self._refuse_changes()
        if self._unchecked:
            self._unchecked = False
            first_batch_check.check_staged(self)
        self._draws = self.steps
        pipe = self._pipe = self._pipe_for(self._micros, True)
        samples = [m.samples for m in self._micros]
        pipe.parts.weights = [n / sum(samples) for n in samples]
        self._scale = self._scaler.scale if self._scaler else 1.0
        tape = self._tape if isinstance(self._tape, PipeTape) and self._tape.active else None
        self._mark("batch")
        pipe.actors.record(tape is not None)
        pipe.parts.settle = self._settle if tape is not None else None
        lr = float(self.optimizer.param_groups[0].get("lr", math.nan))
        number, self.steps = self.steps, self.steps + 1
        grads: dict[str, Tensor] = {}
        alone = self.clip_norm is None and self._scaler is None and not pipe.weighted

        def last() -> list[float]:
            if tape is not None:
                tape.fired(pipe.actors.spans(), pipe.net)
            grads.update(self._reduced(pipe))
            self._mark("gradients")
            said = self._said(pipe, grads)
            if alone:  # nothing to learn from the others: updated while they may still be at work
                self._update(grads, number, torch.zeros((), device=self.device), 1.0)
            return said

        pipe.actors.run(1, last)
        raw, *rest = torch.tensor(pipe.actors.sums, dtype=torch.float64, device=self.device).unbind()
        values = dict(zip(pipe.values, rest, strict=True))
        loss = values["metric:loss_total" if pipe.weighted else "loss:loss"]
        self._mark("norm")
        raw = raw.sqrt()
        if alone:
            return Result(number, loss, raw, lr, clock(), False).attach(reported(values))
        inverse: Any = 1.0 / self._scale
        if pipe.weighted:
            weight = values["metric:loss_weight"]
            loss, inverse = loss / weight, inverse / weight
        if self._scaler is not None:
            finite = math.isfinite(float(raw))
            self._scaler.update(finite)
            if not finite:
                return Result(number, loss, raw * inverse, lr, clock(), True).attach(reported(values))
        norm = self._update(grads, number, raw, inverse)
        return Result(number, loss, norm, lr, clock(), False).attach(reported(values))

    def _refuse_changes(self) -> None:
        """What a user changed since the last step: state is taken into account, the rest is decided by the stages."""
        for name, param, trained in self._trained:
            if param.requires_grad is not trained:
                raise OptimizerError(
                    f"{name} was {'frozen' if trained else 'unfrozen'} after the job was made",
                    why="a plan with stages is made for the gradients that there are",
                    next="make a new job",
                )
        if not self._tracked.same():
            if self._tracked.regrouped():
                raise OptimizerError(
                    "the optimizer's groups were changed after the job was made",
                    why="a plan with stages gives each rank some of their parameters",
                    next="make a new job",
                )
            self._by_name = self._tracked.resolve(self._kept, self._cut)

    def evaluate(self, batches: Iterable[Any], metrics: Metrics | None = None) -> Evaluation:
        """The loss over batches with the model in evaluation mode, through the stages; see `Job.evaluate`."""
        self._refuse_released()
        training = [(m, m.training) for m in self._model.modules()]
        self._model.eval()
        sums = Sums()
        try:
            with self._engine.measuring(metrics or {}, partial(self.precision.around, device=self.device)):
                for i, batch in enumerate(batches):
                    self._micros = self._agreed(batch)
                    self._draws = -1 - i
                    pipe = self._pipe_for(self._micros, False)
                    samples = [m.samples for m in self._micros]
                    pipe.parts.weights = [n / sum(samples) for n in samples]
                    pipe.actors.run(1, partial(self._said, pipe, {}))
                    sums.add_outputs(dict(zip(pipe.values, pipe.actors.sums[1:], strict=True)), sum(samples))
        finally:
            for module, mode in training:
                module.training = mode
        return sums.evaluation

    def _move(self, items: list[Move], why: str, tensors: list[Tensor]) -> list[Tensor]:
        """From one placement to another, inside of this place."""
        if all(a == b for _, _, a, b in items):
            return tensors
        key = (why, *((n, a, b) for n, _, a, b in items))
        if key not in self._moves:
            self._moves[key] = EagerStep(moves(self.mesh, items, why), self._transport)
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
        way = crossing(self._grad_specs[name], a, self._owned_nd[name, src], b, self._owned_nd[name, dst])
        return exchange(way, x if self._at == src else None, device=self.device)

    def _said(self, pipe: Pipe, grads: Mapping[str, Tensor]) -> list[float]:
        """This rank's share of the square of the gradient's norm, of the loss and of metrics."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, g in grads.items():
            if self._homes[name][0] == self._at:
                nd = self._owned_nd[name, self._at]
                copies = math.prod(n for p, n in zip(nd, self.mesh.sizes, strict=True) if not isinstance(p, Split))
                square += g.double().square().sum() / copies
        values = self._values(pipe)
        speaks = self._place.ranks[0] == self.rank
        return [float(square), *(float(values[key]) if speaks and key in values else 0.0 for key in pipe.values)]

    def _values(self, pipe: Pipe) -> dict[str, Tensor]:
        """Loss and metrics of the stages at this place, whole."""
        items: list[Move] = []
        terms: list[Tensor] = []
        for s, o in pipe.outputs("loss", "metric"):
            items.append((f"{o.kind}:{o.name}", o.placed.spec, o.placed.nd, (B,) * len(self.mesh.sizes)))
            terms.append(pipe.parts.sums[s, f"{o.kind}:{o.name}"])
        return dict(zip([n for n, *_ in items], self._move(items, "values summed", terms), strict=True))

    def _update(self, grads: Mapping[str, Tensor], number: int, raw: Tensor, inverse: Any) -> Tensor:
        """Update what this rank owns; the norm of the gradient as it counts."""
        names = [n for n in self._by_name if n in grads]
        pieces = optim.laid_out([self._by_name[n] for n in names], [grads[n] for n in names], self._plain)
        norm = scale_and_clip(pieces, raw, inverse, self.clip_norm, self.clip_value)
        updates = [(self._by_name[n], g) for n, g in zip(names, pieces, strict=True)]
        key = torch.tensor([self.seed, number], device=self.device)
        here = self._place.ranks.index(self.rank)
        update(self.optimizer, updates, self.precision.rounding, key, self.mesh, here, self._numbers)
        self._mark("optimizer")
        split = [k for k in self._kept if k.gathered]
        if split:
            items = [(k.name, k.spec, k.state_nd, k.nd) for k in split]
            moved = self._move(items, "updated parameters", [k.owned.detach() for k in split])
            for k, x in zip(split, moved, strict=True):
                k.param.detach().copy_(x)
        if self._ema_decay is not None:
            foreach_lerp(list(self._ema.values()), [k.owned.detach().float() for k in self._kept], 1 - self._ema_decay)
        return norm

    def _settle(self) -> None:
        """Wait for the device, so that a recorded firing ends when its work does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
