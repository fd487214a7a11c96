"""What one rank did in a step with stages: its firings and waits, between the marks of the job around them.

The actors stamp when each firing began and ended (`Actors.record`); the job marks what comes before and behind the
pipe, as in any step. A firing that had to wait for another place is `because` of the firing that filled the queue
it waited for, so a critical path runs through all places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from laminar.ir.net import Net, Queue
from laminar.ir.timeline import Span
from laminar.runtime.trace.tape import MARKS, AnnouncementKey, RankSteps, Tape

PIPE = "pipe"
"""The mark that stands for all firings of a step."""


class PipeTape(Tape):
    """Stamps of steps with stages."""

    def __init__(self, rank: int, world: int, limit: int | None) -> None:
        super().__init__(rank, world, limit)
        self._fired: dict[int, tuple[list[Span], Net]] = {}

    def fired(self, spans: Sequence[Span], net: Net) -> None:
        """The firings of the step that is being recorded, all of them done."""
        if self.active:
            self._fired[self.steps] = (list(spans), net)
            self.mark(PIPE)

    def told(self) -> list[RankSteps]:
        """The steps as spans, firings where the pipe was."""
        return [self._opened(told, *self._fired[n]) for n, told in enumerate(super().told())]

    def _opened(self, told: RankSteps, spans: list[Span], net: Net) -> RankSteps:
        at = next(i for i, s in enumerate(told.spans) if s.name == PIPE)
        pipe = told.spans[at]
        inside = [replace(s, module="") for s in spans if pipe.start <= s.start and s.end <= pipe.end]
        first = inside[0].start if inside else pipe.end
        host = replace(MARKS["host"], rank=self.rank, start=pipe.start, end=first, source="measured")
        begins = [host] if first > pipe.start else []
        out = RankSteps(
            [*told.spans[:at], *begins, *inside, *told.spans[at + 1 :]], dict(told.posts), beside=told.beside
        )
        shift = len(begins) + len(inside) - 1
        out.in_flight.update({i + shift if i > at else i: key for i, key in told.in_flight.items()})
        self._links(out, at + len(begins), inside, net)
        return out

    def _links(self, out: RankSteps, first: int, inside: Sequence[Span], net: Net) -> None:
        """Who announced what, and who waited for it."""
        crossing: Mapping[str, Queue] = {q.name: q for q in net.queues if net.crosses(q)}
        for i, span in enumerate(inside):
            name, _, k = span.name.partition(".")
            if span.kind == "wait":
                queue = next(
                    (q for q in net.reads[name] if q.name in crossing and f"queue {q.name}" in span.cause), None
                )
                if queue is not None and i + 1 < len(inside):
                    out.awaited[first + i + 1] = self._key(net, queue, k.removesuffix("/wait"))
            else:
                for queue in net.fills[name]:
                    if queue.name in crossing:
                        out.posts[self._key(net, queue, k)] = span.end

    @staticmethod
    def _key(net: Net, queue: Queue, k: str) -> AnnouncementKey:
        ranks = net.places[net.by_name[queue.producer].place].ranks
        return (PIPE, ranks, queue.name, k)
