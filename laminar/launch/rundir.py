"""The run directory: what a run leaves behind, in open formats.

    runs/gpt-tiny-20300102-030405/
        config.json           what was asked for, with which versions, where
        plan.json             how every tensor lies (`laminar explain` reads it)
        events.jsonl          what happened on rank 0, one line of JSON each
        events.rank1.jsonl    and on the others
        timeline.json         what every rank did in one step, if that was asked for (`laminar diff` reads it)
        checkpoint/           weights and optimizer state at the end, unless another place was named for them
        logs/rank0.log        everything a rank printed

It is written by the launcher (config) and by the ranks (the rest), and stays readable whatever
happens to them: lines are whole, and nothing is rewritten.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from laminar.errors import RecipeError

VERSIONS = ("laminar-train", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class RunDir:
    """Paths in one run's directory."""

    root: Path

    @property
    def config(self) -> Path:
        """What was asked for."""
        return self.root / "config.json"

    @property
    def plan(self) -> Path:
        """How every tensor lies."""
        return self.root / "plan.json"

    @property
    def timeline(self) -> Path:
        """What every rank did in one step."""
        return self.root / "timeline.json"

    @property
    def checkpoint(self) -> Path:
        """Weights and optimizer state."""
        return self.root / "checkpoint"

    def events(self, rank: int) -> Path:
        """What happened on a rank."""
        return self.root / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")

    def log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.root / "logs" / f"rank{rank}.log"

    def tail(self, rank: int, lines: int = 20) -> str:
        """The end of a rank's log."""
        try:
            text = self.log(rank).read_text(errors="replace")
        except OSError:
            return ""
        kept = [line for line in text.rstrip().splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(kept[-lines:]).strip()

    def __str__(self) -> str:
        return str(self.root)


def default_name(recipe: str) -> str:
    """`examples/gpt.py:tiny` as `gpt-tiny-20300102-030405`."""
    path, _, function = recipe.partition(":")
    return f"{Path(path).stem}-{function}-{time.strftime('%Y%m%d-%H%M%S')}"


def make(recipe: str, given: str | None, resume: bool = False) -> RunDir:
    """A directory of its own for this run. One that holds a run already is only taken to resume it."""
    if given is not None:
        run = RunDir(Path(given))
        if run.config.exists() and not resume:
            raise RecipeError(f"{given} holds a run already", next="name another --run-dir, or add --resume")
        (run.root / "logs").mkdir(parents=True, exist_ok=True)
        return run
    name = default_name(recipe)
    for number in range(1, 1000):
        root = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        (root / "logs").mkdir()
        return RunDir(root)
    raise RecipeError(f"runs/{name} is taken a thousand times", next="name a --run-dir")


def write_config(run: RunDir, arguments: dict[str, Any], world: int) -> None:
    """What it takes to run it again, and to know where it ran."""
    versions = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    config = {
        "arguments": arguments,
        "command": sys.argv,
        "world": world,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": {
            "name": socket.gethostname(),
            "platform": platform.platform(),
            "cores": usable_cores(),
            "cwd": os.getcwd(),
        },
        "versions": versions,
    }
    run.config.write_text(json.dumps(config, indent=2, default=str) + "\n")


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
