"""The fused kernel of recurrent layers gives what the plain form gives, and runs only where nobody sees its bytes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.api import load_recipe
from laminar.capture.ops import kernels
from laminar.ir.mesh import Mesh
from laminar.ir.program import Program, ProgramOutput
from laminar.ir.serial.codec import Ref
from laminar.lower.lower import lower
from laminar.profile import time_op
from laminar.runtime.code import fused_lstm
from tests.support.zoo import specimen

MESH = Mesh({"dp": 2})


def _given(steps: int, batch: int, bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of a layer of width 5 on inputs of width 3, and gradients of its results."""
    rng = torch.Generator().manual_seed(steps)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    layer = [draw(steps, batch, 3), draw(batch, 5), draw(batch, 5), draw(20, 3), draw(20, 5)]
    return [*layer, draw(20) if bias else None], [draw(steps, batch, 5), draw(batch, 5), draw(batch, 5)]


@pytest.mark.parametrize("steps, batch", [(7, 4), (1, 1), (6, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_fused_and_plain_give_the_same(steps: int, batch: int, bias: bool, reverse: bool) -> None:
    """States, and gradients of inputs, states, weights and bias; a rank may hold no samples at all."""
    layer, grads = _given(steps, batch, bias)
    plain, fused = kernels.lstm(*layer, reverse), fused_lstm.fused_lstm(*layer, reverse)
    if batch:
        assert isinstance(fused[3], fused_lstm.Workspace), "it runs fused here"
    torch.testing.assert_close(fused[:3], plain[:3])
    back = kernels.lstm_backward(*grads, *layer[:5], plain[0], *plain[3:], reverse)
    torch.testing.assert_close(fused_lstm.fused_lstm_backward(*grads, *layer[:5], fused[0], *fused[3:], reverse), back)


def test_inputs_may_be_views() -> None:
    """A layer with the batch first hands a transposed tensor over, and states that are rows of a stack."""
    layer, grads = _given(7, 4, True)
    turned = [layer[0].transpose(0, 1).contiguous().transpose(0, 1), *(t.t().contiguous().t() for t in layer[1:5])]
    fused, plain = fused_lstm.fused_lstm(*turned, layer[5], False), kernels.lstm(*layer, False)
    torch.testing.assert_close(fused[:3], plain[:3])
    views = [g.transpose(-1, -2).contiguous().transpose(-1, -2) for g in grads]
    back = kernels.lstm_backward(*grads, *layer[:5], plain[0], *plain[3:], False)
    torch.testing.assert_close(fused_lstm.fused_lstm_backward(*views, *turned, fused[0], *fused[3:], False), back)


def _program(preset: str = "data") -> Program:
    graph = specimen("lstm.py:tiny").graph
    plans = {"data": laminar.plans.data_parallel(graph, MESH), "zero3": laminar.plans.zero(graph, MESH, 3)}
    return lower(graph, plans[preset])


@pytest.mark.parametrize("preset", ["data", "zero3"])
def test_layers_of_a_training_step_run_fused(preset: str) -> None:
    """Both layers, forward and backward, whole weights or gathered ones."""
    program = _program(preset)
    found = fused_lstm.paired(program)
    assert set(found) == {i.name for i in program.instrs if i.op in fused_lstm.FUSED}
    assert len(found) == 4 and all(found.values())


def test_who_looks_at_gates_gets_gates() -> None:
    """An output, another op and a backward that takes only one of the two as it was made."""
    program = _program()
    line = next(i for i in program.instrs if i.op == fused_lstm.LSTM_FORWARD)
    gates = line.outs[3]
    assert gates is not None
    told = replace(program, outputs=(*program.outputs, ProgramOutput("gates", "metric", Ref(line.name, 3), gates)))
    assert line.name not in fused_lstm.paired(told) and len(fused_lstm.paired(told)) == 2
    back = next(i for i in program.instrs if i.op == fused_lstm.LSTM_BACKWARD and Ref(line.name, 3) in i.refs)
    boxed = replace(back, name="boxed", op="box.slice", refs=(Ref(line.name, 3),), args=())
    args = (*back.args[:9], Ref("boxed"), *back.args[10:])
    other = replace(back, args=args, refs=tuple(Ref("boxed") if r == Ref(line.name, 3) else r for r in back.refs))
    lines = [x for i in program.instrs for x in ((boxed, other) if i.name == back.name else (i,))]
    found = fused_lstm.paired(replace(program, instrs=tuple(lines)))
    assert line.name not in found and back.name not in found and len(found) == 2


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def test_a_job_trains_fused_as_plain_torch_does() -> None:
    """A job's own step takes the fused kernel, and comes to what eager torch comes to, step after step."""
    torch.manual_seed(0)
    model, batch = _Two(), {"x": torch.randn(4, 7, 6), "y": torch.randint(4, (4, 7))}
    twin = _Two()
    twin.load_state_dict(model.state_dict())

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten())

    spied = {k: mock.Mock(side_effect=v, __name__=v.__name__) for k, v in fused_lstm.FUSED.items()}
    with mock.patch.dict(fused_lstm.FUSED, spied):
        spies = list(spied.values())
        job = laminar.parallelize(
            model, loss, lambda p: torch.optim.SGD(p, lr=0.5), batch=batch, device="cpu", check=False
        )
        for spy in spies:
            spy.reset_mock()
        mine = [job.step(batch).loss for _ in range(5)]
        assert [spy.call_count for spy in spies] == [20, 20], "four directions, five steps"
    optimizer, theirs = torch.optim.SGD(twin.parameters(), lr=0.5), []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(twin, batch)
        value.backward()
        optimizer.step()
        theirs.append(float(value.detach()))
    assert mine == pytest.approx(theirs, rel=1e-6)
    torch.testing.assert_close(dict(job.state_dict()), dict(twin.state_dict()))


def test_watched_steps_see_tensors() -> None:
    """Whoever watches lines is shown gates, not bytes: such a step runs the plain forms, with the same results."""
    recipe, batch = load_recipe("examples/lstm.py:tiny"), next(iter(load_recipe("examples/lstm.py:tiny").data()))
    losses = []
    for watched in (False, True):
        job = laminar.parallelize(
            recipe.model(), recipe.loss, recipe.optimizer, batch=batch, device="cpu", detect_anomaly=watched
        )
        losses.append([job.step(batch).loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("key", ["", "_backward"])
def test_what_is_measured_is_what_runs(key: str) -> None:
    """Prices of a CPU are of the fused kernel: forward, and backward on a workspace that forward has left."""
    x, s, y, w, u, g = "f32[7,4,6]", "f32[4,5]", "f32[7,4,5]", "f32[20,6]", "f32[20,5]", "f32[7,4,20]"
    text = (
        f"laminar.lstm_backward({y},{s},{s},{x},{s},{s},{w},{u},{y},{g},{y},F)->{x},{s},{s},{w},{u},f32[20]"
        if key
        else f"laminar.lstm({x},{s},{s},{w},{u},f32[20],F)->{y},{s},{s},{g},{y}"
    )
    ready = time_op.runs_of(text, torch.device("cpu"), 1)[0]
    assert ready.func is fused_lstm.FUSED[f"laminar.lstm{key}"]  # type: ignore[attr-defined]
    assert key == "" or isinstance(ready.args[9], fused_lstm.Workspace)  # type: ignore[attr-defined]
    ready()
