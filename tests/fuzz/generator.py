"""Random programs, and how each is to be trained: all of it drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.fuzz.arithmetic import linear
from tests.fuzz.program import Program, Statement
from tests.fuzz.scope import PLAIN, Scope
from tests.fuzz.templates import WEIGHTS

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adamax", "nadam")
PRECISIONS = ("bf16", "fp16", "bf16-kahan", "bf16-stochastic", "bf16-pure")
PLANS = ("data", "zero1", "zero2", "zero3", "tensor", "random")


def drawn(seed: int, way: str | None = None) -> Program:
    """The program of a seed; `way` says how it is run if that is not to be drawn, too."""
    rng = random.Random(seed)
    features = rng.choice([4, 6, 8])
    scope = Scope(rng, features)
    statements: list[Statement] = []
    wanted, templates = rng.randint(2, 11), list(WEIGHTS)
    first = linear(scope)
    assert first is not None
    statements.append(first)
    scope.values = {first.out: first.shape}  # whatever follows is trained through it
    for _ in range(6 * wanted):
        if len(statements) == wanted:
            break
        made = rng.choices(templates, list(WEIGHTS.values()))[0](scope)
        if made is not None:
            statements.append(made)
            scope.values[made.out] = made.shape
    known = [s.out for s in statements if PLAIN(s.shape)]
    results = [known[-1], *rng.sample(known[:-1], min(len(known) - 1, rng.choice([0, 0, 1, 2])))]
    program = Program(
        seed=seed,
        statements=tuple(statements),
        results=tuple(results),
        loss=rng.choice(["squares", "squares", "cross", "huber", "counted"]),
        dtype="float32" if rng.random() < 0.15 else "float64",
        samples=rng.choice([4, 6, 8, 8, 12]),
        features=features,
        frozen=tuple(rng.sample(range(20), rng.choice([0, 0, 0, 1, 2]))),
    )
    return _trained(program, rng, way)


def _trained(program: Program, rng: random.Random, way: str | None) -> Program:
    """How it is trained."""
    way = way or rng.choices(["alone", "lockstep", "stages", "ranks"], [10, 8, 1, 1.5])[0]
    apart = random.Random(program.seed + 1)  # so that other programs stay what they were
    alone = bool({"state", "draws"} & program.traits)
    if way == "stages" and "coupled" in program.traits and (alone or apart.random() < 0.5):
        way = "lockstep"  # micro-batches are no whole batch there: some show that they are refused
    if way == "stages" and "state" in program.traits:
        way = "lockstep"
    options: dict[str, Any] = {
        "way": way,
        "plan": rng.choice(PLANS) if way != "alone" else "data",
        "ranks": 1 if way == "alone" else 2 if way in ("ranks", "stages") else rng.choice([2, 2, 3, 4]),
        "optimizer": rng.choice(OPTIMIZERS),
        "steps": rng.choice([2, 3]),
        "micro_batches": 1,
        "precision": "f32",
        "clip_norm": rng.choice([None, None, None, 0.7]),
        "again": way == "alone" and rng.random() < 0.1,
    }
    if way == "stages":
        options |= {"steps": 1, "micro_batches": 2, "clip_norm": None, "optimizer": "sgd"}
    elif way != "lockstep":
        if "coupled" not in program.traits and "state" not in program.traits:
            options["micro_batches"] = rng.choice([1, 1, 2, 3])
        elif not alone:  # a warning is expected, and the numbers of accumulated gradients
            options["micro_batches"] = apart.choice([1, 1, 2, 3])
        if program.dtype == "float32" and rng.random() < 0.5:
            options["precision"] = rng.choice(PRECISIONS)
    return replace(program, options=options)
