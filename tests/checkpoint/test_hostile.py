"""Checkpoints made to do harm are refused by name: no code is run, no file outside touched, memory stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.checkpoint.format.encoding import decode_block
from laminar.checkpoint.format.hashing import hash_as
from laminar.checkpoint.format.manifest import read_manifest
from laminar.checkpoint.format.strict_json import as_canonical, read_canonical
from laminar.checkpoint.packs.pack_format import PACK_END, checked_index, index_bytes
from laminar.errors import CheckpointError
from tests.support.hostile_checkpoints import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them, in one process whose addresses are limited to 1 GiB."""
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.support.hostile_checkpoints", str(folder)]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert not list(folder.rglob("PICKLE*"))
    return json.loads(ran.stdout)


def test_there_are_many() -> None:
    """And none is there twice."""
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str, tried: dict[str, Any]) -> None:
    """With an error of ours, in every way in which it can be read; collecting takes nothing of it away."""
    assert tried["cases"][case].startswith("refused: "), tried["cases"][case]


# --- parsers on random input ---------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_canonical_json_comes_back(value: Any) -> None:
    """Whatever is written is read, with its very bytes; types included."""
    data = as_canonical(value, "value")
    assert as_canonical(read_canonical(data, "value").value, "value") == data


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """By our error and no other."""
    with pytest.raises(CheckpointError):
        read_manifest(data, hash_as("manifest", data).hex())


@given(st.data())
def test_random_values_in_a_manifest_are_refused(data: st.DataObject) -> None:
    """Anything anywhere in it: it is refused, or it makes a manifest that says the same."""
    whole = {
        "laminar_checkpoint": 1,
        "run": "run",
        "step": 1,
        "parent": None,
        "save": "",
        "about": {},
        "state": {
            "root": "0" * 64,
            "scalars": {},
            "tensors": [
                {"kind": "buffer", "name": "n", "entry": "", "dtype": "f32", "shape": [2], "blocks": "00" * 32}
            ],
        },
    }
    at: Any = whole
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(JSON)
        break
    written = as_canonical(whole, "manifest")
    try:
        found = read_manifest(written, hash_as("manifest", written).hex())
    except CheckpointError:
        return
    assert found.data == written


@given(st.binary(max_size=300), st.binary(max_size=60), st.integers(0, 400))
def test_random_ends_of_packs_are_refused(body: bytes, footer: bytes, size: int) -> None:
    """Nothing but an index that was made for the file is taken."""
    with pytest.raises(CheckpointError):
        end = footer[:40].ljust(40, b"\0") + PACK_END
        checked_index(body[: index_bytes(end, size, "pack")], end, size, "pack")


@given(st.binary(max_size=300), st.integers(1, 3), st.integers(0, 500))
def test_random_blocks_are_refused_or_have_their_length(data: bytes, encoding: int, size: int) -> None:
    """A frame that can be read has the length that was asked for."""
    try:
        assert len(decode_block(encoding, data, size, bytes(size))) == size
    except ValueError:
        return
