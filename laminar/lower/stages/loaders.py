"""A net with its loaders: what stands before the first part of a step, and what it holds.

Every rank of a step reads the data itself (`runtime/pipeline/loader.py`), so each place has a loader `load0`, `load1`,
... It fires once a step and gives all micro-batches at once. It is at a place of its own with the same ranks, which
goes on beside the step; its queue has registers for the batch in use and for `depth` more. With a depth of 0 there is
nothing beside the step: the place itself loads first, then does the rest.

Ranks of a job meet between steps (the norm of the gradient, `train/job/pipeline_job.py`), so every optimizer here
waits for the reductions of all stages. Such a net is for the check and for predictions: at run time the loader stands
before the pipe, not in it.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.errors import NetError
from laminar.ir.net import Actor, Firing, Net, Queue

PASS_KINDS = ("forward", "backward", "input", "weight")


def with_loads(net: Net, batch_bytes: int, depth: int) -> Net:
    """The net of a step, with a loader at every place that has parts; a whole batch has so many bytes on a rank."""
    if depth < 0:
        raise NetError(f"a loader {depth} batches ahead", allowed="0 or more")
    places, orders = list(net.places), list(net.orders)
    actors, queues = list(net.actors), [*net.queues, *_meetings(net)]
    for p, place in enumerate(net.places):
        readers = [a for a in net.actors if a.place == p and a.kind in PASS_KINDS]
        if not readers:
            continue
        name, many = f"load{p}", readers[0].fires
        first: tuple[Firing, ...] = ((name, 0),)
        if depth:
            places.append(place)
            orders.append(first)
        else:
            orders[p] = first + orders[p]
        actors.append(Actor(name, "load", len(places) - 1 if depth else p, 1, readers[0].stage))
        queues.append(
            Queue(
                f"{name}->{','.join(a.name for a in readers)}",
                name,
                tuple(a.name for a in readers),
                (depth + 1) * many,
                gives=many,
                bytes=-(-batch_bytes // many),
            )
        )
    return replace(net, places=tuple(places), orders=tuple(orders), actors=tuple(actors), queues=tuple(queues))


def _meetings(net: Net) -> list[Queue]:
    """Queues that make every optimizer wait for all reductions, where the net has none."""
    known = {q.name for q in net.queues}
    reduces = [a for a in net.actors if a.kind == "reduce"]
    out = []
    for a in reduces:
        others = tuple(f"O{b.stage}" for b in reduces if b is not a)
        if others and f"{a.name}->all" not in known:
            out.append(Queue(f"{a.name}->all", a.name, others, 1, bytes=8))
    return out
