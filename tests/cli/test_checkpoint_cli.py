"""`laminar checkpoint`: what is there, whether it is whole, how it differs, what may go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from laminar.cli import main
from laminar.train.job.job import Job
from laminar.train.options import JobOptions
from tests.support.small_job import adamw, batches, gap, mean, net

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Job, Path]:
    """A job with three checkpoints."""
    model = net()
    job = Job(model, mean, adamw(model), batches(1)[0], "data", OPTIONS)
    for batch in batches(3):
        job.step(batch)
        job.save(tmp_path / "store")
    return job, tmp_path / "store"


def said(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, Any]:
    code = main(["checkpoint", *map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_is_there_is_listed(saved: tuple[Job, Path], capsys: pytest.CaptureFixture[str]) -> None:
    job, store = saved
    code, rows = said(capsys, "ls", store)
    assert code == 0 and [r["step"] for r in rows] == [1, 2, 3] and rows[2]["root"] == job.hash()
    assert all(0 < r["new_bytes"] <= r["stored_bytes"] for r in rows)
    assert main(["checkpoint", "ls", str(store)]) == 0
    text = capsys.readouterr().out
    assert job.hash()[:16] in text and "new" in text


def test_a_damaged_block_is_named(saved: tuple[Job, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, store = saved
    assert said(capsys, "verify", store)[0] == 0
    pack = max((store / "packs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    data = bytearray(pack.read_bytes())
    data[300] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    code, found = said(capsys, "verify", store)
    assert code == 1 and [c["ok"] for c in found["checkpoints"]] == [True, True, False]
    assert any(word in found["checkpoints"][2]["damage"][0] for word in ("parameter", "optimizer", "average", "buffer"))
    assert main(["checkpoint", "verify", str(store)]) == 1 and "DAMAGED" in capsys.readouterr().out


def test_two_checkpoints_differ_by_tensor(saved: tuple[Job, Path], capsys: pytest.CaptureFixture[str]) -> None:
    job, store = saved
    run = job.savers[str(store)].run
    assert said(capsys, "diff", f"{store}#{run}@3", store)[1]["same"] is True
    code, found = said(capsys, "diff", f"{store}#{run}@1", store)
    assert code == 1 and not found["same"] and "steps" in found["scalars"]
    assert any("embed.weight" in c["key"] for c in found["tensors"])


def test_weights_are_exported_for_others(
    saved: tuple[Job, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same names and values as the job exports them itself; averages as well."""
    job, store = saved
    for ema in ([], ["--ema"]):
        code, found = said(capsys, "export", store, "-o", tmp_path / "out", *ema)
        assert code == 0 and found["files"] == ["model.safetensors"]
        job.export(tmp_path / "own", ema=bool(ema))
        one, other = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "own"))
        assert set(one) == set(other) and gap({k: one[k] for k in other}, other) == 0.0


def test_a_jobs_weights_come_from_a_checkpoint(saved: tuple[Job, Path]) -> None:
    job, store = saved
    model = net(5)
    other = Job(model, mean, adamw(model), batches(1)[0], "data", OPTIONS)
    other.load_weights(store)
    assert gap(other.state_dict(), job.state_dict()) == 0.0 and other.steps == 0


def test_what_need_not_stay_goes(saved: tuple[Job, Path], capsys: pytest.CaptureFixture[str]) -> None:
    job, store = saved
    code, found = said(capsys, "gc", store, "--keep", "last 1")
    assert code == 0 and [r["step"] for r in found["dropped"]] == [1, 2]
    again = net(7)
    other = Job(again, mean, adamw(again), batches(1)[0], "data", OPTIONS)
    other.resume(store)
    assert other.hash() == job.hash()


@pytest.mark.parametrize("argv", [["ls"], ["verify"], ["diff", "it"], ["export", "-o", "w"], ["gc"]])
def test_what_is_not_there_is_an_error_and_is_not_made(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", argv[0], "it", *argv[1:]]) != 0
    assert "there is no it" in capsys.readouterr().err and not (tmp_path / "it").exists()


def test_listing_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from laminar.cli import main; main(['checkpoint', 'ls', '.']); sys.exit('torch' in sys.modules)"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path, env=path)
