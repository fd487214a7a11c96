"""Plans run against each other on this machine: the measured fastest wins, whatever was predicted.

The launcher writes the plans down, starts as many ranks as they have, and reads what rank 0 found out. Every rank makes
one job for each plan, of the same weights; after a few steps, in which losses must agree, plans take turns: in a round
each runs for about half a second, in an order that rotates, so that whatever else the machine does hits all of them.
All jobs are in memory at once, which is what this costs: finalists are few.

The ranks are those of this machine. A plan for a cluster that isn't here can't be measured, and is refused before
anything is started.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.errors import ClusterError, LaminarError, RecipeError
from laminar.events import emit
from laminar.forecast import Prediction, StagedPrediction, predict, predict_staged
from laminar.ir.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.plan import Plan
from laminar.ir.planned import Origin
from laminar.ir.staged import Staged, load_plan
from laminar.launch.blame import Verdict
from laminar.launch.rank import Place, leave, run_rank
from laminar.launch.rundir import RunDir
from laminar.planner.explain import binding, held, spent
from laminar.search import presets
from laminar.search.micro import micro

FINALISTS = 3
"""Plans of a search that take part, besides data parallel."""
EQUAL = 1.01
"""Plans within this of the fastest are as good as it."""
ROUNDS, LEAST = 8, 3
"""How many there are, and how many there are at least."""
LIMIT_S = 60.0
"""No further round is begun after so long."""
TURN_S = 0.5
"""How long a turn lasts at least."""
WARM = 3
"""Steps before the clock starts, whose losses are compared."""
AGREE = 1e-3
"""How far losses may part, as a share: sums in other orders."""
TIMEOUT_S = 600.0
RESULT, ASKED = "result.json", "asked.json"


@dataclass(frozen=True)
class Measured:
    """What a plan took."""

    step_s: float
    """Median over rounds."""
    low_s: float
    high_s: float
    """Quartiles."""
    ratio: float
    """Median over rounds of its time over that of the first plan in the same round."""
    rounds: int


def refuse_elsewhere(cluster: Cluster) -> None:
    """Refuse a cluster that isn't this machine."""
    here = Cluster.detect()
    if here.device.name != cluster.device.name or here.devices < cluster.devices or len(cluster.levels) > 1:
        raise ClusterError(
            f"{cluster.name} can't be measured: this machine has {here.devices} x {here.device.name}",
            next=f"plan for what is here: --cluster {here.devices}x{here.device.name}, "
            "or a file of `laminar profile -o here.json`",
        )


def contest(
    recipe: str,
    plans: Sequence[Plan | Staged],
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    tick: Callable[[], None] | None = None,
) -> list[Measured]:
    """What steps of each plan take on this machine's ranks; all plans have as many."""
    from laminar.launch import local

    worlds = {p.ranks if isinstance(p, Staged) else p.mesh.ranks for p in plans}
    if len(worlds) != 1:
        raise LaminarError(f"plans for {' and '.join(map(str, sorted(worlds)))} ranks can't take turns")
    world = worlds.pop()
    with tempfile.TemporaryDirectory(prefix="laminar-contest-") as folder:
        at = Path(folder)
        (at / "logs").mkdir()
        for k, plan in enumerate(plans):
            plan.save(at / f"plan{k}.json")
        (at / ASKED).write_text(json.dumps({"plans": len(plans), "rounds": rounds, "seed": seed}))
        listener = local.reserve(0) if world > 1 else None
        ended = local.launch(["plan", recipe, "--contest", folder], world, RunDir(at), listener, lambda event: None,
                             tick or (lambda: None), TIMEOUT_S)  # fmt: skip
        if isinstance(ended, Verdict):
            raise ended.error
        if not (at / RESULT).exists():
            raise LaminarError("no rank said what it measured", at=RunDir(at).tail(0))
        rows = json.loads((at / RESULT).read_text())
    return [_summed(row, rows[0]) for row in rows]


def _summed(row: list[float], first: list[float]) -> Measured:
    low, middle, high = statistics.quantiles(row, n=4, method="inclusive") if len(row) > 1 else (row[0],) * 3
    ratios = [a / b for a, b in zip(row, first, strict=True)]
    return Measured(middle, low, high, statistics.median(ratios), len(row))


def be_a_rank(
    folder: str, recipe: str, place: Place, parallelize: Callable[..., Any], load: Callable[..., Any]
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


def _turns(at: Path, recipe: Any, name: str, parallelize: Callable[..., Any]) -> list[list[float]]:
    """Seconds of a step, by plan and round."""
    import torch
    import torch.distributed as dist

    asked = json.loads((at / ASKED).read_text())
    if recipe.optimizer is None:
        raise RecipeError(f"{name} has no optimizer", next="give Recipe(optimizer=lambda params: AdamW(params))")
    batches = []
    for batch in recipe.data():
        batches.append(batch)
        if len(batches) == WARM:
            break
    jobs = []
    for k in range(asked["plans"]):
        torch.manual_seed(asked["seed"])
        plan = load_plan(at / f"plan{k}.json")
        jobs.append(parallelize(recipe.model(), recipe.loss, recipe.optimizer, batch=batches[0], plan=plan,
                                seed=asked["seed"]))  # fmt: skip
    losses = [[float(job.step(batches[i % len(batches)]).loss) for i in range(WARM)] for job in jobs]
    for k, mine in enumerate(losses[1:], 1):
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, losses[0], strict=True))
        if not apart <= AGREE:
            raise LaminarError(f"losses of plans 0 and {k} part by {apart:.1e}: {losses[0]} and {mine}")
    count = [max(1, round(TURN_S / _took(jobs[0], batches, 1)))]
    if dist.is_initialized():
        dist.broadcast_object_list(count)
    calls = count[0]
    rows: list[list[float]] = [[] for _ in jobs]
    began = time.perf_counter()
    for r in range(asked["rounds"]):
        over = [r >= LEAST and time.perf_counter() - began > LIMIT_S]
        if dist.is_initialized():
            dist.broadcast_object_list(over)  # rank 0's clock
        if over[0]:
            break
        for k in range(len(jobs)):
            turn = (k + r) % len(jobs)
            rows[turn].append(_took(jobs[turn], batches, calls))
        emit("step", step=r + 1)
    for job in reversed(jobs):
        job.close()
    return rows


def _took(job: Any, batches: list[Any], calls: int) -> float:
    """Seconds of a step: from when all ranks are ready to when all are done."""
    _ready(job)
    start = time.perf_counter()
    for i in range(calls):
        job.step(batches[i % len(batches)])
    _ready(job)
    return (time.perf_counter() - start) / calls


def _ready(job: Any) -> None:
    import torch
    import torch.distributed as dist

    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    if dist.is_initialized():
        dist.barrier()


# --- which plan is taken


def taken(
    recipe: str, plan: Plan | Staged, *, rounds: int = ROUNDS, tick: Callable[[], None] | None = None
) -> Plan | Staged:
    """The measured fastest of a search's finalists and data parallel, with all that was measured in its account."""
    assert plan.origin is not None, "a plan that comes from a search"
    graph, cluster = plan.origin.graph, plan.origin.cluster
    refuse_elsewhere(cluster)
    mesh = Mesh({"dp": cluster.devices})
    account = plan.account
    names = [account["choice"]["plan"], *(row["plan"] for row in account["runners_up"])]
    sides: dict[str, tuple[str, Plan | Staged]] = {}
    for name, one in zip(names, (plan, *plan.origin.others), strict=False):
        if len(sides) < FINALISTS:
            sides.setdefault(one.hash, (name, one))
    data = presets.data_parallel(graph, mesh)
    sides.setdefault(data.hash, (f"data parallel on dp={mesh.ranks}", data))
    plans = [one for _, one in sides.values()]
    rows = contest(recipe, plans, rounds=rounds, tick=tick)
    best = min(range(len(rows)), key=lambda k: rows[k].ratio)
    if rows[0].ratio <= EQUAL * rows[best].ratio:
        best = 0  # as good as equal: what was predicted fastest stays
    found: list[dict[str, Any]] = []
    for k, (row, (name, one)) in enumerate(zip(rows, sides.values(), strict=True)):
        predicted_s = account["step_s"] if k == 0 else _simulated(one, plan.origin).seconds
        found.append({"plan": name, "step_s": row.step_s, "low_s": row.low_s, "high_s": row.high_s, "ratio": row.ratio,
                      "predicted_s": predicted_s, "taken": k == best})  # fmt: skip
    said = (
        "the plan that was predicted fastest is the fastest measured, or as good as it"
        if best == 0
        else f"taken because it was measured fastest: {1 / rows[best].ratio:.3f} times as fast as the predicted best"
    )
    measured = {"rounds": rows[0].rounds, "rows": found, "says": said}
    if best == 0:
        return replace(plan, account={**account, "measured": measured})
    winner, ran = plans[best], _simulated(plans[best], plan.origin)
    figures = ran.account()
    choice = {"plan": found[best]["plan"], "step_s": ran.seconds, "peak_bytes": figures["peak_bytes"],
              "spent": spent(ran)}  # fmt: skip
    others = [account["choice"], *(r for r in account["runners_up"] if r["plan"] != choice["plan"])]
    binds = {**binding(choice["spent"]), "memory_bytes": account["binding"]["memory_bytes"]}
    about = {"choice": choice, "runners_up": others, "binding": binds, "memory": held(ran), "measured": measured}
    other = {**account, **winner.account, **figures, **about, "searched": account["choice"]["plan"]}
    dropped = ("wins", "form", "bubbles", "stages") if isinstance(winner, Plan) else ("wins", "form")
    other = {k: v for k, v in other.items() if k not in dropped}
    return replace(winner, name="measured", account=other, origin=plan.origin)


def _simulated(plan: Plan | Staged, origin: Origin) -> Prediction | StagedPrediction:
    """What a plan was predicted to take."""
    if isinstance(plan, Staged):
        return predict_staged(micro(origin.graph, plan.micro_batches), plan, origin.cluster)
    return predict(origin.graph, plan, origin.cluster)
