"""A cost learnt from measured times: it finds the true one, keeps its ratio where it must, and no pause throws it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from laminar.data import OnlineCost, SampleCost
from laminar.errors import DataError

TRUE = SampleCost(per_token=2e-6, per_square=3e-10)
PER_UNIT = 1e-3


def units(count: int, seed: int = 0) -> list[np.ndarray]:
    """Units of a few samples with a long tail."""
    dice = np.random.default_rng(seed)
    return [np.clip(dice.lognormal(6, 1.3, dice.integers(1, 9)), 1, 30_000).astype(int) for _ in range(count)]


def took(unit: np.ndarray) -> float:
    return PER_UNIT + float(TRUE.of(unit).sum())


def error(found: OnlineCost) -> float:
    """Largest relative error over single samples."""
    return max(abs(float(found.cost.of([n])[0] / TRUE.of([n])[0]) - 1) for n in (500, 2000, 8000, 30_000))


def test_until_something_is_measured_the_given_cost_holds() -> None:
    """The one of the graph."""
    prior = SampleCost(per_token=5.0, per_square=1.0)
    assert OnlineCost(prior).cost is prior and OnlineCost().cost == SampleCost()


@pytest.mark.parametrize("prior", [SampleCost(), SampleCost(per_token=1e9, per_square=1e6)])
def test_the_true_cost_is_found(prior: SampleCost) -> None:
    """In seconds, whatever unit and ratio it began with."""
    found = OnlineCost(prior)
    for unit in units(100):
        found.observe(unit, took(unit))
    assert error(found) < 0.01 and found.per_unit_s == pytest.approx(PER_UNIT, rel=0.05)


def test_noise_is_averaged() -> None:
    """Ten percent on every time leave less than five on the cost."""
    found, dice = OnlineCost(), np.random.default_rng(1)
    for unit in units(400):
        found.observe(unit, took(unit) * float(np.exp(0.1 * dice.standard_normal())))
    assert error(found) < 0.05


def test_a_pause_of_the_machine_does_not_throw_it() -> None:
    """A unit that took a hundred times as long counts as one that took a little longer."""
    found = OnlineCost()
    for unit in units(100):
        found.observe(unit, took(unit))
    for unit in units(3, seed=2):
        found.observe(unit, 100 * took(unit))
    assert error(found) < 0.1


def test_a_change_is_followed() -> None:
    """Attention that became twice as fast."""
    found, later = OnlineCost(), SampleCost(per_token=2e-6, per_square=1.5e-10)
    for unit in units(200):
        found.observe(unit, took(unit))
    for unit in units(1500, seed=3):
        found.observe(unit, PER_UNIT + float(later.of(unit).sum()))
    assert found.cost.per_square == pytest.approx(1.5e-10, rel=0.02)


def test_lengths_that_are_all_alike_leave_the_ratio_as_it_was() -> None:
    """Tokens and pairs of them can't be told apart; the total is learnt all the same."""
    found = OnlineCost(SampleCost(per_token=1000.0, per_square=1.0))
    for _ in range(50):
        found.observe([1000, 1000], 0.5)
    assert found.seconds([1000, 1000]) == pytest.approx(0.5, rel=0.01)
    assert found.cost.per_square * 1000 == pytest.approx(found.cost.per_token, rel=0.5)


def test_no_coefficient_is_negative() -> None:
    """Times that fall with the length (a cache that fills) must not make long samples free."""
    found = OnlineCost()
    for n in range(100, 2000, 50):
        found.observe([n], 1.0 - n / 4000)
    assert found.cost.per_token >= 0 and found.cost.per_square >= 0 and found.per_unit_s >= 0


def test_what_a_sample_costs_by_being_there_is_found() -> None:
    """A kernel called for each of them: many short ones cost more than their tokens."""
    found = OnlineCost()
    for unit in units(200):
        found.observe(unit, took(unit) + 5e-4 * len(unit))
    assert found.cost.per_sample == pytest.approx(5e-4, rel=0.05) and found.per_unit_s == pytest.approx(
        PER_UNIT, rel=0.2
    )


def test_speeds_of_ranks_are_taken_out() -> None:
    """A unit on a rank at half speed takes twice as long and says the same."""
    found = OnlineCost()
    for k, unit in enumerate(units(100)):
        speed = 0.5 if k % 2 else 1.0
        found.observe(unit, took(unit) / speed, speed)
    assert error(found) < 0.01


def test_several_units_may_be_told_at_once() -> None:
    """As a step's sums."""
    found, each = OnlineCost(), units(200)
    for some in (each[i : i + 3] for i in range(0, 198, 3)):
        lengths = np.concatenate(some).astype(float)
        found.observe_sums((3, len(lengths), lengths.sum(), (lengths**2).sum()), sum(map(took, some)))
    assert error(found) < 0.01


def test_empty_units_say_nothing() -> None:
    """Nor do they divide by zero."""
    found = OnlineCost()
    found.observe([0, 0], 0.1)
    assert found.seen == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    """A clock that went backwards."""
    with pytest.raises(DataError, match="took"):
        OnlineCost().observe([10], seconds)


def test_its_state_goes_through_json() -> None:
    """And what is learnt afterwards is the same."""
    found = OnlineCost()
    for unit in units(30):
        found.observe(unit, took(unit))
    again = OnlineCost()
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert again.cost == found.cost
    for unit in units(5, seed=4):
        found.observe(unit, took(unit))
        again.observe(unit, took(unit))
    assert again.cost == found.cost and again.seen == 35
