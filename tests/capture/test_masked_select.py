"""Labels picked by a mask for a CTC loss: captured, though how many there are depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from laminar.errors import CaptureError
from tests.support.capture_check import draw, same

LABELS = torch.tensor([[3, 1, -100, 2], [-100, -100, 4, 4], [1, 2, 3, 4], [2, -100, 1, -100]])
BATCH = {"x": draw(4, 9, 6, seed=4), "labels": LABELS}


def ctc(model: nn.Module, batch: dict[str, Tensor], lengths: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of speech models: labels of all samples one after the other."""
    mask = batch["labels"] >= 0
    targets = batch["labels"].masked_select(mask)
    log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, targets, torch.full((4,), 9), lengths(mask), zero_infinity=True)


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of the mask": lambda mask: mask.sum(-1),
    "computed otherwise": lambda mask: mask.long().cumsum(1)[:, -1],
    "given": lambda mask: torch.tensor([3, 2, 4, 2]),
}


@pytest.mark.parametrize("lengths", COUNTS)
def test_picked_labels_train_as_in_plain_pytorch(lengths: str) -> None:
    """Gaps in the middle, empty begins, and lengths nobody knows to be the mask's: each sample has its own labels."""
    same(lambda: nn.Linear(6, 5), lambda m, b: ctc(m, b, COUNTS[lengths]), BATCH)


def test_they_are_spread_as_on_one_device() -> None:
    """Samples may lie on different ranks."""
    model = nn.Linear(6, 5)
    loss: Any = lambda m, b: ctc(m, b, COUNTS["of the mask"])  # noqa: E731
    graph = laminar.capture(model, loss, BATCH)
    report = laminar.verify(
        model, loss, [BATCH], laminar.plans.data_parallel(graph, laminar.Mesh({"dp": 2})), graph=graph
    )
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "used",
    [
        lambda y: y.sum(),
        lambda y: torch.mean(y),
        lambda y: (y * 2).mean(),
        lambda y: y[0],
        lambda y: sum(y),
        lambda y: torch.zeros(len(y)).mean() + y.shape[0],
        lambda y: F.mse_loss(y, torch.zeros(3)),
    ],
)
def test_anything_else_about_them_is_refused(used: Callable[[Any], Any]) -> None:
    """How many are picked is a shape that depends on data."""
    with pytest.raises(CaptureError, match="depends on data"):
        capture(nn.Linear(6, 5), lambda m, b: used(m(b).masked_select(b[..., :5] > 0)), draw(4, 6, seed=1))


def test_code_that_asks_whether_they_are_a_tensor_hears_yes() -> None:
    """A stand-in that says no would be left out of the loss without a word."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        picked = (batch > 0).long().masked_select(batch > 0)
        total = model(batch).mean()
        return total + picked.sum() if isinstance(picked, Tensor) else total

    with pytest.raises(CaptureError, match="depends on data"):
        capture(nn.Linear(6, 5), loss, draw(4, 6, seed=1))
