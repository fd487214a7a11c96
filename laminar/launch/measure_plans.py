"""Plans run against each other on this machine: the measured fastest wins, whatever was predicted.

The launcher writes the plans down, starts as many ranks as they have, and reads what rank 0 found out. The ranks make
jobs of them that take turns (`train/auto/interleaved_timing.py`), from the recipe's own weights and batches.

The ranks are those of this machine. A plan for a cluster that isn't here can't be measured, and is refused before
anything is started.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from laminar.errors import ClusterError, LaminarError, PlanError, RecipeError
from laminar.events import emit
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, load_plan
from laminar.launch.blame import Verdict
from laminar.launch.rank import RankPlace, leave, run_rank
from laminar.launch.rundir import RunDir
from laminar.planner.search.finalists import (
    DDP,
    MEASURED_ROUNDS,
    NOBODY_LEFT_OUT,
    Measured,
    as_ddp,
    finalists,
    settled,
    summed_up,
)

ROUNDS_LIMIT_S = 60.0
"""No further round is begun after so long."""
BATCHES_IN_TURN = 3
"""Of the recipe's, which are used in turn."""
MEASURE_TIMEOUT_S = 600.0
RESULT, ASKED = "result.json", "asked.json"


def refuse_elsewhere(cluster: Cluster) -> None:
    """Refuse a cluster that isn't this machine."""
    here = Cluster.detect()
    if here.device.name != cluster.device.name or here.devices < cluster.devices or len(cluster.levels) > 1:
        raise ClusterError(
            f"{cluster.name} can't be measured: this machine has {here.devices} x {here.device.name}",
            next=f"plan for what is here: --cluster {here.devices}x{here.device.name}, "
            "or a file of `laminar profile -o here.json`",
        )


def run_plans(
    recipe: str,
    plans: Sequence[Plan | Staged],
    *,
    rounds: int = MEASURED_ROUNDS,
    seed: int = 0,
    tick: Callable[[], None] | None = None,
) -> list[Measured | str]:
    """What steps of each plan take on this machine's ranks, or why it is out; all plans have as many ranks."""
    from laminar.launch import local

    worlds = {p.ranks if isinstance(p, Staged) else p.mesh.ranks for p in plans}
    if len(worlds) != 1:
        raise LaminarError(f"plans for {' and '.join(map(str, sorted(worlds)))} ranks can't take turns")
    world = worlds.pop()
    with tempfile.TemporaryDirectory(prefix="laminar-measure-") as folder:
        at = Path(folder)
        (at / "logs").mkdir()
        for k, plan in enumerate(plans):
            plan.save(at / f"plan{k}.json")
        (at / ASKED).write_text(json.dumps({"plans": len(plans), "rounds": rounds, "seed": seed}))
        listener = local.reserve(0) if world > 1 else None
        command = ["plan", recipe, "--measure-rank", folder]
        ended = local.launch(
            command, world, RunDir(at), listener, lambda event: None, tick or (lambda: None), MEASURE_TIMEOUT_S
        )
        if isinstance(ended, Verdict):
            raise ended.error
        if not (at / RESULT).exists():
            raise LaminarError("no rank said what it measured", at=RunDir(at).tail(0))
        rows = json.loads((at / RESULT).read_text())
    if all(isinstance(row, str) for row in rows):
        raise LaminarError("none of the plans could be run", why="; ".join(dict.fromkeys(rows)))
    return summed_up(rows)


def measure_as_a_rank(
    folder: str, recipe: str, place: RankPlace, parallelize: Callable[..., Any], load: Callable[..., Any]
) -> None:
    """One rank's side; the process ends here."""
    at = Path(folder)

    def body() -> None:
        rows = _turns(at, load(recipe), recipe, parallelize)
        if place.rank == 0:
            (at / RESULT).write_text(json.dumps(rows))
        emit("end")

    found = run_rank(body, place, RunDir(at))
    leave(0 if found is None else found.code)


def _turns(at: Path, recipe: Any, name: str, parallelize: Callable[..., Any]) -> list[list[float] | str]:
    """Seconds of a step, by plan and round; or why a plan is out."""
    import torch

    from laminar.train.auto.interleaved_timing import turns
    from laminar.train.world import World

    asked = json.loads((at / ASKED).read_text())
    if recipe.optimizer is None:
        raise RecipeError(f"{name} has no optimizer", next="give Recipe(optimizer=lambda params: AdamW(params))")
    batches = [batch for _, batch in zip(range(BATCHES_IN_TURN), recipe.data(), strict=False)]

    def job(k: int) -> Any:
        torch.manual_seed(asked["seed"])
        plan = load_plan(at / f"plan{k}.json")
        return parallelize(
            recipe.model(), recipe.loss, recipe.optimizer, batch=batches[0], plan=plan, seed=asked["seed"]
        )

    world = World(timeout_s=MEASURE_TIMEOUT_S)
    makes = [partial(job, k) for k in range(asked["plans"])]
    rows = turns(
        makes,
        batches,
        world.gather_objects,
        limit_s=ROUNDS_LIMIT_S,
        rounds=asked["rounds"],
        tick=lambda number: emit("step", step=number),
    )
    world.close()
    return rows


def taken(
    recipe: str, plan: Plan | Staged, *, rounds: int = MEASURED_ROUNDS, tick: Callable[[], None] | None = None
) -> Plan | Staged:
    """The measured fastest of a search's finalists and plans with a name, with all that was measured in its account."""
    assert plan.origin is not None, "a plan that comes from a search"
    refuse_elsewhere(plan.origin.cluster)
    sides = finalists(plan)
    if not sides:
        raise PlanError(
            "this plan lies outside of what was searched, and has no runners-up", next="laminar plan without --measure"
        )
    from laminar.train.auto.ddp_fits import why_not  # and torch with it
    from laminar.train.optimizer.precision import Precision

    why = why_not(plan.origin.graph, Precision.of("f32"))
    ddp = None if why else as_ddp(plan)
    sides += [ddp] if ddp else []
    rows = run_plans(recipe, [side.plan for side in sides], rounds=rounds, tick=tick)
    return settled(plan, sides, rows, {DDP: why} if why else NOBODY_LEFT_OUT)
