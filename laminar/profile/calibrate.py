"""Calibrating a cluster: trials run whole on its ranks, and the constants of `cost.calibrate` fitted to them.

For each number of ranks the trials of `train.trials` are timed under several plans and under DDP, their features are
worked out from the same profile that predictions will use, and the fit goes into `profile["calibration"]` under
the section's name, with what it was fitted to and how far off it is on a model left out.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.cost.calibrate import Calibration, Timing, fit
from laminar.forecast.features import ddp_features, step_features
from laminar.forecast.step import machine, section_of
from laminar.ir.clusters.cluster import Cluster
from laminar.profile.sweep import Progress
from laminar.profile.trials import DDP_SIDE, TRIAL_PLANS, TRIALS, Trial, all_timed, mesh_of, trial_graph
from laminar.runtime.check.processes import on_ranks

SHORT = ("data", "zero1", "zero3", "tensor", "random1", "random2")
"""Plans that are timed: presets, and two draws."""


def timings_of(trial: Trial, ranks: int, seconds: dict[str, float], cluster: Cluster) -> list[Timing]:
    """What was timed for one model, with the features its programs have on this cluster."""
    bare = machine(cluster, mesh_of("data", ranks), calibrated=False)
    graph = trial_graph(trial, ranks)
    out = []
    for side, measured in seconds.items():
        if side == DDP_SIDE:
            found = ddp_features(graph, TRIAL_PLANS["data"](graph, mesh_of("data", ranks)), bare)
        else:
            found = step_features(graph, TRIAL_PLANS[side](graph, mesh_of(side, ranks)), bare)
        out.append(Timing(trial.name, side, found, measured))
    return out


def calibrated(
    cluster: Cluster,
    ranks: Sequence[int],
    *,
    plans: Sequence[str] = SHORT,
    rounds: int = 7,
    turn_s: float = 0.07,
    progress: Progress | None = None,
) -> Cluster:
    """The cluster with a calibration for each number of ranks."""
    if cluster.device.kind != "cpu":
        return cluster
    found: dict[str, Any] = dict(cluster.profile.get("calibration", {}))
    raw: dict[str, Any] = dict(cluster.profile.get("trials", {}))
    done, total = 0, len(ranks) * len(TRIALS)
    for n in ranks:
        section = section_of(cluster, n)
        sides = list(plans) if n > 1 else ["data"]
        timings: list[Timing] = []
        with tempfile.TemporaryDirectory(prefix="laminar-trials-") as folder:
            begun = Path(folder) / "begun"

            def show(done: int = done, n: int = n, begun: Path = begun) -> None:
                names = begun.read_text().split() if begun.exists() else []
                if progress is not None and names:
                    progress(done + len(names) - 1, total, f"{names[-1]} on {n} ranks")

            threads = max(1, cluster.devices // n)
            names = [trial.name for trial in TRIALS]
            args = (names, sides, rounds, turn_s, str(begun))
            runs = on_ranks(n, all_timed, *args, threads=threads, timeout_s=1800, waiting=show)[0]
        for trial, run in zip(TRIALS, runs, strict=True):
            seconds = {side: statistics.median(ts) for side, ts in run["times"].items()}
            timings += timings_of(trial, n, seconds, cluster)
        done += len(TRIALS)
        found[section] = fit(timings).to_json()
        raw[section] = [[t.model, t.side, round(t.seconds, 7)] for t in timings]
    if progress is not None:
        progress(total, total, "")
    return cluster.with_profile({**cluster.profile, "calibration": found, "trials": raw})


def refitted(cluster: Cluster) -> Cluster:
    """The same timings fitted anew: after the cost model, or the table behind it, has changed."""
    found: dict[str, Any] = {}
    for section, rows in cluster.profile.get("trials", {}).items():
        ranks = int(section.split("ranks=")[1].split("/")[0])
        timings: list[Timing] = []
        for trial in TRIALS:
            seconds = {side: s for model, side, s in rows if model == trial.name}
            timings += timings_of(trial, ranks, seconds, cluster)
        found[section] = fit(timings).to_json()
    return cluster.with_profile({**cluster.profile, "calibration": found})


__all__ = ["Calibration", "calibrated", "refitted", "timings_of"]
