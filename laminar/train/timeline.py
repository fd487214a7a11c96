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

from types import TracebackType
from typing import Any

import torch

from laminar.errors import LaminarError
from laminar.ir.timeline import Timeline
from laminar.runtime.trace.align import gathered_timeline
from laminar.runtime.trace.gpu_tape import KernelTape
from laminar.runtime.trace.tape import Tape
from laminar.train.prefetch import Loads


class Recording:
    """A recording of a job's steps; see `Recorded.timeline`."""

    def __init__(self, job: Recorded, steps: int | None) -> None:
        self._job, self._steps = job, steps
        self._timeline: Timeline | None = None

    def __enter__(self) -> Recording:
        job = self._job
        if job._tape is not None:
            raise LaminarError("this job is being recorded already", next="end the other `with job.timeline():` first")
        job._set_tape(job._new_tape(self._steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        job, tape = self._job, self._job._tape
        assert tape is not None
        job._set_tape(None)
        if error is None:
            self._timeline = self._gathered(tape)
        elif isinstance(tape, KernelTape):
            tape.abandon()

    def _gathered(self, tape: Tape | KernelTape) -> Timeline:
        """The timeline of all ranks; an error on all of them if one has nothing to tell."""
        job, problem, about = self._job, "", dict[str, Any]()
        try:
            about = tape.finish() if isinstance(tape, KernelTape) else {"axes": tape.axes}
        except LaminarError as error:
            problem = str(error)
        for rank, said in enumerate(job._world.gather_objects(problem)):
            if said:
                raise LaminarError(f"rank {rank}: {said}")
        meta = {"device": job.device.type, "torch": torch.__version__, **about, **job._about()}
        return gathered_timeline(tape.told(), job._world.gather_objects, job.rank, job.device, meta)

    @property
    def timeline(self) -> Timeline:
        """What all ranks did in the median step; known when the block has ended."""
        if self._timeline is None:
            raise LaminarError("this recording has no timeline", next="read it behind a `with` block that went well")
        return self._timeline


class Recorded(Loads):
    """What a job is, as far as recording goes. A job writes `_step` and says there what it has just done."""

    _at: int = 0
    """At which place of its plan this rank is."""
    _tape: Tape | KernelTape | None = None

    def timeline(self, steps: int | None = None) -> Recording:
        """Record the steps made inside a `with` block, at most the first `steps` of them.

        Behind the block, `.timeline` is that of all ranks. Entering and leaving are collective.
        """
        if steps is not None and steps < 1:
            raise LaminarError(f"timeline(steps={steps}) records nothing", allowed="a whole number of at least 1")
        return Recording(self, steps)

    def _recorded_step(self, batch: Any) -> Any:
        """`_step`, with its stamps where a recording runs."""
        tape = self._tape
        if tape is None:
            return self._step(batch)
        loader = self._loader()
        tape.begin()
        if isinstance(tape, Tape) and loader is not None and (waited := loader.wait()) is not None:
            tape.waited(waited[0])
        try:
            result = self._step(batch)
        except BaseException:
            tape.drop()
            raise
        if isinstance(tape, Tape) and loader is not None:
            tape.loaded(f"load{self._at}.0", loader.loads)
        tape.end()
        return result

    def _step(self, batch: Any) -> Any:
        raise NotImplementedError

    def _mark(self, name: str) -> None:
        """What has been done since the last mark (one of `record.MARKS`)."""
        if self._tape is not None:
            self._tape.mark(name)

    def _new_tape(self, steps: int | None) -> Tape | KernelTape:
        if self.device.type == "cuda":
            return KernelTape(self.rank, self.device, steps)
        return Tape(self.rank, self.world, steps)

    def _set_tape(self, tape: Tape | KernelTape | None) -> None:
        self._tape = tape

    def _about(self) -> dict[str, Any]:
        """What a timeline should say about the job."""
        return {}
