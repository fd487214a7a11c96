"""The graph of a plan as a picture: what is computed, how it lies, what it costs, and where ranks exchange.

Forward ops from top to bottom; views are left out, small ops of one module that lie alike share a box, and weights
stand inside the ops that read them. A box shows how its result lies and what it costs on one rank, alone, forward and
(in brackets) backward; the darker, the more of the work. Arrows on which a tensor changes its placement by way of the
network are drawn in orange and say how. Layers that repeat are drawn once, in a frame that says how often; which stage
has what is listed below. `dot` writes
it for Graphviz, `draw` paints it with matplotlib (`pip install 'laminar-train[picture]'`), which is imported only here.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laminar.errors import LaminarError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import StageWork
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged
from laminar.planner.report.diagram import Arrow, Box, Sketch, sketched
from laminar.planner.report.graph_of_plan import cluster_for, graph_for

BOX_WIDTH, GAP = 2.9, 0.34
"""Of a box and between rows, in inches."""
PALE, DARK, WIRE_COLOR, FRAME_COLOR = (0.93, 0.96, 0.98), (0.28, 0.52, 0.69), "#d9702b", "#8a8f98"
LEGEND = (
    "each op: how its result lies; its time alone on one rank, forward (backward); darker: more of the work. "
    "Arrows: what is read; orange: ranks exchange in forward, and how. Dashed: layers alike, drawn once"
)
TITLE_PT, SMALL_PT = 11.0, 7.5
LETTER = 0.0082
"""Inches that a letter takes on the average, for each point of its size."""


def dot(plan: Planned, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> str:
    """The graph of a plan for Graphviz."""
    sketch = sketched(plan, graph_for(plan, graph), cluster_for(plan, cluster))
    lines = ["digraph plan {", f'  label="{_quoted(sketch.title)}"; labelloc=t; fontname="Helvetica";']
    lines.append('  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];')
    lines.append('  edge [fontname="Helvetica", fontsize=9, color="#555555"];')
    inside = [_dot_box(b, sketch) for b in sketch.boxes.values() if b.layer]
    if inside:
        lines += ["  subgraph cluster_layer {", f'    label="x{sketch.layers}"; style=dashed; color="{FRAME_COLOR}";']
        lines += [f"  {text}" for text in inside] + ["  }"]
    lines += [_dot_box(b, sketch) for b in sketch.boxes.values() if not b.layer]
    for a in sketch.arrows:
        how = f' [label="{_quoted(a.label)}", color="{WIRE_COLOR}", fontcolor="{WIRE_COLOR}"]' if a.label else ""
        lines.append(f'  "{_quoted(a.src)}" -> "{_quoted(a.dst)}"{how};')
    if stages := stage_lines(plan):
        text = "\\l".join(_quoted(line) for line in stages)
        lines.append(f'  stages [shape=note, style=filled, fillcolor=white, label="{text}\\l"];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot_box(box: Box, sketch: Sketch) -> str:
    text = "\\n".join(_quoted(t) for t in (box.title, *box.lines))
    red, green, blue = (round(255 * c) for c in _colour(box, sketch))
    return f'  "{_quoted(box.name)}" [label="{text}", fillcolor="#{red:02x}{green:02x}{blue:02x}"];'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _colour(box: Box, sketch: Sketch) -> tuple[float, float, float]:
    share = math.sqrt((box.seconds + box.backward_s) / sketch.most_s)
    red, green, blue = (p + (d - p) * share for p, d in zip(PALE, DARK, strict=True))
    return red, green, blue


def draw(plan: Planned, path: str | Path, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> None:
    """The graph of a plan as a picture; the kind of file follows from the name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError:
        raise LaminarError("a picture needs matplotlib", next="pip install 'laminar-train[picture]'") from None
    sketch = sketched(plan, graph_for(plan, graph), cluster_for(plan, cluster))
    boxes = list(sketch.boxes.values())
    left, right = min(b.column for b in boxes), max(b.column for b in boxes)
    step = BOX_WIDTH + 0.7
    width = max(7.0, (right - left + 1) * step + 1.2)
    title, legend = _wrapped(sketch.title, width, TITLE_PT), _wrapped(LEGEND, width, SMALL_PT)
    below = [line for text in stage_lines(plan) for line in _wrapped(text, width, SMALL_PT)]
    tops, height = _tops(boxes, 0.05 + 0.2 * len(title) + 0.15 * len(legend))
    figure = Figure(figsize=(width, height + 1.0 + 0.15 * len(below)), dpi=110)
    FigureCanvasAgg(figure)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, width)
    axis.set_ylim(height + 0.8 + 0.15 * len(below), -0.2)
    axis.axis("off")
    shift = (width - (right - left) * step) / 2
    at = {b.name: (shift + (b.column - left) * step, tops[b.row], _tall(b)) for b in boxes}
    for k, line in enumerate(title):
        axis.text(0.25, 0.02 + 0.2 * k, line, fontsize=TITLE_PT, va="center")
    for k, line in enumerate(legend):
        axis.text(0.25, 0.04 + 0.2 * len(title) + 0.15 * k, line, fontsize=SMALL_PT, va="center", color="#555555")
    for k, line in enumerate(below):
        axis.text(0.25, height + 0.2 + 0.15 * k, line, fontsize=SMALL_PT, va="center")
    inside = [b for b in boxes if b.layer]
    if inside:
        _frame(axis, [at[b.name] for b in inside], sketch.layers, FancyBboxPatch)
    for arrow in sketch.arrows:
        _arrow(axis, at, arrow, sketch)
    for b in boxes:
        x, y, tall = at[b.name]
        axis.add_patch(
            FancyBboxPatch(
                (x - BOX_WIDTH / 2, y),
                BOX_WIDTH,
                tall,
                boxstyle="round,pad=0.02,rounding_size=0.08",
                facecolor=_colour(b, sketch),
                edgecolor="#4a5560",
                linewidth=0.8,
                zorder=3,
            )
        )
        size = min(9.0, 9.0 * 34 / len(b.title))
        axis.text(x, y + 0.15, b.title, ha="center", va="center", fontsize=size, weight="bold", zorder=4)
        for k, line in enumerate(b.lines):
            axis.text(x, y + 0.36 + 0.19 * k, line, ha="center", va="center", fontsize=7.5, zorder=4)
    figure.savefig(str(path))


def stage_lines(plan: Planned) -> list[str]:
    """What is where, for a plan with stages; nothing for others."""
    if not isinstance(plan, Staged):
        return []
    known = plan.account.stages or (StageWork(),) * len(plan.stages)
    lines = []
    for s, (stage, about) in enumerate(zip(plan.stages, known, strict=True)):
        ranks = ", ".join(map(str, plan.places[stage.place].ranks[:8]))
        more = ", ..." if len(plan.places[stage.place].ranks) > 8 else ""
        share = f", {about.share:.1%} of the work" if about.share is not None else ""
        lines.append(f"stage {s} at place {stage.place} (ranks {ranks}{more}){share}: {about.modules or ''}")
    return lines


def _wrapped(text: str, width: float, points: float) -> list[str]:
    """A text in lines that fit into so many inches."""
    return textwrap.wrap(text, max(20, int((width - 0.5) / (LETTER * points))))


def _tall(box: Box) -> float:
    return 0.3 + 0.19 * len(box.lines)


def _tops(boxes: Sequence[Box], head: float) -> tuple[dict[int, float], float]:
    """Where each row begins below the head, and where the last one ends."""
    tops, at = {}, head + 0.15
    for row in range(1 + max(b.row for b in boxes)):
        tops[row] = at
        at += max((_tall(b) for b in boxes if b.row == row), default=0.0) + GAP
    return tops, at


def _frame(axis: Any, places: list[tuple[float, float, float]], layers: int, patch: Any) -> None:
    x0, x1 = min(p[0] for p in places) - BOX_WIDTH / 2 - 0.7, max(p[0] for p in places) + BOX_WIDTH / 2 + 0.7
    y0, y1 = min(p[1] for p in places) - 0.12, max(p[1] + p[2] for p in places) + 0.12
    axis.add_patch(
        patch(
            (x0, y0),
            x1 - x0,
            y1 - y0,
            boxstyle="round,pad=0.02,rounding_size=0.1",
            fill=False,
            edgecolor=FRAME_COLOR,
            linestyle="--",
            linewidth=1.2,
            zorder=1,
        )
    )
    axis.text(
        x1 - 0.08, y0 + 0.16, f"x{layers}", ha="right", va="center", fontsize=13, color=FRAME_COLOR, weight="bold"
    )


def _arrow(axis: Any, at: dict[str, tuple[float, float, float]], arrow: Arrow, sketch: Sketch) -> None:
    """Straight to the next row; around the boxes between where there are some."""
    (x0, y0, tall), (x1, y1, _) = at[arrow.src], at[arrow.dst]
    start, end = (x0, y0 + tall + 0.02), (x1, y1 - 0.02)
    apart = sketch.boxes[arrow.dst].row - sketch.boxes[arrow.src].row
    colour = WIRE_COLOR if arrow.label else "#555555"
    bend = 0.0
    if apart > 1:
        start, end = (x0 - BOX_WIDTH / 2 - 0.02, y0 + tall / 2), (x1 - BOX_WIDTH / 2 - 0.02, y1 + 0.15)
        bend = min(0.5, 0.9 / max(0.5, y1 - y0))
    axis.annotate(
        "",
        xy=end,
        xytext=start,
        zorder=2,
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 1.6 if arrow.label else 0.9,
            "connectionstyle": f"arc3,rad={bend:.3f}",
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
    if arrow.label:
        x, y = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        if bend:
            axis.text(x - 0.5, y, arrow.label, fontsize=7.5, color=WIRE_COLOR, rotation=90, ha="center", va="center")
        else:
            axis.text(x + 0.06, y, arrow.label, fontsize=7.5, color=WIRE_COLOR, ha="left", va="center")
