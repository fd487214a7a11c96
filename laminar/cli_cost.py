"""What a step costs, from the command line: `laminar profile`, `laminar simulate`, `laminar diff`.

`profile` measures this machine and writes a cluster file. `simulate` predicts a plan's step on any cluster, named or
measured, without the hardware. `diff` compares a predicted with a measured timeline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.errors import ClusterError, PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, load_plan
from laminar.ir.timeline import Timeline
from laminar.launch.vocabulary import PRECISIONS

PROFILE = """\
examples
  laminar profile -o here.json                              measure this machine, about three minutes
  laminar profile -o here.json --for examples/gpt.py:small  also measure the ops that this recipe would run
  laminar plan examples/gpt.py:small --mesh dp=2 --cluster here.json

The file describes a cluster: laminar.Cluster.load("here.json"). If it exists it is extended, and entries that are
measured again replace older ones. On CPU ranks, all ranks measure ops at once, as they run in a step; then a few whole
models are trained for some steps, to calibrate what single ops can't show.
"""
SIMULATE = """\
examples
  laminar plan     examples/gpt.py:tiny --mesh dp=8 --cluster 8xh100 -o plan.json
  laminar simulate plan.json -o sim.json --trace sim.perfetto.json --png sim.png
  laminar simulate plan.json --cluster 64xa100@ib200        the same plan on another machine

clusters
  a file from `laminar profile`, or [NODESx][COUNTx]DEVICE[@FABRIC[+FABRIC]]: 8xh100, 16x4xa100-80g, 2xcpu

Open the trace at ui.perfetto.dev or chrome://tracing.
"""
DIFF = """\
examples
  laminar simulate plan.json --cluster here.json -o sim.json
  laminar train examples/gpt.py:small --plan plan.json --timeline run.json
  laminar diff sim.json run.json --png both.png
"""
TRIALS_S = 60.0
"""After so long no further model is begun on a GPU."""


def cluster_from(text: str | None) -> Cluster:
    """A cluster by file or by name; this machine where nothing is said."""
    return Cluster.detect() if text is None else Cluster.named(text)


# --- profile --------------------------------------------------------------------------------------


def profile_options(p: argparse.ArgumentParser) -> None:
    """What `laminar profile` can be told."""
    p.epilog, p.formatter_class = PROFILE, argparse.RawDescriptionHelpFormatter
    p.add_argument("-o", "--output", required=True, metavar="FILE", help="cluster file to write or extend")
    p.add_argument("--for", dest="recipe", metavar="RECIPE", help="also measure the ops that this recipe would run")
    p.add_argument(
        "--ranks", metavar="N[,N...]", help="measure with this many ranks at once (default: 1, and one per core)"
    )
    p.add_argument(
        "--budget", type=float, default=100.0, metavar="S", help="seconds to spend on single ops (default: 100)"
    )
    p.add_argument(
        "--trials",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="calibrate with whole training steps (default: yes)",
    )
    p.add_argument("--keep", metavar="FILE", help="on a GPU, save the timed training steps with their graphs and plans")


def do_profile(args: argparse.Namespace) -> int:
    """Measure this machine."""
    from laminar.profile.calibrate import calibrated
    from laminar.profile.sweep import profile

    start = time.monotonic()
    path = Path(args.output)
    if not path.absolute().parent.is_dir():
        raise ClusterError(f"{args.output}: there is no such folder", next="make it first")
    here = Cluster.detect()
    if path.exists():
        before = Cluster.load(path)
        if before.device.name != here.device.name or before.devices != here.devices:
            there, now = (f"{c.devices} x {c.device.name}" for c in (before, here))
            raise ClusterError(f"{path} describes {there}, this machine is {now}", next="write to another file")
        here = before
    ranks = _ranks(args.ranks, here)
    programs = _programs(args.recipe, ranks) if args.recipe else ()
    with _Bar(args.json) as bar:
        found = profile(here, ranks=ranks, budget_s=args.budget, programs=programs, progress=bar.part("ops and links"))
        found.save(path)  # whatever becomes of whole steps, this was measured
        if args.trials and here.device.kind == "cpu":
            most = [n for n in ranks if n > 1] or ranks
            found = calibrated(found, most, progress=bar.part("whole steps"))
        elif args.trials:
            found = _on_gpu(found, args.keep, bar.part("whole steps"))
    if args.recipe:
        found = found.with_profile({**found.profile, "for": [*found.profile.get("for", []), args.recipe]})
    found.save(path)
    summary = summarised(found)
    summary["seconds"] = round(time.monotonic() - start, 1)
    if args.json:
        print(json.dumps(summary))
    else:
        print(found)
        for name, rows in summary["sections"].items():
            print(f"\n{name}: {rows['entries']} ops; each predicted from the others")
            for row in rows["check"]:
                print(
                    f"  {row['family']:<16} {row['entries']:>4} ops  median error {row['median']:6.1%}  "
                    f"90th percentile {row['p90']:6.1%}"
                )
        if summary["failed"]:
            print(f"\n{len(summary['failed'])} could not be measured")
            for name, why in list(summary["failed"].items())[:8]:
                print(f"  {name[:100]}: {why[:160]}")
        for name, fit in summary["calibration"].items():
            print(
                f"\ncalibrated on whole steps, {name}: a model left out is predicted within "
                f"{fit['interval']:.0%} (90 %)"
            )
            for model, error in fit["errors"].items():
                print(f"  {model:<24} median error of {fit['of']} {error:6.1%}")
        print(f"\nwritten to {path} after {summary['seconds']:.0f} s")
    return 0


def _on_gpu(found: Cluster, keep: str | None, show: Any) -> Cluster:
    """The cluster, calibrated with whole steps on its GPU."""
    import tempfile

    from laminar.profile.gpu_trials import calibrated_on_gpu, timed_apart

    show(0, 1, "compiled models on the GPU")
    with tempfile.TemporaryDirectory(prefix="laminar-trials-") as folder:
        return calibrated_on_gpu(found, timed_apart(TRIALS_S, Path(keep or f"{folder}/trials.jsonl")))


def _ranks(text: str | None, here: Cluster) -> list[int]:
    if here.device.kind == "gpu":
        return [1]
    if text is None:
        return sorted({1, here.devices})
    parts = text.split(",")
    if not all(part.strip().isdigit() and 0 < int(part) <= here.devices for part in parts):
        raise ClusterError(f"--ranks {text}", allowed=f"numbers from 1 to {here.devices}, separated by commas")
    return sorted({int(part) for part in parts})


def _programs(recipe: str, ranks: list[int]) -> list[Any]:
    """The programs whose ops `--for` measures: the recipe under the presets."""
    from laminar.api import graph_of
    from laminar.ir.mesh import Mesh
    from laminar.lower.step import step_programs
    from laminar.placement import presets

    graph = graph_of(recipe)
    out = []
    for n in ranks:
        dp, tp = Mesh({"dp": n}), Mesh({"tp": n})
        for plan in (presets.data_parallel(graph, dp), presets.zero(graph, dp, 3), presets.tensor_parallel(graph, tp)):
            out += [p for p in step_programs(graph, plan) if p is not None]
    return out


def summarised(cluster: Cluster) -> dict[str, Any]:
    """What a profile knows and how well, for people and scripts."""
    from laminar.cost.calibrate import Calibration, interval
    from laminar.cost.ops.price import OpCost
    from laminar.cost.ops.table import Table

    sections = {}
    for name, section in Table.of(cluster.profile).sections.items():
        rows = OpCost(cluster, name).check()
        check = [
            {"family": r.family, "entries": r.entries, "median": round(r.median, 4), "p90": round(r.p90, 4)}
            for r in rows
        ]
        sections[name] = {"entries": len(section.ops), "check": check}
    fits = {}
    for name, data in cluster.profile.get("calibration", {}).items():
        fit = Calibration.from_json(data)
        fits[name] = {
            "interval": interval(1.0, fit.sigma)[1] - 1,
            "errors": fit.errors,
            "models": list(fit.models),
            "of": "seconds" if fit.quiet else "the ratio to DDP",
        }
    return {
        "cluster": cluster.name,
        "device": cluster.device.name,
        "devices": cluster.devices,
        "sections": sections,
        "collectives": len(cluster.profile.get("collectives", [])),
        "calibration": fits,
        "failed": dict(cluster.profile.get("failed", {})),
    }


class _Bar:
    """A progress line on stderr, where someone is watching."""

    def __init__(self, quiet: bool) -> None:
        self.shows = not quiet and sys.stderr.isatty()
        self.start = time.monotonic()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shows:
            sys.stderr.write("\r\033[K")

    def part(self, what: str) -> Any:
        """A callback (done, total, text) for one part of the work."""

        def show(done: int, total: int, text: str) -> None:
            if self.shows:
                width = 24
                full = round(width * done / max(total, 1))
                line = (
                    f"{what} [{'#' * full}{'.' * (width - full)}] {done}/{total} {time.monotonic() - self.start:.0f} s"
                )
                columns = os.get_terminal_size(sys.stderr.fileno()).columns
                sys.stderr.write("\r\033[K" + f"{line}  {text}"[: columns - 1])
                sys.stderr.flush()

        return show


# --- simulate -------------------------------------------------------------------------------------


def simulate_options(p: argparse.ArgumentParser) -> None:
    """What `laminar simulate` can be told."""
    p.epilog, p.formatter_class = SIMULATE, argparse.RawDescriptionHelpFormatter
    p.add_argument("plan", help="a plan file")
    p.add_argument(
        "--cluster", metavar="CLUSTER", help="file or name of a cluster (default: the plan's own, else this machine)"
    )
    p.add_argument("--recipe", metavar="RECIPE", help="recipe of the model (default: the one the plan was made for)")
    p.add_argument(
        "--optimizer",
        default="adamw",
        choices=["adamw", "adam", "sgd", "momentum"],
        help="whose update and state to price (default: adamw)",
    )
    p.add_argument("--precision", choices=PRECISIONS, help="as in `laminar train` (default: the plan's own)")
    p.add_argument("--tokens", type=float, metavar="N", help="days to train on so many tokens (or samples)")
    p.add_argument("--price", type=float, metavar="P", help="price per device-hour; prints the cost per million tokens")
    p.add_argument(
        "--load-s", type=float, default=0.0, metavar="S", help="seconds a rank takes to load a batch (default: 0)"
    )
    p.add_argument(
        "--prefetch", type=int, default=2, metavar="N", help="batches loaded ahead while steps run (default: 2)"
    )
    p.add_argument("-o", "--output", metavar="FILE", help="save the timeline")
    p.add_argument("--trace", metavar="FILE", help="save a Chrome trace, for ui.perfetto.dev")
    p.add_argument("--png", metavar="FILE", help="draw the timeline and the memory")


def do_simulate(args: argparse.Namespace) -> int:
    """Predict one step of a plan."""
    from laminar.api import graph_of
    from laminar.forecast.pipeline_step import predict_staged
    from laminar.forecast.step import predict
    from laminar.placement.presets import like
    from laminar.planner.report.graph_of_plan import cluster_named, graph_of_own_batch
    from laminar.planner.report.throughput import rate_lines, rates, with_work
    from laminar.staging.stage_plans import for_other_graph

    plan = load_plan(args.plan)
    recipe = args.recipe or plan.account.recipe
    if recipe is None:
        raise PlanError(f"{args.plan} does not say which recipe it is for", next="--recipe path/to/file.py:function")
    cluster = cluster_from(args.cluster or cluster_named(plan))
    if args.load_s < 0 or args.prefetch < 0:
        raise PlanError(f"--load-s {args.load_s} --prefetch {args.prefetch}", allowed="0 or more")
    asked: dict[str, Any] = {"optimizer": args.optimizer, "load_s": args.load_s, "prefetch": args.prefetch}
    own_precision = plan.account.work.precision if plan.account.work else "f32"
    precision, kind = args.precision or own_precision, "cpu" if cluster.on([0]).device.kind == "cpu" else "cuda"
    times = 1
    if isinstance(plan, Staged):
        times, free = plan.micro_batches, plan.account.batch
        parts = times * free.captured // free.samples if free else times
        graph = graph_of(recipe, parts, precision, kind)
        plan = for_other_graph(graph, plan) if precision != own_precision else plan
        found: Any = predict_staged(graph, plan, cluster, **asked)
    else:
        graph = graph_of_own_batch(plan, graph_of(recipe, 1, precision, kind))
        plan = like(graph, plan) if precision != own_precision else plan
        found = predict(graph, plan, cluster, **asked)
    account = replace(with_work(plan.account, graph, precision, cluster, times), step=found.figures())
    line = found.timeline
    if args.output:
        line.save(args.output)
    if args.trace:
        Path(args.trace).write_text(json.dumps(line.to_chrome()))
    if args.png:
        from laminar.cost.timeline_plot import draw_timelines

        draw_timelines([line], args.png)
    parts = line.breakdown()
    if args.json:
        about = {"precision": precision, **rates(account, args.tokens, args.price)}
        print(json.dumps({"plan": plan.hash, **found.figures().to_json(), **about, "breakdown": parts}))
        return 0
    print(replace(plan, account=account).forecast())
    print("\n".join(rate_lines(account, args.tokens, args.price)).strip("\n"))
    if isinstance(plan, Plan):
        print(found.memory)
    print(rendered(parts, line.step_ns))
    for what, path in (("timeline", args.output), ("trace", args.trace), ("picture", args.png)):
        if path:
            print(f"{what} written to {path}")
    return 0


def rendered(parts: dict[str, Any], step_ns: int) -> str:
    """Where the time goes, largest first; nested parts are indented."""
    lines = ["where a step's time goes"]

    def rows(values: dict[str, Any], indent: str) -> None:
        flat = [(k, v) for k, v in values.items() if isinstance(v, (int, float)) and v]
        for name, ns in sorted(flat, key=lambda kv: -kv[1]):
            lines.append(f"{indent}{name:<36} {ns / 1e6:10.3f} ms  {ns / max(step_ns, 1):6.1%}")
        for name, inner in values.items():
            if isinstance(inner, dict) and any(inner.values()):
                lines.append(f"{indent}{name}")
                rows(inner, indent + "  ")

    rows({k: v for k, v in parts.items() if k != "ranks"}, "  ")
    return "\n".join(lines)


# --- diff -----------------------------------------------------------------------------------------


def diff_options(p: argparse.ArgumentParser) -> None:
    """What `laminar diff` can be told."""
    p.epilog, p.formatter_class = DIFF, argparse.RawDescriptionHelpFormatter
    p.add_argument("predicted", help="timeline from `laminar simulate -o`")
    p.add_argument("measured", help="timeline from `laminar train --timeline`")
    p.add_argument("--png", metavar="FILE", help="draw both over one time axis")


def do_diff(args: argparse.Namespace) -> int:
    """A predicted timeline beside a measured one."""
    from laminar.cost.timeline_diff import compare, render

    predicted, measured = Timeline.load(args.predicted), Timeline.load(args.measured)
    found = compare(predicted, measured)
    if args.png:
        from laminar.cost.timeline_plot import draw_timelines

        draw_timelines([predicted, measured], args.png)
    print(json.dumps(found.to_json()) if args.json else render(found))
    return 0
