"""Which rank is to blame, and how to say so.

When one rank fails, the others fail too: a collective loses its peer and raises. What a user needs is
the first real failure, by time and by kind, and only that. So a rank that ends writes down what
happened to it (`describe`), the launcher adds what it sees from outside (a signal, an exit code
without a word), `culprit` picks one, and `verdict` puts it into words with the next step.

Pure functions on small values: nothing here starts, stops or reads a process.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from laminar import errors
from laminar.errors import LaminarError, OutOfMemoryError, PeerError, RankError

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
FAILED, REFUSED = 1, 2
"""Exit codes: training began and failed; or it was refused before the first step."""

_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_WORDS = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|remote process exited|Broken pipe|Timed out waiting \d+ms for"
)
_MEMORY_WORDS = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|not enough memory|ALLOC_FAILED", re.IGNORECASE
)
LESS_MEMORY = "--plan zero3, more --micro-batches, --precision bf16, or a smaller batch"


class Stopped(BaseException):
    """A signal asked this rank to stop. No `except Exception` of a recipe catches it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended, if not well."""

    rank: int
    time: float
    kind: str
    """"raised", "refused" (a LaminarError), "memory", "peer" (lost another rank), "signal", "exit", "silent"."""
    type: str = ""
    message: str = ""
    traceback: str = ""
    shown: str = ""
    """The part of the traceback that is the user's own, where there is one."""
    step: int | None = None
    """Steps made when it happened; nothing before the first began."""
    code: int = 0
    """A signal's number or an exit code."""

    @property
    def real(self) -> bool:
        """Whether it may be the cause: a rank that lost another is not."""
        return self.kind not in ("peer", "silent")


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def kind_of(error: BaseException) -> str:
    """What kind of failure an error is. Types of torch go by name, so that torch need not be loaded."""
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "signal"
    if isinstance(error, SystemExit):
        return "exit"
    for e in causes_of(error):
        own, text = type(e).__name__, str(e)
        if isinstance(e, MemoryError) or own == "OutOfMemoryError":
            return "memory"
        if isinstance(e, RuntimeError | OSError) and _MEMORY_WORDS.search(text):
            return "memory"
        if isinstance(e, PeerError) or own in _LOST_TYPES or (isinstance(e, RuntimeError) and _LOST_WORDS.search(text)):
            return "peer"
    if isinstance(error, RankError) and error.__cause__ is not None:
        return kind_of(error.__cause__)  # this rank's own failure, told as it was told to the others
    return "refused" if isinstance(error, LaminarError) else "raised"


def describe(error: BaseException, step: int | None) -> dict[str, Any]:
    """An error as the fields of an event."""
    code = 0
    if isinstance(error, Stopped | KeyboardInterrupt):
        code = error.number if isinstance(error, Stopped) else int(signal.SIGINT)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return {
        "failure": kind_of(error),
        "type": type(error).__name__,
        "message": str(error),
        "step": step,
        "code": code,
        "traceback": "".join(traceback.format_exception(error)),
        "shown": shown(error),
    }


def shown(error: BaseException) -> str:
    """The traceback from the first line on that is not ours, without ours in between; all of it if every line is."""
    told = traceback.TracebackException.from_exception(error)
    each: Any = told
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        theirs = [f for f in each.stack if not f.filename.startswith((_OURS, "<"))]
        if not theirs:
            return ""
        each.stack = traceback.StackSummary.from_list(theirs)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(told.format())


def from_event(rank: int, time: float, fields: dict[str, Any]) -> Failure:
    """A failure from what `describe` wrote."""
    return Failure(
        rank=rank,
        time=time,
        kind=str(fields.get("failure", "raised")),
        type=str(fields.get("type", "")),
        message=str(fields.get("message", "")),
        traceback=str(fields.get("traceback", "")),
        shown=str(fields.get("shown", "")),
        step=fields.get("step"),
        code=int(fields.get("code", 0)),
    )


def from_exit(rank: int, time: float, code: int, step: int | None) -> Failure:
    """A failure of which only the exit code is known; subprocess writes a signal as its negative."""
    return Failure(rank=rank, time=time, kind="signal" if code < 0 else "exit", code=abs(code), step=step)


def culprit(failures: Sequence[Failure]) -> Failure | None:
    """The first real failure; if there is none, the first."""
    ordered = sorted(failures, key=lambda f: (not f.real, f.time, f.rank))
    return ordered[0] if ordered else None


@dataclass(frozen=True)
class Verdict:
    """What to tell the user, and how to exit."""

    error: LaminarError
    code: int
    traceback: str = ""
    rank: int | None = None
    plain: bool = False
    """The error says it all; its traceback is for whoever asks."""
    full: str = ""
    """The whole traceback, for whoever asks, where another is shown."""


def verdict(failure: Failure, world: int, others: Sequence[Failure], stopped: Sequence[int], log: str) -> Verdict:
    """One failure in words. `others` failed by themselves; `stopped` were stopped because of it."""
    who = f"rank {failure.rank} of {world}" if world > 1 else "the run"
    when = (
        "before the first step"
        if failure.step is None
        else f"after step {failure.step}"
        if failure.step
        else "in the first step"
    )
    same = [f.rank for f in others if f.real and (f.type, f.message) == (failure.type, failure.message)]
    lines = {
        "also": f"{_ranks(same)} failed in the same way" if same else "",
        "stopped": _ranks([r for r in stopped if r not in same and r != failure.rank]),
        "log": log,
    }
    error: LaminarError
    code, trace, plain = FAILED, "", False
    if failure.kind == "refused":
        code = REFUSED if failure.step is None else FAILED
        error, trace, plain = getattr(errors, failure.type, RankError)(failure.message), failure.traceback, True
    elif failure.kind == "memory":
        error = OutOfMemoryError(
            f"{who} ran out of memory {when}", said=_first_line(failure), **lines, next=LESS_MEMORY
        )
        trace = failure.traceback
    elif failure.kind == "signal":
        error = _killed(failure, who, when, lines)
    elif failure.kind == "exit":
        what = f"ended with exit code {failure.code}" + ("" if failure.traceback else ", without a word")
        error = RankError(f"{who} {what}, {when}", **lines, next="see its log")
        trace = failure.traceback
    elif failure.kind == "peer":
        error = RankError(
            f"{who} lost the others {when}", said=_first_line(failure), **lines, next="see the logs of all ranks"
        )
    elif failure.kind == "silent":
        error = RankError(f"{who} {failure.message}", **lines, next="see the logs: they hold where every rank stood")
    else:
        error = RankError(f"{who} failed {when}: {failure.type}: {failure.message}", **lines)
        trace = failure.shown or failure.traceback
    return Verdict(error, code, trace, failure.rank, plain, failure.traceback)


def _killed(failure: Failure, who: str, when: str, lines: dict[str, str]) -> LaminarError:
    try:
        name = signal.Signals(failure.code).name
    except ValueError:
        name = f"signal {failure.code}"
    hint, step = "", "see its log"
    if name == "SIGKILL":
        hint, step = " (often the kernel's out-of-memory killer; `dmesg` tells)", "if it was memory: " + LESS_MEMORY
    elif name == "SIGBUS":
        hint, step = " (often a full /dev/shm)", "fewer data workers, or more shared memory"
    elif name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        hint = " (a crash in native code)"
    return RankError(f"{who} was ended by {name}{hint}, {when}", **lines, next=step)


def _first_line(failure: Failure) -> str:
    return (failure.message.strip().splitlines() or [failure.type])[0][:300]


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
