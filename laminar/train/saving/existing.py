"""Whether there is something to go on from, found out without torch: before a run has loaded anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

from laminar.checkpoint.history.checkpoint_name import CheckpointName
from laminar.checkpoint.history.references import list_refs
from laminar.checkpoint.store.uri import open_store


def is_legacy(path: Path) -> bool:
    """Whether a job was saved in a folder in the former way (`legacy_checkpoint.py`), to its end or nearly so."""
    if (path / "job.json").is_file():
        return True
    try:
        json.loads((path / "job.json.part").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


def holds_a_checkpoint(uri: str | os.PathLike[str]) -> bool:
    """Whether a store holds a checkpoint of the run that is meant."""
    name = CheckpointName.parse(uri)
    if "://" not in name.store:
        if is_legacy(Path(name.store)):
            return True
        if not Path(name.store).is_dir():
            return False
    return bool(list_refs(open_store(name.store), name.run or None).refs)
