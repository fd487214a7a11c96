"""Plans from the command line: `laminar plan` finds one for a cluster, or makes the one it is told to.

With a cluster and nothing else, it searches placements, meshes, stages, micro-batches, ZeRO and recompute together, and
says how far from the best the plan can be. With a mesh, a preset, placements or stages it makes that plan. Either way
the plan can be asked: why a tensor is sharded as it is, what would change if something were different, which flags of
other systems mean the same, and what it looks like. `laminar explain` asks the same of a plan that was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from laminar import cli_cost
from laminar.cli_ask import parse_changes, questions, tell, working
from laminar.errors import MeshError, PlanError
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import SCHEDULES, Staged, plan_of
from laminar.ir.sbp import parse
from laminar.launch.vocabulary import MEMORY, PRECISIONS, couple_word, hidden, memory_bytes, plan_name
from laminar.placement.presets import PRESET_NAMES
from laminar.planner.report.throughput import with_work
from laminar.planner.space.request import PINNABLE, STORED_PINS

if TYPE_CHECKING:
    from laminar.runtime.check.prove_rule_files import ProvedRules

EXAMPLES = """\
examples
  laminar plan examples/gpt.py:deep --cluster 8xh100 -o plan.json               search
  laminar plan examples/gpt.py:deep --cluster 64xh100 --memory 40GB --compare   at most 40 GB a rank; show what lost
  laminar plan examples/gpt.py:deep --cluster 8xh100 --batch free               the recipe's batch, or a part of it
  laminar plan examples/gpt.py:deep --cluster 8xh100 --precision bf16 --tokens 1e12 --price 2.5     days and cost
  laminar plan examples/gpt.py:deep --cluster 8xh100 --pin tp=8 --only tensor
  laminar plan examples/gpt.py:deep --cluster 8xh100 --pin 'blocks.*.mlp.up.weight=S(0)' --price 2.5
  laminar plan examples/gpt.py:deep --cluster 8xh100 --why blocks.3.mlp.down.weight --what-if 'memory=40GB; link=0.5'
  laminar plan examples/gpt.py:deep --cluster 8xh100 --flags megatron --png plan.png
  laminar plan examples/gpt.py:small --cluster here.json --measure              run the best candidates on this machine
  laminar plan examples/gpt.py:deep --cluster 8xh100 --rules rules.json            with a TASO or FlexFlow rule file
  laminar plan examples/gpt.py:deep --cluster 8xh100 --exact                    steps in exact mode, by storage
  laminar plan examples/gpt.py:tiny --mesh dp=2,tp=2 --preset tensor -o plan.json
  laminar plan examples/gpt.py:tiny --mesh tp=2 --place 'blocks.*up.weight=tp:S(0)' -o plan.json
  laminar plan examples/gpt.py:tiny --stages 2 --micro-batches 4 -o plan.json

clusters
  a file from `laminar profile`, or [NODESx][COUNTx]DEVICE[@FABRIC[+FABRIC]]: 8xh100, 16x4xa100-80g, 2xcpu
--pin
  dp, tp, stages, micro_batches, virtual, zero; recompute and offload (0: never, 1: as much as memory requires);
  and placements of tensors by name pattern
--what-if
  memory, margin, devices, cluster, link (a factor on link speed), only, batch=free, budget, and any pin (tp=any
  lifts it)
"""


def parse_mesh(text: str) -> Mesh:
    """`dp=2,tp=4` as a mesh."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise MeshError(f"{text!r} is not a mesh", next="write axes as dp=2,tp=4")
        if name.strip() in axes:
            raise MeshError(f"{text!r} names axis {name.strip()} twice", next="write axes as dp=2,tp=4")
        axes[name.strip()] = int(size)
    return Mesh(axes)


def parse_seeds(texts: list[str]) -> dict[str, dict[str, Any]]:
    """`PATTERN=axis:S(0)` (several axes separated by `;`) as placements by pattern."""
    seeds: dict[str, dict[str, Any]] = {}
    for text in texts:
        pattern, equals, rest = text.partition("=")
        if not equals:
            raise PlanError(
                f"{text!r} is no placement", next="write 'pattern=axis:S(0)', for example 'batch.*=dp:S(0)'"
            )
        for item in rest.split(";"):
            axis, colon, placement = item.partition(":")
            if not colon:
                raise PlanError(f"{item!r} in --place {text!r} names no axis", next="write 'pattern=axis:S(0)'")
            seeds.setdefault(pattern, {})[axis.strip()] = parse(placement.strip())
    return seeds


def parse_pins(texts: list[str]) -> dict[str, int | str]:
    """`tp=8`, several with commas, or `PATTERN=S(0)` as pins; the names are checked by the search."""
    pins: dict[str, int | str] = {}
    for text in texts:
        parts = text.split(",") if re.fullmatch(r"[^()]*", text) else [text]
        for part in parts:
            name, equals, value = (x.strip() for x in part.partition("="))
            if not equals or not value or (name in (*PINNABLE, *STORED_PINS.values()) and not value.isdigit()):
                raise PlanError(
                    f"{part!r} pins nothing", next="write --pin tp=8, --pin stages=4,zero=1 or --pin 'PATTERN=S(0)'"
                )
            pins[name] = int(value) if value.isdigit() else value
    return pins


def do_plan(args: argparse.Namespace) -> int:
    """Find a plan, or make one from a preset, from placements or with stages."""
    if args.measure_rank:
        return _rank_that_measures(args)
    for text in args.what_if:
        parse_changes(text)  # before anything is searched
    told = args.mesh or args.preset or args.place
    if args.exact is not None:
        return _exact(args)
    if args.stages:
        return _stages(args, parse_mesh(args.mesh) if args.mesh else None)
    if args.cluster and not told:
        return _search(args)
    for name in ("memory", "margin", "batch", "budget", "pin", "only", "proposals", "rules", "compare", "measure"):
        if getattr(args, name) or (name == "margin" and args.margin is not None):
            raise PlanError(f"--{name} is for a search", next="leave out --mesh, --preset, --place and --stages")
    return _made(args)


def _search(args: argparse.Namespace) -> int:
    """The best plan for a cluster."""
    from laminar.api import graph_of, plan
    from laminar.cache import kept
    from laminar.planner.search.earlier_plans import across_commands

    if args.recompute or args.offload or args.program:
        raise PlanError(
            "--recompute, --offload and --program do not go with a search",
            next="--pin recompute=1, --pin offload=1, or name a mesh",
        )
    cluster = cli_cost.cluster_from(args.cluster)
    if args.measure and args.batch == "free":
        raise PlanError("--measure runs the recipe's own batches", next="leave out --batch free")
    if args.measure:
        from laminar.launch.measure_plans import refuse_elsewhere, taken

        refuse_elsewhere(cluster)
    rules = _rules(args)
    with working("capturing", args.json):
        graph = graph_of(args.recipe, 1, args.precision, _kind(cluster))
    asked: dict[str, Any] = {
        "memory_bytes": args.memory,
        "margin": args.margin,
        "batch": args.batch or "fixed",
        "budget_s": 10.0 if args.budget is None else args.budget,
        "pin": parse_pins(args.pin),
        "only": args.only,
        "proposals": args.proposals,
    }
    with working("searching", args.json) as say:

        def search() -> Plan | Staged:
            with across_commands(graph, cluster.hash):
                return plan(graph, cluster, **asked, rules=rules, progress=lambda text: say(f"searching, {text}"))

        about = {"graph": graph.hash, "cluster": cluster.hash, **asked}
        about |= {"rules": [rules.file, rules.content]} if rules is not None else {}
        found = search() if args.measure else kept("plans", about, search, lambda p: p.to_json(), plan_of)
    if args.measure:
        with working("measuring", args.json):
            found = taken(args.recipe, found)
    account = replace(with_work(found.account, graph, args.precision, cluster), recipe=args.recipe)
    if account.batch is not None and account.work is not None:
        share = account.batch.samples / account.batch.captured
        work = replace(account.work, flops=account.work.flops * share)
        account = replace(account, samples=found.account.samples, tokens=found.account.tokens, work=work)
    if args.cluster.endswith(".json"):
        account = replace(account, cluster_file=args.cluster)
    found = replace(found, account=account)
    data: dict[str, Any] = {"graph": graph.hash, **account.to_json()}
    if rules is not None and account.rules is not None:
        data["rules"] = {**data["rules"], "each": [verdict.to_json() for verdict in rules.verdicts]}
        if not args.json:
            print(f"{rules}\n  {_taken(account.rules.used)}\n")
    return tell(args, found, lambda: graph, cluster, data)


def _exact(args: argparse.Namespace) -> int:
    """What a step in exact mode takes for each way to store, the fastest that fits first."""
    from laminar.api import graph_of
    from laminar.forecast.exact_step import exact_steps
    from laminar.ir.exact import Exact
    from laminar.planner.report.words import sized
    from laminar.planner.space.request import asking

    asked = Exact.of(args.exact) or Exact()
    if not args.cluster or args.mesh or args.preset or args.place or args.stages:
        raise PlanError("--exact predicts steps on a cluster", next="laminar plan RECIPE --exact --cluster 8xh100")
    cluster = cli_cost.cluster_from(args.cluster)
    with working("capturing", args.json):
        graph = graph_of(args.recipe, 1, args.precision, _kind(cluster))
    with working("simulating", args.json):
        found = exact_steps(graph, asked, cluster)
    room = asking(cluster, args.memory, margin=args.margin).room_bytes
    rows: list[dict[str, Any]] = [
        {
            "storage": step.storage,
            "step_s": step.prediction.seconds,
            "peak_bytes": step.prediction.peak_bytes,
            "fits": step.prediction.peak_bytes <= room,
        }
        for step in found
    ]
    rows.sort(key=lambda row: not row["fits"])  # within that by time, as they come
    if args.json:
        print(json.dumps({"exact": asked.to_json(), "processes": found[0].processes, "storages": rows}))
        return 0
    print(
        f"exact mode ({asked}) of {args.recipe} on {found[0].processes} of {cluster.devices} devices of {cluster.name}"
    )
    for row in rows:
        fits = "" if row["fits"] else f"  does not fit {sized(room)}"
        print(f"  --plan {row['storage']:<6} {row['step_s'] * 1e3:10.2f} ms  {sized(row['peak_bytes']):>10}{fits}")
    return 0


def _rules(args: argparse.Namespace) -> ProvedRules | None:
    """The rules of `--rules`, proved."""
    if args.rules is None:
        return None
    from laminar.runtime.check.prove_rule_files import proved_rules

    with working("proving rules", args.json) as say:
        return proved_rules(args.rules, lambda done, of: say(f"proving rules {_bar(done, of)}"))


def _bar(done: int, of: int, width: int = 20) -> str:
    """How far something is, as a bar."""
    filled = width * done // of
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{of}"


def _taken(used: Mapping[str, int]) -> str:
    """Which of the rules a plan uses."""
    return "the plan uses " + (", ".join(f"{name} x{n}" for name, n in used.items()) or "none of them")


def _rank_that_measures(args: argparse.Namespace) -> int:
    """One of the ranks that `--measure` starts."""
    from laminar.api import load_recipe, parallelize
    from laminar.launch.measure_plans import measure_as_a_rank
    from laminar.launch.rank import RankPlace

    place = RankPlace.of(os.environ)
    if place is None:
        raise PlanError("--measure-rank is for ranks that --measure starts", next="laminar plan RECIPE --measure")
    measure_as_a_rank(args.measure_rank, args.recipe, place, parallelize, load_recipe)
    return 0


def _made(args: argparse.Namespace) -> int:
    """A plan with a name, or from placements of some tensors, on a mesh."""
    from laminar.api import graph_of, plans

    cluster = cli_cost.cluster_from(args.cluster) if args.cluster else None
    if args.mesh is None and cluster is None:
        raise MeshError("neither a mesh nor a cluster", next="--mesh dp=2,tp=4, or --cluster 8xh100")
    mesh = parse_mesh(args.mesh) if args.mesh else Mesh({"dp": cluster.devices if cluster else 1})
    if cluster is not None:
        cluster.fits(mesh)
    with working("capturing", args.json):
        graph = graph_of(args.recipe, 1, args.precision, _kind(cluster))
    kept = {"recompute": args.recompute, "offload": args.offload}
    with working("planning", args.json):
        if args.place:
            plan = plans.placed(graph, mesh, parse_seeds(args.place), **kept)
        else:
            plan = plans.named(args.preset or "data", graph, mesh, **kept, gather_once=args.gather_once)
        account = replace(with_work(plan.account, graph, args.precision, cluster), recipe=args.recipe)
        plan = replace(plan, account=account)
        if cluster is not None:
            from laminar.forecast.step import with_prediction

            plan = with_prediction(graph, plan, cluster)
            if args.cluster.endswith(".json"):
                plan = replace(plan, account=replace(plan.account, cluster_file=args.cluster))
    if args.program:
        from laminar.lower.lower import lower

        if args.output:
            plan.save(args.output)
        program = lower(graph, plan)
        print(json.dumps({"plan": plan.hash, "program": program.to_json()}) if args.json else program)
        return 0
    return tell(
        args, plan, lambda: graph, cluster, {"graph": graph.hash, "mesh": mesh.to_json(), **plan.account.to_json()}
    )


def _stages(args: argparse.Namespace, mesh: Mesh | None) -> int:
    """A plan with stages, each spread over a mesh of its own."""
    from laminar.api import graph_of, plans

    if args.place or args.program:
        raise PlanError("--place and --program do not go with --stages", next="leave them out")
    cluster = cli_cost.cluster_from(args.cluster) if args.cluster else None
    with working("capturing", args.json):
        graph = graph_of(args.recipe, args.micro_batches, args.precision, _kind(cluster))
    inner: Any = mesh
    if mesh is not None and (args.preset or "").startswith("zero"):
        inner = partial(plans.zero, mesh=mesh, stage=int(args.preset[4:]))
    stages = int(args.stages) if args.stages.isdigit() else args.stages.split(",")
    window = None if args.window == "any" else int(args.window)
    differ = cluster if cluster is not None and len(cluster.parts) > 1 else None
    with working("planning", args.json):
        plan: Staged = plans.pipeline(
            graph,
            stages,
            args.micro_batches,
            args.virtual,
            inner,
            differ,
            schedule=args.schedule,
            window=window,
            stash=args.stash,
            couple=args.couple,
            recompute=args.recompute,
            offload=args.offload,
        )
        account = with_work(plan.account, graph, args.precision, cluster, args.micro_batches)
        account = replace(account, recipe=args.recipe)
        if cluster is not None:
            from laminar.forecast.pipeline_step import predict_staged

            account = replace(account, step=predict_staged(graph, plan, cluster).figures())
            if args.cluster.endswith(".json"):
                account = replace(account, cluster_file=args.cluster)
        plan = replace(plan, account=account)
    whole = partial(graph_of, args.recipe, 1, args.precision, _kind(cluster))
    return tell(args, plan, whole, cluster, {"graph": graph.hash, "ranks": plan.ranks, **plan.account.to_json()})


def _kind(cluster: Any) -> str:
    """The device that autocast is for."""
    return "cpu" if cluster is not None and cluster.on([0]).device.kind == "cpu" else "cuda"


def plan_options(p: argparse.ArgumentParser) -> None:
    """The options of `laminar plan`."""
    p.epilog, p.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    p.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="the machines: a file from `laminar profile`, or a name such as 8xh100; alone it means: search",
    )
    p.add_argument("-o", "--output", metavar="FILE", help="save the plan")
    p.add_argument(
        "--exact",
        nargs="?",
        const="",
        metavar="units=8,slices=1",
        help="with --cluster: predict steps in exact mode, for each way in which processes may store weights and state",
    )
    p.add_argument(
        "--precision",
        default="f32",
        choices=PRECISIONS,
        help="precision to plan for, as in `laminar train` (default: f32, the model's own)",
    )
    search_options(p)
    questions(p)
    placement_options(p)
    pipeline_options(p)


def search_options(p: argparse.ArgumentParser) -> None:
    """What a search is asked for."""
    add = p.add_argument_group("search").add_argument
    add(
        "--memory",
        type=memory_bytes,
        metavar="SIZE",
        help=f"memory limit per rank, in {MEMORY} (default: the device's memory less the margin)",
    )
    add("--margin", type=float, metavar="SHARE", help="share of a device's memory left free (default: 0.08)")
    add(
        "--batch",
        choices=["fixed", "free"],
        help="fixed: the recipe's batch (default); free: that or an equal part of it, whichever trains the most "
        "samples per second",
    )
    add("--budget", type=float, metavar="S", help="CPU seconds to spend on the search (default: 10)")
    add(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=N",
        help="fix a number (dp, tp, stages, micro_batches, virtual, zero, recompute, offload) or a placement "
        "('PATTERN=S(0)', 'PATTERN=tp:S(0)'); may be repeated",
    )
    add(
        "--only",
        metavar="WORDS",
        help="what the search may use: data, tensor, pipeline, zero, recompute, offload, "
        "rewrite, separated by commas (default: all)",
    )
    add(
        "--proposals",
        type=int,
        default=0,
        metavar="N",
        help="afterwards try N random changes to the best plan (default: 0; 300000 take about 10 s)",
    )
    add(
        "--rules",
        metavar="FILE",
        help="also search with the rewrite rules of a TASO or FlexFlow JSON file: those that hold on random numbers",
    )
    add("--compare", action="store_true", help="show every candidate that was evaluated")
    add(
        "--measure",
        action="store_true",
        help="run the best candidates and the named plans on this machine, and take the fastest",
    )
    add("--measure-rank", help=argparse.SUPPRESS)


def placement_options(p: argparse.ArgumentParser) -> None:
    """A plan without a search."""
    made = p.add_argument_group("a plan of your own")
    add = made.add_argument
    add("--mesh", metavar="MESH", help="axes and sizes, such as dp=2,tp=4 (default with --preset: dp over the cluster)")
    add(
        "--preset",
        type=plan_name,
        choices=PRESET_NAMES,
        help="a plan by name, the same names as in `laminar train --plan` (default: data)",
    )
    add(
        "--gather-once",
        action="store_true",
        help="with zero3: keep parameters gathered from forward until backward, which is faster and takes more memory",
    )
    add(
        "--place",
        action="append",
        default=[],
        metavar="PATTERN=AXIS:S(0)",
        help="place tensors by name pattern, the rest filled in at minimum cost; may be repeated",
    )
    hidden(made, "--seed", "--place", action="append")
    add(
        "--recompute",
        action="append",
        default=[],
        metavar="PATTERN",
        help="recompute in backward what these modules (blocks.*) or values (%%gelu.*) hold, instead of keeping it; "
        "may be repeated",
    )
    add(
        "--offload",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep what these modules or values hold in host memory until backward; may be repeated",
    )
    add("--program", action="store_true", help="print the program that every rank runs")


def pipeline_options(p: argparse.ArgumentParser) -> None:
    """A plan with stages, without a search."""
    made = p.add_argument_group("a pipeline of your own")
    add = made.add_argument
    add(
        "--stages",
        metavar="N",
        help="cut the model into N stages of equal work, or where these modules begin "
        "(patterns, separated by commas); --mesh is then the mesh of each stage",
    )
    add("--micro-batches", type=int, default=4, metavar="M", help="micro-batches per batch (default: 4)")
    hidden(made, "--microbatches", "--micro-batches", type=int)
    add("--virtual", type=int, default=1, metavar="V", help="virtual stages per place, taking turns (default: 1)")
    add("--schedule", choices=SCHEDULES, help="order of micro-batches (default: 1f1b, or interleaved with --virtual)")
    add("--window", default="0", metavar="W", help="how far ahead of schedule a stage may run, or 'any' (default: 0)")
    add(
        "--stash",
        type=float,
        default=1.0,
        metavar="X",
        help="micro-batches in flight, as a multiple of what the schedule needs (default: 1)",
    )
    add(
        "--couple",
        type=couple_word,
        choices=["microbatch"],
        metavar="micro-batch",
        help="let ops that mix the samples of a batch see one micro-batch at a time",
    )
