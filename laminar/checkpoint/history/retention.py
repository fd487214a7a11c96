"""Which checkpoints of a run are kept: the last few, and every so many steps for good.

Dropping removes references; blocks that nobody refers to any more go with the next `collect_garbage`. A checkpoint that
can't be read counts for nothing: it neither takes the place of one that can, nor is it removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from laminar.checkpoint.history.references import CheckpointRef, list_refs, load_checkpoint
from laminar.checkpoint.packs.block_index import BlockIndex
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError, StorageError

_KEEP = re.compile(r"(?:last )?(\d{1,9})(?:,? every (\d{1,9})(?: steps)?)?")


@dataclass(frozen=True)
class Keep:
    """`Keep(last=3, every=1000)`: the last three, and those of steps 0, 1000, 2000, ..."""

    last: int = 3
    every: int = 0
    """0: none but the last ones."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise CheckpointError("at least the last checkpoint is kept", allowed="last >= 1, every >= 0")

    @staticmethod
    def parse(text: str) -> Keep:
        """`last 3, every 1000 steps`, `3, every 1000`, `3`."""
        found = _KEEP.fullmatch(text.strip())
        if found is None:
            raise CheckpointError(f"{text[:60]!r} does not say what to keep", next="write: last 3, every 1000 steps")
        return Keep(int(found[1]), int(found[2] or 0))


def drop_checkpoints(store: Store, run: str, keep: Keep) -> tuple[CheckpointRef, ...]:
    """Drop what need not be kept of a run; what was dropped."""
    index, whole, dropped = BlockIndex(store), 0, []
    for ref in reversed(list_refs(store, run).refs):
        if whole >= keep.last:
            if not keep.every or ref.step % keep.every:
                store.delete(ref.key)
                dropped.append(ref)
        elif _is_there(store, index, ref):
            whole += 1
    return tuple(reversed(dropped))


def _is_there(store: Store, index: BlockIndex, ref: CheckpointRef) -> bool:
    """Whether a checkpoint's manifest can be read and packs have its blocks."""
    try:
        tensors = load_checkpoint(store, ref).state.tensors
    except StorageError:
        raise
    except CheckpointError:
        return False
    return all(t.block(n) in index for t in tensors for n in range(t.blocks))
