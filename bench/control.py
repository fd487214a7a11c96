"""What do credits, headers and choices cost, beside the bytes themselves?

Two ranks on Gloo. `bare`: a loop of isend on one and irecv on the other, into four buffers in turn, each waited for
before the next; `bare ahead`: the same with four under way, as the registers of a queue are. The other ways: the same
bytes through a queue with four registers between two actors that do nothing, as between machines (`posted`: small
messages on lines, others by c10d) and through shared memory (`shared`). With four ranks there are two pairs, and a
leader on each side that chooses for both (`led`). CPU time of the whole process, threads of Gloo and of this package
included, per message and rank; rounds alternate between all ways.

A bare receive that comes after its message costs far more than one that was posted (up to milliseconds of a thread of
Gloo's, most of all on an idle machine), so the cost itself, `cpu_ms`, is reported beside the differences.

    python bench/control.py [--bytes 65536] [--messages 400] [--rounds 15]

Target: at most 0.15 ms of CPU time per message and rank over `bare`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import report

from laminar.ir.mesh import Mesh, Place
from laminar.ir.net import Actor, Net, Queue
from laminar.runtime.check.processes import on_ranks
from laminar.runtime.pipeline.actors import Actors
from laminar.runtime.pipeline.channels import Value
from laminar.runtime.pipeline.connect import connect_actors

REGISTERS = 4


def net_of(places: list[tuple[int, ...]], messages: int, nbytes: int, window: int | None) -> Net:
    """Two actors and a queue."""
    actors = (Actor("give", "forward", 0, messages), Actor("take", "forward", 1, messages))
    orders = tuple(tuple((a.name, k) for k in range(messages)) for a in actors)
    queue = Queue("q", "give", ("take",), REGISTERS, bytes=nbytes)
    return Net(tuple(Place(p, Mesh({"r": len(p)})) for p in places), actors, (queue,), orders, window)


def actors_of(net: Net, nbytes: int, shared: bool) -> Actors:
    """Actors that give the same tensor again and again, and look at what they get."""
    x = torch.zeros(nbytes // 4)

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        return {"q": [Value([x], k)]} if name == "give" else {}

    made = connect_actors(net, run, shared=shared, timeout_s=120)
    assert made is not None
    return made


def bare(messages: int, nbytes: int, under_way: int = 1) -> Callable[[], None]:
    """Plain sends of the lower half of the ranks to the upper, so many of them at a time."""
    half, rank = dist.get_world_size() // 2, dist.get_rank()
    buffers = [torch.zeros(nbytes // 4) for _ in range(1 if rank < half else REGISTERS)]

    def run() -> None:
        works: deque[Any] = deque()
        for k in range(messages):
            x = buffers[k % len(buffers)]
            works.append(dist.isend(x, rank + half) if rank < half else dist.irecv(x, rank - half))
            if len(works) == under_way:
                works.popleft().wait()
        for work in works:
            work.wait()

    return run


def rounds_of(messages: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """On a rank: CPU seconds per message of each way, one figure a round."""
    half = dist.get_world_size() // 2
    places = [tuple(range(half)), tuple(range(half, 2 * half))]
    made = {
        f"{way}{' led' if half > 1 else ''}": actors_of(
            net_of(places, messages, nbytes, None if half > 1 else 0), nbytes, way == "shared"
        )
        for way in ("posted", "shared")
    }
    sides: dict[str, Callable[[], Any]] = {
        "bare": bare(messages, nbytes),
        "bare ahead": bare(messages, nbytes, REGISTERS),
    }
    sides |= {name: (lambda a=a: a.run(1)) for name, a in made.items()}
    out: dict[str, list[float]] = {name: [] for name in sides}
    for r in range(rounds + 1):
        for name in sides if r % 2 == 0 else reversed(sides):
            dist.barrier()
            began = time.process_time()
            sides[name]()
            if r:
                out[name].append((time.process_time() - began) / messages)
    for a in made.values():
        a.close()
    return out


def over(each: list[dict[str, list[float]]], way: str, base: str) -> dict[str, float]:
    """CPU milliseconds of one way beyond another, on the rank where that is most: quartiles of the rounds."""
    more = ([1000 * (a - b) for a, b in zip(rank[way], rank[base], strict=True)] for rank in each)
    low, median, high = max((statistics.quantiles(m, n=4) for m in more), key=lambda q: q[1])
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}


def most(each: list[dict[str, list[float]]], way: str) -> float:
    """CPU milliseconds per message, median of the rounds, on the rank where that is most."""
    return round(1000 * max(statistics.median(rank[way]) for rank in each), 4)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 10, 1 << 16, 1 << 20])
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    for ranks in args.ranks:
        for nbytes in args.bytes:
            each = on_ranks(ranks, rounds_of, args.messages, nbytes, args.rounds)
            for way in each[0]:
                if way.startswith("bare"):
                    continue
                report(
                    "control",
                    {
                        "way": way,
                        "ranks": ranks,
                        "bytes": nbytes,
                        "messages": args.messages,
                        "rounds": args.rounds,
                        "cpu_ms": most(each, way),
                        "bare_ms": most(each, "bare"),
                        "bare_ahead_ms": most(each, "bare ahead"),
                        "over_bare_ms": over(each, way, "bare"),
                        "over_bare_ahead_ms": over(each, way, "bare ahead"),
                        "of": "CPU ms per message, the rank that pays most",
                        "target": 0.15,
                    },
                )


if __name__ == "__main__":
    main()
