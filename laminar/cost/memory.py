"""How much memory a rank needs, line by line: a program is played through as the runtime runs it.

What lives from step to step is counted first: parameters, optimizer state, inputs, constants, and the buffers
that exchanges are made with. Then every line takes memory for what it makes and gives back what it was
the last to read. Views share the memory of what they view, products write gradients into their bucket, a
reduction works in place where the runtime lets it, a collective holds its buffers from its start to the
line that first reads its result. With fused groups, values inside a group never exist, a kernel may
overwrite what it is the last to read, and the compiler keeps memory for later results (`cost/parking.py`).

    step      `runtime.module.Step`, line by line: no groups given
    compiled  `runtime.compiled.Compiled`: groups given, and the program after recomputation, as it is compiled

Buffers follow `runtime/transport.py`: shared memory (`shared`), sends (`gloo`), NCCL (`nccl`), or none at all (`null`).
What a plan offloads counts as long as it is on the device: until its copy to the host has arrived, and from where it
starts to come back.

Not covered: what a kernel takes for itself while it runs (an LSTM takes much; draws are counted), memory of the
framework, of NCCL, and of the data loader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from laminar.cost.buffers import Buffers, buffers_of
from laminar.cost.heap import HEAPS, Heap
from laminar.cost.layout import layouts
from laminar.cost.parking import NEVER_IN_PLACE, Life, arranged, handed_on
from laminar.cost.table import DRAWS, local_call
from laminar.cost.work import FREE
from laminar.errors import ClusterError
from laminar.ir.codec import Ref
from laminar.ir.program import BRING, SEND, Instr, Program

TWO_PASSES = frozenset("native_layer_norm_backward native_group_norm_backward batch_norm_backward".split())
"""Ops that a compiler makes two kernels of, along rows and across them: what they read outlives the first."""
ALLOCATES = frozenset(
    "convolution convolution_backward attention attention_backward lstm lstm_backward sort topk".split()
)
"""Kernels that take memory for their results themselves."""
KEEPS = ALLOCATES - {"convolution"}
"""Kernels whose results, several at once, are not taken over by others."""

DRAWN_BYTES = 32
"""What a keyed draw takes for each number at most, before its result: four times 64 bits (`capture/kernels.py`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, and how they change over a step."""

    parameters: int
    gradients: int
    state: int
    """Of the optimizer."""
    inputs: int
    """Batch, buffers of the model and everything else that is given and is no parameter."""
    constants: int
    buffers: int
    """Of collectives, made once; buckets of gradients are counted as gradients."""
    peak_activations: int
    """What lines make and others read, where it is most."""
    peak_bytes: int
    """Everything, where it is most; rounded as the allocator does."""
    peak_line: int
    """Where that is; the number of lines stands for the optimizer."""
    base_bytes: int
    """What is there before the first line: all that stays, and places that wait for gradients."""
    reserved_bytes: int
    """What the allocator has taken from the device by the end of the step."""
    curve: tuple[tuple[int, int], ...]
    """(line, bytes while it runs); the last point is the optimizer's."""
    host_bytes: int = 0
    """Of buffers in the host's memory for what is offloaded. Where the host is the device (allocator "cpu") they are
    part of `peak_bytes` as well."""

    @property
    def resting(self) -> int:
        """What is there between steps, without gradients."""
        return self.parameters + self.state + self.inputs + self.constants + self.buffers

    def __str__(self) -> str:
        rows = ("parameters", "gradients", "state", "inputs", "constants", "buffers", "peak_activations", "peak_bytes")
        lines = [f"  {name.replace('_', ' '):<16} {getattr(self, name) / 1e6:12,.1f} MB" for name in rows]
        return "\n".join(["memory of one rank", *lines, f"  peak at line     {self.peak_line:12,}"])


@dataclass(eq=False, slots=True)
class _Place:
    """A stretch of memory that values lie in."""

    nbytes: int
    block: int
    fixed: bool
    active: bool
    """Whether it counts as an activation."""
    index: int
    values: int = 0


def memory(
    program: Program,
    rank: int = 0,
    *,
    optimizer: float = 8.0,
    update: float = 0.0,
    allocator: str | None = None,
    backend: str | None = None,
    groups: Sequence[tuple[int, ...]] | None = None,
    keep: Collection[str] = (),
    workspace_bytes: int = 0,
) -> Memory:
    """What `rank` needs for a step of a program.

    `optimizer`: bytes of state per element that the rank updates (8 for Adam in float32, 4 for momentum); `update`:
    bytes per element that the update takes while it runs. `allocator`: "cuda", "cpu" or None for exact bytes.
    `backend`: who moves bytes; by default NCCL on a GPU, else shared memory. `groups`: lines that run as one kernel.
    `keep`: names of lines whose results somebody else holds until the end. `workspace_bytes`: what libraries
    take for themselves for good.
    """
    if allocator not in HEAPS:
        raise ClusterError(f"no allocator {allocator!r}", allowed="  ".join(map(str, HEAPS)))
    moved = backend or ("nccl" if allocator == "cuda" else "shared")
    if allocator == "cpu":
        workspace_bytes += _host_bytes(program, rank)
    more = optimizer, update, workspace_bytes
    if groups is None:
        return _Play(program, rank, HEAPS[allocator](), moved, groups, keep, {}).run(*more)
    first = _Play(program, rank, HEAPS[None](), moved, groups, keep, {})
    first.run(*more)
    handed = handed_on(first.lives, first.reads, first.parts, first.unseen)
    return _Play(program, rank, HEAPS[allocator](), moved, groups, keep, handed).run(*more)


def _host_bytes(program: Program, rank: int) -> int:
    """What offloaded values take in the host's memory, all at once."""
    sent = (p for i in program.instrs if i.op == SEND for p in i.outs if p)
    return sum(p.local(program.mesh, rank).nbytes for p in sent)


class _Play:
    def __init__(
        self,
        program: Program,
        rank: int,
        heap: Heap,
        backend: str,
        groups: Sequence[tuple[int, ...]] | None,
        keep: Collection[str],
        handed: Mapping[int, int],
    ) -> None:
        self.program, self.rank, self.mesh, self.heap = program, rank, program.mesh, heap
        self.compiled = groups is not None
        self.makers = {i.name: i for i in program.instrs}
        self.calls = {i.name: local_call(i, self.mesh, rank) for i in program.instrs}
        self.buffers: Buffers = buffers_of(program, rank, backend, self.compiled)
        self.copies = layouts(program, self.calls).copies
        self.uses: dict[Ref, int] = {}
        for ref in [r for i in program.instrs for r in i.refs] + [o.ref for o in program.outputs]:
            self.uses[ref] = self.uses.get(ref, 0) + 1
        self.readers = dict(self.uses)
        for name in keep:
            for k in range(len(self.makers[name].outs)):
                self.readers[Ref(name, k)] = self.readers.get(Ref(name, k), 0) + 1
        self.places: dict[Ref, _Place] = {}
        self.flying: dict[str, list[_Place]] = {}
        self.active = self.peak_active = 0
        self.grads = self._gradients()
        self.order, self.inner = arranged(program, groups)
        self.curve: list[tuple[int, int]] = []
        self.high = 0
        self.handed, self.giving = handed, set(handed.values())
        self.parked: dict[int, int] = {}
        self.lives: list[Life] = []
        self.reads: list[set[int]] = []
        self.parts: list[int] = []
        self.unseen: dict[int, int] = {}
        self.part, self.late = 0, False

    # -- memory --------------------------------------------------------------------------------

    def _take(
        self, nbytes: int, fixed: bool = False, active: bool = True, maker: Instr | None = None, dtype: str = ""
    ) -> _Place:
        index, step = len(self.lives), -1 if fixed else len(self.parts)
        op = maker.op.partition(".")[2] if maker else ""
        kernel = maker is not None and not maker.kind
        self.lives.append(
            Life(nbytes, (nbytes, dtype), step, gives=kernel and op not in KEEPS, takes=kernel and op not in ALLOCATES)
        )
        before = self.handed.get(index)
        if before is None:
            block = self.heap.take(nbytes) if nbytes else -1
        else:
            block = self.parked.pop(before)
            self.active -= nbytes
        place = _Place(nbytes, block, fixed, active and not fixed, index)
        if place.active:
            self.active += nbytes
            self.peak_active = max(self.peak_active, self.active)
        self.high = max(self.high, self.heap.allocated)
        return place

    def _put(self, ref: Ref, place: _Place) -> None:
        """A value lies there."""
        place.values += 1
        self.places[ref] = place

    def _drop(self, place: _Place) -> None:
        """One value or user less."""
        place.values -= 1
        if place.values == 0 and not place.fixed:
            self.lives[place.index].dead = len(self.parts)
            if place.index in self.giving:
                self.parked[place.index] = place.block
                return
            if place.block >= 0:
                self.heap.give(place.block)
            if place.active:
                self.active -= place.nbytes

    def _read(self, ref: Ref) -> None:
        """One reader less; behind the last the value goes."""
        self.readers[ref] -= 1
        if self.readers[ref] == 0:
            self._drop(self.places[ref])

    # -- what is known before ------------------------------------------------------------------

    def _local(self, ref: Ref) -> int:
        out = self.makers[ref.name].outs[ref.index]
        return out.local(self.mesh, self.rank).nbytes if out else 0

    def _root(self, ref: Ref) -> Ref:
        """The value whose memory this is a view of."""
        while (maker := self.makers.get(ref.name)) is not None and self._is_view(maker):
            ref = maker.refs[0]
        return ref

    def _is_view(self, instr: Instr) -> bool:
        if instr.op in FREE or instr.op.startswith("aten.squeeze"):
            return instr.name not in self.copies
        return False

    def _gradients(self) -> set[Ref]:
        """Values that leave as gradients, or whose memory does."""
        return {self._root(o.ref) for o in self.program.outputs if o.kind == "grad"}

    # -- the step ------------------------------------------------------------------------------

    def run(self, optimizer: float, update: float, workspace_bytes: int) -> Memory:
        """Play it through."""
        program, mesh = self.program, self.mesh
        sizes: dict[str, int] = {"param": 0, "": 0}
        for item in program.inputs:
            nbytes = item.placed.local(mesh, self.rank).nbytes
            sizes["param" if item.kind == "param" else ""] += nbytes
            self._put(Ref(item.name), self._take(nbytes, fixed=True))
        read = {r.name for r in self.uses}
        constants = 0
        for constant in program.constants:
            if constant.name in read:
                constants += constant.spec.nbytes
                self._put(Ref(constant.name), self._take(constant.spec.nbytes, fixed=True))
        grads = [o.placed.local(mesh, self.rank) for o in program.outputs if o.kind == "grad"]
        elements = [g.numel for g in grads]
        for n in elements:
            self._take(int(n * optimizer), fixed=True)
        for nbytes in self.buffers.fixed:
            self._take(nbytes, fixed=True)
        if workspace_bytes:
            self._take(workspace_bytes, fixed=True)
        self.homes = {name: self._take(nbytes, fixed=True) for name, nbytes in self.buffers.homes.items()}
        base = self.heap.allocated
        for lines in self.order:
            self.high = self.heap.allocated
            part = self._line(lines)
            self.parts.append(part)
            self.curve.append((lines[-1], self.high))
        self.high = self.heap.allocated
        for out in program.outputs:
            self._await(out.ref)
        extra = [self._take(int(n * update)) for n in elements if update]
        self.curve.append((len(program.instrs), self.high))
        for place in extra:
            place.values = 1
            self._drop(place)
        top = max(range(len(self.curve)), key=lambda k: self.curve[k][1])
        return Memory(
            parameters=sizes["param"],
            gradients=sum(g.nbytes for g in grads),
            state=sum(int(n * optimizer) for n in elements),
            inputs=sizes[""],
            constants=constants,
            buffers=sum(self.buffers.fixed),
            peak_activations=self.peak_active,
            peak_bytes=self.curve[top][1],
            peak_line=self.curve[top][0],
            base_bytes=base,
            reserved_bytes=self.heap.reserved,
            curve=tuple(sorted(self.curve)),
            host_bytes=_host_bytes(program, self.rank),
        )

    def _line(self, lines: tuple[int, ...]) -> int:
        """One line, or several that are one kernel; the number of the part it is in, -1 for a collective."""
        instrs = [self.program.instrs[k] for k in lines]
        read = [r for i in instrs for r in i.refs]
        inside = {i.name for i in instrs}
        begins = not self.late and instrs[0].phase != "forward"
        apart = instrs[0].moves or instrs[0].hosts
        if begins or apart or any(r.name in self.flying for r in read):
            self.part, self.late = self.part + 1, self.late or begins
        for ref in read:
            if ref.name not in inside:
                self._await(ref)
        self.reads.append({self.places[r].index for r in read if r.name not in inside and r not in self.inner})
        if apart:  # these read their inputs themselves
            (self._start if instrs[0].moves else self._copy)(instrs[0])
            return -1
        spare = self._spare(instrs, read)
        for instr in instrs:
            self._make(instr, spare.get(instr.name, []))
        for ref in read:
            if ref not in self.inner:
                self._read(ref)
        for instr in instrs:
            for k in range(len(instr.outs)):
                ref = Ref(instr.name, k)
                if ref in self.places and ref not in self.inner and not self.readers.get(ref):
                    self._drop(self.places.pop(ref))
        return self.part

    def _make(self, instr: Instr, spare: list[_Place]) -> None:
        """Memory for what a line makes: none, some that is there already, or its own."""
        view = self.places.get(instr.refs[0]) if instr.refs and self._is_view(instr) else None
        if instr.op in DRAWS and instr.outs[0] and not self.compiled:
            bits = self._take(DRAWN_BYTES * instr.outs[0].local(self.mesh, self.rank).numel)
            bits.values = 1
            self._drop(bits)
        for k, out in enumerate(instr.outs):
            ref = Ref(instr.name, k)
            if out is None:
                continue
            if ref in self.inner:
                if view is not None:
                    self.places[ref] = view  # not a user of it: gone when the kernel ends
                continue
            home = self.buffers.lying.get(ref)
            if view is not None:
                self._put(ref, view)
            elif home is not None:
                self._put(ref, self.homes[home])
            else:
                nbytes = self._local(ref)
                place = next((p for p in spare if p.nbytes == nbytes), None)
                if place is None or ref in self.grads:
                    maker = self.makers.get(self._root(ref).name, instr)
                    place = self._take(nbytes, active=ref not in self.grads, maker=maker, dtype=out.spec.dtype)
                else:
                    spare.remove(place)
                    self._unseen(nbytes)
                if instr.op == "aten.cat":
                    self._unseen(nbytes)
                self._put(ref, place)

    def _unseen(self, nbytes: int) -> None:
        self.unseen[len(self.parts)] = self.unseen.get(len(self.parts), 0) + nbytes

    def _spare(self, instrs: list[Instr], read: list[Ref]) -> dict[str, list[_Place]]:
        """For lines of a kernel, the memory of what they are the last to read: a compiler may write results there."""
        if not self.compiled or any(i.kind or i.op.partition(".")[2] in NEVER_IN_PLACE for i in instrs):
            return {}
        last: dict[Ref, str] = {}
        through: dict[str, set[Ref]] = {}  # what a line reads from outside, also by way of values that never exist
        inside = {i.name for i in instrs}
        for instr in instrs:
            found: set[Ref] = set()
            for ref in instr.refs:
                found |= {ref} if ref.name not in inside else through[ref.name] if ref in self.inner else set()
            through[instr.name] = found
            if any(Ref(instr.name, k) not in self.inner for k in range(len(instr.outs))):
                last |= dict.fromkeys(found, instr.name)
        again = {r for i in instrs if i.op.partition(".")[2] in TWO_PASSES for r in through[i.name]}
        out: dict[str, list[_Place]] = {}
        for ref, name in last.items():
            if ref in again:
                continue
            place = self.places.get(ref)
            if place is not None and place.active and place.values == 1 and self.readers[ref] == read.count(ref):
                out.setdefault(name, []).append(place)
        for places in out.values():
            places.sort(key=lambda p: -p.index)  # what was made last goes first, seen in compiled code
        return out

    # -- collectives ---------------------------------------------------------------------------

    def _start(self, instr: Instr) -> None:
        """What an exchange takes when it starts; inputs it holds on to are let go when it ends."""
        need = self.buffers.needs[instr.name]
        if need.result == "start":
            self._results(instr)
        elif need.result == "place":
            for k, ref in enumerate(instr.refs):
                home = self.buffers.lying.get(Ref(instr.name, k))
                self._put(Ref(instr.name, k), self.places[ref] if home is None else self.homes[home])
        held = [self._take(nbytes) for nbytes in need.during]
        if need.holds:
            held += [self.places[ref] for ref in dict.fromkeys(instr.refs)]
        for place in held:
            place.values += 1
        self.flying[instr.name] = held
        for ref in instr.refs:
            self._read(ref)

    def _copy(self, instr: Instr) -> None:
        """To the host: what is sent is held until it has arrived, and takes nothing there. Back: it has memory from the
        start."""
        back = instr.op == BRING
        for k in range(len(instr.outs)):
            self._put(Ref(instr.name, k), self._take(self._local(Ref(instr.name, k)) if back else 0))
        held = [] if back else [self.places[ref] for ref in dict.fromkeys(instr.refs)]
        for place in held:
            place.values += 1
        self.flying[instr.name] = held
        for ref in instr.refs:
            self._read(ref)

    def _results(self, instr: Instr) -> None:
        """Memory for what an exchange makes, where it has none yet."""
        for k in range(len(instr.outs)):
            ref = Ref(instr.name, k)
            home = self.buffers.lying.get(ref)
            if home:
                self._put(ref, self.homes[home])
            else:
                nbytes = self._local(ref) if home is None else 0
                self._put(ref, self._take(nbytes, active=ref not in self.grads))

    def _await(self, ref: Ref) -> None:
        """A result is needed: if its exchange is still under way, it ends here."""
        if ref.name not in self.flying:
            return
        instr = self.makers[ref.name]
        if instr.moves and self.buffers.needs[ref.name].result == "finish":
            self._results(instr)
        for place in self.flying.pop(ref.name):
            self._drop(place)
        for k in range(len(instr.outs)):
            made = Ref(instr.name, k)
            if not self.readers.get(made):
                self._drop(self.places.pop(made))
