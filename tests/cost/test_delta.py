"""Delta simulation is full simulation, to the last tick: random edits of random loads, alone and in chains.

A few thousand edits run with every test run; all 10,000:  python -m pytest -m slow tests/cost/test_delta.py
"""

from __future__ import annotations

import random

import pytest

from laminar.cost.sim import delta
from laminar.cost.sim.delta import again
from laminar.cost.sim.simulate import simulate
from laminar.cost.sim.tasks import FULL_SPEED, Drag, Lane, Load, Task
from laminar.errors import SimulationError
from tests.support.sim_reference import random_load, random_task, step_load

EDITS = ("work", "work", "zero", "insert", "remove", "links", "lane", "after", "order", "segment")


def renumbered(tasks: list[Task], order: list[int]) -> list[Task]:
    """Old tasks in a new order (old indices; those left out are gone), conditions following along."""
    place = {i: k for k, i in enumerate(order)}
    return [tasks[i]._replace(after=tuple(place[p] for p in tasks[i].after if p in place)) for i in order]


def edited(rng: random.Random, load: Load, count: list[int]) -> Load:
    """One random edit of a random kind at a uniformly random task."""
    tasks, kind = list(load.tasks), rng.choice(EDITS)
    at = rng.randrange(len(tasks))
    task = tasks[at]
    count[0] += 1
    if kind == "work":
        tasks[at] = task._replace(work=rng.randrange(1, 120))
    elif kind == "zero":
        tasks[at] = task._replace(work=0)
    elif kind == "links":
        tasks[at] = task._replace(links=tuple(rng.sample(range(load.links), rng.randrange(load.links + 1))))
    elif kind == "after":
        near = range(max(0, at - 12), at)
        tasks[at] = task._replace(after=tuple(rng.sample(near, min(len(near), rng.randrange(4)))))
    elif kind == "lane":  # to another rank, as a stage boundary does
        other = random_task(rng, task.name, load.lanes, load.links, at, 60)
        tasks[at] = task._replace(lanes=other.lanes, links=other.links)
    elif kind == "segment":
        for i in range(at, min(len(tasks), at + rng.randrange(1, 12))):
            tasks[i] = tasks[i]._replace(work=rng.randrange(80))
    elif kind == "insert":
        new = random_task(rng, f"new{count[0]}", load.lanes, load.links, at, 60)
        tasks = [t._replace(after=tuple(p + (p >= at) for p in t.after)) for t in tasks]
        tasks.insert(at, new)
        if at + 1 < len(tasks) and rng.random() < 0.5:
            tasks[at + 1] = tasks[at + 1]._replace(after=(*tasks[at + 1].after, at))
    elif kind == "remove" and len(tasks) > 2:
        tasks = renumbered(tasks, [i for i in range(len(tasks)) if i != at])
    elif kind == "order":  # a task moves to an earlier place that its conditions allow
        lowest = max((p + 1 for p in task.after), default=0)
        to = rng.randrange(lowest, at + 1)
        rest = [i for i in range(len(tasks)) if i != at]
        tasks = renumbered(tasks, [*rest[:to], at, *rest[to:]])
    return Load(load.lanes, tuple(tasks), load.links, load.drag)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess at every opportunity: loads of tests are small, and would mostly be simulated instead."""
    for name, value in {"TICKS": 3, "FEW": 0, "MORE": 0, "LITTLE": 5}.items():
        monkeypatch.setattr(delta, name, value)


def prove(seed: int, edits: int, most: int = 300) -> dict[str, int]:
    """So many edits of random loads and of steps, each compared with a full run; what was reused."""
    rng = random.Random(seed)
    total, count = {"simulated": 0, "copied": 0, "full": 0}, [0]
    done = 0
    while done < edits:
        if rng.random() < 0.3:
            load = step_load(rng, rng.randrange(2, 13), rng.randrange(1, 3), rng.random() < 0.5)
        else:
            load = random_load(rng, rng.randrange(5, most))
        before = simulate(load)
        for _ in range(20):
            new = load
            for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
                new = edited(rng, new, count)
            fast, slow = again(before, new), simulate(new)
            assert fast.same(slow), f"seed {seed}, edit {done}"
            assert fast.how["simulated"] + fast.how["copied"] == len(new.tasks)
            for key in total:
                total[key] += int(fast.how[key])
            if rng.random() < 0.5:  # a chain: go on from the result, or try another edit of the same load
                load, before = new, fast
            done += 1
    return total


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(4))
def test_delta_equals_full_on_random_edits(seed: int) -> None:
    """Starts, ends and reasons, with shared links, drag, transfers across ranks and tasks of no work."""
    total = prove(seed, 500)
    assert total["copied"] > total["simulated"] / 2, "little was reused"
    assert total["full"] < 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("most", [300, 1500])
def test_delta_equals_full_on_ten_thousand_random_edits(most: int, request: pytest.FixtureRequest) -> None:
    """The whole proof, once guessing at every opportunity, once as in earnest with loads that are large enough."""
    if most == 300:
        request.getfixturevalue("eager")
    total = prove(12345, 10_000, most)
    assert total["full"] < 200


def test_the_same_load_again_is_copied_whole() -> None:
    """Nothing changed, nothing is simulated."""
    load = step_load(random.Random(0), 8, 2)
    before = simulate(load)
    same = again(before, Load(load.lanes, tuple(Task(*t) for t in load.tasks), load.links, load.drag))
    assert same.same(before) and same.how == {"simulated": 0, "copied": len(load.tasks), "full": False}


def test_an_edit_costs_as_much_as_it_disturbs() -> None:
    """One op of a long step takes longer: what follows merely moves, and few tasks are simulated."""
    load = step_load(random.Random(1), 120, 1)
    before = simulate(load)
    for at in (5, len(load.tasks) // 2, len(load.tasks) - 30):
        at = next(i for i in range(at, len(load.tasks)) if load.tasks[i].lanes == (0,))
        tasks = list(load.tasks)
        tasks[at] = tasks[at]._replace(work=tasks[at].work + 100)
        new = Load(load.lanes, tuple(tasks), load.links, load.drag)
        fast = again(before, new)
        assert fast.same(simulate(new))
        assert fast.how["simulated"] < len(tasks) / 4, at


def test_edits_far_apart_leave_the_stretch_between_them_alone() -> None:
    """One in the first layer and one in the last: the layers between are copied."""
    load = step_load(random.Random(2), 120, 1)
    before = simulate(load)
    tasks = list(load.tasks)
    for at in (12, len(tasks) - 12):
        tasks[at] = tasks[at]._replace(work=tasks[at].work + 50)
    new = Load(load.lanes, tuple(tasks), load.links, load.drag)
    fast = again(before, new)
    assert fast.same(simulate(new)) and fast.how["simulated"] < len(tasks) / 3


def test_a_stage_boundary_moves_a_layer_to_another_rank() -> None:
    """The ops of one layer change lanes, and so does the hand-over: removed on one rank, new on the other."""
    rng = random.Random(3)
    load = step_load(rng, 12, 2)
    before = simulate(load)
    half = len(load.lanes) // 2
    tasks = [
        t._replace(lanes=tuple(lane + half for lane in t.lanes), links=tuple(1 for _ in t.links))
        if ".5" in t.name and max(t.lanes) < half
        else t
        for t in load.tasks
    ]
    new = Load(load.lanes, tuple(tasks), load.links, load.drag)
    fast = again(before, new)
    assert new.tasks != load.tasks and fast.same(simulate(new)) and not fast.how["full"]


def told(old: Load, new: Load) -> tuple[list[int], list[int]]:
    """What someone who made the edit would say: new or changed tasks of `new`, and those of `old` that are gone."""
    was, now = ({t.name: i for i, t in enumerate(load.tasks)} for load in (old, new))
    names = [{i: t.name for i, t in enumerate(load.tasks)} for load in (old, new)]
    gone = [i for name, i in was.items() if name not in now]
    last, changed = -1, []
    for j, task in enumerate(new.tasks):
        i = was.get(task.name, -1)
        if 0 <= i < last:  # moved: gone from its place, and new in another
            gone.append(i)
            changed.append(j)
            continue
        last = max(last, i)
        then = old.tasks[i]
        same = i >= 0 and (then.lanes, then.work, then.links) == (task.lanes, task.work, task.links)
        if not same or [names[0][p] for p in then.after] != [names[1][p] for p in task.after]:
            changed.append(j)
    return changed, gone


@pytest.mark.usefixtures("eager")
def test_being_told_what_changed_gives_the_same_as_finding_it() -> None:
    """A search knows its edits; saying them saves the comparison, and nothing else."""
    rng, count, full = random.Random(6), [0], 0
    for k in range(40):
        load = random_load(rng, rng.randrange(5, 200)) if k % 2 else step_load(rng, rng.randrange(2, 9), 1)
        before = simulate(load)
        for _ in range(10):
            new = load
            for _ in range(rng.choice([1, 1, 3])):
                new = edited(rng, new, count)
            fast = again(before, new, *told(load, new))
            assert fast.same(simulate(new))
            full += fast.how["full"]
            if rng.random() < 0.5:
                load, before = new, fast
    assert full < 8


def test_what_is_told_and_cannot_be_is_run_in_full() -> None:
    """More tasks have gone than were named: nothing is guessed about which."""
    load = step_load(random.Random(7), 4, 1)
    new = Load(load.lanes, load.tasks[:-2], load.links, load.drag)
    fast = again(simulate(load), new, [], [len(load.tasks) - 1])
    assert fast.how["full"] and fast.same(simulate(new))


def test_a_long_chain_of_edits_stays_exact_and_small() -> None:
    """A search walks through hundreds of loads; slots of removed tasks do not pile up for ever."""
    rng, count = random.Random(4), [0]
    load = step_load(rng, 6, 2)
    times = simulate(load)
    for _ in range(300):
        load = edited(rng, load, count)
        times = again(times, load)
        assert times.same(simulate(load))
        assert len(times.net.work) <= 3 * len(load.tasks) + 70


@pytest.mark.parametrize("change", ["lanes", "links", "drag"])
def test_another_machine_is_run_in_full_and_counted(change: str) -> None:
    """Where nothing can be reused the answer is still right, and says how it was found."""
    load = step_load(random.Random(5), 4, 1)
    other = {
        "lanes": Load((*load.lanes, Lane(7, "host")), load.tasks, load.links, load.drag),
        "links": Load(load.lanes, load.tasks, load.links + 1, load.drag),
        "drag": Load(load.lanes, load.tasks, load.links, Drag(FULL_SPEED // 7, FULL_SPEED // 5)),
    }[change]
    fast = again(simulate(load), other)
    assert fast.how["full"] and fast.same(simulate(other))


def test_an_edit_that_makes_no_sense_is_refused_as_by_a_full_run() -> None:
    """A ring of conditions, a name given twice, a lane that isn't there: the same error, by name."""
    lanes = (Lane(0, "compute"), Lane(1, "compute"))
    load = Load(lanes, (Task("a", (0,), 3), Task("b", (1,), 3, (0,)), Task("c", (0,), 3, (1,)), Task("d", (1,), 1)))
    before = simulate(load)
    for tasks in (
        (load.tasks[0], load.tasks[1]._replace(after=(2,)), *load.tasks[2:]),
        (*load.tasks[:3], load.tasks[3]._replace(name="a")),
        (*load.tasks[:3], load.tasks[3]._replace(lanes=(5,))),
        (*load.tasks[:3], load.tasks[3]._replace(after=(9,))),
        (*load.tasks, Task("e", (0,), -1)),
    ):
        new = Load(lanes, tasks)
        with pytest.raises(SimulationError) as full:
            simulate(new)
        with pytest.raises(SimulationError) as edit:
            again(before, new)
        assert str(full.value) == str(edit.value)


def test_steps_of_hours_and_speeds_of_almost_nothing_stay_exact() -> None:
    """Beyond 64 bits numpy would wrap around; such loads are run by Python's integers."""
    lanes = (Lane(0, "compute"), Lane(0, "communication:dp"))
    for work, drag in ((10**9, Drag(1, 1)), (10**13, Drag(FULL_SPEED // 2, FULL_SPEED // 2)), (10**6, Drag(1, 1))):
        tasks = [Task(f"t{i}", (i % 2,), work + i, (i - 2,) if i > 1 else ()) for i in range(80)]
        load = Load(lanes, tuple(tasks), 0, drag)
        before = simulate(load)
        tasks[40] = tasks[40]._replace(work=work * 3)
        new = Load(lanes, tuple(tasks), 0, drag)
        assert again(before, new).same(simulate(new))
