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

from laminar.cost.ops.interned import Forms

NEVER_IN_PLACE = frozenset(
    """mm bmm addmm baddbmm mv convolution convolution_backward attention attention_at attention_backward
    attention_backward_at lstm lstm_backward embedding embedding_dense_backward index.Tensor index_put gather
    scatter_add cumsum sort topk""".split()
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


def in_order(forms: Forms, groups: Sequence[tuple[int, ...]] | None) -> tuple[list[tuple[int, ...]], set[int]]:
    """What runs one after the other, and values, by number, that exist only inside a kernel.

    A group runs where its last line stands, or just before somebody outside needs what it makes.
    """
    count, outputs = len(forms.of), forms.program.outputs
    home = [-1] * count
    for g, members in enumerate(groups or ()):
        for k in members:
            if home[k] >= 0:
                raise ValueError("a line is in two groups")
            home[k] = g
    made = [len(i.outs) for i in forms.examples]
    maker = [-1] * forms.values
    for k, (form, first) in enumerate(zip(forms.of, forms.makes, strict=True)):
        for v in range(first, first + (made[form] or 1)):
            maker[v] = k
    leaving = {forms.number(o.ref) for o in outputs}
    in_place = [i.op.partition(".")[2] not in NEVER_IN_PLACE for i in forms.examples]
    looks_up = [i.op in LOOKS_UP for i in forms.examples]
    plain = {
        g for g, members in enumerate(groups or ()) if len(members) > 1 and all(in_place[forms.of[k]] for k in members)
    }
    outside: dict[int, int] = {}
    """The first line that reads a value of another's kernel."""
    for k, (form, reads) in enumerate(zip(forms.of, forms.reads, strict=True)):
        for v in reads:
            line = maker[v]
            if line < 0 or home[line] < 0 or home[k] == home[line]:
                continue
            if v not in outside and (not looks_up[form] or home[line] not in plain):
                outside[v] = k
    inner = {
        v
        for k in range(count)
        if home[k] >= 0
        for v in range(forms.makes[k], forms.makes[k] + made[forms.of[k]])
        if v not in outside and v not in leaving
    }
    if groups is not None and all(g >= 0 for g in home):
        return [tuple(g) for g in groups], inner  # they say themselves when they run
    when: list[tuple[float, tuple[int, ...]]] = [((k), (k,)) for k in range(count) if home[k] < 0]
    for members in groups or ():
        first_reader = min((k for v, k in outside.items() if maker[v] in members), default=count)
        when.append((min(max(members), first_reader - 0.5), tuple(sorted(members))))
    return [lines for _, lines in sorted(when)], inner
