"""What rows leave open: micro-batch, recompute and virtual stages, and how blocks are dealt out to stages."""

from __future__ import annotations

from dataclasses import dataclass

from bench.published.features import Features
from bench.published.model import Shape
from bench.published.rows import Row


@dataclass(frozen=True)
class Chosen:
    """What a row leaves open, decided."""

    mbs: int
    vp: int
    recompute: str


def choices(row: Row) -> list[Chosen]:
    """Everything a row leaves open."""
    each = max(1, row.gbs // row.dp)
    sizes = [row.mbs] if row.mbs else [n for n in (1, 2, 4, 8, 16) if each % n == 0 and n * row.seq <= 65536] or [1]
    again = [row.recompute] if row.recompute else ["none", "selective", "full"]
    if row.recompute is None and row.features.fused_attention:
        again = ["none", "full"]
    if row.recompute is None and "oom" in row.metric.lower():
        again = ["none"]  # a step that did not fit was not made to
    out = []
    for mbs in sizes:
        many = max(1, each // mbs)
        for vp in virtual(row, many):
            out += [Chosen(mbs, vp, r) for r in again]
    return out


def virtual(row: Row, micro_batches: int) -> list[int]:
    """Virtual stages: as the row says, as far as micro-batches and layers allow."""
    if row.pp == 1:
        return [1]
    if row.vp:
        return [min(row.vp, max(1, (row.layers + 2) // row.pp))]
    if micro_batches % row.pp:
        return [1]
    each = row.layers // row.pp
    return [v for v in range(1, each + 1) if each % v == 0 and v <= 24] if row.layers % row.pp == 0 else [1]


def shape_of(row: Row, chosen: Chosen, does: Features) -> Shape:
    """The block that is captured."""
    pad, whole = 128 * row.tp, row.tp
    heads = -(-row.heads // whole) * whole  # heads that don't divide are padded, as the vocabulary is
    groups = row.kv_heads if heads == row.heads and heads % row.kv_heads == 0 else heads
    return Shape(
        hidden=row.hidden,
        heads=heads,
        kv_heads=groups,
        width=max(2, row.hidden // row.heads // 2 * 2),
        ffn=-(-row.ffn // whole) * whole,
        vocab=-(-row.vocab // pad) * pad,
        tokens=max(1, row.seq // row.cp),
        batch=chosen.mbs,
        gated=row.gated,
        causal=row.causal,
        fused_attention=does.fused_attention or row.cp > 1,
        dropout=does.dropout,
        biases=row.biases,
        wide_loss=not does.fused_loss,
        dtype="f16" if row.precision == "f16" else "f32" if row.precision in ("f32", "tf32") else "bf16",
    )


def spread_layers(layers: int, stages: int) -> list[int]:
    """Blocks of each stage; where they don't divide, the first and the last have fewer, as they have more to do."""
    each = -(-layers // stages)
    out = [each] * stages
    over = each * stages - layers
    order = [0, stages - 1, *range(1, stages - 1)]
    for k in range(over):
        out[order[k % stages]] -= 1
    return out


def balanced_layers(layers: int, stages: int, part_s: dict[str, float]) -> list[int]:
    """Blocks of each stage so that the slowest is fastest."""
    each = part_s["Fblock"] + part_s["Bblock"]
    more = [0.0] * stages
    more[0] += part_s["Fembed"] + part_s["Bembed"]
    more[-1] += part_s["Fhead"] + part_s["Bhead"]
    out = [0] * stages
    for _ in range(layers):
        at = min(range(stages), key=lambda s: out[s] * each + more[s])
        out[at] += 1
    return out
