"""Names of checkpoints, as people write them: `store`, `store#run`, `store#run@step`.

A store is a folder or a URI. It may hold many runs: where it does, a name has to say which is meant, so nobody goes on
with somebody else's run by chance.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from laminar.checkpoint.history.references import CheckpointRef, list_refs
from laminar.checkpoint.store.uri import open_store
from laminar.errors import StateError

SHOWN_RUNS = 8
"""Runs that an error lists."""


@dataclass(frozen=True)
class CheckpointName:
    """A store, and which run and step of it are meant, if that is said."""

    store: str
    run: str = ""
    step: int | None = None

    @staticmethod
    def parse(text: str | os.PathLike[str]) -> CheckpointName:
        """From text."""
        store, mark, rest = os.fspath(text).rpartition("#")
        if not mark:
            return CheckpointName(rest)
        run, at, step = rest.partition("@")
        if at and not step.isdigit():
            raise StateError(f"{text} names no checkpoint", allowed="STORE, STORE#RUN or STORE#RUN@STEP")
        return CheckpointName(store, run, int(step) if at else None)

    def all_meant(self) -> list[CheckpointRef]:
        """The checkpoints of the run that is meant, the last first; all of one step where that is said."""
        refs = list_refs(open_store(self.store), self.run or None).refs
        runs = list(dict.fromkeys(r.run for r in refs))
        if not refs:
            what = f"no run {self.run}" if self.run else "no job"
            raise StateError(f"{what} was saved in {self.store}", next="name a store that a job was saved in")
        if len(runs) > 1:
            some = [f"{run} (step {max(r.step for r in refs if r.run == run)})" for run in runs[-SHOWN_RUNS:]]
            raise StateError(
                f"{self.store} holds {len(runs)} runs", runs=", ".join(some), next=f"say which: {self.store}#{runs[-1]}"
            )
        if self.step is None:
            return list(reversed(refs))
        found = [r for r in reversed(refs) if r.step == self.step]
        if not found:
            steps = ", ".join(str(r.step) for r in refs[-SHOWN_RUNS:])
            raise StateError(f"{runs[0]} has no checkpoint of step {self.step}", steps=steps)
        return found
