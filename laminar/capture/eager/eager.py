"""`laminar.eager`: parts of a model that run as they are, in plain PyTorch, as one op of the graph.

A module that branches on a tensor, indexes by a mask, loops over the experts that were hit, or goes through numpy can't
be written down as a graph. It can be one op: everything around it is captured, placed and trained as before. By default
such an op sees whole tensors on every rank, which is always right; `batch_dim=0` declares that it works sample by
sample, which is tried out, and lets it be split over the batch.

Parts are declared here, or found (`laminar.capture.eager.eager_search`): both end in `Tracing.call`, which puts the op
into the trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from laminar.capture.canonical.canonical import Canonical
from laminar.capture.eager.eager_trial import EagerError, declared, tried_part
from laminar.capture.model.model_tensors import Slot
from laminar.capture.ops.eager_names import _Patched, digest
from laminar.capture.ops.eager_parts import (
    EagerPart,
    Held,
    Hole,
    _parts,
    eager_backward,
    generators_seeded,
    register,
    slots_in,
)
from laminar.capture.ops.eager_parts import eager as run
from laminar.capture.torch_private import function_modes, tree_flatten, tree_unflatten, without_function_modes
from laminar.errors import CaptureError

T = TypeVar("T")
MARK = "laminar_eager"


@dataclass(frozen=True)
class Options:
    """What a user declares about a part."""

    batch_dim: int | None = None
    out: Callable[..., Any] | None = None


@overload
def eager(target: T, *, batch_dim: int | None = None, out: Callable[..., Any] | None = None) -> T: ...
@overload
def eager(
    target: None = None, *, batch_dim: int | None = None, out: Callable[..., Any] | None = None
) -> Callable[[T], T]: ...
def eager(target: Any = None, *, batch_dim: int | None = None, out: Callable[..., Any] | None = None) -> Any:
    """Have a module, a class of modules, a method or a function run as it is, in plain eager PyTorch, inside of a plan.

    target     an `nn.Module` (marked, and returned), a subclass of it, or a function; without one, a decorator
    batch_dim  None: it sees whole tensors on every rank. 0: it works on samples along dim 0 one by one, so that ranks
               may each do their share; this is tried out when the model is captured
    out        called like the target on stand-ins, returns tensors like those the target makes (`torch.empty_like(x)`),
               where that can't be found by a trial run on made-up values

    Outside of Laminar nothing changes. Shapes of results must not depend on data. Backward runs it a second time.
    """
    if batch_dim not in (None, 0):
        raise CaptureError(f"batch_dim={batch_dim!r}", allowed="None, for whole tensors, or 0")
    options = Options(batch_dim, out)
    if target is None:
        return lambda given: eager(given, batch_dim=batch_dim, out=out)
    if isinstance(target, nn.Module):
        target.__dict__[MARK] = options
        return target
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise CaptureError(f"laminar.eager of the class {target.__name__}", allowed="modules and functions")
        setattr(target, MARK, options)
        return target
    if not callable(target):
        raise CaptureError(f"laminar.eager of a {type(target).__name__}", allowed="modules and functions")

    @functools.wraps(target)
    def either(*args: Any, **kwargs: Any) -> Any:
        tracing = now_tracing()
        if tracing is None:
            return target(*args, **kwargs)
        return tracing.call(target, None, getattr(target, "__qualname__", repr(target)), options, args, kwargs)

    return either


_active = threading.local()
"""In the thread that traces: the `Tracing` at work."""


def now_tracing() -> Tracing | None:
    """The tracing at work in this thread, while a step runs on stand-ins and not in plain PyTorch."""
    tracing: Tracing | None = getattr(_active, "tracing", None)
    return tracing if tracing is not None and _canonical() is not None else None


def _canonical() -> Canonical | None:
    return next((m for m in reversed(function_modes()) if isinstance(m, Canonical)), None)


class Method(_Patched):
    """A method of a module that runs as it is while the module is traced."""

    def __init__(self, tracing: Tracing, module: nn.Module, path: str, name: str, options: Options) -> None:
        self.tracing, self.module, self.path, self.name, self.options = tracing, module, path, name, options
        self.original = module.__dict__.get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = self.original or types.MethodType(getattr(type(self.module), self.name), self.module)
        if now_tracing() is not self.tracing:
            return plain(*args, **kwargs)
        label = f"{self.path or 'the model'}{'' if self.name == 'forward' else '.' + self.name}"
        label = f"{label} ({type(self.module).__name__})"
        try:
            if self.name == "forward":
                return self.tracing.call(None, self.module, label, self.options, args, kwargs)
            function = getattr(plain, "__func__", None)
            if function is None:
                raise EagerError(f"{label} is no method of its class")
            return self.tracing.call(function, None, label, self.options, (self.module, *args), kwargs)
        except EagerError as error:
            error.target = Target(self.path, self.name)
            raise


class Target(NamedTuple):
    """A part that was found: a method of a module by path, or, without one, a function as `module:name`."""

    path: str | None
    name: str

    def __str__(self) -> str:
        if self.path is None:
            return self.name.replace(":", ".")
        return self.path if self.name == "forward" else f"{self.path}.{self.name}".removeprefix(".")


class Tracing:
    """Parts that run as they are while one model is traced: those its user declared, and those that were found."""

    def __init__(self, model: nn.Module, slots: Sequence[Slot], found: Mapping[Target, Any]) -> None:
        self.model, self.slots, self.found = model, slots, found
        self._places = {(id(holder), key) for s in slots for holder, key in s.places}
        self._holders = {id(m.__dict__) for m in model.modules()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While a model is traced: its parts are ops."""
        before = getattr(_active, "tracing", None)
        patched: list[tuple[dict[str, Any], str, Any]] = []

        def put(holder: dict[str, Any], name: str, value: Any) -> None:
            patched.append((holder, name, holder.get(name)))
            holder[name] = value

        for path, module in self.model.named_modules():
            options = getattr(module, MARK, None)
            names = {t.name for t in self.found if t.path == path} | ({"forward"} if options is not None else set())
            for name in sorted(names):
                put(module.__dict__, name, Method(self, module, path, name, options or Options()))
        for target in self.found:
            if target.path is None:
                room, _, name = target.name.partition(":")
                place = vars(sys.modules[room])
                put(place, name, self._function(place[name], target))
        _active.tracing = self
        try:
            yield
        finally:
            _active.tracing = before
            for holder, name, original in reversed(patched):
                if original is None:
                    holder.pop(name, None)
                else:
                    holder[name] = original

    def _function(self, function: Callable[..., Any], target: Target) -> Callable[..., Any]:
        """A function that was found, as it runs while the model is traced."""

        @functools.wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            if now_tracing() is not self:
                return function(*args, **kwargs)
            try:
                return self.call(function, None, str(target), Options(), args, kwargs)
            except EagerError as error:
                error.target = target
                raise

        return either

    def call(
        self,
        function: Callable[..., Any] | None,
        module: nn.Module | None,
        label: str,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One call of a part, as an op of the trace."""
        mode = _canonical()
        assert mode is not None
        part, tensors, traced = self._part(function, module, label, options, args, kwargs)
        if part.outcome is None:
            whole = part.slots
            part = self._shaped(part, tensors, traced, options, args, kwargs, prune=module is None)
            kept = dict(zip(whole, traced, strict=True))
            traced = [kept[name] for name in part.slots]
        register(part)
        mode.site += 1
        mode.drew = True
        # What it changes is changed after backward has been told what it was.
        before = [t.clone() if i in part.changes else t for i, t in enumerate(tensors)]
        before += [t.detach().clone() if i in part.writes else t for i, t in enumerate(traced)]
        made = list(_AsItIs.apply(part, mode.key, mode.site, *before))  # type: ignore[no-untyped-call]
        return self._result(part, made, tensors, traced)

    def _part(
        self, function: Any, module: nn.Module | None, label: str, options: Options, args: Any, kwargs: Any
    ) -> tuple[EagerPart, list[Tensor], list[Tensor]]:
        """The part that such a call is of, its tensor arguments, and the tensors of its modules."""
        flat, tree = tree_flatten((args, kwargs))
        modules = [] if module is None else [module]
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                leaves.append(Hole(len(tensors) - 1))
            elif isinstance(leaf, nn.Module):
                modules += [] if any(m is leaf for m in modules) else [leaf]
                leaves.append(Held(next(i for i, m in enumerate(modules) if m is leaf)))
            else:
                _refuse_hidden(leaf, label)
                leaves.append(leaf)
        part = EagerPart(
            "",
            label,
            function,
            [weakref.ref(m) for m in modules],
            tree,
            leaves,
            len(tensors),
            [],
            [],
            (),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        )
        slots = {name: s for name, s in slots_in(part).items() if self._from_before(s)}
        traced = [s.tensor for s in slots.values()]
        given = [*tensors, *traced]
        part.slots, part.dtypes = list(slots), [t.dtype for t in given]
        part.needs = tuple(t.requires_grad and torch.is_grad_enabled() for t in given)
        about = [
            function,
            modules,
            str(tree),
            list(leaves),
            options,
            str(part.autocast),
            part.needs,
            [(tuple(t.shape), t.dtype) for t in given],
        ]
        plain = [v for v in leaves if not isinstance(v, (Hole, Held))]
        kind = type(module).__name__ if module is not None else getattr(function, "__qualname__", "part").split(".")[-1]
        part.name = f"{kind}-{digest(about, identity=[*modules, function, *plain] if function else [*modules, *plain])}"
        known = [p for p in _parts.get(part.name, []) if p.outcome is not None]
        if known:  # what is alike makes the same shapes
            modules_of, label_of = part.modules, part.label
            part = replace(known[-1], modules=modules_of, label=label_of, leaves=leaves, tree=tree, function=function)
            traced = [slots[name].tensor for name in part.slots]
        return part, tensors, traced

    def _from_before(self, slot: Slot) -> bool:
        """Whether a tensor of a module was there before the step: what this step has left on it is not given."""
        known = any((id(holder), key) in self._places for holder, key in slot.places)
        return known or not any(id(holder) in self._holders for holder, _ in slot.places)

    def _shaped(
        self,
        part: EagerPart,
        tensors: list[Tensor],
        traced: list[Tensor],
        options: Options,
        args: Any,
        kwargs: Any,
        prune: bool,
    ) -> EagerPart:
        """The part with the shapes of what it makes."""
        if options.out is not None:
            shaped = declared(part, options.out, args, kwargs)
            if options.batch_dim == 0:
                shaped = _declared_samples(shaped, tensors)
            return shaped
        real = {id(s.fake): s.tensor for s in self.slots if s.fake is not None}
        values = [None] * len(tensors) + [real.get(id(t)) for t in traced]
        return tried_part(part, [*tensors, *traced], values, options.batch_dim == 0, prune)

    def _result(self, part: EagerPart, made: list[Tensor], tensors: list[Tensor], traced: list[Tensor]) -> Any:
        """What the part returns, with what it changes changed and what it leaves left."""
        assert part.outcome is not None
        count = len(made) - len(part.changes) - len(part.writes)
        for i, value in zip(part.changes, made[count:], strict=False):
            tensors[i].copy_(value)
        with torch.no_grad():
            for i, value in zip(part.writes, made[count + len(part.changes) :], strict=True):
                traced[i].copy_(value)
        values = [made[v.at] if isinstance(v, Hole) else v for v in part.outcome.leaves]
        result, left = tree_unflatten(values, part.outcome.tree)
        held = part.held()
        for (at, path, name), value in left.items():
            held[at].get_submodule(path).__dict__[name] = value
        return result


class Keying(Tracing):
    """Parts as a graph runs them, but in place, in plain PyTorch: their draws are those that the op makes."""

    def __init__(self, model: nn.Module, found: Mapping[Target, Any], mode: Canonical) -> None:
        super().__init__(model, (), found)
        self.mode = mode

    def call(
        self,
        function: Callable[..., Any] | None,
        module: nn.Module | None,
        label: str,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One call, with all generators set as they are for the op."""
        self.mode.site += 1
        _active.tracing = None  # what it calls runs as it is with it
        try:
            with generators_seeded(self.mode.key, self.mode.site, self.mode.key.device), without_function_modes():
                if function is not None:
                    return function(*args, **kwargs)
                assert module is not None
                return module.forward(*args, **kwargs)
        finally:
            _active.tracing = self


def _declared_samples(part: EagerPart, tensors: list[Tensor]) -> EagerPart:
    """Which tensors have samples in dim 0, by their sizes alone."""
    rows = next((t.shape[0] for t in tensors if len(t.shape)), 0)
    ins = tuple(i for i, t in enumerate(tensors) if len(t.shape) and t.shape[0] == rows)
    assert part.outcome is not None
    outs = tuple(i for i, t in enumerate(part.outcome.tensors) if len(t.shape) and t.shape[0] == rows)
    if rows > 1 and len(outs) == len(part.outcome.tensors):
        return replace(part, batched=(ins, outs), rows=rows)
    return part


def _refuse_hidden(leaf: Any, label: str, depth: int = 3) -> None:
    """Tensors that an argument holds where nobody finds them would be left out."""
    if isinstance(leaf, Tensor):
        raise EagerError(
            f"{label} is given tensors inside of an object that is no dict, list or tuple",
            next="pass the tensors themselves, or have a larger part run as it is with laminar.eager",
        )
    if depth and isinstance(leaf, (list, tuple, set)):
        for item in leaf:
            _refuse_hidden(item, label, depth - 1)
    elif depth and not isinstance(leaf, (type, types.FunctionType, types.ModuleType, nn.Module)):
        kept = leaf if isinstance(leaf, dict) else getattr(leaf, "__dict__", None) or {}
        for item in kept.values():
            _refuse_hidden(item, label, depth - 1)


# --- in the trace ----------------------------------------------------------------------------

_LIB = torch.library.Library("laminar", "FRAGMENT")
_LIB.define(
    "eager(Tensor[] given, Tensor key, str name, int site, int[] ins, int[] outs, int flops, int rows) -> Tensor[]"
)
_LIB.define(
    "eager_backward(Tensor[] grads, Tensor[] given, Tensor key, str name, int site, bool[] needs, int[] ins, "
    "int[] outs, int flops, int rows) -> Tensor[]"
)
_LIB.impl("eager", run, "CompositeExplicitAutograd")
_LIB.impl("eager_backward", eager_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("laminar::eager", lib=_LIB)  # type: ignore[untyped-decorator]
def _(given: list[Tensor], key: Tensor, name: str, *rest: Any) -> list[Tensor]:
    outcome = _parts[name][-1].outcome
    assert outcome is not None
    return [key.new_empty(t.shape, dtype=t.dtype) for t in outcome.tensors]


@torch.library.register_fake("laminar::eager_backward", lib=_LIB)  # type: ignore[untyped-decorator]
def _(
    grads: Any, given: list[Tensor], key: Tensor, name: str, site: int, needs: list[bool], *rest: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(given, needs, strict=True) if need]


class _AsItIs(torch.autograd.Function):
    """The op and its gradient."""

    @staticmethod
    def forward(ctx: Any, part: EagerPart, key: Tensor, site: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.site = part, site
        ctx.save_for_backward(key, *given)
        made = torch.ops.laminar.eager(
            list(given), key, part.name, site, part.batched[0], part.batched[1], part.flops, part.rows
        )
        ctx.mark_non_differentiable(*[t for t, d in zip(made, part.differentiable, strict=True) if not d])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        part, (key, *given) = ctx.part, ctx.saved_tensors
        needs = list(ctx.needs_input_grad[3:])
        wanted = [g for g, d in zip(grads, part.differentiable, strict=True) if d]
        if not any(needs) or not wanted:
            return (None,) * (3 + len(given))
        found = iter(
            torch.ops.laminar.eager_backward(
                wanted, given, key, part.name, ctx.site, needs, part.batched[0], part.batched[1], part.flops, part.rows
            )
        )
        return (None, None, None, *(next(found) if need else None for need in needs))
