"""What each software stack does: yes or no, with a source. Facts, not constants; no time stands here.

A row names its system; the first entry whose pattern fits is its stack, and the last fits all. Sources are named as
they are known to us; they were not read again for this table, and where a row itself settled a question, its entry
says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, kw_only=True)
class Stack:
    """How a system runs a step."""

    pattern: str
    source: str
    fused_attention: bool
    """One kernel for scores, softmax and sum; else three, and the scores go to memory."""
    kernel: str = "flash2"
    """Which fused attention: `flash1` (Triton, 2023), `flash2`, or `hopper` (cuDNN 9 or FlashAttention 3)."""
    skips_masked: bool = True
    """Fused attention leaves out the half that a causal mask hides."""
    fused_ops: bool = True
    """Elementwise ops and norms run together, by hand-written kernels or a compiler; else one by one."""
    compiled: bool = False
    """A compiler decides what forward keeps, and makes cheap ops again."""
    merged_apart: bool = False
    """Attention over a split sequence gathers keys first, and merges partial results by kernels of their own."""
    split_norms: bool = False
    """Norms and dropout are split by token among tensor-parallel ranks, also where the row does not say so."""
    dropout: bool = False
    fused_dropout: bool = True
    """Dropout of scores runs with the softmax; else it is a kernel of its own."""
    wide_loss: bool = True
    """Logits go to float32 for the loss; else a kernel reads them as they are."""
    grad_overlap: bool = True
    """Gradients are reduced while backward goes on."""
    param_overlap: bool = True
    """Weights of a distributed optimizer are gathered while forward goes on."""
    tensor_overlap: bool = False
    """Exchanges of tensor parallelism run piece by piece beside the products next to them."""
    async_reduce: bool = False
    """In backward, sums of tensor parallelism run beside gradients of weights."""
    send_overlap: bool = False
    """Stages compute while their results are on the way."""
    wide_grads: bool = True
    """Gradients are summed, and reduced, in float32; else in the precision of the weights."""
    fused_sums: bool = False
    """Products add gradients of weights to the sum themselves; else a kernel does."""
    stops_early: bool = False
    """Recompute of a block ends with the last value that backward needs; else the whole forward runs again."""
    dynamic_eight: bool = False
    """Eight bits are scaled by the largest element of each tensor, found when it is cast."""
    every_other: bool = False
    """Selective recompute makes every other block again, or every other product of all; else attention alone."""
    graphed: bool = False
    """Kernels are launched by CUDA graphs."""
    zero: int = 0
    """Where the row does not say."""
    summed_once: bool = True
    """With weights in pieces: gradients are still reduced for every micro-batch if not."""
    balanced: bool = False
    """Stages have fewer blocks where the embedding and the head are."""
    recomputes: bool = True
    """Whether recompute may have been on where the row does not say."""
    virtual: bool = True
    """Whether stages may be interleaved where the row does not say."""


STACKS: tuple[Stack, ...] = (
    Stack(
        pattern=r"bloom|bigscience|megatron-deepspeed|vtrain", fused_attention=False, dropout=True,
        fused_dropout=False, grad_overlap=False, param_overlap=False, wide_grads=False,
        source="Megatron-DeepSpeed 2021-22: scale-mask-softmax kernel, gradients reduced behind the last micro-batch",
    ),
    Stack(
        pattern=r"libai|oneflow", fused_attention=False, dropout=True, param_overlap=False, wide_grads=False,
        balanced=True, send_overlap=True,
        source="LiBai 2022: softmax and dropout in one kernel, static graph with overlapped reductions and sends; four "
        "stages take 11/8 of a quarter of one device's time, so they are balanced",
    ),
    Stack(
        pattern=r"megatron-core|mcore", fused_attention=True, fused_sums=True, kernel="hopper", split_norms=True,
        send_overlap=True, tensor_overlap=True, zero=1,
        source="Megatron-Core r0.8 README: overlapped reductions, gathers, sends and tensor exchanges",
    ),
    Stack(
        pattern=r"nemo.*24\.03|nemo.*long", fused_attention=True, fused_sums=True, split_norms=True, send_overlap=True,
        tensor_overlap=True, zero=1, wide_grads=False,
        source="NeMo 24.03: Transformer Engine with FlashAttention 2, its context parallelism overlaps its ring",
    ),
    Stack(
        pattern=r"nemo|megatron-bridge|mlperf|nvidia|dgx", fused_attention=True, fused_sums=True, kernel="hopper",
        split_norms=True, send_overlap=True, tensor_overlap=True, zero=1, wide_grads=False,
        source="NeMo performance guide: distributed optimizer with overlap, userbuffers for tensor exchanges",
    ),
    Stack(
        pattern=r"megatron", fused_attention=False, dropout=True, fused_dropout=False, grad_overlap=False,
        param_overlap=False, async_reduce=True, fused_sums=True,
        source="Megatron-LM 2021-22 (SC21, Korthikanti): own softmax kernels, reductions behind the last micro-batch",
    ),
    Stack(
        pattern=r"torchtitan", fused_attention=True, split_norms=True, tensor_overlap=True, zero=3, wide_grads=True,
        stops_early=True, dynamic_eight=True, every_other=True, merged_apart=True, virtual=False,
        source="torchtitan: torch.compile per block, FSDP2 with prefetch, asynchronous tensor parallelism",
    ),
    Stack(
        pattern=r"nanotron", fused_attention=True, fused_ops=True, split_norms=True, zero=1, param_overlap=False,
        virtual=False, balanced=True, recomputes=False,
        source="nanotron: stages cut by cost, FlashAttention 2, its norms and rotary kernels, tensor parallelism by "
        "reduce-scatter, ZeRO 1, no recompute unless asked for",
    ),
    Stack(
        pattern=r"llm-foundry|mosaic|composer", fused_attention=True, fused_ops=False, zero=3, wide_grads=False,
        kernel="flash1", wide_loss=False, stops_early=True, summed_once=False, virtual=False,
        source="llm-foundry: FSDP, eager blocks, Triton FlashAttention, fused cross-entropy",
    ),
    Stack(
        pattern=r"fsdp|deepspeed|ibm|fms|litgpt|lightning|pytorch", fused_attention=True, compiled=True, zero=3,
        wide_grads=False, summed_once=False, virtual=False, source="FSDP or ZeRO with FlashAttention 2 and a compiler",
    ),
    Stack(
        pattern=r"", fused_attention=True, split_norms=True, send_overlap=True, zero=1, source="what is usual in 2024",
    ),
)  # fmt: skip


@lru_cache(maxsize=256)
def stack_of(system: str, zero: int | None = None, told: frozenset[str] = frozenset()) -> Stack:
    """The stack of a system by its name; `told` is what a row says about itself (`compile`, `async TP`, `bf16`)."""
    low = system.lower()
    found = next(s for s in STACKS if re.search(s.pattern, low))
    if found.pattern == "" and zero == 3:
        found = next(s for s in STACKS if s.pattern.startswith("fsdp"))
    if "deepspeed" in found.pattern and "megatron" in found.pattern:
        found = replace(found, wide_grads="bf16" in told)  # its optimizer for bfloat16 sums in float32
    if found.pattern == "torchtitan":
        said = " ".join(told).lower()
        compiled = "compile" in said and "no compile" not in said
        found = replace(found, fused_ops=compiled, compiled=compiled, tensor_overlap="async" in said)
    return found
