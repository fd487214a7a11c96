"""Channels over c10d: Gloo with receives that are posted in advance, NCCL with receives in the order of the sends.

On Gloo even a short send waits for its receiver, so the receiver posts a receive for every register it grants before it
grants it; a message then travels while both ranks compute. Every register has a tag of its own, so registers may be
filled and freed in any order. A posted receive is as long as the longest message; a shorter one leaves the rest of the
register as it was, and the layout, which comes on a connection, says how much of it counts. At the end the sender fills
what is still posted with single bytes, so that nothing is left open.

Small messages need none of this: they go with their announcement, on the connection. Of the others, one contiguous
tensor leaves from where it lies; several are copied into one buffer first, which costs less than a message each.
Tensors of a GPU go through pinned memory of the host, on both sides.

NCCL has no tags and takes no short messages. There each direction of a pair of ranks has a group of its own, and
the receiver posts its receives when the connection announces a message, with the sizes it announces: announcements of
one sender arrive in order, so both ends issue the same calls in the same order.

Not covered: NCCL has not run on several real ranks; the order of its calls is tested on a recording stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.errors import PeerError
from laminar.runtime.pipeline.channels import MessageLayout, QueueRoute, RegisterBuffers

FIRST_REGISTER_TAG = 1 << 10
"""Tags below are left to others who send and receive in the same group."""


INLINE_BYTES = 1 << 17
"""Smaller messages go with their announcement. CPU time per message, both ranks, on a busy machine: at 16 kB 0.19 ms on
the connection and 0.50 ms by Gloo, at 64 kB 0.23 and 0.57, at 128 kB 0.24 and 0.49; at 1 MB the connection is far
slower."""


def tag_of(wires: Sequence[QueueRoute], number: int) -> int:
    """The tag of a wire's first register."""
    return FIRST_REGISTER_TAG + sum(w.queue.registers for w in wires[:number])


def registers_of(count: int, nbytes: int, pinned: bool) -> list[Tensor]:
    """Memory of registers on the host."""
    return [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]


class PostedSender:
    """Sends into receives that are known to be posted."""

    def __init__(self, group: Any, peer: int, tag: int, wire: QueueRoute, pinned: bool = False) -> None:
        """`peer` is the reader's rank within the group."""
        self.group, self.peer, self.tag = group, peer, tag
        self.registers, self.nbytes, self.pinned = wire.queue.registers, wire.route.max_bytes, pinned
        self.filled, self.inline_bytes = wire.queue.filled, 0 if pinned else INLINE_BYTES
        self._slots: RegisterBuffers | None = None
        self._under_way: dict[int, tuple[Any, Any]] = {}

    def send(self, n: int, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Start to send; what is sent is kept until it has been read."""
        if not layout.nbytes:
            return
        slot = n % self.registers
        if len(tensors) == 1 and tensors[0].is_contiguous() and not tensors[0].is_cuda:
            flat = as_bytes(tensors[0])
        else:
            if self._slots is None:
                self._slots = RegisterBuffers(registers_of(self.registers, self.nbytes, self.pinned))
            self._slots.put(n, layout, tensors)
            flat = self._slots.buffers[slot][: layout.nbytes]
        self._under_way[n] = self.group.send([flat], self.peer, self.tag + slot), flat

    def read(self, count: int) -> None:
        """Let go of what has been read."""
        for n in [n for n in self._under_way if n < count]:
            self._under_way.pop(n)[0].wait()

    def close(self, made: int, read: int) -> None:
        """Fill what is still posted, so that nothing is left open: all that this has not filled itself."""
        byte = torch.zeros(1, dtype=torch.uint8)
        empty = [n for n in range(max(read, self.filled), read + self.registers) if n not in self._under_way]
        works = [self.group.send([byte], self.peer, self.tag + n % self.registers) for n in empty]
        for work in [*works, *(w for w, _ in self._under_way.values())]:
            work.wait()


_OPEN: set[PostedReceiver] = set()
"""Receivers that were not closed: what they posted may still be written to, so they live as long as the process."""


class PostedReceiver:
    """Receives into registers, each posted before it is granted."""

    def __init__(
        self,
        group: Any,
        peer: int,
        tag: int,
        wire: QueueRoute,
        device: torch.device,
        timeout_s: float,
        source: int = -1,
    ) -> None:
        """`peer` is the sender's rank within the group, `source` in the world, for errors."""
        self.source = source
        self.group, self.peer, self.tag, self.wire, self.device = group, peer, tag, wire, device
        self.registers, self.patience = wire.queue.registers, timedelta(seconds=timeout_s)
        self._slots = RegisterBuffers(registers_of(self.registers, wire.route.max_bytes, device.type == "cuda"))
        self.storages = frozenset(b.untyped_storage().data_ptr() for b in self._slots.buffers)
        self._works: list[Any] = [None] * self.registers
        _OPEN.add(self)
        for n in range(wire.queue.filled, self.registers):
            self._post(n)

    def _post(self, slot: int) -> None:
        if self._works[slot] is None:
            self._works[slot] = self.group.recv([self._slots.buffers[slot]], self.peer, self.tag + slot)

    def announced(self, n: int, layout: MessageLayout) -> None:
        """It has been posted long ago."""

    def get(self, n: int, layout: MessageLayout) -> list[Tensor]:
        """What has arrived, or is about to."""
        slot = n % self.registers
        if layout.nbytes:
            try:
                self._works[slot].wait(self.patience)
            except RuntimeError as error:
                raise PeerError(
                    f"{self.wire.name}: rank {self.source} announced register {n}, which did not arrive",
                    said=str(error).splitlines()[0],
                ) from error
            self._works[slot] = None
        views = self._slots.views(n, layout)
        return list(views) if self.device.type == "cpu" else [v.to(self.device) for v in views]

    def release(self, n: int) -> None:
        """Post the register again."""
        self._post(n % self.registers)

    def close(self) -> None:
        """Take the last bytes."""
        for slot, work in enumerate(self._works):
            if work is not None:
                work.wait(self.patience)
                self._works[slot] = None
        _OPEN.discard(self)


class InOrderSender:
    """Sends on a group of its own, tensor by tensor, in the order of the announcements (NCCL)."""

    inline_bytes = 0

    def __init__(self, group: Any, peer: int) -> None:
        self.group, self.peer = group, peer
        self._under_way: dict[int, Any] = {}

    def send(self, n: int, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Start to send."""
        flat = [t.detach().contiguous() for t in tensors if t.numel()]
        self._under_way[n] = [self.group.send([t], self.peer, 0) for t in flat], flat

    def read(self, count: int) -> None:
        """Let go of what has been read."""
        for n in [n for n in self._under_way if n < count]:
            del self._under_way[n]

    def close(self, made: int, read: int) -> None:
        """Wait for the last ones."""
        for works, _ in self._under_way.values():
            for work in works:
                work.wait()


class InOrderReceiver:
    """Posts receives as they are announced (NCCL)."""

    storages: frozenset[int] = frozenset()
    """Every message gets memory of its own."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        self.group, self.peer, self.device = group, peer, device
        self._arriving: dict[int, tuple[list[Any], list[Tensor]]] = {}

    def announced(self, n: int, layout: MessageLayout) -> None:
        """Post receives of the announced sizes."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for _, _, shape, dtype in layout.places]
        self._arriving[n] = [self.group.recv([t], self.peer, 0) for t in tensors if t.numel()], tensors

    def get(self, n: int, layout: MessageLayout) -> list[Tensor]:
        """What arrives; on a GPU, work that is issued now waits for it there."""
        works, tensors = self._arriving[n]
        for work in works:
            work.wait()
        works.clear()
        return tensors

    def release(self, n: int) -> None:
        """Let go of it."""
        self._arriving.pop(n, None)  # registers that were full at the beginning never arrived

    def close(self) -> None:
        """Everything announced has been taken or waits in memory."""
        for works, _ in self._arriving.values():
            for work in works:
                work.wait()
