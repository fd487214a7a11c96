"""Calibration: constants found again where they are known, errors that are those of a model left out."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from laminar.cost.calibrate import HALF_90, Calibration, Timing, fit, interval

TRUE = Calibration(
    {
        "compute": 1.2,
        "memory": 0.8,
        "update": 1.1,
        "exchange": 1.5,
        "wire": 1.2,
        "eager_exchange": 1.3,
        "eager_copies": 1.0,
    },
    {
        "lines": 2e-6,
        "exchanges": 5e-5,
        "steps": 3e-4,
        "eager_lines": 9e-6,
        "eager_parameters": 4e-6,
        "eager_steps": 8e-4,
    },
)


def timings(models: int, seed: int, noise: float = 0.0, mood: float = 0.3) -> list[Timing]:
    """Steps of made-up models under made-up plans, timed by a machine that obeys `TRUE`."""
    rng = random.Random(seed)
    out = []
    for m in range(models):
        speed = math.exp(rng.gauss(0, mood))
        compute, memory = 10 ** rng.uniform(-2.5, -1.5), 10 ** rng.uniform(-3, -2)
        lines, update = rng.randint(100, 900), 10 ** rng.uniform(-3, -2.3)
        for side in ("data", "zero1", "zero3", "tensor", "random1", "random2"):
            features = {
                "compute": compute * rng.uniform(0.6, 1.6),
                "memory": memory * rng.uniform(0.5, 2),
                "update": update,
                "exchange": 10 ** rng.uniform(-3.5, -2),
                "wire": 10 ** rng.uniform(-4, -2.5),
                "waits": compute * rng.uniform(0.1, 0.9),
                "lines": lines,
                "exchanges": rng.randint(2, 120),
                "steps": 1,
            }
            out.append(_timed(f"m{m}", side, features, speed, noise, rng))
        ddp = {
            "compute": compute,
            "memory": memory,
            "update": update,
            "eager_lines": lines,
            "eager_parameters": 40,
            "eager_steps": 1,
            "eager_exchange": 10 ** rng.uniform(-3, -2),
            "eager_copies": 1e-3,
        }
        out.append(_timed(f"m{m}", "ddp", ddp, speed, noise, rng))
    return out


def _timed(model: str, side: str, features: dict[str, float], speed: float, noise: float, rng: random.Random) -> Timing:
    return Timing(model, side, features, TRUE.seconds(features) * speed * math.exp(rng.gauss(0, noise)))


def test_ratios_of_models_not_seen_are_predicted_whatever_the_machines_mood() -> None:
    """Absolute times drift between models by tens of percent; ratios within a model must survive that."""
    found, fresh = fit(timings(6, seed=1)), timings(5, seed=2)
    off = []
    for model in {t.model for t in fresh}:
        mine = [t for t in fresh if t.model == model]
        ddp = next(t for t in mine if t.side == "ddp")
        for t in mine:
            want = t.seconds / ddp.seconds
            got = found.seconds(t.features) / found.seconds(ddp.features)
            off.append(abs(got / want - 1))
    plain = Calibration()
    naive = [
        plain.seconds(t.features) / plain.seconds(d.features) / (t.seconds / d.seconds) - 1
        for t in fresh
        for d in fresh
        if d.model == t.model and d.side == "ddp"
    ]
    assert np.median(off) < 0.03
    assert np.median(np.abs(naive)) > 3 * np.median(off), "the fit must do better than adding up parts"


def test_intervals_cover_what_they_promise() -> None:
    """A 90 % interval that covers 60 %, or everything, is worth nothing."""
    inside = []
    for seed in range(6):
        found = fit(timings(5, seed=10 + seed, noise=0.05))
        fresh = timings(5, seed=100 + seed, noise=0.05)
        for t in fresh:
            ddp = next(d for d in fresh if d.model == t.model and d.side == "ddp")
            if t.side != "ddp":
                ratio = found.seconds(t.features) / found.seconds(ddp.features) / (t.seconds / ddp.seconds)
                inside.append(abs(math.log(ratio)) <= HALF_90 * found.ratio_sigma)
    assert 0.8 <= np.mean(inside) <= 0.99


def test_errors_are_named_by_model_fitted_and_left_out() -> None:
    """Both are printed: the first says how well the form fits, the second what a user may expect."""
    found = fit(timings(3, seed=3, noise=0.03))
    assert set(found.errors) == {f"m{i} {how}" for i in range(3) for how in ("fitted", "left out")}
    assert found.models == ("m0", "m1", "m2") and 0 < found.ratio_sigma < 0.3


def test_without_ddp_errors_are_those_of_seconds() -> None:
    """On a GPU each model is one step: its ratio to itself is always right, and says nothing."""
    some = [t for t in timings(5, seed=6, noise=0.1) if t.side != "ddp"]
    found = fit([next(t for t in some if t.model == m) for m in dict.fromkeys(t.model for t in some)], quiet=True)
    assert found.quiet and min(found.errors.values()) > 0
    worst = max(v for k, v in found.errors.items() if k.endswith("left out"))
    assert found.sigma == pytest.approx(found.ratio_sigma) and 0.5 * worst < HALF_90 * found.sigma < 1.5 * worst


def test_json_gives_back_the_same() -> None:
    """A profile is a file."""
    found = fit(timings(3, seed=4))
    assert Calibration.from_json(found.to_json()) == found


def test_what_trials_say_nothing_about_stays_where_it_was() -> None:
    """Without a single exchange in the trials, the price of exchanges must not wander off."""
    some = [
        Timing(t.model, t.side, {k: v for k, v in t.features.items() if "exchange" not in k}, t.seconds)
        for t in timings(4, seed=5)
        if t.side != "ddp"
    ]
    assert fit(some).multipliers["exchange"] == pytest.approx(1.0, abs=0.05)


def test_an_interval_is_symmetric_in_ratios() -> None:
    """Being twice as slow is as likely as being twice as fast."""
    low, high = interval(2.0, 0.1)
    assert low * high == pytest.approx(4.0) and high / 2.0 == pytest.approx(math.exp(0.1645))
