"""The loader: an actor in front of the step, on a thread of its own.

It reads the user's iterable and fills registers: one batch each, at most `depth` that nobody has taken yet. A register
is in use from when the loader begins to read a batch until the consumer takes it: so loading is hidden as long as it
takes no longer than a step, and a slow consumer makes the loader wait, not memory grow. At most `depth + 1` batches
exist: those in registers, and the one in the consumer's hands (a `for` loop holds the last one while it asks for the
next, so for that moment it may be one more).

Batches come in the order of the iterable, and the iterable is only ever touched by that one thread. What it raises is
raised where the batch would have been taken, with the number of the batch. Ranks agree on every batch
before it counts as loaded (`train/batch/prefetch.py`): that happens on the same thread, beside the step.

A loader ends when its data does, when it is closed, or when nobody holds it any more. The thread can't be torn out of
user code that blocks: it then ends when that returns.

On a GPU the batch is copied into pinned memory and from there by a stream of the loader's own. The consumer's stream
waits for the copy, the host does not.

Python code of the data shares the interpreter's lock with the step; work that does not let go of it (decoding in
pure Python) belongs into the workers of a `DataLoader`, which is an iterable like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laminar.capture.model.batches import mapped
from laminar.runtime.trace.tape import now

LOADER = "laminar loader"
"""The name of threads that read data, and may draw random numbers, beside the steps (`loader.py`)."""

EPOCH = object()
"""An item that is no batch: the data begins anew here, on every rank."""
REMEMBERED_LOADS = 64
"""Loads whose times are remembered."""
CLOSE_WAIT_S = 5.0
"""How long `close` waits for user code that is reading a batch."""


@dataclass(frozen=True)
class Ended:
    """The data is over; `why` is said to the user if it is not over everywhere."""

    why: str = ""


Agree = Callable[[str, int, str, Callable[[], bool]], Ended | None]
"""Tell other ranks what came (`batch`, `epoch`, `end`, `failed`), after how many batches, and its error. Gives what all
make of it: nothing to go on. The last argument says whether to give up waiting for them."""


def agree_alone(what: str, made: int, error: str, stopped: Callable[[], bool]) -> Ended | None:
    """For a single rank: it is over when the data is."""
    return Ended() if what == "end" else None


class Closed(Exception):
    """The loader was closed while it waited for other ranks."""


class Filled(NamedTuple):
    """A register: a batch, what the device has to wait for before it reads it, and when it was loaded."""

    batch: Any
    copied: Any = None
    at: int = 0


class Mover:
    """Takes batches to where the step reads them."""

    def __init__(self, device: torch.device, whole: bool = True) -> None:
        """`whole`: the rank needs all of a batch on its device; else it is only pinned, and the rank's share is moved
        when it is cut."""
        self.device, self.whole = device, whole
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Filled:
        if self.stream is None:
            return Filled(batch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if not self.whole and not _is_share(batch):
                return Filled(mapped(batch, _pinned))
            moved = mapped(batch, lambda t: _pinned(t).to(self.device, non_blocking=True))
            return Filled(moved, self.stream.record_event())

    def taken(self, filled: Filled) -> Any:
        """The batch, on the stream that is current where it is taken."""
        if filled.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(filled.copied)
            mapped(filled.batch, lambda t: t.record_stream(current))  # its memory was made on another stream
        return filled.batch


def _pinned(t: Tensor) -> Tensor:
    return t.pin_memory() if t.device.type == "cpu" and not t.is_pinned() else t


def _is_share(batch: Any) -> bool:
    """Whether a batch is a rank's own part: a `Local`, or one inside of a `Sized`."""
    return hasattr(batch, "share") or hasattr(getattr(batch, "batch", None), "share")


class Registers:
    """What loader and consumer share. Numbers only grow; `made - taken` registers are full."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.full: deque[Filled] = deque()
        self.most = 0
        """The most registers that were ever taken at once, the one being filled included."""
        self.error: BaseException | None = None
        self.ended: Ended | None = None
        self.closed = False
        self.filling_since: int | None = None
        self.loads: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_LOADS)
        """When the last loads began and ended."""
        self.changed = threading.Condition()  # its lock may be taken again by a finalizer on the same thread

    def _over(self) -> bool:
        return self.closed or self.error is not None or self.ended is not None

    def claim(self) -> bool:
        """Wait for a free register and take it; not if the loader is to end."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.full) < self.depth)
            if self.closed:
                return False
            self.most = max(self.most, len(self.full) + 1)
            self.filling_since = now()
            return True

    def fill(self, filled: Filled | Ended | BaseException) -> None:
        """What became of the register."""
        with self.changed:
            if isinstance(filled, Filled):
                assert self.filling_since is not None
                self.loads.append((self.filling_since, filled.at))
                self.full.append(filled)
            elif isinstance(filled, Ended):
                self.ended = filled
            else:
                self.error = filled
            self.filling_since = None
            self.changed.notify_all()

    def take(self) -> Filled | Ended:
        """The oldest full register, which is free from now on; an error when it is its turn."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.full) or self._over())
            if self.closed:
                return Ended()
            if self.full:
                out = self.full.popleft()
                self.changed.notify_all()
                return out
            if self.error is not None:
                error, self.error, self.ended = self.error, None, Ended()
                raise error
            assert self.ended is not None
            ended, self.ended = self.ended, Ended()
            return ended

    def settle(self) -> None:
        """Wait until nothing is being loaded: all registers are full, or there is no more."""
        with self.changed:
            self.changed.wait_for(lambda: self._over() or len(self.full) == self.depth)

    def close(self) -> None:
        """No more is wanted."""
        with self.changed:
            self.closed = True
            self.full.clear()
            self.changed.notify_all()


class BatchSource:
    """The user's data, batch by batch, agreed on and moved. Used by one thread only."""

    def __init__(self, data: Iterable[Any], move: Mover, agree: Agree, stopped: Callable[[], bool], rank: int) -> None:
        self.data, self.move, self.agree, self.stopped, self.rank = data, move, agree, stopped, rank
        self.items: Iterator[Any] | None = None
        self.made = 0

    def draw(self) -> Filled | Ended:
        """The next batch; the user's error with its number."""
        while True:
            try:
                if self.items is None:
                    self.items = iter(self.data)
                item = next(self.items, self)
                filled = None if item is EPOCH or item is self else self.move(item)._replace(at=now())
            except BaseException as error:
                error.add_note(f"raised while batch {self.made} (from 0) was loaded, on rank {self.rank}")
                with contextlib.suppress(Exception):
                    self.agree("failed", self.made, f"{type(error).__name__}: {error}", self.stopped)
                raise
            what = "batch" if filled is not None else "epoch" if item is EPOCH else "end"
            del item
            ended = self.agree(what, self.made, "", self.stopped)
            if ended is not None:
                return ended
            if filled is not None:
                self.made += 1
                return filled

    def close(self) -> None:
        """Let go of the data; a generator ends here."""
        items: Any = self.items
        self.items = None
        if hasattr(items, "close"):
            with contextlib.suppress(Exception):
                items.close()


def _work(registers: Registers, source: BatchSource) -> None:
    """What the thread does. It knows nothing of the `Loader`, so that one which nobody holds can end it."""
    try:
        while registers.claim():
            try:
                filled = source.draw()
            except Closed:
                return
            except BaseException as error:
                registers.fill(error)
                return
            registers.fill(filled)
            if isinstance(filled, Ended):
                return
            del filled
    finally:
        source.close()


_open: weakref.WeakSet[Loader] = weakref.WeakSet()


class Loader(Iterator[Any]):
    """Batches of an iterable, loaded ahead of their use by a thread of their own.

    `depth=0` has no thread: a batch is loaded when it is asked for.
    """

    def __init__(
        self,
        data: Iterable[Any],
        depth: int = 2,
        *,
        device: torch.device | None = None,
        whole: bool = True,
        agree: Agree = agree_alone,
        rank: int = 0,
        ended: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`ended` is told why if the data is over here or elsewhere, but not everywhere."""
        self.depth, self._ended = depth, ended
        self._move = Mover(device or torch.device("cpu"), whole)
        self.registers = Registers(depth)
        registers = self.registers
        self._source = BatchSource(data, self._move, agree, lambda: registers.closed, rank)
        self._wait: tuple[int, int] | None = None
        self.waited_ns = 0
        """How long the consumer has waited for batches, in all."""
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=_work, args=(registers, self._source), name=LOADER, daemon=True)
            weakref.finalize(self, registers.close)
            _open.add(self)
            self._thread.start()

    def __next__(self) -> Any:
        start = now()
        if self._thread is not None:
            filled = self.registers.take()
        elif self.registers.closed:
            filled = Ended()
        else:
            filled = self._inline()
        self._wait = (start, now())
        self.waited_ns += self._wait[1] - start
        if isinstance(filled, Ended):
            self.close()
            if filled.why:
                self._ended(filled.why)
            raise StopIteration
        return self._move.taken(filled)

    def _inline(self) -> Filled | Ended:
        """Without a thread."""
        registers = self.registers
        registers.filling_since, registers.most = now(), 1
        try:
            filled = self._source.draw()
            if isinstance(filled, Filled):
                registers.loads.append((registers.filling_since, filled.at))
            return filled
        except BaseException:
            self.close()
            raise
        finally:
            registers.filling_since = None

    def settle(self) -> None:
        """Wait until the thread rests, because its registers are full or its data is over."""
        if self._thread is not None:
            self.registers.settle()

    def wait(self) -> tuple[int, int] | None:
        """When the consumer began and ceased to wait for the batch it has; told once."""
        out, self._wait = self._wait, None
        return out

    def loads(self, start: int, end: int) -> list[tuple[int, int]]:
        """What was loaded between two moments: when each load began and ended, cut at both."""
        registers = self.registers
        with registers.changed:
            running = registers.filling_since
            found = [*registers.loads, *([(running, end)] if running is not None else [])]
        return [(max(a, start), min(b, end)) for a, b in found if b > start and a < end]

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """End the thread and let go of all batches; waits so long for user code that is reading one."""
        self.registers.close()
        thread = self._thread
        if thread is None:
            self._source.close()
        elif thread is not threading.current_thread():
            thread.join(wait_s)

    @property
    def running(self) -> bool:
        """Whether there is a thread that has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    """A thread that is inside of torch when the interpreter goes would take the process with it."""
    for loader in list(_open):
        loader.close(1.0)
