"""Probing: how an op without a rule splits, found by trying.

The op is run on whole inputs and on shards; a candidate (one dim of each input split or not, one
dim of each output split, or the output partial) is kept only if the shards reproduce the whole on
several random draws. Slow, and only for ops nobody wrote a rule for. In float64 where the op can, so
that a weak coupling between elements does not pass for rounding. Not covered: ops larger than
`MOST_ELEMENTS`, ops with no kernel on this machine, torch's own that read whole numbers, and maxima (an
output that is P(max)).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES, caller, unplain
from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import PSUM, B, Sbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import call_of
from laminar.rules.ops.table import rule_for
from laminar.runtime.comm.shards import assemble, shard

PROBE_DRAWS = 3
PROBE_RANKS = 2
MOST_ELEMENTS = 1 << 22
"""Elements beyond which an op is not probed but computed whole."""
MOST_CANDIDATES = 256
"""Candidates beyond which an op is not probed."""
PROBE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
AXIS = Mesh({"probe": PROBE_RANKS})


def probe(graph: Graph) -> Graph:
    """The graph with signatures found for ops without a rule; nodes that are alike are probed once."""
    found: dict[str, Any] = {}
    rows: list[tuple[str, Any]] = []
    for node in graph.nodes:
        call = call_of(node, graph.specs)
        if rule_for(call) is not None:
            continue
        key = repr((call.op, call.args, call.ins, call.outs))
        if key not in found:
            found[key] = signatures_of(node, [graph.specs[r] for r in node.ins])
        rows.append((node.name, found[key]))
    return replace(graph, probed=tuple(rows)) if rows else graph


def signatures_of(node: Node, ins: list[TensorSpec]) -> list[list[list[str]]]:
    """Every way to split an op that reproduced the whole: placements read and made, as text."""
    outs = [o for o in node.outs if o is not None]
    if (
        len(outs) != len(node.outs)
        or sum(s.numel for s in (*ins, *outs)) > MOST_ELEMENTS
        or not ins
        or _trusts(node, ins)
    ):
        return []
    draws = _draws(node, ins, wide=True) or _draws(node, ins, wide=False)
    options: list[list[Sbp]] = [
        [B, *[Split(d) for d, n in enumerate(s.shape) if n % PROBE_RANKS == 0 and n > 1]] for s in ins
    ]
    if not draws or not _tells(draws) or math.prod(map(len, options)) > MOST_CANDIDATES:
        return []
    kept = []
    for placed in itertools.product(*options):
        if all(p == B for p in placed):
            continue
        made = _outputs(node, placed, draws)
        if made is not None:
            kept.append([[str(p) for p in placed], [str(p) for p in made]])
    return kept


def _trusts(node: Node, ins: list[TensorSpec]) -> bool:
    """Whether a kernel of torch's may take whole numbers for places in memory without looking: random ones would
    overwrite anything (`segment_reduce` by lengths that don't add up)."""
    return node.op.startswith("aten.") and any(not s.has_gradient and s.dtype != "bool" for s in ins)


def _tells(draws: list[tuple[list[Tensor], list[Tensor]]]) -> bool:
    """Whether draws say anything: of outputs that are NaN, or all the same, every piece is like every other."""
    for made in zip(*(outs for _, outs in draws), strict=True):
        values = torch.stack([t.to(torch.complex128 if t.is_complex() else torch.float64) for t in made])
        fine = values[torch.isfinite(values)]
        if 2 * fine.numel() < values.numel() or bool((fine == fine[:1]).all()):
            return False
    return True


def _draws(node: Node, ins: list[TensorSpec], wide: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Several inputs and the op on each, or nothing if it can't be run."""
    try:
        return [_draw(node, ins, seed, wide) for seed in range(PROBE_DRAWS)]
    except Exception:  # whatever a user's op raises on random numbers, it is computed whole
        return []


def _draw(node: Node, ins: list[TensorSpec], seed: int, wide: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Random inputs (integers small enough to be indices), and the op on them."""
    g = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in ins:
        dtype = DTYPES[spec.dtype]
        if dtype == torch.bool:
            tensors.append(torch.rand(spec.shape, generator=g) < 0.5)
        elif dtype.is_floating_point:
            tensors.append(
                torch.randn(spec.shape, generator=g, dtype=torch.float64).to(torch.float64 if wide else dtype)
            )
        else:
            low = max(min((n for s in ins for n in s.shape if n > 1), default=2), 2)
            tensors.append(torch.randint(0, low, spec.shape, generator=g, dtype=dtype))
    whole = _run(node, tensors)
    for got, want in zip(whole, node.outs, strict=True):
        if want is None or tuple(got.shape) != want.shape:
            raise ValueError(f"{node.op} makes {tuple(got.shape)} for {want}")
    return tensors, whole


def _run(node: Node, tensors: list[Tensor]) -> list[Tensor]:
    at = iter(tensors)
    args = [unplain(map_refs(a, lambda _: next(at))) for a in node.args]
    with torch.no_grad():
        out = caller(node.op)(*args)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _outputs(node: Node, placed: tuple[Sbp, ...], draws: list[tuple[list[Tensor], list[Tensor]]]) -> list[Sbp] | None:
    """Placements of the outputs that reproduce the whole on every draw, or None."""
    made: list[list[Sbp]] | None = None
    for tensors, whole in draws:
        try:
            ranks = [
                _run(node, [shard(t, (p,), AXIS, r) for t, p in zip(tensors, placed, strict=True)])
                for r in range(PROBE_RANKS)
            ]
        except Exception:
            return None
        here = []
        for i, want in enumerate(whole):
            pieces = [r[i] for r in ranks]
            options: list[Sbp] = [B, PSUM, *[Split(d) for d in range(want.dim())]]
            here.append([p for p in options if _agrees(pieces, want, p)])
        made = here if made is None else [[p for p in a if p in b] for a, b in zip(made, here, strict=True)]
        if not all(made):
            return None
    return [options[0] for options in made or []]


def _agrees(pieces: list[Tensor], want: Tensor, p: Sbp) -> bool:
    if p == PSUM and want.dtype == torch.bool:
        return False
    try:
        if p == B and not all(torch.equal(piece, pieces[0]) for piece in pieces):
            return False
        got = assemble(pieces, want.shape, (p,), AXIS)
        if isinstance(p, Split) and want.shape[p.dim] % PROBE_RANKS:
            return False
        if want.is_floating_point():
            tol = PROBE_TOLERANCE.get(want.dtype, 2e-2)
            return bool(torch.allclose(got, want, rtol=tol, atol=tol * 0.1, equal_nan=True))
        return torch.equal(got, want)
    except (RuntimeError, ValueError, IndexError):  # shapes that don't fit, or a dtype that can't be compared
        return False
