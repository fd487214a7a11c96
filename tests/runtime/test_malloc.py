"""Freed memory stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from laminar.runtime.code.malloc import keep_freed_memory
if {keep}:
    assert keep_freed_memory()

def step():
    kept = [torch.ones(3 << 20) for _ in range(4)]  # 12 MB each
    return sum(float(t[0]) for t in kept)

for _ in range(6):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_that_frees_and_takes_the_same_gets_no_new_pages() -> None:
    """New pages are cleared and mapped one by one, which costs a step more than many of its ops."""
    faults = {}
    for keep in (False, True):
        code = CODE.format(keep=keep)
        # What the C library does by default depends on what was freed before; this is its first default, made to last.
        eager = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240, env=eager
        )
        faults[keep] = int(done.stdout)
    assert 5 * faults[True] < faults[False], "five steps of 48 MB are 61,440 pages"


GIVEN = """
import torch
from laminar.runtime.code.malloc import give_back_freed_memory, keep_freed_memory

def held_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

assert keep_freed_memory()
some = [torch.ones(1 << 18) for _ in range(200)]  # 1 MB each
del some
before = held_mb()
give_back_freed_memory()
print(before - held_mb())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_what_won_t_come_again_is_given_back() -> None:
    """Kept, it would be missing to other processes for as long as this one lives."""
    done = subprocess.run([sys.executable, "-c", GIVEN], capture_output=True, text=True, check=True, timeout=240)
    assert float(done.stdout) > 150
