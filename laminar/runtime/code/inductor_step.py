"""A program through Inductor: fused kernels between collectives, and no host work where shapes allow.

Same call as `EagerStep`, other means. The program is first made cheap to keep (`lower/memory/mincut_recompute.py`),
then cut at collectives and where backward begins into *parts*, pure functions of tensors. Each part is traced to ATen,
decomposed and compiled when it is first reached, with the strides its inputs then have. Forward and backward are never
one part: a compiler would share what recomputation is there to make twice.

    memory    a part gets its inputs in a list that it empties; what nobody needs afterwards is freed at
              its last reader inside the part, or overwritten there.
    products  that are only made to be widened (weight gradients under autocast) come out wide.
    replay    on a GPU, a program without collectives is recorded as a CUDA graph after its first run and
              replayed from then on. Inputs named `static` are read where they lie, others are copied into
              place. All recordings of a process share one pool of memory; so, as with `EagerStep`, outputs are
              good until the next call. Loss and metrics are copies and stay good. A program that sends values to
              the host is not recorded: parts end there as at collectives.
    cache     compiled kernels are kept in $XDG_CACHE_HOME/laminar/inductor (~/.cache by default), unless
              TORCHINDUCTOR_CACHE_DIR says otherwise: a second process compiles in a fraction of the time.

Rounding differs from `EagerStep` within what fused arithmetic always differs by. Gradients that go into a
reduction are copied into its bucket here, where `EagerStep` has products write there directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES, constant_tensor, find_op
from laminar.capture.torch_private import compiled_graph
from laminar.events import emit
from laminar.ir.ops import HOST_BRING
from laminar.ir.program import Instr, Program
from laminar.ir.serial.codec import Dtype, Ref
from laminar.lower.memory.mincut_recompute import TRAFFIC, recompute, written_out
from laminar.lower.memory.planned_recompute import early
from laminar.runtime.code.cuda_graph import RecordedGraph
from laminar.runtime.code.decompositions import DECOMPOSED
from laminar.runtime.code.host_copies import Bring, Send, exchange_of
from laminar.runtime.code.local_op import prepare
from laminar.runtime.comm.aliases import result_may_alias
from laminar.runtime.comm.boxing_ops import LocalBoxing
from laminar.runtime.comm.transport import Bucket, Exchange, Groups, Null
from laminar.runtime.trace.tape import Recordable, now, recordable

CompiledPart = Callable[[list[Tensor]], Sequence[Tensor]]
Compiler = Callable[[Callable[..., Any], list[Tensor], bool, list[int], list[int]], CompiledPart]
"""From a function, its first inputs, whether it is late, which inputs it may overwrite, and which outputs are shown."""
TensorsByRef = dict[Ref, Tensor]
AS_IT_IS = ("laminar.eager", "laminar.eager_backward")
"""Python that looks at data (`laminar.eager`): no compiler sees it, and no recording of a GPU can hold it."""


def run_uncompiled(
    fn: Callable[..., Any], inputs: list[Tensor], late: bool, mine: list[int], shown: list[int]
) -> CompiledPart:
    """No compiler: the part line by line."""
    return lambda args: fn(*args)


class Compiled:
    """One rank's compiled step: call it with local inputs in order, get local outputs in order."""

    adding = None
    sums: frozenset[int] = frozenset()
    """No product adds to a sum here, as some of `EagerStep` do."""

    def __init__(
        self,
        program: Program,
        transport: Groups | Null,
        constants: Mapping[str, Tensor] | None = None,
        static: Iterable[int] = (),
        *,
        replay: bool | None = None,
        traffic: float | None = TRAFFIC,
        compiler: Compiler = compiled_graph,
    ) -> None:
        """`static` are positions of inputs whose memory never moves.

        `traffic` is what a byte of traffic is worth against a byte of memory (see `recompute`): larger keeps
        more and runs faster, None keeps everything. `replay=False` never records.
        """
        self.source, self.transport, self.static = program, transport, frozenset(static)
        transport.prepare(program)
        if traffic is not None:
            program = recompute(written_out(program), traffic=traffic)
        self.program = program
        cuda = transport.device.type == "cuda"
        self.replays = cuda and not program.collectives if replay is None else replay
        self.replays = self.replays and not any(i.hosts or i.op in AS_IT_IS for i in program.instrs)
        _keep_cache()
        cutter = _Cutter(program, transport, constants or {}, compiler)
        self.events, self.constants = cutter.events(), cutter.constants
        self._recorded: RecordedGraph | None = None
        self._ran = False

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            if not self.replays:
                return self._run(inputs)
            if self._recorded is None or not self._recorded.fits(inputs):
                self._record(inputs)
            return self._recorded(inputs) if self._recorded is not None else self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        memory: TensorsByRef = {Ref(i.name): t for i, t in zip(self.program.inputs, inputs, strict=True)}
        memory |= self.constants
        tape = self.transport.tape
        if tape is not None and tape.active:
            tape.run(self._stamped, memory)
        else:
            for event in self.events:
                event(memory)
        return [memory[o.ref] for o in self.program.outputs]

    @cached_property
    def _stamped(self) -> Recordable:
        """The events with a stamp behind each; a part is one line."""
        by_name = {i.name: i for i in self.program.instrs}
        lines, exchanges, parts = [], {}, 0
        for event in self.events:
            if isinstance(event, _Part):
                phase = "backward" if event.late else "forward"
                lines.append((Instr(f"part{parts}", "fused.part", (), (), (), (), phase=phase), ""))
                parts += 1
            elif isinstance(event, _Start | _Finish) and by_name[event.name].hosts:
                ending = "" if isinstance(event, _Start) else "/wait"
                lines.append((replace(by_name[event.name], name=event.name + ending), ""))
            elif isinstance(event, _Start | _Finish):
                lines.append((by_name[event.name], "start" if isinstance(event, _Start) else "finish"))
                exchanges[event.name] = event.exchange

        def run(memory: TensorsByRef) -> tuple[list[Tensor], list[int]]:
            stamps = [now()]
            for event in self.events:
                event(memory)
                stamps.append(now())
            return [], stamps

        return recordable(run, self.program, self.transport.rank, lines, exchanges)

    def _record(self, inputs: Sequence[Tensor]) -> None:
        """Run once, so that all is compiled and loaded, then record: a step has no effects, so it may run twice."""
        self._recorded = None
        if not self._ran:
            self._run(inputs)
            self._ran = True
        try:
            kinds = [o.kind for o in self.program.outputs]
            self._recorded = RecordedGraph(self._run, inputs, self.static, kinds, self.transport.device)
        except RuntimeError as error:
            self.replays = False
            emit("warning", what="the step can't be recorded as a CUDA graph and runs without", why=str(error)[:300])

    @property
    def parts(self) -> list[_Part]:
        """The compiled parts, in order."""
        return [e for e in self.events if isinstance(e, _Part)]


# --- cutting ---------------------------------------------------------------------------------


@dataclass
class _Line:
    """One instruction of a part, ready to be called."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Part:
    """A stretch of the program that talks to nobody."""

    compiler: Compiler
    late: bool
    lines: list[_Line] = field(default_factory=list)
    ins: list[Ref] = field(default_factory=list)
    outs: list[Ref] = field(default_factory=list)
    last: list[Ref] = field(default_factory=list)
    """Inputs that nobody needs afterwards."""
    shown: list[int] = field(default_factory=list)
    own: frozenset[Ref] = frozenset()
    """Inputs that were made by other parts, or have come back from the host."""
    like: dict[Ref, Ref] = field(default_factory=dict)
    """Gradients, and the parameters they must lie like."""
    strides: dict[Ref, tuple[int, ...]] = field(default_factory=dict)
    code: CompiledPart | None = None

    def __call__(self, memory: TensorsByRef) -> None:
        args = [memory[r] for r in self.ins]
        if self.code is None:
            self.strides = {ref: memory[param].stride() for ref, param in self.like.items()}
            self.code = self.compiler(self.compute, args, self.late, self._mine(memory), self.shown)
        for ref in self.last:
            del memory[ref]
        memory.update(zip(self.outs, self.code(args), strict=True))
        for ref, strides in self.strides.items():
            if memory[ref].stride() != strides:  # dims of length 1, whose strides mean nothing but are compared
                memory[ref] = memory[ref].as_strided(memory[ref].shape, strides)

    def compute(self, *inputs: Tensor) -> list[Tensor]:
        """The part, line by line."""
        env: dict[Ref, Any] = dict(zip(self.ins, inputs, strict=True))
        for line in self.lines:
            out = line.target(*_fill(line.args, env), **{k: _fill(v, env) for k, v in line.kwargs.items()})
            if isinstance(out, (tuple, list)):
                env.update({Ref(line.name, i): t for i, t in enumerate(out)})
            else:
                env[Ref(line.name)] = out
        return [_laid(env[r], self.strides[r]) if r in self.strides else env[r] for r in self.outs]

    def _mine(self, memory: TensorsByRef) -> list[int]:
        """Inputs that may be overwritten: made by another part, read for the last time, sharing memory with none."""
        places = [t.untyped_storage().data_ptr() for t in memory.values()]
        gone = set(self.last)
        return [
            i
            for i, ref in enumerate(self.ins)
            if ref in gone and ref in self.own and places.count(memory[ref].untyped_storage().data_ptr()) == 1
        ]


def _laid(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with its dims in memory in the order that these strides have: fused optimizers insist on it."""
    order = sorted(range(t.dim()), key=lambda d: -strides[d])
    back = sorted(range(t.dim()), key=lambda d: order[d])
    return t.permute(order).contiguous().permute(back)


def _fill(arg: Any, env: Mapping[Ref, Any]) -> Any:
    if isinstance(arg, Ref):
        return env[arg]
    if isinstance(arg, (list, tuple)):
        return type(arg)(_fill(a, env) for a in arg)
    return arg


@dataclass
class _Start:
    """Hand tensors over to a collective."""

    exchange: Exchange | Send | Bring
    refs: list[Ref]
    last: list[Ref]
    flying: dict[str, Any]
    name: str

    def __call__(self, memory: TensorsByRef) -> None:
        given = [memory[r] for r in self.refs]
        for ref in self.last:
            del memory[ref]
        if isinstance(self.exchange, Send):  # seen here, so that no part overwrites what is still being copied
            memory.update({Ref(f"{self.name}/sent", k): t for k, t in enumerate(given)})
        self.flying[self.name] = self.exchange.start(*given)


@dataclass
class _Finish:
    """Wait for a collective."""

    exchange: Exchange | Send | Bring
    count: int
    flying: dict[str, Any]
    name: str

    def __call__(self, memory: TensorsByRef) -> None:
        out = self.exchange.finish(self.flying.pop(self.name))
        if isinstance(self.exchange, Send):
            for ref in [r for r in memory if r.name == f"{self.name}/sent"]:
                del memory[ref]
        outs = out if isinstance(out, (tuple, list)) else [out]
        memory.update({Ref(self.name, i): t for i, t in enumerate(outs)})


class _Cutter:
    """From a program to events."""

    def __init__(
        self, program: Program, transport: Groups | Null, given: Mapping[str, Tensor], compiler: Compiler
    ) -> None:
        self.program, self.transport, self.compiler = program, transport, compiler
        self.mesh, self.rank, self.device = program.mesh, transport.rank, transport.device
        self.makers = {i.name: i for i in program.instrs}
        self.readers: dict[Ref, int] = {}
        for ref in [r for i in program.instrs for r in i.refs] + [o.ref for o in program.outputs]:
            self.readers[ref] = self.readers.get(ref, 0) + 1
        names = {r.name for r in self.readers}
        self.constants: TensorsByRef = {
            Ref(c.name): (given[c.name] if c.name in given else constant_tensor(c)).to(self.device)
            for c in program.constants
            if c.name in names
        }
        self.flying: dict[str, Any] = {}

    def events(self) -> list[Callable[[TensorsByRef], None]]:
        """What to do, in order."""
        out: list[Any] = []
        group: list[Instr] = []
        waiting: dict[str, _Finish] = {}
        first, late = early(self.program), False

        def close() -> None:
            if group:
                out.append(self._part(list(group), late))
                group.clear()

        def arrive(refs: Iterable[Ref]) -> None:
            for name in dict.fromkeys(r.name for r in refs if r.name in waiting):
                close()
                out.append(waiting.pop(name))

        for instr in self.program.instrs:
            arrive(instr.refs)
            if instr.name not in first and not late:
                close()
                late = True
            if instr.moves or instr.hosts:
                close()
                exchange = self._exchange(instr) if instr.moves else exchange_of(instr, self.device)
                out.append(_Start(exchange, list(instr.refs), [], self.flying, instr.name))
                waiting[instr.name] = _Finish(exchange, len(instr.outs), self.flying, instr.name)
            elif instr.op in AS_IT_IS:
                close()
                out.append(replace(self._part([instr], late), compiler=run_uncompiled))
            else:
                group.append(instr)
        close()
        arrive(o.ref for o in self.program.outputs)
        out += waiting.values()
        self._lifetimes(out)
        return out

    def _lifetimes(self, events: list[Any]) -> None:
        """Tell every event what it returns and what it reads for the last time."""
        leaving = {o.ref for o in self.program.outputs}
        parts = [e for e in events if isinstance(e, _Part)]
        made = {Ref(line.name, k): p for p in parts for line in p.lines for k in range(self._outs(line.name))}
        needed: set[Ref] = set(leaving)
        shown: set[Ref] = set(leaving)
        given = {i.name for i in self.program.inputs}  # a stage's backward need not read what it makes a gradient of
        grads = {o.ref: Ref(o.name) for o in self.program.outputs if o.kind == "grad" and o.name in given}
        for event in reversed(events):
            if isinstance(event, _Part):
                event.like = {r: p for r, p in grads.items() if made.get(r) is event}
                mine = {r for r in needed if made.get(r) is event}
                event.outs = sorted(mine, key=str)
                event.shown = [i for i, r in enumerate(event.outs) if r in shown]
                event.own = frozenset(r for r in event.ins if r in made or self._brought(r))
                event.last = [r for r in event.ins if r not in needed]
                needed |= set(event.ins)
            elif isinstance(event, _Start):
                event.last = [r for r in dict.fromkeys(event.refs) if r not in needed]
                needed |= set(event.refs)
                if not isinstance(event.exchange, Send | Bring):  # these copy however values lie
                    shown |= set(event.refs)
        for event in events:
            if not isinstance(event, _Finish):  # inputs and constants of the program stay
                event.last = [r for r in event.last if r in made or r.name in self.makers]

    def _brought(self, ref: Ref) -> bool:
        """Whether a value has come back from the host, into memory that nobody else knows."""
        return ref.name in self.makers and self.makers[ref.name].op == HOST_BRING

    def _outs(self, name: str) -> int:
        return len(self.makers[name].outs)

    def _part(self, instrs: list[Instr], late: bool) -> _Part:
        part = _Part(self.compiler, late)
        inside = {i.name for i in instrs}
        wide = self._widened(instrs)
        reads: dict[Ref, None] = {}
        for instr in instrs:
            if instr.name in wide.values():
                continue
            line = self._line(instr)
            if instr.name in wide:
                product = self._line(self.makers[wide[instr.name]])
                dtype = DTYPES[instr.outs[0].spec.dtype] if instr.outs[0] else torch.float32
                line = _Line(instr.name, find_op("aten.mm.dtype"), (*product.args[:2], dtype), {})
            part.lines.append(line)
            reads |= dict.fromkeys(r for r in _refs((line.args, line.kwargs)) if r.name not in inside)
        part.ins = list(reads)
        return part

    def _widened(self, instrs: list[Instr]) -> dict[str, str]:
        """Casts to float32 of products that nobody else reads, on a GPU: name of the cast to name of the product.

        Sizes must be multiples of 8, or the compiler would rather pad the product, which it does not know how to
        do for this form.
        """
        if self.device.type != "cuda":
            return {}
        inside = {i.name: i for i in instrs}
        out = {}
        for instr in instrs:
            if instr.op != "aten._to_copy" or instr.args[1] != Dtype("f32"):
                continue
            maker = inside.get(instr.refs[0].name)
            if maker is None or maker.op != "aten.mm" or self.readers[instr.refs[0]] > 1:
                continue
            sizes = [n for p in maker.ins for n in p.local(self.mesh, self.rank).shape]
            if maker.ins[0].spec.dtype in ("bf16", "f16") and all(n % 8 == 0 for n in sizes):
                out[instr.name] = maker.name
        return out

    def _line(self, instr: Instr) -> _Line:
        if instr.kind:
            box = LocalBoxing.of(instr, self.mesh, self.rank)
            return _Line(instr.name, getattr(box, instr.kind), (instr.refs[0],), {})
        target, args, kwargs = prepare(instr, self.mesh, self.rank, self.device)
        return _Line(instr.name, DECOMPOSED.get(instr.op, target), self._lifted(args, instr.name), kwargs)

    def _lifted(self, arg: Any, name: str) -> Any:
        """Tables of indices become inputs."""
        if isinstance(arg, Tensor):
            ref = Ref(f"{name}.table", len(self.constants))
            self.constants[ref] = arg
            return ref
        return type(arg)(self._lifted(a, name) for a in arg) if isinstance(arg, (list, tuple)) else arg

    def _exchange(self, instr: Instr) -> Exchange:
        leaving = {o.ref for o in self.program.outputs}
        bucket = None
        if instr.kind == "all_reduce" and (len(instr.refs) > 1 or Ref(instr.name) in leaving):
            shapes = [p.local(self.mesh, self.rank).shape for p in instr.ins]
            bucket = Bucket(shapes, DTYPES[instr.ins[0].spec.dtype], self.device)
        maker = self.makers.get(instr.refs[0].name)
        alone = (
            maker is not None and not maker.kind and not result_may_alias(maker) and self.readers[instr.refs[0]] == 1
        )
        return self.transport.exchange(instr, self.rank, not alone, bucket, range(len(instr.refs)) if bucket else ())


def _refs(arg: Any) -> Iterable[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, dict):
        yield from _refs(tuple(arg.values()))
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _refs(item)


def _keep_cache() -> None:
    """Tell Inductor where to keep what it compiled, unless the user has."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / "laminar" / "inductor"))
