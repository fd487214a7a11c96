"""States of a few tensors, saved into stores and read back: what tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from laminar.checkpoint import CheckpointRef, Manifest, Save, StateReader, Store, TensorKey, load_manifest, state_record
from laminar.checkpoint.read.state_reader import STORED_AS
from laminar.ir.tensor import ITEM_BYTES

Arrays = Mapping[TensorKey, tuple[str, np.ndarray]]
"""Dtype and bits by key."""
SCALARS = {"steps": 3, "seed": 7, "groups": [{"lr": 1e-3, "betas": [0.9, 0.999]}]}


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0, levels: int = 256) -> np.ndarray:
    """Random bits for a tensor; few `levels` of its bytes compress well."""
    dice = np.random.default_rng(seed)
    raw = dice.integers(0, levels, (*shape, ITEM_BYTES[dtype]), np.uint8)
    return raw.reshape(-1).view(STORED_AS[ITEM_BYTES[dtype]]).reshape(shape)


def small_state(seed: int = 0) -> dict[TensorKey, tuple[str, np.ndarray]]:
    """A weight, its optimizer state, a counter, a buffer and an empty tensor."""
    return {
        TensorKey("parameter", "up.weight"): ("bf16", bits("bf16", (16, 24), seed)),
        TensorKey("optimizer", "up.weight", "exp_avg"): ("f32", bits("f32", (16, 24), seed + 1, levels=2)),
        TensorKey("optimizer", "up.weight", "step"): ("f32", bits("f32", (), seed + 2)),
        TensorKey("buffer", "mean"): ("f64", bits("f64", (3,), seed + 3)),
        TensorKey("buffer", "empty"): ("i64", bits("i64", (0, 4))),
    }


def save_arrays(
    store: Store,
    arrays: Arrays,
    run: str = "run",
    after: int = 0,
    step: int = 0,
    parent: CheckpointRef | None = None,
    scalars: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckpointRef:
    """One process saves all of a state."""
    before = {} if parent is None else load_manifest(store, parent.manifest).state.by_key
    with Save(store, **options) as save:
        records = [save.tensor(k, d, a.shape, a, before.get(k)) for k, (d, a) in arrays.items()]
        state = state_record(records, SCALARS if scalars is None else scalars)
        manifest = Manifest(run, step, state, parent.manifest if parent else None, {"plan": "hand-made"})
        return save.commit(manifest, after)


def assert_holds(store: Store, ref: CheckpointRef, arrays: Arrays) -> None:
    """A checkpoint is this state, bit for bit."""
    reader = StateReader(store, ref)
    assert set(reader.manifest.state.by_key) == set(arrays)
    for key, (dtype, array) in arrays.items():
        assert reader.tensor(key).dtype == dtype
        assert reader.read(key).tobytes() == array.tobytes(), key
