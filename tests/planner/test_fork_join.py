"""Forks, joins and branches against graphs of which it is known how they were put together, and against any graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.planner.space.fork_join import BEGINNING, Region, forward_reads, regions
from tests.support.traced_models import traced


class Grown:
    """A random series-parallel graph, with the regions it was made of."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.reads: dict[str, list[str]] = {}
        self.made: set[tuple[str, str, frozenset[frozenset[str]]]] = set()
        self.join([self.series(BEGINNING, 3)])

    def op(self, *reads: str) -> str:
        """One more op, in the order of the program."""
        name = f"op{len(self.reads)}"
        self.reads[name] = [r for r in dict.fromkeys(reads) if r != BEGINNING]
        return name

    def join(self, ends: list[str]) -> str:
        return self.op(*ends)

    def series(self, start: str, depth: int) -> str:
        """Ops and parallel parts one after the other; the last op."""
        at = start
        for _ in range(self.rng.randint(1, 3)):
            at = self.parallel(at, depth - 1) if depth > 1 and self.rng.random() < 0.5 else self.op(at)
        return at

    def parallel(self, fork: str, depth: int) -> str:
        """Branches from an op to one that reads them all; what it was read past them, maybe, and branches that fork."""
        branches, ends = [], []
        inner: list[tuple[str, list[frozenset[str]]]] = []
        for _ in range(self.rng.randint(1, 3)):
            first = len(self.reads)
            last = self.series(fork, depth)
            if self.rng.random() < 0.3:  # its own branches are joined where it is
                heads = len(self.reads)
                tips = [self.series(last, 1) for _ in range(2)]
                middle = int(tips[0][2:]) + 1
                inner.append((last, [self.names(heads, middle), self.names(middle, len(self.reads))]))
                ends += tips
            else:
                ends.append(last)
            branches.append(self.names(first, len(self.reads)))
        skip = [fork] if self.rng.random() < 0.3 else []
        join = self.join([*ends, *skip])
        for at, parts in [(fork, branches), *inner]:
            if len(parts) > 1:
                self.made.add((at, join, frozenset(parts)))
        return join

    def names(self, first: int, last: int) -> frozenset[str]:
        return frozenset(f"op{k}" for k in range(first, last))


def as_sets(found: list[Region]) -> set[tuple[str, str, frozenset[frozenset[str]]]]:
    return {(r.fork, r.join, frozenset(r.branches)) for r in found}


@pytest.mark.parametrize("seed", range(200))
def test_regions_of_a_series_parallel_graph_are_its_parallel_parts(seed: int) -> None:
    """Each once, with all of its branches, however parts stand in each other and share forks or joins."""
    grown = Grown(seed)
    found = regions(grown.reads)
    assert len(found) == len(as_sets(found))
    assert as_sets(found) == grown.made


def test_random_graphs_have_parallel_parts() -> None:
    """The test above would hold for a search that finds nothing if nothing was there."""
    assert sum(len(Grown(seed).made) for seed in range(200)) > 400


@pytest.mark.parametrize("seed", range(200))
def test_branches_of_any_graph_do_not_wait_for_each_other(seed: int) -> None:
    """Nor does anything before them wait for them: what leads to them, they, and the rest can be stages."""
    rng = random.Random(seed)
    reads: dict[str, list[str]] = {}
    for k in range(rng.randint(2, 14)):
        reads[f"op{k}"] = [f"op{r}" for r in range(k) if rng.random() < 2 / (k + 1)]
    needed = {list(reads)[-1]}
    for name in reversed(reads):
        needed.update(reads[name] if name in needed else ())
    reads = {n: r for n, r in reads.items() if n in needed}
    ancestors: dict[str, set[str]] = {}
    for name, own in reads.items():
        ancestors[name] = {*own, *(a for r in own for a in ancestors[r])}
    for region in regions(reads):
        assert len(region.branches) > 1 and all(region.branches)
        assert sum(map(len, region.branches)) == len(region.inside)
        before = {a for name in region.inside for a in ancestors[name]} - region.inside
        assert region.fork == BEGINNING or region.fork in before
        assert region.join not in region.inside | before
        for branch in region.branches:
            for name in branch:
                assert ancestors[name] <= branch | before
        for name in before:
            assert ancestors[name] <= before


class Net(nn.Module):
    """Two towers with inputs of their own, one of them with a loss of its own, and a table that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.top = nn.Linear(12, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.left(self.table(a)), self.right(self.table(b))
        return self.top(torch.cat([left, right], -1)).square().mean() + right.abs().mean()


def test_towers_are_branches_though_they_share_a_table_and_one_has_a_loss_of_its_own() -> None:
    """Weights are no ops, and what leaves a branch on another way is behind it all the same."""
    some = torch.zeros(4, dtype=torch.long)
    graph = laminar.capture(Net(), lambda m, b: m(b["a"], b["b"]), {"a": some, "b": some})
    found = [r for r in regions(forward_reads(graph)) if r.fork == BEGINNING]
    modules = [{graph.by_name[n].module.split(".")[0] for n in branch} for branch in found[0].branches]
    assert modules == [{"table", "left"}, {"table", "right"}]


def test_layers_in_a_row_have_no_branches_but_inside() -> None:
    """A residual stream is one way; queries, keys and values of a layer are three short ones."""
    graph = traced(6)
    reads = forward_reads(graph)
    assert all(len(r.inside) < len(reads) / 6 for r in regions(reads))
