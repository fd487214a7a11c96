"""What each rank did when, during one step: simulated or measured, the same type.

A timeline is a list of spans. A span is one thing that took time on one lane of one rank: an op, a
transfer, a wait, work of the host. Times are whole nanoseconds. A simulated timeline knows for each
span the one whose end allowed it to start; a measured one does not, and `critical_path` then follows
the order on the rank, and collectives across ranks.

Symmetric ranks are written once: `stands_for` says which ranks a written one speaks for, and means
are weighted by it. Names are the same on both sides (`mm_3`, `all_reduce_1/finish`, `optimizer`), so
that two timelines can be laid side by side, line by line.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from laminar.errors import TimelineError
from laminar.ir.serial.reading import LARGEST_WHOLE, JsonPart

FORMAT = "laminar.timeline"
TIMELINE_VERSION = 1
KINDS = ("compute", "communication", "wait", "host")
"""In the order in which a moment is given to one of them: what computes hides what moves."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time, on one lane of one rank."""

    name: str
    lane: str
    """`compute`, `host`, or `communication:` and the axes."""
    rank: int
    start: int
    end: int
    kind: str
    """`compute`, `communication`, `wait` or `host`. Communication on the compute lane is never hidden."""
    op: str = ""
    family: str = ""
    module: str = ""
    phase: str = ""
    cause: str = ""
    bytes: int = 0
    source: str = ""
    because: int = -1
    """Index of the span whose end allowed this start; -1 where there is none, or it isn't known."""

    @property
    def beside(self) -> bool:
        """Whether it is no part of the step: a loader or a saver on a thread of its own."""
        return self.lane == "host" and self.phase in ("load", "save")

    @property
    def reason(self) -> str:
        """What transfers are summed up by."""
        return self.cause or self.op


_COLUMNS = tuple(f.name for f in fields(Span))
_TEXT = frozenset(f.name for f in fields(Span) if f.type == "str")


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks."""

    kind: str
    """`simulated` or `measured`."""
    ranks: int
    spans: tuple[Span, ...]
    stands_for: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank written -> ranks it stands for. Empty: each for itself."""
    memory: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Rank -> (ns, bytes in use from then on)."""
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("simulated", "measured"):
            raise TimelineError(f"no timeline is {self.kind!r}", allowed="simulated, measured")
        for s in self.spans:
            if s.kind not in KINDS or s.end < s.start:
                raise TimelineError(f"span {s.name!r} is {s.kind!r}, {s.start}..{s.end} ns", allowed=", ".join(KINDS))

    @cached_property
    def _limits(self) -> tuple[int, int]:
        return min((s.start for s in self.spans), default=0), max((s.end for s in self.spans), default=0)

    @property
    def step_ns(self) -> int:
        """From the first start on any rank to the last end."""
        return self._limits[1] - self._limits[0]

    @property
    def written(self) -> list[int]:
        """The ranks that have spans of their own here."""
        return sorted({s.rank for s in self.spans})

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The top of each memory curve."""
        return {rank: max((b for _, b in curve), default=0) for rank, curve in self.memory.items()}

    # -- where the time went

    def breakdown(self, rank: int | None = None) -> dict[str, Any]:
        """Where the step's time went on one rank, or on the mean rank.

        Each moment belongs to one part: compute if any runs, else a transfer that runs (`exposed`), else
        a wait, else the host, else `idle`. `compute` is given by family, `exposed` by cause, and these
        parts add up to `step` exactly. `hidden` (transfers behind compute, by cause) lies beside the sum; what loads or
        saves beside the step is in none of them.
        """
        if rank is not None:
            return self._breakdown(rank)
        each = {r: self._breakdown(r) for r in self.written}
        weights = {r: len(self.stands_for.get(r, (r,))) for r in each}
        total = sum(weights.values()) or 1
        out: dict[str, Any] = {"step": self.step_ns}
        for part in ("compute", "exposed", "hidden"):
            sums: dict[str, int] = {}
            for r, one in each.items():
                for key, ns in one[part].items():
                    sums[key] = sums.get(key, 0) + weights[r] * ns
            out[part] = {key: ns // total for key, ns in sums.items()}
        for part in ("wait", "host"):
            out[part] = sum(weights[r] * one[part] for r, one in each.items()) // total
        out["idle"] = self.step_ns - _spent(out)
        return out

    def _breakdown(self, rank: int) -> dict[str, Any]:
        mine = [s for s in self.spans if s.rank == rank and s.end > s.start and not s.beside]
        if not mine and rank not in self.written:
            raise TimelineError(f"rank {rank} is not in this timeline", allowed=", ".join(map(str, self.written)))
        order = {kind: k for k, kind in enumerate(KINDS)}
        marks = sorted([(s.start, 1, i) for i, s in enumerate(mine)] + [(s.end, 0, i) for i, s in enumerate(mine)])
        running: list[set[int]] = [set() for _ in KINDS]
        parts: dict[str, dict[str, int]] = {"compute": {}, "exposed": {}, "hidden": {}}
        plain = {"wait": 0, "host": 0}
        now = marks[0][0] if marks else 0
        for at, begins, i in marks:
            past, now = at - now, at
            if past:
                compute, moving, waiting, host = running
                top = min(compute or moving or waiting or host, default=-1)
                if compute:
                    _add(parts["compute"], mine[top].family or mine[top].op or mine[top].name, past)
                    for cause in {mine[k].reason for k in moving}:
                        _add(parts["hidden"], cause, past)
                elif moving:
                    _add(parts["exposed"], mine[top].reason, past)
                elif waiting:
                    plain["wait"] += past
                elif host:
                    plain["host"] += past
            lane = running[order[mine[i].kind]]
            (lane.add if begins else lane.remove)(i)
        out: dict[str, Any] = {"step": self.step_ns, **parts, **plain}
        out["idle"] = self.step_ns - _spent(out)
        return out

    def critical_path(self) -> list[Span]:
        """The spans that the end of the step depends on, first to last.

        Simulated: each span's `because`, from the last end back. Measured: the span before it on the
        same rank; for a wait or a finish, if another rank began that collective later than this one began
        to wait, the last of those beginnings.
        """
        if not self.spans:
            return []
        at = max(
            range(len(self.spans)), key=lambda i: (not self.spans[i].beside, self.spans[i].end, self.spans[i].start, i)
        )
        path, seen = [at], {at}
        step_back = self._known_reason if self.kind == "simulated" else self._likely_reason
        while (at := step_back(at, seen)) >= 0:
            path.append(at)
            seen.add(at)
        return [self.spans[i] for i in reversed(path)]

    def _known_reason(self, at: int, seen: set[int]) -> int:
        reason = self.spans[at].because
        return -1 if reason in seen else reason

    def _likely_reason(self, at: int, seen: set[int]) -> int:
        span = self.spans[at]
        if span.because >= 0 and span.because not in seen:
            return span.because
        if span.kind == "wait" or span.name.endswith("/finish"):
            last = self._last_start.get(span.name.removesuffix("/finish"), at)
            other = self.spans[last]
            if other.rank != span.rank and span.start < other.start < span.end and last not in seen:
                return last
        ends = self._ends.get(span.rank, [])
        for _, k in reversed(ends[: bisect_right(ends, (span.start, len(self.spans)))]):
            if k not in seen:
                return k
        return -1

    @cached_property
    def _ends(self) -> dict[int, list[tuple[int, int]]]:
        out: dict[int, list[tuple[int, int]]] = {}
        for i, s in enumerate(self.spans):
            if not s.beside:
                out.setdefault(s.rank, []).append((s.end, i))
        return {rank: sorted(ends) for rank, ends in out.items()}

    @cached_property
    def _last_start(self) -> dict[str, int]:
        """Collective -> the span of the rank that began it last."""
        out: dict[str, int] = {}
        for i, s in enumerate(self.spans):
            name = s.name.removesuffix("/start")
            if name != s.name and (name not in out or self.spans[out[name]].start < s.start):
                out[name] = i
        return out

    # -- on disk

    def to_json(self) -> dict[str, Any]:
        """Plain data: one column per field, texts as numbers into one list, because spans are many."""
        texts: dict[str, int] = {}

        def column(name: str) -> list[int]:
            values = [getattr(s, name) for s in self.spans]
            return [texts.setdefault(v, len(texts)) for v in values] if name in _TEXT else values

        columns = {name: column(name) for name in _COLUMNS}
        return {
            "format": FORMAT,
            "version": TIMELINE_VERSION,
            "kind": self.kind,
            "ranks": self.ranks,
            "stands_for": {str(r): list(ranks) for r, ranks in self.stands_for.items()},
            "memory": {str(r): [[t for t, _ in curve], [b for _, b in curve]] for r, curve in self.memory.items()},
            "meta": self.meta,
            "texts": list(texts),
            "spans": columns,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        """What `to_json` wrote."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TimelineError("this is not a timeline", next="write one with `laminar simulate -o sim.json`")
        if data.get("version") != TIMELINE_VERSION:
            raise TimelineError(f"timeline of version {data.get('version')}", allowed=f"version {TIMELINE_VERSION}")
        part = JsonPart(data, lambda what: TimelineError(f"this timeline is damaged: {what}"))
        texts = [t.text() for t in part["texts"].rows()]
        columns: list[list[Any]] = []
        for name in _COLUMNS:
            column = part["spans"][name]
            if name in _TEXT:
                columns.append([_entry(v, texts) for v in column.rows()])
            else:
                columns.append([v.whole(-LARGEST_WHOLE) for v in column.rows()])
        if len({len(column) for column in columns}) > 1:
            raise part["spans"].wrong("columns of different lengths")
        reasons = columns[_COLUMNS.index("because")]
        for row, reason in zip(part["spans"]["because"].rows(), reasons, strict=True):
            if not -1 <= reason < len(reasons):
                raise row.wrong(f"{reason}, not the number of a span")
        return cls(
            kind=part["kind"].text(),
            ranks=part["ranks"].whole(1),
            spans=tuple(Span(*row) for row in zip(*columns, strict=True)),
            stands_for={
                _rank(r, c): tuple(v.whole() for v in c.rows()) for r, c in part["stands_for"].fields().items()
            },
            memory={_rank(r, c): _curve(c) for r, c in part["memory"].fields().items()},
            meta=part["meta"].object(),
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise TimelineError("there is no such timeline", at=str(path)) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise TimelineError("this file is not JSON", at=str(path)) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TimelineError(f"{path} is not a timeline", next="write one with `laminar simulate -o sim.json`")
        try:
            return cls.from_json(data)
        except TimelineError as error:
            raise TimelineError(str(error), at=str(path)) from None

    def to_chrome(self) -> dict[str, Any]:
        """A trace for ui.perfetto.dev or chrome://tracing: a process per rank, a thread per lane.

        Arrows follow the critical path where it changes lanes; memory is a counter.
        """
        events: list[dict[str, Any]] = []
        lanes = {(s.rank, s.lane): 0 for s in self.spans}
        for tid, (rank, lane) in enumerate(sorted(lanes, key=lambda key: (key[0], _lane_order(key[1]))), 1):
            lanes[rank, lane] = tid
            events.append(_meta("thread_name", rank, tid, {"name": lane}))
            events.append(_meta("thread_sort_index", rank, tid, {"sort_index": tid}))
        for rank in self.written:
            others = len(self.stands_for.get(rank, (rank,))) - 1
            name = f"rank {rank}" + (f" (and {others} like it)" if others > 0 else "") + f", {self.kind}"
            events.append(_meta("process_name", rank, 0, {"name": name}))
            events.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
        zero = self._limits[0]
        for s in self.spans:
            args = {
                key: value
                for key in ("op", "family", "module", "phase", "cause", "bytes", "source")
                if (value := getattr(s, key))
            }
            events.append(
                {"name": s.name, "cat": s.kind, "ph": "X", "pid": s.rank, "tid": lanes[s.rank, s.lane]}
                | {"ts": (s.start - zero) / 1000, "dur": (s.end - s.start) / 1000, "args": args}
            )
        path = self.critical_path()
        for k, (a, b) in enumerate(pairwise(path)):
            if (a.rank, a.lane) != (b.rank, b.lane):
                common = {"name": "critical path", "cat": "critical path", "id": k}
                for ph, s, at in (("s", a, a.start), ("f", b, b.start)):
                    event = {"ph": ph, "pid": s.rank, "tid": lanes[s.rank, s.lane], "ts": (at - zero) / 1000}
                    events.append(common | event | ({"bp": "e"} if ph == "f" else {}))
        for rank, curve in self.memory.items():
            for at, held in curve:
                event = {"name": "memory", "ph": "C", "pid": rank, "tid": 0, "ts": (at - zero) / 1000}
                events.append(event | {"args": {"bytes": held}})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"kind": self.kind, **self.meta}}

    def __str__(self) -> str:
        return f"{self.kind} step of {self.step_ns / 1e6:.3f} ms: {len(self.spans)} spans on {self.ranks} ranks"


def _entry(part: JsonPart, texts: list[str]) -> str:
    at = part.whole()
    if at >= len(texts):
        raise part.wrong(f"text {at}, of {len(texts)}")
    return texts[at]


def _rank(text: str, part: JsonPart) -> int:
    return part.read(lambda _: int(text))


def _curve(part: JsonPart) -> tuple[tuple[int, int], ...]:
    at, held = ([v.whole(-LARGEST_WHOLE) for v in column.rows()] for column in part.rows(2))
    return part.read(lambda _: tuple(zip(at, held, strict=True)))


def _add(parts: dict[str, int], key: str, ns: int) -> None:
    parts[key or "other"] = parts.get(key or "other", 0) + ns


def _spent(parts: dict[str, Any]) -> int:
    """What adds up to the step, but for `idle`."""
    spent: Iterable[int] = (*parts["compute"].values(), *parts["exposed"].values(), parts["wait"], parts["host"])
    return sum(spent)


def _lane_order(lane: str) -> tuple[int, str]:
    return {"host": 0, "compute": 1}.get(lane, 2), lane


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
