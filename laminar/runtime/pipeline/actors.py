"""Actors at work: one rank's part of a net, step after step.

An actor fires when all it reads is there and all it fills has room; `run` of the user says what a firing does. This
file and its neighbours own everything else: registers (`registers.py`), order (`agenda.py`), transport (`channels.py`,
`control_sockets.py`), errors (`control.py`, `heartbeat.py`). Nothing is known here of models or programs.

Two numbers that only grow are all that ranks tell each other about a queue: register `n` is full (`DATA`), and the
first `n` are read (`CREDIT`). An actor begins only when its outputs have room at every reader, so nothing is ever sent
that its reader has no memory for.

One thread does it all: it hears what has come, fires what is ready (`agenda.py` says which), and sleeps until
something comes. What it did and what it waited for can be recorded (`record`, `spans`).

A run of some steps begins and ends with everybody: the fewest steps that any rank asks for are run (which is how
data ends), and nobody returns before all have done their part, or one of them has failed; then every rank raises an
error that names the cause (`heartbeat.py`). After an error nothing can be run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from laminar.errors import NetError, RankError
from laminar.ir.net import Net
from laminar.ir.timeline import Span
from laminar.runtime.pipeline.agenda import Agenda, agendas
from laminar.runtime.pipeline.channels import (
    ChannelReceiver,
    ChannelSender,
    QueueRoute,
    Value,
    fits,
    from_bytes,
    message_bytes,
    message_layout,
    parse_layout,
)
from laminar.runtime.pipeline.control import ControlPlane
from laminar.runtime.pipeline.control_sockets import BEGIN, CHOICE, CREDIT, DATA, END, Connections, ControlMessage
from laminar.runtime.pipeline.registers import Inlet, Outlet, connect
from laminar.runtime.trace.tape import now

RunFiring = Callable[[str, int, int, dict[str, list[Value]]], Mapping[str, Sequence[Value]]]
"""What a firing does: actor, which firing of the step, step (counted over all runs) and inputs by queue, to outputs by
queue. Inputs are not to be written to; those that came from another place are good until the firing ends."""
PHASE_OF_KIND = {
    "load": "batch",
    "forward": "forward",
    "backward": "backward",
    "input": "backward",
    "weight": "backward",
    "reduce": "update",
    "optimize": "update",
    "save": "host",
}
LEAST_WAIT_NS = 10_000
"""A shorter wait is not told."""
OFTEN_NS = 500_000
"""A rank that has something to do listens this often. Firings are mostly longer, so mostly before each."""


class Actors:
    """One rank's actors. Made on all ranks of the net together; `connect_actors` makes one over c10d."""

    def __init__(
        self,
        net: Net,
        run: RunFiring,
        connections: Connections,
        wires: Sequence[QueueRoute],
        senders: dict[tuple[int, int], ChannelSender],
        receivers: dict[tuple[int, int], ChannelReceiver],
        *,
        initial: Mapping[str, Sequence[Value]] | None = None,
        timeout_s: float = 600.0,
        on_failure: Callable[[RankError], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`senders` and `receivers` by wire and the other rank.

        `initial`: values of queues that are filled before the first step, on ranks that read them. `on_failure` is
        called in another thread when a cause becomes known while this rank is in a firing, which it may then abort.
        """
        self.net, self.rank = net, connections.rank
        self._run, self._connections, self._wires = run, connections, wires
        self._senders, self._receivers = senders, receivers
        self._on_close = on_close
        self.agendas = agendas(net, self.rank)
        self._by_place = {a.place: a for a in self.agendas}
        ranks = sorted({r for p in net.places for r in p.ranks})
        self.control = ControlPlane(connections, ranks, self._handle, timeout_s, on_failure)
        self.inlets, self.outlets = connect(net, self.rank, wires, receivers, initial or {})
        self._by_wire = {i.wire.number: i for i in self.inlets.values() if i.wire is not None}
        mine = [a for a in net.actors if self.rank in net.places[a.place].ranks]
        self._reads = {a.name: [self.inlets[q.name, a.place] for q in net.reads[a.name]] for a in mine}
        self._fills = {a.name: [self.outlets[q.name] for q in net.fills[a.name]] for a in mine}
        self.steps = 0
        self._phase, self._target = "", 0
        self._last: Callable[[], Sequence[float]] | None = None
        self.closed = False
        self._tape: list[tuple[str, int, int, int, int, int, str]] | None = None
        self._idle: tuple[int, str] | None = None

    # -- steps

    def run(self, steps: int, last: Callable[[], Sequence[float]] | None = None) -> int:
        """Run steps together with all ranks; how many were run: the fewest that any of them asked for.

        `last` is called when this rank's own firings are done, while others may still be at theirs; what it returns is
        added up over all ranks, in `sums`.
        """
        self.begin(steps)
        self._last = last
        self.control.live()
        heard_ns = 0
        try:
            while self._phase:
                if now() - heard_ns > OFTEN_NS:
                    self.control.hear(0.0)
                    heard_ns = now()
                if not self._act():
                    if self._tape is not None and self._phase == "work":
                        self._idle = self._idle[0] if self._idle else now(), self._awaited()
                    self.control.sleep(self._awaited)
                    heard_ns = now()
        except BaseException as error:
            self.control.stopped(error)  # by a signal, say, while it waited
            raise
        return self.steps

    def begin(self, steps: int) -> None:
        """Ask for steps; `advance` then does them bit by bit."""
        self.control.start()
        if self.closed or self._phase:
            raise RankError(f"rank {self.rank}: {'these actors are closed' if self.closed else 'a run is under way'}")
        self._phase = "begin"
        self.control.ask(BEGIN, steps)

    def advance(self) -> bool:
        """Hear what has come and do one thing, if there is one; never waits. The run is over when `phase` is empty."""
        self.control.hear(0.0)
        return self._act()

    def _act(self) -> bool:
        if self._phase == "work":
            for agenda in self._by_urgency():
                if agenda.step < self._target and (at := agenda.next(self._ready)) is not None:
                    self._fire(agenda, at)
                    return True
            if all(a.step == self._target for a in self.agendas):
                self._phase = "end"
                self.control.ask(END, 0, self._ended())
                return True
        elif self._phase == "begin" and BEGIN in self.control.answers:
            self.steps = self.control.answers.pop(BEGIN)
            self._target += self.steps
            self._phase = "work"
            return True
        elif self._phase == "end" and END in self.control.answers:
            del self.control.answers[END]
            self._phase = ""
            self.control.liveness.doing = "between runs"
            return True
        return False

    def _ended(self) -> Sequence[float]:
        """What this rank has to say when all its firings are done."""
        last, self._last = self._last, None
        if last is None:
            return ()
        step = self._target - 1
        try:
            self.control.enter("the end", step)
            said = last()
            self.control.leave()
        except BaseException as error:
            self.control.failed(error, f"the end of step {step}")
            raise
        return said

    @property
    def sums(self) -> tuple[float, ...]:
        """What `last` gave on all ranks of the last run, added up; the same bits on all of them."""
        return self.control.sums

    def _by_urgency(self) -> list[Agenda]:
        """Places that are behind come first."""
        return sorted(self.agendas, key=lambda a: (a.step, a.place)) if len(self.agendas) > 1 else self.agendas

    @property
    def phase(self) -> str:
        """`begin`, `work` or `end` of a run, or nothing."""
        return self._phase

    def _ready(self, name: str) -> bool:
        return all(i.has(name) for i in self._reads[name]) and all(o.room() for o in self._fills[name])

    def _fire(self, agenda: Agenda, at: int) -> None:
        name, k = agenda.order[at]
        step, connections = agenda.step, self._connections
        for follower in agenda.followers:
            connections.post(follower, CHOICE, agenda.place, agenda.choices, at)
        if agenda.followers:
            connections.flush()
        inlets, outlets = self._reads[name], self._fills[name]
        firsts = [out.begin() for out in outlets]
        begun = now()
        try:
            inputs = {i.queue.name: i.take(name) for i in inlets}
            start = now()
            self.control.enter(f"{name}.{k}", step)
            made = self._run(name, k, step, inputs)
            self.control.leave()
            self._give(name, outlets, firsts, made, inlets)
        except BaseException as error:
            batch = f"micro-batch {k}, " if self.net.by_name[name].fires > 1 else ""
            self.control.failed(error, f"{name}.{k} ({batch}step {step})")
            raise
        for inlet in inlets:
            if inlet.finish(name) and inlet.wire is not None:
                for source in inlet.receivers:
                    connections.post(source, CREDIT, inlet.wire.number, inlet.read)
        agenda.fired(at)
        self.control.liveness.moved()
        connections.flush()
        if self._tape is not None:
            idle, self._idle = self._idle or (begun, "inputs that are under way"), None
            self._tape.append((name, k, step, start, now(), *idle))

    def _give(
        self,
        name: str,
        outlets: list[Outlet],
        firsts: list[int],
        made: Mapping[str, Sequence[Value]],
        inlets: list[Inlet],
    ) -> None:
        """Put what a firing made into its registers."""
        if {*made} != {o.queue.name for o in outlets}:
            raise NetError(f"{name} gave {sorted(made)}", allowed=", ".join(o.queue.name for o in outlets))
        registers = frozenset().union(*(i.storages for i in inlets))
        for out, first in zip(outlets, firsts, strict=True):
            q = out.queue
            values = made[q.name]
            if len(values) != q.gives:
                raise NetError(f"{name} gave {len(values)} values for queue {q.name}", allowed=str(q.gives))
            for n, value in enumerate(values, first):
                if registers and any(t.untyped_storage().data_ptr() in registers for t in value.tensors):
                    # A register that was read here will be filled again before this value's readers are done.
                    kept = [t.clone() if t.untyped_storage().data_ptr() in registers else t for t in value.tensors]
                    value = Value(kept, value.index)
                for inlet in out.inlets:
                    if inlet.wire is None:
                        inlet.fill(n, value)
                    else:
                        mine = list(inlet.wire.route.pack(value, self.rank, self.rank))
                        inlet.part(n, self.rank, value.index, mine)
                for number, dst in out.remote:
                    self._send(self._wires[number], dst, n, value)

    def _send(self, wire: QueueRoute, dst: int, n: int, value: Value) -> None:
        tensors = wire.route.pack(value, self.rank, dst)
        layout = message_layout(tensors)
        fits(wire, layout)
        sender, tail = self._senders[wire.number, dst], layout.code
        if layout.nbytes <= sender.inline_bytes:
            tail += b"\0" + message_bytes(layout, tensors)
        else:
            sender.send(n, layout, tensors)
        self._connections.post(dst, DATA, wire.number, n, value.index, tail)

    # -- what comes

    def _handle(self, m: ControlMessage) -> None:
        if m.kind == DATA:
            code, inline, data = m.tail.partition(b"\0")
            layout = parse_layout(code)
            self._by_wire[m.which].part(m.a, m.source, m.b, from_bytes(layout, data) if inline else layout)
        elif m.kind == CREDIT:
            remote, key = self.outlets[self._wires[m.which].queue.name].remote, (m.which, m.source)
            if m.a > remote[key]:
                remote[key] = m.a
                self._senders[key].read(m.a)
        elif m.kind == CHOICE:
            self._by_place[m.which].told(m.a, m.b)

    def _awaited(self) -> str:
        """What this rank waits for, in words."""
        if self._phase != "work":
            return f"all ranks to {self._phase}"
        for agenda in self._by_urgency():
            if agenda.step == self._target:
                continue
            name = agenda.awaited()
            if name is None:
                return f"rank {agenda.leader} to choose at place {agenda.place}"
            for inlet in self._reads[name]:
                if not inlet.has(name):
                    sources = sorted(inlet.sources - inlet.parts.get(inlet.counts[name], {}).keys())
                    who = f" from ranks {', '.join(map(str, sources))}" if sources else ""
                    return f"queue {inlet.queue.name}{who} ({inlet.queue.producer} for {name})"
            for out in self._fills[name]:
                if not out.room():
                    who = ", ".join(str(dst) for (_, dst), read in out.remote.items() if read == out.read)
                    return f"room in queue {out.queue.name}" + (f" at ranks {who}" if who else "")
        return "others"

    # -- records

    def record(self, on: bool = True) -> None:
        """Keep, or stop keeping, when firings began and ended and what came before them."""
        self._tape, self._idle = ([] if on else None), None

    def spans(self) -> list[Span]:
        """What was recorded: a span for each firing, and one for each wait before it; `module` says which step."""
        out = []
        for name, k, step, start, end, idle, why in self._tape or ():
            kind = self.net.by_name[name].kind
            span = Span(
                f"{name}.{k}",
                "compute",
                self.rank,
                start,
                end,
                "compute",
                family=kind,
                phase=PHASE_OF_KIND[kind],
                module=f"step {step}",
                source="measured",
            )
            if start - idle >= LEAST_WAIT_NS:
                out.append(replace(span, name=f"{name}.{k}/wait", start=idle, end=start, kind="wait", cause=why))
            out.append(span)
        return out

    @property
    def peaks(self) -> dict[str, int]:
        """For each queue that is filled here, the most registers that were ever in use."""
        return {name: out.most for name, out in self.outlets.items()}

    # -- the end

    def close(self) -> None:
        """Say goodbye to everybody, once nothing is under way; after an error, just leave."""
        if self.closed:
            return
        self.closed = True
        try:
            if self.control.cause is None and not self._phase:
                self.control.start()
                self.control.bye(1)
                for key, sender in self._senders.items():
                    out = self.outlets[self._wires[key[0]].queue.name]
                    sender.close(out.made, out.remote[key])
                for receiver in self._receivers.values():
                    receiver.close()
                self.control.bye(2)
                if self._on_close is not None:
                    self._on_close()
        finally:
            self.control.close()

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
