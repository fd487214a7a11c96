"""What a profile must look like to be priced with: measured seconds of ops and exchanges, and what was fitted to them.

Profiles are files, and people edit and merge files. Whoever reads one later takes it for numbers of a machine, so all
of it is looked at when a cluster is read, and what is wrong is named by its place: `profile.collectives[3].seconds`.
Names of ops are their shapes (`cost/ops/table.py`), and are not looked into here.
"""

from __future__ import annotations

from typing import Any

from laminar.errors import ClusterError
from laminar.ir.serial.reading import JsonPart

LONGEST_S = 1e4
"""No op, exchange or latency of a machine takes longer; what is simulated is counted in nanoseconds."""


def checked_profile(profile: Any) -> dict[str, Any]:
    """The profile, if it is one."""
    whole = JsonPart(profile, ClusterError, "profile")
    for section in whole.get("ops", {}).fields().values():
        section["device"].text()
        section["versions"].object()
        for entry in section["ops"].fields().values():
            seconds, spread, repeats = entry.rows(3)
            _seconds(seconds)
            _positive(spread, zero=True)
            repeats.whole()
    for row in whole.get("collectives", []).rows():
        row["backend"].text()
        row["kind"].text()
        row["ranks"].whole(1)
        row["bytes"].whole(1)
        _seconds(row["seconds"])
        _positive(row.get("spread", 0.0), zero=True)
        row.get("resident", False).flag()
        if "level" in row:
            row["level"].text()
    for row in whole.get("overlap", []).rows():
        _positive(row["compute_left"])
        _positive(row["transfer_left"])
    for fitted in whole.get("calibration", {}).fields().values():
        for table in ("multipliers", "extra_s", "errors"):
            for figure in fitted.get(table, {}).fields().values():
                _positive(figure, zero=True)
        for name in ("sigma", "ratio_sigma"):
            _positive(fitted.get(name, 0.0), zero=True)
        for model in fitted.get("models", []).rows():
            model.text()
        fitted.get("quiet", False).flag()
    for rows in whole.get("trials", {}).fields().values():
        rows.rows()
    whole.get("failed", {}).object()
    whole.get("for", []).rows()
    whole.get("workspace_bytes", 0).whole()
    return dict(whole.object())


def _seconds(part: JsonPart) -> None:
    _positive(part)
    if part.value > LONGEST_S:
        raise part.wrong(f"{part.value} s, more than {LONGEST_S:.0f} s")


def _positive(part: JsonPart, zero: bool = False) -> None:
    """A finite number above 0, or not below it."""
    value = part.number(0.0)
    if value == float("inf") or not (value or zero):
        raise part.wrong(f"{part.value}, not a number {'of at least' if zero else 'above'} 0")
