"""Leases: whoever is about to refer to blocks says so, and nothing it may count on is removed meanwhile.

A writer takes its lease before it looks which blocks there are, and gives it back when its checkpoint is committed or
given up. A thread renews it. A lease that was not renewed for `LEASE_S` is over: its holder has died, or has been
stopped for so long that it will find its lease gone and must not commit. Times are the store's: ages are told by the
difference to a file written now, so clocks of machines may differ.
"""

from __future__ import annotations

import secrets
import threading

from laminar.checkpoint.format.sealed import sealed
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError, StorageError

LEASES = "leases"
LEASE_S = 900.0
"""After which a lease that was not renewed is over."""


class Lease:
    """One writer's lease; a context manager that gives it back."""

    def __init__(self, store: Store, seconds: float = LEASE_S) -> None:
        self.name = secrets.token_hex(8)
        self._key = f"{LEASES}/{self.name}"
        self._store, self._every_s = store, seconds / 4
        self._ended = threading.Event()
        store.put(self._key, sealed("lease", {"laminar_lease": 1, "holder": self.name}))
        self._thread = threading.Thread(target=self._renew, name="laminar lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.check()
                self._store.put(self._key, sealed("lease", {"laminar_lease": 1, "holder": self.name}))
            except CheckpointError:
                continue  # tried again in time, or noticed at the commit

    def check(self) -> None:
        """Refuse to go on if the lease has run out and was taken away."""
        try:
            self._store.size(self._key)
        except MissingKeyError:
            raise CheckpointError(
                "the lease of this save has run out, and blocks it counts on may be gone", next="save again"
            ) from None

    def give_back(self) -> None:
        """Be done; harmless if it is given back already."""
        self._ended.set()
        self._thread.join()
        try:
            self._store.delete(self._key)
        except StorageError:
            return  # it runs out by itself

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
