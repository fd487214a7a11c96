"""Mixtures of experts from transformers, as shipped, train as they do in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from tests.support.rank_pool import Ranks

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}


def model_of(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12, head_dim=4)
        model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # a loop over the experts that were hit; the only one in float64
    return model.double()  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def _trained(kind: str, plan: str, options: dict[str, Any]) -> tuple[float, float]:
    model, other = model_of(kind), model_of(kind)
    g = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 31, (4, 6), generator=g) for _ in range(3)]
    sgd = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, other)]
    job = laminar.parallelize(model, loss, sgd[0], batch=data[0], plan=plan, device="cpu", **options)
    assert any(n.op == "laminar.eager" for n in job.graph.nodes)
    off = 0.0
    for batch in data:
        sgd[1].zero_grad()
        value = loss(other, batch)
        value.backward()
        sgd[1].step()
        off = max(off, abs(float(job.step(batch).loss) - value.item()))
    state = job.state_dict()
    return off, max(float((state[k] - v).abs().max()) for k, v in other.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data", "zero3", "tensor"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_mixtures_of_experts_train_to_the_weights_of_an_ordinary_loop(two: Ranks, kind: str, plan: str) -> None:
    """Router, attention and norms are placed; the experts' loop runs as it is."""
    for off, weights in two.run(_trained, kind, plan, {}):
        assert off < 1e-6 and weights < 1e-6  # transformers keeps norms and the router's softmax in float32
