"""What the search keeps to be quick: whatever is shared, cached or cut short gives what the long way gives.

Parts of a micro-batch that cells have in common, stages that are alike, placements solved once for several plans, cuts
found by a sliding window: each beside its slow counterpart. And large models: the search must find what people use,
or better.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import laminar
from laminar.forecast import pipeline_step
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import Split
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.cost_by_depth import PART_NAMES, Share
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.pipeline_recompute import pipelined
from laminar.planner.estimate.score_cell import CellScorer
from laminar.planner.estimate.score_placement import scored
from laminar.planner.estimate.stage_cost import parts_of, share_of
from laminar.planner.search.best_first.search import find
from laminar.planner.space.cell import Cell, cells
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Placer, Style, styles
from laminar.staging import balance
from laminar.staging.stage_plans import pipeline
from tests.support.marks import slow
from tests.support.traced_models import traced
from tests.support.zoo import recipe


def model_of(layers: int = 6, batch: int = 16, d: int = 64, spec: str = "8xh100", **more: Any) -> Model:
    """A small GPT on a cluster."""
    return Model(traced(layers, batch=batch, d=d), Request(Cluster.preset(spec), **more))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inner", ["tensor", "sequence"])
def test_parts_of_one_data_parallel_rank_are_those_of_all(inner: str, recompute: bool) -> None:
    """Cells with the same samples on a rank share what was measured: a mesh with a data axis gives the same."""
    model = model_of()
    cell, style = Cell(2, 4, 1, 2, 2, recompute), Style(("data", inner))
    alone = parts_of(model, share_of(model, cell, style, 1))
    both = parts_of(model, Share(4, cell.mesh, style, 0, recompute, 4))
    assert alone.share.mesh.ranks == 2 and both.share.mesh.ranks == 4
    for name in PART_NAMES:
        mine, theirs = getattr(alone, name), getattr(both, name)
        assert mine.each == pytest.approx(theirs.each, rel=1e-6), name
        # A data axis has one small exchange more: the number of labels that count.
        assert mine.ends == pytest.approx(theirs.ends, rel=1e-3, abs=5e-5 if name.endswith("_s") else 0), name


@pytest.mark.parametrize(
    ("cell", "memory_bytes"),
    [
        (Cell(2, 8, 1, 2, 2), None),
        (Cell(2, 8, 3, 4, 1), None),
        (Cell(2, 4, 1, 2, 2, True), 162e6),
        *[
            slow(Cell(*cell), memory)
            for *cell, memory in ((4, 8, 1, 2, 1, None), (2, 4, 1, 2, 2, True, None), (4, 8, 1, 2, 1, True, 157e6))
        ],
    ],
)
def test_pipelines_are_estimated_near_to_what_they_are_simulated_to_take(
    cell: Cell, memory_bytes: float | None
) -> None:
    """An estimate that is far off would have the search simulate the wrong plans; with some blocks recomputed too."""
    model = model_of(layers=12, batch=64, d=512, memory_bytes=memory_bytes)
    style = Style.of(cell.mesh, "tensor")
    score = scored(model, cell, style, 1)
    assert (0 < sum(score.again) < 12) == (memory_bytes is not None)
    graph = model.whole(cell.micro_batches)
    _, ran, _ = pipelined(model, score, graph, model.unfolded(score))
    assert score.seconds == pytest.approx(ran.seconds, rel=0.12)
    assert score.peak_bytes == pytest.approx(max(ran.peaks), rel=0.15)


def test_one_more_micro_batch_is_under_way_where_there_is_room_for_it() -> None:
    """It hides the hops of virtual stages; where it is what does not fit any more, the plan does without."""
    cell = Cell(4, 8, 3, 2, 1)

    def made(memory_bytes: float | None) -> tuple[Model, Staged, StagedPrediction]:
        model = model_of(layers=12, batch=64, d=512, memory_bytes=memory_bytes)
        score = scored(model, cell, Style(("data",)), 1)
        return model, *pipelined(model, score, model.whole(8), model.unfolded(score))[:2]

    model, staged, ran = made(None)
    without = predict_staged(model.whole(8), replace(staged, stash=1.0), model.request.cluster)
    assert max(ran.peaks) > max(without.peaks) and ran.seconds < without.seconds
    for memory, wanted in ((max(ran.peaks), ran), (max(ran.peaks) - 1, without)):
        _, staged, ran = made(memory)
        assert max(ran.peaks) == max(wanted.peaks) <= memory
        assert (staged.stash > 1) == (wanted is not without)
    score = scored(model, Cell(2, 8, 1, 4, 1), Style(("data",)), 1)
    assert pipelined(model, score, model.whole(8), model.unfolded(score))[0].stash == 1.0  # one stage at a place


def test_a_guess_from_the_share_itself_is_its_score() -> None:
    """Guesses and scores are the same formula; only parts of other shares make them differ."""
    model = model_of(batch=32)
    cell = Cell(2, 4, 1, 2, 2)
    ways = [Style(("data", "tensor")), Style(("data", "free"), "once")]
    scores = [scored(model, cell, style, zero).seconds for style in ways for zero in (0, 1)]
    looker = CellScorer(model)
    assert looker.guess(cell) == pytest.approx(min(scores))
    # Twice the samples in one go: from the parts at hand, in proportion.
    other = looker.guess(Cell(2, 2, 1, 2, 2))
    assert other > 0 and len(model.parts) == len(ways)


def test_stages_that_are_alike_are_priced_once_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every part priced by itself, a step takes the same seconds and bytes."""
    graph = micro(traced(8, batch=16, d=64), 4)
    cluster = Cluster.preset("8xh100")
    plan = pipeline(graph, 4, 4, 1, presets.tensor_parallel(graph, laminar.Mesh({"dp": 1, "tp": 2})))
    asked = []
    schedule = pipeline_step.part_schedule
    monkeypatch.setattr(pipeline_step, "part_schedule", lambda *a: asked.append(a) or schedule(*a))
    once = predict_staged(graph, plan, cluster)
    shared, asked[:] = len(asked), []
    monkeypatch.setattr(pipeline_step, "outline", lambda program: (id(program),))
    apart = predict_staged(graph, plan, cluster)
    assert shared < len(asked) == 8
    assert once.part_s == apart.part_s and once.peaks == apart.peaks and once.seconds == apart.seconds


def test_state_in_pieces_counts_in_pieces_in_stages() -> None:
    """ZeRO 1 in a pipeline: a rank updates, and keeps state for, its own piece only."""
    graph = micro(traced(4, batch=16, d=64), 4)
    cluster, mesh = Cluster.preset("8xh100"), laminar.Mesh({"dp": 4})
    plan = presets.data_parallel(graph, mesh)
    whole, pieces = (
        predict_staged(graph, pipeline(graph, 2, 4, 1, presets.in_pieces(graph, plan, zero)), cluster)
        for zero in (0, 1)
    )
    state = 8 * sum(i.spec.numel for i in graph.of_kind("param")) / 2
    saved = max(whole.peaks) - max(pieces.peaks)
    assert saved == pytest.approx(state * 3 / 4, rel=0.15)


@pytest.mark.parametrize("spec", ["8xh100", "16xh100"])
def test_placements_solved_once_for_several_plans_are_the_same(spec: str) -> None:
    """What plans have in common on their first axes is kept; each comes out as if nothing were."""
    model = model_of(spec=spec)
    graph, mesh = model.small(1, 3), laminar.Mesh({"dp": model.request.cluster.devices // 4, "tp": 4})
    kept = Placer(model.machine(mesh), mesh)
    for style in styles(mesh, True, True, lean=True):
        assert kept.plan(graph, style).hash == Placer(model.machine(mesh), mesh).plan(graph, style).hash, style


def test_cuts_of_places_that_are_alike_are_those_of_any_places() -> None:
    """The quick way to cut: as few bytes as the exact one, and no stage slower than it allows."""
    rng = random.Random(0)
    for _ in range(300):
        ops = rng.randint(1, 12)
        stages = rng.randint(1, ops)
        work = [rng.choice([0.0, 1.0, 2.0, rng.random()]) for _ in range(ops)]
        total = np.concatenate(([0.0], np.cumsum(work)))
        sent = np.array([float(rng.randint(0, 5)) for _ in range(ops + 1)])
        allowed = np.array([True, *(rng.random() < 0.7 for _ in range(ops - 1)), True])
        if allowed[1:-1].sum() < stages - 1:
            allowed[:] = True
        slack = rng.choice([1.01, 1.05, 1.3])
        slow, quick = (
            f(t, sent, allowed, stages, slack)
            for f, t in ((balance._cuts, [total] * stages), (balance._even_cuts, total))
        )
        assert len(set(quick)) == stages and quick[0] == 0 and all(allowed[k] for k in quick)
        assert sum(sent[quick[1:]]) == pytest.approx(sum(sent[slow[1:]]))
        worst = max(np.diff(total[[*quick, ops]]))
        assert worst <= slack * balance.slowest_s(total[np.flatnonzero(allowed)], stages) * (1 + 1e-6)


def test_micro_batches_leave_every_rank_whole_samples() -> None:
    """A batch of three times a power of two is cut so that ranks get equal shares, down to one sample each."""
    found = cells(Request(Cluster.preset("64xh100")), 96, 24, True)
    for cell in found:
        assert 96 % cell.micro_batches == 0
        assert cell.plain or 96 // cell.micro_batches % cell.dp == 0, cell
    assert any(c.stages > 1 and c.dp == 2 and c.micro_batches == 48 for c in found)  # one sample for each rank


def large(layers: int, batch: int) -> Graph:
    """Layers of the size of GPT-3's."""
    made = recipe("gpt.py:tiny")
    import gpt

    config = gpt.Config(layers=layers, d=12288, heads=96, vocab=51200, tokens=2048, batch=batch)
    with torch.device("meta"):
        model = gpt.GPT(config).to(torch.bfloat16)
    ids = torch.zeros((batch, 2048), dtype=torch.int64, device="meta")
    return laminar.capture(model, made.loss, {"ids": ids, "target": ids})


@pytest.mark.slow
def test_what_is_found_for_a_large_model_beats_what_people_use() -> None:
    """Layers of GPT-3 on 1,024 devices: it fits, and no preset with tensor parallel in nodes and stages is faster."""
    graph = large(16, 768)
    request = Request(Cluster.preset("1024xh100"), memory_bytes=30e9, budget_s=8)
    found = find(graph, request)
    best = found.finals[0]
    assert best.peak_bytes <= 30e9 and isinstance(found.plan, laminar.ir.plans.staged.Staged)
    model = Model(graph, request)
    for stages, micro_batches, again in ((8, 48, True), (8, 48, False), (4, 24, True), (16, 96, True)):
        cell = Cell(stages, micro_batches, 1, 1024 // 8 // stages, 8, again)
        plan = model.unfolded(Score(cell, Style(("data", "tensor")), 1, None, 0.0, 0.0))
        whole = model.whole(micro_batches)
        ran = predict_staged(
            whole, pipeline(whole, stages, micro_batches, 1, plan, couple="microbatch"), request.cluster
        )
        if max(ran.peaks) <= 30e9:
            assert best.seconds <= ran.seconds * 1.005, cell


def test_in_pieces_of_the_sequence_the_residual_stream_is_made_and_read_in_pieces() -> None:
    """Norms and sums then do only a part, and what forward keeps is less."""
    model = model_of(d=128)
    graph, mesh = model.small(1, 3), Mesh({"tp": 4})
    plans = {style: model.planned(1, mesh, Style((style,))) for style in ("tensor", "sequence")}
    stream = presets.residual_stream(graph)
    assert stream
    for ref in stream:
        dims = len(graph.specs[ref].shape)
        for node in graph.nodes:
            for read, nd in zip(node.ins, plans["sequence"].ops[node.name].ins, strict=True):
                assert read != ref or nd == (Split(dims - 2),), (node.name, nd)
        if ref.name in model.fold.at:
            assert plans["sequence"].ops[ref.name].outs[ref.index] == (Split(dims - 2),)
    cell = Cell(2, 4, 1, 1, 4)
    tensor, sequence = (parts_of(model, share_of(model, cell, Style((style,)), 1)) for style in ("tensor", "sequence"))
    assert sequence.kept_bytes.each < 0.8 * tensor.kept_bytes.each


def test_with_micro_batches_weights_may_stay_whole_where_that_moves_less() -> None:
    """Gradients are added up once a step, so that many micro-batches share it: tokens are split, not weights."""
    model = Model(traced(6, batch=64, d=256, tokens=256), Request(Cluster.preset("8xh100")))
    cell, style = Cell(2, 64, 1, 1, 4), Style(("free",), "once")
    found = parts_of(model, share_of(model, cell, style, 1))
    tensor = parts_of(model, share_of(model, cell, Style(("tensor",)), 1))
    assert found.sums_bytes.each > 0.9 * found.grad_bytes.each  # terms on all ranks, to be added up at the end
    assert found.weight_bytes.each > 3 * tensor.weight_bytes.each
    assert found.forward_s.each + found.backward_s.each < tensor.forward_s.each + tensor.backward_s.each
