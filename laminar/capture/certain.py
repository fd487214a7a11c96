"""Draws whose use is certain: a random number in [0, 1) compared with a number outside of it.

Layers that are skipped at random ask `torch.rand([]) < p`, `random.random() < p` or the like, and with p = 0 (most
configurations) the answer is known before the draw. So it is while a step is traced: such a comparison is False or
True, as it would be in every step. With a p in between, one graph can't hold both paths, and that is refused by name.

Python's and NumPy's draws of single numbers are replaced while a step is traced, for the thread that traces: they
give a `Draw`, which can be compared and nothing else.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.capture.canonical import HANDLERS, Canonical, catches
from laminar.errors import CaptureError

ASKS: dict[str, Callable[[float], bool | None]] = {
    "<": lambda p: False if p <= 0 else True if p >= 1 else None,
    "<=": lambda p: False if p < 0 else True if p >= 1 else None,
    ">": lambda p: True if p < 0 else False if p >= 1 else None,
    ">=": lambda p: True if p <= 0 else False if p >= 1 else None,
}
"""What a comparison of a number in [0, 1) with p gives, where that is certain."""


def _undecided(p: Any) -> CaptureError:
    return CaptureError(
        f"a random number decides what runs next (with probability {p}): it depends on the draw, and one graph holds "
        "one path",
        next="set the probability to 0 (layerdrop=0.0 in many configurations), or choose by torch.where",
    )


class Draw:
    """A number in [0, 1) as Python would have it; only what is certain about it may be asked."""

    def __init__(self, which: str, look: Callable[[], Any] | None = None) -> None:
        """Drawn from `which`; what refuses to `look` at a draw of torch's."""
        self.which, self.look = which, look

    def _ask(self, how: str, p: Any) -> bool:
        known = ASKS[how](p) if isinstance(p, (int, float)) else None
        if known is None and self.look is not None:
            self.look()
        if known is None:
            raise _undecided(p)
        return known

    def __lt__(self, p: Any) -> bool:
        return self._ask("<", p)

    def __le__(self, p: Any) -> bool:
        return self._ask("<=", p)

    def __gt__(self, p: Any) -> bool:
        return self._ask(">", p)

    def __ge__(self, p: Any) -> bool:
        return self._ask(">=", p)

    def _used(self, *_: Any) -> Any:
        if self.look is not None:
            self.look()
        raise CaptureError(
            f"forward draws random numbers from {self.which}, which would be the same in every captured step",
            next="draw with torch.rand, randn, bernoulli or dropout",
        )


for (
    _name
) in """float int index bool eq ne hash array getattr add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs
    round floordiv mod repr str format""".split():
    setattr(Draw, f"__{_name}__", Draw._used)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, single draws from Python and NumPy on this thread are `Draw`s; other threads draw as ever."""
    thread = threading.get_ident()

    def instead(which: str, draw: Callable[..., Any], unit: Callable[..., bool]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and unit(*args, **kwargs):
                return Draw(which)
            return draw(*args, **kwargs)

        return drawn

    def alone(*args: Any, **kwargs: Any) -> bool:
        return not args and not kwargs

    def from_0_to_1(*args: Any, **kwargs: Any) -> bool:
        given = [*args, *kwargs.values()]
        return [*given, *[0.0, 1.0][len(given) :]] == [0, 1]

    places: list[tuple[Any, str, str, Callable[..., bool]]] = [
        (random, "random", "Python", alone), (random, "uniform", "Python", from_0_to_1),
        (np.random, "random", "numpy", alone), (np.random, "rand", "numpy", alone),
        (np.random, "random_sample", "numpy", alone), (np.random, "uniform", "numpy", from_0_to_1),
    ]  # fmt: skip
    kept = [(module, name, getattr(module, name)) for module, name, _, _ in places]
    for module, name, which, unit in places:
        setattr(module, name, instead(which, getattr(module, name), unit))
    try:
        yield
    finally:
        for module, name, draw in kept:
            setattr(module, name, draw)


# --- draws of torch --------------------------------------------------------------------------


def _marks(function: Any) -> None:
    """What this function draws is remembered, if it is one number in [0, 1)."""
    inner = HANDLERS[function]

    def run(mode: Canonical, *args: Any, **kwargs: Any) -> Any:
        made = inner(mode, *args, **kwargs)
        bounds = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, (int, float))]
        if made.numel() == 1 and (function is not Tensor.uniform_ or bounds in ([], [0, 1])):
            mode.units[id(made)] = made
        return made

    HANDLERS[function] = run


for _function in (torch.rand, torch.rand_like, Tensor.uniform_):
    _marks(_function)


def _compares(how: str, *functions: Any) -> None:
    ask = ASKS[how]

    @catches(*functions)
    def run(mode: Canonical, input: Any, other: Any, **kwargs: Any) -> Any:
        draw = mode.units.get(id(input))
        if draw is input and draw is not None and isinstance(other, (int, float)) and not kwargs:
            known = ask(other)
            if known is not None:
                return torch.tensor(known).reshape(draw.shape) if draw.dim() else torch.tensor(known)
        return functions[0](input, other, **kwargs)


_compares("<", torch.lt, Tensor.lt, Tensor.__lt__, torch.less, Tensor.less)
_compares("<=", torch.le, Tensor.le, Tensor.__le__, torch.less_equal, Tensor.less_equal)
_compares(">", torch.gt, Tensor.gt, Tensor.__gt__, torch.greater, Tensor.greater)
_compares(">=", torch.ge, Tensor.ge, Tensor.__ge__, torch.greater_equal, Tensor.greater_equal)


def item_of(mode: Canonical, input: Tensor) -> Any:
    """The Python number in a tensor; of a draw in [0, 1), what is certain about it."""
    if mode.units.get(id(input)) is not input:
        return input.item()

    def look() -> Any:
        mode.units.pop(id(input), None)
        return input.item()

    return Draw("torch", look)
