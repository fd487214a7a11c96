"""Is the plan that a search finds as fast as the best of DDP, FSDP2 and our own data parallel?

The search is given a profile of the machine (`bench/results/profile_2.json`, or `profile_16_4.json` and the like for
more ranks; make your own with `laminar profile`), and all dimensions but stages, which run in jobs of another kind. It
is done by every rank, with time to finish, so that all find the same plan.

    python bench/train_found.py [--model gpt cnn mlp dlrm] [--ranks 2] [--rounds 12] [--repeats 3]

Targets (a peer's time over ours): 1.0 against the best of them in the geometric mean, no model below 0.97; 1.3 against
DDP on DLRM and the wide MLP.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from peers import ddp, fsdp, ours
from race import race

import laminar
from laminar.ir.graph import Graph
from laminar.planner.whatif import resized

RESULTS = Path(__file__).parent / "results"


def found(graph: Graph, mesh: laminar.Mesh) -> laminar.Plan:
    """The best plan without stages for so many ranks of this machine."""
    name = f"profile_{mesh.ranks}.json" if mesh.ranks == 2 else f"profile_16_{mesh.ranks}.json"
    cluster = resized(laminar.Cluster.load(RESULTS / name), mesh.ranks)
    pins = {"tp": 1, "stages": 1, "microbatches": 1, "recompute": 0}  # one axis; what it splits is open
    return laminar.plan(graph, cluster, pin=pins, budget_s=1e6)


SIDES = {"laminar": partial(ours, plan=found), "data": partial(ours, plan="data"), "ddp": ddp, "fsdp": fsdp}

if __name__ == "__main__":
    race("train_found", SIDES, split=True, target=1.0, doc=__doc__)
