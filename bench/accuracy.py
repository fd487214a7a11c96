"""How far are predicted steps from measured ones, on models that nothing was fitted to?

Two commands. `measure` times whole steps of every model of `judged.py` under every plan of
`laminar.profile.trials`, with DDP of the same model in the same rounds; run it several times, some minutes apart:

    python bench/accuracy.py measure --ranks 2 --rounds 15 --to bench/results/steps_2.jsonl

`judge` predicts each of these steps from a profile that `laminar profile` wrote, and reports the errors:

    python bench/accuracy.py judge --profile here.json --from bench/results/steps_2.jsonl

`own-ops` adds the judged programs' single ops to a profile, as `laminar profile --for` would; errors are reported with
and without, and the targets are without: median 8 %, 90th percentile 18 %, tau 0.9, 80 to 97 % within the interval.

On shared cores absolute times repeat within a factor of two only, so the yardstick there is DDP in the same
round: median over rounds of seconds over DDP's seconds, predicted against measured. The repeat error, one run
predicting another, stands beside each figure: no prediction can be better. Kendall's tau counts pairs of plans of
one model that differ by more than that. `--absolute` judges seconds instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import report
from judged import JUDGED, judged

from laminar.cost.calibrate import HALF_90
from laminar.forecast.features import ddp_features
from laminar.forecast.step import machine, predict, section_of
from laminar.ir.clusters.cluster import Cluster
from laminar.profile.trials import DDP_SIDE, TRIAL_PLANS, Trial, mesh_of, timed_sides, trial_graph
from laminar.runtime.check.processes import on_ranks


def turns(names: list[str], plans: list[str], rounds: int, turn_s: float, run: str, out: str) -> None:
    """One rank's part of a run; the first rank writes a line per model as soon as it has it."""
    for name in names:
        load, start = os.getloadavg()[0], time.time()
        found = timed_sides(judged(name), plans, rounds, turn_s)
        if dist.get_rank():
            continue
        line = {**found, "run": run, "at": round(start), "load_before": round(load, 2), "torch": torch.__version__}
        line["times"] = {k: [round(t, 7) for t in ts] for k, ts in found["times"].items()}
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")
        ddp = line["times"][DDP_SIDE]
        text = "  ".join(f"{k} {_median_ratio(ts, ddp):.2f}" for k, ts in line["times"].items() if k != DDP_SIDE)
        print(f"{name}: {time.time() - start:.0f} s, ddp {statistics.median(ddp) * 1e3:.1f} ms; {text}", flush=True)


def measure(args: argparse.Namespace) -> None:
    """One run: every model, every plan, so many rounds; one line per model."""
    threads = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    work = (args.model, args.plan, args.rounds, args.turn, args.run, str(Path(args.to).absolute()))
    on_ranks(args.ranks, turns, *work, threads=threads, timeout_s=3600)


def _median_ratio(times: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, under, strict=True))


def predicted(trial: Trial, ranks: int, plans: list[str], cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Seconds and standard error by side; DDP's too."""
    graph = trial_graph(trial, ranks)
    out = {}
    for name in plans:
        mesh = mesh_of(name, ranks)
        found = predict(graph, TRIAL_PLANS[name](graph, mesh), cluster)
        out[name] = (found.seconds, found.sigma)
    bare = machine(cluster, mesh_of("data", ranks), calibrated=False)
    calibration = machine(cluster, mesh_of("data", ranks)).calibration
    features = ddp_features(graph, TRIAL_PLANS["data"](graph, mesh_of("data", ranks)), bare)
    out[DDP_SIDE] = (calibration.seconds(features), calibration.sigma)
    return out


def judge(args: argparse.Namespace) -> None:
    """Errors of a profile's predictions on measured runs."""
    cluster = Cluster.load(args.profile)
    lines = [json.loads(text) for text in Path(args.source).read_text().splitlines()]
    ranks = lines[0]["ranks"]
    rows, pairs, covered = [], [], []
    for name in dict.fromkeys(line["model"] for line in lines):
        mine = [line for line in lines if line["model"] == name]
        plans = [p for p in mine[0]["times"] if p != DDP_SIDE]
        guess = predicted(judged(name), ranks, plans, cluster)
        seen = {}
        for p in plans:
            if args.absolute:
                each = [statistics.median(line["times"][p]) for line in mine]
                want = guess[p][0]
            else:
                each = [_median_ratio(line["times"][p], line["times"][DDP_SIDE]) for line in mine]
                want = guess[p][0] / guess[DDP_SIDE][0]
            value = statistics.median(each)
            repeat = [abs(a / b - 1) for a, b in itertools.permutations(each, 2)]
            rows.append(
                {
                    "model": name,
                    "plan": p,
                    "measured": value,
                    "predicted": want,
                    "error": want / value - 1,
                    "repeat": statistics.median(repeat) if repeat else 0.0,
                }
            )
            sigma = calibration_sigma(cluster, ranks, args.absolute)
            covered.append(abs(math.log(want / value)) <= HALF_90 * sigma)
            seen[p] = (value, want, rows[-1]["repeat"])
        for a, b in itertools.combinations(plans, 2):
            apart = abs(math.log(seen[a][0] / seen[b][0]))
            if apart > max(seen[a][2], seen[b][2], 0.01):
                same = (seen[a][0] - seen[b][0]) * (seen[a][1] - seen[b][1])
                pairs.append(1 if same > 0 else -1)
    errors = sorted(abs(r["error"]) for r in rows)
    repeats = sorted(r["repeat"] for r in rows)
    report(
        "accuracy",
        {
            "ranks": ranks,
            "what": "seconds" if args.absolute else "ratio to DDP",
            "profile": section_of(cluster, ranks),
            "with_for": bool(cluster.profile.get("for")),
            "models": len({r["model"] for r in rows}),
            "programs": len(rows),
            "runs": len({line["run"] for line in lines}),
            "median_error": round(statistics.median(errors), 4),
            "p90_error": round(errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)], 4),
            "repeat_median": round(statistics.median(repeats), 4),
            "repeat_p90": round(repeats[min(len(repeats) - 1, math.ceil(0.9 * len(repeats)) - 1)], 4),
            "kendall_tau": round(sum(pairs) / len(pairs), 4) if pairs else None,
            "pairs": len(pairs),
            "covered_by_90_interval": round(sum(covered) / len(covered), 4),
            "calibration": cluster.profile.get("calibration", {}).get(section_of(cluster, ranks), {}).get("errors"),
            "rows": [{**r, **{k: round(r[k], 4) for k in ("measured", "predicted", "error", "repeat")}} for r in rows],
        },
    )
    if args.show:
        for r in sorted(rows, key=lambda r: -abs(r["error"])):
            print(
                f"{r['model']:<8} {r['plan']:<8} measured {r['measured']:.4g} predicted {r['predicted']:.4g} "
                f"error {r['error']:+.1%} repeat {r['repeat']:.1%}"
            )


def own_ops(args: argparse.Namespace) -> None:
    """The profile with the judged programs' own ops measured as well: what `laminar profile --for` does."""
    from laminar.lower.step import step_programs
    from laminar.profile.sweep import measure_instrs

    cluster = Cluster.load(args.profile)
    programs = []
    for name in args.model:
        graph = trial_graph(judged(name), args.ranks)
        for plan in TRIAL_PLANS:
            made = step_programs(graph, TRIAL_PLANS[plan](graph, mesh_of(plan, args.ranks)))
            programs += [p for p in made if p is not None]
    found = measure_instrs(cluster, programs, section_of(cluster, args.ranks), args.budget)
    found.with_profile({**found.profile, "for": list(args.model)}).save(args.to)


def calibration_sigma(cluster: Cluster, ranks: int, absolute: bool) -> float:
    """The standard error that intervals are made from."""
    found = machine(cluster, mesh_of("data", ranks)).calibration
    return found.sigma if absolute else found.ratio_sigma


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", required=True)
    p = verbs.add_parser("measure")
    p.add_argument("--model", nargs="*", default=list(JUDGED))
    p.add_argument("--plan", nargs="*", default=list(TRIAL_PLANS))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--turn", type=float, default=0.12, help="seconds a side's turn lasts at least")
    p.add_argument("--run", default=time.strftime("%H%M%S"), help="name of this run")
    p.add_argument("--to", default="bench/results/steps.jsonl")
    p = verbs.add_parser("judge")
    p.add_argument("--profile", required=True)
    p.add_argument("--from", dest="source", required=True)
    p.add_argument("--absolute", action="store_true", help="judge seconds, not ratios to DDP")
    p.add_argument("--show", action="store_true", help="print every program, worst first")
    p = verbs.add_parser("own-ops")
    p.add_argument("--profile", required=True)
    p.add_argument("--model", nargs="*", default=list(JUDGED))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--budget", type=float, default=100.0, help="seconds")
    p.add_argument("--to", required=True)
    args = top.parse_args()
    {"measure": measure, "judge": judge, "own-ops": own_ops}[args.verb](args)


if __name__ == "__main__":
    main()
