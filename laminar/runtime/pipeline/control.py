"""The control plane: one rank among those of a net, what it hears and what it tells, apart from what it does.

It reads the connections, keeps watch over the neighbours (`heartbeat.py`), and sees to it that a cause of failure
reaches all ranks. They can agree on a number: each tells the coordinator, the lowest of them, which answers with the
least when it has heard all. What concerns registers and choices is handed on to `handle`.

`hear` and everything that raises belongs to the thread that acts. A second thread sends signs of life, and listens
while the first is in a firing, so that `on_failure` can end what will never end by itself: a collective with a rank
that has failed. A firing can't be interrupted from here; without such a hook it ends when its collective notices.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
from collections.abc import Callable, Sequence

from laminar.errors import PeerError, RankError
from laminar.runtime.pipeline.control_sockets import BEGIN, BYE, END, FAIL, GONE, HEARTBEAT, Connections, ControlMessage
from laminar.runtime.pipeline.heartbeat import PER_TIMEOUT, FailureCause, HeartbeatThread, Liveness

PEER_LOST = re.compile(r"gloo/|nccl|Connection (closed|reset) by peer|Broken pipe", re.IGNORECASE)
"""An error of a firing that may be the echo of another rank's end."""
ECHO_S = 2.0
"""How long to listen for the cause of such an error before naming it the cause."""


class ControlPlane:
    """One rank's ears and mouth."""

    def __init__(
        self,
        connections: Connections,
        ranks: Sequence[int],
        handle: Callable[[ControlMessage], None],
        timeout_s: float,
        on_failure: Callable[[RankError], None] | None = None,
    ) -> None:
        self.connections, self.rank, self.ranks, self.coordinator = connections, connections.rank, ranks, min(ranks)
        self.timeout_s, self.on_failure = timeout_s, on_failure
        self.liveness = Liveness(self.rank, connections.peers, timeout_s)
        self.cause: FailureCause | None = None
        """Why nothing goes on."""
        self.answers: dict[int, int] = {}
        """What all have agreed on, by kind of question."""
        self.sums: tuple[float, ...] = ()
        """Numbers that were told with the last question, added up over all ranks in their order."""
        self._handle = handle
        self._asked: dict[int, dict[int, tuple[int, tuple[float, ...]]]] = {BEGIN: {}, END: {}}
        self._byes = dict.fromkeys(connections.peers, 0)
        self._inside: tuple[str, float] | None = None
        self._ear, self._inbox = threading.Lock(), list[ControlMessage]()
        self._tick_s = min(timeout_s / (2 * PER_TIMEOUT), 1.0)
        self._next_look = 0.0
        self._heartbeat = HeartbeatThread(timeout_s / PER_TIMEOUT, self._beat)

    def start(self) -> None:
        """Everybody is taken to be alive now."""
        if self.cause is not None:
            raise self.cause.error(self.rank)
        self.liveness.restart()

    def live(self) -> None:
        """Begin to give signs of life."""
        if self.connections.peers and not self._heartbeat.is_alive():
            self._heartbeat.start()

    # -- what comes

    def hear(self, wait_s: float) -> bool:
        """Handle what has come; whether there was anything."""
        with self._ear:
            if self._inbox:
                wait_s = 0.0
            got = self._inbox + self.connections.receive(wait_s)
            self._inbox = []
        for message in got:
            self._heard(message)
        if self.cause is not None:
            raise self.cause.error(self.rank)
        return bool(got)

    def _heard(self, m: ControlMessage) -> None:
        self.liveness.heard(m.source)
        if m.kind in (BEGIN, END):
            if self.rank == self.coordinator:
                self._asked_by(m.source, m.kind, m.b, _numbers(m.tail))
            else:
                self.answers[m.kind], self.sums = m.b, _numbers(m.tail)
        elif m.kind == HEARTBEAT:
            self.liveness.told(m.tail)
        elif m.kind == BYE:
            self._byes[m.source] = max(m.a, self._byes[m.source])
        elif (cause := self._cause_in(m)) is not None:
            self.tell(cause)
        elif m.kind == GONE:
            self.liveness.gone(m.source)
        else:
            self._handle(m)

    def _cause_in(self, m: ControlMessage) -> FailureCause | None:
        if m.kind == FAIL:
            return FailureCause.read(m.tail)
        if m.kind == GONE and self._byes[m.source] < 2:
            return FailureCause(
                m.source, f"rank {m.source} has ended without a word; last known: {self.liveness.last(m.source)}"
            )
        return None

    def sleep(self, awaited: Callable[[], str]) -> None:
        """Wait until something comes, and see whether everybody is still there; `awaited` says for what."""
        came = self.hear(self._tick_s)
        if not came:
            self.liveness.doing = f"waiting for {awaited()}"
        if came and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._tick_s
        if (cause := self.liveness.verdict()) is not None:
            self.tell(cause)
            raise cause.error(self.rank)

    # -- what is told

    def ask(self, kind: int, number: int, terms: Sequence[float] = ()) -> None:
        """Tell the coordinator a number; the least of all ranks' will be in `answers`, the sums of their terms in
        `sums`."""
        if self.rank == self.coordinator:
            self._asked_by(self.rank, kind, number, tuple(terms))
        else:
            self.connections.post(self.coordinator, kind, b=number, tail=_tail(terms))
            self.connections.flush()

    def _asked_by(self, rank: int, kind: int, number: int, terms: tuple[float, ...]) -> None:
        asked = self._asked[kind]
        asked[rank] = number, terms
        if len(asked) == len(self.ranks):
            self.answers[kind] = least = min(number for number, _ in asked.values())
            self.sums = tuple(map(sum, zip(*(asked[r][1] for r in self.ranks), strict=True)))
            asked.clear()
            for other in self.ranks:
                if other != self.rank:
                    self.connections.post(other, kind, b=least, tail=_tail(self.sums))
            self.connections.flush()

    def tell(self, cause: FailureCause) -> None:
        """The first cause that is known is the cause; tell the neighbours, once."""
        if self.cause is None:
            self.cause = cause
            for peer in self.connections.peers:
                self.connections.post(peer, FAIL, tail=cause.tail())
            self.connections.flush()

    def enter(self, what: str, step: int) -> None:
        """A firing begins, or what ends a step."""
        self.liveness.doing = where = f"in {what} of step {step}"
        self._inside = where, time.monotonic()

    def leave(self) -> None:
        """It has ended."""
        self._inside = None

    def failed(self, error: BaseException, where: str) -> None:
        """A firing has raised: find out whether it is the cause or its echo, tell everybody, and raise."""
        self._inside = None
        if isinstance(error, PeerError) or PEER_LOST.search(str(error)):
            until = time.monotonic() + min(self.timeout_s / 2, ECHO_S)
            with contextlib.suppress(RankError):
                while time.monotonic() < until:
                    self.hear(0.05)
            self.tell(
                FailureCause(
                    -1, f"rank {self.rank} lost another in {where}: {_first_line(error)}", "see the logs of all ranks"
                )
            )
        self.tell(
            FailureCause(self.rank, f"rank {self.rank} failed in {where}: {type(error).__name__}: {_first_line(error)}")
        )
        assert self.cause is not None
        if isinstance(error, Exception):
            raise self.cause.error(self.rank) from error

    def stopped(self, error: BaseException) -> None:
        """This rank will not go on: tell the others, unless they know of a cause."""
        self.tell(FailureCause(self.rank, f"rank {self.rank} stopped: {type(error).__name__}: {_first_line(error)}"))

    def _beat(self) -> None:
        """A sign of life, in a thread of its own."""
        inside = self._inside
        if inside is not None and (for_s := time.monotonic() - inside[1]) > self.timeout_s:
            self.tell(
                FailureCause(
                    self.rank,
                    f"rank {self.rank} has been {inside[0]} for {for_s:.1f} s",
                    "see what it does there, or allow more time",
                )
            )
        for peer in self.connections.peers:
            self.connections.post(peer, HEARTBEAT, tail=self.liveness.heartbeat())
        self.connections.flush()
        if inside is None or not self._ear.acquire(blocking=False):
            return
        try:
            self._inbox += self.connections.receive(0.0)
            causes = [c for c in map(self._cause_in, self._inbox) if c is not None]
        finally:
            self._ear.release()
        if causes and self.on_failure is not None and self._inside is inside:
            hook, self.on_failure = self.on_failure, None
            hook(causes[0].error(self.rank))

    # -- the end

    def bye(self, number: int) -> None:
        """Everything that was said before a goodbye has been heard when all goodbyes are."""
        for peer in self.connections.peers:
            self.connections.post(peer, BYE, 0, number)
        self.connections.flush()
        self.liveness.doing = "closing"
        while any(said < number for said in self._byes.values()):
            self.sleep(lambda: "all ranks to close")

    def close(self) -> None:
        """End the connections."""
        self._heartbeat.stop()
        self.connections.close()


def _tail(terms: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(terms)}d", *terms)


def _numbers(tail: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(tail) // 8}d", tail)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
