"""Real calls of ATen ops, for checking rules: recorded from torch's own samples, or written by hand.

`recorded` runs the sample inputs of torch's operator database, forward and backward, and keeps a
handful of different calls of every op the rule table knows. `written` holds what those samples do
not reach, and shapes that divide where that matters; sizes there differ from each other, so that a
rule that confuses two dims can't pass.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laminar.capture import kernels
from laminar.capture.torch_ops import find_op, op_name, plain, positional
from laminar.ir.codec import Dtype, Ref
from laminar.rules.signing import options
from tests.rule_check import Case

MOST_ELEMENTS = 40_000


def make_case(op: str, args: tuple[Any, ...]) -> Case:
    """A case from real arguments; tensors are copied, because what follows may write into them."""
    values: list[Tensor] = []

    def number(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            values.append(arg.detach().clone(memory_format=torch.contiguous_format))
            return Ref(f"x{len(values) - 1}")
        return tuple(map(number, arg)) if isinstance(arg, (list, tuple)) else arg

    return Case(op, plain(number(args)), values)


def functional(name: str) -> str:
    """The name under which a graph holds an op: `aten.add_.Tensor` is `aten.add.Tensor`."""
    namespace, base, *overload = name.split(".")
    return ".".join([namespace, base.removesuffix("_"), *overload]) if not base.endswith("__") else name


class Recorder(TorchDispatchMode):
    """Keeps different calls of the ops it is told to watch."""

    def __init__(self, watched: Collection[str], each: int) -> None:
        super().__init__()
        self.watched, self.each = watched, each
        self.kept: dict[str, dict[Any, Case]] = defaultdict(dict)
        self.trivial: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = functional(op_name(func))
        if name in self.watched and len(self.kept[name]) < self.each:
            self.keep(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keep(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more case, unless it is like another, too large, or nothing in it can be split."""
        args = positional(find_op(name), args, kwargs)
        tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
        if any(t.numel() > MOST_ELEMENTS or t.layout != torch.strided or t.is_nested for t in tensors):
            return
        try:
            case = make_case(name, args)
        except (TypeError, KeyError):
            return  # a complex scalar or a dtype that a graph can't hold
        if case.key in self.kept[name]:
            return
        if not interesting(case):
            self.trivial[name] += 1
            if self.trivial[name] > 2:
                return
        self.kept[name][case.key] = case


def interesting(case: Case) -> bool:
    """Whether anything but replication is possible; a rule that can't even be read is worth a look too."""
    try:
        return any(len(options(case.call, parts)) > 1 for parts in (2, 3))
    except Exception:  # checking will say what is wrong
        return True


def recorded(watched: Collection[str], each: int = 8, samples: int = 12) -> dict[str, list[Case]]:
    """Cases by op from torch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder(watched, each)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if info.name.startswith("jiterator"):  # needs a GPU
                continue
            for dtype in (torch.float64, torch.int64, torch.bool):
                if dtype in info.dtypes:
                    _sample(info, dtype, recorder, samples)
    return {name: list(cases.values()) for name, cases in recorder.kept.items()}


def _sample(info: Any, dtype: torch.dtype, recorder: Recorder, samples: int) -> None:
    grad = dtype.is_floating_point and info.supports_autograd
    for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=grad), samples):
        ins = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
        ins = [t for t in ins if t.requires_grad]
        try:
            with recorder:
                out = info(sample.input, *sample.args, **sample.kwargs)
            outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            tangents = [torch.randn_like(t) for t in outs]
            if ins and outs:
                with recorder:
                    torch.autograd.grad(outs, ins, tangents, allow_unused=True)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
            continue  # samples that torch itself refuses here (sparse layouts, missing kernels)
