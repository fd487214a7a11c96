"""Every rewrite rule is proved: where it stands alone, and in the models in which it finds something to do."""

from __future__ import annotations

import pytest
import torch

import laminar
from laminar.rewrite import standalone as laws
from laminar.rewrite.apply import Rewrite, Site, rewrite
from laminar.rewrite.rules import REWRITE_RULES
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, prove, random_inputs
from tests.support import zoo

FOUND = {
    "llama.py:tiny": """merge-products merge-gradient-products sum-as-product power-of-one each-before-expand""",
    "gpt.py:tiny": "split-biased-product split-gradient-product split-inner split-bias-gradient",
    "bert.py:tiny": """merge-biased-products merge-gradient-products sum-as-product scale-behind-batched join-turns
        scale-behind-batched-right scale-before-batched scale-before-batched-right""",
    "t5.py:tiny": """merge-products merge-gradient-products sum-as-product power-of-one join-turns each-before-expand
        merge-lookups merge-lookup-gradients""",
    "moe.py:tiny": """split-biased-product split-gradient-product split-inner split-bias-gradient join-turns
        each-before-expand add-broadcasts""",
    "dlrm.py:tiny": "split-gradient-product-right scale-behind-product turn-of-batched scale-behind-sum",
    "resnet.py:tiny": "scale-of-one join-scales each-before-expand",
    "vit.py:tiny": "add-broadcasts",
    "mlp.py:tiny": "",
    "unet.py:tiny": "",
    "lstm.py:tiny": "",
}
"""Which rules find something in which model; the others of the zoo are like one of these."""


@pytest.mark.parametrize("rule", REWRITE_RULES, ids=lambda r: r.name)
def test_every_rule_holds_where_it_stands_alone(rule: Rewrite) -> None:
    """A rule that no model at hand has a place for must be right all the same, and must find what it looks for."""
    graph = laws.stage(rule)
    sites = rule.find(graph)
    assert sites, f"{rule.text} does not find its own left side in\n{graph}"
    after = rule.apply(graph, sites[0])
    assert after.hash != graph.hash
    assert prove(graph, after) <= PROOF_TOLERANCE
    if rule.exact:
        assert prove(graph, after, dtype="") == 0.0


@pytest.mark.parametrize("name", FOUND)
def test_every_rule_keeps_losses_gradients_and_buffers_of_a_model(name: str) -> None:
    """Forward and backward are one graph, so a rule that is right for values but not for gradients shows here."""
    with zoo.one_thread():
        graph = zoo.specimen(name).graph
        found = []
        for rule in REWRITE_RULES:
            classes: dict[str, list[Site]] = {}
            for site in rule.find(graph):
                classes.setdefault(site.key, []).append(site)
            for sites in classes.values():
                made, count = rewrite(graph, rule, sites)
                after = made.graph
                assert count
                assert prove(graph, after) <= PROOF_TOLERANCE, f"{rule.name} at {sites[0].roots}"
                assert not rule.exact or prove(graph, after, dtype="") == 0.0, rule.name
            found += [rule.name] * bool(classes)
        assert set(found) == set(FOUND[name].split())


CUBE = {"A": (3, 3, 3), "p": (2, 0, 1), "q": (0, 2, 1)}
SQUARES = {"A": [(3, 3), (3, 3)], "B": [(3, 3), (3, 3)]}
WRONG = {
    "drops a number": ("mm(scale(A, s), B) => mm(A, B)", {"A": (6, 5), "B": (5, 4), "s": 0.5}),
    "multiplies twice": ("scale(mm(A, B), s) => mm(scale(A, s), scale(B, s))", {"A": (6, 5), "B": (5, 4), "s": 0.5}),
    "is nearly right": (
        "sum(mm(A*, B*)) => scale(mm(cat(A*, 1), cat(B*, 0)), 0.999999999)",
        laws.SHAPES["sum-as-product"],
    ),
    "multiplies sums": ("sum(mm(A*, B*)) => mm(sum(A*), sum(B*))", SQUARES),
    "turns in the wrong order": ("turn(turn(A, p), q) => turn(A, then(q, p))", CUBE),
    "moves a relu into a product": (
        "each(mm(A, B), f) => mm(each(A, f), B)",
        {"A": (6, 5), "B": (5, 4), "f": laws.RELU},
    ),
    "swaps factors": ("mm(A, B) => mm(B, A)", {"A": (3, 3), "B": (3, 3)}),
    "moves a number out of a relu": (
        "each(scale(A, s), f) => scale(each(A, f), s)",
        {"A": (3, 4), "s": -0.5, "f": laws.RELU},
    ),
}
"""Rules that fit by their shapes, and do not hold."""


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_caught(what: str) -> None:
    """The proof is worth something only if a rule that looks right and is wrong does not get through."""
    text, shapes = WRONG[what]
    rule = Rewrite("wrong", text, "")
    graph = laws.stage(rule, shapes)
    sites = rule.find(graph)
    assert sites, "a rule that finds nothing is not caught, it is idle"
    assert prove(graph, rule.apply(graph, sites)) > 100 * PROOF_TOLERANCE


def test_a_rule_that_is_wrong_in_backward_only_is_caught() -> None:
    """The loss of such a model is right, and it trains badly: gradients must be part of the proof."""
    graph = zoo.specimen("llama.py:tiny").graph
    rule = Rewrite("wrong", "sum(mm(A*, B*)) => scale(mm(cat(A*, 1), cat(B*, 0)), 1.001)", "")
    after = rule.apply(graph, rule.find(graph))
    assert all(n.phase == "backward" for n in after.nodes if n.name not in graph.by_name)
    assert prove(graph, after) > 1e-6


class Branches(torch.nn.Module):
    """Three convolutions of one value, two of them alike in all but channels, as in an Inception block."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(2, 3, 3, padding=1)
        self.a = torch.nn.Conv2d(3, 4, 3, padding=1, bias=bias)
        self.b = torch.nn.Conv2d(3, 2, 3, padding=1, bias=bias)
        self.c = torch.nn.Conv2d(3, 2, 1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Branches side by side."""
        x = self.stem(x).relu()
        return torch.cat([self.a(x).relu(), self.b(x).tanh(), self.c(x)], 1)


class LowRank(torch.nn.Module):
    """A layer with a low-rank addition, and a factor that two terms share."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False)
        self.whole = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (W + U D), written as two terms; then one weight for two values."""
        y = self.whole(x) + self.up(self.down(x)) * 0.5
        return self.whole(y) + self.whole(y.tanh())


class Heads(torch.nn.Module):
    """Heads as a batch of products, with turns and numbers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (torch.nn.Parameter(torch.randn(2, 6, 4) / 2) for _ in range(2))
        self.table = torch.nn.Parameter(torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Queries and keys of one value; a table that is read through a cast."""
        x = x.expand(2, 7, 6)
        q, k = torch.bmm(x, self.q), torch.bmm(x, self.k)
        scores = torch.bmm(q * 0.5, k.transpose(1, 2)) / 3
        return torch.bmm(scores.softmax(-1), x) + self.table.double()[1].float()


def captured(model: torch.nn.Module, *shape: int) -> laminar.Graph:
    """A model's training step, with a loss that weighs every result differently."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    return laminar.capture(model, lambda m, b: (m(b).pow(2) * 0.5).mean() + m(b).mean(), x)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_convolutions_that_share_an_input_become_one_with_all_their_gradients(bias: bool) -> None:
    """Branching nets spend their time in small convolutions; those that are alike are one, forward and backward."""
    graph = captured(Branches(bias), 2, 2, 5, 5)
    before = sum(n.op.startswith("aten.convolution") for n in graph.nodes)
    for rule in REWRITE_RULES:
        if "convolution" in rule.name:
            graph, old = rule.apply(graph, rule.find(graph)), graph
            assert prove(old, graph) <= PROOF_TOLERANCE, rule.name
    after = sum(n.op.startswith("aten.convolution") for n in graph.nodes)
    assert after == before - 2
    assert prove(captured(Branches(bias), 2, 2, 5, 5), graph) <= PROOF_TOLERANCE


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (LowRank, (40, 8), "reassociate-right reassociate-left factor-right"),
        (
            Heads,
            (7, 6),
            """merge-batched-products batched-sum-as-product scale-behind-batched scale-before-batched
        each-behind-take""",
        ),
    ],
)
def test_rules_for_models_that_the_zoo_lacks(
    model: type[torch.nn.Module], shape: tuple[int, ...], expected: str
) -> None:
    """Low-rank updates, batched heads and tables that are cast: each rule keeps values and gradients."""
    graph = captured(model(), *shape)
    found = set()
    for rule in REWRITE_RULES:
        sites = rule.find(graph)
        for site in sites:
            assert prove(graph, rule.apply(graph, site)) <= PROOF_TOLERANCE, f"{rule.name} at {site.roots}"
        found |= {rule.name} if sites else set()
    assert set(expected.split()) <= found


def test_random_inputs_index_only_what_is_there() -> None:
    """An index beyond a table would stop the proof, one that never leaves the first rows would prove little."""
    graph = zoo.specimen("t5.py:tiny").graph
    rows = graph.input("embed.weight").spec.shape[0]
    ids = random_inputs(graph)["batch.source"]
    assert int(ids.max()) < rows and int(ids.max()) > rows // 2
