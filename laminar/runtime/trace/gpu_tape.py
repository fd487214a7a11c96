"""What a GPU did in a step: its kernels, as the profiler saw them, told apart by name.

A compiled step is a few CUDA graphs, and stamps of the host would show when they were launched. So on a GPU the
profiler listens to the device alone (no stacks, no shapes, no ops of the host) and gives every kernel with its times,
those inside graphs included. A kernel no longer knows which line of the program it came from; its name tells
its family (`kernel_family`), and by family it is compared with what was predicted.

Where a step begins and ends on the device is marked by a kernel nobody else uses: one complex number is filled.
Times are those of the system's clock, brought to the clock of all recordings.

Memory is torch's own account: what is allocated and reserved after the steps, and the most since the process began
or its peaks were last reset. Nothing is reset here.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from laminar.errors import LaminarError
from laminar.ir.timeline import Span
from laminar.runtime.trace.tape import RankSteps, now

STEP_MARK = re.compile(r"FillFunctor<\s*c10::complex<double>")
"""The kernel that marks the ends of a step."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""What the trace calls things that took time on the device."""
NAME_LENGTH = 96
CLOCK_SETTLE_S = 2e-3
FAMILIES = (
    ("communication", r"nccl"),
    ("optimizer", r"multi_tensor_apply|fused_?adam|adamw?_"),
    ("attention", r"flash|fmha|attention|sdpa|mha_"),
    ("convolution", r"conv|cudnn|implicit|wgrad|dgrad|winograd|nchw|nhwc"),
    ("matmul", r"gemm|cutlass|nvjet|cublas|splitk|gemv|matmul|triton_tem"),
    ("fused.reduction", r"triton_(red|per|mix)"),
    ("fused.pointwise", r"triton_"),
    ("moving", r"memcpy|memset|catarray|copy_kernel|direct_copy|fillfunctor"),
    ("rows", r"softmax|layer_?norm|rms_?norm|group_?norm"),
    ("channels", r"batch_?norm"),
    ("indexing", r"index|embedding|gather|scatter"),
    ("loss", r"nll"),
    ("pooling", r"pool|upsample"),
    ("draws", r"philox|distribution|random"),
    ("sums", r"reduce"),
    ("cheap", r"elementwise"),
)
"""Families by kernel name, the first that fits: names as of torch 2.11 to 2.13 with Triton, cuBLAS and cuDNN."""
NCCL_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "SendRecv": "all_to_all",
}
"""What NCCL's kernels have in their names."""
_PATTERNS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in FAMILIES]


def kernel_family(name: str) -> str:
    """Which family a kernel belongs to; "other" if its name says nothing."""
    return next((family for family, pattern in _PATTERNS if pattern.search(name)), "other")


def short(name: str) -> str:
    """A kernel's name without return type, namespaces of torch, and what is too long to read."""
    name = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


class KernelTape:
    """Kernels of the steps that a rank makes while a recording runs; used like `Tape`."""

    def __init__(self, rank: int, device: torch.device, limit: int | None = None) -> None:
        self.rank, self.device, self.limit = rank, device, limit
        self.steps = 0
        self._open = False
        self._told: list[RankSteps] = []
        self._cell = torch.zeros(1, dtype=torch.complex128, device=device)
        torch.cuda.synchronize(device)
        self._profile: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()
        self._settle()
        self._running = True

    @property
    def active(self) -> bool:
        """Never: programs run as they always do."""
        return False

    def begin(self) -> None:
        """A step begins."""
        self._open = self._running
        if self._open:
            self._cell.fill_(1.0)

    def end(self) -> None:
        """It has ended, as far as the host is concerned."""
        if not self._open:
            return
        self._cell.fill_(1.0)
        self._open, self.steps = False, self.steps + 1
        if self.limit is not None and self.steps >= self.limit:
            self._stop()

    def drop(self) -> None:
        """It has failed; so will the recording."""
        self._open = False

    def mark(self, name: str) -> None:
        """Marks of the host say nothing about the device."""

    def told(self) -> list[RankSteps]:
        """The steps as spans; after `finish`."""
        return self._told

    def _stop(self) -> None:
        if self._running:
            self._settle()
            self._profile.stop()
            self._running = False

    def _settle(self) -> None:
        """The two clocks differ by microseconds, and what seems to lie outside of the recording is not told."""
        torch.cuda.synchronize(self.device)
        time.sleep(CLOCK_SETTLE_S)

    def abandon(self) -> None:
        """Stop listening, without an answer."""
        self._stop()

    def finish(self) -> dict[str, Any]:
        """Stop listening and read what was heard; what to say about memory."""
        self._stop()
        if self.steps:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                self._profile.export_chrome_trace(str(path))
                trace = json.loads(path.read_text(errors="replace"), strict=False)
            behind = time.time_ns() - now()
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            self._told = steps_of(trace, self.rank, index, self.steps, behind)
        return {
            "memory_bytes": {
                "allocated": torch.cuda.memory_allocated(self.device),
                "max_allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
                "max_reserved": torch.cuda.max_memory_reserved(self.device),
            }
        }


def steps_of(trace: dict[str, Any], rank: int, device: int, steps: int, behind: int) -> list[RankSteps]:
    """Spans of each step from a trace; `behind` is how far the clock of recordings is behind the system's."""
    events = sorted(_events(trace, device, behind), key=lambda e: e[0])
    marks = [k for k, (_, _, event) in enumerate(events) if STEP_MARK.search(event["name"])]
    if len(marks) != 2 * steps:
        raise LaminarError(
            f"the profiler saw {len(marks)} of the {2 * steps} marks of {steps} steps among {len(events)} kernels",
            next="see that CUPTI works here: torch.profiler must list kernels, and no other profiler may run",
        )
    busy: dict[Any, int] = {}
    for _, _, event in events:
        if kernel_family(event["name"]) != "communication":
            stream = event.get("args", {}).get("stream")
            busy[stream] = busy.get(stream, 0) + 1
    main = max(busy, key=lambda s: busy[s]) if busy else None
    out = []
    for first, last in zip(marks[::2], marks[1::2], strict=True):
        spans = [_span(start, end, event, rank, main) for start, end, event in events[first : last + 1]]
        for k, at in ((0, "begin"), (-1, "end")):
            spans[k] = Span(f"mark/{at}", spans[k].lane, rank, spans[k].start, spans[k].end, "host", source="measured")
        out.append(RankSteps(spans))
    return out


def _events(trace: dict[str, Any], device: int, behind: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """What took time on the device: start and end in nanoseconds, and the trace's own words."""
    base = int(trace.get("baseTimeNanoseconds", 0)) - behind
    for event in trace.get("traceEvents", []):
        if event.get("ph") != "X" or event.get("cat") not in ON_DEVICE:
            continue
        if event.get("args", {}).get("device", device) != device:
            continue
        start = base + round(float(event["ts"]) * 1e3)
        yield start, start + max(round(float(event["dur"]) * 1e3), 1), event


def _span(start: int, end: int, event: dict[str, Any], rank: int, main: Any) -> Span:
    name, args = event["name"], event.get("args", {})
    kind, stream = kernel_family(name), args.get("stream")
    family = kind
    if kind == "communication":
        lane = f"communication:{stream}"
        family = next((ours for theirs, ours in NCCL_KERNELS.items() if theirs in name), kind)
    else:
        lane = "compute" if stream == main else f"compute:{stream}"
    return Span(
        name=short(name),
        lane=lane,
        rank=rank,
        start=start,
        end=end,
        kind="communication" if kind == "communication" else "compute",
        op=name if len(name) <= 256 else short(name),
        family=family,
        bytes=int(args.get("bytes", 0) or 0),
        source="measured",
    )
