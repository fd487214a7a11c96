"""The digest of a run's state: the same however it lies, another after a single flipped bit anywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.mesh import Mesh, Place
from laminar.ir.sbp import B, S
from laminar.runtime.comm.shards import shard
from laminar.train.state.shards import shards_of
from laminar.train.state.state_hash import digest_of, plain_entries, state_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, shape, generator=dice).to(dtype)


def digest(whole: torch.Tensor, nd: tuple, mesh: Mesh) -> str:
    place = Place(tuple(range(mesh.ranks)), mesh)
    sums = []
    for rank in range(mesh.ranks):
        mine = shard(whole, nd, mesh, rank)
        shape = tuple(whole.shape)
        sums.append(state_sums(shards_of("parameter", "w", "", shape, nd, place, rank, mine), rank))
    return digest_of(sums, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (4, 3, 5), (70_001,), (300, 301), (3, 1, 0)], ids=str)
def test_it_does_not_hang_on_how_a_tensor_lies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = tensor(shape, dtype)
    want = digest(x, (B,), Mesh({"dp": 1}))
    assert digest(x, (B,), Mesh({"dp": 3})) == want
    for d in range(len(shape)):
        assert digest(x, (S(d),), Mesh({"dp": 3})) == want
        assert digest(x, (S(d), S(len(shape) - 1)), Mesh({"a": 2, "b": 2})) == want
    if shape == (6, 5):
        assert digest(x, (S(0, blocks=3),), Mesh({"dp": 2})) == want


@given(st.integers(0, 10**6))
def test_a_single_flipped_bit_is_seen(at: int) -> None:
    x = tensor((40, 13), torch.float32, at)
    want = digest(x, (B,), Mesh({"dp": 1}))
    data = as_bytes(x)
    data[at % data.numel()] ^= 1 << (at % 8)
    assert digest(x, (S(0),), Mesh({"dp": 2})) != want


def test_order_and_shape_count() -> None:
    x = tensor((4, 6), torch.float32)
    y = x.flatten()[torch.randperm(24, generator=torch.Generator().manual_seed(1))].view(4, 6)
    one = Mesh({"dp": 1})
    assert len({digest(t, (B,), one) for t in (x, y, x.view(6, 4), x.double())}) == 4


def test_hyper_parameters_count_but_not_how_an_update_is_computed() -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    plain = torch.optim.AdamW(params, lr=0.1).param_groups
    assert plain_entries(plain) == plain_entries(torch.optim.AdamW(params, lr=0.1, fused=True).param_groups)
    assert plain_entries(plain) != plain_entries(torch.optim.AdamW(params, lr=0.1 + 1e-17 * 10).param_groups)
