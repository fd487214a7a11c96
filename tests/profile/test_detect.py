"""What this machine is: its GPUs by the names the driver gives, else its cores."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.profile import detect


def answering(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """`nvidia-smi` says this, or does not exist."""

    def run(command: list[str], **_: Any) -> Any:
        assert command[0] == "nvidia-smi"
        if text is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(detect.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_machine_without_gpus_is_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as this process may use, each with its share of the memory."""
    answering(monkeypatch, None)
    monkeypatch.setattr(detect.os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    cluster = Cluster.detect()
    assert (cluster.devices, cluster.device.kind, cluster.backend) == (3, "cpu", "shared")
    assert cluster.device.memory_bytes.value > 0
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("name", "mib", "device"),
    [
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("Tesla V100-SXM2-16GB", 16384, "v100-16g"),
        ("NVIDIA B200", 183359, "b200"),
    ],
)
def test_known_gpus_are_recognised(monkeypatch: pytest.MonkeyPatch, name: str, mib: int, device: str) -> None:
    """By the name the driver gives; memory is what the driver says, not what the sheet says."""
    answering(monkeypatch, f"{name}, {mib} MiB\n" * 4)
    cluster = Cluster.detect()
    assert (cluster.devices, cluster.device.name, cluster.backend) == (4, device, "nccl")
    assert cluster.device.memory_bytes == Figure(mib << 20, "measured", "nvidia-smi")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"])
def test_an_unknown_gpu_gets_assumed_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Planning goes on, and every rate says that nobody has measured it."""
    answering(monkeypatch, f"{name}, 24564 MiB\n{name}, 24564 MiB\n")
    cluster = Cluster.detect()
    assert (cluster.devices, cluster.device.kind) == (2, "gpu")
    rates = [*cluster.device.flops_per_s.values(), cluster.device.bytes_per_s]
    assert all(f.source == "assumed" and "laminar profile" in f.note for f in rates)


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES says which a process may use; an empty one means none."""
    answering(monkeypatch, "NVIDIA H200, 143771 MiB\n" * 8)
    for value, count, kind in (("0,1,5", 3, "gpu"), ("GPU-8f2a", 1, "gpu"), ("", None, "cpu"), ("-1", None, "cpu")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        cluster = Cluster.detect()
        assert cluster.device.kind == kind
        assert count is None or cluster.devices == count


def test_a_cluster_prints_its_numbers_and_their_sources() -> None:
    """What `laminar plan --cluster` would use, for a reader to doubt."""
    text = str(Cluster.preset("16x8xh100@eth100"))
    assert "128 x h100" in text
    assert "shared by 8" in text
    assert "datasheet" in text and "measured" in text and "assumed" in text
