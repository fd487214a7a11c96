"""What one rank did in a step: a stamp of the clock behind every line, and spans made of the stamps later.

A step that is not recorded pays nothing: while a transport has a *tape*, `module.Step` runs a second copy of
its generated code in which every line is followed by `t = perf_counter_ns()`. That is one call into C and one
local variable (about 50 ns; a Python function that appends to a list costs twice as much), and the end of
one line is the start of the next. The copy shares the exchanges, buckets and constants of the first, so results
are the same to the last bit.

Lines of a collective are told apart further where ranks share memory. While a program runs, its yards stamp
what they wait for and what they announce: the time asleep becomes a span of kind "wait", copying and reducing one
of kind "communication", and which announcement ended which wait is known exactly. Other transports move bytes in
the background; there `start` and `finish` are recorded, and how much of a `finish` was spent waiting for a late rank
follows from the others' clocks (`align.py`).

Around the program, a job marks what it has just done: `batch`, `norm`, `gradients`, `optimizer`, `host`.

A loader's thread tells when it loaded (`runtime/pipeline/loader.py`): that stands beside the step, on the lane `host`.

Not covered: other threads than these two, memory over time, and GPUs, whose kernels are recorded
by `gpu_tape.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from laminar.cost.ops.families import family_of
from laminar.ir.program import Instr, Program
from laminar.ir.timeline import Span
from laminar.runtime.comm.shm_arena import Yard

now = time.perf_counter_ns
"""The clock of all recordings: on Linux one for all processes of a machine."""
LEAST_NS = 1000
"""A wait, or a piece of a collective, that is shorter is left in the span it lies in."""
Key = tuple[Hashable, ...]
"""What ranks announce to each other: a group, what it is about, and how often it has happened."""

MARKS = {
    "batch": Span("batch", "compute", 0, 0, 0, "host", phase="batch"),
    "loading": Span("load/wait", "compute", 0, 0, 0, "wait", phase="load", cause="the next batch was not loaded"),
    "host": Span("host", "compute", 0, 0, 0, "host", phase="host"),
    "late": Span("late", "compute", 0, 0, 0, "host", phase="host", cause="this rank began the step after another"),
    "forward": Span("forward", "compute", 0, 0, 0, "compute", family="model", phase="forward"),
    "backward": Span("backward", "compute", 0, 0, 0, "compute", family="model", phase="backward"),
    "pipe": Span("pipe", "compute", 0, 0, 0, "compute", family="stages", phase="forward"),
    "norm": Span(
        "norm", "compute", 0, 0, 0, "compute", family="gradients", phase="update", cause="norm of the gradient"
    ),
    "gradients": Span("gradients", "compute", 0, 0, 0, "compute", family="gradients", phase="update"),
    "optimizer": Span("optimizer", "compute", 0, 0, 0, "compute", family="optimizer", phase="update"),
}
"""What a job may say it has just done. All ranks meet in a `norm`."""


def line_span(instr: Instr, part: str) -> Span:
    """The span of a line, without its times; `part` is start or finish for a collective, else empty."""
    name = f"{instr.name}/{part}" if part else instr.name
    if part:
        known = {"kind": "communication", "family": instr.kind, "cause": instr.reason, "bytes": instr.bytes}
    else:
        known = {"kind": "compute", "family": "fused" if instr.op == "fused.part" else family_of(instr.op)}
    return Span(name, "compute", 0, 0, 0, op=instr.op, module=instr.module, phase=instr.phase, **known)  # type: ignore[arg-type]


@dataclass
class Recordable:
    """Code of a program with its stamps: called like the program, gives outputs and one stamp more than lines."""

    run: Callable[..., tuple[list[Tensor], Sequence[int]]]
    spans: list[Span]
    """One for each line that is stamped, without times."""
    members: list[tuple[int, ...] | None]
    """For lines of a collective, the ranks that take part."""
    yards: dict[Yard, tuple[int, ...]]
    """Memory that ranks share, and which ranks."""
    quiet: frozenset[str]
    """Collectives that can't tell what they wait for, by name."""
    axes: dict[str, str]
    """For each collective, the axes it runs over."""


def stamped(module: fx.GraphModule, program: Program, rank: int) -> Recordable:
    """A copy of a program's code that stamps every line; nodes know their line as `meta["line"]`."""
    by_name = {i.name: i for i in program.instrs}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    stamps: list[fx.Node] = []
    lines: list[tuple[Instr, str]] = []
    for node in module.graph.nodes:
        if node.op != "placeholder" and not stamps:
            stamps.append(graph.call_function(now))
        if node.op == "output":
            (outs,) = fx.map_arg(node.args, lambda n: copies[n])
            graph.output((outs, tuple(stamps)))
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        name, part = node.meta.get("line", ("", ""))
        if name:
            stamps.append(graph.call_function(now))
            lines.append((by_name[name], part))
    kept = {n.target: attrgetter(n.target)(module) for n in module.graph.nodes if n.op == "get_attr"}
    exchanges = {i.name: kept[f"{i.name}_x"] for i, part in lines if part == "start"}
    return described(fx.GraphModule(kept, graph, "Recorded"), program, rank, lines, exchanges)


def described(
    run: Callable[..., Any], program: Program, rank: int, lines: Sequence[tuple[Instr, str]], exchanges: dict[str, Any]
) -> Recordable:
    """Code that stamps these lines, with what is known about them."""
    mesh, coords = program.mesh, program.mesh.coords(rank)
    members = [mesh.group(i.box.axes, coords) if part else None for i, part in lines]
    groups = {i.name: g for (i, part), g in zip(lines, members, strict=True) if part == "start" and g is not None}
    found = {name: _yard(x) for name, x in exchanges.items()}
    yards = {y: groups[name] for name, y in found.items() if y is not None}
    quiet = frozenset(name for name, y in found.items() if y is None)
    axes = {i.name: program.axis_names(i) for i, part in lines if part}
    return Recordable(run, [line_span(i, part) for i, part in lines], members, yards, quiet, axes)


def _yard(exchange: Any) -> Yard | None:
    """The yard an exchange goes through, if it does."""
    yard = getattr(exchange, "yard", None) or getattr(getattr(exchange, "area", None), "yard", None)
    return yard if isinstance(yard, Yard) else None


@dataclass
class Told:
    """A step as one rank tells it, by its own clock."""

    spans: list[Span]
    posts: dict[Key, int] = field(default_factory=dict)
    """When it announced what."""
    awaited: dict[int, Key] = field(default_factory=dict)
    """Spans that could begin only when the others had announced this."""
    flights: dict[int, Key] = field(default_factory=dict)
    """Finishing spans that were blocked until the others had announced this, or by the transfer itself."""
    begun: dict[Key, int] = field(default_factory=dict)
    """When it began to announce what takes a while to announce; by the time it is done, the others may have it."""
    beside: list[Span] = field(default_factory=list)
    """What another thread of the rank did meanwhile."""

    @property
    def start(self) -> int:
        """When the step began on this rank."""
        return self.spans[0].start

    @property
    def end(self) -> int:
        """When it ended."""
        return max(s.end for s in self.spans)


@dataclass
class _Taken:
    """Stamps of one step, in the order they were taken."""

    begun: int
    marks: list[tuple[str, int] | tuple[Recordable, int, Sequence[int]]] = field(default_factory=list)
    """A mark and when; or a program, its number within the recording, and its stamps."""
    waits: list[tuple[int, int, Key]] = field(default_factory=list)
    posts: list[tuple[int, Key]] = field(default_factory=list)
    beside: list[Span] = field(default_factory=list)


class Tape:
    """Stamps of the steps that a rank makes while a recording runs. It never sees another rank."""

    def __init__(self, rank: int, world: int = 1, limit: int | None = None) -> None:
        """`limit`: how many steps to record; later ones run as if there were no tape."""
        self.rank, self.everyone, self.limit = rank, tuple(range(world)), limit
        self._steps: list[_Taken] = []
        self._taken: _Taken | None = None
        self._programs: dict[int, int] = {}
        self.axes: dict[str, str] = {}
        """Over which axes each collective ran."""

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return len(self._steps)

    @property
    def active(self) -> bool:
        """Whether a step is being recorded right now."""
        return self._taken is not None

    def begin(self) -> None:
        """A step begins."""
        if self.limit is None or len(self._steps) < self.limit:
            self._taken = _Taken(now())

    def waited(self, since: int) -> None:
        """A step that has just begun had waited for its batch since then; waiting is a part of it."""
        taken = self._taken
        if taken is not None and taken.begun - since >= LEAST_NS:
            taken.marks.append(("loading", taken.begun))
            taken.begun = since

    def loaded(self, name: str, loads: Callable[[int, int], list[tuple[int, int]]]) -> None:
        """What a loader did beside the step so far; `loads` gives it between two moments."""
        if self._taken is not None:
            self._taken.beside = [
                Span(name, "host", self.rank, a, b, "host", "load", family="load", phase="load", source="measured")
                for a, b in loads(self._taken.begun, now())
            ]

    def end(self) -> None:
        """It has ended."""
        if self._taken is not None:
            self.mark("host")
            self._steps.append(self._taken)
            self._taken = None

    def drop(self) -> None:
        """It has failed: what was recorded of it is forgotten."""
        self._taken = None

    def mark(self, name: str) -> None:
        """Everything since the last mark, or the last line of a program, was `name`."""
        if self._taken is not None:
            self._taken.marks.append((name, now()))

    def run(self, code: Recordable, *inputs: Any) -> list[Tensor]:
        """Run a program and keep its stamps; only while a step is recorded."""
        taken = self._taken
        assert taken is not None
        number = self._programs.setdefault(id(code), len(self._programs))
        with contextlib.ExitStack() as stack:
            for yard, members in code.yards.items():
                stack.enter_context(_listening(yard, (number, members), taken))
            outs, stamps = code.run(*inputs)
        taken.marks.append((code, number, stamps))
        self.axes.update(code.axes)
        return outs

    def told(self) -> list[Told]:
        """The steps as spans."""
        return [_told(t, self.rank, self.everyone) for t in self._steps]


@contextlib.contextmanager
def _listening(yard: Yard, key: Key, taken: _Taken) -> Iterator[None]:
    """Stamp what a yard waits for and what it announces, as long as the block runs."""
    wait, post, waits, posts = yard.wait, yard.post, taken.waits, taken.posts

    def timed_wait(column: int, value: int) -> None:
        start = now()
        wait(column, value)
        waits.append((start, now(), (*key, column, value)))

    def timed_post(column: int, value: int) -> None:
        posts.append((now(), (*key, column, value)))
        post(column, value)

    vars(yard).update(wait=timed_wait, post=timed_post)  # on this yard only, and only for now
    try:
        yield
    finally:
        del vars(yard)["wait"], vars(yard)["post"]


def _told(taken: _Taken, rank: int, everyone: tuple[int, ...]) -> Told:
    """Spans of a step from its stamps."""
    out = Told([], posts={key: at for at, key in taken.posts}, beside=taken.beside)
    cuts, at = _Cuts(taken), taken.begun
    seen: dict[tuple[int, str], int] = {}

    def add(span: Span, start: int, end: int) -> None:
        last = out.spans[-1] if out.spans else None
        if last is not None and last.kind == span.kind == "host" and last.name == span.name:
            out.spans[-1] = replace(last, end=end)
        elif end > start:
            out.spans.append(replace(span, rank=rank, start=start, end=end, source="measured"))

    for mark in taken.marks:
        if len(mark) == 2:
            name, end = mark
            if name == "norm" and end > at:
                met: Key = (-1, everyone, name, 0)
                out.posts[met], out.flights[len(out.spans)] = at, met
            add(MARKS[name], at, end)
            at = end
            continue
        code, number, stamps = mark
        add(MARKS["host"], at, stamps[0])
        for span, members, start, end in zip(code.spans, code.members, stamps, stamps[1:], strict=False):
            if members is None:
                add(span, start, end)
                continue
            name, _, part = span.name.rpartition("/")
            if name in code.quiet:
                count = seen[number, span.name] = seen.get((number, span.name), 0) + 1
                key: Key = (number, members, name, count)
                if part == "start":
                    out.begun[key], out.posts[key] = start, end
                elif end > start:
                    out.flights[len(out.spans)] = key
                add(span, start, end)
                continue
            for piece, a, b, key_ in cuts.within(span, start, end):
                if key_ is not None:
                    out.awaited[len(out.spans)] = key_
                add(piece, a, b)
        at = stamps[-1]
    return out


class _Cuts:
    """Where lines of collectives fall into waiting and moving."""

    def __init__(self, taken: _Taken) -> None:
        self.waits = [w for w in taken.waits if w[1] - w[0] >= LEAST_NS]
        self.posts = [at for at, _ in taken.posts]

    def within(self, span: Span, start: int, end: int) -> Iterator[tuple[Span, int, int, Key | None]]:
        """Pieces of a span, in order, with what each had to wait for; the wait itself is a piece of its own."""
        name = span.name.rpartition("/")[0]
        waits = self._take(self.waits, end, lambda w: w[0])
        cuts = [at for at in self._take(self.posts, end, lambda at: at) if start < at < end]
        at, key = start, None
        for a, b, what in [*waits, (end, end, ())]:
            a = at if b > a and a - at < LEAST_NS else a
            for cut in [c for c in cuts if at + LEAST_NS <= c <= a - LEAST_NS]:
                yield span, at, cut, key
                at, key = cut, None
            if a > at:
                yield span, at, a, key
                key = None
            if b > a:
                yield replace(span, name=f"{name}/wait", kind="wait", bytes=0), a, b, key
                at, key = b, what

    @staticmethod
    def _take(items: list[Any], end: int, when: Callable[[Any], int]) -> list[Any]:
        """Remove and give those before `end`."""
        count = next((k for k, item in enumerate(items) if when(item) >= end), len(items))
        out = items[:count]
        del items[:count]
        return out
