"""What is known of a tensor without holding it: shape and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
    "c32": 4,
    "c64": 8,
    "c128": 16,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "bool": 1,
}
"""Every dtype a graph may hold, and its size."""

FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2")
COMPLEX = ("c32", "c64", "c128")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the planner sees it; prints as `f32[64,128]`."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"TensorSpec: unknown dtype {self.dtype!r}, one of {sorted(ITEM_BYTES)}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"TensorSpec: negative size in {self.shape}")

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether its elements are real numbers of limited precision."""
        return self.dtype in FLOATS

    @property
    def is_complex(self) -> bool:
        """Whether its elements are complex."""
        return self.dtype in COMPLEX

    @property
    def has_gradient(self) -> bool:
        """Whether gradients can flow through it."""
        return self.is_float or self.is_complex

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @staticmethod
    def parse(text: str) -> TensorSpec:
        """The inverse of `str`: this text is also the JSON form."""
        dtype, _, rest = text.partition("[")
        dims = rest.rstrip("]")
        return TensorSpec(tuple(int(n) for n in dims.split(",")) if dims else (), dtype)
