"""Longest first, each to the rank that would finish it earliest: of one step, and of many steps at once.

Costs are whole numbers in floats, at most 2^40 in a step, so sums are exact: one step alone, the same step among
many, and the same step on another machine get the same ranks. Ties go to the rank with the lower number.

With ranks of one speed a heap finds the least loaded. With few speeds there is a heap for each, with many every rank
is looked at. Many steps are worked off side by side: the longest sample of each, then the second of each, and so on,
which takes a fraction of the time of one step after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from laminar.data.cost.sample_cost import FloatArray, IntArray

EXACT = float(1 << 40)
"""What the costs of a step add up to, about: their sums are exact, and stay in order when divided by a speed."""
CLASSES = 6
"""Up to so many different speeds there is a heap for each: beyond, looking at every rank is faster (measured)."""


def whole_costs(costs: FloatArray) -> FloatArray:
    """Costs of a step (or of many, one a row) as whole numbers that add up to about `EXACT`."""
    total = costs.sum(axis=-1, keepdims=True)
    scale = np.divide(EXACT, total, out=np.zeros_like(total), where=total > 0)
    whole: FloatArray = np.rint(costs * scale)
    return whole


def longest_first(costs: FloatArray, speeds: FloatArray) -> IntArray:
    """The rank of each sample of one step; `costs` are whole numbers."""
    order = np.argsort(-costs, kind="stable")
    ranks = np.empty(len(costs), dtype=np.int64)
    kinds, kind_of = np.unique(speeds, return_inverse=True)
    sorted_costs: list[float] = costs[order].tolist()
    if len(kinds) == 1:
        found = _one_heap(sorted_costs, len(speeds))
    elif len(kinds) <= CLASSES:
        found = _heap_each(sorted_costs, [1.0 / s for s in kinds.tolist()], kind_of)
    else:
        found = _all_ranks(sorted_costs, 1.0 / speeds)
    ranks[order] = found
    return ranks


def longest_first_steps(costs: FloatArray, speeds: FloatArray) -> IntArray:
    """The same for many steps, one a row, all with the same number of samples."""
    steps, samples = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    by_turn = np.ascontiguousarray(np.take_along_axis(costs, order, axis=1).T)
    loads, row = np.zeros((steps, len(speeds))), np.arange(steps)
    found = np.empty((samples, steps), dtype=np.int64)
    equal, slowness = len(np.unique(speeds)) == 1, 1.0 / speeds
    finish = np.empty_like(loads)
    for turn in range(samples):
        if equal:
            best = loads.argmin(axis=1)
        else:
            np.add(loads, by_turn[turn][:, None], out=finish)
            np.multiply(finish, slowness, out=finish)
            best = finish.argmin(axis=1)
        loads[row, best] += by_turn[turn]
        found[turn] = best
    ranks = np.empty((steps, samples), dtype=np.int64)
    np.put_along_axis(ranks, order, found.T, axis=1)
    return ranks


def _one_heap(costs: Sequence[float], ranks: int) -> list[int]:
    heap = [(0.0, r) for r in range(ranks)]
    replace, found = heapq.heapreplace, []
    for cost in costs:
        load, rank = heap[0]
        replace(heap, (load + cost, rank))
        found.append(rank)
    return found


def _heap_each(costs: Sequence[float], slowness: Sequence[float], kind_of: IntArray) -> list[int]:
    heaps: list[list[tuple[float, int]]] = [[] for _ in slowness]
    for rank, kind in enumerate(kind_of.tolist()):
        heaps[kind].append((0.0, rank))
    pairs = list(zip(heaps, slowness, strict=True))
    replace, found = heapq.heapreplace, []
    for cost in costs:
        least, chosen = (float("inf"), -1), heaps[0]
        for heap, slow in pairs:
            load, rank = heap[0]
            finish = ((load + cost) * slow, rank)
            if finish < least:
                least, chosen = finish, heap
        load, rank = chosen[0]
        replace(chosen, (load + cost, rank))
        found.append(rank)
    return found


def _all_ranks(costs: Sequence[float], slowness: FloatArray) -> list[int]:
    loads, finish, found = np.zeros(len(slowness)), np.empty(len(slowness)), []
    for cost in costs:
        np.add(loads, cost, out=finish)
        np.multiply(finish, slowness, out=finish)
        best = int(finish.argmin())
        loads[best] += cost
        found.append(best)
    return found
