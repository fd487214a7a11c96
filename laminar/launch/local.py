"""Ranks on this machine: start them, watch them, stop them.

Every rank is a process of its own, in a session of its own: a Ctrl-C on the terminal reaches the
launcher alone, which then stops the ranks; and what a rank has started goes with it. Ranks get
torchrun's environment and meet at a store that lives here, on a socket bound before any of them
starts. So a port in use is known at once, and the death of a rank takes no store with it.

The launcher learns what happens from the ranks' event files and exit codes, polled: there is nothing
a stuck rank could block. It ends in one of four ways: all ranks are done; a rank has failed, and the
first real failure is told (`blame`); a signal came; nothing has happened for too long.

This machine only. For several, start `python -m laminar train ...` with torchrun on each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from laminar.errors import RankError, RendezvousError, StoppedError
from laminar.events import Event, Follower
from laminar.launch.blame import FAILED, Failure, Verdict, culprit, from_event, from_exit, verdict
from laminar.launch.rank import LAUNCHED
from laminar.launch.rundir import RunDir, usable_cores

POLL_S = 0.05
SETTLE_S = 0.5
"""How long to look for an earlier failure once a real one is known."""
FAILURE_PATIENCE_S = 5.0
"""How long to look for a real failure while ranks only say that they lost each other. They wait for each other
as long as the launcher waits for all of them, so it waits this much longer and lets them say whom they miss."""
GRACE_S = 5.0
"""How long ranks may take to stop before they are killed."""
SAVE_GRACE_S = 60.0
"""The same where they are to save before they stop."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def reserve(port: int) -> socket.socket:
    """A listening socket on this machine; ranks that come before the store is up wait in its queue."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"port {port} can't be used: {error.strerror or error}",
            next="leave out --master-port to have a free one found, or name another",
        ) from None
    return listener


class Rendezvous:
    """The ranks' meeting place. Torch is loaded for it in a thread, while the ranks load theirs."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.error: BaseException | None = None
        self._listener = listener
        self._server: Any = None
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def _serve(self) -> None:
        try:
            import torch.distributed as dist

            handle = self._listener.detach()
            self._server = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=handle
            )
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        """Stop serving. A thread in the middle of loading torch is waited for: it can't be stopped."""
        if self._thread.is_alive():
            self._thread.join(30)
        self._server = None
        self._listener.close()


class Rank:
    """One process, and what is known of it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], follower: Follower) -> None:
        self.rank, self.process, self.follower = rank, process, follower
        self.step: int | None = None
        self.ended: dict[str, Any] | None = None
        """Fields of its "end" event: it has done all it had to."""
        self.saved: int | None = None
        """The step of its last checkpoint."""
        self.failure: Failure | None = None
        self.heard = time.monotonic()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def hear(self) -> list[Event]:
        """New events, after taking note of them."""
        found = self.follower.new()
        for event in found:
            self.heard = time.monotonic()
            if event.kind in ("step", "skipped"):
                self.step = int(event.fields["step"])
            elif event.kind == "phase" and event.fields.get("name") == "first step":
                self.step = self.step or 0
            elif event.kind == "checkpoint":
                self.saved = int(event.fields["step"])
            elif event.kind == "end":
                self.ended = event.fields
            elif event.kind == "error" and self.failure is None:
                self.failure = from_event(self.rank, event.time, event.fields)
        return found

    def look(self) -> None:
        """Take note of an exit that no event explains."""
        code = self.process.poll()
        if code is None or self.failure is not None:
            return
        if code != 0 or self.ended is None:
            self.failure = from_exit(self.rank, time.time(), code, self.step)

    def signal(self, number: int) -> None:
        """To the process and all it has started; SIGTERM to the process alone, which may need its workers for a last
        step.
        """
        if number == signal.SIGTERM:
            self.process.send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a rank finds in its environment: the same as under torchrun."""
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        LAUNCHED: "1",
        "PYTHONUNBUFFERED": "1",
    }
    if world > 1:
        own |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // world))}
    return {**threads, **os.environ, **own}


class Launch:
    """One run's processes."""

    def __init__(
        self, command: Sequence[str], world: int, run: RunDir, listener: socket.socket | None, timeout_s: float
    ) -> None:
        self.command, self.world, self.run, self.timeout_s = list(command), world, run, timeout_s
        self.store = Rendezvous(listener) if listener else None
        self.ranks: list[Rank] = []
        self.signalled: int | None = None

    # --- starting and stopping ----------------------------------------------------------------

    def start(self) -> None:
        """Start every rank, then the store."""
        port = self.store.port if self.store else 0
        for rank in range(self.world):
            follower = Follower(self.run.events(rank), from_end=True)
            with self.run.log(rank).open("ab") as log:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment(rank, self.world, port),
                    start_new_session=True,
                )
            self.ranks.append(Rank(rank, process, follower))
        if self.store:
            self.store.start()

    def stop(self, by: int = signal.SIGINT, grace_s: float = GRACE_S) -> list[int]:
        """Stop every rank that still runs: asked first, then killed. Which ones they were.

        SIGTERM asks for a last checkpoint, SIGINT for an end at once.
        """
        running = [r for r in self.ranks if r.alive]
        for r in running:
            r.signal(by)
        until = time.monotonic() + grace_s
        while any(r.alive for r in running) and time.monotonic() < until:
            time.sleep(POLL_S)
        for r in self.ranks:
            if r.alive or r.failure is not None or r in running:
                r.signal(signal.SIGKILL)  # what it has started too
            r.process.wait()
        return [r.rank for r in running]

    def close(self) -> None:
        """Nothing is left, whatever happened."""
        self.stop()
        for r in self.ranks:
            if r.process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    r.process.stdin.close()
        if self.store:
            self.store.close()

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Note the first signal; a second one ends the ranks without more ado.

        A signal that is ignored stays so (`nohup`, a job in a script's background). Handlers belong to
        the main thread; a launch from another one leaves signals to whoever made it.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if self.signalled is not None:
                for r in self.ranks:
                    r.signal(signal.SIGKILL)
            self.signalled = self.signalled or number

        wanted = [s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():
            wanted = []
        before = {s: signal.signal(s, note) for s in wanted}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    # --- watching -----------------------------------------------------------------------------

    def watch(self, show: Callable[[Event], None], tick: Callable[[], None]) -> dict[str, Any] | Verdict:
        """Until it is over: the fields of rank 0's "end" event, or a verdict."""
        real_since = lost_since = None
        while True:
            over = self.look(show)
            tick()
            now = time.monotonic()
            if self.signalled is not None:
                return self.interrupted()
            failures = [r.failure for r in self.ranks if r.failure]
            real_since = real_since or (now if any(f.real for f in failures) else None)
            lost_since = lost_since or (now if failures else None)
            if failures and (
                over or _passed(real_since, SETTLE_S, now) or _passed(lost_since, FAILURE_PATIENCE_S, now)
            ):
                return self.failed()
            if over and not failures:
                return self.ranks[0].ended or {}
            if self.store and self.store.error is not None:
                error = RendezvousError(f"the store could not be started: {self.store.error}")
                return Verdict(error, FAILED)
            if now - max(r.heard for r in self.ranks) > self.timeout_s + FAILURE_PATIENCE_S:
                return self.silent()
            time.sleep(POLL_S)

    def look(self, show: Callable[[Event], None]) -> bool:
        """Whether all ranks have ended. Exits first, then events: a rank that is gone has written its last words."""
        gone = [r for r in self.ranks if not r.alive]
        for r in self.ranks:
            for event in r.hear():
                if r.rank == 0:
                    show(event)
        for r in gone:
            r.look()
        return len(gone) == self.world

    def failed(self) -> Verdict:
        """The first real failure, in words; every rank is stopped."""
        before = [r.failure for r in self.ranks if r.failure]
        chosen = culprit(before)
        assert chosen is not None
        if not chosen.real and (mute := [r for r in self.ranks if r.alive and r.failure is None]):
            # The others lost somebody who is still there: it does not answer.
            for r in mute:
                r.signal(signal.SIGUSR1)  # every thread's stack into the log
            time.sleep(SETTLE_S)
            if len(mute) == 1:
                chosen = Failure(
                    rank=mute[0].rank,
                    time=time.time(),
                    kind="silent",
                    step=mute[0].step,
                    message=f"is alive but did not answer the others ({_where(mute[0])})",
                )
        stopped = self.stop()
        others = [f for f in before if f is not chosen]
        stopped += [f.rank for f in others if not f.real]
        found = verdict(chosen, self.world, others, sorted({*stopped} - {chosen.rank}), self._log(chosen.rank))
        if not found.traceback and chosen.kind in ("signal", "exit") and (tail := self.run.tail(chosen.rank)):
            found = Verdict(found.error, found.code, f"the end of {self._log(chosen.rank)}:\n{tail}", found.rank)
        return found

    def silent(self) -> Verdict:
        """Nothing was heard for too long: say where everybody stands."""
        for r in self.ranks:
            r.signal(signal.SIGUSR1)
        time.sleep(SETTLE_S)
        where = "   ".join(f"rank {r.rank} {_where(r)}" for r in self.ranks)
        self.stop()
        error = RankError(
            f"no rank has made progress for {self.timeout_s:.0f} s",
            at=where,
            log=str(Path(self.run.root) / "logs"),
            next="the end of each log says where the rank stood; --timeout allows for longer steps",
        )
        return Verdict(error, FAILED)

    def interrupted(self) -> Verdict:
        """A signal came."""
        assert self.signalled is not None
        name = signal.Signals(self.signalled).name
        if self.signalled == signal.SIGINT:
            self.stop()
        else:
            self.stop(signal.SIGTERM, SAVE_GRACE_S)
        for r in self.ranks:
            r.hear()
        step = max((r.step or 0 for r in self.ranks), default=0)
        saved = next((r.saved for r in self.ranks if r.saved is not None), None)
        kept = "" if saved is None else f"; a checkpoint of step {saved} was saved"
        return Verdict(StoppedError(f"stopped by {name} after step {step}{kept}"), 128 + self.signalled)

    def _log(self, rank: int) -> str:
        return str(self.run.log(rank))


def _passed(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


def _where(r: Rank) -> str:
    return "has not begun to train" if r.step is None else f"has made {r.step} steps"


def launch(
    arguments: Sequence[str],
    world: int,
    run: RunDir,
    listener: socket.socket | None,
    show: Callable[[Event], None],
    tick: Callable[[], None],
    timeout_s: float,
) -> dict[str, Any] | Verdict:
    """Run `python -m laminar ARGUMENTS` as every rank of `world` until it is over. No process is left.

    `listener` comes from `reserve`; one rank alone needs none.
    """
    one = Launch([sys.executable, "-m", "laminar", *arguments], world, run, listener, timeout_s)
    with one.catching():
        try:
            one.start()
            return one.watch(show, tick)
        finally:
            one.close()
