"""The graphs of one model and loss: by shape of batch, and by the values that the model's code has read.

A graph is used for as long as everything that its trace read is what it was (`guards.py`). Otherwise the step is
captured again, and the new graph kept beside the old: going back to an earlier value costs nothing. What can't be
captured again, because the job holds it, is refused by name (a parameter replaced) or taken over (a buffer replaced).

A value that is read and changes in every step makes every step a capture. That is said, with what it costs and the ways
out. One that the step itself changes, and that what it computes depends on, is refused: a captured step runs no Python.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laminar.cache import folder, kept, sources
from laminar.capture.model.model_tensors import Slot, slots_of
from laminar.errors import CaptureError, LaminarError, StateError
from laminar.events import emit
from laminar.ir.graph import Graph
from laminar.train.engine.guards import Guards, Reads

if TYPE_CHECKING:
    from laminar.train.batch.leaves import Leaves

MOST_GRAPHS = 64
"""Graphs that are kept."""
_log = logging.getLogger("laminar")


@dataclass
class Guarded:
    """A graph, and the values that its trace has read."""

    graph: Graph
    needed: dict[str, Any]
    reads: Reads

    def differs(self, guards: Guards) -> list[str]:
        """Values that are not what they were."""
        return guards.differences(self.needed, self.reads)


class Captures:
    """Graphs for batches, captured when first needed: call it with leaves."""

    def __init__(self, guards: Guards, capture: Callable[[Leaves, bool], Graph]) -> None:
        self.guards, self.capture = guards, capture
        self.take: Callable[[Slot], None] | None = None
        """Makes the job hold a tensor that an attribute of the model has come to hold."""
        self._reads: Reads | None = None
        """What was read for the last graph; nothing if it was kept from an earlier run of the script."""
        self._autocast = _autocast()
        self.said = ""
        """What has changed since the job was made, in as far as steps depend on it: ranks compare this."""
        self._of: dict[Any, list[Guarded]] = {}
        self._hits: dict[Any, Graph] = {}
        self._at = guards.version
        self._slots = {s.name: s for s in slots_of(guards.model)}
        self._times: Counter[str] = Counter()
        self._state = (-1, 0, 0)

    def adopt(self, slots: list[Slot]) -> None:
        """The tensors that the job holds from now on; the model may be changed until then."""
        self._slots = {s.name: s for s in slots}
        self.settle()

    def learn(self, others: Captures) -> None:
        """Take the graphs of a job whose model is a copy of this one's: what their traces read is read here by name."""
        self.guards.look()
        for shape, known in others._of.items():
            for each in known:
                loose = each.reads.loose
                reads = Reads(None if loose is None else {*loose, *each.reads.names})
                needed = self.guards.needed(reads)
                self._of.setdefault(shape, []).append(Guarded(each.graph, needed, reads))
                self.guards.read.update(needed)

    def look(self, held: Mapping[str, Tensor]) -> None:
        """See whether anything has changed; tensors that were replaced are taken over or refused."""
        if _autocast() != self._autocast:
            raise LaminarError(
                "torch.autocast around a step is nothing that a compiled step would see",
                next='leave it out, and say parallelize(..., precision="bf16")',
            )
        guards, walks = self.guards, self.guards.walks
        if guards.look() == self._at:
            return
        changes = guards.take()
        if guards.walks != walks:
            self._replaced(held)
            changes = {**guards.take(), **changes}
        self._at = guards.version
        self._hits.clear()
        changed = sorted(n for n, old in changes.items() if guards.matters(n) and guards.values.get(n) != old)
        if changed:
            text = "; ".join(f"{n} = {guards.show(n)}" for n in changed)
            self.said = f"{zlib.crc32((self.said + text).encode()):08x} {text[:300]}"

    def digest(self) -> str:
        """The values that steps depend on, as far as they are the same in another process."""
        plain = sorted((n, v) for n, v in self.guards.values.items() if n in self.guards.read and isinstance(v, tuple))
        return f"{zlib.crc32(repr(plain).encode()):08x}"

    def settle(self) -> None:
        """Take what has changed since the last look for something that the job itself did."""
        self.guards.look()
        changes = self.guards.take()
        self._at = self.guards.version
        self._hits.clear()
        for each in (g for some in self._of.values() for g in some):
            for name in each.differs(self.guards):
                if name in changes and each.needed.get(name) == changes[name] and name in self.guards.values:
                    each.needed[name] = self.guards.values[name]

    @property
    def state(self) -> int:
        """A number for the values there are, as far as any trace has read them: the same when they are."""
        if self._state[:2] != (self.guards.version, len(self.guards.read)):
            values = self.guards.values
            found = hash(tuple(sorted((n, values.get(n)) for n in self.guards.read)))
            self._state = self.guards.version, len(self.guards.read), found
        return self._state[2]

    def __call__(self, leaves: Leaves, backward: bool, besides: Any = ()) -> Graph:
        """The graph for such a batch under the values there are; `besides` is what else tells graphs apart."""
        shape = (leaves.key, backward, besides)
        found = self._hits.get(shape)
        if found is None:
            known = self._of.setdefault(shape, [])
            match = next((g for g in reversed(known) if not g.differs(self.guards)), None)
            match = match or self._captured(leaves, backward, known[-1] if known else None)
            if match in known:
                known.remove(match)
            known.append(match)  # the one used last
            while sum(map(len, self._of.values())) > MOST_GRAPHS:
                del next(some for some in self._of.values() if some)[0]
            found = self._hits[shape] = match.graph
        return found

    def _captured(self, leaves: Leaves, backward: bool, last: Guarded | None) -> Guarded:
        changed = last.differs(self.guards) if last is not None else []
        start = time.perf_counter()
        made = self._traced(leaves, backward)
        if last is not None:
            self._tell(changed, time.perf_counter() - start, made.graph.hash == last.graph.hash)
        return made

    def _traced(self, leaves: Leaves, backward: bool) -> Guarded:
        guards = self.guards
        guards.look()
        before = dict(guards.values)
        self._reads = None
        graph = self.capture(leaves, backward)
        reads = _known_reads(graph, self._reads)
        guards.look()
        needed = guards.needed(reads)
        moved = [n for n, v in needed.items() if n in before and before[n] != v]
        if moved:
            shown = guards.show(moved[0])
            again = self.capture(leaves, backward)
            if again.hash != graph.hash:
                raise CaptureError(
                    f"the step changes {moved[0]} (it is {shown} now), and what it computes depends on that: "
                    "a side effect that a captured step can't repeat",
                    next="change it between steps, outside of model and loss, or keep it as a registered buffer",
                )
            guards.look()
            _log.warning("%s changes while a step is captured; captured steps won't repeat that", moved[0])
            needed = guards.needed(reads)
        guards.take()
        self._at = guards.version
        self._hits.clear()
        guards.read.update(needed)
        return Guarded(graph, needed, reads)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around the code that is traced, and nothing else: what it reads is what the graph depends on."""
        with self.guards.reading() as reads:
            yield
        if self._reads is not None:
            reads.seen |= self._reads.seen
            reads.whole |= self._reads.whole
        self._reads = reads

    def _tell(self, changed: list[str], seconds: float, same: bool) -> None:
        """Why a step was captured again, and what to do if that happens all the time."""
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        emit("recapture", changed=changed[:20], seconds=seconds, same=same)
        _log.info("captured again in %.1f s, because %s changed%s", seconds, names, ": the same graph" if same else "")
        self._times.update(changed)
        for name in changed:
            if self._times[name] in (3, 10, 100):
                key = name.rpartition(".")[2]
                _log.warning(
                    "%s has changed %d times (it is %s now); each time the step is captured again, which took %.1f s. "
                    "Keep it as a registered buffer, or as a tensor in the batch, if steps are to follow it; "
                    'parallelize(..., unguarded=["%s"]) if its changes don\'t matter',
                    name,
                    self._times[name],
                    self.guards.show(name),
                    seconds,
                    key,
                )

    def _replaced(self, held: Mapping[str, Tensor]) -> None:
        """Tensors of the model that are no longer those the job holds."""
        if not held:
            return
        found = {s.name: s for s in slots_of(self.guards.model)}
        known = self._slots
        for name in tuple(dict.fromkeys((*known, *found))):
            old, new = known.get(name), found.get(name)
            if old is not None and new is not None and old.tensor is new.tensor:
                continue
            if old is None and new is not None and new.plain and self.take is not None:
                self.take(new)  # an attribute that holds a tensor now: an input like any other, if it is read
                known[name] = new
                continue
            if old is not None and old.plain and new is None:
                del known[name]  # and one that holds none any more
                continue
            if (
                old is not None
                and new is not None
                and old.kind == new.kind == "buffer"
                and _fits(new.tensor, held[name])
            ):
                with torch.no_grad():
                    held[name].copy_(new.tensor)
                for holder, key in new.places:
                    holder[key] = old.tensor
                continue
            kind = (old or new).kind.replace("param", "parameter")  # type: ignore[union-attr]
            what = (
                "is new"
                if old is None
                else "is gone"
                if new is None
                else "is another tensor than when the job was made"
            )
            raise StateError(
                f"{kind} {name} of the model {what}",
                why="the job and its optimizer hold the tensors that were there when it was made",
                next="change it in place (under torch.no_grad(), or by job.load_state_dict), or make a new job",
            )
        self.guards.look()


def _known_reads(graph: Graph, reads: Reads | None) -> Reads:
    """What a trace has read: told now and kept beside the graph, or as it was told when the graph was traced.

    What is kept are names of attributes, which then count as read of every object. Without any all do.
    """
    if folder() is None:
        return reads or Reads(None)
    about = {"graph": graph.hash, **sources()}
    if reads is not None:
        kept("reads", about, lambda: sorted(reads.names), _strings, _strings)
        return reads

    def unknown() -> list[str]:
        raise LookupError

    try:
        return Reads(kept("reads", about, unknown, _strings, _strings))
    except LookupError:
        return Reads(None)


def _strings(found: Any) -> list[str]:
    return list(map(str, found))


def _autocast() -> tuple[bool, ...]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _fits(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype
