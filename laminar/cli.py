"""The command line: `laminar capture | profile | plan | explain | simulate | verify | train | diff`.

Every verb prints for people by default and JSON with `--json`, shows a progress line when it takes
longer than two seconds, exits 0 only on success, and reports errors without a traceback unless
`--debug` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from laminar import cli_cost
from laminar.errors import LaminarError, MeshError, PlanError, RecipeError
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import parse
from laminar.ir.staged import SCHEDULES, Staged, load_plan

EPILOG = """\
examples
  laminar capture examples/gpt.py:tiny --report
  laminar plan    examples/gpt.py:tiny --mesh dp=2,tp=2 --preset tensor_parallel -o plan.json
  laminar plan    examples/gpt.py:tiny --mesh tp=2 --seed 'blocks.*up.weight=tp:S(0)' -o plan.json
  laminar plan    examples/gpt.py:tiny --stages 2 --microbatches 4 -o plan.json
  laminar explain plan.json
  laminar profile  -o here.json
  laminar simulate plan.json --cluster here.json --png step.png
  laminar verify  examples/gpt.py:tiny --plan plan.json
  laminar train   examples/gpt.py:tiny --workers 2

A recipe is a Python function that returns laminar.Recipe(...), named path/to/file.py:function.
"""

WHOLE = "computed whole on every rank"
PRESETS = ["data_parallel", "zero1", "zero2", "zero3", "tensor_parallel"]


@contextlib.contextmanager
def working(what: str, quiet: bool) -> Iterator[None]:
    """A spinner with seconds on stderr, from the third second on, where someone is watching."""
    done = threading.Event()

    def spin() -> None:
        start = time.monotonic()
        for mark in itertools.cycle("|/-\\"):
            if done.wait(0.2):
                return
            passed = time.monotonic() - start
            if passed > 2:
                sys.stderr.write(f"\r{mark} {what} {passed:.0f} s")
                sys.stderr.flush()

    thread = threading.Thread(target=spin, daemon=True)
    if not quiet and sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
            sys.stderr.write("\r\033[K")


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


def _captured(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Recipe, model, first batch and graph; on meta where only the graph is wanted."""
    from laminar.api import captured

    with working("capturing", args.json):
        return captured(args.recipe, whole=args.verb == "verify")


def do_capture(args: argparse.Namespace) -> int:
    """What was captured, and which ops have no rule."""
    from laminar.cost.work import flops
    from laminar.rules.notation import call_of
    from laminar.rules.table import rule_for

    _, _, _, graph = _captured(args)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(graph.to_json(), file)
    calls = [(n, call_of(n, graph.specs)) for n in graph.nodes]
    total = sum(flops(c) for _, c in calls) or 1.0
    probed = dict(graph.probed)
    rows = [
        {
            "op": n.op, "node": n.name, "where": n.where, "share": flops(c) / total,
            "how": f"probed, {len(found)} signatures" if (found := probed.get(n.name)) else WHOLE,
        }
        for n, c in calls
        if rule_for(c) is None
    ]  # fmt: skip
    params = graph.of_kind("param")
    summary = {
        "graph": graph.hash,
        "nodes": len(graph.nodes),
        "phases": {p: sum(n.phase == p for n in graph.nodes) for p in ("forward", "recompute", "backward")},
        "parameters": sum(i.spec.numel for i in params),
        "parameter_tensors": len(params),
        "batch": {i.name: str(i.spec) for i in graph.of_kind("batch")},
        "constants": len(graph.constants),
        "flops": total,
        "without_rule": rows,
    }
    if args.json:
        print(json.dumps(summary))
        return 0
    print(f"graph {graph.hash[:12]}: {len(graph.nodes)} ops "
          f"({', '.join(f'{v} {k}' for k, v in summary['phases'].items() if v)}), "
          f"{summary['parameters']:,} parameters in {len(params)} tensors, {total:.3g} operations a step")  # fmt: skip
    for i in graph.of_kind("batch"):
        print(f"  {i.name}: {i.spec}")
    if args.report:
        print("parameters and buffers")
        for i in graph.inputs:
            if i.kind in ("param", "buffer"):
                tied = f"  (also {', '.join(i.aliases)})" if i.aliases else ""
                print(f"  {i.kind:<6} {i.name}: {i.spec}{tied}")
        print("every op has a rule" if not rows else "ops without a rule")
        for row in rows:
            print(f"  {row['op']:<32} {row['share']:6.2%} of the work  {row['how']}  {row['where']}")
    return 0


def do_plan(args: argparse.Namespace) -> int:
    """Make a plan from a preset or seeds."""
    from laminar.api import plans

    cluster = cli_cost.cluster_of(args.cluster) if args.cluster else None
    if args.mesh is None and cluster is None and not args.stages:
        raise MeshError("neither a mesh nor a cluster", next="--mesh dp=2,tp=4, or --cluster 8xh100")
    mesh = parse_mesh(args.mesh) if args.mesh else Mesh({"dp": cluster.devices if cluster else 1})
    if cluster is not None and not args.stages:
        cluster.fits(mesh)
    if args.stages:
        return _plan_stages(args, mesh if args.mesh else None)
    _, _, _, graph = _captured(args)
    with working("planning", args.json):
        if args.seed:
            plan = plans.seeded(graph, mesh, parse_seeds(args.seed), recompute=args.recompute)
        elif args.preset.startswith("zero"):
            plan = plans.zero(graph, mesh, int(args.preset[4:] or 3), recompute=args.recompute)
        elif args.preset == "tensor_parallel":
            plan = plans.tensor_parallel(graph, mesh, recompute=args.recompute)
        else:
            plan = plans.data_parallel(graph, mesh, recompute=args.recompute)
        plan = replace(plan, account={**plan.account, "recipe": args.recipe})
        if cluster is not None:
            from laminar.forecast import accounted

            plan = accounted(graph, plan, cluster)
            if args.cluster.endswith(".json"):
                plan = replace(plan, account={**plan.account, "cluster_file": args.cluster})
    if args.output:
        plan.save(args.output)
    if args.program:
        from laminar.lower.lower import lower

        program = lower(graph, plan)
        print(json.dumps({"plan": plan.hash, "program": program.to_json()}) if args.json else program)
    elif args.json:
        print(json.dumps({"plan": plan.hash, "graph": graph.hash, "mesh": mesh.to_json(), **plan.account}))
    else:
        print(plan.explain())
        if args.output:
            print(f"\nwritten to {args.output}")
    return 0


def _plan_stages(args: argparse.Namespace, mesh: Mesh | None) -> int:
    """A plan with stages, each spread over a mesh of its own."""
    from laminar.api import captured, plans

    if args.seed or args.program:
        raise PlanError("--seed and --program do not go with --stages", next="leave them out")
    with working("capturing", args.json):
        _, _, _, graph = captured(args.recipe, parts=args.microbatches)
    inner: Any = mesh
    if mesh is not None and args.preset.startswith("zero"):
        inner = partial(plans.zero, mesh=mesh, stage=int(args.preset[4:] or 3))
    stages = int(args.stages) if args.stages.isdigit() else args.stages.split(",")
    window = None if args.window == "any" else int(args.window)
    with working("planning", args.json):
        plan = plans.pipeline(
            graph, stages, args.microbatches, args.virtual, inner, schedule=args.schedule, window=window,
            stash=args.stash, couple=args.couple, recompute=args.recompute,
        )  # fmt: skip
        account = {**plan.account, "recipe": args.recipe}
        if args.cluster:
            from laminar.forecast import predict_staged

            cluster = cli_cost.cluster_of(args.cluster)
            account |= predict_staged(graph, plan, cluster).account()
            account |= {"cluster_file": args.cluster} if args.cluster.endswith(".json") else {}
        plan = replace(plan, account=account)
    if args.output:
        plan.save(args.output)
    print(json.dumps({"plan": plan.hash, "graph": graph.hash, "ranks": plan.ranks, **plan.account})
          if args.json else plan.explain())  # fmt: skip
    if args.output and not args.json:
        print(f"\nwritten to {args.output}")
    return 0


def do_explain(args: argparse.Namespace) -> int:
    """What a saved plan does and why."""
    plan = load_plan(args.plan)
    print(json.dumps({"plan": plan.hash, **plan.to_json()}) if args.json else plan.explain())
    return 0


def do_verify(args: argparse.Namespace) -> int:
    """A plan against one device."""
    from laminar.api import load_recipe, verify

    plan = load_plan(args.plan)
    if isinstance(plan, Staged) and args.ranks != "inprocess":
        raise PlanError("plans with stages are verified in process", next="leave out --ranks")
    with working("capturing and running", args.json):
        recipe = load_recipe(args.recipe)
        batches = list(itertools.islice(iter(recipe.data()), args.batches))
        if not batches:
            raise RecipeError(f"{args.recipe} gives no batch", next="data() must yield at least one")
        report = verify(recipe.model(), recipe.loss, batches, plan, args.ranks, args.dtype)
    if args.json:
        fields = ("ok", "max_rel_error", "tolerance", "worst", "losses", "first_difference")
        print(json.dumps({key: getattr(report, key) for key in fields}))
    else:
        print(report)
    return 0 if report.ok else 1


def do_train(args: argparse.Namespace) -> int:
    """Start the ranks and watch them; or be one of them, where the environment says so."""
    from laminar.api import load_recipe, train
    from laminar.launch import command

    args.mesh = parse_mesh(args.mesh) if args.mesh else None
    return command.run(args, train, load_recipe)


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    from laminar.launch import command

    top = argparse.ArgumentParser("laminar", description="Train a PyTorch model on many devices as if they were one.",
                                  epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(name: str, run: Callable[[argparse.Namespace], int], help_: str, recipe: bool) -> argparse.ArgumentParser:
        p = verbs.add_parser(name, help=help_, description=help_ + ".")
        if recipe:
            p.add_argument("recipe", help="path/to/file.py:function")
        p.add_argument("--json", action="store_true", help="print JSON")
        p.add_argument("--debug", action="store_true", help="show tracebacks")
        p.set_defaults(run=run)
        return p

    p = verb("capture", do_capture, "write down forward, loss and backward of one step as a graph", True)
    p.add_argument(
        "--report", action="store_true", help="list names, and ops without a rule with their share of the work"
    )
    p.add_argument("-o", "--output", metavar="FILE", help="save the graph as JSON")
    p = verb("plan", do_plan, "decide how every tensor lies on a mesh", True)
    p.add_argument("--mesh", help="axes and sizes, such as dp=2,tp=4 (default: dp over the cluster)")
    p.add_argument("--cluster", metavar="C", help="predict seconds and bytes on it: a file of `laminar profile`, or a "
                   "name such as 8xh100")  # fmt: skip
    p.add_argument("--preset", default="data_parallel", choices=PRESETS,
                   help="a plan with a name (default: data_parallel)")  # fmt: skip
    p.add_argument("--seed", action="append", default=[], metavar="PATTERN=AXIS:S(0)",
                   help="place tensors by name pattern, complete the rest at least cost; may be repeated")  # fmt: skip
    p.add_argument("--recompute", action="append", default=[], metavar="PATTERN",
                   help="make again in backward what these modules (blocks.*) or values (%%gelu.*) hold; may be "
                   "repeated")  # fmt: skip
    p.add_argument("--program", action="store_true", help="print the program every rank runs")
    p.add_argument("--stages", metavar="N", help="cut the model into N stages of equal work at ranks of their own, or "
                   "where these modules begin (patterns, with commas); --mesh is then that of each stage")  # fmt: skip
    p.add_argument("--microbatches", type=int, default=4, metavar="M", help="per step, with --stages (default: 4)")
    p.add_argument(
        "--virtual", type=int, default=1, metavar="V", help="stages that take turns at each place (default: 1)"
    )
    p.add_argument("--schedule", choices=SCHEDULES, help="order of micro-batches (default: 1f1b, or interleaved)")
    p.add_argument("--window", default="0", metavar="W", help="how far a place may leave the order; any (default: 0)")
    p.add_argument("--stash", type=float, default=1.0, metavar="X",
                   help="how many times as many micro-batches as needed may be under way (default: 1)")  # fmt: skip
    p.add_argument("--couple", choices=["microbatch"],
                   help="let ops that couple samples see one micro-batch at a time")  # fmt: skip
    p.add_argument("-o", "--output", metavar="FILE", help="save the plan")
    cli_cost.profile_options(verb("profile", cli_cost.do_profile, "measure this machine's ops and links", False))
    p = verb("explain", do_explain, "say what a saved plan does and why", False)
    p.add_argument("plan", help="a plan file")
    cli_cost.simulate_options(verb("simulate", cli_cost.do_simulate, "predict a step of a plan, on any cluster", False))
    p = verb("verify", do_verify, "run a plan against one device; exit 1 if it differs", True)
    p.add_argument("--plan", required=True, metavar="FILE", help="a plan file")
    p.add_argument("--ranks", default="inprocess", choices=["inprocess", "processes"],
                   help="all ranks in lock-step here, or one Gloo process each")  # fmt: skip
    p.add_argument("--dtype", default="f64", choices=["f64", "f32"], help="precision of the comparison (default: f64)")
    p.add_argument("--batches", type=int, default=1, help="how many batches (default: 1)")
    command.options(verb("train", do_train, "train a recipe on this machine's ranks", True))
    cli_cost.diff_options(verb("diff", cli_cost.do_diff, "say where a prediction and a recorded run part", False))
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit code."""
    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        return int(args.run(args))
    except LaminarError as error:
        if args.debug:
            raise
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except Exception as error:
        if args.debug:
            raise
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        print(f"{type(error).__name__}: {error}\n  next  --debug shows the traceback", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
