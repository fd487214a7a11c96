"""Forms of lines: what shares one is alike in all but names, and prices by form are the prices of the lines."""

from __future__ import annotations

from functools import cache

import pytest

from laminar.cost.ops.interned import Forms
from laminar.cost.ops.table import local_call
from laminar.forecast.step import machine
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import map_refs, refs_in
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.program import Instr, Placed, Program, ProgramInput, ProgramOutput
from laminar.ir.sbp import B
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.step import step_programs
from laminar.placement import presets
from tests.support.local_layouts import local_layouts
from tests.support.zoo import specimen

MODELS = ["gpt.py:tiny", "llama.py:tiny", "resnet.py:tiny"]
X = Placed(TensorSpec((64, 32), "f32"), (B,))
ROW = Placed(TensorSpec((32,), "f32"), (B,))
BYTES = 64 * 32 * 4


@cache
def program(name: str) -> Program:
    graph = specimen(name, "f32").graph
    return step_programs(graph, presets.tensor_parallel(graph, Mesh({"dp": 2, "tp": 2}), "tp"))[0]


def by_hand(*instrs: Instr, out: str) -> Program:
    given = tuple(ProgramInput(n, "batch", X) for n in ("x", "y"))
    last = ProgramOutput("out", "loss", Ref(out), X)
    return Program(Mesh({"dp": 1}), given, (), instrs, (last,), "", "")


def op(name: str, kind: str, *args: object, outs: tuple[Placed, ...] = (X,)) -> Instr:
    refs = tuple(refs_in(args))
    return Instr(name, kind, args, refs, (X,) * len(refs), outs)


@pytest.mark.parametrize("name", MODELS)
def test_lines_of_one_form_differ_in_names_only(name: str) -> None:
    """All that is worked out for a form is taken for its other lines, so nothing else may differ."""
    p = program(name)
    forms = Forms(p)

    def nameless(i: Instr) -> object:
        return i.op, map_refs(i.args, lambda _: "a tensor"), i.boxing, i.ins, i.outs

    for instr, form in zip(p.instrs, forms.of, strict=True):
        assert nameless(instr) == nameless(forms.examples[form])
    assert len(forms.examples) == len({repr(nameless(i)) for i in p.instrs}), "alike in all, but not found alike"


@pytest.mark.parametrize("name", MODELS)
def test_values_have_numbers_of_their_own(name: str) -> None:
    """Two values under one number would be one value."""
    p = program(name)
    forms = Forms(p)
    refs = {Ref(i.name) for i in p.inputs} | {Ref(c.name) for c in p.constants}
    refs |= {Ref(i.name, k) for i in p.instrs for k in range(len(i.outs))}
    numbers = {forms.number(r) for r in refs}
    assert len(numbers) == len(refs) and max(numbers) < forms.values
    assert all([forms.number(r) for r in i.refs] == reads for i, reads in zip(p.instrs, forms.reads, strict=True))


def test_a_view_of_a_view_leads_to_what_holds_the_memory() -> None:
    """A kernel that reads a view reads the tensor behind it."""
    turned = op("a", "aten.t", Ref("x"))
    again = op("b", "aten.t", Ref("a"))
    forms = Forms(by_hand(turned, again, op("c", "aten.relu", Ref("b")), out="c"))
    whole = forms.whole(FREE)
    assert whole[forms.number(Ref("b"))] == whole[forms.number(Ref("a"))] == forms.number(Ref("x"))
    assert whole[forms.number(Ref("c"))] == forms.number(Ref("c"))


def test_where_a_tensor_stands_among_arguments_is_part_of_the_form() -> None:
    """A norm with a weight and one with a bias read tensors of the same shapes."""
    weighted = op("a", "aten.native_layer_norm", Ref("x"), (32,), Ref("y"), None, 1e-5)
    shifted = op("b", "aten.native_layer_norm", Ref("x"), (32,), None, Ref("y"), 1e-5)
    listed = [op(n, "aten.cat", (Ref(a), Ref(b)), 0) for n, a, b in (("c", "x", "y"), ("d", "y", "x"))]
    forms = Forms(by_hand(weighted, shifted, *listed, out="d"))
    assert forms.of == [0, 1, 2, 2]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("machine_name", ["4xcpu", "4xh100"])
def test_a_line_has_the_price_it_would_have_alone(name: str, machine_name: str) -> None:
    """Prices are looked up by form and by how operands lie; asked one by one they must be the same."""
    p = program(name)
    prices, fresh = (machine(Cluster.preset(machine_name), p.mesh) for _ in range(2))
    _, lying = local_layouts(p, rank=3)
    for instr, price in zip(p.instrs, prices.lines(p, 3), strict=True):
        if not instr.moves:
            assert price == fresh.op(local_call(instr, p.mesh, 3), lying.marks[instr.name]), instr.name


def test_a_fused_kernel_costs_what_it_reads_and_leaves_once() -> None:
    """x is read twice and counts once; a stays inside, b is for the product, c leaves."""
    p = by_hand(
        op("a", "aten.relu", Ref("x")),
        op("b", "aten.add.Tensor", Ref("a"), Ref("x")),
        op("c", "aten.mul.Tensor", Ref("b"), Ref("y")),
        Instr("d", "aten.mm", (Ref("b"), Ref("y")), (Ref("b"), Ref("y")), (X, X), (X,)),
        out="c",
    )
    assert kernels(p) == [(0, 1, 2), (3,)]
    prices = machine(Cluster.preset("1xh100"), p.mesh)
    fused, product = prices.kernels(p, [(0, 1, 2), (3,)], 0)
    assert fused[0] == prices.ops("fused.pointwise", args=(4 * BYTES,)).seconds
    assert product == prices.op(local_call(p.instrs[3], p.mesh))


def test_a_fused_reduction_goes_by_its_shape() -> None:
    """Sums across rows are columns to the kernel that makes them."""
    total = op("a", "aten.sum.dim_IntList", Ref("x"), (0,), False, outs=(ROW,))
    p = by_hand(total, out="a")
    prices = machine(Cluster.preset("1xh100"), p.mesh)
    (found,) = prices.kernels(p, [(0,)], 0)
    assert found[0] == prices.ops("fused.reduction", args=(64, 32, BYTES + 32 * 4, "columns")).seconds


def test_the_gradient_of_a_norm_of_rows_is_read_once_and_priced_as_measured() -> None:
    """A profile's time for it is that of both passes, so that counting the second again would pay for it twice."""
    args = (Ref("x"), Ref("y"), (32,), Ref("x"), Ref("x"), None, None, (True, False, False))
    p = by_hand(op("a", "aten.native_layer_norm_backward", *args), out="a")
    prices = machine(Cluster.preset("1xh100"), p.mesh)
    (found,) = prices.kernels(p, [(0,)], 0)
    half = 3 * BYTES // 2  # what a profile measures: three tensors of half precision
    alone = prices.ops("fused.reduction", args=(64, 32, half, "layer_norm_backward")).seconds
    more, less = (prices.ops("fused.pointwise", args=(n,)).seconds for n in (3 * BYTES, half))
    assert found[0] == pytest.approx(alone + more - less, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_priced_the_same_whoever_asks_first(name: str) -> None:
    """A price list that has seen other ranks and other programs answers as a fresh one does."""
    p = recompute(written_out(program(name)))
    groups = kernels(p)
    cluster = Cluster.preset("4xh100")
    used = machine(cluster, p.mesh)
    used.lines(program(name), 0)
    used.kernels(p, groups, 1)
    assert list(used.kernels(p, groups, 0)) == list(machine(cluster, p.mesh).kernels(p, groups, 0))
