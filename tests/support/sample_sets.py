"""Data sets of samples of different lengths, whose tokens say whose they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bench.length_cases import drawn


class Numbered(Dataset[list[int]]):
    """Sample i is i, as often as it is long."""

    def __init__(self, count: int = 200, name: str = "codealpaca") -> None:
        self.lengths = np.minimum(drawn(name, count), 400)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> list[int]:
        return [number] * int(self.lengths[number])


class Deadly(Numbered):
    """Whoever loads sample 150 dies."""

    def __getitem__(self, number: int) -> list[int]:
        if number == 150:
            os._exit(1)
        return super().__getitem__(number)


class Broken(Numbered):
    """Sample 150 can't be read."""

    def __getitem__(self, number: int) -> list[int]:
        if number == 150:
            raise OSError("disk on fire")
        return super().__getitem__(number)


class Counting:
    """A stream from any sample on, which counts what is read of it."""

    def __init__(self, samples: Numbered) -> None:
        self.samples, self.reads = samples, 0

    def __call__(self, first: int) -> Iterator[list[int]]:
        for number in range(first, len(self.samples)):
            self.reads += 1
            yield self.samples[number]


class Seeking:
    """An iterable that can be told where to begin."""

    def __init__(self, samples: Numbered) -> None:
        self.samples, self.at = samples, 0
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.at, self.start = self.start, 0
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def samples_of(unit: Any) -> list[int]:
    """Which samples a packed unit holds."""
    return [int(unit.tokens[a]) for a in unit.bounds[:-1]]


def together(make: Callable[[int], Any], ranks: int, of: Callable[[Any], list[int]] = list) -> list[list[int]]:
    """Step by step, what all ranks have."""
    return [sorted(s for part in step for s in of(part)) for step in zip(*map(make, range(ranks)), strict=True)]
