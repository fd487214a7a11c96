"""Every error a user can meet, as one tree.

    LaminarError
    ├── CaptureError        the model can't be written down as one graph (names the user's line)
    ├── GraphError          a graph that breaks the grammar of `ir.graph`
    ├── PlacementError      a placement that can't hold for a tensor
    │   └── NoRuleError     an op has no signature for the placements asked for
    ├── PlanError           a plan that does not fit its graph, its mesh or this version
    │   └── NoPlanFits      no plan that was looked at fits the memory (knows the fewest bytes seen)
    ├── RuleError           a rewrite rule that can't be read, or does not hold
    ├── MeshError           a mesh that makes no sense, or is larger than the world
    ├── ClusterError        a description of a machine that makes no sense, or is too small
    ├── BatchError          a batch that differs from the captured one
    ├── DataError           samples that can't be balanced or packed, or a loader that lost its worker
    ├── NetError            actors and queues that make no sense, or would wait for each other for ever
    ├── SimulationError     a load the simulator can't run: tasks that wait for each other, or name what isn't there
    ├── TimelineError       a file that is no timeline, or a span that can't have happened
    ├── RecipeError         a recipe that can't be found or has the wrong shape
    ├── OptimizerError      an optimizer that can't run on what ranks own
    ├── CheckError          the compiled step gives other numbers than the model itself
    ├── StateError          a checkpoint that is not this model's or this optimizer's
    ├── CheckpointError     a checkpoint that is damaged, hostile, or gone
    │   └── StorageError    the place where checkpoints lie can't be read or written
    ├── NonFiniteError      a loss or gradient that is NaN or infinite
    ├── OutOfMemoryError    a rank needs more memory than there is
    ├── RankError           a rank failed or died while the others trained
    │   └── PeerError       this rank is well, but has lost another
    ├── StoppedError        a signal asked the run to end
    └── RendezvousError     ranks have no place to meet: a port in use, a run directory nobody named

An error says what is wrong, where, what is allowed, and the next step; nothing here formats a
traceback, the command line decides about that.
"""

from __future__ import annotations

from math import inf


class LaminarError(Exception):
    """The root: catch this to catch everything Laminar raises on purpose."""

    def __init__(self, what: str, **lines: str) -> None:
        """`what` in one line, then labelled lines such as at=..., allowed=..., next=..."""
        width = max((len(label) for label in lines), default=0)
        self.what, self.lines = what, {label: text for label, text in lines.items() if text}
        body = "".join(f"\n  {label:<{width}}  {text}" for label, text in self.lines.items())
        super().__init__(what + body)


class CaptureError(LaminarError):
    """The model can't be written down as one graph."""


class GraphError(LaminarError):
    """A graph that breaks the grammar."""


class PlacementError(LaminarError):
    """A placement that can't hold for a tensor."""


class NoRuleError(PlacementError):
    """An op has no signature for the placements asked for."""


class PlanError(LaminarError):
    """A plan that does not fit its graph, its mesh or this version."""


class NoPlanFits(PlanError):
    """No plan that a search looked at fits the memory."""

    def __init__(self, what: str, *, least_bytes: float = inf, **lines: str) -> None:
        """`least_bytes` is what the leanest plan that was looked at needs on its fullest rank."""
        super().__init__(what, **lines)
        self.least_bytes = least_bytes


class RuleError(LaminarError):
    """A rewrite rule that can't be read, or does not hold."""


class MeshError(LaminarError):
    """A mesh that makes no sense, or is larger than the world."""


class ClusterError(LaminarError):
    """A description of a machine that makes no sense, or is too small."""


class BatchError(LaminarError):
    """A batch that differs from the captured one."""


class DataError(LaminarError):
    """Samples that can't be balanced or packed, or a loader that lost its worker."""


class NetError(LaminarError):
    """Actors and queues that make no sense, or would wait for each other for ever."""


class SimulationError(LaminarError):
    """A load the simulator can't run."""


class TimelineError(LaminarError):
    """A file that is no timeline, or a span that can't have happened."""


class RecipeError(LaminarError):
    """A recipe that can't be found or has the wrong shape."""


class OptimizerError(LaminarError):
    """An optimizer that can't run on what ranks own."""


class CheckError(LaminarError):
    """The compiled step gives other numbers than the model itself."""


class StateError(LaminarError):
    """A checkpoint that is not this model's or this optimizer's."""


class CheckpointError(LaminarError):
    """A checkpoint that is damaged, hostile, or gone."""


class StorageError(CheckpointError):
    """The place where checkpoints lie can't be read or written."""


class NonFiniteError(LaminarError):
    """A loss or gradient that is NaN or infinite."""


class OutOfMemoryError(LaminarError):
    """A rank needs more memory than there is."""


class RankError(LaminarError):
    """A rank failed or died while the others trained."""


class PeerError(RankError):
    """This rank is well, but has lost another."""


class StoppedError(LaminarError):
    """A signal asked the run to end."""


class RendezvousError(LaminarError):
    """Ranks have no place to meet."""
