"""Whose line an op is: noted while tracing, for every op forward, recomputed or backward.

A forward op belongs to the innermost line that is neither torch's nor ours, and to the module that
runs. A backward op belongs to the forward op behind it, matched by autograd's sequence numbers. An op
run again by `torch.utils.checkpoint` is marked, and draws the random numbers it drew the first time.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from laminar.capture.canonical.canonical import Canonical, gpu_autocast
from laminar.capture.canonical.known_values import NOT_KNOWN, looked_at, without_masks
from laminar.capture.model.model_tensors import MODULE_SCALARS
from laminar.capture.torch_private import (
    TorchDispatchMode,
    autograd_node,
    checkpoints,
    function_modes,
    get_proxy_mode,
    nodes_made,
    schema,
    sequence_number,
)
from laminar.capture.tracing.op_log import call_as_json

_TORCH = os.path.dirname(torch.__file__)
_OURS = str(Path(__file__).parents[2])
STEP_FUNCTIONS = ("laminar_whole_step", "refuse_carried", "refuse_drawn", "in_plain_pytorch")
"""Functions that run a step: frames further out belong to whoever called capture."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a traced op comes from."""

    where: str = ""
    module: str = ""
    phase: str = "forward"


def is_users(path: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not path.startswith((_TORCH, _OURS, "<"))


def show_line(path: str, number: int) -> str:
    """`model/blocks.py:41  self.up(x)`."""
    short = os.sep.join(path.split(os.sep)[-2:])
    return f"{short}:{number}  {linecache.getline(path, number).strip()}"


def blame(error: BaseException) -> str:
    """The user's line an exception passed through last, inside the step."""
    best = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in STEP_FUNCTIONS:
            best = ""
        elif is_users(frame.f_code.co_filename):
            best = show_line(frame.f_code.co_filename, number)
    if isinstance(error.__cause__, BaseException) and not best:
        return blame(error.__cause__)
    return best


class Recorder(TorchDispatchMode):
    """Notes the origin of every traced op."""

    def __init__(self, model: nn.Module, dry: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.dry = dry
        """Whether nothing is traced: ops are only noted."""
        self.noting = True
        self.ops: list[Any] = []
        """Every op of forward with its arguments, as JSON, as long as it is `noting`."""
        self.names = {id(m): path for path, m in model.named_modules()}
        self.stack: list[str] = []
        self.origins: dict[str, Origin] = {}
        self.by_sequence: dict[int, Origin] = {}
        self.recomputing = 0
        self.lines: dict[tuple[str, int], str] = {}
        self.fixed: Origin | None = None
        """What ops that belong to no line of the user's are told to be."""
        self.written: dict[tuple[int, str], str] = {}
        """Where an attribute of a module was assigned last."""

    def where(self, depth: int = 2) -> str:
        """The user's line that is running."""
        frame: Any = sys._getframe(depth)
        while frame is not None and frame.f_code.co_name not in STEP_FUNCTIONS:
            path = frame.f_code.co_filename
            if is_users(path):
                key = (path, frame.f_lineno)
                if key not in self.lines:
                    self.lines[key] = show_line(*key)
                return self.lines[key]
            frame = frame.f_back
        return ""

    def behind(self, node: Any) -> Origin:
        """The forward op that autograd made a node for."""
        return self.by_sequence.get(node._sequence_nr(), Origin())

    @property
    def inside(self) -> str:
        """The module that is running, with its class."""
        path = self.stack[-1] if self.stack else ""
        return f"{path} ({type(self.model.get_submodule(path)).__name__})" if path else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proxy = get_proxy_mode()
        if proxy is None:
            if self.dry and self.noting:
                self.ops.append(call_as_json(func, args, kwargs))
            return func(*args, **(kwargs or {}))
        found = looked_at(func, args, kwargs)
        if found is not NOT_KNOWN:
            return found
        args = without_masks(func, args)
        refuse_mixed(func, args)
        behind = autograd_node() if not self.recomputing else None
        if behind is not None and func is torch.ops.aten.allclose.default:
            return True  # a formula of torch's that checks a gradient, such as that of complex singular vectors
        if self.fixed is not None:
            origin = self.fixed
        elif behind is not None and not self.noting:
            origin = replace(self.behind(behind), phase="backward")
        elif behind is not None:  # a gradient that the model itself asks for: a penalty, a step of its own
            origin = replace(self.behind(behind), phase="forward")
            self.by_sequence.setdefault(sequence_number(), origin)
        else:
            phase = "recompute" if self.recomputing else "forward"
            origin = Origin(self.where(), self.stack[-1] if self.stack else "", phase)
            self.by_sequence.setdefault(sequence_number(), origin)
            if self.noting:
                self.ops.append(call_as_json(func, args, kwargs))
        with nodes_made(proxy) as made:
            out = func(*args, **(kwargs or {}))
        self.origins.update({node.name: origin for node in made})
        return out

    @contextlib.contextmanager
    def following(self, canonical: Canonical) -> Iterator[None]:
        """Follow which module runs, and tell recomputation from first computation.

        Hooks are everybody's: modules that another thread runs meanwhile (transforms of a loader) are not ours.
        """
        here = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == here:
                self.stack.append(self.names.get(id(module), self.stack[-1] if self.stack else ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == here:
                self.stack.pop()

        assign = nn.Module.__setattr__

        def again(fn: Any) -> Any:
            first, where, gpu = canonical.site, list(self.stack), gpu_autocast.active

            def run(*args: Any, **kwargs: Any) -> Any:
                # The same draws as the first time: the sites start where they started then.
                site, canonical.site = canonical.site, first
                stack, self.stack = self.stack, list(where)
                self.recomputing += 1
                gpu_autocast.regions.append(gpu)
                try:
                    with canonical_again(canonical):
                        return fn(*args, **kwargs)
                finally:
                    self.recomputing -= 1
                    gpu_autocast.regions.pop()
                    canonical.site, self.stack = site, stack

            return run

        def noted(module: nn.Module, name: str, value: Any) -> None:
            if type(value) in MODULE_SCALARS and threading.get_ident() == here:
                self.written[id(module), name] = self.where()
            assign(module, name, value)

        before = torch.nn.modules.module.register_module_forward_pre_hook(enter)
        after = torch.nn.modules.module.register_module_forward_hook(leave)
        nn.Module.__setattr__ = noted  # type: ignore[method-assign, assignment]
        try:
            with checkpoints(again):
                yield
        finally:
            before.remove()
            after.remove()
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]


_ALIKE = frozenset(
    """mm addmm bmm baddbmm addbmm mv addmv dot vdot addr convolution convolution_backward linear""".split()
)


def refuse_mixed(func: Any, args: Any) -> None:
    """Products of different dtypes, which tensors that hold nothing let pass, and torch's kernels do not."""
    found = {a.dtype for a in args if isinstance(a, torch.Tensor)} if _takes_one_dtype(func) else ()
    if len(found) > 1:
        shown = " and ".join(sorted(map(str, found)))
        raise RuntimeError(f"{schema(func).name} takes tensors of one dtype, and got {shown}")


@cache
def _takes_one_dtype(func: Any) -> bool:
    return func.namespace == "aten" and schema(func).name.removeprefix("aten::") in _ALIKE


@contextlib.contextmanager
def canonical_again(mode: Canonical) -> Iterator[None]:
    """Recomputation runs inside backward, where function modes are not active: enter the same one."""
    active = any(m is mode for m in function_modes())
    with contextlib.nullcontext() if active else mode:
        yield
