"""From programs to loads: classes of ranks, lanes, and times that can be worked out by hand.

Prices here are made up, so that every expected time is a sum a reader can check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from laminar.cost.schedule import ExchangePrice, KernelGroups, Price, Prices, rank_classes, schedule
from laminar.cost.sim.simulate import simulate, timeline
from laminar.cost.sim.tasks import FULL_SPEED, Drag
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.program import Boxing, Instr, MoveCause, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.sbp import PSUM, B, S
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec

MS = 1_000_000
FREELY = Drag()
X = TensorSpec((8, 4), "f32")


class Listed(Prices):
    """Milliseconds by name: a number for an op, three for a collective."""

    def __init__(self, ms: dict[str, Any], drag: Drag = FREELY) -> None:
        self.ms, self.drag = ms, drag

    def _price(self, name: str) -> Price | ExchangePrice:
        found = self.ms.get(name, 1.0)
        if isinstance(found, tuple):
            return ExchangePrice(*(t * 1e-3 for t in found), "measured", 0.0, "ring")
        return Price(found * 1e-3, "measured", 0.0, "cheap")

    def lines(self, program: Program, rank: int) -> Sequence[Price | ExchangePrice]:
        return [self._price(i.name) for i in program.instrs]

    def kernels(self, program: Program, groups: KernelGroups, rank: int) -> Sequence[Price | ExchangePrice]:
        return [self._price(program.instrs[g[-1]].name) for g in groups]


def op(name: str, *refs: str, spec: TensorSpec = X, nd: tuple[Any, ...] = (S(0),)) -> Instr:
    read = tuple(Ref(r) for r in refs)
    placed = Placed(spec, nd)
    return Instr(name, "aten.relu", read, read, (placed,) * len(read), (placed,))


def reduce(name: str, ref: str, axes: tuple[int, ...] = (0,), dims: int = 1) -> Instr:
    nd, done = (PSUM,) * dims, tuple(B if a in axes else PSUM for a in range(dims))
    read, over = (Ref(ref),), Boxing(axes, ((0, 1),), ((0, 1),))
    return Instr(
        name, "box.all_reduce", read, read, (Placed(X, nd),), (Placed(X, done),), cause=MoveCause("x"), boxing=over
    )


def program(*instrs: Instr, mesh: Mesh | None = None, out: str = "") -> Program:
    mesh = mesh or Mesh({"dp": 2})
    placed = Placed(X, (S(0),) * 1 + (B,) * (len(mesh.sizes) - 1))
    given = ProgramInput("x", "batch", placed)
    last = ProgramOutput("y", "loss", Ref(out or instrs[-1].name), placed)
    return Program(mesh, (given,), (), tuple(instrs), (last,), "", "")


def ends(p: Program, prices: Prices, **more: Any) -> dict[str, int]:
    made = schedule(p, prices, **more)
    times = simulate(made.load)
    return {t.name: int(e) for t, e in zip(made.load.tasks, times.end, strict=True)}


def test_a_chain_takes_the_sum_of_its_parts() -> None:
    """Nothing to overlap, nothing to wait for."""
    p = program(op("a", "x"), op("b", "a"), op("c", "b"))
    assert ends(p, Listed({"a": 3, "b": 2, "c": 4})) == {"a": 3 * MS, "b": 5 * MS, "c": 9 * MS}


def test_a_transfer_runs_beside_compute_and_is_awaited_by_its_first_reader() -> None:
    """The runtime starts a collective where it stands and waits before the first reader."""
    p = program(op("a", "x"), reduce("r", "a"), op("b", "a"), op("c", "r", "b"))
    found = ends(p, Listed({"a": 2, "r": (1, 5, 1), "b": 3, "c": 1}))
    assert found["r/start"] == 3 * MS and found["b"] == 6 * MS
    assert found["r"] == 8 * MS and found["r/finish"] == 9 * MS and found["c"] == 10 * MS


def test_overlap_slows_both_sides() -> None:
    """Half speed for both while they overlap: 4 ms of compute and of transfer take 8 together."""
    p = program(op("a", "x"), reduce("r", "a"), op("b", "a"), op("c", "r", "b"))
    found = ends(p, Listed({"a": 2, "r": (0, 4, 0), "b": 4, "c": 1}, Drag(FULL_SPEED // 2, FULL_SPEED // 2)))
    assert found["b"] == found["r"] == 10 * MS and found["c"] == 11 * MS


def test_shared_memory_has_no_transfer() -> None:
    """Copying is done by the rank that needs the result, so nothing is hidden."""
    p = program(op("a", "x"), reduce("r", "a"), op("b", "a"), op("c", "r", "b"))
    found = ends(p, Listed({"a": 2, "r": (1, 0, 3), "b": 4, "c": 1}))
    assert "r" not in found and found["r/finish"] == 10 * MS and found["c"] == 11 * MS


def test_even_ranks_are_one_class() -> None:
    """A step of a thousand ranks that do the same is simulated once."""
    p = program(op("a", "x", spec=TensorSpec((1000, 4), "f32")), mesh=Mesh({"dp": 1000}))
    p = Program(p.mesh, (), (), p.instrs, (), "", "")
    assert [len(c) for c in rank_classes(p)] == [1000]
    assert len(schedule(p, Listed({})).load.tasks) == 1


def test_ranks_with_other_sizes_are_classes_of_their_own_and_wait_for_each_other() -> None:
    """Five rows on two ranks are three and two: the one with less waits at the collective."""

    class Uneven(Listed):
        def lines(self, program: Program, rank: int) -> Sequence[Price | ExchangePrice]:
            slow = Listed({"a": 3, "r": (0, 0, 1)}).lines(program, rank)
            fast = Listed({"a": 2, "r": (0, 0, 1)}).lines(program, rank)
            return slow if rank == 0 else fast

    five = TensorSpec((5, 4), "f32")
    p = program(op("a", "x", spec=five), reduce("r", "a"), op("b", "r"))
    assert [len(c) for c in rank_classes(p)] == [1, 1]
    found = ends(p, Uneven({}))
    assert found["a"] == 3 * MS and found["a@1"] == 2 * MS
    assert found["r/finish"] == found["r/finish@1"] == 4 * MS


def test_groups_that_lie_differently_on_the_machine_are_told_apart() -> None:
    """Three ranks a group on nodes of four: one group lies inside a node, the other does not."""
    mesh = Mesh({"dp": 2, "tp": 3})
    p = program(op("a", "x", nd=(B, B)), reduce("r", "a", axes=(1,), dims=2), mesh=mesh)
    assert len(rank_classes(p)) == 1
    assert len(rank_classes(p, Cluster.preset("2x4xh100"))) == 2


def test_a_fused_group_is_one_task_named_after_its_last_line() -> None:
    """Measured kernels and simulated ones are compared by that name."""
    p = program(op("a", "x"), op("b", "a"), op("c", "b"))
    made = schedule(p, Listed({"b": 5, "c": 1}), groups=[(0, 1), (2,)])
    assert [t.name for t in made.load.tasks] == ["b", "c"]


def test_labels_say_what_each_span_is() -> None:
    """A timeline without families and causes could not be broken down."""
    p = program(op("a", "x"), reduce("r", "a"), op("c", "r"))
    made = schedule(p, Listed({"r": (1, 2, 1)}))
    line = timeline(made.load, simulate(made.load), made.labels(), ranks=2, stands_for=made.stands_for)
    kinds = {s.name: s.kind for s in line.spans}
    assert kinds == {
        "a": "compute",
        "r/start": "communication",
        "r": "communication",
        "r/finish": "communication",
        "c": "compute",
    }
    assert {s.cause for s in line.spans if s.name.startswith("r")} == {"P(sum) to B for x"}
    assert line.stands_for == {0: (0, 1)}


@pytest.mark.parametrize("ms", [0.0, 2.5])
def test_the_update_and_what_follows_it_come_behind_the_program(ms: float) -> None:
    """Parameters that are kept whole and updated in shards are gathered after the update."""

    class Around(Listed):
        def around(self, program: Program, rank: int) -> Any:
            return [("batch", Price(ms * 1e-3, "measured", 0, "host"))], [
                ("optimizer", Price(0.003, "measured", 0, ""))
            ]

    first = program(op("a", "x"))
    found = ends(first, Around({"a": 1, "g": (1, 0, 1)}), then=program(reduce("g", "x")))
    assert found["batch"] == round(ms * MS)
    assert found["optimizer"] == round((ms + 4) * MS) and found["g/finish"] == round((ms + 6) * MS)
