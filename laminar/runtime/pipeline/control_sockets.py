"""Connections between ranks: short messages beside the data, over plain sockets.

Ranks that share a queue, follow the same leader or must hear of each other's end hold a connection: one stream socket,
on which a message is 24 bytes and, seldom, a tail. What is said on a connection arrives in order; between connections
there is no order. A connection is read by the thread that acts, whenever it has nothing better to do, and it may wait
for all of its connections at once, which a receive of c10d can't do (its works on Gloo don't tell whether they are done
without waiting, and a wait that times out closes the pair). A process that dies ends its connections, so the others
know at once.

Nobody ever blocks in sending: what the system does not take now stays here and goes with the next try.

`Connections` is what the actors see. `TcpConnections` is the real thing; tests have connections within one process that
delay and reorder. Not covered: networks where ranks can't open connections to each other, which Gloo needs as well.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from laminar.errors import PeerError

MESSAGE = struct.Struct("<IHHqq")
"""Bytes in the tail, kind, which, and two numbers."""
DATA, CREDIT, CHOICE, BEGIN, END, HEARTBEAT, FAIL, BYE, GONE = range(9)
"""A register is filled; so many are read; the leader's choice; so many steps; steps done; a sign of life; what went
wrong; a connection is about to end; a connection has ended."""
RECEIVE_BYTES = 1 << 16
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ControlMessage(NamedTuple):
    """One message, as it arrives."""

    source: int
    kind: int
    which: int = 0
    a: int = 0
    b: int = 0
    tail: bytes = b""


class Connections(Protocol):
    """The connections of one rank. They carry numbers and short tails, never a tensor."""

    rank: int
    peers: tuple[int, ...]
    """Ranks at the other ends."""

    def post(self, to: int, kind: int, which: int = 0, a: int = 0, b: int = 0, tail: bytes = b"") -> None:
        """Say something; it leaves with the next `flush`. Safe in any thread."""
        ...

    def flush(self) -> None:
        """Send what has been posted, as far as it goes without blocking."""
        ...

    def receive(self, wait_s: float) -> list[ControlMessage]:
        """What has arrived; if nothing has, wait for something. An ended connection is a `GONE`, once."""
        ...

    def close(self) -> None:
        """End all connections."""


class TcpConnections:
    """Connections over TCP; see `TcpConnections.open`."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self.rank, self.peers = rank, tuple(sorted(sockets))
        self._sockets = sockets
        self._ranks = {s.fileno(): r for r, s in sockets.items()}
        self._out = {r: bytearray() for r in sockets}
        self._in = {r: bytearray() for r in sockets}
        self._lock = threading.Lock()
        self._poll = select.poll()
        for r, s in sockets.items():
            s.setblocking(False)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.register(sockets[r], select.POLLIN)

    @staticmethod
    def open(
        group: Any, ranks: Sequence[int], wanted: Iterable[tuple[int, int]], timeout_s: float
    ) -> TcpConnections | None:
        """Connections of this rank. All ranks of `group` call this; `wanted` are pairs, the same on all of them.

        Those outside `ranks` only take part in the gathering of addresses.
        """
        me, size = dist.get_rank(group), dist.get_world_size(group)
        mine: tuple[str, int, bytes] | None = None
        if me in ranks:
            door = socket.create_server((_address(), 0), backlog=max(size, 16))
            mine = (*door.getsockname()[:2], secrets.token_bytes(16))
        found: list[Any] = [None] * size
        dist.all_gather_object(found, mine, group)
        if mine is None:
            return None
        pairs = {(min(p), max(p)) for p in wanted if p[0] != p[1]}
        sockets: dict[int, socket.socket] = {}
        try:
            door.settimeout(timeout_s)
            for low, high in sorted(pairs):
                if high == me:
                    host, port, token = found[low]
                    s = socket.create_connection((host, port), timeout_s)
                    s.sendall(token + me.to_bytes(4, "little"))
                    sockets[low] = s
            missing = {high for low, high in pairs if low == me}
            until = time.monotonic() + timeout_s
            while missing and time.monotonic() < until:
                s, _ = door.accept()
                s.settimeout(timeout_s)
                said = _exactly(s, 20)
                who = int.from_bytes(said[16:], "little")
                if secrets.compare_digest(said[:16], mine[2]) and who in missing:
                    missing.discard(who)
                    sockets[who] = s
                else:
                    s.close()  # a stranger
        except OSError as error:
            raise PeerError(
                f"rank {me} has no connection to another rank: {error}",
                next="see whether ranks can open connections to each other",
            ) from error
        finally:
            door.close()
        return TcpConnections(me, sockets)

    def post(self, to: int, kind: int, which: int = 0, a: int = 0, b: int = 0, tail: bytes = b"") -> None:
        """Say something; it leaves with the next `flush`."""
        out = self._out.get(to)
        if out is not None:
            with self._lock:
                out += MESSAGE.pack(len(tail), kind, which, a, b) + tail

    def flush(self) -> None:
        """Send what has been posted, as far as it goes without blocking."""
        for r, out in self._out.items():
            if out:
                with self._lock:
                    self._send(r, out)

    def _send(self, r: int, out: bytearray) -> None:
        try:
            while out:
                del out[: self._sockets[r].send(out)]
        except BlockingIOError:
            pass
        except (OSError, KeyError):
            out.clear()  # the other end is gone; reading will tell

    def receive(self, wait_s: float) -> list[ControlMessage]:
        """What has arrived; if nothing has, wait for something."""
        self.flush()
        stop = time.monotonic() + wait_s
        while True:
            stuck = any(self._out.values())
            left_s = max(0.0, stop - time.monotonic())
            if not self._ranks:
                time.sleep(left_s)
            ready = self._poll.poll(1000 * min(left_s, 0.001 if stuck else left_s))
            out = [m for fd, _ in ready for m in self._read(self._ranks[fd])]
            if out or time.monotonic() >= stop:
                return out
            self.flush()

    def _read(self, r: int) -> list[ControlMessage]:
        buffer, s, ended = self._in[r], self._sockets[r], False
        try:
            while True:
                got = s.recv(RECEIVE_BYTES)
                buffer += got
                ended = not got
                if len(got) < RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        out, at = [], 0
        while len(buffer) - at >= MESSAGE.size:
            length, kind, which, a, b = MESSAGE.unpack_from(buffer, at)
            end = at + MESSAGE.size + length
            if len(buffer) < end:
                break
            out.append(ControlMessage(r, kind, which, a, b, bytes(buffer[at + MESSAGE.size : end]) if length else b""))
            at = end
        del buffer[:at]
        if ended:
            self._end(r)
            out.append(ControlMessage(r, GONE))
        return out

    def _end(self, r: int) -> None:
        with self._lock:
            s = self._sockets.pop(r)
            self._poll.unregister(s)
            del self._ranks[s.fileno()]
            self._out[r].clear()
            s.close()

    def close(self) -> None:
        """End all connections."""
        self.flush()
        for r in list(self._sockets):
            self._end(r)


def _exactly(s: socket.socket, count: int) -> bytes:
    out = b""
    while len(out) < count:
        got = s.recv(count - len(out))
        if not got:
            return b"\0" * count
        out += got
    return out


def _address() -> str:
    """The address of this machine by which the others see it: the one it uses itself to reach the rendezvous."""
    master = os.environ.get("MASTER_ADDR", "")
    if master in LOOPBACK or (not master and os.environ.get("GLOO_SOCKET_IFNAME") == "lo"):
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((master or socket.gethostname(), 9))  # nothing is sent
            return str(s.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
