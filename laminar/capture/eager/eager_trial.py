"""What a part that runs as it is makes: found by running it, on tensors of the right shapes and made-up values.

Capture knows shapes and no values. A part whose results have shapes that don't depend on data makes the same shapes on
any values, so a few runs on random ones tell them: floats of both signs, whole numbers that are small enough to be
indices, masks of both kinds. Parameters and buffers have their own values where this process has them. If runs
disagree, a shape depends on data, and a larger part has to run as it is. If none succeeds, the user declares what is
made (`laminar.eager(..., out=)`).

Trials run in a thread of their own, where none of the modes is active under which a model is traced.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from laminar.capture.model.model_tensors import Slot, swapped
from laminar.capture.ops.eager_parts import CallOutcome, EagerPart, Hole, called, given_of, leaves_of, slots_in
from laminar.capture.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    disable_current_modes,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    without_function_modes,
)
from laminar.errors import CaptureError

TRIAL_DRAWS = 3
QUESTIONS = (
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "size",
    "stride",
    "dim",
    "numel",
    "layout",
    "storage_offset",
    "is_contiguous",
    "is_strides_like_format",
    "is_non_overlapping_and_dense",
)
"""Questions about a tensor that read no value."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
PLAIN_RESULTS = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)


class EagerError(CaptureError):
    """A part can't run as it is, at least not by itself."""

    target: Any = None
    """Which part it is, where it was found and not declared."""


class ReadTensors(TorchDispatchMode):
    """Which of the tensors given are read; refuses what belongs to the model and is not given."""

    def __init__(self, part: EagerPart, given: Sequence[Tensor], carried: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part, self.carried = part, carried
        self.known = {id(t): i for i, t in enumerate(given)}
        self.read: set[int] = set()
        self.made: dict[int, Any] = {}
        """What was made here, which may well be a leaf: forward may ask autograd for something itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace == "prim" or func.overloadpacket.__name__ in QUESTIONS
        ):  # torch asks these where none may raise
            return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, Tensor):
                continue
            at = self.known.get(id(value))
            if at is not None:
                self.read.add(at)
            elif id(value) in self.carried:
                raise EagerError(
                    f"{self.part.label} leaves a tensor in {self.carried[id(value)]}, and the next step reads it",
                    next="give it a first value with register_buffer, so that it goes in and out of every step",
                )
            elif isinstance(value, FakeTensor) or (value.requires_grad and value.is_leaf and not self._ours(value)):
                raise EagerError(
                    f"{self.part.label} reads a tensor of the model that is neither its own nor given to it",
                    next="pass it as an argument, or have a module that holds both run as it is with laminar.eager",
                )
        out = func(*args, **(kwargs or {}))
        self.made.update({id(t): weakref.ref(t) for t in tree_leaves(out) if isinstance(t, Tensor)})
        return out

    def _ours(self, value: Tensor) -> bool:
        return id(value) in self.made and self.made[id(value)]() is value


def drawn(like: Tensor, real: Tensor | None, number: int, generator: torch.Generator, is_argument: bool) -> Tensor:
    """A made-up value for a tensor, or the one it has."""
    shape, dtype = tuple(like.shape), like.dtype
    device = real.device if real is not None else torch.device("cpu")
    if real is not None and not real.is_meta and tuple(real.shape) == shape:
        return real.detach().to(dtype).clone()
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < (0.5, 2.0, 0.1)[number]
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, (2, 1, 3)[number], shape, generator=generator).to(device, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float32
    value = torch.randn(shape, generator=generator, dtype=wide)
    if not is_argument and len(shape) > 1:
        value = value / max(1.0, float(like.numel() // max(shape[0], 1)) ** 0.5)
    return (value * (1.0, 0.1, 3.0)[number]).to(device, dtype)


def tried_part(
    part: EagerPart, given: Sequence[Tensor], real: Sequence[Tensor | None], per_sample: bool, prune: bool
) -> EagerPart:
    """The part with what trials found out; `given` are stand-ins, `real` the values that are known."""
    with _numpy_aside(), concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, part, given, real, per_sample, prune).result()


@contextlib.contextmanager
def _numpy_aside() -> Iterator[None]:
    """Inside, NumPy's global generator is another one: the thread that traces holds the lock of its own."""
    numpy: Any = np.random
    state, own = numpy.get_state(legacy=True), numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.MT19937(0))
    try:
        yield
    finally:
        numpy.set_bit_generator(own)
        numpy.set_state(state)


def _tried(
    part: EagerPart, given: Sequence[Tensor], real: Sequence[Tensor | None], per_sample: bool, prune: bool
) -> EagerPart:
    device = next((t.device for t in real if t is not None and not t.is_meta), torch.device("cpu"))
    key = torch.tensor([0, 0])
    runs: list[tuple[list[Tensor], CallOutcome]] = []
    failed: Exception | None = None
    read: set[int] = set()
    flops = 0
    carried: dict[str, Any] = {}
    with contextlib.ExitStack() as around:
        for module in part.held():
            around.enter_context(swapped(module, []))
        for number in range(TRIAL_DRAWS):
            draw = torch.Generator().manual_seed(number)
            values = [
                drawn(t, r, number, draw, i < part.arguments).to(device)
                for i, (t, r) in enumerate(zip(given, real, strict=True))
            ]
            try:
                with torch.set_grad_enabled(any(part.needs)):
                    leaves = leaves_of(part, values, part.needs)
                    seen = ReadTensors(
                        part,
                        leaves,
                        {id(t): k for k, v in carried.items() for t in tree_leaves(v) if isinstance(t, Tensor)},
                    )
                    with FlopCounterMode(display=False) as counter, seen:
                        got = called(part, leaves, key, number, False, _as_it_is, copied=True)
            except EagerError:
                raise
            except Exception as error:
                failed = error
                continue
            if got.numbers:
                name, old, new = got.numbers[0]
                raise EagerError(
                    f"{part.label} can't run as it is: it changes {name} from {old!r} to {new!r}, a side effect that "
                    "backward would repeat",
                    next="keep it as a registered buffer, or change it outside the model",
                )
            read |= seen.read
            flops = max(flops, int(counter.get_total_flops()))
            runs.append((values, got))
            carried = _put_back(part, got)
    if not runs:
        assert failed is not None
        raise EagerError(
            f"{part.label} did not run on values made up for a trial: {type(failed).__name__}: {failed}".split("\n")[0],
            why="what runs as it is must say which shapes it makes",
            next="declare them: laminar.eager(..., out=lambda *args: a result of the same shapes)",
        ) from failed
    found = _agreed(part, runs, flops)
    if prune:
        found = _pruned(found, read)
    return _by_sample(found, runs, per_sample) if per_sample else found


def _as_it_is(got: CallOutcome) -> CallOutcome:
    return got


def _put_back(part: EagerPart, got: CallOutcome) -> dict[str, Any]:
    """Put what a call left on modules where the next one finds it."""
    values = [got.tensors[v.at] if isinstance(v, Hole) else v for v in got.leaves]
    _, left = tree_unflatten(values, got.tree)
    held = part.held()
    for (at, path, name), value in left.items():
        held[at].get_submodule(path).__dict__[name] = value
    return {f"{path}.{name}" if path else name: value for (_, path, name), value in left.items()}


def _agreed(part: EagerPart, runs: Sequence[tuple[list[Tensor], CallOutcome]], flops: int) -> EagerPart:
    """What all runs have in common; where they differ, the part is too small to run as it is."""
    changes = tuple(sorted({i for _, got in runs for i in got.arguments}))
    writes = tuple(sorted({i for _, got in runs for i in got.buffers}))
    kinds = [s.kind for s in _slots_given(part)]
    for i in writes:
        if kinds[i] == "param":
            raise EagerError(
                f"{part.label} changes its parameter {_slots_given(part)[i].name} in forward",
                next="compute a weight from it, or change it between steps",
            )
    if any(got.arguments != set(changes) or got.buffers != set(writes) for _, got in runs):
        # Some runs change what others don't: with copies in their places, all results are there in all runs.
        return _again(replace(part, changes=changes, writes=writes), [v for v, _ in runs], flops)
    first = runs[0][1]
    for leaf in first.leaves:
        if not isinstance(leaf, (Hole, *PLAIN_RESULTS)):
            raise EagerError(
                f"{part.label} returns a {type(leaf).__name__}, which is no tensor",
                next="return tensors in tuples, lists and dicts",
            )
    for _, got in runs[1:]:
        if got.tree != first.tree or got.leaves != first.leaves:
            raise EagerError(f"{part.label} returns other things on other data", next="return the same kind every time")
        for a, b in zip(first.tensors, got.tensors, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise EagerError(
                    f"{part.label} makes a shape that depends on data: {tuple(a.shape)} and {tuple(b.shape)}",
                    next="make its result of a fixed size, or have a larger part run as it is with laminar.eager",
                )
    if not first.tensors:
        raise EagerError(f"{part.label} makes no tensor", next="have a larger part run as it is with laminar.eager")
    differentiable = tuple(any(got.tensors[i].requires_grad for _, got in runs) for i in range(len(first.tensors)))
    empty = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in first.tensors]
    return replace(
        part,
        changes=changes,
        writes=writes,
        outcome=replace(first, tensors=empty),
        differentiable=differentiable,
        flops=flops,
    )


def _again(part: EagerPart, values: Sequence[list[Tensor]], flops: int) -> EagerPart:
    key = torch.tensor([0, 0])
    runs = []
    for number, given in enumerate(values):
        with torch.set_grad_enabled(any(part.needs)):
            got = called(part, leaves_of(part, given, part.needs), key, number, False, _as_it_is)
        runs.append((given, replace(got, arguments=frozenset(part.changes), buffers=frozenset(part.writes))))
    return _agreed(part, runs, flops)


def _slots_given(part: EagerPart) -> list[Slot]:
    return given_of(part, slots_in(part))


def _pruned(part: EagerPart, read: set[int]) -> EagerPart:
    """Without tensors of modules that it does not look into; those of one child stay together."""

    def family(name: str) -> str:
        head, dot, _ = name.partition(".")
        return head + dot

    names = [s.name for s in _slots_given(part)]
    kept = {family(names[i - part.arguments]) for i in read if i >= part.arguments}
    stay = [i for i, n in enumerate(names) if family(n) in kept or i in part.writes]
    every = [*range(part.arguments), *[part.arguments + i for i in stay]]
    return replace(
        part,
        slots=[part.slots[i] for i in stay],
        dtypes=[part.dtypes[i] for i in every],
        needs=tuple(part.needs[i] for i in every),
        writes=tuple(stay.index(i) for i in part.writes),
    )


def _by_sample(part: EagerPart, runs: Sequence[tuple[list[Tensor], CallOutcome]], per_sample: bool) -> EagerPart:
    """Which tensors have samples in dim 0, if the part makes of each sample what it makes of it alone."""
    values = runs[0][0]
    rows = next((t.shape[0] for t in values[: part.arguments] if t.dim()), 0)
    ins = tuple(i for i, t in enumerate(values[: part.arguments]) if t.dim() and t.shape[0] == rows)
    assert part.outcome is not None
    outs = tuple(i for i, t in enumerate(part.outcome.tensors) if t.dim() and t.shape[0] == rows)
    whole = "" if rows > 1 else "a batch of one"
    if part.writes:
        whole = "it changes buffers, which are those of all samples"
    elif len(outs) != len(part.outcome.tensors):
        whole = "it makes a tensor that holds nothing for single samples"
    elif any(got.drew for _, got in runs):
        whole = "it draws random numbers, which would not be those of the whole batch"
    if whole:
        return part if not rows else replace(part, rows=rows)
    split = replace(part, batched=(ins, outs), rows=rows)
    for given, got in runs:
        halves = []
        for piece in (slice(0, rows // 2), slice(rows // 2, rows)):
            some = [t[piece] if i in ins else t for i, t in enumerate(given)]
            with torch.set_grad_enabled(any(part.needs)):
                given_here = leaves_of(part, some, part.needs)
                halves.append(called(part, given_here, torch.tensor([0, 0]), 0, False, _as_it_is).tensors)
        for i, want in enumerate(got.tensors):
            both = torch.cat([h[i].detach() for h in halves])
            close = CLOSE.get(want.dtype, 2e-2)
            if both.shape != want.shape or not torch.allclose(
                both, want.detach(), rtol=close, atol=close, equal_nan=True
            ):
                raise EagerError(
                    f"{part.label} is declared to run sample by sample (batch_dim=0), and half a batch gives other "
                    "results than it has in the whole",
                    next="leave batch_dim out: then it sees whole tensors",
                )
    return split


def declared(part: EagerPart, out: Callable[..., Any], args: Any, kwargs: Any) -> EagerPart:
    """The part with what its user says that it makes: `out` on stand-ins, which are no part of the trace."""
    flat, tree = tree_flatten((args, kwargs))
    with disable_current_modes(), without_function_modes(), torch.no_grad():
        stand_ins = [torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) else v for v in flat]
        args, kwargs = tree_unflatten(stand_ins, tree)
        result, tensors = out(*args, **kwargs), []
        flat, tree = tree_flatten((result, {}))
        for i, leaf in enumerate(flat):
            if isinstance(leaf, Tensor):
                tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"))
                flat[i] = Hole(len(tensors) - 1)
    if not tensors:
        raise EagerError(f"{part.label}: what out= returns holds no tensor", next="return a result of the same shapes")
    found = CallOutcome(tensors, tree, flat, frozenset(), frozenset())
    return replace(part, outcome=found, differentiable=tuple(t.dtype.is_floating_point for t in tensors))
