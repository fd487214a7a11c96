"""Torch's operator database as tiny models: each sample of each entry becomes a module, a loss and a batch.

A sample's floating tensors that may have gradients are parameters, or the product of a batch leaf and a parameter of
ones (so that values stay in the op's domain), by turns; tensors that the op changes are buffers, and everything else
that is a tensor is a leaf of the batch. All outputs are reduced with uneven weights, integers and flags too, by way of
a parameter, so that no element is counted like another and every model has something to train. Collects nothing itself.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

FORMS = ("function", "method", "inplace", "out", "noncontiguous", "complex")
"""How an entry is called. `out` writes into a tensor given; `complex` and `noncontiguous` say what it is called on."""
UNDEFINED = ("empty", "new_empty")
"""Entries that make memory nobody has written to."""
MOST_ELEMENTS = 20_000


def entries() -> dict[str, Any]:
    """Every entry of the database under a name of its own."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {e.name + (f".{e.variant_test_name}" if e.variant_test_name else ""): e for e in op_db}
    return {name: e for name, e in found.items() if not name.startswith(UNDEFINED)}


def dtype_of(entry: Any) -> torch.dtype:
    """The dtype an entry is tried in: float64 if it can, else the first it can."""
    order = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool, torch.uint8, torch.int32)
    known = entry.supported_dtypes("cpu")
    return next((d for d in order if d in known), torch.float64)


def differentiable(entry: Any) -> bool:
    """Whether gradients can be asked for, in the dtype the entry is tried in."""
    return bool(entry.supports_autograd) and dtype_of(entry) in entry.supported_backward_dtypes("cpu")


def forms_of(entry: Any) -> list[str]:
    """The ways an entry can be called."""
    out = ["function"]
    if entry.method_variant is not None:
        out.append("method")
    if entry.inplace_variant is not None and entry.supports_inplace_autograd:
        out.append("inplace")
    if entry.supports_out:
        out.append("out")
    out.append("noncontiguous")
    if differentiable(entry) and torch.complex128 in entry.supported_backward_dtypes("cpu"):
        out.append("complex")
    return out


@dataclass(frozen=True)
class _Leaf:
    """A tensor of the sample: a parameter, a batch leaf, or their product."""

    kind: str
    name: str


class OpModel(nn.Module):
    """An op called on tensors that come from parameters and a batch."""

    def __init__(
        self,
        call: Callable[..., Any],
        leaves: list[Any],
        tree: Any,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
    ) -> None:
        super().__init__()
        self.call, self.leaves, self.tree = call, leaves, tree
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """What the op makes."""
        filled = [self.value(leaf, batch) if isinstance(leaf, _Leaf) else leaf for leaf in self.leaves]
        return self.call(*tree_unflatten(filled, self.tree))

    def value(self, leaf: _Leaf, batch: dict[str, Tensor]) -> Tensor:
        """The tensor that stands for one of the sample's."""
        if leaf.kind == "batch":
            return batch[leaf.name]
        param: Tensor = getattr(self, leaf.name)
        return param * batch[leaf.name] if leaf.kind == "product" else param


def weighed(out: Any, gain: Tensor) -> Tensor:
    """A number to which every element of every output adds its own share."""
    total = gain.new_zeros(())
    for k, t in enumerate(t for t in tree_flatten(out)[0] if isinstance(t, Tensor)):
        t = t if t.layout == torch.strided else t.to_dense()
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        real = t.to(torch.float64)
        weight = torch.cos(torch.arange(t.numel(), dtype=torch.float64) * 0.7 + k).view(t.shape) + 0.3
        share = (torch.nan_to_num(real, 0.0, 3.0, -3.0) * weight).sum()
        total = total + (share if t.requires_grad else share * gain)
    return total + gain * 0.5


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The outputs, weighed."""
    return weighed(model(batch), model.gain)


@dataclass
class OpCase:
    """One sample of one entry in one form."""

    entry: str
    form: str
    index: int
    make: Callable[[], OpModel]
    batch: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.entry}/{self.form}/{self.index}"


def cases(name: str, form: str, most: int) -> Iterator[OpCase]:
    """Up to so many cases of an entry, spread over its samples."""
    entry = entries()[name]
    dtype = torch.complex128 if form == "complex" else dtype_of(entry)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not `entry.sample_inputs`, which looks at the stack for every sample.
        samples = list(itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, differentiable(entry)), 200))
    small = [s for s in samples if _size(s) <= MOST_ELEMENTS and (form != "inplace" or _may_write(entry, s))]
    chosen = sorted({round(k * (len(small) - 1) / max(most - 1, 1)) for k in range(min(most, len(small)))})
    for index in chosen:
        yield case_of(name, entry, form, index, small[index])


def _size(sample: Any) -> int:
    flat = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return sum(t.numel() for t in flat if isinstance(t, Tensor))


def _sparse(sample: Any) -> bool:
    flat = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return any(isinstance(t, Tensor) and t.layout != torch.strided for t in flat)


def _may_write(entry: Any, sample: Any) -> bool:
    """Whether the result fits where the input lies: in-place forms don't broadcast what they write to."""
    if sample.broadcasts_input or not isinstance(sample.input, Tensor):
        return False
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry.inplace_variant(sample.input.detach().clone(), *sample.args, **sample.kwargs)
    except Exception:
        return False
    return True


def case_of(name: str, entry: Any, form: str, index: int, sample: Any) -> OpCase:
    """A sample as a model and a batch."""
    if form == "noncontiguous" and not _sparse(sample):
        sample = sample.noncontiguous()
    after = sample.output_process_fn_grad
    function = {"method": entry.method_variant, "inplace": entry.inplace_variant}.get(form) or entry.op

    def call(input: Any, args: Any, kwargs: Any) -> Any:
        if form == "inplace":
            input = input.clone()
        if form == "out":
            return _into_given(function, input, args, kwargs)
        return after(function(input, *args, **kwargs))

    flat, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    params: dict[str, Tensor] = {"gain": torch.ones((), dtype=torch.float64)}
    batch: dict[str, Tensor] = {}
    leaves: list[Any] = []
    buffers: dict[str, Tensor] = {}
    changed = _changed(call, flat, tree) if form != "out" else set()
    for k, value in enumerate(flat):
        if not isinstance(value, Tensor):
            leaves.append(value)
            continue
        if k in changed:
            buffers[f"t{k}"] = value.detach()
            leaves.append(_Leaf("buffer", f"t{k}"))
            continue
        given = value.detach()
        if not value.requires_grad or value.layout != torch.strided:
            leaf = _Leaf("batch", f"t{k}")
            batch[leaf.name] = given
        elif (k + index) % 2 and form != "noncontiguous":
            leaf = _Leaf("param", f"t{k}")
            params[leaf.name] = given
        else:
            leaf = _Leaf("product" if form != "noncontiguous" or (k + index) % 2 else "param", f"t{k}")
            if leaf.kind == "product":
                batch[leaf.name] = given
                params[leaf.name] = torch.ones(given.shape[-1:], dtype=given.dtype)
            else:
                params[leaf.name] = given
        leaves.append(leaf)
    batch |= {f"row{k}": torch.arange(4.0, dtype=torch.float64) for k in range(len(batch) + 1)}  # a batch of 4 samples

    def make() -> OpModel:
        return OpModel(call, leaves, tree, _cloned(params), _cloned(buffers))

    return OpCase(name, form, index, make, batch)


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.clone(memory_format=torch.preserve_format) for k, v in tensors.items()}


def _changed(call: Any, flat: list[Any], tree: Any) -> set[int]:
    """Which of a sample's tensors the op writes to."""
    mine = [t.detach().clone() if isinstance(t, Tensor) else t for t in flat]
    before = [t.clone() if isinstance(t, Tensor) else t for t in mine]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(*tree_unflatten(mine, tree))
        return {
            k
            for k, (a, b) in enumerate(zip(mine, before, strict=True))
            if isinstance(a, Tensor) and a.layout == torch.strided and not torch.equal(a.nan_to_num(), b.nan_to_num())
        }
    except Exception:
        return set()


def _into_given(function: Any, input: Any, args: Any, kwargs: Any) -> Any:
    """The op with `out=`, which takes no gradients."""
    with torch.no_grad():
        made = function(input, *args, **kwargs)
        out = tuple(torch.empty_like(t) for t in made) if isinstance(made, tuple) else torch.empty_like(made)
        return function(input, *args, **kwargs, out=out)
