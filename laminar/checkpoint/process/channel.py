"""Messages between a training process and its writer: JSON with a length before it, and file descriptors beside it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct(">Q")
MOST_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True)
class BlockSource:
    """A block to be written: where its pieces lie in a segment."""

    shape: tuple[int, ...]
    """Of the block."""
    item_bytes: int
    pieces: tuple[PieceSource, ...]
    base: str | None = None
    """Hash of a block to which it may be stored as a delta."""


@dataclass(frozen=True)
class PieceSource:
    """A part of a block: a box of an array that lies in the segment, row-major."""

    offset: int
    """Where the array begins, in bytes."""
    held: tuple[int, ...]
    """The array's shape."""
    part: tuple[tuple[int, int], ...]
    """Begin and end of the box in the array, by dim."""
    place: tuple[int, ...] = field(default=())
    """Where the box begins in the block; at its beginning unless said."""


class Channel:
    """One end of a socket. Messages come in order, whole or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sending = end, threading.Lock()

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Hand over a message; `OSError` if nobody is there."""
        data = json.dumps(message).encode()
        with self._sending:
            head = _LENGTH.pack(len(data))
            if fd is None:
                self._end.sendall(head)
            else:
                socket.send_fds(self._end, [head], [fd])
            self._end.sendall(data)

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """The next message and what came with it; nothing if the other end is gone."""
        try:
            head, fds, _, _ = socket.recv_fds(self._end, _LENGTH.size, 1)
            if not head:
                return None
            head += self._exactly(_LENGTH.size - len(head))
            (length,) = _LENGTH.unpack(head)
            if length > MOST_MESSAGE_BYTES:
                return None
            data = self._exactly(length)
        except (OSError, EOFError):
            return None
        return json.loads(data), fds[0] if fds else None

    def _exactly(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            part = self._end.recv(min(count - len(out), 1 << 20))
            if not part:
                raise EOFError
            out += part
        return bytes(out)

    def close(self) -> None:
        """Nobody hears from this end any more."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def block_message(block: BlockSource) -> list[Any]:
    """A block as JSON."""
    pieces = [[p.offset, list(p.held), [list(e) for e in p.part], list(p.place)] for p in block.pieces]
    return [list(block.shape), block.item_bytes, pieces, block.base]


def read_block(message: list[Any]) -> BlockSource:
    """The inverse."""
    shape, item_bytes, pieces, base = message
    found = [PieceSource(o, tuple(h), tuple((a, b) for a, b in part), tuple(at)) for o, h, part, at in pieces]
    return BlockSource(tuple(shape), item_bytes, tuple(found), base)
