"""One line of a program as one rank runs it: a callable and its arguments.

Sizes, offsets and index tables that depend on the rank are worked out here, so that the code that
runs has nothing left to decide. Hot ops are bound to torch's own functions instead of `OpOverload`
objects, which cost about a microsecond more per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.capture import torch_private
from laminar.capture.ops import kernels
from laminar.capture.ops.torch_ops import DENSE, LAZY_CONJUGATES, dense, find_op, spread, unplain, with_values
from laminar.ir.mesh import Mesh
from laminar.ir.ops import DRAWS
from laminar.ir.program import Instr, Placed
from laminar.ir.sbp import Split, chunk, local_indices
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call, local_args

FAST = """mm addmm bmm baddbmm add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar mul.Scalar div.Scalar t permute
    unsqueeze transpose.int sum.dim_IntList sum embedding relu exp log sqrt rsqrt tanh sigmoid neg clone
    native_layer_norm _softmax _log_softmax where.self pow.Tensor_Scalar amax amin convolution cat stack gather
    masked_fill.Scalar index_select cos sin maximum minimum abs""".split()


def nll_loss2d_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Torch's own lays its result out like `x` and then insists that it be contiguous."""
    return find_op("aten.nll_loss2d_backward")(grad, x.contiguous(), *rest)  # type: ignore[no-any-return]


BOUND: dict[str, Callable[..., Any]] = {f"aten.{n}": getattr(torch, n.split(".")[0]) for n in FAST}
BOUND |= {
    "aten.view": torch.reshape,
    "aten._unsafe_view": torch.reshape,
    "aten.reshape": torch.reshape,
    "aten.gelu": torch_private.gelu,
    "aten.silu": torch_private.silu,
    "aten.slice.Tensor": find_op("aten.slice.Tensor"),
    "aten.nll_loss2d_backward": nll_loss2d_backward,
}
BOUND |= {name: dense(find_op(name)) for name in DENSE} | {name: with_values(find_op(name)) for name in LAZY_CONJUGATES}
"""Fast spellings. Views become reshapes, because boxing may have changed strides."""

SQUEEZES = ("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims")
"""Ops that would also drop a dim of which a rank happens to hold one row: they run as reshapes."""


def offset_of(placed: Any, dim: int, mesh: Mesh, rank: int) -> int | list[tuple[int, int]]:
    """Where a rank's stretch of a dim begins; of several, where each begins and how long it is."""
    if any(isinstance(p, Split) and p.dim == dim and p.blocks > 1 for p in placed.nd):
        rows = local_indices(placed.spec.shape, placed.nd, mesh.sizes, mesh.coords(rank))[dim]
        pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return [(int(piece[0]), len(piece)) for piece in pieces]
    start, size = 0, placed.spec.shape[dim]
    for p, parts, part in zip(placed.nd, mesh.sizes, mesh.coords(rank), strict=True):
        if isinstance(p, Split) and p.dim == dim:
            first, size = chunk(size, parts, part)
            start += first
    return start


def prepare(
    instr: Instr, mesh: Mesh, rank: int, device: torch.device
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What to call, with `Ref`s where tensors go."""
    ins = tuple(p.local(mesh, rank) for p in instr.ins)
    outs = tuple(p.local(mesh, rank) if p else None for p in instr.outs)
    return call_for_shapes(instr, ins, outs, mesh, (rank,), device)


def depends_on_rank(instr: Instr) -> bool:
    """Whether ranks whose shapes are equal run a line with different arguments."""
    return _has_offset(instr) or (instr.op in DRAWS and any(isinstance(p, Split) for p in _made(instr).nd))


def _has_offset(instr: Instr) -> bool:
    return len(instr.args) >= 4 and instr.args[-4] == "offset"


def _made(instr: Instr) -> Placed:
    (placed,) = instr.outs
    assert placed is not None
    return placed


def call_for_shapes(
    instr: Instr,
    ins: tuple[TensorSpec, ...],
    outs: tuple[TensorSpec | None, ...],
    mesh: Mesh,
    ranks: Sequence[int],
    device: torch.device,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A line for tensors of these shapes: those of a rank, or of several whose rows lie one behind the other."""
    args = instr.args
    if instr.hosts:  # in one memory both are identities
        return (lambda *given: given[: len(outs)]), args, {}
    if _has_offset(instr):
        side, which, dim = args[-3:]
        placed = instr.ins[which] if side == "in" else instr.outs[which]
        args = (*args[:-4], offset_of(placed, dim, mesh, ranks[0]))
        if instr.op == "laminar.embedding_backward_at":
            assert outs[0] is not None
            args = (*args[:2], outs[0].shape[0], *args[3:])
        return getattr(kernels, instr.op[8:]), unplain_keep(args), {}
    if instr.op in SQUEEZES:
        assert outs[0] is not None
        return torch.reshape, (args[0], outs[0].shape), {}
    whole = Call(instr.op, args, tuple(p.spec for p in instr.ins), tuple(p.spec if p else None for p in instr.outs))
    args = local_args(whole, ins, outs)
    if instr.op.startswith("laminar."):
        if instr.op in DRAWS and any(isinstance(p, Split) for p in _made(instr).nd):
            part = args[4] if len(args) > 4 else None
            index = [torch.from_numpy(i).to(device) for i in _indices(_made(instr), mesh, ranks)]
            args = (*args[:4], part, index, _made(instr).spec.shape)
        return getattr(kernels, instr.op[8:]), unplain_keep(args), {}
    some, kwargs = spread(instr.op, args)
    op = find_op(instr.op)
    if not instr.ins and any(a.name == "device" for a in torch_private.schema(op).arguments):
        kwargs["device"] = device
    return BOUND.get(instr.op, op), unplain_keep(some), {k: unplain(v) for k, v in kwargs.items()}


def _indices(placed: Placed, mesh: Mesh, ranks: Sequence[int]) -> list[np.ndarray]:
    """Which elements of each dim of the whole ranks hold, those of several one behind the other where they differ."""
    found = [local_indices(placed.spec.shape, placed.nd, mesh.sizes, mesh.coords(r)) for r in ranks]
    return [
        each[0] if all(np.array_equal(each[0], e) for e in each[1:]) else np.concatenate(each)
        for each in zip(*found, strict=True)
    ]


def unplain_keep(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as torch takes them; index tables stay as they are."""
    return tuple(a if isinstance(a, (list, Ref)) else unplain(a) for a in args)
