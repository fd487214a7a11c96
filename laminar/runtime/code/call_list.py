"""The lines of a rank's step as calls, without the text of a `torch.fx` module: the same calls in the same order.

Writing a module and compiling its text takes longer than a small program runs, so whoever runs each program once
(verification of many plans) leaves it out. `Calls` stands in for `fx.Graph` where `eager_step._Build` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class CallNode:
    """What a line makes: its place among the values, and what is noted about it."""

    __slots__ = ("at", "meta")

    def __init__(self, at: int) -> None:
        self.at, self.meta = at, dict[str, Any]()


class Calls:
    """Lines as they are written, then run as a step."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.count = root, 0
        self.lines: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]] = []
        self.outputs: list[Any] = []
        self.drops: list[list[int]] = []

    def _call(self) -> CallNode:
        self.count += 1
        return CallNode(self.count - 1)

    def placeholder(self, name: str) -> CallNode:
        """An input: these come before all lines."""
        return self._call()

    def get_attr(self, name: str) -> Any:
        """An object the code refers to: itself."""
        return self.root[name]

    def call_function(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> CallNode:
        """A line that calls a function."""
        out = self._call()
        self.lines.append((target, args, kwargs or {}, out.at))
        return out

    def call_method(self, name: str, args: tuple[Any, ...]) -> CallNode:
        """A line that calls a method of an object that is kept."""
        holder, *rest = args
        return self.call_function(getattr(holder, name), tuple(rest))

    def output(self, values: list[Any]) -> None:
        """What the step returns; afterwards it may be run."""
        self.outputs = values
        last: dict[int, int] = {}
        for k, (_, args, kwargs, at) in enumerate(self.lines):
            last[at] = k
            for used in _calls((args, tuple(kwargs.values()))):
                last[used.at] = k
        kept = {c.at for c in _calls(values)}
        self.drops = [[] for _ in self.lines]
        for at, k in last.items():
            if at not in kept:
                self.drops[k].append(at)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """One step: inputs in order, outputs in order."""
        env: list[Any] = [None] * self.count
        env[: len(inputs)] = inputs

        def fill(arg: Any) -> Any:
            if type(arg) is CallNode:
                return env[arg.at]
            if type(arg) is list or type(arg) is tuple:
                return type(arg)(map(fill, arg))
            return arg

        for (target, args, kwargs, at), drops in zip(self.lines, self.drops, strict=True):
            env[at] = target(*map(fill, args), **{k: fill(v) for k, v in kwargs.items()} if kwargs else kwargs)
            for gone in drops:
                env[gone] = None
        return [fill(v) for v in self.outputs]


def _calls(arg: Any) -> list[CallNode]:
    if type(arg) is CallNode:
        return [arg]
    return [c for a in arg for c in _calls(a)] if isinstance(arg, (list, tuple)) else []
