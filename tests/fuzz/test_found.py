"""What random models have found, each as the smallest program that shows it."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from tests.fuzz.oracle import outcome
from tests.fuzz.program import Program, Statement
from tests.support.zoo import one_thread

FOUND: dict[str, tuple[str, str, str]] = {
    "a power in place is not that of its mirror image": ("alone", "v = (a * 1.5).sub_(self.p).square_()", ""),
    "a complex view of a repeated gradient": ("alone", "v = torch.view_as_real(torch.complex(a, a * 0.5)).sum(-1)", ""),
    "a gradient inside of forward is forward": (
        "stages",
        "t = a.detach().requires_grad_()\n"
        "(g,) = torch.autograd.grad(self.layer(t).tanh().sum(), t, create_graph=True)\n"
        "v = torch.tanh(self.last(a + g))",
        "self.layer = nn.Linear(4, 4)\nself.last = nn.Linear(4, 4)",
    ),
    "a buffer that is written without being read": (
        "stages",
        "v = self.layer(a)",
        "self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
    ),
    "the older way of checkpointing": (
        "stages",
        "v = self.last(checkpoint(self.layer, a, use_reentrant=True))",
        "self.layer = nn.Linear(4, 4)\nself.last = nn.Linear(4, 4)",
    ),
    "a norm of what was expanded": (
        "alone",
        "v = self.norm(a.sum(1).view(-1, 1, 1).expand(-1, 2, 4)).sum(1)",
        "self.norm = nn.GroupNorm(2, 2)",
    ),
    "the older way of checkpointing, without a gradient": (
        "alone",
        "v = self.last(a + checkpoint(self.layer, x[:, :4] * 2, use_reentrant=True))",
        "self.layer = nn.Linear(4, 4)\nself.last = nn.Linear(4, 4)",
    ),
}
"""Way, the lines that make `v` from `a`, and those of `__init__`."""


def program(way: str, code: str, init: str) -> Program:
    first = Statement(
        "a",
        (-1, 4),
        ("a = torch.tanh(self.first(x)) * self.p",),
        ("x",),
        ("self.first = nn.Linear(4, 4)", "self.p = nn.Parameter(torch.rand(4))"),
    )
    second = Statement("v", (-1, 4), tuple(code.split("\n")), ("a",), tuple(filter(None, init.split("\n"))))
    options = {
        "way": way,
        "plan": "data",
        "ranks": 2 if way == "stages" else 1,
        "optimizer": "momentum",
        "steps": 2,
        "micro_batches": 2 if way == "stages" else 1,
        "precision": "f32",
        "clip_norm": None,
    }
    return Program(3, (first, second), ("v",), features=4, options=options)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_right(name: str) -> None:
    """Each was wrong or crashed when it was drawn."""
    with one_thread():
        found = outcome(program(*FOUND[name]))
    assert found.kind == "equal", found.why


def test_capture_leaves_checkpointing_as_it_was() -> None:
    """Its own way of running regions again stayed behind, and met the user's next plain loop."""
    entry = torch.utils.checkpoint.CheckpointFunction.apply
    assert outcome(program("alone", "v = checkpoint(torch.tanh, a, use_reentrant=True)", "")).kind == "equal"
    assert torch.utils.checkpoint.CheckpointFunction.apply == entry
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)
