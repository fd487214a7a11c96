"""What a net can't say, and a running system could get wrong: shared registers, and ranks that act in different orders.

`lower/deadlock.py` may decide by one execution because no register belongs to two queues and because a place acts
as one. Both are promises of whoever runs the net. Here they are checked, given how it will be run.

**Shared registers.** Two queues that draw from one pool compete for its last register. If the wrong one gets it, what
the other was to carry may be the very thing that would free it: some timings finish and others don't. Stages of one
place that share a budget are the usual case: the first fills it with micro-batches that can't go on, because the later
stages have no room. So a pool is refused unless it could be divided, and `reserve` divides it.

**Collectives inside an actor.** Ranks of one place must come to them in one order. Two all-reduces that meet crosswise
raise nothing and give wrong sums; two groups that wait for each other hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from laminar.errors import NetError
from laminar.ir.net import Firing, Net, Queue
from laminar.lower.deadlock import fewest


def check_pools(net: Net, pools: Mapping[str, str], registers: Mapping[str, int]) -> None:
    """Refuse pools of registers that several queues draw from, unless each could have its own from it.

    `pools` says which pool a queue draws from, `registers` how many there are in each.
    """
    for pool, queues in _drawing(net, pools).items():
        wanted = sum(q.registers for q in queues)
        if len(queues) > 1 and registers[pool] < wanted:
            names = ", ".join(f"{q.name} ({q.registers})" for q in queues)
            raise NetError(
                f"queues share the {registers[pool]} registers of pool {pool}, so it matters who comes first",
                at=names,
                allowed=f"{wanted} registers, so that each queue has its own",
                next="`reserve` divides the pool so that the net finishes",
            )


def reserve(net: Net, pools: Mapping[str, str], registers: Mapping[str, int]) -> Net:
    """The net with each pool divided among its queues: first what every queue needs to finish, then the rest in turn.

    Where stages of one place share a budget, this keeps room for the later ones.
    """
    drawing = _drawing(net, pools)
    pooled = {q.name for queues in drawing.values() for q in queues}
    least = {q.name: max(q.filled, q.gives, *(q.taken(c) for c in q.consumers)) for q in net.queues if q.name in pooled}
    small = _with(net, least)
    needs = fewest(small, pooled)
    if needs is None:
        raise NetError("no division of these pools lets the net finish", next="ask `lower.check.refuse` about the net")
    least |= needs
    for pool, queues in drawing.items():
        left = registers[pool] - sum(least[q.name] for q in queues)
        if left < 0:
            parts = ", ".join(f"{q.name} {least[q.name]}" for q in queues)
            raise NetError(f"pool {pool} has {registers[pool]} registers, its queues need {parts}")
        while left and (open_ := [q for q in queues if least[q.name] < q.registers]):
            for q in open_[:left]:
                least[q.name] += 1
                left -= 1
    return _with(net, least)


def _drawing(net: Net, pools: Mapping[str, str]) -> dict[str, list[Queue]]:
    out: dict[str, list[Queue]] = {}
    for q in net.queues:
        if q.name in pools:
            out.setdefault(pools[q.name], []).append(q)
    return out


def _with(net: Net, registers: Mapping[str, int]) -> Net:
    queues = tuple(replace(q, registers=registers.get(q.name, q.registers)) for q in net.queues)
    return replace(net, queues=queues)


Call = tuple[tuple[int, ...], tuple[str, int, int]]
"""The ranks of a collective, and which it is: of which firing, and which of those in it."""
Groups = Mapping[str, Sequence[tuple[int, ...]]]
"""Actor -> for each collective inside it, in order, the ranks that take part."""


def check_ranks(net: Net, groups: Groups, orders: Mapping[int, Sequence[Firing]] | None = None) -> None:
    """Refuse ranks whose collectives would not meet as they should.

    `orders` gives what each rank really does; without it, each does what its place does. All members of a group must
    come to its collectives in the same sequence, and groups must not wait for each other in a ring.
    """
    acts = dict(orders) if orders is not None else _acts(net, groups)
    calls: dict[int, list[Call]] = {}
    for rank, order in acts.items():
        inside = [(ranks, (name, k, i)) for name, k in order for i, ranks in enumerate(groups.get(name, ()))]
        calls[rank] = [call for call in inside if rank in call[0]]
    for ranks in dict.fromkeys(group for made in calls.values() for group, _ in made):
        lists = {rank: [call for group, call in calls.get(rank, []) if group == ranks] for rank in ranks}
        model = ranks[0]
        for rank in ranks[1:]:
            if lists[rank] != lists[model]:
                pairs = zip(lists[model] + [("nothing", 0, 0)], lists[rank] + [("nothing", 0, 0)], strict=False)
                at, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
                raise NetError(
                    f"ranks {model} and {rank} act in different orders: {_call(a)} would meet {_call(b)}",
                    at=f"collective {at} of ranks {', '.join(map(str, ranks))}",
                    next="ranks of one place must follow one order: the leader's",
                )
    _meet(calls)


def _acts(net: Net, groups: Groups) -> dict[int, Sequence[Firing]]:
    out: dict[int, Sequence[Firing]] = {}
    for p, (place, order) in enumerate(zip(net.places, net.orders, strict=True)):
        if not any(groups.get(name) for name, _ in order):
            continue
        for rank in place.ranks:
            if rank in out:
                raise NetError(
                    f"rank {rank} is at place {p} and at another, and both have collectives inside",
                    next="say in which order it acts, or make them one place",
                )
            out[rank] = order
    return out


def _call(call: tuple[str, int, int]) -> str:
    return f"{call[0]}.{call[1]}" if call[0] != "nothing" else "nothing"


def _meet(calls: Mapping[int, Sequence[Call]]) -> None:
    """Play the collectives: one is over when all its ranks have come to it."""
    at = dict.fromkeys(calls, 0)
    todo = list(calls)
    while todo:
        rank = todo.pop()
        while at[rank] < len(calls[rank]):
            call = calls[rank][at[rank]]
            if any(at[r] >= len(calls[r]) or calls[r][at[r]] != call for r in call[0]):
                break
            for r in call[0]:
                at[r] += 1
            todo += [r for r in call[0] if r != rank]
    stuck = {rank: calls[rank][n] for rank, n in at.items() if n < len(calls[rank])}
    if stuck:
        who = "; ".join(f"rank {r} is in {_call(call)} with {', '.join(map(str, g))}" for r, (g, call) in stuck.items())
        raise NetError("ranks wait for each other in different collectives", at=who, next="give all ranks one order")
