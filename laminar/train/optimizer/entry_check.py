"""Which entries an optimizer keeps for a parameter, found by letting it make one step with a small one.

State that comes from a file is held against this before an optimizer sees it: torch's fused updates look at no shape,
and an entry that is missing or too small is read beyond its end.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.train.optimizer.optimizer import KNOWN, TRIAL


@dataclass(frozen=True)
class ExpectedEntry:
    """One entry of an optimizer's state."""

    like_parameter: bool
    """Whether it has an element for each of the parameter's; else it is a number."""
    dtype: torch.dtype | None
    """Nothing: it is no tensor."""


def expected_entries(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, ExpectedEntry] | None:
    """The entries of a parameter with these options; nothing where that can't be told.

    Of torch's own elementwise optimizers only, whose entries are all of these two kinds.
    """
    if type(optimizer) not in KNOWN:
        return None
    param = nn.Parameter(torch.zeros(TRIAL, dtype=dtype))
    param.grad = torch.zeros_like(param)
    plain = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    plain |= {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    twin = copy.copy(optimizer)
    twin.__dict__ = {k: copy.copy(v) for k, v in optimizer.__dict__.items()}
    twin.state = defaultdict(dict)
    twin.param_groups = [{**plain, "params": [param]}]
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)  # without the hooks around it, which are not about this parameter
    found = twin.state.get(param, {})
    return {
        key: ExpectedEntry(isinstance(v, Tensor) and v.shape == param.shape, v.dtype if isinstance(v, Tensor) else None)
        for key, v in found.items()
    }


def wrong_entries(
    expected: Mapping[str, ExpectedEntry],
    given: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None],
    shape: tuple[int, ...],
    rounded: bool,
) -> list[str]:
    """What is wrong with entries of a parameter of a shape: of tensors their shape and dtype are given, else nothing.

    `rounded`: updates replace entries by ones of another dtype.
    """
    wrong = [f"no {key}" for key in expected if key not in given]
    for key, what in given.items():
        known = expected.get(key)
        if known is None:  # kept from when an option was another; carried along, if it can do no harm
            if what is not None and what[0] not in (shape, (), (1,)):
                wrong.append(f"unexpected {key} of {list(what[0])}")
            continue
        if what is None:
            continue
        found, dtype = what
        fits = found == shape if known.like_parameter else found in ((), (1,))
        if not fits:
            wrong.append(f"{key} is {list(found)}, the parameter {list(shape)}")
        elif dtype != known.dtype and not rounded and not (known.dtype is None or not known.like_parameter):
            wrong.append(f"{key} is {dtype}, this optimizer keeps {known.dtype}")
    return wrong
