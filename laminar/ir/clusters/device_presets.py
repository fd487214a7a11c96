"""Machines people have: devices and fabrics by name.

Rates of devices are dense peaks from datasheets; how much of a peak is reached is in `efficiency`, whose
ends are published best measurements and whose shape is assumed. Rates of links are what
collectives reach, not what is printed on the cable. A number nobody has measured says so.

Nothing here looks at a machine: `laminar.profile.detect` does, and says here what it has found. A device that is not in
the tables gets assumed rates, to be replaced by `laminar profile`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from laminar.errors import ClusterError
from laminar.ir.clusters.cluster import Cluster, Device, Figure, Level

NODE = 8
"""Devices a node has unless told."""
GRAMMAR = (
    "[NODESx][COUNTx]DEVICE[@FABRIC[+FABRIC]], as in 64xh100, 16x4xa100-40g, 16x8xh100@pcie+eth100/8; "
    "of several kinds with + between them and @@FABRIC behind: 8xh100+8xa100@@ib200"
)
ACROSS = r"(ib|eth)[1-9]\d{0,4}(/[1-9]\d*)?"
FABRICS = "nvlink  pcie  ib<Gbit/s>[/sharers]  eth<Gbit/s>[/sharers]"


def sheet(value: float, note: str) -> Figure:
    """From a datasheet."""
    return Figure(value, "datasheet", note)


def measured(value: float, note: str) -> Figure:
    """From a measurement that the note names."""
    return Figure(value, "measured", note)


def assumed(value: float, note: str = "") -> Figure:
    """From nobody."""
    return Figure(value, "assumed", note)


# -- devices -----------------------------------------------------------------------------------


def _gpu(
    name: str, sheet_name: str, tera: Mapping[str, float], memory_gb: float, memory_tb_per_s: float,
    matmul: Figure, memory: Figure, host: Figure,
) -> Device:  # fmt: skip
    """A GPU by its datasheet, and by the best fraction of it that products and memory-bound ops were seen to reach."""
    top, flow = matmul.value, memory.value
    product = ((1e8, 0.1 * top), (1e9, 0.35 * top), (1e10, 0.7 * top), (1e11, 0.9 * top), (1e12, top))
    return Device(
        name=name,
        kind="gpu",
        flops_per_s={dtype: sheet(rate * 1e12, f"{sheet_name}, dense") for dtype, rate in tera.items()},
        memory_bytes=sheet(memory_gb * 1e9, f"{sheet_name}; the driver keeps a part"),
        bytes_per_s=sheet(memory_tb_per_s * 1e12, sheet_name),
        launch_s=assumed(5e-6, "one op of PyTorch called from Python"),
        kernel_s=assumed(2e-6, "start and drain of one kernel"),
        efficiency={
            "matmul": product,
            "convolution": tuple((size, 0.8 * part) for size, part in product),
            "attention": tuple((size, 0.7 * part) for size, part in product),
            "memory": ((1e5, 0.2 * flow), (1e6, 0.5 * flow), (1e7, 0.85 * flow), (1e8, flow)),
        },
        host_bytes_per_s=host,
    )


_A100 = {"f64": 9.7, "f32": 19.5, "tf32": 156.0, "bf16": 312.0, "f16": 312.0}
_HOPPER = {"f64": 33.5, "f32": 66.9, "tf32": 494.7, "bf16": 989.4, "f16": 989.4, "f8": 1978.9}
_COPY_A100 = measured(0.79, "copy on the device, 1.58 of 2.0 TB/s")
_COPY_H100 = measured(0.755, "copy on the device, 2.53 of 3.35 TB/s")
_PCIE3 = assumed(12e9, "PCIe 3, 16 lanes, pinned memory")
_PCIE4 = assumed(25e9, "PCIe 4, 16 lanes, pinned memory")
_PCIE5 = assumed(50e9, "PCIe 5, 16 lanes, pinned memory")
_BEST_H100 = measured(0.803, "best bf16 product found by search, 794.5 Tflop/s")

DEVICES: dict[str, Device] = {
    "v100-16g": _gpu(
        "v100-16g", "NVIDIA V100 SXM2 datasheet", {"f64": 7.8, "f32": 15.7, "f16": 125.0}, 16, 0.9,
        assumed(0.8, "like A100"), assumed(0.8, "like A100"), _PCIE3,
    ),
    "v100-32g": _gpu(
        "v100-32g", "NVIDIA V100 SXM2 datasheet", {"f64": 7.8, "f32": 15.7, "f16": 125.0}, 32, 0.9,
        assumed(0.8, "like A100"), assumed(0.8, "like A100"), _PCIE3,
    ),
    "a100-40g": _gpu(
        "a100-40g", "NVIDIA A100 SXM 40 GB datasheet", _A100, 40, 1.555,
        measured(0.869, "of the 80 GB part"), _COPY_A100, _PCIE4,
    ),
    "a100-80g": _gpu(
        "a100-80g", "NVIDIA A100 SXM 80 GB datasheet", _A100, 80, 2.039,
        measured(0.869, "best bf16 product found by search, 271.2 Tflop/s"), _COPY_A100, _PCIE4,
    ),
    "h100": _gpu("h100", "NVIDIA H100 SXM datasheet", _HOPPER, 80, 3.35, _BEST_H100, _COPY_H100, _PCIE5),
    "h200": _gpu("h200", "NVIDIA H200 SXM datasheet", _HOPPER, 141, 4.8, _BEST_H100, _COPY_H100, _PCIE5),
    "b200": _gpu(
        "b200", "NVIDIA HGX B200 datasheet",
        {"f64": 37.0, "f32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "f16": 2250.0, "f8": 4500.0}, 180, 8.0,
        measured(0.776, "best bf16 product found by search, 1745 Tflop/s"), assumed(0.755, "like H100"), _PCIE5,
    ),
}  # fmt: skip
"""GPUs by name. A dtype that is missing (bf16 on V100, f8 before Hopper) has no units of its own there."""

ALIASES = {"v100": "v100-32g", "a100": "a100-80g"}


def cpu(ghz: float = 2.5, flops_per_cycle: int = 32, memory_bytes: Figure | None = None, note: str = "") -> Device:
    """One core, on which one rank runs."""
    why = note or "2.5 GHz, two AVX2 multiply-adds a cycle"
    rate = ghz * 1e9 * flops_per_cycle
    return Device(
        name="cpu",
        kind="cpu",
        flops_per_s={
            "f64": assumed(rate / 2, why),
            "f32": assumed(rate, why),
            "bf16": assumed(rate / 2, "converted to f32 and back"),
            "f16": assumed(rate / 4, "converted to f32 and back"),
        },
        memory_bytes=memory_bytes or assumed(4e9, "a core's share"),
        bytes_per_s=assumed(8e9, "a core's share while all cores use the memory"),
        launch_s=assumed(4e-6, "one op of PyTorch called from Python"),
        kernel_s=assumed(0.0, "the core that calls is the core that computes"),
        efficiency={
            "matmul": ((1e5, 0.2), (1e7, 0.6), (1e9, 0.8)),
            "convolution": ((1e5, 0.1), (1e7, 0.4), (1e9, 0.6)),
            "attention": ((1e5, 0.1), (1e7, 0.3), (1e9, 0.5)),
            "memory": ((1e4, 0.5), (1e7, 1.0)),
        },
    )


# -- fabrics -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inside:
    """Links inside a node."""

    bytes_per_s: Figure
    latency_s: Figure
    collective_s: Figure
    switch_bytes_per_s: Figure | None = None


_A100_HOP = measured(2.7e-6, "fit to NCCL all-reduces of 2, 4 and 8 A100, with 40 us before the first hop")
_A100_START = measured(40e-6, "fit to NCCL all-reduces of 2, 4 and 8 A100")
_H100_HOP = assumed(1.8e-6, "so that a small all-reduce of 8 H200 takes the measured 40 us")
_H100_START = assumed(35e-6, "so that a small all-reduce of 8 H200 takes the measured 40 us")

NVLINK: dict[str, _Inside] = {
    "v100": _Inside(
        measured(122e9, "NCCL ring of 8; two GPUs alone reach 22 GB/s, not all pairs are joined"),
        assumed(3e-6, "like A100"), assumed(40e-6, "like A100"),
    ),
    "a100": _Inside(measured(227e9, "NCCL ring of 8; two GPUs send 274 of 300 GB/s"), _A100_HOP, _A100_START),
    "h100": _Inside(
        measured(367e9, "NCCL ring of 8 H200; two H100 send 376 of 450 GB/s"), _H100_HOP, _H100_START,
        measured(275e9, "all-reduce of 8 H200 by NVLink SHARP, 482 GB/s of bus bandwidth"),
    ),
    "b200": _Inside(
        measured(746e9, "two GB200 send 746 of 900 GB/s"), _H100_HOP, _H100_START,
        measured(483e9, "all-reduce of 8 B200 by NVLink SHARP, 846 GB/s of bus bandwidth"),
    ),
}  # fmt: skip
NVLINK["h200"] = NVLINK["h100"]

PCIE_GB_PER_S = {"v100": 16.0, "a100": 32.0, "h100": 64.0, "h200": 64.0, "b200": 64.0}
"""One direction, 16 lanes of generation 3, 4 and 5."""
# Counted as a ring through all ranks. Counted as all-reduces among nodes only, the same rows give 73 % for 4 nodes,
# but then no one share fits both few nodes and many.
REACHED_NIC = measured(0.95, "NCCL rings over DGX nodes: 192 of 200 and 380 of 400 GB/s")
REACHED_PCIE = assumed(0.75, "through the host bridge")
HABIT = {"v100": "ib100/2", "a100": "ib200", "h100": "ib400", "h200": "ib400", "b200": "ib400"}
"""How nodes of a device are usually joined."""


def _node(family: str, inside: str, size: int) -> tuple[Level, Figure]:
    if inside == "pcie":
        rate = PCIE_GB_PER_S[family] * 1e9 * REACHED_PCIE.value
        wire = _Inside(assumed(rate, "75 % of 16 lanes"), assumed(5e-6), assumed(40e-6, "like A100"))
    else:
        wire = NVLINK[family]
    return Level("node", size, wire.latency_s, wire.bytes_per_s, 1, wire.switch_bytes_per_s), wire.collective_s


def _across(kind: str, gbit: int, shared: int, nodes: int) -> Level:
    rate = gbit / 8 * 1e9
    if kind == "ib":
        part, wait = REACHED_NIC, assumed(8e-6, "one hop of a collective over RDMA")
        reached = measured(rate * part.value, f"95 % of {gbit} Gbit/s; {part.note}")
    else:
        wait = assumed(30e-6, "one hop of a collective over TCP")
        reached = assumed(rate * 0.8, f"80 % of {gbit} Gbit/s")
    return Level("cluster", nodes, wait, reached, shared)


def _fabrics(text: str, whole: str) -> tuple[str, str]:
    """The fabric inside a node and the one across, empty where the text says nothing."""
    inside = across = ""
    for token in text.split("+") if text else ():
        if token in ("nvlink", "pcie") and not inside:
            inside = token
        elif re.fullmatch(ACROSS, token) and not across:
            across = token
        else:
            raise ClusterError(
                f"fabric: {token!r} in {whole!r} is unknown, or one too many",
                allowed=FABRICS,
                next="at most one inside a node and one across, joined by +",
            )
    return inside, across


def preset(text: str) -> Cluster:
    """A cluster by its short name; `Cluster.preset` says how it is written."""
    whole, at, outer = text.strip().lower().partition("@@")
    kinds = _kinds(whole)
    if len(kinds) > 1:
        return _mixed(text.strip().lower(), kinds, outer)
    if at:
        raise ClusterError(f"fabric: @@{outer} in {text!r} joins kinds of device, and there is one", allowed=GRAMMAR)
    return _of_one_kind(text)


def _kinds(text: str) -> list[str]:
    """The parts of a name: a + begins a new one where a number or a device follows, else it is one of fabrics."""
    out: list[str] = []
    for token in text.split("+"):
        head = token.strip().split("@")[0]
        if not out or re.match(r"\d", head) or head in {*DEVICES, *ALIASES, "cpu"}:
            out.append(token.strip())
        else:
            out[-1] += f"+{token}"
    return out


def _mixed(text: str, kinds: list[str], outer: str) -> Cluster:
    """Parts of one kind each, joined by the fabric told or by the slowest of those that usually join their nodes."""
    from laminar.ir.clusters.mixed import Mixed, slowest

    parts = [_of_one_kind(kind) for kind in kinds]
    each = min(part.levels[0].size for part in parts)
    if outer and not re.fullmatch(ACROSS, outer):
        raise ClusterError(f"fabric: {outer!r} in {text!r} can't join parts", allowed="ib<Gbit/s>  eth<Gbit/s>")
    ways = []
    for kind, part in zip(kinds, parts, strict=True):
        usual = _fabrics(kind.partition("@")[2], text)[1] or HABIT.get(part.device.name.split("-")[0], "eth10")
        wire, _, sharers = usual.partition("/")
        usual = f"{wire}/{min(int(sharers), each)}" if sharers else wire
        ways.append(_joined(outer or usual, each, len(parts), text))
    return Mixed(text, parts, slowest(ways))


def _of_one_kind(text: str) -> Cluster:
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([a-z]\w*(?:-\w+)?)(?:@(.+))?", text.strip().lower())
    if match is None:
        raise ClusterError(f"{text!r} is not the name of a cluster", allowed=GRAMMAR)
    first, second, name, fabric = match.groups()
    name = ALIASES.get(name, name)
    if name != "cpu" and name not in DEVICES:
        known = [*ALIASES, *DEVICES, "cpu"]
        raise ClusterError(f"device: {name!r} in {text!r} is unknown", allowed="  ".join(known), next=GRAMMAR)
    if "0" in (first, second) or int(first or 1) == 0 or int(second or 1) == 0:
        raise ClusterError(f"count: {text!r} has no devices", allowed="a whole number of at least 1")
    if second is not None:
        nodes, each = int(first), int(second)
    else:
        count = int(first or 1)
        each = count if name == "cpu" else min(count, NODE)
        nodes = count // each
        if nodes * each != count:
            raise ClusterError(
                f"count: {count} devices do not fill nodes of {NODE}",
                next=f"write nodes x devices, such as {count}x1x{name}",
            )
    inside, across = _fabrics(fabric or "", text)
    return _cpus(text, nodes, each, inside, across) if name == "cpu" else _gpus(text, name, nodes, each, inside, across)


def _gpus(text: str, name: str, nodes: int, each: int, inside: str, across: str) -> Cluster:
    family = name.split("-")[0]
    level, start = _node(family, inside or "nvlink", each)
    levels = [level]
    if nodes > 1:
        levels.append(_joined(across or HABIT[family], each, nodes, text))
    return Cluster(text.strip().lower(), DEVICES[name], tuple(levels), "nccl", {}, start)


def _joined(across: str, each: int, nodes: int, text: str) -> Level:
    """The level of nodes; Ethernet has one card a node unless told."""
    kind, gbit, sharers = re.match(r"(ib|eth)(\d+)/?(\d*)", across).groups()  # type: ignore[union-attr]
    shared = int(sharers) if sharers else each if kind == "eth" else 1
    if sharers and shared > each:
        raise ClusterError(f"fabric: {shared} devices share a card in {text!r}", allowed=f"1 to {each}, a node's")
    return _across(kind, int(gbit), shared, nodes)


def _cpus(text: str, nodes: int, each: int, inside: str, across: str, device: Device | None = None) -> Cluster:
    if inside:
        raise ClusterError(f"fabric: {inside!r} in {text!r}: cores share memory", allowed="eth<Gbit/s>  ib<Gbit/s>")
    rate = assumed(4e9, "copy by one core while all copy") if nodes == 1 else assumed(1e9, "sockets inside a machine")
    levels = [Level("machine", each, assumed(20e-6, "one rank wakes another"), rate)]
    if nodes > 1:
        levels.append(_joined(across or "eth10", each, nodes, text))
    backend = "shared" if nodes == 1 else "gloo"
    start = assumed(20e-6 if backend == "shared" else 50e-6, "calls from Python")
    return Cluster(text.strip().lower(), device or cpu(), tuple(levels), backend, {}, start)


# -- machines that were looked at ----------------------------------------------------------------


def gpus(name: str, memory_bytes: int, count: int) -> Cluster:
    """A machine of GPUs that call themselves so; rates of those that the tables don't have are assumed."""
    text = name.lower()
    family = next((f for f in ("b200", "h200", "h100", "a100", "v100") if f in text), "")
    size = memory_bytes >> 30
    known = {"a100": "a100-80g" if size > 50 else "a100-40g", "v100": "v100-32g" if size > 20 else "v100-16g"}
    plain = family and "pcie" not in text and "nvl" not in text and "mig" not in text
    if plain:
        base, fabric = DEVICES[known.get(family, family)], "nvlink"
    else:
        guess = assumed(0.5, "unknown device")
        base = _gpu("unknown", "", {"f64": 0.5, "f32": 20.0, "bf16": 80.0, "f16": 80.0}, 1, 0.8, guess, guess, _PCIE4)
        note = f"{name} is not in the tables: measure it with `laminar profile`"
        rates = {dtype: assumed(f.value, note) for dtype, f in base.flops_per_s.items()}
        base = replace(base, name=text, flops_per_s=rates, bytes_per_s=assumed(base.bytes_per_s.value, note))
        family, fabric = family or "a100", "pcie"
    device = replace(base, memory_bytes=measured(memory_bytes, "nvidia-smi"))
    level, start = _node(family, fabric, count)
    return Cluster(f"{count}x{device.name}", device, (level,), "nccl", {}, start)


def cores(count: int, device: Device) -> Cluster:
    """A machine of so many cores."""
    return _cpus(f"{count}xcpu", 1, count, "", "", device)
