"""Models that people use, each in every way: the table in docs/models.md, made from what was found and nothing else.

    python -m tests.suites.families hf vision -j 16            everything, on 16 cores; writes results and the table
    python -m tests.suites.families hf --only BART,T5 --ways captured,tensor
    python -m tests.suites.families --table                    the table again, from the results that are there

Ways, each against the same model in plain PyTorch:

    captured  loss, every gradient and every new buffer of one step, from the captured graph on one device
    data, zero3, tensor    the same on two ranks in lock-step, in this process
    ranks data, ...        three steps of training on two real ranks: losses, weights and buffers

Every model draws as its library lets it draw (dropout, stochastic depth), by the same keys on both sides. Gradients are
judged against the larger of their own size and a thousandth of the model's largest; 1e-9 in float64, and what float32
gives where a library computes in it whatever it is handed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laminar
from laminar.api import inputs_of
from laminar.capture.canonical.canonical import Canonical
from laminar.capture.model.model_tensors import slots_of
from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.check.one_device import run_graph
from laminar.runtime.check.verify import relative_error
from laminar.runtime.comm.shards import assemble
from tests.suites.harness import BAD, RATE, SMALL, STEPS, Case, Outcome, differs
from tests.support.rank_pool import Ranks

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("families.json")
PAGE = ROOT / "docs" / "models.md"
IN_PROCESS = ("captured", "data", "zero3", "tensor")
ON_RANKS = ("ranks data", "ranks zero3", "ranks tensor")
WAYS = (*IN_PROCESS, *ON_RANKS)
TOLERANCE = {"f64": 1e-9, "f32": 2e-5}
PRESETS: dict[str, Callable[..., Any]] = {
    "data": laminar.plans.data_parallel,
    "zero3": lambda graph, mesh: laminar.plans.zero(graph, mesh, 3),
    "tensor": laminar.plans.tensor_parallel,
}


def suites() -> dict[str, Any]:
    """Modules with a `find`, and the names they know."""
    from tests.suites import hf, vision

    return {"hf": (hf.find, list(hf.FAMILIES)), "vision": (vision.find, list(vision.families()))}


# --- one step --------------------------------------------------------------------------------


def eager(case: Case, draws: bool) -> dict[str, Tensor]:
    """Loss, gradients and buffers of one step in plain PyTorch."""
    model = case.make()
    slots = slots_of(model)
    with Canonical(torch.tensor([0, 0])) if draws else contextlib.nullcontext():
        loss = case.loss(model, case.batch)
    trained = [s for s in slots if s.trainable]
    grads = torch.autograd.grad(loss, [s.tensor for s in trained], allow_unused=True)
    out = {"loss:loss": loss.detach()}
    out |= {f"grad:{s.name}": g for s, g in zip(trained, grads, strict=True) if g is not None}
    return out | {f"buffer:{s.name}": s.now.detach() for s in slots if s.kind == "buffer" and isinstance(s.now, Tensor)}


def off(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> str:
    """The first thing that is not as wanted, or nothing."""
    if not all(bool(torch.isfinite(v).all()) for k, v in want.items() if k.startswith(("loss:", "grad:"))):
        return "plain PyTorch gives nothing finite to compare with"
    largest = max((float(v.abs().max()) for k, v in want.items() if k.startswith("grad:") and v.numel()), default=0.0)
    for key in (k for k in want if k.startswith("grad:") and k not in got):
        if want[key].any():
            return f"{key} is missing"
    for key, value in got.items():
        kind = key.partition(":")[0]
        if kind == "metric":
            continue
        if key not in want and kind == "grad" and not value.any():
            continue  # a part that runs as it is can't say beforehand which of its parameters it will read
        if key not in want:
            return f"{key} is not there in plain PyTorch"
        floor = {"grad": SMALL * largest, "buffer": 1e-6}.get(kind, 0.0)
        error = relative_error(value.to(want[key].dtype), want[key], floor)
        if error > tolerance:
            return f"{key} is off by {error:.1e}"
    return ""


def precision(graph: Graph, case: Case) -> str:
    """What the slackest part of a step computes in."""
    specs = [o for n in graph.nodes for o in n.outs if o is not None and o.is_float]
    return "f32" if case.dtype == torch.float32 or any(s.dtype == "f32" for s in specs) else "f64"


def in_process(case: Case, ways: Sequence[str]) -> dict[str, Outcome]:
    """One step in several ways, captured once."""
    out: dict[str, Outcome] = {}
    model = case.make()
    try:
        graph = laminar.capture(model, case.loss, case.batch)
    except Exception as error:
        return dict.fromkeys(ways, failed(error))
    want = eager(case, bool(graph.of_kind("rng")))
    inputs = {k: v.detach() for k, v in inputs_of(graph, model, case.batch).items()}
    tolerance = TOLERANCE[precision(graph, case)]
    for way in ways:
        try:
            got = run_graph(graph, inputs) if way == "captured" else spread(graph, inputs, way)
            problem = off(dict(got), want, tolerance)
            out[way] = Outcome("wrong", problem) if problem else Outcome("equal")
        except Exception as error:
            out[way] = failed(error)
    return out


def spread(graph: Graph, inputs: dict[str, Tensor], preset: str) -> dict[str, Tensor]:
    """One step under a preset on two ranks in this process, put together again."""
    mesh = laminar.Mesh({"tp" if preset == "tensor" else "dp": 2})
    program = laminar.lower(graph, PRESETS[preset](graph, mesh))
    ranks = lockstep.run_lockstep(program, inputs)
    return {
        (key := f"{o.kind}:{o.name}"): assemble([r[key] for r in ranks], o.placed.spec.shape, o.placed.nd, mesh)
        for o in program.outputs
    }


def failed(error: Exception) -> Outcome:
    """Refused with a way out, or not."""
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, LaminarError):
        return Outcome("refused" if re.search(r"^\s+(next|allowed|or)\b", str(error), re.M) else "obscure", line)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Outcome("obscure", f"{line} ({Path(where.filename).name}:{where.lineno})")


# --- training on ranks -----------------------------------------------------------------------


def on_a_rank(suite: str, name: str, preset: str) -> Outcome:
    """What one rank finds after three steps; every rank of a pool runs this."""
    find, _ = suites()[suite]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = find(name)
        try:
            job = laminar.parallelize(
                case.make(), case.loss, lambda p: torch.optim.SGD(p, lr=RATE), batch=case.batch, plan=preset
            )
            losses = [torch.tensor(job.step(case.batch).loss, dtype=torch.float64) for _ in range(STEPS)]
            narrow = precision(job.graph, case) == "f32"
            judged = Case(case.make, case.loss, case.batch, torch.float32 if narrow else torch.float64)
            problem = differs(judged, bool(job.graph.of_kind("rng")), losses, job.state_dict())
        except Exception as error:
            return failed(error)
    return Outcome("wrong", problem) if problem else Outcome("equal")


def ranked(ranks: Ranks, suite: str, name: str, preset: str) -> Outcome:
    """What both ranks find, the worse of the two."""
    try:
        found = ranks.run(on_a_rank, suite, name, preset)
    except AssertionError as error:
        return Outcome("crash", str(error).strip().splitlines()[-1])
    except Exception as error:  # a rank that does not answer
        return Outcome("crash", type(error).__name__)
    return next((f for f in found if f.kind != "equal"), found[0])


def looked_at(suite: str, name: str, ways: Sequence[str], ranks: Ranks | None = None) -> dict[str, Outcome]:
    """A model in the ways asked for; those on ranks only where they were captured."""
    torch.set_num_threads(1)
    find, _ = suites()[suite]
    out: dict[str, Outcome] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        here = [w for w in ways if w in IN_PROCESS]
        if here:
            out |= in_process(find(name), here)
    for way in (w for w in ways if w in ON_RANKS):
        refused = out.get("captured", Outcome("equal"))
        out[way] = ranked(ranks, suite, name, way.split()[1]) if ranks and refused.kind == "equal" else refused
    return out


# --- results and the table -------------------------------------------------------------------


def results() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By suite, name and way: what came of it, and why."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # type: ignore[no-any-return]


def kept(suite: str, name: str, found: dict[str, Outcome]) -> None:
    """Write down what was found, in the place of what was."""
    with RESULTS.with_suffix(".lock").open("w") as lock:  # others may write beside us
        fcntl.flock(lock, fcntl.LOCK_EX)
        everything = results()
        here = everything.setdefault(suite, {}).setdefault(name, {})
        here |= {way: [o.kind, o.why] if o.why else [o.kind] for way, o in found.items()}
        RESULTS.write_text(json.dumps(everything, indent=0, sort_keys=True) + "\n")


SIGNS = {"equal": "✓", "refused": "refused", "wrong": "WRONG", "obscure": "error", "crash": "crash"}


def table() -> str:
    """The page of docs, between its begin and its end."""
    text = []
    titles = {"hf": "transformers", "vision": "torchvision"}
    for suite, names in suites().items():
        found = results().get(suite, {})
        text += ["", f"## {titles[suite]}", "", _totals(found, names[1]), ""]
        text += ["| model | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
        for name in names[1]:
            row = found.get(name, {})
            text.append(f"| {name} | " + " | ".join(SIGNS[row[w][0]] if w in row else "" for w in WAYS) + " |")
        refused = [
            f"- {name}, {way}: {row[1].partition(': ')[2]}"
            for name in names[1]
            for way, row in found.get(name, {}).items()
            if row[0] == "refused" and (way == "captured" or found[name].get("captured", ["equal"])[0] == "equal")
        ]
        text += ["", "Refused:", "", *refused] if refused else []
    return "\n".join(text) + "\n"


def _totals(found: dict[str, dict[str, list[str]]], names: Iterable[str]) -> str:
    counts = {w: Counter(found[n][w][0] for n in names if w in found.get(n, {})) for w in WAYS}
    return "Equal: " + ", ".join(f"{w} {c['equal']} of {sum(c.values())}" for w, c in counts.items() if c) + "."


MARK = "<!-- what follows is written by tests/suites/families.py -->\n"


def write_page() -> None:
    """Put the table into the page."""
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(head + MARK + table())


# --- command line ----------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites.families")
    parser.add_argument("suites", nargs="*", default=[])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--missing", action="store_true", help="only what no result is there for")
    parser.add_argument("--table", action="store_true", help="write the table from the results that are there")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes beside each other")
    given = parser.parse_args(arguments)
    ways = [w.strip() for w in given.ways.split(",")]
    wanted = {n.strip() for n in given.only.split(",") if n.strip()}
    todo = [
        (suite, name, [w for w in ways if not (given.missing and w in results().get(suite, {}).get(name, {}))])
        for suite in given.suites
        for name in suites()[suite][1]
        if not wanted or name in wanted
    ]
    todo = [t for t in todo if t[2]]
    bad = _alone(todo) if given.jobs == 1 else _together(todo, given.jobs)
    if given.table or not wanted:
        write_page()
    return 1 if bad else 0


def _alone(todo: Sequence[tuple[str, str, list[str]]]) -> int:
    ranks, bad = Ranks(2), 0
    for suite, name, ways in todo:
        since = time.monotonic()
        found = looked_at(suite, name, ways, ranks)
        kept(suite, name, found)
        said = "  ".join(f"{w} {o.kind}{': ' + o.why if o.why else ''}" for w, o in found.items())
        print(f"{name:24} {time.monotonic() - since:6.1f} s  {said}", flush=True)
        bad += sum(o.kind in BAD for o in found.values())
    ranks.stop()
    return bad


def _together(todo: Sequence[tuple[str, str, list[str]]], jobs: int) -> int:
    """In several processes, each with its share of the models and two ranks of its own."""

    def run(share: Sequence[tuple[str, str, list[str]]]) -> int:
        bad = 0
        for suite in dict.fromkeys(s for s, _, _ in share):
            for ways in dict.fromkeys(",".join(w) for s, _, w in share if s == suite):
                names = ",".join(n for s, n, w in share if s == suite and ",".join(w) == ways)
                command = [sys.executable, "-m", "tests.suites.families", suite, "--only", names, "--ways", ways]
                bad += subprocess.run(command, cwd=ROOT).returncode != 0
        return bad

    workers = max(1, jobs // 2)
    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(run, [todo[i::workers] for i in range(workers)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
