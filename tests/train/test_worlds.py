"""Worlds: one after the other in the same processes, and a run that goes on from one into the next."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laminar
from laminar.train.job.job import Job
from laminar.train.job.pipeline_job import StagedJob
from laminar.train.options import JobOptions
from laminar.train.world import World
from tests.support import pipeline_jobs
from tests.support.rank_pool import CONTEXT, Ranks
from tests.support.recorded_gpt import _batches, _loss
from tests.support.small_job import adamw, batches, gap, mean, net, plain

OPTIONS = JobOptions(device="cpu", ema=0.9, check=False)


def trained(world: World, plan: Any, steps: int = 2) -> tuple[float, float]:
    """How far a job in a world ends from plain PyTorch, in weights and in losses."""
    data, model = batches(steps), net()
    other = copy.deepcopy(model)
    job = Job(model, mean, adamw(model), data[0], plan, OPTIONS, world=world)
    losses = [job.step(b).loss for b in data]
    want = plain(other, mean, adamw(other), data)
    return gap(job.state_dict(), other.state_dict()), max(abs(a - b) for a, b in zip(losses, want, strict=True))


def _rejoined(rank: int, port: int, said: Any) -> None:
    """A process that meets the other through its environment, as under torchrun, leaves, and meets it again."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    found = []
    for plan in ("zero3", "tensor", "data"):
        world = World("cpu")
        assert world.joined and dist.is_initialized() and world.ranks == (0, 1)
        found.append((world.generation, world.told("number", lambda: len(found)), *trained(world, plan)))
        world.close()
        assert not dist.is_initialized()
    data, model = batches(4), net()
    other = copy.deepcopy(model)
    job = Job(model, mean, adamw(model), data[0], "zero3", OPTIONS)
    for batch in data[:2]:
        job.step(batch)
    job.close()
    job.rebuild(World("cpu"), "tensor", data[0])
    for batch in data[2:]:
        job.step(batch)
    plain(other, mean, adamw(other), data)
    found.append((job.peers.generation, 3, gap(job.state_dict(), other.state_dict()), 0.0))
    job.close()
    found.append(_renumbered(rank))
    said.put((rank, found))
    said.close()
    said.join_thread()
    os._exit(0)


def _renumbered(rank: int) -> tuple[int, int, float, float]:
    """A job with stages whose two processes change numbers: each goes on as what the other was, with its state."""
    data, model = _batches(4), pipeline_jobs.model(True)
    job = StagedJob(model, _loss, pipeline_jobs.make, data[0], staged({"stages": ["blocks.1"]}), OPTIONS)
    for batch in data[:2]:
        job.step(batch)
    before = job.hash()
    job.close()
    os.environ.update(RANK=str(1 - rank), LOCAL_RANK=str(1 - rank))
    job.rebuild(World("cpu"), staged({"stages": ["blocks.1"]}), data[0], ranks=[1, 0])
    assert job.rank == 1 - rank and job.hash() == before
    for batch in data[2:]:
        job.step(batch)
    other = pipeline_jobs.model(True)
    plain(other, _loss, pipeline_jobs.make(other.parameters()), data)
    weights = gap(job.state_dict(), other.state_dict())
    job.close()
    return job.peers.generation, 4, weights, 0.0


def test_processes_leave_a_world_and_make_the_next() -> None:
    """Each has a number of its own, and nothing that ranks have left for each other in one is taken for the next's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store  # a port that is free
    said = CONTEXT.Queue()
    children = [CONTEXT.Process(target=_rejoined, args=(r, port, said), daemon=True) for r in range(2)]
    for child in children:
        child.start()
    try:
        everyone = dict(said.get(timeout=400) for _ in children)
    finally:
        for child in children:
            child.join(20)
            child.kill()
    for found in everyone.values():
        assert [g for g, *_ in found] == [0, 1, 2, 4, 6], "3 and 5 were worlds that the jobs made for themselves"
        assert [n for _, n, *_ in found] == [0, 1, 2, 3, 4]
        assert all(weights < 1e-9 and losses < 1e-10 for _, _, weights, losses in found)


def _guests() -> list[Any]:
    first = World("cpu")
    found: list[Any] = [trained(first, "zero3")]
    first.close()
    assert dist.is_initialized(), "it was the script's"
    second = World("cpu")
    assert second.generation == first.generation + 1
    return [*found, trained(second, "tensor")]


def test_worlds_in_a_process_group_of_the_script(two: Ranks) -> None:
    """They come and go; the process group stays."""
    for found in two.run(_guests):
        assert all(weights < 1e-9 and losses < 1e-10 for weights, losses in found)


def _among_some(stages: bool) -> Any:
    """A world of every other rank; the rest have one of their own."""
    pairs = [[1, 3], [0, 2]]
    groups = [dist.new_group(p) for p in pairs]
    mine = next(i for i, p in enumerate(pairs) if dist.get_rank() in p)
    world = World("cpu", group=groups[mine])
    assert world.size == 2 and world.ranks == tuple(pairs[mine])
    if not stages:
        return [trained(world, p) for p in ("zero3", "tensor")]
    made = pipeline_jobs.model(True)
    plan = pipeline_jobs.planned(made)
    job = StagedJob(made, _loss, pipeline_jobs.make, _batches(1)[0], plan, OPTIONS, world)
    for batch in _batches(2):
        job.step(batch)
    other = pipeline_jobs.model(True)
    plain(other, _loss, pipeline_jobs.make(other.parameters()), _batches(2))
    return [(gap(job.state_dict(), other.state_dict()), 0.0)]


@pytest.mark.parametrize("stages", [False, True])
def test_a_world_is_whatever_ranks_it_is_handed(four: Ranks, stages: bool) -> None:
    """Two worlds of two ranks each at the same time: nobody looks the others up in torch's default group."""
    for found in four.run(_among_some, stages):
        assert all(weights < 1e-9 and losses < 1e-10 for weights, losses in found)


def _went_on(plans: list[Any]) -> tuple[float, float, float]:
    data, model = batches(2 * len(plans)), net()
    other = copy.deepcopy(model)
    whole = laminar.parallelize(
        other, mean, adamw(other), batch=data[0], plan="data", device="cpu", ema=0.9, check=False
    )
    world = World("cpu")
    job = Job(model, mean, adamw(model), data[0], meshed(plans[0]), OPTIONS, world=world)
    for i, batch in enumerate(data):
        if i and i % 2 == 0:
            next_world = World("cpu")
            job.rebuild(next_world, meshed(plans[i // 2]), data[0])
            world.close()
            world = next_world
            assert job.peers is world and job.steps == i and job.mesh.ranks == world.size
        job.step(batch)
        whole.step(batch)
    moments = [
        (a[k], b[k])
        for a, b in zip(
            job.optimizer_state_dict()["state"].values(), whole.optimizer_state_dict()["state"].values(), strict=True
        )
        for k in ("exp_avg", "exp_avg_sq")
    ]
    return (
        gap(job.state_dict(), whole.state_dict()),
        gap(job.state_dict(ema=True), whole.state_dict(ema=True)),
        max(float((a - b).abs().max()) for a, b in moments),
    )


def meshed(plan: str) -> Any:
    """A plan by name, or one for a mesh with two axes."""
    if plan != "two axes":
        return plan
    graph = laminar.capture(net(), mean, batches(1)[0])
    return laminar.plans.tensor_parallel(graph, laminar.Mesh({"dp": 2, "tp": 2}))


@pytest.mark.parametrize("plans", [["zero3", "tensor"], ["data", "zero1", "zero3", "data"], ["tensor", "zero1"]])
def test_an_engine_is_rebuilt_around_the_same_state(two: Ranks, plans: list[str]) -> None:
    """In the next generation, under another plan on another mesh: weights, averages and moments of one run."""
    for weights, averages, moments in two.run(_went_on, plans):
        assert weights < 1e-9 and averages < 1e-6 and moments < 1e-9


@pytest.mark.parametrize("plans", [["two axes", "zero3"], ["zero1", "two axes", "data"]])
def test_state_goes_to_a_mesh_with_other_axes(four: Ranks, plans: list[str]) -> None:
    """From one axis to two and back."""
    for weights, averages, moments in four.run(_went_on, plans):
        assert weights < 1e-9 and averages < 1e-6 and moments < 1e-9


def staged(options: dict[str, Any]) -> Any:
    """A pipeline of a GPT with a tied head; plans inside are named."""
    inner = {
        "data": laminar.Mesh({"dp": 2}),
        "zero3": partial(laminar.plans.zero, mesh=laminar.Mesh({"dp": 2}), stage=3),
        "tensor": laminar.Mesh({"tp": 2}),
    }
    micro = options.get("microbatches", pipeline_jobs.MICRO)
    graph = laminar.capture(
        pipeline_jobs.model(True), _loss, {k: v[: len(v) // micro] for k, v in _batches(1)[0].items()}
    )
    return laminar.plans.pipeline(
        graph, **{"microbatches": micro, **options, "inner": inner.get(options.get("inner", ""))}
    )


def _stages_went_on(plans: list[dict[str, Any]]) -> tuple[float, float, float, int]:
    """A job with stages, rebuilt after every other step: gaps in weights, averages and moments, and what is held."""
    data, made = _batches(2 * len(plans)), pipeline_jobs.model(True)
    job = StagedJob(made, _loss, pipeline_jobs.make, data[0], staged(plans[0]), OPTIONS)
    for i, batch in enumerate(data):
        if i and i % 2 == 0:
            world = World("cpu")
            job.rebuild(world, staged(plans[i // 2]), data[0])
            assert job.peers is world and job.steps == i
        job.step(batch)
    other = pipeline_jobs.model(True)
    optimizer = pipeline_jobs.make(other.parameters())
    averages = {n: p.detach().float().clone() for n, p in other.named_parameters()}

    def average() -> None:
        for n, p in other.named_parameters():
            averages[n].lerp_(p.detach().float(), 0.1)

    for batch in data:
        plain(other, _loss, optimizer, [batch])
        average()
    state = job.optimizer_state_dict()["state"]
    moments = max(
        float((state[i][k] - s[k]).abs().max())
        for i, s in optimizer.state_dict()["state"].items()
        for k in ("exp_avg", "exp_avg_sq", "step")
    )
    ema = job.state_dict(ema=True)
    average_gap = max(float((ema[n] - a).abs().max()) for n, a in averages.items())
    held = sum(p.numel() for p in made.parameters())
    return gap(job.state_dict(), other.state_dict()), average_gap, moments, held


CUTS: list[list[dict[str, Any]]] = [
    [{"stages": ["blocks.1"]}, {"stages": ["blocks.0"]}],
    [{"stages": 2, "virtual": 2}, {"stages": 2, "microbatches": 2}, {"stages": 2}],
]


@pytest.mark.parametrize("plans", CUTS)
def test_stages_are_cut_anew_around_the_same_state(two: Ranks, plans: list[dict[str, Any]]) -> None:
    """Ranks take over weights, moments and averages that they did not hold before."""
    found = two.run(_stages_went_on, plans)
    for weights, averages, moments, _ in found:
        assert weights < 1e-9 and averages < 1e-6 and moments < 1e-9
    whole = sum(p.numel() for p in pipeline_jobs.model(True).parameters())
    assert sum(held for *_, held in found) < 1.5 * whole, "what a rank gave away was freed"


@pytest.mark.parametrize(
    "plans",
    [
        [{"stages": 4}, {"stages": 2, "inner": "zero3"}, {"stages": 2, "inner": "tensor"}],
        [{"stages": 2, "inner": "tensor"}, {"stages": 2, "inner": "data"}, {"stages": 4}],
    ],
)
def test_stages_on_other_meshes_take_the_state_along(four: Ranks, plans: list[dict[str, Any]]) -> None:
    """From four places to two and back, whole and in shards."""
    for weights, averages, moments, _ in four.run(_stages_went_on, plans):
        assert weights < 1e-9 and averages < 1e-6 and moments < 1e-9
