"""Rows of a table of published steps: reading them, and seconds of a step from whatever was measured.

Cells may be blank. Blank batch, micro-batch, recompute or virtual stages are looked for among what fits; a row is
skipped only where its model, its devices or its precision can't be known, and says why.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.published.features import Features, Stated, features_of, known, practice_of, stated
from bench.published.machines import Gpu, gpu_of

PRECISIONS = {"fp16": "f16", "float16": "f16", "half": "f16", "bf16": "bf16", "bfloat16": "bf16", "fp8": "f8",
              "mxfp8": "f8", "fp32": "f32", "float32": "f32", "tf32": "tf32"}  # fmt: skip
VOCABULARY = {"bert": 30522}
"""Of models whose row does not say, by a part of the name; others have that of GPT-2."""
GPT2_VOCABULARY = 50257
GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek", "olmo", "yi-")
"""Names of families with gated MLPs, asked where the number of parameters does not tell."""


UNBIASED = ("mpt", "nemotron")
"""Names of families without gates and without biases."""


class Skip(Exception):
    """A row that can't be predicted, and why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published step. `None` stands for what the source does not say."""

    line: int
    block: str
    system: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool
    biases: bool
    causal: bool
    tied: bool
    gbs: int
    mbs: int | None
    gpu: Gpu
    gpus: int
    tp: int
    pp: int
    dp: int
    cp: int
    vp: int | None
    zero: int | None
    hybrid: bool
    """Weights split inside a node and repeated across (HSDP)."""
    recompute: str | None
    """`none`, `selective` or `full`."""
    split_norms: bool
    precision: str
    pure: bool
    """No float32 copy of the weights."""
    metric: str
    value: float | None
    extra: Mapping[str, str]
    stated: Stated
    """Features of its stack that it states."""
    network: str = ""
    """Network cards of a node and Gb/s of each, as `8x400`, where it says so."""

    @property
    def practice(self) -> str:
        """Which practice its step belongs to."""
        found = known(self.system)
        if found and found.practice:
            return found.practice
        return practice_of(self.precision, self.zero, self.recompute, self.gpu.kind in ("v100", "a100"))

    @property
    def features(self) -> Features:
        """What its stack does."""
        return features_of(self.system, self.practice, self.precision, self.stated)

    @property
    def tokens(self) -> float:
        """Of a step, all devices."""
        return float(self.gbs) * self.seq

    @property
    def params(self) -> float:
        """Elements of all weights."""
        return params(self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab, self.gated, self.tied)

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step, from what was measured."""
        return measured_s(self)


def params(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, gated: bool, tied: bool) -> float:
    """Elements of the weights that matter for counting: matrices."""
    block = hidden * hidden * (2 + 2 * kv_heads / heads) + (3 if gated else 2) * hidden * ffn
    return layers * block + (1 if tied else 2) * vocab * hidden


# --- reading


def read(path: str | Path) -> list[Row | tuple[int, str]]:
    """The rows of a table, or for a row that can't be predicted its line and why."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        return parse(file)


def parse(lines: Iterable[str]) -> list[Row | tuple[int, str]]:
    """The same, from lines of text; the header is line 1."""
    out: list[Row | tuple[int, str]] = []
    reader = csv.DictReader(lines)
    for cells in reader:
        cleaned = {(k or "").strip().lower(): (v or "").strip() for k, v in cells.items() if isinstance(v, str | None)}
        if not any(cleaned.values()):
            continue
        try:
            out.append(row_of(cleaned, reader.line_num))
        except Skip as why:
            out.append((reader.line_num, str(why)))
    return out


def row_of(cells: Mapping[str, str], line: int) -> Row:
    """One row; raises `Skip` where something it needs is not there."""
    name, system = cells.get("model", ""), cells.get("system", "")
    hidden, layers, seq = (_needed(cells, key) for key in ("hidden", "layers", "seq"))
    heads = _whole(cells, "heads") or _heads(hidden)
    kv_heads = _whole(cells, "kv_heads") or heads
    gpu = gpu_of(cells.get("gpu", ""))
    if gpu is None:
        raise Skip(f"device {cells.get('gpu', '')!r} is not known" if cells.get("gpu") else "no device")
    precision = _precision(cells.get("precision", ""))
    low = f"{name} {system}".lower()
    billions = _number(cells, "params_b")
    gated_name = any(word in low for word in GATED)
    ffn = _whole(cells, "ffn") or (4 * hidden if not gated_name else _gated_ffn(hidden))
    vocab = _whole(cells, "vocab") or next((v for k, v in VOCABULARY.items() if k in low), GPT2_VOCABULARY)
    gated, tied = _family(layers, hidden, heads, kv_heads, ffn, vocab, billions, gated_name)
    extra = dict(part.split("=", 1) if "=" in part else (part, "yes")
                 for part in (p.strip() for p in cells.get("extra", "").split(";")) if part)  # fmt: skip
    said = cells.get("precision", "").lower()
    tp, pp, dp, cp = (_whole(cells, key) for key in ("tp", "pp", "dp", "cp"))
    tp, pp, cp, gpus, dp = _ranks(tp or 1, pp or 1, cp or 1, _whole(cells, "gpus"), dp)
    mbs = _whole(cells, "mbs")
    gbs = _batch(_whole(cells, "gbs"), mbs, dp, extra)
    zero, hybrid = _zero(cells.get("zero", ""))
    recompute, split = _recompute(cells.get("recompute", ""))
    try:
        does = stated(cells, extra)
    except ValueError as why:
        raise Skip(str(why)) from why
    network = cells.get("network") or extra.get("network", "")
    if network and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", network):
        raise Skip(f"network {network!r} is not cards x Gb/s")
    return Row(
        line=line, block=cells.get("block", ""), system=system, model=name, layers=layers, hidden=hidden, heads=heads,
        kv_heads=kv_heads, ffn=ffn, vocab=vocab, seq=seq, gated=gated,
        biases=not gated and not any(w in low for w in UNBIASED), causal="bert" not in low, tied=tied, gbs=gbs,
        mbs=mbs, gpu=gpu, gpus=gpus, tp=tp, pp=pp, dp=dp, cp=cp, vp=_whole(cells, "vp"), zero=zero, hybrid=hybrid,
        recompute=recompute, split_norms=split, precision=precision, pure="pure" in said,
        metric=cells.get("metric", ""), value=_number(cells, "value"), extra=extra, stated=does,
        network=network,
    )  # fmt: skip


def _number(cells: Mapping[str, str], key: str) -> float | None:
    found = re.match(r"[<>~≈ ]*(-?[\d,]*\.?\d+(?:[eE][+-]?\d+)?)", cells.get(key, ""))
    return float(found[1].replace(",", "")) if found else None


def _whole(cells: Mapping[str, str], key: str) -> int | None:
    found = _number(cells, key)
    return int(found) if found is not None and found >= 1 else None


def _needed(cells: Mapping[str, str], key: str) -> int:
    found = _whole(cells, key)
    if found is None:
        raise Skip(f"no {key}")
    return found


def _heads(hidden: int) -> int:
    """Where the row does not say: heads of 128, or of 64 where that does not divide."""
    return hidden // 128 if hidden % 128 == 0 and hidden > 2048 else max(1, hidden // 64)


def _gated_ffn(hidden: int) -> int:
    return -(-8 * hidden // 3 // 256) * 256


def _precision(text: str) -> str:
    low = text.lower()
    if not low:
        raise Skip("no precision")
    for word, dtype in PRECISIONS.items():
        if low.startswith(word) or re.search(rf"\b{word}\b", low):
            return dtype
    raise Skip(f"precision {text!r} is not known")


def _family(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, billions: float | None, gated: bool
) -> tuple[bool, bool]:
    """Whether MLPs are gated and whether head and embedding are one: what comes nearest to the stated parameters."""
    if billions is None:
        return gated, not gated
    ways = [(g, t) for g in (gated, not gated) for t in (not g, g)]

    def off(way: tuple[bool, bool]) -> float:
        return abs(params(layers, hidden, heads, kv_heads, ffn, vocab, *way) / (billions * 1e9) - 1)

    named = [w for w in ways if w[0] == gated]
    best, own = min(ways, key=off), min(named, key=off)
    # A name is believed unless the other family fits far better: counts are rounded.
    return best if off(own) - off(best) > 0.08 else own


def _ranks(tp: int, pp: int, cp: int, gpus: int | None, dp: int | None) -> tuple[int, int, int, int, int]:
    if gpus is None and dp is None:
        raise Skip("neither gpus nor dp")
    if gpus is None:
        gpus = tp * pp * cp * (dp or 1)
    rest = gpus // (tp * pp * cp)
    if rest < 1:
        raise Skip(f"{gpus} devices for tp {tp} x pp {pp} x cp {cp}")
    if dp is None or tp * pp * cp * dp != gpus:
        dp = rest if tp * pp * cp * rest == gpus else (dp or rest)
    return tp, pp, cp, gpus, dp


def _batch(gbs: int | None, mbs: int | None, dp: int, extra: Mapping[str, str]) -> int:
    if gbs is not None:
        return gbs
    if mbs is None:
        raise Skip("neither gbs nor mbs")
    again = re.match(r"\d+", extra.get("GA", ""))
    return mbs * dp * (int(again[0]) if again else 1)


def _zero(text: str) -> tuple[int | None, bool]:
    low = text.lower().strip()
    if not low:
        return None, False
    if "hsdp" in low or "hybrid" in low:
        return 3, True
    if "fsdp" in low:
        return 3, False
    if "ddp" in low or low in ("none", "no"):
        return 0, False
    found = re.search(r"\d", low)
    return (min(3, int(found[0])), False) if found else (None, False)


def _recompute(text: str) -> tuple[str | None, bool]:
    low = text.lower().strip()
    split = bool(re.search(r"\bsp\b|\+sp|sequence", low))
    for word in ("full", "selective", "none"):
        if word in low:
            return word, split
    if low in ("no", "false", "0", "off"):
        return "none", split
    if low in ("yes", "true", "1", "on"):
        return "full", split
    return None, split


# --- what was measured


def model_flops(row: Row) -> float:
    """Of a step as tables count it: products and whole attention, forward once and backward twice."""
    hidden, kv = row.hidden, row.kv_heads / row.heads
    block = hidden * hidden * (2 + 2 * kv) + (3 if row.gated else 2) * hidden * row.ffn
    return 6 * row.tokens * (row.layers * block + row.vocab * hidden) + 12 * row.tokens * row.layers * row.seq * hidden


def hardware_flops(row: Row) -> float:
    """The same with every block's forward done twice."""
    head = 6 * row.tokens * row.vocab * row.hidden
    return (model_flops(row) - head) * 4 / 3 + head


def measured_s(row: Row) -> float | None:
    """Seconds of a step from the row's metric; None where nothing was measured, or it did not run."""
    metric, value = re.sub(r"\s", "", row.metric.lower()), row.value
    if value is None or value <= 0 or "oom" in metric:
        return None
    if metric.startswith(("s/it", "sec/it", "seconds/it", "s/step", "sec/step")):
        return value
    if metric.startswith("ms/"):
        return value / 1e3
    if metric.startswith(("samples/s", "sequences/s", "seq/s")):
        return row.gbs / value / (row.gpus if "/gpu" in metric else 1)
    if metric.startswith("tokens/s") or metric.startswith("tok/s"):
        return row.tokens / value / (row.gpus if "gpu" in metric or "device" in metric else 1)
    if metric.startswith("tflop") or metric.startswith("pflop"):
        hardware = "hw" in metric or "hfu" in metric
        flops = hardware_flops(row) if hardware else model_flops(row)
        scale = 1e15 if metric.startswith("p") else 1e12
        return flops / (value * scale * (1 if "total" in metric or "agg" in metric else row.gpus))
    if metric.startswith(("mfu", "hfu")):
        flops = hardware_flops(row) if metric.startswith("hfu") else model_flops(row)
        share = value / 100 if "%" in metric or value > 1.5 else value
        return flops / (share * row.gpu.peak(row.precision) * row.gpus)
    return None


def with_batch(row: Row, **changes: object) -> Row:
    """The row with blanks filled in."""
    return replace(row, **changes)  # type: ignore[arg-type]
