"""Exact mode from the command line: training with hashes in the events, and two hostings held against each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laminar.ir.exact import Exact
from laminar.train.job.exact_job import ExactJob
from laminar.train.job.verify_exact import ExactTrial, verify_trial
from laminar.train.options import JobOptions
from tests.support.zoo import recipe

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples" / "gpt.py") + ":tiny"


def laminar(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laminar", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def trained(where: Path, *argv: str) -> list[str]:
    """The hashes in the events of a run."""
    how = ("--exact", "units=4", "--hash-every", "2", "--steps", "5", "--run-dir", str(where), "--json", *argv)
    done = laminar("train", GPT, *how)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (where / "events.jsonl").read_text().splitlines()]
    found = [(e["step"], e["hash"]) for e in events if e["kind"] == "hash"]
    assert [s for s, _ in found] == [2, 4, 5]
    return [h for _, h in found]


def test_any_number_of_workers_leaves_the_same_hashes(tmp_path: Path) -> None:
    one = trained(tmp_path / "one")
    assert trained(tmp_path / "three", "--workers", "3", "--plan", "zero3") == one


def test_verify_says_that_hashes_are_one() -> None:
    done = laminar("verify", GPT, "--exact", "units=4", "--processes", "2", "--steps", "2", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["ok"] and said["hashes"] == said["others"] and len(said["hashes"]) == 2


def test_errors_name_the_next_step() -> None:
    done = laminar("train", GPT, "--exact", "units=2", "--workers", "3")
    assert done.returncode != 0 and "at most 2 processes" in done.stderr + done.stdout
    done = laminar("train", GPT, "--exact", "pieces=2")
    assert done.returncode != 0 and "units=8" in done.stderr + done.stdout
    done = laminar("verify", GPT)
    assert done.returncode == 2 and "--exact" in done.stderr


def spoil_a_weight(job: ExactJob, step: int) -> None:
    """One bit of one weight, on one of several processes."""
    if job.world > 1 and job.rank == 1 and step == 1:
        weight = job.state.held[sorted(job.state.held)[0]]
        weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def make_gpt() -> object:
    return recipe("gpt.py:tiny")


@pytest.mark.parametrize("processes", [2])
def test_a_difference_is_traced_to_its_step_op_and_tensor(processes: int) -> None:
    trial = ExactTrial(make_gpt, Exact(4), 3, JobOptions(check=False), processes, spoil_a_weight)
    report = verify_trial(trial, 200)
    assert not report.ok and report.step == 2 and report.rank is not None
    assert report.hashes[0] == report.others[0] and report.hashes[1] != report.others[1]
    assert report.op.startswith(("aten.", "laminar.", "box.")) and "step 2 parts" in str(report)
    assert report.tensor.startswith("%")
