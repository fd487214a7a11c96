"""What do guards cost in a step in which nothing has changed?

A transformer of some 300 modules with a config, a loss with a closure; and a Hugging Face Llama of as many. Measured is
processor time of what a job does before a step to see that nothing has changed: `look`, the lookup of the graph, and
the checksum that ranks compare. `changed`: the same with a counter in the model that changes in every step and that no
step reads.

    python bench/guards.py [--rounds 20]

Target: at most 0.2 % of a step of 50 ms, which is 0.1 ms. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import report
from torch import Tensor, nn

from laminar.train.batch.batch_checksum import Sampled
from laminar.train.batch.leaves import Leaves
from laminar.train.engine.tracer import Tracer


class Config:
    """Numbers as configs have them."""

    def __init__(self) -> None:
        self.__dict__.update({f"option_{i}": i for i in range(40)}, width=32, names=["a", "b"], nested={"x": [1, 2]})


class Net(nn.Module):
    """25 encoder layers: 251 modules, and 50 small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.steps_done = Config(), 0
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0) for _ in range(25))
        self.scales = nn.ModuleList(nn.Identity() for _ in range(50))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (self.config.width / 32)
        return x


def llama() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    """Hugging Face's, tiny and deep."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=22,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config), lambda m, b: m(input_ids=b, labels=b).loss, torch.randint(64, (4, 16))


def own() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    """The net above, with a weight in the closure of its loss."""
    weight, model = 0.5, Net()
    return model, lambda m, b: m(b).square().mean() * weight, torch.randn(4, 8, 32)


def seconds(call: Callable[[], Any], rounds: int, calls: int = 50) -> float:
    """Processor seconds of a call: the median of rounds."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - start) / calls)
    return statistics.median(times)


def measured(name: str, made: tuple[nn.Module, Callable[..., Tensor], Any], rounds: int) -> None:
    """One line for a model."""
    model, loss, batch = made
    tracer = Tracer(model, loss)
    leaves, sampled = Leaves.of(batch), Sampled()
    tracer.graph(leaves, True)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        tracer.look({})
        tracer.graph(leaves, True)
        sampled(leaves.tensors, number)

    def changed() -> None:
        model.steps_done = number  # type: ignore[assignment]
        step()

    looked = seconds(partial(tracer.look, {}), rounds)
    whole = seconds(step, rounds)
    report(
        "guards",
        {
            "model": name,
            "modules": len(list(model.modules())),
            "values": len(tracer.captures.guards.values),
            "look_us": round(looked * 1e6, 1),
            "step_us": round(whole * 1e6, 1),
            "changed_us": round(seconds(changed, rounds) * 1e6, 1),
            "share_of_50_ms": round(whole / 0.05, 5),
        },
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured("encoder", own(), args.rounds)
    measured("llama", llama(), args.rounds)


if __name__ == "__main__":
    main()
