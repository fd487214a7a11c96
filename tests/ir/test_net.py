"""The grammar of nets: what is refused at the door, and by which words; and how much a place holds at most."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from laminar.cost.sim.pipeline import execute
from laminar.errors import NetError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from laminar.lower.stages.pipeline_net import Stage, chain
from laminar.lower.stages.schedules import dag_net
from tests.support.net_machine import places

A = Actor("a", "forward", 0, 2)
B = Actor("b", "backward", 1, 1)
Q = Queue("q", "a", ("b",), 3, takes=(2,), bytes=10)
GOOD = Net(places(2), (A, B), (Q,), ((("a", 0), ("a", 1)), (("b", 0),)))


def test_a_net_knows_who_reads_and_fills_what_and_where() -> None:
    """Rates, ends and holders are read off the queues."""
    assert GOOD.reads == {"a": (), "b": (Q,)}
    assert GOOD.fills == {"a": (Q,), "b": ()}
    assert Q.taken("b") == 2 and GOOD.crosses(Q) and GOOD.holders(Q) == (0, 1)
    assert GOOD.bound_bytes(0) == GOOD.bound_bytes(1) == 30
    assert "queue q: a -> b, 3 x 10 bytes" in str(GOOD) and "a.0 a.1" in str(GOOD)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"actors": (A, A)}, "two actors are called a"),
        ({"actors": (replace(A, kind="sing"), B)}, "unknown kind 'sing'"),
        ({"actors": (replace(A, place=2), B)}, "actor a is at place 2"),
        ({"actors": (replace(A, fires=0), B)}, "fires 0 times"),
        ({"queues": (Q, Q)}, "two queues are called q"),
        ({"queues": (replace(Q, producer="c"),)}, "names c, which is no actor"),
        ({"queues": (replace(Q, consumers=("a",)),)}, "other than its producer a"),
        ({"queues": (replace(Q, takes=(2, 2)),)}, "1 consumers and 2 rates"),
        ({"queues": (replace(Q, registers=0),)}, "has 0 registers"),
        ({"queues": (replace(Q, filled=4),)}, "4 of them filled"),
        ({"queues": (replace(Q, takes=(1,)),)}, "a makes 2 registers a step, b reads 1"),
        ({"orders": ((("a", 0), ("a", 1)),)}, "1 orders for 2 places"),
        ({"orders": ((("a", 0),), (("b", 0),))}, "order of place 0 must name each firing once"),
        ({"orders": ((("a", 1), ("a", 0)), (("b", 0),))}, "order of place 0 has a.1 before a.0"),
        ({"window": -1}, "window -1"),
    ],
)
def test_what_breaks_the_grammar_is_refused_by_name(changes: dict, word: str) -> None:
    """The check of liveness and the runtime may take all of this for granted."""
    with pytest.raises(NetError, match=word):
        replace(GOOD, **changes)


def test_a_place_needs_as_many_ranks_as_its_mesh() -> None:
    """A place is a set of ranks: each once, and as many as there are spots."""
    with pytest.raises(Exception, match="2 ranks can't be arranged"):
        Place((0, 1), Mesh({"r": 3}))
    with pytest.raises(Exception, match="not a set of ranks"):
        Place((1, 1), Mesh({"r": 2}))


@pytest.mark.parametrize("virtual", [1, 2, 3, 4, 6])
def test_no_place_ever_holds_more_than_its_order_says(virtual: int) -> None:
    """However long parts take; and with equal times the first place holds exactly that much of its own."""
    rng = random.Random(virtual)
    spots, micro = 4, 8
    stages = [Stage(place=s % spots, stash_bytes=rng.randint(50, 150)) for s in range(spots * virtual)]
    net = dag_net(chain(stages, micro), schedule="interleaved" if virtual > 1 else "1f1b")
    loose = replace(net, window=None)
    own = [[q for q in net.queues if q.bytes and net.holders(q) == (p,)] for p in range(spots)]
    for _ in range(20):
        work = {a.name: rng.randint(1, 30) for a in net.actors}
        times = execute(net, work, 1).times()
        for p in range(spots):
            held = _peak(own[p], times, micro)
            crossing = sum(q.registers * q.bytes for q in net.queues if p in net.holders(q) and q not in own[p])
            assert held + crossing <= net.bound_bytes(p) <= loose.bound_bytes(p)
            assert held + crossing == net.bound_bytes(p)  # an order that is kept leaves nothing to the times
    if virtual > 2:  # what chunks hold at most, they don't hold at the same time
        assert net.bound_bytes(0) < loose.bound_bytes(0)


def _peak(queues: list[Queue], times: dict, micro: int) -> int:
    """The most that queues hold at once: from when a register is taken until its last reader has ended."""
    changes = []
    for q in queues:
        for k in range(micro):
            changes.append((times[q.producer, k, 0][0], 1, q.bytes))
            changes.append((max(times[c, k, 0][1] for c in q.consumers), 0, -q.bytes))
    held = peak = 0
    for _, _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak
