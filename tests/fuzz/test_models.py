"""Some of the random models of `make fuzz-models`, the same in every run; and that the fuzzer would notice.

make fuzz-models PROGRAMS=10000        # fresh ones, in parallel
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from laminar.train.optimizer import optimizer as optim
from tests.fuzz.generator import drawn
from tests.fuzz.models import report
from tests.fuzz.oracle import Different, Outcome, compare, errors, ill_conditioned, outcome
from tests.fuzz.plain import in_its_precision, plain
from tests.fuzz.program import Program, Statement
from tests.fuzz.shrinking import shrink
from tests.support.rank_pool import Ranks
from tests.support.zoo import one_thread

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
        Statement(
            "b",
            (-1, 3),
            ('b = torch.einsum("bd,kd->bk", a, self.w)',),
            ("a",),
            ("self.w = nn.Parameter(torch.randn(3, 6))",),
        ),
        Statement("c", (-1, 3), ("c = F.gelu(b) + b",), ("b",)),
        Statement("d", (-1, 5), ("d = self.last(c)",), ("c",), ("self.last = nn.Linear(3, 5)",)),
    )
    options = {
        "way": "alone",
        "plan": "data",
        "ranks": 1,
        "optimizer": "adam",
        "steps": 3,
        "micro_batches": 2,
        "precision": "f32",
        "clip_norm": 0.7,
    }
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


def changed(code: str, **options: object) -> Program:
    """The planted program with other lines for `c`."""
    other = Statement("c", (-1, 3), (*code.split("\n"),), ("b",))
    statements = tuple(other if s.out == "c" else s for s in planted().statements)
    return replace(planted(), statements=statements, options={**planted().options, **options})


CLAMPED = "c = torch.tanh(b)\nc.register_hook(lambda g: g.clamp(-0.01, 0.01))"


def test_what_is_warned_of_is_judged_by_parts_and_what_is_not_by_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hook that clamps the gradients of a total is not the whole batch's: right with a warning, wrong without."""
    counted = replace(changed(CLAMPED), loss="counted")
    assert outcome(counted) == Outcome("warned", "and other numbers than the whole batch's")
    assert outcome(changed("c = torch.tanh(b) - b.mean(0)")).why == "and other numbers than the whole batch's"
    assert outcome(replace(changed(CLAMPED.replace("clamp(-0.01, 0.01)", "relu()")), loss="counted")).kind == "equal"
    assert outcome(changed(CLAMPED)).kind == "equal"
    assert outcome(changed(CLAMPED, way="stages", ranks=2, steps=1, clip_norm=None, optimizer="sgd")).kind == "refused"
    monkeypatch.setattr("laminar.train.job.job.warn_if_coupled", lambda graph, parts: None)
    assert outcome(counted).kind == "wrong"


def test_what_plain_pytorch_has_no_kernel_for_is_invalid() -> None:
    """In half precision some ops don't run at all, in PyTorch: that is no crash of ours."""
    program = replace(changed("c = b.quantile(0.5, dim=-1, keepdim=True) + b", micro_batches=1), dtype="float32")
    assert outcome(program).kind == "equal"
    assert outcome(replace(program, options={**program.options, "precision": "bf16-pure"})).kind == "invalid"


def test_half_precision_is_judged_by_what_plain_pytorch_makes_of_it() -> None:
    """A model may have no finite loss in it, which is right as long as PyTorch's own is not finite either."""
    program = changed("c = torch.logit(torch.sigmoid(b * 0.01 + 8))", micro_batches=1)
    half = replace(program, dtype="float32", options={**program.options, "precision": "bf16"})
    assert math.isnan(in_its_precision(half)) and all(map(math.isfinite, plain(half).losses))
    assert outcome(half).kind == "equal"
    want = plain(half)
    for loss in (math.inf, 2 * want.losses[0] + 2):
        with pytest.raises(Different, match="the first loss is"):
            compare(half, [loss], {}, want)


def test_numbers_that_go_through_float32_are_judged_as_such() -> None:
    """A gradient is rounded on its way back, scaled before or after: ten million of its last places of float64."""
    assert changed("c = b.float().to(b.dtype)").rounded == "float32" and planted().rounded == "float64"


def test_only_what_plain_pytorch_does_by_itself_is_ill_conditioned() -> None:
    """Weights off by a last bit move a loop by so much; three times that is rounding, a thousand times is not."""
    program = changed("c = torch.tanh(b)", micro_batches=1)
    want, nudged = plain(program), plain(program, ulps=1)
    moved = {k: e for k, e in errors(nudged.losses, nudged.after, want).items() if k in ("w", "last.weight")}
    assert len(moved) == 2 and all(moved.values())
    assert ill_conditioned(program, {k: 3 * e for k, e in moved.items()}, want, 1)
    assert not ill_conditioned(program, {k: 1e3 * e for k, e in moved.items()}, want, 1)
    assert not ill_conditioned(program, {"w": moved["w"], "last.weight": 1e3 * moved["last.weight"]}, want, 1)
