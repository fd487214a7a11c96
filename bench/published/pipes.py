"""A pipeline's step in one pass over its orders, where places keep them to the letter.

`cost.pipeline.execute` runs any net event by event. With a window of 0 and stashes as deep as the order makes them,
nothing is left to decide: a firing begins when the one before it at its place has ended and what it reads has come.
That is one line of arithmetic per firing, and from some micro-batch on every round is like the one before, so that
long steps follow from two shorter ones. `tests/test_published.py` holds both against `execute`.
"""

from __future__ import annotations

from functools import lru_cache

from laminar.lower.stages.pipeline_net import Layout, Stage, chain
from laminar.lower.stages.schedules import interleaved, one_f_one_b

SETTLED = 2
"""Rounds of as many micro-batches as there are places, after which a pipe repeats itself."""


def pipe_s(
    forward: list[float], backward: list[float], places: int, micro_batches: int, send_s: float
) -> tuple[float, list[float]]:
    """Seconds from the first firing to the last, and when each place has done its last, by stage times in a chain.

    Stage s runs at place s % places; `send_s` passes between the end of a firing and what it sends arriving.
    """
    if len(forward) > places and micro_batches % places:
        # Interleaved stages want whole rounds: what the last one lacks, every place works less.
        whole = -(-micro_batches // places) * places
        seconds, ends = pipe_s(forward, backward, places, whole, send_s)
        less = (whole - micro_batches) * max(sum(forward[p::places]) + sum(backward[p::places]) for p in range(places))
        return seconds - less, [max(0.0, end - less) for end in ends]
    few = (SETTLED + 1) * places
    if micro_batches <= few + places:
        return _passed(forward, backward, places, micro_batches, send_s)
    few += (micro_batches - few) % places
    first, ends = _passed(forward, backward, places, few, send_s)
    second, later = _passed(forward, backward, places, few + places, send_s)
    rounds = (micro_batches - few) // places
    return first + rounds * (second - first), [a + rounds * (b - a) for a, b in zip(ends, later, strict=True)]


def _passed(
    forward: list[float], backward: list[float], places: int, micro_batches: int, send_s: float
) -> tuple[float, list[float]]:
    stages = len(forward)
    listed = _order(stages, places, micro_batches)
    sent = [[-1.0] * micro_batches for _ in range(2 * stages)]
    """By part (backward ones behind) and micro-batch, when what it sends has arrived; negative: not yet."""
    free = [0.0] * places
    at = [0] * places
    length = [len(order) for order in listed]
    waiting = list(range(places))
    while waiting:
        again = []
        for p in waiting:
            order, k, now = listed[p], at[p], free[p]
            while k < length[p]:
                back, s, m = order[k]
                if back:
                    before = sent[s][m] if s == stages - 1 else sent[stages + s + 1][m]
                    took = backward[s]
                elif s:
                    before, took = sent[s - 1][m], forward[s]
                else:
                    before, took = 0.0, forward[s]
                if before < 0:
                    break
                now = (before if before > now else now) + took
                last = s == 0 if back else s == stages - 1
                sent[stages * back + s][m] = now if last else now + send_s
                k += 1
            if k < length[p]:
                again.append(p)
            at[p], free[p] = k, now
        waiting = again
    return max(free), free


@lru_cache(maxsize=256)
def _order(stages: int, places: int, micro_batches: int) -> list[list[tuple[bool, int, int]]]:
    layout = layout_of(stages, places, micro_batches)
    orders = interleaved(layout) if stages > places else one_f_one_b(layout)
    return [[(name[0] == "B", int(name[1:]), k) for name, k in order if name[0] in "FB"] for order in orders]


def layout_of(stages: int, places: int, micro_batches: int) -> Layout:
    """A chain of stages dealt out to places in turn."""
    return chain([Stage(place=s % places) for s in range(stages)], micro_batches)
