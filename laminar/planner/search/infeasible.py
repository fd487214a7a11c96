"""A request that nothing fulfils: which limit binds, and the cheapest way out.

Four things can be given way to: memory, a pin, a dimension that was not allowed, the batch. Each pin is lifted alone,
each dimension allowed alone, and the search done again for a short while. Of a batch's equal parts the largest is
looked for that fits. How many bytes more would do is tried out between
what was allowed and what the fastest plan without a limit takes, beginning with what the search itself says was the
leanest it saw. All of this is bounded by a budget; what was not tried is not told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from laminar.errors import NoPlanFits, PlanError
from laminar.ir.graph import Graph
from laminar.placement.micro_batch import micro
from laminar.planner.estimate.candidates import Found
from laminar.planner.report.words import sized
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import divisors
from laminar.planner.space.request import DIMENSIONS, Request
from laminar.planner.tuning import MEMORY_FOUND, MEMORY_PROBES, WAY_OUT_S, WAYS_OUT_S
from laminar.rules.samples import samples_of

UNLIMITED = 1e30


@dataclass(frozen=True)
class WayOut:
    """Something to give way to, and what comes of it."""

    text: str
    step_s: float
    peak_bytes: int
    binds: str = ""
    """What stands in the way, where it is a pin or a dimension that is not allowed."""

    def __str__(self) -> str:
        return f"{self.text} ({self.step_s * 1e3:.4g} ms, {sized(self.peak_bytes)})"


def relaxed(graph: Graph, request: Request, error: PlanError) -> PlanError:
    """The error of a search that found nothing, with what binds and the ways out of it."""
    began = time.process_time()

    def tried(other: Request, graph: Graph = graph) -> Found | None:
        if time.process_time() - began > WAYS_OUT_S:
            return None
        try:
            return find(graph, replace(other, budget_s=min(request.budget_s, WAY_OUT_S)))
        except PlanError:
            return None

    free = tried(replace(request, memory_bytes=UNLIMITED, margin=None))
    ways = []
    for text, binds, other in _lifted(request):
        found = tried(other)
        if found is not None:
            ways.append(WayOut(text, found.certificate.step_s, found.finals[0].peak_bytes, binds))
    ways.sort(key=lambda w: w.step_s)
    leanest_bytes = error.least_bytes if isinstance(error, NoPlanFits) else math.inf
    least = _least(request, free, tried, leanest_bytes) if free is not None else None
    said = [str(w) for w in ways]
    if least is not None:
        said.insert(0, str(least))
    if free is None and not ways:
        return error
    if free is None:
        what = f"no plan does all that is asked: {_asked(request)}"
        return PlanError(what, binds=_binds(ways), next="; or ".join(said))
    needs = least.peak_bytes if least else min(f.peak_bytes for f in free.finals)
    what = (
        f"no plan fits: the leanest found needs {sized(needs)} on its fullest rank, "
        f"{sized(request.room_bytes)} are allowed"
    )
    also = f"memory; with {_binds(ways)} memory would do" if ways else "memory"
    more = "; or ".join(said) or f"allow memory_bytes={needs:.3g}"
    smaller = _smaller(graph, request, tried) or "a smaller batch"
    return NoPlanFits(what, least_bytes=needs, binds=also, next=f"{more}; or take more devices, or {smaller}")


def _lifted(request: Request) -> Iterator[tuple[str, str, Request]]:
    """The request with one pin less, or one dimension more: what to do, what binds, and the request then."""
    for name, value in request.pin.items():
        rest = {k: v for k, v in request.pin.items() if k != name}
        yield f"lift the pin {name}={value}", f"no pin {name}={value}", replace(request, pin=rest)
    for name, placement in request.place.items():
        rest_placed = {k: v for k, v in request.place.items() if k != name}
        yield f"lift the pin {name}={placement}", f"no pin {name}={placement}", replace(request, place=rest_placed)
    for name in DIMENSIONS:
        if not request.allows(name):
            yield f'allow "{name}"', f'"{name}"', replace(request, only=(*request.only, name))


def _smaller(graph: Graph, request: Request, tried: Callable[[Request, Graph], Found | None]) -> str:
    """The largest equal part of the batch that fits, as far as was tried: what fits is taken to fit in smaller ones."""
    samples = samples_of(graph)
    parts, best = divisors(samples)[1:], ""
    while parts:
        middle = (len(parts) - 1) // 2
        try:
            found = tried(request, micro(graph, parts[middle]))
        except PlanError:  # samples that need each other
            found = None
        if found is None:
            parts = parts[middle + 1 :]
            continue
        fits = WayOut("", found.certificate.step_s, found.finals[0].peak_bytes)
        best = f'a batch of {samples // parts[middle]} instead of {samples} samples, batch="free"{fits}'
        parts = parts[:middle]
    return best


def _least(
    request: Request, free: Found, tried: Callable[[Request], Found | None], leanest_bytes: float
) -> WayOut | None:
    """The fewest bytes that do, as far as was tried."""
    low, best = request.room_bytes, min(free.finals, key=lambda f: f.peak_bytes)
    high, step_s = float(best.peak_bytes), best.seconds
    if high <= low:
        return None
    probe = MEMORY_FOUND * leanest_bytes
    for _ in range(MEMORY_PROBES):
        if not low < probe < high:
            probe = math.sqrt(low * high)
        if high / low < MEMORY_FOUND:
            break
        found = tried(replace(request, memory_bytes=probe, margin=None))
        if found is None:
            low = probe
        else:
            leanest = min(found.finals, key=lambda f: f.peak_bytes)
            high, step_s = float(leanest.peak_bytes), leanest.seconds
            if probe <= MEMORY_FOUND * leanest_bytes:
                break  # what the search saw is what there is
    return WayOut(f"allow memory_bytes={math.ceil(high / 1e3) * 1e3:.6g}", step_s, round(high))


def _binds(ways: list[WayOut]) -> str:
    return " or ".join(way.binds for way in ways)


def _asked(request: Request) -> str:
    pins = ", ".join(f"{k}={v}" for k, v in {**request.pin, **request.place}.items()) or "no pins"
    limit = f"; {sized(request.memory_bytes)}" if request.memory_bytes is not None else ""
    return f"{request.cluster.devices} devices, {pins}; only {', '.join(request.only)}{limit}"
