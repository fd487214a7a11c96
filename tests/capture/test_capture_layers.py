"""Torch's functions, norms, layers, attention and losses, one by one: the graph computes what eager PyTorch does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from tests.support.capture_check import Fn, Make, Step, close, draw, eager, graph_outputs, ids, made, ops, same, square

# --- functions, norms, layers --------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounding whose gradient passes through, scaled: no autograd of torch's own would find it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1) * 0.5, None


def test_a_custom_autograd_function_keeps_its_own_backward() -> None:
    """Straight-through estimators and gradient reversal exist only in their backward."""
    same(
        lambda: Fn(lambda m, x: m.b(Straight.apply(m.a(x), 4.0)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        square,
        draw(6, 3),
    )


def test_hooks_of_modules_and_activations_are_part_of_the_graph() -> None:
    """Unlike hooks on parameters they run while a step is traced, so they are simply captured."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[1].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))
        return model

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda g: g * 0.5)
        return out.square().mean()

    same(make, loss, draw(6, 3))


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = torch.tanh(model(x))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def _functional(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    shifted = {k: v + 0.1 for k, v in params.items()}
    each = torch.func.vmap(
        torch.func.grad(lambda r: torch.tanh(torch.func.functional_call(model, shifted, (r,))).sum())
    )
    return each(x).square().mean()


def _inner_step(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    inner = torch.func.functional_call(model, params, (x[:3],)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    tuned = {k: v - 0.1 * g for (k, v), g in zip(params.items(), grads, strict=True)}
    return torch.func.functional_call(model, tuned, (x[3:],)).square().mean()


def _teacher(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        aim = model[0](x).softmax(-1)  # type: ignore[index]
    return F.kl_div(model(x).log_softmax(-1), aim @ torch.ones(4, 2), reduction="batchmean")


def _two_parts(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.mean() + sum((p**2).sum() for p in model.parameters()) * 0.01


@pytest.mark.parametrize(
    "loss", [_penalty, _functional, _inner_step, _teacher, _two_parts], ids=lambda f: f.__name__.strip("_")
)
def test_losses_that_differentiate_or_call_functionally_are_captured(loss: Step) -> None:
    """Gradient penalties, meta-learning and distillation are steps like any other."""
    same(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), loss, draw(6, 3), tol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_traced_through() -> None:
    """Scripts compile their model first; what it computes is what is captured."""
    model = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    plain = capture(model, square, draw(6, 3))
    compiled = capture(torch.compile(model), square, draw(6, 3))  # type: ignore[arg-type]
    assert [n.op for n in compiled.nodes] == [n.op for n in plain.nodes]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), 0], ids=str)
def test_devices_named_in_the_code_do_not_matter(device: Any) -> None:
    """A model written for a GPU is captured on a laptop, and the graph is the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.to(device).to(device, torch.float32, non_blocking=True)
        y = m.a(x) + torch.ones(2, device=device) + torch.arange(2, device=device)
        z = torch.tensor([1.0, 2.0], device=device) + x.new_zeros(2, device=device)
        return y * z.cuda().to(y) + torch.zeros_like(y, device=device)

    def plain(m: Any, x: Tensor) -> Tensor:
        return (m.a(x) + torch.ones(2) + torch.arange(2)) * torch.tensor([1.0, 2.0])

    model, x = made(lambda: Fn(forward, a=nn.Linear(3, 2))), draw(4, 3)
    got = graph_outputs(capture(model, square, x), model, x)
    want = eager(lambda: Fn(plain, a=nn.Linear(3, 2)), square, x, None)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_capture_leaves_random_numbers_where_they_were() -> None:
    """A captured run and a plain one must be able to start from the same seed."""
    import random

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    capture(model, square, draw(6, 3))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def _weight_norm_old() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), torch.nn.utils.weight_norm(nn.Linear(4, 2))
    )


def _spectral_norm_old() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _weight_norm_new() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _spectral_norm_new() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _orthogonal() -> nn.Module:
    return nn.Sequential(
        torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), nn.Linear(4, 2)
    )


@pytest.mark.parametrize(
    "make",
    [_weight_norm_old, _weight_norm_new, _spectral_norm_old, _spectral_norm_new],
    ids=lambda f: f.__name__.strip("_"),
)
def test_weights_computed_from_other_weights_are_followed(make: Make) -> None:
    """Hooks and parametrizations compute a weight in every forward; the trained tensors are behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        graph = same(make, square, draw(6, 3))
    assert any("weight_g" in i.name or "original" in i.name or "weight_orig" in i.name for i in graph.of_kind("param"))
    grads = {o.name for o in graph.outputs if o.kind == "grad"}
    assert grads == {i.name for i in graph.of_kind("param")}


def test_orthogonal_parametrization_is_followed() -> None:
    """Linear algebra in forward is arithmetic like any other."""
    same(_orthogonal, square, draw(6, 4), tol=1e-5)


def _first(module: nn.Module) -> Make:
    return lambda: Fn(lambda m, x: m.inner(x)[0], inner=copy.deepcopy(module))


LAYERS: dict[str, tuple[Make, Any]] = {
    "multihead attention": (
        lambda: Fn(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        draw(2, 5, 8),
    ),
    "multihead attention with weights and masks": (
        lambda: Fn(
            lambda m, b: m.a(b[0], b[0], b[0], key_padding_mask=b[1], attn_mask=b[2], need_weights=False)[0],
            a=nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2, add_bias_kv=True),
        ),
        (draw(2, 5, 8), ids(2, 2, 5).bool() & (torch.arange(5) > 0), torch.triu(torch.ones(5, 5), 1).bool()),
    ),
    "transformer encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        draw(2, 5, 8),
    ),
    "transformer encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True),
        draw(2, 5, 8),
    ),
    "transformer decoder layer": (
        lambda: Fn(
            lambda m, b: m.a(*b, tgt_is_causal=True, tgt_mask=torch.full((5, 5), -torch.inf).triu(1)),
            a=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        ),
        (draw(2, 5, 8), draw(2, 4, 8, seed=2)),
    ),
    "gru": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(4, 3)), draw(5, 2, 4)),
    "gru, all its options": (
        lambda: Fn(lambda m, x: m.a(x)[0], a=nn.GRU(4, 3, 2, batch_first=True, dropout=0.4, bidirectional=True)),
        draw(2, 5, 4),
    ),
    "rnn": (lambda: Fn(lambda m, x: m.a(x)[1], a=nn.RNN(4, 3, 2, nonlinearity="relu")), draw(5, 2, 4)),
    "lstm": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 2, 4)),
    "lstm, its last states": (
        lambda: Fn(lambda m, x: torch.cat(m.a(x)[1]), a=nn.LSTM(4, 3, 2, bias=False, batch_first=True)),
        draw(2, 5, 4),
    ),
    "lstm, all its options": (
        lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3, 2, batch_first=True, dropout=0.4, bidirectional=True)),
        draw(2, 5, 4),
    ),
    "lstm without a batch": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 4)),
    "lstm with projections": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 6, proj_size=3)), draw(5, 2, 4)),
    "lstm cell": (lambda: Fn(lambda m, x: m.a(x)[1], a=nn.LSTMCell(4, 3)), draw(5, 4)),
    "gru cell": (lambda: Fn(lambda m, x: m.a(x), a=nn.GRUCell(4, 3)), draw(5, 4)),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), ids(7, 3, 5)),
    "embedding scaled by frequency": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), ids(7, 3, 5)),
    "embedding bag, sums": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), ids(7, 3, 5)),
    "embedding bag, means": (lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=1), ids(7, 3, 5)),
    "embedding bag, maxima": (lambda: nn.EmbeddingBag(7, 4, mode="max"), ids(7, 3, 5)),
    "embedding bag with offsets, maxima": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, mode="max", padding_idx=3)),
        (ids(7, 9), torch.tensor([0, 2, 2, 6])),
    ),
    "embedding bag with offsets, sums": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, mode="sum")),
        (ids(7, 9), torch.tensor([0, 2, 2, 6])),
    ),
    "embedding bag with offsets, means": (
        lambda: Fn(lambda m, b: m.a(*b), a=nn.EmbeddingBag(7, 4, include_last_offset=True)),
        (ids(7, 9), torch.tensor([0, 2, 2, 6, 9])),
    ),
    "embedding bag with weights": (
        lambda: Fn(
            lambda m, b: m.a(b[0], b[1], per_sample_weights=m.w * b[2]),
            a=nn.EmbeddingBag(7, 4, mode="sum"),
            w=nn.Parameter(torch.linspace(0.5, 1.5, 9)),
        ),
        (ids(7, 9), torch.tensor([0, 2, 2, 6]), draw(9)),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2),
            nn.GroupNorm(2, 4),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 2, 2),
            nn.InstanceNorm2d(2),
            nn.AdaptiveAvgPool2d(2),
        ),
        draw(2, 2, 9, 9),
    ),
    "1-d and 3-d convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(12, 2)),
        draw(2, 2, 8),
    ),
    "padding modes and upsampling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(3, 2, 3, padding="same", padding_mode="circular"),
            nn.PixelShuffle(1),
        ),
        draw(2, 2, 5, 5),
    ),
    "activations": (
        lambda: Fn(
            lambda m, x: sum(
                f(m.a(x))
                for f in (
                    F.gelu,
                    F.silu,
                    F.elu,
                    F.selu,
                    F.mish,
                    F.softplus,
                    F.hardswish,
                    F.leaky_relu,
                    F.logsigmoid,
                    F.tanhshrink,
                    F.relu6,
                )
            ),
            a=nn.Linear(3, 4),
        ),
        draw(6, 3),
    ),
    "prelu, glu and softmax": (
        lambda: Fn(
            lambda m, x: F.softmax(F.glu(m.p(m.a(x))), -1) + F.log_softmax(m.a(x)[:, :2], 0),
            a=nn.Linear(3, 4),
            p=nn.PReLU(4),
        ),
        draw(6, 3),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Linear(3, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Unflatten(1, (2, 4)), nn.LocalResponseNorm(2)
        ),
        draw(6, 3),
    ),
    "bilinear and cosine": (
        lambda: Fn(
            lambda m, x: F.cosine_similarity(m.a(x, x), x @ m.w, dim=-1),
            a=nn.Bilinear(3, 3, 4),
            w=nn.Parameter(torch.ones(3, 4)),
        ),
        draw(6, 3),
    ),
    "einsum": (
        lambda: Fn(
            lambda m, x: torch.einsum("bthd,bshd,hk->bkts", x @ m.q, x, m.w),
            q=nn.Parameter(draw(4, 4)),
            w=nn.Parameter(draw(3, 2)),
        ),
        draw(2, 5, 3, 4),
    ),
    "dropouts": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1),
            nn.Dropout2d(0.4),
            nn.Dropout(0.3, inplace=True),
            nn.AlphaDropout(0.2),
            nn.RReLU(inplace=True),
            nn.FeatureAlphaDropout(0.2),
        ),
        draw(6, 2, 4, 4),
    ),
    "gumbel softmax": (
        lambda: Fn(
            lambda m, x: F.gumbel_softmax(m.a(x), tau=0.7) + F.gumbel_softmax(m.a(x), hard=True), a=nn.Linear(3, 4)
        ),
        draw(6, 3),
    ),
    "noise": (
        lambda: Fn(
            lambda m, x: m.a(
                x
                + 0.1 * torch.randn(x.shape)
                + torch.randn_like(x)
                + torch.rand(6, 3)
                + torch.rand_like(x)
                + torch.normal(0.0, 1.0, (6, 3))
                + torch.randn(size=(3,))
                + torch.empty(6, 3).uniform_(-1, 1)
                + x.new_empty(6, 3).normal_()
                + torch.zeros(6, 3).bernoulli_(0.3)
                + torch.bernoulli(torch.full((6, 3), 0.3))
            ),
            a=nn.Linear(3, 4),
        ),
        draw(6, 3),
    ),
    "draws of whole numbers": (
        lambda: Fn(
            lambda m, x: m.a(x[torch.randperm(6)]) * torch.randint(1, 5, (6, 1)) + torch.randint(3, (4,)),
            a=nn.Linear(3, 4),
        ),
        draw(6, 3),
    ),
    "distributions": (
        lambda: Fn(lambda m, x: torch.distributions.Normal(m.a(x), 1.0).rsample(), a=nn.Linear(3, 4)),
        draw(6, 3),
    ),
    "tensor methods": (
        lambda: Fn(
            lambda m, x: (
                m.a(x)
                .roll(1, 0)
                .flip(1)
                .cumsum(0)
                .topk(2, dim=1)[0]
                .sort(0)[0]
                .repeat(1, 2)
                .tril()
                .logsumexp(0)
                .unsqueeze(0)
                + torch.stack([m.a(x).amax(1), m.a(x).var(1), m.a(x).norm(dim=1)], 1).sum()
            ),
            a=nn.Linear(3, 4),
        ),
        draw(6, 3),
    ),
    "indexing": (
        lambda: Fn(
            lambda m, x: (
                m.a(x)[torch.tensor([0, 2, 4])][:, None, ::2].expand(3, 2, 2)
                + torch.take_along_dim(m.a(x)[:3], torch.tensor([[0], [1], [2]]), 1).unsqueeze(-1)
            ),
            a=nn.Linear(3, 4),
        ),
        draw(6, 3),
    ),
    "vmap": (
        lambda: Fn(lambda m, x: torch.vmap(lambda r: m.w @ r)(x), w=nn.Parameter(draw(4, 3))),
        draw(6, 3),
    ),
    "complex": (
        lambda: Fn(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.w), n=8),
            w=nn.Parameter(draw(5, 2)),
        ),
        draw(6, 8),
    ),
    "complex solve from the right": (
        lambda: Fn(
            lambda m, x: torch.view_as_real(
                torch.linalg.solve(
                    torch.view_as_complex(m.w) + 3 * torch.eye(4), torch.view_as_complex(x), left=False
                ).resolve_conj()
            ),
            w=nn.Parameter(draw(4, 4, 2)),
        ),
        draw(6, 4, 2),
    ),
}
"""What users build models of: a model and its batch."""


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_captured_is_the_layer(name: str) -> None:
    """Users bring torch's own layers first of all."""
    make, batch = LAYERS[name]
    same(make, square, batch, tol=1e-5)


MASK = ids(2, 5, 5).bool() | torch.eye(5, dtype=torch.bool)
ATTENTION: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 4), (2, 3, 5, 4), {}),
    "causal": ((2, 3, 5, 4), (2, 3, 5, 4), {"is_causal": True}),
    "bool mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": MASK}),
    "float mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": draw(2, 1, 5, 5)}),
    "learned bias": ((2, 3, 5, 4), (2, 3, 5, 4), {"attn_mask": "bias"}),
    "3-D": ((2, 5, 4), (2, 5, 4), {}),
    "3-D with a mask": ((2, 5, 4), (2, 5, 4), {"attn_mask": draw(2, 5, 5)}),
    "2-D": ((5, 4), (5, 4), {}),
    "5-D": ((2, 2, 3, 5, 4), (2, 2, 3, 5, 4), {}),
    "dropout": ((2, 3, 5, 4), (2, 3, 5, 4), {"dropout_p": 0.3, "is_causal": True}),
    "dropout and mask": ((2, 3, 5, 4), (2, 3, 5, 4), {"dropout_p": 0.3, "attn_mask": MASK}),
    "grouped queries": ((2, 6, 5, 4), (2, 2, 5, 4), {"enable_gqa": True}),
    "grouped queries with dropout": ((2, 6, 5, 4), (2, 2, 5, 4), {"enable_gqa": True, "dropout_p": 0.3}),
    "one key head": ((2, 6, 5, 4), (2, 1, 5, 4), {}),
    "cross attention, scaled": ((2, 3, 5, 4), (2, 3, 7, 4), {"scale": 0.3}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_every_form_is_captured(name: str) -> None:
    """One op for attention, whatever kernel this device would have chosen."""
    q, k, options = ATTENTION[name]

    def forward(m: Any, x: Any) -> Tensor:
        extra = {key: m.bias if isinstance(v, str) else v for key, v in options.items()}
        return F.scaled_dot_product_attention(x[0] * m.s, x[1] * m.s, x[2] * m.s, **extra)

    def make() -> nn.Module:
        return Fn(forward, s=nn.Parameter(torch.linspace(0.5, 1.5, 4)), bias=nn.Parameter(draw(5, 5)))

    graph = same(make, square, (draw(*q), draw(*k, seed=2), draw(*k, seed=3)), tol=1e-5)
    if "dropout" not in name and "D" not in name and "learned" not in name:
        assert ops(graph, "laminar.attention") == 1 and ops(graph, "laminar.attention_backward") == 1


# --- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
        {"weight": torch.linspace(0.5, 2, 5)},
        {"weight": torch.linspace(0.5, 2, 5), "label_smoothing": 0.1, "ignore_index": 2},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["rows", "images"])
def test_cross_entropy_in_every_form_is_captured(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """The loss is where gradients start: everything inherits its mistakes."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits.movedim(-1, 1) if logits.dim() > 2 else logits, batch["y"], **options)

    same(lambda: nn.Linear(3, 5), loss, {"x": draw(*shape, 3), "y": ids(5, *shape)})


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda x, y: F.cross_entropy(x, y.softmax(-1)),
        lambda x, y: F.gaussian_nll_loss(x, y, torch.linspace(0, 2, 6).unsqueeze(1)),
        lambda x, y: F.poisson_nll_loss(x, y.abs()),
        lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
        lambda x, y: F.margin_ranking_loss(x[:, 0], y[:, 0], torch.ones(6)),
        lambda x, y: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3, 0, 1])),
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6)),
        lambda x, y: F.hinge_embedding_loss(x, y.sign()),
        lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()),
    ],
)
def test_losses_of_torch_are_captured(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Each loss decomposes differently."""
    same(lambda: nn.Linear(3, 4), lambda m, b: loss(m(b[0]), b[1]), (draw(6, 3), draw(6, 4, seed=2)), tol=1e-5)


@pytest.mark.parametrize("number", [True, False])
def test_a_loss_may_be_a_total_and_a_weight(number: bool) -> None:
    """What is summed over everything and divided once does not depend on how the batch is cut."""

    def loss(model: nn.Module, batch: Any) -> laminar.Loss:
        keep = batch["y"] != 0
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * keep
        return laminar.Loss(each.sum(), 6.0 if number else keep.sum())  # type: ignore[arg-type]

    graph = same(lambda: nn.Linear(3, 5), loss, {"x": draw(6, 3), "y": ids(5, 6)})
    assert [o.name for o in graph.outputs if o.kind == "metric"] == ["loss_total", "loss_weight"]


# --- layers whose code in torch looks at data -----------------------------------------------------


def _ctc(flat: bool, tensors: bool, reduction: str = "mean", zero_infinity: bool = False) -> Any:
    labels = [[1, 2, 3], [2, 2, 0], [4, 0, 0]]
    lengths, sizes = [7, 6, 1], [3, 2, 1]
    aim = torch.tensor([k for row, n in zip(labels, sizes, strict=True) for k in row[:n]] if flat else labels)
    more = (torch.tensor(lengths), torch.tensor(sizes)) if tensors else (tuple(lengths), tuple(sizes))

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.a(x).log_softmax(-1)
        return F.ctc_loss(scores, aim, *more, reduction=reduction, zero_infinity=zero_infinity)

    return lambda: Fn(forward, a=nn.Linear(4, 5))


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.a(m.a(x) * 0.5)


LOOKING: dict[str, tuple[Make, Any]] = {
    **{
        f"instance norm {d}d with running statistics": (
            lambda d=d: Fn(_twice, a=getattr(nn, f"InstanceNorm{d}d")(3, affine=True, track_running_stats=True)),
            draw(4, 3, *[5, 2, 3][:d]),
        )
        for d in (1, 2, 3)
    },
    "instance norm without a batch": (
        lambda: Fn(_twice, a=nn.InstanceNorm1d(3, track_running_stats=True, affine=True)),
        draw(3, 5),
    ),
    "instance norm by its running statistics": (
        lambda: Fn(_twice, a=nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval()),
        draw(4, 3, 5, 2),
    ),
    "batch norm that averages over all batches": (lambda: Fn(_twice, a=nn.BatchNorm1d(4, momentum=None)), draw(6, 4)),
    "batch norm 2d that averages": (lambda: Fn(_twice, a=nn.BatchNorm2d(3, momentum=None)), draw(4, 3, 5, 2)),
    "ctc": (_ctc(False, False), draw(7, 3, 4)),
    "ctc, lengths as tensors": (_ctc(False, True), draw(7, 3, 4)),
    "ctc, labels in one row": (_ctc(True, False, "sum"), draw(7, 3, 4)),
    "ctc, labels in one row, lengths as tensors": (_ctc(True, True, "none"), draw(7, 3, 4)),
    "ctc without infinities": (_ctc(False, True, "none", True), draw(7, 3, 4)),
    "a mask for a transformer": (
        lambda: Fn(
            lambda m, x: m.a(x, mask=x[0, 0, :1].detach() * 0 + torch.ones(5, 5).tril().log()),
            a=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
        ),
        draw(3, 5, 4),
    ),
    "a causal mask made in forward": (
        lambda: Fn(
            lambda m, x: m.a(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5)),
            a=nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True),
        ),
        draw(3, 5, 4),
    ),
}


def _raw(forward: Any) -> Make:
    return lambda: Fn(forward, w=nn.Parameter(draw(3)), b=nn.Parameter(draw(3, seed=2)), rm=draw(3), rv=torch.ones(3))


LOOKING |= {
    "torch's own batch norm": (
        _raw(lambda m, x: torch.batch_norm(x, m.w, m.b, m.rm, m.rv, True, 0.1, 1e-5, False)),
        draw(4, 3, 5),
    ),
    "a kernel that writes statistics unsaid": (
        _raw(lambda m, x: torch.native_batch_norm(x, m.w, m.b, m.rm, m.rv, True, 0.1, 1e-5)[0]),
        draw(4, 3, 5),
    ),
    "torch's own instance norm": (
        _raw(lambda m, x: torch.instance_norm(x, m.w, m.b, m.rm, m.rv, True, 0.1, 1e-5, False)),
        draw(4, 3, 5),
    ),
    "labels up to the first -1": (
        _raw(
            lambda m, x: (
                F.multilabel_margin_loss(
                    x[:, :, 0] * m.w, torch.tensor([[0, -1, 1], [1, 2, -1], [0, 1, 2], [-1, 0, 0]])
                )
                + m.w.sum()
            )
        ),
        draw(4, 3, 5),
    ),
    "pooling that draws": (
        lambda: Fn(lambda m, x: F.fractional_max_pool2d(m.a(x), 2, 3), a=nn.Conv2d(3, 2, 1)),
        draw(2, 3, 7, 7),
    ),
}


@pytest.mark.parametrize("name", LOOKING)
def test_layers_that_look_at_data_in_torch_are_captured(name: str) -> None:
    """Statistics of several steps' worth, losses by lengths, masks that might be causal."""
    make, batch = LOOKING[name]
    same(make, square, batch, tol=2e-5)


def test_a_constant_causal_mask_becomes_causal_attention() -> None:
    """Known values of the mask decide, so no mask is carried along."""
    make, batch = LOOKING["a causal mask made in forward"]
    graph = capture(made(make), square, batch)
    found = [n for n in graph.nodes if n.op == "laminar.attention"]
    assert any(n.args[3] is None and n.args[4] for n in found)


@pytest.mark.parametrize("backward", [True, False])
def test_transformers_are_captured_without_their_kernels_for_inference(backward: bool) -> None:
    """In eval mode without gradients torch takes another path, which is not a layer but one opaque kernel."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = made(lambda: Fn(lambda m, x: m.a(x), a=nn.TransformerEncoder(layer, 2))).eval()
    graph = capture(model, square, draw(5, 3, 4), backward=backward)
    assert not any("transformer" in n.op for n in graph.nodes)


LYING: dict[str, Any] = {
    "pooled to one": lambda m, x: F.adaptive_avg_pool2d(m.a(x), 1).flatten(1),
    "pooled to one by torch itself": lambda m, x: torch._C._nn.adaptive_avg_pool2d(m.a(x), [1, 1]).flatten(1),
    "strides set anew": lambda m, x: m.a(x).contiguous().as_strided((2, 4, 196), (784, 196, 1)),
    "strides of channels": lambda m, x: m.a(x).as_strided((2, 14, 14, 4), (784, 56, 4, 1)),
    "written through strides": lambda m, x: _filled(m.a(x).clone(memory_format=torch.contiguous_format)),
}


def _filled(y: Tensor) -> Tensor:
    y.as_strided((2, 784), (784, 1))[:, :5] = 0.5
    return y


@pytest.mark.parametrize("name", LYING)
def test_images_with_channels_last_are_captured(name: str) -> None:
    """How a tensor lies in memory is nothing a graph knows; what is said by strides about the same memory is a view."""

    def make() -> nn.Module:
        return Fn(LYING[name], a=nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)

    same(make, square, draw(2, 3, 16, 16).to(memory_format=torch.channels_last), tol=1e-5)


def test_synchronised_batch_norm_is_the_norm_of_the_whole_batch() -> None:
    """Which is what it is for; plain PyTorch refuses to run it on a processor, so an ordinary one is the oracle."""
    batch = draw(4, 3, 5)
    model = Fn(lambda m, x: m.a(x), a=nn.SyncBatchNorm(3))
    got = graph_outputs(capture(model, square, batch), model, batch)
    want = eager(lambda: Fn(lambda m, x: m.a(x), a=nn.BatchNorm1d(3)), square, batch, None)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)
