"""Actors of a net in one process: whatever the order in which messages come and ranks run, the same bits come out."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from laminar.errors import NetError, PeerError, RankError
from laminar.ir.net import Actor, Net, Queue
from laminar.ir.timeline import Timeline
from laminar.runtime.pipeline.channels import Value
from laminar.runtime.pipeline.control_sockets import FAIL, ControlMessage
from laminar.runtime.pipeline.heartbeat import FailureCause
from tests.support.actor_nets import check, edges_of, hall_of, pipeline, place, random_net
from tests.support.in_process_net import Hall, Sums, first_values
from tests.support.rank_pool import patiently


@pytest.mark.parametrize("window", [0, 1, None])
def test_a_pipeline_gives_what_plain_evaluation_gives(window: int | None) -> None:
    """M gradients to one optimizer, weights back to M forwards, places of different sizes, several steps."""
    net = pipeline([place(0, 1), place(2), place(3, 4)], 4, window=window)
    hall, runs = hall_of(net)
    hall.play(3)
    check(net, hall, runs, 3)


@pytest.mark.parametrize("seed", range(60))
def test_random_nets_give_the_same_bits_whatever_comes_first(seed: int) -> None:
    """Messages late and out of turn, ranks by turns at random, one of them paused for long: nothing may show."""
    dice = random.Random(seed)
    nets = (random_net(dice) for _ in range(1000))
    net = next(n for n in nets if n is not None)
    for play in range(3):
        hall, runs = hall_of(net)
        asleep = dice.choice(hall.ranks)
        hall.play(2, seed * 10 + play, lambda turn, rank, asleep=asleep: rank == asleep and turn % 700 < 500)
        hall.play(1, seed * 10 + play)
        check(net, hall, runs, 3)
        hall.close()


def test_threads_with_jitter_give_the_same_bits() -> None:
    """The same in real time: firings of random length on ranks that run side by side."""
    net = pipeline([place(0), place(1, 2), place(3)], 6, window=None, registers=3)
    hall, runs = hall_of(net)
    for r, a in hall.actors.items():
        a._run = jittered(runs[r], r)
    assert set(hall.threads(2).values()) == {2}
    check(net, hall, runs, 2)
    hall.close()


def wait_until(condition: Callable[[], Any]) -> None:
    """Return as soon as something holds; machines may be slow."""
    ends = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.005)


def jittered(run: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """The same, later."""
    dice = random.Random(seed)

    def later(*args: Any) -> Any:
        time.sleep(dice.expovariate(2000))
        return run(*args)

    return later


def test_ranks_of_a_place_fire_in_the_order_of_their_leader() -> None:
    """Their parts contain collectives: two ranks that take ready firings in different orders would mix them up."""
    net = pipeline([place(1, 2, 3), place(0)], 6, window=None, registers=4)
    logs: dict[int, list[Any]] = {r: [] for r in range(4)}

    def run(rank: int) -> Any:
        inner = Sums(net, rank)

        def one(name: str, k: int, step: int, inputs: Any) -> Any:
            logs[rank].append((name, k, step))
            return inner(name, k, step, inputs)

        return one

    seen = set()
    for seed in range(10):
        for log in logs.values():
            log.clear()
        hall = Hall(net, run, edges_of(net), lambda r: first_values(net, r))
        hall.play(2, seed)
        assert logs[1] == logs[2] == logs[3]
        seen.add(tuple(logs[1]))
    assert len(seen) > 1, "nothing was ever chosen out of order, so this proves nothing"


def test_places_with_ranks_in_common_keep_one_order() -> None:
    """Two places on the same two ranks: if each rank took whichever is ready, their collectives would cross."""
    actors = (Actor("a", "forward", 0, 4), Actor("b", "forward", 1, 4))
    orders = (tuple(("a", k) for k in range(4)), tuple(("b", k) for k in range(4)))
    net = Net((place(0, 1), place(1, 0)), actors, (), orders, None)
    for seed in range(5):
        logs: dict[int, list[Any]] = {0: [], 1: []}
        hall = Hall(net, lambda r, logs=logs: lambda name, k, step, _: logs[r].append((name, k, step)) or {})
        hall.play(2, seed)
        assert logs[0] == logs[1]
        assert len(logs[0]) == 16


def test_a_slow_reader_holds_its_writer_back() -> None:
    """No more registers are ever in use than the queue was given, though the writer could run far ahead."""
    actors = (Actor("fast", "load", 0, 10_000), Actor("slow", "forward", 1, 10_000))
    orders = (tuple(("fast", k) for k in range(10_000)), tuple(("slow", k) for k in range(10_000)))
    net = Net((place(0), place(1)), actors, (Queue("q", "fast", ("slow",), 3, bytes=64),), orders)
    alive: Counter[str] = Counter()

    def fast(name: str, k: int, step: int, _: Any) -> dict[str, list[Value]]:
        alive["made"] += 1
        alive["most"] = max(alive["most"], alive["made"] - alive["read"])
        return {"q": [Value([torch.tensor([float(k)])], k)]}

    def slow(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        assert inputs["q"][0].tensors[0].item() == k
        alive["read"] += 1
        return {}

    hall = Hall(net, lambda r: fast if r == 0 else slow)
    hall.play(1, 3, lambda turn, rank: rank == 1 and turn % 10 > 1)
    assert alive["read"] == 10_000
    assert alive["most"] == 3
    assert hall.actors[0].peaks == {"q": 3}


def test_1f1b_stashes_no_more_than_the_stages_that_follow() -> None:
    """Stage s of S keeps at most S - s micro-batches: that is what the order is for."""
    net = pipeline([place(s) for s in range(4)], 8, registers=8)
    hall, runs = hall_of(net)
    hall.play(2, 1)
    check(net, hall, runs, 2)
    assert [hall.actors[s].peaks[f"stash{s}"] for s in range(4)] == [4, 3, 2, 1]


def test_a_place_begins_the_next_step_while_another_is_in_this_one() -> None:
    """As far as registers allow: a loader is ahead of what it loads for."""
    actors = (Actor("load", "load", 0, 2), Actor("work", "forward", 1, 2))
    orders = ((("load", 0), ("load", 1)), (("work", 0), ("work", 1)))
    net = Net((place(0), place(1)), actors, (Queue("q", "load", ("work",), 4, bytes=64),), orders)
    hall, runs = hall_of(net)
    ahead = []

    def work(name: str, k: int, step: int, inputs: Any) -> Any:
        ahead.append(hall.actors[0].agendas[0].step - step)
        return runs[1](name, k, step, inputs)

    hall.actors[1]._run = work
    hall.play(4, 0, lambda turn, rank: rank == 1 and turn < 200)
    check(net, hall, runs, 4)
    assert max(ahead) >= 2


def test_micro_batches_of_different_sizes_pass_through_one_pipe() -> None:
    """Shapes, dtypes and even the number of tensors may change from one to the next; registers stay."""
    dice = random.Random(0)
    dtypes = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
    sent = [
        [
            torch.randint(0, 2, [dice.randint(0, 5) for _ in range(dice.randint(0, 3))]).to(dice.choice(dtypes))
            for _ in range(dice.randint(0, 4))
        ]
        for _ in range(50)
    ]
    actors = (Actor("a", "forward", 0, 50), Actor("b", "forward", 1, 50))
    orders = (tuple(("a", k) for k in range(50)), tuple(("b", k) for k in range(50)))
    net = Net((place(0), place(1)), actors, (Queue("q", "a", ("b",), 3, bytes=1 << 13),), orders)
    got: list[Any] = []

    def take(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        (value,) = inputs["q"]
        assert value.index == 1000 + k
        got.append([t.clone() for t in value.tensors])
        return {}

    hall = Hall(net, lambda r: take if r else lambda name, k, step, _: {"q": [Value(sent[k], 1000 + k)]})
    hall.play(1, 5)
    for theirs, ours in zip(got, sent, strict=True):
        assert [(t.dtype, t.shape) for t in theirs] == [(t.dtype, t.shape) for t in ours]
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_what_is_kept_of_a_received_register_is_copied() -> None:
    """A stage stashes its input for backward; the register it came in is filled again long before."""
    count = 6
    actors = (Actor("send", "forward", 0, count), Actor("F", "forward", 1, count), Actor("B", "backward", 1, count))
    queues = (Queue("q", "send", ("F",), 1, bytes=64), Queue("stash", "F", ("B",), count, bytes=64))
    orders = (tuple(("send", k) for k in range(count)), tuple((n, k) for n in "FB" for k in range(count)))
    net = Net((place(0), place(1)), actors, queues, orders)
    seen = []

    def run(name: str, k: int, step: int, inputs: dict[str, list[Value]]) -> dict[str, list[Value]]:
        if name == "send":
            return {"q": [Value([torch.full((2, 2), float(k))], k)]}
        if name == "F":
            return {"stash": [Value([inputs["q"][0].tensors[0].T], k)]}
        seen.append(inputs["stash"][0].tensors[0].tolist())
        return {}

    Hall(net, lambda r: run).play(1, 2)
    assert seen == [[[float(k)] * 2] * 2 for k in range(count)]


def test_the_fewest_steps_that_a_rank_asks_for_are_run() -> None:
    """That is how data ends: a rank with two steps left says two, and nobody waits for a third."""
    net = pipeline([place(0), place(1, 2)], 2)
    hall, runs = hall_of(net)
    assert hall.threads({0: 5, 1: 2, 2: 9}) == {0: 2, 1: 2, 2: 2}
    assert hall.threads(0) == {0: 0, 1: 0, 2: 0}
    assert hall.threads(1) == {0: 1, 1: 1, 2: 1}
    check(net, hall, runs, 3)
    hall.close()
    with pytest.raises(RankError, match="closed"):
        hall.actors[0].run(1)


def test_a_poisoned_micro_batch_ends_every_rank_with_its_name() -> None:
    """The rank that fails keeps the exception; the others learn which rank, actor and micro-batch it was."""
    net = pipeline([place(s) for s in range(4)], 4)
    hall, runs = hall_of(net)

    def poisoned(name: str, k: int, step: int, inputs: Any) -> Any:
        if (name, k, step) == ("B2", 1, 1):
            raise ValueError("not a number")
        return runs[2](name, k, step, inputs)

    hall.actors[2]._run = poisoned
    out = hall.threads(3)
    for rank in (0, 1, 3):
        assert isinstance(out[rank], PeerError)
    assert isinstance(out[2], RankError) and not isinstance(out[2], PeerError)
    assert isinstance(out[2].__cause__, ValueError)
    for error in out.values():
        assert "rank 2 failed in B2.1 (micro-batch 1, step 1): ValueError: not a number" in str(error)
    for a in hall.actors.values():
        with pytest.raises(RankError, match=r"B2\.1"):
            a.run(1)
    hall.close()


def test_a_firing_that_takes_too_long_is_named_by_its_own_rank() -> None:
    """The others can't know what a rank is doing; it says so itself, in time."""
    net = pipeline([place(s) for s in range(3)], 2)

    def attempt(limit_s: float) -> dict[int, Any]:
        hall, runs = hall_of(net, timeout_s=limit_s)

        def stuck(name: str, k: int, step: int, inputs: Any) -> Any:
            if (name, k) == ("F1", 1):
                wait_until(lambda: hall.actors[0].control.cause and hall.actors[2].control.cause)
            return runs[1](name, k, step, inputs)

        hall.actors[1]._run = stuck
        out = hall.threads(1)
        hall.close()
        return out

    said = "rank 1 has been in F1.1 of step 0 for"
    for error in patiently(attempt, lambda out: all(said in str(e) for e in out.values()), 2.0).values():
        assert isinstance(error, RankError)
        assert said in str(error)


def test_a_rank_that_is_interrupted_while_it_waits_tells_the_others() -> None:
    """An interrupt comes at any time; the others learn of it, and the interrupted one keeps its own exception."""
    net = pipeline([place(0), place(1), place(2)], 2)
    hall, runs = hall_of(net)
    late = threading.Event()

    def slow(name: str, k: int, step: int, inputs: Any) -> Any:
        late.wait(0.2)
        return runs[0](name, k, step, inputs)

    def interrupted(wait_s: float) -> list[ControlMessage]:
        if hall.actors[2].phase == "work":
            raise KeyboardInterrupt
        return received(wait_s)

    hall.actors[0]._run = slow
    received, hall.lines[2].receive = hall.lines[2].receive, interrupted
    out = hall.threads(1)
    assert isinstance(out[2], KeyboardInterrupt)
    for rank in (0, 1):
        assert "rank 2 stopped: KeyboardInterrupt" in str(out[rank])
    hall.close()


def test_a_rank_in_a_firing_hears_of_a_failure_elsewhere() -> None:
    """It may sit in a collective that will never end: a hook, called in another thread, can end it."""
    net = pipeline([place(0), place(1)], 1)
    hall, runs = hall_of(net, timeout_s=8.0)
    freed = threading.Event()
    heard: list[RankError] = []

    def held(name: str, k: int, step: int, inputs: Any) -> Any:
        if name == "F0":
            hall.lines[1].post(0, FAIL, tail=FailureCause(1, "rank 1 has had enough").tail())
            assert freed.wait(150)
        return runs[0](name, k, step, inputs)

    def told(error: RankError) -> None:
        heard.append(error)
        freed.set()

    hall.actors[0]._run = held
    hall.actors[0].control.on_failure = told
    out = hall.threads(1)
    assert [str(e).splitlines()[0] for e in heard] == ["rank 1 has had enough"]
    assert all("rank 1 has had enough" in str(e) for e in out.values())
    hall.close()


def test_a_rank_that_gives_no_sign_is_named() -> None:
    """One rank never comes to life: the others say which, and what it was last known to do."""
    net = pipeline([place(s) for s in range(3)], 2)

    def attempt(limit_s: float) -> dict[int, BaseException]:
        hall, _ = hall_of(net, timeout_s=limit_s)
        out: dict[int, BaseException] = {}

        def one(rank: int) -> None:
            try:
                hall.actors[rank].run(1)
            except RankError as error:
                out[rank] = error

        workers = [threading.Thread(target=one, args=(r,)) for r in (0, 1)]
        for w in workers:
            w.start()
        for w in workers:
            w.join(200)
        for rank in (0, 1):
            hall.actors[rank].close()
        return out

    said = "rank 2 has given no sign of life"
    out = patiently(attempt, lambda out: all(said in str(e) for e in out.values()), 2.0)
    assert set(out) == {0, 1}
    for error in out.values():
        assert isinstance(error, PeerError)
        assert said in str(error)


def test_ranks_that_wait_for_each_other_say_so() -> None:
    """Orders that can't be kept: everybody is alive, nobody moves, and the error says who waits for what."""
    actors = (Actor("a", "forward", 0), Actor("b", "forward", 1), Actor("c", "forward", 0))
    queues = (Queue("ab", "a", ("b",), 1, bytes=64), Queue("bc", "b", ("c",), 1, bytes=64))
    net = Net((place(0), place(1)), actors, queues, ((("c", 0), ("a", 0)), (("b", 0),)))

    def attempt(limit_s: float) -> dict[int, Any]:
        hall, _ = hall_of(net, timeout_s=limit_s)
        out = hall.threads(1)
        hall.close()
        return out

    for error in patiently(attempt, lambda out: all("no rank has moved" in str(e) for e in out.values()), 1.5).values():
        assert isinstance(error, RankError)
        assert "no rank has moved" in str(error)
        assert "waiting for queue bc" in str(error)


def test_outputs_that_are_not_the_queues_are_refused() -> None:
    """A wrong number of values would leave registers that never fill."""
    actors = (Actor("a", "forward", 0), Actor("b", "forward", 0))
    net = Net((place(0),), actors, (Queue("q", "a", ("b",), 1),), ((("a", 0), ("b", 0)),))
    for gives, words in (({}, "gave"), ({"q": []}, "gave 0 values for queue q")):
        hall = Hall(net, lambda r, gives=gives: lambda *_: gives)
        with pytest.raises(RankError, match=words):
            hall.play(1)


def test_a_message_larger_than_declared_is_refused() -> None:
    """It would be cut short, or run into the next register."""
    actors = (Actor("a", "forward", 0), Actor("b", "forward", 1))
    net = Net((place(0), place(1)), actors, (Queue("q", "a", ("b",), 1, bytes=128),), ((("a", 0),), (("b", 0),)))
    hall = Hall(net, lambda r: lambda *_: {"q": [Value([torch.zeros(100)])]} if r == 0 else {})
    with pytest.raises(RankError, match="a message of 448 bytes, 128 were declared"):
        hall.play(1)


def test_missing_first_values_are_refused() -> None:
    """A queue that begins full needs its values."""
    net = pipeline([place(0)], 2)
    with pytest.raises(NetError, match="weights0 begins with 2 registers filled, 0 were given"):
        Hall(net, lambda r: Sums(net, r))


def test_firings_and_waits_are_recorded() -> None:
    """Names as in simulated timelines, and for each wait what was waited for."""
    net = pipeline([place(0), place(1)], 3)
    hall, runs = hall_of(net)
    for a in hall.actors.values():
        a.record()

    def late(name: str, k: int, step: int, inputs: Any) -> Any:
        if (name, k) == ("F0", 0):
            wait_until(lambda: hall.actors[1]._idle)
        time.sleep(0.001)
        return runs[0](name, k, step, inputs)

    hall.actors[0]._run = late
    hall.threads(1)
    for rank, a in hall.actors.items():
        spans = a.spans()
        fired = [s.name for s in spans if s.kind == "compute"]
        assert fired == [f"{name}.{k}" for name, k in net.orders[rank]]
        assert all(x.end <= y.start for x, y in itertools.pairwise(spans))
        Timeline("measured", 2, tuple(spans))
    waits = {s.name: s.cause for s in hall.actors[1].spans() if s.kind == "wait"}
    assert waits["F1.0/wait"] == "queue act0 from ranks 0 (F0 for F1)"
    for a in hall.actors.values():
        a.record(False)
        assert a.spans() == []
    hall.close()
