"""Models and machines that searches are attacked on (`tests/attack/run.py`): small ones, and odd ones.

Models are those of the zoo, GPTs that are deep enough to be cut, products one after the other whose work is even, or
large in front or at the back, and towers that may stand apart. Machines have slow links, three ranks, prices that were
measured, nodes of different sizes, or devices that differ. Collects nothing itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

import laminar
from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.graph import Graph
from tests.support.zoo import EXAMPLES, NAMES, specimen

PROFILE = Path(__file__).parents[2] / "bench" / "results" / "profile_2.json"


class Products(nn.Module):
    """Three products of one size whose weights are a list, or one after the other with work of different size."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.empty(a, b)) for a, b in itertools.pairwise(widths)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of every row."""
        for w in self.ws:
            x = torch.relu(x @ w)
        return x.square().mean()


PRODUCTS = {
    "even": (1024, 1024, 1024, 1024),
    "wide": (8192, 8192, 8192),
    "front": (4096, 4096, 256, 64, 64),
    "back": (64, 64, 256, 4096, 4096),
}
TOWERS = {"towers": (1024, (3, 3), 64, False), "forked": (512, (3, 1, 2), 48, True)}
"""Width, depths, samples, and whether there is a stem before them."""
DEEP = ("3", "5", "7")
"""GPTs of so many layers, whose work is large beside what a step costs anyway."""
MODELS = (*NAMES, *DEEP, *PRODUCTS, *TOWERS)
SMALL = ("mlp.py:tiny", "dlrm.py:tiny", "lstm.py:tiny", *PRODUCTS, *TOWERS)
"""Of a few dozen ops, which are simulated in a few milliseconds."""
LARGE = ("gpt.py:narrow", "t5.py:tiny")


def plans_of(model: str) -> int:
    """How many plans are judged for a model on each machine: more where they cost less."""
    return 620 if model in SMALL else 40 if model in LARGE else 100


@cache
def graph_of(name: str) -> Graph:
    """A model of the zoo, on meta where it is larger; a GPT of so many layers, a Llama of 7b, products, or towers."""
    from tests.support.branched_models import towers
    from tests.support.traced_models import traced

    if name.isdigit():
        return traced(int(name), batch=16, d=256, tokens=64)
    if name == "7b":
        from llama import Llama, loss

        with torch.device("meta"):
            model = Llama(layers=32, d=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000, tokens=2048).bfloat16()
            ids = torch.zeros(64, 2048, dtype=torch.long)
        return laminar.capture(model, loss, (ids, ids))
    if name in PRODUCTS:
        with torch.device("meta"):
            model, batch = Products(PRODUCTS[name]), torch.empty(64, PRODUCTS[name][0])
        return laminar.capture(model, lambda model, x: model(x), batch)
    if name in TOWERS:
        return towers(*TOWERS[name])
    if name.endswith(":small"):
        return laminar.api.graph_of(str(EXAMPLES / name))
    return specimen(name).graph


def slow_link(spec: str, bytes_per_s: float) -> Cluster:
    """A machine whose ranks are far from each other."""
    cluster = Cluster.preset(spec)
    level = replace(cluster.levels[-1], bytes_per_s=Figure(bytes_per_s, "assumed"))
    return replace(cluster, levels=(*cluster.levels[:-1], level))


MACHINES: dict[str, Callable[[], Cluster]] = {
    **{
        spec: (lambda spec=spec: Cluster.preset(spec))
        for spec in (  # type: ignore[misc]
            "2xcpu",
            "3xcpu",
            "4xcpu",
            "8xcpu",
            "2x4xcpu",
            "4xh100",
            "8xh100@pcie",
            "2x2xa100",
            "4x2xh100@nvlink+eth50",
            "2xh100+2xa100",
        )
    },
    "2xcpu far": lambda: slow_link("2xcpu", 1e7),
    "4xcpu far": lambda: slow_link("4xcpu", 1e8),
    "2+1 cpu": lambda: Cluster.preset("2x2xcpu").without([3]),
    "4+2 h100": lambda: Cluster.preset("2x4xh100").without([6, 7]),
    "measured": lambda: Cluster.load(PROFILE),
}
MEMORY = (0.6, 0.8, None)
"""What a rank may fill: so much of what data parallel holds, where nothing fits in that more, or all there is."""


def short(machine: str, rng: random.Random) -> bool:
    """Whether memory is short: in a quarter of the pairs, if ranks are alike."""
    return rng.random() < 0.25 and "+" not in machine.partition("@")[0]
