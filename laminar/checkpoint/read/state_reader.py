"""Parts of a checkpoint's tensors, from just the blocks that they touch.

Every block is verified before one of its bytes gets into what is handed out; what is damaged is named with its tensor
and place. Elements are opaque: an array has unsigned integers of the item's size (two numbers for a complex one).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laminar.checkpoint.format.block_grid import (
    Slices,
    block_box,
    blocks_of_box,
    box_shape,
    whole_box,
    within,
)
from laminar.checkpoint.format.manifest import Manifest
from laminar.checkpoint.format.state_record import TensorKey, TensorRecord
from laminar.checkpoint.history.references import CheckpointRef, load_checkpoint
from laminar.checkpoint.packs.block_reader import BlockReader
from laminar.checkpoint.store.protocol import Store
from laminar.errors import CheckpointError

STORED_AS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("V16"),
}
"""How elements of so many bytes are handed out."""
AT_A_TIME = 4
"""Blocks that are read beside each other: at most 64 MiB with all that decoding takes."""


class StateReader:
    """Reads tensors of one checkpoint."""

    def __init__(self, store: Store, what: CheckpointRef | Manifest, blocks: BlockReader | None = None) -> None:
        self.manifest = load_checkpoint(store, what) if isinstance(what, CheckpointRef) else what
        self.blocks = BlockReader(store) if blocks is None else blocks

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Reads and hashes beside each other; its threads end with the reader."""
        return ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="laminar reader")

    def tensor(self, key: TensorKey) -> TensorRecord:
        """What is known of a tensor."""
        found = self.manifest.state.by_key.get(key)
        if found is None:
            raise CheckpointError(f"the checkpoint of step {self.manifest.step} has no {key}")
        return found

    def read(self, key: TensorKey, box: Slices | None = None) -> NDArray[Any]:
        """A box of a tensor, or all of it: as large as the checkpoint says, so look at `tensor(key)` first."""
        tensor = self.tensor(key)
        out = np.empty(box_shape(whole_box(tensor.shape) if box is None else box), STORED_AS[tensor.item_bytes])
        self.read_into(key, out, box)
        return out

    def read_into(self, key: TensorKey, out: NDArray[Any], box: Slices | None = None) -> None:
        """The same into memory that is there. If this raises, parts of it may have been filled, with what is right."""
        tensor = self.tensor(key)
        box = whole_box(tensor.shape) if box is None else box
        _refuse_outside(tensor, box)
        if out.shape != box_shape(box) or out.itemsize != tensor.item_bytes:
            raise CheckpointError(
                f"{key}: room of {out.dtype}{list(out.shape)} for {tensor.dtype}{list(box_shape(box))}"
            )
        target = out.view(STORED_AS[tensor.item_bytes]) if out.ndim else out
        wanted = blocks_of_box(tensor.shape, tensor.item_bytes, box)
        while some := list(islice(wanted, AT_A_TIME)):
            each = map if len(some) == 1 else self._pool.map
            contents = each(lambda one: self.block(tensor, one[0]), some)
            for (number, part), content in zip(some, contents, strict=True):
                there = block_box(tensor.shape, tensor.item_bytes, number)
                target[within(part, box)] = content[within(part, there)]

    def block(self, tensor: TensorRecord, number: int) -> NDArray[Any]:
        """One block, in its shape."""
        shape = box_shape(block_box(tensor.shape, tensor.item_bytes, number))
        kind = STORED_AS[tensor.item_bytes]
        try:
            content = self.blocks.read(tensor.block(number), int(np.prod(shape, dtype=np.int64)) * kind.itemsize)
        except CheckpointError as error:
            raise CheckpointError(f"block {number} of {tensor.key}: {error.what}", **error.lines) from error
        return np.frombuffer(content, kind).reshape(shape)


def _refuse_outside(tensor: TensorRecord, box: Slices) -> None:
    inside = len(box) == len(tensor.shape) and all(
        0 <= s.start <= s.stop <= n and s.step in (None, 1) for s, n in zip(box, tensor.shape, strict=True)
    )
    if not inside:
        raise CheckpointError(f"{tensor.key}: {box} is no box of a tensor of shape {list(tensor.shape)}")
