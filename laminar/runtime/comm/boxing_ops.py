"""Steps of boxing on real tensors: what a rank sends, and what it makes of what it gets.

The same geometry serves every transport. `slice` and `pad` are local; the others are one exchange
among the ranks of a group, with a bit of cutting before and gluing after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr
from laminar.ir.sbp import chunk
from laminar.runtime.comm.shards import cut_pieces, glue_pieces


@dataclass
class LocalBoxing:
    """One step for one rank: who takes part, and how dims are opened and cut."""

    kind: str
    ranks: tuple[int, ...]
    at: int
    give: tuple[int, int]
    take: tuple[int, int]
    op: str
    src: tuple[int, ...]
    """Local shape before."""
    dst: tuple[int, ...]
    """Local shape after."""
    sources: tuple[tuple[int, ...], ...]
    """Local shape before, of every rank that takes part."""

    @staticmethod
    def of(instr: Instr, mesh: Mesh, rank: int, which: int = 0) -> LocalBoxing:
        """The geometry of tensor `which` of a boxing instruction."""
        boxing = instr.box
        ranks = mesh.group(boxing.axes, mesh.coords(rank))
        src, dst = instr.ins[which], instr.outs[which]
        assert dst is not None
        return LocalBoxing(
            instr.kind,
            ranks,
            ranks.index(rank),
            boxing.gives[which],
            boxing.takes[which],
            boxing.reduction,
            src.local(mesh, rank).shape,
            dst.local(mesh, rank).shape,
            tuple(src.local(mesh, r).shape for r in ranks),
        )

    # -- local steps ---------------------------------------------------------------------------

    def slice(self, x: Tensor) -> Tensor:
        """This rank's piece of a whole dim."""
        return cut_pieces(x, *self.take, len(self.ranks))[self.at].contiguous()

    def pad(self, x: Tensor) -> Tensor:
        """A term of a sum (or extreme) whose value over the group is the tensor."""
        d, blocks = self.give
        if d < 0:
            return x if self.op != "sum" or self.at == 0 else torch.zeros_like(x)
        fill = 0.0 if self.op == "sum" else _least(x.dtype) if self.op == "max" else _most(x.dtype)
        pieces = [x if r == self.at else x.new_full(shape, fill) for r, shape in enumerate(self.sources)]
        return glue_pieces(pieces, d, blocks)

    # -- exchanges -----------------------------------------------------------------------------

    def outgoing(self, x: Tensor) -> list[Tensor]:
        """What goes to each rank of the group, for all-to-all and reduce-scatter."""
        if self.kind == "all_to_all" and self.give[0] == self.take[0]:
            mine = self._opened(self.at)
            picks = [np.flatnonzero(np.isin(mine, self._taken(j))) for j in range(len(self.ranks))]
            return [x.index_select(self.give[0], torch.from_numpy(p).to(x.device)) for p in picks]
        return cut_pieces(x, *self.take, len(self.ranks))

    def incoming_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what arrives from each rank."""
        d = self.take[0]
        if self.kind == "reduce_scatter":
            return [self.dst] * len(self.ranks)
        out = []
        for r, shape in enumerate(self.sources):
            new = list(shape)
            if self.give[0] == d:
                new[d] = int(np.isin(self._opened(r), self._taken(self.at)).sum())
            else:
                new[d] = self.dst[d]
            out.append(tuple(new))
        return out

    def combine(self, pieces: Sequence[Tensor]) -> Tensor:
        """The tensor made of what arrived."""
        if self.kind == "all_gather":
            return glue_pieces(pieces, *self.give)
        if self.kind == "reduce_scatter":
            return reduce(pieces, self.op)
        if self.give[0] != self.take[0]:
            return glue_pieces(pieces, *self.give)
        want = self._taken(self.at)
        order = np.concatenate([o[np.isin(o, want)] for o in map(self._opened, range(len(self.ranks)))])
        back = torch.from_numpy(np.argsort(order, kind="stable")).to(pieces[0].device)
        return torch.cat(list(pieces), self.give[0]).index_select(self.give[0], back)

    def _whole(self) -> int:
        return sum(shape[self.give[0]] for shape in self.sources)

    def _rows(self, blocks: int, r: int) -> np.ndarray:
        rows = np.arange(self._whole()).reshape(blocks, -1)
        start, length = chunk(rows.shape[1], len(self.ranks), r)
        return rows[:, start : start + length].reshape(-1)

    def _opened(self, r: int) -> np.ndarray:
        """Indices of the opened dim that rank r holds before."""
        return self._rows(self.give[1], r)

    def _taken(self, r: int) -> np.ndarray:
        """Indices of the opened dim that rank r holds after."""
        return self._rows(self.take[1], r)


def reduce(terms: Sequence[Tensor], op: str) -> Tensor:
    """The sum, maximum or minimum of several tensors, in their order."""
    out = terms[0]
    for term in terms[1:]:
        out = out + term if op == "sum" else torch.maximum(out, term) if op == "max" else torch.minimum(out, term)
    return out


def _least(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> float:
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
