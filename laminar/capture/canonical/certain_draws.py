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

from laminar.capture.canonical.canonical import HANDLERS, Canonical, catches
from laminar.errors import CaptureError

ASKS: dict[str, Callable[[float], bool | None]] = {
    "<": lambda p: False if p <= 0 else True if p >= 1 else None,
    "<=": lambda p: False if p < 0 else True if p >= 1 else None,
    ">": lambda p: True if p < 0 else False if p >= 1 else None,
    ">=": lambda p: True if p <= 0 else False if p >= 1 else None,
}
"""What a comparison of a number in [0, 1) with p gives, where that is certain."""


class Drawn(CaptureError):
    """A draw that a graph can't hold; the part that draws may run as it is (`eager_search`)."""

    depends_on_data = True


def _undecided(p: Any) -> Drawn:
    return Drawn(
        f"a random number decides what runs next (with probability {p}): it depends on the draw, and one graph holds "
        "one path",
        next="set the probability to 0 (layerdrop=0.0 in many configurations), or choose by torch.where",
    )


def _as_a_number(which: str) -> Drawn:
    return Drawn(
        f"forward draws random numbers from {which}, which would be the same in every captured step",
        next="draw with torch.rand, randn, bernoulli or dropout",
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
        raise _as_a_number(self.which)


for (
    _name
) in """float int index bool eq ne hash array getattr add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs
    round floordiv mod repr str format""".split():
    setattr(Draw, f"__{_name}__", Draw._used)


def _alone(*args: Any, **kwargs: Any) -> bool:
    return not args and not kwargs


def _from_0_to_1(*args: Any, **kwargs: Any) -> bool:
    given = [*args, *kwargs.values()]
    return [*given, *[0.0, 1.0][len(given) :]] == [0, 1]


UNITS = {"random": _alone, "rand": _alone, "random_sample": _alone, "uniform": _from_0_to_1}
"""Functions of Python and NumPy that draw one number in [0, 1), if called so."""
STATE_CALLS = ("seed", "getstate", "setstate", "get_state", "set_state")


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, what this thread draws from Python's and NumPy's global generators is a `Draw`, or refused where it is
    drawn; other threads draw as ever."""
    thread = threading.get_ident()

    def instead(which: str, name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return draw(*args, **kwargs)
            if name in UNITS and UNITS[name](*args, **kwargs):
                return Draw(which)
            raise _as_a_number(which)

        return drawn

    kept: list[tuple[Any, str, Any]] = []
    modules: list[tuple[Any, str]] = [(random, "Python"), (np.random, "numpy")]
    for module, which in modules:
        generator = module.random.__self__
        for name in dir(module):
            draw = getattr(module, name)
            if getattr(draw, "__self__", None) is generator and name not in STATE_CALLS:
                kept.append((module, name, draw))
                setattr(module, name, instead(which, name, draw))
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
