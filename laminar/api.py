"""The front door: the assembly of the rooms behind the names users type."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.errors import RecipeError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.sbp import Sbp
from laminar.lower.lower import lower
from laminar.search import presets


@dataclass(frozen=True)
class Recipe:
    """What to train: factories, so that planning for a huge model never allocates it."""

    model: Callable[[], Any]
    """Makes the `nn.Module`; may be called under `torch.device("meta")`."""
    loss: Callable[[Any, Any], Any]
    """`loss(model, batch)`: a scalar tensor, or `laminar.Loss(total, weight)`."""
    data: Callable[[], Iterable[Any]]
    """Makes an iterable of batches."""
    optimizer: Callable[[Any], Any] | None = None
    """Makes the optimizer from an iterable of parameters."""
    steps: int = 100


def load_recipe(name: str) -> Recipe:
    """The recipe that `path/to/file.py:function` names."""
    path_text, _, function = name.partition(":")
    path = Path(path_text)
    if not function:
        raise RecipeError(f"{name!r} does not name a recipe", next="write path/to/file.py:function")
    if not path.is_file():
        raise RecipeError(f"no file {path_text}", next="recipes are named path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"laminar_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if make is None:
        here = [
            k
            for k, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == spec.name and not k.startswith("_")
        ]
        raise RecipeError(f"{path_text} has no {function}", allowed="  ".join(here))
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{name} returned a {type(recipe).__name__}, not a laminar.Recipe")
    return recipe


def capture(model: Any, loss: Callable[[Any, Any], Any], batch: Any) -> Graph:
    """Forward, loss and backward of one step as a logical graph; ops without a rule are probed."""
    from laminar.capture.capture import capture as trace
    from laminar.runtime.probe import probe

    return probe(trace(model, loss, batch))


def accounted(graph: Graph, plan: Plan) -> Plan:
    """A plan with the collectives and bytes of its program written into its account."""
    return replace(plan, account={**plan.account, **lower(graph, plan).account()})


class plans:
    """Plans with names. Each takes a graph and a mesh; ops and tensors nobody placed are completed at least cost."""

    @staticmethod
    def data_parallel(graph: Graph, mesh: Mesh) -> Plan:
        """The batch split over every axis, parameters whole, gradients summed."""
        return accounted(graph, presets.data_parallel(graph, mesh))

    @staticmethod
    def zero(graph: Graph, mesh: Mesh, stage: int = 3) -> Plan:
        """Data parallel with optimizer state (1), gradients (2) and parameters (3) in pieces."""
        return accounted(graph, presets.zero(graph, mesh, stage))

    @staticmethod
    def tensor_parallel(graph: Graph, mesh: Mesh, axis: str | None = None) -> Plan:
        """Weights split over `axis` (`tp` unless named), the residual stream whole; other axes data parallel."""
        return accounted(graph, presets.tensor_parallel(graph, mesh, axis))

    @staticmethod
    def seeded(graph: Graph, mesh: Mesh, seeds: Mapping[str, Mapping[str, Sbp]]) -> Plan:
        """A few tensors placed by name pattern, the rest completed at least cost."""
        return accounted(graph, presets.seeded(graph, mesh, seeds))


def inputs_of(graph: Graph, model: Any, batch: Any, seed: int = 0, step: int = 0) -> dict[str, Any]:
    """Whole inputs of a graph by name: the model's own tensors, the batch's leaves, the RNG key."""
    import torch

    from laminar.capture.capture import check_batch, state_of

    given = {**state_of(model), **check_batch(graph, batch), "rng": torch.tensor([seed, step])}
    return {i.name: given[i.name] for i in graph.inputs}


def verify(
    model: Any,
    loss: Callable[[Any, Any], Any],
    batches: Any,
    plan: Plan,
    ranks: str = "inprocess",
    dtype: str = "f64",
    graph: Graph | None = None,
    tolerance: float | None = None,
) -> Any:
    """Loss, gradients and new buffers of a plan against one device.

    `batches` is a list or iterator of batches. `ranks="inprocess"` runs all ranks in lock-step here;
    `ranks="processes"` starts one Gloo process per rank.
    """
    from laminar.runtime.verify import verify_program

    found = list(batches)
    graph = graph or capture(model, loss, found[0])
    whole = [inputs_of(graph, model, batch, step=i) for i, batch in enumerate(found)]
    return verify_program(graph, plan, whole, dtype, ranks, tolerance)
