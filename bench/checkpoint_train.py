"""What does a checkpoint every ten steps cost training, and how fast is one loaded?

A GPT of 92M parameters with AdamW (1.1 GB of state) on two ranks, data parallel, one thread each, on CPU; intervals
of ten steps with no save, with ours (`job.save(store, wait=False)`), with torch's `DCP.async_save` of the same
tensors, and with `torch.save` by the first rank, in turns. Each save has ended before the next interval begins.
Random ids; the same disk.

- `blocked`: seconds in which steps stood still for a save (the call, waits for its copy), over an interval without one.
- `slowdown`: the interval with a save over the one without, less one: copying, hashing and writing take the same cores.
- `seconds`: until the checkpoint was durable (ours) or on its way to the disk (the others, which don't fsync).
- `load`: the same state read back by all ranks, from the page cache: ours verified and into a job, DCP's into tensors.

    python bench/checkpoint_train.py [--rounds 3] [--steps 10] [--folder DIR]

Target: blocked and slowdown at most 1 % of the interval; load at least 0.9 of DCP's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import report
from torch import Tensor, nn

from laminar.runtime.check.processes import on_ranks
from laminar.train.job.job import Job
from laminar.train.options import JobOptions
from laminar.train.saving.checkpoint import saver_for

WIDTH, DEPTH, WORDS, LENGTH = 768, 12, 4096, 64
WAYS = ("none", "laminar", "dcp_async", "torch_save")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (12, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def job_of() -> Job:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(WORDS, (2, LENGTH + 1))
    return Job(model, loss, optimizer, ids, "data", JobOptions(device="cpu", check=False))


def tensors_of(job: Job) -> dict[str, Tensor]:
    return {f"{s.kind}.{s.name}.{s.entry}": s.tensor for s in job.state.shards()}


class Saving:
    """One way to save beside steps."""

    def __init__(self, way: str, job: Job, folder: str) -> None:
        self.way, self.job, self.folder = way, job, folder
        self.blocked_s = self.durable_s = 0.0
        self._future: Any = None
        self._group = dist.new_group(backend="gloo") if way == "dcp_async" else None
        self._saver = saver_for(job, f"{folder}/laminar") if way == "laminar" else None

    def begin(self) -> None:
        self.begun = time.perf_counter()
        if self._saver is not None:
            self._saver.save()
        elif self.way == "dcp_async":
            where = f"{self.folder}/dcp"
            writer = dcp.FileSystemWriter(where, overwrite=True)
            self._future = dcp.async_save(
                {"state": tensors_of(self.job)}, storage_writer=writer, process_group=self._group
            )
        elif self.way == "torch_save":
            if self.job.rank == 0:
                torch.save(tensors_of(self.job), f"{self.folder}/plain.pt")
            dist.barrier()
        self.blocked_s = time.perf_counter() - self.begun

    def end(self) -> None:
        if self._saver is not None:
            done = self._saver.finish()
            assert done is not None
            self.blocked_s, self.durable_s = done.stalled_s, done.seconds
        elif self._future is not None:
            self._future.result()
            self.durable_s = time.perf_counter() - self.begun
        dist.barrier()


def measured(folder: str, rounds: int, steps: int) -> dict[str, Any]:
    """On a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = job_of()
    ids = torch.randint(WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    ways = {way: Saving(way, job, folder) for way in WAYS}
    rows: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            dist.barrier()
            begun = time.perf_counter()
            for step in range(steps):
                if step == 0:
                    ways[way].begin()
                job.step(ids)
            took = time.perf_counter() - begun
            ways[way].end()
            if turn:
                rows[way].append((took, ways[way].blocked_s, ways[way].durable_s))
    loads: dict[str, list[float]] = {"laminar": [], "dcp": []}
    for turn in range(rounds):
        for way in ("laminar", "dcp") if turn % 2 else ("dcp", "laminar"):
            dist.barrier()
            begun = time.perf_counter()
            if way == "laminar":
                job.resume(f"{folder}/laminar")
            else:
                into = {"state": {k: torch.empty_like(t) for k, t in tensors_of(job).items()}}
                dcp.load(into, checkpoint_id=f"{folder}/dcp")
            dist.barrier()
            loads[way].append(time.perf_counter() - begun)
    nbytes = sum(t.nbytes for t in tensors_of(job).values())
    job.close()
    return {"rows": rows, "loads": loads, "nbytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        os.environ["OMP_NUM_THREADS"] = "1"
        ranks = on_ranks(2, measured, folder, args.rounds, args.steps, timeout_s=1500)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worst = {w: [max(pair) for pair in zip(*(r["rows"][w] for r in ranks), strict=True)] for w in WAYS}
    plain = [took for took, *_ in worst["none"]]
    for way in WAYS[1:]:
        blocked = [b / p for (_, b, _), p in zip(worst[way], plain, strict=True)]
        slower = [t / p - 1 for (t, _, _), p in zip(worst[way], plain, strict=True)]
        with contextlib.suppress(statistics.StatisticsError):
            report(
                "checkpoint_train",
                {
                    "way": way,
                    "state_bytes": ranks[0]["nbytes"],
                    "steps": args.steps,
                    "interval_s": round(statistics.median(plain), 2),
                    "blocked_share": [round(x, 4) for x in sorted(blocked)],
                    "slowdown": [round(x, 3) for x in sorted(slower)],
                    "durable_s": [round(d, 2) for *_, d in worst[way]],
                },
            )
    one = ranks[0]["loads"]
    ratios = sorted(d / o for d, o in zip(one["dcp"], one["laminar"], strict=True))
    report(
        "checkpoint_train",
        {
            "way": "load",
            "laminar_s": [round(x, 2) for x in one["laminar"]],
            "dcp_s": [round(x, 2) for x in one["dcp"]],
            "dcp_over_laminar": [round(x, 3) for x in ratios],
            "target": 0.9,
        },
    )


if __name__ == "__main__":
    main()
