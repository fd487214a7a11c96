"""Rewrites as a language: what rules may say, where they apply, and what they leave as it was."""

from __future__ import annotations

import pytest
import torch

import laminar
from laminar.errors import RuleError
from laminar.ir.graph import Graph, Input, Node, Output
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rewrite import standalone as laws
from laminar.rewrite.apply import Rewrite, rewrite
from laminar.rewrite.forms import FORMS
from laminar.rewrite.language import parse_rewrite
from laminar.rewrite.rules import REWRITE_RULES
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, prove
from tests.support import zoo
from tests.support.rewrite_cases import BY_NAME, several
from tests.support.rule_file_cases import TEXTS


def apply(graph: Graph, *names: str) -> Graph:
    """A graph with rules applied one after the other, each at every site of its first class."""
    for name in names:
        sites = BY_NAME[name].find(graph)
        graph = BY_NAME[name].apply(graph, [s for s in sites if s.key == sites[0].key])
    return graph


# --- the language ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mm(A, B)", "has no =>"),
        ("mm(A, B) => mm(A, C)", "stands on the right only"),
        ("mm(A*, X) => mm(A, X)", r"A\* on the left is A on the right"),
        ("mm(A, B => mm(A, B)", "is not closed"),
        ("mm(A, B)) => A", "left over"),
        ("mm(A; B) => A", "can't be read"),
        ("mm(A, ) => A", "where a word should stand"),
        ("matmul(A, B) => mm(A, B)", "no form is called matmul"),
        ("mm(X, W*) => mm(X, cat(W*, 1))", "has members, and no part"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    """Rules are written by hand, and a typing error must not become a rule that never fits."""
    with pytest.raises(RuleError, match=complaint):
        Rewrite("wrong", text, "")


def test_a_rule_prints_as_it_was_written() -> None:
    """The text is the rule: what was understood can be shown."""
    for rule in REWRITE_RULES:
        assert " => ".join(map(str, parse_rewrite(rule.text))) == rule.text


def test_every_form_is_used_by_a_rule() -> None:
    """A word that no rule uses, ours or one from a file, is one that no test tries."""
    used = " ".join([*(r.text for r in REWRITE_RULES), *TEXTS.values()])
    assert [f for f in FORMS if f"{f}(" not in used] == []


def test_rules_have_names_and_reasons_of_their_own() -> None:
    """A plan names rules, and a reader wants to know why there is one."""
    assert len(BY_NAME) == len(REWRITE_RULES) == len(laws.SHAPES)
    assert all(r.doc.endswith((".", ",")) for r in REWRITE_RULES)


# --- sites -----------------------------------------------------------------------------------


def test_query_key_and_value_of_every_block_are_one_class() -> None:
    """A planner decides once for all blocks; sites are found by structure, so names play no role."""
    graph = zoo.specimen("llama.py:tiny").graph
    sites = BY_NAME["merge-products"].find(graph)
    whole = [s for s in sites if s.match.groups[0].count == 3]
    assert len(whole) == 2 and len({s.key for s in whole}) == 1
    assert sorted(sorted(*s.ties)[0].split(".")[1] for s in whole) == ["0", "1"]


def test_grouped_heads_are_offered_with_and_without_the_wider_query() -> None:
    """Equal parts can be split over ranks as blocks, parts of two sizes can't: both choices must be there."""
    graph = zoo.specimen("llama.py:tiny").graph
    sites = [s for s in BY_NAME["merge-products"].find(graph) if any("attention" in p for p in set().union(*s.ties))]
    assert {s.match.division for s in sites} == {"module", "equal"}
    equal = next(s for s in sites if s.match.division == "equal")
    assert {p.split(".")[-2] for p in set().union(*equal.ties)} == {"k", "v"}


def test_every_decoder_layer_can_read_the_encoder_at_once() -> None:
    """Keys and values of cross-attention read one value in all layers: per layer, or all in one product."""
    graph = zoo.specimen("t5.py:tiny").graph
    sites = [s for s in BY_NAME["merge-products"].find(graph) if s.match.division == "all"]
    assert [s.match.groups[0].count for s in sites] == [4]


def test_merged_products_keep_modules_phases_lines_and_parameters() -> None:
    """Plans name modules, pipelines cut by phase, errors show lines, checkpoints keep parameters: all must survive."""
    graph = zoo.specimen("llama.py:tiny").graph
    after = apply(graph, "merge-products", "merge-gradient-products", "sum-as-product")
    assert after.inputs == graph.inputs
    assert [(o.kind, o.name) for o in after.outputs] == [(o.kind, o.name) for o in graph.outputs]
    fresh = [n for n in after.nodes if n.name not in graph.by_name]
    first = next(n for n in fresh if n.op == "aten.mm")
    assert (first.module, first.phase) == ("blocks.0.attention", "forward") and "llama.py" in first.where
    assert all(n.module and n.where for n in fresh)
    forward = [n.phase for n in after.nodes].index("backward")
    assert all(n.phase == "backward" for n in after.nodes[forward:])


def test_weights_are_packed_apart_in_forward_and_backward() -> None:
    """A packed weight that both read would lie in memory between them, and a gathered one would not be freed."""
    after = apply(zoo.specimen("llama.py:tiny").graph, "merge-products", "sum-as-product")
    packed = [
        n
        for n in after.nodes
        if n.op == "aten.cat"
        and all(
            not r.name.startswith(("neg", "slice", "split")) and r in {Ref(i.name) for i in after.inputs} for r in n.ins
        )
    ]
    assert {n.phase for n in packed} == {"forward", "backward"}
    for n in packed:
        assert all(u.phase == n.phase for u in after.users[Ref(n.name)])


def test_draws_keep_their_keys() -> None:
    """Dropout is part of the result: a rewrite that renumbered draws would train another model."""
    graph = zoo.specimen("bert.py:tiny").graph
    drawn = [n.args for n in graph.nodes if n.op == "laminar.uniform"]
    assert drawn
    for variant in several("bert.py:tiny"):
        assert [n.args for n in variant.graph.nodes if n.op == "laminar.uniform"] == drawn


def test_products_that_wait_for_each_other_are_not_merged() -> None:
    """Two products may share an input and still need one another: made one, they would wait for themselves."""
    square = TensorSpec((3, 3), "f32")
    inputs = (Input("x", "batch", square), Input("w", "batch", square))
    nodes = (
        Node("mm_0", "aten.mm", (Ref("x"), Ref("w")), (square,)),
        Node("relu_0", "aten.relu", (Ref("mm_0"),), (square,)),
        Node("mm_1", "aten.mm", (Ref("x"), Ref("relu_0")), (square,)),
    )
    graph = Graph(inputs, (), nodes, (Output("y", "metric", Ref("mm_1")),))
    assert BY_NAME["merge-products"].find(graph) == []


def test_sites_that_only_together_make_a_ring_are_rewritten_as_far_as_possible() -> None:
    """Pairs (a, b) and (c, d) may each be merged, and not both, if c needs a and b needs d."""
    square = TensorSpec((3, 3), "f32")
    names = ("x", "y", "p", "q")
    inputs = tuple(Input(n, "batch", square) for n in names)
    nodes = (
        Node("a", "aten.mm", (Ref("x"), Ref("p")), (square,)),
        Node("d", "aten.mm", (Ref("y"), Ref("q")), (square,)),
        Node("c", "aten.mm", (Ref("y"), Ref("a")), (square,)),
        Node("b", "aten.mm", (Ref("x"), Ref("d")), (square,)),
    )
    nodes = tuple(
        Node(f"mm_{n.name}", n.op, tuple(Ref(f"mm_{r.name}") if r.name in "abcd" else r for r in n.args), n.outs)
        for n in nodes
    )
    graph = Graph(inputs, (), nodes, tuple(Output(n, "metric", Ref(f"mm_{n}")) for n in "bc"))
    rule = BY_NAME["merge-products"]
    sites = rule.find(graph)
    assert len(sites) == 2
    after, count = rewrite(graph, rule, sites)
    assert count == 1
    assert prove(graph, after.graph) <= PROOF_TOLERANCE


def test_what_others_read_is_not_worked_out_twice() -> None:
    """A product inside a match that somebody else reads as well would be made once more."""
    a, b = TensorSpec((6, 5), "f32"), TensorSpec((5, 4), "f32")
    out = TensorSpec((6, 4), "f32")
    nodes = (
        Node("mm_0", "aten.mm", (Ref("a"), Ref("b")), (out,)),
        Node("mul_0", "aten.mul.Scalar", (Ref("mm_0"), 0.5), (out,)),
    )
    inputs = (Input("a", "batch", a), Input("b", "batch", b))
    alone = Graph(inputs, (), nodes, (Output("y", "metric", Ref("mul_0")),))
    both = Graph(inputs, (), nodes, (Output("y", "metric", Ref("mul_0")), Output("z", "metric", Ref("mm_0"))))
    rule = BY_NAME["scale-before-product"]
    assert len(rule.find(alone)) == 1 and rule.find(both) == []


def test_a_term_that_is_added_twice_stays_twice() -> None:
    """x + x is a sum of two terms, though only one op reads x: merging it as one term would lose half of it."""
    names, square = ("a", "b", "c", "d"), TensorSpec((3, 3), "f32")
    nodes = (
        Node("mm_0", "aten.mm", (Ref("a"), Ref("b")), (square,)),
        Node("add_0", "aten.add.Tensor", (Ref("mm_0"), Ref("mm_0"), 1), (square,)),
        Node("mm_1", "aten.mm", (Ref("c"), Ref("d")), (square,)),
        Node("mm_2", "aten.mm", (Ref("d"), Ref("b")), (square,)),
        Node("add_1", "aten.add.Tensor", (Ref("add_0"), Ref("mm_1"), 1), (square,)),
        Node("add_2", "aten.add.Tensor", (Ref("add_1"), Ref("mm_2"), 1), (square,)),
    )
    inputs = tuple(Input(n, "batch", square) for n in names)
    graph = Graph(inputs, (), nodes, (Output("y", "metric", Ref("add_2")),))
    rule = BY_NAME["sum-as-product"]
    (site,) = rule.find(graph)
    assert site.match.groups[0].count == 2 and site.match.rest == (Ref("mm_0"), Ref("mm_0"))
    assert prove(graph, rule.apply(graph, site)) <= PROOF_TOLERANCE


def test_halves_are_summed_in_float32_and_merged_all_the_same() -> None:
    """Under autocast products are narrow and their sum is wide; that is how most models are trained."""
    made = zoo.recipe("llama.py:tiny")

    def loss(model: torch.nn.Module, batch: object) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made.loss(model, batch)

    graph = laminar.capture(made.model(), loss, next(iter(made.data())))
    for name in ("merge-products", "merge-gradient-products", "sum-as-product"):
        after = apply(graph, name)
        assert prove(graph, after) <= PROOF_TOLERANCE
        assert any(
            n.op == "aten.mm" and n.outs[0] and n.outs[0].dtype == "bf16" and n.name not in graph.by_name
            for n in after.nodes
        )
