"""Logical ranks, hostings and the tree as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import LaminarError, MeshError
from laminar.ir.exact import Exact, Hosting, children, cover
from laminar.ir.serial.reading import JsonPart


def test_what_exact_may_be_given() -> None:
    assert Exact.of(None) is None and Exact.of(False) is None
    assert Exact.of(True) == Exact.of("") == Exact(8, 1, 1)
    assert Exact.of("units=4, slices=2") == Exact(4, 2)
    assert Exact.of("units=2,context=3") == Exact(2, context=3)
    assert Exact.of("units=2,sums=integers") == Exact(2, sums="integers") != Exact(2)
    assert Exact(4, 2).mesh.sizes == (4, 2) and Exact(4).mesh.sizes == (4,)
    assert Exact(4, 2, context=3).mesh.sizes == (4, 3, 2) and Exact(4, 2, context=3).ranks == 24
    assert Exact.from_json(JsonPart(Exact(4, 2, 3, 5, "integers").to_json(), LaminarError)) == Exact(
        4, 2, 3, 5, "integers"
    )


@pytest.mark.parametrize(
    "asked",
    ["units", "units=0", "unit=4", "units=-1", 3, "units=4,slices=two", "sums=trees", "sums", "units=65,sums=integers"],
)
def test_what_it_may_not(asked: object) -> None:
    with pytest.raises(LaminarError, match="exact"):
        Exact.of(asked)


def test_more_processes_than_logical_ranks_are_refused_with_the_number_that_can_be_used() -> None:
    with pytest.raises(MeshError, match="at most 4 processes"):
        Hosting.even(4, 5)
    with pytest.raises(MeshError, match="hosts at least one"):
        Hosting((0, 2))


@given(st.integers(1, 40), st.data())
def test_hostings_give_every_process_something(ranks: int, data: st.DataObject) -> None:
    processes = data.draw(st.integers(1, ranks))
    for hosting in (Hosting.even(ranks, processes), Hosting.drawn(ranks, processes, data.draw(st.integers(0, 9)))):
        assert hosting.size == processes
        assert sorted(r for p in range(processes) for r in hosting.hosted(p)) == list(range(ranks))
        assert Hosting.from_json(JsonPart(hosting.to_json(), MeshError)) == hosting
    counts = [len(Hosting.even(ranks, processes).hosted(p)) for p in range(processes)]
    assert max(counts) - min(counts) <= 1 and Hosting.of_counts(counts) == Hosting.even(ranks, processes)


@given(st.lists(st.booleans(), min_size=1, max_size=64))
def test_a_cover_is_of_the_largest_whole_nodes(here: list[bool]) -> None:
    found = cover(tuple(here))
    assert [i for a, b in found for i in range(a, b)] == [i for i, h in enumerate(here) if h]

    def parents(node: tuple[int, int]) -> list[tuple[int, int]]:
        out, at = [], (0, len(here))
        while at != node:
            out.append(at)
            at = next(c for c in children(at) if c[0] <= node[0] and node[1] <= c[1])
        return out

    for node in found:  # each is a node of the tree, and its parent is not wholly here
        assert all(not all(here[a:b]) for a, b in parents(node))
