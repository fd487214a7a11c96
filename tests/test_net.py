"""The grammar of nets: what is refused at the door, and by which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laminar.errors import NetError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from tests.nets import places

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
