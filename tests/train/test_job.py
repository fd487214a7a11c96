"""What a job does besides the bare step: micro-batches, weighted losses, optimizers, checkpoints, precision.

Most tests run on two real ranks, each of which also trains the same model in plain PyTorch: the
functions whose names begin with an underscore are what a rank does, the tests look at the results.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar import Mesh
from laminar.errors import MeshError, NonFiniteError, OptimizerError, PlanError, StateError
from laminar.ir.graph import RNG, SCALE
from tests.support.rank_pool import Ranks
from tests.support.small_job import Net, adamw, batches, counted, gap, mean, net, plain

PLANS = ("data", "zero1", "zero2", "zero3", "tensor")


# --- accumulation and weights ------------------------------------------------------------------


def _accumulated(plan: str, uneven: bool) -> tuple[float, float, int]:
    loss = counted if uneven else mean
    data = batches(6, samples=10, holes=uneven)
    model = net()
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, loss, adamw(model), batch=data[0], plan=plan, micro_batches=3, device="cpu")
    losses = [job.step(b).loss for b in data]
    want = plain(other, loss, adamw(other), data)
    weights = {k: v for k, v in job.state_dict().items() if k != "seen"}
    there = {k: v for k, v in other.state_dict().items() if k != "seen"}
    return (
        gap(weights, there),
        max(abs(a - b) for a, b in zip(losses, want, strict=True)),
        max((i.bytes for i in job.program.collectives), default=0),
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("uneven", [False, True])
def test_micro_batches_equal_one_big_batch(two: Ranks, plan: str, uneven: bool) -> None:
    """10 samples in 3 micro-batches (4, 3, 3), each shared by 2 ranks; with and without uneven counts."""
    for weights, losses, most in two.run(_accumulated, plan, uneven):
        assert weights < 1e-9
        assert losses < 1e-10
        if plan in ("data", "zero1"):
            assert most <= 8, "sums that are kept whole travel once, at the end of the step"


def _uneven(plan: str) -> tuple[float, float]:
    data = batches(6, holes=True)
    model = net()
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, counted, adamw(model), batch=data[0], plan=plan, device="cpu")
    losses = [job.step(b).loss for b in data]
    want = plain(other, counted, adamw(other), data)
    return gap(job.state_dict(), other.state_dict()), max(abs(a - b) for a, b in zip(losses, want, strict=True))


@pytest.mark.parametrize("plan", ["data", "zero3"])
def test_uneven_counts_are_weighted_right(two: Ranks, plan: str) -> None:
    """Ranks with hardly any labels count for little: a mean of means would be off by far."""
    for weights, losses in two.run(_uneven, plan):
        assert weights < 1e-9
        assert losses < 1e-10


# --- batches -------------------------------------------------------------------------------------


def _last_batch(plan: str, local: bool) -> tuple[float, int]:
    data = [*batches(3, 8), *batches(1, 6, seed=2), *batches(1, 8, seed=3), *batches(1, 6, seed=4)]
    model = net()
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, device="cpu")
    for b in data:
        half = {k: v.chunk(2)[job.rank] for k, v in b.items()}
        job.step(laminar.Local(half) if local else b)
    plain(other, mean, adamw(other), data)
    return gap(job.state_dict(), other.state_dict()), len(job.engine._ready)


@pytest.mark.parametrize(
    ("plan", "local"), [("data", False), ("data", True), ("zero3", False), ("zero3", True), ("tensor", False)]
)
def test_a_smaller_last_batch_is_captured_once(two: Ranks, plan: str, local: bool) -> None:
    """The second batch of that size finds the step ready; shares of ranks do as well as global batches."""
    for weights, steps in two.run(_last_batch, plan, local):
        assert weights < 1e-9
        assert steps == 2


def _nested() -> float:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) * self.b(y)

    torch.manual_seed(0)
    model = Two().double()
    other = copy.deepcopy(model)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        (x, rest), tag = batch
        return (m(x, rest["y"]) * rest["scale"]).square().mean() if tag == "both" else m(x, x).sum()

    g = torch.Generator().manual_seed(2)

    def one() -> Any:
        return (
            (
                torch.randn(6, 3, generator=g).double(),
                {"y": torch.randn(6, 2, generator=g).double(), "scale": torch.tensor(0.5).double()},
            ),
            "both",
        )

    data = [one() for _ in range(4)]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    job = laminar.parallelize(model, loss, sgd[0], batch=data[0], device="cpu")
    for b in data:
        job.step(b)
    plain(other, loss, sgd[1], data)
    return gap(job.state_dict(), other.state_dict())


def test_nested_batches(two: Ranks) -> None:
    """Tuples in tuples, dicts, a scalar leaf and a plain value."""
    assert max(two.run(_nested)) < 1e-12


def _mismatch() -> None:
    data = batches(2, 8)
    model = net()
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], device="cpu")
    job.step(data[0])
    job.step(batches(1, 8 if job.rank == 0 else 6)[0])


def test_ranks_with_different_batches_say_so() -> None:
    """Instead of hanging in collectives that don't fit each other; the rank whose batch changed speaks."""
    with pytest.raises(AssertionError, match="step 2: rank 1 has another batch than rank 0"):
        Ranks(2).run(_mismatch)


# --- optimizers ------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer torch does not have."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    m.lerp_(p.grad, 0.01)


class Lamb(torch.optim.Optimizer):
    """Not elementwise: each tensor's step is as long as the tensor."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-9) * p.norm(), alpha=-group["lr"])


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "lion": lambda p: Lion(p),
}


def _optimizers(plan: str) -> dict[str, float]:
    out = {}
    data = batches(4)
    for name, make in ELEMENTWISE.items():
        model = net()
        other = copy.deepcopy(model)
        declared = name == "lion"
        job = laminar.parallelize(model, mean, make, batch=data[0], plan=plan, device="cpu", elementwise=declared)
        for b in data:
            job.step(b)
        plain(other, mean, make(other.parameters()), data)
        out[name] = gap(job.state_dict(), other.state_dict())
    return out


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_every_elementwise_optimizer_of_torch(two: Ranks, plan: str) -> None:
    """On pieces, in their fused or multi-tensor form where there is one. Rprop looks at signs only, so it is exact."""
    for found in two.run(_optimizers, plan):
        assert all(v < 1e-8 for v in found.values()), found


def _refused(plan: str) -> dict[str, str]:
    out = {}
    makers: dict[str, Any] = {
        "Lamb": lambda p: Lamb(p),
        "Adafactor": lambda p: torch.optim.Adafactor(p),
        "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2]),
    }
    for name, make in makers.items():
        try:
            laminar.parallelize(net(), mean, make, batch=batches(1)[0], plan=plan, device="cpu")
            out[name] = "taken"
        except OptimizerError as error:
            out[name] = str(error)
    return out


def test_other_optimizers_are_refused_by_name_where_state_is_in_pieces(two: Ranks) -> None:
    """With everything whole on every rank they are as good as any."""
    for found in two.run(_refused, "zero1"):
        for name, message in found.items():
            assert message.startswith(name), message
    for found in two.run(_refused, "data"):
        assert set(found.values()) == {"taken"}


def _grouped(plan: str, clip: str) -> tuple[float, float, list[float], list[float]]:
    """Two groups, a schedule, clipping, by hand and by job."""

    def make(model: nn.Module) -> Any:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2)
        return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)

    data = batches(8)
    model = net()
    other = copy.deepcopy(model)
    (opt, schedule), (opt2, schedule2) = make(model), make(other)
    limits: dict[str, Any] = {"clip_norm": 0.5} if clip == "norm" else {"clip_value": 0.01}
    job = laminar.parallelize(model, mean, opt, batch=data[0], plan=plan, device="cpu", **limits)
    norms, lrs, want = [], [], []
    for b in data:
        r = job.step(b)
        norms.append(r.grad_norm)
        lrs.append(r.lr)
        schedule.step()

    def after() -> None:
        params = list(other.parameters())
        want.append(float(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])))
        if clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.5)
        else:
            nn.utils.clip_grad_value_(params, 0.01)

    for b in data:
        plain(other, mean, opt2, [b], after)
        schedule2.step()
    worst = max(abs(a - b) for a, b in zip(norms, want, strict=True))
    return gap(job.state_dict(), other.state_dict()), worst, lrs, norms


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_groups_schedules_and_clipping(two: Ranks, plan: str, clip: str) -> None:
    """The norm is that of the whole gradient, however it is cut; schedulers drive the user's own optimizer."""
    for weights, norms, lrs, _ in two.run(_grouped, plan, clip):
        assert weights < 1e-9
        assert norms < 1e-10
        assert lrs[0] == 1e-2 and lrs == sorted(lrs, reverse=True) and lrs[-1] < 2e-3


def _bytes(plan: str, micro_batches: int) -> tuple[dict[str, int], int]:
    model = net(words=64, d=32, dtype=torch.float32)
    whole = sum(p.nbytes for p in model.parameters())
    data = batches(2)
    job = laminar.parallelize(
        model, mean, adamw(model), batch=data[0], plan=plan, micro_batches=micro_batches, device="cpu"
    )
    for b in data:
        job.step(b)
    assert sum(p.nbytes for p in model.parameters()) == job.memory()["parameters"]
    return job.memory(), whole


@pytest.mark.parametrize(
    ("plan", "parts"),
    [("data", (1, 1, 1)), ("zero1", (1, 1, 2)), ("zero2", (1, 2, 2)), ("zero3", (2, 2, 2))],
)
def test_zero_holds_the_bytes_of_the_formula(two: Ranks, plan: str, parts: tuple[int, int, int]) -> None:
    """Parameters, gradients and Adam's two moments, each whole or halved; every dim here is even."""
    for found, whole in two.run(_bytes, plan, 2):
        want = {"parameters": whole // parts[0], "gradients": whole // parts[1], "state": 2 * whole // parts[2]}
        assert found == want


class Named(torch.nn.Module):
    """A model whose parameters have the names of what a step brings itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rng = (torch.nn.Parameter(torch.full((3,), x, dtype=torch.float64)) for x in (0.5, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * self.scale, 0.5) + self.rng


def test_a_model_may_have_a_parameter_called_scale() -> None:
    """Or one called rng: both are inputs of the step, beside its own."""
    x = torch.ones(4, 3, dtype=torch.float64)
    model = Named()
    options: dict[str, Any] = {"batch": x, "precision": "fp16", "device": "cpu"}
    job = laminar.parallelize(model, lambda m, x: m(x).square().mean(), adamw(model), **options)
    assert {"scale", "rng", RNG, SCALE} <= {i.name for i in job.graph.inputs}
    job.step(x)
    assert set(job.state_dict()) == {"scale", "rng"}


def _average(plan: str) -> float:
    data = batches(6)
    model = net()
    other = copy.deepcopy(model)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, ema=0.9, device="cpu")
    for b in data:
        job.step(b)
    average = {k: v.detach().clone().float() for k, v in other.named_parameters()}
    opt = adamw(other)
    for b in data:
        plain(other, mean, opt, [b])
        for k, v in other.named_parameters():
            average[k].lerp_(v.detach().float(), 0.1)
    found = job.state_dict(ema=True)
    return max(float((found[k] - average[k]).abs().max()) for k in average)


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3"])
def test_moving_average(two: Ranks, plan: str) -> None:
    """Kept in shards, in float32."""
    assert max(two.run(_average, plan)) < 1e-6


# --- state -------------------------------------------------------------------------------------------


def _through_plain(plan: str) -> tuple[float, float, float]:
    """4 steps here, then weights and optimizer state to plain PyTorch for 4, then back for 4."""
    data = batches(12)
    straight = net()
    opt = adamw(straight)
    plain(straight, mean, opt, data)
    model = net()
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, device="cpu")
    for b in data[:4]:
        job.step(b)
    other = net(seed=9)
    other.load_state_dict(job.state_dict())
    opt2 = adamw(other)
    opt2.load_state_dict(job.optimizer_state_dict())
    plain(other, mean, opt2, data[4:8])
    again = net(seed=8)
    job2 = laminar.parallelize(again, mean, adamw(again), batch=data[0], plan=plan, device="cpu")
    job2.load_state_dict(other.state_dict())
    job2.load_optimizer_state_dict(opt2.state_dict())
    for b in data[8:]:
        job2.step(b)
    loose = dict(job2.model.state_dict())
    logits = job2.model.eval()(data[0]["ids"])
    want = straight.eval()(data[0]["ids"])
    return (
        gap(job2.state_dict(), straight.state_dict()),
        gap(loose, straight.state_dict()),
        float((logits - want).abs().max()),
    )


@pytest.mark.parametrize("plan", PLANS)
def test_checkpoints_go_both_ways_with_plain_pytorch(two: Ranks, plan: str) -> None:
    """The user's own names, tied weights under both; `job.model` has whole weights and runs."""
    for found in two.run(_through_plain, plan):
        assert max(found) < 1e-9


def _dtensors(plan: str) -> tuple[float, set[str], float]:
    data = batches(3)
    model = net()
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, device="cpu")
    for b in data:
        job.step(b)
    whole, pieces = job.state_dict(), job.state_dict(sharded=True)
    placements = {str(v.placements) for v in pieces.values()}
    full = {k: v.full_tensor() for k, v in pieces.items()}
    again = net(seed=3)
    job2 = laminar.parallelize(again, mean, adamw(again), batch=data[0], plan="data", device="cpu")
    job2.load_state_dict(pieces)
    return gap(full, whole), placements, gap(job2.state_dict(), whole)


@pytest.mark.parametrize("plan", ["data", "zero3", "tensor"])
def test_sharded_state_is_dtensors(two: Ranks, plan: str) -> None:
    """torch's own type reads them back, and another layout takes them."""
    for exact, placements, loaded in two.run(_dtensors, plan):
        assert exact == 0 and loaded == 0
        assert plan == "data" or any("Shard" in p for p in placements)


def _saved(folder: str, first: str, second: str) -> tuple[str, str, str, str]:
    data = batches(6)
    model = net()
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=first, ema=0.9, device="cpu")
    for b in data[:3]:
        job.step(b)
    before = job.hash()
    job.save(folder)
    for b in data[3:]:
        job.step(b)
    again = net(seed=5)
    job2 = laminar.parallelize(again, mean, adamw(again), batch=data[0], plan=second, ema=0.9, device="cpu")
    job2.resume(folder)
    resumed = job2.hash()
    assert job2.steps == 3
    for b in data[3:]:
        job2.step(b)
    return before, resumed, job.hash(), job2.hash()


def test_save_and_resume_on_another_layout(two: Ranks, tmp_path: Path) -> None:
    """The state is the same to the last bit; going on in the same layout stays so."""
    for before, resumed, end, again in two.run(_saved, str(tmp_path / "a"), "zero3", "zero3"):
        assert before == resumed and end == again and before != end
    for before, resumed, *_ in two.run(_saved, str(tmp_path / "b"), "zero1", "tensor"):
        assert before == resumed


def test_wrong_state_is_refused() -> None:
    """With the names that don't fit."""
    model = net()
    job = laminar.parallelize(model, mean, adamw(model), batch=batches(1)[0], device="cpu")
    state = job.state_dict()
    with pytest.raises(StateError, match=r"missing\s+up.weight"):
        job.load_state_dict({k: v for k, v in state.items() if k != "up.weight"})
    with pytest.raises(StateError, match=r"up.weight is \(3,\)"):
        job.load_state_dict({**state, "up.weight": torch.zeros(3)})
    with pytest.raises(StateError, match="no job was saved"):
        job.resume("/nowhere")


def _evaluated(plan: str) -> tuple[float, float, float]:
    data = [*batches(2, 8, holes=True), *batches(1, 6, holes=True, seed=7)]
    model = net()
    other = copy.deepcopy(model).eval()
    job = laminar.parallelize(model, counted, adamw(model), batch=data[0], plan=plan, micro_batches=2, device="cpu")
    seen = float(job.state_dict()["seen"])
    found = job.evaluate(data)
    losses = [counted(other, b) for b in data]
    want = float(sum(x.total for x in losses) / sum(x.weight for x in losses))
    assert model.training
    return found, want, float(job.state_dict()["seen"]) - seen


@pytest.mark.parametrize("plan", ["data", "zero3", "tensor"])
def test_evaluation_is_the_loss_over_everything(two: Ranks, plan: str) -> None:
    """Totals over weights, not a mean of means; buffers don't move."""
    for found, want, moved in two.run(_evaluated, plan):
        assert abs(found - want) < 1e-10
        assert moved == 0


# --- precision -----------------------------------------------------------------------------------------


def stall(precision: str, steps: int = 300) -> float:
    """The loss of a regression whose updates are far smaller than the weights."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.randn(64, 16)
    y = x @ torch.full((16, 1), 1.05)

    def loss(m: nn.Module, b: Any) -> Tensor:
        return (m(b["x"]).float() - b["y"].float()).square().mean()

    opt = torch.optim.SGD(model.parameters(), lr=2e-3)
    job = laminar.parallelize(model, loss, opt, batch={"x": x, "y": y}, precision=precision, device="cpu")
    value = math.nan
    for _ in range(steps):
        value = job.step({"x": x, "y": y}).loss
    return value


def test_compensated_bfloat16_follows_float32_where_plain_bfloat16_stalls() -> None:
    """Each update is below half a unit in the last place of bfloat16: rounded to nearest, nothing ever moves."""
    exact, stuck = stall("f32"), stall("bf16-pure")
    kahan, random = stall("bf16-kahan"), stall("bf16-stochastic")
    start = stall("f32", 1)
    assert exact < 0.2 * start
    assert stuck > 0.8 * start
    assert kahan < 1.1 * exact + 0.01 * start
    assert random < 1.5 * exact + 0.05 * start


def _rounded(plan: str, precision: str) -> list[Tensor]:
    model = net(dtype=torch.float32)
    data = batches(5)
    job = laminar.parallelize(
        model, mean, adamw(model), batch=data[0], plan=plan, precision=precision, device="cpu", micro_batches=2
    )
    for b in data:
        job.step(b)
    return [v.float() for v in job.state_dict().values()]


def test_random_rounding_does_not_depend_on_the_layout(two: Ranks) -> None:
    """Keyed by seed, step and the element's place in the whole tensor: ranks that own pieces draw the same."""
    zero1, data = two.run(_rounded, "zero1", "bf16-stochastic")[0], two.run(_rounded, "data", "bf16-stochastic")[0]
    assert all(torch.equal(a, b) for a, b in zip(zero1, data, strict=True))


def _half(precision: str, plan: str) -> tuple[list[float], list[float], list[bool]]:
    data = batches(12)
    model, other = net(dtype=torch.float32), net(dtype=torch.float32)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, precision=precision, device="cpu")
    found = [job.step(b) for b in data]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def under(m: nn.Module, b: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return mean(m, b)

    return [r.loss for r in found], plain(other, under, adamw(other), data), [r.skipped for r in found]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["data", "zero3"])
def test_half_precision_follows_autocast(two: Ranks, precision: str, plan: str) -> None:
    """Weights stay float32; the curve is that of torch's autocast within what half precision can tell."""
    for got, want, skipped in two.run(_half, precision, plan):
        moved = want[0] - want[-1]
        kept = [abs(a - b) for a, b, s in zip(got, want, skipped, strict=True) if not s]
        assert moved > 0.3
        assert max(kept) < 0.05 * moved or any(skipped)


def _overflow(plan: str) -> tuple[list[bool], list[float], float]:
    """One rank's samples blow up in one step."""
    model = net(dtype=torch.float32)
    data = batches(4)

    def loss(m: nn.Module, b: Any) -> Tensor:
        return mean(m, b) * b["factor"].mean()

    def one(i: int) -> dict[str, Tensor]:
        factor = torch.ones(8)
        factor[7] = 1e38 if i == 2 else 1.0  # the last sample lies on the last rank
        return {**data[i], "factor": factor}

    job = laminar.parallelize(model, loss, adamw(model), batch=one(0), plan=plan, precision="fp16", device="cpu")
    skipped, weights = [], []
    for i in range(4):
        skipped.append(job.step(one(i)).skipped)
        weights.append(float(sum(v.double().abs().sum() for k, v in job.state_dict().items() if k != "seen")))
    assert job.state.scaler is not None
    return skipped, weights, job.state.scaler.scale


@pytest.mark.parametrize("plan", ["data", "zero2", "tensor"])
def test_a_skipped_step_is_skipped_everywhere(two: Ranks, plan: str) -> None:
    """An overflow on one rank leaves all weights as they were, halves the scale, and is reported."""
    first, second = two.run(_overflow, plan)
    assert first == second
    skipped, weights, scale = first
    assert skipped == [False, False, True, False]
    assert weights[1] == weights[2] != weights[3]
    assert scale == 2.0**15


def _wide_sums() -> str:
    model = net(dtype=torch.float32)
    data = batches(1)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], precision="bf16-kahan", device="cpu")
    reduced = [p.spec.dtype for i in job.program.collectives for p in i.ins if p.spec.shape]
    return ",".join(sorted(set(reduced)))


def test_gradients_of_bfloat16_weights_are_summed_in_float32(two: Ranks) -> None:
    """Every reduction of the step but that of the loss, which is what the model made it."""
    assert two.run(_wide_sums)[0] == "f32"


# --- errors ------------------------------------------------------------------------------------------


def test_anomalies_are_located() -> None:
    """The module, the op and the line that first made a NaN, and an infinity that becomes one."""

    class Bad(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first, self.second, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(torch.relu(self.first(x)))
            return torch.sqrt(x - 100) if self.kind == "nan" else (x * 0 + 1) / (x * 0)

    for kind, op in (("nan", "sqrt"), ("inf", "div")):
        model = Bad(kind)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        job = laminar.parallelize(
            model, lambda m, b: m(b).sum(), opt, batch=torch.randn(2, 4), device="cpu", detect_anomaly=True
        )
        with pytest.raises(NonFiniteError) as error:
            job.step(torch.randn(2, 4))
        assert op in str(error.value) and "test_job.py" in str(error.value) and "rank" in str(error.value)


def test_masks_of_infinities_are_no_anomaly() -> None:
    """Attention scores are masked with minus infinity all the time."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            s = self.q(x) @ x.transpose(-1, -2)
            keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
            return s.masked_fill(~keep, float("-inf")).softmax(-1) @ x

    model = Masked()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 4)
    job = laminar.parallelize(model, lambda m, b: m(b).square().mean(), opt, batch=x, device="cpu", detect_anomaly=True)
    assert math.isfinite(job.step(x).loss)


def test_what_does_not_fit_is_said_before_anything_runs(tmp_path: Path) -> None:
    """World size, plan name, foreign parameters, meta models."""
    model, batch = net(), batches(1)[0]
    with pytest.raises(MeshError, match="has 4 ranks, the world has 1"):
        laminar.parallelize(model, mean, adamw(model), batch=batch, mesh=Mesh({"dp": 4}), device="cpu")
    with pytest.raises(PlanError, match="there is no plan 'fast'"):
        laminar.parallelize(model, mean, adamw(model), batch=batch, plan="fast", device="cpu")
    with pytest.raises(OptimizerError, match="not one of the model's"):
        laminar.parallelize(model, mean, adamw(net()), batch=batch, device="cpu")
    with pytest.raises(laminar.CaptureError, match="lives on meta"):
        with torch.device("meta"):
            empty = Net()
        laminar.parallelize(empty, mean, adamw(empty), batch=batch, device="cpu")
    job = laminar.parallelize(model, mean, adamw(model), batch=batch, device="cpu")
    job.plan.save(tmp_path / "plan.json")
    again = net()
    other = laminar.parallelize(again, mean, adamw(again), batch=batch, plan=str(tmp_path / "plan.json"), device="cpu")
    assert other.plan.hash == job.plan.hash


# --- what can't be captured ----------------------------------------------------------------------------


class Branching(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


def _fallback(micro_batches: int) -> float:
    torch.manual_seed(0)
    model = Branching().double()
    other = copy.deepcopy(model)

    def loss(m: nn.Module, b: Any) -> laminar.Loss:
        keep = (b[:, 0] > 0).double()
        return laminar.Loss((m(b).square().sum(1) * keep).sum(), keep.sum())

    g = torch.Generator().manual_seed(1)
    # Every sample alike in sign of its sum, so that shares take the same branch as the whole.
    data = [torch.rand(8, 4, generator=g).double() * (1 if i % 2 else -1) for i in range(6)]
    data = [torch.cat([d[:, :1] * torch.tensor([[1.0], [-1.0]]).repeat(4, 1), d[:, 1:] * 9], 1) for d in data]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, other)]
    with pytest.warns(UserWarning, match="Batch norm sees each rank's share"):
        job = laminar.parallelize(
            model, loss, sgd[0], batch=data[0], plan="ddp", micro_batches=micro_batches, device="cpu"
        )
        if job.rank:
            import warnings

            warnings.warn("Batch norm sees each rank's share: said by rank 0 only", stacklevel=1)
    losses = [job.step(b).loss for b in data]
    want = plain(other, loss, sgd[1], data)
    evaluated = job.evaluate(data[:2])
    assert math.isfinite(evaluated) and len(job.hash()) == 64
    return max(gap(job.state_dict(), other.state_dict()), *(abs(a - b) for a, b in zip(losses, want, strict=True)))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_model_that_looks_at_its_data_trains_with_ddp(two: Ranks, micro_batches: int) -> None:
    """Behind the same job, weighted the same way."""
    with pytest.raises(laminar.CaptureError):
        model = Branching()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        laminar.parallelize(model, lambda m, b: m(b).sum(), opt, batch=torch.ones(2, 4), device="cpu")
    assert max(two.run(_fallback, micro_batches)) < 1e-9


def test_two_jobs_side_by_side(two: Ranks) -> None:
    """Jobs of one process don't get in each other's way."""
    for a, b in itertools.pairwise(two.run(_side_by_side)):
        assert a == b


def _side_by_side() -> list[float]:
    data = batches(3)
    models = [net(seed=i) for i in range(2)]
    jobs = [
        laminar.parallelize(m, mean, adamw(m), batch=data[0], plan=p, device="cpu")
        for m, p in zip(models, ("data", "zero3"), strict=True)
    ]
    return [job.step(b).loss for b in data for job in jobs]


# --- corners -------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Two layers added up: their biases have one and the same gradient. A mask that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 6)
        self.register_buffer("mask", torch.full((6,), 2.0), persistent=False)
        self.table = torch.full((6,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a(x) + self.b(x)) * self.mask + self.table)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("limits", [{}, {"clip_norm": 0.05}, {"clip_value": 0.01}, {"micro_batches": 2}])
def test_gradients_that_are_one_tensor_are_scaled_once(limits: dict[str, Any]) -> None:
    """Scaling happens in place."""
    torch.manual_seed(0)
    model = Sum().double()
    other = copy.deepcopy(model)
    data = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other)]
    job = laminar.parallelize(model, squares, sgd[0], batch=data[0], device="cpu", **limits)
    for x in data:
        job.step(x)

    def after() -> None:
        if "clip_norm" in limits:
            nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        elif "clip_value" in limits:
            nn.utils.clip_grad_value_(other.parameters(), 0.01)

    plain(other, squares, sgd[1], data, after)
    assert gap(job.state_dict(), other.state_dict()) < 1e-12


def _inference(plan: str) -> float:
    torch.manual_seed(0)
    model = Sum()
    other = copy.deepcopy(model)
    x = torch.randn(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    job = laminar.parallelize(model, squares, opt, batch=x, plan=plan, device="cpu")
    return float((job.model(x) - other(x)).abs().max())


def test_inference_has_buffers_that_no_state_dict_lists(two: Ranks) -> None:
    """Rotary tables and causal masks are often kept out of it, or are plain attributes."""
    for plan in ("zero3", "tensor"):
        assert max(two.run(_inference, plan)) < 1e-6


def _frozen_in_turns(plan: str) -> float:
    torch.manual_seed(0)
    model = Sum().double()
    other = copy.deepcopy(model)
    data = [torch.randn(4, 4, dtype=torch.float64) for _ in range(6)]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    job = laminar.parallelize(model, squares, sgd[0], batch=data[0], plan=plan, micro_batches=2, device="cpu")
    for i, x in enumerate(data):
        for m in (model, other):
            for name in "abc":
                getattr(m, name).requires_grad_(name != "abc"[i % 3])
        job.step(x)
        plain(other, squares, sgd[1], [x])
    return gap(job.state_dict(), other.state_dict())


def test_layers_may_be_frozen_and_thawed_between_steps(two: Ranks) -> None:
    """Each set of trained parameters is another graph, with sums of its own."""
    for plan in ("data", "zero1", "zero3"):
        assert max(two.run(_frozen_in_turns, plan)) < 1e-12


def _in_a_hurry() -> int:
    """Batches smaller than the world are computed whole by everyone: nothing makes ranks wait for each other."""
    torch.manual_seed(0)
    model = Sum()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4)
    job = laminar.parallelize(model, squares, opt, batch=x, device="cpu")
    for _ in range(20):
        job.evaluate([x[:1], x[:1].repeat(1, 1), x, x[:1]])
    return job.steps


def test_ranks_may_run_ahead_of_each_other(two: Ranks) -> None:
    """Notes about batches are told apart by their number."""
    assert two.run(_in_a_hurry) == [0, 0]


def _drawing(split: bool) -> list[float]:
    """Losses of a model with dropout; the key of its draws whole, or in shards like any other tensor."""

    def made(graph: laminar.Graph, mesh: Mesh) -> laminar.Plan:
        plan = laminar.plans.data_parallel(graph, mesh)
        return replace(plan, inputs={**plan.inputs, RNG: (laminar.S(0),)}) if split else plan

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    batch = torch.linspace(-1, 1, 48).view(8, 6)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    job = laminar.parallelize(model, loss, partial(torch.optim.SGD, lr=0.1), batch=batch, plan=made, device="cpu")
    return [job.step(batch).loss for _ in range(3)]


def test_the_key_of_random_draws_may_lie_in_pieces(two: Ranks) -> None:
    """A plan may place every input; a random one does."""
    assert two.run(_drawing, True) == two.run(_drawing, False)


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), norm, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


@pytest.mark.parametrize("samples", [8, 4])
def test_micro_batches_of_samples_that_mix_are_said(samples: int) -> None:
    """Batch norm sees one micro-batch at a time: the user hears which op it is, and what to do. Others hear nothing."""

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch[:, None].expand(-1, 3, -1).reshape(-1, 4)).square().mean()

    batch = torch.randn(samples, 4)
    with pytest.warns(UserWarning, match=r"batch_norm mixes the samples of a batch.*train/test_job.py.*GroupNorm"):
        model: nn.Module = _Normed(nn.BatchNorm1d(8))
        laminar.parallelize(model, loss, adamw(model), batch=batch, micro_batches=4, device="cpu")
    model = _Normed(nn.LayerNorm(8))
    laminar.parallelize(model, loss, adamw(model), batch=batch, micro_batches=4, device="cpu")
    model = _Normed(nn.BatchNorm1d(8)).eval()
    laminar.parallelize(model, loss, adamw(model), batch=batch, micro_batches=4, device="cpu")
