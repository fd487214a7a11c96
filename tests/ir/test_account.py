"""What a plan says about itself: fields for the package, a table for its users and in files."""

from __future__ import annotations

import json

import pytest

from laminar.errors import PlanError
from laminar.ir.plans.account import (
    Account,
    BindingLimit,
    CompletionCost,
    KeptOutPlan,
    PredictedStep,
    SearchOptions,
    SimulatedPlan,
    StageWork,
    WholeOp,
)
from laminar.ir.plans.certificate import Certificate

STEP = PredictedStep(step_s=0.5, step_low_s=0.4, step_high_s=0.6, peak_bytes=7, cluster="8xh100", bubbles=(0.25,))
PROOF = Certificate("space", 0.5, 0.4, 9, 3, 5, 1, 0, outside=("stages",), interval=(0.4, 0.6), known="prices")
FULL = Account(
    step=STEP,
    completion=CompletionCost(
        cost_s=1.0, replicated_s=2.0, solver="exactly", unsplit=(WholeOp(op="sort", share=0.5, where="a.py:3"),)
    ),
    stages=(StageWork(share=0.5, sends=3), StageWork(modules="1 to 2")),
    certificate=PROOF,
    choice=SimulatedPlan(plan="data parallel", step_s=0.5, peak_bytes=7, sides=((1, 2, 3),), spent={"products": 0.5}),
    binding=BindingLimit(memory_bytes=8.0, kept_out=KeptOutPlan(plan="zero", step_s=0.1, peak_bytes=9.0)),
    options=SearchOptions(pin={"tp": 2}, only=("data",)),
    memory={"parameters": 7},
)


def test_an_account_survives_its_file() -> None:
    """Fields of all kinds, one inside of another, and those that stand beside the others in files."""
    data = json.loads(json.dumps(FULL.to_json(), allow_nan=False))
    assert Account.from_json(data) == FULL and Account.from_json({}) == Account() and Account().to_json() == {}
    assert data["step_s"] == 0.5 and data["solver"] == "exactly", "flat, as files always were"
    assert data["certificate"]["cells"]["pruned"] == 5 and data["certificate"]["sentence"] == str(PROOF)


def test_users_may_read_it_like_a_table() -> None:
    """As they could when it was one."""
    assert FULL["certificate"]["bound_s"] == 0.4 and FULL["request"]["margin"] is None and FULL["step_s"] == 0.5
    assert "measured" not in FULL and FULL.get("measured") is None and len(FULL) == len(list(FULL))
    assert {**FULL, "note": 1}["memory"] == {"parameters": 7}
    with pytest.raises(KeyError):
        FULL["measured"]


def test_what_is_not_known_is_kept() -> None:
    """Another version's, or somebody's own."""
    account = Account.from_json({"note": {"by": "me"}, "samples": 4})
    assert account.samples == 4 and account["note"] == {"by": "me"}
    assert Account.from_json(account.to_json()) == account


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"step_s": 0.5}, "no field 'step_low_s'"),
        ({"choice": {"plan": "x", "step_s": "fast", "peak_bytes": 1}}, "choice.step_s: 'fast', not a number"),
        ({"looked_at": [{"plan": 3}]}, "looked_at[0].plan: 3, not a text"),
        ({"memory": {"parameters": 1.5}}, "memory.parameters: 1.5, not a whole number"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(data: dict[str, object], said: str) -> None:
    """Plan files are edited by hand."""
    with pytest.raises(PlanError) as error:
        Account.from_json(data)
    assert said in str(error.value)
