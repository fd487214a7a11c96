"""Whose result may lie in the memory of its input: what generated code reduces, or fills again, must be nobody else's.

Lock-step never writes to a value, so it can't see such a mistake; real ranks reduce in place and use buffers again.
"""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laminar.capture.ops.torch_ops import gives_list, op_name
from laminar.runtime.comm.aliases import shares


class Watcher(TorchDispatchMode):
    """Notes ops whose results share memory with their arguments, and those that make a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.sharing: set[str] = set()
        self.lists: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable:
            name = op_name(func)
            self.seen.add(name)
            if isinstance(out, list):
                self.lists.add(name)
            if _places(out) & _places((args, kwargs)):
                self.sharing.add(name)
        return out


def _places(values: Any) -> set[int]:
    found = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout == torch.strided and t.numel()]
    return {t.untyped_storage().data_ptr() for t in found}


def watched(samples: int) -> Watcher:
    """All of torch's operator samples, forward and backward, under the watcher."""
    from torch.testing._internal.common_methods_invocations import op_db

    watcher = Watcher()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            grad = info.supports_autograd and torch.float64 in info.dtypes
            dtype = torch.float64 if torch.float64 in info.dtypes else torch.int64
            for sample in islice(info.sample_inputs_func(info, "cpu", dtype, grad), samples):
                ins = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
                ins = [t for t in ins if t.requires_grad]
                try:
                    with watcher:
                        out = info(sample.input, *sample.args, **sample.kwargs)
                        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
                        if ins and outs:
                            torch.autograd.grad(outs, ins, [torch.randn_like(t) for t in outs], allow_unused=True)
                except Exception:
                    continue  # what torch itself refuses here
    return watcher


NEVER_IN_A_GRAPH = {"aten.alias", "aten.detach", "aten.resolve_conj", "aten.resolve_neg"}


@pytest.mark.slow
def test_every_op_that_shares_memory_is_known_to() -> None:
    """A view taken for a value is overwritten by the next all-reduce or gather, silently."""
    found = watched(10)
    assert len(found.seen) > 500
    assert {op for op in found.sharing if not shares(op)} - NEVER_IN_A_GRAPH == set()
    assert {op for op in found.lists if not gives_list(op)} == set()
