"""Clusters of several kinds of device."""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.clusters.mixed import Mixed


def slower(part: Cluster, factor: float, memory_bytes: float | None = None) -> Cluster:
    """The same devices at a fraction of their speed."""
    d = part.device
    rates = {k: Figure(f.value * factor) for k, f in d.flops_per_s.items()}
    memory = Figure(memory_bytes) if memory_bytes else d.memory_bytes
    call = Figure(d.launch_s.value / factor)
    device = replace(
        d,
        name=f"slow {d.name}",
        flops_per_s=rates,
        bytes_per_s=Figure(d.bytes_per_s.value * factor),
        memory_bytes=memory,
        launch_s=call,
    )
    return replace(part, name=f"{part.name} at {factor:g}", device=device)


def cores(factor: float = 0.5, fast: int = 2, slow: int = 2, memory_bytes: float | None = None) -> Mixed:
    """Fast cores and slow ones, joined by a fast network."""
    parts = [Cluster.preset(f"{fast}xcpu"), slower(Cluster.preset(f"{slow}xcpu"), factor, memory_bytes)]
    outer = Cluster.preset("2x2xcpu@eth100/1").levels[-1]
    return Mixed("fast and slow cores", parts, outer)
