"""Torch's operator database: what plain PyTorch can train, Laminar trains to the same numbers or refuses by name.

The list of refusals (tests/suites/op_db_refused.txt) may only shrink: an entry on it that works fails these tests, and
so does one that is refused and not on it.
"""

from __future__ import annotations

import pytest
import torch

from tests.suites.harness import Outcome, against
from tests.suites.op_cases import FORMS, cases, differentiable, entries
from tests.suites.op_db import REFUSED, SAMPLES, listed_entries, outcome_of, swept, tasks
from tests.support.marks import some
from tests.support.rank_pool import Ranks

PARTS = 48
"""Into how many tests a full sweep is cut, for those who run them on many cores."""

FOUND = """cumsum/inplace polygamma.polygamma_n_1/inplace square/inplace arange/out _native_batch_norm_legit/function
    as_strided/function as_strided_scatter/function stft/function istft/function cov/function combinations/function
    index_fill/function index_put/function unsafe_split/function chalf/function svd/complex cauchy/function
    _segment_reduce.lengths/function nn.functional.fractional_max_pool2d/function narrow/function to_sparse/function
    block_diag/function matmul/complex std/complex norm/complex H/complex nanquantile/function
    masked_select/complex linalg.matrix_rank/out lu/out unbind_copy/out resize_as_/function
    native_batch_norm/out linalg.lu_solve/complex""".split()
"""What was once wrong, obscure or refused for no good reason."""
FAMILIES = """add/noncontiguous xlogy/inplace erfinv/method abs/complex amax/noncontiguous cumprod/complex
    sort/noncontiguous gather/function scatter_add/inplace cat/function expand/method where/noncontiguous
    einsum/function addmm/out linalg.solve/complex fft.rfft/out special.bessel_j0/noncontiguous
    special.chebyshev_polynomial_v/out
    nn.functional.conv2d/noncontiguous nn.functional.layer_norm/function nn.functional.batch_norm/function
    nn.functional.scaled_dot_product_attention/function nn.functional.embedding/function
    nn.functional.cross_entropy/function nn.functional.max_pool2d/noncontiguous nn.functional.dropout/inplace
    nn.functional.interpolate.bilinear/function masked.softmax/function signal.windows.hann/function lcm/out
    randn_like/noncontiguous zeros_like/function""".split()
"""Every family of ops, and every form."""


def _samples(task: str) -> int:
    return SAMPLES if task in FOUND else 1


def test_what_was_found_stays_right_and_so_do_all_families() -> None:
    """One task for each kind of mistake the database has shown, and a few of each family; `make sweep` runs all."""
    assert set(FOUND) | set(FAMILIES) <= set(tasks())
    assert {name.rpartition("/")[2] for name in FAMILIES} == set(FORMS)
    assert against(REFUSED, swept([*FOUND, *FAMILIES], samples=_samples)) == []


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", some(2, range(PARTS), "op_db"))
def test_the_whole_database(part: int) -> None:
    """Every entry in every form it has."""
    assert against(REFUSED, swept(tasks()[part::PARTS])) == []


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", some(1, range(8), "op_db compiled"))
def test_a_sample_through_the_compiler(part: int) -> None:
    """Inductor has kernels of its own for most of these ops, and forms of its own for many of ours."""
    assert against(REFUSED, swept(tasks(forms=("function",))[part::64], ways=("compiled",))) == []


def test_nearly_all_differentiable_entries_are_equal() -> None:
    """At most three in a hundred may stand on the list."""
    known = [name for name, entry in entries().items() if differentiable(entry)]
    refused = listed_entries(REFUSED)
    assert refused <= set(entries()), "an entry that torch does not have"
    assert len(refused & set(known)) <= 0.03 * len(known)


def _on_ranks(names: list[str]) -> dict[tuple[str, str], Outcome]:
    torch.set_num_threads(1)
    return {
        (name, "ranks"): outcome_of(case, "ranks")
        for name in names
        for case in cases(*name.rsplit("/", 1), 1)  # type: ignore[arg-type]
    }


def _agreed(ranks: Ranks, names: list[str]) -> list[str]:
    return [problem for found in ranks.run(_on_ranks, names) for problem in against(REFUSED, found)]


@pytest.mark.slow
def test_a_few_on_real_ranks(two: Ranks) -> None:
    """Ranks run generated code, reduce in place and use buffers again, none of which lock-step does."""
    assert _agreed(two, ["fft.rfft/function", "unsafe_split/function", "diagonal/function", "matmul/complex"]) == []


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", some(2, range(8), "op_db on ranks"))
def test_a_sample_on_real_ranks(two: Ranks, part: int) -> None:
    """Data and tensor parallel, and a random plan, two ranks each."""
    assert _agreed(two, tasks(forms=("function", "complex"))[part::48]) == []
