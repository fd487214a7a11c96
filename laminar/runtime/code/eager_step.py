"""A program as code: a `torch.fx.GraphModule` whose forward is one rank's step, line by line.

What can be decided before running is decided here: sizes, offsets, which exchange, who may write
in place. Weight gradients that go into a bucket are written there by the product that makes them
(`mm(out=...)`), so that reduction needs no copy. While its transport has a tape, a copy of the code runs that
stamps every line (`runtime/trace/tape.py`).
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from laminar.capture.ops.torch_ops import DTYPES, constant_tensor, gives_list
from laminar.ir.program import Instr, Program
from laminar.ir.sbp import local_shape
from laminar.ir.serial.codec import Ref
from laminar.runtime.code.call_list import Calls
from laminar.runtime.code.fused_lstm import FUSED, LSTM_FORWARD, paired
from laminar.runtime.code.host_copies import exchange_of
from laminar.runtime.code.local_op import prepare
from laminar.runtime.comm.aliases import result_may_alias
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.transport import PASSING, Bucket, Groups, Null
from laminar.runtime.trace.tape import Recordable, stamped


def _rows_into(grad: Tensor, ids: Tensor, rows: int, padding: int, by_count: bool, *, out: Tensor) -> Tensor:
    """The gradient of a table of embeddings, where it is wanted: fresh memory the size of the table costs more."""
    if grad.device.type != "cpu" or padding >= 0 or by_count:
        return out.copy_(torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, by_count))
    return out.zero_().index_add_(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))


OUT_VARIANTS: dict[str, Callable[..., Any]] = {
    "aten.mm": torch.mm,
    "aten.bmm": torch.bmm,
    "aten.addmm": torch.addmm,
    "aten.embedding_dense_backward": _rows_into,
}
"""Ops that can write their result where they are told."""


class Adding:
    """Whether products that make gradients add to what their buffers hold, or begin anew.

    Programs that make terms of the same sums (for micro-batches of different sizes) share the buffers, by the name of
    the gradient.
    """

    def __init__(self) -> None:
        self.first = True
        self.buckets: dict[str, Bucket] = {}


def _mm_adding(adding: Adding, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product that is a term of a sum over micro-batches: written and added in one pass."""
    return torch.mm(a, b, out=out) if adding.first else out.addmm_(a, b)


class EagerStep:
    """One rank's compiled step: call it with local inputs in order, get local outputs in order."""

    def __init__(
        self,
        program: Program,
        transport: Groups | Null,
        constants: Mapping[str, Tensor] | None = None,
        ranges: bool = False,
        watch: Callable[[Instr, Any], None] | None = None,
        adding: Adding | None = None,
        text: bool = True,
    ) -> None:
        """`watch` sees every line of the program with its result, as it runs; without `text` its lines are only called.

        With `adding`, gradients that are plain products are summed over runs in their own buffers, from the first on;
        `sums` says which outputs these are.
        """
        self.program, self.transport, self.adding = program, transport, adding
        transport.prepare(program, in_order=True)
        build = _Build(program, transport, constants or {}, ranges, watch, adding, text)
        self.module = build.module()
        self.buckets = [*{id(b): b for b, _ in (*build.buckets.values(), *build.into.values())}.values()]
        """Buffers that every run writes anew."""
        self.sums = frozenset(i for i, o in enumerate(program.outputs) if o.ref.name in build.adds)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        tape = self.transport.tape
        with torch.no_grad():
            if tape is not None and tape.active:
                return tape.run(self._stamped, *inputs)
            try:
                return self.module.forward(*inputs)  # type: ignore[no-any-return]
            except Exception as error:
                self._note(error)
                raise

    def _note(self, error: Exception) -> None:
        """Say which op of the user's failed, where an error comes out of generated code."""
        if isinstance(self.module, Calls):
            return
        lines = [n for f, n in traceback.walk_tb(error.__traceback__) if f.f_code is self.module.forward.__code__]
        written = self.code.splitlines()
        name = written[lines[-1] - 1].partition("=")[0].strip() if lines and lines[-1] <= len(written) else ""
        for node in self.module.graph.nodes:
            if node.name == name and node.meta.get("where"):
                error.add_note(f"in the step that Laminar made of {node.meta['where']}")

    @cached_property
    def _stamped(self) -> Recordable:
        return stamped(self.module, self.program, self.transport.rank)

    @property
    def code(self) -> str:
        """The generated Python."""
        return str(self.module.code)


class _Build:
    def __init__(
        self,
        program: Program,
        transport: Groups | Null,
        constants: Mapping[str, Tensor],
        ranges: bool,
        watch: Callable[[Instr, Any], None] | None = None,
        adding: Adding | None = None,
        text: bool = True,
    ) -> None:
        self.program, self.transport, self.adding = program, transport, adding
        self.adds: set[str] = set()
        """Products that add to their buffers."""
        self.mesh, self.rank, self.device = program.mesh, transport.rank, transport.device
        self.root: dict[str, Any] = {}
        self.graph: Any = fx.Graph() if text else Calls(self.root)
        self.env: dict[Ref, Any] = {}
        self.waiting: dict[str, tuple[Instr, Any, str]] = {}
        self.uses: dict[Ref, int] = {}
        self.ranges, self.watch = ranges, watch
        for instr in program.instrs:
            for ref in instr.refs:
                self.uses[ref] = self.uses.get(ref, 0) + 1
        for out in program.outputs:
            self.uses[out.ref] = self.uses.get(out.ref, 0) + 1
        self.makers = {i.name: i for i in program.instrs}
        self.given = constants
        # Who watches is shown tensors.
        self.recurrent = paired(program) if self.device.type == "cpu" and watch is None else {}
        self.into: dict[str, tuple[Bucket, int]] = {}
        self.buckets: dict[str, tuple[Bucket, list[int]]] = {}
        leaving = {o.ref for o in program.outputs if o.kind not in PASSING}
        for instr in program.instrs:
            # A lone gradient gets a buffer too: one that is made once, not in every step.
            if instr.kind == "all_reduce" and (len(instr.refs) > 1 or Ref(instr.name) in leaving):
                self._plan_bucket(instr)
        if self.device.type == "cpu":
            self._plan_local_gradients()

    def _plan_bucket(self, instr: Instr) -> None:
        """Lay out a bucket, and see which members can be written straight into it."""
        shapes = [local_shape(p.spec.shape, p.nd, self.mesh.sizes, self.mesh.coords(self.rank)) for p in instr.ins]
        dtype = DTYPES[instr.ins[0].spec.dtype]
        bucket = self.transport.bucket(instr, shapes, dtype)
        fill = []
        for i, ref in enumerate(instr.refs):
            maker = self.makers.get(ref.name)
            if maker is not None and maker.op in OUT_VARIANTS and self.uses[ref] == 1 and ref.name not in self.into:
                self.into[ref.name] = (bucket, i)
            else:
                fill.append(i)
        self.buckets[instr.name] = (bucket, fill)

    def _plan_local_gradients(self) -> None:
        """Gradients that nobody reduces get buffers as well: the system would clear fresh memory in every step."""
        for out in self.program.outputs:
            maker = self.makers.get(out.ref.name)
            if out.kind == "grad" and maker is not None and maker.op in OUT_VARIANTS and self.uses[out.ref] == 1:
                shape = out.placed.local(self.mesh, self.rank).shape
                bucket = Bucket([shape], DTYPES[out.placed.spec.dtype], self.device)
                wide = out.placed.spec.dtype in ("f32", "f64")
                if self.adding is not None and maker.op == "aten.mm" and wide and out.ref.name not in self._bucketed:
                    self.adds.add(out.ref.name)
                    bucket = self.adding.buckets.setdefault(out.name, bucket)
                self.into.setdefault(out.ref.name, (bucket, 0))

    @property
    def _bucketed(self) -> set[str]:
        """Values that lie in the bucket of a collective."""
        return {r.name for i in self.program.instrs if i.name in self.buckets for r in i.refs}

    def keep(self, name: str, value: Any) -> Any:
        """An object the generated code refers to."""
        self.root[name] = value
        return self.graph.get_attr(name)

    def module(self) -> Any:
        for i, item in enumerate(self.program.inputs):
            self.env[Ref(item.name)] = self.graph.placeholder(f"in{i}")
        read = {r.name for i in self.program.instrs for r in i.refs} | {o.ref.name for o in self.program.outputs}
        for i, const in enumerate(self.program.constants):
            if const.name in read:
                value = self.given.get(const.name, None)
                value = constant_tensor(const) if value is None else value
                self.env[Ref(const.name)] = self.keep(f"const{i}", value.to(self.device))
        for line, instr in enumerate(self.program.instrs):
            for ref in instr.refs:
                self._await(ref)
            if instr.kind in ("slice", "pad"):
                box = LocalBoxing.of(instr, self.mesh, self.rank)
                holder = self.keep(f"{instr.name}_box", box)
                self._name(self.graph.call_method(instr.kind, (holder, self.env[instr.refs[0]])), instr)
            elif instr.hosts:
                self._copy(instr)
            elif instr.kind:
                self._start(instr)
            else:
                self._op(instr)
            for i, memory in enumerate(self.transport.ended(line)):
                self.graph.call_method("fill_", (self.keep(f"ended{line}_{i}", memory), 0xFF))
        for out in self.program.outputs:
            self._await(out.ref)
        self.graph.output([self.env[o.ref] for o in self.program.outputs])
        return self.graph if isinstance(self.graph, Calls) else fx.GraphModule(self.root, self.graph, "Step")

    def _name(self, node: Any, instr: Instr) -> None:
        node.meta["module"] = instr.module
        node.meta["where"] = instr.where
        node.meta["line"] = (instr.name, "finish" if instr.moves else "")
        self.env[Ref(instr.name)] = node
        if self.watch is not None:
            self.graph.call_method("__call__", (self.keep(f"{instr.name}_seen", partial(self.watch, instr)), node))

    def _op(self, instr: Instr) -> None:
        target, args, kwargs = prepare(instr, self.mesh, self.rank, self.device)
        filled = tuple(self._fill(a) for a in args)
        kwargs = {k: self._fill(v) for k, v in kwargs.items()}
        if instr.name in self.into:
            bucket, i = self.into[instr.name]
            out = self.keep(f"{instr.name}_out", bucket.views[i])
            if instr.name in self.adds:
                target, filled = _mm_adding, (self.keep("adding", self.adding), out, *filled)
            else:
                target, kwargs = OUT_VARIANTS[instr.op], {**kwargs, "out": out}
        if instr.name in self.recurrent:
            target = FUSED[instr.op]
            kwargs = {"keeps": self.recurrent[instr.name]} if instr.op == LSTM_FORWARD else {}
        range_node = self._range(instr)
        node = self.graph.call_function(target, filled, kwargs)
        self._name(node, instr)
        if range_node is not None:
            self.graph.call_function(_leave, (range_node,))
        if len(instr.outs) > 1 or gives_list(instr.op):
            for i, spec in enumerate(instr.outs):
                if spec is not None and self.uses.get(Ref(instr.name, i)):
                    self.env[Ref(instr.name, i)] = self.graph.call_function(operator.getitem, (node, i))

    def _range(self, instr: Instr) -> Any:
        """A profiler range that carries the module's name."""
        return self.graph.call_function(_enter, (f"{instr.module or 'loss'}/{instr.op}",)) if self.ranges else None

    def _start(self, instr: Instr) -> None:
        bucket, fill = self.buckets.get(instr.name, (None, []))
        copy = instr.kind == "all_reduce" and bucket is None and not self._donated(instr.refs[0])
        exchange = self.transport.exchange(instr, self.rank, copy, bucket, fill)
        holder = self.keep(f"{instr.name}_x", exchange)
        refs = [instr.refs[i] for i in fill] if bucket is not None else list(instr.refs)
        handle = self.graph.call_method("start", (holder, *[self.env[r] for r in refs]))
        handle.meta["line"] = (instr.name, "start")
        self.waiting[instr.name] = (instr, handle, f"{instr.name}_x")

    def _copy(self, instr: Instr) -> None:
        """A copy to the host or back: started here, awaited like a collective."""
        holder = self.keep(f"{instr.name}_x", exchange_of(instr, self.device))
        handle = self.graph.call_method("start", (holder, *[self.env[r] for r in instr.refs]))
        handle.meta["line"] = (instr.name, "")
        self.waiting[instr.name] = (instr, handle, f"{instr.name}_x")

    def _donated(self, ref: Ref) -> bool:
        """Whether a collective may reduce a tensor where it lies: nobody else reads it, and it is no view."""
        maker = self.makers.get(ref.name)
        return maker is not None and not maker.kind and not result_may_alias(maker) and self.uses[ref] == 1

    def _await(self, ref: Ref) -> None:
        if ref.name not in self.waiting:
            return
        instr, handle, holder = self.waiting.pop(ref.name)
        node = self.graph.call_method("finish", (self.graph.get_attr(holder), handle))
        self._name(node, instr)
        if instr.hosts:
            del node.meta["line"]  # where it was started
        if len(instr.refs) > 1 or instr.name in self.buckets or instr.hosts:
            for i in range(len(instr.outs)):
                self.env[Ref(instr.name, i)] = self.graph.call_function(operator.getitem, (node, i))

    def _fill(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            return self.env[arg]
        if isinstance(arg, list) and any(isinstance(a, Tensor) for a in arg):
            return [self.keep(f"index{len(self.root)}", a) for a in arg]
        if isinstance(arg, list):
            return [self._fill(a) for a in arg]
        return arg


def _enter(name: str) -> Any:
    handle = torch.profiler.record_function(name)
    handle.__enter__()
    return handle


def _leave(handle: Any) -> None:
    handle.__exit__(None, None, None)
