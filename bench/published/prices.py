"""Prices of items on a device, from its facts and ten fitted constants.

product     waves of tiles over the multiprocessors, each as deep as the product and a bit more (what filling and
            draining a tile costs); the best of a few tiles, with or without splitting the depth; or its bytes
attention   one kernel: its products and its exponentials, at a share of both
bytes       what a kernel reads and writes, at a share of the memory's rate
exchanges   `laminar.cost.comm.price`, on links that reach a share of what is printed on them
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from bench.published.bills import Item
from bench.published.machines import A100, H100, INSIDE, Gpu, Wiring, attention_rate, cluster
from laminar.cost.comm.price import CollectiveCost
from laminar.ir.mesh import Mesh

FILE = Path(__file__).parent / "constants.json"
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (256, 64, 0.88), (128, 64, 0.82), (64, 64, 0.66))
"""Rows and columns of a tile, and the share of the best tile's rate. Assumed: as libraries' own tables have them."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""Pieces a product's depth may be cut into."""
BACKWARD_PRODUCTS, BACKWARD_EXPS = 2.5, 1.5
"""Of fused attention's backward, over forward: five products for two; exponentials again, and their gradients."""


@dataclass(frozen=True)
class Constants:
    """What is fitted, for one kind of device."""

    matmul: float = 0.7
    """Share of the peak that a large product reaches in half precision."""
    depth: float = 200.0
    """What a tile costs beside its depth, in elements of depth."""
    matmul8: float = 0.55
    """Share of the peak in eight bits."""
    attention: float = 0.6
    """Share that fused attention reaches of its products and exponentials."""
    memory: float = 0.75
    """Share of the memory's rate."""
    kernel_s: float = 3e-6
    """What a kernel takes whatever it does."""
    launch_s: float = 25e-6
    """What the host takes to launch one."""
    node: float = 0.6
    """Share of NVLink that exchanges reach."""
    across: float = 0.7
    """Share of the network cards."""
    jitter: float = 0.005
    """By how much a step is longer for each doubling of the nodes."""


LIMITS: dict[str, tuple[float, float]] = {
    "matmul": (0.3, 0.869),
    "depth": (0.0, 1500.0),
    "matmul8": (0.2, 0.763),
    "attention": (0.1, 1.0),
    "memory": (0.3, 0.95),
    "kernel_s": (0.5e-6, 12e-6),
    "launch_s": (1e-6, 80e-6),
    "node": (0.1, 0.83),
    "across": (0.1, 0.97),
    "jitter": (0.0, 0.03),
}
"""Physical limits; those of products are the device's own (`Gpu.matmul_most`)."""


def limits(gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Of a kind of device."""
    return {**LIMITS, "matmul": (0.3, gpu.matmul_most), "matmul8": (0.2, gpu.matmul8_most or 0.5)}


def load(path: Path = FILE) -> dict[str, Constants]:
    """The fitted constants of every kind; kinds without rows have those of the kind before them."""
    if not path.exists():
        return {}
    names = {f.name for f in fields(Constants)}
    return {
        kind: Constants(**{k: v for k, v in found.items() if k in names})
        for kind, found in json.loads(path.read_text())["kinds"].items()
    }


KIN = {"v100": A100, "a100": A100, "h100": H100, "b200": H100}
"""Whose constants a device has that nothing was fitted to."""


def of_kind(gpu: Gpu, known: dict[str, Constants]) -> Constants:
    """A device's constants: its own, or those of its kin inside its own limits."""
    for kin in (gpu, KIN[gpu.kind], A100):
        kind = kin.kind
        if kind in known:
            most = limits(gpu)
            if kin is not gpu:  # as near to the best product seen as the kin comes
                own = limits(kin)
                known = {
                    kind: replace(
                        known[kind],
                        **{
                            name: getattr(known[kind], name) * most[name][1] / own[name][1]
                            for name in ("matmul", "matmul8")
                        },
                    )
                }
            return replace(
                known[kind], **{k: min(max(v, most[k][0]), most[k][1]) for k, v in asdict(known[kind]).items()}
            )
    return Constants()


class Prices:
    """Seconds of items on one device of one cluster, for one set of constants."""

    def __init__(self, gpu: Gpu, gpus: int, wires: Wiring, constants: Constants) -> None:
        self.gpu, self.constants = gpu, constants
        self.bytes_per_s = gpu.hbm_bytes_per_s * constants.memory
        self.links = _links(gpu, gpus, wires, constants.node, constants.across)
        self._known: dict[Item, float] = {}

    def product_s(self, batch: int, m: int, n: int, k: int, dtype: str) -> float:
        """Of (m, k) times (k, n), `batch` of them."""
        key = ("mm", batch, m, n, k, dtype)
        if key not in self._known:
            c, gpu = self.constants, self.gpu
            share = c.matmul8 if dtype == "f8" else c.matmul
            rate = gpu.peak("f16" if dtype == "bf16" and gpu.kind == "v100" else dtype) * share * gpu.clock
            # What a tile costs beside is time: in eight bits, twice as much depth would fit into it.
            best = (
                _units(gpu.processors, batch, m, n, k, c.depth * (2 if dtype == "f8" else 1))
                * 2
                * gpu.processors
                / rate
            )
            wide = 1 if dtype == "f8" else 4 if dtype == "f32" else 2
            moved = batch * (wide * (m * k + k * n) + max(2, wide) * m * n)
            self._known[key] = max(best, moved / self.bytes_per_s) + c.kernel_s
        return self._known[key]

    def attention_s(self, back: bool, heads: int, q: int, k: int, width: int, halved: bool, kernel: str) -> float:
        """One kernel for all heads of all samples."""
        c, gpu = self.constants, self.gpu
        pairs = float(heads) * q * k * (0.5 + 64 / max(q, 128) if halved else 1.0)
        flops = 4 * pairs * width * (BACKWARD_PRODUCTS if back else 1.0)
        exps = pairs * (BACKWARD_EXPS if back else 1.0)
        share = c.attention * gpu.clock * attention_rate(kernel, gpu)
        return (flops / gpu.peak("bf16") + exps / gpu.exps_per_s) / share + c.kernel_s

    def bytes_s(self, nbytes: float) -> float:
        """A kernel that reads and writes so much."""
        return nbytes / self.bytes_per_s + self.constants.kernel_s

    def move_s(self, kind: str, nbytes: float, mesh: Mesh, axes: tuple[int, ...]) -> float:
        """A collective over axes of a mesh, all groups at once."""
        ranks = math.prod(mesh.sizes[a] for a in axes)
        if kind != "send":
            nbytes /= INSIDE.get(self.gpu.kind, {}).get(ranks, 1.0)
        return self.links.on(kind, int(nbytes), mesh, axes).seconds


@lru_cache(maxsize=2048)
def _links(gpu: Gpu, gpus: int, wires: Wiring, node: float, across: float) -> CollectiveCost:
    return CollectiveCost(cluster(gpu, gpus, wires, node, across))


@lru_cache(maxsize=1 << 18)
def _units(processors: int, batch: int, m: int, n: int, k: int, depth: float) -> float:
    """Multiply-adds that one multiprocessor does, waiting for the last wave included; of the best way."""
    best = math.inf
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            if split > 1 and (k < 1024 * split or tiles >= 2 * processors):
                break
            waves = -(-tiles * split // processors)
            each = rows * columns * (k / split + depth * (1 if split == 1 else 1.5)) / share
            best = min(best, waves * each)
    return best
