"""One timeline from what every rank has told: clocks aligned, the median step chosen, waits given their reasons.

Ranks of one machine read one clock. For other machines, the first rank of each plays ping-pong with rank 0: the
other clock is read between two readings of one's own, so the difference is known to half of the round trip,
and the shortest of several round trips is kept.

Of the steps recorded, the one of median duration becomes the timeline; `meta` has the durations of all
(`steps_ns`), and for every name the least, median and largest time it took over steps and ranks (`spread_ns`).
A step lasts from when the first rank begins it to when the last has ended it.

A span that could begin only when other ranks had announced something is `because` of what the last of them did
just before. Where a transfer runs in the background, a rank in `finish` can't tell a late partner from a slow
transfer, but the timeline can: until the last rank's `start` had ended, nothing could have arrived. Where something
had (a rank was put to sleep before it could stamp the end of its `start`), the beginning of that `start` counts.
"""

from __future__ import annotations

import os
import platform
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laminar.errors import LaminarError
from laminar.ir.timeline import Span, Timeline
from laminar.runtime.trace.tape import LEAST_SPAN_NS, MARKS, AnnouncementKey, RankSteps, now

PING_PONG_ROUNDS = 16
"""How often to ask another machine for its time."""
GatherObjects = Callable[[Any], list[Any]]
"""Everyone's value, by rank; every rank must call it."""


@dataclass(frozen=True)
class Clock:
    """How a rank's clock differs from rank 0's: subtract `ahead_ns` from what it shows."""

    ahead_ns: int = 0
    within_ns: int = 0
    """The truth is at most so far away."""


def clock_id() -> str:
    """What processes that read the same clock have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return platform.node()


def clocks(gather: GatherObjects, rank: int, device: torch.device, here: str | None = None) -> list[Clock]:
    """Every rank's clock against rank 0's. `here` names the machine whose clock this rank reads."""
    machines = gather(here or clock_id())
    mine = Clock()
    if len(set(machines)) > 1 and "gloo" in str(dist.get_backend()):
        device = torch.device("cpu")  # Gloo sends nothing else
    for name in dict.fromkeys(machines):
        first = machines.index(name)
        if first == 0:
            continue
        if rank == first:
            mine = _asks(device)
        elif rank == 0:
            _answers(first, device)
    measured = gather(mine)
    return [measured[machines.index(name)] for name in machines]


def _asks(device: torch.device) -> Clock:
    """Ping-pong with rank 0: the reading whose round trip was shortest."""
    note, best = torch.zeros(1, dtype=torch.int64, device=device), None
    for _ in range(PING_PONG_ROUNDS):
        sent = now()
        dist.send(note, 0)
        dist.recv(note, 0)
        theirs, back = int(note), now()
        found = Clock((sent + back) // 2 - theirs, (back - sent) // 2)
        best = found if best is None or found.within_ns < best.within_ns else best
    assert best is not None
    return best


def _answers(other: int, device: torch.device) -> None:
    note = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(PING_PONG_ROUNDS):
        dist.recv(note, other)
        int(note)  # on a GPU, wait until it is there
        dist.send(torch.full_like(note, now()), other)


def gathered_timeline(
    told: Sequence[RankSteps], gather: GatherObjects, rank: int, device: torch.device, meta: dict[str, Any]
) -> Timeline:
    """The timeline of all ranks, the same on each, from this rank's steps; every rank must call this."""
    known = clocks(gather, rank, device)
    everyone = gather([(t.start, t.end, totals(t.spans)) for t in told])
    steps = min(map(len, everyone))
    if steps == 0:
        raise LaminarError("no step was recorded", next="call job.step inside `with job.timeline():`")
    shifted = [[(a - c.ahead_ns, b - c.ahead_ns) for a, b, _ in each] for each, c in zip(everyone, known, strict=True)]
    steps_ns = [max(each[s][1] for each in shifted) - min(each[s][0] for each in shifted) for s in range(steps)]
    chosen = sorted(range(steps), key=lambda s: steps_ns[s])[(steps - 1) // 2]
    meta = {
        **meta,
        "steps_ns": steps_ns,
        "step": chosen,
        "spread_ns": least_median_largest([each[s][2] for each in everyone for s in range(steps)]),
    }
    if any(c.within_ns for c in known):
        meta["clocks_within_ns"] = [c.within_ns for c in known]
    return joined_timeline(gather(told[chosen]), known, meta)


def totals(spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds by name."""
    out: dict[str, int] = {}
    for s in spans:
        out[s.name] = out.get(s.name, 0) + s.end - s.start
    return out


def least_median_largest(each: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    """For every name the least, median and largest of its times."""
    names = dict.fromkeys(n for one in each for n in one)
    found = {n: sorted(one.get(n, 0) for one in each) for n in names}
    return {n: [ts[0], int(statistics.median(ts)), ts[-1]] for n, ts in found.items()}


def joined_timeline(told: Sequence[RankSteps], known: Sequence[Clock], meta: dict[str, Any]) -> Timeline:
    """One step of all ranks as a timeline that begins at 0."""
    zero = min(t.start - c.ahead_ns for t, c in zip(told, known, strict=True))
    moved = [_moved(t, zero + c.ahead_ns) for t, c in zip(told, known, strict=True)]
    _disprove(moved)
    rows = [list(_cut(r, moved)) for r in range(len(moved))]
    first, offsets = 0, []
    for each in rows:
        offsets.append(first)
        first += len(each)
    starts = [[s.start for s, _ in each] for each in rows]
    spans: list[Span] = []
    for r, each in enumerate(rows):
        for k, (span, key) in enumerate(each):
            because = offsets[r] + k - 1 if k else -1
            if key is not None and k:
                who, when = _last(key, r, moved)
                if when > each[k - 1][0].start:  # else it had been announced before anyone looked
                    because = offsets[who] + max(bisect_left(starts[who], when) - 1, 0)
            spans.append(replace(span, because=because))
    spans += [span for each in moved for span in each.beside]
    ranks = len(told)
    return Timeline(
        kind="measured",
        ranks=ranks,
        spans=tuple(spans),
        stands_for={r: (r,) for r in range(ranks)},
        memory={},
        meta=meta,
    )


def _moved(told: RankSteps, by: int) -> RankSteps:
    """By the common clock; a rank that began after the first one has a span that says so."""
    spans = [replace(s, start=s.start - by, end=s.end - by) for s in told.spans]
    late, shift = spans[0].start, 0
    if late >= LEAST_SPAN_NS:
        spans.insert(0, replace(MARKS["late"], rank=spans[0].rank, end=late, source="measured"))
        shift = 1
    return RankSteps(
        spans,
        {k: at - by for k, at in told.posts.items()},
        {i + shift: k for i, k in told.awaited.items()},
        {i + shift: k for i, k in told.in_flight.items()},
        {k: at - by for k, at in told.begun.items()},
        [replace(s, start=s.start - by, end=s.end - by) for s in told.beside],
    )


def _disprove(told: Sequence[RankSteps]) -> None:
    """What had arrived before its sender says it was announced was announced when the sender began to."""
    for rank, mine in enumerate(told):
        for i, key in mine.in_flight.items():
            members: Any = key[1]
            for other in (told[r] for r in members if r != rank):
                if key in other.begun and other.posts[key] >= mine.spans[i].end:
                    other.posts[key] = other.begun[key]


def _last(key: AnnouncementKey, rank: int, told: Sequence[RankSteps]) -> tuple[int, int]:
    """Which of the other ranks of a group announced this last, and when; this rank at no time if none did."""
    members: Any = key[1]
    found = [(told[r].posts[key], r) for r in members if r != rank and key in told[r].posts]
    when, who = max(found, default=(-1, rank))
    return who, when


def _cut(rank: int, told: Sequence[RankSteps]) -> Iterator[tuple[Span, AnnouncementKey | None]]:
    """A rank's spans and what each had to wait for, finishing spans cut where the last partner had started."""
    mine = told[rank]
    for i, span in enumerate(mine.spans):
        key = mine.in_flight.get(i)
        if key is None:
            yield span, mine.awaited.get(i)
            continue
        _, when = _last(key, rank, told)
        until = min(when, span.end)
        if until - span.start < LEAST_SPAN_NS:
            yield span, None
            continue
        name = span.name.removesuffix("/finish")
        yield replace(span, name=f"{name}/wait", kind="wait", end=until, bytes=0), None
        if span.end > until:
            yield replace(span, start=until), key
