"""`as_strided` in a captured step gives what it gives in plain PyTorch, gradients and writes through it included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from laminar.capture.graph.as_strided import seen
from laminar.errors import CaptureError
from tests.support.capture_check import Fn, draw, same, square

X, PICTURES = draw(6, 8, seed=1), draw(2, 4, 6, 5, seed=2)


def conv() -> nn.Module:
    return nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)


def _diagonal(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    y.as_strided((6,), (9,)).mul_(3.0)
    return y


def _windows_of_a_product(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x).contiguous()
    return torch.relu(y.as_strided((6, 3, 4), (8, 2, 1)))


def _from_an_offset(m: Any, x: Tensor) -> Tensor:
    return m.inner(x).as_strided((3, 4), (16, 2), 9)


def _scattered(m: Any, x: Tensor) -> Tensor:
    return torch.as_strided_scatter(m.inner(x), x[:2, :3] * 2, (2, 3), (8, 1), 3)


def _turned(m: Any, x: Tensor) -> Tensor:
    return m.inner(x).t().as_strided((8, 6), (6, 1))


def _resized(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    wide, turned = y.detach().clone(), y.detach().t()
    row = wide[1]
    wide.resize_(8, 6)
    wide.mul_(2.0)
    turned.resize_(3, 4)
    return y * wide.resize_as_(y) + turned.sum(1).repeat(2).unsqueeze(1) * row


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module], Tensor]] = {
    "pooled channels last": (
        lambda m, x: nn.AdaptiveAvgPool2d(1)(m.inner(x)),
        conv,
        PICTURES.contiguous(memory_format=torch.channels_last),
    ),
    "pooled transposed": (
        lambda m, x: nn.AdaptiveAvgPool1d(1)(m.inner(x)[None].transpose(1, 2)),
        lambda: nn.Linear(8, 8),
        X,
    ),
    "pooled permuted": (
        lambda m, x: nn.AdaptiveAvgPool2d(1)(m.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        lambda: nn.Linear(4, 8),
        PICTURES,
    ),
    "diagonal in place": (_diagonal, lambda: nn.Linear(8, 8), X),
    "windows": (_windows_of_a_product, lambda: nn.Linear(8, 8), X),
    "from an offset": (_from_an_offset, lambda: nn.Linear(8, 8), X),
    "scattered": (_scattered, lambda: nn.Linear(8, 8), X),
    "turned": (_turned, lambda: nn.Linear(8, 8), X),
    "resized": (_resized, lambda: nn.Linear(8, 8), X),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_seen_in_another_way_is_captured(name: str) -> None:
    """Anything channels-last with adaptive pooling restrides its result; others slide windows or reach diagonals."""
    forward, inner, x = CASES[name]
    same(lambda: Fn(forward, inner=inner()), square, x)


@pytest.mark.parametrize("name", ["windows", "pooled permuted"])
def test_it_is_spread_as_on_one_device(name: str) -> None:
    """Picks by a table are ops like any others to a plan."""
    forward, inner, x = CASES[name]
    model = Fn(forward, inner=inner())
    graph = laminar.capture(model, square, x)
    report = laminar.verify(
        model, square, [x], laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2})), graph=graph
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.inner(x)[2:5].as_strided((6, 8), (8, 1), 0),  # rows before it
        lambda m, x: m.inner(x)[:, ::2].as_strided((6, 4), (8, 1)),  # columns between its own
        lambda m, x: m.inner(x) * m.inner(x).detach()[:, ::2].resize_(24)[0],
    ],
)
def test_what_lies_beside_the_tensor_is_refused(forward: Any) -> None:
    """Values of somebody else, which no graph could name."""
    with pytest.raises(CaptureError, match="looks at memory beside"):
        capture(Fn(forward, inner=nn.Linear(8, 8)), square, X)


def test_a_write_to_an_element_that_is_seen_twice_is_refused() -> None:
    """In which order it is written is nobody's promise."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.inner(x)
        y.as_strided((6, 3, 4), (8, 2, 1)).mul_(2.0)
        return y

    with pytest.raises((CaptureError, RuntimeError)):
        capture(Fn(forward, inner=nn.Linear(8, 8)), square, X)


@given(st.data())
def test_every_choice_is_what_torch_sees(data: st.DataObject) -> None:
    """Any order in memory, any sizes, strides and offset that stay inside."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(d) for d in range(len(shape))]
    x = torch.arange(int(np.prod(shape)), dtype=torch.float32).view([shape[d] for d in order]).permute(back)
    size = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    stride = [data.draw(st.integers(0, 6)) for _ in size]
    offset = data.draw(st.integers(0, 5))
    reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    found = seen(x.shape, x.stride(), 0, size, stride, offset)
    if reach >= x.numel():
        assert found is None
        return
    assert found is not None
    got = x
    if not found.same:
        got = x.permute(found.order).reshape(-1)
        got = got.view(found.sizes).permute(found.back) if found.table is None else got[torch.from_numpy(found.table)]
    assert torch.equal(got, x.as_strided(size, stride, offset))
