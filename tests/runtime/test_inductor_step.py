"""The compiled step: same numbers as the plain one, cut where it must be, with nothing held too long."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import laminar
from laminar.api import inputs_of
from laminar.capture.ops import kernels
from laminar.capture.torch_private import compiled_graph
from laminar.ir.serial.codec import Ref
from laminar.runtime.code import inductor_step
from laminar.runtime.code.decompositions import DECOMPOSED
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.code.inductor_step import Compiled, run_uncompiled
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null, join_process_group
from tests.support.zoo import FEW, one_thread, specimen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.2, self.training))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = Net()
    batch = (torch.randn(12, 8), torch.randint(0, 4, (12,)))
    graph = laminar.capture(model, loss, batch)
    return graph, {k: v.detach() for k, v in inputs_of(graph, model, batch, seed=5).items()}


def lowered(graph, mesh=None, preset="data_parallel"):
    return laminar.lower(graph, getattr(laminar.plans, preset)(graph, mesh or laminar.Mesh({"dp": 1})))


def local(program, whole, rank=0):
    return [shard(whole[i.name], i.placed.nd, program.mesh, rank) for i in program.inputs]


def close(program, got, want, tolerance=2e-5) -> None:
    largest = max(float(w.abs().max()) for o, w in zip(program.outputs, want, strict=True) if o.kind == "grad")
    for o, g, w in zip(program.outputs, got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype, o.name
        scale = max(float(w.abs().max()), 1e-3 * largest)
        assert float((g - w).abs().max()) <= tolerance * scale, o.name


@pytest.mark.parametrize("name", FEW)
def test_parts_compute_what_the_step_computes(name: str) -> None:
    """Every model of the zoo, through everything but the compiler: norms written out, recomputation, cuts."""
    with one_thread():
        one = specimen(name)
        program = lowered(one.graph, laminar.Mesh({"dp": 2}))
        given = local(program, one.inputs)
        want = EagerStep(program, Null(program.mesh), one.constants)(*given)
        step = Compiled(program, Null(program.mesh), one.constants, compiler=run_uncompiled)
        for _ in range(2):
            close(program, step(*given), want)


def test_inductor_computes_what_the_step_computes(case) -> None:
    """Through the real compiler, on this machine's CPU, dropout included; and again with other inputs."""
    graph, whole = case
    program = lowered(graph)
    step, plain = Compiled(program, Null(program.mesh)), EagerStep(program, Null(program.mesh))
    for scale in (1.0, 1.7):
        given = [t * scale if t.is_floating_point() else t for t in local(program, whole)]
        before = [t.clone() for t in given]
        close(program, step(*given), plain(*given))
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "inputs were written to"
    hits = counters["inductor"]["fxgraph_cache_hit"]
    close(program, Compiled(program, Null(program.mesh))(*given), plain(*given))
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 2, "both parts come from the cache"


def test_compiled_draws_are_those_of_the_kernels() -> None:
    """A draw that differs in one bit is another run; indices this large overflow 32 bits in a compiler's hands."""
    key = torch.tensor([2**40 + 5, 123])

    def draws(key: torch.Tensor) -> list[torch.Tensor]:
        return [DECOMPOSED["laminar.uniform"]((300, 7), key, 3, torch.float32)]

    (got,) = compiled_graph(draws, [key], False, [], [0])([key])
    assert torch.equal(got, kernels.uniform((300, 7), key, 3, torch.float32))


def test_forward_and_backward_are_two_parts(case) -> None:
    """One graph for both would let the compiler share what is meant to be made twice."""
    graph, _ = case
    step = Compiled(lowered(graph), Null(laminar.Mesh({"dp": 1})), compiler=run_uncompiled)
    forward, backward = step.parts
    assert not forward.late and backward.late
    again = [line.name for line in backward.lines if line.name.endswith(".again")]
    assert again and not any(line.name.endswith(".again") for line in forward.lines)


def test_gradients_lie_like_their_parameters() -> None:
    """Fused optimizers compare strides, even of dims of length 1, and a compiler turns images around as it likes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.contiguous()
    batch = torch.randn(2, 3, 8, 8)
    graph = laminar.capture(model, lambda m, b: m(b).square().mean(), batch)
    program, whole = lowered(graph), inputs_of(graph, model, batch)

    def turned(fn, inputs, late, mine, shown):
        def code(args):
            out = fn(*args)
            four = [i for i, t in enumerate(out) if t.dim() == 4 and (t.shape[-1] == 1 or i not in shown)]
            return [t.to(memory_format=torch.channels_last) if i in four else t for i, t in enumerate(out)]

        return code

    got = Compiled(program, Null(program.mesh), compiler=turned)(*[whole[i.name].detach() for i in program.inputs])
    for o, g in zip(program.outputs, got, strict=True):
        if o.kind == "grad":
            assert g.stride() == whole[o.name].stride(), o.name


@pytest.mark.parametrize("preset", ["data_parallel", "tensor_parallel", "zero"])
def test_parts_end_where_ranks_talk(case, preset: str) -> None:
    """No collective inside a part, each started once and finished once before its first reader."""
    graph, whole = case
    mesh = laminar.Mesh({"tp" if preset == "tensor_parallel" else "dp": 2})
    program = lowered(graph, mesh, preset)
    step = Compiled(program, Null(mesh), compiler=run_uncompiled)
    starts = [e.name for e in step.events if isinstance(e, inductor_step._Start)]
    ends = [e.name for e in step.events if isinstance(e, inductor_step._Finish)]
    assert starts == [i.name for i in program.collectives]
    assert sorted(starts) == sorted(ends)
    want = EagerStep(program, Null(mesh))(*local(program, whole))
    close(program, step(*local(program, whole)), want)


def test_a_real_process_group_carries_a_compiled_step(case, tmp_path) -> None:
    """Buckets are filled from parts, reduced, and come back."""
    graph, whole = case
    join_process_group(0, 1, str(tmp_path / "rendezvous"))
    try:
        mesh = laminar.Mesh({"dp": 1})
        program = lowered(graph, mesh)
        want = EagerStep(program, Groups(mesh))(*local(program, whole))
        close(program, Compiled(program, Groups(mesh), compiler=run_uncompiled)(*local(program, whole)), want)
    finally:
        torch.distributed.destroy_process_group()


def test_saved_values_die_inside_the_part_that_reads_them_last(case) -> None:
    """Whoever calls a part must hold nothing back, or nothing could be freed or overwritten in it."""
    graph, whole = case
    seen: list[tuple[int, int]] = []

    def watching(fn, inputs, late, mine, shown):
        def code(args):
            given = [weakref.ref(a) for a in args]
            count = len(args)
            out = fn(*args)
            args.clear()
            seen.append((count, sum(given[i]() is None for i in mine)))
            return out

        if late:
            assert mine, "backward may overwrite what forward left for it alone"
        return code

    program = lowered(graph)
    step = Compiled(program, Null(program.mesh), compiler=watching)
    step(*local(program, whole))
    (_, freed_forward), (_, freed_backward) = seen
    assert freed_forward == 0 and freed_backward > 0


def test_only_memory_of_its_own_may_be_overwritten(case) -> None:
    """Never an input of the step, never an output, never one of two views of the same memory."""
    graph, whole = case
    program = lowered(graph)
    outputs = {o.ref for o in program.outputs}
    inputs = {Ref(i.name) for i in program.inputs}

    def checking(fn, given, late, mine, shown):
        part = fn.__self__
        places = [t.untyped_storage().data_ptr() for t in given]
        for i in mine:
            assert part.ins[i] not in inputs | outputs
            assert places.count(places[i]) == 1
        return lambda args: fn(*args)

    Compiled(program, Null(program.mesh), compiler=checking)(*local(program, whole))


def test_the_forms_the_compiler_sees_equal_the_kernels() -> None:
    """Batch norm as arithmetic against torch's own kernels, in float64; draws, which must not differ in a bit."""
    torch.manual_seed(0)
    x, dy = torch.randn(6, 5, 4, 3, dtype=torch.float64) * 3 + 1, torch.randn(6, 5, 4, 3, dtype=torch.float64)
    w, b = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    _, mean, rstd = kernels.batch_norm(x, w, b, 1e-5)
    var = x.var((0, 2, 3), correction=0)
    dw, db = kernels.batch_norm_sums(dy, x, mean, rstd)
    calls = {
        "batch_norm_apply": (x, w, b, mean, var, 1e-5),
        "batch_norm_moments": (x,),
        "batch_norm_sums": (dy, x, mean, rstd),
        "batch_norm_grad": (dy, x, w, mean, rstd, dw, db, 72),
        "batch_norm_backward": (dy, x, w, mean, rstd),
    }
    key = torch.tensor([7, 3])
    calls["uniform"] = ((3, 4, 5), key, 2, torch.float32)
    calls["normal"] = ((6,), key, 1, torch.float64)
    wants = {f"laminar.{name}": (getattr(kernels, name), args) for name, args in calls.items()}
    wants["aten.gelu"] = (lambda x: F.gelu(x, approximate="tanh"), (x,))
    wants["aten.gelu_backward"] = (lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"), (dy, x))
    probabilities = torch.randn(7, 2, 5, dtype=torch.float64).log_softmax(-1)
    labels = (probabilities, torch.randint(1, 5, (2, 3)), torch.tensor([7, 6]), torch.tensor([3, 2]))
    wants["laminar.ctc_loss"] = (kernels.ctc_loss, (*labels, 0, False))
    nll, alpha = kernels.ctc_loss(*labels, 0, False)
    wants["laminar.ctc_loss_backward"] = (kernels.ctc_loss_backward, (nll, *labels, nll, alpha, 0, False))
    assert wants.keys() == DECOMPOSED.keys()
    for name, (kernel, args) in wants.items():
        form = functools.partial(DECOMPOSED[name], approximate="tanh") if "gelu" in name else DECOMPOSED[name]
        got, want = form(*args), kernel(*args)
        got, want = (got, want) if isinstance(got, tuple) else ((got,), (want,))
        for g, v in zip(got, want, strict=True):
            torch.testing.assert_close(g, v, rtol=1e-10, atol=0.0 if "uniform" in name else 1e-10, msg=name)


def test_what_was_compiled_is_found_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same part comes from the cache; with other inputs to overwrite it is another part."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.randn(64), torch.randn(64)

    def fn(x, y):  # annotations given as text would end up in the graph, which then can't be cached
        return [x * y + 1]

    def hits(mine: list[int]) -> int:
        before = counters["inductor"]["fxgraph_cache_hit"]
        (got,) = compiled_graph(fn, [x, y], True, mine, [0])([x.clone(), y.clone()])
        assert torch.allclose(got, x * y + 1)
        return counters["inductor"]["fxgraph_cache_hit"] - before

    assert [hits([0]), hits([0]), hits([]), hits([])] == [0, 1, 0, 1]


@pytest.mark.parametrize("given", [{}, {"XDG_CACHE_HOME": "/x"}, {"TORCHINDUCTOR_CACHE_DIR": "/y"}], ids=str)
def test_the_cache_lies_where_users_look_for_caches(given: dict[str, str]) -> None:
    """Under ~/.cache, XDG respected, and whoever named a place for Inductor keeps it."""
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")}
    code = "import os; from laminar.runtime.code import inductor_step as compiled; compiled._keep_cache()"
    code += "; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "HOME": "/h", **given}, capture_output=True, text=True
    )
    want = given.get("TORCHINDUCTOR_CACHE_DIR", f"{given.get('XDG_CACHE_HOME', '/h/.cache')}/laminar/inductor")
    assert done.stdout.strip() == want, done.stderr
