"""Rules of parts that run as they are (`laminar.eager`): all that is known about them is what was declared.

Without a declaration every rank does the whole, on whole tensors. Where samples lie along dim 0 of some tensors and
each is worked on by itself, that dim splits; parameters stay whole, and their gradients are sums over the samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call, Rule
from laminar.rules.ops.families import text


def _by_samples(specs: Sequence[TensorSpec | None], split: Collection[int]) -> list[list[str]]:
    """Letters of tensors of which some have samples in dim 0, and nothing else is known."""
    return [
        ["n" if i in split and d == 0 else "." for d in range(len(spec.shape) if spec else 0)]
        for i, spec in enumerate(specs)
    ]


def eager_rule(call: Call) -> Rule:
    """eager(given, key, name, site, ins, outs, flops, rows): whole tensors, or samples where that is declared."""
    ins = _by_samples(call.ins, call.args[4])
    return Rule(text(call, ins, _by_samples(call.outs, call.args[5])))


def eager_backward_rule(call: Call) -> Rule:
    """eager_backward(grads, given, key, name, site, needs, ins, outs, flops, rows); what is whole gets a sum."""
    grads, needs, split = len(call.args[0]), call.args[5], call.args[6]
    given = [i for i, need in enumerate(needs) if need]
    ins = _by_samples(call.ins, [*(range(grads) if split else ()), *(grads + i for i in split)])
    return Rule(text(call, ins, _by_samples(call.outs, [k for k, i in enumerate(given) if i in split])))
