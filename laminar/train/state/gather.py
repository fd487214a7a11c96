"""Whole tensors on every rank, from what each holds: for state dicts, checkpoints and a model made whole again.

State says what it has (`HeldPart`) and hands it to one of these; it never sees a transport. `GatherFromMesh` is for
ranks on one mesh, all of which hold a part of everything. `GatherFromPlaces` is for stages: a tensor is put together at
its home, the first place that holds it, and sent to everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.errors import StateError
from laminar.ir.mesh import Place
from laminar.ir.sbp import B, NdSbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.train.state.resharder import Resharder
from laminar.train.world import World


@dataclass(frozen=True)
class HeldPart:
    """What this rank has of a tensor that is wanted whole."""

    name: str
    spec: TensorSpec
    """Of the whole tensor."""
    nd: NdSbp
    """How it lies at this rank's place."""
    home: Place | None
    """Where it is held; nothing: it is whole on every rank."""
    tensor: Tensor | None
    """Nothing on ranks that don't hold it."""


class Gather(Protocol):
    """Every rank of the world calls these alike, in the same order."""

    def whole(self, parts: Sequence[HeldPart]) -> list[Tensor]:
        """Whole tensors on every rank."""
        ...

    def dtensors(self, parts: Sequence[HeldPart], strides: Sequence[tuple[int, ...]]) -> list[Any]:
        """The same as DTensors, of which each rank has its shard."""
        ...

    def notes(self, mine: Any) -> list[Any]:
        """What ranks that may hold other tensors say, by rank: among those that hold the same, one speaks for all."""
        ...


class GatherFromMesh:
    """All ranks stand on one mesh."""

    def __init__(self, resharder: Resharder, world: World) -> None:
        self.resharder, self.world = resharder, world
        self.mesh = resharder.transport.mesh

    def whole(self, parts: Sequence[HeldPart]) -> list[Tensor]:
        """All in one program, so that exchanges are merged."""
        everywhere = (B,) * len(self.mesh.sizes)
        held = [_there(p) for p in parts]
        moved = self.resharder([(p.name, p.spec, p.nd, everywhere) for p in parts], "a whole copy", held)
        return [m.clone() if m.data_ptr() != t.data_ptr() else m for m, t in zip(moved, held, strict=True)]

    def dtensors(self, parts: Sequence[HeldPart], strides: Sequence[tuple[int, ...]]) -> list[Any]:
        """Over a mesh of the same axes; blocks of a packed dim, which DTensor has no word for, are unpacked."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.world.process_group is None:
            raise StateError("DTensors need a process group", next="take whole tensors, or start under torchrun")
        if self.world.process_group is not torch.distributed.group.WORLD:
            raise StateError(
                "DTensors are of torch's default process group, and this world is another", next="take whole tensors"
            )
        mesh = init_device_mesh(self.world.device.type, self.mesh.sizes, mesh_dim_names=self.mesh.names)
        plain = [tuple(Split(x.dim) if isinstance(x, Split) else x for x in p.nd) for p in parts]
        held = [_there(p) for p in parts]
        items = [(p.name, p.spec, p.nd, nd) for p, nd in zip(parts, plain, strict=True)]
        local = self.resharder(items, "DTensors", held)
        return [
            DTensor.from_local(
                t.clone() if t.data_ptr() != old.data_ptr() else t,
                mesh,
                [Shard(x.dim) if isinstance(x, Split) else Replicate() for x in nd],
                run_check=False,
                shape=torch.Size(p.spec.shape),
                stride=stride,
            )
            for t, p, old, nd, stride in zip(local, parts, held, plain, strides, strict=True)
        ]

    def notes(self, mine: Any) -> list[Any]:
        """All hold parts of the same tensors."""
        return [mine]


class GatherFromPlaces:
    """Ranks stand at several places, each with a mesh of its own."""

    def __init__(self, resharder: Resharder, world: World) -> None:
        self.resharder, self.world = resharder, world

    def whole(self, parts: Sequence[HeldPart]) -> list[Tensor]:
        """One after the other: each is put together at its home and sent to everybody."""
        return [self._whole(p) for p in parts]

    def _whole(self, part: HeldPart) -> Tensor:
        if part.home is None:
            return _there(part).clone()
        if self.world.rank in part.home.ranks:
            everywhere = (B,) * len(part.nd)
            items = [(part.name, part.spec, part.nd, everywhere)]
            (out,) = self.resharder(items, f"a whole {part.spec.dtype}", [_there(part)])
            out = out.clone(memory_format=torch.contiguous_format)
        else:
            out = torch.empty(part.spec.shape, dtype=DTYPES[part.spec.dtype], device=self.world.device)
        self.world.broadcast([out], part.home.ranks[0])
        return out

    def dtensors(self, parts: Sequence[HeldPart], strides: Sequence[tuple[int, ...]]) -> list[Any]:
        """Not to be had: there is no mesh of all ranks."""
        raise StateError("a job with stages gives whole weights only", next="state_dict() without sharded=True")

    def notes(self, mine: Any) -> list[Any]:
        """What each rank says."""
        return self.world.gather_objects(mine)


def _there(part: HeldPart) -> Tensor:
    assert part.tensor is not None
    return part.tensor
