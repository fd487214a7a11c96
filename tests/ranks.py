"""Real ranks for tests: processes joined by Gloo that stay up and run one function after another.

Starting Python and torch takes seconds, training a tiny model does not. A task that fails ends its
ranks; the next one gets new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

WAIT_S = 240.0


def _serve(rank: int, world: int, port: int, tasks: Any, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    while True:
        task = tasks.get()
        if task is None:
            break
        function, args = task
        try:
            results.put((rank, function(*args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
            results.close()
            results.join_thread()
            os._exit(1)
    os._exit(0)


class Ranks:
    """`world` processes; `run(f, *args)` calls a module-level function on each and returns what each gave."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.children: list[Any] = []

    def _start(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(self.world)]
        self.children = [
            context.Process(target=_serve, args=(r, self.world, port, self.tasks[r], self.results), daemon=True)
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
