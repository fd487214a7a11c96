"""Models with blocks that may be recomputed, and plans for them."""

from __future__ import annotations

import laminar
from laminar import Mesh

BLOCKS = {
    "mlp.py:tiny": ("layers", "%gelu.*"),
    "resnet.py:tiny": ("stages.*.*",),
    "t5.py:tiny": ("encoder.*", "decoder.*"),
    "bert.py:tiny": ("layers.*",),
    "dlrm.py:tiny": ("bottom", "top"),
    "lstm.py:tiny": ("lstm",),
    "unet.py:tiny": ("enter", "middle1", "bottom", "middle2"),
    "hf.py:gpt2": ("transformer.h.*",),
    "hf.py:bert": ("bert.encoder.layer.*",),
}
"""What is recomputed; `blocks.*` where nothing else is said."""


def blocks(name: str) -> tuple[str, ...]:
    """The patterns for a model."""
    return BLOCKS.get(name, ("blocks.*",))


PLANS = {
    "alone": lambda g: laminar.plans.data_parallel(g, Mesh({"dp": 1})),
    "data": lambda g: laminar.plans.data_parallel(g, Mesh({"dp": 2})),
    "zero3": lambda g: laminar.plans.zero(g, Mesh({"dp": 2})),
    "tensor": lambda g: laminar.plans.tensor_parallel(g, Mesh({"tp": 2})),
    "both": lambda g: laminar.plans.tensor_parallel(g, Mesh({"dp": 2, "tp": 2})),
}
