"""Is the plan that a search finds as fast as the best of DDP, FSDP2, DTensor and the plans we have by name?

The machine is as many cores as there are ranks, a thread each. It is measured first, as `laminar profile` does (or a
file of that is given); then plans are searched for all models as a job with `plan="auto"` and a cluster does it,
without stages (`--stages`: the whole space); then each model is trained by all sides in the same processes, in paired
rounds. As in such a job, finalists of the search are tried out on the ranks first, plans with a name and, where it does
the same, DDP behind our job's face among them, and the fastest is taken (not with `--stages`, and not with
`--no-measure`); the row says which that was, what was predicted fastest, and what it took.
Sides: the plan that was taken (`laminar`), our data parallel, ZeRO 1 and 3 and tensor parallel, DDP and FSDP2, eager
DTensor for the models that `models.py` says how to split; for the DLRM also DDP with sparse gradients, which is
comparable where everybody uses SGD (`dlrm_sgd`) and is only shown beside AdamW: it updates tables with SparseAdam.

    python bench/train_found.py [--model gpt cnn ...] [--ranks 2] [--rounds 15] [--limit 250] [--profile P.json]
                                [--found PLANS]

A search is bounded by processor time, so it may run beside other jobs; what it finds may be raced later (`--found`).

All sides train three steps from the same weights first; who parts from ours by more than 1e-3 of the loss is not
compared, and the row says so. A preset that comes to the very program that was found is not run a second time, and is
as fast as it. Peers that are 1.3 times as slow as the best of them after three rounds get no more turns, but DDP
always does. Ratios are a peer's time over ours: medians of rounds, with the 2.5 % and 97.5 % quantiles of the median
by bootstrap, which know nothing of what differs from one start of the processes to the next. The last row has the
geometric mean over models of the ratio to each model's best peer, and to the best of those that are not ours.

With more ranks than cores ranks share cores, and rows say so (`ranks_per_core`): what they wait for is each other then.

Targets: 1.05 in the geometric mean, no model's interval below 0.97; 1.3 against DDP, dense and sparse, on DLRM and the
wide MLP.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import report
from models import WIDER, Case
from peers import OPTIMIZERS, Side, ddp, ddp_sparse, dtensor, fresh, fsdp, ours
from race import AGREE

import laminar
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.plan import Plan
from laminar.planner.search.finalists import finalists
from laminar.planner.space.request import DIMENSIONS
from laminar.runtime.comm.transport import join_process_group
from laminar.train.auto import try_finalists
from laminar.train.auto.plan_search import BUDGET_S, Searched, with_ddp
from laminar.train.optimizer.precision import Precision
from laminar.train.world import World

BENCH = "train_found"
TURN_S = 0.2
"""How long one side's turn should last at least."""
SCREEN, FAR = 3, 1.3
"""After so many rounds a peer that is so many times as slow as the best one is done."""
LEAST = 5
"""Rounds that a model gets however late it is."""
FLOOR, MEAN, OVER_DDP = 0.97, 1.05, 1.3
PRESETS = ("data", "zero1", "zero3", "tensor")
WIDE = ("mlp", "dlrm", "dlrm_sgd")
"""Where DDP is to be beaten by more."""
TWIN = "the same program as laminar"
DRAWS = 4000
PRELOAD = ["torch", "torch.distributed", "peers", "laminar.train.job.job", "laminar.planner.search.entry"]
CONTEXT = multiprocessing.get_context("forkserver")


# --- the machine, and what is found for it


def own_cores(ranks: int) -> list[int]:
    """So many cores, of different cores' threads as far as they go; this process and its children stay on them.

    Fewer, where there are not so many.
    """
    free = sorted(os.sched_getaffinity(0))
    seen: dict[str, list[int]] = {}
    for cpu in free:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        seen.setdefault(file.read_text().strip() if file.exists() else str(cpu), []).append(cpu)
    first = [twins[0] for twins in seen.values()]
    chosen = (first + [c for c in free if c not in first])[:ranks]
    os.sched_setaffinity(0, chosen)
    return chosen


def measured(ranks: int, budget_s: float, path: Path) -> Cluster:
    """A profile of these cores with whole steps of `laminar profile`'s own models, none of which is raced here."""
    from laminar.profile.calibrate import calibrated
    from laminar.profile.sweep import profile

    here = profile(Cluster.detect(), ranks=[ranks], budget_s=budget_s)
    here = calibrated(here, [ranks])
    here.save(path)
    return here


def searched(*args: Any) -> dict[str, Any]:
    """What `search` gives, or what went wrong."""
    try:
        return search(*args)
    except Exception:
        return {"failed": traceback.format_exc()}


def search(name: str, ranks: int, path: str, stages: bool, budget_s: float) -> dict[str, Any]:
    """The plan for a model, and what there is to say about it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = WIDER[name](ranks, True, 1)
    start = time.perf_counter()
    graph = laminar.capture(fresh(case), case.loss, case.batches[0])
    captured = time.perf_counter()
    only = None if stages else [d for d in DIMENSIONS if d != "pipeline"]
    busy = time.process_time()
    cluster = Cluster.load(path)
    plan = laminar.plan(graph, cluster, only=only, budget_s=budget_s, optimizer=case.optimizer)
    done = time.process_time()
    account, mesh = plan.account, laminar.Mesh({"dp": ranks})
    sides = [f for f in finalists(plan) if isinstance(f.plan, Plan)]
    found = Searched(plan, [], captured - start)
    if not stages:
        found = with_ddp(Searched(plan, sides, captured - start), fresh(case), Precision.of("f32"))
    by_name = {
        "data": laminar.plans.data_parallel(graph, mesh),
        "zero1": laminar.plans.zero(graph, mesh, 1),
        "zero3": laminar.plans.zero(graph, mesh, 3),
        "tensor": laminar.plans.tensor_parallel(graph, laminar.Mesh({"tp": ranks})),
    }
    predicted = {k: predict(graph, p, cluster, optimizer=case.optimizer).seconds for k, p in by_name.items()}
    return {
        "plan": plan,
        "finals": found.finals,
        "left_out": found.left_out,
        "capture_s": round(captured - start, 2),
        "search_cpu_s": round(done - busy, 2),
        "choice": account["choice"],
        "predicted_ms": {k: round(1e3 * s, 2) for k, s in {"laminar": plan.step_s, **predicted}.items()},
        "bound_ms": round(1e3 * plan.bound_s, 2),
        "rewrites": len(plan.rewrites),
    }


# --- the race


def sides_of(name: str, case: Case, plan: Any) -> dict[str, Callable[[Case], Side]]:
    """Who races for a model; DTensor where it is known how it splits it."""
    sides: dict[str, Callable[[Case], Side]] = {"laminar": partial(ours, plan=plan)}
    sides |= {preset: partial(ours, plan=preset) for preset in PRESETS}
    sides |= {"ddp": ddp, "fsdp": fsdp} | ({"dtensor": dtensor} if case.ways else {})
    return sides | ({"ddp_sparse": ddp_sparse} if name.startswith("dlrm") else {})


def begun(sides: dict[str, Callable[[Case], Side]], case: Case) -> tuple[dict[str, Side], dict[str, Any]]:
    """The sides that can be compared, each three steps on, and what is to be said of the others."""
    made: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    notes: dict[str, Any] = {}
    for name, make in sides.items():
        try:
            side = make(case)
            twin = next((n for n, s in made.items() if side.runs and s.runs == side.runs), None)
            if twin is not None:
                notes[name] = TWIN if twin == "laminar" else f"the same program as {twin}"
                continue
            losses[name] = [side.loss(side.step(i)) for i in range(3)]
            made[name] = side
        except Exception as error:
            if name == "laminar":
                raise
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for name in list(made):
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses["laminar"], strict=True))
        if made[name].same and not apart <= AGREE:
            notes[name] = f"losses part by {apart:.1e}"
            del made[name]
        elif not made[name].same:
            notes[name] = f"computes something else, losses part by {apart:.1e}: not a peer"
    return made, {"notes": notes, "losses": {n: [round(x, 6) for x in xs] for n, xs in losses.items()}}


def tried_out(case: Case, plan: Any, finals: list[Any], found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The plan that a job with `plan="auto"` takes, and how it came to it."""
    if not finals:
        return plan, {"why": "it was not asked for"}
    start = time.perf_counter()
    made = OPTIMIZERS[case.optimizer]
    batch = case.batches[0]
    about = {"capture_s": found["capture_s"], "left_out": found["left_out"]}
    taken = try_finalists.tried_finalists(World("cpu"), plan, finals, fresh(case), case.loss, made, batch, **about)
    said: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2), "predicted": finals[0].name}
    told = taken.account.get("measured")
    if told is None:
        return taken, {**said, "taken": finals[0].name, "why": taken.account["unmeasured"]}
    rows = [
        {
            "plan": r["plan"],
            "ms": round(1e3 * r["step_s"], 3),
            "predicted_ms": round(1e3 * r["predicted_s"], 3),
            "ratio": round(r["ratio"], 3),
            "taken": r["taken"],
        }
        for r in told["rows"]
    ]
    name = next(r["plan"] for r in rows if r["taken"])
    return taken, {**said, "taken": name, "rounds": told["rounds"], "rows": rows, "out": told.get("out", [])}


def race(
    name: str, ranks: int, plan: Any, finals: list[Any], found: dict[str, Any], rounds: int, until: float
) -> dict[str, Any]:
    """Rounds of turns on this rank until they are done or time is up; rank 0 decides."""
    case = WIDER[name](ranks, True, 1)
    plan, how = tried_out(case, plan, finals, found)
    made, said = begun(sides_of(name, case, plan), case)
    gc.collect()

    def turn(side: str, calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for i in range(calls):
            made[side].step(i)
        dist.barrier()
        return (time.perf_counter() - start) / calls

    first = _agreed({side: turn(side, 2) for side in made})
    calls = {side: max(1, round(TURN_S / each)) for side, each in first.items()}
    times: dict[str, list[float]] = {side: [] for side in made}
    left = list(made)
    for r in range(rounds):
        for side in left if r % 2 == 0 else reversed(left):
            times[side].append(turn(side, calls[side]))
        now = _agreed({side: statistics.median(ts) for side, ts in times.items()} | {"late": time.time() - until})
        if now["late"] > 0 and r + 1 >= LEAST:
            break
        if r + 1 == SCREEN:
            best = min((now[s] for s in left if s != "laminar" and made[s].same), default=math.inf)
            left = [s for s in left if now[s] <= FAR * best or s == "laminar" or s.startswith("ddp")]
    return {
        **said,
        "tried_out": how,
        "times": times,
        "same": {n: s.same for n, s in made.items()},
        "counts": made["laminar"].counts,
        "memory": {n: s.memory() for n, s in made.items()},
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "batch": len(next(iter(case.batches[0].values()))),
    }


def _agreed(figures: dict[str, float]) -> dict[str, float]:
    """Rank 0's."""
    box = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.broadcast(box, 0)
    return dict(zip(figures, box.tolist(), strict=True))


def on_ranks(ranks: int, job: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """What rank 0 of fresh processes gives back, or the text of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        each = [CONTEXT.Process(target=_child, args=(r, ranks, folder, job, args)) for r in range(ranks)]
        for child in each:
            child.start()
        until = time.monotonic() + limit_s
        while any(c.is_alive() for c in each):
            if any(c.exitcode for c in each) or time.monotonic() > until:
                time.sleep(0.5)  # for others to say what they know
                for child in each:
                    child.kill()
            time.sleep(0.02)
        wrong = sorted(Path(folder).glob("wrong_*"))
        if wrong:
            return wrong[0].read_text()
        if not Path(folder, "result").exists():
            return f"nothing after {limit_s:.0f} s" if time.monotonic() > until else "a rank died"
        return pickle.loads(Path(folder, "result").read_bytes())


def _child(rank: int, ranks: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        join_process_group(rank, ranks, f"{folder}/rendezvous")
        result = job(*args)
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        Path(folder, f"wrong_{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # nothing is left to do, and thread pools have been seen to abort on the way out


# --- what it comes to


def spread(ratios: list[float], rng: np.random.Generator, draws: int = DRAWS) -> tuple[float, float, np.ndarray]:
    """Quantiles of the median of rounds drawn anew, and the medians drawn."""
    each = np.array(ratios)
    medians = np.median(each[rng.integers(len(each), size=(draws, len(each)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return round(float(low), 3), round(float(high), 3), medians


def compared(run: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Ratios of all sides to ours, and of the best peer."""
    times, mine = run["times"], run["times"]["laminar"]
    peers = [s for s in times if s != "laminar"]
    ratios, draws = {}, {}
    for side in peers:
        each = [t / m for t, m in zip(times[side], mine, strict=False)]  # who was screened out has fewer
        low, high, draws[side] = spread(each, rng)
        ratios[side] = {"median": round(statistics.median(each), 3), "low": low, "high": high, "rounds": len(each)}
    for side, note in run["notes"].items():
        if note == TWIN:
            ratios[side], draws[side] = {"median": 1.0, "low": 1.0, "high": 1.0, "rounds": 0}, np.ones(DRAWS)
    same = [s for s in ratios if run["same"].get(s, True)]
    best = min(same, key=lambda s: ratios[s]["median"])
    outside = min((s for s in same if s not in PRESETS), key=lambda s: ratios[s]["median"], default=best)
    return {
        "over_laminar": ratios,
        "best_peer": best,
        "over_best": ratios[best],
        "over_outside": {"peer": outside, **ratios[outside]},
        "draws": draws[best],
    }


def summary(rows: dict[str, dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """All models together."""
    medians = {name: row["over_best"]["median"] for name, row in rows.items()}
    drawn = np.exp(np.mean([np.log(row["draws"]) for row in rows.values()], axis=0))
    low, high = np.quantile(drawn, [0.025, 0.975])
    below = [name for name, row in rows.items() if row["over_best"]["high"] < FLOOR]
    wide = {
        f"{name}: {side}": row["over_laminar"][side]["median"]
        for name, row in rows.items()
        if name in WIDE
        for side in ("ddp", "ddp_sparse")
        if side in row["over_laminar"]
    }
    return {
        "summary": True,
        "models": len(rows),
        "over_best": {name: {"peer": row["best_peer"], **row["over_best"]} for name, row in rows.items()},
        "geometric_mean": round(math.exp(statistics.fmean(map(math.log, medians.values()))), 3),
        "geometric_mean_interval": [round(float(low), 3), round(float(high), 3)],
        "target_mean": MEAN,
        "geometric_mean_outside": round(
            math.exp(statistics.fmean(math.log(row["over_outside"]["median"]) for row in rows.values())), 3
        ),
        "interval_below_floor": below,
        "low_end_below_floor": [name for name, row in rows.items() if row["over_best"]["low"] < FLOOR],
        "floor": FLOOR,
        "ddp_where_wide": wide,
        "target_where_wide": OVER_DDP,
        "failed": failed,
    }


def main() -> None:
    """Profile, search, race, sum up."""
    start = time.time()
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", nargs="*", default=list(WIDER), help=f"{' '.join(WIDER)}; none: only profile")
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--rounds", type=int, default=15, help="at most, for each model")
    args.add_argument("--limit", type=float, default=250, metavar="S", help="seconds for everything; models share them")
    args.add_argument("--profile", metavar="FILE", help="a profile of so many cores; measured and written if not there")
    args.add_argument("--profile-s", type=float, default=40, metavar="S", help="seconds for single ops of a profile")
    args.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="processor seconds of a search")
    args.add_argument("--found", metavar="FILE", help="keeps what is found, for a later run; with --rounds 0 only that")
    args.add_argument("--stages", action="store_true", help="search plans with stages too")
    args.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="try finalists out first")
    given = args.parse_args()
    os.environ["LAMINAR_CACHE"] = "off"
    cores = own_cores(given.ranks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(given.profile or f"{folder}/profile.json")
        fresh_profile = not path.exists()
        if fresh_profile:
            measured(given.ranks, given.profile_s, path)
        profiled = time.time()
        CONTEXT.set_forkserver_preload(PRELOAD)
        kept = Path(given.found) if given.found else None
        found = pickle.loads(kept.read_bytes()) if kept and kept.exists() else {}
        asked = [(n, given.ranks, str(path), given.stages, given.budget) for n in given.model if n not in found]
        with CONTEXT.Pool(len(cores)) as pool:
            found |= {a[0]: f for a, f in zip(asked, pool.starmap(searched, asked, chunksize=1), strict=True)}
        if kept:
            kept.write_bytes(pickle.dumps(found))
        fits = Cluster.load(path).profile.get("calibration", {})
    shared = {"ranks_per_core": round(given.ranks / len(cores), 2)} if len(cores) < given.ranks else {}
    about = {"ranks": given.ranks, "cores": cores, **shared, "profile": "measured" if fresh_profile else given.profile}
    about |= {"found_before": given.found} if given.found and not asked else {}
    planned = time.time()
    if not given.rounds:
        return
    report(
        BENCH,
        {
            "begin": True,
            **about,
            "profile_s": round(profiled - start, 1),
            "search_s": round(planned - profiled, 1),
            "sigma": {k: [round(v["sigma"], 3), round(v["ratio_sigma"], 3)] for k, v in fits.items()},
        },
    )
    rng, rows, failed = np.random.default_rng(0), {}, {}
    for k, name in enumerate(given.model):
        begun_s = time.time()
        share = (start + given.limit - begun_s) / (len(given.model) - k)
        if "failed" in found[name]:
            run = found[name]["failed"]
        else:
            plan, finals = found[name].pop("plan"), found[name].pop("finals")
            finals = finals if given.measure else []
            job = (race, name, given.ranks, plan, finals, found[name], given.rounds, begun_s + share)
            run = on_ranks(given.ranks, *job, limit_s=max(90.0, 3 * share))
        if isinstance(run, str):
            failed[name] = run.strip().splitlines()[-1]
            report(BENCH, {"model": name, **about, "failed": run[-1500:]})
            continue
        rows[name] = compared(run, rng)
        ms = {side: round(1e3 * statistics.median(ts), 2) for side, ts in run["times"].items()}
        shown = {k: v for k, v in rows[name].items() if k != "draws"}
        report(
            BENCH,
            {
                "model": name,
                **about,
                **shown,
                "ms": ms,
                "found": found[name],
                **{k: run[k] for k in ("tried_out", "notes", "losses", "batch", "parameters")},
                "collectives": run["counts"],
                "bytes_on_rank_0": run["memory"],
                "seconds": round(time.time() - begun_s, 1),
            },
        )
    if rows:
        report(BENCH, {**summary(rows, failed), **about, "seconds": round(time.time() - start, 1)})


if __name__ == "__main__":
    main()
