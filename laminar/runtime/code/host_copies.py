"""Values that wait in the host's memory: how `host.send` and `host.bring` (`lower/memory/offload.py`) run.

Both are started and finished like collectives, so that what stands between runs beside the copy. On a GPU:

    stream    one for all copies of a device, beside the one that computes. It waits for compute where a copy starts,
              and compute waits for it where one is finished, by events: the host never stops.
    buffers   are pinned and come from a pool. Copies of a device run in the order they were started, so a buffer may
              be filled again as soon as bringing its values back has been started. After the first step
              none is made.
    memory    what is sent is held until compute has waited for the copy, and what comes back is taken from compute's
              own memory, so that both return to it in compute's order and the allocator need not be told of another
              stream: how much a step takes does not depend on how far the host is ahead.

On a CPU it is a copy in other memory of the same machine: it saves nothing, but runs the same lines with the same
results, and holds what a GPU would hold.

Values lie on the host, and again on the device, as they lay before; those with gaps are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from laminar.ir.ops import HOST_BRING
from laminar.ir.program import Instr


class HostLink:
    """The way between a device and the host's memory: one stream, and buffers that are used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        """Of all buffers that were made."""
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, like: Tensor) -> Tensor:
        """A buffer for a packed tensor, flat."""
        free = self._free.get((like.dtype, like.numel()))
        if free:
            return free.pop()
        self.nbytes += like.numel() * like.element_size()
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=self._stream is not None)

    def give(self, buffer: Tensor) -> None:
        """It may be filled again by copies that are started from now on."""
        flat = buffer.as_strided((buffer.numel(),), (1,))
        self._free.setdefault((flat.dtype, flat.numel()), []).append(flat)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy: (to, from), all flat. What `wait` takes."""
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def wait(self, done: Any) -> None:
        """What is computed from now on comes after the copy."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


@cache
def link_of(device: torch.device) -> HostLink:
    """The link of a device: one in a process."""
    return HostLink(device)


class Send:
    """Values to the host: `start` takes them, `finish` gives them as they lie there."""

    def __init__(self, count: int, link: HostLink) -> None:
        self.count, self.link = count, link

    def start(self, *given: Tensor) -> Any:
        """Begin to copy the first `count`; the rest only had to arrive before."""
        values = [packed(t) for t in given[: self.count]]
        buffers = [self.link.take(t) for t in values]
        done = self.link.copy([(to, flat(t)) for to, t in zip(buffers, values, strict=True)])
        return done, values, buffers

    def finish(self, flying: Any) -> list[Tensor]:
        """The copies have arrived, as far as compute can see; values may go."""
        done, values, buffers = flying
        self.link.wait(done)
        return [to.as_strided(t.shape, t.stride()) for to, t in zip(buffers, values, strict=True)]


class Bring:
    """Values back from the host: `start` takes them as they lie there, `finish` gives them on the device."""

    def __init__(self, link: HostLink) -> None:
        self.link = link

    def start(self, *given: Tensor) -> Any:
        """Begin to copy."""
        device = self.link.device
        values = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in given]
        done = self.link.copy([(flat(to), flat(t)) for to, t in zip(values, given, strict=True)])
        for t in given:
            self.link.give(t)
        return done, values

    def finish(self, flying: Any) -> list[Tensor]:
        """They are there."""
        done, values = flying
        self.link.wait(done)
        return list(values)


def exchange_of(instr: Instr, device: torch.device) -> Send | Bring:
    """Who copies for a line."""
    link = link_of(device)
    return Bring(link) if instr.op == HOST_BRING else Send(len(instr.outs), link)


def packed(t: Tensor) -> Tensor:
    """The tensor itself if it fills a stretch of memory without gaps or repetition, else a contiguous copy."""
    step = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride != step:
                return t.contiguous() if not t.is_contiguous() else t
            step *= size
    return t


def flat(t: Tensor) -> Tensor:
    """A packed tensor as the stretch of memory that it fills."""
    return t.as_strided((t.numel(),), (1,))
