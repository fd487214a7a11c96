"""Values survive being written down, the grammar refuses what is not a graph, and shards are exact.

Everything downstream trusts these three: a plan read from a file is the plan that was saved, a graph
that was built can be run, and cutting a tensor and putting it together again gives the tensor. How
a tensor is cut is also held against torch's own `chunk` and DTensor's arithmetic, because whatever
Laminar stores must be a shard that others can read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from laminar.errors import GraphError, MeshError, PlacementError, PlanError
from laminar.ir.graph import Constant, Graph, Input, Node, Output, check_graph, map_refs, refs_in, widen
from laminar.ir.mesh import Link, Mesh
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.program import Placed
from laminar.ir.sbp import B, NdSbp, P, Partial, S, Sbp, Split, chunk, local_indices, local_shape, parse, parse_nd, show
from laminar.ir.sbp import check_placement as check_placement
from laminar.ir.serial.codec import Dtype, Ref, canonical, content_hash, decode, encode
from laminar.ir.tensor import ITEM_BYTES, TensorSpec
from laminar.lower.lower import lower
from laminar.runtime.comm.shards import assemble, cut_pieces, glue_pieces, shard
from tests.support.zoo import specimen

# --- written down ------------------------------------------------------------------------------

names = st.text("abcxyz_.0", min_size=1, max_size=8)
specs = st.builds(TensorSpec, st.lists(st.integers(0, 300), max_size=4).map(tuple), st.sampled_from(sorted(ITEM_BYTES)))
sbps = st.one_of(
    st.just(B),
    st.sampled_from(["sum", "max", "min"]).map(P),
    st.builds(S, st.integers(0, 9), st.integers(1, 50)),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    names,
    st.builds(Ref, names, st.integers(0, 3)),
    st.sampled_from(sorted(ITEM_BYTES)).map(Dtype),
)
arguments = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)


def same(a: Any, b: Any) -> bool:
    """Equality under which nan is nan, and True is not 1."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


@given(arguments)
def test_arguments_survive_json(args: Any) -> None:
    """Fills of -inf and nan are ordinary in graphs, and JSON has no word for them."""
    text = canonical(encode(args))
    assert same(decode(json.loads(text)), args)
    assert "Infinity" not in text and "NaN" not in text


@given(specs)
def test_a_spec_is_its_text(spec: TensorSpec) -> None:
    """`f32[64,128]` is what is printed, saved and read back."""
    assert TensorSpec.parse(str(spec)) == spec
    assert spec.nbytes == math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


@given(sbps)
def test_a_placement_is_its_text(placement: Sbp) -> None:
    """The text in a plan file and in an error message is the placement itself."""
    assert parse(str(placement)) == placement


@given(st.lists(sbps, min_size=1, max_size=3))
def test_a_placement_on_several_axes_is_its_texts(nd: list[Sbp]) -> None:
    """One text per axis; on one axis no brackets."""
    assert parse_nd([str(p) for p in nd]) == tuple(nd)
    assert show(nd).startswith("[") == (len(nd) > 1)


@pytest.mark.parametrize("text", ["", "S", "S()", "S(x)", "Q(1)", "P(mean)", "B(0)", "S(0, blocks=x)"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    """A typing error in a plan must not become some other placement."""
    with pytest.raises(PlacementError):
        parse(text)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_][a-zA-Z0-9_]{0,4}", fullmatch=True), st.integers(1, 9), min_size=1, max_size=4
    )
)
def test_a_mesh_survives_json(axes: dict[str, int]) -> None:
    """Names, sizes and their order; every rank stands where its coordinates say."""
    mesh = Mesh(axes)
    again = Mesh(json.loads(json.dumps(mesh.to_json())))
    assert again == mesh and hash(again) == hash(mesh) and again.names == tuple(axes)
    if mesh.ranks <= 64:
        assert [mesh.rank(mesh.coords(r)) for r in range(mesh.ranks)] == list(range(mesh.ranks))


@pytest.mark.parametrize("axes", [{}, {"dp": 0}, {"dp": -1}, {"dp": 2.0}, {"dp": True}, {"d p": 2}, {"": 2}])
def test_what_is_no_mesh_is_refused(axes: dict[str, Any]) -> None:
    """A mesh of nothing, or of half a rank, would fail much later and much worse."""
    with pytest.raises(MeshError):
        Mesh(axes)


def test_groups_run_in_mesh_order() -> None:
    """Ranks of a group are the ones that differ on its axes only: every collective relies on it."""
    mesh = Mesh({"dp": 2, "tp": 3})
    assert mesh.group((1,), mesh.coords(4)) == (3, 4, 5)
    assert mesh.group((0,), mesh.coords(4)) == (1, 4)
    assert mesh.group((0, 1), mesh.coords(4)) == tuple(range(6))
    with pytest.raises(MeshError, match="no axis 'pp'"):
        mesh.axis("pp")


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1.0, 1.0), (0.0, 0.0), (0.0, -1.0)])
def test_a_link_has_a_speed(latency_s: float, bytes_per_s: float) -> None:
    """Wrong values are refused at the door."""
    with pytest.raises(ValueError, match="Link needs"):
        Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def small_graph(**changes: Any) -> Graph:
    """A step of a model with one weight: what every test of the grammar breaks in one place."""
    x, w, s = TensorSpec((4, 3), "f32"), TensorSpec((3, 2), "f32"), TensorSpec((), "f32")
    parts: dict[str, Any] = {
        "inputs": (Input("batch.x", "batch", x), Input("w", "param", w, trainable=True, aliases=("v",))),
        "constants": (Constant("c", TensorSpec((2,), "f32"), b"\0" * 8),),
        "nodes": (
            Node("y", "aten.mm", (Ref("batch.x"), Ref("w")), (TensorSpec((4, 2), "f32"),), "model.py:3  x @ w", "up"),
            Node("z", "aten.masked_fill.Scalar", (Ref("y"), float("-inf"), math.nan), (TensorSpec((4, 2), "f32"),)),
            Node("k", "aten._to_copy", (Ref("z"), Dtype("bf16")), (TensorSpec((4, 2), "bf16"),)),
            Node("l", "aten.sum", (Ref("z"),), (s,)),
            Node("t", "aten.topk", (Ref("z"), 1), (TensorSpec((4, 1), "f32"), None), phase="recompute"),
            Node("g", "aten.mm", ((Ref("batch.x"),), Ref("y")), (w,), phase="backward"),
        ),
        "outputs": (Output("loss", "loss", Ref("l")), Output("w", "grad", Ref("g"))),
        "batch_tree": '{"x": "batch.x"}',
        "probed": (("k", [[["S(0)"], ["S(0)"]]]),),
    }
    return Graph(**{**parts, **changes})


def test_a_graph_survives_json_with_its_hash() -> None:
    """Non-finite floats, missing outputs, constants, aliases and probed signatures included."""
    graph = small_graph()
    again = Graph.from_json(json.loads(json.dumps(graph.to_json(), allow_nan=False)))
    assert again.hash == graph.hash
    assert again.to_json() == graph.to_json()
    assert math.isnan(again.by_name["z"].args[2]) and again.by_name["z"].args[1] == -math.inf
    assert again.by_name["k"].args[1] == Dtype("bf16")
    assert again.input("w").aliases == ("v",)


@pytest.mark.parametrize("name", ["gpt.py:tiny", "bert.py:tiny", "hf.py:bert", "resnet.py:tiny"])
def test_a_captured_graph_survives_json_with_its_hash(name: str) -> None:
    """Whatever capture writes can be stored: constants, masks, random sites."""
    graph = specimen(name).graph
    again = Graph.from_json(json.loads(json.dumps(graph.to_json(), allow_nan=False)))
    assert again == graph and again.hash == graph.hash
    assert str(again) == str(graph)


def test_identity_is_what_is_computed() -> None:
    """Moving a line of code does not make another graph; changing an argument does."""
    graph = small_graph()
    moved = tuple(dataclasses.replace(n, where="other.py:9", module="elsewhere") for n in graph.nodes)
    assert small_graph(nodes=moved).hash == graph.hash
    changed = tuple(dataclasses.replace(n, args=(Ref("y"), 0.0, 1)) if n.name == "z" else n for n in graph.nodes)
    assert small_graph(nodes=changed).hash != graph.hash


def test_a_graph_of_another_version_is_refused() -> None:
    """Better than reading it wrongly."""
    with pytest.raises(GraphError, match="version"):
        Graph.from_json({**small_graph().to_json(), "laminar_graph": 99})


@given(st.data())
def test_a_plan_survives_json_with_its_hash(data: st.DataObject) -> None:
    """Saved and loaded it is the same decision; its name and account are carried along but do not count."""
    mesh = Mesh({"a": 2, "b": 3})
    nds = st.tuples(sbps, sbps)
    plan = Plan(
        mesh,
        content_hash("graph"),
        data.draw(
            st.dictionaries(names, st.builds(Choice, st.lists(nds).map(tuple), st.lists(nds).map(tuple)), max_size=3)
        ),
        data.draw(st.dictionaries(names, nds, max_size=3)),
        data.draw(st.dictionaries(names, nds, max_size=3)),
        data.draw(st.dictionaries(names, nds, max_size=3)),
        "drawn",
        Account(samples=3, more={"note": [1]}),
    )
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.hash == plan.hash
    assert dataclasses.replace(plan, name="other", account=Account()).hash == plan.hash
    assert dataclasses.replace(plan, graph_hash="other").hash != plan.hash


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    """Through a file, with everything that explains it."""
    plan = Plan(Mesh({"dp": 2}), "g", {"y": Choice(((B,),), ((S(0, 3),),))}, {"w": (B,)}, {}, {"w": (S(0),)})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (plan.step_s, plan.peak_bytes, plan.bound_s) == (None, None, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"laminar_plan": 1}', '{"laminar_plan": 7}', '{"laminar_plan": 1, "mesh": 3}']
)
def test_a_file_that_is_no_plan_says_so(tmp_path: Path, text: str) -> None:
    """One line about what is wrong, not a KeyError."""
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="no plan file"):
        Plan.load(tmp_path / "absent.json")


def test_a_plan_with_a_broken_placement_is_refused() -> None:
    """The offending text is in the message."""
    data = Plan(Mesh({"dp": 2}), "g", {}, {"w": (B,)}, {}).to_json()
    with pytest.raises(PlanError, match=r"S\(zero\)"):
        Plan.from_json({**data, "inputs": {"w": "S(zero)"}})


# --- the grammar -------------------------------------------------------------------------------


def node(name: str = "n", op: str = "aten.relu", reads: str = "batch.x", **more: Any) -> Node:
    """One node that is right but for what is changed."""
    return Node(name, op, (Ref(reads),), more.pop("outs", (TensorSpec((4, 3), "f32"),)), **more)


GOOD = small_graph()
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "two inputs of one name": ({"inputs": (*GOOD.inputs, GOOD.inputs[1])}, "two inputs or constants are called %w"),
    "a constant named as an input": (
        {"constants": (Constant("w", TensorSpec((), "u8"), b"x"),)},
        "two inputs or constants are called %w",
    ),
    "an unknown kind of input": (
        {"inputs": (*GOOD.inputs, Input("q", "weight", TensorSpec((), "f32")))},
        "unknown kind 'weight'",
    ),
    "a trainable batch": (
        {"inputs": (*GOOD.inputs, Input("q", "batch", TensorSpec((), "f32"), trainable=True))},
        "can't be trainable",
    ),
    "a trainable integer": (
        {"inputs": (*GOOD.inputs, Input("q", "param", TensorSpec((), "i64"), trainable=True))},
        "can't be trainable",
    ),
    "a constant of the wrong length": (
        {"constants": (Constant("c", TensorSpec((2,), "f32"), b"123"),)},
        "holds 3 bytes, not 8",
    ),
    "two nodes of one name": ({"nodes": (*GOOD.nodes, node("y"))}, "two values are called %y"),
    "a node named as an input": ({"nodes": (*GOOD.nodes, node("w"))}, "two values are called %w"),
    "an unknown phase": ({"nodes": (*GOOD.nodes, node(phase="sideways"))}, "unknown phase 'sideways'"),
    "a node without outputs": ({"nodes": (*GOOD.nodes, node(outs=()))}, "makes nothing"),
    "a node whose outputs are all missing": ({"nodes": (*GOOD.nodes, node(outs=(None, None)))}, "makes nothing"),
    "a name that is no op": ({"nodes": (*GOOD.nodes, node(op="relu"))}, "'relu' is not an op name"),
    "a read before it is made": ({"nodes": GOOD.nodes[::-1]}, "which nothing before it makes"),
    "a read of an output that is missing": (
        {"nodes": (*GOOD.nodes, Node("n", "aten.relu", (Ref("t", 1),), (TensorSpec((), "i64"),)))},
        "reads %t.1, which nothing before it makes",
    ),
    "an unknown kind of output": ({"outputs": (Output("x", "answer", Ref("l")),)}, "unknown kind 'answer'"),
    "two outputs of one name": ({"outputs": (*GOOD.outputs, GOOD.outputs[0])}, "two outputs are called loss loss"),
    "an output that nothing makes": ({"outputs": (Output("loss", "loss", Ref("nobody")),)}, "which nothing makes"),
    "a gradient of no input": ({"outputs": (Output("u", "grad", Ref("g")),)}, "grad u belongs to no input"),
    "a gradient of another shape": ({"outputs": (Output("w", "grad", Ref("y")),)}, "its input f32[3,2]"),
    "a new buffer of no input": ({"outputs": (Output("u", "buffer", Ref("g")),)}, "buffer u belongs to no input"),
    "a loss that is no scalar": ({"outputs": (Output("loss", "loss", Ref("y")),)}, "not a scalar"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_grammar_refuses(what: str) -> None:
    """A graph that exists is one that can be run: every clause, by the graph that breaks it alone."""
    changes, message = BROKEN[what]
    with pytest.raises(GraphError) as caught:
        small_graph(**changes)
    assert message in str(caught.value)


def test_the_grammar_accepts_what_it_should() -> None:
    """The graph that the broken ones are made from."""
    check_graph(GOOD)
    assert [n.name for n in GOOD.users[Ref("batch.x")]] == ["y", "g"]
    assert [str(r) for r in refs_in(GOOD.by_name["g"].args)] == ["%batch.x", "%y"]
    assert map_refs((1, (Ref("a"),)), lambda r: r.name) == (1, ("a",))
    assert [i.name for i in GOOD.of_kind("param")] == ["w"]
    with pytest.raises(KeyError):
        GOOD.input("nobody")


def test_widening_reaches_every_dtype() -> None:
    """A cast that stayed float32 would hide errors of 1e-8 in a check of 1e-9."""
    graph = widen(small_graph())
    assert {s.dtype for s in graph.specs.values() if s.is_float and s != GOOD.constants[0].spec} == {"f64"}
    assert graph.by_name["k"].args[1] == Dtype("f64")
    for name in ("hf.py:bert", "llama.py:tiny"):
        wide = widen(specimen(name).graph)
        assert not [n for n in wide.nodes if "f32" in str(n)]
        constants = {c.name for c in wide.constants}
        assert all(s.dtype == "f64" for r, s in wide.specs.items() if s.is_float and r.name not in constants)


def test_a_program_is_data() -> None:
    """Same graph and plan, same hash; it prints with local shapes and counts its collectives."""
    one = specimen("mlp.py:tiny")
    plain = (B,)
    ops = {n.name: Choice((plain,) * len(n.ins), (plain,) * len(n.outs)) for n in one.graph.nodes}
    plan = Plan(
        Mesh({"dp": 2}),
        one.graph.hash,
        ops,
        {i.name: plain for i in one.graph.inputs},
        {f"{o.kind}:{o.name}": plain for o in one.graph.outputs},
    )
    program = lower(one.graph, plan)
    assert program.collectives == [] and program.counts() == {}
    assert program.hash == lower(one.graph, plan).hash
    json.dumps(program.to_json(), allow_nan=False)
    assert "program on Mesh(dp=2)" in str(program)


# --- shards ------------------------------------------------------------------------------------

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 1), (2, 2, 2)]
SHAPES = [(), (1,), (5,), (7, 3), (12,), (4, 6), (0, 2), (2, 3, 8)]


def legal(
    shape: tuple[int, ...], sizes: tuple[int, ...], kinds: tuple[str, ...] = ("sum", "max", "min")
) -> list[NdSbp]:
    """Placements of a shape, blocks of 2 and 3 included."""
    one: list[Sbp] = [B, *map(P, kinds), *(S(d, k) for d in range(len(shape)) for k in (1, 2, 3))]
    out = []
    for nd in itertools.product(one, repeat=len(sizes)):
        try:
            check_placement(TensorSpec(shape, "i64"), nd, sizes, "test")
        except PlacementError:
            continue
        out.append(nd)
    return out


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shards_put_together_are_the_tensor(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Uneven pieces, empty ones and blocks; terms of a sum, a maximum or a minimum."""
    mesh = Mesh(dict(zip("abc", sizes, strict=False)))
    chance = random.Random(str((shape, sizes)))
    whole = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(1))
    every = legal(shape, sizes)
    for nd in chance.sample(every, min(150, len(every))):
        kind = next((p.op for p in nd if isinstance(p, Partial)), None)
        fill = {None: 0, "sum": 0, "max": -1000, "min": 1000}[kind]
        held = []
        for rank in range(mesh.ranks):
            coords = mesh.coords(rank)
            owns = all(c == n - 1 for p, c, n in zip(nd, coords, sizes, strict=True) if isinstance(p, Partial))
            x = shard(whole, tuple(B if isinstance(p, Partial) else p for p in nd), mesh, rank)
            held.append(x if owns else torch.full_like(x, fill))
            assert tuple(x.shape) == local_shape(shape, nd, sizes, coords), show(nd)
            assert Placed(TensorSpec(shape, "i64"), nd).local(mesh, rank).shape == tuple(x.shape)
            index = local_indices(shape, nd, sizes, coords)
            assert tuple(map(len, index)) == tuple(x.shape), show(nd)
        assert torch.equal(assemble(held, shape, nd, mesh), whole), show(nd)


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from([1, 2, 3]))
def test_cut_and_glue_are_inverse(size: int, parts: int, blocks: int) -> None:
    """Along any dim; with blocks, of sizes that divide."""
    size = size * blocks * parts if blocks > 1 else size
    x = torch.arange(2 * size).reshape(2, size)
    pieces = cut_pieces(x, 1, blocks, parts)
    assert len(pieces) == parts
    assert torch.equal(glue_pieces(pieces, 1, blocks), x)


@given(st.integers(0, 200), st.integers(1, 17))
def test_pieces_are_those_of_torch_chunk(size: int, parts: int) -> None:
    """Ceil-sized pieces, the last ones shorter or empty."""
    pieces = [chunk(size, parts, r) for r in range(parts)]
    torchs = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
    assert [n for _, n in pieces if n] == [n for n in torchs if n]
    assert [s for s, n in pieces if n] == list(itertools.accumulate([0, *torchs]))[: len(torchs)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shards_are_dtensor_shards(data: st.DataObject) -> None:
    """Shape and offset of every rank as torch.distributed.tensor works them out: what we store, others can load."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3)))
    nd = tuple(data.draw(st.sampled_from([B, *(S(d) for d in range(len(shape)))])) for _ in sizes)
    theirs = [Shard(p.dim) if isinstance(p, Split) else Replicate() for p in nd]
    mesh = Mesh(dict(zip("abc", sizes, strict=False)))
    for rank in range(mesh.ranks):
        coords = mesh.coords(rank)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, lambda dim, at=coords: at[dim], theirs)
        assert tuple(local) == local_shape(shape, nd, sizes, coords)
        index = local_indices(shape, nd, sizes, coords)
        assert all(list(i) == list(range(o, o + n)) for i, o, n in zip(index, offset, local, strict=True) if n)


@pytest.mark.parametrize(
    ("nd", "message"),
    [
        ((B,), "1 placements for a mesh of 2 axes"),
        ((S(2), B), "has no dim 2"),
        ((P("sum"), P("max")), "mixes kinds of partial"),
        ((S(0, 3), B), "has no 3 blocks that divide by 2"),
        ((S(1), S(1, 2)), "already cut unevenly"),
    ],
)
def test_impossible_placements_are_refused(nd: NdSbp, message: str) -> None:
    """Each with what is wrong about it."""
    with pytest.raises(PlacementError, match=message.replace("(", r"\(")):
        check_placement(TensorSpec((4, 7), "f32"), nd, (2, 2), "test")


def test_a_bool_has_no_sum() -> None:
    """No collective adds truths."""
    with pytest.raises(PlacementError, match="no sum"):
        check_placement(TensorSpec((4,), "bool"), (P("sum"),), (2,), "test")
    with pytest.raises(PlacementError, match=r"P\(mean\)"):
        P("mean")


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "float"), ((-1,), "f32")])
def test_what_is_no_tensor_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    """Unknown dtypes and negative sizes."""
    with pytest.raises(ValueError, match="TensorSpec"):
        TensorSpec(shape, dtype)
