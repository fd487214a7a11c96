"""The user's own model while a job has it in shards: whole on request, refused where pieces would pass for weights.

Under a plan that cuts parameters, or gives stages to different ranks, the modules that a user made hold this rank's
part. Whoever then calls the model, saves it, copies it or asks it for its state dict would get half a model, or an
error about shapes. Each of these is refused by name, with what to use instead (`job.model`). `Job.release` puts whole
weights back and ends the job; a second job on the same modules does so by itself.

Not covered: a tensor that is read directly (`model.fc.weight.norm()`) is this rank's piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from laminar.errors import StateError

_INSIDE: ContextVar[bool] = ContextVar("laminar reads pieces", default=False)
_DICTS = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
"""Where the hooks of this file lie in a module."""


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Inside, nothing is refused: Laminar itself knows that these are pieces."""
    before = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(before)


def own_state(model: nn.Module) -> dict[str, Any]:
    """The model's own state dict, whatever part of each tensor is here."""
    with allowed():
        return dict(model.state_dict())


class Pieces:
    """What stands on every module of which a job has a part elsewhere, and says so."""

    beside_the_step = True
    """Whoever looks at what a step depends on passes by."""

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` makes the model whole again, and ends the job."""
        self.release = release
        self._handles: list[Any] = []

    def put_on(self, model: nn.Module, cut: set[int]) -> None:
        """Look after the modules that hold one of the tensors `cut`, by their ids, or contain one that does."""
        for module in model.modules():
            if any(id(t) in cut for t in (*module.parameters(), *module.buffers())):
                self._handles += [
                    module.register_forward_pre_hook(self._forward),
                    module.register_state_dict_pre_hook(self._state_dict),
                    module.register_load_state_dict_pre_hook(self._load),
                ]

    def take_off(self) -> None:
        """The model is whole."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward(self, module: nn.Module, args: Any) -> None:
        self.refuse(f"running {type(module).__name__}")

    def _state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.refuse("its state dict")

    def _load(self, *args: Any) -> None:
        self.refuse("loading a state dict into it", "use job.load_state_dict(...)")

    def __reduce__(self) -> Any:
        self.refuse("saving it")
        return super().__reduce__()

    def __deepcopy__(self, memo: Any) -> Pieces:
        self.refuse("a copy of it")
        return self

    def refuse(self, what: str, instead: str = "") -> None:
        """Say what can't be had from pieces, unless it is us who ask."""
        if not _INSIDE.get():
            raise StateError(
                f"the parameters of this model are sharded by a job: {what} would see this rank's pieces only",
                next=instead or "use job.model (whole weights), job.state_dict() or job.save(...)",
                or_="job.release() makes this model whole again, and ends the job",
            )


def stripped(model: nn.Module) -> nn.Module:
    """A copy of such a model, without what says that it is in shards."""
    for module in model.modules():
        for name in _DICTS:
            hooks: dict[int, Any] = getattr(module, name, {})
            for key, hook in list(hooks.items()):
                if isinstance(getattr(getattr(hook, "hook", hook), "__self__", None), Pieces):
                    del hooks[key]
    return model


def released(model: nn.Module) -> None:
    """Make a model whole that other jobs have in shards; every rank calls this."""
    found: dict[int, Pieces] = {}
    for module in model.modules():
        for hook in getattr(module, "_forward_pre_hooks", {}).values():
            pieces = getattr(hook, "__self__", None)
            if isinstance(pieces, Pieces):
                found.setdefault(id(pieces), pieces)
    for pieces in found.values():
        pieces.release()
