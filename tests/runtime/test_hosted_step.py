"""Programs of logical ranks: the same bits however they are hosted, stacked or not; and close to one device's
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.exact import Exact, Hosting
from laminar.lower.lower import lower
from laminar.placement.logical import logical_plan
from laminar.runtime.exact.hosted_step import HostedStep
from laminar.runtime.exact.hosts import HostedRanks
from tests.support.hosted_runs import ThreadHosts, run_hosted
from tests.support.zoo import Specimen, captured, one_thread, specimen

MODELS = ("gpt.py:tiny", "resnet.py:tiny", "moe.py:tiny", "lstm.py:tiny", "dlrm.py:tiny", "t5.py:tiny", "unet.py:tiny")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    return [k for k in a if not torch.equal(as_bytes(a[k]), as_bytes(b[k]))]


def outcome(one: Specimen, exact: Exact, hosting: Hosting, **how):
    program = lower(one.graph, logical_plan(one.graph, exact))
    return run_hosted(program, hosting, one.inputs, one.constants, sums=exact.sums, **how)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        *((name, exact) for name in MODELS for exact in (Exact(4), Exact(2, 2))),
        ("moe.py:tiny", Exact(2, context=2)),
        ("gpt.py:tiny", Exact(4, sums="integers")),
        ("resnet.py:tiny", Exact(2, 2, sums="integers")),
    ],
    ids=str,
)
def test_any_hosting_gives_the_same_bits(name: str, exact: Exact) -> None:
    one = specimen(name)
    (first,) = outcome(one, exact, Hosting.even(4, 1), stacks=False)
    want = first[0]
    for key, value in want.items():
        torch.testing.assert_close(value.double(), one.want[key].double(), rtol=1e-3, atol=1e-5)
    hostings = [Hosting.even(4, n) for n in (1, 2, 3, 4)] + [Hosting.drawn(4, n, seed) for n, seed in ((2, 5), (3, 1))]
    for hosting in hostings:
        for host, runs in enumerate(outcome(one, exact, hosting)):
            for run, out in enumerate(runs):
                assert not differing(out, want), (hosting.processes, host, run)


@pytest.mark.parametrize("processes", [(0, 1, 1, 0), (1, 0, 0, 1, 1, 1, 0, 0), (0, 1, 1, 2, 2, 0, 1, 0)], ids=str)
def test_units_of_one_process_in_different_slices(processes: tuple[int, ...]) -> None:
    """A convolution in slices gives the gradient of its bias whole: its terms come from lanes of other units each."""
    one, exact = specimen("unet.py:tiny"), Exact(len(processes) // 2, 2)
    (first,) = outcome(one, exact, Hosting.even(exact.ranks, 1), runs=1)
    for runs in outcome(one, exact, Hosting(processes)):
        assert not any(differing(out, first[0]) for out in runs)


def test_small_products_lie_alike_in_memory_wherever_they_are_made() -> None:
    """A bias of two elements stands before a weight: kernels give small products other bits at odd addresses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2), nn.ReLU(), nn.Linear(2, 12))
    made = laminar.Recipe(
        model=lambda: model, loss=lambda m, x: m(x).square().mean(), data=lambda: [torch.randn(32, 8)]
    )
    one, exact = captured(made, "small"), Exact(4)
    (first,) = outcome(one, exact, Hosting.even(4, 1), runs=1)
    for hosting in (Hosting.even(4, 2), Hosting.even(4, 4), Hosting((0, 1, 0, 1))):
        for runs in outcome(one, exact, hosting):
            assert not any(differing(out, first[0]) for out in runs)


def test_most_lines_of_a_gpt_run_for_all_units_at_once() -> None:
    one, stacked = specimen("gpt.py:tiny"), dict[int, int]()

    def seen(host: int, hosts: ThreadHosts, step: HostedStep) -> None:
        stacked[host] = len(step.stacked)

    outcome(one, Exact(4), Hosting.even(4, 1), seen=seen)
    assert stacked[0] > 60


def test_a_unit_s_part_of_its_tokens_is_stacked_with_those_of_the_others() -> None:
    """Rows that are samples times tokens are cut by both axes, and still lie one unit behind the other."""
    one, stacked = specimen("gpt.py:tiny"), dict[int, list[str]]()

    def seen(host: int, hosts: ThreadHosts, step: HostedStep) -> None:
        stacked[host] = [i.op for i in step.program.instrs if i.name in set(step.stacked)]

    outcome(one, Exact(2, context=2), Hosting.even(4, 1), seen=seen)
    assert len(stacked[0]) > 90 and any("mm" in op for op in stacked[0])


def test_a_ring_s_bytes_where_each_process_hosts_a_whole_subtree() -> None:
    """What is sent for gradients is what a ring sends: twice (n - 1) / n of them, but for the small sums."""
    one, sent = specimen("gpt.py:tiny"), dict[int, float]()
    program = lower(one.graph, logical_plan(one.graph, Exact(4)))
    gradients = sum(i.bytes for i in program.collectives)

    def seen(host: int, hosts: ThreadHosts, step: HostedStep) -> None:
        sent[host] = hosts.bytes / 2  # two runs

    run_hosted(program, Hosting.even(4, 2), one.inputs, one.constants, seen=seen)
    whole = sum(o.placed.spec.nbytes for o in program.outputs if o.kind == "grad")
    assert gradients and all(n <= 1.05 * whole for n in sent.values()), (sent, whole)


def test_one_flipped_bit_is_seen() -> None:
    one = specimen("gpt.py:tiny")
    (a,) = outcome(one, Exact(4), Hosting.even(4, 1))
    changed = dict(one.inputs)
    name = next(k for k in changed if "weight" in k)
    flipped = changed[name].clone()
    as_bytes(flipped)[3] ^= 1
    changed[name] = flipped
    program = lower(one.graph, logical_plan(one.graph, Exact(4)))
    (b,) = run_hosted(program, Hosting.even(4, 1), changed, one.constants)
    assert differing(a[0], b[0])


def test_a_run_that_failed_leaves_no_half_of_a_sum() -> None:
    """After an error in the middle the same step object gives the right bits."""
    one = specimen("gpt.py:tiny")
    program = lower(one.graph, logical_plan(one.graph, Exact(4)))
    step = HostedStep(program, HostedRanks(program.mesh, Hosting.even(4, 1)), one.constants)
    given = [one.inputs[i.name] for i in program.inputs]
    want = [t.clone() for t in step(*given)]
    at = next(k for k, line in enumerate(step.lines) if getattr(line, "product", False))
    plain, calls = step.lines[at]._add_product, []

    def failing(*args: object) -> None:
        if len(calls) == 1:
            raise RuntimeError("spoilt")
        calls.append(0)
        plain(*args)

    step.lines[at]._add_product = failing
    with pytest.raises(RuntimeError, match="spoilt"):
        step(*given)
    step.lines[at]._add_product = plain
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(step(*given), want, strict=True))
