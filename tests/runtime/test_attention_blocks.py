"""Attention by blocks: one set of bits for every way to cut a sequence into stretches of whole blocks.

Every cutting is tried, with ones of a single block and the whole sequence among them. Gradients of keys are added up as
ranks would: each adds what it has up to the nodes of a fixed tree, and those are added for all. Covered: CPU, float32
and bfloat16, one thread and two, lengths that are no multiple of a block, grouped queries, stretches that lie
differently in memory. Not covered: GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from laminar.capture.ops.attention import attention, attention_at, attention_backward
from laminar.capture.ops.attention_blocks import attention_backward_by_blocks, attention_by_blocks
from laminar.errors import PlacementError

BLOCK = 32
SCALE = 0.25
Sums = dict[tuple[int, int], tuple[Tensor, Tensor]]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def problem(tokens: int, dtype: torch.dtype, kv: int = 4) -> list[Tensor]:
    """Gradient of the output, queries, keys and values."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, h, tokens, 16, generator=generator).to(dtype) for h in (4, 4, kv, kv)]


def cuttings(blocks: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a row of blocks, as the blocks at which stretches begin, and the end."""
    for count in range(blocks):
        for inner in itertools.combinations(range(1, blocks), count):
            yield (0, *inner, blocks)


def children(node: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The left one has as many terms as the largest power of two below their number."""
    first, end = node
    middle = first + (1 << ((end - first - 1).bit_length() - 1))
    return (first, middle), (middle, end)


def added(node: tuple[int, int], here: Sums) -> tuple[Tensor, Tensor]:
    """The sum of a node, of the sums that are there or of its children's."""
    if node in here:
        return here[node]
    left, right = (added(child, here) for child in children(node))
    return left[0] + right[0], left[1] + right[1]


def covered(node: tuple[int, int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """The largest nodes that lie in a stretch."""
    if first <= node[0] and node[1] <= end:
        yield node
    elif node[0] < end and first < node[1]:
        for child in children(node):
            yield from covered(child, first, end)


def cut(given: list[Tensor], causal: bool, begins: tuple[int, ...], turned: bool = False) -> list[Tensor]:
    """Output, logsumexp and gradients, each stretch worked out by itself."""
    dout, q, k, v = given
    tokens, blocks, made = q.shape[2], begins[-1], []
    nodes: Sums = {}
    for first, end in itertools.pairwise(begins):
        rows = slice(first * BLOCK, min(end * BLOCK, tokens))
        x, y = q[:, :, rows].clone(), dout[:, :, rows]
        if turned:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        out, lse = attention_by_blocks(x, k, v, causal, SCALE, rows.start, BLOCK)
        terms: Sums = {}

        def add(index: int, dk: Tensor, dv: Tensor, terms: Sums = terms) -> None:
            terms[index, index + 1] = dk, dv

        dq = attention_backward_by_blocks(y, x, k, v, out, lse, causal, SCALE, rows.start, BLOCK, add)
        assert sorted(terms) == [(i, i + 1) for i in range(first, end)]
        nodes |= {node: added(node, terms) for node in covered((0, blocks), first, end)}
        made.append((out, lse, dq))
    return [*(torch.cat(parts, 2) for parts in zip(*made, strict=True)), *added((0, blocks), nodes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("tokens", "kv"), [(192, 4), (180, 4), (192, 2)])
def test_bits_are_the_same_for_every_cutting(dtype: torch.dtype, tokens: int, kv: int) -> None:
    """32 cuttings of six blocks, the last of which may be short."""
    given = problem(tokens, dtype, kv)
    blocks = -(-tokens // BLOCK)
    every = list(cuttings(blocks))
    assert len(every) == 2 ** (blocks - 1)
    want = cut(given, True, every[0])
    for begins in every[1:]:
        got = cut(given, True, begins)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), begins


def test_bits_are_the_same_however_stretches_lie_in_memory() -> None:
    """Queries split off a projection lie token by token, received ones head by head."""
    given = problem(192, torch.float32)
    want = cut(given, True, (0, 2, 6))
    assert all(torch.equal(a, b) for a, b in zip(cut(given, True, (0, 3, 6), turned=True), want, strict=True))


def test_one_call_for_a_stretch_has_other_bits() -> None:
    """Why there are blocks at all: the same rows in a longer stretch come out otherwise."""
    _, q, k, v = problem(192, torch.float32)
    ends = [attention_at(q[:, :, a:], k, v, None, True, SCALE, a)[0][:, :, -BLOCK:] for a in (96, 128)]
    assert not torch.equal(*ends)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "kv"), [(192, 4), (180, 2)])
def test_it_is_attention(causal: bool, tokens: int, kv: int) -> None:
    """Against one call on the whole, in float64."""
    given = problem(tokens, torch.float64, kv)
    dout, q, k, v = given
    out, lse = attention(q, k, v, None, causal, SCALE)
    want = (out, lse, *attention_backward(dout, q, k, v, None, out, lse, causal, SCALE))
    for begins in ((0, 6), (0, 1, 4, 6)):
        for a, b in zip(cut(given, causal, begins), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("offset", "rows"), [(16, 32), (0, 40), (32, 31)])
def test_a_stretch_of_other_than_whole_blocks_is_refused(offset: int, rows: int) -> None:
    """A part of a block would be another call than the block."""
    _, q, k, v = problem(192, torch.float32)
    with pytest.raises(PlacementError, match="whole blocks of 32"):
        attention_by_blocks(q[:, :, offset : offset + rows], k, v, True, SCALE, offset, BLOCK)
