"""A run on a GPU as a CUDA graph: recorded once, then replayed without the host having a say.

What is recorded are addresses. Inputs that never move are read where they lie; others are copied into
place before each replay. Outputs lie where the recording put them and are overwritten by the next replay,
of this or of another recording: all recordings of a device share one pool, so that the memory of a
training step also serves evaluation and the smaller last batch. Losses and metrics are copied out.

A recording that fails leaves torch in the middle of it; `abandon_recording` puts that right, and whoever
asked for the recording runs without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from laminar.capture.torch_private import abandon_recording


class _Pool:
    """Memory that recordings on one device share, for as long as there is one: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.handle = torch.cuda.graph_pool_handle()


_pools: WeakValueDictionary[torch.device, _Pool] = WeakValueDictionary()
"""A pool whose last recording is gone must not be used again, so nothing here keeps one alive."""


class RecordedGraph:
    """A run as a CUDA graph."""

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], list[Tensor]],
        inputs: Sequence[Tensor],
        static: frozenset[int],
        kinds: list[str],
        device: torch.device,
    ) -> None:
        self.static, self.kinds = static, kinds
        self.inputs = [t if i in static else t.detach().to(device, copy=True) for i, t in enumerate(inputs)]
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the first run left would lie beside the pool
        self.pool = _pools.get(device) or _Pool(device)
        _pools[device] = self.pool
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        # Threads of others (a loader that pins memory) may go on talking to the device meanwhile.
        recording = torch.cuda.graph(self.graph, self.pool.handle, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(device), recording:
                self.outs = run(self.inputs)
        except RuntimeError:
            abandon_recording(device, self.pool.handle, stream)
            raise

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether everything static still lies where it lay."""
        held = self.inputs
        return all(inputs[i] is held[i] or inputs[i].data_ptr() == held[i].data_ptr() for i in self.static)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for i, (mine, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if i not in self.static:
                mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return [t.clone() if k in ("loss", "metric") else t for t, k in zip(self.outs, self.kinds, strict=True)]
