"""The judge of torch's databases and of model families: what it calls rounding, and what it doesn't."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.suites.harness import Case, differs, plain


def _tame() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _wild() -> nn.Module:
    """Batch norm over two values that differ in their eighth digit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, eps=1e-20), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].weight.mul_(1e-8)
    return model


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


@functools.cache
def _batch() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _off(make: Callable[[], nn.Module], relative: float) -> str:
    """What the judge says of weights that are off by a share of what plain PyTorch gives."""
    case = Case(make, _loss, _batch())
    losses, _, state = plain(case, False)
    return differs(
        case, False, losses, {k: v * (1 + relative) if v.is_floating_point() else v for k, v in state.items()}
    )


def test_what_plain_pytorch_gives_is_equal() -> None:
    assert _off(_tame, 0.0) == "" == _off(_wild, 0.0)


def test_a_millionth_is_wrong_where_a_model_is_well_conditioned() -> None:
    assert "off by" in _off(_tame, 1e-6)


def test_what_the_last_bit_of_a_weight_does_to_plain_pytorch_is_rounding() -> None:
    """Three steps of a model that amplifies: nudged weights of our own, drawn otherwise than the judge's."""
    case = Case(_wild, _loss, _batch())
    losses, _, state = plain(case, False, nudge=99)
    wanted = plain(case, False)[2]
    assert max(float((state[k] - wanted[k]).abs().max()) for k in wanted) > 1e-12, "the model does not amplify"
    assert differs(case, False, losses, state) == ""


def test_a_mistake_is_wrong_where_a_model_amplifies_too() -> None:
    assert "off by" in _off(_wild, 1e-2)
