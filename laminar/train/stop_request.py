"""A signal that asks a run to end: noted while steps are made, answered between two of them, after a last checkpoint.

Ranks may hear of it at different moments. Each that has heard says so in the store, with its step, and goes on; once
all have, all stop one step behind the last step at which one heard. Nothing is asked of the store before a signal
came. If the others don't hear of it in time, the rank that did ends as it would have without a checkpoint.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is not needed to note a signal
    from laminar.train.world import World

HEARD_WITHIN_S = 20.0
"""How long ranks that have heard wait for the others to hear."""


class StopRequest:
    """One process's; signals are the process's, so there is one, `STOP`."""

    def __init__(self) -> None:
        self.armed = False
        """Whether somebody looks at this between steps."""
        self.asked: BaseException | None = None
        """What to raise in the end."""
        self._since = 0.0
        self._place = ""

    def note(self, why: BaseException) -> bool:
        """Called by the signal's handler: whether this will be seen to."""
        if not self.armed or self.asked is not None:
            return False
        self.asked, self._since = why, time.monotonic()
        return True

    def begin(self, peers: World) -> None:
        """Steps are made from now on; all ranks call this."""
        self.asked, self.armed, self._place = None, True, peers.meeting("stop")

    def end(self) -> None:
        """No more steps are made."""
        self.armed = False

    def due(self, peers: World, step: int, ahead: int = 0) -> bool:
        """Whether to stop behind this step; at the same one on every rank.

        `ahead`: how many steps one rank's host may be ahead of another's, where steps are queued on a device.
        """
        if self.asked is None:
            return False
        if peers.store is None:
            return True
        mine = f"{self._place}/{peers.rank}"
        if not peers.store.check([mine]):
            peers.store.set(mine, str(step))
        everyone = [f"{self._place}/{rank}" for rank in range(peers.size)]
        if peers.store.check(everyone):
            return step > max(int(peers.store.get(k)) for k in everyone) + ahead
        if time.monotonic() - self._since > HEARD_WITHIN_S:
            raise self.asked
        return False


STOP = StopRequest()
