"""Timelines: where the time went adds up, the critical path is a path, and nothing is lost on disk."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from laminar.cost.sim.simulate import simulate, timeline
from laminar.cost.sim.tasks import Load
from laminar.cost.timeline_plot import draw_timelines
from laminar.errors import LaminarError, TimelineError
from laminar.ir.timeline import Span, Timeline
from tests.support.sim_reference import random_load


def labels(load: Load, rng: random.Random) -> list[dict[str, Any]]:
    """Families for what computes, causes for what moves."""
    out: list[dict[str, Any]] = []
    for task in load.tasks:
        kinds = {load.lanes[lane].kind for lane in task.lanes}
        moves = any(kind.startswith("communication") for kind in kinds)
        out.append(
            {"cause": rng.choice(["gradients", "partial sums"]), "bytes": 8, "op": "box.all_reduce"}
            if moves
            else {"family": rng.choice(["matmul", "pointwise"]), "module": "blocks.0", "phase": "forward"}
        )
    return out


def simulated(seed: int, tasks: int = 60) -> Timeline:
    """A random load as a timeline."""
    rng = random.Random(seed)
    load = random_load(rng, tasks)
    return timeline(load, simulate(load), labels(load, rng), memory={0: ((0, 5), (7, 9), (30, 2))})


def span(name: str, rank: int, start: int, end: int, kind: str = "compute", lane: str = "compute", **more: Any) -> Span:
    """A span with less to write."""
    return Span(name, lane, rank, start, end, kind, **more)


def spent(parts: dict[str, Any]) -> int:
    """All that should add up to the step."""
    return (
        sum(parts["compute"].values())
        + sum(parts["exposed"].values())
        + sum(parts[k] for k in ("wait", "host", "idle"))
    )


def test_a_breakdown_worked_out_by_hand() -> None:
    """Compute 0..10 hides half of a transfer 5..15; then a wait, an idle gap, and the host alone."""
    line = Timeline(
        "simulated",
        1,
        (
            span("mm", 0, 0, 10, family="matmul"),
            span("all_reduce", 0, 5, 15, "communication", "communication:dp", cause="gradients"),
            span("all_reduce/finish", 0, 10, 18, "wait"),
            span("launch", 0, 20, 24, "host", "host"),
            span("add", 0, 24, 25, family="pointwise"),
        ),
    )
    assert line.breakdown(0) == {
        "step": 25,
        "compute": {"matmul": 10, "pointwise": 1},
        "exposed": {"gradients": 5},
        "hidden": {"gradients": 5},
        "wait": 3,
        "host": 4,
        "idle": 2,
    }


def test_communication_on_the_compute_lane_is_exposed() -> None:
    """Where a rank itself moves the bytes, nothing hides them."""
    line = Timeline(
        "measured", 1, (span("mm", 0, 0, 4, family="matmul"), span("ar", 0, 4, 9, "communication", cause="gradients"))
    )
    assert line.breakdown()["exposed"] == {"gradients": 5} and line.breakdown()["hidden"] == {}


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_a_breakdown_add_up_to_the_step(seed: int) -> None:
    """On every rank and on the mean rank, to the nanosecond."""
    line = simulated(seed)
    for parts in [line.breakdown(), *(line.breakdown(rank) for rank in line.written)]:
        assert spent(parts) == parts["step"] == line.step_ns
        assert parts["idle"] >= 0


def test_the_mean_rank_is_weighted_by_whom_a_rank_stands_for() -> None:
    """Rank 0 stands for three, rank 3 for itself: 3/4 of the one and 1/4 of the other."""
    spans = (span("a", 0, 0, 100, family="matmul"), span("a", 3, 0, 20, family="matmul"))
    line = Timeline("simulated", 4, spans, stands_for={0: (0, 1, 2), 3: (3,)})
    assert line.breakdown()["compute"] == {"matmul": 80} and line.breakdown()["idle"] == 20


def test_a_rank_that_is_not_written_is_refused_by_name() -> None:
    """A picture of symmetric ranks holds few of them."""
    with pytest.raises(TimelineError, match="rank 7 is not in this timeline"):
        simulated(0).breakdown(7)


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_critical_path_has_no_gap(seed: int) -> None:
    """From tick 0 to the end of the step, each span starts in the tick the one before it ends."""
    line = simulated(seed)
    path = line.critical_path()
    assert path[0].start == 0 and path[-1].end == line.step_ns
    assert all(a.end == b.start for a, b in pairwise(path))


def test_a_measured_critical_path_crosses_to_the_rank_that_came_last() -> None:
    """Rank 0 waits in a collective that rank 1 begins late: what rank 1 did before is to blame."""
    spans = (
        span("mm", 0, 0, 10),
        span("ar/start", 0, 10, 11, "host"),
        span("ar/finish", 0, 11, 45, "wait"),
        span("add", 0, 45, 50),
        span("mm", 1, 0, 40),
        span("ar/start", 1, 40, 41, "host"),
        span("ar/finish", 1, 41, 45, "wait"),
        span("add", 1, 45, 48),
    )
    path = Timeline("measured", 2, spans).critical_path()
    assert [(s.name, s.rank) for s in path] == [
        ("mm", 1),
        ("ar/start", 1),
        ("ar/finish", 0),
        ("add", 0),
    ]


def test_a_measured_critical_path_ends_even_with_spans_of_no_length() -> None:
    """Clocks are coarse: several spans may begin and end in one nanosecond."""
    spans = tuple(span(f"s{i}", 0, 5, 5) for i in range(4))
    assert len(Timeline("measured", 1, spans).critical_path()) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_timeline_survives_the_disk(seed: int, tmp_path: Path) -> None:
    """Equal after saving and loading, spans, memory and all."""
    line = simulated(seed)
    line.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json") == line


def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path) -> None:
    """Missing, not JSON, other JSON, another version, damaged: each says so."""
    path = tmp_path / "x.json"
    with pytest.raises(TimelineError, match="no such timeline"):
        Timeline.load(path)
    good = simulated(0).to_json()
    damaged = {**good, "spans": {**good["spans"], "name": [999_999]}}
    for text, said in [
        ("{", "not JSON"),
        ("{}", "not a timeline"),
        (json.dumps({**good, "version": 99}), "version 99"),
        (json.dumps(damaged), "damaged"),
    ]:
        path.write_text(text)
        with pytest.raises(TimelineError, match=said):
            Timeline.load(path)


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    """And so is a kind nobody knows."""
    with pytest.raises(TimelineError, match=r"'mm' is 'compute', 5\.\.4 ns"):
        Timeline("simulated", 1, (span("mm", 0, 5, 4),))
    with pytest.raises(TimelineError, match="'resting'"):
        Timeline("simulated", 1, (span("mm", 0, 5, 6, "resting"),))
    with pytest.raises(TimelineError, match="'dreamt'"):
        Timeline("dreamt", 1, ())


def test_a_chrome_trace_holds_every_span_on_its_lane() -> None:
    """Complete events in microseconds, a process per rank and a thread per lane, both named."""
    line = simulated(1)
    events = line.to_chrome()["traceEvents"]
    json.dumps(events)
    drawn = [e for e in events if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(drawn) == len(line.spans)
    for event, s in zip(drawn, line.spans, strict=True):
        assert (event["name"], event["pid"], threads[event["pid"], event["tid"]]) == (s.name, s.rank, s.lane)
        assert event["ts"] == s.start / 1000 and event["dur"] == (s.end - s.start) / 1000
    assert len(set(threads)) == len({tid for _, tid in threads})
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [5, 9, 2]
    starts, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert starts == ends


def test_a_picture_shows_all_timelines_and_the_memory(tmp_path: Path) -> None:
    """Two timelines and a memory curve: a PNG that is taller than that of one without memory."""
    pytest.importorskip("matplotlib")
    one, two = simulated(1), simulated(2)
    draw_timelines([one, two], tmp_path / "two.png")
    draw_timelines([Timeline(one.kind, one.ranks, one.spans)], tmp_path / "one.png")
    sizes = []
    for name in ("one", "two"):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(int.from_bytes(data[20:24], "big"))
    assert sizes[1] > sizes[0]


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    """No span, no picture."""
    pytest.importorskip("matplotlib")
    with pytest.raises(LaminarError, match="no span to draw"):
        draw_timelines([Timeline("simulated", 1, ())], tmp_path / "x.png")
