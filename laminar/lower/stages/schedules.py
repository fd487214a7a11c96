"""Who does what when: orders for the firings of a pipeline, and the registers they need.

A schedule is an order per place. With a window of 0 it is kept to the letter; with a larger one it is a list of
priorities: whatever stands first and is ready goes.

    gpipe           all forwards, then all backwards                           stash: all micro-batches
    one_f_one_b     as many forwards as the stash holds, then in turns         stash: the depth to the loss
    interleaved     stage c at place c % places, micro-batches in rounds       stash: more; bubble: 1/chunks
    zero_bubble     weight parts wait until there is nothing better to do      stash: the depth to the loss
    ..._level       the same                                                   stash: the depth of the first stage
    backward_first  gradients, then activations, then weight parts             a list of priorities only

The depth of a stage is the number of stages from it to the loss (`lower/stages/pipeline_net.py`). Stashes are as deep
as the order makes them; a queue between stages has one register more than their depths are apart, so that the next can
be made while the last is read, or what is under way if all parts take equally long, where that is more.

`stash` multiplies the depth of stashes and of queues between stages. With 1 a window is of no use: the one thing a
place could then do out of turn is a backward before a forward that is late, which makes the stages behind it wait. With
2 and a window of 2, a pipe whose stage times vary loses far less: most of the gain comes from running ahead as far as
the stash allows, the rest from the window. (Lognormal times, sigma 0.5, 16 to 32 micro-batches, simulated: against 1F1B
with stash 1 steps are 1.11 to 1.13 times as fast with 2 stages, 1.14 to 1.19 with 4, 1.13 to 1.20 with 8.)
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product

from laminar.cost.sim.pipeline import execute
from laminar.errors import NetError
from laminar.ir.mesh import Place
from laminar.ir.net import Net
from laminar.lower.stages.pipeline_net import Layout, Orders, build, dummy_places

Item = tuple[str, int, int]
"""Part of a stage (`F`, `B` or `W`), stage, micro-batch."""


def gpipe(layout: Layout, stash: float = 1.0) -> Orders:
    """All forwards, then all backwards, the latter from the last stage of a place to its first."""
    del stash  # all micro-batches are stashed anyway
    order: list[list[Item]] = [[] for _ in range(layout.places)]
    for s, stage in enumerate(layout.stages):
        order[stage.place] += [("F", s, k) for k in range(layout.micro_batches)]
    for s, stage in reversed(list(enumerate(layout.stages))):
        order[stage.place] += [(part, s, k) for k in range(layout.micro_batches) for part in "BW"]
    return _orders(layout, order)


def one_f_one_b(layout: Layout, stash: float = 1.0) -> Orders:
    """A stage of depth d runs d forwards (times `stash`), then backwards and forwards in turns.

    Where a place has several stages, their turns are those of an execution with equal times.
    """
    if layout.shared:
        return _listed(layout, _forward_first, stash)
    order: list[list[Item]] = [[] for _ in range(layout.places)]
    for s, stage in enumerate(layout.stages):
        ahead = min(math.ceil(stash * layout.depth[s]), layout.micro_batches)
        items: list[Item] = [("F", s, k) for k in range(ahead)]
        for k in range(layout.micro_batches):
            items += [("B", s, k), ("W", s, k)]
            if k + ahead < layout.micro_batches:
                items.append(("F", s, k + ahead))
        order[stage.place] = items
    return _orders(layout, order)


def interleaved(layout: Layout, stash: float = 1.0) -> Orders:
    """Virtual stages: a chain of C stages, stage c at place c % places, micro-batches in rounds of `places`.

    A place runs a round through its first stage, then through its second, and so on; backwards likewise from its
    last stage. The pipe fills in steps of one stage, not of all stages of a place: the bubble is shorter by as much.
    """
    places, chunks = layout.places, len(layout.stages) // layout.places
    if any(stage.place != s % places for s, stage in enumerate(layout.stages)) or len(layout.stages) % places:
        raise NetError(
            f"{len(layout.stages)} stages at {places} places are not interleaved",
            next="put stage c at place c % places, as many stages at each",
        )
    if layout.micro_batches % places:  # the last round would be shorter, and its order would contradict itself
        return _listed(layout, _in_rounds, stash)
    rounds = [range(k, k + places) for k in range(0, layout.micro_batches, places)]
    more = math.ceil((stash - 1) * chunks * places)  # the same at all places, or their orders would contradict
    order: list[list[Item]] = []
    for p in range(places):
        forward: list[Item] = [("F", c * places + p, k) for r in rounds for c in range(chunks) for k in r]
        backward: list[Item] = [("B", c * places + p, k) for r in rounds for c in reversed(range(chunks)) for k in r]
        ahead = min(2 * (places - p - 1) + (chunks - 1) * places + 1 + more, len(forward))
        items = forward[:ahead]
        for n, (_, s, k) in enumerate(backward):
            items += [("B", s, k), ("W", s, k)]
            items += forward[ahead + n : ahead + n + 1]
        order.append(items)
    return _orders(layout, order)


def zero_bubble(layout: Layout, stash: float = 1.0) -> Orders:
    """Weight parts fill what would be bubbles: they wait until the stash is full or nothing else is there to do."""
    if not layout.apart:
        raise NetError("zero_bubble needs gradients of inputs and of weights apart", next="Layout(apart=True)")
    return _listed(layout, _forward_first, stash)


def zero_bubble_level(layout: Layout, stash: float = 1.0) -> Orders:
    """`zero_bubble` in which all stages may hold as much as the deepest: the fullest place is no fuller, others are."""
    if not layout.apart:
        return zero_bubble(layout)  # which refuses
    return _listed(layout, _forward_first, stash, max(layout.depth))


def backward_first(layout: Layout, stash: float = 1.0) -> Orders:
    """Priorities for a window: gradients, then activations, then weight parts, each in the order of micro-batches."""
    del stash
    return by_priority(layout, _backward_first)


Priority = Callable[[Layout, Item], tuple[int, ...]]
"""What comes first has the smaller value."""


def _forward_first(layout: Layout, item: Item) -> tuple[int, ...]:
    """As far ahead as stashes allow, nearest to the loss first: what the stages behind wait for is made early."""
    part, s, k = item
    return ("FBW".index(part), k if part != "F" else 0, layout.depth[s], k)


def _in_rounds(layout: Layout, item: Item) -> tuple[int, ...]:
    """As far ahead as stashes allow, a round of micro-batches through each stage of a place in turn."""
    part, s, k = item
    return ("FBW".index(part), k // layout.places, layout.depth[s] * (1 if part == "B" else -1), k)


def _backward_first(layout: Layout, item: Item) -> tuple[int, ...]:
    part, s, k = item
    return ("BFW".index(part), k if part != "F" else 0, layout.depth[s], k)


def by_priority(layout: Layout, rule: Priority) -> Orders:
    """All firings of a place sorted by a rule: an order for windows, hardly one to keep to the letter."""
    order: list[list[Item]] = [[] for _ in range(layout.places)]
    for s, stage in enumerate(layout.stages):
        order[stage.place] += [(part, s, k) for part in "FBW" for k in range(layout.micro_batches)]
    return _orders(layout, [sorted(items, key=lambda item: rule(layout, item)) for items in order])


SCHEDULE_ORDERS: dict[str, Callable[[Layout, float], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-level": zero_bubble_level,
    "backward-first": backward_first,
}


def _listed(layout: Layout, rule: Priority, stash: float, waiting: int = 0) -> Orders:
    """How places act if whoever is ready goes, all parts take equally long, and stashes are as deep as their stages."""
    orders = by_priority(layout, rule)
    net = build(layout, dummy_places(layout.places), orders, None, _by_depth(layout, stash, waiting))
    ran = execute(net, _equal(net), steps=1)
    return tuple(ran.order(p) for p in range(layout.places))


def _orders(layout: Layout, items: Sequence[Sequence[Item]]) -> Orders:
    """Parts as firings of the actors there are, with loaders before, reductions behind, optimizers and savers last."""
    out = []
    for p in range(layout.places):
        order = list(dict.fromkeys((name, k) for part, s, k in items[p] if (name := layout.part(part, s)) is not None))
        mine = [s for s in range(len(layout.stages)) if layout.stages[s].place == p and layout.stages[s].trained]
        last = {s: max(order.index((name, layout.micro_batches - 1)) for name in layout.parts(s)) for s in mine}
        for s in sorted(mine, key=lambda s: -last[s]):
            order.insert(last[s] + 1, (f"R{s}", 0))
        order += [(f"O{s}", 0) for s in sorted(mine, key=lambda s: last[s])]
        order += [(f"save{p}", 0)] * (p in layout.saves and bool(mine))
        here = [i for i, load in enumerate(layout.loads) if load.place == p]
        for k, i in product(range(layout.micro_batches), here):
            found = (at for at, (name, j) in enumerate(order) if j == k and name[0] in "FBI")
            order.insert(next(found, len(order)), (f"load{i}", k))
        out.append(tuple(order))
    return tuple(out)


# -- the whole net ----------------------------------------------------------------------------


def dag_net(
    layout: Layout,
    places: Sequence[Place] = (),
    schedule: str | Orders = "1f1b",
    *,
    window: int | None = 0,
    stash: float = 1.0,
    registers: Mapping[str, int] | None = None,
) -> Net:
    """The whole net of a layout; `registers` sets queues by name."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULE_ORDERS:
            raise NetError(f"no schedule is called {schedule!r}", allowed="  ".join(SCHEDULE_ORDERS))
        orders = SCHEDULE_ORDERS[schedule](layout, stash)
    else:
        orders = schedule
    counts = _by_depth(layout, stash)
    if kept := _by_order(layout, orders):
        counts = _under_way(layout, orders, counts | kept)
    net = build(layout, tuple(places) or dummy_places(layout.places), orders, window, {**counts, **(registers or {})})
    unknown = sorted(set(registers or ()) - {q.name for q in net.queues})
    if unknown:
        raise NetError(f"no queue is called {unknown[0]}", allowed="  ".join(q.name for q in net.queues))
    return net


def _by_depth(layout: Layout, stash: float, waiting: int = 0) -> dict[str, int]:
    """Stashes as deep as their stages, and between stages one register more than they are apart; times `stash`.

    At least `waiting` micro-batches may wait for their weight parts.
    """
    depth, back = layout.depth, "I" if layout.apart else "B"
    out: dict[str, int] = {}
    for s, d in enumerate(depth):
        out[f"F{s}->{back}{s}"] = d
        out[f"F{s}->W{s}"] = out[f"I{s}->W{s}"] = max(d, waiting)
    for e in layout.edges:
        apart = depth[e.source] - depth[e.target]
        out |= dict.fromkeys((f"F{e.source}->F{e.target}", f"{back}{e.target}->{back}{e.source}"), apart + 1)
    out = {name: min(math.ceil(stash * count), layout.micro_batches) for name, count in out.items()}
    for i, load in enumerate(layout.loads):
        deep = [depth[s] for s in load.stages]
        out[layout.load_queue(i)] = load.depth + math.ceil(stash * (max(deep) - min(deep) + 1)) - 1
    return out


def _by_order(layout: Layout, orders: Orders) -> dict[str, int]:
    """Stashes as deep as the orders, kept to the letter, make them; nothing for mere lists of priorities."""
    out: dict[str, int] = {}
    spots = {firing: at for order in orders for at, firing in enumerate(order)}
    for s in range(len(layout.stages)):
        parts = layout.parts(s)
        for i, maker in enumerate(parts):
            for reader in parts[i + 1 :]:
                ends = [spots[reader, k] for k in range(layout.micro_batches)]
                begins = [spots[maker, k] for k in range(layout.micro_batches)]
                if any(begin > end for begin, end in zip(begins, ends, strict=True)):
                    return {}
                out[f"{maker}->{reader}"] = max(n + 1 - bisect(ends, at) for n, at in enumerate(begins))
    return out


def _under_way(layout: Layout, orders: Orders, counts: Mapping[str, int]) -> dict[str, int]:
    """At least what is under way when all parts take equally long: with so many registers the orders can be kept."""
    plenty = dict.fromkeys(counts, layout.micro_batches)
    net = build(layout, dummy_places(layout.places), orders, 0, plenty)
    out = dict(counts)
    with suppress(NetError):  # orders that can't be kept at all: `lower/stages/deadlock.py` says why
        ran = execute(net, _equal(net), steps=1)
        times = ran.times()
        loaded = {layout.load_queue(i): load.depth for i, load in enumerate(layout.loads)}
        for q in net.queues:
            if q.name in loaded:  # loaders run ahead as far as they may: only what is being read counts
                spans = [[times[c, k, 0] for c in q.consumers] for k in range(layout.micro_batches)]
                ends = sorted(max(end for _, end in span) for span in spans)
                begins = sorted(min(start for start, _ in span) for span in spans)
                reading = max(n + 1 - bisect(ends, at) for n, at in enumerate(begins))
                out[q.name] = max(out[q.name], loaded[q.name] + reading - 1)
            elif q.name in out:
                out[q.name] = max(out[q.name], ran.in_flight[q.name])
    return out


def _equal(net: Net) -> dict[str, int]:
    """Equal times for all parts, none for the rest."""
    return {a.name: int(a.kind in ("forward", "backward", "input", "weight")) for a in net.actors}
