"""Stages in exact mode: every micro-batch's bits are those of the whole graph, whoever hosts which units of which
stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.exact import Exact, Hosting
from laminar.lower.lower import lower
from laminar.lower.stages.one_order import carriers, one_order
from laminar.lower.stages.stage_programs import Stages, stages
from laminar.placement.logical import logical_plan
from laminar.runtime.comm.tensor_messages import bundled, fills_memory, unbundled
from laminar.staging.logical_stages import logical_stages
from tests.support.hosted_runs import run_hosted, run_stages
from tests.support.zoo import Specimen, one_thread, specimen

UNITS, SLICES = Exact(4, stages=2), Exact(2, 2, stages=3)
FAST = (("gpt.py:tiny", UNITS), ("resnet.py:tiny", UNITS), ("unet.py:tiny", SLICES))
MODELS = ("gpt", "resnet", "t5", "moe", "lstm", "dlrm", "unet", "llama", "bert")
LATER = [(f"{name}.py:tiny", exact) for name in MODELS for exact in (UNITS, SLICES)]
EACH = (*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER if case not in FAST))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def cut(one: Specimen, exact: Exact, micro_batches: int) -> Stages:
    return stages(one.graph, logical_stages(one.graph, exact, micro_batches), finished=True)


def micro_batches(one: Specimen, count: int) -> list[dict[str, Tensor]]:
    """Inputs of so many micro-batches, each with samples of its own order."""
    kinds = {i.name: i.kind for i in one.graph.inputs}
    return [
        {n: x.detach().roll(k, 0) if kinds[n] == "batch" and x.dim() else x.detach() for n, x in one.inputs.items()}
        for k in range(count)
    ]


def alike(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a), as_bytes(b))


def whole_graph(one: Specimen, exact: Exact, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = Exact(exact.units, exact.slices)
    program = lower(one.graph, logical_plan(one.graph, plain))
    (found,) = run_hosted(program, Hosting.even(plain.ranks, 1), feed, one.constants, runs=1)
    return found[0]


@pytest.mark.parametrize(("name", "exact"), EACH)
def test_any_hosting_of_stages_gives_the_bits_of_the_whole_graph(name: str, exact: Exact) -> None:
    """Of a tied weight each stage gives its own term."""
    one, count = specimen(name), 2
    made, feeds = cut(one, exact, count), micro_batches(one, count)
    want = [whole_graph(one, exact, feed) for feed in feeds]
    (alone,) = run_stages(made, exact, Hosting.even(exact.ranks, 1), feeds, one.constants)
    tied = {f"grad:{n}" for n in made.cut.tied}
    assert {key for _, _, key in alone} == set(want[0])
    for (stage, k, key), value in alone.items():
        assert key in tied or alike(value, want[k][key]), (stage, k, key)
    hostings = [Hosting.even(exact.ranks, n) for n in (2, 3, exact.ranks)]
    hostings += [Hosting.drawn(exact.ranks, n, seed) for n, seed in ((2, 5), (3, 1), (5, 3))]
    for hosting in hostings:
        for process, left in enumerate(run_stages(made, exact, hosting, feeds, one.constants)):
            assert left
            for at, value in left.items():
                assert alike(value, alone[at]), (hosting.processes, process, at)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_nothing_stands_before_what_it_needs(count: int) -> None:
    """And a stage has no more micro-batches under way than there are stages from it to the last."""
    made = cut(specimen("t5.py:tiny"), Exact(2, stages=3), count)
    order = one_order([made] * count)
    at = {turn: n for n, turn in enumerate(order)}
    assert len(at) == len(order) == count * len(made.by_name)
    for maker, reader, _ in carriers(made):
        assert all(at[maker.name, k] < at[reader.name, k] for k in range(count))
    for parts in made.parts:
        for n in range(len(order)):
            begun = sum(name == parts[0].name for name, _ in order[: n + 1])
            ended = sum(name == parts[-1].name for name, _ in order[: n + 1])
            assert begun - ended <= len(made.parts) - parts[0].stage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (4, 1, 2), (0, 3)])
def test_a_message_keeps_bits_and_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    turned = x.transpose(0, -1) if x.dim() > 1 else x
    loose = torch.stack([x, x], -1)[..., 0]
    assert x.numel() < 2 or not fills_memory(loose)
    kinds = [(tuple(t.shape), dtype) for t in (x, turned, loose)]
    first, second, third = unbundled(bundled([x, turned, loose]), kinds)
    assert alike(first, x) and alike(second, turned) and alike(third, x)
    assert first.stride() == x.stride() and second.stride() == turned.stride() and third.is_contiguous()
