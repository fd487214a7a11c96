"""What a user does to the optimizer between two steps: noticed at the next one, and taken into account or refused.

The optimizer is the user's own object. Groups may be added and lists of parameters replaced, `load_state_dict` may put
a whole tensor where a rank keeps a piece, a hook may be hung on `step`. Each step asks `same()`, which compares
identities and nothing else, some microseconds; where something is new, `resolve` makes it be about what this rank owns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.torch_private import step_hooks
from laminar.errors import OptimizerError
from laminar.ir.sbp import NdSbp
from laminar.train.optimizer.optimizer import KNOWN, Kept, any_in_pieces, placed_entry, refuse_unless_elementwise


class Tracked:
    """An optimizer as it was when last looked at."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: Sequence[Kept],
        rounded: bool = False,
        declared: bool = False,
        places: int = 1,
    ) -> None:
        """`rounded`: updates replace entries of the state themselves; `declared`: elementwise on the user's word."""
        self.optimizer, self.declared, self.places = optimizer, declared, places
        pieces = any_in_pieces(kept)
        plain = all(k.owned.is_contiguous() for k in kept)
        # Torch's own updates leave tensors of the state where they are, so another tensor is the user's. It matters
        # where one of the weight's shape and layout might not be what fits.
        self._entries = type(optimizer) in KNOWN and not rounded and (pieces or not plain)
        self._pieces = pieces or places > 1
        self.note()

    def note(self) -> None:
        """Take the optimizer as it is."""
        self._groups = self.optimizer.param_groups
        self._listed = [(g, g["params"], list(g["params"])) for g in self._groups]
        self._state = self.optimizer.state
        self._hooks = step_hooks(self.optimizer)
        states = list(self._state.values()) if self._entries else []
        kept = [(s, key, v) for s in states for key, v in s.items() if isinstance(v, Tensor) and v.dim()]
        self._ids = list(map(id, states))
        self._held, self._keys, self._tensors = [s for s, _, _ in kept], [k for _, k, _ in kept], [v for *_, v in kept]

    def _same_entries(self) -> bool:
        return list(map(id, self.optimizer.state.values())) == self._ids and all(
            map(operator.is_, map(dict.get, self._held, self._keys), self._tensors)
        )

    def same(self) -> bool:
        """Whether nobody but the steps has touched it."""
        groups = self.optimizer.param_groups
        return (
            groups is self._groups
            and len(groups) == len(self._listed)
            and all(
                g is group
                and g["params"] is params
                and len(params) == len(known)
                and all(map(operator.is_, params, known))
                for g, (group, params, known) in zip(groups, self._listed, strict=True)
            )
            and self.optimizer.state is self._state
            and (not self._pieces or step_hooks(self.optimizer) == self._hooks)
            and (not self._entries or self._same_entries())
        )

    def regrouped(self) -> bool:
        """Whether other parameters are named than before, or in other groups."""
        now = [list(map(id, g["params"])) for g in self.optimizer.param_groups]
        return now != [list(map(id, known)) for _, _, known in self._listed]

    def resolve(self, kept: Sequence[Kept], cut: Callable[[Tensor, NdSbp], Tensor]) -> dict[str, Kept]:
        """Make groups and state be about owned pieces again; what is trained from now on, by name."""
        owner = {id(k.owned): k for k in kept} | {id(k.param): k for k in kept}
        trained = resolved(self.optimizer, owner)
        if self._pieces and (step_hooks(self.optimizer) != self._hooks or len(self._listed) != len(self._groups)):
            refuse_unless_elementwise(self.optimizer, list(trained.values()), self.declared, self.places)
        for group in self.optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                k = owner[id(p)]
                if k.owned is not p:
                    group["params"][i] = k.owned
                for at in (p, k.owned) if k.owned is not p else (p,):
                    state = self.optimizer.state.pop(at, None)
                    if state:
                        self.optimizer.state[k.owned] = {
                            key: placed_entry(v, k, group, cut) for key, v in state.items()
                        }
        self.note()
        return trained


def resolved(optimizer: torch.optim.Optimizer, owner: Mapping[int, Kept]) -> dict[str, Kept]:
    """The parameters that an optimizer names; one that is not the model's, or is named twice, is refused."""
    out: dict[str, Kept] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            k = owner.get(id(p))
            if k is None:
                raise OptimizerError(
                    f"parameter {i} of group {g} of the optimizer ({_shape(p)}) is not one of the model's",
                    why="the groups were changed after the job was made",
                    next="add parameters that the model had then, or make a new job",
                )
            if k.name in out:
                raise OptimizerError(
                    f"{k.name} is named twice in the optimizer's groups, the second time in group {g}",
                    next="a parameter belongs to one group",
                )
            out[k.name] = k
    return out


def _shape(p: Any) -> str:
    return str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__
