"""What nobody refers to is removed: packs, manifests, and what writers that died have left.

A block is live if a checkpoint has it, or if a pack that stays has a delta to it. A pack without live blocks goes in
two steps, because a writer may have looked, found a block there and not have committed yet:

1. It is condemned, by a marker. Writers that take their lease from now on don't count on it.
2. Leases are listed: these writers may have missed the marker, and their names are written into it. When none of them
   has its lease any more, references are read once more, and what is still dead is removed.

A writer that has its lease therefore finds every block it saw, until it has committed or given up. Nothing waits: if
somebody writes right now, the second step is for the next collection. Collections take turns, by numbers that must be
free; one that finds a later number has been given up by others and stops. Packs that are needed for little are copied
first (`compact.py`), and go like others.

A reference or manifest that can't be read might refer to anything, so nothing is removed until it is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.checkpoint.format.encoding import DELTAS
from laminar.checkpoint.format.sealed import read_sealed, sealed
from laminar.checkpoint.history.compact import PackPlaces, copy_out_of_sparse
from laminar.checkpoint.history.leases import LEASE_S, LEASES
from laminar.checkpoint.history.references import CONDEMNED, DAMAGED, MANIFESTS, list_refs, load_manifest, pack_of
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.store.protocol import MissingKeyError, Store
from laminar.errors import CheckpointError

GC_TURNS = "gc"


@dataclass(frozen=True)
class Collected:
    """What a collection removed, and what it left for the next one."""

    packs: tuple[str, ...] = ()
    freed_bytes: int = 0
    manifests: int = 0
    leftovers: int = 0
    """Files of writers that died."""
    waiting: tuple[str, ...] = ()
    """Packs that go when those who write now have ended."""


@dataclass(frozen=True)
class _Turn:
    """This collection's number, and what the store's clock said when it began."""

    store: Store
    number: int
    now_s: float

    def go_on(self) -> None:
        """Show that this collection is alive; stop if another one has begun because it seemed dead."""
        if any(_number(f.key) > self.number for f in self.store.list(GC_TURNS)):
            raise CheckpointError("this took so long that another collection has begun", next="leave it to that one")
        self.store.put(f"{GC_TURNS}/{self.number:010d}", b"")

    def end(self) -> None:
        """Let others have their turn."""
        self.store.put(f"{GC_TURNS}/{self.number:010d}.done", b"")


def _number(key: str) -> int:
    digits = key.rpartition("/")[2][:10]
    return int(digits) if digits.isdigit() else 0


def collect_garbage(store: Store, lease_s: float = LEASE_S) -> Collected:
    """Remove what nobody refers to or is about to. `lease_s` is after how long writers that say nothing are dead."""
    turn = _take_turn(store, lease_s)
    try:
        return _collect(store, turn, lease_s)
    finally:
        turn.end()


def _take_turn(store: Store, lease_s: float) -> _Turn:
    files = store.list(GC_TURNS)
    last = max((_number(f.key) for f in files), default=0)
    key = f"{GC_TURNS}/{last + 1:010d}"
    busy = CheckpointError("another collection is at work on this store", next="wait until it has ended")
    ended = last == 0 or any(f.key.endswith(".done") and _number(f.key) == last for f in files)
    if not ended:
        store.put(f"{GC_TURNS}/clock", b"")
        begun = max(f.modified_s for f in files if _number(f.key) == last)
        if _modified(store, f"{GC_TURNS}/clock") - begun < lease_s:
            raise busy
    if not store.put_new(key, b""):
        raise busy
    for old in files:
        if _number(old.key):  # not the clock, which others may be looking at
            store.delete(old.key)
    return _Turn(store, last + 1, _modified(store, key))


def _modified(store: Store, key: str) -> float:
    found = [f.modified_s for f in store.list(GC_TURNS) if f.key == key]
    if not found:
        raise CheckpointError("another collection has begun meanwhile", next="leave it to that one")
    return found[0]


def _collect(store: Store, turn: _Turn, lease_s: float) -> Collected:
    index, manifests = BlockIndex(store), [f.key for f in store.list(MANIFESTS)]
    packs = index.packs()
    before = _markers(store)
    live, _ = _live(store)
    spare = copy_out_of_sparse(store, packs, live, f"moved-{turn.number:010d}", turn.go_on)
    dead = set(packs) - _needed(packs, live, spare)
    for pack in sorted(dead - set(before)):
        _condemn(store, pack, None)
    leases = _live_leases(store, turn.now_s, lease_s)
    live, referred = _live(store)
    needed = _needed(packs, live, spare)
    turn.go_on()
    gone, waiting = [], []
    for pack in sorted(set(packs) | set(before)):
        if pack in needed or pack not in packs:
            store.delete(_marker(pack))
        elif pack in dead:
            blockers = before.get(pack)
            holders = leases if blockers is None else leases & blockers
            if holders:
                waiting.append(pack)
                if blockers is None:
                    _condemn(store, pack, leases)
            else:
                gone.append(pack)
    for file in store.list(DAMAGED):
        if pack_of(file.key) not in packs:
            store.delete(file.key)
    sizes = {f.key: f.size for f in store.list("packs")}
    for pack in gone:
        store.delete(pack)
        store.delete(_marker(pack))  # after it: without the marker, a new writer may count on the pack
    orphans = [] if leases else [key for key in manifests if key.partition("/")[2] not in referred]
    for key in orphans:
        store.delete(key)
    freed = sum(sizes.get(pack, 0) for pack in gone)
    return Collected(tuple(gone), freed, len(orphans), store.clean(lease_s), tuple(waiting))


def _live(store: Store) -> tuple[set[bytes], set[str]]:
    """Blocks that checkpoints have, and the manifests that are referred to."""
    found = list_refs(store)
    for key, error in found.damaged.items():
        raise CheckpointError(
            f"nothing can be removed while {key} can't be read, because nobody knows what it refers to: {error.what}",
            next=f"remove {key} if the checkpoint is given up",
        )
    blocks: set[bytes] = set()
    for manifest in {ref.manifest for ref in found.refs}:
        try:
            tensors = load_manifest(store, manifest).state.tensors
        except CheckpointError as error:
            keys = ", ".join(ref.key for ref in found.refs if ref.manifest == manifest)
            raise CheckpointError(
                f"nothing can be removed while a checkpoint's manifest can't be read: {error.what}",
                next=f"remove {keys} if the checkpoint is given up",
            ) from error
        blocks.update(t.block(n) for t in tensors for n in range(t.blocks))
    return blocks, {ref.manifest for ref in found.refs}


def _needed(packs: PackPlaces, live: set[bytes], spare: set[str]) -> set[str]:
    """Packs that stay: those with live blocks, and those with bases of deltas in packs that stay.

    A pack in `spare` stays only for blocks that no other has.
    """
    wanted, stay, rest = set(live), set[str](), dict(packs)
    elsewhere = {p.hash for pack, places in packs.items() if pack not in spare for p in places}
    while True:
        found = {
            pack
            for pack, places in rest.items()
            if any(p.hash in wanted and (pack not in spare or p.hash not in elsewhere) for p in places)
        }
        if not found:
            return stay
        stay |= found
        for pack in found:
            wanted.update(p.base for p in rest.pop(pack) if p.encoding in DELTAS)


def _marker(pack: str) -> str:
    return f"{CONDEMNED}/{pack.partition('/')[2]}"


def _condemn(store: Store, pack: str, blockers: set[str] | None) -> None:
    listed = None if blockers is None else sorted(blockers)
    store.put(_marker(pack), sealed("condemned", {"laminar_condemned": 1, "blockers": listed}))


def _markers(store: Store) -> dict[str, set[str] | None]:
    """Condemned packs, and whose leases they wait for; None: not known, as where a collection was cut short."""
    out: dict[str, set[str] | None] = {}
    for file in store.list(CONDEMNED):
        try:
            part = read_sealed("condemned", store.read(file.key), "laminar_condemned", "blockers")
            known = part["blockers"].value is not None
            out[pack_of(file.key)] = {b.text() for b in part["blockers"].rows()} if known else None
        except MissingKeyError:
            continue
        except CheckpointError:
            out[pack_of(file.key)] = None
    return out


def _live_leases(store: Store, now_s: float, lease_s: float) -> set[str]:
    """Names of leases that are not over; those that are, are removed."""
    live = set()
    for file in store.list(LEASES):
        if now_s - file.modified_s < lease_s:
            live.add(file.key.partition("/")[2])
        else:
            store.delete(file.key)
    return live
