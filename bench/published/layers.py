"""A step layer by layer, simulated: what gathers of weights and reductions of gradients hide behind.

Layers are alike, so from some layer on each further one costs the same, and many follow from a few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from laminar.cost.sim.simulate import simulate
from laminar.cost.sim.tasks import Drag, Lane, Load, Task

SLOWED = Drag.fractions(1 / 1.1256, 1.0)
"""Compute beside a transfer: Galvatron's measured overlap coefficient."""
FOLD = 8
"""Layers after which all further ones cost the same."""


def folded(layers: int, run: Callable[[int], float]) -> float:
    """`run(layers)`, from two runs with fewer layers where there are many."""
    if layers <= FOLD + 2:
        return run(layers)
    first, second = run(FOLD), run(FOLD + 1)
    return first + (layers - FOLD) * (second - first)


class _List:
    """Tasks in three lanes: compute, gathers, reductions; both kinds of transfer share a link."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, lane: int, seconds: float, *after: int) -> int:
        links = (0,) if lane else ()
        name = str(len(self.tasks))
        self.tasks.append(Task(name, (lane,), round(1e9 * seconds), tuple(a for a in after if a >= 0), links))
        return len(self.tasks) - 1

    def seconds(self) -> float:
        lanes = (Lane(0, "compute"), Lane(0, "communication:gather"), Lane(0, "communication:reduce"))
        return simulate(Load(lanes, tuple(self.tasks), 1, SLOWED)).step / 1e9


@lru_cache(maxsize=1 << 14)
def reduced_s(
    ahead: float, forward: float, backward: float, behind: float, layers: int, reduce_s: float, end_s: float
) -> float:
    """The last micro-batch, its gradients reduced layer by layer while backward goes on."""

    def run(layers: int) -> float:
        out = _List()
        out.add(0, ahead + layers * forward)
        for _ in range(layers):
            done = out.add(0, backward)
            out.add(2, reduce_s, done)
        out.add(2, end_s, out.add(0, behind))
        return out.seconds()

    return folded(layers, run)


@lru_cache(maxsize=1 << 14)
def in_pieces_s(
    forward: tuple[float, float, float],
    backward: tuple[float, float, float],
    layers: int,
    micro_batches: int,
    gather_s: float,
    reduce_s: float,
    end_gather_s: float,
    end_reduce_s: float,
) -> float:
    """Micro-batches with weights in shards: one layer's weights on their way while the one before is used."""

    def run(layers: int) -> float:
        out = _List()
        done = [-1, -1]
        for _ in range(micro_batches):
            for name, gather, work, reduce in (
                [("F", end_gather_s, forward[0], 0.0)]
                + [("F", gather_s, forward[1], 0.0)] * layers
                + [("H", end_gather_s, forward[2] + backward[2], end_reduce_s)]
                + [("B", gather_s, backward[1], reduce_s)] * layers
                + [("B", 0.0, backward[0], end_reduce_s)]
            ):
                got = out.add(1, gather, done[-2]) if gather else -1
                done.append(out.add(0, work, got))
                if name != "F" and reduce:
                    out.add(2, reduce, done[-1])
        return out.seconds()

    return folded(layers, run)
