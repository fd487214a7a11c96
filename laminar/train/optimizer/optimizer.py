"""The user's optimizer, run on pieces.

An elementwise update of a tensor is the same update of each of its pieces, so the optimizer itself
is not rewritten: its parameter groups are made to name what this rank owns, and everything that
depends on them (learning-rate schedulers, weight decay by group) goes on working. Which pieces a rank
owns is the plan's decision (`Plan.state`). Which updates are elementwise no trial can decide, as one may begin
to look at norms in its sixth step: torch's own classes are known, others are taken on their user's word
(`elementwise=True`), and only then tried.

With parameters held whole on every rank, any optimizer will do, also one that computes the loss several times.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.torch_private import step_hooks
from laminar.errors import OptimizerError, StateError
from laminar.ir.sbp import NdSbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.train.optimizer.memory_layout import laid_as

KNOWN = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Torch's own whose update of an element depends on that element, its gradient and its state alone."""
TENSORWISE = (torch.optim.Adafactor, torch.optim.Muon)
"""Torch's own that need a whole tensor, but no other than that."""
TRIAL, TRIAL_STEPS = (6, 4), 8
"""Shape of the tensor on which an optimizer is tried, and for how many steps."""


@dataclass
class Kept:
    """One parameter as this rank keeps it."""

    name: str
    spec: TensorSpec
    """Of the whole tensor."""
    param: nn.Parameter
    """The model's own; its data is this rank's part."""
    nd: NdSbp
    state_nd: NdSbp
    """Of the part that this rank's optimizer updates, and of its state."""
    owned: nn.Parameter
    """That part: the parameter itself, or a piece that lies in its memory where that is possible."""

    def __post_init__(self) -> None:
        self.stride = self.owned.stride()
        self.plain = self.owned.is_contiguous() and (self.owned.device.type == "cpu" or 1 not in self.owned.shape)
        """Whether a contiguous gradient lies like it; GPUs look at the strides of dims of one element, too."""

    @property
    def gathered(self) -> bool:
        """Whether the parameter is put together from owned pieces after an update."""
        return self.owned is not self.param

    @property
    def has_own_memory(self) -> bool:
        """Whether the owned part lies elsewhere than in the parameter."""
        return self.gathered and self.owned.untyped_storage().data_ptr() != self.param.untyped_storage().data_ptr()


def made(optimizer: Any, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, from itself or from a factory."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__}",
            allowed="a torch optimizer, or a function that makes one from parameters",
        )
    out = optimizer(params)
    if not isinstance(out, torch.optim.Optimizer):
        raise OptimizerError(f"the optimizer factory returned a {type(out).__name__}", allowed="a torch optimizer")
    return out


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, as often as it likes, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_closure(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Refuse an optimizer that computes the loss itself where a step can't be run that way."""
    if takes_closure(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} computes the loss several times in a step, through a closure",
            why=why,
            next='use an optimizer that takes one gradient a step, or plan="data" without scaled or rounded weights',
        )


def first_lr(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first group, as results tell it."""
    return float(optimizer.param_groups[0].get("lr", math.nan))


def laid_out(kept: Sequence[Kept], grads: list[Tensor], plain: bool = False) -> list[Tensor]:
    """Gradients that lie in memory as what they update does (`memory_layout.py`). `plain`: all of that is."""
    if plain and all(map(Tensor.is_contiguous, grads)):
        return grads
    return [g if g.stride() == k.stride else laid_as(g, k.owned) for k, g in zip(kept, grads, strict=True)]


def refuse_unknown(optimizer: torch.optim.Optimizer, params: Mapping[int, str]) -> None:
    """Every parameter of the optimizer must be one of the model's."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in params:
                raise OptimizerError(
                    f"parameter {i} of group {g} ({tuple(p.shape)}) is not one of the model's",
                    next="make the optimizer from model.parameters()",
                )


def faster(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Use the fused or multi-tensor form of the update where torch has one and the user has not chosen."""
    fused = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    for group in optimizer.param_groups:
        free = group.get("fused", False) is None and group.get("foreach", False) is None
        if not free or group.get("differentiable") or group.get("capturable") or optimizer.state:
            continue
        both = type(optimizer) is not torch.optim.Adagrad or device.type == "cpu"
        floats = all(p.dtype in (torch.float32, torch.float64, torch.bfloat16) for p in group["params"])
        if type(optimizer) in fused and both and floats:
            group["fused"] = True
        else:
            group["foreach"] = True


def adopt(optimizer: torch.optim.Optimizer, kept: Sequence[Kept], cut: Callable[[Tensor, NdSbp], Tensor]) -> None:
    """Make the optimizer's groups and its state be about owned pieces; `cut` takes this rank's part of a whole."""
    by_param = {id(k.param): k for k in kept}
    old = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in old:
                k = by_param[id(p)]
                optimizer.state[k.owned] = {key: placed_entry(v, k, group, cut) for key, v in old[p].items()}
        group["params"] = [by_param[id(p)].owned for p in group["params"]]


# --- which updates are elementwise -------------------------------------------------------------


def any_in_pieces(kept: Iterable[Kept]) -> bool:
    """Whether any parameter or its state is not whole on this rank."""
    return any(isinstance(p, Split) for k in kept for p in (*k.nd, *k.state_nd))


def refuse_unless_elementwise(
    optimizer: torch.optim.Optimizer, kept: Sequence[Kept], declared: bool = False, places: int = 1
) -> None:
    """If there are pieces, refuse an optimizer that is neither known nor `declared` to update element by element.

    One that is declared is tried: whose update of a whole differs from its updates of the pieces is refused, too.
    Where parameters lie whole, but at several `places`, one that takes each tensor by itself will do.
    """
    pieces = any_in_pieces(kept)
    if not pieces and places == 1:
        return
    name = type(optimizer).__name__
    where = "in shards" if pieces else "at several places"
    refuse_closure(optimizer, f"the plan keeps parameters or their state {where}")
    unknown = unknown_part(optimizer, KNOWN if pieces else (*KNOWN, *TENSORWISE))
    whole_plan = 'a plan that keeps parameters and state whole (plan="data")'
    if unknown and not (declared or getattr(optimizer, "elementwise", False) is True):
        raise OptimizerError(
            f"{unknown} is not known to update each element by itself",
            why=f"the plan keeps parameters or their state {where}, and a norm over a part is not one over the whole",
            next=f"say parallelize(..., elementwise=True) if it does, or use {whole_plan}",
        )
    if not unknown or not pieces:
        return
    advice = f"use {whole_plan}, or an elementwise optimizer"
    for group in optimizer.param_groups:
        hyper = {k: v for k, v in group.items() if k != "params"}
        try:
            whole, *halves = (_trial(optimizer, hyper, cut) for cut in (_uncut, _rows, _columns))
        except Exception as error:
            raise OptimizerError(
                f"{name} can't be tried on a small tensor: {type(error).__name__}: {error}",
                why="its update must be elementwise, because the plan keeps state in shards",
                next=advice,
            ) from error
        for half in halves:
            if not torch.allclose(whole, half, rtol=1e-9, atol=1e-12):
                raise OptimizerError(
                    f"{name} is not elementwise: updating a tensor in shards gives other numbers "
                    "than updating it whole",
                    next=advice,
                )


def unknown_part(optimizer: torch.optim.Optimizer, known: tuple[type, ...] = KNOWN) -> str:
    """What of an optimizer is not torch's own elementwise code, in words: its class, its step, or hooks around that."""
    if type(optimizer) not in known:
        return type(optimizer).__name__
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return f"the step of this {type(optimizer).__name__}"
    return f"a hook around {type(optimizer).__name__}.step" if step_hooks(optimizer) else ""


def _uncut(x: Tensor) -> list[Tensor]:
    return [x]


def _rows(x: Tensor) -> list[Tensor]:
    return list(x.split([1, x.shape[0] - 1]))


def _columns(x: Tensor) -> list[Tensor]:
    return list(x.split([1, x.shape[1] - 1], 1))


def _trial(optimizer: torch.optim.Optimizer, hyper: dict[str, Any], cut: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """Some updates of a small float64 tensor, in the pieces that `cut` makes, each by itself; the result put together.

    A piece has an optimizer of its own, as it has on a rank: a norm over all parameters is one over the piece there.
    """
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(TRIAL, generator=random, dtype=torch.float64) for _ in range(TRIAL_STEPS + 1)]
    plain = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in hyper.items()}
    step = type(optimizer).step  # not the instance's, which a scheduler may have wrapped to count calls
    pieces = []
    for start, *grads in zip(*(cut(x) for x in drawn), strict=True):
        param = nn.Parameter(start.clone())
        twin = copy.copy(optimizer)
        twin.__dict__ = {k: copy.copy(v) for k, v in optimizer.__dict__.items()}
        twin.state = defaultdict(dict)
        twin.param_groups = [{**plain, "params": [param]}]
        for grad in grads:
            param.grad = grad.clone()
            step(twin)
        pieces.append(param.detach())
    return torch.cat(pieces, 0 if pieces[0].shape[1] == TRIAL[1] else 1)


# --- state in torch's own format ---------------------------------------------------------------


def load_state_dict(
    optimizer: torch.optim.Optimizer, kept: Sequence[Kept], given: Any, cut: Callable[[Tensor, NdSbp], Tensor]
) -> None:
    """Take what a plain optimizer saved, or what `JobState.optimizer_state_dict` gave."""
    by_owned = {id(k.owned): k for k in kept}
    order = [p for g in optimizer.param_groups for p in g["params"]]
    groups = given["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        raise StateError(
            "the optimizer state has other parameter groups than this optimizer",
            mine=str([len(g["params"]) for g in optimizer.param_groups]),
            given=str([len(g["params"]) for g in groups]),
        )
    optimizer.state.clear()
    numbers = [i for g in groups for i in g["params"]]
    owners = [g for g in optimizer.param_groups for _ in g["params"]]
    for number, p, group in zip(numbers, order, owners, strict=True):
        k = by_owned[id(p)]
        state = given["state"].get(number, given["state"].get(str(number)))
        if state is not None:
            optimizer.state[p] = {key: placed_entry(v, k, group, cut) for key, v in state.items()}
    for group, other in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: v for key, v in other.items() if key not in ("params", "fused", "foreach")})


def placed_entry(value: Any, k: Kept, group: dict[str, Any], cut: Callable[[Tensor, NdSbp], Tensor]) -> Any:
    """One entry of the state as this rank keeps it; unlike torch's own loading it keeps the entry's dtype."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() and tuple(value.shape) == k.spec.shape != tuple(k.owned.shape):
        value = cut(value, k.state_nd)
    if value.dim() and value.shape == k.owned.shape:
        return laid_as(value.to(k.owned.device, copy=True), k.owned)
    on_device = group.get("fused") or group.get("capturable")
    return value.to(k.owned.device, copy=True) if on_device or value.dim() else value.clone()


def is_part(k: Kept, value: Any) -> bool:
    """Whether an entry of the state has an element for each of what is owned, and is split as that is."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == k.owned.shape
