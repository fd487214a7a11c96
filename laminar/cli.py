"""The command line: `laminar capture | profile | plan | explain | simulate | verify | train | checkpoint | diff`.

Every verb prints for people by default and JSON with `--json`, shows a progress line when it takes
longer than two seconds, exits 0 only on success, and reports errors without a traceback unless
`--debug` is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from laminar import cli_ask, cli_checkpoint, cli_cost, cli_plan
from laminar.cli_ask import working
from laminar.cli_plan import parse_mesh
from laminar.errors import LaminarError, PlanError, RecipeError
from laminar.ir.graph import Graph
from laminar.ir.plans.staged import Staged, load_plan
from laminar.launch.vocabulary import PRECISIONS

EPILOG = """\
examples
  laminar capture examples/gpt.py:tiny --report
  laminar plan    examples/gpt.py:deep --cluster 8xh100 -o plan.json
  laminar plan    examples/gpt.py:tiny --mesh dp=2,tp=2 --preset tensor -o plan.json
  laminar explain plan.json
  laminar profile  -o here.json
  laminar simulate plan.json --cluster here.json --png step.png
  laminar verify  examples/gpt.py:tiny --plan plan.json
  laminar verify  examples/gpt.py:tiny --exact --processes 3
  laminar train   examples/gpt.py:tiny --workers 2
  laminar checkpoint ls runs/gpt-tiny-20300102-030405/checkpoint

A recipe is a Python function that returns laminar.Recipe(...), named path/to/file.py:function.
"""

COMPUTED_WHOLE = "computed whole on every rank"


def _captured(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Recipe, model, first batch and graph; on meta where only the graph is wanted."""
    from laminar.api import captured

    with working("capturing", args.json):
        return captured(args.recipe, whole=args.verb == "verify")


def do_capture(args: argparse.Namespace) -> int:
    """What was captured, and which ops have no rule."""
    from laminar.cost.ops.eager import as_they_are, shown_part
    from laminar.cost.ops.roofline import flops
    from laminar.rules.notation import call_of
    from laminar.rules.ops.table import rule_for

    _, _, _, graph = _captured(args)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(graph.to_json(), file)
    calls = [(n, call_of(n, graph.specs)) for n in graph.nodes]
    total = sum(flops(c) for _, c in calls) or 1.0
    probed = dict(graph.probed)
    rows = [
        {
            "op": n.op,
            "node": n.name,
            "where": n.where,
            "share": flops(c) / total,
            "how": f"probed, {len(found)} signatures" if (found := probed.get(n.name)) else COMPUTED_WHOLE,
        }
        for n, c in calls
        if rule_for(c) is None
    ]
    eager = as_they_are(graph)
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
        "eager": eager,
    }
    if args.json:
        print(json.dumps(summary))
        return 0
    print(
        f"graph {graph.hash[:12]}: {len(graph.nodes)} ops "
        f"({', '.join(f'{v} {k}' for k, v in summary['phases'].items() if v)}), "
        f"{summary['parameters']:,} parameters in {len(params)} tensors, {total:.3g} operations a step"
    )
    for i in graph.of_kind("batch"):
        print(f"  {i.name}: {i.spec}")
    if args.report:
        _print_tensors_and_ops(graph, rows, [shown_part(row) for row in eager])
    return 0


def _print_tensors_and_ops(graph: Graph, without_rule: list[dict[str, Any]], eager: list[str]) -> None:
    """All tensors that live from step to step, and the ops that not everything is known about."""
    print("parameters and buffers")
    for i in graph.inputs:
        if i.kind in ("param", "buffer"):
            tied = f"  (also {', '.join(i.aliases)})" if i.aliases else ""
            print(f"  {i.kind:<6} {i.name}: {i.spec}{tied}")
    print("every op has a rule" if not without_rule else "ops without a rule")
    for row in without_rule:
        print(f"  {row['op']:<32} {row['share']:6.2%} of the work  {row['how']}  {row['where']}")
    if eager:
        print("parts that run as they are, in plain PyTorch")
    for told in eager:
        print(f"  {told}")


def do_verify(args: argparse.Namespace) -> int:
    """A plan against one device."""
    from laminar.api import for_plan, load_recipe, verify

    if args.exact is not None:
        return _verify_exact(args)
    if args.plan is None:
        raise PlanError("nothing to verify", next="--plan FILE against one device, or --exact for one hash")
    plan = load_plan(args.plan)
    if isinstance(plan, Staged) and args.ranks != "inprocess":
        raise PlanError("plans with stages are verified in process", next="leave out --ranks")
    with working("capturing and running", args.json):
        recipe = load_recipe(args.recipe)
        batches = list(itertools.islice(iter(recipe.data()), args.batches))
        if not batches:
            raise RecipeError(f"{args.recipe} gives no batch", next="data() must yield at least one")
        batches = [for_plan(plan, batch) for batch in batches]
        report = verify(recipe.model(), recipe.loss, batches, plan, args.ranks, args.dtype)
    if args.json:
        fields = (
            "ok",
            "max_rel_error",
            "tolerance",
            "worst",
            "losses",
            "first_difference",
            "eager_checked",
            "eager_tolerance",
            "eager_differs",
        )
        print(json.dumps({key: getattr(report, key) for key in fields}))
    else:
        if plan.account.batch is not None:
            print(f"the plan is for batches of {plan.account.batch.samples} samples: the first ones of each")
        print(report)
    return 0 if report.ok else 1


def _verify_exact(args: argparse.Namespace) -> int:
    """One hash however a recipe is hosted."""
    from laminar.api import verify_exact

    with working("training in two hostings", args.json):
        how = (args.processes, args.steps, args.seed, args.precision, args.micro_batches)
        report = verify_exact(args.recipe, args.exact, *how)
    print(json.dumps(asdict(report)) if args.json else report)
    return 0 if report.ok else 1


def do_train(args: argparse.Namespace) -> int:
    """Start the ranks and watch them; or be one of them, where the environment says so."""
    from laminar.api import load_recipe, train
    from laminar.launch import command

    args.mesh = parse_mesh(args.mesh) if args.mesh else None
    return command.run_train(args, train, load_recipe)


def verify_options(p: argparse.ArgumentParser) -> None:
    """What `laminar verify` compares: a plan with one device, or exact runs with each other."""
    p.add_argument("--plan", metavar="FILE", help="a plan file, to be compared with one device")
    p.add_argument(
        "--exact",
        nargs="?",
        const="",
        metavar="units=8,slices=1,stages=1",
        help="instead: train in exact mode on 1 process and on several, and compare hashes after every step",
    )
    p.add_argument("--processes", type=int, default=2, metavar="N", help="with --exact: how many (default: 2)")
    p.add_argument("--steps", type=int, default=3, metavar="N", help="with --exact: steps to train (default: 3)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="with --exact: of weights, draws and hostings")
    p.add_argument("--precision", default="f32", choices=PRECISIONS, help="with --exact (default: f32)")
    p.add_argument("--micro-batches", type=int, default=1, metavar="N", help="with --exact: per batch (default: 1)")
    p.add_argument(
        "--ranks",
        default="inprocess",
        choices=["inprocess", "processes"],
        help="all ranks in this process (default), or one Gloo process each",
    )
    p.add_argument("--dtype", default="f64", choices=["f64", "f32"], help="precision of the comparison (default: f64)")
    p.add_argument("--batches", type=int, default=1, metavar="N", help="batches to compare (default: 1)")


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    from laminar.launch import command

    top = argparse.ArgumentParser(
        "laminar",
        description="Train a PyTorch model on many devices as if they were one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(name: str, run: Callable[[argparse.Namespace], int], help_: str, recipe: bool) -> argparse.ArgumentParser:
        p = verbs.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        if recipe:
            p.add_argument("recipe", help="the model to train, as path/to/file.py:function")
        p.add_argument("--json", action="store_true", help="print JSON instead of text")
        p.add_argument("--debug", action="store_true", help="show full tracebacks of errors")
        p.set_defaults(run=run)
        return p

    p = verb("capture", do_capture, "trace forward, loss and backward of one step into a graph", True)
    p.add_argument(
        "--report",
        action="store_true",
        help="list parameter names, and ops without a sharding rule with their share of the work",
    )
    p.add_argument("-o", "--output", metavar="FILE", help="save the graph as JSON")
    cli_plan.plan_options(
        verb("plan", cli_plan.do_plan, "find or make a plan: how every tensor is sharded over the devices", True)
    )
    cli_cost.profile_options(
        verb("profile", cli_cost.do_profile, "measure this machine: ops, collectives and whole steps", False)
    )
    cli_ask.explain_options(
        verb("explain", cli_ask.do_explain, "explain a saved plan: what it does, why, and what it costs", False)
    )
    cli_cost.simulate_options(
        verb("simulate", cli_cost.do_simulate, "predict time and memory of a plan's step, on any cluster", False)
    )
    verify_options(verb("verify", do_verify, "run a plan and compare it with one device; exit 1 if they differ", True))
    command.train_options(verb("train", do_train, "train a recipe on one or more ranks of this machine", True))
    cli_checkpoint.checkpoint_options(
        verb("checkpoint", cli_checkpoint.do_checkpoint, "look after checkpoints: ls, verify, diff, export, gc", False)
    )
    cli_cost.diff_options(verb("diff", cli_cost.do_diff, "compare a predicted with a measured timeline", False))
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
