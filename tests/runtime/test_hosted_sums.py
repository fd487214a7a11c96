"""One sum over several hosts: the tree's, or that of integers, whatever they have of the terms.

Covered: sums that are gathered and those that change hands in slices, terms that are not finite, hosts without terms.
Sums through shared memory are covered by jobs on real processes (`tests/train/test_exact_job.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.exact import Exact, Hosting
from laminar.runtime.exact.integer_sum import PER_EXPONENT, integer_sum
from laminar.runtime.exact.sums import HostedSum
from laminar.runtime.exact.tree_sum import tree_sum
from tests.support.hosted_runs import Meeting, ThreadHosts

TERMS = 7


def terms_of(numel: int, spoilt: bool) -> list[Tensor]:
    terms = list(torch.randn(TERMS, numel) * torch.randn(numel).mul(3).exp())
    if spoilt:
        for term, at, value in ((1, 5, "inf"), (2, numel // 2, "nan"), (5, numel // 2 + 1, "-inf"), (6, 5, "-inf")):
            terms[term][at] = float(value)
    return terms


def hosted_sum(
    hosting: Hosting, owners: tuple[int, ...], terms: list[Tensor], integers: bool
) -> list[tuple[Tensor, int]]:
    """What each host gets, and the bytes that it handed over."""
    meeting = Meeting(hosting.size)

    def one(process: int) -> tuple[Tensor, int]:
        hosts = ThreadHosts(Exact(hosting.size).mesh, hosting, process, meeting)
        whole = HostedSum(hosts, owners, TERMS, terms[0].numel(), torch.float32, "sum", integers)
        for _ in range(2):
            if whole.partials:
                sums = whole.partial(0, tuple(terms[0].shape))
                for i, owner in enumerate(owners):
                    if owner == process:
                        sums.add(i, terms[i])
            whole.start()
            found = whole.finish().clone()
        return found, hosts.bytes // 2

    return meeting.turns.run([lambda p=p: one(p) for p in range(hosting.size)])  # type: ignore[misc]


@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("numel", [PER_EXPONENT, 1000 * PER_EXPONENT])
@pytest.mark.parametrize("integers", [False, True], ids=["tree", "integers"])
def test_whoever_has_the_terms(integers: bool, numel: int, spoilt: bool) -> None:
    terms, want = terms_of(numel, spoilt), torch.empty(numel)
    if integers:
        integer_sum(terms, want)
    else:
        tree_sum({(i, i + 1): t for i, t in enumerate(terms)}, TERMS, "sum", want)
    assert bool(want.isfinite().all()) is not spoilt
    for owners in ((0,) * 4 + (1,) * 3, (0, 1, 0, 1, 0, 1, 0), (2, 0, 1, 1, 2, 0, 0), (0, 0, 2, 2, 0, 0, 2)):
        hosting = Hosting(tuple(range(max(owners) + 1)))
        for found, _ in hosted_sum(hosting, owners, terms, integers):
            assert torch.equal(as_bytes(found), as_bytes(want)), owners


def test_integers_are_a_ring_s_bytes_for_any_hosting() -> None:
    terms = terms_of(1000 * PER_EXPONENT, False)
    ring = 2 * terms[0].nbytes / 2
    scattered = (0, 1, 0, 1, 0, 1, 0)
    (_, integers), _ = hosted_sum(Hosting((0, 1)), scattered, terms, True)
    (_, tree), _ = hosted_sum(Hosting((0, 1)), scattered, terms, False)
    assert integers <= 1.01 * ring and tree >= 2 * ring
