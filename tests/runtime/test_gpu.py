"""On a CUDA device: one rank alone, and two ranks over Gloo with CUDA tensors, against one device on the CPU.

NCCL refuses two ranks on one GPU, so Gloo carries CUDA tensors here. The graph is device-neutral; what
this proves is that the runtime picks kernels that exist on the device and compute the same.
"""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

import laminar
from laminar import events
from laminar.api import inputs_of, load_recipe
from laminar.capture import torch_private
from laminar.capture.ops import kernels
from laminar.capture.torch_private import compiled_graph
from laminar.ir.graph import widen
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.verify import relative_error, verify_program, widened
from laminar.runtime.code import inductor_step
from laminar.runtime.code.decompositions import DECOMPOSED
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.code.inductor_step import Compiled
from laminar.runtime.comm.transport import Null

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
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
    step = EagerStep(program, Null(mesh, device="cuda"), constants)
    outs = step(*[inputs[i.name].cuda() for i in program.inputs])
    largest = max(float(v.abs().max()) for k, v in want.items() if k.startswith("grad:"))
    for o, got in zip(program.outputs, outs, strict=True):
        error = relative_error(got.cpu(), want[f"{o.kind}:{o.name}"], 1e-3 * largest if o.kind == "grad" else 0.0)
        assert error < (1e-9 if wide else 2e-4), (o.kind, o.name, error)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        *product(("gpt.py:tiny", "resnet.py:tiny"), ("data_parallel", "tensor_parallel", "zero")),
        ("gpt.py:tiny", "context_parallel"),
        ("llama.py:tiny", "context_parallel"),
    ],
)
def test_two_ranks_over_gloo_with_cuda_tensors(name: str, preset: str) -> None:
    """Collectives on CUDA tensors through Gloo give one device's gradients."""
    graph, whole = captured(name)
    axis = {"tensor_parallel": "tp", "context_parallel": "cp"}.get(preset, "dp")
    plan = getattr(laminar.plans, preset)(graph, laminar.Mesh({axis: 2}))
    report = verify_program(graph, plan, [whole], ranks="processes", device="cuda")
    assert report.ok, str(report)


# --- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [torch_private.FLASH, torch_private.CUDNN, torch_private.EFFICIENT])
@pytest.mark.parametrize("causal", [True, False])
def test_every_fused_attention_equals_plain_arithmetic(
    fused: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, the logsumexp that backward needs, and gradients, against float64 on whole tensors."""
    monkeypatch.setattr(torch_private, "sdp_choice", lambda *_: fused)
    torch.manual_seed(0)
    packed = torch.randn(2, 128, 3 * 4 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.view(2, 128, 4, 64).transpose(1, 2) for t in packed.split(256, -1))  # as models have them
    dout = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = kernels.attention(q, k, v, None, causal, 0.125)
    got = (out, lse, *kernels.attention_backward(dout, q, k, v, None, out, lse, causal, 0.125))
    wide = [t.double().cpu() for t in (q, k, v, dout)]
    o, l = kernels.attention(*wide[:3], None, causal, 0.125)  # noqa: E741
    want = (o, l, *kernels.attention_backward(wide[3], *wide[:3], None, o, l, causal, 0.125))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert float((g.double().cpu() - w).norm() / w.norm()) < 1e-2


@pytest.mark.parametrize("begins", [(0, 128), (0, 64, 128), (0, 33, 100, 128)])
@pytest.mark.parametrize("fused", [torch_private.FLASH, torch_private.CUDNN, torch_private.EFFICIENT])
def test_stretches_of_every_fused_attention_are_the_whole(
    fused: int, begins: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal attention cut by row, keys whole: rows put together, and gradients of keys added, against float64."""
    monkeypatch.setattr(torch_private, "sdp_choice", lambda *_: fused)
    torch.manual_seed(0)
    packed = torch.randn(2, 128, 3 * 4 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.view(2, 128, 4, 64).transpose(1, 2) for t in packed.split(256, -1))
    dout = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    rows = []
    for a, b in pairwise(begins):
        x, y = q[:, :, a:b], dout[:, :, a:b]
        out, lse = kernels.attention_at(x, k, v, None, True, 0.125, a)
        rows.append((out, lse, *kernels.attention_backward_at(y, x, k, v, None, out, lse, True, 0.125, a)))
    outs, lses, dqs, dks, dvs = zip(*rows, strict=True)
    got = (torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(dqs, 2), sum(dks), sum(dvs))
    wide = [t.double().cpu() for t in (q, k, v, dout)]
    o, l = kernels.attention(*wide[:3], None, True, 0.125)  # noqa: E741
    want = (o, l, *kernels.attention_backward(wide[3], *wide[:3], None, o, l, True, 0.125))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert float((g.double().cpu() - w).norm() / w.norm()) < 1e-2


def test_attention_is_what_torch_would_take() -> None:
    """For a traced tensor as for a real one; and the slow kernel is not what torch takes for bfloat16."""
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    choice = torch_private.sdp_choice(q, q, q, True, 0.125)
    assert choice in (torch_private.FLASH, torch_private.CUDNN)
    with torch_private.FakeTensorMode():
        fake = torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
        assert torch_private.sdp_choice(fake, fake, fake, True, 0.125) == choice


# --- compiled steps --------------------------------------------------------------------------


def compiled_case(name: str, wrap=lambda loss: loss):
    recipe = load_recipe(f"{EXAMPLES}/{name}")
    model, batch = recipe.model(), next(iter(recipe.data()))
    graph = laminar.capture(model, wrap(recipe.loss), batch)
    mesh = laminar.Mesh({"dp": 1})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    whole = inputs_of(graph, model, batch, seed=3, step=1)
    given = [whole[i.name].detach().cuda() for i in program.inputs]
    static = [i for i, item in enumerate(program.inputs) if item.kind in ("param", "buffer")]
    return program, Null(mesh, device="cuda"), given, static


def agree(program, got, want, tolerance: float) -> None:
    largest = max(float(w.abs().max()) for o, w in zip(program.outputs, want, strict=True) if o.kind == "grad")
    for o, g, w in zip(program.outputs, got, want, strict=True):
        error = relative_error(g.cpu(), w.cpu(), 1e-3 * largest if o.kind == "grad" else 0.0)
        assert error < tolerance, (o.kind, o.name, error)


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_equals_the_plain_one(name: str) -> None:
    """Recorded and replayed, on changing inputs: parameters changed in place, batches handed in anew."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    program, transport, given, static = compiled_case(name)
    step, plain = Compiled(program, transport, None, static), EagerStep(program, transport)
    for turn in range(3):
        agree(program, step(*given), plain(*given), 2e-4)
        with torch.no_grad():
            for i, t in enumerate(given):
                if i in static and t.is_floating_point():
                    t.mul_(0.9)
                elif t.dim() and i not in static and program.inputs[i].kind == "batch":
                    given[i] = t.flip(0).clone()
        assert step.replays and step._recorded is not None, turn


def test_a_step_that_can_not_be_recorded_runs_without() -> None:
    """One warning, the same numbers, and a generator that still draws."""
    program, transport, given, static = compiled_case("mlp.py:tiny")

    def waits(fn, inputs, late, mine, shown):
        def code(args):
            torch.cuda.synchronize()  # forbidden while recording
            return fn(*args)

        return code

    step = Compiled(program, transport, None, static, compiler=waits)
    found: list[events.Event] = []
    with events.listening(found.append):
        for _ in range(3):
            agree(program, step(*given), EagerStep(program, transport)(*given), 2e-4)
    assert [e.kind for e in found] == ["warning"] and not step.replays
    assert torch.randn(8, device="cuda").isfinite().all()


def test_recordings_come_and_go() -> None:
    """A pool of memory that has lost its last recording can't take another; outputs of the old may still be held."""
    held = []
    for _ in range(3):
        program, transport, given, static = compiled_case("mlp.py:tiny")
        step = Compiled(program, transport, None, static, compiler=inductor_step.run_uncompiled)
        held.append(step(*given))
        assert step._recorded is not None
        both = Compiled(program, transport, None, static, compiler=inductor_step.run_uncompiled)
        both(*given)
        assert both._recorded is not None and both._recorded.pool is step._recorded.pool


def test_moved_parameters_are_noticed() -> None:
    """A recording reads memory where it lay: another tensor in its place means another recording."""
    program, transport, given, static = compiled_case("mlp.py:tiny")
    step = Compiled(program, transport, None, static)
    step(*given)
    moved = [t.clone() * 1.1 if i in static else t for i, t in enumerate(given)]
    agree(program, step(*moved), EagerStep(program, transport)(*moved), 2e-4)


def test_losses_outlive_the_next_step() -> None:
    """Whoever collects losses on the device must find them unchanged."""
    program, transport, given, static = compiled_case("mlp.py:tiny")
    step = Compiled(program, transport, None, static)
    at = next(i for i, o in enumerate(program.outputs) if o.kind == "loss")
    first = step(*given)[at]
    before = float(first)
    given[static[0]].mul_(3.0)
    second = step(*given)[at]
    assert float(first) == before != float(second)


def test_compiled_draws_are_bit_equal_on_the_gpu() -> None:
    """Dropout must fall the same on every device, compiled or not."""
    key = torch.tensor([2**40 + 5, 123])

    def draws(key: torch.Tensor) -> list[torch.Tensor]:
        return [DECOMPOSED["laminar.uniform"]((3000, 701), key, 3, torch.float32)]

    (got,) = compiled_graph(draws, [key.cuda()], False, [], [0])([key.cuda()])
    assert torch.equal(got.cpu(), kernels.uniform((3000, 701), key, 3, torch.float32))


def half(loss):
    def run(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss(model, batch)

    return run


@pytest.mark.parametrize("name", ["gpt.py:small", "resnet.py:small"])
def test_half_precision_agrees_with_the_plain_step(name: str) -> None:
    """Weight gradients come out of their products in float32 and are no worse for it."""
    program, transport, given, static = compiled_case(name, half)
    got = Compiled(program, transport, None, static)(*given)
    want = EagerStep(program, transport)(*given)
    for o, g, w in zip(program.outputs, got, want, strict=True):
        assert g.dtype == w.dtype
        if o.kind == "grad" and g.dim() == 2:
            assert float((g - w).norm() / w.norm()) < 3e-2, o.name


def test_recomputation_lowers_the_peak() -> None:
    """By about what the pass says lies less between forward and backward."""
    program, transport, given, static = compiled_case("gpt.py:small", half)

    def peak(traffic: float | None) -> int:
        step = Compiled(program, transport, None, static, replay=False, traffic=traffic)
        step(*given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(*given)
        return int(torch.cuda.max_memory_allocated()) - before

    assert peak(0.1) < 0.75 * peak(None)
