"""What this machine is: its GPUs if it has any that may be used, else its cores.

Asks the operating system and `nvidia-smi`; loads no framework, and never fails because a device is unknown.
`Cluster.detect`, `Cluster.preset` and what else makes clusters of text, files or other clusters is asked for here, by
way of `ir/clusters/maker_hook.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from laminar.ir.clusters.cluster import Cluster
from laminar.ir.clusters.device_presets import cores, cpu, gpus, measured
from laminar.ir.clusters.device_presets import preset as preset
from laminar.ir.clusters.mixed import mixed_from as mixed_from
from laminar.ir.clusters.mixed import without as without


def detect() -> Cluster:
    """This machine: its GPUs if it has any that may be used, else the cores this process may run on."""
    found = _visible(_nvidia_smi())
    if not found:
        return _from_cores()
    return gpus(*found[0], found.count(found[0]))  # a cluster has devices of one kind


def _nvidia_smi() -> list[tuple[str, int]]:
    """Name and memory in bytes of every GPU; none where there is no such program or it fails."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"^\s*(.+?)\s*,\s*(\d+)\s*MiB\s*$", text, re.MULTILINE)
    return [(name, int(mib) << 20) for name, mib in found]


def _visible(gpus: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that CUDA_VISIBLE_DEVICES leaves."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [c for c in chosen.split(",") if c.strip() not in ("", "-1")]
    return [gpus[int(c)] if c.strip().isdigit() and int(c) < len(gpus) else gpus[0] for c in names] if gpus else []


def _from_cores() -> Cluster:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = _read("/proc/cpuinfo")
    flags = set(re.findall(r"^flags\s*:\s*(.*)$", info, re.MULTILINE)[:1][0].split()) if "flags" in info else set()
    model = (re.findall(r"^model name\s*:\s*(.*)$", info, re.MULTILINE) or ["unknown processor"])[0]
    speeds = [float(x) for x in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)]
    ghz = max(speeds) / 1000 if speeds else 2.5
    per_cycle = 64 if "avx512f" in flags else 32 if "fma" in flags else 16
    total = _memory_bytes()
    memory = measured(total / count, "a core's share of what the system has") if total else None
    device = cpu(ghz, per_cycle, memory, f"{model}: {ghz:.2f} GHz, {per_cycle} flops a cycle")
    return cores(count, device)


def _memory_bytes() -> int:
    """What this process may use: the system's memory, or the limit it runs under."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            limits.append(int(text))
    return min(limits, default=0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
