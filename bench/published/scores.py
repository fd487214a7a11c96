"""How good predictions are: errors of seconds, the ranking of plans, what choosing by prediction would cost, memory."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence

from bench.published.rows import Row

Judged = tuple[Row, float, int]
"""A row, its predicted seconds and its predicted peak bytes."""


def summary(errors: Sequence[float]) -> str:
    """Median and mean of absolute errors, and the bias."""
    found = figures(errors)
    return f"median {found['median']:.1%}, mean {found['mean']:.1%}, bias {found['bias']:+.1%}"


def figures(errors: Sequence[float]) -> dict[str, float]:
    """The same as numbers, rounded for a file."""
    if not errors:
        return {}
    sizes = [abs(e) for e in errors]
    return {
        "median": round(statistics.median(sizes), 4),
        "mean": round(statistics.mean(sizes), 4),
        "bias": round(statistics.mean(errors), 4),
    }


def families(judged: Iterable[Judged]) -> list[list[Judged]]:
    """Measured rows that differ in nothing but the plan, at least three together."""
    by: dict[object, list[Judged]] = {}
    for one in judged:
        row = one[0]
        if row.measured_s:
            key = (row.system, row.model, row.layers, row.gpu, row.gpus, row.gbs, row.seq, row.precision)
            by.setdefault(key, []).append(one)
    return [found for found in by.values() if len(found) >= 3]


def ranking(judged: Iterable[Judged]) -> dict[str, float]:
    """Kendall's tau over pairs of plans of one family, and by how much the plan predicted fastest misses the best."""
    agree = pairs = 0
    regrets = []
    for found in families(judged):
        times = [(predicted, row.measured_s or 0.0) for row, predicted, _ in found]
        for a, b in itertools.combinations(times, 2):
            if a[1] != b[1]:
                pairs += 1
                agree += 1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1
        regrets.append(min(times)[1] / min(t for _, t in times) - 1)
    if not regrets:
        return {}
    return {
        "tau": round(agree / max(1, pairs), 3),
        "pairs": pairs,
        "families": len(regrets),
        "worst_regret": round(max(regrets), 4),
    }


def memory_errors(judged: Iterable[Judged]) -> list[float]:
    """Predicted over stated peak less one, where a row states one."""
    out = []
    for row, _, peak in judged:
        stated = stated_bytes(row)
        if stated:
            out.append(peak / stated - 1)
    return out


def stated_bytes(row: Row) -> float | None:
    """The peak that a row states in its extras."""
    for key, unit in (("mem_GiB", 2**30), ("mem_GB", 1e9)):
        found = re.match(r"[\d.]+", row.extra.get(key, ""))
        if found:
            return float(found[0]) * unit
    return None
