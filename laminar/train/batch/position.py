"""Where a run stands in its data: batches without end, begun anew when they run out, and how to get back to a place.

Data that can seek (it has `state_dict` and `load_state_dict`, as laminar.data's loaders and torchdata's have) is
asked for its state behind each batch, and handed it when a run goes on: nothing is read twice. Other data is drawn
again from its beginning, and what had been seen is thrown away.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from laminar.errors import RecipeError, StateError
from laminar.runtime.pipeline.loader import EPOCH

REMEMBERED = 64
"""States of so many batches are kept: more than can be loaded ahead."""


class DataPosition:
    """A recipe's data, and where in it a run is."""

    def __init__(self, data: Callable[[], Iterable[Any]], remembers: bool = True) -> None:
        """`data` makes a new iterable of batches each time. `remembers`: states may be asked for."""
        self.data, self.remembers = data, remembers
        self._states: dict[int, Any] = {}

    def batches(
        self, seen: int = 0, marked: bool = False, state: Any = None, replayed: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Batches without end, from the one behind the `seen`th on.

        `marked`: where data begins anew there is an `EPOCH`, which loaders of several ranks agree on. `state`: where
        the data was then; without it, so many batches are drawn and thrown away, and `replayed` is called behind
        them.
        """
        at = 0
        while True:
            before, source = at, self.data()
            if state is not None:
                _seek(source, state)
                at, before, state = seen, seen - 1, None
            for batch in source:
                at += 1
                if at > seen:
                    self._remember(at, source)
                    yield batch
                elif at == seen and replayed is not None:
                    replayed()
                    replayed = None
            if at == before:
                what = "gives no batch" if at == 0 else f"gave {at} batches and no more when it was called again"
                raise RecipeError(
                    f"data() {what}", next="data() must make a new iterable of batches each time it is called"
                )
            if marked:
                yield EPOCH

    def _remember(self, at: int, source: Any) -> None:
        if self.remembers and callable(getattr(source, "state_dict", None)) and hasattr(source, "load_state_dict"):
            self._states[at] = copy.deepcopy(source.state_dict())  # it may be the loader's own, which goes on
            while len(self._states) > REMEMBERED:
                del self._states[next(iter(self._states))]

    def state(self, seen: int) -> Any:
        """The data's own state behind its `seen`th batch, as plain data; nothing if it can't seek."""
        return plain_state(self._states.get(seen))


def plain_state(state: Any) -> Any:
    """A loader's state, if JSON can hold all of it; else nothing."""
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return state if json.loads(text) == state else None


def _seek(source: Any, state: Any) -> None:
    if not callable(getattr(source, "load_state_dict", None)):
        raise StateError(
            "the checkpoint has a place in data that can seek, and this data can't",
            next="use the data that was saved, or load the weights alone: job.load_weights(path)",
        )
    source.load_state_dict(state)
