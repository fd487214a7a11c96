"""One tracing pass over forward, loss and backward, on tensors that hold nothing.

The model's parameters, buffers and plain tensor attributes are swapped for fake CPU tensors while
loss *and* gradient run (recomputation in backward must see them too), then put back. A dispatch
mode notes for every op the user's line, the module, and the phase; a backward op gets those of the
forward op behind it, matched by autograd's sequence numbers.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laminar.capture.canonical import Canonical, gpu_autocast
from laminar.errors import CaptureError, LaminarError

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a traced op comes from."""

    where: str = ""
    module: str = ""
    phase: str = "forward"


@dataclass
class Slot:
    """One tensor of the model: what holds it, under which names, and its stand-in while tracing."""

    name: str
    kind: str
    tensor: Tensor
    places: list[tuple[Any, Any]]
    """Dicts and lists that hold it, and under which key."""
    aliases: list[str] = field(default_factory=list)
    fake: Any = None


def slots_of(model: nn.Module) -> list[Slot]:
    """Every tensor of a model, tied ones once, in order of first appearance."""
    found: dict[int, Slot] = {}

    def meet(name: str, kind: str, tensor: Tensor, holder: Any, key: Any) -> None:
        slot = found.get(id(tensor))
        if slot is None:
            found[id(tensor)] = Slot(name, kind, tensor, [(holder, key)])
            return
        if not any(h is holder and k == key for h, k in slot.places):
            slot.places.append((holder, key))
        if name != slot.name and name not in slot.aliases:
            slot.aliases.append(name)

    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, p in module._parameters.items():
            if p is not None:
                meet(prefix + key, "param", p, module._parameters, key)
        for key, b in module._buffers.items():
            if b is not None:
                meet(prefix + key, "buffer", b, module._buffers, key)
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                meet(prefix + key, "buffer", value, module.__dict__, key)
            elif isinstance(value, (list, dict)) and key not in _OWN:
                for at, item in enumerate(value) if isinstance(value, list) else value.items():
                    if isinstance(item, Tensor):
                        meet(f"{prefix}{key}.{at}", "buffer", item, value, at)
    return list(found.values())


_OWN = frozenset(nn.Module().__dict__)
"""What every module has of its own: dicts of parameters, buffers, hooks."""


def refuse_hooks(slots: list[Slot]) -> None:
    """Hooks on parameters would silently not run: refuse them by name."""
    for slot in slots:
        hooks = slot.tensor._backward_hooks or getattr(slot.tensor, "_post_accumulate_grad_hooks", None)
        if slot.kind == "param" and hooks:
            raise CaptureError(
                f"parameter {slot.name} has a hook, which a captured graph would not run",
                next="remove the hook, or do its work in the loss",
            )


@contextlib.contextmanager
def swapped(model: nn.Module, slots: list[Slot]) -> Iterator[None]:
    """The model with stand-ins; whatever happens, its own tensors and attributes come back."""
    modules = list(model.modules())
    attributes = [(m, dict(m.__dict__), dict(m._buffers)) for m in modules]
    kept = [
        (value, copy.copy(value))
        for m in modules
        for key, value in m.__dict__.items()
        if key not in _OWN and type(value) in (list, dict, set)
    ]
    for slot in slots:
        for holder, key in slot.places:
            holder[key] = slot.fake
    stand_in = {id(s.tensor): s.fake for s in slots}
    flat = [(m, m._flat_weights) for m in modules if isinstance(m, nn.RNNBase)]
    for m, weights in flat:
        m._flat_weights = [stand_in.get(id(w), w) for w in weights]
    try:
        yield
    finally:
        for m, attrs, buffers in attributes:
            m.__dict__.clear()
            m.__dict__.update(attrs)
            m._buffers.clear()
            m._buffers.update(buffers)
        for value, before in kept:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)
        for slot in slots:
            for holder, key in slot.places:
                holder[key] = slot.tensor
        for m, weights in flat:
            m._flat_weights = weights


def _scalars(model: nn.Module) -> dict[str, Any]:
    """Numbers and texts that modules keep, in containers too."""
    out: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in _OWN:
                continue
            name = f"{path}.{key}" if path else key
            if type(value) in _PLAIN:
                out[name] = value
            elif type(value) in (list, dict, set):
                items = value.items() if isinstance(value, dict) else [(i, v) for i, v in enumerate(value)]
                out[name] = [(k, v) for k, v in items if type(v) in _PLAIN]
    return out


_PLAIN = (int, float, bool, str)


def _line(path: str, number: int) -> str:
    short = os.sep.join(path.split(os.sep)[-2:])
    return f"{short}:{number}  {linecache.getline(path, number).strip()}"


class Recorder(TorchDispatchMode):
    """Notes the origin of every traced op."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.stack: list[str] = []
        self.origins: dict[str, Origin] = {}
        self.by_sequence: dict[int, Origin] = {}
        self.recomputing = 0
        self.lines: dict[tuple[str, int], str] = {}
        self.fixed: Origin | None = None
        """What ops that belong to no line of the user's are told to be."""
        self.written: dict[tuple[int, str], str] = {}
        """Where an attribute of a module was assigned last."""

    def where(self, depth: int = 2) -> str:
        """The innermost line that is neither torch's nor ours: `model.py:41  self.up(x)`."""
        frame: Any = sys._getframe(depth)
        while frame is not None and frame.f_code.co_name not in STEPS:
            path = frame.f_code.co_filename
            if not path.startswith((_TORCH, _OURS, "<")):
                key = (path, frame.f_lineno)
                if key not in self.lines:
                    self.lines[key] = _line(*key)
                return self.lines[key]
            frame = frame.f_back
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        proxy = get_proxy_mode()
        if proxy is None:
            return func(*args, **(kwargs or {}))
        root = proxy.tracer.graph._root
        last = root.prev
        behind = torch._C._current_autograd_node() if not self.recomputing else None
        if self.fixed is not None:
            origin = self.fixed
        elif behind is not None:
            old = self.by_sequence.get(behind._sequence_nr(), Origin())
            origin = Origin(old.where, old.module, "backward")
        else:
            phase = "recompute" if self.recomputing else "forward"
            origin = Origin(self.where(), self.stack[-1] if self.stack else "", phase)
            self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, origin)
        out = func(*args, **(kwargs or {}))
        node = last.next
        while node is not root:
            self.origins[node.name] = origin
            node = node.next
        return out

    @contextlib.contextmanager
    def following(self, canonical: Canonical) -> Iterator[None]:
        """Follow which module runs, and tell recomputation from first computation."""

        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(self.names.get(id(module), self.stack[-1] if self.stack else ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()

        inner = torch.utils.checkpoint._checkpoint_without_reentrant_generator
        entry = torch.utils.checkpoint.CheckpointFunction.apply
        compiling = torch.utils.checkpoint._is_compiling
        assign = nn.Module.__setattr__

        def generator(fn: Any, preserve: bool, *rest: Any, **kw: Any) -> Any:
            # Torch runs the region for the first time itself: this is called to run it again.
            first, where = canonical.site, list(self.stack)

            def again(*args: Any, **kwargs: Any) -> Any:
                # The same draws as the first time: the sites start where they started then.
                site, canonical.site = canonical.site, first
                stack, self.stack = self.stack, list(where)
                self.recomputing += 1
                try:
                    with canonical_again(canonical):
                        return fn(*args, **kwargs)
                finally:
                    self.recomputing -= 1
                    canonical.site, self.stack = site, stack

            return inner(again, False, *rest, **kw)

        def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

        def noted(module: nn.Module, name: str, value: Any) -> None:
            if type(value) in _PLAIN:
                self.written[id(module), name] = self.where()
            assign(module, name, value)

        before = torch.nn.modules.module.register_module_forward_pre_hook(enter)
        after = torch.nn.modules.module.register_module_forward_hook(leave)
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = generator
        torch.utils.checkpoint.CheckpointFunction.apply = reentrant  # type: ignore[method-assign, assignment]
        torch.utils.checkpoint._is_compiling = lambda *_: False  # selective policies then keep what they say
        nn.Module.__setattr__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            before.remove()
            after.remove()
            torch.utils.checkpoint._checkpoint_without_reentrant_generator = inner
            torch.utils.checkpoint.CheckpointFunction.apply = entry  # type: ignore[method-assign]
            torch.utils.checkpoint._is_compiling = compiling
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]


@contextlib.contextmanager
def canonical_again(mode: Canonical) -> Iterator[None]:
    """Recomputation runs inside backward, where function modes are not active: enter the same one."""
    active = any(m is mode for m in torch.overrides._get_current_function_mode_stack())
    with contextlib.nullcontext() if active else mode:
        yield


@contextlib.contextmanager
def device_neutral() -> Iterator[None]:
    """What a script says about devices and checks means the policy, not the place.

    Tracing happens on fake CPU tensors, so `torch.autocast("cuda")` becomes autocast for the CPU, with
    the longer list of float32 ops that GPUs have (see `canonical`). Distributions don't check their
    arguments, for that would need to look at data.
    """
    cls = torch.amp.autocast_mode.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__

    def neutral(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        elsewhere = device_type not in ("cpu", "meta")
        init(self, "cpu" if elsewhere else device_type, *args, **kwargs)
        self._elsewhere = elsewhere and self._enabled
        if elsewhere and not args and kwargs.get("dtype") is None:
            self.fast_dtype = torch.float16

    def entered(self: Any) -> Any:
        gpu_autocast.regions.append(getattr(self, "_elsewhere", False))
        return enter(self)

    def left(self: Any, *exc: Any) -> Any:
        gpu_autocast.regions.pop()
        return leave(self, *exc)

    checks = torch.distributions.Distribution._validate_args
    cls.__init__, cls.__enter__, cls.__exit__ = neutral, entered, left  # type: ignore[method-assign]
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave  # type: ignore[method-assign]
        torch.distributions.Distribution.set_default_validate_args(checks)
        gpu_autocast.regions.clear()


STEPS = ("laminar_whole_step", "_refuse_carried")
"""Functions that run a step: frames further out belong to whoever called capture."""


@dataclass
class Traced:
    """What one pass gives: the raw graph, its inputs and outputs in order, and every op's origin."""

    graph: Any
    slots: list[Slot]
    outputs: list[tuple[str, str]]
    origins: dict[str, Origin]
    draws: bool


def trace(
    model: nn.Module, step: Callable[[], tuple[Tensor, dict[str, Tensor]]], slots: list[Slot], leaves: dict[str, Tensor],
    set_leaves: Callable[[list[Tensor]], None],
) -> Traced:  # fmt: skip
    """Trace `step` (loss and metrics from swapped model and batch) and its gradient."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    refuse_hooks(slots)

    def fake(t: Tensor, grad: bool) -> Tensor:
        with fake_mode:
            out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") if t.layout == torch.strided else t
        return out.requires_grad_(grad)

    for slot in slots:
        trainable = slot.kind == "param" and slot.tensor.requires_grad
        slot.fake = fake(slot.tensor, trainable)
    fakes = [fake(t, False) for t in leaves.values()]
    with fake_mode:
        key = torch.zeros(2, dtype=torch.int64)
    names = {id(m): path for path, m in model.named_modules()}
    recorder = Recorder(names)
    mode: list[Canonical] = []
    outputs: list[tuple[str, str]] = []
    left: list[_Left] = []

    def laminar_whole_step(*flat: Tensor) -> list[Tensor]:
        params, batch, rng = flat[: len(slots)], flat[len(slots) : -1], flat[-1]
        for slot, t in zip(slots, params, strict=True):
            slot.fake = t
        set_leaves(list(batch))
        canonical = Canonical(rng)
        mode.append(canonical)
        before = _scalars(model)
        with swapped(model, slots), recorder.following(canonical), canonical, recorder:
            # torch.compile'd attributes and the like see ordinary tensors from here on.
            loss, metrics = step()
            _check_loss(loss)
            _refuse_side_effects(model, before, recorder)
            left.extend(_left_behind(model))
            trained = [s for s in slots if s.kind == "param" and s.tensor.requires_grad]
            wrt = [s.fake for s in trained]
            # The gradient of the loss by itself belongs to the line that made the loss.
            recorder.fixed = replace(recorder.by_sequence.get(loss.grad_fn._sequence_nr(), Origin()), phase="backward")
            one = torch.ones_like(loss)
            recorder.fixed = None
            grads = torch.autograd.grad(loss, wrt, one, allow_unused=True)
            results = [loss.detach(), *[m.detach() for m in metrics.values()]]
            outputs.append(("loss", "loss"))
            outputs.extend(("metric", k) for k in metrics)
            for slot, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    results.append(grad)
                    outputs.append(("grad", slot.name))
            for slot in slots:
                if slot.kind != "buffer":
                    continue
                now = _held(slot)
                if isinstance(now, Tensor):
                    results.append(now.detach())
                    outputs.append(("buffer", slot.name))
        return results

    try:
        with fake_mode, device_neutral(), torch.enable_grad():
            gm = make_fx(laminar_whole_step, tracing_mode="real", _error_on_data_dependent_ops=True, _allow_non_fake_inputs=True,
                         decomposition_table=_decompositions())(*[s.fake for s in slots], *fakes, key)  # fmt: skip
            if left:
                _refuse_carried(model, step, slots, left, key)
    except LaminarError as error:
        labels = _labels(error)
        if "at" in labels:
            raise
        found = {"at": _blame(error), "module": _inside(model, recorder)} if recorder.stack else {"at": _blame(error)}
        raise type(error)(str(error).split("\n")[0], **found, **labels) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _data_dependent(error, mode[-1].failed, _inside(model, recorder)) from error
    except Exception as error:
        raise CaptureError(
            f"the model could not be traced: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            at=_blame(error),
            module=_inside(model, recorder),
            next="run the model once in plain PyTorch with this batch; if that works, this op needs a report",
        ) from error
    for slot in slots:
        slot.fake = None
    return Traced(gm, slots, outputs, recorder.origins, mode[-1].drew)


def _held(slot: Slot) -> Any:
    """What now stands where a slot's tensor was."""
    holder, place = slot.places[0]
    return holder.get(place) if isinstance(holder, dict) else holder[place] if place < len(holder) else None


def _inside(model: nn.Module, recorder: Recorder) -> str:
    """The module that was running."""
    path = recorder.stack[-1] if recorder.stack else ""
    return f"{path} ({type(model.get_submodule(path)).__name__})" if path else ""


def _refuse_side_effects(model: nn.Module, before: dict[str, Any], recorder: Recorder) -> None:
    """A Python number changed in forward would change once, at capture, and never again."""
    for name, new in _scalars(model).items():
        if name in before and before[name] != new:
            path, _, key = name.rpartition(".")
            raise CaptureError(
                f"forward changes {name} from {before[name]!r} to {new!r}: a side effect that a captured step can't repeat",
                at=recorder.written.get((id(model.get_submodule(path)), key), ""),
                next="keep it as a registered buffer, or change it outside the model",
            )


@dataclass
class _Left:
    """An attribute that holds tensors of the step after it: left lying about, or state of the next step."""

    module: nn.Module
    key: str
    name: str
    value: Any


def _left_behind(model: nn.Module) -> list[_Left]:
    found = []
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in _OWN and any(isinstance(t, FakeTensor) for t in _tensors_in(value)):
                held = type(value)(value) if type(value) in (list, dict) else value
                found.append(_Left(module, key, f"{path}.{key}" if path else key, held))
    return found


def _tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)


class _Spy(TorchDispatchMode):
    """Refuses to have certain tensors read."""

    def __init__(self, marked: dict[int, str], recorder: Recorder) -> None:
        super().__init__()
        self.marked, self.recorder = marked, recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self.marked:
                raise CaptureError(
                    f"forward leaves a tensor in {self.marked[id(value)]}, and the next step reads it: state that a graph of "
                    "one step would lose",
                    at=self.recorder.where(),
                    next="give it a first value with register_buffer, so that it goes in and out of every step",
                )
        return func(*args, **(kwargs or {}))


def _refuse_carried(model: nn.Module, step: Callable[[], Any], slots: list[Slot], left: list[_Left], key: Tensor) -> None:
    """Run forward again on what it left behind: whoever reads that carries state in a way no graph shows.

    Tensors at the places of slots are state too, but known: they are inputs and outputs already.
    """
    known = {id(slot.fake) for slot in slots}
    recorder = Recorder({})
    again = Canonical(key)
    with swapped(model, slots):
        marked: dict[int, str] = {}
        for item in left:
            places = {p for slot in slots for holder, p in slot.places if holder is item.module.__dict__}
            if item.key in places:
                continue
            item.module.__dict__[item.key] = item.value
            marked.update({id(t): item.name for t in _tensors_in(item.value) if isinstance(t, FakeTensor) and id(t) not in known})
        if marked:
            with recorder.following(again), again, _Spy(marked, recorder):
                step()


_ASKS = {
    "__bool__": ("the truth of a tensor (in if, while, assert, and, or) decides what runs next", "torch.where"),
    "__getitem__": ("indexing with a boolean mask makes a shape", "torch.where, or multiply by the mask"),
    "masked_select": ("masked_select makes a shape", "torch.where, or multiply by the mask"),
    "nonzero": ("nonzero makes a shape", "torch.where(condition, a, b), or topk of a fixed size"),
    "where": ("torch.where(condition) with one argument makes a shape", "torch.where(condition, a, b)"),
    "unique": ("unique makes a shape", "one_hot and sums of fixed size"),
    "_pack_padded_sequence": ("the layout of a packed sequence follows the lengths in the batch",
                              "the padded tensor, and mask the loss"),
    "repeat_interleave": ("repeat_interleave by a tensor makes a shape", "a fixed number of repeats"),
}
"""What a user wrote when torch says that an output depends on data: the complaint, and a form that works."""


def _data_dependent(error: Any, called: Any, module: str) -> CaptureError:
    name = getattr(called, "__name__", "")
    shape = isinstance(error, DynamicOutputShapeException)
    if shape:
        what = f"{error.func} makes a shape"
    else:
        what = f"{name.strip('_') if name in _NUMBERS else 'a call'}() takes a Python number out of a tensor"
    what, instead = _ASKS.get(name, (what, "a tensor in its place, with torch.where or a mask of fixed shape"))
    return CaptureError(
        f"{what}: it depends on data, and one graph holds one path and one set of shapes",
        at=_blame(error),
        module=module,
        next=f"use {instead}; or keep this part out of the model",
    )


_NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__", "__complex__", "numpy", "__array__")


def _labels(error: LaminarError) -> dict[str, str]:
    out = {}
    for line in str(error).split("\n")[1:]:
        label, _, text = line.strip().partition("  ")
        out[label] = text.strip()
    return out


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise CaptureError(f"the loss is a {type(loss).__name__}, not a tensor", next="return a scalar tensor or laminar.Loss")
    if loss.dim() != 0:
        raise CaptureError(
            f"the loss is a tensor of shape {tuple(loss.shape)}, not a scalar", next="reduce it, with .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise CaptureError("the loss does not depend on any trainable parameter", next="check detach() and no_grad()")


def _blame(error: BaseException) -> str:
    """The user's line an exception passed through last."""
    best = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _OURS, "<")):
            best = _line(path, number)
    if isinstance(error.__cause__, BaseException) and not best:
        return _blame(error.__cause__)
    return best


def _decompositions() -> Any:
    """Losses and rare layers that torch itself can write out; everything else stays as it is."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return get_decompositions(
        [
            aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.huber_loss,
            aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward, aten.glu,
            aten.glu_backward, aten.unfold_backward, aten.native_dropout, aten.native_dropout_backward,
            aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.multi_margin_loss,
            aten.multilabel_margin_loss_forward, aten.softplus_backward, aten.norm, aten.addcmul, aten.lerp,
            aten.std_mean, aten.native_batch_norm_backward, aten.embedding_renorm, aten.std, aten.index_add_,
            aten.trace, aten.linspace, aten.mv, aten.dot, aten.triu_indices, aten.tril_indices,
        ]
    )  # fmt: skip


