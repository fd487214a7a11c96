"""What backward recomputes: the choice is the cheapest there is, it costs no bit, and never more memory."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laminar
from laminar.api import inputs_of
from laminar.ir.program import Program
from laminar.lower.memory.mincut_recompute import RecomputeOp, choose, recompute, written_out
from laminar.lower.memory.planned_recompute import boundary, boundary_bytes, early
from laminar.runtime.check.in_process import lockstep
from tests.support.zoo import FEW, one_thread, specimen

INF = float("inf")


# --- the choice ------------------------------------------------------------------------------


def cost_of(ops, keep, rewrite, wanted, kept: frozenset[int]) -> float:
    """What a set of kept values costs, everything else that is wanted being recomputed; infinite if impossible."""
    maker = {v: i for i, op in enumerate(ops) for v in op.makes}
    again: set[int] = set()
    made: set[int] = set()
    todo = [v for v in wanted if v not in kept]
    while todo:
        v = todo.pop()
        if v in made or v in kept:
            continue
        made.add(v)
        again.add(maker[v])
        todo += [r for r in ops[maker[v]].reads if r in maker]
    return sum(keep[v] for v in kept) + sum(ops[i].again for i in again) + sum(rewrite.get(v, 0) for v in made)


def random_case(rng: random.Random):
    """Up to eight ops over a few inputs, some of them too heavy to run again, some with two results."""
    ops, values = [], list(range(100, 100 + rng.randint(1, 2)))
    fresh = itertools.count()
    for _ in range(rng.randint(2, 8)):
        reads = tuple(rng.sample(values, min(len(values), rng.randint(1, 3))))
        makes = tuple(next(fresh) for _ in range(rng.choice([1, 1, 1, 2])))
        ops.append(RecomputeOp(reads, makes, INF if rng.random() < 0.3 else float(rng.randint(0, 3))))
        values += makes
    made = [v for op in ops for v in op.makes]
    keep = {v: float(rng.randint(0, 12)) for v in made}
    rewrite = {v: float(rng.randint(1, 4)) for v in made if rng.random() < 0.3}
    wanted = set(rng.sample(made, rng.randint(1, len(made))))
    return ops, keep, rewrite, wanted


@pytest.mark.parametrize("seed", range(200))
def test_the_cut_is_the_cheapest_choice(seed: int) -> None:
    """Against every subset of values that could be kept."""
    ops, keep, rewrite, wanted = random_case(random.Random(seed))
    kept, again = choose(ops, keep, rewrite, wanted)
    best = min(
        cost_of(ops, keep, rewrite, wanted, frozenset(some))
        for n in range(len(keep) + 1)
        for some in itertools.combinations(keep, n)
    )
    # A value recomputed beside a kept one costs its op once, and what it rewrites only if it is not kept itself.
    got = sum(keep[v] for v in kept) + sum(ops[i].again for i in again)
    got += sum(
        rewrite.get(v, 0) for i in again for v in ops[i].makes if v not in kept and _needed(v, ops, again, wanted)
    )
    assert got == pytest.approx(best)
    assert cost_of(ops, keep, rewrite, wanted, frozenset(kept)) == pytest.approx(best)


def _needed(v, ops, again, wanted) -> bool:
    return v in wanted or any(v in ops[i].reads for i in again)


def test_large_sizes_do_not_overflow() -> None:
    """Terabytes of activations are cut like bytes: the flow runs on 32-bit integers inside."""
    ops = [RecomputeOp((100,), (0,), INF), RecomputeOp((0,), (1,), 1e9), RecomputeOp((1,), (2,), 1e9)]
    kept, again = choose(ops, {0: 4e12, 1: 5e12, 2: 6e12}, {}, {1, 2})
    assert kept == {0} and again == {1, 2}


# --- programs --------------------------------------------------------------------------------


def program_of(one, mesh=None, preset="data_parallel") -> Program:
    mesh = mesh or laminar.Mesh({"dp": 2})
    return laminar.lower(one.graph, getattr(laminar.plans, preset)(one.graph, mesh))


@pytest.mark.parametrize("out", [False, True], ids=["fused", "written out"])
@pytest.mark.parametrize("name", FEW)
def test_recomputation_changes_no_bit(name: str, out: bool) -> None:
    """The same ops on the same values, some of them twice; and what lies between the phases only shrinks."""
    with one_thread():
        one = specimen(name)
        program = program_of(one)
        program = written_out(program) if out else program
        again = recompute(program)
        want = lockstep.run_lockstep(program, one.inputs, one.constants)
        got = lockstep.run_lockstep(again, one.inputs, one.constants)
    for w, g in zip(want, got, strict=True):
        assert w.keys() == g.keys()
        assert all(torch.equal(w[k], g[k]) for k in w)
    assert boundary_bytes(again) <= boundary_bytes(program)


@pytest.mark.parametrize("name", ["gpt.py:tiny", "resnet.py:tiny", "llama.py:tiny"])
def test_writing_norms_out_changes_rounding_only(name: str) -> None:
    """Statistics first, then elementwise: what the fused kernels do, in another order."""
    with one_thread():
        one = specimen(name, "f64")
        plan = laminar.plans.data_parallel(specimen(name).graph, laminar.Mesh({"dp": 1}))
        program = laminar.lower(one.graph, replace(plan, graph_hash=one.graph.hash))
        want = lockstep.run_lockstep(program, one.inputs, one.constants)[0]
        got = lockstep.run_lockstep(written_out(program), one.inputs, one.constants)[0]
    scale = max(float(v.abs().max()) for k, v in want.items() if k.startswith("grad:"))
    for k, v in want.items():
        assert torch.allclose(got[k], v, rtol=1e-10, atol=1e-12 * scale), k
    assert not {i.op for i in written_out(program).instrs if i.phase == "forward"} & {
        "aten.native_layer_norm",
        "laminar.batch_norm",
        "aten._log_softmax",
    }


@pytest.mark.parametrize("preset", ["zero", "tensor_parallel"])
def test_collectives_are_never_run_again(preset: str) -> None:
    """Ranks would have to agree on them; and they are what a plan pays for."""
    program = program_of(specimen("gpt.py:tiny"), laminar.Mesh({"tp": 2}), preset)
    again = recompute(written_out(program))
    assert [i.name for i in again.collectives] == [i.name for i in program.collectives]


# --- what is chosen --------------------------------------------------------------------------


class Half(nn.Module):
    """A transformer's feed-forward half under autocast, which casts its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))
        return self.head(x)


def half_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@pytest.fixture(scope="module")
def half() -> Program:
    torch.manual_seed(0)
    batch = (torch.randn(64, 16, 32), torch.randint(0, 50, (64, 16)))
    graph = laminar.capture(Half(), half_loss, batch)
    return laminar.lower(graph, laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 1})))


def kept_ops(program: Program) -> set[str]:
    makers = {i.name: i for i in program.instrs}
    return {makers[r.name].op for r in boundary(program)}


def test_activations_masks_and_softmax_are_not_kept(half: Program) -> None:
    """Products' results stay, and small statistics; no gelu, no random draw, no float32 log-softmax."""
    again = recompute(written_out(half))
    kept = kept_ops(again)
    assert "aten.addmm" in kept and "aten.amax" in kept
    assert not kept & {"aten.gelu", "laminar.uniform", "aten.ge.Scalar", "aten._log_softmax", "aten.view", "aten.t"}
    assert boundary_bytes(again) < 0.5 * boundary_bytes(half)


def test_narrow_weights_are_cast_twice_only_if_traffic_is_cheap(half: Program) -> None:
    """Casting again reads four bytes and writes two for each two bytes kept."""

    def casts(traffic: float) -> int:
        program = recompute(written_out(half), traffic=traffic)
        weights = {i.name for i in program.inputs if i.kind == "param" and len(i.placed.spec.shape) == 2}
        return sum(
            i.phase == "recompute" and i.op == "aten._to_copy" and i.refs[0].name in weights for i in program.instrs
        )

    assert casts(0.1) == 3 and casts(0.5) == 0


def test_a_copy_stands_right_before_its_first_reader(half: Program) -> None:
    """Made early it would only lie about: nothing may stand between but other copies."""
    program = recompute(written_out(half))
    readers: dict[str, int] = {}
    for k, instr in enumerate(program.instrs):
        for ref in instr.refs:
            readers.setdefault(ref.name, k)
    for k, instr in enumerate(program.instrs):
        if instr.name.endswith(".again"):
            assert instr.phase == "recompute"
            between = program.instrs[k + 1 : readers[instr.name]]
            assert all(i.name.endswith(".again") for i in between), instr.name


def test_the_residual_stream_is_not_rebuilt_from_its_beginning() -> None:
    """Each kept value of it is at most a few products away from the next."""
    one = specimen("gpt.py:narrow")
    program = recompute(written_out(program_of(one, laminar.Mesh({"dp": 1}))))
    first = early(program)
    residual = [i for i in program.instrs if i.name in first and i.op == "aten.add.Tensor" and "blocks" in i.module]
    kept = {r.name for r in boundary(program)}
    gaps, gap = [], 0
    for instr in (i for i in residual if len(i.refs) == 2 and i.outs[0] and i.outs[0].spec.shape == (2, 32, 64)):
        gap = 0 if instr.name in kept else gap + 1
        gaps.append(gap)
    assert gaps and max(gaps) <= 2


def test_recomputed_regions_of_the_user_stay_as_they_are() -> None:
    """A checkpoint's own recomputation is backward: what it reads is kept, what it makes is not copied."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False))

    model, batch = Net(), torch.randn(4, 8)
    graph = laminar.capture(model, lambda m, b: m(b).square().mean(), batch)
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 1})))
    asked = [i.name for i in program.instrs if i.phase == "recompute"]
    again = recompute(program)
    assert asked and [i.name for i in again.instrs if i.phase == "recompute" and i.name in asked] == asked
    whole = inputs_of(graph, model, batch)
    want, got = (lockstep.run_lockstep(p, whole)[0] for p in (program, again))
    assert all(torch.equal(want[k], got[k]) for k in want)
