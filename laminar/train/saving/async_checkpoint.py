"""The saver: checkpoints written beside the steps, from a copy.

A checkpoint begins with a snapshot, which all ranks make together between two steps: rank 0 then has whole tensors of
its own. A thread writes them while training goes on. There is one register: the next snapshot waits until the last is
on disk, so at most one copy of the job exists at a time. A directory never has files of two different steps
(`checkpoint.py`).

A write that fails is raised at the next step on rank 0, with the path. `finish` waits for the last write, and
raises on every rank: no run ends well without its checkpoint.
"""

from __future__ import annotations

import threading
from pathlib import Path

from laminar.errors import StateError
from laminar.train.protocol import HasState
from laminar.train.saving.checkpoint import Snapshot, snapshot


class Saver:
    """Writes a job's checkpoints beside its steps. All methods but `check` are for every rank to call."""

    def __init__(self, job: HasState) -> None:
        self.job = job
        self._thread: threading.Thread | None = None
        self._path = ""
        self._error: Exception | None = None

    def save(self, directory: str | Path) -> None:
        """Copy the job as it is now and write it beside the steps to come; first waits for the write before."""
        self._wait()
        self.check()
        taken = snapshot(self.job, apart=True)
        if taken is not None:
            self._path = str(directory)
            self._thread = threading.Thread(target=self._write, args=(taken,), name="laminar saver", daemon=True)
            self._thread.start()

    def _write(self, taken: Snapshot) -> None:
        try:
            taken.write(self._path)
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raise what became of the last write, if it failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failed(str(error)) from error

    def _failed(self, said: str) -> StateError:
        return StateError(f"the checkpoint {self._path} could not be written: {said}", next="see the disk, then resume")

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def leave(self, wait_s: float) -> None:
        """The run has failed: give a write that is under way so long to end."""
        if self._thread is not None:
            self._thread.join(wait_s)

    def finish(self) -> None:
        """Wait until all is on disk; an error on every rank if it is not."""
        self._wait()
        error, self._error = self._error, None
        said = self.job.peers.gather_objects((self._path, str(error)) if error is not None else None)
        for found in said:
            if found is not None:
                self._path, text = found
                raise self._failed(text) from error
