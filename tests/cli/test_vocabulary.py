"""One thing has one name wherever it is typed, and what was typed before still works without being shown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laminar
from laminar.cli import main, parser
from laminar.cli_ask import parse_changes
from laminar.errors import PlanError
from laminar.launch.vocabulary import memory_bytes
from laminar.placement.presets import PRESET_NAMES
from laminar.planner.space.request import asking
from laminar.train.options import PLANS

ROOT = Path(__file__).parents[2]
MLP = f"{ROOT}/examples/mlp.py:tiny"
OLD = ("--microbatches", "--seed PATTERN", "data_parallel", "tensor_parallel", "--measure-rank", "{microbatch}")
"""Spellings that no help text may show."""


def verbs() -> dict[str, argparse.ArgumentParser]:
    """The parser of every verb."""
    found = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def saved(folder: Path, *words: str) -> dict[str, Any]:
    """The plan that a command makes."""
    out = folder / f"{len(list(folder.iterdir()))}.json"
    assert main(["plan", MLP, *words, "-o", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", sorted(verbs()))
def test_help_shows_no_old_spelling(name: str) -> None:
    """An option that is kept for old scripts is not what a reader should learn."""
    shown = verbs()[name].format_help()
    assert not [word for word in OLD if word in shown]


@pytest.mark.parametrize("name", sorted(verbs()))
def test_every_option_has_a_help_text(name: str) -> None:
    """A stranger reads all of them, and one without a text says nothing."""
    for action in verbs()[name]._actions:
        assert action.help, action.option_strings or action.dest


def test_plans_have_the_same_names_everywhere() -> None:
    """`laminar train --plan`, `laminar plan --preset`, `laminar.parallelize(plan=...)` and `laminar.plans.named`."""
    preset = next(a for a in verbs()["plan"]._actions if a.dest == "preset")
    assert tuple(preset.choices or ()) == PRESET_NAMES and set(PRESET_NAMES) < set(PLANS)
    shown = next(a for a in verbs()["train"]._actions if a.dest == "plan").help
    assert shown is not None and all(name in shown for name in PLANS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--mesh", "dp=2", "--preset", "data_parallel"], ["--mesh", "dp=2", "--preset", "data"]),
        (["--mesh", "tp=2", "--preset", "tensor_parallel"], ["--mesh", "tp=2", "--preset", "tensor"]),
        (["--mesh", "dp=2", "--seed", "batch.*=dp:S(0)"], ["--mesh", "dp=2", "--place", "batch.*=dp:S(0)"]),
        (["--stages", "2", "--microbatches", "2"], ["--stages", "2", "--micro-batches", "2"]),
    ],
)
def test_old_spellings_make_the_same_plan(old: list[str], new: list[str], tmp_path: Path, capsys: Any) -> None:
    """To the last byte of the file."""
    assert saved(tmp_path, *old) == saved(tmp_path, *new)


def test_train_takes_old_spellings() -> None:
    """Of plans and of micro-batches."""
    given = parser().parse_args(["train", MLP, "--plan", "tensor_parallel", "--microbatches", "2"])
    assert (given.plan, given.micro_batches) == ("tensor", 2)
    assert parser().parse_args(["train", MLP]).micro_batches == 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("40GB", 40e9),
        ("40 GB", 40e9),
        ("40gb", 40e9),
        ("40GiB", 40 * 2**30),
        ("512MiB", 2**29),
        ("40e9", 40e9),
        ("40000000000", 40e9),
        ("40", 40e9),
        ("0.5", 5e8),
        ("1500MB", 1.5e9),
    ],
)
def test_memory_is_bytes_with_a_unit(text: str, nbytes: float) -> None:
    """GB is 10^9 and GiB 2^30; a small number without a unit was GB before there were units, and still is."""
    assert memory_bytes(text) == nbytes
    assert parse_changes(f"memory={text}") == {"memory_bytes": nbytes}


@pytest.mark.parametrize("text", ["much", "40XB", "GB", "4.0.0GB", "-1GB"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    """With the way to write it."""
    with pytest.raises(argparse.ArgumentTypeError, match="40GiB"):
        memory_bytes(text)


def test_micro_batches_are_pinned_under_either_name() -> None:
    """In Python, in `--pin` and in `--what-if`; both come to the same request."""
    cluster = laminar.Cluster.preset("2xcpu")
    assert asking(cluster, pin={"micro_batches": 2}).pin == asking(cluster, pin={"microbatches": 2}).pin
    with pytest.raises(PlanError, match="micro_batches"):
        asking(cluster, pin={"micro_batch": 2})
    assert parse_changes("micro_batches=2; microbatches=any") == {"pin": {"micro_batches": 2, "microbatches": None}}


def test_python_takes_old_spellings_too() -> None:
    """Plans by their functions' names, and `microbatches` of a pipeline."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).pow(2).mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph, mesh = laminar.capture(model, loss, torch.randn(4, 4)), laminar.Mesh({"dp": 2})
    named = laminar.plans.named
    assert named("data", graph, mesh).hash == named("data_parallel", graph, mesh).hash
    assert named("zero1", graph, mesh).hash == laminar.plans.zero(graph, mesh, 1).hash
    with pytest.raises(PlanError, match="data  zero1  zero2  zero3  tensor  context"):
        named("fast", graph, mesh)
    pipeline = laminar.plans.pipeline
    assert pipeline(graph, 2, micro_batches=2).hash == pipeline(graph, 2, microbatches=2).hash
    assert laminar.plans.seeded is laminar.plans.placed
    job = laminar.parallelize(
        model, loss, torch.optim.SGD(model.parameters()), batch=torch.randn(4, 4), plan="data_parallel"
    )
    first, second = job.step(torch.randn(4, 4)), job.step(torch.randn(4, 4))
    assert (first.step, second.step, job.steps) == (1, 2, 2)
