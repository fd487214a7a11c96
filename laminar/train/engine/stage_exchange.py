"""What processes give each other around a step with stages in exact mode: weights before it, gradients behind it.

A process computes with whole weights of those stages that it hosts some of, whatever it stores; and stores its part of
everything, whatever it computes. So before a step those who host a stage are given its weights by all who store parts,
and behind it everybody is given his part of each gradient by one of those who have it whole. Where weights are stored
whole, nothing travels before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import NdSbp, Split, local_shape
from laminar.ir.tensor import TensorSpec
from laminar.runtime.comm.shards import glue_pieces, shard
from laminar.runtime.comm.tensor_messages import TensorKind, bundle_bytes, bundled, unbundled
from laminar.runtime.exact.stage_hosts import StageHosts

WEIGHTS, TIED, STORED = 1 << 20, 1 << 21, 1 << 22
"""Tags of messages, above those of what passes between stages."""
Placement = Callable[[str], NdSbp]
"""How processes store a tensor of some name."""


class StageExchange:
    """Among the processes of `hosts`, who store things on a mesh of one axis."""

    def __init__(self, hosts: StageHosts, mesh: Mesh) -> None:
        self.hosts, self.mesh, self.me = hosts, mesh, hosts.process

    def _kinds(self, names: Sequence[str], specs: Mapping[str, TensorSpec], at: Placement, q: int) -> list[TensorKind]:
        """What a process has of tensors."""
        sizes, coords = self.mesh.sizes, self.mesh.coords(q)
        return [(tuple(local_shape(specs[n].shape, at(n), sizes, coords)), DTYPES[specs[n].dtype]) for n in names]

    def _from(self, process: int, tag: int, kinds: list[TensorKind]) -> list[Tensor]:
        return unbundled(self.hosts.receive(process, tag, bundle_bytes(kinds)), kinds) if kinds else []

    def weights(
        self,
        wanted: Sequence[Sequence[str]],
        held: Mapping[str, Tensor],
        specs: Mapping[str, TensorSpec],
        at: Placement,
    ) -> dict[str, Tensor]:
        """Whole tensors from everybody's parts; `wanted` says for each stage which ones its hosts need."""
        needs = {
            q: sorted({n for s, names in enumerate(wanted) if q in self.hosts.members[s] for n in names})
            for q in range(self.hosts.hosts)
        }
        for q, names in needs.items():
            if q != self.me and names:
                self.hosts.send(q, WEIGHTS, bundled([held[n] for n in names]))
        mine = needs[self.me]
        pieces: dict[str, list[Tensor]] = {n: [] for n in mine}
        for q in range(self.hosts.hosts):
            parts = [held[n] for n in mine]
            if q != self.me:
                parts = self._from(q, WEIGHTS, self._kinds(mine, specs, at, q))
            for name, part in zip(mine, parts, strict=True):
                pieces[name].append(part)
        out = {}
        for name, parts in pieces.items():
            (cut,) = at(name)
            assert isinstance(cut, Split)
            out[name] = glue_pieces(parts, cut.dim, cut.blocks)
        return out

    def tied(
        self,
        stages_of: Mapping[str, Sequence[int]],
        terms: dict[tuple[int, str], Tensor],
        kinds: Mapping[str, TensorKind],
    ) -> None:
        """Gradients of weights that several stages read, added up where the first of them is, in order of stages."""
        pairs: dict[tuple[int, int], list[str]] = {}
        for name, stages in stages_of.items():
            for other in stages[1:]:
                pairs.setdefault((other, stages[0]), []).append(name)
        for (other, home), names in sorted(pairs.items()):
            for q in self.hosts.members[home]:
                if q not in self.hosts.members[other] and self.hosts.giver(other, q) == self.me:
                    self.hosts.send(q, TIED, bundled([terms[other, n] for n in names]))
        for (other, home), names in sorted(pairs.items()):
            if self.me in self.hosts.members[home]:
                if self.me in self.hosts.members[other]:
                    found = [terms[other, n] for n in names]
                else:
                    found = self._from(self.hosts.giver(other, self.me), TIED, [kinds[n] for n in names])
                for name, x in zip(names, found, strict=True):
                    terms[home, name] = terms[home, name] + x

    def parts(
        self, home: Mapping[str, int], whole: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], at: Placement
    ) -> dict[str, Tensor]:
        """This process's parts of tensors that those who host a stage have whole; `home` says which stage."""
        by_stage = [[n for n, s in home.items() if s == stage] for stage in range(len(self.hosts.members))]
        for stage, names in enumerate(by_stage):
            for q in range(self.hosts.hosts):
                if names and q not in self.hosts.members[stage] and self.hosts.giver(stage, q) == self.me:
                    self.hosts.send(q, STORED, bundled([shard(whole[n], at(n), self.mesh, q) for n in names]))
        out: dict[str, Tensor] = {}
        for stage, names in enumerate(by_stage):
            if self.me in self.hosts.members[stage]:
                out |= {n: shard(whole[n], at(n), self.mesh, self.me) for n in names}
            else:
                kinds = self._kinds(names, specs, at, self.me)
                out |= zip(names, self._from(self.hosts.giver(stage, self.me), STORED, kinds), strict=True)
        return out

    def numbers(self, mine: Mapping[int, float | Tensor], count: int, add: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """So many numbers, each of which one process knows; `add` adds up everybody's tensor in its place."""
        told = torch.zeros(count, dtype=torch.float64, device=self.hosts.device)
        for at, value in mine.items():
            told[at] = value
        return list(add(told).unbind())
