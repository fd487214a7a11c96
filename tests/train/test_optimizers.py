"""Which optimizers a job takes, and what may be done to them between steps.

An update on pieces is that of the whole only if it is elementwise, which no trial of a few steps can prove.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.errors import OptimizerError
from laminar.train.optimizer.optimizer import KNOWN
from tests.support.rank_pool import Ranks


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, a norm with statistics, and a head."""

    def __init__(self, d: int = 8, rank: int = 2, norm: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(d, d)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False)
        self.norm = nn.BatchNorm1d(d) if norm else nn.LayerNorm(d)
        self.head = nn.Linear(d, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.base(x) + self.up(self.down(x)))))


def adapted(norm: bool = True) -> Adapted:
    torch.manual_seed(0)
    return Adapted(norm=norm).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :4].sin()).square().mean()


def batches(n: int, samples: int = 8) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 8, generator=g, dtype=torch.float64) for _ in range(n)]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> list[float]:
    losses = []
    for x in data:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def gap(job: Any, other: nn.Module) -> float:
    want = other.state_dict()
    return max(float((v.double() - want[k].double()).abs().max()) for k, v in job.state_dict().items())


def job_of(model: nn.Module, optimizer: Any, plan: Any = "data", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what plan="ddp" says about itself
        return laminar.parallelize(model, loss, optimizer, batch=batches(1)[0], plan=plan, device="cpu", **options)


def refusal(make: Callable[[], Any]) -> str:
    try:
        make()
    except OptimizerError as error:
        return str(error)
    return "taken"


# --- which optimizers may be run on pieces -------------------------------------------------------


class Global(torch.optim.SGD):
    """Its step is as long as all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.norm() for p in params]).norm()
        for p in params:
            p.add_(p.grad, alpha=-0.1 * float(norm))


class Late(torch.optim.Optimizer):
    """Elementwise for five steps, then by the norm of each tensor: no short trial sees it."""

    def __init__(self, params: Any, lr: float = 0.1, begins: int = 5) -> None:
        super().__init__(params, {"lr": lr})
        self.steps, self.begins = 0, begins

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.add_(p.grad / (p.grad.norm() if self.steps > self.begins else 1.0), alpha=-0.1)


class Signs(torch.optim.Optimizer):
    """Elementwise, and says so."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.add_(p.grad.sign(), alpha=-0.01)


class Silent(Signs):
    """The same, without a word."""

    elementwise = False


def _on_pieces(plan: str) -> dict[str, str | float]:
    out: dict[str, str | float] = {}
    cases: dict[str, tuple[Any, bool]] = {
        "global": (Global, False),
        "global declared": (Global, True),
        "late": (Late, False),
        "late declared": (Late, True),
        "later declared": (partial(Late, begins=50), True),
        "silent": (Silent, False),
        "silent declared": (Silent, True),
        "signs": (Signs, False),
    }
    for name, (make, declared) in cases.items():
        try:
            model = adapted()
            other = copy.deepcopy(model)
            job = job_of(model, make, plan, elementwise=declared)
        except OptimizerError as error:
            out[name] = str(error)
            continue
        for x in batches(3):
            job.step(x)
        by_hand(other, make(other.parameters()), batches(3))
        out[name] = gap(job, other)
    hooked = adapted()
    sgd = torch.optim.SGD(hooked.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: None)
    out["hook"] = refusal(lambda: job_of(hooked, sgd, plan))
    other = adapted()
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    own.step = lambda: None  # type: ignore[method-assign]
    out["own step"] = refusal(lambda: job_of(other, own, plan))
    scheduled = adapted()
    timed = torch.optim.SGD(scheduled.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(timed, 1)
    out["schedule"] = refusal(lambda: job_of(scheduled, timed, plan))
    return out


def test_on_pieces_an_optimizer_is_known_or_declared(two: Ranks) -> None:
    """Torch's own exact classes pass, others on their user's word; what a trial can see is refused even then."""
    for found in two.run(_on_pieces, "zero1"):
        for name in ("global", "late", "silent"):
            assert "is not known to update each element by itself" in str(found[name])
            assert "elementwise=True" in str(found[name])
        assert str(found["global declared"]).startswith("Global is not elementwise")
        assert str(found["late declared"]).startswith("Late is not elementwise")
        assert "hook around SGD.step" in str(found["hook"]) and "the step of this SGD" in str(found["own step"])
        assert found["schedule"] == "taken"
        for name in ("silent declared", "signs", "later declared"):
            assert isinstance(found[name], float) and found[name] < 1e-9, found[name]


def test_every_class_of_torch_is_sorted() -> None:
    """A new one that torch brings has to be looked at before it runs on pieces."""
    all_of_them = {c for c in vars(torch.optim).values() if isinstance(c, type) and c is not torch.optim.Optimizer}
    others = {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor, torch.optim.Muon}
    assert {c for c in all_of_them if issubclass(c, torch.optim.Optimizer)} == {*KNOWN, *others}


def _at_places(make: Any, declared: bool) -> str:
    model = adapted(norm=False)
    plan = laminar.plans.pipeline(laminar.capture(model, loss, batches(1, 4)[0]), 2, 2)
    return refusal(
        lambda: laminar.parallelize(
            model, loss, make, batch=batches(1)[0], plan=plan, device="cpu", elementwise=declared
        ).close()
    )


def test_stages_take_optimizers_that_look_at_one_tensor(two: Ranks) -> None:
    """A norm over all parameters is not that of a stage's."""
    for message in two.run(_at_places, Global, False):
        assert "Global is not known" in message and "at several places" in message
    for message in two.run(_at_places, torch.optim.LBFGS, False):
        assert "LBFGS computes the loss several times" in message and "stages" in message
    assert set(two.run(_at_places, torch.optim.Adafactor, False)) == {"taken"}


# --- optimizers that compute the loss themselves -----------------------------------------------


def _closed(plan: str, options: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    model = adapted()
    other = copy.deepcopy(model)
    data = batches(1) * 4
    make = partial(torch.optim.LBFGS, lr=0.5, max_iter=6, history_size=4, line_search_fn=options.pop("search", None))
    parts = options.get("micro_batches", 1)
    if parts > 1:  # statistics of a part are not those of the batch
        model.norm.eval(), other.norm.eval()
    job = job_of(model, make, plan, **options)
    losses = [job.step(x).loss for x in data]
    optimizer = make(other.parameters())
    want = []
    for x in data:

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            value = loss(other, x)
            value.backward()
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(other.parameters(), options["clip_norm"])
            return value

        want.append(optimizer.step(closure).item())  # type: ignore[attr-defined]
    return gap(job, other), losses, want


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("data", {}),
        ("data", {"search": "strong_wolfe"}),
        ("data", {"micro_batches": 2}),
        ("data", {"clip_norm": 0.3}),
        ("ddp", {"micro_batches": 2}),
    ],
    ids=str,
)
def test_lbfgs_on_two_ranks_is_lbfgs_on_one(two: Ranks, plan: str, options: dict[str, Any]) -> None:
    """All ranks see the same numbers, so they search along the same lines; statistics move with each evaluation."""
    for weights, losses, want in two.run(_closed, plan, options):
        assert weights < 1e-7
        assert losses == pytest.approx(want, rel=1e-7)
        assert want[-1] < 0.7 * want[0] or "clip_norm" in options  # clipped, its model of the curvature is none


def test_lbfgs_alone() -> None:
    """One process needs no plan; draws of one step are the same in each of its evaluations."""
    weights, losses, want = _closed("auto", {})
    assert weights < 1e-9 and losses == pytest.approx(want)


def test_lbfgs_of_a_model_with_dropout_minimises_one_function() -> None:
    """If each evaluation drew anew, a line search would compare different functions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()
    seen: list[float] = []

    class Twice(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            seen.extend(float(closure()) for _ in range(2))

    job = job_of(model, Twice)
    for _ in range(2):
        job.step(batches(1)[0])
    assert seen[0] == seen[1] != seen[2] == seen[3]


def _closure_refused(plan: str, precision: str) -> str:
    return refusal(lambda: job_of(adapted(), torch.optim.LBFGS, plan, precision=precision))


def test_lbfgs_is_refused_where_a_step_is_not_the_whole_gradient(two: Ranks) -> None:
    """By name, with the way out."""
    for plan, precision in (("zero1", "f32"), ("zero3", "f32"), ("data", "fp16"), ("data", "bf16-kahan")):
        for message in two.run(_closure_refused, plan, precision):
            assert message.startswith("LBFGS computes the loss several times") and 'plan="data"' in message


# --- what is done to an optimizer between steps --------------------------------------------------


def _both(change: Callable[[nn.Module, torch.optim.Optimizer], None], plan: str, parameters: Any = None) -> float:
    """Two steps, a change, two steps: by a job and by hand."""
    model = adapted()
    other = copy.deepcopy(model)
    chosen = parameters or (lambda m: m.parameters())
    mine, theirs = (torch.optim.AdamW(chosen(m), lr=0.05) for m in (model, other))
    job = job_of(model, mine, plan)
    data = batches(4)
    for x in data[:2]:
        job.step(x)
    by_hand(other, theirs, data[:2])
    change(model, mine)
    change(other, theirs)
    for x in data[2:]:
        job.step(x)
    by_hand(other, theirs, data[2:])
    return gap(job, other)


def without_head(model: Any) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not n.startswith("head")]


def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.2})


def clear(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def fresh(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), lr=0.03).state_dict())


def freeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.head.requires_grad_(False)
    model.base.requires_grad_(True)


def drop(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:-2]  # the head


CHANGES: dict[str, tuple[Any, Any]] = {
    "a group is added": (add_group, without_head),
    "state is cleared": (clear, None),
    "state is loaded into the optimizer": (fresh, None),
    "layers are frozen and unfrozen": (freeze, None),
    "parameters are taken out": (drop, None),
}


def _changed(plan: str) -> dict[str, float]:
    return {name: _both(change, plan, params) for name, (change, params) in CHANGES.items()}


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3"])
def test_changes_between_steps_count(two: Ranks, plan: str) -> None:
    """As they would in plain PyTorch: in groups, in state, in what is trained."""
    for found in two.run(_changed, plan):
        assert max(found.values()) < 1e-9, found


def test_a_replaced_entry_of_the_state_is_noticed() -> None:
    """Where it lies otherwise than its weight, the fused update would take it element by wrong element."""
    model = nn.Linear(8, 4).double()
    model.weight.data = model.weight.detach().t().contiguous().t()
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, other))
    job = job_of(model, mine)
    data = batches(4)
    for x in data[:2]:
        job.step(x)
    by_hand(other, theirs, data[:2])
    entry = torch.rand(4, 8, dtype=torch.float64)
    mine.state[mine.param_groups[0]["params"][0]]["exp_avg"] = entry.clone()
    theirs.state[other.weight]["exp_avg"] = entry.clone()
    for x in data[2:]:
        job.step(x)
    by_hand(other, theirs, data[2:])
    assert gap(job, other) < 1e-12


def _meddled(plan: str) -> dict[str, str]:
    out = {}

    def stranger(job: Any, model: Any) -> None:
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    def twice(job: Any, model: Any) -> None:
        job.optimizer.param_groups.append({**job.optimizer.param_groups[0], "params": list(model.head.parameters())})

    def hook(job: Any, model: Any) -> None:
        job.optimizer.register_step_post_hook(lambda *_: None)

    for name, change in {"stranger": stranger, "twice": twice, "hook": hook}.items():
        model = adapted()
        job = job_of(model, torch.optim.SGD, plan)
        job.step(batches(1)[0])
        change(job, model)
        out[name] = refusal(lambda job=job: job.step(batches(1)[0]))
    return out


def test_changes_that_can_not_count_are_refused_by_name(two: Ranks) -> None:
    """At the next step, on every rank."""
    for found in two.run(_meddled, "zero1"):
        assert "parameter 0 of group 1 of the optimizer ((3,)) is not one of the model's" in found["stranger"]
        assert "head.weight is named twice" in found["twice"]
        assert "a hook around SGD.step" in found["hook"]


def _staged_changes() -> list[str]:
    out = []
    for change in (add_group, freeze, clear):
        model = adapted(norm=False)
        plan = laminar.plans.pipeline(laminar.capture(model, loss, batches(1, 4)[0]), 2, 2)
        optimizer = torch.optim.AdamW(without_head(model), lr=0.1)
        job = laminar.parallelize(model, loss, optimizer, batch=batches(1)[0], plan=plan, device="cpu")
        job.step(batches(1)[0])
        change(model, optimizer)
        out.append(refusal(lambda job=job: job.step(batches(1)[0])))
        job.close()
    return out


def test_a_job_with_stages_says_what_it_can_not_change(two: Ranks) -> None:
    """Every rank has some of the parameters: the same error is raised by all."""
    for added, frozen, cleared in two.run(_staged_changes):
        assert "groups were changed" in added and "frozen after the job was made" in frozen and cleared == "taken"


# --- frozen parameters ---------------------------------------------------------------------------


def _frozen(plan: str) -> tuple[float, dict[str, int], int, int, set[str]]:
    model = adapted()
    other = copy.deepcopy(model)
    frozen = sum(p.nbytes for p in model.base.parameters())
    rest = sum(p.nbytes for p in model.parameters()) - frozen
    optimizer = partial(torch.optim.AdamW, lr=0.05)
    job = job_of(model, optimizer, plan)
    data = batches(3)
    for x in data:
        job.step(x)
    by_hand(other, optimizer(other.parameters()), data)
    return gap(job, other), job.memory(), frozen, rest, set(job.plan.state)


def test_zero3_keeps_frozen_parameters_in_pieces_too(two: Ranks) -> None:
    """With adapters they are nearly all of the model; they have neither gradients nor state."""
    for plan, parts in (("zero3", 2), ("zero2", 1)):
        for weights, memory, frozen, rest, state in two.run(_frozen, plan):
            assert weights < 1e-12
            assert memory["parameters"] == (frozen + rest) // parts
            assert memory["gradients"] == rest // 2 and memory["state"] == rest
            assert not any(name.startswith("base") for name in state)


def test_zero_on_a_searched_plan_cuts_frozen_parameters() -> None:
    """The same promise where a search has placed the ops."""
    from laminar.placement import presets

    graph, mesh = laminar.capture(adapted(), loss, batches(1)[0]), laminar.Mesh({"dp": 2})
    whole = laminar.plans.data_parallel(graph, mesh)
    found = {stage: presets.in_pieces(graph, whole, stage) for stage in (1, 2, 3)}
    assert found[3].inputs["base.weight"] == (laminar.S(0),) and "base.weight" not in found[3].state
    assert all(found[s].inputs["base.weight"] == (laminar.B,) for s in (1, 2))
    assert laminar.verify(adapted(), loss, batches(2), found[3]).ok
