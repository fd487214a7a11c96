"""Units go from slow processes to fast ones within three steps, and no bit changes by it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laminar
from laminar.errors import LaminarError
from laminar.ir.exact import Exact
from laminar.runtime.check.processes import on_ranks
from laminar.runtime.exact.hosted_step import HostedStep
from laminar.train.auto.rebalance import Rebalance, slowest_process, unit_counts
from laminar.train.engine.exact_engine import ExactEngine
from tests.support.exact_runs import ExactRun, hashes, make_job
from tests.support.zoo import recipe

SLOW_S, FAST_S, NAP_S = 0.10, 0.05, 1.0
RUN = ExactRun("mlp.py:tiny", Exact(8), steps=9)


@given(st.integers(2, 5), st.integers(0, 6), st.data())
def test_counts_are_the_best_integers(processes: int, more: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.2, 5), min_size=processes, max_size=processes))
    units = processes + more
    got = unit_counts(units, speeds)
    assert sum(got) == units and min(got) >= 1
    every = (c for c in itertools.product(range(1, units + 1), repeat=processes) if sum(c) == units)
    assert slowest_process(got, speeds) <= min(slowest_process(c, speeds) for c in every) * (1 + 1e-12)


def slowed(run: ExactRun) -> tuple[list[str], list[list[int]]]:
    """One process takes twice as long for each of its units from the third step on: hashes, and units by process."""
    job, data = make_job(run), iter(recipe(run.model).data())

    def own_s(engine: ExactEngine) -> float:
        return len(engine.hosts.hosted) * (SLOW_S if job.steps > 3 and job.rank == 1 else FAST_S)

    ExactEngine.own_s = property(own_s)  # type: ignore[assignment]
    balance = Rebalance()
    balance.begin(job)
    found, hosted = [], []
    for _ in range(run.steps):
        result = job.step(next(data))
        found.append(f"{job.hash()} {float(result.loss).hex()} {float(result.grad_norm).hex()}")
        balance.after_step(job, result)
        hosted.append([len(job.hosting.hosted(p)) for p in range(job.world)])
    return found, hosted


def test_a_process_that_slows_down_has_less_within_three_steps_and_no_bit_changes() -> None:
    for found, hosted in on_ranks(2, slowed, RUN, timeout_s=280):
        assert found == hashes(RUN)
        assert hosted[2] == [4, 4] and hosted[5:] == [[5, 3]] * 4, hosted  # 5/1 and 3/0.5: the best of eight units


def dawdling(run: ExactRun) -> list[float]:
    """Own seconds of each step, of which one process sleeps away some."""
    job, data, plain = make_job(run), iter(recipe(run.model).data()), HostedStep._run

    def slow(step: HostedStep, inputs: object) -> list[torch.Tensor]:
        if job.rank == 1:
            time.sleep(NAP_S)
        return plain(step, inputs)  # type: ignore[arg-type]

    HostedStep._run = slow  # type: ignore[method-assign,assignment]
    out = []
    for _ in range(run.steps):
        job.step(next(data))
        out.append(job.engine.own_s)
    return out


def test_own_time_is_not_the_time_of_the_step() -> None:
    """Who waits for another has not worked; the run that tries lines out does not count."""
    waits, sleeps = on_ranks(2, dawdling, replace(RUN, steps=4), timeout_s=280)
    assert waits[0] == sleeps[0] == 0.0
    assert min(sleeps[1:]) >= NAP_S
    assert sorted(waits[1:])[len(waits) // 2] < NAP_S / 2


def test_it_is_for_exact_jobs() -> None:
    model = torch.nn.Linear(4, 4)
    job = laminar.parallelize(model, lambda m, b: m(b).sum(), lambda ps: torch.optim.SGD(ps), batch=torch.ones(4, 4))
    with pytest.raises(LaminarError, match="exact mode"):
        Rebalance().begin(job)
