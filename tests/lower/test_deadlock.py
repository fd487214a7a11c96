"""Whether a net finishes: one execution against many random ones, against all of them, and against planted errors."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from laminar.errors import NetError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from laminar.lower.stages.deadlock import check_net, refuse_deadlock
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from tests.support.net_machine import Machine, outcomes, places, random_net, random_pipeline

FAST, SLOW = 2_500, 110_000


def confluent(seed: int, count: int, tries: int = 3) -> tuple[int, int]:
    """Check random nets against random interleavings of two or three steps; how many finish and how many don't.

    Where a net does not finish, all interleavings must also get stuck at the same firings.
    """
    rng = random.Random(seed)
    found = [0, 0]
    for number in range(count):
        net = random_net(rng) if number % 8 else random_pipeline(rng)
        verdict = check_net(net)
        found[verdict.finishes] += 1
        ends: dict[int, set[tuple[int, ...]]] = {}
        for _ in range(tries):
            steps = rng.choice((2, 2, 3))
            machine = Machine(net, steps)
            assert machine.play(rng) == verdict.finishes, f"seed {seed}, net {number}: {verdict}\n{net}"
            ends.setdefault(steps, set()).add(tuple(machine.fired.values()))
            assert all(machine.most[q.name] <= q.registers for q in net.queues)
        assert all(len(different) == 1 for different in ends.values()), f"seed {seed}, net {number}\n{net}"
    return found[1], found[0]


def test_the_check_agrees_with_random_interleavings_of_random_nets() -> None:
    """Yes means every interleaving finishes, no means none does: that is what lets one execution decide."""
    finish, stuck = confluent(1, FAST)
    assert min(finish, stuck) > FAST // 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(11))
def test_the_check_agrees_on_more_than_a_hundred_thousand_nets(part: int) -> None:
    """The same, often enough that a rare corner would show."""
    finish, stuck = confluent(100 + part, SLOW // 11)
    assert min(finish, stuck) > SLOW // 11 // 5


def test_the_check_agrees_with_all_interleavings_of_tiny_nets() -> None:
    """Every reachable state is visited: there is one end, and it is the one that the check predicts."""
    rng = random.Random(2)
    found = [0, 0]
    for _ in range(500):
        net = random_net(rng, actors=4, fires=(1, 1, 2))
        verdict = check_net(net)
        found[verdict.finishes] += 1
        ends = outcomes(net, 2)
        assert len(ends) == 1, str(net)
        assert (ends == {tuple(2 * a.fires for a in net.actors)}) == verdict.finishes, str(net)
    assert min(found) > 100


def ring_of_one() -> Net:
    """A pipeline of four stages in which the first may stash one micro-batch less than 1F1B has under way."""
    return dag_net(chain([Stage(place=s) for s in range(4)], 8), registers={"F0->B0": 3})


def test_a_missing_credit_is_named_with_its_ring_and_the_number_needed() -> None:
    """The error says who waits for what, in words, and what would help."""
    with pytest.raises(NetError) as error:
        refuse_deadlock(ring_of_one())
    text = str(error.value)
    assert "queue F0->B0 needs 4 registers, has 3" in text
    assert "F0.3 needs a register of queue F0->B0: 3 of 3 taken, and B0.0 has not read" in text
    assert "B0.0 stands behind F0.3 in the order of their place" in text
    refuse_deadlock(dag_net(chain([Stage(place=s) for s in range(4)], 8)))


def test_a_ring_over_several_places_is_told_link_by_link() -> None:
    """GPipe with too small a stash at the first stage: the ring goes through every stage and back."""
    net = dag_net(chain([Stage(place=s) for s in range(2)], 4), schedule="gpipe", registers={"F0->B0": 2})
    with pytest.raises(NetError) as error:
        refuse_deadlock(net)
    text = str(error.value)
    for link in (
        "F0.2 needs a register of queue F0->B0: 2 of 2 taken, and B0.0 has not read",
        "B0.0 reads queue B1->B0, which B1.0 has not filled",
        "B1.0 stands behind F1.2 in the order of their place",
        "F1.2 reads queue F0->F1, which F0.2 has not filled",
    ):
        assert link in text
    assert "queue F0->B0 needs 4 registers, has 2" in text


def test_the_ring_is_a_ring_of_true_waits() -> None:
    """Each waits for the next, the last for the first, and none of them is done in any interleaving."""
    rng = random.Random(3)
    seen = 0
    for _ in range(400):
        net = random_net(rng)
        verdict = check_net(net)
        if verdict.finishes:
            continue
        seen += 1
        ring = verdict.ring
        assert all(a.on == b.firing for a, b in itertools.pairwise([*ring, ring[0]]))
        machine = Machine(net, 2)
        machine.play(rng)
        for wait in ring:
            name, k = wait.firing
            assert machine.fired[name] % net.by_name[name].fires == k
            if wait.queue:
                queue = next(q for q in net.queues if q.name == wait.queue)
                ends = (wait.firing[0], wait.on[0]) if wait.why == "full" else (wait.on[0], wait.firing[0])
                assert queue.producer == ends[0] and ends[1] in queue.consumers
            else:
                assert net.by_name[wait.firing[0]].place == net.by_name[wait.on[0]].place
    assert seen > 100


def with_registers(net: Net, counts: dict[str, int]) -> Net:
    return replace(net, queues=tuple(replace(q, registers=counts.get(q.name, q.registers)) for q in net.queues))


def test_the_registers_asked_for_are_the_fewest_that_help() -> None:
    """With them the net finishes, and no smaller number of additional registers does, wherever they are put."""
    rng = random.Random(4)
    helped = hopeless = 0
    while helped < 60 or hopeless < 20:
        net = random_net(rng, actors=4)
        verdict = check_net(net)
        if verdict.finishes or len(net.queues) > 4:
            continue
        if verdict.needs is None:
            hopeless += 1
            assert not check_net(with_registers(net, {q.name: 1000 for q in net.queues})).finishes
            continue
        helped += 1
        assert check_net(with_registers(net, verdict.needs)).finishes
        more = sum(verdict.needs[q.name] - q.registers for q in net.queues if q.name in verdict.needs)
        for extra in itertools.product(range(more), repeat=len(net.queues)):
            if sum(extra) < more:
                trial = {q.name: q.registers + n for q, n in zip(net.queues, extra, strict=True)}
                assert not check_net(with_registers(net, trial)).finishes, (str(net), verdict.needs, trial)


def test_one_register_less_than_needed_stops_every_interleaving() -> None:
    """The planted error: from a net with the fewest registers one is taken away."""
    rng = random.Random(5)
    planted = 0
    for _ in range(60):
        net = random_pipeline(rng)
        needs = check_net(with_registers(net, {q.name: max(1, q.filled) for q in net.queues})).needs
        if not needs:
            continue
        least = with_registers(net, {q.name: max(1, q.filled) for q in net.queues} | needs)
        assert Machine(least, 2).play(rng)
        name = rng.choice(sorted(needs))
        short = with_registers(least, {name: needs[name] - 1})
        verdict = check_net(short)
        assert not verdict.finishes and not Machine(short, 2).play(rng)
        assert verdict.needs and sum(verdict.needs.values()) == 1 + sum(
            q.registers for q in short.queues if q.name in verdict.needs
        )
        planted += 1
    assert planted > 20


def test_an_order_that_contradicts_the_data_is_not_blamed_on_registers() -> None:
    """Backward before forward at the place of the loss: no credit helps, and the error says so."""
    actors = (Actor("F", "forward", 0, 2), Actor("B", "backward", 0, 2))
    orders = ((("B", 0), ("F", 0), ("F", 1), ("B", 1)),)
    net = Net(places(1), actors, (Queue("stash", "F", ("B",), 2),), orders)
    with pytest.raises(NetError, match="no number of registers helps"):
        refuse_deadlock(net)
    assert check_net(replace(net, window=1)).finishes


def test_memory_is_added_up_and_the_overflow_named() -> None:
    """Registers times bytes where a queue is filled or read; the error names the place and its largest queues."""
    stages = [Stage(place=s, stash_bytes=100) for s in range(3)]
    net = dag_net(chain(stages, 6, [10, 7]))
    verdict = check_net(net, 1000)
    assert verdict.bytes == tuple(net.bound_bytes(p) for p in range(3)) == (340, 200 + 40 + 28, 100 + 28)
    assert verdict.fits and verdict.finishes
    with pytest.raises(NetError) as error:
        refuse_deadlock(net, 339)
    assert "place 0" in str(error.value) and "F0->B0: 3 x 100" in str(error.value) and "339 bytes" in str(error.value)


def test_a_rank_at_two_places_holds_the_registers_of_both() -> None:
    """A loader beside the first stage: what passes between them lies there once, all else is added up."""
    actors = (Actor("load", "load", 0), Actor("F", "forward", 1), Actor("G", "forward", 2))
    queues = (Queue("x", "load", ("F",), 2, bytes=10), Queue("y", "F", ("G",), 3, bytes=100))
    here = Place((0,), Mesh({"r": 1}))
    orders = ((("load", 0),), (("F", 0),), (("G", 0),))
    net = Net((here, here, Place((1,), Mesh({"r": 1}))), actors, queues, orders)
    assert check_net(net).bytes == (320, 320, 300)
