"""Two timelines side by side: what differs comes out first, and what does not differ is zero."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from laminar.cost.timeline_diff import DiffRow, compare, render
from laminar.errors import TimelineError
from laminar.ir.timeline import Span, Timeline

MS = 1_000_000
LINES = [  # name, family, phase, ms
    ("mm_0", "matmul", "forward", 5),
    ("gelu_0", "dear", "forward", 2),
    ("mm_1", "matmul", "backward", 6),
    ("sum_0", "sums", "backward", 1),
]


def step(
    kind: str = "simulated", slow: dict[str, int] | None = None, ranks: int = 2, waits: dict[int, int] | None = None
) -> Timeline:
    """A small step: four ops, an all-reduce through shared memory, an update. `slow` adds milliseconds by name."""
    slow, spans = slow or {}, []
    for rank in range(ranks):
        at = 0

        def add(name: str, ms: int, what: str, rank: int = rank, **fields: Any) -> None:
            nonlocal at
            end = at + (ms + slow.get(name, 0)) * MS
            spans.append(Span(name, "compute", rank, at, end, what, **fields))
            at = end

        add("batch", 1, "host", phase="batch")
        for name, family, phase, ms in LINES:
            add(name, ms, "compute", family=family, phase=phase)
        moved = {"op": "box.all_reduce", "family": "all_reduce", "phase": "backward"}
        add("box_0/start", 1, "communication", cause="P(sum) to B for gradients", **moved)
        if waits and waits.get(rank):
            add("box_0/wait", waits[rank], "wait", cause="P(sum) to B for gradients", **moved)
        add("box_0/finish", 2, "communication", cause="P(sum) to B for gradients", **moved)
        add("optimizer", 3, "compute", family="optimizer", phase="update")
    return Timeline(kind, ranks, tuple(spans), meta={"axes": {"box_0": "dp"}})


def test_a_timeline_compared_with_itself_differs_nowhere() -> None:
    """Any difference here would be made by the comparison."""
    one = step()
    found = compare(one, one)
    tables = (found.parts, found.phases, found.lines, (found.step, found.exposed, found.hidden))
    assert all(r.difference_ns == 0 and r.share in (0.0, 1.0) for t in tables for r in t)
    assert not found.only_predicted and not found.only_measured
    assert {r.name for r in found.lines} == {s.name for s in one.spans}


@pytest.mark.parametrize(
    ("slow", "part", "phase"),
    [
        ({"mm_0": 4, "gelu_0": 1}, "matmul", "forward"),
        ({"gelu_0": 4, "mm_0": -1}, "dear", "forward"),
        ({"box_0/finish": 4, "mm_1": 1}, "all_reduce[dp]  P(sum) to B for gradients", "backward"),
        ({"optimizer": 4}, "optimizer", "update"),
        ({"batch": 4}, "host", ""),
    ],
)
def test_what_was_slowed_down_comes_out_first(slow: dict[str, int], part: str, phase: str) -> None:
    """The order of the rows is what a reader acts on."""
    found = compare(step(), step("measured", slow))
    name = max(slow, key=lambda n: abs(slow[n]))
    assert found.parts[0].name == part and found.lines[0].name == name
    assert found.parts[0].difference_ns == found.lines[0].difference_ns == 4 * MS
    assert found.step.difference_ns == sum(slow.values()) * MS
    assert found.parts[0].share == pytest.approx(4 / sum(map(abs, slow.values())))
    if phase:
        assert found.phases[0].name == phase


def test_parts_add_up_to_the_step_on_both_sides() -> None:
    """Otherwise time could be lost between the rows, and the difference with it."""
    found = compare(step(), step("measured", {"mm_0": 3, "sum_0": 2}, waits={0: 2, 1: 2}))
    for side in ("predicted_ns", "measured_ns"):
        assert sum(getattr(r, side) for r in found.parts) == getattr(found.step, side)
    assert sum(r.share for r in found.parts) == pytest.approx(1.0)


def test_waits_stand_by_rank_beside_the_mean() -> None:
    """A rank that waits is the trace of another that is late; a mean would hide which."""
    late = Span("late", "compute", 1, 0, 4 * MS, "host")
    run = step("measured", waits={0: 4})
    shifted = [replace(s, start=s.start + 4 * MS, end=s.end + 4 * MS) if s.rank else s for s in run.spans]
    found = compare(step(), replace(run, spans=(*shifted, late)))
    by_rank = {s.rank: s for s in found.skew}
    assert by_rank[0].measured_waiting_ns == 4 * MS and by_rank[0].late_ns == 0
    assert by_rank[1].measured_waiting_ns == 0 and by_rank[1].late_ns == 4 * MS
    waiting = next(r for r in found.parts if r.name == "waiting")
    assert (waiting.predicted_ns, waiting.measured_ns) == (0, 2 * MS)


def test_a_rank_that_stands_for_others_is_compared_with_all_of_them() -> None:
    """A simulation writes equal ranks once, and unequal ones with `@rank` behind their names."""
    both = step()
    once = replace(both, spans=tuple(s for s in both.spans if s.rank == 0), stands_for={0: (0, 1)})
    assert compare(once, step("measured")).lines[0].difference_ns == 0
    apart = tuple(replace(s, name=f"{s.name}@1") if s.rank else s for s in both.spans)
    found = compare(replace(both, spans=apart), step("measured"))
    assert not found.only_predicted and all(r.difference_ns == 0 for r in found.lines)


def test_what_has_no_partner_is_listed_as_such() -> None:
    """Kernels of a GPU know their family but not their line: the parts still meet, the lines can't."""
    kernels = [
        Span("nvjet_tst_128x256", "compute", 0, 0, 11 * MS, "compute", family="matmul"),
        Span("triton_poi_fused_gelu", "compute", 0, 11 * MS, 14 * MS, "compute", family="dear"),
    ]
    alone = step(ranks=1)
    found = compare(alone, Timeline("measured", 1, tuple(kernels)))
    assert not found.lines
    assert [r.name for r in found.only_measured] == ["nvjet_tst_128x256", "triton_poi_fused_gelu"]
    assert {r.name for r in found.only_predicted} == {s.name for s in alone.spans}
    matmul = next(r for r in found.families if r.name == "matmul")
    assert (matmul.predicted_ns, matmul.measured_ns) == (11 * MS, 11 * MS)


def test_communication_behind_compute_is_hidden_and_no_part_of_the_step() -> None:
    """Otherwise a plan that overlaps would look as slow as one that does not."""
    whole = step(ranks=1)
    behind = Span("box_0", "communication:dp", 0, 0, 6 * MS, "communication", op="box.all_reduce")
    found = compare(replace(whole, spans=(*whole.spans, behind)), replace(whole, kind="measured"))
    assert found.hidden.predicted_ns == 5 * MS and found.hidden.measured_ns == 0  # 1 ms of it while the host works
    assert found.step.difference_ns == 0


def test_steps_of_different_worlds_are_refused() -> None:
    """Their lines have the same names and nothing else in common."""
    with pytest.raises(TimelineError, match="of 2 ranks, the second of 4"):
        compare(step(), step("measured", ranks=4))
    with pytest.raises(TimelineError, match="second timeline has no spans"):
        compare(step(), Timeline("measured", 2, ()))


def test_the_comparison_is_text_for_people_and_plain_data_for_programs() -> None:
    """`laminar diff` prints one or the other; both must say the same."""
    found = compare(step(), step("measured", {"mm_0": 4}, waits={0: 1}))
    data = json.loads(json.dumps(found.to_json()))
    assert data["parts"][0] == {
        "name": "matmul",
        "predicted_ns": 11 * MS,
        "measured_ns": 15 * MS,
        "share": round(found.parts[0].share, 4),
        "detail": "compute",
        "difference_ns": 4 * MS,
    }
    text = render(found, most=2)
    first = next(line for line in text.splitlines() if line.startswith("  matmul"))
    assert first.split() == ["matmul", "11.000", "15.000", "+4.000", f"{found.parts[0].share:.1%}"]
    assert "and 6 more" in text and "rank 0" in text and "all_reduce[dp]" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_row_says_how_much_longer_reality_took() -> None:
    """The sign is the one readers expect: slower than predicted is positive."""
    assert DiffRow("mm", 3, 5).difference_ns == 2
