"""Trials: whole training steps of small models, timed beside DDP, to calibrate what a step is predicted to take.

A cost model made of single ops misses what only a whole step shows: caches that others have emptied, ranks
that wait for each other, the price of a line of generated code. A few constants for that are fitted to
these models, under several plans each. They are nobody's models, and none of them is among those a
prediction is judged by.

In a round every side runs one turn, so that whatever else the machine does hits all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laminar.capture.capture import capture
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.placement import presets
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.probe_rules import probe
from laminar.train.job.job import Job
from laminar.train.options import JobOptions

DDP_SIDE = "ddp"
"""The side everything is measured against."""


@dataclass(frozen=True)
class Trial:
    """A model, its loss, and a batch for so many ranks."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]


class _Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class _Attention(nn.Module):
    """Heads with packed or separate projections."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """A transformer layer; gated with root mean square norms, or plain."""

    def __init__(self, d: int, heads: int, hidden: int, gated: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = _Norm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(d), norm(d)
        self.attention = _Attention(d, heads, causal=not gated)
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.gate = nn.Linear(d, hidden) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y), approximate="tanh")
        return x + self.down(y)  # type: ignore[no-any-return]


class _Words(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int, d: int, heads: int, hidden: int, vocab: int, tokens: int, gated: bool) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, d), nn.Embedding(tokens, d)
        self.layers = nn.ModuleList(_Layer(d, heads, hidden, gated) for _ in range(layers))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class _Tables(nn.Module):
    """Ids and numbers to a logit."""

    def __init__(self, tables: int, rows: int, d: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, d) for _ in range(tables))
        self.dense = nn.Linear(16, d)
        self.top = nn.Sequential(nn.Linear(d * (tables + 1), 320), nn.ReLU(), nn.Linear(320, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        found = [t(ids[:, i]) for i, t in enumerate(self.tables)]
        return self.top(torch.cat([self.dense(numbers), *found], 1)).squeeze(1)  # type: ignore[no-any-return]


def _pictures() -> nn.Module:
    def part(a: int, b: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    parts = [*part(3, 24, 1), *part(24, 48, 2), *part(48, 48, 1), nn.MaxPool2d(2), *part(48, 96, 1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 12))


def _perceptron() -> nn.Module:
    def part(a: int, b: int) -> list[nn.Module]:
        return [nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)]

    return nn.Sequential(*part(1024, 1536), *part(1536, 1536), *part(1536, 512), nn.Linear(512, 20))


def _wide() -> nn.Module:
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(1792, 1792), nn.ReLU())], nn.Linear(1792, 16))


def _classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _next(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def _clicks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["ids"]), batch["y"])


def _words(vocab: int, samples: int, tokens: int) -> Callable[[int], Any]:
    def make(ranks: int) -> dict[str, Tensor]:
        ids = torch.randint(vocab, (samples * ranks, tokens + 1), generator=torch.Generator().manual_seed(1))
        return {"ids": ids[:, :-1].contiguous(), "next": ids[:, 1:].contiguous()}

    return make


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[int], Any]:
    def make(ranks: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(shape[0] * ranks, *shape[1:], generator=rng)
        return {"x": x, "y": torch.randint(classes, (len(x),), generator=rng)}

    return make


def _visits(ranks: int) -> dict[str, Tensor]:
    rng, n = torch.Generator().manual_seed(1), 192 * ranks
    numbers, ids = torch.randn(n, 16, generator=rng), torch.randint(6000, (n, 6), generator=rng)
    return {"numbers": numbers, "ids": ids, "y": (numbers[:, 0] > 0).float()}


TRIALS = (
    Trial("perceptron", _perceptron, _classes, _labelled((96, 1024), 20)),
    Trial("wide", _wide, _classes, _labelled((24, 1792), 16)),
    Trial("decoder", lambda: _Words(3, 256, 4, 1024, 1000, 96, False), _next, _words(1000, 3, 96)),
    Trial("gated", lambda: _Words(4, 320, 5, 768, 400, 48, True), _next, _words(400, 6, 48)),
    Trial("pictures", _pictures, _classes, _labelled((12, 3, 28, 28), 12)),
    Trial("tables", lambda: _Tables(6, 6000, 48), _clicks, _visits),
)
"""What `laminar profile` runs whole."""


def trial_named(name: str) -> Trial:
    """A trial by name."""
    return next(t for t in TRIALS if t.name == name)


TRIAL_PLANS: dict[str, Callable[[Graph, Mesh], Plan]] = {
    "data": presets.data_parallel,
    "zero1": lambda graph, mesh: presets.zero(graph, mesh, 1),
    "zero3": lambda graph, mesh: presets.zero(graph, mesh, 3),
    "tensor": presets.tensor_parallel,
    "random1": lambda graph, mesh: random_plan(graph, mesh, 1),
    "random2": lambda graph, mesh: random_plan(graph, mesh, 2),
    "random3": lambda graph, mesh: random_plan(graph, mesh, 3),
}
"""Plans by name: presets as a user would ask for them, and draws that nobody would."""


def mesh_of(plan: str, ranks: int) -> Mesh:
    """The mesh a plan of `TRIAL_PLANS` is for."""
    return Mesh({"tp" if plan == "tensor" else "dp": ranks})


def trial_graph(trial: Trial, ranks: int) -> Graph:
    """The graph a job of this trial is made from."""
    torch.manual_seed(0)
    return probe(capture(trial.model(), trial.loss, trial.batch(ranks), wide=True))


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of every side."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def timed_sides(
    trial: Trial | str, plans: Sequence[str], rounds: int, turn_s: float, yardstick: bool = True
) -> dict[str, Any]:
    """Seconds of a step by side and round, on this rank; and what each program was. Every rank must call this."""
    trial = trial_named(trial) if isinstance(trial, str) else trial
    ranks = dist.get_world_size()
    batch = trial.batch(ranks)
    steps: dict[str, Callable[[], Any]] = {}
    for name in plans:
        torch.manual_seed(0)
        mesh = mesh_of(name, ranks)
        job = Job(trial.model(), trial.loss, adamw, batch, TRIAL_PLANS[name], JobOptions(mesh=mesh, device="cpu"))
        steps[name] = lambda job=job: job.step(batch)  # type: ignore[misc]
    if yardstick:
        steps[DDP_SIDE] = _ddp(trial, batch)
    calls = {name: _calls(step, turn_s) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls[name]):
                steps[name]()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / calls[name])
    return {"model": trial.name, "ranks": ranks, "threads": torch.get_num_threads(), "times": times}


def all_timed(names: Sequence[str], plans: Sequence[str], rounds: int, turn_s: float, begun: str) -> list[Any]:
    """`timed_sides` for one trial after the other, in one process group; the file `begun` gets a line for each."""
    out = []
    for name in names:
        if dist.get_rank() == 0:
            with open(begun, "a") as file:
                file.write(f"{name}\n")
        out.append(timed_sides(name, plans, rounds, turn_s))
        gc.collect()
    return out


def _calls(step: Callable[[], Any], turn_s: float) -> int:
    """How many steps make a turn; agreed by all ranks. The first steps only warm up, one if steps are long."""
    step()
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        step()
        each = torch.tensor(time.perf_counter() - start)
        dist.broadcast(each, 0)
        if float(each) > 4 * turn_s:
            break
    return max(1, round(turn_s / float(each)))


def _ddp(trial: Trial, batch: Any) -> Callable[[], Any]:
    """An ordinary training step under DistributedDataParallel, on this rank's share of the batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        trial.model(), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer = adamw(model.parameters())
    share = shared(batch, dist.get_rank(), dist.get_world_size())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = trial.loss(model, share)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def shared(batch: Any, rank: int, ranks: int) -> Any:
    """One rank's samples of a batch, in the same structure."""
    if isinstance(batch, Tensor):
        return batch.chunk(ranks)[rank].contiguous()
    if isinstance(batch, Mapping):
        return {k: shared(v, rank, ranks) for k, v in batch.items()}
    return tuple(shared(v, rank, ranks) for v in batch)
