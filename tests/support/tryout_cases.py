"""For tests: finalists of a search tried out on real ranks: the fastest is taken by all, and nobody can tell that it
happened.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything of a model, its optimizer and all generators, as bytes, and where it lies."""
    out: dict[str, Any] = {"mode": [m.training for m in model.modules()]}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        out[name] = (t.data_ptr(), id(t), t._version, t.detach().numpy().tobytes())
        out[f"{name}.grad"] = t.grad if t.grad is None else (t.grad.data_ptr(), t.grad.numpy().tobytes())
    for k, state in enumerate(optimizer.state.values()):
        out |= {f"{k}.{key}": (v.data_ptr(), v.numpy().tobytes()) for key, v in state.items()}
    out["groups"] = [{**g, "params": list(map(id, g["params"]))} for g in optimizer.param_groups]
    out["modules"] = [sorted(m.__dict__) for m in model.modules()]
    out["drawn"] = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]
    return out
