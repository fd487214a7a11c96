"""`job.prefetch(data)`: batches loaded beside the step, and the same number of them on every rank.

    for batch in job.prefetch(data, depth=2):
        job.step(batch)

Each rank has a loader (`runtime/pipeline/loader.py`) over its own iterable. The end of data is a handshake: with
every item a loader says in the store what it got (a batch, the end, an error) and waits until all ranks have said so
about the same item; only then the batch counts as loaded. So no rank begins a step that another has no batch for:
where one rank's data ends, all end, and if others had more, all of them say who had how many. All this happens
on the loaders' threads, as far ahead of the steps as registers allow; it costs a step nothing and a batch three
messages to the store.

What ranks say about one item is summed up in one counter, so nobody reads another's note unless something is wrong.
"""

from __future__ import annotations

import json
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from laminar.errors import BatchError, LaminarError, PeerError
from laminar.runtime.pipeline.loader import Closed, Ended, Loader, agree_alone
from laminar.train.world import World

ODD = 1 << 32
"""Added to the counter of an item by a rank that has no batch there."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 0.0002, 0.01
"""How long to sleep before asking again whether all ranks have an item, at first and at most."""


class Handshake:
    """Ranks agree on every item of their data; one of these for each loader."""

    def __init__(self, store: Any, rank: int, size: int, place: str, timeout_s: float) -> None:
        """`place` is the same on all ranks, and no other loader's."""
        self.store, self.rank, self.size, self.place, self.timeout_s = store, rank, size, place, timeout_s
        self.items = 0

    def __call__(self, what: str, made: int, error: str, stopped: Callable[[], bool]) -> Ended | None:
        """See `runtime.loading.Agree`."""
        item, self.items = self.items, self.items + 1
        counter = f"{self.place}/{item}"
        self.store.set(f"{self.place}/made/{self.rank}", str(item))
        if what != "batch":
            self.store.set(f"{counter}/{self.rank}", json.dumps([what, made, error]))
        count = self.store.add(counter, 1 if what == "batch" else 1 + ODD)
        if what == "failed":
            return None  # nothing the others say could matter
        pause, since = FIRST_SLEEP_S, time.monotonic()
        while count % ODD < self.size:
            if stopped():
                raise Closed
            if time.monotonic() - since > self.timeout_s:
                raise self._late(item, made)
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_SLEEP_S)
            count = self.store.add(counter, 0)
        if item and self.rank == 0:
            self.store.delete_key(f"{self.place}/{item - 1}")  # all have gone on from there
        return self._verdict(counter, made) if count >= ODD else None

    def _verdict(self, counter: str, made: int) -> Ended | None:
        """What to do where somebody has no batch."""
        said: dict[int, tuple[str, int, str]] = {}
        for rank in range(self.size):
            if self.store.check([f"{counter}/{rank}"]):
                said[rank] = json.loads(self.store.get(f"{counter}/{rank}"))
        for rank, (what, at, error) in said.items():
            if what == "failed":
                raise PeerError(f"rank {rank} failed while it loaded batch {at} (from 0): {error}")
        kinds = {what for what, _, _ in said.values()}
        if len(said) == self.size and len(kinds) == 1:
            return Ended() if kinds == {"end"} else None
        more = [r for r in range(self.size) if r not in said]
        ends = "; ".join(f"the data of rank {r} ended after {at} batches" for r, (_, at, _) in said.items())
        why = f"{ends}; {_ranks(more)} had more" if more else f"{ends}, for some of them to begin anew"
        if "epoch" in kinds:
            raise BatchError(why, next="give every rank equally many batches")
        return Ended(f"{why}: all ranks end after {made} batches")

    def _late(self, item: int, made: int) -> PeerError:
        """Who has not come as far as this."""
        late = []
        for rank in range(self.size):
            key = f"{self.place}/made/{rank}"
            if not self.store.check([key]) or int(self.store.get(key)) < item:
                late.append(rank)
        return PeerError(
            f"{_ranks(late)} had not loaded batch {made} (from 0) after {self.timeout_s:.0f} s",
            next="see whether it still runs, and what its data waits for",
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


class Prefetcher:
    """Makes loaders on this rank of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.latest: Callable[[], Loader | None] = lambda: None
        """The loader that was made last, for recordings to ask."""

    def __call__(self, data: Iterable[Any], depth: int = 2) -> Loader:
        """The batches of `data`, loaded by a thread of their own, at most `depth` ahead; on a GPU, on the device.

        `data` is any iterable of what `step` takes, a `DataLoader` for one. All ranks get equally many batches. Ends
        with the data, with `close()`, or when nobody holds it any more; also a context manager.
        """
        if depth < 0:
            raise LaminarError(f"prefetch(depth={depth})", allowed="a whole number; 0 loads when asked")
        world, agree = self.world, agree_alone
        if world.store is not None:
            agree = Handshake(world.store, world.rank, world.size, world.meeting("load"), world.timeout_s)
        loader = Loader(
            data, depth, device=world.device, whole=world.size == 1, agree=agree, rank=world.rank, ended=_uneven
        )
        self.latest = weakref.ref(loader)
        world.open.add(loader)
        return loader


def _uneven(why: str) -> None:
    warnings.warn(why, stacklevel=3)
