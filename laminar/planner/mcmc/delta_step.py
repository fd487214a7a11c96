"""A simulated step with a few placements changed: its load is edited where they differ, and simulated by delta.

Lowering a plan and pricing its program takes a hundred times as long as simulating it. To find out whether a small
change is worth that, the load of a plan that was simulated is edited as the change's own costs say:

    an op           takes as much longer or shorter as its price differs, in the kernel that it is part of
    an exchange     that is there already (alone, or in a bucket) takes as much longer or shorter as the boxing of its
                    value differs
    a new exchange  starts when its value is made, on the lane of its axis, and is waited for by its first reader; that
                    of a gradient by the optimizer

Then `cost.delta` says when everything runs, to the last tick. What the edit leaves out is what the compiler would do
with the changed program: other kernels, other buckets, another order. So the answer decides what is lowered and
simulated in full, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from laminar.cost.schedule import Schedule
from laminar.cost.sim.delta import again
from laminar.cost.sim.simulate import Times, simulate
from laminar.cost.sim.tasks import COMPUTE, TRANSFER, Load, Task
from laminar.ir.program import Program
from laminar.ir.serial.codec import Ref
from laminar.planner.mcmc.additive_cost import Additive

BEFORE_UPDATE = ("norm", "optimizer")
"""Tasks behind which the update begins; the second is what grows with the state."""


@dataclass(frozen=True)
class SimulatedStep:
    """A plan's simulated step, and, where it is one load, what it was simulated from."""

    seconds: float
    peak_bytes: Callable[[], int] = field(repr=False)
    program: Program | None = field(default=None, repr=False)
    groups: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    times: Times | None = field(default=None, repr=False)

    @property
    def editable(self) -> bool:
        """Whether all ranks do the same, in one load."""
        return self.schedule is not None and len(self.schedule.stands_for) == 1


class Edited:
    """The load of one step, to be edited again and again."""

    def __init__(
        self,
        step: SimulatedStep,
        cost: Additive,
        state: Sequence[int],
        copies: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`state` is that of the step's plan; `cost` stands anywhere. `copies` are the names in the step's graph of
        what stands in the graph of `cost` but once."""
        assert step.program is not None and step.schedule is not None and step.times is not None
        self.times, self.load = step.times, step.times.load
        self.state = list(state)
        here = list(cost.at)
        cost.go(state)
        self.made, self.wants = list(cost.made), list(cost.wants)
        self.value_s = [cost.value_s(v) for v in range(len(cost.refs))]
        cost.go(here)
        self.copies = copies or {}
        index = {task.name: i for i, task in enumerate(self.load.tasks)}
        self.compute = self._computes(step, index)
        self.moved = self._transfers(step.program, index)
        self.tasks = [[self.compute.get(name, -1) for name in self.named(name)] for name in cost.names]
        """By site, where the results of its copies are made."""
        reading: list[set[int]] = [set() for _ in cost.refs]
        for site, reads in enumerate(cost.reads):
            for v, _ in reads:
                reading[v].update(t for t in self.tasks[site] if t >= 0)
        self.reading = [sorted(tasks) for tasks in reading]
        self.update = [index[name] for name in BEFORE_UPDATE if name in index]
        self.lanes: dict[str, Task] = {}
        """By lane, a task of it: what a new exchange looks like."""
        for task in self.load.tasks:
            if any(self.load.lanes[lane].role == TRANSFER for lane in task.lanes):
                self.lanes.setdefault(self.load.lanes[task.lanes[0]].kind.partition(":")[2], task)
        self.own = next(t.lanes for t in self.load.tasks if self.load.lanes[t.lanes[0]].role == COMPUTE)

    def named(self, name: str) -> Sequence[str]:
        """The copies of what is called so."""
        return self.copies.get(name, (name,))

    def _computes(self, step: SimulatedStep, index: dict[str, int]) -> dict[str, int]:
        """By op, the task in which its result is made; what was written out counts as the op it was."""
        assert step.program is not None
        instrs = step.program.instrs
        found: dict[str, int] = {}
        for group in step.groups if step.groups is not None else ((k,) for k in range(len(instrs))):
            task = next((index[instrs[k].name] for k in reversed(group) if instrs[k].name in index), -1)
            if task >= 0:
                for k in group:
                    name = instrs[k].name
                    if not name.endswith(".again"):
                        found[name] = found[name.partition(".")[0]] = task
        return found

    def _transfers(self, program: Program, index: dict[str, int]) -> dict[Ref, list[int]]:
        """By value, the exchanges that move it, chains of them followed."""
        behind: dict[Ref, Ref] = {}
        found: dict[Ref, list[int]] = {}
        for instr in program.instrs:
            if instr.op.startswith("box."):
                for k, ref in enumerate(instr.refs):
                    first = behind[Ref(instr.name, k)] = behind.get(ref, ref)
                    if instr.name in index:
                        found.setdefault(first, []).append(index[instr.name])
        return found

    def seconds(self, cost: Additive) -> float:
        """Of the step, with the placements of the state that `cost` stands in."""
        load, changed = self.edit(cost)
        if load is self.load:
            return self.times.step / 1e9
        return (simulate(load) if changed is None else again(self.times, load, changed)).step / 1e9

    def edit(self, cost: Additive) -> tuple[Load, list[int] | None]:
        """The edited load, and which of its tasks are new or other than before."""
        more: dict[int, float] = {}
        """By task, what is added to its work, in seconds."""
        new: list[tuple[int, Task]] = []
        """Tasks to be put in, and before which; their `after` in old numbers."""
        for site, (before, now) in enumerate(zip(self.state, cost.at, strict=True)):
            if before != now:
                rows = cost.tables[site].options
                for task in self.tasks[site]:
                    task = task if task >= 0 else self.update[-1] if self.update else 0
                    more[task] = more.get(task, 0.0) + rows[now].seconds - rows[before].seconds
        for v, made in enumerate(cost.made):
            if made != self.made[v] or cost.wants[v] != self.wants[v]:
                delta_s = cost.value_s(v) - self.value_s[v]
                for name in self.named(cost.refs[v].name) if delta_s else ():
                    self._exchange(cost, v, name, delta_s, more, new)
        return self._written(more, new)

    def _exchange(
        self, cost: Additive, v: int, name: str, delta_s: float, more: dict[int, float], new: list[tuple[int, Task]]
    ) -> None:
        """The boxing of a copy of a value costs more or less than it did."""
        there = self.moved.get(Ref(name, cost.refs[v].index), [])
        if there:
            for task in there:
                more[task] = more.get(task, 0.0) + delta_s / len(there)
            return
        if delta_s <= 0:
            return
        maker = self.compute.get(name, -1)
        if cost.leaves[v]:
            at, wait = maker + 1, self.update[0] if self.update else len(self.load.tasks)
        else:
            next_ = bisect_right(self.reading[v], maker)
            at = wait = self.reading[v][next_] if next_ < len(self.reading[v]) else maker + 1
        axes = [a for a, (x, y) in enumerate(zip(cost.nds[cost.made[v]], self._other(cost, v), strict=True)) if x != y]
        like = self.lanes.get(cost.mesh.names[axes[0]]) if axes else None
        like = like or next(iter(self.lanes.values()), None)
        after = (maker,) if maker >= 0 else ()
        if like is None:  # nothing is exchanged so far: as good as more work
            new.append((at, Task(f"new.{v}.{name}", self.own, round(1e9 * delta_s), after)))
            return
        new.append((at, Task(f"new.{v}.{name}", like.lanes, round(1e9 * delta_s), after, like.links)))
        new.append((wait, Task(f"new.{v}.{name}/finish", self.own, 0, ())))

    def _other(self, cost: Additive, v: int) -> Sequence[object]:
        """A placement that a value is read in and not made in."""
        return cost.nds[next((nd for nd in cost.wants[v] if nd != cost.made[v]), cost.made[v])]

    def _written(self, more: dict[int, float], new: list[tuple[int, Task]]) -> tuple[Load, list[int] | None]:
        old = self.load.tasks
        changed: list[int] = []
        works: dict[int, Task] = {}
        for i, seconds in more.items():
            work = max(0, old[i].work + round(1e9 * seconds))
            if work != old[i].work:
                works[i] = old[i]._replace(work=work)
        if not works and not new:
            return self.load, []
        if not new:
            tasks = list(old)
            for i, task in works.items():
                tasks[i] = task
            return Load(self.load.lanes, tuple(tasks), self.load.links, self.load.drag), list(works)
        new.sort(key=lambda item: item[0])
        out = list(old[: new[0][0]])
        for i in works.keys() & range(len(out)):
            out[i] = works[i]
            changed.append(i)
        now = list(range(len(out)))
        """By old task, its place in the new list."""
        placed: dict[str, int] = {}
        k = 0
        for i in range(len(out), len(old) + 1):
            while k < len(new) and new[k][0] <= i:
                _, task = new[k]
                k += 1
                after = tuple(now[a] for a in task.after if a < len(now))
                if task.name.endswith("/finish"):
                    after = (placed[task.name.removesuffix("/finish")],)
                placed[task.name] = len(out)
                changed.append(len(out))
                out.append(task._replace(after=after))
            if i == len(old):
                break
            task = old[i]
            now.append(len(out))
            if i in works:
                task = works[i]
                changed.append(len(out))
            if task.after:
                task = Task(task.name, task.lanes, task.work, tuple([now[a] for a in task.after]), task.links)
            out.append(task)
        return Load(self.load.lanes, tuple(out), self.load.links, self.load.drag), changed
