"""What a job's state tells of itself and asks nobody for: boxes in global coordinates that make every tensor once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laminar
from laminar.errors import PlacementError
from laminar.ir.mesh import Mesh, Place
from laminar.ir.sbp import B, NdSbp, Split, check_placement
from laminar.ir.tensor import TensorSpec
from laminar.runtime.comm.shards import shard
from laminar.train.state.shards import shards_of
from tests.support import pipeline_jobs
from tests.support.rank_pool import Ranks
from tests.support.recorded_gpt import _batches, _loss
from tests.support.small_job import adamw, batches, counted, gap, mean, net


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, NdSbp]:
    """A shape, a mesh and a placement that is legal there: uneven, packed, copied, on one to three axes."""
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=0, max_size=3)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh({f"axis{i}": n for i, n in enumerate(sizes)})
    one = (
        st.just(B)
        if not shape
        else st.one_of(st.just(B), st.builds(Split, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3, 4])))
    )
    nd = tuple(draw(one) for _ in sizes)
    try:
        check_placement(TensorSpec(shape, "f32"), nd, mesh.sizes, "drawn")
    except PlacementError:
        nd = tuple(Split(p.dim) if isinstance(p, Split) else B for p in nd)
    return shape, mesh, nd


@settings(max_examples=300)
@given(placements())
def test_owned_boxes_make_each_tensor_exactly_once(case: tuple[tuple[int, ...], Mesh, NdSbp]) -> None:
    """Whatever the placement: each element lies in one box of one first owner, and every owner says the same of it."""
    shape, mesh, nd = case
    whole = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    place = Place(tuple(range(10, 10 + mesh.ranks)), mesh)
    seen = torch.zeros(shape, dtype=torch.int64)
    said: dict[Any, set[tuple[int, ...]]] = {}
    for rank in place.ranks:
        mine = shard(whole, nd, mesh, rank - 10)
        covered = 0
        for s in shards_of("parameter", "w", "", shape, nd, place, rank, mine):
            assert rank in s.owners and torch.equal(s.tensor, whole[s.index] if shape else whole)
            said.setdefault(tuple((i.start, i.stop) for i in s.index), set()).add(s.owners)
            covered += s.tensor.numel()
            if rank == s.owners[0]:
                seen[s.index] += 1
        assert covered == mine.numel(), "every element of the rank's own part is in a box"
    assert bool((seen == 1).all())
    assert all(len(owners) == 1 for owners in said.values())


# --- real ranks ----------------------------------------------------------------------------------


def refused(*args: Any, **kwargs: Any) -> Any:
    """Stands for a collective that must not run."""
    raise AssertionError("a collective ran")


def told(job: Any) -> list[tuple[Any, ...]]:
    """The shards of a job, with every collective of torch out of order."""
    names = ["all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "batch_isend_irecv"]
    names += ["all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv", "isend"]
    with (
        mock.patch.multiple(dist, **dict.fromkeys(names, refused)),
        mock.patch.object(type(job.gather), "whole", refused),
    ):
        found = list(job.state.shards())
    return [(s.kind, s.name, s.entry, s.shape, s.index, s.tensor.clone(), s.owners, job.rank) for s in found]


def put_together(everyone: list[list[tuple[Any, ...]]]) -> dict[tuple[str, str, str], Tensor]:
    """Whole tensors from the shards of all ranks, each box from its first owner; each element exactly once."""
    out: dict[tuple[str, str, str], Tensor] = {}
    seen: dict[tuple[str, str, str], Tensor] = {}
    for said in everyone:
        for kind, name, entry, shape, index, tensor, owners, rank in said:
            assert rank in owners
            key = (kind, name, entry)
            whole = out.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))
            if rank == owners[0]:
                whole[index] = tensor
                seen.setdefault(key, torch.zeros(shape, dtype=torch.int64))[index] += 1
            else:
                first = next(s for s in everyone[owners[0]] if s[:3] == key and s[4] == index)
                assert torch.equal(first[5], tensor), "owners of a box have the same numbers"
    assert all(bool((n == 1).all()) for n in seen.values())
    return out


def same_as_dicts(everyone: list[Any]) -> set[str]:
    """Assert that shards come to what the state dicts say; the kinds that there were."""
    whole = put_together([shards for shards, *_ in everyone])
    _, weights, average, optimizer, names = everyone[0]
    listed = {n: t for (kind, n, _), t in whole.items() if kind in ("parameter", "buffer")}
    for name, tensor in listed.items():
        assert torch.equal(tensor, weights[name])
    assert {id(t) for t in weights.values()} and set(listed) <= set(weights)
    for (kind, name, entry), tensor in whole.items():
        if kind == "optimizer":
            assert torch.equal(tensor, optimizer["state"][names.index(name)][entry])
        elif kind == "average":
            assert torch.equal(tensor.to(weights[name].dtype), average[name])
    entries = {(names[i], k) for i, s in optimizer["state"].items() for k, v in s.items() if isinstance(v, Tensor)}
    assert entries == {(n, e) for kind, n, e in whole if kind == "optimizer"}
    return {kind for kind, _, _ in whole}


def _job(plan: Any, loss: Any = counted) -> Any:
    model, data = net(), batches(2, holes=True)
    names = [n for n, _ in model.named_parameters()]
    job = laminar.parallelize(model, loss, adamw(model), batch=data[0], plan=plan, device="cpu", ema=0.9, check=False)
    for batch in data:
        job.step(batch)
    out = told(job), job.state_dict(), job.state_dict(ema=True), job.optimizer_state_dict(), names
    job.close()
    return out


@pytest.mark.filterwarnings("ignore:plan=")
@pytest.mark.parametrize("plan", ["data", "zero1", "zero3", "tensor", "ddp"])
def test_shards_of_all_ranks_are_the_state_dicts(two: Ranks, plan: str) -> None:
    """On real ranks, odd sizes and a tied weight included, and nobody was asked for anything."""
    assert same_as_dicts(two.run(_job, plan)) == {"parameter", "buffer", "optimizer", "average"}


def _packed(graph: Any, mesh: Any) -> Any:
    """A packed split of a weight, and another axis across it."""
    return laminar.plans.seeded(
        graph,
        mesh,
        {
            "up.weight": {"tp": laminar.S(0, blocks=2)},
            "down.weight": {"tp": laminar.S(1, blocks=2)},
            "batch.*": {"dp": laminar.S(0)},
        },
    )


def _meshed() -> Any:
    model, data = net(), batches(2)
    names = [n for n, _ in model.named_parameters()]
    mesh = laminar.Mesh({"dp": 2, "tp": 2})
    job = laminar.parallelize(
        model, mean, adamw(model), batch=data[0], plan=_packed, mesh=mesh, device="cpu", ema=0.9, check=False
    )
    for batch in data:
        job.step(batch)
    shards = told(job)
    return (shards, job.state_dict(), job.state_dict(ema=True), job.optimizer_state_dict(), names), max(
        sum(s[1] == n and s[0] == "parameter" for s in shards) for n in names
    )


def test_packed_weights_are_told_as_several_boxes(four: Ranks) -> None:
    """`S(0, blocks=2)` gives a rank a piece of each block, and each is a box with an index of its own."""
    everyone = four.run(_meshed)
    same_as_dicts([found for found, _ in everyone])
    assert max(boxes for _, boxes in everyone) == 2


def _staged(tied: bool) -> Any:
    made = pipeline_jobs.model(tied)
    names = [n for n, _ in made.named_parameters()]
    job: Any = laminar.parallelize(
        made, _loss, pipeline_jobs.make, batch=_batches(1)[0], plan=pipeline_jobs.planned(made), ema=0.9, check=False
    )
    for batch in _batches(2):
        job.step(batch)
    out = told(job), job.state_dict(), job.state_dict(ema=True), job.optimizer_state_dict(), names
    job.close()
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_stages_tell_of_their_own_tensors_only(two: Ranks, tied: bool) -> None:
    """What two stages share is told by the one that is its home; together it is the whole model."""
    assert {"parameter", "optimizer", "average"} <= same_as_dicts(two.run(_staged, tied))


def test_state_is_told_apart_from_what_runs_it() -> None:
    """A state holds no process group, no transport and no compiled step: an engine comes and goes around it."""
    model, data = net(), batches(1)
    job: Any = laminar.parallelize(model, mean, adamw(model), batch=data[0], device="cpu", check=False)
    inside = {type(v).__module__ for v in vars(job.state).values()}
    assert not {m for m in inside if m.startswith(("laminar.runtime", "laminar.train.engine", "laminar.train.world"))}


def _resumed(tmp: str, plan: str) -> tuple[float, float]:
    model, data = net(), batches(4)
    job = laminar.parallelize(model, mean, adamw(model), batch=data[0], plan=plan, device="cpu", ema=0.9, check=False)
    for batch in data[:2]:
        job.step(batch)
    job.save(tmp)
    again = net(seed=3)
    other = laminar.parallelize(
        again, mean, adamw(again), batch=data[0], plan="data", device="cpu", ema=0.9, check=False
    )
    other.resume(tmp)
    for batch in data[2:]:
        job.step(batch)
        other.step(batch)
    return gap(job.state_dict(), other.state_dict()), gap(job.state_dict(ema=True), other.state_dict(ema=True))


def test_averages_survive_a_checkpoint_into_another_layout(two: Ranks, tmp_path: Any) -> None:
    """Weights and their moving average go on as if nothing had happened."""
    for weights, averages in two.run(_resumed, str(tmp_path / "it"), "zero3"):
        assert weights < 1e-9 and averages < 1e-6
