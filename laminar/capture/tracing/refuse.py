"""What one graph can't hold, refused by name instead of captured wrongly.

A step that decides by looking at data, counts in Python, draws from Python's own random numbers,
rewrites its weights, or hands state to the next step behind our back would be captured once and be
wrong from then on. Each of these is recognised here, with the user's line where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.capture.canonical.canonical import Canonical
from laminar.capture.model.model_tensors import OWN, Slot, scalars, swapped
from laminar.capture.torch_private import (
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    get_proxy_mode,
    get_proxy_slot,
    tree_leaves,
)
from laminar.capture.tracing.origins import Recorder, blame
from laminar.capture.tracing.python_random import Draws
from laminar.errors import CaptureError, LaminarError


def refuse_hooks(slots: list[Slot]) -> None:
    """Hooks on parameters would silently not run: refuse them by name."""
    for slot in slots:
        hooks = slot.tensor._backward_hooks or getattr(slot.tensor, "_post_accumulate_grad_hooks", None)
        if slot.kind == "param" and hooks:
            raise CaptureError(
                f"parameter {slot.name} has a hook, which a captured graph would not run",
                next="remove the hook, or do its work in the loss",
            )


def refuse_layouts(slots: list[Slot], leaves: dict[str, Tensor]) -> None:
    """Only dense tensors have a place in a graph."""
    for name, tensor in [*((s.name, s.tensor) for s in slots), *leaves.items()]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CaptureError(f"{name} is {kind}, a graph holds dense tensors", next="give a dense tensor")


def refuse_scripted(model: nn.Module) -> None:
    """TorchScript keeps parameters where no stand-in can take their places."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is a TorchScript module, whose code can't be followed",
                next="use the module that it was made from",
            )


def refuse_computed(slots: list[Slot]) -> None:
    """A tensor that is kept, and was made of parameters: a graph of one step begins too late for their gradients."""
    for slot in slots:
        if slot.kind == "buffer" and slot.own.requires_grad and not slot.own.is_leaf:
            raise CaptureError(
                f"{slot.name} was computed from parameters before the step, which would get no gradient through it",
                next="compute it in forward",
            )


def refuse_shared(slots: list[Slot]) -> None:
    """Two tensors in the same memory: an update of one would be an update of the other, until a plan parts them."""
    spans = []
    for slot in slots:
        t = slot.tensor
        if not t.is_meta and t.numel():
            reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
            spans.append((t.data_ptr(), t.data_ptr() + reach * t.element_size(), slot))
    widest: tuple[int, Slot] | None = None
    for start, end, slot in sorted(spans, key=lambda span: span[:2]):
        if widest is not None and start < widest[0] and (slot.trainable or widest[1].trainable):
            raise CaptureError(
                f"{widest[1].name} and {slot.name} lie in the same memory, and are two tensors",
                next="tie them by assigning the same parameter to both, or give each its own memory with .clone()",
            )
        widest = (end, slot) if widest is None or end > widest[0] else widest


def refuse_loss(loss: Any, backward: bool = True) -> None:
    """A loss that is none, or has no gradient to give."""
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the loss is a {type(loss).__name__}, not a tensor", next="return a scalar tensor or laminar.Loss"
        )
    if loss.dim() != 0:
        raise CaptureError(
            f"the loss is a tensor of shape {tuple(loss.shape)}, not a scalar", next="reduce it, with .mean() or .sum()"
        )
    if loss.is_complex() or not loss.is_floating_point():
        raise CaptureError(f"the loss is {loss.dtype}, not a real number", next="return a floating scalar")
    if backward and not loss.requires_grad:
        raise CaptureError("the loss does not depend on any trainable parameter", next="check detach() and no_grad()")


# --- side effects ----------------------------------------------------------------------------


class Before:
    """What Python kept before the step ran: compared afterwards."""

    def __init__(self, model: nn.Module, draws: Draws) -> None:
        self.model, self.draws = model, draws
        self.scalars = scalars(model)
        self.modules = {path: (m, [id(p) for p in m.parameters()]) for path, m in model.named_modules()}

    def refuse_changes(self, slots: list[Slot], recorder: Recorder) -> None:
        """A Python number changed in forward would change once, at capture, and never again."""
        for name, new in scalars(self.model).items():
            if name in self.scalars and self.scalars[name] != new:
                path, _, key = name.rpartition(".")
                raise CaptureError(
                    f"forward changes {name} from {self.scalars[name]!r} to {new!r}: "
                    "a side effect that a captured step can't repeat",
                    at=recorder.written.get((id(self.model.get_submodule(path)), key), ""),
                    next="keep it as a registered buffer, or change it outside the model",
                )
        for slot in slots:
            if slot.kind == "param" and slot.now is not slot.fake:
                raise CaptureError(
                    f"forward puts another tensor in the place of parameter {slot.name}",
                    next="compute a weight from the parameter under another name",
                )
        ours = {id(slot.fake) for slot in slots}
        for name, p in self.model.named_parameters():
            if id(p) not in ours:
                raise CaptureError(
                    f"forward makes parameter {name}, which no optimizer would know",
                    next="make it in __init__, or keep a plain tensor in a variable",
                )
        own = {id(slot.fake): id(slot.own) for slot in slots}
        for path, module in self.model.named_modules():
            was, held = self.modules.get(path, (module, []))
            if was is not module and held != [own.get(id(p)) for p in module.parameters()]:
                raise CaptureError(
                    f"forward puts another module in the place of {path}: the next step would begin with that one",
                    next="keep the modules, and choose among them in forward",
                )
        if self.draws.numpy:
            raise _drawn("numpy")


def _drawn(which: str) -> CaptureError:
    return CaptureError(
        f"forward draws random numbers from {which}, which would be the same in every captured step",
        next="draw with torch.rand, randn, bernoulli or dropout",
    )


# --- state behind our back -------------------------------------------------------------------


@dataclass
class Left:
    """An attribute that holds tensors of the step after it: left lying about, or state of the next step."""

    holder: dict[str, Any]
    key: str
    name: str
    value: Any
    tensors: list[Tensor]
    """Those in it that depend on the step's inputs."""


def left_behind(model: nn.Module, slots: list[Slot]) -> list[Left]:
    """Attributes with tensors that this step made, where no slot is; a table made of nothing is no state."""
    places = {(id(holder), key) for slot in slots for holder, key in slot.places}
    found = []
    for path, module in model.named_modules():
        fresh = [(module.__dict__, k, v) for k, v in module.__dict__.items() if k not in OWN]
        fresh += [(module._buffers, k, v) for k, v in module._buffers.items()]
        for holder, key, value in fresh:
            if (id(holder), key) in places:
                continue
            known = {at for place, at in places if place == id(value)} if type(value) in (list, dict) else set()
            items = [v for k, v in _items(value) if k not in known]
            made = [t for item in items for t in _tensors_in(item) if _comes_from_inputs(t)]
            if made:
                held = type(value)(value) if type(value) in (list, dict) else value
                found.append(Left(holder, key, f"{path}.{key}" if path else key, held, made))
    return found


def _comes_from_inputs(tensor: Tensor) -> bool:
    """Whether a traced tensor depends on parameters, buffers, batch or key."""
    mode = get_proxy_mode()
    slot: Any = get_proxy_slot(tensor, mode.tracer, None) if mode and isinstance(tensor, FakeTensor) else None
    todo, seen = [slot.proxy.node] if slot is not None else [], set()
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        seen.add(node)
        todo += [n for n in node.all_input_nodes if n not in seen]
    return False


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]


def _tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for _, item in _items(value):
            yield from _tensors_in(item, depth - 1)


class _Spy(TorchDispatchMode):
    """Refuses to have certain tensors read."""

    def __init__(self, marked: dict[int, str], recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marked, self.recorder = marked, recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self.marked:
                raise CaptureError(
                    f"forward leaves a tensor in {self.marked[id(value)]}, and the next step reads it: "
                    "state that a graph of one step would lose",
                    at=self.recorder.where(),
                    next="give it a first value with register_buffer, so that it goes in and out of every step",
                )
        return func(*args, **(kwargs or {}))


def _once_more(slots: list[Slot], key: Tensor) -> Canonical:
    return Canonical(key, neutral=True, exchanged={id(s.own): s.fake for s in slots})


def refuse_carried(model: nn.Module, step: Callable[[], Any], slots: list[Slot], left: list[Left], key: Tensor) -> None:
    """Run forward again on what it left behind: whoever reads that carries state in a way no graph shows."""
    known = {id(slot.fake) for slot in slots}
    recorder, again = Recorder(model), _once_more(slots, key)
    with swapped(model, slots):
        marked: dict[int, str] = {}
        for item in left:
            item.holder[item.key] = item.value
            marked.update({id(t): item.name for t in item.tensors if id(t) not in known})
        with recorder.following(again), again, recorder, _Spy(marked, recorder):
            step()


def refuse_drawn(model: nn.Module, step: Callable[[], Any], slots: list[Slot], draws: Draws, key: Tensor) -> None:
    """Somebody drew from Python's generator: the step, if it does so when it runs again."""
    recorder, again = Recorder(model), _once_more(slots, key)
    with swapped(model, slots), recorder.following(again), again, recorder:
        if draws.python(step):
            raise _drawn("Python")


# --- what depends on data --------------------------------------------------------------------

_ASKS = {
    "__bool__": ("the truth of a tensor (in if, while, assert, and, or) decides what runs next", "torch.where"),
    "__getitem__": ("indexing with a boolean mask makes a shape", "torch.where, or multiply by the mask"),
    "masked_select": ("masked_select makes a shape", "torch.where, or multiply by the mask"),
    "nonzero": ("nonzero makes a shape", "torch.where(condition, a, b), or topk of a fixed size"),
    "where": ("torch.where(condition) with one argument makes a shape", "torch.where(condition, a, b)"),
    "unique": ("unique makes a shape", "one_hot and sums of fixed size"),
    "repeat_interleave": ("repeat_interleave by a tensor makes a shape", "a fixed number of repeats"),
    "_pack_padded_sequence": (
        "the layout of a packed sequence follows the lengths in the batch",
        "the padded tensor, and mask the loss",
    ),
}
"""What a user wrote when torch says that an output depends on data: the complaint, and a form that works."""
_NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__", "__complex__", "numpy", "__array__")


def data_dependent(error: Any, called: Any, module: str) -> CaptureError:
    """Torch's complaint in the words of what the user called."""
    name = getattr(called, "__name__", "")
    if isinstance(error, DynamicOutputShapeException):
        what = f"{error.func} makes a shape"
    else:
        what = f"{name.strip('_') or 'a call'}() takes a Python number out of a tensor"
    what, instead = _ASKS.get(name, (what, "a tensor in its place, with torch.where or a mask of fixed shape"))
    return CaptureError(
        f"{what}: it depends on data, and one graph holds one path and one set of shapes",
        at=blame(error),
        module=module,
        next=f"use {instead}; or put it into a module or function of its own, marked with laminar.eager",
    )


def located(error: LaminarError, module: str) -> LaminarError:
    """The same refusal with line and module, where it had none."""
    if "at" in error.lines:
        return error
    found = type(error)(error.what, **{"at": blame(error), "module": module, **error.lines})
    return found.with_traceback(error.__traceback__)  # who looks for the part that did it goes by the frames
