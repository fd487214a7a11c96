"""The generated code of one rank: what it may write in place, what it carries for profilers, what it costs nobody."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laminar
from laminar.api import inputs_of
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null, join_process_group


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = Net()
    batch = (torch.randn(12, 8), torch.randint(0, 4, (12,)))
    graph = laminar.capture(model, loss, batch)
    return model, batch, graph


@pytest.fixture
def alone(tmp_path):
    """A real process group of one."""
    join_process_group(0, 1, str(tmp_path / "rendezvous"))
    yield
    torch.distributed.destroy_process_group()


def local_inputs(program, graph, model, batch, rank=0):
    whole = inputs_of(graph, model, batch)
    return [shard(whole[i.name].detach(), i.placed.nd, program.mesh, rank) for i in program.inputs]


def test_one_rank_runs_the_graph_itself(case, alone) -> None:
    """On one rank the program is the graph: bit for bit the same numbers, through a real process group."""
    model, batch, graph = case
    mesh = laminar.Mesh({"dp": 1})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    outs = EagerStep(program, Groups(mesh))(*local_inputs(program, graph, model, batch))
    want = run_graph(graph, inputs_of(graph, model, batch))
    for o, got in zip(program.outputs, outs, strict=True):
        assert torch.equal(got, want[f"{o.kind}:{o.name}"]), o.name


def test_inputs_are_never_written_to(case) -> None:
    """Reductions in place must not reach parameters or the batch."""
    model, batch, graph = case
    for plan in (
        laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2})),
        laminar.plans.tensor_parallel(graph, laminar.Mesh({"tp": 2})),
        laminar.plans.zero(graph, laminar.Mesh({"dp": 2}), 3),
    ):
        program = laminar.lower(graph, plan)
        given = local_inputs(program, graph, model, batch)
        before = [t.clone() for t in given]
        step = EagerStep(program, Null(plan.mesh))
        step(*given)
        step(*given)
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_weight_gradients_are_written_into_their_bucket(case) -> None:
    """Gradients that are products need no copy before they are reduced, and come back as views of the bucket."""
    model, batch, graph = case
    mesh = laminar.Mesh({"dp": 2})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    step = EagerStep(program, Null(mesh))
    assert step.code.count(", out = ") == 2  # up.weight and down.weight
    outs = step(*local_inputs(program, graph, model, batch))
    grads = [t for o, t in zip(program.outputs, outs, strict=True) if o.kind == "grad"]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1


def test_ranges_carry_module_names(case) -> None:
    """A profile is only readable if ops say which module they belong to."""
    model, batch, graph = case
    mesh = laminar.Mesh({"dp": 1})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    step = EagerStep(program, Null(mesh), ranges=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*local_inputs(program, graph, model, batch))
    names = {e.name for e in profile.events()}
    assert "up/aten.addmm" in names
    assert "down/aten.mm" in names  # backward ops too


def test_the_program_says_why_each_collective_exists(case) -> None:
    """Op, local shape, placement; kind, axis, bytes and reason of each collective."""
    _, _, graph = case
    plan = laminar.plans.tensor_parallel(graph, laminar.Mesh({"dp": 2, "tp": 2}))
    program = laminar.lower(graph, plan)
    text = str(program)
    for instr in program.collectives:
        assert instr.why and instr.bytes > 0
        assert f"{instr.bytes:,} B  <- {instr.why}" in text
    assert "f32[6,8] [S(0), B]" in text  # this rank's half of the batch


def test_programs_are_the_same_each_time(case) -> None:
    """Ranks lower on their own and must agree on every collective."""
    _, _, graph = case
    mesh = laminar.Mesh({"dp": 2, "tp": 2})
    hashes = {laminar.lower(graph, laminar.plans.tensor_parallel(graph, mesh)).hash for _ in range(3)}
    assert len(hashes) == 1
