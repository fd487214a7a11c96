"""Who fires next at a place: an order, a window, and one rank that chooses for all.

A place keeps the order of its firings. With a window of 0 that is all: every rank goes through the order, and waits
where it must. With a window a rank may take the earliest firing that is ready among those at most `window` places
ahead of the first unfinished one; firings of one actor never overtake each other, and at that place a step ends before
the next begins. Parts of a place contain collectives, so all its ranks must take the same firing: the first of them
chooses, by what is ready for itself, and tells the others, who wait until their own registers are there. They will be:
where the leader has its inputs, some rank of another place has fired, and all ranks of a place fire alike.

A rank may belong to several places, and then picks among their agendas on its own. That is safe while
places and ranks form no ring. Where they do (two places with two ranks in common: each rank could enter another one's
collective first), the places of the ring share one fixed order, taken from one imagined run of the whole net, so that
at any time the first firing that is left can go on, everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from laminar.errors import NetError
from laminar.ir.net import Firing, Net


@dataclass
class Agenda:
    """What one rank has to do at one place (or at places that share one order), step after step."""

    place: int
    order: tuple[Firing, ...]
    window: int | None = 0
    leader: int = -1
    """The rank that chooses; -1: nobody has to."""
    followers: tuple[int, ...] = ()
    """Ranks that are told, if this one chooses."""
    step: int = 0
    """Steps finished."""
    choices: int = 0
    """Firings begun since the beginning."""
    _first: int = 0
    _done: list[bool] = field(default_factory=list)
    _told: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._done = [False] * len(self.order)

    def next(self, ready: Callable[[str], bool]) -> int | None:
        """Where in the order the firing to begin now stands, if there is one."""
        if self.leader >= 0 and not self.followers:
            at = self._told.get(self.choices)
            return at if at is not None and ready(self.order[at][0]) else None
        if self.window == 0:
            return self._first if ready(self.order[self._first][0]) else None
        last = len(self.order) if self.window is None else min(len(self.order), self._first + self.window + 1)
        seen: set[str] = set()
        for at in range(self._first, last):
            name = self.order[at][0]
            if self._done[at] or name in seen:
                continue
            if ready(name):
                return at
            seen.add(name)
        return None

    def awaited(self) -> str | None:
        """The actor that this rank most wants to fire; nothing while the leader has not chosen."""
        if self.leader >= 0 and not self.followers:
            at = self._told.get(self.choices)
            return None if at is None else self.order[at][0]
        return self.order[self._first][0]

    def told(self, number: int, at: int) -> None:
        """The leader's choice number `number`."""
        self._told[number] = at

    def fired(self, at: int) -> None:
        """A firing has begun and ended."""
        self._told.pop(self.choices, None)
        self.choices += 1
        self._done[at] = True
        while self._first < len(self.order) and self._done[self._first]:
            self._first += 1
        if self._first == len(self.order):
            self._first, self.step = 0, self.step + 1
            self._done = [False] * len(self.order)


def agendas(net: Net, rank: int) -> list[Agenda]:
    """What a rank has to do, by place."""
    out = []
    tied = rings(net)
    merged: list[tuple[int, Firing]] | None = None
    for ring in tied:
        mine = {p for p in ring if rank in net.places[p].ranks}
        if mine:
            merged = merged or list(imagined(net))
            out.append(Agenda(min(mine), tuple(firing for p, firing in merged if p in mine)))
    for at, place in enumerate(net.places):
        if rank not in place.ranks or any(at in ring for ring in tied) or not net.orders[at]:
            continue
        leads = net.window != 0 and len(place.ranks) > 1
        leader = place.ranks[0] if leads else -1
        out.append(Agenda(at, net.orders[at], net.window, leader, place.ranks[1:] if leader == rank else ()))
    return sorted(out, key=lambda agenda: agenda.place)


def rings(net: Net) -> list[set[int]]:
    """Sets of places that are joined through their ranks in more than one way."""
    out: list[set[int]] = []
    left = {at for at, order in enumerate(net.orders) if order}
    while left:
        part, ranks, links = set[int](), set[int](), 0
        todo = [min(left)]
        while todo:
            at = todo.pop()
            if at in part:
                continue
            part.add(at)
            members = set(net.places[at].ranks)
            links += len(members)
            ranks |= members
            todo += [p for p in left - part if members & set(net.places[p].ranks)]
        left -= part
        if links >= len(part) + len(ranks):  # a tree has one link less than it has nodes
            out.append(part)
    return out


def imagined(net: Net) -> Iterator[tuple[int, Firing]]:
    """One run of one step of a net, one firing at a time: places by turns, each in its order."""
    full = {(q.name, c): q.filled for q in net.queues for c in q.consumers}
    todo = [deque(order) for order in net.orders]

    def free(name: str) -> bool:
        return all(max(full[q.name, c] for c in q.consumers) + q.gives <= q.registers for q in net.fills[name])

    moved = True
    while moved and any(todo):
        moved = False
        for at, order in enumerate(todo):
            while order:
                name, k = order[0]
                if not free(name) or any(full[q.name, name] < q.taken(name) for q in net.reads[name]):
                    break
                for q in net.reads[name]:
                    full[q.name, name] -= q.taken(name)
                for q in net.fills[name]:
                    for c in q.consumers:
                        full[q.name, c] += q.gives
                order.popleft()
                moved = True
                yield at, (name, k)
    if any(todo):
        stuck = ", ".join(f"{o[0][0]}.{o[0][1]} at place {p}" for p, o in enumerate(todo) if o)
        raise NetError(f"actors wait for each other: {stuck}", next="give a queue between them more registers")
