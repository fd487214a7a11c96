"""Actors on real ranks: processes joined by Gloo, with data through shared memory and through c10d."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laminar.errors import PeerError, RankError
from laminar.ir.net import Actor, Net, Queue
from laminar.runtime.pipeline import c10d_channels
from laminar.runtime.pipeline.c10d_channels import PostedSender
from laminar.runtime.pipeline.channels import RingSender, Value
from laminar.runtime.pipeline.connect import connect_actors
from tests.support.actor_nets import edges_of, pipeline, place, random_net
from tests.support.in_process_net import Sums, expected, first_values
from tests.support.rank_pool import WAIT_S, Ranks, patiently, stop_this_process

WAYS = ["shared", "lines", "gloo"]
"""Through shared memory; small messages on lines, as between machines; everything by c10d."""


def told(way: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """On a rank: how to join so that data goes one way."""
    c10d_channels.INLINE_BYTES = 0 if way == "gloo" else 1 << 17
    return {"shared": way == "shared", "timeout_s": timeout_s}


Firing = Callable[[str, int, int, dict[str, list[Value]]], dict[str, list[Value]]]


def numbers(net: Net, steps: list[int], way: str, seed: int | None = None) -> Any:
    """On a rank: run a net of numbers, some steps at a time, and give the log and the kinds of channel."""
    rank = dist.get_rank()
    run: Any = Sums(net, rank) if any(rank in p.ranks for p in net.places) else None
    dice = random.Random(seed)

    def later(*args: Any) -> Any:
        if seed is not None and rank == 0:
            time.sleep(dice.expovariate(500))
        return run(*args)

    actors = connect_actors(net, later, routes=edges_of(net), initial=first_values(net, rank), **told(way))
    if actors is None:
        return {}, set()
    with actors:
        assert [actors.run(n) for n in steps] == steps
        kinds = {type(s).__name__ for s in actors._senders.values()}
    return run.log, kinds


def check(net: Net, logs: list[Any], steps: int) -> None:
    """What ranks made is what plain evaluation makes."""
    for (name, k, step), rows in expected(net, steps).items():
        for rank, row in zip(net.places[net.by_name[name].place].ranks, rows, strict=True):
            assert logs[rank][0][name, k, step] == row, (name, k, step, rank)


@pytest.mark.parametrize("window", [0, None])
@pytest.mark.parametrize("way", WAYS)
def test_two_stages_on_two_ranks(two: Ranks, way: str, window: int | None) -> None:
    """Several runs with one set of channels, closed and recomputed by the next test on the same ranks."""
    net = pipeline([place(0), place(1)], 4, window=window)
    logs = two.run(numbers, net, [1, 0, 3], way)
    check(net, logs, 4)
    assert logs[0][1] == {(RingSender if way == "shared" else PostedSender).__name__}


@pytest.mark.parametrize("window", [0, 2, None])
@pytest.mark.parametrize("way", WAYS)
def test_places_of_other_sizes_on_four_ranks(four: Ranks, way: str, window: int | None) -> None:
    """Two ranks, one, and the same one with another, so that ranks are in several places; one of them is slow."""
    net = pipeline([place(0, 1), place(2), place(2, 3)], 4, window=window)
    check(net, four.run(numbers, net, [2, 1], way, 7), 3)


def test_a_rank_of_the_world_may_be_in_no_place(four: Ranks) -> None:
    """It takes part in making groups, and in nothing else."""
    net = pipeline([place(3), place(1)], 3)
    check(net, four.run(numbers, net, [2], "gloo"), 2)


@pytest.mark.parametrize("way", WAYS)
def test_random_nets_on_real_ranks(four: Ranks, way: str) -> None:
    """Overlapping places, rates, windows: the same bits as by plain evaluation."""
    dice = random.Random(way)
    for seed in range(6):
        net = next(n for n in (random_net(dice) for _ in range(1000)) if n is not None and len(n.queues) > 3)
        check(net, four.run(numbers, net, [2], way, seed), 2)


def sizes(way: str) -> list[float]:
    """On a rank: micro-batches of different sizes through one pipe, one or several tensors each."""
    count = 40
    actors = (Actor("a", "forward", 0, count), Actor("b", "forward", 1, count))
    orders = (tuple(("a", k) for k in range(count)), tuple(("b", k) for k in range(count)))
    net = Net((place(0), place(1)), actors, (Queue("q", "a", ("b",), 3, bytes=1 << 20),), orders)
    got = []

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        dice = random.Random(k)
        made = [torch.full((dice.randint(0, 200), dice.randint(1, 200)), float(k + 1)).t() for _ in range(k % 4)]
        if name == "a":
            return {"q": [Value(made, k)]}
        (value,) = inputs["q"]
        assert value.index == k
        assert len(made) == len(value.tensors)
        assert all(torch.equal(x, y) for x, y in zip(made, value.tensors, strict=True))
        got.append(float(k))
        return {}

    actors_ = connect_actors(net, run, **told(way))
    assert actors_ is not None
    with actors_:
        actors_.run(1)
    return got


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_of_different_sizes(two: Ranks, way: str) -> None:
    """Empty ones, transposed ones, several at once: registers are posted once, for the largest."""
    assert two.run(sizes, way)[1] == [float(k) for k in range(40)]


def on_gpu(way: str) -> list[float]:
    """On a rank: tensors of one GPU go to another process by way of the host."""
    actors = (Actor("a", "forward", 0, 8), Actor("b", "forward", 1, 8))
    orders = (tuple(("a", k) for k in range(8)), tuple(("b", k) for k in range(8)))
    net = Net((place(0), place(1)), actors, (Queue("q", "a", ("b",), 2, bytes=1 << 20),), orders)
    got = []

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        if name == "a":
            return {"q": [Value([torch.full((300, 300), float(k), device="cuda"), torch.ones(3, device="cuda")], k)]}
        x, y = inputs["q"][0].tensors
        assert x.is_cuda and y.is_cuda
        got.append(float(x.mean() * y.mean()))
        return {}

    made = connect_actors(net, run, device="cuda", **told(way))
    assert made is not None
    with made:
        made.run(1)
    return got


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_a_gpu_go_through_the_host(two: Ranks, way: str) -> None:
    """Gloo and shared memory know nothing of GPUs."""
    assert two.run(on_gpu, way)[1] == [float(k) for k in range(8)]


def paused(net: Net, way: str) -> Any:
    """On a rank: the same, with rank 1 stopped for a while in the middle, as by a debugger or a swapping machine."""
    rank = dist.get_rank()
    inner = Sums(net, rank)

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        if rank == 1 and (k, step) == (1, 1) and name.startswith("F"):
            stop_this_process(0.5)
        return inner(name, k, step, inputs)

    actors = connect_actors(net, run, routes=edges_of(net), initial=first_values(net, rank), **told(way))
    assert actors is not None
    with actors:
        actors.run(3)
    return inner.log, set()


@pytest.mark.parametrize("way", WAYS)
def test_a_paused_rank_changes_nothing(two: Ranks, way: str) -> None:
    """It comes back before the time limit; the others have waited, and the bits are the same."""
    net = pipeline([place(0), place(1)], 3, window=None, registers=3)
    check(net, two.run(paused, net, way), 3)


def flood(way: str, count: int) -> tuple[int, dict[str, int]]:
    """On a rank: a fast writer and a slow reader; by how much the writer's memory grew after a warm-up."""
    actors = (Actor("fast", "load", 0, count), Actor("slow", "forward", 1, count))
    orders = (tuple(("fast", k) for k in range(count)), tuple(("slow", k) for k in range(count)))
    net = Net((place(0), place(1)), actors, (Queue("q", "fast", ("slow",), 4, bytes=1 << 14),), orders)

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        if name == "fast":
            return {"q": [Value([torch.full((4096,), float(k))], k)]}
        assert inputs["q"][0].tensors[0][-1].item() == k
        if k % 100 == 0:
            time.sleep(0.005)
        return {}

    made = connect_actors(net, run, **told(way))
    assert made is not None
    with made:
        made.run(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10_000 // count):
            made.run(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, made.peaks


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_memory_of_a_writer_stays_flat_over_ten_thousand_micro_batches(two: Ranks, way: str) -> None:
    """All of them would be 160 MB; four registers are 64 kB."""
    (grown_kb, peaks), _ = two.run(flood, way, 2000)
    assert peaks == {"q": 4}
    assert grown_kb < 40_000


def doomed(how: str, timeout_s: float, way: str) -> tuple[str, str, float]:
    """On a rank: a pipeline in which rank 1 comes to grief in B1.2 of step 1; the error of the others and its delay."""
    rank = dist.get_rank()
    net = pipeline([place(r) for r in range(dist.get_world_size())], 4)
    inner = Sums(net, rank)
    begun = time.monotonic()

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        nonlocal begun
        begun = time.monotonic()
        if (name, k, step) == ("B1", 2, 1):
            if how == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "exit":
                os._exit(3)
            elif how == "silent":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "stuck":
                while not actors.control.cause:  # until this rank itself has said so
                    time.sleep(0.02)
            else:
                raise ValueError("poisoned")
        return inner(name, k, step, inputs)

    given = first_values(net, rank)
    actors: Any = connect_actors(net, run, routes=edges_of(net), initial=given, **told(way, timeout_s))
    try:
        actors.run(3)
    except RankError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    finally:
        actors.close()
    return "", "", 0.0


def grief(world: int, how: str, timeout_s: float, way: str) -> dict[int, tuple[str, str, float]]:
    """What the ranks that are left say."""
    ranks = Ranks(world)
    ranks._start()
    try:
        for tasks in ranks.tasks:
            tasks.put((doomed, (how, timeout_s, way)))
        left = world - (how in ("dead", "exit", "silent"))
        out = {}
        for _ in range(left):
            rank, value, error = ranks.results.get(timeout=WAIT_S)
            assert error is None, error
            out[rank] = value
        return out
    finally:
        ranks.stop(kill=True)


@pytest.mark.parametrize(("how", "way"), [("dead", "shared"), ("dead", "gloo"), ("exit", "lines")])
def test_a_dead_rank_is_named_at_once(how: str, way: str) -> None:
    """By its line, which ends; with a time limit of minutes nobody may wait for that."""
    out = grief(3, how, 200.0, way)
    assert set(out) == {0, 2}
    for kind, text, delay_s in out.values():
        assert kind == PeerError.__name__
        assert "rank 1 has ended without a word" in text
        assert delay_s < 100


@pytest.mark.parametrize("way", WAYS)
def test_a_poisoned_micro_batch_is_named_on_every_rank(way: str) -> None:
    """Which rank, which actor, which micro-batch, which step, and what it said."""
    out = grief(3, "poisoned", 200.0, way)
    assert set(out) == {0, 1, 2}
    for rank, (kind, text, delay_s) in out.items():
        assert kind == ("RankError" if rank == 1 else "PeerError")
        assert "rank 1 failed in B1.2 (micro-batch 2, step 1): ValueError: poisoned" in text
        assert delay_s < 100


def test_a_stopped_process_is_named_within_the_time_limit() -> None:
    """No line ends and nothing is said: only the missing signs of life tell."""
    limit_s = 3.0
    out = patiently(
        lambda s: grief(3, "silent", s, "shared"),
        lambda out: set(out) == {0, 2} and all("rank 1 has given no sign" in text for _, text, _ in out.values()),
        limit_s,
    )
    assert set(out) == {0, 2}
    for kind, text, _ in out.values():
        assert kind == PeerError.__name__
        said = re.search(r"rank 1 has given no sign of life for ([\d.]+) s", text)
        assert said and float(said[1]) >= limit_s


def test_a_firing_without_end_is_named_within_the_time_limit() -> None:
    """The rank itself says where it is, while it still is there."""
    out = patiently(
        lambda s: grief(3, "stuck", s, "gloo"),
        lambda out: all("rank 1 has been in B1.2" in text for _, text, _ in out.values()),
    )
    assert set(out) == {0, 1, 2}
    for rank, (kind, text, _) in out.items():
        assert kind == ("RankError" if rank == 1 else "PeerError")
        assert "rank 1 has been in B1.2 of step 1 for" in text


def echo(rank_of_cause: int) -> None:
    """On a rank: a place of all ranks, whose firings contain a collective; one of them fails, and all end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Net((place(*range(world)),), (Actor("F", "forward", 0, 4),), (), (tuple(("F", k) for k in range(4)),), None)

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        if rank == rank_of_cause and k == 2:
            raise ValueError("one of us")
        dist.all_reduce(torch.ones(3))
        return {}

    actors = connect_actors(net, run, **told("shared"))
    assert actors is not None
    with actors:
        actors.run(1)


@pytest.mark.parametrize("cause", [0, 2])
def test_a_collective_that_loses_a_rank_names_what_that_rank_said(cause: int) -> None:
    """The error that Gloo raises in the others is an echo; they look for the cause before they name one."""
    ranks = Ranks(3)
    ranks._start()
    try:
        for tasks in ranks.tasks:
            tasks.put((echo, (cause,)))
        for _ in range(3):
            rank, _, error = ranks.results.get(timeout=WAIT_S)
            last = error[error.rindex("laminar.errors.") :]
            assert last.startswith("laminar.errors." + ("RankError" if rank == cause else "PeerError"))
            assert f"rank {cause} failed in F.2 (micro-batch 2, step 0): ValueError: one of us" in last
    finally:
        ranks.stop(kill=True)
