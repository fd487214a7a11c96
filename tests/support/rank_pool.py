"""Real ranks for tests: processes joined by Gloo that stay up and run one function after another.

Starting Python and torch takes seconds, training a tiny model does not. So processes come from a server that has
loaded both and done nothing else (`CONTEXT`): it forks in a few milliseconds. A task that fails ends its ranks; the
next one gets new ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.seeds import SEED

WAIT_S = 1500.0 if SEED else 240.0
"""For ranks that hang; in the long runs so long that a busy machine is not taken for that."""
SELDOM = (50_000, 20, 100)
"""When to look for garbage: graphs are many small objects that stay, and the usual figures take a sixth of the time."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "laminar.api", "laminar.train.job.job", "pytest"])


def _serve(rank: int, world: int, port: int, tasks: Any, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    torch.set_num_threads(1)
    gc.set_threshold(*SELDOM)
    dist.init_process_group("gloo")
    while True:
        task = tasks.get()
        if task is None:
            break
        function, args = task
        torch.manual_seed(0)
        try:
            results.put((rank, function(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
            results.close()
            results.join_thread()
            os._exit(1)
    os._exit(0)


def patiently(attempt: Callable[[float], Any], good: Callable[[Any], bool], first_s: float = 3.0) -> Any:
    """What comes of an attempt with a time limit that has to pass, as short as this machine allows.

    Who stands still for that long on a busy machine counts as silent: then there is another attempt, with more time.
    """
    for limit_s in (first_s, 5 * first_s, 15 * first_s):
        found = attempt(limit_s)
        if good(found):
            break
    return found


def stop_this_process(seconds: float) -> None:
    """Stop for a while, as a debugger or a swapping machine would; what wakes it waits until it has stopped."""
    stopped = f"until grep -q '^State:.T' /proc/{os.getpid()}/status; do sleep 0.02; done"
    waker = subprocess.Popen(["sh", "-c", f"{stopped}; sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def heed_interrupts() -> None:
    """Whoever runs tests in the background has interrupts ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Ranks:
    """`world` processes; `run(f, *args)` calls a module-level function on each and returns what each gave."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.children: list[Any] = []

    def _start(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a port that is free
        self.results = CONTEXT.Queue()
        self.tasks = [CONTEXT.Queue() for _ in range(self.world)]
        self.children = [
            CONTEXT.Process(
                target=_serve, args=(r, self.world, self.store.port, self.tasks[r], self.results), daemon=True
            )
            for r in range(self.world)
        ]
        for child in self.children:
            child.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What every rank returned, by rank; the first traceback if one failed."""
        if not self.children:
            self._start()
        for tasks in self.tasks:
            tasks.put((function, args))
        out: dict[int, Any] = {}
        try:
            while len(out) < self.world:
                rank, value, error = self.results.get(timeout=WAIT_S)
                if error is not None:
                    raise AssertionError(f"rank {rank} failed\n{error}")
                out[rank] = value
        except (AssertionError, queue.Empty):
            self.stop(kill=True)
            raise
        return [out[r] for r in range(self.world)]

    def stop(self, kill: bool = False) -> None:
        """End the processes."""
        for child, tasks in zip(self.children, getattr(self, "tasks", []), strict=False):
            if kill:
                child.kill()
            else:
                tasks.put(None)
        for child in self.children:
            child.join(20)
            if child.is_alive():
                child.kill()
        self.children = []
