"""Sums in integers: near enough to the exact sum, the same in any order and grouping, and NaN where there is one.

Exact sums are taken in rational numbers. Groupings are those that processes make: each adds up the integers of its
terms, and these are added in any order.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.runtime.exact.integer_sum import (
    CHUNK_ELEMENTS,
    PER_EXPONENT,
    bits_of,
    block_exponents,
    floats_of,
    integer_sum,
    integer_terms,
)

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def summed(terms: list[Tensor]) -> Tensor:
    out = torch.empty_like(terms[0])
    integer_sum(terms, out)
    return out


def in_groups(terms: list[Tensor], chance: random.Random) -> Tensor:
    """As processes do it that have some of the terms each."""
    order, groups = chance.sample(terms, len(terms)), list[list[Tensor]]()
    while order:
        size = chance.randint(1, len(order))
        groups.append(order[:size])
        order = order[size:]
    exponents = torch.stack([block_exponents(g) for g in groups]).amax(0)
    total = torch.zeros(terms[0].numel(), dtype=torch.int32)
    for group in groups:
        total += integer_terms(group, exponents, len(terms))
    out = torch.empty_like(terms[0])
    floats_of(total, exponents, len(terms), out)
    return out


def filled(values: list[float]) -> Tensor:
    return torch.tensor((values * PER_EXPONENT)[:PER_EXPONENT], dtype=torch.float32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=20))
def test_no_sum_is_further_off_than_it_says(columns: list[list[float]]) -> None:
    """The bound in the module's header, for any numbers: the largest there are, the smallest, and those far apart."""
    terms = [filled(c) for c in columns]
    found, n = summed(terms), len(terms)
    largest = max(abs(Fraction(x)) for t in terms for x in t.tolist())
    step = max(Fraction(2) ** (math.frexp(largest)[1] - bits_of(n) if largest else -200), Fraction(2) ** -126)
    assert step * n / 2 <= n * max(Fraction(2) ** -bits_of(n) * largest, Fraction(2) ** -127)
    for i in range(3):
        exact = sum(Fraction(t[i].item()) for t in terms)
        if math.isinf(found[i].item()):
            assert abs(exact) + step * n / 2 >= Fraction(torch.finfo(torch.float32).max)
            continue
        last = max(Fraction(2) ** -149, Fraction(math.ulp(found[i].item())) * 2**29)  # of single precision
        assert abs(Fraction(found[i].item()) - exact) <= step * n / 2 + last / 2


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_each_term_is_rounded_to_the_nearest_integer(count: int) -> None:
    """Three quarters of a step are one step, and a quarter is none."""
    step = 2.0 ** (1 - bits_of(count))
    terms = [filled([1.0, 0.75 * step, -0.75 * step, 0.25 * step]) for _ in range(count)]
    assert summed(terms)[:4].tolist() == [count, count * step, -count * step, 0.0]


def test_eight_terms_lose_at_most_a_quarter_of_a_last_place_of_the_largest() -> None:
    """Of ordinary numbers, many of them; a tree of floats for comparison."""
    terms = [torch.randn(1 << 18) for _ in range(8)]
    exact = torch.stack(terms).double().sum(0)
    largest = torch.stack(terms).abs().amax(0).view(-1, PER_EXPONENT).amax(1, keepdim=True).double()
    off = (summed(terms).double() - exact).abs()
    rounding = exact.abs() * 2**-24
    assert ((off - rounding).view(-1, PER_EXPONENT) / largest).max() <= 2**-25
    tree = ((terms[0] + terms[1]) + (terms[2] + terms[3])) + ((terms[4] + terms[5]) + (terms[6] + terms[7]))
    assert off.pow(2).mean() < (tree.double() - exact).pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 64])
def test_any_order_and_grouping_gives_the_same_bits(dtype: torch.dtype, count: int) -> None:
    chance = random.Random(count)
    numel = CHUNK_ELEMENTS + 3 * PER_EXPONENT
    terms = [(torch.randn(numel) * torch.randn(numel).mul(4).exp()).clamp(-6e4, 6e4).to(dtype) for _ in range(count)]
    want = summed(terms)
    assert torch.equal(as_bytes(summed(chance.sample(terms, count))), as_bytes(want))
    for _ in range(3):
        assert torch.equal(as_bytes(in_groups(terms, chance)), as_bytes(want))
    alone = terms[0].clone()
    integer_sum([alone, *terms[1:]], alone)
    assert torch.equal(as_bytes(alone), as_bytes(want)), "written over its first term"


def test_floats_are_not_like_that() -> None:
    terms = [torch.randn(1000) for _ in range(8)]
    assert not torch.equal(sum(terms[1:], terms[0]), sum(terms[-2::-1], terms[-1]))


def test_the_largest_terms_there_may_be_don_t_overflow_integers() -> None:
    for count in (1, 2, 5, 8, 33, 64):
        terms = [torch.full((PER_EXPONENT,), 1 - 2**-24) for _ in range(count)]
        assert torch.equal(summed(terms).double(), torch.full((PER_EXPONENT,), count * (1 - 2**-24)).float().double())
        most = torch.finfo(torch.float32).max
        assert summed([torch.full((PER_EXPONENT,), most) for _ in range(count)])[0] == (
            most if count == 1 else math.inf
        )


def test_what_is_not_finite_is_kept_and_spoils_nothing_beside_it() -> None:
    """As floats have it: infinities of both signs make NaN; elements of the same block are still sums."""
    terms = [torch.randn(3 * PER_EXPONENT) for _ in range(4)]
    terms[1][70], terms[2][71], terms[0][72], terms[3][72], terms[3][73] = (
        math.inf,
        -math.inf,
        math.inf,
        -math.inf,
        math.nan,
    )
    found = summed(terms)
    assert found[70] == math.inf and found[71] == -math.inf and found[72].isnan() and found[73].isnan()
    rest = torch.ones(3 * PER_EXPONENT, dtype=torch.bool)
    rest[70:74] = False
    torch.testing.assert_close(found[rest], torch.stack(terms).sum(0)[rest])
    plain = [t.clone() for t in terms]
    for t in plain:
        t[PER_EXPONENT : 2 * PER_EXPONENT] = 0
    others = torch.cat([found[:PER_EXPONENT], found[2 * PER_EXPONENT :]])
    assert torch.equal(others, torch.cat([summed(plain)[:PER_EXPONENT], summed(plain)[2 * PER_EXPONENT :]]))
