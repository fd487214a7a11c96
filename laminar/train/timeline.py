"""`job.timeline()`: record what every rank does in the steps made inside a `with` block.

    with job.timeline() as t:
        for batch in some:
            job.step(batch)
    t.timeline.save("timeline.json")

While the block runs, steps leave stamps (`runtime/trace/tape.py`); at its end every rank tells what it did, and each
has the timeline of all (`runtime/trace/align.py`). On GPUs the kernels are recorded instead
(`runtime/trace/gpu_tape.py`). Steps outside the block pay nothing.

A block in which a step fails makes no timeline: the ranks that would have to be asked may be gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from laminar.errors import LaminarError
from laminar.ir.timeline import Timeline
from laminar.runtime.comm.transport import Groups, Null
from laminar.runtime.exact.hosts import HostedRanks
from laminar.runtime.exact.stage_hosts import StageHosts
from laminar.runtime.trace.align import gathered_timeline
from laminar.runtime.trace.gpu_tape import KernelTape
from laminar.runtime.trace.pipeline_tape import PipeTape
from laminar.runtime.trace.tape import Tape
from laminar.train.batch.metrics import Result
from laminar.train.batch.prefetch import Prefetcher
from laminar.train.world import World


class Recording:
    """A recording of a job's steps; see `StepRecorder.timeline`."""

    def __init__(self, recorder: StepRecorder, steps: int | None) -> None:
        self._recorder, self._steps = recorder, steps
        self._timeline: Timeline | None = None

    def __enter__(self) -> Recording:
        if self._recorder.tape is not None:
            raise LaminarError("this job is being recorded already", next="end the other `with job.timeline():` first")
        self._recorder.put_in(self._recorder.new_tape(self._steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tape = self._recorder.tape
        assert tape is not None
        self._recorder.put_in(None)
        if error is None:
            self._timeline = self._gathered(tape)
        elif isinstance(tape, KernelTape):
            tape.abandon()

    def _gathered(self, tape: Tape | KernelTape) -> Timeline:
        """The timeline of all ranks; an error on all of them if one has nothing to tell."""
        world, problem, about = self._recorder.world, "", dict[str, Any]()
        try:
            about = tape.finish() if isinstance(tape, KernelTape) else {"axes": tape.axes}
        except LaminarError as error:
            problem = str(error)
        for rank, said in enumerate(world.gather_objects(problem)):
            if said:
                raise LaminarError(f"rank {rank}: {said}")
        meta = {"device": world.device.type, "torch": torch.__version__, **about, **self._recorder.about()}
        return gathered_timeline(tape.told(), world.gather_objects, world.rank, world.device, meta)

    @property
    def timeline(self) -> Timeline:
        """What all ranks did in the median step; known when the block has ended."""
        if self._timeline is None:
            raise LaminarError("this recording has no timeline", next="read it behind a `with` block that went well")
        return self._timeline


class StepRecorder:
    """What a job's steps leave their stamps with. Costs a step nothing but a look while no recording runs."""

    def __init__(
        self,
        world: World,
        loader: Prefetcher,
        about: Callable[[], dict[str, Any]] = dict,
        transport: Groups | Null | HostedRanks | StageHosts | None = None,
        place: int | None = None,
    ) -> None:
        """`about` is what a timeline should say of the job. Programs that run through `transport` leave stamps, too.

        `place`: at which place of a plan with stages this rank is.
        """
        self.world, self.loader, self.about, self.transport, self.place = world, loader, about, transport, place
        self.tape: Tape | KernelTape | None = None

    def timeline(self, steps: int | None = None) -> Recording:
        """Record the steps made inside a `with` block, at most the first `steps` of them.

        Behind the block, `.timeline` is that of all ranks. Entering and leaving are collective.
        """
        if steps is not None and steps < 1:
            raise LaminarError(f"timeline(steps={steps}) records nothing", allowed="a whole number of at least 1")
        return Recording(self, steps)

    def step(self, run: Callable[[Any], Result], batch: Any) -> Result:
        """A step with its stamps; only called while a recording runs."""
        tape, loader = self.tape, self.loader.latest()
        assert tape is not None
        tape.begin()
        if isinstance(tape, Tape) and loader is not None and (waited := loader.wait()) is not None:
            tape.waited(waited[0])
        try:
            result = run(batch)
        except BaseException:
            tape.drop()
            raise
        if isinstance(tape, Tape) and loader is not None:
            tape.loaded(f"load{self.place or 0}.0", loader.loads)
        tape.end()
        return result

    def mark(self, name: str) -> None:
        """What has been done since the last mark (one of `tape.MARKS`)."""
        if self.tape is not None:
            self.tape.mark(name)

    def new_tape(self, steps: int | None) -> Tape | KernelTape:
        """What the next steps are recorded on."""
        rank, size = self.world.rank, self.world.size
        if self.place is not None:
            return PipeTape(rank, size, steps)
        if self.world.device.type == "cuda":
            return KernelTape(rank, self.world.device, steps)
        return Tape(rank, size, steps)

    def put_in(self, tape: Tape | KernelTape | None) -> None:
        """From now on stamps go here."""
        self.tape = tape
        if self.transport is not None:
            self.transport.tape = tape if isinstance(tape, Tape) else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        tape = self.tape
        self.put_in(None)
        try:
            yield
        finally:
            self.put_in(tape)
