"""The ranks that train together, as one of them sees it.

Alone, under `torchrun`, under `laminar train` or inside a script that has made its own process
group: all four look the same from here on. A world has a number, its generation. One can be closed and the next made in
the same process, of the same ranks or of others: whatever ranks leave for each other in the store stands under the
generation's number, so nobody takes an answer of a former one for his own. Whoever talks to the other ranks is handed a
world, or its `process_group`, and looks nothing up in torch's globals.

Besides collectives there is a store, where ranks leave
small notes that cost the others nothing; through it they notice that their batches differ before
the collectives of two different programs meet. With each note goes a checksum over a few elements of
the batch; in every step one rank compares its neighbour's of the step before with its own.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from laminar.capture.torch_private import default_store
from laminar.errors import BatchError, LaminarError, MeshError, PlanError, RankError
from laminar.events import emit
from laminar.ir.mesh import Mesh
from laminar.runtime.code.malloc import keep_freed_memory
from laminar.runtime.comm.transport import Groups, Null

_GENERATIONS = itertools.count()
"""Worlds made so far by this process: ranks make them in the same order, so this tells them apart."""
_MET: list[Any] = []
"""The store through which this process has met the others; for later generations, too, in which it may be another rank.

Kept for as long as the process lives: where rank 0 serves the store, nobody knows when the last one has left it.
"""
RING = 64
"""How many notes of a rank are kept."""
BESIDES = "\x1f"
"""What stands in a note between a batch and what has changed besides."""
PATIENCE_S = 60.0
"""How long to wait for another rank to begin the same step before saying that it does not."""


class World:
    """This rank among `size`."""

    def __init__(
        self,
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        group: Any = None,
        generation: int | None = None,
    ) -> None:
        """`group`: a process group whose ranks these are; unless given that of the script, or one that is made here.

        `generation` is the same on all ranks; unless given it counts the worlds that this process has made, which must
        then be as many on each.
        """
        self.joined = False
        self.generation = next(_GENERATIONS) if generation is None else generation
        if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._join(device, timeout_s)
        self.process_group = dist.group.WORLD if group is None and dist.is_initialized() else group
        """What collectives of this world go through; nothing if it has one rank and never met others."""
        met = self.process_group is not None
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self.process_group)) if met else (0,)
        """Its ranks by the numbers that torch's default process group has for them."""
        self.size = len(self.ranks)
        self.rank = dist.get_rank(self.process_group) if met else 0
        if self.rank < 0:
            raise MeshError("this process is no rank of that process group", next="make the world where it is one")
        self.device = _device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.store = default_store() if self.size > 1 else None
        self.timeout_s, self.patience_s = timeout_s, PATIENCE_S
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()
        """What is to be closed before the process group is left."""
        self._transports: weakref.WeakSet[Groups] = weakref.WeakSet()
        self._host: Any = None
        self._notes = self._meetings = 0
        self._told: dict[int, str] = {}
        """Checksums of this rank's last batches, by the number of their note."""
        self._home = f"laminar/{self.generation}" + (f"/{'-'.join(map(str, self.ranks))}" if group is not None else "")
        self._place = f"{self._home}/note"

    def _join(self, device: torch.device | str | None, timeout_s: float) -> None:
        missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise MeshError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set",
                next="start with torchrun or laminar train",
            )
        if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        emit("phase", name="meeting the other ranks")
        within = timedelta(seconds=timeout_s)
        if not _MET:
            _MET.append(next(rendezvous("env://", timeout=within))[0])
            # Gloo's threads let go of a collective's tensors a moment after it is done, and need the interpreter for
            # it. A script that ends in that moment is ended by SIGABRT: 12 of 28 short ones, none of 20 with a pause.
            atexit.register(time.sleep, 0.1)
        store, rank, size = _MET[0], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store.set_timeout(within)
        place = PrefixStore(f"laminar/generation/{self.generation}", store)
        dist.init_process_group(_backend(device), timeout=within, store=place, rank=rank, world_size=size)
        self.joined = True

    def transport(self, mesh: Mesh, ranks: Sequence[int] | None = None) -> Groups | Null:
        """How programs on a mesh of these ranks talk: of all of them in order, or of some; only they call this."""
        if mesh.ranks == 1:
            return Null(mesh, 0, self.device)
        made = Groups(mesh, self.device, timeout_s=self.timeout_s, ranks=ranks, group=self.process_group)
        self._transports.add(made)
        return made

    def another_group(self) -> Any:
        """A Gloo group of the same ranks, for what a thread exchanges beside the steps; nothing for one rank.

        All ranks call this together. Threads that exchange at the same time need a group each.
        """
        if self.size == 1:
            return None
        within, ranks = timedelta(seconds=self.timeout_s), list(self.ranks)
        if self.process_group is dist.group.WORLD:
            return dist.new_group(ranks, within, backend="gloo")
        return dist.new_group(ranks, within, backend="gloo", use_local_synchronization=True)

    def leave_group(self, group: Any) -> None:
        """Give such a group up. One of some ranks stays until the end: its name would be free too early on some."""
        if group is not None and self.process_group is dist.group.WORLD and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    @property
    def host_group(self) -> Any:
        """A group that takes tensors of the host, for the thread that makes steps: the world's own if it is of Gloo."""
        if self.size == 1:
            return None
        if self._host is None:
            own = dist.get_backend(self.process_group) == "gloo"
            self._host = self.process_group if own else self.another_group()
        return self._host

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier(self.process_group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everyone's tensor, in its place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Give everyone the values of rank 0, or of another, in place."""
        if self.size == 1:
            return
        plain = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        src, group = self.ranks[source], self.process_group
        bits = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in plain]
        work = [dist.broadcast(t, src, group, async_op=True) for t in bits]
        for w, t, p in zip(work, tensors, plain, strict=True):
            w.wait()
            if p is not t:
                t.copy_(p)

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's small value, by rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, self.process_group)
        return out

    @property
    def notes(self) -> int:
        """How many steps have been noted."""
        return self._notes

    def agree(self, note: str, changed: bool, state: str = "", values: str = "") -> None:
        """Leave a note about the step that begins; if it differs from the last one, see that everyone's does.

        Costs one message to the store, and no waiting while nothing changes. The rank whose batch has
        changed waits for the others to begin the same step, and speaks up if theirs is another. `state` is what
        has changed in the model and the loss; `values` a checksum, and which note's batch it is of.
        """
        self._notes += 1
        if self.store is None:
            return
        self.store.set(self._slot(self.rank), f"{self._notes}|{values}|{note}{BESIDES}{state}")
        self._remember(values)
        if changed:
            for other in range(self.size):
                if other != self.rank and (theirs := self._note_of(other)) is not None:
                    self._compare(other, (note, state), theirs.partition("|")[2])
        elif self._notes % self.size == self.rank:
            self._compare_values((self.rank + 1) % self.size)

    def _compare(self, other: int, mine: tuple[str, str], theirs: str) -> None:
        note, _, state = theirs.partition(BESIDES)
        if note != mine[0]:
            raise BatchError(
                f"step {self._notes}: rank {self.rank} has another batch than rank {other}",
                mine=mine[0],
                theirs=note,
                next="hand the same global batch to every rank, or equal shares as laminar.Local(share); where"
                " shares are uneven, pad them and leave padding out of laminar.Loss(total, weight)",
            )
        if state != mine[1]:
            raise LaminarError(
                f"step {self._notes}: the model or its loss has changed in another way on rank {self.rank} than on "
                f"rank {other}",
                mine=mine[1].partition(" ")[2] or "nothing",
                theirs=state.partition(" ")[2] or "nothing",
                next="make the same change on every rank",
            )

    def _remember(self, values: str) -> None:
        number, _, checksum = values.partition(":")
        if number:
            self._told[int(number)] = checksum
            while len(self._told) > RING:
                del self._told[next(iter(self._told))]

    def _compare_values(self, other: int) -> None:
        """See whether another rank's batch of the step before was this one's; nobody is waited for."""
        slot = f"{self._place}/{other}/{(self._notes - 1) % RING}"
        if not self.store.check([slot]):  # type: ignore[union-attr]
            return
        count, _, rest = self.store.get(slot).decode().partition("|")  # type: ignore[union-attr]
        number, _, checksum = rest.partition("|")[0].partition(":")
        if int(count) == self._notes - 1 and number and self._told.get(int(number), checksum) != checksum:
            raise BatchError(
                f"step {number}: rank {self.rank} had another batch than rank {other}",
                why="the same elements have other values there",
                next="hand the same global batch to every rank (data that is shuffled needs one seed for all), or "
                "equal shares as laminar.Local(share)",
            )

    def meeting(self, what: str) -> str:
        """A place in the store for something that all ranks begin now, the same on each."""
        self._meetings += 1
        return f"{self._home}/{what}/{self._meetings}"

    def told(self, what: str, make: Callable[[], Any]) -> Any:
        """Plain data that rank 0 makes, for everybody; where it can't, all of them raise what it says."""
        if self.store is None:
            return make()
        slot = self.meeting(what)
        said: dict[str, Any]
        if self.rank == 0:
            try:
                said = {what: make()}
            except LaminarError as error:
                said = {"error": str(error)}
            except Exception as error:
                self.store.set(slot, json.dumps({"error": f"rank 0: {type(error).__name__}: {error}"}))
                raise
            self.store.set(slot, json.dumps(said))
        else:
            try:
                self.store.wait([slot], timedelta(seconds=self.timeout_s))
            except Exception as error:
                raise RankError(f"rank 0 found no {what} within {self.timeout_s:.0f} s") from error
            said = json.loads(self.store.get(slot))
        if "error" in said:
            raise PlanError(said["error"])
        return said[what]

    def _slot(self, rank: int) -> str:
        """Where a rank's note about this step lies: a ring, for others may be some steps ahead or behind."""
        return f"{self._place}/{rank}/{self._notes % RING}"

    def _note_of(self, other: int) -> str | None:
        """What another rank noted about this step; nothing if it is so far ahead that the note is gone."""
        start = time.monotonic()
        while time.monotonic() - start < self.patience_s:
            if self.store.check([self._slot(other)]):  # type: ignore[union-attr]
                count, _, note = self.store.get(self._slot(other)).decode().partition("|")  # type: ignore[union-attr]
                if int(count) >= self._notes:
                    return str(note) if int(count) == self._notes else None
            time.sleep(0.005)
        raise BatchError(
            f"rank {other} has not begun step {self._notes} after {self.patience_s:.0f} s",
            next="see that every rank makes the same number of steps, and whether that one still runs",
        )

    def close(self) -> None:
        """Leave the process group, if this made it; another world can be made behind that."""
        for each in list(self.open):
            each.close()
        if self.joined and dist.is_initialized():
            for each in list(self._transports):
                each.close()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            self.joined = False


class ProcessGroups:
    """Groups of some of a world's ranks, made when first asked for; all ranks ask for the same ones in one order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: dict[tuple[int, ...], Any] = {tuple(range(world.size)): world.process_group}

    def __call__(self, members: tuple[int, ...]) -> Any:
        """That of these ranks; nothing of a single one."""
        if len(members) > 1 and members not in self._made:
            self._made[members] = dist.new_group([self.world.ranks[m] for m in members])
        return self._made.get(members)


def _own_gpu() -> bool:
    """Whether every rank of this machine can have a GPU of its own."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return torch.cuda.is_available() and torch.cuda.device_count() >= here


def _backend(device: torch.device | str | None) -> str:
    on_gpu = torch.device(device).type == "cuda" if device is not None else _own_gpu()
    return "nccl" if on_gpu and _own_gpu() else "gloo"


def _device(device: torch.device | str | None) -> torch.device:
    """The device of this rank: the one asked for, else its own GPU, else the CPU."""
    chosen = torch.device(device) if device is not None else torch.device("cuda" if _own_gpu() else "cpu")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise MeshError("there is no GPU here", next='use device="cpu"')
        index: int | None = chosen.index
        if index is None:
            chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
    return chosen
