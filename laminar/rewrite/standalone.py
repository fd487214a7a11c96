"""Rules standing alone: the left side of a rewrite rule written down as a graph, with tensors of given shapes.

What a rule looks for need not occur in any model at hand. Here it is made to occur, nothing simplified, so that every
rule, right or wrong, can be tried on numbers (`runtime/check/prove_rewrites.py`) before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from laminar.ir.graph import Graph, Input, Node, Output, map_refs
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rewrite.apply import Rewrite
from laminar.rewrite.edit import Lookup, Writer
from laminar.rewrite.forms import Seen
from laminar.rewrite.language import Term, starred, words
from laminar.rewrite.match import MemberGroup, value

RELU = ("aten.relu", (), "f64")
ROWS = ("aten.slice.Tensor", (0, 1, 4, 1), (3, 4))
CONV = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
IDS = "i64"

SHAPES: dict[str, Mapping[str, Any]] = {
    "merge-products": {"X": (6, 4), "W": [(4, 3), (4, 5), (4, 2)]},
    "merge-biased-products": {"B": [(3,), (5,)], "X": (6, 4), "W": [(4, 3), (4, 5)]},
    "merge-gradient-products": {"A": [(3, 6), (2, 6)], "X": (6, 4)},
    "merge-batched-products": {"X": (2, 6, 4), "W": [(2, 4, 3), (2, 4, 5)]},
    "merge-batched-products-left": {"A": [(2, 3, 4), (2, 5, 4)], "X": (2, 4, 6)},
    "sum-as-product": {"A": [(6, 3), (6, 2), (6, 4)], "B": [(3, 5), (2, 5), (4, 5)]},
    "batched-sum-as-product": {"A": [(2, 6, 3), (2, 6, 2)], "B": [(2, 3, 5), (2, 2, 5)]},
    "split-product": {"X": (6, 4), "W": (4, 9), "sizes": (2, 3, 4)},
    "split-biased-product": {"B": (9,), "X": (6, 4), "W": (4, 9), "sizes": (3, 3, 3)},
    "split-gradient-product": {"G": [(6, 3), (6, 2)], "X": (6, 4)},
    "split-gradient-product-right": {"X": (4, 6), "G": [(6, 3), (6, 2)]},
    "split-inner": {"A": [(6, 3), (6, 2)], "B": (5, 4), "sizes": (3, 2)},
    "split-bias-gradient": {"G": [(6, 3), (6, 2)]},
    "factor-right": {"A": [(6, 3), (6, 3)], "X": (3, 5)},
    "factor-left": {"X": (6, 3), "B": [(3, 5), (3, 5)]},
    "reassociate-right": {"A": (6, 5), "B": (5, 4), "C": (4, 3)},
    "reassociate-left": {"A": (6, 5), "B": (5, 4), "C": (4, 3)},
    **{
        f"scale-{where}-product{side}": {"A": (6, 5), "B": (5, 4), "s": -0.7}
        for where in ("behind", "before")
        for side in ("", "-right")
    },
    **{
        f"scale-{where}-batched{side}": {"A": (2, 6, 5), "B": (2, 5, 4), "s": -0.7}
        for where in ("behind", "before")
        for side in ("", "-right")
    },
    "power-of-one": {"A": (3, 4)},
    "scale-of-one": {"A": (3, 4)},
    "join-scales": {"A": (3, 4), "r": -1.5, "s": 0.3},
    "join-turns": {"A": (2, 3, 4), "p": (2, 0, 1), "q": (0, 2, 1)},
    "meet-turns": {"A": (2, 3, 4), "p": (2, 0, 1), "q": (0, 2, 1), "f": RELU},
    "turn-of-product": {"A": (5, 3), "B": (5, 4)},
    "turn-of-product-right": {"A": (3, 5), "B": (4, 5)},
    "turned-factors": {"A": (5, 3), "B": (4, 5)},
    "turn-of-batched": {"A": (2, 5, 3), "B": (2, 5, 4)},
    "turn-of-batched-right": {"A": (2, 3, 5), "B": (2, 4, 5)},
    "turned-batched-factors": {"A": (2, 5, 3), "B": (2, 4, 5)},
    "each-before-expand": {"A": (3, 1), "n": (2, 3, 4), "f": RELU},
    "mul-broadcasts": {"A": (3, 1), "n": (2, 3, 4), "B": (2, 3, 4)},
    "add-broadcasts": {"A": (3, 1), "n": (2, 3, 4), "B": (2, 3, 4)},
    "each-behind-take": {"A": (6, 4), "f": RELU, "m": ROWS},
    "cast-of-wider": {"A": ((3, 4), "f32"), "d": "f64", "e": "f16"},
    "scale-behind-sum": {"A": (3, 4, 2), "s": -0.7, "d": ((0, 2), False)},
    "merge-lookups": {"T": (7, 3), "I": [((2, 4), IDS), ((2, 5), IDS)], "h": (-1, False, False)},
    "merge-lookup-gradients": {
        "G": [(2, 4, 3), (2, 5, 3)],
        "I": [((2, 4), IDS), ((2, 5), IDS)],
        "h": (7, -1, False),
    },
    "merge-convolutions": {"X": (2, 3, 5, 5), "W": [(4, 3, 3, 3), (2, 3, 3, 3)], "h": CONV},
    "merge-biased-convolutions": {
        "X": (2, 3, 5, 5),
        "W": [(4, 3, 3, 3), (2, 3, 3, 3)],
        "B": [(4,), (2,)],
        "h": CONV,
    },
    **{
        name: {
            "G": [(2, 4, 5, 5), (2, 2, 5, 5)],
            "X": (2, 3, 5, 5),
            "W": [(4, 3, 3, 3), (2, 3, 3, 3)],
            "h": CONV,
        }
        for name in ("merge-convolution-gradients", "merge-convolution-bias-gradients", "sum-as-convolution")
    },
}
"""For every rule: the shape of each tensor, one for each member where there is a star, and the plain arguments."""


class PlainWriter(Writer):
    """Writes what it is told, and never a shorter way to say it."""

    def maker(self, ref: Ref, *ops: str) -> Node | None:
        """Nobody knows who made anything."""
        return None

    def _whole(self, parts: Any, d: int) -> Ref | None:
        return None


def stage(rule: Rewrite, given: Mapping[str, Any] | None = None) -> Graph:
    """A graph that is the left side of a rule, and gives back what the rule would replace."""
    given = SHAPES[rule.name] if given is None else given
    left = rule.sides[0]
    inputs: list[Input] = []
    bound: dict[str, Any] = {}
    count = 1

    def tensor(name: str, shape: Any) -> Seen:
        dims, dtype = shape if shape and isinstance(shape[-1], str) else (shape, "f64")
        inputs.append(Input(name, "batch", TensorSpec(tuple(dims), dtype)))
        return Seen(Ref(name))

    for var in dict.fromkeys(words(left)):
        if not var.tensor:
            bound[var.name] = given[var.name]
        elif var.star:
            count = len(given[var.name])
            bound[var.name] = tuple(tensor(f"{var.name}{i}", s) for i, s in enumerate(given[var.name]))
        else:
            bound[var.name] = tensor(var.name, given[var.name])
    sizes = given.get("sizes", ())
    writer = PlainWriter(Lookup(Graph(tuple(inputs), (), (), ())))
    group = MemberGroup(bound, sizes, count)
    assert isinstance(left, Term)
    several = len(sizes) if left.form == "part" else count if starred(left) else 1
    made = [value(writer, left, group, k) for k in range(several)]

    def plain(ref: Ref) -> Ref:  # as a capture would have called it
        return Ref(re.sub(r"_[wk](\d+)$", r"_\1", ref.name), ref.index)

    nodes = [replace(n, name=plain(Ref(n.name)).name, args=map_refs(n.args, plain)) for n in writer.nodes]
    outputs = tuple(Output(f"y{k}", "metric", plain(ref)) for k, ref in enumerate(made))
    return Graph(tuple(inputs), (), tuple(nodes), outputs)
