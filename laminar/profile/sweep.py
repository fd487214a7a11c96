"""Measuring a machine: ranks that run the same ops and exchanges at once, and what they found, in one profile.

A section of the table is measured by as many fresh processes as it has ranks, each with its share of the cores, as
the launcher starts them. They are given keys (`grid`), measure them in blocks of like size, most needed first, and
stop when time is up; what a rank found is a file of lines, and the table gets the median over ranks. Exchanges are
measured by the same ranks. `profile` does it for every number of ranks and turns the best that was seen into the
cluster's own figures.

A block holds ops of like size, because an op's surroundings are part of its price: a view between large products
finds the caches empty. The ops of given programs can be measured besides, those first that are thought to take longest.

On a GPU ops are measured one by one. One that fails is noted and left out; one that leaves the device unusable takes
its process along, and another goes on behind it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laminar.cost.ops.families import measured_traits
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.strides import layouts
from laminar.cost.ops.table import Entry, Section, Table, cpu_section, key_of, local_call
from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.program import Program
from laminar.profile import shapes

Progress = Callable[[int, int, str], None]
"""(done, total, what is being measured)."""
OPS_PER_BLOCK = 40
CLASSES_S = (1e-5, 6e-5, 6e-4)
"""Ops below, between and above these times (by a roofline of an ordinary core) are stirred apart."""
EXCHANGE_SHARE = 0.4
"""Of a section's time, what exchanges get where there are any."""
BLOCK_S = (0.3, 6.0)
"""A block gets its part of the time that is left, by what is in it, within these limits."""
FUSED_FROM = 0.55
"""Of the time for ops, where compiled kernels begin, on a GPU."""
MOST_FAILURES = 5
"""How many processes a GPU may take along before measuring ends with what there is."""
CALL_S = 2e-4
"""What measuring an op costs besides running it, for dealing out time."""


def cores_here() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- what is measured -------------------------------------------------------------------------


def blocks(keys: Sequence[str]) -> list[list[str]]:
    """Keys in blocks of like size; the first blocks hold the first keys."""
    out: list[list[str]] = []
    open_: dict[int, list[str]] = {}
    for key in keys:
        size = sum(roughly_s(key) > limit for limit in CLASSES_S)
        block = open_.setdefault(size, [])
        if not block:
            out.append(block)
        block.append(key)
        if len(block) == OPS_PER_BLOCK:
            del open_[size]
    return out


def roughly_s(key: str) -> float:
    """Seconds on an ordinary core, for dealing out time."""
    t = measured_traits(key)
    return t.flops / 8e10 + t.nbytes / 8e9


def keys_of(programs: Iterable[Program], cost: OpCost, ranks: int | None = None) -> list[str]:
    """The distinct local ops of programs, those first that are thought to take most of the time in all.

    Only programs for `ranks` ranks count, if that is given; every rank's shapes do.
    """
    share: dict[str, float] = {}
    for program in programs:
        if ranks is not None and program.mesh.ranks != ranks:
            continue
        for rank in sorted({0, program.mesh.ranks - 1}):
            calls = {i.name: local_call(i, program.mesh, rank) for i in program.instrs}
            lying = layouts(program, calls)
            for instr in program.instrs:
                if instr.kind:
                    continue
                call, marks = calls[instr.name], lying.marks[instr.name]
                if any(s.numel == 0 for s in (*call.ins, *(o for o in call.outs if o))):
                    continue
                key = key_of(call, marks)
                answer = cost(call.op, call.ins, call.outs, call.args, marks)
                share[key] = share.get(key, 0.0) + answer.seconds
    return sorted(share, key=lambda k: -share[k])


# --- the ranks that measure -------------------------------------------------------------------


@dataclass(frozen=True)
class SweepJob:
    """What ranks are told."""

    ranks: int
    threads: int
    device: str
    keys: list[str]
    ops_s: float
    exchanges_s: float
    fused: bool = False
    skip: tuple[str, ...] = ()
    """Compiled kernels that were tried already."""


def measure_section(
    job: SweepJob, progress: Progress | None = None
) -> tuple[Section, list[dict[str, Any]], dict[str, Any]]:
    """Entries, rows of exchanges, and other figures, by `job.ranks` fresh processes. None is left behind."""
    if job.device != "cuda" or job.ranks > 1:
        found, problem = _by_ranks(job, progress)
        if problem is not None:
            raise problem
        return _merged(found)
    every: list[dict[str, Any]] = []
    stop = time.monotonic() + job.ops_s
    for attempt in range(MOST_FAILURES + 1):
        (lines,), problem = _by_ranks(job, progress)
        every += lines
        tried = [line["trying"] for line in lines if "trying" in line]
        if problem is None:
            break
        if not tried and not attempt:
            raise problem  # it never got as far as measuring
        if tried:
            every.append({"failed": {tried[-1]: "took its process along: " + " ".join(str(problem).split())[-270:]}})
        left = stop - time.monotonic()
        if left < 5.0 or not tried:
            break
        seen = frozenset(tried)
        job = replace(job, keys=[k for k in job.keys if k not in seen], ops_s=left, skip=(*job.skip, *tried))
    return _merged([every])


def _by_ranks(job: SweepJob, progress: Progress | None) -> tuple[list[list[dict[str, Any]]], LaminarError | None]:
    """What each rank has written down, and what went wrong, if anything did."""
    with tempfile.TemporaryDirectory(prefix="laminar-profile-") as folder:
        at = Path(folder)
        (at / "job").write_text(json.dumps(job.__dict__))
        found_at = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(job.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": found_at,
        }
        with (at / "log").open("wb") as log:
            command = [sys.executable, "-m", "laminar.profile.sweep", folder]
            ranks = [
                subprocess.Popen([*command, str(r)], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for r in range(job.ranks)
            ]
        problem = None
        try:
            _follow(at, ranks, job, progress)
        except LaminarError as error:
            problem = error
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [_lines(at / f"found{r}") for r in range(job.ranks)], problem


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a rank has written; a line that it could not finish is left out."""
    out = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            out.append(json.loads(text))
    return out


def _follow(at: Path, ranks: list[subprocess.Popen[bytes]], job: SweepJob, progress: Progress | None) -> None:
    """Until all ranks are done; the first to fail is told with the end of its log."""
    stop = time.monotonic() + job.ops_s + job.exchanges_s + 120.0
    shown = ""
    while any(p.poll() is None for p in ranks):
        failed = [r for r, p in enumerate(ranks) if p.poll() not in (None, 0)]
        late = time.monotonic() > stop
        if failed or late:
            text = (at / "log").read_text(errors="replace").strip()[-2000:]
            what = f"rank {failed[0]} of {job.ranks} failed while measuring" if failed else "measuring does not end"
            raise LaminarError(
                what, log=f"\n{text}", next="measure with fewer ranks, or see what else the machine does"
            )
        if progress is not None:
            with contextlib.suppress(OSError, ValueError):
                text = (at / "progress").read_text()
                if text != shown:
                    shown = text
                    done, total, what = json.loads(text)
                    progress(done, total, what)
        time.sleep(0.05)
    if any(p.returncode for p in ranks):
        raise LaminarError("a rank failed while measuring", log="\n" + (at / "log").read_text(errors="replace")[-2000:])


def _merged(found: list[list[dict[str, Any]]]) -> tuple[Section, list[dict[str, Any]], dict[str, Any]]:
    """One answer from what each rank has found: the median over ranks."""
    ops: dict[str, list[list[float]]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    other: dict[str, Any] = {}
    for line in (line for lines in found for line in lines):
        for key, entry in line.get("ops", {}).items():
            ops.setdefault(key, []).append(entry)
        if "row" in line:
            name = json.dumps({k: v for k, v in line["row"].items() if k not in ("seconds", "spread")})
            rows.setdefault(name, []).append(line["row"])
        if "other" in line:
            other |= line["other"]
        if "failed" in line:
            other["failed"] = {**other.get("failed", {}), **line["failed"]}
    entries = {}
    for key, each in ops.items():
        seconds = statistics.median(e[0] for e in each)
        apart = statistics.pstdev(e[0] for e in each) / seconds / math.sqrt(len(each))
        spread = statistics.fmean(e[1] for e in each)
        entries[key] = Entry(seconds, math.hypot(spread, apart), int(min(e[2] for e in each)))
    merged = []
    for each_row in rows.values():
        seconds = statistics.median(r["seconds"] for r in each_row)
        merged.append({**each_row[0], "seconds": seconds})
    return Section(other.pop("device", ""), other.pop("versions", {}), entries), merged, other


def work(folder: Path, rank: int) -> None:
    """One rank's side."""
    # Long because it is the script of a process: what is timed, in which order, and what ranks agree on in between.
    import torch
    import torch.distributed as dist

    from laminar.profile import time_collectives, time_op
    from laminar.runtime.code.malloc import keep_freed_memory
    from laminar.runtime.comm.transport import join_process_group

    keep_freed_memory()
    job = SweepJob(**json.loads((folder / "job").read_text()))
    torch.set_num_threads(job.threads)
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device(job.device)
    if job.ranks > 1:
        join_process_group(rank, job.ranks, str(folder / "rendezvous"), "nccl" if job.device == "cuda" else "gloo")

    def agree(mine: bool) -> bool:
        """Whether any rank says yes."""
        if job.ranks == 1:
            return mine
        said = torch.tensor([int(mine)], device=device)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())

    def go(mine: bool) -> bool:
        """Whether all ranks say yes."""
        return not agree(not mine)

    todo = blocks(job.keys)
    total = len(job.keys)
    done = 0

    def say(text: str, done: int, total: int) -> None:
        if rank == 0:
            (folder / "progress.new").write_text(json.dumps([done, total, text]))
            (folder / "progress.new").replace(folder / "progress")

    with (folder / f"found{rank}").open("w") as found:

        def note(**line: Any) -> None:
            found.write(json.dumps(line) + "\n")
            found.flush()

        versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
        note(other={"device": _device_name(device), "versions": versions})
        began = time.monotonic()
        until = began + job.ops_s * (FUSED_FROM if job.fused else 1.0)
        if device.type == "cuda":
            _one_by_one(job, device, until, note, say)
            todo = []
        for number, block in enumerate(todo):
            left = until - time.monotonic()
            if not go(left > 0):
                break
            say(f"ops, {job.ranks} rank{'s' * (job.ranks > 1)}", done, total)
            usable = [key for key in block if _runs(key, device)]
            mine, rest = (sum(roughly_s(k) + CALL_S for b in part for k in b) for part in ([block], todo[number:]))
            limit_s = min(max(0.75 * left * mine / rest, BLOCK_S[0]), BLOCK_S[1])  # making operands takes time too
            entries = time_op.stirred(usable, limit_s, agree, seed=number)
            note(ops={k: [e.seconds, round(e.spread, 5), e.repeats] for k, e in entries.items()})
            done += len(block)
        note(other={"launch_s": time_op.launch_s(device)})
        if job.fused:
            from laminar.profile import time_fused as fused

            for key, entry in fused.measure(device, began + job.ops_s, frozenset(job.skip), note):
                note(ops={key: [entry.seconds, round(entry.spread, 5), entry.repeats]})
                say("fused kernels", done, total)
        if job.ranks > 1 and job.exchanges_s > 0:
            until = time.monotonic() + job.exchanges_s
            for count, row in enumerate(time_collectives.measure_exchanges(device, job.threads, until, agree, go)):
                note(row=row)
                say(f"exchanges of {job.ranks} ranks", count, 10 * len(time_collectives.EXCHANGE_SIZES))
            note(other={"overlap": time_collectives.measure_overlap(device)})
            dist.barrier()
    # Torch's thread pools sometimes abort while an interpreter is taken down; everything is on disk.
    sys.stdout.flush()
    os._exit(0)


def _one_by_one(job: SweepJob, device: Any, until: float, note: Callable[..., None], say: Callable[..., None]) -> None:
    """Ops of a GPU, each for itself, until time is up."""
    import torch

    from laminar.profile import time_op

    if not job.skip:
        note(other={"workspace_bytes": time_op.workspace_bytes(device)})
    timer = time_op.Timer(device, 0.05)
    for number, key in enumerate(job.keys):
        if time.monotonic() > until:
            return
        if number % OPS_PER_BLOCK == 0:
            say("ops", number, len(job.keys))
            torch.cuda.empty_cache()  # memory of recordings that are gone
        note(trying=key)
        try:
            entry = timer(time_op.runs_of(key, device))
        except Exception as error:
            note(failed={key: f"{type(error).__name__}: {error}"[:300]})
            torch.cuda.synchronize(device)  # a device that does not answer any more ends this process
            continue
        note(ops={key: [entry.seconds, round(entry.spread, 5), entry.repeats]})


def _runs(key: str, device: Any) -> bool:
    """Whether an op runs here at all: a dtype or a kernel may be missing."""
    import torch

    from laminar.profile.time_op import runs_of

    try:
        with torch.no_grad():
            runs_of(key, device, 1)[0]()
        return True
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        return False


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# --- a profile --------------------------------------------------------------------------------


def profile(
    cluster: Cluster,
    *,
    ranks: Sequence[int] | None = None,
    budget_s: float = 150.0,
    programs: Iterable[Program] = (),
    progress: Progress | None = None,
) -> Cluster:
    """The cluster with what was measured on this machine: a profile, and figures of its own marked "measured".

    `ranks`: how many processes measure at once, one section each; by default 1, 2, 4, ... up to the cores (or GPUs).
    `programs`: their local ops are measured besides. What the cluster's profile has already is kept and extended.
    """
    gpu = cluster.device.kind == "gpu"
    if gpu:
        import torch

        if not torch.cuda.is_available():
            raise LaminarError(
                f"cluster {cluster.name} has GPUs, this machine has none",
                next='profile Cluster.detect() or Cluster.preset("2xcpu")',
            )
        available = torch.cuda.device_count()
    else:
        available = cores_here()
    counts = list(ranks) if ranks else [n for n in (1, 2, 4, 8, 16) if n <= min(available, cluster.devices)]
    programs = list(programs)
    old = dict(cluster.profile)
    kept: dict[str, Any] = {}
    table, rows, overlap = Table.of(old), list(old.get("collectives", ())), list(old.get("overlap", ()))
    for n in counts:
        each_s = budget_s / len(counts) - 5.0  # processes take some seconds to start
        threads = max(1, cores_here() // n)
        wished = keys_of(programs, OpCost(cluster), n)
        exchanges_s = EXCHANGE_SHARE * each_s if n > 1 else 0.0
        keys = list(dict.fromkeys([*wished, *shapes.keys("gpu" if gpu else "cpu")]))
        keys = [] if gpu and n > 1 else keys  # one GPU is like another
        ops_s = max(2.0, each_s - exchanges_s)
        job = SweepJob(n, threads, "cuda" if gpu else "cpu", keys, ops_s, exchanges_s, fused=gpu and n == 1)
        section, found, other = measure_section(job, progress)
        if section.ops:
            name = f"cuda/{cluster.device.name}" if gpu else cpu_section(n, threads)
            table = table.extended(Table({name: section}))
        fresh = {_same(r) for r in found}
        rows = [r for r in rows if _same(r) not in fresh] + found
        if "overlap" in other:
            overlap = [r for r in overlap if r.get("ranks") != n] + [other["overlap"]]
        kept |= {k: other[k] for k in ("workspace_bytes", "failed") if k in other}
        launch = other.get("launch_s")
        if launch is not None and n == counts[0]:
            cluster = replace(cluster, device=replace(cluster.device, launch_s=Figure(launch, "measured", "small add")))
    made = {**old, **kept, "ops": table.to_json(), "collectives": rows, "overlap": overlap}
    return with_figures(replace(cluster, profile=made))


def measure_instrs(cluster: Cluster, programs: Iterable[Program], section: str, budget_s: float) -> Cluster:
    """The cluster with the local ops of programs measured in one section, those that take longest first."""
    kind, *rest = section.split("/")
    counted = dict(part.split("=") for part in rest if "=" in part)
    n, threads = int(counted.get("ranks", 1)), int(counted.get("threads", 1))
    keys = keys_of(programs, OpCost(cluster, section), n if kind == "cpu" else None)
    found, _, _ = measure_section(SweepJob(n, threads, kind, keys, budget_s, 0.0))
    table = Table.of(cluster.profile).extended(Table({section: found}))
    return replace(cluster, profile={**cluster.profile, "ops": table.to_json()})


def _same(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(k) for k in ("backend", "kind", "ranks", "bytes", "resident"))


def with_figures(cluster: Cluster) -> Cluster:
    """The cluster's own rates, from the best that its profile has."""
    device, sections = cluster.device, Table.of(cluster.profile).sections
    name = max(sections, key=lambda s: (len(sections[s].ops), s), default=None)  # of equals, that with most ranks
    if name is None:
        return cluster
    cost = OpCost(cluster, name)
    threads = int(name.rpartition("threads=")[2]) if "threads=" in name else 1
    note = f"best of {len(cost.measured.ops)} ops, {name}"
    seen = {measured_traits(key).dtype for key in cost.measured.ops}
    rates = {
        dtype: Figure(rate / threads, "measured", note) if dtype in seen else device.flops_per_s[dtype]
        for dtype, rate in cost.rates.flops_per_s.items()
        if dtype in seen & {"f64", "f32", "bf16", "f16"} or dtype in device.flops_per_s
    }
    flow = Figure(cost.rates.bytes_per_s / (threads if device.kind == "cpu" else 1), "measured", note)
    device = replace(device, flops_per_s=rates, bytes_per_s=flow)
    if device.kind == "gpu":
        least = min(e.seconds for e in cost.measured.ops.values())
        device = replace(device, kernel_s=Figure(least, "measured", f"least {note}"))
    else:
        device = replace(device, launch_s=Figure(cost.rates.call_s, "measured", "a view between small ops"))
    return replace(cluster, device=device, levels=_levels(cluster))


def _levels(cluster: Cluster) -> tuple[Any, ...]:
    """The innermost level with the latency and rate of its own gathers."""
    rows = [r for r in cluster.profile.get("collectives", ()) if r["backend"] == cluster.backend]
    gathers = [r for r in rows if r["kind"] == "all_gather"]
    if not gathers or not cluster.levels:
        return cluster.levels
    small = min(gathers, key=lambda r: (r["bytes"], r["ranks"]))
    large = max(gathers, key=lambda r: (r["bytes"], -r["ranks"]))
    part = (large["ranks"] - 1) / large["ranks"]
    rate = large["bytes"] * part / max(large["seconds"] - small["seconds"], 1e-9)
    first = replace(
        cluster.levels[0],
        latency_s=Figure(
            small["seconds"] / max(1, small["ranks"] - 1), "measured", f"all-gather of {small['bytes']} B"
        ),
        bytes_per_s=Figure(rate, "measured", f"all-gather of {large['bytes']} B by {large['ranks']} ranks"),
    )
    return (first, *cluster.levels[1:])


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
