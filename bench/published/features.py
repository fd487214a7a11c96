"""What a training stack does in a step: features that a row states, or that follow from what it does state.

A row may have a column for each feature, by the feature's name, or say it in `extra` (`attention=flash2`, `compile`).
What it leaves open follows from its precision, its sharding, its recompute and its device: they tell which of three
practices a step belongs to, and a practice does what its known systems have in common. A name only adds what is
documented to differ (`KNOWN`). Facts, not constants: no time stands here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache

ATTENTION = ("unfused", "triton", "flash2", "hopper")
"""Three kernels and scores in memory; FlashAttention in Triton; FlashAttention 2; FlashAttention 3 or cuDNN 9."""
Stated = Mapping[str, str | bool]
"""Some features by name."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """How a step is run. The defaults are a plain loop that does nothing of it."""

    attention: str = "unfused"
    """One of `ATTENTION`."""
    fused_ops: bool = False
    """Elementwise ops and norms run together, by hand-written kernels or a compiler; else one by one."""
    compiled: bool = False
    """A compiler decides what forward keeps, and makes cheap ops again."""
    fused_loss: bool = False
    """A kernel reads logits as they are; else they go to float32 for the loss."""
    dropout: bool = False
    fused_dropout: bool = False
    """Dropout of scores runs with the softmax; else it is a kernel of its own."""
    split_norms: bool = False
    """Norms and dropout are split by token among tensor-parallel ranks, also where the row does not say so."""
    grad_overlap: bool = False
    """Gradients are reduced while backward goes on."""
    param_overlap: bool = False
    """Weights of a distributed optimizer are gathered while forward goes on."""
    tensor_overlap: bool = False
    """Exchanges of tensor parallelism run piece by piece beside the products next to them."""
    send_overlap: bool = False
    """Stages compute while their results are on the way."""
    wide_grads: bool = False
    """Gradients are summed, and reduced, in float32; else in the precision of the weights."""
    fused_sums: bool = False
    """Products add gradients of weights to the sum themselves; else a kernel does."""
    stops_early: bool = False
    """Recompute of a block ends with the last value that backward needs; else the whole forward runs again."""
    dynamic_eight: bool = False
    """Eight bits are scaled by the largest element of each tensor, found when it is cast."""
    merged_apart: bool = False
    """Attention over a split sequence gathers keys first, and merges partial results by kernels of their own."""
    balanced: bool = False
    """Stages have fewer blocks where the embedding and the head are."""

    @property
    def fused_attention(self) -> bool:
        """One kernel for scores, softmax and sum; else three, and the scores go to memory."""
        return self.attention != "unfused"


# --- three practices

PRACTICES: dict[str, Features] = {
    # Megatron's kernels of 2019 to 2022: its own softmax, dropout in the model, exchanges behind backward.
    "classic": Features(fused_ops=True, dropout=True),
    # PyTorch's FSDP: eager unless a row says `compile`, PyTorch's attention and its checkpoints, which stop early.
    "sharded": Features(attention="flash2", stops_early=True),
    # Megatron-Core with Transformer Engine: fused kernels, tokens split between products, every exchange overlapped.
    "overlapped": Features(
        attention="hopper",
        fused_ops=True,
        split_norms=True,
        grad_overlap=True,
        param_overlap=True,
        tensor_overlap=True,
        send_overlap=True,
        fused_sums=True,
    ),
}
STAGE = {"classic": 0, "sharded": 3, "overlapped": 1}
"""ZeRO's stage where a row does not say."""


def practice_of(precision: str, zero: int | None, recompute: str | None, before_hopper: bool) -> str:
    """Which practice a row belongs to.

    float16 was left for bfloat16 at about the time that attention was fused. Sharded weights are FSDP's. Whole blocks
    were recomputed for the scores, which fused attention does not keep.
    """
    if precision in ("f16", "f32", "tf32"):
        return "classic"
    if zero == 3:
        return "sharded"
    return "classic" if before_hopper and recompute == "full" else "overlapped"


# --- what is known of systems by name


@dataclass(frozen=True)
class Known:
    """A system: where it is documented to differ from the practice of its rows."""

    pattern: str
    source: str
    differs: tuple[tuple[str, str | bool], ...] = ()
    practice: str = ""
    """Where rows alone would tell another one."""


def _known(pattern: str, source: str, practice: str = "", **differs: str | bool) -> Known:
    return Known(pattern, source, tuple(differs.items()), practice)


KNOWN: tuple[Known, ...] = (
    _known("bloom|bigscience|megatron-deepspeed|vtrain", "Megatron-DeepSpeed 2021-22", "classic"),
    _known(
        "libai|oneflow",
        "LiBai 2022: softmax and dropout in one kernel, static graph with overlapped reductions; four "
        "stages take 11/8 of a quarter of one device's time, so they are balanced",
        fused_dropout=True,
        grad_overlap=True,
        balanced=True,
    ),
    _known("megatron-core|mcore", "Megatron-Core r0.8 README: all of the practice"),
    _known("nemo.*24\\.03|nemo.*long", "NeMo 24.03: Transformer Engine with FlashAttention 2", attention="flash2"),
    _known("nemo|mlperf|nvidia|dgx", "NeMo performance guide: all of the practice"),
    _known("megatron-bridge", "Megatron-Bridge performance guide; its FSDP is Megatron's", "overlapped"),
    _known("megatron", "Megatron-LM 2021-22 (SC21, Korthikanti): products add to gradients", fused_sums=True),
    _known(
        "torchtitan",
        "torchtitan: sequence parallel, reductions in float32, float8 scaled dynamically, and PyTorch's "
        "context parallelism",
        split_norms=True,
        wide_grads=True,
        dynamic_eight=True,
        merged_apart=True,
    ),
    _known(
        "nanotron",
        "nanotron: stages cut by cost, FlashAttention 2, exchanges not overlapped, gradients in float32",
        attention="flash2",
        tensor_overlap=False,
        param_overlap=False,
        wide_grads=True,
        balanced=True,
    ),
    _known(
        "llm-foundry|mosaic|composer",
        "llm-foundry 2023: `attn_impl: triton` (flash-attn 1.0.3), fused cross-entropy",
        attention="triton",
        fused_loss=True,
    ),
    _known("ibm|fms|litgpt|lightning", "FSDP with a compiler", fused_ops=True, compiled=True),
)
"""The first whose pattern fits."""


@lru_cache(maxsize=256)
def known(system: str) -> Known | None:
    """What is known of a system by its name."""
    low = system.lower()
    return next((k for k in KNOWN if low and re.search(k.pattern, low)), None)


def features_of(system: str, practice: str, precision: str, stated: Stated) -> Features:
    """What a row states, else what is known of its system, else its practice."""
    found = known(system)
    base = PRACTICES[practice]
    if practice == "classic" and precision == "bf16":
        base = replace(base, wide_grads=True)  # too coarse to sum in: Megatron and DeepSpeed both use float32
    return replace(base, **{**dict(found.differs if found else ()), **stated})  # type: ignore[arg-type]


def voted(practice: str, systems: Iterable[str]) -> Features:
    """A practice with every feature as most of some systems have it, each with one vote; in a tie, as it stands."""
    stands = PRACTICES[practice]
    each = [replace(stands, **dict(k.differs)) for k in set(map(known, systems)) if k]  # type: ignore[arg-type]
    most: dict[str, str | bool] = {}
    for name in (f.name for f in fields(Features)):
        for value, votes in Counter(getattr(e, name) for e in each).items():
            if 2 * votes > len(each):
                most[name] = value
    return replace(stands, **most)  # type: ignore[arg-type]


# --- what a row states

WORDS: dict[str, Stated] = {
    "compile": {"compiled": True, "fused_ops": True},
    "no compile": {"compiled": False, "fused_ops": False},
    "async tp": {"tensor_overlap": True, "split_norms": True},
}
"""Of `extra`, without a value."""


def stated(cells: Mapping[str, str], extra: Mapping[str, str]) -> Stated:
    """The features that a row states, in columns or in `extra`; raises `ValueError` for what is none."""
    out: dict[str, str | bool] = {}
    for word in extra:
        out |= WORDS.get(word.lower(), {})
    for name in (f.name for f in fields(Features)):
        text = (cells.get(name) or extra.get(name, "")).lower()
        if not text:
            continue
        if name == "attention":
            if text not in ATTENTION:
                raise ValueError(f"attention {text!r} is none of {', '.join(ATTENTION)}")
            out[name] = text
        elif text in ("yes", "no"):
            out[name] = text == "yes"
        else:
            raise ValueError(f"{name} {text!r} is neither yes nor no")
    return out
