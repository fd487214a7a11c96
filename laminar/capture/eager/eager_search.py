"""Which part of a model has to run as it is: found from where tracing failed.

Tracing stops at the first line that looks at data. The frames it passed through name the modules, and the methods of
modules, that were at work; the innermost one that makes results of fixed shapes runs as it is (`capture.eager`), and
the model is traced again. Modules that are alike are taken together, so that depth costs no further attempts. What was
found is remembered for the next capture of the same model, and said: as an event, and by the line in the graph.
"""

from __future__ import annotations

import inspect
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from laminar.capture.canonical.canonical import Canonical
from laminar.capture.eager.eager import Keying, Target, Tracing
from laminar.capture.eager.eager_trial import EagerError
from laminar.capture.model.model_tensors import Slot
from laminar.capture.ops.eager_names import digest
from laminar.capture.ops.eager_parts import NAME
from laminar.capture.torch_private import LOOKS_AT_DATA
from laminar.capture.tracing.origins import STEP_FUNCTIONS, blame, is_users
from laminar.errors import CaptureError, LaminarError
from laminar.events import emit
from laminar.ir.graph import Graph

T = TypeVar("T")
SEARCH_ATTEMPTS = 64


@dataclass(frozen=True)
class Reason:
    """Why a part runs as it is."""

    where: str
    """The user's line."""
    why: str
    error: BaseException | None = None
    """What tracing ended with; not kept, for it holds the frames of the model's code."""
    cause: BaseException | None = None
    outer: tuple[Target, ...] = ()
    """What else could run as it is instead, innermost first."""


_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Target, Reason]]] = weakref.WeakKeyDictionary()


def traced(model: nn.Module, slots: Sequence[Slot], trace: Callable[[], T]) -> tuple[T, dict[str, str]]:
    """What `trace` gives, with parts that run as they are; and the lines that made those necessary, by path."""
    modes = tuple(m.training for m in model.modules())
    known = dict(_found.get(model, {}).get(modes, {}))
    given = dict(known)
    for _ in range(SEARCH_ATTEMPTS):
        try:
            with Tracing(model, slots, known).active():
                result = trace()
            break
        except EagerError as error:
            _outwards(known, error)
        except Exception as error:
            fresh = _reason(model, error, known)
            if fresh is None:
                raise
            known.update(fresh)
    else:
        raise CaptureError(f"{type(model).__name__} looks at data in more than {SEARCH_ATTEMPTS} places", next=MARK_IT)
    known = {target: Reason(reason.where, reason.why) for target, reason in known.items()}
    _found.setdefault(model, {})[modes] = known
    for target, reason in known.items():
        if target not in given:
            emit("eager", part=str(target), at=reason.where, why=reason.why)
    return result, {t.path: reason.where for t, reason in known.items() if t.path is not None}


def keyed(model: nn.Module, mode: Canonical) -> AbstractContextManager[None]:
    """While a model runs in plain PyTorch: parts draw what they draw as ops of a graph with that key."""
    modes = tuple(m.training for m in model.modules())
    return Keying(model, _found.get(model, {}).get(modes, {}), mode).active()


MARK_IT = 'mark the part that looks at data with laminar.eager, or train with plan="ddp"'


def runs_as_it_is(graph: Graph) -> bool:
    """Whether a graph holds names of parts: then it is good only where those were captured."""
    return any(n.op in NAME for n in graph.nodes)


def with_reasons(graph: Graph, lines: dict[str, str]) -> Graph:
    """The graph whose ops that run as they are say which line made that necessary."""
    if not runs_as_it_is(graph):
        return graph
    nodes = tuple(replace(n, where=lines.get(n.module) or n.where) if n.op in NAME else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def _reason(model: nn.Module, error: BaseException, known: dict[Target, Reason]) -> dict[Target, Reason] | None:
    """Parts to run as they are because of an error, or None if that is no way out."""
    cause = _cause(error)
    if cause is None:
        return None
    targets = [t for t in _targets(model, cause) if t not in known]
    if not targets:
        return None
    first, outer = targets[0], tuple(targets[1:])
    where, why = blame(cause), str(error).split("\n")[0]
    return {t: Reason(where, why, error, cause, outer if t == first else ()) for t in (first, *_alike(model, first))}


def _cause(error: BaseException) -> BaseException | None:
    """The exception in a chain that fake tensors are to blame for: no values, no kernel, or another one than real ones.

    What a user raises is the user's, and what we refuse stays refused.
    """
    seen: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and not any(now is s for s in seen):
        if isinstance(now, LOOKS_AT_DATA) or getattr(now, "depends_on_data", False):
            return now
        seen.append(now)
        now = now.__cause__
    last = seen[-1]
    return last if isinstance(error, CaptureError) and not isinstance(last, LaminarError) else None


def _targets(model: nn.Module, error: BaseException) -> list[Target]:
    """Methods of modules and functions that an exception passed through, innermost first; never the whole model."""
    paths = {id(m): path for path, m in model.named_modules()}
    out: list[Target] = []
    caller: dict[str, Any] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, around, caller = frame.f_code, caller, frame.f_globals
        if code.co_name in STEP_FUNCTIONS:
            out = []
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        method = getattr(type(owner), code.co_name, None) if isinstance(owner, nn.Module) else None
        if method is not None and getattr(inspect.unwrap(method), "__code__", None) is code:
            if id(owner) in paths and code.co_name not in CALLS and (paths[id(owner)] or code.co_name != "forward"):
                out.append(Target(paths[id(owner)], code.co_name))
        elif is_users(code.co_filename):
            out += _functions(code, around, frame.f_globals)
    return list(dict.fromkeys(reversed(out)))


CALLS = ("_call_impl", "_wrapped_call_impl", "__call__")


def _functions(code: Any, *places: dict[str, Any]) -> Iterator[Target]:
    """The function of some code as its caller, or its own file, knows it."""
    for place in places:
        if not is_users(str(place.get("__file__", "<"))):
            continue
        for name, value in place.items():
            if isinstance(value, types.FunctionType) and inspect.unwrap(value).__code__ is code:
                yield Target(None, f"{place['__name__']}:{name}")
                return


def _alike(model: nn.Module, target: Target) -> Iterator[Target]:
    """The same method of modules that differ in nothing but their tensors, and don't contain this one."""
    if target.path is None:
        return
    module = model.get_submodule(target.path)
    for other, m in model.named_modules():
        alike = type(m) is type(module) and m is not module and not _contains(other, target.path)
        if alike and digest(m, identity=[m]) == digest(module, identity=[module]):
            yield Target(other, target.name)


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def _outwards(known: dict[Target, Reason], error: EagerError) -> None:
    """In the place of a part that can't run as it is, the next one out; raised if there is none."""
    first: BaseException | None = error  # the one that knows its target; others repeat it with a line
    while first is not None and getattr(first, "target", None) is None and first.__cause__ is not first:
        first = first.__cause__
    reason = known.pop(getattr(first, "target", None), None)  # type: ignore[arg-type]
    if reason is None:
        raise error
    assert first is not None
    trial = first.__cause__
    if trial is not None and type(trial) is type(reason.cause) and str(trial) == str(reason.cause):
        raise reason.error or error  # it fails on real tensors as well: nothing that tracing is to blame for
    outer = [t for t in reason.outer if t not in known]
    if not outer:
        raise CaptureError(
            reason.why, at=reason.where, why=f"and {str(error).partition(chr(10))[0]}", next=MARK_IT
        ) from reason.error
    known[outer[0]] = replace(reason, outer=tuple(outer[1:]))
