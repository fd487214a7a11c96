"""The writer process, as the training process sees it.

    writer = WriterProcess("s3://bucket/run", most_bytes=4 << 30)
    segment = writer.segments.segment(nbytes)           # waits while too much is under way
    ...                                                 # copy shards into segment.memory, one after the other
    writer.begin()
    hashes = writer.add(segment, blocks)                # futures: nothing waits
    written = writer.finish()
    ref = writer.commit(manifest_of(hashes.result()), after=3)
    writer.end(); ref.result(); writer.free(segment)

A segment may be filled again when `finish` has been answered. What fails in the writer is raised by the future of the
request that failed and of those after it, until `end`; if the process dies, by all that wait. It is started with a
fresh Python, in a session of its own, and ends when this process closes it or ends in whatever way (`writer_main.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.history.references import CheckpointRef
from laminar.checkpoint.packs.block_writer import Written
from laminar.checkpoint.process.channel import BlockSource, Channel, block_message
from laminar.checkpoint.process.shared_memory import SegmentBudget, SharedSegment
from laminar.errors import CheckpointError, StorageError

MAIN = "laminar.checkpoint.process.writer_main"
CLOSE_S = 10.0
AnswerRead = TypeVar("AnswerRead")


class WriterProcess:
    """A process that writes blocks into one store."""

    def __init__(self, uri: str | os.PathLike[str], most_bytes: int, **options: Any) -> None:
        """`most_bytes` of segments may be in use at a time; `options` are those of `Save`."""
        self.segments = SegmentBudget(most_bytes)
        self.progress = Written()
        """Of the save under way, a fifth of a second old at most."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
        self._channel = Channel(ours)
        self._waiting: deque[tuple[Future[Any], Callable[[dict[str, Any]], Any]]] = deque()
        self._lock = threading.Lock()
        self._dead: CheckpointError | None = None
        self._thread = threading.Thread(target=self._receive, name="laminar writer", daemon=True)
        self._thread.start()
        self._opened = self._ask(_nothing, do="open", uri=os.fspath(uri), options=options)

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._process.pid

    # -- requests

    def begin(self) -> Future[None]:
        """A save begins: its lease is taken, and the store's blocks are looked up."""
        self.progress = Written()
        return self._ask(_nothing, do="begin")

    def add(self, segment: SharedSegment, blocks: Sequence[BlockSource]) -> Future[list[bytes]]:
        """Write blocks out of a segment, which stays as it is until `finish` is answered; their hashes."""
        if not segment.known:
            segment.known = True
            self._ask(_nothing, segment.fd, do="segment", number=segment.number, nbytes=segment.nbytes)
        listed = [block_message(b) for b in blocks]
        return self._ask(_hashes, do="add", segment=segment.number, blocks=listed)

    def finish(self) -> Future[Written]:
        """All that was added is durable."""
        return self._ask(lambda answer: Written(**answer["written"]), do="finish")

    def commit(self, manifest: Manifest, after: int = 0) -> Future[CheckpointRef]:
        """Make it a checkpoint; see `Save.commit`."""
        return self._ask(
            lambda answer: CheckpointRef(**answer["ref"]), do="commit", manifest=manifest.data.decode(), after=after
        )

    def end(self) -> Future[None]:
        """The save is over, committed or not; its lease is given back."""
        return self._ask(_nothing, do="end")

    def free(self, segment: SharedSegment) -> None:
        """Be done with a segment."""
        if segment.known:
            self._ask(_nothing, do="forget", number=segment.number)
        segment.free()

    def close(self) -> None:
        """End the process; a save under way is given up."""
        self._channel.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def __enter__(self) -> WriterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answers

    def _ask(
        self, read: Callable[[dict[str, Any]], AnswerRead], fd: int | None = None, **request: Any
    ) -> Future[AnswerRead]:
        future: Future[AnswerRead] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            self._waiting.append((future, read))
            with contextlib.suppress(OSError):  # the thread that receives notices, and fails all that wait
                self._channel.send(request, fd)
        return future

    def _receive(self) -> None:
        while (received := self._channel.receive()) is not None:
            answer = received[0]
            if "progress" in answer:
                self.progress = Written(**answer["progress"])
                continue
            future, read = self._waiting.popleft()
            if "error" in answer:
                kind = StorageError if answer["error"]["storage"] else CheckpointError
                future.set_exception(kind(answer["error"]["what"], **answer["error"]["lines"]))
            else:
                future.set_result(read(answer))
        with self._lock:
            self._dead = CheckpointError(
                "the process that writes checkpoints has ended", next="see its messages; what was committed is whole"
            )
            for future, _ in self._waiting:
                future.set_exception(self._dead)
            self._waiting.clear()


def _nothing(_: dict[str, Any]) -> None: ...


def _hashes(answer: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(h) for h in answer["hashes"]]
