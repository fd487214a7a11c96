"""The models that predictions are judged by: seven, none of them among those a profile is calibrated with.

Four are those of the training benchmarks (GPT, residual CNN, wide MLP, DLRM), three are built from the examples'
classes at sizes where a step takes tens of milliseconds: Llama with grouped keys and a gated MLP, a vision
transformer, BERT with dropout. The batch grows with the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from models import MODELS

from laminar.api import load_recipe
from laminar.profile.trials import Trial

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    """The module of an example."""
    load_recipe(f"{EXAMPLES}/{name}.py:tiny")
    return sys.modules[f"laminar_recipe_{name}"]


def _case(name: str) -> Trial:
    """One of the training benchmarks' models."""
    make: Callable[..., Any] = MODELS[name]
    case = make(2, True)
    return Trial(name, case.model, case.loss, lambda ranks: make(ranks, True).batches[0])


def _llama() -> Trial:
    m = example("llama")
    return Trial(
        "llama",
        lambda: m.Llama(layers=4, d=288, heads=6, kv_heads=2, hidden=768, vocab=512, tokens=64),
        m.loss,
        lambda ranks: next(m.counting(batch=4 * ranks, tokens=64, vocab=512)),
    )


def _vit() -> Trial:
    m = example("vit")
    return Trial(
        "vit",
        lambda: m.ViT(size=32, patch=4, layers=4, d=192, heads=6, hidden=768, classes=10),
        m.loss,
        lambda ranks: next(m.images(batch=6 * ranks, size=32, classes=10)),
    )


def _bert() -> Trial:
    m = example("bert")
    return Trial(
        "bert",
        lambda: m.BERT(layers=3, d=256, heads=8, vocab=2002, tokens=80),
        m.loss,
        lambda ranks: next(m.sentences(batch=4 * ranks, tokens=80, topics=20, words=100)),
    )


def judged(name: str) -> Trial:
    """A model by name."""
    return {"llama": _llama, "vit": _vit, "bert": _bert}[name]() if name not in MODELS else _case(name)


JUDGED = (*MODELS, "llama", "vit", "bert")

if __name__ == "__main__":
    for name in JUDGED:
        trial = judged(name)
        model = trial.model()
        print(
            name, sum(p.numel() for p in model.parameters()), float(torch.as_tensor(trial.loss(model, trial.batch(2))))
        )
