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
        self._first = {node[0]: out for node, out in self.outs.items()}
        self._waiting: list[tuple[TreeNode, Tensor, bool]] = []

    def _note(self, node: TreeNode) -> None:
        if node[1] - node[0] > 1:
            left, right = children(node)
            self._parents[left, right] = node
            self._note(left)
            self._note(right)

    def clear(self) -> None:
        """Forget terms of a sum that was not brought to its end."""
        self._waiting.clear()

    def room(self, index: int) -> Tensor | None:
        """Where the term of this number may be written as it is made, if it begins a sum."""
        return self._first.get(index)

    def partner(self, index: int) -> Tensor | None:
        """What the term of this number is added to first, if that is here and may be written over."""
        if not self._waiting:
            return None
        node, term, own = self._waiting[-1]
        return term if own and (node, (index, index + 1)) in self._parents else None

    def joined(self, index: int) -> None:
        """The term of this number has been added to its partner."""
        left, a, _ = self._waiting.pop()
        self._take(self._parents[left, (index, index + 1)], a, True)

    def add(self, index: int, term: Tensor, own: bool = False) -> None:
        """The next term. `own`: nobody else reads it, so sums may be written over it."""
        self._take((index, index + 1), term, own)

    def _take(self, node: TreeNode, term: Tensor, own: bool) -> None:
        """A sum of the tree, joined with what stands to its left for as long as that is here."""
        while self._waiting and (self._waiting[-1][0], node) in self._parents:
            left, a, mine = self._waiting.pop()
            node = self._parents[left, node]
            term, own = self.op(a, term, out=self.outs.get(node, a if mine else None)), True
        if node not in self.outs:
            self._waiting.append((node, term, own))
        elif self.outs[node] is not term:
            self.outs[node].copy_(term)


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
