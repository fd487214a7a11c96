"""What a person sees of a run: one bar on a terminal, a line every few seconds elsewhere.

It reads events of rank 0 only and keeps no truth of its own; the run directory has everything. Before
the first step it says what is being done and for how long, because capture, planning and compilation
can take longer than a person likes to look at nothing.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Protocol, TextIO

from laminar.events import Event

EVERY_S = 5.0
"""Seconds between two plain lines."""
METRICS_SHOWN = 6
"""Metrics that are shown behind a loss; events have all."""


class Display(Protocol):
    """Shows a run. It never sees a process, only events."""

    def on(self, event: Event) -> None:
        """Take note of an event of rank 0."""

    def tick(self) -> None:
        """Time has passed."""

    def close(self) -> None:
        """Nothing more comes; the terminal is left as it was."""


def display(quiet: bool) -> Display:
    """A bar on a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        return NoDisplay()
    return Bar() if sys.stdout.isatty() else Lines(sys.stdout)


class NoDisplay:
    """For `--json`: the answer is one object at the end."""

    def on(self, event: Event) -> None:
        """Not shown."""

    def tick(self) -> None:
        """Not shown."""

    def close(self) -> None:
        """Nothing was opened."""


class State:
    """What is known of a run from its events."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.phase_since = time.monotonic()
        self.steps = self.done = self.begun_at = 0
        self.last: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        """What the user's own code told last."""
        self.rate_s: float | None = None
        """Seconds per step, smoothed; without the first, which is slow."""

    def on(self, event: Event) -> str | None:
        """Take an event in; a line about what has just ended, if something has."""
        fields = event.fields
        if event.kind == "phase":
            return self.next_phase(str(fields.get("name")))
        if event.kind == "start":
            self.steps, self.done = int(fields["steps"]), int(fields["done"])
            self.begun_at = self.done
        elif event.kind == "step":
            ended = self.next_phase("training") if self.phase != "training" else None
            first = self.done == self.begun_at
            self.done, self.last = int(fields["step"]), fields
            if not first:
                took = float(fields["seconds"])
                self.rate_s = took if self.rate_s is None else 0.9 * self.rate_s + 0.1 * took
            return ended
        elif event.kind == "skipped":
            self.done = int(fields["step"])
            return f"step {self.done} skipped: gradients were not finite at this loss scale"
        elif event.kind == "hash":
            return f"step {fields['step']}: hash {fields['hash']}"
        elif event.kind == "eval":
            return (
                f"step {fields['step']}: evaluation loss {four_digits(fields['loss'])}{listed(fields.get('metrics'))}"
            )
        elif event.kind == "log":
            self.logged |= fields.get("values", {})
        elif event.kind == "measured":
            return plan_taken(fields)
        elif event.kind == "warning":
            return f"warning: {fields.get('message', '')}"
        return None

    def next_phase(self, name: str) -> str | None:
        """Begin a phase; a line about the last one if it took a while."""
        now = time.monotonic()
        took, was = now - self.phase_since, self.phase
        self.phase, self.phase_since = name, now
        return f"{was} {took:.1f} s" if took >= 0.1 and was != "training" else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, if it goes on like this."""
        return None if self.rate_s is None else (self.steps - self.done) * self.rate_s

    def numbers(self) -> str:
        """Loss, throughput, gradient norm and learning rate of the last step."""
        last = self.last
        parts = [f"loss {four_digits(last.get('loss'))}{listed({**last.get('metrics', {}), **self.logged})}"]
        if self.rate_s is not None and last.get("per_s") is not None:
            parts.append(f"{float(last['per_s']):,.0f} {last.get('unit', 'samples')}/s")
        if last.get("grad_norm") is not None:
            parts.append(f"grad norm {four_digits(last['grad_norm'])}")
        if last.get("lr") is not None:
            parts.append(f"lr {float(last['lr']):.3g}")
        return "  ".join(parts)


def plan_taken(fields: dict[str, Any]) -> str:
    """Which of a search's finalists a job trains with, and why."""
    if not fields.get("done"):
        return f"finalists of the search were not measured: {fields.get('why')}"
    rows, took = fields.get("rows", ()), float(fields.get("seconds", 0))
    times = ", ".join(f"{row['plan']} {1e3 * float(row['step_s']):.4g} ms" for row in rows)
    return f"taken: {fields.get('taken')} (measured in {took:.1f} s: {times})"


def four_digits(value: Any) -> str:
    """Four digits, enough to see a loss fall."""
    return "?" if value is None else f"{float(value):.4g}"


def listed(metrics: Any) -> str:
    """Metrics behind a loss; the first ones, where there are many."""
    names = list(metrics or ())
    more = f"  ({len(names) - METRICS_SHOWN} more)" if len(names) > METRICS_SHOWN else ""
    return "".join(f"  {name} {four_digits(metrics[name])}" for name in names[:METRICS_SHOWN]) + more


def clock(seconds: float) -> str:
    """4.2 s, 1:05, or 2:00:00."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def summary(ended: dict[str, Any], run: str, checkpoint: str | None) -> str:
    """The last lines about a run that went well, from the fields of its "end" event."""
    rate = ended.get("per_s")
    lines = [
        f"trained to step {ended.get('steps')} in {clock(float(ended.get('seconds') or 0))}:"
        f" loss {four_digits(ended.get('loss'))}"
        + (f", {float(rate):,.0f} {ended.get('unit')}/s without the first step" if rate is not None else ""),
        f"evaluation     loss {four_digits(ended['evaluation'])}{listed(ended.get('metrics'))}"
        if ended.get("evaluation") is not None
        else "",
        f"skipped        {ended['skipped']} steps" if ended.get("skipped") else "",
        f"checkpoint     {checkpoint}" if checkpoint else "",
        f"timeline       {ended['timeline']}" if ended.get("timeline") else "",
        f"run directory  {run}",
    ]
    return "\n".join(line for line in lines if line)


class Lines:
    """A line when something begins or ends, and every few seconds in between."""

    def __init__(self, out: TextIO, every_s: float = EVERY_S) -> None:
        self.out, self.every_s = out, every_s
        self.state = State()
        self.shown, self.shown_at = -1, time.monotonic()

    def on(self, event: Event) -> None:
        """A line if it is time."""
        first = event.kind == "step" and not self.state.last
        if line := self.state.on(event):
            self._say(line)
        if event.kind == "step" and (first or self.state.done == self.state.steps):
            self._step()
        self.tick()

    def tick(self) -> None:
        """A sign of life if nothing was said for a while."""
        if time.monotonic() - self.shown_at < self.every_s:
            return
        if self.state.phase == "training" and self.state.done != self.shown:
            self._step()
        elif self.state.phase != "training":
            self._say(f"{self.state.phase}, {time.monotonic() - self.state.phase_since:.0f} s so far")

    def _step(self) -> None:
        state = self.state
        if state.done == self.shown:
            return
        self.shown = state.done
        eta = "" if state.eta_s is None else f"  eta {clock(state.eta_s)}"
        self._say(f"step {state.done}/{state.steps}  {state.numbers()}{eta}")

    def _say(self, line: str) -> None:
        self.shown_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self.out, flush=True)

    def close(self) -> None:
        """The last step is always shown."""
        if self.state.last:
            self._step()


class Bar:
    """One bar that is redrawn in place; lines about what has ended scroll above it."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self.state = State()
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[info]}"),
            console=console or Console(),
            refresh_per_second=8,
        )
        self.task = self.progress.add_task("starting", total=None, info="")
        self.progress.start()

    def on(self, event: Event) -> None:
        """Redraw with what it says."""
        if line := self.state.on(event):
            self.progress.console.print(line, style="dim", highlight=False, markup=False)
        self.tick()

    def tick(self) -> None:
        """Redraw: the seconds move on."""
        state = self.state
        if state.phase == "training":
            eta = "" if state.eta_s is None else f"  eta {clock(state.eta_s)}"
            self.progress.update(
                self.task,
                description=f"step {state.done}/{state.steps}",
                total=state.steps,
                completed=state.done,
                info=state.numbers() + eta,
            )
        else:
            passed = time.monotonic() - state.phase_since
            self.progress.update(self.task, description=state.phase, info=f"{passed:.0f} s")

    def close(self) -> None:
        """Leave the last state of the bar standing."""
        self.tick()
        self.progress.stop()
