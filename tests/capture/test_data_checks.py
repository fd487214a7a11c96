"""Checks of data that only raise or warn are no part of a captured step; everything else about data is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laminar.capture.capture import capture
from laminar.errors import CaptureError
from tests.support.capture_check import Fn, asserting, draw, same, square

X = draw(4, 6, seed=3)


def _raises(m: Any, x: Tensor) -> Tensor:
    if x is not None and x.max() >= 100:
        raise ValueError(f"too large: {x.max()}")
    return m.inner(x)


def _either(m: Any, x: Tensor) -> Tensor:
    if x.max() >= 100 or not torch.isfinite(x).all():
        message = "bad values"
        raise ValueError(message)
    return m.inner(x)


def _item(m: Any, x: Tensor) -> Tensor:
    if (x > 100).any().item():
        raise ValueError
    return m.inner(x)


def _otherwise(m: Any, x: Tensor) -> Tensor:
    if torch.isfinite(x).all():
        y = m.inner(x)
    else:
        raise ValueError("values")
    return y * 2


def _elif(m: Any, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return x
    elif x.abs().max() > 100:
        raise ValueError("values")
    else:
        return m.inner(x)


def _warns(m: Any, x: Tensor) -> Tensor:
    if (x.abs() > 100).any():
        warnings.warn("large values", stacklevel=2)
    return m.inner(x)


def _torch(m: Any, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 100)
    torch._check_tensor_all_with(ValueError, x < 100, lambda: "too large")
    torch._assert(torch.isfinite(x).all(), "values")
    return m.inner(x)


CHECKS = [_raises, _either, asserting, _item, _otherwise, _elif, _warns, _torch]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_only_raises_is_passed(check: Any) -> None:
    """Libraries check labels and masks in every forward; a step that runs at all passes."""
    same(lambda: Fn(check, inner=nn.Linear(6, 6)), square, X)


def _computes(m: Any, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = x.clamp(-10, 10)
    return m.inner(x)


def _returns(m: Any, x: Tensor) -> Tensor:
    if x.max() > 0:
        return m.inner(x)
    raise ValueError


def _counts(m: Any, x: Tensor) -> Tensor:
    while x.max() > 100:
        raise ValueError
    return m.inner(x)


def _chooses(m: Any, x: Tensor) -> Tensor:
    scale = 2.0 if x.max() > 0 else 1.0
    return m.inner(x) * scale


def _tries(m: Any, x: Tensor) -> Tensor:
    if x.max() > 0:
        m.inner(x).sum()
        raise ValueError
    return m.inner(x)


@pytest.mark.parametrize("path", [_computes, _returns, _counts, _chooses])
def test_a_question_that_decides_what_is_computed_is_refused(path: Any) -> None:
    """Otherwise the first answer would be every step's."""
    with pytest.raises(CaptureError, match="depends on data"):
        capture(Fn(path, inner=nn.Linear(6, 6)), square, X)


def _caught(m: Any, x: Tensor) -> Tensor:
    try:
        if x.max() > 0:
            raise ValueError
    except ValueError:
        return m.inner(x) * 2
    return m.inner(x)


def test_an_error_that_is_caught_again_is_a_path_like_any_other() -> None:
    """What looks like a check may be a way to branch."""
    with pytest.raises(CaptureError, match="depends on data"):
        capture(Fn(_caught, inner=nn.Linear(6, 6)), square, X)
