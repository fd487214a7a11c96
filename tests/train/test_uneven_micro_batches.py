"""Micro-batches of different sizes in one step: the numbers are those of the whole batch on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laminar
from laminar import Mesh, Sized
from laminar.api import micro_batches
from laminar.errors import BatchError, LaminarError, PlanError
from laminar.lower.stages.stage_net import joining, layout_of, piped, together, widest
from laminar.lower.stages.stage_programs import stages
from laminar.staging import balance
from laminar.staging.stage_plans import for_other_graph
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.pipeline_steps import SIZES
from tests.support.marks import slow
from tests.support.rank_pool import Ranks
from tests.support.uneven_jobs import LOSSES, SEED, TOKENS, WIDTH, batch_of, counted, loss, make, model, plain, planned

Given = list[tuple[int, tuple[int, ...]]]
"""Samples of each batch, and how many each micro-batch has; none: as equal as can be."""


def _train(which: str, given_: Given, captured: int, micro: int, options: dict[str, Any]) -> Any:
    """Losses and weights of a job that is handed batches of such sizes; how many pipes and sizes it came to."""
    made = model()
    batches = [batch_of(n, seed) for seed, (n, _) in enumerate(given_)]
    handed = [Sized(b, sizes) if sizes else b for b, (_, sizes) in zip(batches, given_, strict=True)]
    plan = planned(made, captured, micro, **options)
    job = laminar.parallelize(made, LOSSES[which], make, batch=handed[0], plan=plan, seed=SEED)
    first = job.pipes.training
    said = [job.step(b).loss for b in handed]
    out = said, job.state_dict(), job.pipes.training is first, len(job.pipes.training.sizes)
    job.close()
    return out


def same(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    """To 1e-9, losses and weights."""
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-9, atol=0.0)
    assert got[1].keys() == want[1].keys()
    for name, w in want[1].items():
        torch.testing.assert_close(got[1][name], w, rtol=1e-9, atol=1e-10)


SIZES_OF: Given = [(10, ()), (9, (4, 1, 2, 2)), (4, ()), (10, (1, 4, 4, 1))]


@pytest.mark.parametrize(
    ("which", "options"),
    [
        slow("mean", {"window": 0}),
        ("counted", {"window": 2, "stash": 2.0}),
        slow("mean", {"schedule": "zero-bubble"}),
        ("counted", {"virtual": 2}),
    ],
    ids=["window 0", "window 2", "zero-bubble", "virtual"],
)
def test_uneven_micro_batches_train_as_whole_batches_do(two: Ranks, which: str, options: dict[str, Any]) -> None:
    """Two ranks, sizes from four down to one, equal or not, given or not; dropout included; the plan was made for five.

    Four are the most that any has, so the pipe that is opened first (for three) is left once for a larger one.
    """
    want = plain(which, [batch_of(n, seed) for seed, (n, _) in enumerate(SIZES_OF)])
    for said, weights, kept, sizes in two.run(_train, which, SIZES_OF, 5, 4, {"stages": 2, **options}):
        same((said, weights), want)
        assert not kept and sizes == 3


def test_micro_batches_that_fit_go_through_the_pipe_there_is(two: Ranks) -> None:
    """A pipe whose registers hold three samples takes two and one: nothing is opened anew."""
    given_: Given = [(12, ()), (7, ()), (5, (1, 1, 2, 1)), (12, ())]
    want = plain("mean", [batch_of(n, seed) for seed, (n, _) in enumerate(given_)])
    for said, weights, kept, sizes in two.run(_train, "mean", given_, 3, 4, {"stages": 2}):
        same((said, weights), want)
        assert kept and sizes == 3


@pytest.mark.parametrize(
    "options",
    [
        slow({"stages": 4, "window": 2, "stash": 2.0}),
        slow({"stages": 2, "inner": Mesh({"dp": 2})}),
        {"stages": 2, "inner": Mesh({"tp": 2}), "window": 2, "stash": 2.0},
        {"stages": 2, "inner": [Mesh({"dp": 1}), Mesh({"dp": 3})]},
    ],
    ids=["4 stages", "data", "tensor", "1 and 3 ranks"],
)
def test_uneven_micro_batches_compose_with_plans_inside(four: Ranks, options: dict[str, Any]) -> None:
    """Where a place splits the batch, one of its micro-batches has a single sample that can't be split."""
    want = plain("mean", [batch_of(n, seed) for seed, (n, _) in enumerate(SIZES_OF)])
    for said, weights, _, _ in four.run(_train, "mean", SIZES_OF, 3, 4, options):
        same((said, weights), want)


def _evaluated() -> tuple[list[float], float]:
    made = model()
    job = laminar.parallelize(made, loss, make, batch=batch_of(6), plan=planned(made, 2, 3, stages=2), seed=SEED)
    counts = [job.evaluate([batch_of(n, n)]) for n in (6, 7, 3)]
    out = [*counts, job.evaluate([batch_of(7, 7), Sized(batch_of(8, 8), (5, 1, 2)), batch_of(3, 3)])]
    trained = job.step(batch_of(7, 7)).loss
    job.close()
    return out, trained


def test_evaluation_takes_any_size(two: Ranks) -> None:
    """Its loss is the mean over all samples, however they are cut; training goes on through its own pipe."""
    made = model(train=False)
    with torch.no_grad():
        one = {n: float(loss(made, batch_of(n, n))) for n in (6, 7, 3, 8)}
    want = [one[6], one[7], one[3], (7 * one[7] + 8 * one[8] + 3 * one[3]) / 18]
    trained = plain("mean", [batch_of(7, 7)])[0][0]
    for said, step in two.run(_evaluated):
        assert said == pytest.approx(want, rel=1e-9) and step == pytest.approx(trained, rel=1e-9)


def _refused() -> list[str]:
    made = model()
    many = SIZES + 1
    batch = batch_of(many * (many + 1) // 2)
    job = laminar.parallelize(made, loss, make, batch=batch, plan=planned(made, 2, many, stages=2), seed=SEED)
    said = []
    sizes = tuple(range(1, many + 1))
    for handed in (Sized(batch, sizes), Sized(batch, sizes[1:]), Sized(batch_of(many), (0, 2, *[1] * (many - 2)))):
        try:
            job.step(handed)
        except LaminarError as error:
            said.append(f"{type(error).__name__}: {error}")
    job.step(batch)
    job.close()
    return said


def test_too_many_sizes_and_sizes_that_do_not_add_up_are_refused(two: Ranks) -> None:
    """Each size is a program; a step has at most a handful. The job goes on behind a refusal."""
    for many, wrong, empty in two.run(_refused):
        assert many.startswith("BatchError") and f"{SIZES + 1} different sizes" in many and f"{SIZES} at most" in many
        assert f"{SIZES} sizes for {SIZES + 1} micro-batches" in wrong
        assert "at least one in each" in empty


@pytest.mark.parametrize("count", [slow(2), 4])
def test_uneven_micro_batches_are_verified_in_this_process(count: int) -> None:
    """All places here, gradients against one device on the whole batch, dropout included: 11 samples in 4 parts."""
    for window, options in ((0, {}), (2, {"inner": Mesh({"dp": 2})})):
        made = model()
        plan = planned(made, 3, 4, stages=count, window=window, stash=2.0, **options)
        for value in LOSSES.values():
            report = laminar.verify(made, value, [batch_of(11, 1), batch_of(11, 2)], plan)
            assert report.ok and report.max_rel_error <= 1e-9, str(report)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=3, max_size=3), min_size=1, max_size=3),
    st.sampled_from([0, 2]),
    st.sampled_from(sorted(LOSSES)),
)
def test_sizes_at_random_train_as_whole_batches_do(two: Ranks, sizes: list[list[int]], window: int, which: str) -> None:
    """Any sizes, in any order, from one step to the next."""
    given_: Given = [(sum(one), tuple(one)) for one in sizes]
    want = plain(which, [batch_of(n, seed) for seed, (n, _) in enumerate(given_)])
    for said, weights, _, _ in two.run(_train, which, given_, 2, 3, {"stages": 2, "window": window, "stash": 2.0}):
        same((said, weights), want)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_batch_is_cut_where_it_is_told(sizes: list[int]) -> None:
    """Parts follow each other, and together they are the batch; leaves of another length go to all."""
    n = sum(sizes)
    batch = {"x": torch.arange(n), "y": torch.arange(2 * n).view(n, 2), "shared": torch.ones(n + 1)}
    for parts in (micro_batches(batch, sizes), micro_batches(batch, len(sizes))):
        assert torch.equal(torch.cat([p["x"] for p in parts]), batch["x"])
        assert torch.equal(torch.cat([p["y"] for p in parts]), batch["y"])
        assert all(p["shared"] is batch["shared"] for p in parts)
    assert [len(p["x"]) for p in micro_batches(batch, sizes)] == sizes
    lengths = [len(p["x"]) for p in micro_batches(batch, len(sizes))]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
    with pytest.raises(BatchError):
        micro_batches(batch, [*sizes, 1])
    assert Leaves.of(Sized(batch, sizes)).key != Leaves.of(batch).key


def test_registers_are_as_large_as_the_largest_needs_them() -> None:
    """One net for several sizes; a smaller size joins one that is there, a larger one does not."""
    made = model()
    plan = planned(made, 3, 4, stages=2)
    found = {}
    for n in (1, 3, 4):
        graph = laminar.capture(made, loss, batch_of(n))
        found[n] = stages(graph, for_other_graph(graph, plan), found.get(3))
    three, one = together([found[3], found[1]])
    assert three.net is one.net and three.net == piped(found[3]).net
    assert widest([layout_of(found[n])[0] for n in (1, 3, 4)]) == layout_of(found[4])[0]
    joined = joining(found[1], piped(found[3]))
    assert joined is not None and joined.net == three.net
    assert joining(found[4], piped(found[3])) is None


def test_a_cut_through_a_layer_that_is_one_op_at_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch adds the bias of a layer apart, but not for a single sample: its weights can't be at two places then.

    Where stages are balanced, no cut goes through a layer.
    """
    made = model()
    few, many = (laminar.capture(made, counted, batch_of(n)) for n in (1, 4))
    kept = planned(made, 5, 4, stages=2, virtual=2)
    stages(few, for_other_graph(few, kept), stages(many, for_other_graph(many, kept)))
    monkeypatch.setattr(balance, "_inside_layers", lambda *_: set())
    cut = planned(made, 5, 4, stages=2, virtual=2)
    with pytest.raises(PlanError, match=r"another size stage 0 gives, or does not give, grad:layers\.1\.weight"):
        stages(few, for_other_graph(few, cut), stages(many, for_other_graph(many, cut)))


class Listed(nn.Module):
    """The same layers, with weights and biases in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(4))
        self.bs = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for w, b in zip(self.ws, self.bs, strict=True):
            x = F.gelu(F.linear(x.transpose(0, 1), w, b))
        return x


def test_a_bias_stays_with_its_product_wherever_it_is_kept() -> None:
    """Which of them belong together is seen from what is added to what, not from their names."""
    torch.manual_seed(0)
    made = Listed().double()
    few, many = (
        laminar.capture(made, lambda m, x: m(x).square().mean(), torch.randn(n, TOKENS, WIDTH, dtype=torch.float64))
        for n in (1, 4)
    )
    for count in range(2, 7):
        plan = laminar.plans.pipeline(many, count, 4)
        stages(few, for_other_graph(few, plan), stages(many, plan))
