"""One rank's side of a launched run: it writes down what happens, stops when told, and never outlives its launcher.

The contract is torchrun's: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
Under our own launcher there is one thing more: standard input is a pipe that the launcher holds open.
When it closes, the launcher is gone, however it went, and the rank ends itself with all it started.

A rank that fails writes an "error" event with its traceback and ends at once, without leaving the
process group in good order: its closed connections are what tells the others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from laminar import events
from laminar.errors import MeshError, RendezvousError, StoppedError
from laminar.launch.blame import Stopped, Verdict, describe, from_event, verdict
from laminar.launch.rundir import RunDir
from laminar.train.stop_request import STOP

LAUNCHED = "LAMINAR_LAUNCHED"
"""Set by our launcher: standard input is its lifeline, and it shows the progress."""
LINGER_S = 1.0
"""How long a rank that lost another stays, under launchers that blame whoever ends first."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands."""

    rank: int
    world: int
    launched: bool
    """By our own launcher, and not by torchrun or by hand."""

    @staticmethod
    def of(environ: Mapping[str, str]) -> RankPlace | None:
        """This process's place, if it was started as a rank. RANK without LOCAL_RANK is some cluster's, not ours."""
        if not all(k in environ for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
            return None
        try:
            rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        except ValueError:
            raise MeshError(
                f"RANK={environ['RANK']!r} and WORLD_SIZE={environ['WORLD_SIZE']!r} are not numbers"
            ) from None
        return RankPlace(rank, world, LAUNCHED in environ)


def agree_on(place: RankPlace, mine: str, environ: Mapping[str, str]) -> str:
    """One name for all ranks: rank 0's. Ranks meet at torchrun's store, which is there before them."""
    if place.world == 1:
        return mine
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RendezvousError(
            "ranks that nobody launched together need one run directory", next="give every rank the same --run-dir"
        )
    import torch.distributed as dist

    store = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    key = f"laminar/run/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:
        store.set(key, mine)
    return str(store.get(key).decode())


def hold_lifeline() -> None:
    """End this process and all it started when standard input closes."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        if os.getpgid(0) == os.getpid():  # a group of our own: workers of a data loader go too
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end the block by `Stopped`, between two lines of Python; a second one is not needed.

    While steps are made, SIGTERM is answered after the step and a last checkpoint (`train/stop_request.py`).
    """

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGTERM and STOP.note(Stopped(number)):
            return
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


class StepCounter:
    """How far this rank has come: nothing before the loop begins."""

    def __init__(self) -> None:
        self.made: int | None = None

    def __call__(self, event: events.Event) -> None:
        if event.kind in ("step", "skipped"):
            self.made = int(event.fields["step"])
        elif event.kind == "phase" and event.fields.get("name") == "first step" and self.made is None:
            self.made = 0


def run_rank(body: Callable[[], None], place: RankPlace, run: RunDir) -> Verdict | None:
    """Run `body` as one rank; nothing if all went well, else what to say about it."""
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # asked for by the launcher when a run stands still
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    if place.launched:
        hold_lifeline()
    run.events(place.rank).parent.mkdir(parents=True, exist_ok=True)
    sink, steps = events.JsonLines(run.events(place.rank), place.rank), StepCounter()
    with events.listening(sink), events.listening(steps):
        try:
            with stoppable():
                events.emit("rank", world=place.world, pid=os.getpid())
                body()
            return None
        except BaseException as error:
            fields = describe(error, steps.made)
            events.emit("error", **fields)
            sys.stdout.flush()
            failure = from_event(place.rank, 0.0, fields)
            if place.launched and failure.kind not in ("signal", "exit"):
                print(failure.traceback, file=sys.stderr, end="", flush=True)  # into the log
            if not place.launched and failure.kind == "peer":
                time.sleep(LINGER_S)
            if failure.kind == "signal":
                name = signal.Signals(failure.code).name
                return Verdict(StoppedError(f"rank {place.rank} was stopped by {name}"), 128 + failure.code)
            return verdict(failure, place.world, [], [], "")
        finally:
            sink.close()


def leave(code: int) -> NoReturn:
    """End the process now. Torch's thread pools sometimes abort while an interpreter is taken down."""
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
