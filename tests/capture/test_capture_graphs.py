"""What a captured graph is besides its numbers: how large it may be, where its ops come from, what it draws."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.api import load_recipe
from laminar.capture.canonical.canonical import Canonical
from laminar.capture.capture import capture, check_batch, state_of
from laminar.ir.graph import RNG, Graph
from tests.support.capture_check import EXAMPLES, KEY, Step, draw, graph_outputs, made, same, square
from tests.support.zoo import FEW

# --- size --------------------------------------------------------------------------------------


def gpt(**config: int) -> tuple[nn.Module, Step, dict[str, Tensor]]:
    """A GPT of any size and a batch for it, on the meta device."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("capture_gpt", EXAMPLES / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with torch.device("meta"):
        model = module.GPT(module.Config(**config))
        batch = {key: torch.empty(config["batch"], config["tokens"], dtype=torch.int64) for key in ("ids", "target")}
    return model, module.loss, batch


def grown_mb(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """How far the peak of this process's memory rose, in MB, the seconds of processors it took, and the result."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    result = run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.process_time() - start, result


def test_a_model_of_billions_is_captured_without_allocating_it() -> None:
    """Planning must not need the machine that is planned for."""
    model, loss, batch = gpt(layers=4, d=12288, heads=96, vocab=50257, tokens=2048, batch=8)
    mb, _, graph = grown_mb(lambda: capture(model, loss, batch))
    assert sum(i.spec.numel for i in graph.of_kind("param")) > 8e9
    assert mb < 500


@pytest.mark.slow
def test_gpt3_is_captured_in_a_minute_and_two_gigabytes() -> None:
    """175 billion parameters, 96 layers: the size that planning is for."""
    model, loss, batch = gpt(layers=96, d=12288, heads=96, vocab=50257, tokens=2048, batch=32)
    mb, seconds, graph = grown_mb(lambda: capture(model, loss, batch))
    assert 174e9 < sum(i.spec.numel for i in graph.of_kind("param")) < 176e9
    assert mb < 2000 and seconds < 60


@pytest.mark.parametrize("name", FEW)
def test_every_example_is_captured_the_same_from_cpu_and_from_meta(name: str) -> None:
    """The graph computes what the model does, and a plan made from shapes alone fits the model on the machine."""
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    recipe = load_recipe(str(EXAMPLES / name))
    batch = next(iter(recipe.data()))
    graph = same(recipe.model, recipe.loss, batch, tol=1e-5)
    with torch.device("meta"):
        model = recipe.model()
    assert all(p.is_meta for p in model.parameters())
    assert capture(model, recipe.loss, batch).hash == graph.hash


def test_capturing_twice_gives_the_same_hash() -> None:
    """A plan is for a graph by its hash."""
    recipe = load_recipe(str(EXAMPLES / "gpt.py:tiny"))
    batch = next(iter(recipe.data()))
    assert capture(recipe.model(), recipe.loss, batch).hash == capture(recipe.model(), recipe.loss, batch).hash


# --- origins -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gpt() -> Graph:
    recipe = load_recipe(str(EXAMPLES / "gpt.py:tiny"))
    return capture(recipe.model(), recipe.loss, next(iter(recipe.data())))


def line_of(text: str) -> str:
    """`gpt.py:55  return ...`: the start of a `where` that names the one line containing `text`."""
    lines = (EXAMPLES / "gpt.py").read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f"examples/gpt.py:{number}  {lines[number - 1].strip()}"


def test_every_forward_op_names_a_line_of_the_model(tiny_gpt: Graph) -> None:
    """An error that names no line is a riddle."""
    for node in tiny_gpt.nodes:
        if node.phase == "forward":
            assert node.where.startswith("examples/gpt.py:"), node


def test_every_backward_op_names_the_line_of_its_forward_op(tiny_gpt: Graph) -> None:
    """A user never wrote a backward op; the line that caused it is the one to look at."""
    forward_lines = {n.where for n in tiny_gpt.nodes if n.phase == "forward"}
    for node in tiny_gpt.nodes:
        assert node.where in forward_lines, node


@pytest.mark.parametrize(
    ("parameter", "text", "module"),
    [
        ("blocks.1.mlp.up.weight", "self.down(F.gelu(self.up(x)", "blocks.1.mlp.up"),
        ("blocks.0.attention.qkv.weight", "in self.qkv(x).split", "blocks.0.attention.qkv"),
        ("blocks.0.attention.out.weight", "return self.out(y", "blocks.0.attention.out"),
        ("blocks.1.norm2.weight", "x + self.mlp(self.norm2(x))", "blocks.1.norm2"),
        ("head.weight", "return self.head(self.norm(x))", "head"),
        ("position.weight", "x = self.embed(ids) + self.position(positions)", "position"),
    ],
)
def test_a_gradient_names_the_line_and_module_of_its_layer(
    tiny_gpt: Graph, parameter: str, text: str, module: str
) -> None:
    """Matched by autograd's own bookkeeping, so checked against the source by hand."""
    (out,) = [o for o in tiny_gpt.outputs if o.kind == "grad" and o.name == parameter]
    node = tiny_gpt.by_name[out.ref.name]
    assert node.phase == "backward"
    assert node.where == line_of(text)
    assert node.module == module


def test_ops_that_sum_gradients_name_a_line_too(tiny_gpt: Graph) -> None:
    """Autograd adds gradients between ops; such sums belong to the value that was read twice."""
    sums = [n for n in tiny_gpt.nodes if n.op == "aten.add.Tensor" and n.phase == "backward"]
    assert sums and all(n.where for n in sums)


# --- keyed draws -----------------------------------------------------------------------------


def dropped(graph: Graph, model: nn.Module, batch: Any, key: tuple[int, int]) -> Tensor:
    return graph_outputs(graph, model, batch, key)["loss:loss"]


def test_draws_are_a_function_of_seed_step_and_site() -> None:
    """The same key repeats a step exactly; another step, or another layer, draws anew."""
    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)))
    batch = draw(16, 4)
    graph = capture(model, square, batch)
    values = {key: float(dropped(graph, model, batch, key)) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(set(values.values())) == 3
    assert float(dropped(graph, model, batch, (0, 1))) == values[0, 1]
    sites = [n.args[2] for n in graph.nodes if n.op == "laminar.uniform"]
    assert len(sites) == len(set(sites)) == 2


def test_dropout_keeps_the_share_it_should() -> None:
    """Keyed numbers must still be random numbers."""
    with Canonical(torch.tensor([5, 1])):
        x = F.dropout(torch.ones(200, 500), 0.3)
        again = F.dropout(torch.ones(200, 500), 0.3)
        noise = torch.randn(100_000)
    kept = (x != 0).float()
    assert abs(float(kept.mean()) - 0.7) < 0.005
    assert float(x.max()) == pytest.approx(1 / 0.7)
    assert abs(float((kept * (again != 0)).mean()) - 0.49) < 0.005, "two sites must be independent"
    assert float(kept.mean(0).std()) < 0.05 and float(kept.mean(1).std()) < 0.04
    assert abs(float(noise.mean())) < 0.02 and abs(float(noise.std()) - 1) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_draws_do_not_depend_on_the_layout(seed: int) -> None:
    """Whoever holds an element draws its number: four ranks drop what one device drops."""
    from laminar.placement.random_plan import random_plan
    from laminar.runtime.check.verify import verify_program

    model = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.3)))
    batch = draw(6, 4)
    graph = capture(model, square, batch)
    plan = random_plan(graph, laminar.Mesh({"a": 2, "b": 2}), seed)
    given = {**state_of(model), **check_batch(graph, batch), RNG: torch.tensor(KEY)}
    report = verify_program(graph, plan, [{i.name: given[i.name] for i in graph.inputs}])
    assert report.ok, report


# --- several shapes side by side ---------------------------------------------------------------
