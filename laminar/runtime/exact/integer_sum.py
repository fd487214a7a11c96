"""Sums that need no order: every term is rounded to whole multiples of one power of two, and integers are added.

A block of neighbouring elements shares an exponent: that of its largest element in any term. With it known, each term's
element is an integer of so many bits below it, and integers give one sum in whatever order and grouping they are added,
so it does not matter which process has which terms. Of n terms, M being the largest magnitude in a block,

    |sum - exact sum| <= n * max(2**-bits * M, 2**-127) + half a unit in the sum's last place,

where bits = 31 - ceil(log2(n)). For eight terms that is 2**-25 M, a quarter of a unit in the last place of M. A tree of
floats may be off by more for an element near M, and by less for one far below it. A block that has a NaN or an
infinity in any term is added by the tree, from terms that are gathered: as rare as it is slow.

Covered: terms of 32 bits and of 16, which become 32. Not covered: double precision and whole numbers, which are
added by the tree, and maxima, which have no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.runtime.exact.tree_sum import tree_sum

PER_EXPONENT = 64
"""Elements that share an exponent. Fewer lose less of small elements, and cost more: a byte of exponent for each."""
CHUNK_ELEMENTS = 1 << 16
"""Elements that go through all passes at once, so that what lies between stays in a core's cache."""
NOT_FINITE = 255
"""The exponent of a block with an infinity or a NaN in it."""
INTEGER_TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIGNIFICAND, BIAS = 23, 127
"""Of single precision: bits of the significand as stored, and what is added to exponents."""


def bits_of(terms: int) -> int:
    """Bits of each term's integers, so that no sum overflows: there are 24 or more, so the largest is below 2**bits."""
    return 31 - math.ceil(math.log2(terms))


class TermRows:
    """The terms that are here, each in a row of its own until all exponents are known; as `PartialSums` takes them."""

    def __init__(self, members: Sequence[bool], rows: Sequence[Tensor]) -> None:
        """`rows` are where the terms go that `members` says are here."""
        self.rows = dict(zip((i for i, here in enumerate(members) if here), rows, strict=True))

    def clear(self) -> None:
        """Nothing is kept from one sum to the next."""

    def room(self, index: int) -> Tensor | None:
        """Where the term of this number may be written as it is made."""
        return self.rows[index]

    def partner(self, index: int) -> Tensor | None:
        """Nothing: terms are not added before exponents are known."""
        return None

    def joined(self, index: int) -> None:
        """No term is added to a partner."""

    def add(self, index: int, term: Tensor, own: bool = False) -> None:
        """The next term."""
        row = self.rows[index]
        if row.data_ptr() != term.data_ptr():
            row.copy_(term)


def block_exponents(rows: Sequence[Tensor]) -> Tensor:
    """For each block the exponent that all these terms stay below, as a byte; `NOT_FINITE` where one is not finite."""
    out = torch.zeros(rows[0].numel() // PER_EXPONENT, dtype=torch.uint8, device=rows[0].device)
    for begin in range(0, rows[0].numel(), CHUNK_ELEMENTS):
        largest: Tensor | None = None
        for row in rows:
            found = row[begin : begin + CHUNK_ELEMENTS].abs()
            largest = found if largest is None else torch.maximum(largest, found, out=largest)
        assert largest is not None
        found = largest.view(-1, PER_EXPONENT).amax(1).to(torch.float32)  # NaN if there is one
        at = begin // PER_EXPONENT
        out[at : at + found.numel()] = (found.view(torch.int32) >> SIGNIFICAND) & NOT_FINITE
    return out


def integer_terms(rows: Sequence[Tensor], exponents: Tensor, terms: int) -> Tensor:
    """These rows of a sum of so many terms as integers, added up. Where a block is not finite: no matter what."""
    out = torch.zeros(exponents.numel() * PER_EXPONENT, dtype=torch.int32, device=exponents.device)
    scales, _ = _scales(exponents, terms)
    size = min(out.numel(), CHUNK_ELEMENTS)
    scaled, whole = out.new_empty(size, dtype=torch.float32), out.new_empty(size)
    for begin in range(0, out.numel(), CHUNK_ELEMENTS):
        into = out[begin : begin + CHUNK_ELEMENTS]
        f, i = scaled[: into.numel()], whole[: into.numel()]
        scale = scales[begin // PER_EXPONENT : (begin + CHUNK_ELEMENTS) // PER_EXPONENT]
        for k, row in enumerate(rows):
            torch.mul(row[begin : begin + CHUNK_ELEMENTS].view(-1, PER_EXPONENT), scale, out=f.view(-1, PER_EXPONENT))
            f.round_()
            if k:
                into.add_(i.copy_(f))
            else:
                into.copy_(f)
    return out


def floats_of(integers: Tensor, exponents: Tensor, terms: int, out: Tensor) -> None:
    """What sums of integers are as floats."""
    _, steps = _scales(exponents, terms)
    out.copy_(integers.to(torch.float32).view(-1, PER_EXPONENT).mul_(steps).view(-1))


def integer_sum(rows: Sequence[Tensor], out: Tensor) -> None:
    """The whole sum of all terms, flat rows in their order, in `out`; it may be one of them."""
    for begin in range(0, out.numel(), CHUNK_ELEMENTS):
        here, into = [r[begin : begin + CHUNK_ELEMENTS] for r in rows], out[begin : begin + CHUNK_ELEMENTS]
        exponents = block_exponents(here)
        spoilt = not_finite(exponents)
        by_tree = spoilt_sums([spoilt_blocks(r, spoilt) for r in here]) if spoilt.numel() else None
        floats_of(integer_terms(here, exponents, len(rows)), exponents, len(rows), into)
        if by_tree is not None:
            into.view(-1, PER_EXPONENT)[spoilt] = by_tree


def not_finite(exponents: Tensor) -> Tensor:
    """The numbers of the blocks that have an infinity or a NaN in one of the terms."""
    return (exponents == NOT_FINITE).nonzero().view(-1)


def spoilt_blocks(row: Tensor, numbers: Tensor) -> Tensor:
    """Some blocks of a row."""
    return row.view(-1, PER_EXPONENT)[numbers]


def spoilt_sums(terms: Sequence[Tensor]) -> Tensor:
    """What is not finite, and what lies beside it, added up by the tree; all terms, in their order."""
    nodes = {(i, i + 1): t.reshape(-1) for i, t in enumerate(terms)}
    return tree_sum(nodes, len(terms), "sum", torch.empty_like(nodes[0, 1])).view(-1, PER_EXPONENT)


def _scales(exponents: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """For each block what turns a term into an integer, and what turns a sum of integers back: powers of two."""
    bits = bits_of(terms)
    raised = exponents.to(torch.int32).clamp_(bits, NOT_FINITE - 1)  # tiny ones, so that neither power leaves its range
    scale = (2 * BIAS - 1 + bits - raised) << SIGNIFICAND
    step = (raised + 1 - bits) << SIGNIFICAND
    return scale.view(torch.float32).view(-1, 1), step.view(torch.float32).view(-1, 1)
