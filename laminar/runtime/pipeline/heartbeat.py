"""Who is alive and who moves: signs of life between ranks, and what follows when they stay away.

Four times per `timeout_s` a thread of each rank sends its neighbours a heartbeat: how many firings every rank has made,
as far as it has heard, and what each was last doing. The thread that acts need not take part, so a rank that computes
for long is not silent. From this a rank that waits concludes:

- a connection that ends without a goodbye: that process has died (known at once);
- no heartbeat from a neighbour for `timeout_s`: it has stopped, or its machine is gone;
- no rank anywhere has fired for twice `timeout_s`, though all are alive: they wait for each other, or for one that is
  busy with something else between two runs.

And a rank that is in one firing for longer than `timeout_s` says so itself. Whoever finds something tells its
neighbours, and they theirs, each once; the first that is heard is the cause that a rank's error names.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laminar.errors import PeerError, RankError

PER_TIMEOUT = 4
"""Heartbeats within the time after which a rank counts as silent."""


@dataclass(frozen=True)
class FailureCause:
    """Why ranks end: which of them, and what about it."""

    rank: int
    what: str
    next: str = "see that rank's log"

    def error(self, me: int) -> RankError:
        """The error as the rank `me` raises it."""
        return (RankError if self.rank == me else PeerError)(self.what, next=self.next)

    def tail(self) -> bytes:
        """As it travels."""
        return json.dumps([self.rank, self.what, self.next]).encode()

    @staticmethod
    def read(tail: bytes) -> FailureCause:
        """As it was sent."""
        return FailureCause(*json.loads(tail))


@dataclass
class Liveness:
    """What one rank knows about the others."""

    rank: int
    peers: Sequence[int]
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    doing: str = "not begun"
    """Of this rank, in words: "in F1.3 of step 0"."""
    fired: int = 0
    _heard: dict[int, float] = field(default_factory=dict)
    _known: dict[int, tuple[int, str]] = field(default_factory=dict)
    _moved: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Everybody has just been heard."""
        now = self.clock()
        self._heard = dict.fromkeys(self.peers, now)
        self._moved = now

    def heard(self, peer: int) -> None:
        """Anything at all has come from a neighbour."""
        if peer in self._heard:
            self._heard[peer] = self.clock()

    def gone(self, peer: int) -> None:
        """A connection has ended in peace."""
        self._heard.pop(peer, None)

    def told(self, tail: bytes) -> None:
        """A neighbour's heartbeat."""
        for rank, fired, doing in json.loads(tail):
            old = self._known.get(rank, (-1, ""))
            if rank != self.rank and fired >= old[0]:
                if fired > old[0]:
                    self._moved = self.clock()
                self._known[rank] = fired, doing

    def heartbeat(self) -> bytes:
        """What to tell the neighbours."""
        known = [(rank, *what) for rank, what in list(self._known.items())]
        return json.dumps([(self.rank, self.fired, self.doing), *known]).encode()

    def moved(self) -> None:
        """This rank has fired."""
        self.fired += 1
        self._moved = self.clock()

    def last(self, rank: int) -> str:
        """What a rank was last known to do."""
        return self._known.get(rank, (0, "not heard of"))[1]

    def verdict(self) -> FailureCause | None:
        """What is wrong, if something is. To be asked only after everything that has arrived was heard."""
        now = self.clock()
        for peer, when in self._heard.items():
            if now - when > self.timeout_s:
                return FailureCause(
                    peer,
                    f"rank {peer} has given no sign of life for {now - when:.1f} s; last known: {self.last(peer)}",
                    "see whether that process still runs",
                )
        if now - self._moved > 2 * self.timeout_s:
            all_ = {self.rank: self.doing} | {r: doing for r, (_, doing) in self._known.items()}
            stands = "; ".join(f"rank {r}: {doing}" for r, doing in sorted(all_.items()))
            return FailureCause(
                self.rank,
                f"no rank has moved for {now - self._moved:.1f} s: {stands}",
                "see that every rank runs the same steps of the same net",
            )
        return None


class HeartbeatThread(threading.Thread):
    """Calls `beat` every so often until stopped."""

    def __init__(self, every_s: float, beat: Callable[[], Any]) -> None:
        super().__init__(name="laminar-heartbeat", daemon=True)
        self.every_s, self.beat = every_s, beat
        self._stop_now = threading.Event()

    def run(self) -> None:
        """The thread."""
        while not self._stop_now.wait(self.every_s):
            self.beat()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        self._stop_now.set()
        if self is not threading.current_thread() and self.is_alive():
            self.join()
