"""Random generators of a process: Python's, NumPy's and torch's, kept with a checkpoint and put back.

What a captured step draws depends on the run's seed and its step alone, and needs none of this. These are for what
runs beside it: a user's data, parts of a model that run in plain PyTorch, `plan="ddp"`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from laminar.errors import StateError

PYTHON_WORDS, NUMPY_WORDS = 625, 624
"""Of the states of their Mersenne twisters."""


def generator_states() -> dict[str, Any]:
    """As they are now, as plain data."""
    version, words, gauss = random.getstate()
    _, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "python": {"version": version, "words": _packed(words), "gauss": _number(gauss)},
        "numpy": {"words": _packed(keys), "pos": int(pos), "has_gauss": int(has_gauss), "gauss": float(cached).hex()},
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return found


def restore_generators(given: Any) -> None:
    """The inverse; what is no such state is refused, and nothing is changed."""
    try:
        python = (int(given["python"]["version"]), _words(given["python"]["words"], PYTHON_WORDS), _back(given))
        numpy = given["numpy"]
        keys = np.array(_words(numpy["words"], NUMPY_WORDS), dtype=np.uint32)
        theirs = ("MT19937", keys, int(numpy["pos"]), int(numpy["has_gauss"]), float.fromhex(numpy["gauss"]))
        words = torch.frombuffer(bytearray.fromhex(given["torch"]), dtype=torch.uint8)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the checkpoint's random generators make no sense: {error!r}") from error
    try:
        random.setstate(python)
        np.random.set_state(theirs)
        torch.set_rng_state(words)
        if "cuda" in given and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(given["cuda"]), dtype=torch.uint8))
    except (TypeError, ValueError, RuntimeError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        raise StateError(f"the checkpoint's random generators make no sense: {error}") from error


def by_rank(states: Sequence[Any]) -> dict[str, Any]:
    """The states of all ranks, equal ones once."""
    kept: list[Any] = []
    for state in states:
        if state not in kept:
            kept.append(state)
    return {"of_rank": [kept.index(s) for s in states], "states": kept}


def of_rank(given: Mapping[str, Any], rank: int, world: int) -> Any:
    """What a rank goes on with: its own where there are as many ranks as there were, else that of rank 0."""
    try:
        numbers = given["of_rank"]
        return given["states"][numbers[rank if len(numbers) == world else 0]]
    except (KeyError, IndexError, TypeError) as error:
        raise StateError(f"the checkpoint's random generators make no sense: {error!r}") from error


def state_of_rank(given: Any, rank: int, world: int) -> Any:
    """A rank's own state of something that each rank has one of; nothing if the ranks are others, and had different
    ones.
    """
    if not isinstance(given, Mapping) or "of_rank" not in given:
        return None
    several = len(given["states"]) > 1
    return None if several and len(given["of_rank"]) != world else of_rank(given, rank, world)


def _packed(words: Any) -> str:
    return np.asarray(words, dtype="<u4").tobytes().hex()


def _words(text: str, count: int) -> tuple[int, ...]:
    found = np.frombuffer(bytes.fromhex(text), dtype="<u4")
    if len(found) != count:
        raise ValueError(f"{len(found)} words of {count}")
    return tuple(int(w) for w in found)


def _number(value: float | None) -> str | None:
    return None if value is None else value.hex()


def _back(given: Any) -> float | None:
    gauss = given["python"]["gauss"]
    return None if gauss is None else float.fromhex(gauss)
