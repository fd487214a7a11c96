"""Devices and clusters behind published rows: facts, each with its source. Nothing here is fitted.

Peaks, memory and links come from `laminar.ir.clusters.device_presets`; this adds what that does not tell
(multiprocessors, rate of exponentials, a lower power limit) and how the machines of each table are wired.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.clusters.device_presets import DEVICES


@dataclass(frozen=True)
class Gpu:
    """One kind of device as rows name it."""

    name: str
    """In `laminar.ir.clusters.device_presets`."""
    kind: str
    """Whose constants it has."""
    processors: int
    """Streaming multiprocessors."""
    exps_per_s: float
    """Exponentials: 16 a clock and multiprocessor."""
    matmul_most: float
    """The best share of the peak that a product was seen to reach."""
    matmul8_most: float = 0.0
    memory_bytes: float = 0.0
    """Where it differs from the sheet."""
    bytes_per_s: float = 0.0
    clock: float = 1.0
    """Share of the clock under load that a lower power limit leaves."""
    source: str = "datasheet"
    node: int = 8
    """Devices joined by NVLink."""

    @property
    def hbm_bytes_per_s(self) -> float:
        """Of its memory, at best."""
        return self.bytes_per_s or DEVICES[self.name].bytes_per_s.value

    @property
    def most_bytes(self) -> float:
        """Its memory: what is sold as 80 GB has 80 times 2^30 bytes."""
        return (self.memory_bytes or DEVICES[self.name].memory_bytes.value) * 2**30 / 1e9

    def peak(self, precision: str) -> float:
        """Operations a second of a product in that precision; one without units of its own runs in half precision."""
        rates = DEVICES[self.name].flops_per_s
        for dtype in (precision, "f16"):
            if dtype in rates:
                return rates[dtype].value
        return max(f.value for f in rates.values())


V100 = Gpu("v100-32g", "v100", 80, 16 * 80 * 1.53e9, 0.869, source="share of A100: nobody published one for V100")
A100 = Gpu("a100-80g", "a100", 108, 16 * 108 * 1.41e9, 0.869, source="best bf16 product 271.2 of 312 Tflop/s")
H100 = Gpu("h100", "h100", 132, 16 * 132 * 1.75e9, 0.803, 0.709, source="best products 794.5 of 989, 1402.6 of 1979")
B200 = Gpu("b200", "b200", 148, 16 * 148 * 1.85e9, 0.776, 0.763, source="best products 1745 of 2250, 3432.5 of 4500")

GPUS: tuple[tuple[str, Gpu], ...] = (
    # Assumed: power goes with the cube of the clock, a third of it static: ((500 - 233) / (700 - 233)) ** (1 / 3).
    (
        r"h100.*(96g|hbm2e|500w)",
        replace(H100, memory_bytes=96e9, bytes_per_s=2.4e12, clock=0.83, source="96 GB of HBM2e at 2.4 TB/s, 500 W"),
    ),
    (r"gh200", replace(H100, memory_bytes=96e9, bytes_per_s=4.0e12)),
    (r"h200", replace(H100, name="h200", source="as H100 with 141 GB at 4.8 TB/s")),
    (r"h100|h800", H100),
    (r"gb200|gb300", replace(B200, memory_bytes=186e9, node=72, source="72 devices share NVLink")),
    (r"b300", replace(B200, memory_bytes=288e9)),
    (r"b200|b100", B200),
    (r"a100.*40", replace(A100, name="a100-40g")),
    (r"a100|a800", A100),
    (r"v100.*16", replace(V100, name="v100-16g")),
    (r"v100", V100),
)


def gpu_of(text: str) -> Gpu | None:
    """The device a row names; None if it is not known."""
    low = text.lower()
    return next((gpu for pattern, gpu in GPUS if re.search(pattern, low)), None)


@dataclass(frozen=True)
class Wiring:
    """How a cluster's nodes are joined."""

    gbit: int
    """Of one network card."""
    shared: int
    """Devices that share it."""
    source: str


WIRED: tuple[tuple[str, str, Wiring], ...] = (
    ("bloom|bigscience|jean", "a100", Wiring(100, 2, "Jean Zay: 4 Omni-Path of 100 Gb/s for 8 devices")),
    ("megatron-deepspeed|vtrain", "a100", Wiring(100, 1, "vTrain: 800 Gb/s between nodes of 8")),
    ("", "v100", Wiring(100, 2, "DGX-1 class: 4 cards of 100 Gb/s for 8 devices")),
    ("", "a100", Wiring(200, 1, "DGX A100: 8 cards of 200 Gb/s")),
    ("", "h100", Wiring(400, 1, "DGX H100: 8 cards of 400 Gb/s")),
    ("", "b200", Wiring(400, 1, "DGX B200: 8 cards of 400 Gb/s")),
)
"""Part of the system's name, kind of device, wiring; the first that fits."""


@lru_cache(maxsize=1024)
def wiring(system: str, gpu: Gpu, vocab: int = 0, network: str = "") -> Wiring:
    """Of a row's cluster: what it states, else what its name tells; a vocabulary of 250,000 is BLOOM's."""
    if network:
        cards, gbit = (int(n) for n in network.split("x"))
        return Wiring(gbit, max(1, gpu.node // cards), "stated")
    low = system.lower()
    if "megatron-deepspeed" in low and vocab >= 250_000:
        low += " bloom"
    return next(w for pattern, kind, w in WIRED if kind == gpu.kind and re.search(pattern, low))


SPEC = {"v100": 150e9, "a100": 300e9, "h100": 450e9, "b200": 900e9}
"""NVLink of one device, one direction."""


INSIDE = {"v100": {2: 0.168, 4: 0.635}, "a100": {2: 0.860, 4: 0.967}}
"""Rate of an all-reduce inside a node over that of eight devices, by how many take part: NCCL measured on both."""
TRITON = 1 / math.sqrt(1.3 * 2.5)
"""Rate of FlashAttention in Triton over FlashAttention 2, which is 1.3 to 2.5 times as fast (Dao 2023, section 4,
on A100): the middle of that range by ratio."""
BEFORE_HOPPER = 1 / math.sqrt(1.5 * 2.0)
"""On H100, rate of FlashAttention 2 over FlashAttention 3, which is 1.5 to 2.0 times as fast (Shah et al. 2024).
Assumed of older kernels too, and on B200."""


def attention_rate(kernel: str, gpu: Gpu) -> float:
    """Rate of an attention kernel over the best that there is for a device."""
    rate = TRITON if kernel == "triton" else 1.0
    return rate * BEFORE_HOPPER if gpu.kind in ("h100", "b200") and kernel != "hopper" else rate


@lru_cache(maxsize=512)
def cluster(gpu: Gpu, gpus: int, wires: Wiring, node: float, across: float) -> Cluster:
    """Devices in nodes, nodes by their cards; `node` and `across` are the shares of both links that are reached."""
    nodes = -(-gpus // gpu.node)
    made = Cluster.preset(
        f"{nodes}x{gpu.node}x{gpu.name}@nvlink+ib{wires.gbit}/{wires.shared}"
        if nodes > 1
        else f"{min(gpus, gpu.node)}x{gpu.name}@nvlink"
    )
    inner = made.levels[0]
    levels = [replace(inner, bytes_per_s=Figure(node * SPEC[gpu.kind], "measured", "fitted"), switch_bytes_per_s=None)]
    for level in made.levels[1:]:
        levels.append(replace(level, bytes_per_s=Figure(across * wires.gbit / 8 * 1e9, "measured", "fitted")))
    return replace(made, levels=tuple(levels))
