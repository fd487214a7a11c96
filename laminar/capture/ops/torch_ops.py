"""ATen ops by name, both ways: from a traced call to plain data, and from plain data to a callable.

This file knows how torch spells ops, schemas and dtypes. Arguments are stored by
position in schema order with defaults filled in; what only says where a tensor lives (device,
layout, pinning, memory format) is dropped, because a graph is device-neutral.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from laminar.capture.ops.eager_parts import NAME as EAGER
from laminar.capture.torch_private import overload_name, schema
from laminar.errors import CaptureError
from laminar.ir.graph import Constant
from laminar.ir.serial.codec import Dtype, Ref
from laminar.ir.tensor import TensorSpec

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLACE_ARGS = ("device", "layout", "pin_memory", "memory_format")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        kind = tensor.dtype if tensor.dtype not in DTYPE_NAMES else tensor.layout
        raise CaptureError(
            f"a tensor of {tuple(tensor.shape)} is {kind}, which a graph has no place for",
            next="cast it to a dtype that models train in, and keep it dense",
        )
    return TensorSpec(tuple(int(n) for n in tensor.shape), DTYPE_NAMES[tensor.dtype])


def op_name(op: Any) -> str:
    """`aten.add.Tensor`; the default overload is not written."""
    name = f"{op.namespace}.{schema(op).name.split('::')[1]}"
    return name if overload_name(op) == "default" else f"{name}.{overload_name(op)}"


def find_op(name: str) -> Any:
    """The overload of a name in a graph. Not kept: an op registered anew leaves a dead overload behind."""
    namespace, base, *overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload[0] if overload else "default")


def positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments by position, defaults filled in, those about places as None."""
    out: list[Any] = []
    for i, arg in enumerate(schema(op).arguments):
        value = args[i] if i < len(args) else kwargs.get(arg.name, arg.default_value)
        out.append(None if arg.name in PLACE_ARGS else value)
    return tuple(out)


def plain_argument(value: Any) -> Any:
    """A traced argument as plain data; tensors must already be `Ref`s."""
    if isinstance(value, (Ref, Dtype, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(plain_argument(v) for v in value)
    if isinstance(value, torch.dtype):
        return Dtype(DTYPE_NAMES[value])
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, torch.SymInt)):
        return int(value)
    if isinstance(value, (float, torch.SymFloat)):
        return float(value)
    if isinstance(value, complex):
        return value
    raise TypeError(f"argument {value!r} of type {type(value).__name__} has no plain form")


def unplain(value: Any) -> Any:
    """Plain data as torch takes it."""
    if isinstance(value, Dtype):
        return DTYPES[value.name]
    if isinstance(value, tuple):
        return [unplain(v) for v in value]
    return value


@cache
def _shape_of_call(op: Any) -> tuple[tuple[str, bool, Any], ...]:
    return tuple((a.name, a.kwarg_only, a.default_value) for a in schema(op).arguments)


def spread(name: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for an op, trailing defaults left out."""
    op = find_op(name)
    shape = _shape_of_call(op)
    kwargs = {
        key: value
        for (key, only, default), value in zip(shape, args, strict=True)
        if only and key not in PLACE_ARGS and not _same(value, default)
    }
    plain_args = [value for (_, only, _), value in zip(shape, args, strict=True) if not only]
    defaults = [(key, default) for key, only, default in shape if not only]
    while plain_args and (
        _same(plain_args[-1], defaults[len(plain_args) - 1][1]) or defaults[len(plain_args) - 1][0] in PLACE_ARGS
    ):
        if not _optional(op, len(plain_args) - 1):
            break
        plain_args.pop()
    return tuple(plain_args), kwargs


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)


@cache
def _optional(op: Any, position: int) -> bool:
    arg = [a for a in schema(op).arguments if not a.kwarg_only][position]
    return bool(arg.has_default_value()) or arg.name in PLACE_ARGS


DENSE = ("aten.native_group_norm", "aten.native_group_norm_backward", "aten.view_as_complex")
"""Ops that want tensors without gaps. Torch copies for them first, which a graph, knowing no strides, forgets."""


def dense(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op on copies of those tensors that lie with gaps, repeats or in an odd order."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*map(_without_gaps, args), **kwargs)

    return call


def _without_gaps(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return value
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return value if last is not None and value.is_contiguous(memory_format=last) else value.contiguous()


LAZY_CONJUGATES = ("aten.linalg_lu_solve", "aten._linalg_solve_ex")
"""Ops that may give a conjugate as a bit on a tensor that holds the other values: no collective looks at that bit."""


def with_values(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with results that hold their values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        return out.resolve_conj() if isinstance(out, torch.Tensor) else tuple(t.resolve_conj() for t in out)

    return call


def caller(name: str) -> Callable[..., Any]:
    """A function of the positional arguments of an op; canonical ops are plain functions."""
    if name.startswith("laminar."):
        from laminar.capture.ops import kernels

        return getattr(kernels, name.removeprefix("laminar."))  # type: ignore[no-any-return]
    if name in ("aten.view", "aten._unsafe_view"):  # strides may differ from those traced
        return torch.reshape
    op = (
        dense(find_op(name))
        if name in DENSE
        else with_values(find_op(name))
        if name in LAZY_CONJUGATES
        else find_op(name)
    )

    def call(*args: Any) -> Any:
        some, kwargs = spread(name, args)
        return op(*some, **kwargs)

    return call


def gives_list(name: str) -> bool:
    """Whether an op makes a list of tensors, which may be one of one."""
    if name.startswith("laminar."):
        return name in EAGER
    returns = schema(find_op(name)).returns
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


def constant_tensor(const: Constant, device: torch.device | str = "cpu") -> torch.Tensor:
    """A constant as a tensor; floating ones come as written, whatever the graph was widened to."""
    dtype = DTYPES[const.spec.dtype]
    if not const.data:
        return torch.empty(const.spec.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(const.data), dtype=dtype).reshape(const.spec.shape).to(device)
