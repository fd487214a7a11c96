"""One GPU, compiled: how far are predicted seconds and bytes of a step from measured ones?

Fourteen cases (model, size, precision), none of them measured by the profile as a whole or in fused pieces. Each is
trained for a few steps through `laminar.parallelize`, compiled, AdamW fused; the prediction is made from the same
graph and plan and a profile that `laminar profile` wrote on that machine.

    python bench/accuracy_gpu.py --profile gpu.json [--case gpt-bf16 ...] [--to steps.jsonl.gz]
    python bench/accuracy_gpu.py --profile gpu.json --from steps.jsonl.gz      predict again what was measured before

Seconds are of replayed CUDA graphs: median of turns. Allocated bytes are of a step of the same code without
replay, since memory of CUDA graphs counts as allocated only while they are recorded; `reserved` is what the
process holds while replaying. Targets: median error of seconds 8 %, of allocated bytes 4 %.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import report
from judged import example
from torch import nn

import laminar
from laminar.cli_cost import cluster_of
from laminar.forecast import predict

Made = tuple[Callable[[], nn.Module], Callable[..., Any], Any]


def gpt(layers: int, d: int, heads: int, tokens: int, batch: int, vocab: int = 50304) -> Made:
    m = example("gpt")
    config = m.Config(layers=layers, d=d, heads=heads, vocab=vocab, tokens=tokens, batch=batch)
    ids = torch.randint(vocab, (batch, tokens + 1), generator=torch.Generator().manual_seed(1))
    return lambda: m.GPT(config), m.loss, {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}


def llama(layers: int, d: int, heads: int, kv_heads: int, hidden: int, tokens: int, batch: int) -> Made:
    m = example("llama")
    model = partial(
        m.Llama, layers=layers, d=d, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=32000, tokens=tokens
    )
    return model, m.loss, next(m.counting(batch=batch, tokens=tokens, vocab=32000))


def vit(size: int, patch: int, layers: int, d: int, batch: int) -> Made:
    m = example("vit")
    model = partial(m.ViT, size=size, patch=patch, layers=layers, d=d, heads=d // 64, hidden=4 * d, classes=1000)
    return model, m.loss, next(m.images(batch=batch, size=size, classes=1000))


def bert(layers: int, d: int, tokens: int, batch: int) -> Made:
    m = example("bert")
    model = partial(m.BERT, layers=layers, d=d, heads=d // 64, vocab=30000, tokens=tokens)
    return model, m.loss, next(m.sentences(batch=batch, tokens=tokens, topics=100, words=299))


def resnet(widths: list[int], blocks: int, size: int, batch: int) -> Made:
    m = example("resnet")
    return (lambda: m.ResNet(widths=widths, blocks=blocks, classes=10), m.loss,
            next(m.images(batch=batch, size=size, classes=10)))  # fmt: skip


def mlp(width: int, layers: int, batch: int) -> Made:
    def model() -> nn.Module:
        parts = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(*parts, nn.Linear(width, 100))

    rng = torch.Generator().manual_seed(1)
    batch_of = {"x": torch.randn(batch, width, generator=rng), "y": torch.randint(100, (batch,), generator=rng)}
    return model, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), batch_of


CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "mlp-8192-bf16": (lambda: mlp(8192, 4, 4096), "bf16"),
    "mlp-2048-f32": (lambda: mlp(2048, 6, 2048), "f32"),
    "resnet-bf16": (lambda: resnet([64, 128, 256, 512], 2, 64, 128), "bf16"),
    "resnet-f32": (lambda: resnet([64, 128, 256], 2, 48, 64), "f32"),
    "vit-bf16": (lambda: vit(96, 8, 6, 768, 64), "bf16"),
    "vit-f32": (lambda: vit(64, 8, 6, 384, 64), "f32"),
    "llama-2048-bf16": (lambda: llama(4, 2048, 16, 8, 5504, 1024, 4), "bf16"),
    "llama-512-f32": (lambda: llama(6, 512, 8, 4, 1376, 512, 8), "f32"),
    "bert-bf16": (lambda: bert(6, 768, 128, 64), "bf16"),
    "gpt-768-bf16": (lambda: gpt(12, 768, 12, 1024, 8), "bf16"),
    "gpt-768-fp16": (lambda: gpt(6, 768, 12, 512, 16), "fp16"),
    "gpt-512-f32": (lambda: gpt(6, 512, 8, 256, 16, 8192), "f32"),
    "gpt-256-bf16": (lambda: gpt(4, 256, 4, 128, 64, 8192), "bf16"),
    "gpt-1024-bf16": (lambda: gpt(24, 1024, 16, 1024, 16), "bf16"),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def measured(name: str) -> tuple[dict[str, Any], Any, Any]:
    """Seconds and bytes of a case; its graph and plan."""
    make, precision = CASES[name]
    model, loss, batch = make()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    torch.manual_seed(0)
    job = laminar.parallelize(model().cuda(), loss, adamw, batch=batch, plan="data", precision=precision, device="cuda")
    step = job._first.step
    replays, step.replays = step.replays, False
    for _ in range(2):
        job.step(batch)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    job.step(batch)
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - before
    step.replays = replays
    for _ in range(3):
        job.step(batch)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    began = time.perf_counter()
    job.step(batch)
    torch.cuda.synchronize()
    calls = max(3, min(200, round(0.25 / (time.perf_counter() - began))))
    turns = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(calls):
            job.step(batch)
        torch.cuda.synchronize()
        turns.append((time.perf_counter() - began) / calls)
    found = {"case": name, "seconds": statistics.median(turns), "spread": max(turns) / min(turns) - 1,
             "allocated": allocated, "reserved": reserved, "first_s": first_s,
             "parameters": sum(p.numel() for p in job.model.parameters()) if job.world == 1 else 0}  # fmt: skip
    graph, plan = job.graph, job.plan
    job.close()
    del job, step
    return found, graph, plan


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--profile", required=True)
    args.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    args.add_argument("--to", help="keep what was measured, graphs and plans included")
    args.add_argument("--from", dest="source", help="predict what was measured before")
    args.add_argument("--until", type=float, default=1e9, help="seconds after which no further case is begun")
    given = args.parse_args()
    cluster = cluster_of(given.profile)
    rows = []
    began = time.monotonic()
    if given.source:
        from laminar.ir.graph import Graph
        from laminar.ir.plan import Plan

        with gzip.open(given.source, "rt") as file:
            kept = [json.loads(text) for text in file]
        cases = ((k["found"], Graph.from_json(k["graph"]), Plan.from_json(k["plan"])) for k in kept)
    else:
        cases = _measured(given, began)
    for found, graph, plan in cases:
        try:
            guess = predict(graph, plan, cluster)
        except Exception:
            traceback.print_exc()  # what was measured is kept all the same
            continue
        low, high = guess.interval_s
        rows.append({**found, "predicted_s": guess.seconds, "predicted_bytes": guess.memory.peak_bytes,
                     "error_s": guess.seconds / found["seconds"] - 1,
                     "error_bytes": guess.memory.peak_bytes / found["allocated"] - 1,
                     "covered": low <= found["seconds"] <= high, "known": guess.known()})  # fmt: skip
        r = rows[-1]
        print(f"{r['case']:<18} {r['seconds'] * 1e3:9.3f} ms, predicted {r['predicted_s'] * 1e3:9.3f} "
              f"({r['error_s']:+.1%}); {r['allocated'] / 1e6:9.1f} MB, predicted {r['predicted_bytes'] / 1e6:9.1f} "
              f"({r['error_bytes']:+.1%}); reserved {r['reserved'] / 1e6:.0f} MB", flush=True)  # fmt: skip
    if not rows:
        raise SystemExit("nothing was measured and predicted")
    errors, held = ([abs(r[k]) for r in rows] for k in ("error_s", "error_bytes"))
    report("accuracy_gpu", {
        "cases": len(rows),
        "median_error_s": round(statistics.median(errors), 4), "worst_error_s": round(max(errors), 4),
        "median_error_bytes": round(statistics.median(held), 4), "worst_error_bytes": round(max(held), 4),
        "covered_by_90_interval": round(sum(r["covered"] for r in rows) / len(rows), 4),
        "targets": {"median_error_s": 0.08, "error_bytes": 0.04},
        "rows": [{k: round(v, 6) if isinstance(v, float) else v for k, v in r.items()} for r in rows],
    })  # fmt: skip


def _measured(given: argparse.Namespace, began: float) -> Any:
    for name in given.case:
        if time.monotonic() - began > given.until:
            print(f"{name}: not begun, time is up", file=sys.stderr)
            continue
        try:
            found, graph, plan = measured(name)
        except Exception:
            traceback.print_exc()
            continue
        if given.to:
            with gzip.open(given.to, "at") as file:
                file.write(json.dumps({"found": found, "graph": graph.to_json(), "plan": plan.to_json()}) + "\n")
        yield found, graph, plan


if __name__ == "__main__":
    main()
