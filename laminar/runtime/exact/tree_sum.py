"""Sums in a fixed binary tree over logical indices: what each process can add up by itself, and the rest of the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.ir.exact import TreeNode, children, cover

IN_CACHE = 1 << 15
"""Elements that are taken up the whole tree at once, so that what lies between stays in a core's cache."""
JOIN: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class PartialSums:
    """The terms that are here, added up as they come, in order: one sum for each node of their cover."""

    def __init__(self, members: tuple[bool, ...], op: str, outs: Sequence[Tensor]) -> None:
        """`outs` are where the sums go, one for each node of the cover."""
        self.op, self.outs = JOIN[op], dict(zip(cover(members), outs, strict=True))
        self._parents: dict[tuple[TreeNode, TreeNode], TreeNode] = {}
        for node in self.outs:
            self._note(node)
        self._waiting: list[tuple[TreeNode, Tensor, bool]] = []

    def _note(self, node: TreeNode) -> None:
        if node[1] - node[0] > 1:
            left, right = children(node)
            self._parents[left, right] = node
            self._note(left)
            self._note(right)

    def add(self, index: int, term: Tensor, own: bool = False) -> None:
        """The next term. `own`: nobody else reads it, so sums may be written over it."""
        node = (index, index + 1)
        waiting = self._waiting
        if node in self.outs:
            self.outs[node].copy_(term)
            return
        waiting.append((node, term, own))
        while len(waiting) > 1 and (waiting[-2][0], waiting[-1][0]) in self._parents:
            (right, b, _), (left, a, mine) = waiting.pop(), waiting.pop()
            parent = self._parents[left, right]
            if parent in self.outs:
                self.op(a, b, out=self.outs[parent])
            else:
                waiting.append((parent, self.op(a, b, out=a) if mine else self.op(a, b), True))


def tree_sum(terms: Mapping[TreeNode, Tensor], count: int, op: str, out: Tensor) -> Tensor:
    """The whole sum of `count` terms in `out`, from flat sums of nodes that make it up; `out` may be one of them."""
    join = JOIN[op]
    if len(terms) == 1:
        (only,) = terms.values()
        return out if only.data_ptr() == out.data_ptr() else out.copy_(only)

    def at(node: TreeNode, begin: int, end: int) -> tuple[Tensor, bool]:
        if node in terms:
            return terms[node][begin:end], False
        (a, mine), (b, _) = (at(child, begin, end) for child in children(node))
        return join(a, b, out=a) if mine else join(a, b), True

    left, right = children((0, count))
    step = out.numel() if len(terms) == 2 else IN_CACHE
    for begin in range(0, out.numel(), max(step, 1)):
        end = min(begin + step, out.numel())
        join(at(left, begin, end)[0], at(right, begin, end)[0], out=out[begin:end])
    return out
