"""On a CUDA device: one rank alone, and two ranks over Gloo with CUDA tensors, against one device on the CPU.

NCCL refuses two ranks on one GPU, so Gloo carries CUDA tensors here. The graph is device-neutral; what
this proves is that the runtime picks kernels that exist on the device and compute the same.
"""

from pathlib import Path

import pytest
import torch

import laminar
from laminar.api import inputs_of, load_recipe
from laminar.ir.graph import widen
from laminar.runtime.module import Step
from laminar.runtime.reference import constants_of, run_graph
from laminar.runtime.transport import Null
from laminar.runtime.verify import error_of, verify_program, widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = ["gpt.py:tiny", "resnet.py:tiny", "llama.py:tiny", "bert.py:tiny", "moe.py:tiny", "lstm.py:tiny"]


def captured(name):
    recipe = load_recipe(f"{EXAMPLES}/{name}")
    model, batch = recipe.model(), next(iter(recipe.data()))
    graph = laminar.capture(model, recipe.loss, batch)
    return graph, inputs_of(graph, model, batch, seed=3, step=1)


@pytest.mark.parametrize("wide", [True, False], ids=["f64", "f32"])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_on_cuda_equals_the_cpu(name: str, wide: bool) -> None:
    """Fused kernels differ by device; their results may not."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    graph, whole = captured(name)
    subject = widen(graph) if wide else graph
    inputs = widened(whole) if wide else {k: v.detach() for k, v in whole.items()}
    constants = constants_of(subject, wide)
    want = run_graph(subject, inputs, constants)
    mesh = laminar.Mesh({"dp": 1})
    from dataclasses import replace

    plan = replace(laminar.plans.data_parallel(graph, mesh), graph_hash=subject.hash)
    program = laminar.lower(subject, plan)
    step = Step(program, Null(mesh, device="cuda"), constants)
    outs = step(*[inputs[i.name].cuda() for i in program.inputs])
    largest = max(float(v.abs().max()) for k, v in want.items() if k.startswith("grad:"))
    for o, got in zip(program.outputs, outs, strict=True):
        error = error_of(got.cpu(), want[f"{o.kind}:{o.name}"], 1e-3 * largest if o.kind == "grad" else 0.0)
        assert error < (1e-9 if wide else 2e-4), (o.kind, o.name, error)


@pytest.mark.parametrize("preset", ["data_parallel", "tensor_parallel", "zero"])
@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny"])
def test_two_ranks_over_gloo_with_cuda_tensors(name: str, preset: str) -> None:
    """Collectives on CUDA tensors through Gloo give one device's gradients."""
    graph, whole = captured(name)
    axis = "tp" if preset == "tensor_parallel" else "dp"
    plan = getattr(laminar.plans, preset)(graph, laminar.Mesh({axis: 2}))
    report = verify_program(graph, plan, [whole], ranks="processes", device="cuda")
    assert report.ok, str(report)
