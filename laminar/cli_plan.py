"""Plans from the command line: `laminar plan` finds one for a cluster, or makes the one it is told to.

With a cluster and nothing else, it searches: every placement, meshes, stages, micro-batches, ZeRO and recompute, and
says how far from the best the plan can be. With a mesh, a preset, seeds or stages it makes that plan. Either way the
plan can be asked: why a tensor lies as it does, what if something were different, what other systems call it, and what
it looks like. `laminar explain` asks the same of a plan that was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

from laminar import cli_cost
from laminar.cli_ask import PINS, parse_changes, questions, told, working
from laminar.errors import MeshError, PlanError
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.sbp import parse
from laminar.ir.staged import SCHEDULES, Staged, plan_of
from laminar.launch.command import PRECISIONS
from laminar.planner.report.throughput import with_work

PRESETS = ["data_parallel", "zero1", "zero2", "zero3", "tensor_parallel"]
EXAMPLES = """\
examples
  laminar plan examples/gpt.py:deep --cluster 8xh100 -o plan.json            search
  laminar plan examples/gpt.py:deep --cluster 64xh100 --memory 40 --compare  at most 40 GB a rank, and what lost
  laminar plan examples/gpt.py:deep --cluster 8xh100 --batch free            the recipe's batch, or a part of it
  laminar plan examples/gpt.py:deep --cluster 8xh100 --precision bf16 --tokens 1e12 --price 2.5     days and money
  laminar plan examples/gpt.py:deep --cluster 8xh100 --pin tp=8 --only tensor
  laminar plan examples/gpt.py:deep --cluster 8xh100 --pin 'blocks.*.mlp.up.weight=S(0)' --price 2.5
  laminar plan examples/gpt.py:deep --cluster 8xh100 --why blocks.3.mlp.down.weight --what-if 'memory=40; link=0.5'
  laminar plan examples/gpt.py:deep --cluster 8xh100 --flags megatron --png plan.png
  laminar plan examples/gpt.py:small --cluster here.json --measure           the finalists, run on this machine
  laminar plan examples/gpt.py:tiny --mesh dp=2,tp=2 --preset tensor_parallel -o plan.json
  laminar plan examples/gpt.py:tiny --mesh tp=2 --seed 'blocks.*up.weight=tp:S(0)' -o plan.json
  laminar plan examples/gpt.py:tiny --stages 2 --microbatches 4 -o plan.json

clusters: a file of `laminar profile`, or [NODESx][COUNTx]DEVICE[@FABRIC[+FABRIC]], such as 8xh100, 16x4xa100-80g,
2xcpu. What can be pinned: dp, tp, stages, microbatches, virtual, zero, recompute and offload (0: nothing, 1: what
memory asks for), and how tensors lie.
What can be asked: memory (GB), margin, devices, cluster, link (a factor), only, batch (free), budget,
and any pin (tp=any lifts it).
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
    """`PATTERN=axis:S(0)` (several axes separated by `;`) as seeds."""
    seeds: dict[str, dict[str, Any]] = {}
    for text in texts:
        pattern, equals, rest = text.partition("=")
        if not equals:
            raise PlanError(f"{text!r} is not a seed", next="write 'pattern=axis:S(0)', for example 'batch.*=dp:S(0)'")
        for item in rest.split(";"):
            axis, colon, placement = item.partition(":")
            if not colon:
                raise PlanError(f"{item!r} in seed {text!r} names no axis", next="write 'pattern=axis:S(0)'")
            seeds.setdefault(pattern, {})[axis.strip()] = parse(placement.strip())
    return seeds


def parse_pins(texts: list[str]) -> dict[str, int | str]:
    """`tp=8`, several with commas, or `PATTERN=S(0)` as pins; the names are checked by the search."""
    pins: dict[str, int | str] = {}
    for text in texts:
        parts = text.split(",") if re.fullmatch(r"[^()]*", text) else [text]
        for part in parts:
            name, equals, value = (x.strip() for x in part.partition("="))
            if not equals or not value or (name in PINS and not value.isdigit()):
                raise PlanError(f"{part!r} pins nothing",
                                next="write --pin tp=8, --pin stages=4,zero=1 or --pin 'PATTERN=S(0)'")  # fmt: skip
            pins[name] = int(value) if value.isdigit() else value
    return pins


def do_plan(args: argparse.Namespace) -> int:
    """Find a plan, or make one from a preset or seeds."""
    if args.measure_rank:
        return _rank_that_measures(args)
    for text in args.what_if:
        parse_changes(text)  # before anything is searched
    told = args.mesh or args.preset or args.seed
    if args.stages:
        return _stages(args, parse_mesh(args.mesh) if args.mesh else None)
    if args.cluster and not told:
        return _search(args)
    for name in ("memory", "margin", "batch", "budget", "pin", "only", "proposals", "compare", "measure"):
        if getattr(args, name) or (name == "margin" and args.margin is not None):
            raise PlanError(f"--{name} is for a search", next="leave out --mesh, --preset, --seed and --stages")
    return _made(args)


def _search(args: argparse.Namespace) -> int:
    """The best plan for a cluster."""
    from laminar.api import graph_of, plan
    from laminar.cache import kept
    from laminar.planner.search.earlier_plans import across_commands

    if args.recompute or args.offload or args.program:
        raise PlanError("--recompute, --offload and --program do not go with a search",
                        next="--pin recompute=1, --pin offload=1, or name a mesh")  # fmt: skip
    cluster = cli_cost.cluster_of(args.cluster)
    if args.measure and args.batch == "free":
        raise PlanError("--measure runs the recipe's own batches", next="leave out --batch free")
    if args.measure:
        from laminar.launch.measure_plans import refuse_elsewhere, taken

        refuse_elsewhere(cluster)
    with working("capturing", args.json):
        graph = graph_of(args.recipe, 1, args.precision, _kind(cluster))
    asked: dict[str, Any] = {
        "memory_bytes": args.memory * 1e9 if args.memory else None,
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
                return plan(graph, cluster, **asked, progress=lambda text: say(f"searching, {text}"))

        about = {"graph": graph.hash, "cluster": cluster.hash, **asked}
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
    return told(args, found, lambda: graph, cluster, {"graph": graph.hash, **account.to_json()})


def _rank_that_measures(args: argparse.Namespace) -> int:
    """One of the ranks that `--measure` starts."""
    from laminar.api import load_recipe, parallelize
    from laminar.launch.measure_plans import be_a_rank
    from laminar.launch.rank import Place

    place = Place.of(os.environ)
    if place is None:
        raise PlanError("--measure-rank is for ranks that --measure starts", next="laminar plan RECIPE --measure")
    be_a_rank(args.measure_rank, args.recipe, place, parallelize, load_recipe)
    return 0


def _made(args: argparse.Namespace) -> int:
    """A plan with a name, or from seeds, on a mesh."""
    from laminar.api import graph_of, plans

    cluster = cli_cost.cluster_of(args.cluster) if args.cluster else None
    if args.mesh is None and cluster is None:
        raise MeshError("neither a mesh nor a cluster", next="--mesh dp=2,tp=4, or --cluster 8xh100")
    mesh = parse_mesh(args.mesh) if args.mesh else Mesh({"dp": cluster.devices if cluster else 1})
    if cluster is not None:
        cluster.fits(mesh)
    with working("capturing", args.json):
        graph = graph_of(args.recipe, 1, args.precision, _kind(cluster))
    preset, kept = args.preset or "data_parallel", {"recompute": args.recompute, "offload": args.offload}
    with working("planning", args.json):
        if args.seed:
            plan = plans.seeded(graph, mesh, parse_seeds(args.seed), **kept)
        elif preset.startswith("zero"):
            plan = plans.zero(graph, mesh, int(preset[4:] or 3), **kept, gather_once=args.gather_once)
        elif preset == "tensor_parallel":
            plan = plans.tensor_parallel(graph, mesh, **kept)
        else:
            plan = plans.data_parallel(graph, mesh, **kept)
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
    return told(
        args, plan, lambda: graph, cluster, {"graph": graph.hash, "mesh": mesh.to_json(), **plan.account.to_json()}
    )


def _stages(args: argparse.Namespace, mesh: Mesh | None) -> int:
    """A plan with stages, each spread over a mesh of its own."""
    from laminar.api import graph_of, plans

    if args.seed or args.program:
        raise PlanError("--seed and --program do not go with --stages", next="leave them out")
    cluster = cli_cost.cluster_of(args.cluster) if args.cluster else None
    with working("capturing", args.json):
        graph = graph_of(args.recipe, args.microbatches, args.precision, _kind(cluster))
    inner: Any = mesh
    if mesh is not None and (args.preset or "").startswith("zero"):
        inner = partial(plans.zero, mesh=mesh, stage=int(args.preset[4:] or 3))
    stages = int(args.stages) if args.stages.isdigit() else args.stages.split(",")
    window = None if args.window == "any" else int(args.window)
    differ = cluster if cluster is not None and len(cluster.parts) > 1 else None
    with working("planning", args.json):
        plan: Staged = plans.pipeline(
            graph, stages, args.microbatches, args.virtual, inner, differ, schedule=args.schedule, window=window,
            stash=args.stash, couple=args.couple, recompute=args.recompute, offload=args.offload,
        )  # fmt: skip
        account = with_work(plan.account, graph, args.precision, cluster, args.microbatches)
        account = replace(account, recipe=args.recipe)
        if cluster is not None:
            from laminar.forecast.pipeline_step import predict_staged

            account = replace(account, step=predict_staged(graph, plan, cluster).figures())
            if args.cluster.endswith(".json"):
                account = replace(account, cluster_file=args.cluster)
        plan = replace(plan, account=account)
    whole = partial(graph_of, args.recipe, 1, args.precision, _kind(cluster))
    return told(args, plan, whole, cluster, {"graph": graph.hash, "ranks": plan.ranks, **plan.account.to_json()})


def _kind(cluster: Any) -> str:
    """The device that autocast is for."""
    return "cpu" if cluster is not None and cluster.on([0]).device.kind == "cpu" else "cuda"


def options(p: argparse.ArgumentParser) -> None:
    """The options of `laminar plan`."""
    p.epilog, p.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    p.add_argument("--cluster", metavar="C", help="the machine: a file of `laminar profile`, or a name such as 8xh100; "
                   "alone it means: search")  # fmt: skip
    p.add_argument("-o", "--output", metavar="FILE", help="save the plan")
    p.add_argument("--precision", default="f32", choices=PRECISIONS,
                   help="what is priced, as in `laminar train` (default: f32, which is as the model is)")  # fmt: skip
    search = p.add_argument_group("search")
    search.add_argument("--memory", type=float, metavar="GB", help="what a rank may fill (default: the device's memory "
                        "less the margin)")  # fmt: skip
    search.add_argument("--batch", choices=["fixed", "free"],
                        help="the recipe's batch (default), or that or an equal part of it, whichever trains most "
                        "samples a second")  # fmt: skip
    search.add_argument("--margin", type=float, metavar="SHARE",
                        help="share of a device's memory that stays free (default: 0.08)")  # fmt: skip
    search.add_argument(
        "--proposals",
        type=int,
        default=0,
        metavar="N",
        help="try N random moves around the best plan, too: 300000 take some 10 s",
    )
    search.add_argument("--budget", type=float, metavar="S", help="processor seconds to spend (default: 10)")
    search.add_argument("--pin", action="append", default=[], metavar="NAME=N",
                        help="fix a number (dp, tp, stages, microbatches, virtual, zero, recompute, offload), or how "
                        "tensors lie ('PATTERN=S(0)', 'PATTERN=tp:S(0)'); may be repeated")  # fmt: skip
    search.add_argument("--only", metavar="DIMENSIONS", help="what may be used: data, tensor, pipeline, zero, "
                        "recompute, offload, rewrite, with commas (default: all)")  # fmt: skip
    search.add_argument("--compare", action="store_true", help="show all plans that were looked at")
    search.add_argument("--measure", action="store_true",
                        help="run the finalists and data parallel on this machine, and take the fastest")  # fmt: skip
    search.add_argument("--measure-rank", help=argparse.SUPPRESS)
    questions(p)
    made = p.add_argument_group("a plan of your own")
    made.add_argument("--mesh", help="axes and sizes, such as dp=2,tp=4 (with --preset alone: dp over the cluster)")
    made.add_argument("--preset", choices=PRESETS, help="a plan with a name (default: data_parallel)")
    made.add_argument("--seed", action="append", default=[], metavar="PATTERN=AXIS:S(0)",
                      help="place tensors by name pattern, the rest at least cost; may be repeated")  # fmt: skip
    made.add_argument("--recompute", action="append", default=[], metavar="PATTERN",
                      help="make again in backward what these modules (blocks.*) or values (%%gelu.*) hold; may be "
                      "repeated")  # fmt: skip
    made.add_argument("--offload", action="append", default=[], metavar="PATTERN",
                      help="keep what these modules or values hold in the host's memory until backward; may be "
                      "repeated")  # fmt: skip
    made.add_argument("--gather-once", action="store_true",
                      help="with zero3: what forward has gathered of parameters stays for backward, which takes less "
                      "time and more memory")  # fmt: skip
    made.add_argument("--program", action="store_true", help="print the program every rank runs")
    made.add_argument("--stages", metavar="N", help="cut the model into N stages of equal work at ranks of their own, "
                      "or where these modules begin (patterns, with commas); --mesh is then that of each "
                      "stage")  # fmt: skip
    made.add_argument("--microbatches", type=int, default=4, metavar="M", help="per step, with --stages (default: 4)")
    made.add_argument("--virtual", type=int, default=1, metavar="V",
                      help="stages that take turns at each place (default: 1)")  # fmt: skip
    made.add_argument("--schedule", choices=SCHEDULES, help="order of micro-batches (default: 1f1b, or interleaved)")
    made.add_argument("--window", default="0", metavar="W",
                      help="how far a place may leave the order; any (default: 0)")  # fmt: skip
    made.add_argument("--stash", type=float, default=1.0, metavar="X",
                      help="how many times as many micro-batches as needed may be under way (default: 1)")  # fmt: skip
    made.add_argument("--couple", choices=["microbatch"],
                      help="let ops that couple samples see one micro-batch at a time")  # fmt: skip
