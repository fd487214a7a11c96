"""How much memory a rank needs, line by line: a program is played through as the runtime runs it.

What lives from step to step is counted first: parameters, optimizer state, inputs, constants, and the buffers
that exchanges are made with. Then every line takes memory for what it makes and gives back what it was
the last to read. Views share the memory of what they view, products write gradients into their bucket, a
reduction works in place where the runtime lets it, a collective holds its buffers from its start to the
line that first reads its result. With fused groups, values inside a group never exist, a kernel may
overwrite what it is the last to read, and the compiler keeps memory for later results
(`cost/memory/inductor_reuse.py`).

    step      `runtime.module.Step`, line by line: no groups given
    compiled  `runtime.compiled.Compiled`: groups given, and the program after recomputation, as it is compiled

Buffers follow `runtime/comm/transport.py`: shared memory (`shared`), sends (`gloo`), NCCL (`nccl`), or none at all
(`null`). What a plan offloads counts as long as it is on the device: until its copy to the host has arrived, and from
where it starts to come back.

Not covered: what a kernel takes for itself while it runs (an LSTM takes much; draws are counted), memory of the
framework, of NCCL, and of the data loader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from laminar.cost.memory.allocator import HEAPS, Heap, Nowhere
from laminar.cost.memory.comm_buffers import Need
from laminar.cost.memory.inductor_reuse import Life, handed_on
from laminar.cost.memory.liveness import LineRun, Script
from laminar.errors import ClusterError
from laminar.ir.ops import HOST_BRING, HOST_SEND
from laminar.ir.program import Program

DRAWN_BYTES = 32
"""What a keyed draw takes for each number at most, before its result: four times 64 bits (`capture/ops/kernels.py`)."""


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
    script = Script(program, rank, moved, groups, keep)
    handed: Mapping[int, int] = {}
    if groups is not None:
        first = _Play(script, Nowhere(), {})
        first.run(*more)
        handed = handed_on(first.lives, first.reads, first.parts, first.unseen)
    return _Play(script, HEAPS[allocator](), handed).run(*more)


def _host_bytes(program: Program, rank: int) -> int:
    """What offloaded values take in the host's memory, all at once."""
    sent = (p for i in program.instrs if i.op == HOST_SEND for p in i.outs if p)
    return sum(p.local(program.mesh, rank).nbytes for p in sent)


class _Play:
    def __init__(self, script: Script, heap: Heap, handed: Mapping[int, int]) -> None:
        self.script, self.program, self.rank, self.mesh = script, script.program, script.rank, script.program.mesh
        self.heap, self.buffers, self.lying, self.inner = heap, script.buffers, script.lying, script.inner
        self.readers = list(script.readers)
        self.places: list[_Place | None] = [None] * script.forms.values
        self.flying: dict[int, list[_Place]] = {}
        """By line, what its exchange holds on to."""
        self.active = self.peak_active = 0
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
        self,
        nbytes: int,
        fixed: bool = False,
        active: bool = True,
        gives: bool = False,
        takes: bool = False,
        dtype: str = "",
    ) -> _Place:
        index = len(self.lives)
        self.lives.append(Life(nbytes, (nbytes, dtype), -1 if fixed else len(self.parts), gives=gives, takes=takes))
        before = self.handed.get(index)
        if before is None:
            block = self.heap.take(nbytes) if nbytes else -1
        else:
            block = self.parked.pop(before)
            self.active -= nbytes
        place = _Place(nbytes, block, fixed, active and not fixed, index)
        if place.active:
            self.active += nbytes
            if self.active > self.peak_active:
                self.peak_active = self.active
        if self.heap.allocated > self.high:
            self.high = self.heap.allocated
        return place

    def _put(self, value: int, place: _Place) -> None:
        """A value lies there."""
        place.values += 1
        self.places[value] = place

    def _at(self, value: int) -> _Place:
        """Where a value lies."""
        place = self.places[value]
        assert place is not None
        return place

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

    def _read(self, value: int) -> None:
        """One reader less; behind the last the value goes."""
        self.readers[value] -= 1
        if self.readers[value] == 0:
            self._drop(self._at(value))

    def _forget(self, value: int) -> None:
        """Nobody will read it."""
        place = self._at(value)
        self.places[value] = None
        self._drop(place)

    # -- the step ------------------------------------------------------------------------------

    def run(self, optimizer: float, update: float, workspace_bytes: int) -> Memory:
        """Play it through."""
        program, mesh, forms = self.program, self.mesh, self.script.forms
        sizes: dict[str, int] = {"param": 0, "": 0}
        for item in program.inputs:
            nbytes = item.placed.local(mesh, self.rank).nbytes
            sizes["param" if item.kind == "param" else ""] += nbytes
            self._put(forms.numbers[item.name], self._take(nbytes, fixed=True))
        constants = 0
        for constant in program.constants:
            if self.script.used[forms.numbers[constant.name]]:
                constants += constant.spec.nbytes
                self._put(forms.numbers[constant.name], self._take(constant.spec.nbytes, fixed=True))
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
        for run in self.script.runs:
            self.high = self.heap.allocated
            part = self._kernel(run)
            self.parts.append(part)
            self.curve.append((run.lines[-1], self.high))
        self.high = self.heap.allocated
        for out in program.outputs:
            self._await(forms.number(out.ref))
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

    def _kernel(self, run: LineRun) -> int:
        """One line, or several that are one kernel; the number of the part it is in, -1 for a collective."""
        script, flying, places, inner, readers = self.script, self.flying, self.places, self.inner, self.readers
        begins = not self.late and not run.forward
        awaited = flying and any(script.maker[v] in flying for v in run.read)
        if begins or run.apart or awaited:
            self.part, self.late = self.part + 1, self.late or begins
        if awaited:
            for v in run.outer:
                self._await(v)
        if script.compiled and not self.handed:
            self.reads.append({self._at(v).index for v in run.seen})
        if run.apart:  # these read their inputs themselves
            (self._start if script.fact(run.lines[0]).moves else self._copy)(run.lines[0])
            return -1
        spare = self._spare(run) if run.spare else {}
        for line in run.lines:
            self._make(line, spare.get(line, []))
        for v in run.read:
            if v not in inner:
                readers[v] -= 1
                if readers[v] == 0:
                    self._drop(self._at(v))
        makes = script.forms.makes
        for line in run.lines:
            for v in range(makes[line], makes[line] + script.fact(line).makes):
                if not readers[v] and places[v] is not None and v not in inner:
                    self._forget(v)
        return self.part

    def _make(self, line: int, spare: list[_Place]) -> None:
        """Memory for what a line makes: none, some that is there already, or its own."""
        script = self.script
        fact, first = script.fact(line), script.forms.makes[line]
        view = self.places[script.forms.reads[line][0]] if script.views[line] else None
        if fact.drawn and not script.compiled:
            bits = self._take(DRAWN_BYTES * fact.drawn)
            bits.values = 1
            self._drop(bits)
        for k, nbytes, dtype in fact.outs:
            v = first + k
            if v in self.inner:
                if view is not None:
                    self.places[v] = view  # not a user of it: gone when the kernel ends
                continue
            if view is not None:
                self._put(v, view)
                continue
            home = self.lying.get(v)
            if home is not None:
                self._put(v, self.homes[home])
                continue
            grad = v in script.grads
            place = next((p for p in spare if p.nbytes == nbytes), None)
            if place is None or grad:
                root = script.maker[script.root(v)] if script.views[line] else line
                maker = script.fact(root) if root >= 0 else fact
                place = self._take(nbytes, active=not grad, gives=maker.gives, takes=maker.takes, dtype=dtype)
            else:
                spare.remove(place)
                self._unseen(nbytes)
            if fact.cat:
                self._unseen(nbytes)
            self._put(v, place)

    def _unseen(self, nbytes: int) -> None:
        self.unseen[len(self.parts)] = self.unseen.get(len(self.parts), 0) + nbytes

    def _spare(self, run: LineRun) -> dict[int, list[_Place]]:
        """For lines of a kernel, the memory of what they are the last to read: a compiler may write results there."""
        out: dict[int, list[_Place]] = {}
        for v, line, times in run.spare:
            place = self.places[v]
            if place is not None and place.active and place.values == 1 and self.readers[v] == times:
                out.setdefault(line, []).append(place)
        for places in out.values():
            places.sort(key=lambda p: -p.index)  # what was made last goes first, seen in compiled code
        return out

    # -- collectives ---------------------------------------------------------------------------

    def _start(self, line: int) -> None:
        """What an exchange takes when it starts; inputs it holds on to are let go when it ends."""
        need, reads, first = self._need(line), self.script.forms.reads[line], self.script.forms.makes[line]
        if need.result == "start":
            self._results(line)
        elif need.result == "place":
            for k, v in enumerate(reads):
                home = self.lying.get(first + k)
                self._put(first + k, self._at(v) if home is None else self.homes[home])
        held = [self._take(nbytes) for nbytes in need.during]
        if need.holds:
            held += [self._at(v) for v in dict.fromkeys(reads)]
        self._fly(line, held)

    def _copy(self, line: int) -> None:
        """To the host: what is sent is held until it has arrived, and takes nothing there. Back: it has memory from the
        start."""
        back, first = self.program.instrs[line].op == HOST_BRING, self.script.forms.makes[line]
        fact = self.script.fact(line)
        sizes = {k: nbytes for k, nbytes, _ in fact.outs} if back else {}
        for k in range(fact.makes):
            self._put(first + k, self._take(sizes.get(k, 0)))
        self._fly(line, [] if back else [self._at(v) for v in dict.fromkeys(self.script.forms.reads[line])])

    def _fly(self, line: int, held: list[_Place]) -> None:
        """It is under way, and holds on to something."""
        for place in held:
            place.values += 1
        self.flying[line] = held
        for v in self.script.forms.reads[line]:
            self._read(v)

    def _need(self, line: int) -> Need:
        return self.buffers.needs[self.program.instrs[line].name]

    def _results(self, line: int) -> None:
        """Memory for what an exchange makes, where it has none yet."""
        first, fact = self.script.forms.makes[line], self.script.fact(line)
        sizes = {k: nbytes for k, nbytes, _ in fact.outs}
        for k in range(fact.makes):
            v = first + k
            home = self.lying.get(v)
            if home:
                self._put(v, self.homes[home])
            else:
                nbytes = sizes.get(k, 0) if home is None else 0
                self._put(v, self._take(nbytes, active=v not in self.script.grads))

    def _await(self, value: int) -> None:
        """A result is needed: if its exchange is still under way, it ends here."""
        line = self.script.maker[value]
        if line not in self.flying:
            return
        fact = self.script.fact(line)
        if fact.moves and self._need(line).result == "finish":
            self._results(line)
        for place in self.flying.pop(line):
            self._drop(place)
        for v in range(self.script.forms.makes[line], self.script.forms.makes[line] + fact.makes):
            if not self.readers[v]:
                self._forget(v)
