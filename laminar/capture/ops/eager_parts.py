"""Parts of a model that run as they are: what such an op does when it runs, on any rank.

A part is a module or a function that decides by looking at data, so that no graph can hold it. In a graph it is one op
that is told a name; the Python behind the name is looked up here, in the process that captured it. The op is a pure
function of tensors: arguments, then every parameter and buffer the part may read, and a key for random numbers.

    forward   stand-ins take the places of the part's tensors, it runs in plain PyTorch, everything is put back
    backward  runs it again with gradients on, and asks autograd: nothing is kept between the two
    draws     torch, numpy and Python are seeded by (seed, step, sample, site) and put back, so that all ranks draw
              the same, and backward draws what forward drew
    changes   buffers and arguments that it changes in place are results like any others

What a part does at a trial (`eager_trial`) is what it must do at run time: other shapes, another number in Python, or a
change to a tensor that a trial did not change are refused when they happen.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laminar.capture.model.model_tensors import OWN, Slot, scalars, slots_of, swapped
from laminar.capture.ops.eager_names import beside
from laminar.capture.torch_private import tree_flatten, tree_unflatten
from laminar.errors import CaptureError, GraphError

T = TypeVar("T")
SMALL_BUFFER = 1 << 20
"""Bytes of a buffer that is copied for every call; a larger one only if it is known to be changed."""
UP_TO_32_BITS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Hole:
    """Where a tensor goes in arguments or results that are otherwise as they were at capture."""

    at: int


@dataclass(frozen=True)
class Held:
    """Where a module goes."""

    at: int


@dataclass
class CallOutcome:
    """What one call made: tensors in order, and what stands around them."""

    tensors: list[Tensor]
    tree: Any
    leaves: list[Any]
    """Results and attributes left on modules, tensors replaced by holes."""
    arguments: frozenset[int]
    """Arguments that were changed in place."""
    buffers: frozenset[int]
    """Slots that hold another value than before."""
    numbers: tuple[tuple[str, Any, Any], ...] = ()
    """Plain values that modules keep and that were changed: name, old and new."""
    drew: bool = False
    """Whether it drew random numbers."""


@dataclass
class EagerPart:
    """A module or a function, called in one way."""

    name: str
    label: str
    """For messages: `blocks.0.mlp (Experts)`."""
    function: Callable[..., Any] | None
    """None for a module, which is called itself."""
    modules: list[weakref.ref[nn.Module]]
    tree: Any
    leaves: list[Any]
    arguments: int
    """How many tensors among the arguments; the rest of what is given are slots."""
    slots: list[str]
    """Which of the modules' tensors are given; it reads no others."""
    dtypes: list[torch.dtype]
    """Of what is given."""
    needs: tuple[bool, ...]
    """Which of what is given has a gradient."""
    autocast: torch.dtype | None = None
    changes: tuple[int, ...] = ()
    """Arguments that it changes in place."""
    writes: tuple[int, ...] = ()
    """Slots that it gives new values, by their place among those given."""
    outcome: CallOutcome | None = None
    """What a trial gave; its tensors are empty ones."""
    differentiable: tuple[bool, ...] = ()
    batched: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Which of the tensors given and made have samples in dim 0, where that is declared."""
    flops: int = 0
    rows: int = 1
    reentrant: bool = field(default=False, compare=False)

    @property
    def alive(self) -> bool:
        """Whether its modules are still there."""
        return all(ref() is not None for ref in self.modules)

    def held(self) -> list[nn.Module]:
        """Its modules."""
        found = [ref() for ref in self.modules]
        if any(m is None for m in found):
            raise GraphError(
                f"{self.label} runs as it is, and its module is gone", next="keep the model that was captured"
            )
        return found  # type: ignore[return-value]


_parts: dict[str, list[EagerPart]] = {}
_lock = threading.RLock()


def register(part: EagerPart) -> None:
    """Make a part known by its name; parts of one name are alike in all but where their tensors lie."""
    with _lock:
        others = [p for p in _parts.get(part.name, []) if p.alive and p.modules != part.modules]
        _parts[part.name] = [*others[-3:], part]


def part_named(name: str) -> EagerPart:
    """The part of a name."""
    found = [p for p in _parts.get(name, []) if p.alive]
    if not found:
        raise GraphError(
            f"{name} runs as it is, and this process has not captured it",
            why="a graph holds the name of such an op, and the Python behind it lives where the model does",
            next="capture the model in this process (laminar.capture, parallelize and verify do)",
        )
    return found[-1]


def missing(ops: Sequence[tuple[str, tuple[Any, ...]]]) -> list[str]:
    """Names of parts in (op, arguments) of a graph's nodes that this process does not know."""
    names = [args[NAME[op]] for op, args in ops if op in NAME]
    return [n for n in dict.fromkeys(names) if not any(p.alive for p in _parts.get(n, []))]


NAME = {"laminar.eager": 2, "laminar.eager_backward": 3}
"""Ops that run a part, and where among their arguments its name is."""


# --- the two ops -----------------------------------------------------------------------------


def eager(given: Sequence[Tensor], key: Tensor, name: str, site: int, *_: Any) -> list[Tensor]:
    """The part's results: what it returns, what it leaves on modules, arguments and buffers that it changed."""
    part = part_named(name)
    wide = _is_wide(part, given)
    with _lock, torch.set_grad_enabled(any(part.needs)):
        leaves = leaves_of(part, given, part.needs)
        return called(part, leaves, key, site, wide, lambda got: _fresh(_checked(part, got, given), given, wide))


def eager_backward(
    grads: Sequence[Tensor], given: Sequence[Tensor], key: Tensor, name: str, site: int, needs: Sequence[bool], *_: Any
) -> list[Tensor]:
    """Gradients of those given that need one; zeros where the part did not use it this time."""
    part = part_named(name)

    def differentiated(got: CallOutcome) -> list[Tensor]:
        made = _checked(part, got, given)
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        of = [t for t, d in zip(made, part.differentiable, strict=True) if d]
        pairs = [(t, g.to(t.dtype)) for t, g in zip(of, grads, strict=True) if t.requires_grad]
        found = _gradients(part, pairs, wanted)
        return [torch.zeros_like(t) if g is None else _own(g, grads) for t, g in zip(wanted, found, strict=True)]

    with _lock, torch.enable_grad():
        leaves = leaves_of(part, given, needs)
        wide = _is_wide(part, given)
        # Inside of the call: what is recomputed in backward reads the part's tensors again.
        try:
            found = called(part, leaves, key, site, wide, differentiated)
        except RuntimeError as error:
            if "use_reentrant" not in str(error) or part.reentrant:
                raise
            part.reentrant = True  # a region inside that knows backward() alone
            leaves = leaves_of(part, given, needs)
            found = called(part, leaves, key, site, wide, differentiated)
        return [t.detach() for t in found]


def _gradients(part: EagerPart, pairs: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> Sequence[Tensor | None]:
    if not pairs:
        return [None] * len(wanted)
    outs, grads = [t for t, _ in pairs], [g for _, g in pairs]
    if not part.reentrant:
        return torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    torch.autograd.backward(outs, grads)
    return [t.grad for t in wanted]


def _own(grad: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A gradient in memory of its own: autograd hands on what it was given where nothing is computed."""
    shared = any(grad.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in others)
    return grad.clone() if shared or 0 in grad.stride() else grad.detach()


def _is_wide(part: EagerPart, given: Sequence[Tensor]) -> bool:
    """Whether a graph was widened to float64 since it was captured."""
    return any(t.dtype == torch.float64 and d in UP_TO_32_BITS for t, d in zip(given, part.dtypes, strict=True))


def leaves_of(part: EagerPart, given: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Tensors to differentiate by, in the memory of those given; parameters are `nn.Parameter`s, as in the model."""
    out: list[Tensor] = []
    kinds = [s.kind for s in given_of(part, slots_in(part))] if part.slots else []
    for i, (t, need) in enumerate(zip(given, needs, strict=True)):
        if i >= part.arguments and kinds[i - part.arguments] == "param":
            out.append(nn.Parameter(t.detach(), requires_grad=bool(need)))
        else:
            out.append(t.detach().requires_grad_(bool(need)))
    return out


def _fresh(made: list[Tensor], given: Sequence[Tensor], wide: bool) -> list[Tensor]:
    """Results that share memory with nothing given and with no other, and are dense."""
    seen = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    out = []
    for t in made:
        t = t.detach()
        t = t.double() if wide and t.dtype in UP_TO_32_BITS else t
        place = t.untyped_storage().data_ptr()
        if t.numel() and (place in seen or 0 in t.stride()):
            t = t.clone(memory_format=torch.contiguous_format)
        seen.add(t.untyped_storage().data_ptr())
        out.append(t)
    return out


# --- one call --------------------------------------------------------------------------------


def slots_in(part: EagerPart) -> dict[str, Slot]:
    """The tensors of the part's modules as they are now, by the number of the module and their name there."""
    out: dict[int, tuple[str, Slot]] = {}
    for at, module in enumerate(part.held()):
        for slot in slots_of(module):
            _, known = out.setdefault(id(slot.tensor), (f"{at}:{slot.name}", slot))
            if known is not slot:
                known.places += [p for p in slot.places if not any(p[0] is h and p[1] == k for h, k in known.places)]
    return dict(out.values())


def given_of(part: EagerPart, slots: Mapping[str, Slot]) -> list[Slot]:
    """Those of them that are given."""
    gone = [name for name in part.slots if name not in slots]
    if gone:
        raise GraphError(
            f"{part.label} has lost {gone[0].partition(':')[2]} since it was captured",
            next="capture again after a module has changed",
        )
    return [slots[name] for name in part.slots]


def _touched(tensors: Sequence[Tensor], versions: Sequence[int], given: Sequence[Tensor]) -> list[bool]:
    """Which tensors a part has written into: by their versions, and copies by their values."""
    return [
        t._version != v or (t is not g and not _same(t, g)) for t, v, g in zip(tensors, versions, given, strict=True)
    ]


def called(
    part: EagerPart,
    leaves: Sequence[Tensor],
    key: Tensor,
    site: int,
    wide: bool,
    then: Callable[[CallOutcome], T],
    copied: bool = False,
) -> T:
    """Call the part on such tensors, and look at what it made; then whatever it did to its modules is undone.

    What it is known to change is a copy; with `copied`, so is everything but parameters. Small buffers always are, and
    are compared by value: batch norm's kernels change statistics without leaving a trace on the tensor.
    """
    # Long because what is put in place for the call, the call, and what it has done are one transaction.
    held, slots = part.held(), slots_in(part)
    arguments = [t.clone() if copied or i in part.changes else t for i, t in enumerate(leaves[: part.arguments])]
    inner = [
        t.clone()
        if i in part.writes or (not isinstance(t, nn.Parameter) and (copied or t.nbytes <= SMALL_BUFFER))
        else t
        for i, t in enumerate(leaves[part.arguments :])
    ]
    mine = given_of(part, slots)
    for slot in slots.values():  # what it is not given it can't read: such a tensor has a shape and no values
        slot.fake = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device="meta")
    for slot, t in zip(mine, inner, strict=True):
        slot.fake = t
    values = [arguments[v.at] if isinstance(v, Hole) else held[v.at] if isinstance(v, Held) else v for v in part.leaves]
    args, kwargs = tree_unflatten(values, part.tree)
    versions = [t._version for t in (*arguments, *inner)]
    device = leaves[0].device if leaves else key.device
    with contextlib.ExitStack() as around:
        for module in held[1:]:
            around.enter_context(swapped(module, []))
        around.enter_context(swapped(held[0], list(slots.values())) if held else contextlib.nullcontext())
        for module in held:
            _unguarded(module)
        before, plain = _attributes(held), [scalars(m) for m in held]
        moved = around.enter_context(generators_seeded(key, site, device))
        if part.autocast is not None:
            around.enter_context(torch.autocast(device.type, dtype=part.autocast))
        if wide:
            around.enter_context(_widely())
        function = part.function or held[0].forward
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            error.add_note(f"raised by {part.label}, which runs as it is (laminar.eager)")
            raise
        flat, tree = tree_flatten((result, _left(held, before, {id(s.fake) for s in slots.values()})))
        tensors: list[Tensor] = []
        for i, leaf in enumerate(flat):
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                flat[i] = Hole(len(tensors) - 1)
        now = [slot.now for slot in mine]
        touched = _touched((*arguments, *inner), versions, leaves)
        changed = frozenset(i for i in range(part.arguments) if touched[i])
        written = frozenset(
            i for i, (t, n) in enumerate(zip(inner, now, strict=True)) if n is not t or touched[part.arguments + i]
        )
        tensors += [arguments[i] for i in sorted(changed | set(part.changes))]
        tensors += [now[i] for i in sorted(written | set(part.writes))]
        after = [scalars(m) for m in held]
        numbers = tuple(
            (k, v, new[k]) for old, new in zip(plain, after, strict=True) for k, v in old.items() if new.get(k, v) != v
        )
        return then(CallOutcome(tensors, tree, flat, changed, written, numbers, moved()))


def _unguarded(module: nn.Module) -> None:
    """Without our own hooks that refuse to run a model in shards: here its tensors are whole. They come back."""
    for m in module.modules():
        for key, hook in list(m._forward_pre_hooks.items()):
            if beside(hook):
                del m._forward_pre_hooks[key]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN is the same as NaN."""
    a, b = a.detach(), b.detach()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _attributes(held: Sequence[nn.Module]) -> dict[int, tuple[nn.Module, dict[str, Any], dict[str, list[int]]]]:
    """What modules keep, containers by what is in them."""
    return {
        id(m): (m, dict(m.__dict__), {k: _inside(v) for k, v in m.__dict__.items() if type(v) in (list, dict)})
        for module in held
        for m in module.modules()
    }


def _inside(value: Any) -> list[int]:
    return [id(v) for v in (value.values() if isinstance(value, dict) else value)]


def _left(held: Sequence[nn.Module], before: Mapping[int, Any], own: set[int]) -> dict[tuple[int, str, str], Any]:
    """Attributes with tensors that this call made: which module, its path there, and the name."""
    out: dict[tuple[int, str, str], Any] = {}
    for at, module in enumerate(held):
        for path, m in module.named_modules():
            _, attributes, inside = before[id(m)]
            for key, value in m.__dict__.items():
                same = value is attributes.get(key) and (key not in inside or _inside(value) == inside[key])
                if key in OWN or same or isinstance(value, nn.Module):
                    continue
                found = [v for v in tree_flatten(value)[0] if isinstance(v, Tensor)]
                if found and not all(id(t) in own for t in found):
                    out[at, path, key] = value
    return out


def _checked(part: EagerPart, got: CallOutcome, given: Sequence[Tensor]) -> list[Tensor]:
    """What was made, if it is of the kind that a trial made."""
    want = part.outcome
    assert want is not None

    def refuse(what: str, **more: str) -> None:
        raise CaptureError(f"{part.label} runs as it is, and {what}", **more)

    if got.tree != want.tree or got.leaves != want.leaves:
        refuse(
            f"gave {_shown(got)} where it gave {_shown(want)} at its trial: this depends on data, and is no tensor",
            next="return tensors of a fixed shape alone, or have a larger part run as it is with laminar.eager",
        )
    if got.numbers:
        name, old, now = got.numbers[0]
        refuse(
            f"changes {name} from {old!r} to {now!r}: a side effect that backward would repeat",
            next="keep it as a registered buffer, or change it outside the model",
        )
    new = sorted(got.arguments - set(part.changes))
    if new:
        refuse(
            f"changes tensor argument {new[0]} in place, which it did not do at its trial",
            next="change a copy, or change it every time",
        )
    new = sorted(got.buffers - set(part.writes))
    if new:
        name = part.slots[new[0]].partition(":")[2]
        refuse(f"changes {name}, which it did not do at its trial", next="change it every time, by nothing if need be")
    if got.drew and part.batched[0]:
        refuse(
            "draws random numbers, which it did not do at its trial: by samples they would depend on the ranks",
            next="leave batch_dim out: then it sees whole tensors",
        )
    split = any(given[i].shape[0] != part.rows for i in part.batched[0])
    for i, (t, w) in enumerate(zip(got.tensors, want.tensors, strict=True)):
        shape, other = tuple(t.shape), tuple(w.shape)
        if i in part.batched[1] and split:
            shape, other = shape[1:], other[1:]
        if shape != other:
            refuse(
                f"made a tensor of {tuple(t.shape)} where its trial made {tuple(w.shape)}: a shape depends on data",
                next="make its result of a fixed size, or mark a larger part with laminar.eager",
            )
        if t.dtype != w.dtype and not (t.is_floating_point() and w.is_floating_point()):
            refuse(f"made {t.dtype} where its trial made {w.dtype}", next="make the same dtype every time")
        if t.dtype != w.dtype and not _is_wide(part, given):
            refuse(f"made {t.dtype} where its trial made {w.dtype}", next="make the same dtype every time")
    return got.tensors


def _shown(outcome: CallOutcome) -> str:
    return ", ".join("a tensor" if isinstance(v, Hole) else repr(v) for v in outcome.leaves) or "nothing"


# --- around a call ---------------------------------------------------------------------------

_ODD = 0x9E3779B97F4A7C15


@contextlib.contextmanager
def generators_seeded(key: Tensor, site: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """All generators set by the key and the site, and afterwards as they were; tells whether anybody has drawn."""
    seed = 0
    for number in (*key.tolist(), site):
        seed = ((seed ^ (int(number) & (2**64 - 1))) * _ODD + 0x632BE59BD9B4E019) % 2**64
        seed ^= seed >> 29
    cuda = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    ours: Any = random.getstate(), np.random.get_state(legacy=True)
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(seed >> 1)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed >> 32)
        generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in cuda)]
        states, python = [g.get_state() for g in generators], random.getstate()
        array: Any = np.random.get_state(legacy=True)

        def moved() -> bool:
            now: Any = np.random.get_state(legacy=True)
            return (
                any(not torch.equal(a, g.get_state()) for a, g in zip(states, generators, strict=True))
                or random.getstate() != python
                or now[2:] != array[2:]
                or not np.array_equal(now[1], array[1])
            )

        try:
            yield moved
        finally:
            random.setstate(ours[0])
            np.random.set_state(ours[1])


class _Wide(TorchFunctionMode):
    """Every narrower floating dtype that code names means float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        kwargs = {k: torch.float64 if v in UP_TO_32_BITS else v for k, v in (kwargs or {}).items() if _is_dtype(v)} | {
            k: v for k, v in (kwargs or {}).items() if not _is_dtype(v)
        }
        return func(*[torch.float64 if _is_dtype(a) and a in UP_TO_32_BITS else a for a in args], **kwargs)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


@contextlib.contextmanager
def _widely() -> Iterator[None]:
    """A part in float64, whatever it says: verification compares sums to 1e-9."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
