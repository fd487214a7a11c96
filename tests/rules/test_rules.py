"""Every rule is arithmetic: each signature it allows, on real calls, gives what one device gives.

Whatever else goes wrong in Laminar, a plan is only as right as the rules it was made from. So every
op of the table is run, forward and backward, with inputs cut, copied and torn into terms as each
signature says, and put together again. The mutants at the end show that a wrong rule is caught.
Covered: one axis of 2, 3 and 4 ranks, pairs of axes, blocks, dims that don't divide. Not covered:
GPU kernels, and whether a rule allows all it could.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from laminar.capture.ops.torch_ops import find_op
from laminar.errors import CaptureError
from laminar.ir.ops import may_share_memory
from laminar.ir.sbp import Partial
from laminar.lower.lower import LOCAL_DIM
from laminar.rules.notation import Rule, signatures
from laminar.rules.ops.expand import EXPANSIONS
from laminar.rules.ops.table import RULES, rule_for
from laminar.rules.signing import options
from laminar.runtime.comm.aliases import shares
from tests.support.rule_cases import case, interesting, ints, real, recorded, written
from tests.support.rule_check import Case, Failure, blocks_for, check_axis, check_one, pairs

PARTS = (2, 3, 4)
NEVER_SPLIT = {"aten.masked_scatter", "aten.median", "aten.nanmedian", "aten.prod"}
"""Ops whose rule says that nothing but replication is possible."""
ENOUGH = 260
"""ATen overloads that must be verified."""

Cases = dict[str, list[Case]]


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    """Recorded and written calls by op; one thread, because the tensors are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = recorded(RULES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # variances with too few degrees of freedom are meant
        for one in written():
            out.setdefault(one.op, []).append(one)
            _ = one.call
    yield out
    torch.set_num_threads(threads)


@pytest.fixture
def chance() -> torch.Generator:
    """Random terms, the same at every run."""
    return torch.Generator().manual_seed(3)


def report(failures: list[Failure]) -> str:
    """The first failure of every op."""
    firsts = {f.case.op: f for f in reversed(failures)}
    return "\n".join([f"{len(failures)} wrong signatures of {len(firsts)} ops", *map(str, firsts.values())])


# --- the table -------------------------------------------------------------------------------


def test_rules_name_ops_a_graph_can_hold() -> None:
    """A misspelt overload would never be found, and a mutating one never stands in a captured graph."""
    for name in RULES:
        assert name.startswith("laminar.") or not find_op(name)._schema.is_mutable


def test_a_result_in_memory_of_its_input_is_known_as_one(cases: Cases) -> None:
    """Generated code writes memory again behind its last reader: a view that nobody knew of would read garbage."""
    found = set()
    for op, some in cases.items():
        for one in some:
            given = {v.untyped_storage().data_ptr() for v in one.values if v.numel()}
            made = [o for o in one.whole if isinstance(o, torch.Tensor) and o.numel()]
            if given & {o.untyped_storage().data_ptr() for o in made}:
                found.add(op)
    assert {"aten.unsafe_split.Tensor", "aten.diagonal", "aten.squeeze.dims", "aten.view_as_real"} <= found
    assert found <= {op for op in RULES if shares(op)}
    assert {op for op in RULES if shares(op)} == {op for op in RULES if may_share_memory(op)}, (
        "memory is predicted by names"
    )


def test_every_rule_is_reached(cases: Cases) -> None:
    """A rule that no case reaches is a guess."""
    assert sorted(set(RULES) - set(cases)) == []
    assert {name for name, some in cases.items() if not any(map(interesting, some))} == NEVER_SPLIT


def test_every_expansion_and_local_form_is_reached(cases: Cases) -> None:
    """They run by other code than plain local calls, so they count as reached only on their own."""
    expanded, local = set(), set()
    for name, some in cases.items():
        for one in some:
            hows = {s.how for s in options(one.call, 2)}
            local |= hows
            if "expand" in hows:
                expanded.add(name)
    assert expanded == set(EXPANSIONS)
    assert local - {"", "expand"} == set(LOCAL_DIM)


# --- arithmetic ------------------------------------------------------------------------------


def test_every_signature_on_one_axis(cases: Cases, chance: torch.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """S, B and P in and out, uneven pieces and blocks included: equal to the op on whole tensors."""
    failures: list[Failure] = []
    verified: set[str] = set()
    checked = 0
    for name, some in cases.items():
        for one in some:
            for parts in PARTS:
                count, wrong = check_axis(one, parts, chance)
                checked += count
                failures += wrong
                if count and not wrong:
                    verified.add(name)
    overloads = {n for n in verified if n.startswith("aten.")} - {f.case.op for f in failures}
    with capsys.disabled():
        canonical = len(verified) - len([n for n in verified if n.startswith("aten.")])
        calls = sum(map(len, cases.values()))
        print(
            f"\n{len(overloads)} ATen overloads and {canonical} canonical ops verified: "
            f"{checked} signatures of {calls} calls"
        )
    assert not failures, report(failures)
    assert len(overloads) >= ENOUGH


@pytest.mark.slow  # random plans on meshes of several axes are in the normal run
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)], ids=str)
def test_signatures_compose_on_two_axes(cases: Cases, chance: torch.Generator, sizes: tuple[int, int]) -> None:
    """The second axis sees what the first left, so a rule for one axis serves any mesh."""
    draw = random.Random(4)
    failures: list[Failure] = []
    for some in cases.values():
        for one in some:
            found = list(pairs(one, sizes))
            for signs in draw.sample(found, min(3, len(found))):
                if why := check_one(one, signs, sizes, chance):
                    failures.append(Failure(one, signs, sizes, why))
    assert not failures, report(failures)


# --- wrong rules are caught ------------------------------------------------------------------


def caught(one: Case, wrong: Rule, chance: torch.Generator) -> bool:
    """Whether checking refuses a rule, on any number of ranks."""
    for parts in PARTS:
        try:
            found = signatures(wrong, one.call, parts, dict(blocks_for(one.call)))
        except CaptureError:  # it contradicts the shapes
            return True
        if check_axis(one, parts, chance, found)[1]:
            return True
    return False


def pooled(*shape: int) -> Case:
    """Max pooling that keeps the size."""
    return case("max_pool2d_with_indices", real(*shape), [3, 3], [1, 1], [1, 1])


MUTANTS: dict[str, tuple[Callable[[], Case], Rule]] = {
    "exp is linear": (lambda: case("exp", real(4, 6)), Rule("a b -> a b", linear="0")),
    "relu passes sums": (lambda: case("relu", real(4, 6)), Rule("a b -> a b", linear="0")),
    "neg passes maxima": (lambda: case("neg", real(4, 6)), Rule("a b -> a b", through="0")),
    "mul is a sum": (lambda: case("mul.Tensor", real(4, 6), real(4, 6)), Rule("a b, a b -> a b", linear="01")),
    "add is a product": (lambda: case("add.Tensor", real(4, 6), real(4, 6)), Rule("a b, a b -> a b", linear="0|1")),
    "add's stretched dim splits": (lambda: case("add.Tensor", real(4, 6), real(6)), Rule("a b, a -> a b")),
    "mm contracts n": (lambda: case("mm", real(6, 8), real(8, 12)), Rule("m k, k n -> m .")),
    "mm keeps k": (lambda: case("mm", real(6, 8), real(8, 12)), Rule("m k, k n -> m n", whole={"k": "0"})),
    "mm of two sums": (lambda: case("mm", real(6, 8), real(8, 12)), Rule("m k, k n -> m n", linear="01")),
    "addmm counts its bias on every rank": (
        lambda: case("addmm", real(12), real(6, 8), real(8, 12)),
        Rule("n, m k, k n -> m n"),
    ),
    "softmax splits its dim": (lambda: case("_softmax", real(4, 6), 1, False), Rule("a b -> a b")),
    "softmax backward splits its dim": (
        lambda: case("_softmax_backward_data", real(4, 6), real(4, 6), 1, torch.float64),
        Rule("a b, a b -> a b"),
    ),
    "cumsum splits its dim": (lambda: case("cumsum", real(4, 6), 1), Rule("a b -> a b")),
    "sort splits its dim": (lambda: case("sort", real(4, 6), 1, False), Rule("a b -> a b, a b")),
    "amax adds up": (lambda: case("amax", real(4, 6), (1,)), Rule("a b -> a")),
    "mean adds up": (lambda: case("mean.dim", real(4, 6), (1,)), Rule("a b -> a")),
    "var adds up": (lambda: case("var.correction", real(4, 6), (1,), 1, False), Rule("a b -> a")),
    "norms add up": (lambda: case("linalg_vector_norm", real(4, 6), 2, (1,)), Rule("a b -> a")),
    "a view mixes up its factors": (
        lambda: case("view", real(4, 6), (24,)),
        Rule("a b -> (b a)", sizes={"a": 4, "b": 6}),
    ),
    "a split is contiguous": (lambda: case("split.Tensor", real(5, 24), 12, 1), Rule("a (b 2) -> a b, a b")),
    "a flip leaves its dim in place": (lambda: case("flip", real(4, 6), (1,)), Rule("a b -> a b")),
    "a split vocabulary is looked up as it is": (
        lambda: case("embedding", real(12, 8), ints(12, 4, 6)),
        Rule("v e, a b -> a b e"),
    ),
    "a scaled embedding gradient adds up": (
        lambda: case("embedding_dense_backward", real(24, 8), ints(4, 24), 12, -1, True),
        Rule("i e, i -> . e"),
    ),
    "writes by index add up": (
        lambda: case("index_put", real(9, 4), [torch.randperm(9)[:6]], real(6, 4), False),
        Rule(". e, i, i e -> . e", additive="0"),
    ),
    "layer norm splits what it norms": (
        lambda: case("native_layer_norm", real(4, 6), (6,), real(6), real(6), 1e-5),
        Rule("a h, h, h -> a h, a ., a .", whole={"h": "12"}),
    ),
    "a group is cut in two": (
        lambda: case("native_group_norm", real(6, 12, 5), real(12), real(12), 6, 12, 5, 2, 1e-5),
        Rule("n c ., c, c -> n c ., n ., n .", whole={"c": "12"}),
    ),
    "batch norm splits the batch": (
        lambda: case("laminar.batch_norm", real(6, 4, 5), real(4), real(4), 1e-5),
        Rule("n c ., c, c -> n c ., c, c", whole={"n": "12"}),
    ),
    "a mean loss adds up": (
        lambda: case("nll_loss_forward", real(6, 12), ints(12, 6), None, 1, -100),
        Rule("n c, n -> [], []"),
    ),
    "a mean's gradient is local": (
        lambda: case("mse_loss_backward", real(), real(4, 6), real(4, 6), 1),
        Rule("[], a b, a b -> a b"),
    ),
    "convolution splits rows": (
        lambda: case("convolution", real(4, 3, 8, 5), real(6, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        Rule("n i h w, o i . . -> n o h w"),
    ),
    "pooling splits rows": (lambda: pooled(4, 3, 8, 6), Rule("n c h w -> n c h w, n c h w")),
    "causal attention splits rows": (
        lambda: case("laminar.attention", real(4, 3, 6, 5), real(4, 3, 6, 5), real(4, 3, 6, 5), None, True, 0.3),
        Rule("b h t ., b h . ., b h . . -> b h t ., b h t"),
    ),
    "attention splits keys": (
        lambda: case("laminar.attention", real(4, 3, 6, 5), real(4, 3, 8, 5), real(4, 3, 8, 5), None, False, 0.3),
        Rule("b h . ., b h s ., b h s . -> b h . ., b h .", whole={"s": "01"}),
    ),
    "grouped keys are gathered with the wrong heads": (
        lambda: case("laminar.attention", real(2, 8, 6, 5), real(2, 4, 6, 5), real(2, 4, 6, 5), None, False, 0.3),
        Rule("b (r h) . ., b h . ., b h . . -> b (r h) . ., b (r h) .", sizes={"h": 4, "r": 2}),
    ),
    "an LSTM splits time": (
        lambda: case("laminar.lstm", real(6, 4, 3), real(4, 5), real(4, 5), real(20, 3), real(20, 5), None, False),
        Rule("t n ., n ., n ., . ., . . -> t n ., n ., n ., t n ., t n .", whole={"t": "12"}),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_rule_is_caught(mutant: str, chance: torch.Generator) -> None:
    """The same checker that passes the table must refuse each of these."""
    torch.manual_seed(5)
    make, wrong = MUTANTS[mutant]
    one = make()
    right = rule_for(one.call)
    assert right is not None and not caught(one, right, chance)
    assert caught(one, wrong, chance)


def test_shapes_that_an_op_cant_have_are_refused_with_a_way_out() -> None:
    """Shape functions can be wrong: before 2.13, torch's says that x.norm(dim=-1) over one element keeps the dim."""
    norm = case("linalg_vector_norm", real(6, 1, 1), 2, (-1,)).call
    wrong = replace(norm, outs=norm.ins)
    rule = rule_for(wrong)
    assert rule is not None
    with pytest.raises(CaptureError, match=r"linalg_vector_norm was captured with shapes[\s\S]*laminar\.eager"):
        signatures(rule, wrong, 2)


LINEAR_BUT_UNUSED = {
    *("aten.ldexp.Tensor", "aten.nansum", "aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.special_xlog1py"),
    *("aten.polar", "aten.cholesky_solve", "aten.nextafter", "aten.nan_to_num", "aten.scatter.value_reduce"),
    "laminar.eager_backward",
}
"""Ops that do pass sums of their first input (or come within rounding of it); nobody needs it."""


def test_no_op_passes_sums_by_accident(cases: Cases, chance: torch.Generator) -> None:
    """For every op that is not declared linear, some case shows that it isn't: the samples are sharp."""
    unnoticed = set()
    for name, some in cases.items():
        rules = {id(one): rule for one in some if (rule := rule_for(one.call))}
        if any(rule.linear for rule in rules.values()):
            continue
        tried = noticed = False
        for one in some:
            if not one.values or not one.values[0].is_floating_point():
                continue
            found = signatures(replace(rules[id(one)], linear="0"), one.call, 2)
            sums = [s for s in found if s.ins[0] == Partial("sum") and not s.how]
            count, wrong = check_axis(one, 2, chance, [found[0], *sums])
            tried, noticed = tried or bool(count), noticed or bool(wrong)
        if tried and not noticed:
            unnoticed.add(name)
    assert unnoticed == LINEAR_BUT_UNUSED
