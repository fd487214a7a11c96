"""A few elements of every batch, so that ranks notice at once that theirs differ.

Which elements they are moves with the step, so that sooner or later each is looked at. A checksum over them goes with
the note that every rank leaves about a step anyway (`World.agree`); in every step one rank reads that of its neighbour
about the step before. A batch on a GPU is not waited for: its elements are fetched beside the step, and are told with
one of the next notes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes

SOME = 64
"""Elements of each leaf that are looked at in a step."""
STRIDE = 2_654_435_761
"""Neighbours among them are so far apart, and so far they move: a prime near the golden section of 2^32."""


class Sampled:
    """The checksums of one rank's batches."""

    def __init__(self) -> None:
        self._at = np.arange(SOME, dtype=np.int64) * STRIDE
        self._underway: deque[tuple[int, list[Tensor], Any]] = deque()

    def __call__(self, leaves: Mapping[str, Tensor], number: int) -> str:
        """The checksum to tell now, of this batch or an earlier one, as `number:checksum`; empty if there is none."""
        found = [_picked(t.detach(), self._at + number * (STRIDE + 2)) for t in leaves.values() if t.numel()]
        if not any(t.device.type == "cuda" for t in found):
            return f"{number}:{_sum(found)}"
        there = [t.to("cpu", non_blocking=True) for t in found]
        done = torch.cuda.Event()
        done.record()
        self._underway.append((number, there, done))
        told = ""
        while self._underway and self._underway[0][2].query():
            of, values, _ = self._underway.popleft()
            told = f"{of}:{_sum(values)}"
        return told


def _picked(x: Tensor, at: Any) -> Tensor:
    """Elements of a tensor by their numbers, taken modulo its size; only these are touched."""
    return torch.take(x, torch.from_numpy(at % x.numel()).to(x.device, non_blocking=True))


def _sum(values: list[Tensor]) -> str:
    crc = 0
    for t in values:
        crc = zlib.crc32(as_bytes(t).numpy().data, crc)
    return f"{crc:08x}"
