"""Blocks written: hashed, looked up, encoded and appended to packs; what the store has already is not written again.

Hashing and encoding happen where `add` is called, writing in a thread beside it, at most `BLOCKS_AHEAD` blocks behind.
A pack becomes visible when it is whole and durable: at its size limit, and at `finish`. What was added and not finished
is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from laminar.checkpoint.format.encoding import DELTAS, UNCODED, Stored, encode_block
from laminar.checkpoint.format.hashing import Content, block_hash
from laminar.checkpoint.packs.block_index import PACKS, BlockIndex
from laminar.checkpoint.packs.block_reader import BlockReader
from laminar.checkpoint.packs.pack_format import NO_BASE, PACK_MAGIC, BlockPlace, pack_end, stored_hash
from laminar.checkpoint.store.protocol import Store, Upload
from laminar.errors import CheckpointError, StorageError

PACK_BYTES = 1 << 30
"""A pack that has grown so large is ended, and another begun."""
BLOCKS_AHEAD = 4
"""Blocks that wait to be written: 16 MiB of memory."""


@dataclass
class Written:
    """What became of the blocks of a save."""

    blocks: int = 0
    plain_bytes: int = 0
    new_blocks: int = 0
    new_bytes: int = 0
    """Of blocks that were written, as they are stored."""
    shared_bytes: int = 0
    """Of blocks that the store had, plain."""


class BlockWriter:
    """Writes one process's blocks of one save into packs called `name`-0, -1, ..."""

    def __init__(
        self,
        store: Store,
        name: str,
        index: BlockIndex,
        shun: frozenset[str] = frozenset(),
        compress: bool = True,
        threads: int = 1,
    ) -> None:
        """Blocks of packs in `shun` count as not there: they may be about to go, or damaged."""
        self.written = Written()
        self._store, self._name, self._index, self._shun = store, name, index, shun
        self._compress, self._threads = compress, threads
        self._reader = BlockReader(store, index)
        self._mine: set[bytes] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="laminar pack")
        self._under_way: deque[Future[None]] = deque()
        self._upload: Upload | None = None
        self._places: list[BlockPlace] = []
        self._offset = 0
        self._packs = 0
        self._finished = False
        self._broken: BaseException | None = None

    def add(self, plain: memoryview, base: bytes | None = None, item_bytes: int = 1) -> bytes:
        """The hash of a block, which is in the store after `finish`; till then, its content must not change.

        `base`: the hash of a block to which this one may be stored as a delta, if that takes little room. `item_bytes`:
        of an element, which helps to make deltas small.
        """
        content = plain.cast("B")
        digest = block_hash(content, self._threads)
        self.written.blocks += 1
        self.written.plain_bytes += len(content)
        if digest in self._mine or self._is_kept(digest):
            self.written.shared_bytes += len(content)
            return digest
        self._mine.add(digest)
        stored, base = self._encoded(content, base, item_bytes)
        self.written.new_blocks += 1
        self.written.new_bytes += len(stored.data)
        while len(self._under_way) >= BLOCKS_AHEAD:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(self._unless_broken, self._append, digest, len(content), stored, base))
        return digest

    def _is_kept(self, block: bytes) -> bool:
        """Whether the store has a block and will go on having it, with all that is needed to read it."""
        return any(
            pack not in self._shun and (place.encoding not in DELTAS or self._is_kept(place.base))
            for pack, place in self._index.places(block)
        )

    def _encoded(self, content: memoryview, base: bytes | None, item_bytes: int) -> tuple[Stored, bytes]:
        if not self._compress:
            return Stored(UNCODED, content), NO_BASE
        depth, before = 0, None
        if base is not None and self._is_kept(base):
            depth = max(p.depth for _, p in self._index.places(base))
            before = self._base(base, len(content))
        stored = encode_block(content, item_bytes, before, depth)
        return stored, base if base is not None and stored.encoding in DELTAS else NO_BASE

    def _base(self, base: bytes, plain_bytes: int) -> Content | None:
        """The content of a base; a damaged one is no reason to fail, and none to make more depend on it."""
        try:
            return self._reader.read(base, plain_bytes)
        except StorageError:
            raise
        except CheckpointError:
            return None

    # -- in the thread beside

    def _unless_broken(self, call: Callable[..., None], *args: object) -> None:
        """After one failure nothing more is written: half a block may stand where the next one would be."""
        if self._broken is not None:
            raise self._broken
        try:
            call(*args)
        except BaseException as error:
            self._broken = error
            raise

    def _append(self, digest: bytes, plain_bytes: int, stored: Stored, base: bytes) -> None:
        if self._upload is None:
            self._upload = self._store.upload(f"{PACKS}/{self._name}-{self._packs}.pack")
            self._upload.write(PACK_MAGIC)
            self._places, self._offset = [], len(PACK_MAGIC)
        size, seal = len(stored.data), stored_hash(digest, stored.encoding, stored.data)
        self._upload.write(stored.data)
        self._places.append(
            BlockPlace(digest, self._offset, size, plain_bytes, stored.encoding, stored.depth, base, seal)
        )
        self._offset += size
        if self._offset >= PACK_BYTES:
            self._end_pack()

    def _end_pack(self) -> None:
        if self._upload is not None:
            self._upload.write(pack_end(self._places))
            self._upload.commit()
            self._upload = None
            self._packs += 1

    # -- the end

    def finish(self) -> Written:
        """Everything that was added is durable; a second call says the same."""
        if self._finished:
            return self.written
        while self._under_way:
            self._under_way.popleft().result()
        self._pool.submit(self._unless_broken, self._end_pack).result()
        self._pool.shutdown()
        self._finished = True
        return self.written

    def abort(self) -> None:
        """Stop, and leave nothing behind but packs that were ended; harmless after `finish`."""
        self._pool.shutdown(cancel_futures=True)
        self._under_way.clear()
        if self._upload is not None:
            self._upload.abort()
            self._upload = None
