"""Draws belong to samples: a sample has the same random numbers however its batch is cut, and wherever it is run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laminar
from laminar import Mesh, Sized
from laminar.capture.canonical.canonical import Canonical
from laminar.capture.ops import kernels
from laminar.errors import PlanError
from laminar.ir.graph import RNG
from laminar.ir.sbp import Split
from laminar.rules.samples import compared, doubtful, draws_of, in_parts, sample_places
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.code import decompositions
from tests.support.marks import slow
from tests.support.rank_pool import Ranks
from tests.support.uneven_jobs import batch_of as tokens_of
from tests.support.uneven_jobs import loss as tokens_loss
from tests.support.uneven_jobs import make, planned
from tests.support.uneven_jobs import model as net
from tests.support.uneven_jobs import plain as whole

SEED = 7


class Draws(nn.Module):
    """Every way in which a draw can hold samples, or hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.first = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3)  # tokens first
        self.second = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Sites 1 to 4 and 5 to 8 are those of the layers."""
        n, t = x.shape
        h = self.first(self.embed(x).transpose(0, 1)).transpose(0, 1)
        h = self.second(h)
        h = h @ F.dropout(self.weight, 0.2)  # 9: no samples
        h = h + torch.randn(8, dtype=h.dtype)  # 10: none
        h = F.dropout1d(h, 0.3)  # 11: some channels of each sample
        h = h + 0.1 * torch.randn(n * t, 8).view(n, t, 8)  # 12: samples first, merged with tokens
        h = h + 0.1 * torch.randn(t * n, 8).view(t, n, 8).transpose(0, 1)  # 13: samples second, merged
        h = h * torch.rand(n, 1, 1)  # 14: one number for each sample
        return h * torch.rand(())  # 15: one number


def mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean of squares."""
    return model(batch["x"]).square().mean()


def batch_of(samples: int, tokens: int = 5) -> dict[str, Tensor]:
    """Tokens."""
    return {"x": torch.randint(0, 17, (samples, tokens), generator=torch.Generator().manual_seed(samples))}


def model() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return Draws().double()


WANT = {
    **{1: Split(0), 2: Split(1), 3: Split(1), 4: Split(1), 5: Split(0), 6: Split(0), 7: Split(0), 8: Split(0)},
    **{9: None, 10: None, 11: Split(0), 12: Split(0), 13: Split(0, 5), 14: Split(0), 15: None},
}


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8, 16])
def test_the_dim_that_holds_samples_is_found(samples: int) -> None:
    """From the rules alone, at any size, also where as many tokens or channels as samples are about."""
    graph = laminar.capture(model(), mean, batch_of(samples))
    assert sample_places(graph) == WANT


def drawn(graph: Any, inputs: Any) -> dict[int, Tensor]:
    """What each site drew."""
    out: dict[int, Tensor] = {}
    sites = {d.name: d.args[2] for d in draws_of(graph)}
    run_graph(
        graph, inputs, watch=lambda node, made: out.update({sites[node.name]: made[0]}) if node.name in sites else None
    )
    return out


@pytest.mark.parametrize("sizes", [(3, 3), (4, 1, 2), slow((1,) * 6), slow((6,))])
def test_parts_of_a_batch_draw_bit_for_bit_what_the_batch_draws(sizes: tuple[int, ...]) -> None:
    """Of every site: the samples' numbers where it holds samples, the same numbers where it holds none."""
    made, batch = model(), batch_of(sum(sizes))
    graph = laminar.capture(made, mean, batch)
    want = drawn(graph, laminar.api.inputs_of(graph, made, batch, SEED, 3))
    for first, n in zip(itertools.accumulate((0, *sizes)), sizes, strict=False):
        micro = {"x": batch["x"][first : first + n]}
        part = in_parts(laminar.capture(made, mean, micro), WANT)
        got = drawn(part, laminar.api.inputs_of(part, made, micro, SEED, 3, first, sum(sizes)))
        assert got.keys() == want.keys() == WANT.keys()
        for site, lies in WANT.items():
            x = want[site]
            if lies is not None:
                opened = x.unflatten(lies.dim, (lies.blocks, sum(sizes), -1))
                x = opened.narrow(lies.dim + 1, first, n).flatten(lies.dim, lies.dim + 2)
            assert torch.equal(got[site], x), site


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_kernels_place_elements_in_the_whole_batch(data: st.DataObject) -> None:
    """Any shape, any dim, anything before and behind the samples in it, whole or one rank's piece, fused or not."""
    before, after = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 9))
    first = data.draw(st.integers(0, count - 1))
    n = data.draw(st.integers(1, count - first))
    lead, rest = data.draw(st.lists(st.integers(1, 3), max_size=2)), data.draw(st.lists(st.integers(1, 3), max_size=2))
    inner = after * torch.Size(rest).numel()

    def shape(samples: int) -> tuple[int, ...]:
        return (*lead, before * samples * after, *rest)

    key = torch.tensor([SEED, 2**40 + 1, first, count])
    for kernel in (kernels.uniform, kernels.normal, decompositions._uniform, decompositions._normal):
        want = kernel(shape(count), key, 4, torch.float64)
        d = len(lead)
        want = want.unflatten(d, (before, count, after)).narrow(d + 1, first, n).reshape(shape(n))
        got = kernel(shape(n), key, 4, torch.float64, (n, inner))
        assert torch.equal(got, want)
        index = [torch.randperm(s)[: max(s // 2, 1)] for s in shape(n)]
        some = kernel([len(i) for i in index], key, 4, torch.float64, (n, inner), index, shape(n))
        assert torch.equal(some, want[torch.meshgrid(*index, indexing="ij")])


def test_a_key_that_is_compiled_in_is_still_read_at_run_time() -> None:
    """One compiled program serves all parts: first sample and batch size are numbers in a tensor, not constants."""

    def draw(key: Tensor) -> Tensor:
        return decompositions._uniform((3, 2, 4), key, 5, torch.float32, (2, 4))

    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    for first, count in ((0, 2), (2, 6), (4, 9)):
        key = torch.tensor([SEED, 1, first, count])
        want = kernels.uniform((3, count, 4), key, 5, torch.float32)[:, first : first + 2]
        assert torch.equal(compiled(key), want)


def _trained(micro: int | tuple[int, ...], options: dict[str, Any], samples: int = 10) -> dict[str, Tensor]:
    made, batch = model(), batch_of(samples)
    count = micro if isinstance(micro, int) else len(micro)
    job = laminar.parallelize(made, mean, make, batch=batch, micro_batches=count, seed=SEED, **options)
    for _ in range(2):
        job.step(batch if isinstance(micro, int) else Sized(batch, micro))
    out: dict[str, Tensor] = job.state_dict()
    job.close()
    return out


def _plain(samples: int = 10) -> dict[str, Tensor]:
    made, batch = model(), batch_of(samples)
    optimizer = make(made.parameters())
    for step in range(2):
        optimizer.zero_grad()
        with Canonical(torch.tensor([SEED, step])):
            mean(made, batch).backward()
        optimizer.step()
    return made.state_dict()


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """To 1e-9."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        torch.testing.assert_close(got[name], w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("micro", [slow(1), slow(2), 3, slow(10), (1, 7, 2), slow((5, 5))], ids=str)
def test_a_job_in_micro_batches_is_the_whole_batch_in_plain_pytorch(micro: int | tuple[int, ...]) -> None:
    """Even, uneven, given, one sample at a time: weights after two steps with dropout are the same to rounding."""
    close(_trained(micro, {}), _plain())


class Small(nn.Module):
    """Samples first, and samples second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Both in one compiled piece."""
        return F.dropout(F.dropout(self.a(x), 0.4).transpose(0, 1) * 2, 0.4)


@pytest.mark.slow
def test_a_compiled_job_draws_the_same() -> None:
    """Through Inductor too, which is the way of GPUs: one program, whichever part of the batch it is given."""

    def value(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    batch, states = torch.randn(6, 3, 6, dtype=torch.float64), []
    for options in ({"micro_batches": 1}, {"micro_batches": 3, "compile": True}):
        job = laminar.parallelize(Small().double(), value, make, batch=batch, seed=SEED, **options)
        job.step(batch)
        job.step(batch)
        states.append(job.state_dict())
        job.close()
    close(states[1], states[0])


def _shares() -> dict[str, Tensor]:
    """Every rank hands over its own share: of 12 samples in two parts, each part has three of each rank."""
    made, batch = model(), batch_of(12)
    job = laminar.parallelize(made, mean, make, batch=batch, micro_batches=2, plan="data", seed=SEED)
    for _ in range(2):
        x = batch["x"].view(2, 2, 3, 5)[:, job.rank].reshape(6, 5)
        job.step(laminar.Local({"x": x}))
    out: dict[str, Tensor] = job.state_dict()
    job.close()
    return out


@pytest.mark.parametrize("plan", [slow("data"), slow("zero3"), "tensor"])
def test_no_placement_changes_what_a_micro_batch_draws(two: Ranks, plan: str) -> None:
    """Two ranks, three parts of ten samples: split by sample, in shards, by column."""
    options: dict[str, Any] = {"plan": plan}
    if plan == "tensor":
        options["mesh"] = Mesh({"tp": 2})
    want = _plain()
    for got in two.run(_trained, 3, options):
        close(got, want)


def test_shares_are_numbered_part_by_part(two: Ranks) -> None:
    """Where ranks hand over shares, the batch is what the parts are one after the other."""
    want = _plain(12)
    for got in two.run(_shares):
        close(got, want)


def _staged(micro: int) -> tuple[list[float], dict[str, Tensor]]:
    made, batches = net(), [tokens_of(8, seed) for seed in range(2)]
    job = laminar.parallelize(
        made, tokens_loss, make, batch=batches[0], seed=SEED, plan=planned(made, 8 // micro, micro, stages=2)
    )
    out = [job.step(b).loss for b in batches], job.state_dict()
    job.close()
    return out


@pytest.mark.parametrize("micro", [1, 4])
def test_a_pipeline_draws_what_one_device_draws(two: Ranks, micro: int) -> None:
    """Dropout in both stages, micro-batch after micro-batch, against plain PyTorch on the whole batch."""
    said, weights = whole("mean", [tokens_of(8, seed) for seed in range(2)])
    for got, state in two.run(_staged, micro):
        assert got == pytest.approx(said, rel=1e-9)
        close(state, weights)


class Shuffled(nn.Module):
    """Samples mixed with others of their part: the op that reads the draw needs all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Noise on a weight that is as large as there are samples, and a permutation of them."""
        order = torch.randperm(x.shape[0])
        return self.a(x + x[order] * torch.rand(4))


def test_a_draw_that_no_rule_reaches_is_told_by_its_size() -> None:
    """With one sample more, a draw that holds samples is larger; each part gets its samples' numbers."""

    def value(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    made = Shuffled()
    graph, larger = (laminar.capture(made, value, torch.randn(n, 4)) for n in (4, 5))
    found = sample_places(graph)
    assert found == {1: None, 2: None} and len(doubtful(graph, found)) == 2
    assert compared(graph, larger, found) == {1: Split(0), 2: None}
    with pytest.warns(UserWarning, match="mixes the samples of a batch"):  # which it does: rows are exchanged
        job = laminar.parallelize(made, value, make, batch=torch.randn(8, 4), micro_batches=2)
    parts = [d.args[4:] for d in draws_of(job.graph)]
    assert parts == [((4, 1),), ()]
    job.close()


def test_a_draw_whose_numbers_belong_to_nobody_is_refused() -> None:
    """A draw for each pair of samples has no part of it for each: micro-batches can't have the numbers of the batch."""

    def value(m: nn.Module, x: Tensor) -> Tensor:
        pairs = (x @ x.t()) * torch.rand(x.shape[0], x.shape[0])
        return m(x).square().mean() + pairs.mean()

    with pytest.raises(PlanError, match=r"\[4, 4\] for 4 samples and \[5, 5\] for 5"):
        laminar.parallelize(nn.Linear(4, 4), value, make, batch=torch.randn(8, 4), micro_batches=2)


def test_a_graph_without_draws_is_left_alone() -> None:
    """Nothing to place, nothing to change; and the graph of a whole batch keeps its key of two numbers."""
    plain_net = nn.Linear(4, 4)
    graph = laminar.capture(plain_net, lambda m, x: m(x).square().mean(), torch.randn(4, 4))
    assert sample_places(graph) == {} and in_parts(graph, {}) is graph
    job = laminar.parallelize(model(), mean, make, batch=batch_of(4))
    assert job.graph.input(RNG).spec.shape == (2,) and all(len(d.args) == 4 for d in draws_of(job.graph))
    job.close()
