"""Who makes clusters of a short name, of this machine, of a file of several kinds, and of what is left of one.

They know presets and ask the operating system, so they stand above `ir/clusters/cluster.py`. A cluster asks whoever was
named with `clusters_made_by`: `laminar/__init__.py` names `profile/detect.py`, which is loaded when somebody asks.
Nothing here imports anything, so that naming somebody costs no time; what can be asked is `ir.cluster.ClusterMakers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NAMED_MAKERS: list[Callable[[], Any]] = []


def clusters_made_by(load: Callable[[], Any]) -> None:
    """Name who makes clusters: `load` is called at each question, and gives an `ir.cluster.ClusterMakers`."""
    _NAMED_MAKERS[:] = [load]


def who_makes_clusters() -> Any:
    """An `ir.cluster.ClusterMakers`."""
    return _NAMED_MAKERS[0]()
