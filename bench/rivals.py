"""Other ways to deal out a batch of samples: torch's order, Flatflow's scheduler, Karmarkar-Karp, longest first.

Each takes the costs of a global batch and a number of ranks and gives the samples of each rank. Flatflow's own
function is called where the package is found (`pip install --no-deps --target FOLDER flatflow flatbuffers==25.12.19`,
then `--flatflow FOLDER`); `equal_counts` does what its stable mode is described to do, for machines that have nothing
but torch: ranks get equally many samples, by balanced largest differencing on their tokens.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

Parts = list[list[int]]
"""The samples of each rank, by their place in the batch."""


def torch_order(samples: int, ranks: int) -> Parts:
    """What `DistributedSampler` gives: every rank-th sample."""
    return [list(range(rank, samples, ranks)) for rank in range(ranks)]


def longest_first(costs: Sequence[float], ranks: int) -> Parts:
    """Longest first, to the rank with least: LPT."""
    heap, parts = [(0.0, r) for r in range(ranks)], [[] for _ in range(ranks)]
    for sample in sorted(range(len(costs)), key=lambda s: -costs[s]):
        load, rank = heapq.heappop(heap)
        parts[rank].append(sample)
        heapq.heappush(heap, (load + costs[sample], rank))
    return parts


def karmarkar_karp(costs: Sequence[float], ranks: int) -> Parts:
    """The largest differencing method for any number of ranks: the two worst partitions are joined, large to small."""
    number = count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for sample, cost in enumerate(costs):
        sums: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(ranks - 1)]
        heap.append((-cost, next(number), [*sums, (cost, [sample])]))
    heapq.heapify(heap)
    return [samples for _, samples in _joined(heap, number)]


def equal_counts(costs: Sequence[float], ranks: int) -> Parts:
    """Balanced largest differencing: as many samples for each rank, or one less where they don't divide."""
    order = sorted(range(len(costs)), key=lambda s: -costs[s])
    order += [-1] * (-len(order) % ranks)  # nobody's sample, which costs nothing
    number = count()
    heap = []
    for at in range(0, len(order), ranks):
        sums = sorted(((costs[s] if s >= 0 else 0.0), [s]) for s in order[at : at + ranks])
        heap.append((sums[0][0] - sums[-1][0], next(number), sums))
    heapq.heapify(heap)
    return [[s for s in samples if s >= 0] for _, samples in _joined(heap, number)]


def _joined(heap: list[Any], number: Any) -> list[tuple[float, list[int]]]:
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)), key=lambda pair: pair[0]
        )
        heapq.heappush(heap, (sums[0][0] - sums[-1][0], next(number), sums))
    return list(heap[0][2]) if heap else []


Schedule = Callable[[NDArray[np.int64], int, int, int, bool], list[list[list[int]]]]


def flatflow(folder: str, linear: int, square: int) -> Schedule:
    """Flatflow's own scheduler for a cost of `linear * n + square * n^2`: the samples of each rank in each step."""
    sys.path.insert(0, folder)
    import flatbuffers
    from flatflow import ffi
    from flatflow.ops import graph_generated as g
    from flatflow.ops.operator_generated import Operator
    from flatflow.ops.scalar_type_generated import ScalarType

    builder = flatbuffers.Builder()

    def tensor(*shape: tuple[int, int]) -> int:
        g.TensorMetadataStartShapeVector(builder, len(shape))
        for size in reversed(shape):
            g.CreateSymInt(builder, size)
        sizes = builder.EndVector()
        g.TensorMetadataStart(builder)
        g.TensorMetadataAddDtype(builder, ScalarType.BFLOAT16)
        g.TensorMetadataAddShape(builder, sizes)
        return int(g.TensorMetadataEnd(builder))

    def product(rows: tuple[int, int], inner: tuple[int, int], columns: tuple[int, int]) -> int:
        operands = [tensor(rows, inner), tensor(inner, columns)]
        g.NodeStartArgsVector(builder, 2)
        for operand in reversed(operands):
            builder.PrependUOffsetTRelative(operand)
        args, made = builder.EndVector(), tensor(rows, columns)
        g.NodeStart(builder)
        g.NodeAddTarget(builder, Operator.MM)
        g.NodeAddArgs(builder, args)
        g.NodeAddMeta(builder, made)
        return int(g.NodeEnd(builder))

    length, one = (0, 1), (1, 0)  # a size is (constant, times the length)
    nodes = [product(length, (linear, 0), one), product(length, (square, 0), length)]
    g.GraphStartNodesVector(builder, len(nodes))
    for node in reversed(nodes):
        builder.PrependUOffsetTRelative(node)
    whole = builder.EndVector()
    g.GraphStart(builder)
    g.GraphAddNodes(builder, whole)
    builder.Finish(g.GraphEnd(builder))
    graph = bytes(builder.Output())

    def schedule(lengths: NDArray[np.int64], ranks: int, batch: int, micro: int, stable: bool) -> list[list[list[int]]]:
        function = ffi.sched if stable else ffi.sched_unstable
        numbers = np.arange(len(lengths), dtype=np.uintp)
        each = [
            np.asarray(
                function(numbers.copy(), lengths.astype(np.int64), graph, 1, 1, ranks, r, batch, micro, "joint")
            ).reshape(-1, batch // ranks)
            for r in range(ranks)
        ]
        return [[each[r][step].tolist() for r in range(ranks)] for step in range(len(each[0]))]

    return schedule
