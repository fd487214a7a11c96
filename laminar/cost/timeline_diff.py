"""Where prediction and reality part: two timelines side by side, worst first.

Both timelines are cut the same way. Every moment of a rank belongs to one part: ops by family, communication that
nothing hides by collective (kind, axes, cause), waiting, the host (`Timeline.breakdown`). Parts add up to the step,
so their differences add up to the step's, and a part's *share* is its part of all differences, whatever
their signs. Ranks count by the mean; what single ranks waited stands beside it.

Single lines are matched by name: what a name took in the step, all its pieces and micro-batches together. A name that
only one side has is listed as such. A GPU's kernels know their family but not their line, so there only the
parts can be compared.

A transfer that runs in the background is hidden or exposed; only what is exposed is time. What a simulated
rank idles and what a measured one waits are one part, since a simulation writes no waits. Kernels that a
compiler wrote are one family, "fused", whatever they do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from laminar.errors import TimelineError
from laminar.ir.timeline import Span, Timeline

LINE_ENDINGS = ("start", "finish", "wait")
"""What the lines of a collective end in."""
WAITING, HOST_ROW = "waiting", "host"


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One part or line, predicted and measured; the mean rank's nanoseconds."""

    name: str
    predicted_ns: int
    measured_ns: int
    share: float = 0.0
    """Of the sum of all differences of its table."""
    detail: str = ""

    @property
    def difference_ns(self) -> int:
        """Measured less predicted: positive where reality took longer."""
        return self.measured_ns - self.predicted_ns


@dataclass(frozen=True, slots=True)
class Skew:
    """How one rank's step differed from the others'."""

    rank: int
    predicted_waiting_ns: int
    measured_waiting_ns: int
    late_ns: int
    """By how much it began the step after the first rank did."""


@dataclass(frozen=True)
class Comparison:
    """A predicted and a measured step. In every table the worst row is first."""

    predicted: str
    """What kind of timeline the first is: simulated, or measured too."""
    measured: str
    step: DiffRow
    parts: tuple[DiffRow, ...]
    """Families, collectives, waiting and host: what the step is made of."""
    phases: tuple[DiffRow, ...]
    lines: tuple[DiffRow, ...]
    """Names that both have."""
    only_predicted: tuple[DiffRow, ...]
    only_measured: tuple[DiffRow, ...]
    skew: tuple[Skew, ...]
    hidden: DiffRow
    """Communication behind compute: no part of the step, but of the same bytes as what is exposed."""

    @property
    def families(self) -> tuple[DiffRow, ...]:
        """The parts that compute."""
        return tuple(r for r in self.parts if r.detail == "compute")

    @property
    def collectives(self) -> tuple[DiffRow, ...]:
        """The parts that are communication which nothing hides."""
        return tuple(r for r in self.parts if r.detail == "communication")

    @property
    def exposed(self) -> DiffRow:
        """All communication that nothing hides."""
        found = self.collectives
        return DiffRow("exposed communication", sum(r.predicted_ns for r in found), sum(r.measured_ns for r in found))

    def to_json(self) -> dict[str, Any]:
        """Plain data, differences included."""

        def rows(table: Iterable[DiffRow]) -> list[dict[str, Any]]:
            return [{**asdict(r), "difference_ns": r.difference_ns, "share": round(r.share, 4)} for r in table]

        return {
            "predicted": self.predicted,
            "measured": self.measured,
            **{key: rows([getattr(self, key)])[0] for key in ("step", "exposed", "hidden")},
            **{
                key: rows(getattr(self, key)) for key in ("parts", "phases", "lines", "only_predicted", "only_measured")
            },
            "skew": [asdict(s) for s in self.skew],
        }


def compare(sim: Timeline, run: Timeline) -> Comparison:
    """Lay a predicted timeline beside a measured one of the same program."""
    for which, timeline in (("first", sim), ("second", run)):
        if not timeline.spans:
            raise TimelineError(f"the {which} timeline has no spans")
    if sim.ranks != run.ranks:
        raise TimelineError(
            f"the first timeline is of {sim.ranks} ranks, the second of {run.ranks}",
            next="compare steps of the same plan",
        )
    axes = {**_axes(sim), **_axes(run)}
    sides = [_relabelled(t, _family, lambda s: _collective(s, axes)) for t in (sim, run)]
    broken = [t.breakdown() for t in sides]
    parts = _worst(
        [
            *_rows(broken[0]["compute"], broken[1]["compute"], "compute"),
            *_rows(broken[0]["exposed"], broken[1]["exposed"], "communication"),
            *_rows(
                {WAITING: broken[0]["wait"] + broken[0]["idle"]},
                {WAITING: broken[1]["wait"] + broken[1]["idle"]},
                WAITING,
            ),
            *_rows({HOST_ROW: broken[0]["host"]}, {HOST_ROW: broken[1]["host"]}, HOST_ROW),
        ]
    )
    phased = [_relabelled(t, _phase, _phase).breakdown() for t in (sim, run)]
    phases = [_added(b["compute"], b["exposed"]) for b in phased]
    names = [_by_name(t) for t in (sim, run)]
    both = {n: names[0][n] for n in names[0] if n in names[1]}
    alone = [{n: row for n, row in mine.items() if n not in both} for mine in names]
    return Comparison(
        predicted=sim.kind,
        measured=run.kind,
        step=DiffRow("step", sim.step_ns, run.step_ns, 1.0),
        parts=parts,
        phases=_worst(_rows(phases[0], phases[1], "")),
        lines=_worst([DiffRow(n, both[n][0], names[1][n][0], detail=both[n][1]) for n in both]),
        only_predicted=_worst([DiffRow(n, ns, 0, detail=what) for n, (ns, what) in alone[0].items()]),
        only_measured=_worst([DiffRow(n, 0, ns, detail=what) for n, (ns, what) in alone[1].items()]),
        skew=tuple(_skew(sim, run)),
        hidden=DiffRow("hidden communication", *(sum(b["hidden"].values()) for b in broken)),
    )


def base(span: Span) -> str:
    """The line a span belongs to: without the rank a simulation adds, and without the part of a collective."""
    name = _plain(span.name)
    head, _, part = name.rpartition("/")
    return head if part in LINE_ENDINGS else name


def _plain(name: str) -> str:
    """A name without the `@rank` that tells classes of ranks apart."""
    return re.sub(r"@\d+(?=$|/)", "", name)


def _axes(timeline: Timeline) -> dict[str, str]:
    """The axes of collectives, by line: as told, or from the lane of the transfer."""
    lanes = {base(s): s.lane.partition(":")[2] for s in timeline.spans if s.lane.startswith("communication:")}
    return {**lanes, **timeline.meta.get("axes", {})}


def _collective(span: Span, axes: Mapping[str, str]) -> str:
    """Kind, axes and cause of the collective that a span belongs to."""
    kind = span.op[4:] if span.op.startswith("box.") else span.family or span.name
    where = axes.get(base(span), "")
    return f"{kind}{f'[{where}]' if where else ''}{f'  {span.cause}' if span.cause else ''}"


def _family(span: Span) -> str:
    family = span.family or span.op or span.name
    return "fused" if family.startswith("fused.") else family


def _phase(span: Span) -> str:
    return span.phase or ("update" if span.name == "optimizer" or span.family == "optimizer" else "other")


def _relabelled(timeline: Timeline, family: Callable[[Span], str], cause: Callable[[Span], str]) -> Timeline:
    """The timeline with families and causes named anew, so that its breakdown is by these names."""

    def labelled(s: Span) -> Span:
        kind = HOST_ROW if s.family == HOST_ROW else s.kind  # a simulation has what the host does on the compute lane
        return replace(s, family=family(s), cause=cause(s), kind=kind)

    return replace(timeline, spans=tuple(map(labelled, timeline.spans)))


def _rows(predicted: Mapping[str, int], measured: Mapping[str, int], detail: str) -> list[DiffRow]:
    names = dict.fromkeys([*predicted, *measured])
    return [DiffRow(n, predicted.get(n, 0), measured.get(n, 0), detail=detail) for n in names]


def _added(*maps: Mapping[str, int]) -> dict[str, int]:
    out: dict[str, int] = {}
    for one in maps:
        for key, ns in one.items():
            out[key] = out.get(key, 0) + ns
    return out


def _worst(rows: list[DiffRow]) -> tuple[DiffRow, ...]:
    """The largest difference first, each with its share of all."""
    total = sum(abs(r.difference_ns) for r in rows) or 1
    rows = [replace(r, share=abs(r.difference_ns) / total) for r in rows]
    return tuple(sorted(rows, key=lambda r: (-abs(r.difference_ns), r.name)))


def _by_name(timeline: Timeline) -> dict[str, tuple[int, str]]:
    """What each name took on the mean rank, and what it is. Waits are no line's own."""
    weights = {r: len(timeline.stands_for.get(r, (r,))) for r in timeline.written}
    total = sum(weights.values())
    sums: dict[str, list[Any]] = {}
    for s in timeline.spans:
        if s.kind == "wait":
            continue
        row = sums.setdefault(_plain(s.name), [0, s.family or s.kind])
        row[0] += (s.end - s.start) * weights[s.rank]
    return {n: (ns // total, what) for n, (ns, what) in sums.items()}


def _skew(sim: Timeline, run: Timeline) -> Iterable[Skew]:
    """Every rank's waiting; predicted, by the rank that stands for it."""
    speaks = {r: by for by, ranks in sim.stands_for.items() for r in ranks}
    waits: dict[int, int] = {}
    for rank in sim.written:
        parts = sim.breakdown(rank)
        waits[rank] = parts["wait"] + parts["idle"]
    for rank in run.written:
        parts = run.breakdown(rank)
        late = sum(s.end - s.start for s in run.spans if s.rank == rank and s.name == "late")
        yield Skew(rank, waits.get(speaks.get(rank, rank), 0), parts["wait"] + parts["idle"], late)


# --- for people ------------------------------------------------------------------------------


def render(comparison: Comparison, most: int = 12) -> str:
    """The comparison as text, at most so many rows a table."""
    c = comparison
    above = c.step.predicted_ns / max(c.step.measured_ns, 1) - 1
    lines = [
        f"a step: {c.predicted} {_ms(c.step.predicted_ns)} ms, {c.measured} {_ms(c.step.measured_ns)} ms; "
        f"the first is {abs(above):.1%} {'longer' if above > 0 else 'shorter'}",
        "the mean rank's milliseconds, worst first",
        "",
    ]
    lines += _table("", [c.step, c.exposed, c.hidden], most, shares=False)
    lines += _table("by family of op", c.families, most)
    lines += _table("by collective, where nothing hides it", c.collectives, most)
    lines += _table("the rest", [r for r in c.parts if r.detail in ("waiting", "host")], most)
    lines += _table("by phase", c.phases, most)
    lines += _table("lines that both have", c.lines, most, detail=True)
    lines += _table("only predicted", c.only_predicted, most, shares=False, detail=True)
    lines += _table("only measured", c.only_measured, most, shares=False, detail=True)
    if len(c.skew) > 1:
        lines.append(f"{'ranks':<56}{'waits, predicted':>18}{'measured':>11}{'began late by':>16}")
        worst = sorted(c.skew, key=lambda s: -abs(s.measured_waiting_ns - s.predicted_waiting_ns))
        for s in worst[:most]:
            lines.append(
                f"  {f'rank {s.rank}':<54}{_ms(s.predicted_waiting_ns):>18}"
                f"{_ms(s.measured_waiting_ns):>11}{_ms(s.late_ns):>16}"
            )
        lines += _more(len(worst), most)
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, rows: Iterable[DiffRow], most: int, shares: bool = True, detail: bool = False) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    out = [f"{title:<56}{'predicted':>11}{'measured':>11}{'difference':>12}" + (f"{'share':>8}" if shares else "")]
    for r in rows[:most]:
        name = f"{r.name}  ({r.detail})" if detail and r.detail and r.detail not in r.name else r.name
        name = name if len(name) <= 53 else f"{name[:50]}..."
        out.append(
            f"  {name:<54}{_ms(r.predicted_ns):>11}{_ms(r.measured_ns):>11}{_ms(r.difference_ns, '+'):>12}"
            + (f"{r.share:>8.1%}" if shares else "")
        )
    return [*out, *_more(len(rows), most), ""]


def _more(count: int, most: int) -> list[str]:
    return [f"  and {count - most} more"] if count > most else []


def _ms(ns: int, sign: str = "") -> str:
    return f"{ns / 1e6:{sign},.3f}"
