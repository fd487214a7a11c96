"""Random models against plain PyTorch, as many as one has time for.

    python -m tests.fuzz.models --programs 10000 --jobs 16        # fresh seeds, printed
    python -m tests.fuzz.models --seed 7 --programs 100           # the same hundred again
    python -m tests.fuzz.models --only 7000042                    # one program, shown and shrunk

Each program is trained for a few steps in plain PyTorch and through Laminar, in a process that may crash. Those whose
numbers differ, and those that crash, are shrunk and printed as code that runs. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.generator import drawn
from tests.fuzz.oracle import Outcome
from tests.fuzz.program import Program
from tests.fuzz.shrinking import shrink
from tests.fuzz.worker import Worker

BAD = ("wrong", "crash")
MOST = 12
"""So many failures are shrunk; of each kind of message one."""


def main() -> int:
    """Run the fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--way", choices=("alone", "lockstep", "stages", "ranks"))
    parser.add_argument("--only", type=int, help="one program by its own seed")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("LAMINAR_CACHE", "off")
    seed = int.from_bytes(os.urandom(3), "big") if args.seed is None else args.seed
    print(f"SEED={seed} PROGRAMS={args.programs}", flush=True)
    first = seed * 1_000_000
    seeds = [args.only] if args.only is not None else [first + i for i in range(args.programs)]
    found = sweep([drawn(s, args.way) for s in seeds], args.jobs)
    bad = {s: o for s, o in found.items() if o.kind in BAD}
    print(report(found))
    for s, o in bad.items():
        program = drawn(s, args.way)
        print(f"\n{o.kind}: program {s} ({program.options['way']}, {program.options['plan']}): {o.why}")
    if bad and not args.no_shrink:
        for s, o in _one_of_each(bad).items():
            print(shrunk(drawn(s, args.way), o), flush=True)
    return 1 if bad else 0


def sweep(programs: list[Program], jobs: int) -> dict[int, Outcome]:
    """Outcomes by seed, judged by so many processes."""
    out: dict[int, Outcome] = {}
    here = threading.local()
    workers: list[Worker] = []
    began = said = time.monotonic()

    def judged(program: Program) -> tuple[int, Outcome]:
        if not hasattr(here, "worker"):
            here.worker = Worker()
            workers.append(here.worker)
        return program.seed, here.worker.judge(program)

    with ThreadPoolExecutor(jobs) as pool:
        for s, o in pool.map(judged, programs):
            out[s] = o
            now = time.monotonic()
            if o.kind in BAD:
                print(f"{o.kind}: {s}: {o.why}", flush=True)
            if now - said > 30:
                said = now
                print(f"{len(out)} of {len(programs)} in {now - began:.0f} s: {counts(out)}", flush=True)
    for worker in workers:
        worker.stop()
    return out


def counts(found: dict[int, Outcome]) -> str:
    """How many of each kind."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(o.kind for o in found.values()).items()))


def report(found: dict[int, Outcome]) -> str:
    """Counts, and what was refused or invalid, by message."""
    lines = [counts(found)]
    lines += [f"  ill-conditioned: {s}: {o.why}" for s, o in found.items() if o.kind == "ill-conditioned"]
    for kind in ("refused", "invalid", "warned"):
        told = Counter(_like(o.why) for o in found.values() if o.kind == kind)
        lines += [f"  {kind} {n} times: {why}" for why, n in told.most_common(25)]
    return "\n".join(lines)


def _like(why: str) -> str:
    """A message without its names and numbers."""
    return re.sub(r"\d+", "#", why)[:150]


def _one_of_each(bad: dict[int, Outcome]) -> dict[int, Outcome]:
    kinds = {(o.kind, _like(o.why)): s for s, o in reversed(bad.items())}
    return {s: bad[s] for s in list(kinds.values())[:MOST]}


def shrunk(program: Program, was: Outcome) -> str:
    """A minimal program that fails as this one does, as a script."""
    worker = Worker(60.0)

    def fails(other: Program) -> bool:
        return worker.judge(other).kind == was.kind

    small = shrink(program, fails)
    now = worker.judge(small)
    worker.stop()
    shown = f"# {now.kind}: {now.why}\n# trained with {small.options}\n{small.source()}"
    sizes = f"shrunk from {len(program.statements)} to {len(small.statements)} statements"
    return f"\n{'-' * 100}\n# program {program.seed}, {sizes}\n{shown}"


if __name__ == "__main__":
    sys.exit(main())
