"""A timeline as a picture: lanes of each rank over time, and memory below.

One row per lane, one colour per family of ops, collectives in warm colours by what causes them, waits
hatched. Several timelines (a simulated and a measured one, say) stand one above the other on the same
time axis, so that a longer step is a longer row. Spans narrower than a pixel are drawn as stretches
of their colour: neighbours of one colour with no visible gap become one bar, so that thousands of spans
stay a small file.

Needs matplotlib (`pip install 'laminar-train[picture]'`), which is imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.errors import LaminarError
from laminar.ir.timeline import Span, Timeline

COOL = ("#2f6f9f", "#4fa3a5", "#7a6fb0", "#5b8c5a", "#9bb8d3", "#8c8c8c", "#3d4f7c", "#a3c4a8")
WARM_COLORS = ("#e07b39", "#c8443c", "#e6b422", "#b5527b", "#8f3b1b")
WAIT_COLOR, HOST_COLOR, OTHER_COLOR = "#ffffff", "#c9c9c9", "#b9c2c9"
WIDTH_PX = 1400
RANKS = 8
"""Written ranks drawn per timeline; more would not be legible."""


def draw_timelines(timelines: Sequence[Timeline], path: str | Path, ranks: int = RANKS) -> None:
    """Write a picture of the timelines, one above the other; the kind of file follows from the name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise LaminarError("a picture needs matplotlib", next="pip install 'laminar-train[picture]'") from None
    lines = [line for line in timelines if line.spans]
    if not lines:
        raise LaminarError("there is no span to draw", next="give a timeline of at least one step")
    colours = _colours(lines)
    unit, per_ns = _unit(max(line.step_ns for line in lines))
    rows = [_rows(line, ranks) for line in lines]
    with_memory = [line for line in lines if any(line.memory.values())]
    heights = [0.42 * len(r) + 0.5 for r in rows] + ([1.7] if with_memory else [])
    legend = _legend(colours)
    bottom = 0.55 + 0.26 * -(-len(legend) // 6)
    height = sum(heights) + 0.55 * len(heights) + bottom + 0.2
    figure = Figure(figsize=(14, height), dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        len(heights),
        1,
        height_ratios=heights,
        hspace=0.55 / (sum(heights) / len(heights)),
        left=0.12,
        right=0.985,
        top=1 - 0.42 / height,
        bottom=(bottom + 0.15) / height,
    )
    axes: list[Any] = []
    for k in range(len(heights)):
        axes.append(figure.add_subplot(grid[k], sharex=axes[0] if axes else None))
    longest = max(line.step_ns for line in lines) * per_ns
    for axis, line, lanes in zip(axes, lines, rows, strict=False):
        _draw_lanes(axis, line, lanes, colours, per_ns, longest)
    if with_memory:
        _draw_memory(axes[-1], with_memory, per_ns)
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False)
    axes[-1].set_xlabel(f"time in {unit}")
    axes[0].set_xlim(0, longest * 1.005)
    figure.legend(handles=legend, loc="lower center", ncols=min(6, len(legend)), frameon=False, fontsize=9)
    figure.savefig(str(path))


def _unit(ns: int) -> tuple[str, float]:
    return ("s", 1e-9) if ns >= 10_000_000_000 else ("ms", 1e-6) if ns >= 100_000 else ("µs", 1e-3)


def _paint(span: Span) -> tuple[str, str]:
    """What a span is coloured by: its kind, and its family or cause."""
    if span.kind == "compute":
        return "compute", span.family or span.op or "other"
    if span.kind == "communication":
        return "communication", span.reason or "transfer"
    return span.kind, span.kind


def _colours(lines: Sequence[Timeline]) -> dict[tuple[str, str], str]:
    """Colours by share of time: the larger a family, the earlier in the palette; the small ones share a grey."""
    shares: dict[tuple[str, str], int] = {}
    for line in lines:
        for span in line.spans:
            shares[_paint(span)] = shares.get(_paint(span), 0) + span.end - span.start
    out, palettes = {}, {"compute": list(COOL), "communication": list(WARM_COLORS)}
    for key in sorted(shares, key=lambda key: (-shares[key], key)):
        if key[0] in palettes:
            out[key] = palettes[key[0]].pop(0) if palettes[key[0]] else OTHER_COLOR
        else:
            out[key] = WAIT_COLOR if key[0] == "wait" else HOST_COLOR
    return out


def _legend(colours: dict[tuple[str, str], str]) -> list[Any]:
    from matplotlib.patches import Patch

    handles, others = [], 0
    for kind in ("compute", "communication", "wait", "host"):
        for (which, name), colour in colours.items():
            if which == kind and colour != OTHER_COLOR:
                hatch = "////" if kind == "wait" else None
                label = f"moves: {name}" if kind == "communication" else name
                handles.append(Patch(facecolor=colour, edgecolor="#777777", linewidth=0.5, hatch=hatch, label=label))
            others += which == kind and colour == OTHER_COLOR
    if others:
        handles.append(
            Patch(facecolor=OTHER_COLOR, edgecolor="#777777", linewidth=0.5, label=f"{others} smaller families")
        )
    return handles


def _rows(line: Timeline, ranks: int) -> list[tuple[int, str]]:
    """(rank, lane), top to bottom."""
    order = {"host": 0, "compute": 1}
    shown = set(line.written[:ranks])
    lanes = {(s.rank, s.lane) for s in line.spans if s.rank in shown}
    return sorted(lanes, key=lambda key: (key[0], order.get(key[1], 2), key[1]))


def _draw_lanes(
    axis: Any,
    line: Timeline,
    rows: list[tuple[int, str]],
    colours: dict[tuple[str, str], str],
    per_ns: float,
    longest: float,
) -> None:
    zero = min(s.start for s in line.spans)
    pixel = max(1, int(longest / per_ns / WIDTH_PX))
    bars: dict[tuple[int, tuple[str, str]], list[list[int]]] = {}
    place = {row: len(rows) - 1 - k for k, row in enumerate(rows)}
    for s in sorted(line.spans, key=lambda s: s.start):
        if (s.rank, s.lane) in place and s.end > s.start:
            stretches = bars.setdefault((place[s.rank, s.lane], _paint(s)), [])
            if stretches and s.start - stretches[-1][1] < pixel:
                stretches[-1][1] = max(stretches[-1][1], s.end)
            else:
                stretches.append([s.start, s.end])
    for (y, key), stretches in bars.items():
        axis.broken_barh(
            [((a - zero) * per_ns, max(b - a, pixel // 2) * per_ns) for a, b in stretches],
            (y - 0.38, 0.76),
            facecolors=colours[key],
            edgecolors="#555555" if key[0] == "wait" else "none",
            linewidth=0.4 if key[0] == "wait" else 0,
            hatch="////" if key[0] == "wait" else None,
        )
    several = len({rank for rank, _ in rows}) > 1
    for k, (rank, _) in enumerate(rows):
        if k and rows[k - 1][0] != rank:
            axis.axhline(len(rows) - 0.5 - k, color="#dddddd", linewidth=0.8)
    names = [(f"rank {rank}  " if several else "") + lane.replace("communication:", "moves ") for rank, lane in rows]
    axis.set_yticks([place[row] for row in rows], names, fontsize=9)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.axvline(line.step_ns * per_ns, color="#222222", linewidth=1)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(_title(line, len({rank for rank, _ in rows})), loc="left", fontsize=11)


def _title(line: Timeline, drawn: int) -> str:
    """Kind, step time, and where the mean rank's time went."""
    parts = line.breakdown()
    step = max(1, parts["step"])
    compute, exposed = sum(parts["compute"].values()), sum(parts["exposed"].values())
    what = f"{line.meta['model']}, " if "model" in line.meta else ""
    ranks = (
        f"{line.ranks} rank" + ("s" if line.ranks != 1 else "") + (f" ({drawn} drawn)" if drawn < line.ranks else "")
    )
    shares = [("compute", compute), ("exposed communication", exposed), ("waiting", parts["wait"])]
    shares += [("host", parts["host"]), ("idle", parts["idle"])]
    said = ", ".join(f"{name} {100 * ns / step:.0f} %" for name, ns in shares if ns / step >= 0.005)
    return f"{what}{line.kind}: step {line.step_ns / 1e6:.2f} ms on {ranks}   ({said})"


def _draw_memory(axis: Any, lines: Sequence[Timeline], per_ns: float) -> None:
    top = max(b for line in lines for curve in line.memory.values() for _, b in curve)
    unit, scale = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20) if top >= 2**20 else ("KiB", 2**10)
    styles = {"simulated": "-", "measured": "--"}
    for k, line in enumerate(lines):
        zero = min(s.start for s in line.spans)
        rank, curve = max(line.memory.items(), key=lambda item: max((b for _, b in item[1]), default=0))
        if curve:
            times = [(t - zero) * per_ns for t, _ in curve] + [line.step_ns * per_ns]
            held = [b / scale for _, b in curve] + [curve[-1][1] / scale]
            label = f"{line.kind}, rank {rank}: peak {max(held):.2f} {unit}"
            axis.step(times, held, styles.get(line.kind, "-"), where="post", color=COOL[k], linewidth=1.4, label=label)
            if k == 0:
                axis.fill_between(times, held, step="post", color=COOL[k], alpha=0.12)
    axis.set_ylim(0, 1.32 * top / scale)
    axis.set_ylabel(unit)
    axis.set_title("memory of the fullest rank", loc="left", fontsize=11)
    axis.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
