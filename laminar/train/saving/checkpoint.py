"""A job to a store of checkpoints and back: which run it is there, and which checkpoint it goes on from.

A store is a folder or a URI (`s3://bucket/prefix`). It may hold many runs, each a row of checkpoints. A job that
saves for the first time begins a run of its own; one that has resumed goes on with that run. So nothing that somebody
else has saved is ever replaced or continued by chance. `uri#run` names a run, `uri#run@1200` the checkpoint of one of
its steps.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.history.checkpoint_name import CheckpointName
from laminar.checkpoint.history.references import CheckpointRef, last_sequence, list_refs
from laminar.checkpoint.history.retention import Keep
from laminar.checkpoint.read.verify import shun_damaged
from laminar.checkpoint.store.protocol import Store
from laminar.checkpoint.store.uri import open_store
from laminar.errors import CheckpointError, StateError, StorageError
from laminar.events import emit
from laminar.train.protocol import HasState
from laminar.train.saving import lr_schedulers
from laminar.train.saving.existing import is_legacy
from laminar.train.saving.generators import of_rank, restore_generators
from laminar.train.saving.legacy_checkpoint import resume_legacy
from laminar.train.saving.resume import resume_from
from laminar.train.saving.saver import SavedCheckpoint, Saver


def save(
    job: HasState, uri: str | os.PathLike[str], scheduler: Any = None, wait: bool = True
) -> SavedCheckpoint | None:
    """See `Job.save`."""
    saver = saver_for(job, uri)
    saver.save(scheduler=scheduler)
    return saver.finish() if wait else None


def saver_for(job: HasState, uri: str | os.PathLike[str], keep: str = "") -> Saver:
    """What writes a job's checkpoints into a store: the same for all of its saves there. Every rank calls this.

    `keep`: which of them stay, as text.
    """
    name = CheckpointName.parse(uri)
    if name.step is not None:
        raise StateError(f"{uri} is one checkpoint; a job is saved in a store", next=f"save in {name.store}")
    saver: Saver | None = job.savers.get(_place(name))
    if saver is None or name.run not in ("", saver.run):
        run = _agreed(job, lambda: _new_run(name))
        if saver is not None:
            saver.finish()
            saver.close()
        saver = job.savers[_place(name)] = Saver(job, open_store(name.store), run)
    if keep:
        saver.keep = Keep.parse(keep)
    return saver


def resume(
    job: HasState, uri: str | os.PathLike[str], scheduler: Any = None, generators: bool = True
) -> Mapping[str, Any]:
    """See `Job.resume`; what was saved beside the state, of a folder of the former kind nothing."""
    name = CheckpointName.parse(uri)
    if "://" not in name.store and is_legacy(Path(name.store)):
        resume_legacy(job, Path(name.store), scheduler)
        return {}
    mine = job.savers.get(_place(name))
    if mine is not None:
        mine.settle()  # or it would take the next number of its run later
    if mine is not None and not name.run:
        name = replace(name, run=mine.run)
    refs = _agreed(job, name.all_meant)
    schedulers = lr_schedulers.attached(job.state.optimizer, scheduler)
    named = scheduler is not None

    def fits(about: Mapping[str, Any]) -> None:
        lr_schedulers.refuse_other_schedulers(schedulers, about.get("schedulers", []), name.store, named)

    manifest, ref = _first_whole(job, open_store(name.store), refs, fits)
    again = lr_schedulers.restore_named if named else lr_schedulers.restore
    about = manifest.about
    again(schedulers, about.get("schedulers", []), name.store)
    if generators and about.get("generators"):
        restore_generators(of_rank(about["generators"], job.peers.rank, job.peers.size))
    last = _agreed(job, lambda: last_sequence(open_store(name.store), ref.run))
    saver: Saver | None = job.savers.get(_place(name))
    if saver is None:
        saver = job.savers[_place(name)] = Saver(job, open_store(name.store), ref.run)
    saver.go_on(ref, last)
    emit("resumed", step=ref.step, run=ref.run, root=ref.root)
    return about


def _first_whole(
    job: HasState, store: Store, refs: Sequence[CheckpointRef], fits: Callable[[Mapping[str, Any]], None]
) -> tuple[Manifest, CheckpointRef]:
    """Go on from the first of these that is whole, newest first."""
    damaged: CheckpointError | None = None
    for ref in refs:
        try:
            manifest = resume_from(job, store, ref, fits)
        except StorageError:
            raise
        except CheckpointError as error:
            emit("damaged", step=ref.step, run=ref.run, said=error.what)
            damaged = error
            continue
        if damaged is not None and job.peers.rank == 0:
            shun_damaged(store)  # or the next save might count on a block that is no good
        return manifest, ref
    assert damaged is not None
    raise CheckpointError(
        f"no checkpoint of {refs[0].run} in {store.uri} is whole", last=damaged.what, next="laminar checkpoint verify"
    ) from damaged


def _place(name: CheckpointName) -> str:
    """A store's name, the same however its folder is written."""
    return name.store if "://" in name.store else os.path.abspath(name.store)


def _new_run(name: CheckpointName) -> str:
    """A name for a run that is nobody else's."""
    if name.run:
        if list_refs(open_store(name.store), name.run).refs:
            raise StateError(
                f"{name.store} holds a run {name.run} already",
                next="resume it first, or save under another name; nothing that was saved is replaced",
            )
        return name.run
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _agreed(job: HasState, ask: Any) -> Any:
    """What the first rank finds out, on every rank; its error, too."""
    found: Any = None
    error: Exception | None = None
    if job.peers.rank == 0:
        try:
            found = ask()
        except Exception as refused:  # the others wait to hear of it
            error = refused
    said = job.peers.gather_objects((found, None if error is None else (type(error).__name__, str(error))))
    if error is not None:
        raise error
    found, refused_there = said[0]
    if refused_there is not None:
        kind = CheckpointError if refused_there[0] != "StateError" else StateError
        raise kind(f"rank 0: {refused_there[1]}")
    return found
