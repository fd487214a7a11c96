"""The command: rows in, predictions and errors out.

    python -m bench.published --csv FILE            one line per row, errors by block and over all
    python -m bench.published --csv FILE --json     {"rows": [{"line", ...}, ...], "median_error", "mean_error"}
    python -m bench.published --csv FILE --fit      fits the constants of every kind of device, writes them down
    python -m bench.published --csv FILE --unnamed  every system left out in turn and predicted without its name
    python -m bench.published --vtrain FILE         single-node rows: fitted on half of the models, judged on the rest

The columns are block, status, system, model, params_B, layers, hidden, heads, kv_heads, ffn, vocab, seq, gbs, mbs, gpu,
gpus, tp, pp, dp, cp, vp, zero, recompute, precision, metric, value, extra, source; cells may be blank. A row may also
state what its stack does, a column for each feature (`features.Features`), and how its nodes are joined (`network`,
cards and Gb/s of a node: `8x400`); all of these may stand in `extra` instead. The table that the constants were fitted
to is not part of the repository. `--record` adds the result to `bench/results/published.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.published import fit as fitting
from bench.published import prices, unnamed, vtrain
from bench.published.rows import Row, read
from bench.published.scores import figures, memory_errors, ranking, summary
from bench.published.steps import ROOM, Step, step_of

RESULTS = Path(__file__).parent.parent / "results"


def predicted(rows: Sequence[Row | tuple[int, str]]) -> dict[str, Any]:
    """What `--json` prints."""
    known = prices.load()
    out, errors = [], []
    for row in rows:
        found: dict[str, Any] = dict.fromkeys(("line", "predicted_s", "measured_s", "peak_bytes", "skipped"))
        if isinstance(row, tuple):
            found["line"], found["skipped"] = row
        else:
            step = step_of(row, prices.of_kind(row.gpu, known))
            measured = row.measured_s
            found |= {
                "line": row.line,
                "predicted_s": step.seconds,
                "measured_s": measured,
                "peak_bytes": step.peak_bytes,
            }
            if measured:
                errors.append(abs(step.seconds / measured - 1))
        out.append(found)
    return {
        "rows": out,
        "median_error": statistics.median(errors) if errors else None,
        "mean_error": statistics.mean(errors) if errors else None,
    }


def described(row: Row, step: Step) -> str:
    """One row as text."""
    measured = row.measured_s
    against = f"{measured:9.3f} s {step.seconds / measured - 1:+7.1%}" if measured else " " * 19
    plan = f"tp {row.tp} pp {row.pp} dp {row.dp} cp {row.cp} vp {step.chosen.vp} mbs {step.chosen.mbs}"
    full = "" if step.peak_bytes <= ROOM * row.gpu.most_bytes else "  does not fit"
    return (
        f"{row.line:5} {row.block:4} {row.system[:20]:20} {row.model[:18]:18} {row.gpus:6} {plan:38} "
        f"{step.chosen.recompute:9} {row.precision:4} {step.seconds:9.3f} s {against} "
        f"{step.peak_bytes / 2**30:6.1f} GiB{full}"
    )


def told(rows: Sequence[Row | tuple[int, str]]) -> dict[str, Any]:
    """Every row as text, then the errors by block; the figures come back."""
    known = prices.load()
    by: dict[str, list[float]] = {}
    judged = []
    print(" line block system               model                gpus plan, predicted, measured, error, peak")
    for row in rows:
        if isinstance(row, tuple):
            print(f"{row[0]:5} skipped: {row[1]}")
            continue
        step = step_of(row, prices.of_kind(row.gpu, known))
        print(described(row, step))
        judged.append((row, step.seconds, step.peak_bytes))
        if row.measured_s:
            by.setdefault(row.block or "-", []).append(step.seconds / row.measured_s - 1)
    for block, errors in by.items():
        print(f"{block:6} {len(errors):4} rows: {summary(errors)}")
    errors = [e for v in by.values() for e in v]
    if errors:
        print(f"all    {len(errors):4} rows: {summary(errors)}")
    order, memory = ranking(judged), memory_errors(judged)
    if order:
        print(
            f"plans of one model: tau {order['tau']} over {order['pairs']} pairs of {order['families']} families, "
            f"worst regret {order['worst_regret']:.1%}"
        )
    if memory:
        print(f"stated peaks of memory, {len(memory)} rows: {summary(memory)}")
    return {
        "rows": len(errors),
        **figures(errors),
        "ranking": order,
        "memory": figures(memory),
        "blocks": {b: figures(v) for b, v in by.items()},
    }


def fitted(rows: Sequence[Row | tuple[int, str]]) -> dict[str, Any]:
    """Fit all kinds, write the constants down, and say how far off they are."""
    known = [row for row in rows if isinstance(row, Row)]
    found = fitting.fit(known, {})
    by_line = {row.line: row for row in known}
    out: dict[str, Any] = {"kinds": {}, "blocks": {}}
    blocks: dict[str, list[float]] = {}
    for f in found:
        print(f"{f.kind}: in sample {summary(list(f.inside.values()))}")
        print(f"{f.kind}: model left out {summary(list(f.outside.values()))}")
        out["kinds"][f.kind] = {
            "in_sample": figures(list(f.inside.values())),
            "model_left_out": figures(list(f.outside.values())),
        }
        for line, error in f.outside.items():
            blocks.setdefault(by_line[line].block, []).append(error)
    for block, errors in blocks.items():
        print(f"{block}: model left out, {len(errors)} rows: {summary(errors)}")
        out["blocks"][block] = figures(errors)
    inside = [e for f in found for e in f.inside.values()]
    outside = [e for f in found for e in f.outside.values()]
    print(f"all: in sample {summary(inside)}")
    print(f"all: model left out {summary(outside)}")
    out |= {"in_sample": figures(inside), "model_left_out": figures(outside), "rows": len(inside)}
    fitting.save(found, {"fitted_to": f"{len(inside)} published steps", "model_left_out": figures(outside)})
    return out


def without_names(rows: Sequence[Row | tuple[int, str]]) -> dict[str, Any]:
    """Every system left out in turn, then relatives at once, then only names hidden."""
    known = [row for row in rows if isinstance(row, Row)]
    found = unnamed.left_out(known)
    errors = {line: e for v in found.values() for line, e in v.items()}
    print(f"all {len(errors)} rows, each system left out: {summary(list(errors.values()))}")
    related = {}
    for systems in unnamed.RELATED:
        group, mine = " + ".join(systems), unnamed.without(known, systems)
        whole = figures(list({**errors, **mine}.values()))
        related[group] = {"rows": len(mine), **figures(list(mine.values())), "all": whole}
        if mine:
            print(
                f"{group}, {len(mine)} rows left out together: {summary(list(mine.values()))}; "
                f"as one system, all rows: median {whole['median']:.1%}, mean {whole['mean']:.1%}"
            )
    hidden = unnamed.name_hidden(known)
    print(f"no system left out, only names hidden: {summary(hidden)}")
    return {
        "rows": len(errors),
        **figures(list(errors.values())),
        "related": related,
        "name_hidden": figures(hidden),
        "systems": {system: {"rows": len(v), **figures(list(v.values()))} for system, v in found.items()},
        "errors": {str(line): round(e, 4) for line, e in errors.items()},
    }


def record(what: str, result: dict[str, Any], seconds: float) -> None:
    """Add a line to the results."""
    from bench.common import commit

    line = {
        "bench": "published",
        "what": what,
        **result,
        "seconds": round(seconds, 1),
        "command": "python -m bench.published " + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "commit": commit(),
    }
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "published.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__.split("\n")[0])
    parser.add_argument("--csv", help="a table of published steps; one with this schema, or your own rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the table and write them down")
    parser.add_argument("--unnamed", action="store_true", help="leave out every system in turn and hide its name")
    parser.add_argument("--vtrain", help="a table of single-node iterations")
    parser.add_argument("--record", action="store_true", help="add the result to bench/results/published.jsonl")
    given = parser.parse_args(arguments)
    if not given.csv and not given.vtrain:
        parser.error("give --csv FILE (a table of published steps) or --vtrain FILE (single-node iterations)")
    if not Path(given.csv or given.vtrain).is_file():
        parser.error(f"there is no file {given.csv or given.vtrain}")
    start = time.perf_counter()
    if given.vtrain:
        what, result = "vtrain", vtrain.judged(given.vtrain)
    elif given.fit:
        what, result = "fit", fitted(read(given.csv))
    elif given.unnamed:
        what, result = "unnamed", without_names(read(given.csv))
    elif given.json:
        result = predicted(read(given.csv))
        print(json.dumps(result, indent=1))
        what, result = "predict", {k: v for k, v in result.items() if k != "rows"}
    else:
        what, result = "predict", told(read(given.csv))
    if given.record:
        record(what, result, time.perf_counter() - start)
