"""What runs in the writer process: takes blocks out of shared memory, hashes, encodes and writes them.

    python -m laminar.checkpoint.process.writer_main FD

It has no torch, and no memory of its own but a few blocks. A thread reads requests as they come, so that the training
process never waits to hand one over; they are worked off in their order, each with one answer. After a request that
failed, those of the same save fail alike, until the save is ended.

It lives as long as the other end of its socket. SIGTERM and SIGINT are ignored: who ends a job sends them to all of its
processes, and the job may want to save once more. When the other end is gone, for whatever reason, a save under way is
given up (nothing refers to what was written), its lease is given back, and the process ends within `GIVE_UP_S`.
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from laminar.checkpoint.format.hashing import hash_as
from laminar.checkpoint.format.manifest import read_manifest
from laminar.checkpoint.history.save import Save
from laminar.checkpoint.process.channel import BlockSource, Channel, read_block
from laminar.checkpoint.store.protocol import Store
from laminar.checkpoint.store.uri import open_store
from laminar.errors import CheckpointError, LaminarError, StorageError

GIVE_UP_S = 5.0
"""After the other end is gone, until this process ends whatever it is doing."""
NICER = 10
"""By how much training goes first where both want the same core."""
TOLD_EVERY_S = 0.2
"""How often progress is told."""


class _Gone(Exception):
    """The training process is gone."""


class WriterMain:
    """The loop of the writer process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requests: queue.Queue[tuple[dict[str, Any], int | None] | None] = queue.Queue()
        self._gone = threading.Event()
        self._segments: dict[int, memoryview] = {}
        self._uri, self._options = "", dict[str, Any]()
        self._store: Store | None = None
        self._save: Save | None = None
        self._failed: dict[str, Any] | None = None
        self._told_s = 0.0

    def run(self) -> None:
        """Until the other end is gone."""
        threading.Thread(target=self._receive, daemon=True).start()
        while (request := self._requests.get()) is not None:
            try:
                self._channel.send(self._answer(*request))
            except (_Gone, OSError):
                break
        if self._save is not None:
            self._save.abort()

    def _receive(self) -> None:
        while (request := self._channel.receive()) is not None:
            self._requests.put(request)
        self._gone.set()
        self._requests.put(None)
        time.sleep(GIVE_UP_S)
        os._exit(1)

    def _answer(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        what = request["do"]
        if self._failed is not None and what != "end":
            return self._failed
        try:
            done: dict[str, Any] = getattr(self, f"_{what}")(request, fd)
            return done
        except _Gone:
            raise
        except Exception as error:
            self._failed = {"error": _said(error)}
            return self._failed

    # -- requests

    def _open(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        self._uri, self._options = request["uri"], request["options"]
        return {}

    def _begin(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        if self._store is None:
            self._store = open_store(self._uri)
        self._save = Save(self._store, **self._options)
        return {}

    def _segment(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        assert fd is not None
        size = request["nbytes"]
        self._segments[request["number"]] = memoryview(mmap.mmap(fd, max(size, 1), prot=mmap.PROT_READ))[:size]
        os.close(fd)
        return {}

    def _forget(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        self._segments.pop(request["number"], None)
        return {}

    def _add(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        save, memory = self._begun(), self._segments[request["segment"]]
        hashes = []
        for message in request["blocks"]:
            if self._gone.is_set():
                raise _Gone
            block = read_block(message)
            base = None if block.base is None else bytes.fromhex(block.base)
            hashes.append(save.blocks.add(_content(block, memory), base, block.item_bytes).hex())
            self._tell()
        return {"hashes": hashes}

    def _finish(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        return {"written": asdict(self._begun().finish())}

    def _commit(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        data = request["manifest"].encode()
        manifest = read_manifest(data, hash_as("manifest", data).hex())
        return {"ref": asdict(self._begun().commit(manifest, request["after"]))}

    def _end(self, request: dict[str, Any], fd: int | None) -> dict[str, Any]:
        save, self._save, self._failed = self._save, None, None
        if save is not None:
            save.abort()
        return {}

    def _begun(self) -> Save:
        if self._save is None:
            raise CheckpointError("no save was begun", next="call begin first")
        return self._save

    def _tell(self) -> None:
        if time.monotonic() - self._told_s > TOLD_EVERY_S:
            self._told_s = time.monotonic()
            self._channel.send({"progress": asdict(self._begun().blocks.written)})


def _content(block: BlockSource, memory: memoryview) -> memoryview:
    """A block's bytes: the segment's own where they lie together, else a copy."""
    pieces = []
    for piece in block.pieces:
        size = int(np.prod(piece.held, dtype=np.int64)) * block.item_bytes
        array = np.frombuffer(memory, f"V{block.item_bytes}", size // block.item_bytes, piece.offset).reshape(
            piece.held
        )
        pieces.append(array[tuple(slice(a, b) for a, b in piece.part)])
    if len(pieces) == 1 and pieces[0].shape == block.shape:
        whole = np.ascontiguousarray(pieces[0])
    else:
        whole = np.zeros(block.shape, f"V{block.item_bytes}")
        for piece, content in zip(block.pieces, pieces, strict=True):
            whole[tuple(slice(at, at + n) for at, n in zip(piece.place, content.shape, strict=True))] = content
    return whole.reshape(-1).view(np.uint8).data


def _said(error: Exception) -> dict[str, Any]:
    """An error, to be raised at the other end."""
    if isinstance(error, LaminarError):
        return {"storage": isinstance(error, StorageError), "what": error.what, "lines": error.lines}
    return {"storage": False, "what": f"the writer process failed: {type(error).__name__}: {error}", "lines": {}}


def serve(fd: int) -> None:
    """Serve the socket that was inherited."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICER)
    channel = Channel(socket.socket(fileno=fd))
    WriterMain(channel).run()
    os._exit(0)  # threads that wait for a store don't keep it


if __name__ == "__main__":
    serve(int(sys.argv[1]))
