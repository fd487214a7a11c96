"""Words that all verbs and the Python API share, and older spellings that still work but are not shown.

One thing has one name wherever it is typed: a plan is `data`, `zero3` or `tensor` in `laminar train --plan`, in
`laminar plan --preset` and in `laminar.parallelize(plan=...)`; a batch is divided into `--micro-batches`; memory has a
unit. An option's older spelling is added with `hidden`, a value's is translated by the type of its option.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from laminar.placement.presets import SPELLINGS

PRECISIONS = ("f32", "bf16", "fp16", "bf16-kahan", "bf16-stochastic", "bf16-pure")
_UNITS = {
    "": 1.0,
    "B": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
    "TIB": 2.0**40,
}
GIGABYTES_BELOW = 1e6
"""A bare number below this was typed in GB when there was no unit, and is still read so: no device has so few bytes."""
MEMORY = "bytes: 40GB (10^9), 40GiB (2^30) or 40e9"


def plan_name(text: str) -> str:
    """A plan's name, or the file of one, in today's spelling."""
    return SPELLINGS.get(text, text)


def memory_bytes(text: str) -> float:
    """Bytes from `40GB`, `40GiB` or `40e9`."""
    found = re.fullmatch(r"\s*([\d.]+(?:[eE][+-]?\d+)?)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", text)
    unit = found[2].upper() if found else ""
    if found is None or unit not in _UNITS or found[1].count(".") > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write {MEMORY}")
    number = float(found[1])
    return number * 1e9 if not unit and number < GIGABYTES_BELOW else number * _UNITS[unit]


def couple_word(text: str) -> str:
    """What `--couple` is given, as plans spell it."""
    return text.replace("-", "").replace("_", "")


def hidden(group: Any, old: str, shown: str, **options: Any) -> None:
    """The older spelling of an option that `group` has: it works, and `--help` does not show it."""
    group.add_argument(
        old, dest=shown.strip("-").replace("-", "_"), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
    )
