"""Saves in odd moments and of odd states: two at once, one that fails, a script that ends, options of other types."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laminar.checkpoint.history import save as save_module
from laminar.checkpoint.history.references import list_refs
from laminar.checkpoint.store.uri import open_store
from laminar.errors import CheckpointError, StateError
from laminar.train.batch.position import DataPosition
from laminar.train.job.job import Job
from laminar.train.loop import loop
from laminar.train.options import JobOptions
from laminar.train.saving import checkpoint, resume
from laminar.train.saving.snapshots.snapshot import Snapshot
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, mean, net

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


def made(optimizer: Any = adamw, seed: int = 0, plan: Any = "data", model: nn.Module | None = None) -> Job:
    model = net(seed) if model is None else model
    return Job(model, mean, optimizer(model), batches(1)[0], plan, OPTIONS)


def roots(store: Path) -> list[str]:
    return [ref.root for ref in list_refs(open_store(store)).refs]


def test_two_saves_that_copy_at_once_are_both_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update waits for all of them, not for the last one that began."""
    copies = Snapshot._copies

    def slowly(self: Snapshot, held: Any, buffers: bool) -> Iterator[Any]:
        for pair in copies(self, held, buffers):
            time.sleep(0.0 if buffers else 0.004)
            yield pair

    monkeypatch.setattr(Snapshot, "_copies", slowly)
    job = made()
    job.step(batches(1)[0])
    root = job.hash()
    for name in ("a", "b"):
        job.save(tmp_path / name, wait=False)
    job.step(batches(2)[1])
    for saver in job.savers.values():
        saver.finish()
    assert roots(tmp_path / "a") == roots(tmp_path / "b") == [root]


def _damaged_for_one(store: str) -> tuple[int, str]:
    """On a rank: the newest checkpoint can't be read by one rank alone."""
    job = made(plan="zero3")
    for batch in batches(2):
        job.step(batch)
        job.save(store)
    reader = resume.StateReader

    def read(where: Any, ref: Any) -> Any:
        if job.rank == 1 and ref.step == 2:
            raise CheckpointError("its manifest is damaged, as one rank sees it")
        return reader(where, ref)

    resume.StateReader = read  # type: ignore[assignment,misc]
    try:
        job.resume(store)
    finally:
        resume.StateReader = reader  # type: ignore[misc]
    found = job.steps, job.hash()
    job.close()
    return found


def test_ranks_go_on_from_one_checkpoint_though_one_of_them_sees_damage(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(_damaged_for_one, str(tmp_path))
    assert one == other and one[0] == 1


def test_a_save_that_failed_is_told_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_module.Save, "commit", full)
        job.save(tmp_path, wait=False)
        job.savers[str(tmp_path)].settle()
    with pytest.raises(StateError, match="No space left"):
        job.step(batches(1)[0])
    job.step(batches(1)[0])
    job.save(tmp_path)
    assert roots(tmp_path) == [job.hash()]


def test_a_script_that_ends_behind_a_save_waits_for_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = "from tests.train.test_odd_saves import made; made().save('store', wait=False)"
    path = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path, env=path)
    assert len(roots(tmp_path / "store")) == 1


class Own:
    """Data of a rank's own that can seek, and hands out its own state."""

    def __init__(self, rank: int) -> None:
        self.at = {"batch": 10 * rank}

    def state_dict(self) -> dict[str, int]:
        return self.at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at["batch"] += 1
            yield batches(1, seed=self.at["batch"] % 10)[0] | {"of": torch.full((8,), self.at["batch"])}


def _places(store: str) -> list[int]:
    """On a rank: batches that are seen behind a resumption."""
    seen: list[int] = []
    job = made()
    step = job.step
    job.step = lambda batch: seen.append(int(batch.pop("of")[0])) or step(batch)  # type: ignore[method-assign]
    own = Own(job.rank)
    loop(job, lambda: own, 3, checkpoint=store, prefetch=2)
    job.close()
    again = made(seed=3)
    step_again = again.step
    again.step = lambda batch: seen.append(int(batch.pop("of")[0])) or step_again(batch)  # type: ignore[method-assign]
    loop(again, lambda: Own(again.rank), 5, resume=store, prefetch=2)
    again.close()
    return seen


def test_each_ranks_data_goes_on_where_it_was(two: Ranks, tmp_path: Path) -> None:
    """Though batches were loaded ahead, and the loader's state is its own dict, which goes on."""
    assert two.run(_places, str(tmp_path)) == [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]


def test_data_that_cannot_seek_is_not_asked() -> None:
    position = DataPosition(lambda: [1, 2, 3])
    assert [b for b, _ in zip(position.batches(2), range(3), strict=False)] == [3, 1, 2] and position.state(3) is None


def test_hooks_of_users_hear_of_their_own_parameters_alone(tmp_path: Path) -> None:
    job, heard = made(), []
    job.step(batches(1)[0])
    job.save(tmp_path)
    other = made(seed=2)
    other.optimizer.register_step_post_hook(lambda *_: heard.append(1))
    other.resume(tmp_path)
    assert not heard


def test_averages_that_are_missing_begin_anew_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = made()
    job.step(batches(1)[0])
    job.save(tmp_path)
    name = next(iter(job.state.ema))
    boxes = resume.stage_averages

    def without(state: Any, names: Any, read: Any) -> Any:
        return boxes(state, set(names) - {name}, read)

    other = made(seed=2)
    resume.stage_averages = without  # type: ignore[assignment]
    try:
        other.resume(tmp_path)
    finally:
        resume.stage_averages = boxes  # type: ignore[assignment]
    mine, theirs = job.state.ema, other.state.ema
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == [name]


def test_tensors_without_elements_are_no_obstacle(tmp_path: Path) -> None:
    model = net()
    model.register_buffer("nothing", torch.zeros(0, 4))
    job = made(model=model)
    job.save(tmp_path)
    job.resume(tmp_path)


def test_options_of_numpy_and_options_that_no_file_can_hold(tmp_path: Path) -> None:
    job = made(lambda m: torch.optim.SGD(m.parameters(), lr=float(np.float32(0.05)), momentum=0.9))
    job.optimizer.param_groups[0]["lr"] = np.float32(0.05)
    job.optimizer.param_groups[0]["decides"] = lambda: 1
    job.step(batches(1)[0])
    job.save(tmp_path)
    other = made(lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9), seed=2)
    other.resume(tmp_path)
    assert other.optimizer.param_groups[0]["lr"] == float(np.float32(0.05)) and other.hash() == job.hash()


def test_entries_from_when_an_option_was_another_are_carried_along(tmp_path: Path) -> None:
    job = made(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    job.step(batches(1)[0])
    job.optimizer.param_groups[0]["momentum"] = 0.0
    job.step(batches(2)[1])
    job.save(tmp_path)
    other = made(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), seed=2)
    other.resume(tmp_path)
    assert other.hash() == job.hash()
    other.step(batches(1)[0])


def test_going_back_while_a_save_is_under_way(tmp_path: Path) -> None:
    """It is committed first, and the next one has the number behind it."""
    job = made()
    job.save(tmp_path)
    job.step(batches(1)[0])
    job.save(tmp_path, wait=False)
    job.resume(tmp_path)
    assert job.steps == 1
    job.step(batches(2)[1])
    job.save(tmp_path)
    assert len(roots(tmp_path)) == 3 and roots(tmp_path)[-1] == job.hash()
    assert checkpoint.saver_for(job, f"{tmp_path}/.") is job.savers[str(tmp_path)]


def test_a_job_whose_schedulers_are_refused_stays_as_it_was(tmp_path: Path) -> None:
    job = made()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    job.step(batches(1)[0])
    scheduler.step()
    job.save(tmp_path)
    other = made(seed=2)
    kept = torch.optim.lr_scheduler.CosineAnnealingLR(other.optimizer, 5)
    before = other.hash()
    with pytest.raises(StateError, match="ExponentialLR"):
        other.resume(tmp_path)
    assert other.hash() == before and kept.last_epoch == 0


@dataclass
class Plain(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that has no hash."""

    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        super().__init__(self.optimizer)

    def get_lr(self) -> list[Any]:
        return [g["lr"] * 0.5 for g in self.optimizer.param_groups]


def test_schedulers_of_any_class_are_found(tmp_path: Path) -> None:
    job = made()
    scheduler = Plain(job.optimizer)
    job.step(batches(1)[0])
    scheduler.step()
    job.save(tmp_path)
    assert job.resume(tmp_path)["schedulers"][0]["class"] == "Plain"
