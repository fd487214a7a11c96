"""Parts of a model under autocast, and parts that are computed again, are captured as such, with the same numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laminar.api import load_recipe
from laminar.capture.capture import capture
from tests.support.capture_check import (
    EXAMPLES,
    KEY,
    Fn,
    Make,
    Step,
    close,
    draw,
    eager,
    graph_outputs,
    made,
    ops,
    same,
    square,
)

# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_captured_as_a_policy(device: str) -> None:
    """`autocast("cuda")` in a training script says which ops are bf16, not where they run."""

    def loss(place: str) -> Step:
        def run(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast(place, dtype=torch.bfloat16):
                return square(model, batch)

        return run

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    model, batch = made(make), draw(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(model, loss(device), batch)
    assert {str(n.outs[0]) for n in graph.nodes if n.op == "aten.addmm"} == {"bf16[5,8]", "bf16[5,4]"}
    (norm,) = [n for n in graph.nodes if n.op == "aten.native_layer_norm"]
    assert str(norm.outs[0]) == ("f32[5,8]" if device == "cuda" else "bf16[5,8]"), "GPUs keep norms in float32"
    got, want = graph_outputs(graph, model, batch), eager(make, loss("cpu"), batch, None)
    for name, value in want.items():
        close(got[name], value, name, 1e-5 if device == "cpu" else 2e-2)


@pytest.mark.parametrize("name", ["attention", "lstm", "batch norm", "conv", "cross entropy"])
def test_autocast_around_canonical_ops_casts_as_torch_does(name: str) -> None:
    """Canonical ops are caught before autocast sees them, so they must do its work themselves."""

    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).view(2, 3, 2, 12).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)

    models: dict[str, tuple[Make, Any]] = {
        "attention": (lambda: Fn(attend, a=nn.Linear(4, 24)), draw(2, 3, 4)),
        "lstm": (lambda: Fn(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 3)), draw(5, 2, 4)),
        "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), draw(5, 4)),
        "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), draw(2, 2, 5, 5)),
        "cross entropy": (
            lambda: Fn(lambda m, x: F.cross_entropy(m.a(x), torch.tensor([0, 2, 1])), a=nn.Linear(4, 3)),
            draw(3, 4),
        ),
    }
    make, batch = models[name]

    def loss(model: nn.Module, x: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return (out.float() * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum()

    same(make, loss, batch, tol=2e-2)


# --- recomputation -----------------------------------------------------------------------------


def _region(reentrant: bool, dropout: float = 0.0) -> Make:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def part(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(F.dropout(torch.tanh(self.a(x)), dropout)))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.c.bias
            x = checkpoint(self.part, x, use_reentrant=reentrant) if self.training else self.part(x)  # type: ignore[assignment]
            return F.dropout(self.c(x), dropout)

    return Region


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_recomputed_in_the_graph(reentrant: bool) -> None:
    """The user traded time for memory; sharing the recomputed values would take the memory back."""
    model, batch = made(_region(reentrant)), draw(5, 4)
    graph = capture(model, square, batch)
    got, want = graph_outputs(graph, model, batch), eager(lambda: made(_region(reentrant)).eval(), square, batch, None)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)
    assert ops(graph, "aten.addmm", "forward") == 3
    assert ops(graph, "aten.addmm", "recompute") == 2
    assert ops(graph, "aten.tanh", "recompute") == 2
    made_in = {n.name: n.phase for n in graph.nodes}
    inside = {n.name for n in graph.nodes if n.op == "aten.tanh" and n.phase == "forward"}
    for node in graph.nodes:
        if node.op == "aten.tanh_backward":
            assert not {r.name for r in node.ins} & inside, "backward reads what recomputation should give"
            assert "recompute" in {made_in.get(r.name) for r in node.ins}


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_checkpointed_region_draws_the_same_numbers_twice(reentrant: bool) -> None:
    """Two draws would make the gradient that of another function."""
    batch, model = draw(50, 4), made(_region(reentrant, 0.5))
    graph = capture(model, square, batch)
    sites = {
        p: {n.args[2] for n in graph.nodes if n.op == "laminar.uniform" and n.phase == p}
        for p in ("forward", "recompute")
    }
    assert sites["recompute"] == {1} and sites["forward"] == {1, 2}

    def plain() -> nn.Module:
        return made(_region(reentrant, 0.5)).eval()

    got, want = graph_outputs(graph, model, batch), eager(plain, square, batch, KEY)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_nested_checkpoints_and_several_arguments_are_followed() -> None:
    """Regions lie in each other where a library checkpoints layers and the user checkpoints blocks."""

    def forward(m: Any, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return F.dropout(torch.sin(m.b(y)), 0.3)

        def outer(y: Tensor, scale: float, mask: Tensor) -> Tensor:
            return checkpoint(inner, F.dropout(torch.sin(m.a(y)) * scale * mask, 0.3), use_reentrant=False)  # type: ignore[return-value]

        return checkpoint(outer, x, 2.0, mask=x[:, :1] > 0, use_reentrant=False)  # type: ignore[return-value]

    def plain(m: Any, x: Tensor) -> Tensor:
        y = F.dropout(torch.sin(m.a(x)) * 2.0 * (x[:, :1] > 0), 0.3)
        return F.dropout(torch.sin(m.b(y)), 0.3)

    model, batch = made(lambda: Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))), draw(50, 4)
    graph = capture(model, square, batch)
    assert ops(graph, "aten.sin", "recompute") >= 1
    got = graph_outputs(graph, model, batch)
    want = eager(lambda: Fn(plain, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), square, batch, KEY)
    for name, value in want.items():
        close(got[name], value, name, 2e-6)


def test_batch_norm_in_a_checkpointed_region_counts_as_in_eager_pytorch() -> None:
    """Torch updates the statistics once more when it runs the region again, and so does the graph."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: torch.tanh(m.n(m.a(y))), x, use_reentrant=False))

    same(lambda: Fn(forward, a=nn.Linear(3, 4), n=nn.BatchNorm1d(4), b=nn.Linear(4, 2)), square, draw(6, 3), tol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recomputation_runs_under_the_same_autocast(device: str) -> None:
    """Another precision the second time would be another function, and torch would refuse it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return checkpoint(lambda y: torch.softmax(m.a(y), -1), x, use_reentrant=False)  # type: ignore[return-value]

    graph = capture(made(lambda: Fn(forward, a=nn.Linear(3, 4))), square, draw(6, 3))
    found = {(n.phase, str(n.outs[0])) for n in graph.nodes if n.op == "aten._softmax"}
    wide = "f32[6,4]" if device == "cuda" else "bf16[6,4]"
    assert found == {("forward", wide), ("recompute", wide)}


def test_selective_checkpointing_keeps_what_the_policy_says() -> None:
    """The products are saved, the cheap rest is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(m: Any, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return m.b(torch.tanh(m.a(y)).sin()).sin()

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return checkpoint(region, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    graph = same(lambda: Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), square, draw(5, 4))
    assert ops(graph, "aten.addmm", "recompute") == 0 and ops(graph, "aten.tanh", "recompute") == 1


def test_gradient_checkpointing_of_hugging_face_models_is_kept() -> None:
    """One flag of theirs, and the same graph as if the regions had been written by hand."""
    pytest.importorskip("transformers")
    recipe = load_recipe(str(EXAMPLES / "hf.py:gpt2"))
    batch = next(iter(recipe.data()))
    model = recipe.model()
    plain = capture(model, recipe.loss, batch)
    model.gradient_checkpointing_enable()
    graph = capture(model, recipe.loss, batch)
    assert ops(plain, "aten.addmm", "recompute") == 0 and ops(graph, "aten.addmm", "recompute") >= 4
    want = graph_outputs(plain, model, batch)
    for name, value in graph_outputs(graph, model, batch).items():
        close(value, want[name], name, 1e-5)


def test_a_recomputed_op_names_the_line_it_was_written_on() -> None:
    """Recomputation runs inside backward, where the user's frames are those of the region again."""
    graph = capture(made(_region(False)), square, draw(5, 4))
    found = [n for n in graph.nodes if n.phase == "recompute" and n.op == "aten.tanh"]
    assert found and all("torch.tanh(self.b(" in n.where for n in found)
    assert {n.module for n in graph.nodes if n.phase == "recompute" and n.op == "aten.addmm"} <= {"a", "b"}
