"""Ops by name: the sets of them that several rooms go by, each stated once.

A set is here if it states a fact about ops. What one room makes of ops (which it prices alike, which its kernels
fuse, which a preset splits) stays with that room.
"""

from __future__ import annotations

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Steps of boxing in which ranks talk to each other."""
LOCAL_BOXING = ("slice", "pad")
"""Steps of boxing that a rank does alone."""
COLLECTIVE_OPS = frozenset(f"box.{kind}" for kind in COLLECTIVES)
"""The former as ops of lines: `Instr.moves` without a call, for loops over all lines."""

HOST_SEND, HOST_BRING = "host.send", "host.bring"
"""Lines that copy values to the host's memory, and back to the device. Both give what they are given, value by value;
what a line reads beyond that only says what must have arrived before it starts (see `lower/memory/offload.py`)."""
HOST_COPIES = frozenset((HOST_SEND, HOST_BRING))
ASYNC_OPS = COLLECTIVE_OPS | HOST_COPIES
"""Lines that go on beside what follows them."""

DRAWS = ("laminar.uniform", "laminar.normal")
"""Random numbers, by key."""

FREE = frozenset(
    f"aten.{name}"
    for name in """view _unsafe_view reshape t permute transpose.int unsqueeze squeeze squeeze.dim expand slice.Tensor
    select.int split.Tensor split_with_sizes unbind.int alias detach""".split()
)
"""Ops that only look at memory in another way."""
VIEWS = FREE | frozenset(
    f"aten.{name}"
    for name in """squeeze.dims diagonal unfold unsafe_split.Tensor unsafe_split_with_sizes view_as_complex view_as_real
    as_strided view.dtype""".split()
)
"""Ops whose result is memory of what they read; those beyond the free ones are rare, and priced like others."""
_MAY_ALIAS = ("aten.clone", "aten.contiguous", "aten._to_copy", "aten.to.", "aten.lift", "laminar.")
"""Ops, besides views, whose result may be the memory of what they read."""

RESHAPES = tuple(
    f"aten.{name}" for name in "view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims".split()
)
"""Ops that give the same elements, in the same order, another shape."""

WRITE_INTO_PLACE = ("aten.mm", "aten.bmm", "aten.addmm", "aten.embedding_dense_backward")
"""Ops that can write their result where they are told."""


def may_share_memory(op: str) -> bool:
    """Whether the result of an op may lie where its input lies, by name: `runtime/comm/aliases.py` asks torch too."""
    return op in VIEWS or op.startswith(_MAY_ALIAS)
