"""The zoo, captured: every example as a graph, its inputs, and what one device makes of them.

Capturing a model and running it once on whole tensors is the same for every plan, so it is done once
per process and kept. Used by the tests of plans and programs; collects nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laminar
from laminar.api import inputs_of
from laminar.ir.graph import Graph, widen
from laminar.ir.plans.plan import Plan
from laminar.runtime.check.in_process import loopback
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.rounding import TermSizes
from laminar.runtime.check.verify import VERIFY_TOLERANCE, Report, judged, verify_program, widened
from laminar.runtime.comm.shards import assemble
from tests.support.example_recipes import TINY

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = tuple(TINY)
"""Every small recipe of the examples, as `file.py:function`."""
TWINS = ("gpt.py:narrow", "hf.py:bert", "hf.py:gpt2")
"""Those that consist of the same ops as another of them."""
MOST = tuple(pytest.param(name, marks=pytest.mark.slow) if name in TWINS else name for name in NAMES)
"""For tests that take long and need not see the same ops twice: twins are left to `make prove`."""
CORE = ("mlp.py:tiny", "gpt.py:tiny", "resnet.py:tiny", "moe.py:tiny", "lstm.py:tiny")
FEW = tuple(name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES)
"""For facts about programs that no single op decides: five models of different build, the others in `make prove`."""


@dataclass(frozen=True, eq=False)
class Specimen:
    """One model in one precision, ready to be spread."""

    name: str
    graph: Graph
    inputs: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    want: Mapping[str, Tensor]
    """What one device makes, by `kind:name`."""
    dtype: str


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors here are tiny, and tests share two cores: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe(name: str) -> Any:
    """A recipe by `file.py:function`."""
    return laminar.load_recipe(str(EXAMPLES / name))


def captured(made: Any, name: str = "") -> Specimen:
    """A recipe captured as it is, in float32."""
    model, batch = made.model(), next(iter(made.data()))
    graph = laminar.capture(model, made.loss, batch)
    inputs = {k: v.detach() for k, v in inputs_of(graph, model, batch, seed=3).items()}
    constants = constants_of(graph)
    return Specimen(name, graph, inputs, constants, run_graph(graph, inputs, constants), "f32")


def wide(one: Specimen) -> Specimen:
    """The same in float64, every cast included."""
    graph = widen(one.graph)
    inputs, constants = widened(one.inputs), constants_of(graph, wide=True)
    return Specimen(one.name, graph, inputs, constants, run_graph(graph, inputs, constants), "f64")


@cache
def specimen(name: str, dtype: str = "f32") -> Specimen:
    """A model of the zoo; its plans are made for the float32 graph, whatever they are checked in."""
    return captured(recipe(name), name) if dtype == "f32" else wide(specimen(name))


def worst_error(one: Specimen, plan: Plan, way: str = "shared") -> float:
    """The largest relative error of any loss, gradient or buffer under a plan, of the code that ranks run."""
    program = laminar.lower(one.graph, replace(plan, graph_hash=one.graph.hash))
    ranks = loopback.run_loopback(program, one.inputs, one.constants, way=way)
    sized = TermSizes(one.graph, one.inputs, one.constants)
    worst = 0.0
    for o in program.outputs:
        key = f"{o.kind}:{o.name}"
        got = assemble([r[key] for r in ranks], o.placed.spec.shape, o.placed.nd, program.mesh)
        worst = max(worst, judged(key, got, one.want[key], VERIFY_TOLERANCE[one.dtype], sized))
    return worst


def equal(one: Specimen, plan: Plan, way: str = "shared") -> bool:
    """Whether a plan runs and gives what one device gives, within the tolerance of the precision."""
    try:
        return worst_error(one, plan, way) <= VERIFY_TOLERANCE[one.dtype]
    except Exception:
        return False


def verified(one: Specimen, plan: Plan) -> Report:
    """Assert that a plan gives one device's numbers in float64; the report, for whoever wants more."""
    report = verify_program(one.graph, plan, [one.inputs])
    assert report.ok, f"{one.name}, {plan}: {report}"
    return report
