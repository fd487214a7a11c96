"""How far a staged plan's results are from those of one device."""

from __future__ import annotations

from laminar.ir.plans.staged import Staged
from laminar.lower.stages.stage_programs import stages
from laminar.runtime.check.in_process import loopback_pipeline
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.check.rounding import TermSizes
from laminar.runtime.check.verify import judged
from tests.support.zoo import Specimen


def worst(one: Specimen, staged: Staged, way: str = "shared") -> float:
    """The largest error of two micro-batches through the stages against one device; plans are for the f32 graph."""
    again = dict(one.inputs)
    batch = [i.name for i in one.graph.of_kind("batch")]
    for name in batch:  # the second micro-batch has the same samples in another order
        again[name] = one.inputs[name].flip(0) if one.inputs[name].dim() else one.inputs[name]
    parts = [one.inputs, again]
    made = stages(one.graph, staged)
    got = loopback_pipeline.run_pipeline_loopback([made] * 2, parts, [0.5, 0.5], [one.constants] * 2, way=way)
    wants = [run_graph(one.graph, parts[0], one.constants)]
    left = {k.removeprefix("buffer:"): v for k, v in wants[0].items() if k.startswith("buffer:")}
    wants.append(run_graph(one.graph, {**parts[1], **left}, one.constants))
    sized = TermSizes(one.graph, one.inputs, one.constants)
    errors = []
    for key in wants[0]:
        want = wants[1][key] if key.startswith("buffer:") else 0.5 * wants[0][key] + 0.5 * wants[1][key]
        errors.append(judged(key, got[key], want, 1e-9, sized))
    assert got.keys() == wants[0].keys()
    return max(errors)
