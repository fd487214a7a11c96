"""Updates on whole vectors: the same bits however a tensor is cut, with every elementwise optimizer of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.sbp import B
from laminar.ir.tensor import TensorSpec
from laminar.train.optimizer.optimizer import KNOWN, Kept
from laminar.train.optimizer.whole_vectors import ROOM, WholeVectors, flat_with_room, roomy

HOW: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True},
    "ASGD": {"lr": 0.01},
}
N = 1000


def kept(x: torch.Tensor) -> Kept:
    param = nn.Parameter(x.clone())
    return Kept("w", TensorSpec(tuple(x.shape), "f32"), param, (B,), (B,), param)


def trained(kind: type, cuts: list[int], how: dict[str, Any], threads: int = 1) -> torch.Tensor:
    dice = torch.Generator().manual_seed(0)
    x, *grads = (torch.randn(N, generator=dice) for _ in range(6))
    pieces = [kept(p) for p in x.split(cuts)]
    held = {"w": pieces[0].param.detach()}
    optimizer = kind([k.param for k in pieces], **how)
    vectors = WholeVectors(optimizer, pieces, held)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for grad in grads:
            for k, g in zip(pieces, grad.split(cuts), strict=True):
                k.owned.grad = g.clone()
            vectors.step()
            for k in pieces:
                assert k.owned.grad is None and k.owned.shape == (len(k.owned),)
    finally:
        torch.set_num_threads(before)
    states = [v for k in pieces for v in optimizer.state[k.owned].values() if torch.is_tensor(v) and v.dim()]
    assert all(v.shape == k.owned.shape for k in pieces for v in optimizer.state[k.owned].values() if v.dim())
    count = len(states) // len(pieces)
    return torch.cat([k.owned.detach() for k in pieces] + [torch.cat(states[i::count]) for i in range(count)])


@pytest.mark.parametrize("kind", KNOWN, ids=lambda k: k.__name__)
@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_cuts_change_no_bit(kind: type, form: str) -> None:
    how = {**HOW.get(kind.__name__, {}), form: True}
    try:
        kind([nn.Parameter(torch.zeros(2))], **how)
    except (TypeError, RuntimeError):
        pytest.skip(f"{kind.__name__} has no {form} form on a CPU")
    whole = trained(kind, [N], how)
    for cuts in ([500, 500], [1, 999], [333, 334, 333], [63, 65, 872], [17] * 58 + [14]):
        for threads in (1, 2):
            assert torch.equal(as_bytes(trained(kind, cuts, how, threads)), as_bytes(whole)), cuts


def test_tensors_have_room_behind_them_and_keep_their_place() -> None:
    x = torch.arange(10.0).view(2, 5).t()
    room = roomy(x)
    assert torch.equal(room, x) and room.stride() == x.stride()
    flat = flat_with_room(room)
    assert flat is not None and flat.numel() == ROOM and flat_with_room(torch.zeros(10)) is None
