"""References: the checkpoints of each run, in the order in which they were committed.

    refs/<run>/0000000007   run, sequence number, step, the manifest's hash and the state's root

A run goes on from its last number to the next, which must be free: of two processes that both believe to continue a
run, one finds it taken. So a run's checkpoints are never overwritten, and a run that was set back to an earlier step
simply has later numbers of lower steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.checkpoint.format.hashing import HASH_BYTES
from laminar.checkpoint.format.manifest import RUN_NAME, Manifest, read_manifest
from laminar.checkpoint.format.sealed import read_sealed, sealed
from laminar.checkpoint.format.state_record import hex_bytes
from laminar.checkpoint.packs.block_index import PACKS
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError, StorageError

REFS = "refs"
MANIFESTS = "manifests"
CONDEMNED = "condemned"
"""Names of packs that are about to be removed (`gc.py`): no new checkpoint may count on them."""

DAMAGED = "damaged"
"""Names of packs in which a block was found damaged (`verify.py`): what they hold is written again when it is saved."""


@dataclass(frozen=True)
class CheckpointRef:
    """One checkpoint of a run."""

    run: str
    sequence: int
    step: int
    manifest: str
    """Hash of the manifest."""
    root: str
    """Of the state."""

    @property
    def key(self) -> str:
        """Where it is kept."""
        return ref_key(self.run, self.sequence)

    @property
    def data(self) -> bytes:
        """The file."""
        return sealed(
            "reference",
            {
                "laminar_reference": 1,
                "run": self.run,
                "sequence": self.sequence,
                "step": self.step,
                "manifest": self.manifest,
                "root": self.root,
            },
        )


def ref_key(run: str, sequence: int) -> str:
    """Where the so-manieth checkpoint of a run is kept."""
    return f"{REFS}/{run}/{sequence:010d}"


def read_ref(store: Store, key: str) -> CheckpointRef:
    """A reference, which has to be the one that belongs under its key."""
    names = ("laminar_reference", "run", "sequence", "step", "manifest", "root")
    part = read_sealed("reference", store.read(key), *names)
    manifest, root = (hex_bytes(part[k], HASH_BYTES).hex() for k in ("manifest", "root"))
    found = CheckpointRef(part["run"].text(), part["sequence"].whole(1), part["step"].whole(), manifest, root)
    if found.key != key or not RUN_NAME.fullmatch(found.run):
        raise part.wrong(f"it does not belong under {key}")
    return found


def pack_of(marker: str) -> str:
    """The pack that a key in `condemned/` or `damaged/` is about."""
    return f"{PACKS}/{marker.partition('/')[2]}"


@dataclass(frozen=True)
class RefList:
    """References that were found, and what is wrong with those that can't be read."""

    refs: tuple[CheckpointRef, ...]
    """By run, oldest first."""
    damaged: dict[str, CheckpointError]
    """By key."""


def list_refs(store: Store, run: str | None = None) -> RefList:
    """All checkpoints of a store, or of one run."""
    refs, damaged = [], {}
    for file in store.list(REFS if run is None else f"{REFS}/{run}"):
        try:
            refs.append(read_ref(store, file.key))
        except MissingKeyError:
            continue  # dropped meanwhile
        except StorageError:
            raise
        except CheckpointError as error:
            damaged[file.key] = error
    return RefList(tuple(refs), damaged)


def last_sequence(store: Store, run: str) -> int:
    """The number of a run's last checkpoint, readable or not; 0 if it has none."""
    return max((int(f.key.rpartition("/")[2]) for f in store.list(f"{REFS}/{run}") if f.key[-10:].isdigit()), default=0)


def load_checkpoint(store: Store, ref: CheckpointRef) -> Manifest:
    """The manifest that a reference is to, which has to be of the same run, step and state."""
    manifest = load_manifest(store, ref.manifest)
    if (manifest.run, manifest.step, manifest.state.root) != (ref.run, ref.step, ref.root):
        raise CheckpointError(
            f"{ref.key} is to another run, step or state than its manifest's", next="use another checkpoint"
        )
    return manifest


def load_manifest(store: Store, manifest: str) -> Manifest:
    """A checkpoint's manifest, by its hash."""
    try:
        data = store.read(f"{MANIFESTS}/{manifest}")
    except MissingKeyError:
        raise CheckpointError(f"the manifest {manifest[:12]} is gone", next="use another checkpoint") from None
    return read_manifest(data, manifest)
