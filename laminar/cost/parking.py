"""What a compiler does with memory: which values of a group of lines exist, and who takes over whose memory.

Inductor gives a kernel's result the memory of an earlier value of the same size and dtype whose last reader has
run, and until then nobody else can have that memory. It does so where its own estimate of the part's peak
allows it. That estimate counts inputs until their last reader, as if they were freed there, though parameters
are not: so a step holds more than what lives, by up to what the part reads of parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from laminar.ir.codec import Ref
from laminar.ir.program import Program

NEVER_IN_PLACE = frozenset(
    "mm bmm addmm baddbmm mv convolution convolution_backward attention attention_backward lstm lstm_backward "
    "embedding embedding_dense_backward index.Tensor index_put gather scatter_add cumsum sort topk".split()
)
"""Ops that a compiler does not let overwrite their input: they read it in another order than they write."""
LOOKS_UP = frozenset(("aten.nll_loss_forward", "aten.gather"))
"""Ops that read few elements of a large tensor: what a kernel of several lines made for them alone is not stored,
they work those elements out again."""
FOREVER = 1 << 60


@dataclass(slots=True)
class Life:
    """From which kernel to which a stretch of memory is in use; kernels are numbered as they run."""

    nbytes: int
    key: Hashable
    """What must be equal for one to take over from another."""
    born: int
    """-1 for what is there before."""
    dead: int = FOREVER
    gives: bool = False
    """Whether its memory may be taken over."""
    takes: bool = False
    """Whether it may take over memory."""


def handed_on(
    lives: Sequence[Life], reads: Sequence[set[int]], parts: Sequence[int], unseen: Mapping[int, int]
) -> dict[int, int]:
    """For each life that takes over another's memory, the number of that other.

    `reads`: for each kernel the lives it reads; `parts`: the part it belongs to, -1 for a collective. `unseen`: bytes
    that the estimate counts besides at a kernel: results that overwrite an input, pieces of a concatenation.
    """
    born: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    for k, life in enumerate(lives):
        born.setdefault(life.born, []).append(k)
        dead.setdefault(life.dead, []).append(k)
    out: dict[int, int] = {}
    for part, steps in groupby(range(len(parts)), key=lambda s: parts[s]):
        if part >= 0:
            inside = list(steps)
            out |= _in_part(inside[0], inside[-1], lives, reads, born, dead, unseen)
    return out


def _in_part(
    first: int,
    last: int,
    lives: Sequence[Life],
    reads: Sequence[set[int]],
    born: dict[int, list[int]],
    dead: dict[int, list[int]],
    unseen: Mapping[int, int],
) -> dict[int, int]:
    held = np.zeros(last - first + 1, dtype=np.int64)
    read = {k: s for s in range(first, last + 1) for k in reads[s]}
    for k, until in read.items():
        if lives[k].born < first:
            held[: until - first + 1] += lives[k].nbytes
    for s in range(first, last + 1):
        for k in born.get(s, ()):
            held[s - first : min(lives[k].dead, last) - first + 1] += lives[k].nbytes
        held[s - first] += unseen.get(s, 0)
    most = int(held.max())
    kept: dict[Hashable, list[int]] = {}
    out: dict[int, int] = {}
    for s in range(first, last + 1):
        for k in born.get(s, ()):
            waiting = kept.get(lives[k].key)
            if not lives[k].takes or not waiting:
                continue
            between = held[lives[waiting[-1]].dead + 1 - first : s - first]
            if not len(between) or int(between.max()) + lives[k].nbytes <= most:
                between += lives[k].nbytes
                out[k] = waiting.pop()
        for k in dead.get(s, ()):
            if lives[k].gives and lives[k].born >= first:
                kept.setdefault(lives[k].key, []).append(k)
    return out


def arranged(program: Program, groups: Sequence[tuple[int, ...]] | None) -> tuple[list[tuple[int, ...]], set[Ref]]:
    """What runs one after the other, and values that exist only inside a kernel.

    A group runs where its last line stands, or just before somebody outside needs what it makes.
    """
    instrs = program.instrs
    home = {k: g for g, members in enumerate(groups or ()) for k in members}
    if len(home) != sum(map(len, groups or ())):
        raise ValueError("a line is in two groups")
    at = {i.name: k for k, i in enumerate(instrs)}
    leaving = {o.ref for o in program.outputs}
    plain = {
        g
        for g, members in enumerate(groups or ())
        if len(members) > 1 and all(instrs[k].op.partition(".")[2] not in NEVER_IN_PLACE for k in members)
    }
    outside: dict[Ref, int] = {}
    for k, instr in enumerate(instrs):
        for ref in instr.refs:
            maker = at.get(ref.name)
            if maker is None or maker not in home or home.get(k) == home[maker]:
                continue
            if instr.op not in LOOKS_UP or home[maker] not in plain:
                outside.setdefault(ref, k)
    inner = {
        Ref(instrs[k].name, n)
        for k in home
        for n in range(len(instrs[k].outs))
        if Ref(instrs[k].name, n) not in outside and Ref(instrs[k].name, n) not in leaving
    }
    if groups is not None and len(home) == len(instrs):
        return [tuple(g) for g in groups], inner  # they say themselves when they run
    when: list[tuple[float, tuple[int, ...]]] = [((k), (k,)) for k in range(len(instrs)) if k not in home]
    for members in groups or ():
        first = min((k for r, k in outside.items() if at[r.name] in members), default=len(instrs))
        when.append((min(max(members), first - 0.5), tuple(sorted(members))))
    return [lines for _, lines in sorted(when)], inner
