"""Some of the random models of `make fuzz-models`, the same in every run; and that the fuzzer would notice.

make fuzz-models PROGRAMS=10000        # fresh ones, in parallel
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from laminar.train import optimizer as optim
from tests.fuzz.generator import drawn
from tests.fuzz.models import report
from tests.fuzz.oracle import Outcome, outcome
from tests.fuzz.program import Program, Statement
from tests.fuzz.shrinking import shrink
from tests.ranks import Ranks
from tests.zoo import one_thread

PROGRAMS, ON_RANKS = 64, 8


def judged(seeds: range, way: str | None, ranks: Ranks | None = None) -> dict[int, Outcome]:
    with one_thread():
        return {s: outcome(drawn(s, way), ranks) for s in seeds}


def good(found: dict[int, Outcome]) -> None:
    bad = [f"{s}: {o.kind}: {o.why}" for s, o in found.items() if o.kind in ("wrong", "crash")]
    assert not bad, "\n".join([*bad, "python -m tests.fuzz.models --only SEED shows and shrinks one"])
    equal = sum(o.kind == "equal" for o in found.values())
    assert equal > 0.7 * len(found), report(found)


@pytest.mark.parametrize("way", ["alone", "lockstep"])
def test_random_models_train_as_in_plain_pytorch(way: str) -> None:
    """In one process: through a job and its optimizer, and on plans for two to four ranks."""
    good(judged(range(PROGRAMS // 2), way))


def test_random_models_train_on_ranks(two: Ranks) -> None:
    """Generated code, real collectives, optimizers on pieces."""
    good(judged(range(500, 500 + ON_RANKS), "ranks", two))


def planted() -> Program:
    """A program whose gradient lies otherwise than its weight, among others that do not."""
    parts = (
        Statement("a", (-1, 6), ("a = torch.tanh(self.first(x))",), ("x",), ("self.first = nn.Linear(4, 6)",)),
        Statement("b", (-1, 3), ('b = torch.einsum("bd,kd->bk", a, self.w)',), ("a",),
                  ("self.w = nn.Parameter(torch.randn(3, 6))",)),
        Statement("c", (-1, 3), ("c = F.gelu(b) + b",), ("b",)),
        Statement("d", (-1, 5), ("d = self.last(c)",), ("c",), ("self.last = nn.Linear(3, 5)",)),
    )  # fmt: skip
    options = {"way": "alone", "plan": "data", "ranks": 1, "optimizer": "adam", "steps": 3, "micro_batches": 2,
               "precision": "f32", "clip_norm": 0.7}  # fmt: skip
    return Program(1, parts, ("d", "c"), features=4, options=options)


def test_a_wrong_update_is_found_and_shrunk_to_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: gradients as the last op left them. What is left is the product that lays its gradient out otherwise."""
    assert outcome(planted()).kind == "equal"
    monkeypatch.setattr(optim, "laid_out", lambda kept, grads, plain: list(grads))
    assert outcome(planted()).kind == "wrong"
    with one_thread():
        small = shrink(planted(), lambda p: outcome(p).kind == "wrong", tries=60)
    text = small.source()
    assert "einsum" in text and "gelu" not in text and "self.last" not in text and "self.first" not in text
    assert small.options["optimizer"] == "sgd" and small.options["micro_batches"] == 1
    space: dict[str, object] = {}
    exec(text, space)
    torch.manual_seed(0)
    assert torch.isfinite(space["loss"](space["Model"]().double(), space["batches"](1)[0]))  # type: ignore[operator, index]


def test_crashes_refusals_and_nonsense_are_told_apart() -> None:
    """A fuzzer that takes an error for a refusal finds nothing."""
    program = replace(planted(), options={**planted().options, "micro_batches": 1})
    refused = program.without("c")
    looks = Statement("c", (-1, 3), ("c = b * 2 if b.sum() > 0 else b",), ("b",))
    refused = replace(program, statements=tuple(looks if s.out == "c" else s for s in program.statements))
    assert outcome(refused).kind in ("refused", "equal")
    nonsense = Statement("c", (-1, 3), ("c = b @ b",), ("b",))
    invalid = replace(program, statements=tuple(nonsense if s.out == "c" else s for s in program.statements))
    assert outcome(invalid).kind == "invalid"
    unknown = replace(program, options={**program.options, "plan": 3})
    assert outcome(unknown).kind in ("crash", "refused")
