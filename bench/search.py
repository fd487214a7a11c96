"""How long does the search take, and how far from the best can its plan be?

    gpt     24 layers (355M parameters), 8 sequences of 1,024 tokens a device, on 8 to 64 H100
    175b    the shape of GPT-3: 96 layers, 1,536 sequences of 2,048 tokens, on 1,024 H100
    405b    the shape of Llama 3.1 405B: 126 layers, grouped queries, 2,048 sequences of 8,192 tokens, on 16,384 H100

All in bfloat16, all dimensions open. The graph is there already; capture, on meta, is reported beside.

    python bench/search.py [gpt] [175b] [405b] [--devices 8 16 32 64] [--budget 60] [--times 2]

Targets: 5 processor seconds and a gap of 2 % for `gpt`, 30 and 6 % for `175b`, 30 and 15 % for `405b`; the first plan
after 0.3, 5 and 10. `first_s` is when the first plan
was there, `best_s` the one that was chosen; a second search of the same graph in the same process finds prices and
rules in their caches.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import report
from torch import Tensor, nn

from laminar.api import capture
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.planner.search.best_first.search import find
from laminar.planner.search.earlier_plans import forget
from laminar.planner.space.request import Request

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
GPT = {"gpt": (24, 1024, 50304, 1024), "175b": (96, 12288, 51200, 2048)}
"""Layers, width, vocabulary and tokens; heads of 64, and of 128."""
LARGE = {"175b": (1024, 1536), "405b": (16384, 2048)}
"""Devices and sequences."""
TARGETS = {"gpt": (5.0, 0.3, 0.02), "175b": (30.0, 5.0, 0.06), "405b": (30.0, 10.0, 0.15)}
"""Processor seconds to the end and to the first plan, and the gap."""


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())


def traced(name: str, batch: int) -> tuple[Graph, float]:
    """The graph of the global batch, and the seconds it took."""
    with torch.device("meta"):
        if name == "405b":
            made = importlib.import_module("llama")
            model = made.Llama(layers=126, d=16384, heads=128, kv_heads=8, hidden=53248, vocab=128256, tokens=8192)
            model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))  # not tied
            tokens = 8192
        else:
            layers, width, vocab, tokens = GPT[name]
            made = importlib.import_module("gpt")
            heads = width // (64 if name == "gpt" else 128)
            config = made.Config(layers=layers, d=width, heads=heads, vocab=vocab, tokens=tokens, batch=batch)
            model = made.GPT(config)
        model = model.to(torch.bfloat16)
        ids = torch.zeros((batch, tokens), dtype=torch.int64)
    begun = time.process_time()
    graph = capture(model, loss, {"ids": ids, "target": ids})
    return graph, time.process_time() - begun


def searched(graph: Graph, request: Request, times: int) -> dict[str, Any]:
    """Seconds and what was found."""
    seconds: list[float] = []
    said: list[list[float]] = []
    for _ in range(times):
        begun = time.process_time()
        said.append([])
        forget()  # what the first one has found
        found = find(graph, request, lambda _, begun=begun: said[-1].append(time.process_time() - begun))
        seconds.append(time.process_time() - begun)
    proof = found.certificate
    return {
        "search_s": round(seconds[0], 2),
        "again_s": round(seconds[-1], 2) if times > 1 else None,
        "first_s": round(said[0][0], 2),
        "best_s": round(said[0][-1], 2),
        "step_ms": round(1e3 * proof.step_s, 3),
        "bound_ms": round(1e3 * proof.bound_s, 3),
        "gap": round(proof.gap, 4),
        "cells": proof.to_json()["cells"],
        "plan": found.plan.account["choice"]["plan"],
        "peak_gb": round(found.plan.account["peak_bytes"] / 1e9, 1),
    }


def main() -> None:
    """One line for each model and number of devices."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("models", nargs="*", default=["gpt"], help="gpt, 175b, 405b")
    args.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64], help="of gpt")
    args.add_argument("--budget", type=float, default=60.0)
    args.add_argument("--times", type=int, default=2)
    given = args.parse_args()
    cases = [(n, d, 8 * d) for n in given.models if n == "gpt" for d in given.devices]
    cases += [(n, *LARGE[n]) for n in given.models if n != "gpt"]
    for name, devices, batch in cases:
        graph, capture_s = traced(name, batch)
        request = Request(Cluster.preset(f"{devices}xh100"), budget_s=given.budget)
        target_s, first_s, target_gap = TARGETS[name]
        row = {"model": name, "devices": devices, "sequences": batch, "capture_s": round(capture_s, 2)}
        row |= searched(graph, request, given.times)
        report("search", {**row, "target_s": target_s, "target_first_s": first_s, "target_gap": target_gap})


if __name__ == "__main__":
    main()
