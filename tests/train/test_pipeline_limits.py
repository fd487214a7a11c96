"""Pipelines at their limits, on real ranks: how much is under way, what happens when one fails, and that nothing but
time depends on timing.

Jobs are of `StagedJob`. Where a test has to see or disturb what actors do, it does so around their firings and their
lines (`hooked`, `Shuffled`); functions whose names begin with an underscore are what a rank does.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.api import micro_batches
from laminar.cli import main
from laminar.errors import PeerError, RankError
from laminar.ir.net import Net
from laminar.runtime.pipeline.control_sockets import BYE, GONE, ControlMessage
from tests.support.marks import slow
from tests.support.rank_pool import WAIT_S, Ranks, patiently, stop_this_process
from tests.support.zoo import EXAMPLES

MICRO = 8
VOCAB = 32


class Tower(nn.Module):
    """Token ids to logits, by a few layers."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())


def batch_of(seed: int, samples: int = 2 * MICRO) -> dict[str, Tensor]:
    """Two samples a micro-batch."""
    ids = torch.randint(VOCAB, (samples, 6), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}


def adam(params: Any) -> torch.optim.Optimizer:
    """An optimizer with a memory, so that a wrong gradient is not forgotten."""
    return torch.optim.AdamW(params, lr=1e-2)


def job_of(timeout_s: float = 60.0, **options: Any) -> Any:
    """On a rank: a job with as many stages as there are ranks."""
    torch.manual_seed(0)
    model, batch = Tower(), batch_of(0)
    graph = laminar.capture(model, loss_of, micro_batches(batch, MICRO)[0])
    plan = laminar.plans.pipeline(graph, dist.get_world_size(), MICRO, **options)
    return laminar.parallelize(model, loss_of, adam, batch=batch, plan=plan, timeout_s=timeout_s, check=False)


Hook = Callable[[str, int, int], None]


def hooked(job: Any, before: Hook | None = None, after: Hook | None = None) -> Callable[[], None]:
    """Call something around every firing of a job; what is given back undoes it."""
    actors = job.pipes.training.actors
    fire = actors._run

    def run(name: str, k: int, step: int, inputs: Any) -> Any:
        if before is not None:
            before(name, k, step)
        made = fire(name, k, step, inputs)
        if after is not None:
            after(name, k, step)
        return made

    actors._run = run
    return lambda: setattr(actors, "_run", fire)


def late(seed: str, mean_s: float = 0.001) -> Hook:
    """Sleeps of random lengths, now and then a long one."""
    dice = random.Random(seed)
    return lambda *_: time.sleep(dice.lognormvariate(0, 1.0) * mean_s)


# -- how much is under way


Log = list[tuple[int, str, bool]]
"""When, which actor, and whether a firing ended (or began)."""


def _logged(options: dict[str, Any], steps: int) -> tuple[Net, Log, dict[str, int], list[float]]:
    """Two ways to know what is under way: when firings of this rank began and ended, and what its registers say."""
    job, log = job_of(**options), Log()
    rank, actors = dist.get_rank(), job.pipes.training.actors

    def before(name: str, k: int, step: int) -> None:
        log.append((time.perf_counter_ns(), name, False))
        for out in actors.outlets.values():
            assert out.made - out.read <= out.queue.registers, out.queue.name

    def after(name: str, k: int, step: int) -> None:
        delay(name, k, step)
        log.append((time.perf_counter_ns(), name, True))

    delay = late(f"{rank} {options}")
    hooked(job, before, after)
    losses = [float(job.step(batch_of(i)).loss) for i in range(steps)]
    out = actors.net, log, actors.peaks, losses
    job.close()
    return out


def in_flight(net: Net, logs: list[Log]) -> dict[str, int]:
    """For each queue the most registers in use when a firing of its producer began, by all ranks' clocks (one here)."""
    begun: dict[str, list[int]] = {a.name: [] for a in net.actors}
    ended: dict[str, list[int]] = {a.name: [] for a in net.actors}
    for log in logs:
        for at, name, end in log:
            (ended if end else begun)[name].append(at)
    out = {}
    for q in net.queues:
        out[q.name] = q.filled
        for n, at in enumerate(begun[q.producer], 1):
            read = min(q.taken(c) * bisect(ended[c], at) for c in q.consumers)
            out[q.name] = max(out[q.name], q.filled + n * q.gives - read)
    return out


@pytest.mark.parametrize("world", [2, slow(4)])
def test_a_stage_stashes_no_more_than_its_depth_under_1f1b(world: int, two: Ranks, four: Ranks) -> None:
    """Stage s of S holds S - s micro-batches, no more and no less, whatever the times: that is the point of 1F1B."""
    found = (two if world == 2 else four).run(_logged, {}, 3)
    net = found[0][0]
    seen = in_flight(net, [log for _, log, _, _ in found])
    for s, (_, log, peaks, _) in enumerate(found):
        assert len(log) == 3 * 2 * len(net.orders[s])
        mine = [(name[0], end) for _, name, end in log if name[0] in "FB"]
        under = itertools.accumulate(1 if part == "F" else -1 for part, end in mine if end == (part == "B"))
        assert max(under) == seen[f"F{s}->B{s}"] == peaks[f"F{s}->B{s}"] == world - s


def random_options(dice: random.Random) -> dict[str, Any]:
    """A window, a stash and a schedule."""
    return {
        "schedule": dice.choice(("1f1b", "1f1b", "gpipe", "zero-bubble", "backward-first")),
        "window": dice.choice((0, 1, 2, 3, None)),
        "stash": dice.choice((1.0, 1.25, 1.5, 2.0, 3.0)),
    }


def stays_within_grants(ranks: Ranks, options: dict[str, Any], losses: list[float]) -> None:
    """No queue ever has more registers in use than it was given, by the clock and by the registers' own account."""
    found = ranks.run(_logged, options, 2)
    net = found[0][0]
    seen = in_flight(net, [log for _, log, _, _ in found])
    peaks = {name: most for _, _, mine, _ in found for name, most in mine.items()}
    for q in net.queues:
        assert seen[q.name] <= peaks[q.name] <= q.registers, q.name
    assert all(said == losses for *_, said in found)


SEEDS = [*range(3), *(slow(seed) for seed in range(3, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_registers_in_flight_never_exceed_the_grant(seed: int, two: Ranks, four: Ranks) -> None:
    """Whatever the window and the stash, with stages that dawdle at random; and the losses are the same bits."""
    ranks = two if seed % 3 else four
    options = random_options(random.Random(f"grants {seed}"))
    if options["schedule"] == "backward-first" and options["window"] is not None:
        options["window"] = None  # a list of priorities, not an order to keep
    wanted = ranks.run(_logged, {}, 2)[0][3]
    stays_within_grants(ranks, options, wanted)


class Wide(nn.Module):
    """A few numbers in; 256 KB to keep for backward and 256 KB to hand on in its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(8, 16), nn.Linear(16, 1024), nn.Linear(1024, 1)
        self.gain = nn.Parameter(torch.ones(1024))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.embed(ids))) * self.gain)


def _flooded(micro: int, steps: int) -> tuple[dict[str, int], list[int], dict[str, int]]:
    """Bytes of one register by queue, resident bytes behind each step, and the most registers in use by queue."""
    torch.manual_seed(0)
    model, batch = Wide(), torch.randint(8, (64 * micro,))
    mean = lambda m, ids: m(ids).square().mean()  # noqa: E731
    graph = laminar.capture(model, mean, batch[:64])
    plan = laminar.plans.pipeline(graph, ["head"], micro)
    job: Any = laminar.parallelize(model, mean, adam, batch=batch, plan=plan, timeout_s=60.0)
    if dist.get_rank() == 1:
        hooked(job, lambda name, k, step: time.sleep(0.0002) if name == "F1" else None)
    resident = []
    for _ in range(steps + 2):
        job.step(batch)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    actors = job.pipes.training.actors
    sizes, peaks = {q.name: q.bytes for q in actors.net.queues}, actors.peaks
    job.close()
    return sizes, resident[2:], peaks


@pytest.mark.slow
def test_memory_of_a_stage_stays_flat_over_ten_thousand_micro_batches(two: Ranks) -> None:
    """A fast first stage before a slow one: all it makes would be 2.6 GB. Within 4 MB of itself after two steps."""
    (sizes, resident, peaks), _ = two.run(_flooded, 500, 20)
    assert sizes["F0->F1"] == 64 * 1024 * 4 <= sizes["F0->B0"]
    assert max(resident) - min(resident) < 4 << 20, [n - resident[0] for n in resident]
    assert peaks["F0->B0"] == 2


# -- what happens when one fails


def _grieved(how: str, who: int, timeout_s: float) -> tuple[str, str, float, float]:
    """A job that fails in its second step: this rank's error, its seconds since the last firing, those to close."""
    job, rank = job_of(timeout_s, window=2, stash=2.0), dist.get_rank()
    last = time.monotonic()

    def before(name: str, k: int, step: int) -> None:
        nonlocal last
        last = time.monotonic()
        if (rank, name, k, step) == (who, f"B{who}", 3, 1):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "left":
                os._exit(3)
            elif how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)

    hooked(job, before)
    job.step(batch_of(0))
    batch = batch_of(1)
    if how == "poisoned":  # a label that does not exist, in the fourth micro-batch: the last stage will not take it
        batch["target"][2 * 3 + 1, 2] = VOCAB + 5
    try:
        job.step(batch)
    except RankError as error:
        told = time.monotonic()
        job.close()
        return type(error).__name__, str(error), told - last, time.monotonic() - told
    return "", "no error", 0.0, 0.0


@pytest.mark.parametrize("world", [2, 4])
def test_a_poisoned_micro_batch_ends_every_rank_of_a_job_with_its_name(world: int, two: Ranks, four: Ranks) -> None:
    """An op raises on a value: every rank says which stage, micro-batch and step it was, and what the op said."""
    found = (two if world == 2 else four).run(_grieved, "poisoned", -1, 200.0)
    for rank, (kind, text, after_s, close_s) in enumerate(found):
        assert kind == (RankError if rank == world - 1 else PeerError).__name__
        assert f"rank {world - 1} failed in F{world - 1}.3 (micro-batch 3, step 1): IndexError: Target" in text
        assert after_s < 100 and close_s < 100  # half of the time limit: nobody waited for it


def survivors(world: int, how: str, who: int, timeout_s: float) -> dict[int, tuple[str, str, float, float]]:
    """What the ranks that are left say; none of their processes is left then."""
    ranks = Ranks(world)
    ranks._start()
    pids = [child.pid for child in ranks.children]
    try:
        for tasks in ranks.tasks:
            tasks.put((_grieved, (how, who, timeout_s)))
        out = {}
        for _ in range(world - 1):
            rank, value, error = ranks.results.get(timeout=WAIT_S)
            assert error is None, error
            out[rank] = value
    finally:
        ranks.stop(kill=True)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    return out


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (4, "killed"),
        slow(2, "killed"),
        slow(2, "left"),
        slow(4, "left"),
    ],
)
def test_a_dead_stage_is_named_by_every_rank_that_is_left(world: int, how: str) -> None:
    """Neighbours see its line end and tell the others: with a time limit of minutes, nobody waits for that."""
    found = survivors(world, how, 1, 200.0)
    assert set(found) == {*range(world)} - {1}
    for kind, text, after_s, close_s in found.values():
        assert kind == PeerError.__name__
        assert "rank 1 has ended without a word" in text
        assert after_s < 100 and close_s < 100


@pytest.mark.parametrize(("world", "who"), [(2, 1), slow(4, 2), slow(4, 0)])
def test_a_stage_that_stops_answering_is_named_within_the_time_limit(world: int, who: int) -> None:
    """The process is there and its lines are open: only signs of life are missing."""
    found = patiently(
        lambda s: survivors(world, "stopped", who, s),
        lambda found: all(f"rank {who} has given no sign of life" in text for _, text, *_ in found.values()),
    )
    assert set(found) == {*range(world)} - {who}
    for kind, text, *_ in found.values():
        assert kind == PeerError.__name__
        assert f"rank {who} has given no sign of life" in text


def ranks_of(launcher: int) -> dict[int, int]:
    """Ranks that a launcher has started, with their processes."""
    out = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with open(f"/proc/{child}/environ", "rb") as file:
            own = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0"))
        if b"LAMINAR_LAUNCHED" in own:
            out[int(own[b"RANK"])] = int(child)
    return out


@pytest.mark.parametrize(
    ("stages", "number", "words"),
    [
        slow(2, signal.SIGSTOP, "rank 1 of 2 is alive but did not answer the others"),
        slow(4, signal.SIGSTOP, "rank 1 of 4 is alive but did not answer the others"),
        slow(4, signal.SIGKILL, "rank 1 of 4 was ended by SIGKILL"),
    ],
)
def test_a_command_whose_stage_is_lost_ends_and_leaves_nothing(
    stages: int, number: int, words: str, tmp_path: Path
) -> None:
    """`laminar train --plan`: one error that names the rank, and no process is left, not even one that is stopped."""
    recipe, plan, run = str(EXAMPLES / "gpt.py:tiny"), str(tmp_path / "plan.json"), tmp_path / "run"
    assert main(["plan", recipe, "--stages", str(stages), "--micro-batches", "4", "-o", plan]) == 0
    command = [sys.executable, "-m", "laminar", "train", recipe, "--plan", plan, "--steps", "1000000", "--timeout", "8"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids: dict[int, int] = {}
    try:
        stop, seen = time.monotonic() + 120, run / "events.rank1.jsonl"
        while time.monotonic() < stop and not (seen.exists() and '"step"' in seen.read_text()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        pids = ranks_of(process.pid)
        assert len(pids) == stages
        os.kill(pids[1], number)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert words in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


# -- nothing but time depends on timing


class Shuffled:
    """Has a job hear what comes late and in any order, goodbyes excepted."""

    def __init__(self, job: Any, seed: str) -> None:
        self.lines, self.dice = job.pipes.training.actors._connections, random.Random(seed)
        self.held: list[ControlMessage] = []
        self.receive, self.lines.receive = self.lines.receive, self.some
        self.late = 0
        """Times that something had come and was not heard yet."""

    def some(self, wait_s: float) -> list[ControlMessage]:
        """In place of `receive`."""
        came = self.held + self.receive(0.0 if self.held else wait_s)
        byes = [m for m in came if m.kind in (BYE, GONE)]
        rest = [m for m in came if m.kind not in (BYE, GONE)]
        self.dice.shuffle(rest)
        count = self.dice.randint(0, len(rest))
        self.late += count < len(rest)
        heard, self.held = (rest + byes, []) if count == len(rest) else (rest[:count], rest[count:] + byes)
        return heard

    def undo(self) -> None:
        """Hear as before, what was held back first: what is read last in a step may be told behind its end."""
        self.lines.receive = self.rest

    def rest(self, wait_s: float) -> list[ControlMessage]:
        """From then on in place of `receive`."""
        held, self.held = self.held, []
        return held + self.receive(0.0 if held else wait_s)


def pause(name: str, k: int, step: int) -> None:
    """Stop this process for a second in its third backward."""
    if name == f"B{dist.get_rank()}" and k == 2:
        stop_this_process(1.0)


def _disturbed(options: dict[str, Any], ways: list[tuple[str, ...]]) -> list[tuple[list[float], str, float, int]]:
    """Losses, the weights' hash and seconds of the same steps from the same state, disturbed in several ways; how often
    something was heard late."""
    job, rank, out = job_of(**options), dist.get_rank(), []
    job.step(batch_of(9))
    weights = {name: t.clone() for name, t in job.state_dict().items()}
    for i, way in enumerate(ways):
        job.load_state_dict(weights)
        job.optimizer.state.clear()
        job.state.steps = 1
        undo = []
        if "jitter" in way:
            undo.append(hooked(job, late(f"{rank} {i}", 0.002)))
        if "pause" in way and rank == 1:
            undo.append(hooked(job, pause))
        shuffling = Shuffled(job, f"{rank} {i}") if "shuffle" in way else None
        begun = time.monotonic()
        losses = [float(job.step(batch_of(k)).loss) for k in range(1 if "pause" in way else 3)]
        took = time.monotonic() - begun
        for undone in reversed(undo):
            undone()
        losses += [float(job.step(batch_of(k)).loss) for k in range(len(losses), 3)]
        if shuffling is not None:
            shuffling.undo()
        out.append((losses, job.hash(), took, shuffling.late if shuffling else 0))
    job.close()
    return out


WAYS: list[tuple[str, ...]] = [(), ("jitter",), ("pause",), ("shuffle",), ("jitter", "pause", "shuffle")]


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {}), (2, {"window": 2, "stash": 2.0}), (4, {"window": 2, "stash": 2.0}), slow(4, {})],
    ids=str,
)
def test_disturbed_ranks_train_the_same_bits(world: int, options: dict[str, Any], two: Ranks, four: Ranks) -> None:
    """Stages that dawdle, a rank that is stopped for a second, messages late and out of turn: what is learned stays."""
    ways = WAYS if world == 2 else [WAYS[0], WAYS[-1]]
    found = (two if world == 2 else four).run(_disturbed, options, ways)
    calm_losses, calm_hash, *_ = found[0][0]
    for mine in found:
        for way, (losses, weights, took, heard_late) in zip(ways, mine, strict=True):
            assert losses == calm_losses and weights == calm_hash, way
            assert took >= 1.0 or "pause" not in way  # they were disturbed
            assert heard_late > 0 or "shuffle" not in way
    assert len(set(calm_losses)) == 3
