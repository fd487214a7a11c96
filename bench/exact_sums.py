"""Do sums in integers cost less than the tree, where the units of exact mode lie scattered over processes?

Forward and backward of the GPT of 10.9M parameters in 8 units of 64 rows, no update: with sums up the tree and in
integers, through memory that processes share and through messages (Gloo), for hostings that are aligned with the tree,
uneven, and interleaved. Bytes are what a process hands over for others; a ring would send `ring_bytes` of gradients.

    python bench/exact_sums.py [--hosting even uneven interleaved four three] [--rounds 12]

No target: this says where which kind pays.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import paired, ratio, report
from exact_cost import UNITS, case
from torch import Tensor

import laminar
from laminar.api import inputs_of
from laminar.ir.exact import Exact, Hosting
from laminar.ir.program import Program
from laminar.lower.lower import lower
from laminar.placement.logical import logical_plan
from laminar.runtime.check.processes import on_ranks
from laminar.runtime.exact.hosted_step import HostedStep
from laminar.runtime.exact.hosts import HostedRanks

HOSTINGS = {
    "even": Hosting.even(UNITS, 2),
    "uneven": Hosting.of_counts([5, 3]),
    "interleaved": Hosting(tuple(u % 2 for u in range(UNITS))),
    "three": Hosting.even(UNITS, 3),
    "four": Hosting.even(UNITS, 4),
    "four_interleaved": Hosting(tuple(u % 4 for u in range(UNITS))),
}


class CountedHosts(HostedRanks):
    """Hosts that count what they hand over for others."""

    sent = 0

    def gather(self, mine: Tensor) -> list[Tensor]:
        """A ring hands on all pieces but one."""
        self.sent += mine.nbytes * (self.hosts - 1)
        return super().gather(mine)

    def exchange(self, parts: list[Tensor], received: list[int]) -> list[Tensor]:
        """Each part but its own."""
        self.sent += sum(p.nbytes for i, p in enumerate(parts) if i != self.process)
        return super().exchange(parts, received)


def measure(hosting: Hosting, rounds: int) -> dict[str, Any]:
    """All sides in turns on this rank."""
    given, rank = case(1, 2, True), dist.get_rank()
    torch.manual_seed(0)
    model = given.model()
    graph = laminar.capture(model, given.loss, given.batches[0])
    program: Program = lower(graph, logical_plan(graph, Exact(UNITS)))
    inputs = inputs_of(graph, model, given.batches[0])
    whole = [inputs[i.name].detach() for i in program.inputs]
    busy: dict[str, list[float]] = {}

    def turn(side: str, step: HostedStep) -> Callable[[], None]:
        busy[side] = []

        def go() -> None:
            dist.barrier()
            start = time.process_time()
            step(*whole)
            busy[side].append(time.process_time() - start)
            dist.barrier()

        return go

    sides, hosts = {}, {}
    for sums in ("tree", "integers"):
        for how in ("shared", "messages"):
            side = f"{sums}_{how}"
            hosts[side] = CountedHosts(program.mesh, hosting, rank, dist.group.WORLD, share=how == "shared")
            sides[side] = turn(side, HostedStep(program, hosts[side], sums=sums))
    times = paired(sides, rounds, 1)
    runs = rounds + 2
    gradients = sum(o.placed.spec.nbytes for o in program.outputs if o.kind == "grad")
    return {
        "times": times,
        "busy": {side: each[2:] for side, each in busy.items()},
        "sent_bytes": {side: h.sent // runs for side, h in hosts.items()},
        "ring_bytes": 2 * gradients * (hosting.size - 1) // hosting.size,
    }


def main() -> None:
    """One line for each hosting."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--hosting", nargs="*", choices=list(HOSTINGS), default=list(HOSTINGS))
    args.add_argument("--rounds", type=int, default=12)
    given = args.parse_args()
    for name in given.hosting:
        load, hosting = os.getloadavg()[0], HOSTINGS[name]
        found = on_ranks(hosting.size, measure, hosting, given.rounds, timeout_s=900)
        first = found[0]
        total = {side: [sum(f["busy"][side][r] for f in found) for r in range(given.rounds)] for side in first["busy"]}
        report(
            "exact_sums",
            {
                "hosting": name,
                "processes": list(hosting.processes),
                **{
                    f"integers_over_tree_{how}": ratio(first["times"], f"integers_{how}", f"tree_{how}")
                    for how in ("shared", "messages")
                },
                **{
                    f"integers_over_tree_{how}_cpu": ratio(total, f"integers_{how}", f"tree_{how}")
                    for how in ("shared", "messages")
                },
                "sent_over_ring": {
                    side: round(max(f["sent_bytes"][side] / f["ring_bytes"] for f in found), 3)
                    for side in first["sent_bytes"]
                },
                "ms": {side: round(sorted(ts)[len(ts) // 2] * 1e3, 1) for side, ts in first["times"].items()},
                "cpu_ms_of_all": {side: round(sorted(ts)[len(ts) // 2] * 1e3, 1) for side, ts in total.items()},
                "load_before": round(load, 2),
            },
        )


if __name__ == "__main__":
    main()
