"""The saver: a job's checkpoints, written beside its steps.

A save begins between two steps, on all ranks: scalars and buffers are taken at once, and a thread of each rank copies
its part of everything else while the next forward and backward run (on a GPU it is copied at once). Then, still
beside the steps, ranks send each other the few parts of blocks that go across their cuts, hash and write their
blocks, and the first rank commits: a checkpoint is there whole or not at all. The next save waits until the last is
committed, so there is one copy of a rank's part at any time.

A save that fails is raised at the next `check`, on every rank, with the store's name; nothing that was committed
before is touched. `finish` waits for the last one, so no run ends well without its checkpoint.

Not covered: weights that a user's own code changes between steps while they are copied. Where torch counts such
changes the save is refused; `job.save` waits, and has no such moment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.capture.torch_private import changes_seen
from laminar.checkpoint.format.block_grid import box_shape
from laminar.checkpoint.format.hashing import HASH_BYTES
from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.history.gc import collect_garbage
from laminar.checkpoint.history.references import CheckpointRef
from laminar.checkpoint.history.retention import Keep, drop_checkpoints
from laminar.checkpoint.history.save import LOW_PRECISION
from laminar.checkpoint.packs.block_writer import Written
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError, StateError
from laminar.events import emit
from laminar.train.protocol import HasState
from laminar.train.saving.beside import about_run
from laminar.train.saving.scalars import scalars_of
from laminar.train.saving.snapshots.among_ranks import first_text, gathered_bytes
from laminar.train.saving.snapshots.block_sink import BlockSink, BlockToWrite, sink_for
from laminar.train.saving.snapshots.snapshot import Snapshot
from laminar.train.saving.snapshots.snapshot_plan import SnapshotPlan
from laminar.train.state.shards import StateShard


@dataclass(frozen=True)
class SavedCheckpoint:
    """What became of a save."""

    ref: CheckpointRef
    written: Written
    """By this rank."""
    stalled_s: float
    """How long the steps stood still for it on this rank, the wait for its copy included."""
    seconds: float
    """From its beginning until it was committed."""


class Saver:
    """Writes one job's checkpoints into one store, as one run. All methods but `check` are for every rank to call."""

    def __init__(self, job: HasState, store: Store, run: str, sequence: int = 0, compress: bool = True) -> None:
        """The next checkpoint is the one after number `sequence` of `run`."""
        self.job, self.store, self.run, self.sequence, self.compress = job, store, run, sequence, compress
        self.parent: str | None = None
        self.keep: Keep | None = None
        """Which checkpoints stay; nothing: all."""
        self.last: SavedCheckpoint | None = None
        """The last one that was committed."""
        self.sink: BlockSink | None = None
        """What hashes and writes this rank's blocks."""
        self._snapshot: Snapshot | None = None
        self._group = job.peers.another_group()
        self._bases: dict[tuple[Any, int], bytes] = {}
        """Hashes of this rank's last blocks."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stalled_s = 0.0
        self.joins_at_exit = False
        job.peers.open.add(self)

    def go_on(self, ref: CheckpointRef, sequence: int) -> None:
        """From another checkpoint, whose run has checkpoints up to number `sequence`."""
        self._join()
        self.run, self.sequence, self.parent, self._bases = ref.run, sequence, ref.manifest, {}

    def save(self, about: dict[str, Any] | None = None, scheduler: Any = None) -> None:
        """Save the job as it is now, beside the steps to come; first waits for the save before."""
        begun = time.perf_counter()
        self._join()
        self.check()
        job = self.job
        shards = list(job.state.shards())
        plan = job.planner.plan(shards)
        snapshot = self._memory_on_all(plan)
        scalars = scalars_of(job.state, job.gather.notes)
        beside = {**about_run(job, scheduler), **(about or {})}
        snapshot.copy(shards, buffers=True)
        versions = _versions(shards)
        copied = threading.Event()
        wrong: list[str] = []

        def copy() -> None:
            try:
                snapshot.copy(shards, buffers=False)
                if _versions(shards) != versions:
                    wrong.append("weights or optimizer state were changed by other code while they were copied")
            except Exception as error:
                wrong.append(str(error))
            finally:
                copied.set()

        self._stalled_s = time.perf_counter() - begun
        if job.peers.device.type == "cpu":
            job.state.wait_for_copies.append(lambda: self._waits(copied))
        else:
            copy()
        work = _Work(self, snapshot, plan, scalars, beside, job.state.steps, begun)
        first = None if copied.is_set() else copy
        self._thread = threading.Thread(target=work.run, args=(first, wrong), name="laminar saver")
        self._thread.start()
        _join_before_exit(self)

    def _waits(self, copied: threading.Event) -> None:
        begun = time.perf_counter()
        copied.wait()
        self._stalled_s += time.perf_counter() - begun

    def _memory_on_all(self, plan: SnapshotPlan) -> Snapshot:
        """Memory for the blocks of this rank; if one rank can't have it, all of them say so."""
        made, said = None, ""
        try:
            made = self._memory_for(plan)
        except Exception as error:
            said = f"rank {self.job.peers.rank} has no room for its part: {error}"
        failed = next((text for text in self.job.peers.gather_objects(said) if text), "")
        if made is None or failed:
            raise self._failed(failed)
        return made

    def _memory_for(self, plan: SnapshotPlan) -> Snapshot:
        if self._snapshot is None or self._snapshot.plan is not plan:
            self._snapshot = None
            if self.sink is None:
                self.sink = sink_for(self.store, plan.nbytes, self.compress)
                weakref.finalize(self, self.sink.close)  # a job that nobody closes leaves no process behind
            self._snapshot = Snapshot(plan, self.job.peers, self.sink.room(plan.nbytes))
        return self._snapshot

    def renew(self) -> None:
        """The next save has a writer of its own: the last one failed, and the process that writes may have died."""
        with contextlib.suppress(Exception):
            if self.sink is not None:
                self.sink.close()
        self.sink = self._snapshot = None

    # --- the end of a save

    def check(self) -> None:
        """Raise what became of the last save, if it failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failed(str(error)) from error

    def _failed(self, said: str) -> StateError:
        return StateError(
            f"a checkpoint could not be saved in {self.store.uri}: {said}", next="see to that, then resume"
        )

    def settle(self) -> None:
        """Wait until no save is under way; what became of the last one is told by `check`."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def leave(self, wait_s: float) -> None:
        """The run has failed: give a save that is under way so long to end."""
        if self._thread is not None:
            self._thread.join(wait_s)

    def finish(self) -> SavedCheckpoint | None:
        """Wait until the last save is committed; an error on every rank if it is not."""
        self._join()
        error, self._error = self._error, None
        for said in self.job.peers.gather_objects(None if error is None else str(error)):
            if said is not None:
                raise self._failed(said) from error
        return self.last

    def close(self) -> None:
        """End with the world: what is under way is waited for."""
        self._join()
        if self._error is not None:
            logging.getLogger("laminar").warning(str(self._failed(str(self._error))))
        self.renew()
        self.job.peers.leave_group(self._group)
        self._group = None


def _join_before_exit(saver: Saver) -> None:
    """A script that ends behind a save waits for it, while threads may still be started: later none may."""
    there = weakref.ref(saver)

    def join() -> None:
        found = there()
        if found is not None:
            found.settle()

    if not saver.joins_at_exit and hasattr(threading, "_register_atexit"):
        saver.joins_at_exit = True
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out already
            threading._register_atexit(join)


@dataclass
class _Work:
    """One save, as a thread of a rank goes through it."""

    saver: Saver
    snapshot: Snapshot
    plan: SnapshotPlan
    scalars: dict[str, Any]
    about: dict[str, Any]
    step: int
    begun: float

    def run(self, copy: Callable[[], None] | None, wrong: list[str]) -> None:
        """Until it is committed, or has failed."""
        saver = self.saver
        try:
            if copy is not None:
                copy()
            saver.last = self._saved(wrong)
            ref = saver.last.ref
            self._dropped()
            emit("checkpoint", step=ref.step, run=ref.run, root=ref.root, **_numbers(saver.last))
        except Exception as error:
            saver._error = error
            emit("save failed", step=self.step, store=saver.store.uri, said=str(error))
            saver.renew()

    def _saved(self, wrong: list[str]) -> SavedCheckpoint:
        saver = self.saver
        if saver._group is not None:
            self.snapshot.exchange(saver._group)
        sink = saver.sink
        assert sink is not None
        hashes: list[bytes] = []
        written = Written()
        try:
            if not wrong:
                hashes, written = sink.write(self._blocks())
        except Exception as error:
            wrong.append(str(error))
        try:
            everyone = self._told(hashes, wrong[0] if wrong else "")
            ref = self._committed(sink, everyone)
        finally:
            with contextlib.suppress(CheckpointError):  # of what was committed nothing is lost with it
                sink.end()
        self._remember(hashes)
        return SavedCheckpoint(ref, written, saver._stalled_s, time.perf_counter() - self.begun)

    def _dropped(self) -> None:
        """Drop checkpoints that need not stay; where that fails, the one that was saved is no worse for it."""
        saver = self.saver
        if saver.keep is None or saver.job.peers.rank != 0:
            return
        try:
            if drop_checkpoints(saver.store, saver.run, saver.keep):
                collect_garbage(saver.store)
        except CheckpointError as error:
            emit("keep", said=error.what)

    def _blocks(self) -> list[BlockToWrite]:
        out = []
        for share, offset in zip(self.plan.mine, self.plan.offsets, strict=True):
            tensor = self.plan.tensors[share.tensor]
            base = self.saver._bases.get((tensor.key, share.number)) if tensor.dtype in LOW_PRECISION else None
            out.append(BlockToWrite(offset, box_shape(share.box), tensor.item_bytes, share.nbytes, base))
        return out

    def _remember(self, hashes: Sequence[bytes]) -> None:
        self.saver._bases = {
            (self.plan.tensors[s.tensor].key, s.number): h for s, h in zip(self.plan.mine, hashes, strict=True)
        }

    # --- among ranks

    def _told(self, hashes: Sequence[bytes], failed: str) -> list[bytes] | None:
        """The hashes of all blocks, in the order of the plan, on the first rank; an error on all if any rank failed."""
        saver = self.saver
        counts = [0] * saver.job.peers.size
        for share in self.plan.shares:
            counts[share.writer] += 1
        mine = b"".join(hashes) if not failed else b"\0" * (counts[saver.job.peers.rank] * HASH_BYTES)
        everyone = gathered_bytes(mine, [n * HASH_BYTES for n in counts], saver.job.peers, saver._group)
        said = first_text(failed, saver.job.peers, saver._group)
        if said:
            raise StateError(said)
        if everyone is None:
            return None
        return self.plan.in_order(everyone)

    def _committed(self, sink: BlockSink, hashes: list[bytes] | None) -> CheckpointRef:
        saver = self.saver
        said = ""
        if hashes is not None:
            try:
                state = self.plan.state(hashes, self.scalars)
                manifest = Manifest(saver.run, self.step, state, saver.parent, self.about)
                ref = sink.commit(manifest, saver.sequence)
                said = json.dumps({"ref": [ref.run, ref.sequence, ref.step, ref.manifest, ref.root]})
            except Exception as error:
                said = json.dumps({"failed": str(error)})
        found = json.loads(first_text(said, saver.job.peers, saver._group))
        if "failed" in found:
            raise StateError(found["failed"])
        ref = CheckpointRef(*found["ref"])
        saver.sequence, saver.parent = ref.sequence, ref.manifest
        return ref


def _versions(shards: Sequence[StateShard]) -> int:
    """How often torch has seen the tensors of these change, in sum; buffers, which are copied already, aside."""
    return sum(changes_seen(s.tensor) for s in shards if s.kind != "buffer")


def _numbers(saved: SavedCheckpoint) -> dict[str, Any]:
    written = saved.written
    return {
        "new_bytes": written.new_bytes,
        "shared_bytes": written.shared_bytes,
        "stalled_s": saved.stalled_s,
        "seconds": saved.seconds,
    }
