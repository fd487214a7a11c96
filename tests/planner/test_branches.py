"""Branches on devices of their own: what is found, that it is right, and that nothing of the kind beats its bound.

Data parallel exchanges the gradients of all weights; towers apart exchange what they give to the head. Where weights
are large beside that and nodes are joined by a slow network, nothing else comes near.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laminar
from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.staged import Staged
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.search.best_first.branches import Branches, deal, falling
from laminar.planner.search.best_first.search import find
from laminar.planner.space.request import asking
from tests.support.branched_models import Towers, branches, loss, mlp, towers
from tests.support.plain_training import OPTIMIZERS, TOLERANCE, difference, plain
from tests.support.rank_pool import Ranks
from tests.support.traced_models import traced

SLOW = "2x1xa100@eth25"
"""Two devices, a slow network between them."""


# --- what is found


@pytest.mark.parametrize(
    ("cluster", "sizes", "factor"), [(SLOW, [1, 1], 0.65), ("2x2xa100@eth25", [2, 2], 0.7), ("2xcpu", [1, 1], 0.99)]
)
def test_towers_stand_apart_where_exchanging_their_weights_is_slow(
    cluster: str, sizes: list[int], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on each node, and faster by so much than the best plan of any other kind."""
    graph = towers(2048, (3, 3), 256)
    plan = laminar.plan(graph, cluster)
    assert plan.account["choice"]["branches"] == sizes
    assert isinstance(plan, Staged) and [len(p.ranks) for p in plan.places] == sizes
    assert "branches apart on" in plan.explain() and "tower" in plan.explain()
    others = [row for row in plan.account["runners_up"] if "branches" not in row]
    assert plan.step_s is not None and plan.bound_s is not None
    assert plan.step_s < factor * min(row["step_s"] for row in others)
    assert plan.bound_s <= plan.step_s
    if max(sizes) == 1:
        assert plan.account["certificate"]["gap"] < 0.08
    assert not plan.flags("megatron").ok
    if cluster != SLOW:
        return
    monkeypatch.setattr(Branches, "_allowed", lambda self: False)
    without = laminar.plan(graph, cluster)
    assert without.step_s is not None and plan.step_s < factor * without.step_s
    assert "branches" not in without.account["choice"]


def test_sizes_follow_the_work_and_the_lighter_towers_share_a_set() -> None:
    """Three towers on four devices: the deep one gets two, or more, and nobody is idle."""
    found = find(towers(2048, (4, 2, 2), 256), asking(Cluster.preset("4x1xa100@eth25")))
    assert isinstance(found.plan, Staged)
    assert found.finals[0].score.apart == (2, 1, 1)
    held = [{n.split(".")[1] for n in s.plan.inputs if n.startswith("towers")} for s in found.plan.stages]
    assert [h for h in held if h] == [{"0"}, {"1"}, {"2"}]
    two = find(towers(2048, (4, 2, 2), 256), asking(Cluster.preset(SLOW)))
    assert isinstance(two.plan, Staged) and two.finals[0].score.apart == (1, 1)
    held = [{n.split(".")[1] for n in s.plan.inputs if n.startswith("towers")} for s in two.plan.stages]
    assert [h for h in held if h] == [{"0"}, {"1", "2"}]


def test_the_space_and_the_certificate_count_them() -> None:
    """What is claimed is about plans with branches apart as well, each by name."""
    found = find(towers(2048, (6, 6), 256), asking(Cluster.preset(SLOW)))
    assert [w["devices"] for w in found.space.data["branches"]] == [[1, 1]]
    assert found.space.data["branches"][0]["branches"] == [[0], [1]]
    proof = found.certificate
    assert proof.cells == len(found.space.data["cells"]) * len(found.space.data["rewrites"]) + 1
    assert proof.looked_at + proof.pruned + proof.unfit + proof.unfinished >= proof.cells


@pytest.mark.parametrize(
    "options",
    [
        {"only": "data,tensor,zero"},
        {"pin": {"stages": 1}},
        {"pin": {"dp": 2}},
        {"pin": {"towers.0.0.weight": "S(0)"}},
        {"pin": {"recompute": 1}},
    ],
)
def test_who_asks_for_something_else_gets_no_branches(options: dict[str, Any]) -> None:
    """Pins speak of stages that are alike, and `only` may leave stages out."""
    assert not branches(towers(64, (3, 3), 8), "2xcpu", **options).at
    assert branches(towers(64, (3, 3), 8), "2xcpu", pin={"microbatches": 2, "recompute": 0}).at


@pytest.mark.parametrize("layers", [2, 12])
def test_a_model_without_branches_that_matter_is_looked_at_no_further(layers: int) -> None:
    """Queries, keys and values are a few percent each, of one layer."""
    model = Model(traced(layers), asking(Cluster.preset("8xh100")))

    class Never(Bounds):
        def one_device_s(self) -> float:
            raise AssertionError("nothing is to be priced")

    assert not Branches(model, Never(model)).at


class Normed(nn.Module):
    """Towers with batch statistics, and a metric that nothing else needs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), mlp(64, 64, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x[:, 0]), self.right(x[:, 1])], -1)


def test_samples_that_are_coupled_stay_in_one_batch() -> None:
    """A norm over the batch sees all of it; branches may still stand apart."""
    torch.manual_seed(0)
    model, batch = Normed(), torch.randn(8, 2, 64)
    graph = laminar.capture(model, loss, batch)
    asked = Model(graph, asking(Cluster.preset("4xcpu")))
    found = Branches(asked, Bounds(asked), coupled=True)
    assert {way.micro_batches for way in found.at} == {1}
    for way in found.at:
        plan = found.plan(way, [found.options(size, 1)[0] for size in way.sizes])
        assert laminar.verify(model, loss, [batch], plan).ok


def test_memory_is_kept_to() -> None:
    """With room for one tower on each device branches win, with less they are out."""
    graph, cluster = towers(2048, (3, 3), 256), Cluster.preset(SLOW)
    found = find(graph, asking(cluster, only="data,pipeline"))
    assert found.finals[0].score.apart
    peak = found.finals[0].peak_bytes
    assert find(graph, asking(cluster, 1.02 * peak, only="data,pipeline")).finals[0].score.apart
    assert not find(graph, asking(cluster, 0.98 * peak, only="data,pipeline")).finals[0].score.apart
    with pytest.raises(LaminarError, match="no plan fits"):
        find(graph, asking(cluster, 0.9 * peak, only="data,pipeline"))


# --- they are right


@pytest.mark.parametrize(
    ("depths", "stem", "cluster"), [((2, 2), False, "2xcpu"), ((3, 1, 2), True, "4xcpu"), ((2, 1, 1), False, "8xcpu")]
)
def test_every_way_with_every_placement_gives_the_numbers_of_one_device(
    depths: tuple[int, ...], stem: bool, cluster: str
) -> None:
    """Stems, towers that share a set, sets of different sizes, micro-batches, pieces, free placements."""
    torch.manual_seed(0)
    model, batch = Towers(16, depths, stem, head=4), torch.randn(8, len(depths), 16)
    found = branches(laminar.capture(model, loss, batch), cluster)
    assert found.at
    if stem:
        assert {way.micro_batches for way in found.at} >= {1, 2}
    for k, way in enumerate(found.at):
        options = [found.options(size, way.micro_batches) for size in way.sizes]
        inners = [one[(k + p) % len(one)] for p, one in enumerate(options)]
        report = laminar.verify(model, loss, [batch], found.plan(way, inners))
        assert report.ok, f"{way} {inners}: {report}"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes."""
    pool = Ranks(2)
    yield pool
    pool.stop()


def material() -> tuple[nn.Module, list[Tensor]]:
    """A model and its batches."""
    torch.manual_seed(3)
    return Towers(384, (2, 2)).double(), [torch.randn(64, 2, 384, dtype=torch.float64) for _ in range(4)]


def _trained(plan: Staged) -> tuple[float, str, float]:
    """Some steps with a plan and some without: how far apart weights and losses are."""
    model, batches = material()
    other = copy.deepcopy(model)
    job = laminar.parallelize(
        model, loss, OPTIMIZERS["adamw"](model.parameters()), batch=batches[0], plan=plan, seed=5, device="cpu"
    )
    losses = [job.step(batch).loss for batch in batches]
    want = plain(other, loss, OPTIMIZERS["adamw"](other.parameters()), batches, 5)
    apart, where = difference(job.state_dict(), other.state_dict())
    job.close()
    return apart, where, max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(losses, want, strict=True))


@pytest.mark.slow
def test_towers_that_were_found_apart_train_on_real_ranks_as_plain_pytorch_does(ranks: Ranks) -> None:
    """One tower in each process, joined by Gloo; the losses and weights of one device after four steps."""
    model, batches = material()
    plan = laminar.plan(laminar.capture(model, loss, batches[0]), "2x1xcpu@eth1", budget_s=3)
    assert isinstance(plan, Staged) and plan.account["choice"]["branches"] == [1, 1]
    assert laminar.verify(model, loss, batches[:1], plan).ok
    for rank, (apart, where, losses) in enumerate(ranks.run(_trained, plan)):
        assert apart <= TOLERANCE[torch.float64], f"rank {rank}: {where} differs by {apart:.2e}"
        assert losses <= TOLERANCE[torch.float64], f"rank {rank}: losses differ by {losses:.2e}"


# --- dealing out


@settings(max_examples=50)
@given(st.integers(1, 16), st.integers(1, 4), st.sets(st.integers(1, 8), min_size=1))
def test_all_splits_of_the_devices_are_there(total: int, count: int, allowed: set[int]) -> None:
    """Against trying everything."""
    every = {tuple(sorted(p, reverse=True)) for p in itertools.product(allowed, repeat=count) if sum(p) == total}
    found = list(falling(total, count, sorted(allowed)))
    assert set(found) == every and len(found) == len(every)


@settings(max_examples=80)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_branches_are_dealt_out_within_twice_the_best(work: list[float], sizes: list[int]) -> None:
    """Everybody once, sets counted as they are; on sets of different speed the heaviest first is at most twice off."""
    dealt = deal(work, (0.0, 0.0), sizes)
    if dealt is None:
        return
    busiest, groups, _ = dealt
    assert sorted(k for group in groups for k in group) == list(range(len(work)))
    assert busiest == pytest.approx(max(sum(work[k] for k in g) / s for g, s in zip(groups, sizes, strict=True)))
    best = min(
        max(sum(w for w, p in zip(work, homes, strict=True) if p == q) / s for q, s in enumerate(sizes))
        for homes in itertools.product(range(len(sizes)), repeat=len(work))
    )
    assert best <= busiest * (1 + 1e-9) and busiest <= 2 * best * (1 + 1e-9)
