"""The saver: checkpoints beside the steps hold what the job was, and a failed one harms nothing."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laminar.checkpoint.history.references import list_refs
from laminar.checkpoint.history.save import Save
from laminar.checkpoint.store.uri import open_store
from laminar.errors import StateError
from laminar.train.job.job import Job
from laminar.train.loop import loop
from laminar.train.options import JobOptions
from laminar.train.saving.checkpoint import saver_for
from laminar.train.saving.legacy_checkpoint import resume_legacy
from laminar.train.saving.save_schedule import SaveEvery
from laminar.train.saving.snapshots import block_sink
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, gap, mean, net, plain

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


def made(plan: Any = "data", seed: int = 0, **kwargs: Any) -> Job:
    model = net(seed, **kwargs)
    return Job(model, mean, adamw(model), batches(1)[0], plan, OPTIONS)


class Gate:
    """Holds up the writing of blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        finish = Save.finish

        def held(save: Save) -> Any:
            assert self.open.wait(60)
            return finish(save)

        monkeypatch.setattr(Save, "finish", held)


def steps(store: Path) -> list[int]:
    return [ref.step for ref in list_refs(open_store(store)).refs]


def test_a_checkpoint_is_what_the_job_was_though_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied first: steps made while it is being written are not in it, and nobody waits for the disk."""
    gate, job, data = Gate(monkeypatch), made(), batches(5)
    job.step(data[0])
    want = job.hash()
    saver = saver_for(job, tmp_path)
    saver.save()
    for batch in data[1:]:
        job.step(batch)
        saver.check()
    assert not steps(tmp_path) and job.hash() != want
    gate.open.set()
    saver.finish()
    again = made(seed=1)
    again.resume(tmp_path)
    assert again.hash() == want and again.steps == 1


def test_a_snapshot_that_is_copied_during_steps_is_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update waits for the copy, wherever the copying thread has got to; weights, moments and averages alike."""
    from laminar.train.saving.snapshots.snapshot import Snapshot

    copies = Snapshot._copies

    def slowly(self: Snapshot, held: Any, buffers: bool) -> Iterator[Any]:
        for pair in copies(self, held, buffers):
            time.sleep(0.0 if buffers else 0.004)
            yield pair

    monkeypatch.setattr(Snapshot, "_copies", slowly)
    job, data = made(), batches(8)
    job.step(data[0])
    saver, roots = saver_for(job, tmp_path), []
    for batch in data[1:]:
        roots.append(job.hash())
        saver.save()
        job.step(batch)
    saver.finish()
    assert [ref.root for ref in list_refs(open_store(tmp_path)).refs] == roots
    assert saver.last is not None and saver.last.stalled_s > 0.02, "the update had to wait for the slow copy"


def test_without_waiting_for_the_copy_it_would_be_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail; and who changes weights behind the job's back is told."""
    from laminar.train.saving.snapshots.snapshot import Snapshot
    from laminar.train.state.state import JobState

    copies = Snapshot._copies

    def slowly(self: Snapshot, held: Any, buffers: bool) -> Iterator[Any]:
        for pair in copies(self, held, buffers):
            time.sleep(0.0 if buffers else 0.01)
            yield pair

    monkeypatch.setattr(Snapshot, "_copies", slowly)
    monkeypatch.setattr(JobState, "about_to_change", lambda self: None)
    job, data = made(), batches(3)
    job.step(data[0])
    saver = saver_for(job, tmp_path)
    saver.save()
    job.step(data[1])
    with pytest.raises(StateError, match="changed by other code while they were copied"):
        saver.finish()
    assert not steps(tmp_path)


def test_the_next_checkpoint_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of a rank's part at a time, and they are committed in order."""
    gate, job = Gate(monkeypatch), made()
    saver = saver_for(job, tmp_path)
    saver.save()
    job.step(batches(1)[0])
    threading.Timer(0.2, gate.open.set).start()
    saver.save()
    assert steps(tmp_path) == [0]
    saver.finish()
    assert steps(tmp_path) == [0, 1]


def _fails(where: str, then: str) -> list[str]:
    """On a rank: a save that fails on one rank alone, training that goes on, and a save that works."""
    job = made("zero3")
    saver = saver_for(job, where)
    saver.save()
    saver.finish()
    job.step(batches(1)[0])
    finish = Save.finish
    if job.rank == 1:
        Save.finish = lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[method-assign,assignment]
    said = ""
    try:
        saver.save()
        job.step(batches(2)[1])
        saver.finish()
    except StateError as error:
        said = str(error)
    Save.finish = finish  # type: ignore[method-assign]
    job.step(batches(3)[2])
    saver.save()
    last = saver.finish()
    assert last is not None
    found = [said, job.hash(), last.ref.root]
    job.close()
    return found


def _in_processes(where: str, plan: str) -> list[str]:
    """On a rank: saves that a process of its own writes; one whose process is killed fails, and the next one works."""
    block_sink.PROCESS_FROM_BYTES = 0
    try:
        job, said = made(plan), ""
        saver = saver_for(job, where)
        for number, batch in enumerate(batches(4)):
            job.step(batch)
            if number == 1 and job.rank == job.world - 1:
                os.kill(saver.sink._writer.pid, signal.SIGKILL)  # type: ignore[union-attr]
            saver.save()
            try:
                saver.finish()
            except StateError as error:
                said += str(error)
        root = job.hash()
        job.close()
        return [said, root]
    finally:
        block_sink.PROCESS_FROM_BYTES = 32 << 20


@pytest.mark.parametrize("plan", [pytest.param("data", marks=pytest.mark.slow), "tensor"])
def test_a_process_writes_and_may_die(plan: str, two: Ranks, tmp_path: Path) -> None:
    """Nothing that was committed is lost with it, ranks agree that the save has failed, the next one has another."""
    one, other = two.run(_in_processes, str(tmp_path), plan)
    assert one == other and "has ended" in one[0]
    assert steps(tmp_path) == [1, 3, 4]
    again = made(seed=3)
    again.resume(tmp_path)
    assert again.hash() == one[1]


def test_a_full_disk_on_one_rank_is_told_on_all_and_training_goes_on(two: Ranks, tmp_path: Path) -> None:
    """Nothing that was committed before is lost, and nothing of the failed save is referred to."""
    one, other = two.run(_fails, str(tmp_path), "")
    assert one == other and "No space left on device" in one[0] and one[1] == one[2]
    assert steps(tmp_path) == [0, 3]


def test_a_store_that_cannot_be_written_ends_a_run_soon(tmp_path: Path) -> None:
    """And not only when it is over, hours later."""
    job = made()
    (tmp_path / "packs").write_text("no folder")
    seen = []
    job.step = lambda batch, step=job.step: seen.append(1) or time.sleep(0.02) or step(batch)  # type: ignore[method-assign]
    with pytest.raises(StateError, match="could not be saved in"):
        loop(job, lambda: batches(5), 2000, checkpoint=tmp_path, checkpoint_every=2)
    assert 2 <= len(seen) < 2000


def test_a_loop_saves_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    """The end is not saved twice, and who goes on from one of them comes to the same weights."""
    job = made()
    loop(job, lambda: batches(5), 7, checkpoint=tmp_path / "whole", checkpoint_every=3, prefetch=2)
    assert steps(tmp_path / "whole") == [3, 6, 7]

    def cut() -> Iterator[Any]:
        for i, batch in enumerate(itertools.cycle(batches(5))):
            if i == 5:
                raise RuntimeError("pulled the plug")
            yield batch

    with pytest.raises(RuntimeError, match="pulled the plug"):
        loop(made(), cut, 20, checkpoint=tmp_path / "cut", checkpoint_every=3)
    resumed = made(seed=1)
    loop(resumed, lambda: batches(5), 7, checkpoint=tmp_path / "cut", resume=tmp_path / "cut")
    assert resumed.hash() == job.hash() and steps(tmp_path / "cut") == [3, 7]


def test_checkpoints_that_need_not_stay_are_dropped(tmp_path: Path) -> None:
    job = made()
    loop(job, lambda: batches(5), 9, checkpoint=tmp_path, checkpoint_every=1, keep="last 2, every 4")
    assert steps(tmp_path) == [4, 8, 9]
    again = made(seed=1)
    again.resume(f"{tmp_path}#{list_refs(open_store(tmp_path)).refs[0].run}@4")
    assert again.steps == 4


@pytest.mark.parametrize(("text", "every"), [("100", (100, 0)), ("30s", (0, 30)), ("10m", (0, 600)), ("2h", (0, 7200))])
def test_how_often_is_said_in_steps_or_time(text: str, every: tuple[int, float]) -> None:
    assert (SaveEvery.parse(text).steps, SaveEvery.parse(text).seconds) == every


def _by_time(where: str) -> list[int]:
    """On a rank: checkpoints every second of steps that take a twentieth of one."""
    job = made("zero1")
    step = job.step
    job.step = lambda batch: time.sleep(0.05) or step(batch)  # type: ignore[method-assign]
    loop(job, lambda: batches(5), 60, checkpoint=where, checkpoint_every="1s")
    job.close()
    return steps(Path(where))


def test_ranks_save_after_the_same_step_where_time_decides(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(_by_time, str(tmp_path))
    assert one == other and 2 <= len(one) < 60


def test_runs_are_never_mixed(tmp_path: Path) -> None:
    """A second run in one store is another run; who resumes has to say which, or is its own."""
    first, second = made(), made(seed=5)
    first.save(tmp_path)
    second.step(batches(1)[0])
    second.save(tmp_path)
    runs = [job.savers[str(tmp_path)].run for job in (first, second)]
    assert {r.run for r in list_refs(open_store(tmp_path)).refs} == set(runs) and len(set(runs)) == 2
    third = made(seed=6)
    with pytest.raises(StateError, match="holds 2 runs"):
        third.resume(tmp_path)
    third.resume(f"{tmp_path}#{runs[0]}")
    assert third.hash() == first.hash()
    second.step(batches(1)[0])
    second.resume(tmp_path)
    assert second.steps == 1
    with pytest.raises(StateError, match="holds a run"):
        made().save(f"{tmp_path}#{runs[1]}")
    with pytest.raises(StateError, match="no job was saved"):
        third.resume(tmp_path / "elsewhere")


def damaged(store: Path, step: int) -> None:
    """Spoil a pack, counted in the order in which they were written."""
    packs = sorted((store / "packs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    written = packs[step].stat().st_mtime_ns
    data = bytearray(packs[step].read_bytes())
    data[200] = (data[200] + 1) % 256
    os.chmod(packs[step], 0o600)
    packs[step].write_bytes(data)
    os.utime(packs[step], ns=(written, written))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    job = made()
    for batch in batches(2):
        job.step(batch)
        job.save(tmp_path)
    damaged(tmp_path, -1)
    again = made(seed=1)
    again.resume(tmp_path)
    assert again.steps == 1
    again.step(batches(2)[1])
    again.save(tmp_path)  # the very state whose blocks are damaged: written again, not shared
    third = made(seed=2)
    third.resume(tmp_path)
    assert third.steps == 2 and third.hash() == again.hash()
    for number in range(len(list((tmp_path / "packs").iterdir()))):
        damaged(tmp_path, number)
    before = again.hash()
    with pytest.raises(Exception, match="is whole"):
        again.resume(tmp_path)
    assert again.hash() == before, "nothing is put in place of a checkpoint that is not whole"


def changed(what: Callable[[nn.Module], None]) -> Job:
    model = net(2)
    what(model)

    def loss(m: nn.Module, batch: Any) -> torch.Tensor:
        return m.up(m.norm(m.embed(batch["ids"]))).square().mean()

    return Job(model, loss, adamw(model), batches(1)[0], "data", OPTIONS)


def test_another_models_checkpoint_is_refused_by_names_and_shapes(tmp_path: Path) -> None:
    job = made()
    job.step(batches(1)[0])
    job.save(tmp_path)
    with pytest.raises(StateError, match=r"up\.bias is f64\[64\] there, f64\[32\]"):
        changed(lambda m: setattr(m, "up", nn.Linear(16, 32).double())).resume(tmp_path)
    with pytest.raises(StateError, match=r"missing\s+extra\.weight"):
        changed(lambda m: setattr(m, "extra", nn.Linear(2, 2).double())).resume(tmp_path)
    with pytest.raises(StateError, match=r"unexpected.*down"):
        changed(lambda m: setattr(m, "down", nn.Identity())).resume(tmp_path)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """Torch's fused updates look at no shape: what does not belong to an optimizer never gets there."""
    job = made()
    job.step(batches(1)[0])
    job.save(tmp_path)
    model = net()
    other = Job(model, mean, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batches(1)[0], "data", OPTIONS)
    with pytest.raises(StateError, match="not that of this SGD"):
        other.resume(tmp_path)
    model = net()
    amsgrad = torch.optim.AdamW(model.parameters(), 0.1, amsgrad=True)
    other = Job(model, mean, amsgrad, batches(1)[0], "data", OPTIONS)
    other.resume(tmp_path)  # its options are those of the run that goes on
    assert not amsgrad.param_groups[0]["amsgrad"] and other.hash() == job.hash()


def test_folders_of_the_former_kind_are_read(tmp_path: Path) -> None:
    """Weights, optimizer state, averages and steps; a write that was stopped between its renames is finished."""
    where = tmp_path / "it"
    shutil.copytree(Path(__file__).parents[1] / "golden" / "folder_of_version_1", where)
    for name in ("job.json", "optimizer.safetensors"):
        (where / name).rename(where / f"{name}.part")
    job = made(seed=4, dtype=torch.float32)
    job.resume(where, scheduler=torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9))
    assert job.steps == 2
    job.optimizer.param_groups[0]["lr"] = 1e-2
    other = net(dtype=torch.float32)
    optimizer = adamw(other)
    plain(other, mean, optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = 9e-3
    plain(other, mean, optimizer, batches(2)[1:])
    assert gap(job.state_dict(), other.state_dict()) < 1e-6
    with pytest.raises(StateError, match="version 7"):
        (where / "job.json").write_text('{"laminar_job": 7}')
        resume_legacy(job, where)
