"""What does a lowered program cost the host, beside plain eager PyTorch and eager DTensor?

An 8-layer GPT of width 64 (batch 2, 32 tokens), tensor parallel over 2 ranks, no communication on any
side. `laminar`: the generated code with null collectives. `eager`: a plain model of the same local
shapes, forward and backward. `dtensor`: the same plan by `parallelize_module` on a fake process group.

    python bench/host_time.py [--rounds 15]

Targets: laminar at most 0.9 of eager, and dtensor at least 5 times laminar. One thread.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.nn.functional as F
from common import paired, ratio, report
from torch import nn

import laminar
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Null

LAYERS, WIDTH, HEADS, BATCH, TOKENS, VOCAB = 8, 64, 4, 2, 32, 128


class Block(nn.Module):
    """A pre-norm block; `share` of the heads and of the hidden width, as one rank has them."""

    def __init__(self, share: int = 1) -> None:
        super().__init__()
        self.heads = HEADS // share
        inner = WIDTH // share
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, inner) for _ in range(3))
        self.out = nn.Linear(inner, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * inner), nn.Linear(4 * inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """The blocks between an embedding and a head, which no side splits."""

    def __init__(self, share: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(share) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def eager_side(batch):  # type: ignore[no-untyped-def]
    """Forward and backward of one rank's shapes in plain PyTorch."""
    model = Net(share=2)
    params = list(model.parameters())

    def run() -> None:
        torch.autograd.grad(loss(model, batch), params)

    return run


def laminar_side(batch):  # type: ignore[no-untyped-def]
    """The generated code of rank 0."""
    model = Net()
    mesh = laminar.Mesh({"tp": 2})
    graph = laminar.capture(model, loss, batch)
    seeds = {
        r"blocks\.\d+\.(q|k|v|up)\.(weight|bias)": {"tp": laminar.S(0)},
        r"blocks\.\d+\.(out|down)\.weight": {"tp": laminar.S(1)},
        r"embed.weight|head.weight|batch.*": {"tp": laminar.B},
    }
    plan = laminar.plans.tensor_parallel(graph, mesh) if seeds is None else laminar.plans.seeded(graph, mesh, seeds)
    program = laminar.lower(graph, plan)
    step = EagerStep(program, Null(mesh))
    from laminar.api import inputs_of

    whole = inputs_of(graph, model, batch)
    local = [shard(whole[i.name].detach(), i.placed.nd, mesh, 0) for i in program.inputs]
    return lambda: step(*local), program


def dtensor_side(batch):  # type: ignore[no-untyped-def]
    """The same plan as eager DTensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    for block in model.blocks:
        ways = {n: ColwiseParallel() for n in ("q", "k", "v", "up")} | {n: RowwiseParallel() for n in ("out", "down")}
        parallelize_module(block, mesh, ways)
    params = list(model.parameters())

    def run() -> None:
        torch.autograd.grad(loss(model, batch), params)

    return run


def main() -> None:
    """Measure all three in paired rounds."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--rounds", type=int, default=15)
    args.add_argument("--calls", type=int, default=10)
    given = args.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = (torch.randint(0, VOCAB, (BATCH, TOKENS)), torch.randint(0, VOCAB, (BATCH, TOKENS)))
    run, program = laminar_side(batch)
    sides = {"laminar": run, "eager": eager_side(batch), "dtensor": dtensor_side(batch)}
    times = paired(sides, given.rounds, given.calls)
    report(
        "host_time",
        {
            "laminar_over_eager": ratio(times, "laminar", "eager"),
            "dtensor_over_laminar": ratio(times, "dtensor", "laminar"),
            "ms": {k: round(sorted(v)[len(v) // 2] * 1e3, 2) for k, v in times.items()},
            "collectives": program.counts(),
        },
    )


if __name__ == "__main__":
    main()
