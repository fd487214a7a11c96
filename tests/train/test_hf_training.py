"""A model from the transformers library trains on two ranks as it does in an ordinary loop.

GPT-2 as the library ships it, with random weights, on text. Two real processes under torchrun run
the lines that the README shows; the other side is plain PyTorch in this process. Losses are compared
step by step and weights at the end, without dropout and with it (the plain loop then draws its
random numbers by the same keys, which is what `Canonical` is for).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import hf
import pytest
import torch
from data import VOCAB
from safetensors.torch import load_file
from torch import Tensor, nn

from laminar.capture.canonical.canonical import Canonical

ROOT = Path(__file__).parents[2]
STEPS = 30

PRELUDE = """
import sys
sys.path.insert(0, {examples!r})
import torch
from tests.train.test_hf_training import batches_of, model_of, optimizer_of

torch.set_num_threads(1)
model = model_of({dropout})
optimizer = optimizer_of(model)
batches = batches_of()
"""


def model_of(dropout: float) -> nn.Module:
    return hf.gpt2_model(VOCAB, tokens=32, d=32, layers=2, dropout=dropout)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with an `eps` that does not make steps out of rounding: the keys' bias has no other gradient."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.01)


def batches_of() -> list[dict[str, Tensor]]:
    return list(islice(hf.text(batch=8, tokens=32), STEPS))


def readme_lines() -> str:
    """The code block of the section on one's own model."""
    section = (ROOT / "README.md").read_text().partition("## Bring your own model: three lines")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, "the README has lost its section"
    return found[1]


def spread(folder: Path, dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the README's lines on two ranks under torchrun."""
    script = folder / "script.py"
    script.write_text(PRELUDE.format(examples=str(ROOT / "examples"), dropout=dropout) + readme_lines())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--redirects", "3", "--log-dir", str(folder / "logs"), str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    logs = {path.name: path.read_text() for path in sorted(folder.glob("logs/**/0/std*.log"))}
    assert done.returncode == 0, done.stderr[-2000:] + logs.get("stderr.log", "")[-4000:]
    losses = [float(line) for line in logs["stdout.log"].split()]
    return losses, load_file(folder / "weights" / "model.safetensors")


def plain(dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    """The same in an ordinary loop."""
    model = model_of(dropout)
    optimizer = optimizer_of(model)
    losses = []
    for step, batch in enumerate(batches_of()):
        with Canonical(torch.tensor([0, step])) if dropout else contextlib.nullcontext():
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "dropout", [pytest.param(0.0, id="plain", marks=pytest.mark.slow), pytest.param(0.1, id="dropout")]
)
def test_gpt2_on_two_ranks_has_the_loss_curve_of_one_process(tmp_path: Path, dropout: float) -> None:
    """Same losses at every step, same weights at the end, and something was learned on the way."""
    losses, weights = spread(tmp_path, dropout)
    want_losses, want_weights = plain(dropout)
    assert len(losses) == STEPS
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    assert set(want_weights) - set(weights) == {"lm_head.weight"}  # which is the embedding
    for name, got in weights.items():
        want = want_weights[name]
        assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max()), name
