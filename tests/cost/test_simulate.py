"""The simulator against answers worked out by hand, and against a slow one that walks tick by tick."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.cost.sim.simulate import simulate, timeline
from laminar.cost.sim.tasks import FULL_SPEED, Drag, Lane, Load, Task
from laminar.errors import SimulationError
from tests.support.sim_reference import random_load, slow_ticks

ONE = (Lane(0, "compute"), Lane(0, "communication:dp"))
TWO = (*ONE, Lane(1, "compute"), Lane(1, "communication:dp"))


def when(load: Load) -> dict[str, tuple[int, int]]:
    """Name -> (start, end)."""
    times = simulate(load)
    return {t.name: (int(s), int(e)) for t, s, e in zip(load.tasks, times.start, times.end, strict=True)}


def why(load: Load) -> dict[str, str]:
    """Name -> name of the task that allowed it."""
    return {
        t.name: load.tasks[b].name if b >= 0 else "" for t, b in zip(load.tasks, simulate(load).because, strict=True)
    }


def test_a_chain_adds_up() -> None:
    """Nothing overlaps in one lane, whatever the tasks wait for."""
    load = Load(ONE, (Task("a", (0,), 5), Task("b", (0,), 7), Task("c", (0,), 1, (0, 1))))
    assert when(load) == {"a": (0, 5), "b": (5, 12), "c": (12, 13)}
    assert why(load) == {"a": "", "b": "a", "c": "b"}


def test_a_fork_runs_side_by_side_and_the_join_waits_for_the_longer_arm() -> None:
    """Two ranks start when the first has ended; the join starts with the last of them."""
    lanes = (Lane(0, "compute"), Lane(1, "compute"))
    tasks = (Task("a", (0,), 4), Task("b", (0,), 3, (0,)), Task("c", (1,), 9, (0,)), Task("d", (0,), 2, (1, 2)))
    load = Load(lanes, tasks)
    assert when(load) == {"a": (0, 4), "b": (4, 7), "c": (4, 13), "d": (13, 15)}
    assert why(load)["d"] == "c"


def test_a_collective_that_overlaps_costs_only_what_sticks_out() -> None:
    """Reductions of 10 behind compute of 6 each: the second waits for the first, the end for the second."""
    tasks = (
        Task("back1", (0,), 6),
        Task("reduce1", (1,), 10, (0,)),
        Task("back2", (0,), 6),
        Task("reduce2", (1,), 10, (2,)),
        Task("optimizer", (0,), 3, (1, 3)),
    )
    load = Load(ONE, tasks)
    assert when(load) == {
        "back1": (0, 6),
        "reduce1": (6, 16),
        "back2": (6, 12),
        "reduce2": (16, 26),
        "optimizer": (26, 29),
    }
    assert why(load) == {
        "back1": "",
        "reduce1": "back1",
        "back2": "back1",
        "reduce2": "reduce1",
        "optimizer": "reduce2",
    }


def test_a_transfer_of_two_ranks_starts_when_both_are_there() -> None:
    """A collective stands in a lane of each rank and begins with the last."""
    tasks = (Task("fast", (0,), 2), Task("slow", (2,), 11), Task("all_reduce", (1, 3), 5, (0, 1)))
    assert when(Load(TWO, tasks))["all_reduce"] == (11, 16)


def test_two_transfers_on_one_link_share_it() -> None:
    """10 and 4 on one link: both at half speed until the smaller is through at 8, the rest alone."""
    tasks = (Task("a", (1,), 10, (), (0,)), Task("b", (3,), 4, (), (0,)))
    assert when(Load(TWO, tasks, 1)) == {"a": (0, 14), "b": (0, 8)}


def test_the_fullest_link_decides() -> None:
    """Three users on link 0, two on link 1: who uses both gets a third."""
    lanes = tuple(Lane(r, "communication:dp") for r in range(4))
    tasks = (
        Task("a", (0,), 6, (), (0, 1)),
        Task("b", (1,), 6, (), (0,)),
        Task("c", (2,), 6, (), (0,)),
        Task("d", (3,), 6, (), (1,)),
    )
    # a, b, c at 1/3; d at 1/2 until 12, where nobody has ended but d; then all as before until 18
    assert when(Load(lanes, tasks, 2)) == {"a": (0, 18), "b": (0, 18), "c": (0, 18), "d": (0, 12)}


def test_ends_are_rounded_up_to_whole_ticks() -> None:
    """Work 1 at a third of the speed takes 3 ticks; work 1 at 2/3 takes 2, since 1.5 is no tick."""
    assert when(Load(ONE, (Task("a", (0,), 1), Task("b", (1,), 9)), 0, Drag(FULL_SPEED // 3, FULL_SPEED)))["a"] == (
        0,
        3,
    )
    assert when(Load(ONE, (Task("a", (0,), 1), Task("b", (1,), 9)), 0, Drag(FULL_SPEED // 3 * 2, FULL_SPEED)))["a"] == (
        0,
        2,
    )


def test_overlap_drags_both_sides_and_only_while_it_lasts() -> None:
    """Compute 10 and a transfer 4, each at half speed beside the other: the transfer takes 8, compute 4 + 6."""
    load = Load(ONE, (Task("mm", (0,), 10), Task("reduce", (1,), 4)), 0, Drag(FULL_SPEED // 2, FULL_SPEED // 2))
    assert when(load) == {"mm": (0, 14), "reduce": (0, 8)}


def test_drag_stays_on_its_rank_and_spares_the_host() -> None:
    """A transfer on rank 1 slows neither compute on rank 0 nor a host thread on rank 1."""
    lanes = (*TWO, Lane(1, "host"))
    tasks = (Task("mm", (0,), 10), Task("move", (3,), 10), Task("launch", (4,), 10), Task("mm1", (2,), 10))
    got = when(Load(lanes, tasks, 0, Drag(FULL_SPEED // 2, FULL_SPEED)))
    assert got == {"mm": (0, 10), "move": (0, 10), "launch": (0, 10), "mm1": (0, 15)}


def test_tasks_of_no_work_end_when_they_start_and_disturb_nobody() -> None:
    """A meeting point passes on the same tick, through any number of them, and is no overlap."""
    tasks = (
        Task("a", (0,), 5),
        Task("meet", (0, 1), 0, (0,)),
        Task("again", (1,), 0, (1,)),
        Task("b", (0,), 5, (2,)),
        Task("ping", (1,), 0),
    )
    load = Load(ONE, tasks, 0, Drag(FULL_SPEED // 2, FULL_SPEED // 2))
    assert when(load) == {"a": (0, 5), "meet": (5, 5), "again": (5, 5), "b": (5, 10), "ping": (5, 5)}


def test_it_agrees_with_a_simulator_that_walks_tick_by_tick() -> None:
    """The event loop touches only what changes; the slow one asks everybody at every tick."""
    rng = random.Random(0)
    for _ in range(60):
        load = random_load(rng, rng.randrange(1, 26), work=12)
        times = simulate(load)
        assert (times.start.tolist(), times.end.tolist()) == slow_ticks(load)


def test_every_start_is_the_end_of_its_reason() -> None:
    """`because` names a condition, and no condition ended later."""
    rng = random.Random(1)
    for _ in range(40):
        load = random_load(rng, 60)
        times = simulate(load)
        for i, task in enumerate(load.tasks):
            before = [max((k for k in range(i) if lane in load.tasks[k].lanes), default=-1) for lane in task.lanes]
            conditions = [*task.after, *(b for b in before if b >= 0)]
            if times.because[i] < 0:
                assert times.start[i] == 0 and not conditions
            else:
                assert times.because[i] in conditions
                assert times.start[i] == times.end[times.because[i]] == max(times.end[c] for c in conditions)


def test_the_clock_may_start_anywhere() -> None:
    """With an idle task in front of every lane all times move by its length and nothing else changes."""
    rng = random.Random(2)
    for _ in range(20):
        load = random_load(rng, 40)
        # in front of every lane, not beside: host lanes have no drag, so the pause of each lane waits there
        lanes = (*load.lanes, Lane(99, "host"))
        pause = [Task("pause", (len(lanes) - 1,), 1000)]
        pause += [Task(f"gate{k}", (k,), 0, (0,)) for k in range(len(load.lanes))]
        moved = [t._replace(after=tuple(p + len(pause) for p in t.after)) for t in load.tasks]
        later, plain = simulate(Load(lanes, (*pause, *moved), load.links, load.drag)), simulate(load)
        assert (later.start[len(pause) :] - 1000).tolist() == plain.start.tolist()
        assert (later.end[len(pause) :] - 1000).tolist() == plain.end.tolist()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_more_work_never_makes_one_lane_faster(works: list[int], data: Any) -> None:
    """On one resource the step is the sum of its parts, so that it can only grow."""
    at, more = data.draw(st.integers(0, len(works) - 1)), data.draw(st.integers(0, 50))
    new = [w + more * (i == at) for i, w in enumerate(works)]
    old_step, new_step = (
        simulate(Load(ONE, tuple(Task(f"t{i}", (0,), w) for i, w in enumerate(each)))).step for each in (works, new)
    )
    assert new_step == old_step + more == sum(new)


def test_with_several_lanes_more_work_can_make_the_step_shorter() -> None:
    """Graham's anomaly: the longer op keeps a transfer from starting while another one needs the link.

    `mm` alone hands its result over at 2, so that `late` shares the link with `early`, which the long `tail`
    waits for. One tick later it would still share; 8 ticks later `early` has had the link for itself.
    """

    def step(work: int) -> int:
        lanes = (Lane(0, "compute"), Lane(0, "communication:a"), Lane(1, "compute"), Lane(1, "communication:b"))
        tasks = (
            Task("mm", (0,), work),
            Task("late", (1,), 10, (0,), (0,)),
            Task("early", (3,), 10, (), (0,)),
            Task("tail", (2,), 30, (2,)),
        )
        return simulate(Load(lanes, tasks, 1)).step

    assert step(2) == 18 + 30
    assert step(10) == 10 + 30


def test_with_several_lanes_one_condition_less_can_make_the_step_longer() -> None:
    """The same anomaly from the other side: the condition that kept `late` off the link was useful."""

    def step(after: tuple[int, ...]) -> int:
        lanes = (Lane(0, "communication:a"), Lane(1, "communication:b"), Lane(1, "compute"))
        tasks = (
            Task("early", (1,), 10, (), (0,)),
            Task("late", (0,), 10, after, (0,)),
            Task("tail", (2,), 30, (0,)),
        )
        return simulate(Load(lanes, tasks, 1)).step

    assert step((0,)) == 40
    assert step(()) == 50


def test_tasks_that_wait_for_each_other_are_named() -> None:
    """A ring can come from lane order alone: b stands behind a, and a waits for b."""
    load = Load(ONE, (Task("x", (1,), 1), Task("a", (0,), 1, (2,)), Task("b", (0,), 1)))
    with pytest.raises(SimulationError, match="2 tasks can never start") as info:
        simulate(load)
    assert "a <- b <- a" in str(info.value)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("bad", (7,), 1), "'bad' names lanes"),
        (Task("bad", (), 1), "'bad' names lanes"),
        (Task("bad", (0,), -1), "'bad' has work -1"),
        (Task("bad", (0,), 1, (9,)), "'bad' waits for"),
        (Task("bad", (0,), 1, (), (1,)), "'bad' uses links"),
        (Task("good", (0,), 1), "two tasks are called 'good'"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_by_the_name_of_its_task(task: Task, said: str) -> None:
    """Loads are made by code; its mistakes should be found where they were made."""
    with pytest.raises(SimulationError, match=said):
        simulate(Load(ONE, (Task("good", (0,), 1), task), 1))


def test_a_speed_of_nothing_is_refused() -> None:
    """Drag leaves some speed, or the step never ends."""
    with pytest.raises(ValueError, match=r"Drag\.compute"):
        Drag(0, FULL_SPEED)


def test_an_empty_load_takes_no_time() -> None:
    """Nothing to do is no error."""
    assert simulate(Load((), ())).step == 0


def test_times_become_a_timeline_with_one_span_per_rank_of_a_transfer() -> None:
    """Reasons turn from tasks into spans, and labels fill what a task does not know."""
    tasks = (Task("mm", (0,), 4), Task("all_reduce", (1, 3), 5, (0,), (0,)), Task("add", (2,), 2, (1,)))
    load = Load(TWO, tasks, 1)
    labels: list[dict[str, Any]] = [{"family": "matmul"}, {"cause": "gradient", "bytes": 64}, {"family": "pointwise"}]
    line = timeline(load, simulate(load), labels, stands_for={0: (0, 2), 1: (1, 3)}, meta={"model": "tiny"})
    assert [(s.name, s.rank, s.lane, s.kind, s.start, s.end, s.because) for s in line.spans] == [
        ("mm", 0, "compute", "compute", 0, 4, -1),
        ("all_reduce", 0, "communication:dp", "communication", 4, 9, 0),
        ("all_reduce", 1, "communication:dp", "communication", 4, 9, 0),
        ("add", 1, "compute", "compute", 9, 11, 1),
    ]
    assert line.ranks == 4 and line.step_ns == 11 and line.meta == {"model": "tiny"}
    assert line.spans[1].cause == "gradient" and line.spans[3].family == "pointwise"
