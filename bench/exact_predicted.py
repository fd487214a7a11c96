"""How far are predicted steps in exact mode off, against those measured by `exact_cost.py`?

Ratios on both sides: a step in exact mode over one in our default mode, and steps with slices over those of one slice.
Measured are the newest rows of `exact_cost.py` (processor time of rank 0); predictions are made from a profile of the
machine that they were measured on.

    python bench/exact_predicted.py [--cluster here.json]

No target: `laminar plan --exact` is read by people who want to know what to expect.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from common import RESULTS, report
from exact_cost import ROWS, UNITS, case

import laminar
from laminar.forecast.exact_step import exact_steps
from laminar.forecast.step import predict
from laminar.ir.exact import Exact
from laminar.ir.mesh import Mesh
from laminar.placement import presets

RANKS = 2


def measured() -> dict[str, dict[str, Any]]:
    """The newest row of each case."""
    rows = [json.loads(line) for line in (RESULTS / "exact_cost.jsonl").read_text().splitlines()]
    return {row["model"]: row for row in rows if row["ranks"] == RANKS}


def main() -> None:
    """One line for each number of rows in a unit."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    profile = str(RESULTS / "profile_exact.json")
    args.add_argument("--cluster", default=profile, help=f"a file of laminar profile (default: {profile})")
    cluster, rows = laminar.Cluster.load(args.parse_args().cluster), measured()
    for name, samples in ROWS.items():
        given = case(samples, RANKS, True)
        graph = laminar.capture(given.model(), given.loss, given.batches[0])

        def exact_s(slices: int, graph: Any = graph) -> float:
            found = exact_steps(graph, Exact(UNITS, slices), cluster)
            return next(step.prediction.seconds for step in found if step.storage == "data")

        default_s = predict(graph, presets.data_parallel(graph, Mesh({"dp": RANKS})), cluster.on(range(RANKS))).seconds
        one = exact_s(1)
        predicted = {"exact_over_default": one / default_s} | {
            f"{n}_slices_over_1": exact_s(n) / one for n in (2, 4, 8)
        }
        slices = rows.get(f"{name}_slices", {})
        found = {"exact_over_default": 1 / rows[name]["default_over_laminar_cpu"]["median"]} | {
            f"{n}_slices_over_1": slices[f"exact_{n}_slices_over_laminar_cpu"]["median"] for n in (2, 4, 8) if slices
        }
        report(
            "exact_predicted",
            {
                "model": name,
                "predicted": {key: round(value, 3) for key, value in predicted.items()},
                "measured": {key: round(value, 3) for key, value in found.items()},
                "error": {key: round(predicted[key] / value - 1, 3) for key, value in found.items()},
                "rows_of": rows[name]["commit"],
            },
        )


if __name__ == "__main__":
    main()
