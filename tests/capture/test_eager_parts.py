"""Parts of a model that look at data run as they are, and everything around them is planned and trained as before.

The oracle is the model itself in plain PyTorch, in float64. Parts are found by tracing, unless a test declares one with
`laminar.eager`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laminar
from laminar.api import inputs_of
from laminar.events import listening
from laminar.ir.graph import Graph
from laminar.runtime.check.one_device import run_graph
from tests.support.rank_pool import Ranks

D = 8


class Experts(nn.Module):
    """A loop over the experts that were hit, as transformers' eager experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, D, D) / 3), nn.Parameter(torch.randn(4, D, D) / 3)
        self.gate = nn.Linear(D, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(-1, D)
        weights, chosen = self.gate(y).softmax(-1).topk(2, -1)
        out = torch.zeros_like(y)
        for e in chosen.unique():
            token, k = torch.where(chosen == e)
            out.index_add_(0, token, F.silu(y[token] @ self.up[e]) @ self.down[e] * weights[token, k, None])
        return out.view_as(x)


class Chosen(nn.Module):
    """Works on the tokens with a positive score alone."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.work = nn.Linear(D, 1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        at = (self.score(x)[..., 0] > 0).nonzero(as_tuple=True)
        out = x.clone()
        out[at] = self.work(x[at]).tanh()
        return out


class Early(nn.Module):
    """Leaves when little changes: sometimes it returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.abs().mean() < 0.35:
                return x
            x = layer(x).tanh() * 0.6
        return x


class Masked(nn.Module):
    """Overwrites spans of what it is given in place, at places that numpy works out."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        mask = np.zeros(x.shape[:2], dtype=bool)
        for row, start in enumerate(np.argmax(x.detach().numpy()[..., 0], 1)):
            mask[row, start : start + 2] = True
        x[torch.from_numpy(mask)] = self.mark.to(x.dtype)
        return x


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(np.cos(ctx.saved_tensors[0].numpy())) * grad


class Numpy(nn.Module):
    """There and back through numpy, with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return _Sine.apply(x * self.scale)  # type: ignore[no-any-return, no-untyped-call]


class Counting(nn.Module):
    """Changes buffers: how often each unit won, and the statistics of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.register_buffer("wins", torch.zeros(D, dtype=torch.int64))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).view_as(x)
        won = y.flatten(0, 1).argmax(-1)
        self.wins += torch.bincount(won, minlength=D)
        return y * 2 if int(won[0]) % 2 else y + self.unused.sum()


class Leaving(nn.Module):
    """Leaves a loss of its own on itself, which the loss function reads; part of it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.aux: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = checkpoint(lambda t: self.inner(t).relu(), x, use_reentrant=False)
        keep = y[y.sum(-1) > 1]
        self.aux = keep.pow(2).sum() / x.numel()
        return y + x, {"kept": torch.tensor(float(len(keep)), dtype=x.dtype)}


class Net(nn.Module):
    """Layers around two of a kind; the head's weight is tied to the embedding's."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, D)
        self.before = nn.Linear(D, D)
        self.parts = nn.ModuleList(part() for _ in range(2))
        self.after = nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.before(self.emb(ids))
        for part in self.parts:
            out = part(y * 1.5)
            y = y + (out[0] if isinstance(out, tuple) else out)
        return self.after(y).tanh() @ self.emb.weight.T


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy, and what parts have left."""
    value = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
    for m in model.modules():
        if getattr(m, "aux", None) is not None:
            value = value + m.aux
    return value


def batches(n: int, size: int = 4) -> Iterator[dict[str, Tensor]]:
    for i in range(n):
        g = torch.Generator().manual_seed(100 + i)
        yield {k: torch.randint(0, 11, (size, 5), generator=g) for k in "xy"}


def net(part: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(part).double()


def plain(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Loss and gradients of the model itself."""
    value = loss(model, batch)
    out = {"loss:loss": value.detach()}
    value.backward()
    for name, p in model.named_parameters():
        out[f"grad:{name}"] = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
    return out


def eager_ops(graph: Graph) -> list[Any]:
    return [n for n in graph.nodes if n.op.startswith("laminar.eager")]


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((got[k] - w).abs().max()) for k, w in want.items() if k in got)


PARTS = [Experts, Chosen, Early, Masked, Numpy, Counting, Leaving]
DP, TP = laminar.Mesh({"dp": 2}), laminar.Mesh({"tp": 2})
PLANS: dict[str, Callable[[Graph], Any]] = {
    "data": lambda g: laminar.plans.data_parallel(g, DP),
    "zero3": lambda g: laminar.plans.zero(g, DP, 3),
    "tensor": lambda g: laminar.plans.tensor_parallel(g, TP),
    "recompute": lambda g: laminar.plans.zero(g, DP, 3, recompute="parts.*"),
}


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.__name__)
def test_what_looks_at_data_is_one_op_and_gives_what_plain_pytorch_gives(part: Any) -> None:
    """The part runs as it is, twice in the model; all else is captured; every plan gives the same numbers."""
    model, data = net(part), list(batches(3))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    graph = laminar.capture(model, loss, data[0])
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    forward = [n for n in eager_ops(graph) if n.op == "laminar.eager"]
    assert len(forward) >= 2 and {n.module for n in forward} <= {"parts.0", "parts.1"}
    assert any(n.op == "aten.mm" or n.op == "aten.addmm" for n in graph.nodes)
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).hash == graph.hash
    for batch in data:
        want = plain(model, batch)
        model.load_state_dict(state)
        got = run_graph(graph, inputs_of(graph, model, batch))
        assert apart(got, want) < 1e-12
    for name in ("zero3", "tensor") if part is not Counting else PLANS:
        report = laminar.verify(model, loss, data[:1], PLANS[name](graph), graph=graph)
        assert report.ok, f"{name}: {report}"


def _trained(part: Any, plan: Any, options: dict[str, Any]) -> tuple[float, float]:
    """Largest difference of losses and of weights from an ordinary loop."""
    model, other, data = net(part), net(part), list(batches(4))
    sgd = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, other)]
    if plan == "recompute":
        mesh = laminar.Mesh({"dp": torch.distributed.get_world_size()})
        plan = lambda g, m: laminar.plans.zero(g, mesh, 3, recompute="parts.*")  # noqa: E731
    job = laminar.parallelize(model, loss, sgd[0], batch=data[0], plan=plan, device="cpu", **options)
    off = 0.0
    for batch in data:
        sgd[1].zero_grad()
        value = loss(other, batch)
        value.backward()
        for p in other.parameters():  # a parameter that was not looked at this time has a gradient of zero, not none
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        sgd[1].step()
        off = max(off, abs(float(job.step(batch).loss) - value.item()))
    state = job.state_dict()
    return off, max(float((state[k].double() - v.double()).abs().max()) for k, v in other.state_dict().items())


@pytest.mark.parametrize(
    ("part", "plan", "options"),
    [
        (Experts, "zero3", {"micro_batches": 2}),
        (Counting, "recompute", {}),
        pytest.param(Experts, "data", {}, marks=pytest.mark.slow),
        pytest.param(Masked, "tensor", {}, marks=pytest.mark.slow),
        pytest.param(Leaving, "zero3", {}, marks=pytest.mark.slow),
        pytest.param(Numpy, "data", {"precision": "f32"}, marks=pytest.mark.slow),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_real_ranks_train_to_the_weights_of_an_ordinary_loop(two: Ranks, part: Any, plan: Any, options: Any) -> None:
    """Four steps on two processes, the part on whole tensors."""
    for off, weights in two.run(_trained, part, plan, options):
        assert off < 1e-12 and weights < 1e-12


# --- declared ------------------------------------------------------------------------------------


@laminar.eager(batch_dim=0)
def clipped(x: Tensor, bound: Tensor) -> Tensor:
    """By samples: a branch for each of them."""
    return torch.stack([row if row.norm() < bound[0] else row / row.norm() for row in x])


class Scaling(nn.Module):
    """A method that looks at data, and reads one of many tensors of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.factor = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(clipped(self.scaled(x), self.factor.abs() * 3))

    @laminar.eager
    def scaled(self, x: Tensor, by: float = 0.7) -> Tensor:
        """More where there is little."""
        return x * self.factor if x.mean() > 0 else x * by * self.factor


def test_functions_and_methods_are_declared_and_read_what_they_read() -> None:
    """A method is given the tensors of its module that it looks at, and no others; samples are split over ranks."""
    model, data = net(Scaling), list(batches(2))
    graph = laminar.capture(model, loss, data[0])
    forward = [n for n in graph.nodes if n.op == "laminar.eager"]
    assert [n.args[2].split("-")[0] for n in forward] == ["scaled", "clipped"] * 2
    assert [r.name for r in forward[0].args[0]][1:] == ["parts.0.factor"]
    assert forward[1].args[4:6] == ((0,), (0,))
    for batch in data:
        assert apart(run_graph(graph, inputs_of(graph, model, batch)), plain(model, batch)) < 1e-12
    for plan in PLANS.values():
        assert laminar.verify(model, loss, data, plan(graph), graph=graph).ok
    split = PLANS["data"](graph)
    assert str(split.ops[forward[1].name].outs[0][0]) == "S(0)" and str(split.ops[forward[0].name].outs[0][0]) == "B"


@pytest.mark.parametrize("how", ["instance", "class"])
def test_modules_are_declared_one_by_one_or_by_class(how: str) -> None:
    """What could be captured runs as it is because its user says so; outside of capture nothing has changed."""

    class Plain(nn.Linear):
        pass

    if how == "class":
        assert laminar.eager(Plain, batch_dim=0) is Plain
    model = net(lambda: Plain(D, D))
    if how == "instance":
        assert laminar.eager(model.parts[0], batch_dim=0) is model.parts[0]  # type: ignore[index]
    (batch,) = batches(1)
    want = plain(model, batch)
    graph = laminar.capture(model, loss, batch)
    assert sum(n.op == "laminar.eager" for n in graph.nodes) == (2 if how == "class" else 1)
    assert apart(run_graph(graph, inputs_of(graph, model, batch)), want) < 1e-12
    plan = PLANS["data"](graph)
    node = next(n for n in graph.nodes if n.op == "laminar.eager_backward")
    assert [str(nd[0]) for nd in plan.ops[node.name].outs] == ["S(0)", "P(sum)", "P(sum)"]
    assert laminar.verify(model, loss, [batch], plan, graph=graph).ok


def test_a_wrong_word_about_samples_is_refused() -> None:
    """Half a batch must give half the results."""

    @laminar.eager(batch_dim=0)
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    model = net(nn.Identity)
    (batch,) = batches(1)
    with pytest.raises(laminar.CaptureError, match="centred is declared to run sample by sample"):
        laminar.capture(model, lambda m, b: centred(m(b["x"])).pow(2).sum(), batch)


def test_shapes_that_no_trial_finds_are_declared() -> None:
    """On made-up values the part fails; `out=` says what it makes, on meta too."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if float(x.abs().max()) > 1e-3:
                raise ValueError("too large for me")
            return x[x > -1].view_as(x) * 2

    model = net(Picky)
    model.before.weight.data *= 1e-5  # type: ignore[union-attr]
    model.before.bias.data *= 1e-5  # type: ignore[union-attr]
    (batch,) = batches(1)
    with pytest.raises(laminar.CaptureError, match="did not run on values made up for a trial") as info:
        laminar.capture(model, loss, batch)
    assert "laminar.eager" in str(info.value)
    for part in model.parts:  # type: ignore[union-attr]
        laminar.eager(part, out=torch.empty_like)
    graph = laminar.capture(model, loss, batch)
    assert apart(run_graph(graph, inputs_of(graph, model, batch)), plain(model, batch)) < 1e-12
    with torch.device("meta"):
        bare = Net(Picky).double()
    for part in bare.parts:  # type: ignore[union-attr]
        laminar.eager(part, out=torch.empty_like)
    assert laminar.capture(bare, loss, batch).hash == graph.hash


# --- draws, regions, precisions --------------------------------------------------------------------


class Dropping(nn.Module):
    """Draws from torch, numpy and Python, as many times as data says."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        import random

        for _ in range(1 + int(x.detach().abs().sum()) % 2):
            x = F.dropout(self.work(x), 0.3) * random.uniform(0.5, 1) + float(np.random.rand(3)[1])
        return x


def test_draws_of_a_part_hang_on_the_step_and_not_on_the_ranks() -> None:
    """Backward and every rank see what forward drew, steps draw anew, and nobody's generator moves."""
    model, data = net(Dropping), list(batches(2))
    graph = laminar.capture(model, loss, data[0])
    for name in ("zero3", "recompute"):
        assert laminar.verify(model, loss, data, PLANS[name](graph), graph=graph).ok
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    first, again, later = (run_graph(graph, inputs_of(graph, model, data[0], step=s)) for s in (0, 0, 1))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert apart(first, again) == 0 and apart(first, later) > 1e-3


class Region(nn.Module):
    """What looks at data, inside of a region that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.part = nn.Linear(D, D), Chosen()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: self.part(self.inner(t).sin()), x, use_reentrant=False)  # type: ignore[no-any-return]


class Reentrant(nn.Module):
    """A region of the older kind, inside of what looks at data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() == 0:
            return x
        return checkpoint(lambda t: self.inner(t).sin(), x, use_reentrant=True)  # type: ignore[no-any-return]


class Casting(nn.Module):
    """Under autocast, and with a dtype written down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.float().softmax(-1).to(y.dtype) if y.max() > 0 else y


@pytest.mark.parametrize("part", [Region, Reentrant], ids=lambda p: p.__name__)
def test_regions_around_and_inside_give_the_same_gradients(part: Any) -> None:
    """Recomputation reads the part's tensors again, after the call has ended."""
    model, (batch,) = net(part), batches(1)
    graph = laminar.capture(model, loss, batch)
    assert eager_ops(graph)
    assert apart(run_graph(graph, inputs_of(graph, model, batch)), plain(model, batch)) < 1e-12
    assert laminar.verify(model, loss, [batch], PLANS["zero3"](graph), graph=graph).ok


def test_autocast_holds_inside_of_a_part() -> None:
    """And verification widens what the part says about dtypes."""
    model, (batch,) = net(Casting).float(), batches(1)

    def cast(m: nn.Module, b: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(m, b)

    graph = laminar.capture(model, cast, batch)
    specs = [str(o) for n in graph.nodes if n.op == "laminar.eager" for o in n.outs]
    assert specs == ["bf16[4,5,8]"] * 2
    value = cast(model, batch)
    got = run_graph(graph, inputs_of(graph, model, batch))
    assert float((got["loss:loss"] - value.detach()).abs()) < 1e-5
    assert laminar.verify(model, cast, [batch], PLANS["data"](graph), graph=graph).ok


# --- refused -----------------------------------------------------------------------------------------


class Growing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Stepping(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if x.sum() > 0 else -x


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        last = getattr(self, "last", None)
        self.last = x.mean().detach()
        return x if last is None or x.sum() > last else -x


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.elsewhere: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.elsewhere[0].weight if x.sum() > 0 else x * self.weight


def test_what_a_part_may_not_do_is_refused_by_name() -> None:
    """A shape for the rest of the model, a counter, state behind our back, a weight of somebody else's."""
    (batch,) = batches(1)

    def said(model: nn.Module) -> str:
        with pytest.raises(laminar.CaptureError) as info:
            laminar.capture(model, loss, batch)
        return str(info.value)

    assert "a shape that depends on data" in said(net(Growing))
    assert "changes calls from 0 to 1" in said(net(Stepping))
    assert "the next step reads it" in said(net(Remembering))
    model = net(Peeking)
    for part in model.parts:  # type: ignore[union-attr]
        part.elsewhere = [model.after]
    assert "neither its own nor given to it" in said(model)


def test_the_loss_and_the_model_itself_are_refused_with_the_way_out() -> None:
    """There is nothing around them to keep."""
    (batch,) = batches(1)
    with pytest.raises(laminar.CaptureError, match="the truth of a tensor") as info:
        laminar.capture(net(nn.Identity), lambda m, b: loss(m, b) if loss(m, b) > 0 else loss(m, b) * 2, batch)
    assert "laminar.eager" in str(info.value)


def test_a_graph_says_what_it_misses_where_nobody_captured() -> None:
    """A graph holds names; the Python behind them is in the process that captured the model."""
    from laminar.capture.ops import eager_parts

    model, (batch,) = net(Early), batches(1)
    graph = laminar.capture(model, loss, batch)
    given = inputs_of(graph, model, batch)
    assert not eager_parts.missing([(n.op, n.args) for n in graph.nodes])
    del model
    gc.collect()
    with pytest.raises(laminar.GraphError, match="this process has not captured it"):
        run_graph(graph, given)


def test_what_runs_as_it_is_is_said() -> None:
    """As an event, with the line that made it necessary."""
    seen: list[Any] = []
    (batch,) = batches(1)
    with listening(seen.append):
        laminar.capture(net(Early), loss, batch)
    found = [e.fields for e in seen if e.kind == "eager"]
    assert [f["part"] for f in found] == ["parts.0", "parts.1"]
    assert all("if x.abs().mean() < 0.35" in f["at"] for f in found)


def test_a_plan_says_what_runs_as_it_is_and_its_price_counts() -> None:
    """By module, with its share of the work; a simulated step takes the part's operations into account."""
    from laminar.cost.ops.eager import as_they_are

    model, (batch,) = net(Experts), batches(1)
    graph = laminar.capture(model, loss, batch)
    rows = as_they_are(graph)
    assert [r["module"] for r in rows] == ["parts.0", "parts.1"] and all(0.2 < r["share"] < 0.5 for r in rows)
    text = PLANS["data"](graph).explain()
    assert "runs as it is" in text and "parts.1 (Experts)" in text and "chosen.unique()" in text
    assert laminar.predict(graph, PLANS["zero3"](graph), laminar.Cluster.preset("2xh100")).seconds > 0


def test_stages_and_compiled_code_run_parts_too() -> None:
    """Within one stage; and between compiled parts, where no compiler looks inside."""
    from laminar.lower.lower import lower
    from laminar.runtime.code.inductor_step import Compiled, run_uncompiled
    from laminar.runtime.comm.transport import Null

    model, (batch,) = net(Experts), batches(1)
    for part in model.parts:  # type: ignore[union-attr]
        laminar.eager(part, batch_dim=0)  # or micro-batches would be refused: nobody knows what it does to samples
    graph = laminar.capture(model, loss, batch)
    one = laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 1}))
    step = Compiled(lower(graph, one), Null(one.mesh), compiler=run_uncompiled)
    given = inputs_of(graph, model, batch)
    outs = step(*[given[i.name].detach() for i in step.program.inputs])
    got = {f"{o.kind}:{o.name}": t for o, t in zip(step.program.outputs, outs, strict=True)}
    assert apart(got, plain(model, batch)) < 1e-12 and not step.replays
    assert sum(len(p.lines) == 1 and p.compiler is run_uncompiled for p in step.parts) >= 4
    half = {k: v[:2] for k, v in batch.items()}
    small = laminar.capture(model, loss, half)
    staged = laminar.plans.pipeline(small, 2, microbatches=2)
    assert laminar.verify(model, loss, [batch], staged).ok
