"""One GPU, compiled: how far are predicted seconds and bytes of a step from measured ones?

Fourteen cases (model, size, precision), none of them measured by the profile as a whole or in fused pieces, none
among the trials that it is calibrated with. Each is trained for a few steps through `laminar.parallelize`, compiled,
AdamW fused, its batch on the device; the prediction is made from the same graph and plan and a profile that
`laminar profile` wrote on that machine.

    python bench/accuracy_gpu.py --profile gpu.json [--case gpt-768-bf16 ...] [--to steps.gz] [--kernels kernels.gz]
    python bench/accuracy_gpu.py --profile gpu.json --from steps.gz     predict again what was measured before
    python bench/accuracy_gpu.py --to steps.gz                          measure only
    python bench/accuracy_gpu.py --small --profile h200                 try the benchmark itself, on any device

What is measured: `laminar.profile.gpu_trials.whole_step`. A case that fails is a row with its error, and the next one
goes on; files grow case by case. `--kernels` keeps one step's kernels of each case, as the profiler saw them.
Targets: median error of seconds 8 %, of allocated bytes 4 %.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import report
from judged import example
from torch import nn

import laminar
from laminar.cli_cost import cluster_from
from laminar.forecast.step import predict
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.profile.gpu_trials import recorded_kernels, whole_step

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
    return (
        lambda: m.ResNet(widths=widths, blocks=blocks, classes=10),
        m.loss,
        next(m.images(batch=batch, size=size, classes=10)),
    )


def mlp(width: int, layers: int, batch: int) -> Made:
    def model() -> nn.Module:
        parts = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(*parts, nn.Linear(width, 100))

    rng = torch.Generator().manual_seed(1)
    batch_of = {"x": torch.randn(batch, width, generator=rng), "y": torch.randint(100, (batch,), generator=rng)}
    return model, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), batch_of


CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "gpt-256-bf16": (lambda: gpt(4, 256, 4, 128, 64, 8192), "bf16"),
    "mlp-8192-bf16": (lambda: mlp(8192, 4, 4096), "bf16"),
    "llama-2048-bf16": (lambda: llama(4, 2048, 16, 8, 5504, 1024, 4), "bf16"),
    "resnet-bf16": (lambda: resnet([64, 128, 256, 512], 2, 64, 128), "bf16"),
    "vit-f32": (lambda: vit(64, 8, 6, 384, 64), "f32"),
    "bert-bf16": (lambda: bert(6, 768, 128, 64), "bf16"),
    "gpt-768-bf16": (lambda: gpt(12, 768, 12, 1024, 8), "bf16"),
    "mlp-2048-f32": (lambda: mlp(2048, 6, 2048), "f32"),
    "gpt-512-f32": (lambda: gpt(6, 512, 8, 256, 16, 8192), "f32"),
    "resnet-f32": (lambda: resnet([64, 128, 256], 2, 48, 64), "f32"),
    "vit-bf16": (lambda: vit(96, 8, 6, 768, 64), "bf16"),
    "gpt-768-fp16": (lambda: gpt(6, 768, 12, 512, 16), "fp16"),
    "llama-512-f32": (lambda: llama(6, 512, 8, 4, 1376, 512, 8), "f32"),
    "gpt-1024-bf16": (lambda: gpt(24, 1024, 16, 1024, 16), "bf16"),
}
"""One of every kind first, in case time runs out; the largest last."""


SMALL: dict[str, tuple[Callable[[], Made], str]] = {
    "gpt-small": (lambda: gpt(1, 32, 2, 16, 2, 64), "bf16"),
    "mlp-small": (lambda: mlp(32, 1, 8), "f32"),
    "resnet-small": (lambda: resnet([8, 16], 1, 16, 4), "f32"),
}
"""For trying the benchmark itself."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def measured(name: str, with_kernels: bool, device: str) -> tuple[dict[str, Any], Graph, Plan, list[Any] | None]:
    """Seconds and bytes of a case; its graph and plan, and its kernels if they are asked for and can be had."""
    make, precision = (CASES | SMALL)[name]
    model, loss, batch = make()
    torch.manual_seed(0)

    def job_of(batch: Any) -> Any:
        with torch.device(device):
            made = model()
        options = {"plan": "data", "precision": precision, "device": device, "compile": True}
        return laminar.parallelize(made, loss, adamw, batch=batch, **options)

    found, job = whole_step(job_of, batch, device=device)
    found |= {"case": name, "parameters": sum(p.numel() for p in job.model.parameters())}
    kernels = None
    if with_kernels:
        try:
            kernels = recorded_kernels(job, batch)
        except Exception as error:
            traceback.print_exc()
            found["kernels_error"] = f"{type(error).__name__}: {error}"[:300]
    graph, plan = job.graph, job.plan
    job.close()
    return found, graph, plan, kernels


def _append(path: str | None, line: dict[str, Any]) -> None:
    if path:
        with gzip.open(path, "at") as file:
            file.write(json.dumps(line) + "\n")


def _measured(given: argparse.Namespace, began: float) -> Iterator[tuple[dict[str, Any], Graph | None, Plan | None]]:
    """Case by case; one that fails has an error and no graph."""
    device = "cuda" if torch.cuda.is_available() or not given.small else "cpu"
    for name in given.case or (SMALL if given.small else CASES):
        if time.monotonic() - began > given.until:
            print(f"{name}: not begun, time is up", file=sys.stderr, flush=True)
            continue
        start = time.monotonic()
        try:
            found, graph, plan, kernels = measured(name, bool(given.kernels), device)
        except Exception as error:
            traceback.print_exc()
            found = {"case": name, "error": f"{type(error).__name__}: {error}"[:500]}
            _append(given.to, {"found": found})
            yield found, None, None
            continue
        found["case_s"] = time.monotonic() - start
        _append(given.to, {"found": found, "graph": graph.to_json(), "plan": plan.to_json()})
        if kernels is not None:
            _append(given.kernels, {"case": name, "kernels": kernels})
        yield found, graph, plan


def _kept(path: str) -> Iterator[tuple[dict[str, Any], Graph | None, Plan | None]]:
    """What was measured before; a case that was being written when its process was ended is left out."""
    with gzip.open(path, "rt") as file, contextlib.suppress(EOFError, ValueError):
        for text in file:
            k = json.loads(text)
            graph, plan = (Graph.from_json(k["graph"]), Plan.from_json(k["plan"])) if "graph" in k else (None, None)
            yield k["found"], graph, plan


def _said(r: dict[str, Any]) -> str:
    """A row for people."""
    if "error" in r:
        return f"{r['case']:<18} failed: {r['error']}"
    text = f"{r['case']:<18} {r['seconds'] * 1e3:9.3f} ms"
    text += f", predicted {r['predicted_s'] * 1e3:9.3f} ({r['error_s']:+.1%})" if "predicted_s" in r else ""
    text += f"; {r['allocated'] / 1e6:9.1f} MB"
    text += f", predicted {r['predicted_bytes'] / 1e6:9.1f} ({r['error_bytes']:+.1%})" if "predicted_s" in r else ""
    return (
        text + f"; reserved {r['reserved'] / 1e6:.0f} MB, host {r['host_s'] * 1e3:.2f} ms, first {r['first_s']:.0f} s"
    )


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--profile", help="a file of `laminar profile`; without it nothing is predicted")
    args.add_argument("--case", nargs="*", choices=[*CASES, *SMALL])
    args.add_argument("--small", action="store_true", help="small cases, on the CPU where there is no GPU")
    args.add_argument("--to", help="keep what was measured, graphs and plans included")
    args.add_argument("--kernels", help="keep the kernels of a step of each case")
    args.add_argument("--from", dest="source", help="predict what was measured before")
    args.add_argument("--until", type=float, default=1e9, help="seconds after which no further case is begun")
    given = args.parse_args()
    cluster = cluster_from(given.profile) if given.profile else None
    rows = []
    for found, graph, plan in _kept(given.source) if given.source else _measured(given, time.monotonic()):
        row = {k: v for k, v in found.items() if k != "turns"}
        if cluster is not None and graph is not None and plan is not None:
            try:
                guess = predict(graph, plan, cluster)
                low, high = guess.interval_s
                row |= {
                    "predicted_s": guess.seconds,
                    "predicted_bytes": guess.memory.peak_bytes,
                    "error_s": guess.seconds / found["seconds"] - 1,
                    "error_bytes": guess.memory.peak_bytes / max(found["allocated"], 1) - 1,
                    "predicted_reserved": guess.memory.reserved_bytes,
                    "covered": low <= found["seconds"] <= high,
                    "known": guess.known(),
                }
            except Exception as error:
                traceback.print_exc()  # what was measured is kept all the same
                row["error"] = f"not predicted: {type(error).__name__}: {error}"[:500]
        rows.append(row)
        print(_said(row), flush=True)
    judged = [r for r in rows if "error_s" in r]
    if not judged:
        raise SystemExit(0 if cluster is None and any("seconds" in r for r in rows) else "nothing was predicted")
    if given.small:
        return
    errors, held = ([abs(r[k]) for r in judged] for k in ("error_s", "error_bytes"))
    report(
        "accuracy_gpu",
        {
            "cases": len(judged),
            "failed": len(rows) - len(judged),
            "median_error_s": round(statistics.median(errors), 4),
            "worst_error_s": round(max(errors), 4),
            "median_error_bytes": round(statistics.median(held), 4),
            "worst_error_bytes": round(max(held), 4),
            "covered_by_90_interval": round(sum(r["covered"] for r in judged) / len(judged), 4),
            "targets": {"median_error_s": 0.08, "error_bytes": 0.04},
            "rows": [{k: round(v, 6) if isinstance(v, float) else v for k, v in r.items()} for r in rows],
        },
    )


if __name__ == "__main__":
    main()
