"""Small GPTs traced without weights, and plans of theirs that undercut a bound, if there are any."""

from __future__ import annotations

from typing import Any

import torch

import laminar
from laminar.errors import LaminarError
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph, map_refs
from laminar.placement.random_plan import random_plan
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Placer, styles
from tests.support.zoo import recipe


def traced(layers: int, batch: int = 8, d: int = 32, tokens: int = 16) -> Graph:
    """A GPT of some depth, without weights."""
    made = recipe("gpt.py:tiny")
    import gpt

    config = gpt.Config(layers=layers, d=d, heads=4, vocab=64, tokens=tokens, batch=batch)
    with torch.device("meta"):
        model = gpt.GPT(config)
    ids = torch.zeros((batch, tokens), dtype=torch.int64)
    return laminar.capture(model, made.loss, {"ids": ids, "target": ids})


def letters(graph: Graph) -> list[Any]:
    """A graph without its names."""
    number = {i.name: k for k, i in enumerate((*graph.inputs, *graph.constants))}
    number |= {n.name: len(number) + k for k, n in enumerate(graph.nodes)}
    return [(n.op, n.outs, map_refs(n.args, lambda r: (number[r.name], r.index))) for n in graph.nodes]


def plans_of(graph: Graph, model: Model, cell: Cell, seeds: int) -> list[Any]:
    """Sensible and senseless plans for one cell."""
    made = []
    placer = Placer(model.machine(cell.mesh), cell.mesh)
    for style in styles(cell.mesh, True, True):
        for zero in (0, 1, 3):
            try:
                made.append(placer.pieces(graph, placer.plan(graph, style), style, zero))
            except LaminarError:
                continue
    for seed in range(seeds):
        made.append(random_plan(graph, cell.mesh, seed))
    return made


def undercut(graph: Graph, spec: str, seeds: int) -> list[str]:
    """Plans that are simulated to be faster than one of the bounds of their cell, or to hold less."""
    request = Request(Cluster.preset(spec))
    model = Model(graph, request)
    bounds, devices = Bounds(model), request.cluster.devices
    found = []
    for cell in (Cell(1, 1, 1, devices, 1), Cell(1, 1, 1, devices // 2, 2)):
        least = {"rough": bounds.rough(cell), "quick": bounds.quick(cell).seconds, "full": bounds.of(cell).seconds}
        assert least["full"] >= least["quick"] > 0 and least["rough"] > 0
        for plan in plans_of(graph, model, cell, seeds):
            try:
                ran = predict(graph, plan, request.cluster, prices=model.machine(cell.mesh))
            except LaminarError:
                continue
            found += [f"{plan.name} on {cell}: {ran.seconds} < {k} {s}" for k, s in least.items() if ran.seconds < s]
            if ran.memory.peak_bytes < bounds.least_bytes(cell):
                found.append(f"{plan.name} on {cell}: {ran.memory.peak_bytes} < {bounds.least_bytes(cell)} bytes")
    return found
