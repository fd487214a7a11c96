"""Attention over packed samples is attention of each alone: same numbers, and nothing crosses over, not even a NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laminar.data import document_mask, pack, packed_attention
from laminar.errors import DataError

LENGTHS = (7, 1, 30, 0, 12)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(heads: int, tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, 16, generator=dice, dtype=torch.float64).to(device, dtype).requires_grad_()


def unit(device: str = "cpu", padded: int = 64):  # type: ignore[no-untyped-def]
    return pack([list(range(n)) for n in LENGTHS], [padded]).to(device)


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Every sample by itself, written out."""
    out, begin = torch.zeros_like(q), 0
    for n in LENGTHS:
        rows = slice(begin, begin + n)
        score = q[:, rows] @ k[:, rows].transpose(-1, -2) / 4
        if causal:
            score = score.masked_fill(torch.ones(n, n, device=q.device).triu(1).bool(), float("-inf"))
        out[:, rows] = score.softmax(-1) @ v[:, rows]
        begin += n
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_attention_of_each_sample_alone(causal: bool, device: str) -> None:
    """Forward and backward, with zeros where padding is."""
    inputs = [made(2, 64, device, seed=s) for s in range(3)]
    out, want = packed_attention(*inputs, unit(device), causal), alone(*inputs, causal)
    torch.testing.assert_close(out, want)
    assert not out[:, sum(LENGTHS) :].any()
    got = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_varlen_kernel_gives_the_same(causal: bool, dtype: torch.dtype, kv_heads: int) -> None:
    """Halves on a GPU take it; up to their rounding."""
    q = made(4, 64, "cuda", dtype)
    k, v = (made(kv_heads, 64, "cuda", dtype, s) for s in (1, 2))
    out = packed_attention(q, k, v, unit("cuda"), causal)
    wide = [t.detach().double().repeat_interleave(4 // t.shape[0], 0).requires_grad_() for t in (q, k, v)]
    want = alone(*wide, causal)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(
        torch.autograd.grad(out.float().square().sum(), [q, k, v]),
        torch.autograd.grad(want.square().sum(), wide),
        strict=True,
    ):
        summed = theirs.unflatten(0, (mine.shape[0], -1)).sum(1)
        torch.testing.assert_close(mine.double(), summed, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
def test_nothing_leaks_from_one_sample_to_another(broken: float, dtype: torch.dtype, device: str) -> None:
    """All other samples come out bit for bit as before, and gradients of one stay with it."""
    packed = unit(device)
    inputs = [made(2, 64, device, dtype, s) for s in range(3)]
    before = packed_attention(*inputs, packed)
    spoiled = [t.detach().clone() for t in inputs]
    third = slice(packed.bounds[2], packed.bounds[3])
    for t in spoiled:
        t[:, third] = broken
    after = packed_attention(*spoiled, packed)
    others = packed.documents != 2
    assert torch.equal(before[:, others], after[:, others])
    for grad in torch.autograd.grad(before[:, third].float().square().sum(), inputs):
        assert not grad[:, others].any() and grad[:, third].any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_says_the_same(causal: bool) -> None:
    """For captured graphs, which hold plain tensors only; padding sees padding, so no row is empty."""
    packed = unit()
    inputs = [made(2, 64, seed=s) for s in range(3)]
    mask = document_mask(packed.documents, causal)
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    real = packed.documents >= 0
    torch.testing.assert_close(out[:, real], packed_attention(*inputs, packed, causal)[:, real])
    assert out.isfinite().all() and mask.any(-1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_keeps_samples_apart(device: str) -> None:
    """Finite values of one do not reach another, bit for bit."""
    packed = unit(device)
    inputs = [made(2, 64, device, torch.float32, s).detach() for s in range(3)]
    mask = document_mask(packed.documents)
    before = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    for t in inputs:
        t[:, packed.bounds[2] : packed.bounds[3]] = 100.0
    after, others = F.scaled_dot_product_attention(*inputs, attn_mask=mask), packed.documents != 2
    torch.testing.assert_close(before[:, others], after[:, others], rtol=0, atol=0)


def test_a_mask_may_have_batch_dims() -> None:
    """One row of documents for each unit."""
    documents = torch.tensor([[0, 0, 1], [0, 1, -1]])
    assert document_mask(documents).shape == (2, 3, 3)
    assert document_mask(documents)[1].tolist() == [[True, False, False], [False, True, False], [False, False, True]]


def test_key_heads_may_be_fewer() -> None:
    """Groups of query heads share them."""
    q, k, v = made(4, 64), made(2, 64, seed=1), made(2, 64, seed=2)
    wide = [t.repeat_interleave(2, 0) for t in (k, v)]
    torch.testing.assert_close(packed_attention(q, k, v, unit()), packed_attention(q, *wide, unit()))


def test_bounds_may_be_given_as_numbers() -> None:
    """And a batch dim in front is kept."""
    q = made(2, 10)[None]
    assert packed_attention(q, q, q, [0, 4, 10]).shape == q.shape
    assert not packed_attention(q, q, q, [0, 0]).any()


@pytest.mark.parametrize("bounds", [[], [1, 4], [0, 5, 4], [0, 11]])
def test_bounds_that_are_none_are_refused(bounds: list[int]) -> None:
    """Rising, from 0, inside of the row."""
    q = made(1, 10)
    with pytest.raises(DataError, match="in a row of 10"):
        packed_attention(q, q, q, bounds)


def test_a_scale_is_passed_on() -> None:
    """As in torch."""
    q, k, v = (made(1, 10, seed=s) for s in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)
    torch.testing.assert_close(packed_attention(q, k, v, [0, 10], scale=0.7), want)
