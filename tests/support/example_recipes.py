"""Recipes of the examples by name, loaded from their files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    *("mlp.py:tiny", "resnet.py:tiny", "gpt.py:tiny", "gpt.py:narrow", "llama.py:tiny", "bert.py:tiny"),
    *("vit.py:tiny", "t5.py:tiny", "dlrm.py:tiny", "moe.py:tiny", "lstm.py:tiny", "unet.py:tiny"),
    *("hf.py:gpt2", "hf.py:bert"),
]


def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{Path(file).stem}", EXAMPLES / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
