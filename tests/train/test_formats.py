"""Weights in formats of others: written and read again under every layout, and nothing that a file brings is run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laminar.errors import StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.export import WeightFile, planned_files
from laminar.train.formats.export import export as export_weights
from laminar.train.formats.open_source import open_source
from laminar.train.job.ddp_job import DdpJob
from laminar.train.job.job import Job
from laminar.train.options import JobOptions
from tests.support.rank_pool import Ranks
from tests.support.small_job import adamw, batches, gap, mean, net

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


def job(seed: int = 0, plan: Any = "data") -> Job:
    model = net(seed)
    return Job(model, mean, adamw(model), batches(1)[0], plan, OPTIONS)


def weights(seed: int = 3) -> dict[str, Tensor]:
    """Of another model of the same kind, tied head included."""
    return {k: v.clone() for k, v in net(seed).state_dict().items()}


def untied(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in given.items() if k != "head.weight"}


def as_safetensors(folder: Path, given: dict[str, Tensor]) -> Path:
    save_file(untied(given), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_hugging_face(folder: Path, given: dict[str, Tensor]) -> Path:
    names = list(untied(given))
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, those in files.items():
        save_file({n: given[n] for n in those}, folder / file)
    index = {"metadata": {}, "weight_map": {n: f for f, those in files.items() for n in those}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_torch_save(folder: Path, given: dict[str, Tensor]) -> Path:
    torch.save({"epoch": 3, "model": given}, folder / "weights.pt")
    return folder / "weights.pt"


def as_old_torch_save(folder: Path, given: dict[str, Tensor]) -> Path:
    torch.save(given, folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


def as_dcp(folder: Path, given: dict[str, Tensor]) -> Path:
    with pytest.warns(UserWarning):
        dcp.save(given, checkpoint_id=folder / "dcp")
    return folder / "dcp"


WRITERS = [as_safetensors, as_hugging_face, as_torch_save, as_old_torch_save, as_dcp]


@pytest.mark.parametrize("write", WRITERS)
def test_files_of_others_become_a_jobs_weights(write: Callable[..., Path], tmp_path: Path) -> None:
    given, here = weights(), job()
    found = here.load_weights(write(tmp_path, given))
    assert not found.missing and not found.unexpected
    assert gap(here.state_dict(), given) == 0.0
    assert gap(here.state_dict(ema=True), given) == 0.0, "averages begin from the weights that were loaded"


@pytest.mark.parametrize("write", WRITERS)
def test_sources_give_any_box(write: Callable[..., Path], tmp_path: Path) -> None:
    given = weights()
    source = open_source(write(tmp_path, given))
    for name in untied(given):
        whole = given[name]
        for part in (0.0, 0.3, 1.0):
            index = tuple(slice(int(n * part / 2), max(int(n * part), int(n * part / 2) + 1)) for n in whole.shape)
            index = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(index, whole.shape, strict=True))
            assert torch.equal(source.read(name, index), whole[index])


def _loads(where: str, plan: Any, out: str) -> float:
    """On a rank: weights from a file, a step, and an export; the gap between what was loaded and the file."""
    here = job(plan=plan)
    here.load_weights(where)
    found = gap(here.state_dict(), weights())
    here.step(batches(1)[0])
    want = {k: v.clone() for k, v in here.state_dict().items()}
    files = export_weights(here, out, file_bytes=6000)
    assert len(files) > 1
    here.load_weights(out)
    here.close()
    return max(found, gap(here.state_dict(), want))


@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor"])
def test_ranks_read_their_parts_and_write_whole_files(two: Ranks, plan: str, tmp_path: Path) -> None:
    where = as_dcp(tmp_path, weights())
    assert max(two.run(_loads, str(where), plan, str(tmp_path / "out"))) == 0.0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(untied(weights()))
    assert not list((tmp_path / "out").glob(".*")), "nothing is left lying about"


def test_an_export_is_what_other_programs_read(tmp_path: Path) -> None:
    """By safetensors itself: names, dtypes, a scalar, and tensors that begin where their elements align."""
    here = job()
    assert here.export(tmp_path) == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(untied(weights()))
    assert all(torch.equal(found[k], v) for k, v in untied(here.state_dict()).items())
    here.export(tmp_path / "average", ema=True)
    assert set(load_file(tmp_path / "average" / "model.safetensors")) == set(found)


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    here = job()
    export_weights(here, tmp_path, file_bytes=6000)
    (tmp_path / ".model.safetensors.part").write_bytes(b"left by one that was killed")
    here.export(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}
    assert open_source(tmp_path).specs.keys() == untied(weights()).keys()
    export_weights(here, tmp_path, file_bytes=6000)
    assert not (tmp_path / "model.safetensors").exists()


def test_tensors_align_in_files_of_mixed_dtypes() -> None:
    specs = [("a", "bf16"), ("b", "f64"), ("c", "bool"), ("d", "f32")]
    (file,) = planned_files([(n, TensorSpec((3,), d)) for n, d in specs], 1000)
    table = json.loads(WeightFile(file.name, file.tensors).header[8:])
    for name, dtype in specs:
        begin = table[name]["data_offsets"][0]
        assert begin % {"bf16": 2, "f64": 8, "bool": 1, "f32": 4}[dtype] == 0


def test_a_model_that_cannot_be_captured_loads_and_exports(tmp_path: Path) -> None:
    model = net()
    with pytest.warns(UserWarning, match="ddp"):
        here = DdpJob(model, mean, adamw(model), batches(1)[0], OPTIONS)
    here.load_weights(as_torch_save(tmp_path, weights()))
    assert gap(here.state_dict(), weights()) == 0.0
    here.export(tmp_path)


def test_one_submodule_and_other_names(tmp_path: Path) -> None:
    here, given = job(), weights()
    before = {k: v.clone() for k, v in here.state_dict().items()}
    save_file({f"net.{k}": v for k, v in untied(given).items()}, tmp_path / "w.safetensors")
    with pytest.raises(StateError, match=r"rename=\{'net\.': ''\}"):
        here.load_weights(tmp_path / "w.safetensors")
    found = here.load_weights(tmp_path / "w.safetensors", only="up.", rename={"net.": ""})
    assert set(found.loaded) == {"up.weight", "up.bias"}
    now = here.state_dict()
    assert all(torch.equal(now[k], given[k] if k.startswith("up.") else before[k]) for k in now)
    torch.save(net(5).up.state_dict(), tmp_path / "up.pt")
    here.load_weights(tmp_path / "up.pt", only="up.", rename={"": "up."})
    assert torch.equal(here.state_dict()["up.weight"], net(5).up.weight)
    with pytest.raises(StateError, match="no tensor whose name begins"):
        here.load_weights(tmp_path / "up.pt", only="nowhere.")


def test_what_does_not_fit_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    here = job()
    before = {k: v.clone() for k, v in here.state_dict().items()}
    given = untied(weights())
    given["up.weight"] = torch.zeros(3, 3, dtype=torch.float64)
    given["norm.weight"] = torch.zeros(16, dtype=torch.int64)
    given["extra"] = given.pop("down.bias")
    save_file(given, tmp_path / "w.safetensors")
    with pytest.raises(StateError) as error:
        here.load_weights(tmp_path / "w.safetensors")
    said = str(error.value)
    assert "up.weight is f64[3,3] there" in said and "norm.weight is i64" in said
    assert "missing" in said and "down.bias" in said and "extra" in said
    with pytest.raises(StateError, match="shapes"):
        here.load_weights(tmp_path / "w.safetensors", strict=False)
    assert gap(here.state_dict(), before) == 0.0
    del given["up.weight"], given["norm.weight"]
    save_file(given, tmp_path / "w.safetensors")
    found = here.load_weights(tmp_path / "w.safetensors", strict=False)
    assert found.unexpected == ("extra",) and "up.weight" in found.missing


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    here, trap = job(), str(tmp_path / "sprung")
    as_dcp(tmp_path, weights())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(_Bomb(trap)))
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps({"model": _Bomb(trap)}))
    torch.save({"model": _Bomb(trap)}, tmp_path / "zipped.pt")
    for name in ("dcp", "bomb.pt", "zipped.pt"):
        with pytest.raises(StateError):
            here.load_weights(tmp_path / name)
    assert not os.path.exists(trap)


def test_files_that_are_cut_off_or_lie_are_refused(tmp_path: Path) -> None:
    here = job()
    before = {k: v.clone() for k, v in here.state_dict().items()}
    for write in WRITERS:
        folder = tmp_path / write.__name__
        folder.mkdir()
        where = write(folder, weights())
        files = [p for p in (where.rglob("*") if where.is_dir() else [where]) if p.is_file() and p.name[0] != "."]
        largest = max(files, key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-900])
        with pytest.raises(StateError):
            here.load_weights(where)
        assert gap(here.state_dict(), before) == 0.0
    outside = tmp_path / "as_hugging_face" / "model.safetensors.index.json"
    outside.write_text(json.dumps({"weight_map": {"a": "../weights.safetensors"}}))
    with pytest.raises(StateError, match="no file beside it"):
        here.load_weights(outside.parent)
    with pytest.raises(StateError, match="nothing at"):
        here.load_weights(tmp_path / "nowhere")


def test_a_disk_that_is_full_is_an_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = job()
    here.export(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("laminar.train.formats.export._write", full)
    with pytest.raises(StateError, match="No space left"):
        here.export(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_half_precision_models_take_whole_precision_weights(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).bfloat16()
    here = Job(
        model, lambda m, b: m(b).float().square().mean(), adamw(model), torch.ones(2, 4).bfloat16(), "data", OPTIONS
    )
    given = nn.Linear(4, 4).state_dict()
    save_file(given, tmp_path / "w.safetensors")
    here.load_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(v, given[k].bfloat16()) for k, v in here.state_dict().items())
