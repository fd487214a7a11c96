"""Weights out of somebody's files into a job: all of them, one submodule's, or under other names.

Names, shapes and dtypes are compared before anything is read, and everything is read before anything is changed, on
every rank: a job takes all of what it was asked to, or stays as it was. Each rank reads what it holds and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from laminar.checkpoint.format.block_grid import Slices
from laminar.errors import LaminarError, StateError
from laminar.ir.tensor import TensorSpec
from laminar.train.formats.open_source import open_source
from laminar.train.formats.tensor_source import TensorSource
from laminar.train.protocol import HasState
from laminar.train.state.fill import LoadedWeights, averages_begin_anew, put_staged, stage_weights
from laminar.train.state.state import JobState

LISTED_NAMES = 5
"""Names that an error lists of each kind."""


@dataclass(frozen=True)
class _Match:
    """Which tensor of the files is read for which of the model."""

    source_of: Mapping[str, str]
    """By slot of the model."""
    found: LoadedWeights
    wrong: tuple[str, ...]
    """Shapes and dtypes that don't fit."""


def load_weights(
    job: HasState, path: str | Path, *, only: str = "", rename: Mapping[str, str] | None = None, strict: bool = True
) -> LoadedWeights:
    """See `Job.load_weights`."""
    staged, match, mine = [], None, None
    try:
        source = open_source(path)
        match = _matched(job.state, source, only, rename or {})
        _refuse(match, source, strict)
        of = match.source_of

        def read(slot: str, index: Slices) -> Tensor:
            return source.read(of[slot], index)

        staged = list(stage_weights(job.state, of, read))
    except (LaminarError, OSError) as error:
        mine = error
    said = next((s for s in job.peers.gather_objects(None if mine is None else str(mine)) if s), None)
    if mine is not None:
        raise mine
    if said is not None:
        raise StateError(f"another rank could not load {path}: {said}")
    assert match is not None
    put_staged(job.state, staged)
    averages_begin_anew(job.state)
    return match.found


def _matched(state: JobState, source: TensorSource, only: str, rename: Mapping[str, str]) -> _Match:
    """What belongs to what."""
    mine = state.model_names()
    given: dict[str, str] = {}
    for name in source.specs:
        here = _renamed(name, rename)
        if here in given:
            raise StateError(f"{given[here]} and {name} of {source.where} would both be {here}", next="rename= less")
        given[here] = name
    inside = {n: s for n, s in given.items() if n.startswith(only)}
    source_of: dict[str, str] = {}
    wrong: list[str] = []
    for name, slot in mine.items():
        if name in inside and slot not in source_of:
            source_of[slot] = inside[name]
            wrong += _unfit(name, source.specs[inside[name]], state.specs[slot])
    wanted = {slot: name for name, slot in reversed(mine.items()) if name.startswith(only)}
    if only and not wanted:
        raise StateError(f"the model has no tensor whose name begins with {only!r}", names=_some(sorted(mine)))
    found = LoadedWeights(
        loaded=tuple(n for n in mine if n in inside),
        missing=tuple(name for slot, name in wanted.items() if slot not in source_of),
        unexpected=tuple(n for n in inside if n not in mine),
    )
    return _Match(source_of, found, tuple(wrong))


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    """A name with the longest prefix exchanged that is to be."""
    fits = [p for p in rename if name.startswith(p)]
    if not fits:
        return name
    prefix = max(fits, key=len)
    return rename[prefix] + name[len(prefix) :]


def _unfit(name: str, theirs: TensorSpec, mine: TensorSpec) -> list[str]:
    casts = theirs.dtype == mine.dtype or (theirs.is_float and mine.is_float)
    return [] if theirs.shape == mine.shape and casts else [f"{name} is {theirs} there, {mine} in the model"]


def _refuse(match: _Match, source: TensorSource, strict: bool) -> None:
    found = match.found
    nothing = not match.source_of
    if not (match.wrong or nothing or (strict and (found.missing or found.unexpected))):
        return
    raise StateError(
        f"the weights in {source.where} are not this model's",
        shapes=_some(match.wrong, "; "),
        missing=_some(found.missing),
        unexpected=_some(found.unexpected),
        next=_hint(match, source),
    )


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return between.join(names[:LISTED_NAMES]) + more


def _hint(match: _Match, source: TensorSource) -> str:
    """What would make them fit, if a prefix is all that is in the way."""
    for name in match.found.missing:
        for theirs in source.specs:
            if theirs != name and theirs.endswith("." + name):
                return f"rename={{{theirs.removesuffix(name)!r}: ''}}"
            if theirs != name and name.endswith("." + theirs):
                return f"rename={{'': {name.removesuffix(theirs)!r}}}"
    if match.wrong:
        return "name the files of this model"
    return "only='submodule.' loads a part; strict=False takes what fits"
