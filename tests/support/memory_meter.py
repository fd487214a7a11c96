"""A meter for memory: bytes of all storages that ops have made and that are still alive.

Used by tests that hold predicted memory against what a step really takes; collects nothing itself. It sees
what goes through the dispatcher, so memory that ranks share (mapped files) is added by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laminar.ir.program import Program
from laminar.runtime.code.eager_step import EagerStep
from laminar.runtime.comm.shards import shard
from laminar.runtime.comm.transport import Groups, Null


class Meter(TorchDispatchMode):
    """Counts while it is entered; storages made before, or `ignored`, do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """These are counted elsewhere."""
        for t in tensors:
            self._known.add(t.untyped_storage()._cdata)

    def _see(self, made: Any) -> None:
        if isinstance(made, (list, tuple)):
            for one in made:
                self._see(one)
        elif isinstance(made, Tensor):
            storage = made.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._known:
                return
            self._known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._see(made)
        return made


def held(program: Program, whole: Mapping[str, Tensor], constants: Mapping[str, Tensor], backend: str) -> int:
    """Bytes one rank holds at most in a second step, without inputs and constants: buffers, gradients, activations."""
    groups = Null(program.mesh) if backend == "null" else Groups(program.mesh, share=backend == "shared")
    inputs = []
    for item in program.inputs:
        piece = shard(whole[item.name], item.placed.nd, program.mesh, groups.rank)
        inputs.append(piece.contiguous().clone())
    meter = Meter()
    meter.ignore([*inputs, *constants.values()])
    with meter:
        step = EagerStep(program, groups, constants)
        constant = [t for name, t in vars(step.module).items() if name.startswith("const") and isinstance(t, Tensor)]
        meter.ignore(constant)
        step(*inputs)
        meter.peak = meter.live
        step(*inputs)
    peak = meter.peak
    for arena in getattr(groups, "_arenas", {}).values():
        # Everybody's regions are seen here; this rank's own is what it takes.
        seen = [r.numel() for r in arena.regions if r.untyped_storage()._cdata in meter._known]
        peak += arena.regions[arena.at].numel() - sum(seen)
    return peak


def on_this_rank(*args: Any) -> int:
    """`held`, with one thread."""
    torch.set_num_threads(1)
    return held(*args)


def played(heap: Any, requests: list[tuple[int, float]]) -> Iterator[tuple[int, int]]:
    """Take, or give back one of what is held where the second number is small; allocated and reserved after each."""
    held_blocks: list[Any] = []
    for nbytes, choice in requests:
        if held_blocks and choice < 0.4:
            heap.give(held_blocks.pop(int(choice / 0.4 * len(held_blocks))))
        else:
            held_blocks.append(heap.take(nbytes if choice < 0.7 else nbytes % (1 << 20) + 1))
        yield heap.allocated, heap.reserved


class _Gpu:
    """PyTorch's allocator, asked for tensors of bytes."""

    def take(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def give(self, block: Tensor) -> None:
        """Goes with its last reference."""

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def reserved(self) -> int:
        return torch.cuda.memory_reserved()


def played_on_gpu(requests: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """`played`, on a real GPU, in a process that has used it for nothing else."""
    return list(played(_Gpu(), requests))
