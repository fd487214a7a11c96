"""A program of logical ranks as one process runs it: its lines once, once for each unit of the batch, or stacked.

The counterpart of `code/eager_step.py`. Every logical rank's values come out as if it ran by itself: the same local
code, on the same local shapes, in the same layouts. What does not differ between logical ranks is computed once. What
differs by unit is computed for all units here at once where that gives the same bits (`stacking.py`), which the first
run finds out, line by line; else for one unit after the other. Terms of sums are added up as they are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import constant_tensor
from laminar.ir.program import Instr, Placed, Program
from laminar.ir.sbp import B, Split
from laminar.ir.serial.codec import Ref
from laminar.runtime.code.local_op import call_for_shapes, depends_on_rank, prepare
from laminar.runtime.comm.aliases import result_may_alias
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.shm_arena import ArenaNeeds
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.integer_sum import TermRows
from laminar.runtime.exact.moves import HostedMove
from laminar.runtime.exact.reductions import HostedReduction
from laminar.runtime.exact.stacking import (
    as_results,
    ends_with_vectors,
    random_like,
    same_bits,
    says_little,
    stacked_specs,
)
from laminar.runtime.exact.tree_sum import PartialSums
from laminar.runtime.exact.values import (
    UNIT,
    HostedLane,
    HostedLanes,
    Instances,
    LaneKey,
    LaneValues,
    beside_units,
    stack_units,
    varies,
)

LineWatcher = Callable[[Instr, int, int, Tensor], None]
"""Told of a line, a logical rank, and the number and value of a result."""
SUMS = ("all_reduce", "reduce_scatter")


class HostedStep:
    """Call it with whole inputs in order, get outputs in order: those that are whole, as this process has them.

    `instances` takes and gives values as logical ranks have them, for who runs several programs one after the other.
    """

    def __init__(
        self,
        program: Program,
        hosts: HostedRanks,
        constants: Mapping[str, Tensor] | None = None,
        threads: int = 1,
        stacks: bool = True,
        watch: LineWatcher | None = None,
        sums: str = "tree",
    ) -> None:
        """`stacks`: units may run together. `watch` sees every line's results, the instance of each logical rank.

        `sums` is that of `Exact`.
        """
        self.program, self.hosts, self.mesh, self.device = program, hosts, hosts.mesh, hosts.device
        self.lanes = HostedLanes(hosts.mesh, hosts.hosting, hosts.process)
        self.watch = watch
        self.own_s = self._waited = 0.0
        """Seconds of the last run that this process spent on its own work, not on exchanges; 0 of a first run."""
        self._ran = False
        self.placed = {Ref(i.name): i.placed for i in program.inputs}
        self.placed |= {Ref(i.name, k): p for i in program.instrs for k, p in enumerate(i.outs) if p is not None}
        given = constants or {}
        self.constants = {
            Ref(c.name): given[c.name] if c.name in given else constant_tensor(c) for c in program.constants
        }
        self.env: dict[Ref, LaneValues] = {}
        self.lines: list[Any] = []
        self.reductions = {i.name: HostedReduction(i, hosts, sums) for i in program.instrs if i.kind in SUMS}
        self._share_memory()
        self._feeds = self._feeding()
        for instr in program.instrs:
            if instr.kind in SUMS:
                self.lines.append(_Reduce(self, instr))
            elif instr.moves:
                self.lines.append(_Move(self, instr))
            elif instr.kind:
                self.lines.append(_LocalBox(self, instr))
            elif not self._by_unit(instr):
                self.lines.append(_Once(self, instr))
            else:
                self.lines.append(_ByUnit(self, instr, threads, stacks))
        self._plan_ends()
        self._unfinished: dict[str, _Reduce] = {}

    @property
    def stacked(self) -> list[str]:
        """The lines that the first run has found to give the same bits for all units at once."""
        return [line.instr.name for line in self.lines if isinstance(line, _ByUnit) and line.together]

    # --- made once --------------------------------------------------------------------------------

    def _by_unit(self, instr: Instr) -> bool:
        """Whether what a line makes differs by unit."""
        return any(p is not None and p.nd[UNIT] != B for p in instr.outs)

    def _share_memory(self) -> None:
        """Partial sums lie in memory of all processes, where they have some."""
        wants, takers = ArenaNeeds(), {}
        for name, reduction in self.reductions.items():
            for i, (whole, _) in enumerate(reduction.sums):
                if whole.remote and whole.numel:
                    takers[f"{name}/{i}"] = whole
                    wants.buckets[f"{name}/{i}"] = whole.shared_bytes
        arena = self.hosts.arena(wants) if takers else None
        if arena is not None:
            for key, whole in takers.items():
                whole.segment = arena.buckets[key]

    def _feeding(self) -> dict[Ref, tuple[HostedReduction, int]]:
        """Values that only a sum over the units reads: each term goes there as it is made, in the order of units.

        Not those that lines make in several lanes, each of which has some of the units.
        """
        uses: dict[Ref, int] = {}
        for ref in [r for i in self.program.instrs for r in i.refs] + [o.ref for o in self.program.outputs]:
            uses[ref] = uses.get(ref, 0) + 1
        made = {
            Ref(i.name, k)
            for i in self.program.instrs
            for k, p in enumerate(i.outs)
            if not i.kind and p is not None and set(varies(p)) >= line_axes(i) - {UNIT}
        }
        return {
            ref: (self.reductions[i.name], k)
            for i in self.program.instrs
            if i.kind in SUMS and i.box.axes == (UNIT,)
            for k, ref in enumerate(i.refs)
            if uses[ref] == 1 and ref in made
        }

    def _plan_ends(self) -> None:
        """Which values nobody reads behind each line."""
        last: dict[Ref, int] = {}
        for at, instr in enumerate(self.program.instrs):
            for k in range(len(instr.outs)):
                last[Ref(instr.name, k)] = at
            for ref in instr.refs:
                last[ref] = at
        kept = {o.ref for o in self.program.outputs} | set(self.constants) | {Ref(i.name) for i in self.program.inputs}
        self.ends: list[list[Ref]] = [[] for _ in self.program.instrs]
        for ref, at in last.items():
            if ref not in kept:
                self.ends[at].append(ref)

    # --- a run ------------------------------------------------------------------------------------

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """One step."""
        found = self.instances(inputs)
        return [
            self.instance(o.ref, values, self.hosts.rank) for o, values in zip(self.program.outputs, found, strict=True)
        ]

    def instances(self, inputs: Sequence[Tensor | LaneValues]) -> list[LaneValues]:
        """One step: of each output all instances that are here."""
        begun, self._waited = time.perf_counter(), 0.0
        try:
            with torch.no_grad():
                out = self._run(inputs)
        except BaseException:
            self._abandon()
            raise
        self.own_s = time.perf_counter() - begun - self._waited if self._ran else 0.0
        self._ran = True
        return out

    def wait(self, exchange: Callable[[], Any]) -> Any:
        """What an exchange gives; the time it takes is not this process's own."""
        begun = time.perf_counter()
        out = exchange()
        self._waited += time.perf_counter() - begun
        return out

    def _run(self, inputs: Sequence[Tensor | LaneValues]) -> list[LaneValues]:
        self.env.clear()
        for item, x in zip(self.program.inputs, inputs, strict=True):
            self.env[Ref(item.name)] = self._input(x, item.placed)
        for ref, value in self.constants.items():
            self.env[ref] = {(): Instances(once=value.to(self.device))}
        for line, ends in zip(self.lines, self.ends, strict=True):
            if self._unfinished:
                for ref in line.instr.refs:
                    self.await_sum(ref)
            line.run()
            if self.watch is not None:
                self._show(line.instr)
            for ref in ends:
                self.env.pop(ref, None)
        for line in list(self._unfinished.values()):
            line.finish()
        outs = [self.env[o.ref] for o in self.program.outputs]
        self.env.clear()
        return outs

    def _abandon(self) -> None:
        """A run has failed in its middle: no half of a sum may be left for the next one."""
        self.env.clear()
        self._unfinished.clear()
        for reduction in self.reductions.values():
            for whole, _ in reduction.sums:
                whole.waiting = False
        for line in self.lines:
            for feed in (
                (f for feeds in line.feeds for f in feeds if f is not None) if isinstance(line, _ByUnit) else ()
            ):
                feed[0].clear()

    def _input(self, x: Tensor | LaneValues, placed: Placed) -> LaneValues:
        if isinstance(x, dict):
            return x
        axes = varies(placed)
        if not axes:
            return {(): Instances(once=x.to(self.device, non_blocking=True))}
        out: LaneValues = {}
        for lane in self.lanes.along(axes):
            if UNIT not in axes:
                out[lane.key] = Instances(once=shard(x, placed.nd, self.mesh, lane.ranks[0]).to(self.device))
                continue
            each = [shard(x, placed.nd, self.mesh, r).to(self.device, non_blocking=True) for r in lane.ranks]
            out[lane.key] = Instances(lane.units, each=dict(zip(lane.units, each, strict=True)))
        return out

    def _show(self, instr: Instr) -> None:
        if instr.name in self._unfinished:
            self._unfinished[instr.name].finish()
        for k, placed in enumerate(instr.outs):
            if placed is not None and self.env.get(Ref(instr.name, k)):
                for rank in self.hosts.hosted:
                    assert self.watch is not None
                    self.watch(instr, rank, k, self.fetch(Ref(instr.name, k), rank))

    # --- what lines ask for -----------------------------------------------------------------------

    def axes(self, ref: Ref) -> tuple[int, ...]:
        """The axes along which a value differs."""
        placed = self.placed.get(ref)
        return () if placed is None else varies(placed)

    def keys(self, refs: Sequence[Ref], lane: HostedLane) -> dict[Ref, LaneKey]:
        """Where the logical ranks of a lane find each of these values."""
        return {ref: lane.narrowed(beside_units(self.axes(ref))) for ref in refs}

    def fetch(self, ref: Ref, rank: int) -> Tensor:
        """The instance that a logical rank of this process has."""
        return self.instance(ref, self.env[ref], rank)

    def instance(self, ref: Ref, values: LaneValues, rank: int) -> Tensor:
        """The same of a value that is given."""
        axes, coords = self.axes(ref), self.mesh.coords(rank)
        return values[tuple(coords[a] for a in beside_units(axes))].of(coords[UNIT])

    def await_sum(self, ref: Ref) -> None:
        """See that a sum which is under way has come to its end."""
        if ref.name in self._unfinished:
            self._unfinished[ref.name].finish()

    def spread(self, instr: Instr, made: Callable[[int, int], Tensor]) -> None:
        """Take the results of an exchange over: `made` gives that of a logical rank."""
        for k, placed in enumerate(instr.outs):
            assert placed is not None
            axes = varies(placed)
            found: LaneValues = {}
            for lane in self.lanes.along(axes):
                if UNIT in axes:
                    each = {u: made(k, r) for u, r in zip(lane.units, lane.ranks, strict=True)}
                    found[lane.key] = Instances(lane.units, each=each)
                else:
                    found[lane.key] = Instances(once=made(k, lane.ranks[0]))
            self.env[Ref(instr.name, k)] = found

    def feed(self, ref: Ref, lane: HostedLane) -> tuple[PartialSums | TermRows, tuple[bool, ...]] | None:
        """Where a value's terms go as they are made, if only a sum over units reads them."""
        found = self._feeds.get(ref)
        return None if found is None else found[0].partial(found[1], lane.narrowed(beside_units(self.axes(ref))))

    def feeds(self, ref: Ref) -> bool:
        """Whether a value's terms go into a sum as they are made."""
        return ref in self._feeds


class _Reduce:
    def __init__(self, step: HostedStep, instr: Instr) -> None:
        self.step, self.instr, self.reduction = step, instr, step.reductions[instr.name]

    def run(self) -> None:
        step, refs = self.step, self.instr.refs
        for k, ref in enumerate(refs):
            if not step.feeds(ref):
                self.reduction.add(k, lambda which, rank: step.fetch(refs[which], rank))
        self.reduction.start()
        step._unfinished[self.instr.name] = self

    def finish(self) -> None:
        """Wait for the others, and take the sums."""
        del self.step._unfinished[self.instr.name]
        self.step.spread(self.instr, self.step.wait(self.reduction.finish))


class _Move:
    def __init__(self, step: HostedStep, instr: Instr) -> None:
        self.step, self.instr, self.move = step, instr, HostedMove(instr, step.hosts)
        self.here: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        self.step.spread(self.instr, self.step.wait(lambda: self.move(self._fetch)))

    def _fetch(self, which: int, rank: int) -> Tensor:
        """An instance by the first logical rank that has it, which need not be here."""
        if (which, rank) not in self.here:
            axes = self.step.axes(self.instr.refs[which])
            want = self.step.mesh.coords(rank)
            self.here[which, rank] = next(
                r for r in self.step.hosts.hosted if all(self.step.mesh.coords(r)[a] == want[a] for a in axes)
            )
        return self.step.fetch(self.instr.refs[which], self.here[which, rank])


class _LocalBox:
    """A piece of a whole, or a term of a sum: each logical rank's own."""

    def __init__(self, step: HostedStep, instr: Instr) -> None:
        self.step, self.instr = step, instr
        self.boxes = {r: LocalBoxing.of(instr, step.mesh, r) for r in step.hosts.hosted}

    def run(self) -> None:
        ref = self.instr.refs[0]
        self.step.spread(
            self.instr, lambda _, rank: getattr(self.boxes[rank], self.instr.kind)(self.step.fetch(ref, rank))
        )


class _Call:
    """A line's arguments, with places where values go."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target, self.args, self.kwargs = target, args, kwargs
        self.places = [(i, a) for i, a in enumerate(args) if type(a) is Ref]
        """Where values go, if none lies deeper."""
        self.flat = not kwargs and not any(_holds_values(a) for a in args if type(a) is list)

    def __call__(self, value: Callable[[Ref], Tensor]) -> tuple[Any, ...]:
        if self.flat:  # nearly always, and this is called for every line of every step
            args = list(self.args)
            for i, ref in self.places:
                args[i] = value(ref)
            return as_results(self.target(*args))

        def fill(arg: Any) -> Any:
            if type(arg) is Ref:
                return value(arg)
            return [fill(a) for a in arg] if type(arg) is list else arg

        kwargs = {k: fill(v) for k, v in self.kwargs.items()} if self.kwargs else self.kwargs
        return as_results(self.target(*map(fill, self.args), **kwargs))


def _holds_values(items: list[Any]) -> bool:
    return any(type(a) is Ref or (type(a) is list and _holds_values(a)) for a in items)


def line_axes(instr: Instr) -> set[int]:
    """The axes along which what a line reads and makes differs."""
    return {a for p in (*instr.ins, *instr.outs) if p is not None for a in varies(p)}


class _Once:
    """A line whose results all units share: it runs once in each lane."""

    def __init__(self, step: HostedStep, instr: Instr) -> None:
        self.step, self.instr = step, instr
        self.lanes = step.lanes.along(tuple(sorted(line_axes(instr))))
        self.calls = [_Call(*prepare(instr, step.mesh, lane.ranks[0], step.device)) for lane in self.lanes]
        self.keys = [step.keys(instr.refs, lane) for lane in self.lanes]
        self.made = [(Ref(instr.name, k), k) for k, p in enumerate(instr.outs) if p is not None]
        self.out_keys = [step.keys([ref for ref, _ in self.made], lane) for lane in self.lanes]

    def run(self) -> None:
        env = self.step.env
        for ref, _ in self.made:
            env[ref] = {}
        for lane, call, keys, out_keys in zip(self.lanes, self.calls, self.keys, self.out_keys, strict=True):
            unit = lane.units[0]
            outs = call(lambda ref, keys=keys, unit=unit: env[ref][keys[ref]].of(unit))  # type: ignore[misc]
            for ref, k in self.made:
                env[ref].setdefault(out_keys[ref], Instances(once=outs[k]))


class _ByUnit:
    """A line whose results differ by unit: run for each, or for all that are here at once."""

    def __init__(self, step: HostedStep, instr: Instr, threads: int, stacks: bool) -> None:
        self.step, self.instr = step, instr
        mesh, device = step.mesh, step.device
        self.lanes = step.lanes.along(tuple(sorted(line_axes(instr))))
        self.each = [[_Call(*prepare(instr, mesh, r, device)) for r in lane.ranks] for lane in self.lanes]
        self.dims = [_unit_dim(p) for p in instr.outs]
        self.in_dims = {ref: _unit_dim(p) for ref, p in zip(instr.refs, instr.ins, strict=True)}
        self.keys = [step.keys(instr.refs, lane) for lane in self.lanes]
        self.made = [(Ref(instr.name, k), k, p) for k, p in enumerate(instr.outs) if p is not None]
        self.out_keys = [step.keys([ref for ref, _, _ in self.made], lane) for lane in self.lanes]
        self.own = not result_may_alias(instr)
        self.stacked = [self._reader(lane, keys) for lane, keys in zip(self.lanes, self.keys, strict=True)]
        """What gives a value of all units, by lane."""
        self.together: list[_Call | None] = []
        """For each lane the line for all of its units, where that may be."""
        for lane in self.lanes:
            self.together.append(self._stacked(lane, threads) if stacks and len(lane.units) > 1 else None)
        self.together = self.together if any(self.together) else []
        self.fed = [step.feeds(ref) for ref, _, _ in self.made]
        self.feeds = [[step.feed(ref, lane) for ref, _, _ in self.made] for lane in self.lanes]
        """Where terms of sums go as they are made, by lane and result."""
        self.product = instr.op == "aten.mm" and step.feeds(Ref(instr.name))
        self.accumulates: bool | None = None
        """Whether products of a sum may be added as they are made; nothing until there were two."""
        self.tried = not self.together and not self.product

    def _reader(self, lane: HostedLane, keys: dict[Ref, LaneKey]) -> Callable[[Ref], Tensor]:
        env, units = self.step.env, lane.units
        where = {ref: (key, self.in_dims[ref]) for ref, key in keys.items()}

        def read(ref: Ref) -> Tensor:
            key, dim = where[ref]
            return env[ref][key].together(units, dim)

        return read

    def _stacked(self, lane: HostedLane, threads: int) -> _Call | None:
        instr, mesh, rank = self.instr, self.step.mesh, lane.ranks[0]
        if any(self.step.feeds(Ref(instr.name, k)) for k in range(len(instr.outs))):
            return None
        ins = stacked_specs(instr.ins, mesh, rank, len(lane.units))
        outs = stacked_specs(instr.outs, mesh, rank, len(lane.units))
        if ins is None or outs is None or any(p is not None and p.nd[UNIT] == B for p in instr.outs):
            return None
        if depends_on_rank(instr) and instr.args[-4:-3] == ("offset",):
            return None
        if not ends_with_vectors(instr, mesh, rank, threads):
            return None
        known = tuple(s for s in ins if s is not None)
        return _Call(*call_for_shapes(instr, known, tuple(outs), mesh, lane.ranks, self.step.device))

    def run(self) -> None:
        env = self.step.env
        for ref, _, _ in self.made:
            env[ref] = {}
        for at, lane in enumerate(self.lanes):
            if not self.tried and self.together and self.together[at] is not None and not self._same(at, lane):
                self.together[at] = None
            call = self.together[at] if self.together else None
            if call is None:
                self._run_each(at, lane)
                continue
            outs = call(self.stacked[at])
            for ref, k, _ in self.made:
                here = Instances(lane.units, stacked=outs[k], dim=self.dims[k])
                known = env[ref].setdefault(self.out_keys[at][ref], here)
                if known is not here:  # another lane has had its own units of it
                    known.each.update({u: here.of(u) for u in lane.units})
        if not self.tried:
            self.tried = self.accumulates is not None or not self.product
            self.together = self.together if any(self.together) else []

    def _run_each(self, at: int, lane: HostedLane) -> None:
        env, feeds = self.step.env, self.feeds[at]
        here = {ref: env[ref][key] for ref, key in self.keys[at].items()}
        for unit, call in zip(lane.units, self.each[at], strict=True):
            feed = feeds[0]
            if self.product and feed is not None and feed[1][unit]:
                self._add_product(feed[0], unit, *(here[r].of(unit) for r in self.instr.args))
                continue
            outs = call(lambda ref, unit=unit: here[ref].of(unit))  # type: ignore[misc]
            for (ref, k, placed), fed, feed in zip(self.made, self.fed, feeds, strict=True):
                if fed:
                    if feed is not None and feed[1][unit]:
                        feed[0].add(unit, outs[k], self.own)
                    continue
                key = self.out_keys[at][ref]
                if placed.nd[UNIT] == B:
                    env[ref].setdefault(key, Instances(once=outs[k]))
                else:
                    env[ref].setdefault(key, Instances(lane.units)).each[unit] = outs[k]

    def _add_product(self, sums: PartialSums | TermRows, unit: int, a: Tensor, b: Tensor) -> None:
        """A product that is a term of a sum: added in the same pass, where that rounds as adding it afterwards does."""
        partner = sums.partner(unit)
        if partner is not None and self.tried and self.accumulates:
            torch.addmm(partner, a, b, out=partner)
            sums.joined(unit)
            return
        room = sums.room(unit)
        term = torch.mm(a, b) if room is None else torch.mm(a, b, out=room)
        if partner is not None and not self.tried:
            self.accumulates = self.accumulates is not False and _adds_alike(partner, term, a, b)
        sums.add(unit, term, own=True)

    # --- the trial --------------------------------------------------------------------------------

    def _same(self, at: int, lane: HostedLane) -> bool:
        """Whether all units at once give each unit's bits, in memory laid out as its own."""
        values = {ref: self.step.env[ref][key] for ref, key in self.keys[at].items()}

        def agree(given: Mapping[Ref, Instances]) -> bool:
            call = self.together[at]
            assert call is not None
            stacked = call(lambda ref: given[ref].together(lane.units, self.in_dims[ref]))
            for unit, one in zip(lane.units, self.each[at], strict=True):
                apart = one(lambda ref, unit=unit: given[ref].of(unit))  # type: ignore[misc]
                for k, placed in enumerate(self.instr.outs):
                    if placed is None:
                        continue
                    mine = Instances(lane.units, stacked=stacked[k], dim=self.dims[k]).of(unit)
                    if not _laid_alike(mine, apart[k]) or not same_bits(mine, apart[k]):
                        return False
            return True

        if not agree(values):
            return False
        poor = [r for r, v in values.items() if any(says_little(v.of(u)) for u in lane.units)]
        if not poor:
            return True
        dice = torch.Generator().manual_seed(0)
        drawn = dict(values)
        for ref in poor:
            old = values[ref]
            if old.once is not None:
                drawn[ref] = Instances(once=random_like(old.once, dice))
                continue
            drawn[ref] = Instances(lane.units, each={u: random_like(old.of(u), dice) for u in lane.units})
            if old.stacked is not None and old.units == lane.units:  # as it lies in memory: the trial is of that, too
                as_it_lies = torch.empty_strided(
                    old.stacked.shape, old.stacked.stride(), dtype=old.stacked.dtype, device=old.stacked.device
                )
                drawn[ref].stacked = as_it_lies.copy_(stack_units(list(drawn[ref].each.values()), old.dim))
                drawn[ref].dim = old.dim
        return agree(drawn)


def _adds_alike(partner: Tensor, term: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether a product that is added in one pass gives the bits of one that is added afterwards."""
    if says_little(a) or says_little(b) or says_little(partner):
        dice = torch.Generator().manual_seed(0)
        a, b, partner = (random_like(x, dice) for x in (a, b, partner))
        term = torch.mm(a, b)
    return same_bits(torch.addmm(partner, a, b), partner + term)


def _unit_dim(placed: Placed | None) -> int:
    cut = placed.nd[UNIT] if placed is not None else B
    return cut.dim if isinstance(cut, Split) else 0


def _laid_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie alike in memory, but for dims of one element."""
    return a.shape == b.shape and all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True))
