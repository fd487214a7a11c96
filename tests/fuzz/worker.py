"""A process that judges programs, and is replaced when a program ends it."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.oracle import Outcome, outcome
from tests.fuzz.program import Program
from tests.support.rank_pool import CONTEXT, Ranks

PATIENCE_S = 150.0


def _serve(asked: Any) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(2)
    while True:
        program = asked.recv()
        if program is None:
            break
        asked.send(outcome(program, ranks))
    ranks.stop()


class Worker:
    """Asks one process after another; a program that takes it down is a crash, with the signal's number."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._process: Any = None
        self._end: Any = None

    def judge(self, program: Program) -> Outcome:
        """What comes of a program."""
        if self._process is None:
            self._end, theirs = CONTEXT.Pipe()
            self._process = CONTEXT.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()
        try:
            self._end.send(program)
            if self._end.poll(self.patience_s):
                return self._end.recv()  # type: ignore[no-any-return]
            why = f"nothing came for {self.patience_s:.0f} s"
        except (EOFError, ConnectionError, BrokenPipeError):
            why = "the process is gone"
        self._process.join(5)
        code = self._process.exitcode
        self.stop(kill=True)
        return Outcome("crash", f"{why} (exit code {code})")

    def stop(self, kill: bool = False) -> None:
        """End the process."""
        if self._process is None:
            return
        if kill:
            self._process.kill()
        else:
            self._end.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
        self._end.close()
        self._process = None
