"""Systems that nobody has named: each left out in turn with all its rows, then predicted without its name.

    python -m bench.published --csv FILE --unnamed

Without a system's rows the constants are fitted anew, from where every fit starts, to the rows of the others; what a
practice does is voted on by the others (`features.voted`); how its cluster is wired is what is usual for its devices.
What is not left out: the model itself, the three practices and how rows tell them apart, written down once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace

from bench.published import fit, prices
from bench.published.features import PRACTICES, Features, voted
from bench.published.prices import Constants
from bench.published.rows import Row
from bench.published.scores import summary
from bench.published.steps import step_of

RELATED = (("nemo", "megatron-bridge"), ("nemo", "megatron-bridge", "megatron-core"))
"""Systems of one maker on one code base: leaving out one leaves in its relatives, so all are left out together too."""


def system_key(row: Row) -> str:
    """A system whatever its release: `NeMo v2.1.0` and `NeMo 24.03 long-seq` are one."""
    return re.sub(r"\s+[rv]?\d.*", "", row.system.lower())


def unnamed(row: Row, practices: dict[str, Features]) -> Row:
    """The row as if its system had never been heard of: what it leaves open is what such practices do."""
    hidden = replace(row, system="")
    stands, does = asdict(PRACTICES[hidden.practice]), asdict(practices[hidden.practice])
    return replace(hidden, stated={**{k: v for k, v in does.items() if v != stands[k]}, **row.stated})


def practices_of(rows: Iterable[Row]) -> dict[str, Features]:
    """What the systems of some rows do, by practice."""
    systems: dict[str, set[str]] = {}
    for row in rows:
        systems.setdefault(row.practice, set()).add(row.system)
    return {name: voted(name, systems.get(name, ())) for name in PRACTICES}


def constants_of(rows: Sequence[Row]) -> dict[str, Constants]:
    """Fitted to some rows and nothing else, by kind of device."""
    out = {}
    for kind in dict.fromkeys(row.gpu.kind for row in rows):
        mine = [row for row in rows if row.gpu.kind == kind]
        problem, x = fit.fitted(mine, fit.free_of(mine), Constants(), lambda _: None)
        out[kind] = problem.constants(x)
    return out


def without(rows: Sequence[Row], systems: Collection[str]) -> dict[int, float]:
    """By line, predicted over measured less one, of systems that everything else is fitted without."""
    rest = [row for row in rows if row.measured_s and system_key(row) not in systems]
    mine = [row for row in rows if row.measured_s and system_key(row) in systems]
    kinds = {row.gpu.kind for row in mine}
    alike = [row for row in rest if row.gpu.kind in kinds]
    # Rows of other kinds are asked only where a kind has none left and takes its kin's constants.
    known = constants_of(alike if {row.gpu.kind for row in alike} == kinds else rest)
    practices = practices_of(rest)
    return {row.line: _error(unnamed(row, practices), known) for row in mine}


def left_out(rows: Sequence[Row], tell: Callable[[str], None] = print) -> dict[str, dict[int, float]]:
    """The errors of every system, each left out in turn."""
    out: dict[str, dict[int, float]] = {}
    for system in dict.fromkeys(system_key(row) for row in rows if row.measured_s):
        out[system] = without(rows, {system})
        tell(f"{system:20} {len(out[system]):4} rows: {summary(list(out[system].values()))}")
    return out


def name_hidden(rows: Iterable[Row]) -> list[float]:
    """The errors with the constants of all rows, where only the names are hidden: no system is left out."""
    known = prices.load()
    return [_error(replace(row, system=""), known) for row in rows if row.measured_s]


def _error(row: Row, known: dict[str, Constants]) -> float:
    return step_of(row, prices.of_kind(row.gpu, known)).seconds / (row.measured_s or 1.0) - 1
