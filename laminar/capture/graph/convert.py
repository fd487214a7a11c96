"""From torch's traced graph to ours: mutation removed, views followed, places forgotten.

Each traced tensor is an alias: a base and the chain of views that leads to it. An in-place op on an
alias computes the new value, then writes it back through the chain (a slice by slice_scatter and so
on) into the base; aliases made earlier are viewed again from the new base when next read. That is
functionalisation, done on the graph, so that one tracing pass is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from laminar.capture.graph.as_strided import seen
from laminar.capture.model.model_tensors import Slot, sharing
from laminar.capture.ops.torch_ops import (
    DTYPES,
    PLACE_ARGS,
    caller,
    op_name,
    plain_argument,
    positional,
    spec_of,
    spread,
    unplain,
)
from laminar.capture.tensor_bytes import as_bytes
from laminar.capture.torch_private import schema
from laminar.capture.tracing.origins import Origin
from laminar.capture.tracing.refuse import refuse_computed, refuse_shared
from laminar.capture.tracing.trace import Traced
from laminar.errors import CaptureError
from laminar.ir.graph import RNG, SCALE, Constant, Graph, Input, Node, Output
from laminar.ir.ops import RESHAPES
from laminar.ir.serial.codec import Dtype, Ref
from laminar.ir.tensor import TensorSpec


@dataclass
class _Base:
    ref: Ref
    spec: TensorSpec
    version: int = 0
    constant: bool = False
    param: str = ""
    """For a parameter its name: nothing may write to it."""


@dataclass
class _View:
    """One step of a chain: the op, its other arguments, and which of its outputs."""

    op: str
    args: tuple[Any, ...]
    index: int
    specs: tuple[TensorSpec, ...]


@dataclass
class _Alias:
    base: _Base
    chain: tuple[_View, ...]
    spec: TensorSpec
    ref: Ref
    version: int


LIKE = {
    "zeros_like": 0,
    "ones_like": 1,
    "new_zeros": 0,
    "new_ones": 1,
    "empty_like": 0,
    "new_empty": 0,
    "empty": 0,
    "zeros": 0,
    "ones": 1,
    "empty_strided": 0,
    "new_empty_strided": 0,
    "empty_permuted": 0,
}
FULL_OPS = ("full", "full_like", "new_full")
SAME_OPS = ("alias", "detach", "lift_fresh", "lift", "lift_fresh_copy", "resolve_conj", "resolve_neg")
EAGER = {"_conj": "aten.conj_physical", "_neg_view": "aten.neg"}
"""Views that only set a bit on the tensor; here they compute."""
CHECK_OPS = (
    "_linalg_check_errors",
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
"""Ops that look and make nothing."""


@dataclass
class Converter:
    """Writes our nodes while reading torch's."""

    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def emit(self, op: str, args: tuple[Any, ...], outs: tuple[TensorSpec | None, ...], origin: Origin) -> Ref:
        """One more node; a reference to its first output."""
        stem = op.split(".")[1].strip("_")
        count = self.names.get(stem, 0)
        self.names[stem] = count + 1
        name = f"{stem}_{count}"
        self.nodes.append(Node(name, op, args, outs, origin.where, origin.module, origin.phase))
        return Ref(name)

    def fresh(self, ref: Ref, spec: TensorSpec) -> _Alias:
        """A new tensor that shares memory with nothing."""
        return _Alias(_Base(ref, spec), (), spec, ref, 0)

    def read(self, alias: _Alias, origin: Origin) -> Ref:
        """The current value of an alias, viewed again if its base has changed."""
        if alias.version != alias.base.version:
            ref = alias.base.ref
            for view in alias.chain:
                ref, _ = self._step(ref, view, origin)
            alias.ref, alias.version = ref, alias.base.version
        return alias.ref

    def _step(self, ref: Ref, view: _View, origin: Origin) -> tuple[Ref, TensorSpec]:
        made = self.emit(view.op, (ref, *view.args), view.specs, origin)
        return Ref(made.name, view.index), view.specs[view.index]

    def write(self, alias: _Alias, value: Ref, origin: Origin) -> None:
        """Make `value` the alias's new value, in its base too."""
        base = alias.base
        if base.param:
            raise CaptureError(
                f"parameter {base.param} is changed in place, which only the optimizer may do",
                at=origin.where,
                next="compute a new weight from it, or change it between steps",
            )
        if base.constant:
            raise CaptureError(
                "a tensor from outside the model is changed in place",
                at=origin.where,
                next="register it as a buffer of the model",
            )
        refs: list[tuple[Ref, TensorSpec]] = [(base.ref, base.spec)]
        for view in alias.chain[:-1]:
            refs.append(self._step(refs[-1][0], view, origin))
        for (outer, spec), view in zip(reversed(refs), reversed(alias.chain), strict=False):
            value = self._unview(outer, spec, view, value, origin)
        base.ref = value
        base.version += 1
        if not alias.chain:
            alias.ref, alias.version = value, base.version

    def _unview(self, outer: Ref, spec: TensorSpec, view: _View, value: Ref, origin: Origin) -> Ref:
        """`outer` with the part that `view` shows replaced by `value`."""
        rank = len(spec.shape)
        op, a = view.op, view.args
        if op in RESHAPES:
            return self.emit("aten.view", (value, spec.shape), (spec,), origin)
        if op == "aten.permute":
            back = sorted(range(rank), key=lambda i: a[0][i] % rank)
            return self.emit("aten.permute", (value, tuple(back)), (spec,), origin)
        if op in ("aten.t", "aten.transpose.int"):
            return self.emit(op, (value, *a), (spec,), origin)
        if op == "aten.slice.Tensor":
            return self.emit("aten.slice_scatter", (outer, value, *a), (spec,), origin)
        if op == "aten.select.int":
            return self.emit("aten.select_scatter", (outer, value, *a), (spec,), origin)
        if op in ("aten.split.Tensor", "aten.split_with_sizes"):
            d = a[1] % rank
            start = sum(s.shape[d] for s in view.specs[: view.index])
            stop = start + view.specs[view.index].shape[d]
            return self.emit("aten.slice_scatter", (outer, value, d, start, stop, 1), (spec,), origin)
        if op == "aten.unbind.int":
            return self.emit("aten.select_scatter", (outer, value, a[0], view.index), (spec,), origin)
        if op in ("aten.conj_physical", "aten.neg"):
            return self.emit(op, (value,), (spec,), origin)
        if op in ("aten.view_as_real", "aten.view_as_complex"):
            other = "aten.view_as_complex" if op == "aten.view_as_real" else "aten.view_as_real"
            return self.emit(other, (value,), (spec,), origin)
        if op == "aten.diagonal":
            return self.emit("aten.diagonal_scatter", (outer, value, *a), (spec,), origin)
        if op == "aten.index.Tensor" and self.constants[a[0][0].name].spec.shape == view.specs[0].shape:
            if self.picks_once(a[0][0]):
                return self.emit("aten.index_put", (outer, a[0], value, False), (spec,), origin)
            op = "as_strided that shows an element twice"
        elif view.specs[view.index].dtype == spec.dtype and spec.numel * 8 <= LARGEST_CONSTANT:
            shown = caller(op)(torch.arange(spec.numel).view(spec.shape), *map(unplain, a))
            places = self.constant(shown[view.index] if isinstance(shown, (tuple, list)) else shown)
            if self.picks_once(places):
                flat = TensorSpec((spec.numel,), spec.dtype)
                lying = self.emit("aten.view", (outer, flat.shape), (flat,), origin)
                put = self.emit("aten.index_put", (lying, (places,), value, False), (flat,), origin)
                return self.emit("aten.view", (put, spec.shape), (spec,), origin)
            op = f"{op} that shows an element twice"
        raise CaptureError(
            f"an in-place change through {op} can't be captured", at=origin.where, next="use the functional form"
        )

    def constant(self, tensor: torch.Tensor) -> Ref:
        """A tensor that the graph carries."""
        name = f"const_{len(self.constants)}"
        self.constants[name] = constant_of(name, tensor)
        return Ref(name)

    def picks_once(self, table: Ref) -> bool:
        """Whether no entry of a constant table of indices is there twice."""
        held = np.frombuffer(self.constants[table.name].data, np.int64)
        return len(np.unique(held)) == len(held)


def _outs(value: Any) -> tuple[TensorSpec | None, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(spec_of(v) if isinstance(v, torch.Tensor) else None for v in values)


def convert(traced: Traced, leaves: dict[str, torch.Tensor], batch_tree: str) -> Graph:
    """Our graph of a traced step."""
    c = Converter()
    env: dict[Any, Any] = {}
    holders = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
    inputs: list[Input] = []
    for node, slot in zip(holders, traced.slots, strict=False):
        spec = spec_of(slot.tensor)
        trainable = slot.kind == "param" and slot.tensor.requires_grad
        inputs.append(Input(slot.name, slot.kind, spec, trainable, tuple(slot.aliases)))
        env[node] = c.fresh(Ref(slot.name), spec)
        env[node].base.param = slot.name if slot.kind == "param" else ""
    for node, (name, leaf) in zip(holders[len(traced.slots) : -1], leaves.items(), strict=True):
        inputs.append(Input(name, "scale" if name == SCALE else "batch", spec_of(leaf)))
        env[node] = c.fresh(Ref(name), spec_of(leaf))
    key = TensorSpec((2,), "i64")
    env[holders[-1]] = c.fresh(Ref(RNG), key)
    if traced.draws:
        inputs.append(Input(RNG, "rng", key))
    outputs: list[Output] = []
    slots, together = {slot.name: slot for slot in traced.slots}, sharing(traced.slots)
    for node in traced.graph.graph.nodes:
        origin = traced.origins.get(node.name, Origin(phase="backward"))
        if node.op == "get_attr":
            env[node] = _constant(c, node, traced)
        elif node.op == "call_function":
            env[node] = _call(c, node, env, origin)
        elif node.op == "output":
            results = node.args[0]
            for (kind, name), result in zip(traced.outputs, results, strict=True):
                ref = c.read(env[result], origin)
                if kind == "buffer" and ref == Ref(name):
                    continue  # nothing was written to it
                if kind == "buffer" and not _is_state(c, slots[name], env[result].spec, together):
                    continue
                outputs.append(Output(name, kind, ref))
    read = {r.name for n in c.nodes for r in n.ins} | {o.ref.name for o in outputs}
    inputs = [i for i in inputs if i.name in read or i.name not in slots or not slots[i.name].plain]
    used = [s for s in traced.slots if s.kind == "param" or s.name in read]
    refuse_computed(used)
    refuse_shared(used)
    return Graph(tuple(inputs), tuple(c.constants.values()), tuple(c.nodes), tuple(outputs), batch_tree)


def _is_state(c: Converter, slot: Slot, now: TensorSpec, together: dict[str, str]) -> bool:
    """Whether the new value of a buffer is wanted: that of a plain attribute only if a step reads the old one."""
    if slot.plain and not any(r.name == slot.name for n in c.nodes for r in n.ins):
        return False
    if now != spec_of(slot.tensor):
        raise CaptureError(
            f"forward changes buffer {slot.name} from {spec_of(slot.tensor)} to {now}: "
            "every step would need another graph",
            next="give it its full size and dtype from the start",
        )
    if slot.name in together:
        raise CaptureError(
            f"forward changes buffer {slot.name}, which lies in the same memory as {together[slot.name]}",
            next="give each its own memory with .clone(), or keep one and view it in forward",
        )
    return True


def _constant(c: Converter, node: Any, traced: Traced) -> _Alias:
    tensor = traced.graph
    for part in node.target.split("."):
        tensor = getattr(tensor, part)
    where = next((traced.origins[u.name].where for u in node.users if u.name in traced.origins), "")
    _refuse_outside(tensor, where)
    held = next((s.name for s in traced.slots if s.own is tensor), "")
    if held:
        raise CaptureError(
            f"{held} is read in a way that tracing can't follow", at=where, next="read it through the model"
        )
    alias = c.fresh(c.constant(tensor), spec_of(tensor))
    alias.base.constant = True
    return alias


def _refuse_outside(tensor: torch.Tensor, where: str) -> None:
    """Tensors of neither model nor batch become constants, if that is what they are."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.requires_grad:
        raise CaptureError(
            "a trainable tensor from outside the model is read: it would get no gradient",
            at=where,
            next="make it a parameter of the model",
        )
    if nbytes > LARGEST_CONSTANT:
        raise CaptureError(
            f"a tensor of {nbytes >> 20} MB from outside the model is read, too large for a constant",
            at=where,
            next="make it a buffer, or its module a submodule, of the model",
        )


LARGEST_CONSTANT = 64 << 20
"""Bytes; a graph is written to disk and sent to every rank, constants included."""


def constant_of(name: str, tensor: torch.Tensor) -> Constant:
    """A real tensor as a constant."""
    return Constant(name, spec_of(tensor), as_bytes(tensor.cpu()).numpy().tobytes())


def _filled(
    c: Converter, base_name: str, shape: Any, args: tuple[Any, ...], outs: tuple[TensorSpec | None, ...], origin: Origin
) -> Any:
    """A tensor of one value, whatever it was made by."""
    fill: Any = LIKE[base_name] if base_name in LIKE else args[[a.name for a in shape.arguments].index("fill_value")]
    spec = outs[0]
    assert spec is not None
    if isinstance(fill, Ref):
        return c.fresh(c.emit("aten.expand", (fill, spec.shape, False), outs, origin), spec)
    if base_name in LIKE and spec.is_float:
        fill = float(fill)
    return c.fresh(c.emit("aten.full", (spec.shape, fill, Dtype(spec.dtype), None, None, None), outs, origin), spec)


def _views_of(
    source: _Alias, name: str, rest: tuple[Any, ...], outs: tuple[TensorSpec | None, ...], ref: Ref
) -> list[_Alias]:
    """What an op that looks at a tensor in another way makes of it."""
    views = tuple(o for o in outs if o is not None)
    return [
        _Alias(source.base, (*source.chain, _View(name, rest, i, views)), spec, Ref(ref.name, i), source.base.version)
        for i, spec in enumerate(views)
    ]


def _call(c: Converter, node: Any, env: dict[Any, Any], origin: Origin) -> Any:
    # Long because it tells kinds of calls apart, in an order that matters; what becomes of each is elsewhere.
    target = node.target
    if getattr(target, "__name__", "") == "getitem" and schema(target) is None:
        return env[node.args[0]][node.args[1]]
    if schema(target) is None:
        raise CaptureError(f"{target} is not an op a graph can hold", at=origin.where)
    raw = positional(target, node.args, node.kwargs)

    def lookup(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            got = env[value]
            return c.read(got, origin)
        if isinstance(value, (list, tuple)):
            return tuple(lookup(v) for v in value)
        return value

    name = op_name(target)
    base_name = name.split(".")[1]
    shape = schema(target)
    value = node.meta.get("val")
    outs = _outs(value)
    if "nondeterministic_seeded" in {t.name for t in target.tags} and base_name not in ("uniform", "normal"):
        raise CaptureError(
            f"{name} draws random numbers in a way that can't be keyed",
            at=origin.where,
            next="draw with torch.rand, randn, bernoulli or dropout",
        )
    if name.startswith("aten.") and base_name in SAME_OPS:
        source = env[node.args[0]]
        return source if base_name != "lift_fresh_copy" else c.fresh(c.read(source, origin), source.spec)
    if name.startswith("aten.") and base_name in CHECK_OPS:
        return None
    if "val" not in node.meta and not node.users and not shape.is_mutable:
        return None  # a look at data that was refused, after which the step went on without it
    if base_name == "native_batch_norm" and raw[3] is not None and raw[4] is not None and raw[5]:
        # It changes what its schema does not say.
        return _with_side_effects(
            c, torch.ops.aten._native_batch_norm_legit_functional.default, raw, (3, 4), env, lookup, origin
        )
    _refuse_hidden_writes(base_name, shape, raw, origin)
    if name in ("aten.as_strided", "aten.as_strided_", "aten.as_strided_scatter"):
        return _strided(c, name, raw, env, origin)
    if name in ("aten.resize_", "aten.resize_as_"):
        return _resized(c, node, name, raw, env, origin)
    if "inplace_view" in {t.name for t in target.tags}:
        return _reshaped_in_place(c, node, name, raw, env, lookup, outs, origin)
    if shape.is_mutable:
        return _mutate(c, node, target, raw, env, lookup, origin)
    args = tuple(plain_argument(lookup(a)) for a in raw)
    if name.startswith("aten.") and (base_name in LIKE or base_name in FULL_OPS):
        return _filled(c, base_name, shape, args, outs, origin)
    if name.startswith("aten.") and base_name in EAGER:
        name = EAGER[base_name]
    alias_of = _viewed(target)
    if alias_of is not None and isinstance(raw[alias_of], torch.fx.Node):
        aliases = _views_of(env[raw[alias_of]], name, args[1:], outs, c.emit(name, args, outs, origin))
        return aliases if isinstance(value, (tuple, list)) else aliases[0]
    if not any(o is not None for o in outs):
        raise CaptureError(f"{name} makes no tensor", at=origin.where, next="keep what it asks about out of the model")
    ref = c.emit(name, args, outs, origin)
    if isinstance(value, (tuple, list)):
        return [c.fresh(Ref(ref.name, i), o) if o is not None else None for i, o in enumerate(outs)]
    assert outs[0] is not None
    return c.fresh(ref, outs[0])


def _refuse_hidden_writes(base_name: str, shape: Any, raw: Any, origin: Origin) -> None:
    """Kernels of norms that write running statistics, which their schemas don't say."""
    if base_name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"):
        given = {a.name: value for a, value in zip(shape.arguments, raw, strict=True)}
        if given.get("training") and given.get("running_mean") is not None:
            raise CaptureError(
                f"aten.{base_name} changes running statistics behind the scenes",
                at=origin.where,
                next="call torch.nn.functional.batch_norm, which is captured",
            )


def _viewed(op: Any) -> int | None:
    """Which argument the result of a view op shares memory with."""
    for ret in schema(op).returns:
        if ret.alias_info is not None and not ret.alias_info.is_write:
            for i, arg in enumerate(schema(op).arguments):
                if arg.alias_info is not None:
                    return i
    return 0 if schema(op).name == "aten::_unsafe_view" else None


def _strided(c: Converter, name: str, raw: Any, env: dict[Any, Any], origin: Origin) -> _Alias:
    """Memory seen in another way, as views and picks of values (see `strides`)."""
    scatter = name == "aten.as_strided_scatter"
    looked, source = raw[0].meta["val"], env[raw[0]]
    size, new, start = raw[2:5] if scatter else raw[1:4]
    start = looked.storage_offset() if start is None else start
    found = seen(looked.shape, looked.stride(), looked.storage_offset(), size, new, start)
    if found is None:
        raise CaptureError(
            f"{name} looks at memory beside the tensor it is given, and a graph knows values alone",
            at=origin.where,
            next="use view, unfold, narrow or indexing",
        )
    spec = TensorSpec(tuple(size), source.spec.dtype)
    alias = c.fresh(c.read(source, origin), source.spec) if scatter else source
    if not found.same:
        flat = TensorSpec((source.spec.numel,), spec.dtype)
        turned = TensorSpec(tuple(source.spec.shape[d] for d in found.order), spec.dtype)
        cut = flat if found.table is not None else TensorSpec(found.sizes, spec.dtype)
        views = [_View("aten.permute", (found.order,), 0, (turned,)), _View("aten.view", (cut.shape,), 0, (cut,))]
        if found.table is None:
            views.append(_View("aten.permute", (found.back,), 0, (spec,)))
        else:
            views.append(_View("aten.index.Tensor", ((c.constant(torch.from_numpy(found.table)),),), 0, (spec,)))
        ref = c.read(alias, origin)
        for view in views:
            ref, _ = c._step(ref, view, origin)
        alias = _Alias(alias.base, (*alias.chain, *views), spec, ref, alias.base.version)
    if not scatter:
        return alias
    c.write(alias, c.read(env[raw[1]], origin), origin)
    return c.fresh(alias.base.ref, source.spec)


def _resized(c: Converter, node: Any, name: str, raw: Any, env: dict[Any, Any], origin: Origin) -> Any:
    """`resize_` to no more elements shows the memory a tensor has in another shape; more would hold anything."""
    before, now = raw[0].meta["val"], node.meta["val"]
    if before.shape == now.shape:
        return env[raw[0]]
    if now.numel() > before.numel():
        raise CaptureError(
            f"{name} gives a tensor other memory, which can't be captured",
            at=origin.where,
            next="make a new tensor instead",
        )
    return _strided(c, name, (raw[0], now.shape, now.stride(), None), env, origin)


def _reshaped_in_place(
    c: Converter, node: Any, name: str, raw: Any, env: dict[Any, Any], lookup: Any, outs: Any, origin: Origin
) -> _Alias:
    """`unsqueeze_`, `t_` and the like change how a tensor looks, not what it holds: a view under the old name."""
    base_name = name.split(".")[1]
    if base_name == "set_" or outs[0] is None:
        raise CaptureError(
            f"{name} gives a tensor other memory, which can't be captured",
            at=origin.where,
            next="make a new tensor instead",
        )
    functional = op_name(_like(node.target, base_name.removesuffix("_")))
    source = env[node.args[0]]
    args = tuple(plain_argument(lookup(a)) for a in raw)
    ref = c.emit(functional, args, outs, origin)
    view = _View(functional, args[1:], 0, (outs[0],))
    return _Alias(source.base, (*source.chain, view), outs[0], ref, source.base.version)


def _mutate(c: Converter, node: Any, target: Any, raw: Any, env: dict[Any, Any], lookup: Any, origin: Origin) -> Any:
    """An in-place op, or one with `out=`: its functional form, then the new value written through the alias."""
    arguments = schema(target).arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = op_name(target)
    base_name = name.split(".")[1]
    out_form = all(arguments[i].is_out for i in written)
    functional_op = getattr(getattr(torch.ops.aten, f"{base_name}_functional", None), "default", None)
    if name.startswith("aten.") and functional_op is not None and not out_form and not base_name.endswith("_"):
        return _with_side_effects(c, functional_op, raw, written, env, lookup, origin)
    if not name.startswith("aten.") or not (out_form or (base_name.endswith("_") and written == [0])):
        raise CaptureError(
            f"{name} changes tensors in a way that can't be captured",
            at=origin.where,
            next="use a form that returns a new tensor",
        )
    args = tuple(plain_argument(lookup(a)) for a in raw)
    listed = any(isinstance(raw[i], (list, tuple)) for i in written)
    targets = [env[n] for i in written for n in (raw[i] if isinstance(raw[i], (list, tuple)) else (raw[i],))]
    if listed:
        values = _functional(c, target, base_name.removesuffix("_"), args, raw, env, origin)
        for alias, (value, have) in zip(targets, values, strict=True):
            c.write(alias, _as(c, value, have, alias.spec, origin), origin)
        return targets
    if out_form:
        values = _functional(c, target, base_name, args, raw, env, origin)
        shown = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        for alias, (value, have), now in zip(targets, values, shown, strict=True):
            spec = spec_of(now)
            if spec != alias.spec and not alias.chain:  # an empty tensor was given, and was made to fit
                alias.spec = alias.base.spec = spec
            c.write(alias, _as(c, value, have, alias.spec, origin), origin)
        return targets if len(targets) > 1 else targets[0]
    (alias,) = targets
    spec = alias.spec
    stem = base_name[:-1]
    if stem == "copy":
        value = _as(c, args[1], env[raw[1]].spec, spec, origin)
    elif stem in ("fill", "zero") and not (stem == "fill" and isinstance(args[1], Ref)):
        fill = 0 if stem == "zero" else args[1]
        if spec.is_float:
            fill = float(fill)
        value = c.emit("aten.full", (spec.shape, fill, Dtype(spec.dtype), None, None, None), (spec,), origin)
    elif stem == "fill":
        value = _as(c, args[1], env[raw[1]].spec, spec, origin)
    else:
        ((value, have),) = _functional(c, target, stem, args, raw, env, origin)
        value = _as(c, value, have, spec, origin)
    c.write(alias, value, origin)
    return alias


def _like(target: Any, base_name: str) -> Any:
    """The overload of an op that takes the same arguments, in whatever order and `out` aside, and changes none.

    It may take a dtype and a place besides, which an `out` has.
    """
    wanted = sorted((a.name, str(a.type)) for a in schema(target).arguments if not a.is_out)
    given = {name for name, _ in wanted}
    packet = getattr(torch.ops.aten, base_name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        takes = schema(op).arguments
        same = sorted((a.name, str(a.type)) for a in takes if a.name in given or a.name not in ("dtype", *PLACE_ARGS))
        if same == wanted and not schema(op).is_mutable:
            return op
    return target


def _functional(
    c: Converter, target: Any, base_name: str, args: tuple[Any, ...], raw: Any, env: dict[Any, Any], origin: Origin
) -> list[tuple[Ref, TensorSpec]]:
    """The form without mutation, with the specs it really makes: an in-place op keeps its dtype, the other promotes."""
    op = _like(target, base_name)
    if schema(op).is_mutable:
        raise CaptureError(
            f"{op_name(target)} has no form without mutation",
            at=origin.where,
            next="use a form that returns a new tensor",
        )
    at = {a.name: i for i, a in enumerate(schema(target).arguments)}
    given_out = [raw[i] for i, a in enumerate(schema(target).arguments) if a.alias_info and a.alias_info.is_write]
    written = [env[n].spec for o in given_out for n in (o if isinstance(o, (list, tuple)) else (o,))]
    names = [a.name for a in schema(op).arguments]
    kind = {"dtype": Dtype(written[0].dtype)}
    given = tuple(args[at[n]] if n in at else kind.get(n) for n in names)
    some, kwargs = spread(
        op_name(op), tuple(_standing(raw[at[n]], env) if n in at else unplain(kind.get(n)) for n in names)
    )
    try:
        made = op(*some, **kwargs)
        outs = tuple(spec_of(t) for t in (made if isinstance(made, (tuple, list)) else (made,)))
    except RuntimeError:  # torch knows no shapes of it, or asks for strides; shapes are those of what is written to
        outs = tuple(written)
    ref = c.emit(op_name(op), given, outs, origin)
    return [(Ref(ref.name, i), spec) for i, spec in enumerate(outs)]


def _standing(value: Any, env: dict[Any, Any]) -> Any:
    """Arguments with tensors that have shapes and no values."""
    if isinstance(value, torch.fx.Node):
        spec = env[value].spec
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
    return [_standing(v, env) for v in value] if isinstance(value, (tuple, list)) else value


def _with_side_effects(
    c: Converter, op: Any, raw: Any, written: Sequence[int], env: dict[Any, Any], lookup: Any, origin: Origin
) -> Any:
    """An op that has results and changes some arguments: its form that returns their new values behind the results.

    Results go to where `out` arguments are, if those are given behind the others.
    """
    names = [a.name for a in schema(op).arguments]
    rooms, written = [env[n] for n in raw[len(names) :]], [i for i in written if i < len(names)]
    args, spare = (
        tuple(plain_argument(lookup(a)) for a in raw[: len(names)]),
        [_standing(a, env) for a in raw[: len(names)]],
    )
    some, kwargs = spread(op_name(op), tuple(spare))
    outs = tuple(spec_of(t) for t in op(*some, **kwargs))
    ref = c.emit(op_name(op), args, outs, origin)
    first = len(outs) - len(written)
    for k, i in enumerate(written):
        alias = env[raw[i]]
        c.write(alias, _as(c, Ref(ref.name, first + k), outs[first + k], alias.spec, origin), origin)
    for i, room in enumerate(rooms):
        c.write(room, _as(c, Ref(ref.name, i), outs[i], room.spec, origin), origin)
    return rooms or [c.fresh(Ref(ref.name, i), outs[i]) for i in range(first)]


def _as(c: Converter, ref: Any, have: TensorSpec, want: TensorSpec, origin: Origin) -> Ref:
    """A value cast and expanded to a spec."""
    if have.dtype != want.dtype:
        have = TensorSpec(have.shape, want.dtype)
        ref = c.emit("aten._to_copy", (ref, Dtype(want.dtype), None, None, None, False, None), (have,), origin)
    if have.shape != want.shape:
        ref = c.emit("aten.expand", (ref, want.shape, False), (want,), origin)
    return ref  # type: ignore[no-any-return]
