"""What every benchmark shares: rounds that alternate between the two sides, and one JSON line per result.

Both sides run in the same process or the same set of processes, in paired rounds, so that whatever
else the machine is doing hits both. A result is a ratio with its spread, never a bare time.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def paired(sides: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each side, one figure a round, sides alternating and the order turning."""
    for run in sides.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            start = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.perf_counter() - start) / calls)
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Median of the rounds' ratios, with the quartiles."""
    each = sorted(a / b for a, b in zip(times[over], times[under], strict=True))
    quarters = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    return {"median": round(quarters[1], 3), "low": round(quarters[0], 3), "high": round(quarters[2], 3)}


def commit() -> str:
    """The commit measured, marked where the tree has changes other than results."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results"],  # rows of this very run
            cwd=here,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def report(name: str, result: dict[str, Any]) -> None:
    """Print one JSON line and add it to the results."""
    import torch

    line = {
        "bench": name,
        **result,
        "command": "python " + " ".join([f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "commit": commit(),
    }
    text = json.dumps(line)
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(text + "\n")
