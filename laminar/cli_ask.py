"""Questions about a plan, from the command line: what `laminar plan` and `laminar explain` have in common.

Why is a tensor sharded as it is, what if something were different, what do other systems call it, what does it look
like? A plan straight from a search has its graph at hand; that of a saved plan is captured again from the recipe it
was made for, once, and only if a question needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laminar import cli_cost
from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, load_plan
from laminar.launch.vocabulary import memory_bytes
from laminar.planner.report.throughput import rate_lines, rates
from laminar.planner.report.words import sized
from laminar.planner.space.request import PINNABLE, STORED_PINS

EXPLAIN = """\
examples
  laminar explain plan.json --price 2.5
  laminar explain plan.json --why blocks.3.mlp.down.weight
  laminar explain plan.json --what-if 'devices=16'
  laminar explain plan.json --flags torchtitan --dot plan.dot
"""


@contextlib.contextmanager
def working(what: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with seconds on stderr, from the third second on, where someone is watching; its text may change."""
    done = threading.Event()
    says = [what]

    def spin() -> None:
        start = time.monotonic()
        for mark in itertools.cycle("|/-\\"):
            if done.wait(0.2):
                return
            passed = time.monotonic() - start
            if passed > 2:
                sys.stderr.write(f"\r\033[K{mark} {says[0]} {passed:.0f} s")
                sys.stderr.flush()

    def say(text: str) -> None:
        says[0] = text

    thread = threading.Thread(target=spin, daemon=True)
    if not quiet and sys.stderr.isatty():
        thread.start()
    try:
        yield say
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
            sys.stderr.write("\r\033[K")


WORDS = ("cluster", "only", "batch", "optimizer")


def parse_changes(text: str) -> dict[str, Any]:
    """`memory=40GB; tp=8` as changes of a request; a name that is neither known nor a tensor's is an error."""
    out: dict[str, Any] = {}
    numbers: dict[str, Callable[[str], float]] = {
        "devices": int,
        "link": float,
        "budget": float,
        "memory": memory_bytes,
        "margin": float,
    }
    names = {"budget": "budget_s", "memory": "memory_bytes"}
    for item in text.split(";"):
        name, equals, value = (x.strip() for x in item.partition("="))
        if not equals or not value:
            raise PlanError(f"{item.strip()!r} changes nothing", next="write --what-if 'memory=40GB; devices=16; tp=8'")
        try:
            if name in numbers:
                out[names.get(name, name)] = numbers[name](value)
            elif name in WORDS:
                out[name] = value
            elif (
                name not in PINNABLE
                and name not in STORED_PINS.values()
                and value != "any"
                and not re.search(r"\bB\b|S\(", value)
            ):
                raise PlanError(
                    f"nothing called {name!r} can be changed",
                    allowed="  ".join((*numbers, *WORDS, *PINNABLE)),
                    next="or name tensors by pattern: --what-if 'blocks.*.mlp.up.weight=S(0)'",
                )
            else:
                pin = None if value == "any" else int(value) if value.isdigit() else value
                out.setdefault("pin", {})[name] = pin
        except (ValueError, argparse.ArgumentTypeError):
            of = " of bytes" if name == "memory" else ""
            raise PlanError(
                f"{name} is a number{of}, not {value!r}", next="write --what-if 'memory=40GB; tp=8'"
            ) from None
    if isinstance(out.get("cluster"), str):
        out["cluster"] = cli_cost.cluster_from(out["cluster"])
    return out


def tell(
    args: argparse.Namespace,
    plan: Plan | Staged,
    graph_of: Callable[[], Graph],
    cluster: Cluster | None,
    data: dict[str, Any],
) -> int:
    """Save a plan, and print it with the answers that were asked for; `graph_of` gives that of the whole batch."""
    if args.output:
        plan.save(args.output)
    answers = _answers(args, plan, graph_of, cluster)
    if args.json:
        found = rates(plan.account, args.tokens, args.price)
        print(json.dumps({"plan": plan.hash, **data, **found, **{k: _plain(v) for k, v in answers.items()}}))
        return 0
    print(plan.explain(price=args.price))
    print("\n".join(rate_lines(plan.account, args.tokens, args.price)))
    if getattr(args, "compare", False):
        print(comparison(plan.account))
    _print(answers)
    if args.output:
        print(f"\nwritten to {args.output}")
    return 0


def _plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_plain(one) for one in answer]
    return answer if isinstance(answer, str) else answer.to_json()


def _print(answers: dict[str, Any]) -> None:
    for name, answer in answers.items():
        if name in ("dot", "png"):
            print(f"\n{'graph' if name == 'dot' else 'picture'} written to {answer}")
        else:
            for one in answer if isinstance(answer, list) else [answer]:
                print(f"\n{one}")


def _answers(
    args: argparse.Namespace, plan: Plan | Staged, graph_of: Callable[[], Graph], cluster: Cluster | None
) -> dict[str, Any]:
    """What was asked of a plan, by the name of the option; the graph is only made if somebody needs it."""
    out: dict[str, Any] = {}
    if args.why:
        with working("simulating the alternatives", args.json):
            out["why"] = [plan.why(name, graph=graph_of(), cluster=cluster) for name in args.why]
    if args.what_if:
        changes = [parse_changes(text) for text in args.what_if]
        with working("searching again", args.json):
            out["what_if"] = [plan.what_if(**{"graph": graph_of(), **change}) for change in changes]
    if args.flags:
        known = plan.origin is None and plan.account.form is not None
        out["flags"] = plan.flags(args.flags, graph=None if known else graph_of())
    if args.dot:
        Path(args.dot).write_text(plan.dot(graph=graph_of(), cluster=cluster))
        out["dot"] = args.dot
    if args.png:
        plan.draw(args.png, graph=graph_of(), cluster=cluster)
        out["png"] = args.png
    return out


def do_explain(args: argparse.Namespace) -> int:
    """What a saved plan does and why."""
    from laminar.api import graph_of

    plan = load_plan(args.plan)
    made: list[Graph] = []

    def graph() -> Graph:
        recipe = args.recipe or plan.account.recipe
        if recipe is None:
            raise PlanError(f"{args.plan} does not say which recipe it is for", next="--recipe file.py:function")
        if not made:
            with working("capturing", args.json):
                made.append(graph_of(recipe, 1, plan.account.work.precision if plan.account.work else "f32"))
        return made[0]

    cluster = cli_cost.cluster_from(args.cluster) if args.cluster else None
    answers = _answers(args, plan, graph, cluster)
    if args.json:
        found = rates(plan.account, args.tokens, args.price)
        print(json.dumps({"plan": plan.hash, **plan.to_json(), **found, **{k: _plain(v) for k, v in answers.items()}}))
        return 0
    print(plan.explain(price=args.price))
    print("\n".join(rate_lines(plan.account, args.tokens, args.price)))
    _print(answers)
    return 0


def comparison(account: Account) -> str:
    """All plans that were looked at, as bars: the longer, the more steps a second."""
    rows = account.looked_at
    best = min((row.step_s for row in rows if row.fits), default=0.0)
    lines = ["", "plans that were looked at, steps per second"]
    for row in rows:
        bar = "#" * max(1, round(40 * best / row.step_s))
        note = "" if row.fits else f"  does not fit: {sized(row.peak_bytes or math.inf)}"
        lines.append(f"  {1 / row.step_s:10.3f}  {bar:<41} {row.plan}{note}")
    return "\n".join(lines)


def questions(p: argparse.ArgumentParser) -> None:
    """What a plan can be asked."""
    ask = p.add_argument_group("questions")
    ask.add_argument(
        "--price", type=float, metavar="P", help="price per device-hour; prints the cost per million tokens"
    )
    ask.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="days to train on so many tokens (or samples), with --price also the cost",
    )
    ask.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="TENSOR",
        help="why a tensor is sharded as it is: simulate every alternative; may be repeated",
    )
    ask.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="'NAME=VALUE; ...'",
        help="search again with something changed, and tell the difference; may be repeated",
    )
    ask.add_argument(
        "--flags", choices=["megatron", "torchtitan"], help="the same plan as flags of Megatron-LM or torchtitan"
    )
    ask.add_argument("--dot", metavar="FILE", help="write the graph with placements and costs as a Graphviz file")
    ask.add_argument("--png", metavar="FILE", help="draw the graph with placements and costs")


def explain_options(p: argparse.ArgumentParser) -> None:
    """The options of `laminar explain`."""
    p.epilog, p.formatter_class = EXPLAIN, argparse.RawDescriptionHelpFormatter
    p.add_argument("plan", help="a plan file")
    p.add_argument("--recipe", metavar="RECIPE", help="recipe of the model (default: the one the plan was made for)")
    p.add_argument("--cluster", metavar="CLUSTER", help="file or name of a cluster (default: the plan's own)")
    questions(p)
