"""The machine as data: what a device can do, and which links join devices, level by level.

A cluster is one kind of device and a nesting of levels, innermost first: eight devices make a node,
sixteen nodes a cluster; a rack between them is one more level. Every number is a `Figure`, which carries
where it comes from: a datasheet, a measurement, or nobody (assumed). The cost model reads rates from
here and nowhere else; search and lowering see seconds, never bandwidths.

Rank r of a mesh stands on device r, and the last axis of a mesh varies fastest, so it lies innermost.

Not covered: links that fail, traffic of other jobs. `laminar.ir.clusters.device_presets` has the presets,
`laminar.ir.clusters.mixed` joins clusters of different kinds into one, and `laminar.profile.detect` looks at this
machine.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from laminar.errors import ClusterError
from laminar.ir.clusters.maker_hook import who_makes_clusters
from laminar.ir.clusters.profile import LONGEST_S, checked_profile
from laminar.ir.mesh import Mesh
from laminar.ir.serial.codec import content_hash
from laminar.ir.tensor import ITEM_BYTES

CLUSTER_VERSION = 1
"""Of the JSON form."""
SOURCES = ("datasheet", "measured", "assumed")
DEVICE_KINDS = ("cpu", "gpu")
BACKENDS = ("nccl", "gloo", "shared")
"""Who moves the bytes: NCCL, Gloo over sockets, or memory that ranks of one machine share."""
RATES = (*ITEM_BYTES, "tf32", "f8")
"""Dtypes a device may have a rate for: those of tensors, and two that are ways to multiply."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str = "assumed"
    note: str = ""
    """Which sheet, which measurement, or why this guess."""

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.source}{': ' + self.note if self.note else ''})"


@dataclass(frozen=True)
class Device:
    """What one device can do alone."""

    name: str
    kind: str
    """`cpu` (one core, on which one rank runs) or `gpu`."""
    flops_per_s: Mapping[str, Figure]
    """Peak by dtype, dense; `tf32` and `f8` are rates of products. A dtype that is missing has no units of its own."""
    memory_bytes: Figure
    bytes_per_s: Figure
    """Its memory: bytes read plus bytes written."""
    launch_s: Figure
    """Host seconds to launch one kernel, or to call one op."""
    kernel_s: Figure
    """Seconds a kernel costs on the device even if it was launched long before."""
    efficiency: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By op family, points (size, fraction of the peak), sizes rising. The size is the flops of one call for
    `matmul`, `attention` and `convolution`, and the bytes moved for `memory`."""
    host_bytes_per_s: Figure = Figure(25e9, "assumed", "PCIe 4, 16 lanes, pinned memory")
    """To the host's memory and back, one way at a time: what offloaded values travel at. Of no meaning on a CPU."""


@dataclass(frozen=True)
class Level:
    """Links that join `size` units of the level inside (devices, at the innermost) into one unit."""

    name: str
    size: int
    latency_s: Figure
    """Of one hop, in a collective."""
    bytes_per_s: Figure
    """What one device gets through its link in one direction while nobody else uses it: payload, in collectives."""
    shared: int = 1
    """How many neighbouring devices use one such link; n that do at once get 1/n each."""
    switch_bytes_per_s: Figure | None = None
    """Where a switch can add up what passes through it: the rate at which a device's tensor is all-reduced so."""


@dataclass(frozen=True)
class Reach:
    """How far a group of ranks extends over the levels of a cluster."""

    level: int
    """The innermost level one unit of which holds the whole group; -1 for a group of one."""
    units: tuple[int, ...]
    """For each level, how many of its units the group touches."""
    members: tuple[int, ...]
    """For each level, how many of the group are in that unit which has most."""


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, and the levels of links between them, innermost first."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: str
    profile: Mapping[str, Any] = field(default_factory=dict)
    """What was measured here, as plain JSON; `laminar.cost.ops.table` gives it a meaning."""
    collective_s: Figure = Figure(0.0)
    """What a collective costs before its first hop: launch, and ranks finding each other."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        _check(self)

    # -- asked of a cluster --------------------------------------------------------------------

    @cached_property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(level.size for level in self.levels)

    @cached_property
    def unit_devices(self) -> tuple[int, ...]:
        """For each level, how many devices one of its units has."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[: k + 1]) for k in range(len(sizes)))

    @property
    def kind(self) -> str:
        """Of all its devices: `cpu` or `gpu`."""
        return self.device.kind

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """Clusters of one kind each that it is made of, in the order of their devices: itself, unless it is mixed."""
        return (self,)

    def on(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of one kind on which all these ranks stand: itself, unless it is mixed."""
        return self

    def joining(self, ranks: Sequence[int]) -> Level:
        """The innermost level that has all these ranks."""
        whole = [
            level for level, n in zip(self.levels, self.unit_devices, strict=True) if len({r // n for r in ranks}) == 1
        ]
        return whole[0] if whole else self.levels[-1]

    def fits(self, mesh: Mesh) -> None:
        """Refuse a mesh with more ranks than there are devices."""
        if mesh.ranks > self.devices:
            raise ClusterError(
                f"{mesh} has {mesh.ranks} ranks, cluster {self.name} has {self.devices} devices",
                next=f"use a mesh of at most {self.devices} ranks, or a larger cluster",
            )

    def span(self, ranks: tuple[int, ...]) -> Reach:
        """At which level a group lies, and how it is spread over the units of each."""
        for rank in ranks:
            if not 0 <= rank < self.devices:
                raise ClusterError(
                    f"rank {rank} of a group has no device in cluster {self.name}",
                    allowed=f"ranks 0 to {self.devices - 1}",
                )
        if not ranks or len(set(ranks)) != len(ranks):
            raise ClusterError(f"group {ranks} is empty or names a rank twice", allowed="each rank once")
        found = [Counter(r // size for r in ranks) for size in self.unit_devices]
        level = -1 if len(ranks) == 1 else next(k for k, c in enumerate(found) if len(c) == 1)
        return Reach(level, tuple(map(len, found)), tuple(max(c.values()) for c in found))

    def without(self, lost: Sequence[int]) -> Cluster:
        """What is left when these devices are gone, numbered anew; mixed, where nodes are left with unequal numbers."""
        return _makers().without(self, lost)

    def with_profile(self, profile: Mapping[str, Any]) -> Cluster:
        """The same machine, with what was measured on it."""
        return replace(self, profile=profile)

    def __str__(self) -> str:
        d = self.device
        lines = [f"cluster {self.name}: {self.devices} x {d.name} ({d.kind}), {self.backend}"]
        lines += [f"  {t:<5} {f.value / 1e12:8.4g} Tflop/s  {f.source}: {f.note}" for t, f in d.flops_per_s.items()]
        lines.append(f"  memory {d.memory_bytes.value / 1e9:.4g} GB  {d.memory_bytes.source}: {d.memory_bytes.note}")
        lines.append(f"         {d.bytes_per_s.value / 1e9:.4g} GB/s  {d.bytes_per_s.source}: {d.bytes_per_s.note}")
        for level in self.levels:
            rate, wait = level.bytes_per_s, level.latency_s
            by = f" shared by {level.shared}" if level.shared > 1 else ""
            lines.append(f"  {level.name} of {level.size}: {rate.value / 1e9:.4g} GB/s{by}  {rate.source}: {rate.note}")
            lines.append(f"         {wait.value * 1e6:.3g} us a hop  {wait.source}: {wait.note}")
        if self.profile:
            lines.append(f"  measured: {', '.join(sorted(map(str, self.profile)))}")
        return "\n".join(lines)

    # -- made from text, from this machine, from a file ----------------------------------------

    @staticmethod
    def preset(text: str) -> Cluster:
        """A cluster by its short name: `[NODESx][COUNTx]DEVICE[@FABRIC[+FABRIC]]`.

        `h200` is one device. `64xh100` is 64, eight a node; `16x4xa100` is 16 nodes of four. Devices: cpu,
        v100-16g, v100-32g (v100), a100-40g, a100-80g (a100), h100, h200, b200. Fabrics: `nvlink` or `pcie`
        inside a node, `ib400` (InfiniBand, Gbit/s) or `eth100` (Ethernet) across, with `/k` where k devices share a
        network card: `16x8xh100@pcie+eth100/8`. InfiniBand has a card per device and Ethernet one per
        node unless told. `2xcpu` is two cores of one machine, `4x2xcpu` two of each of four.

        `8xh100+8xa100` has two kinds, joined by the slower of what usually joins nodes of each, or as told behind a
        double @: `8xh100+2x4xa100@@eth100`. Devices are numbered part by part.
        """
        return _makers().preset(text)

    @staticmethod
    def detect() -> Cluster:
        """This machine: its GPUs if it has any, else the cores this process may run on."""
        return _makers().detect()

    @staticmethod
    def named(text: str) -> Cluster:
        """A cluster by its file or its short name."""
        return Cluster.load(text) if Path(text).is_file() or text.endswith(".json") else Cluster.preset(text)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """A cluster from a file that `save` or `laminar profile` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ClusterError(f"no cluster at {path}", next="write one with `laminar profile -o`") from None
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{path} is not a cluster: {error}", next="measure anew with `laminar profile`"
            ) from None
        return Cluster.from_json(data)

    def save(self, path: str | Path) -> None:
        """Write it down."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    # -- plain data ----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data; a figure is [value, source, note]."""
        d = self.device
        return {
            "version": CLUSTER_VERSION,
            "name": self.name,
            "device": {
                "name": d.name,
                "kind": d.kind,
                "flops_per_s": {dtype: _figure_json(f) for dtype, f in d.flops_per_s.items()},
                **{key: _figure_json(getattr(d, key)) for key in DEVICE_FIGURES},
                "host_bytes_per_s": _figure_json(d.host_bytes_per_s),
                "efficiency": {family: [list(p) for p in points] for family, points in d.efficiency.items()},
            },
            "levels": [level_json(level) for level in self.levels],
            "backend": self.backend,
            "collective_s": _figure_json(self.collective_s),
            "profile": dict(self.profile),
        }

    @staticmethod
    def from_json(data: Any) -> Cluster:
        """The inverse of `to_json`; what is missing or malformed is named."""
        version = _get(data, "version", "")
        if version != CLUSTER_VERSION:
            raise ClusterError(
                f"version: a cluster written as version {version!r}",
                allowed=f"version {CLUSTER_VERSION}",
                next="measure anew with `laminar profile`",
            )
        if "parts" in data:
            return _makers().mixed_from(data)
        d = _get(data, "device", "")
        device = Device(
            name=_get(d, "name", "device."),
            kind=_get(d, "kind", "device."),
            flops_per_s={
                dtype: _figure(f, f"device.flops_per_s[{dtype}]")
                for dtype, f in _items(_get(d, "flops_per_s", "device."), "device.flops_per_s")
            },
            efficiency={
                family: _points(points, f"device.efficiency[{family}]")
                for family, points in _items(d.get("efficiency", {}), "device.efficiency")
            },
            **{key: _figure(_get(d, key, "device."), f"device.{key}") for key in DEVICE_FIGURES},
            **{key: _figure(d[key], f"device.{key}") for key in ("host_bytes_per_s",) if key in d},
        )
        levels = _get(data, "levels", "")
        if not isinstance(levels, list):
            raise ClusterError("levels: not a list", allowed="a list of levels, innermost first")
        return Cluster(
            name=_get(data, "name", ""),
            device=device,
            levels=tuple(level_from(x, f"levels[{k}]") for k, x in enumerate(levels)),
            backend=_get(data, "backend", ""),
            profile=checked_profile(data.get("profile", {})),
            collective_s=_figure(data.get("collective_s", [0.0, "assumed", ""]), "collective_s"),
        )

    @cached_property
    def hash(self) -> str:
        """Identity: of every number, its source and what was measured."""
        return content_hash(self.to_json())

    def __hash__(self) -> int:
        return hash(self.hash)


DEVICE_FIGURES = ("memory_bytes", "bytes_per_s", "launch_s", "kernel_s")


class ClusterMakers(Protocol):
    """What makes clusters of something else; the module that does is named in `ir/clusters/maker_hook.py`."""

    def preset(self, text: str) -> Cluster:
        """Of a short name."""
        ...

    def detect(self) -> Cluster:
        """Of this machine."""
        ...

    def mixed_from(self, data: Mapping[str, Any]) -> Cluster:
        """Of the plain data of one with several kinds of devices."""
        ...

    def without(self, cluster: Cluster, lost: Iterable[int]) -> Cluster:
        """Of what is left when devices are lost."""
        ...


def _makers() -> ClusterMakers:
    return who_makes_clusters()  # type: ignore[no-any-return]


def level_json(level: Level) -> dict[str, Any]:
    """A level as plain data."""
    return {
        "name": level.name,
        "size": level.size,
        "latency_s": _figure_json(level.latency_s),
        "bytes_per_s": _figure_json(level.bytes_per_s),
        "shared": level.shared,
        "switch_bytes_per_s": level.switch_bytes_per_s and _figure_json(level.switch_bytes_per_s),
    }


def level_from(data: Any, path: str) -> Level:
    """The inverse; `path` is told in errors."""
    return Level(
        _get(data, "name", f"{path}."),
        _get(data, "size", f"{path}."),
        _figure(_get(data, "latency_s", f"{path}."), f"{path}.latency_s"),
        _figure(_get(data, "bytes_per_s", f"{path}."), f"{path}.bytes_per_s"),
        data.get("shared", 1),
        _figure(data["switch_bytes_per_s"], f"{path}.switch_bytes_per_s") if data.get("switch_bytes_per_s") else None,
    )


def _figure_json(figure: Figure) -> list[Any]:
    return [figure.value, figure.source, figure.note]


def _get(data: Any, key: str, path: str) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise ClusterError(f"{path}{key}: missing from the description of a cluster")
    return data[key]


def _items(data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: {data!r} is not a table", allowed="names and values")
    return data.items()


def _figure(data: Any, path: str) -> Figure:
    if not isinstance(data, list) or len(data) not in (2, 3):
        raise ClusterError(f"{path}: {data!r} is not a figure", allowed="[value, source] or [value, source, note]")
    number = isinstance(data[0], (int, float)) and not isinstance(data[0], bool)
    if number and path.endswith("_s") and not path.endswith("_per_s") and data[0] > LONGEST_S:
        raise ClusterError(f"{path}: {data[0]} s", allowed=f"up to {LONGEST_S:.0f} s")
    return Figure(data[0], data[1], data[2] if len(data) == 3 else "")


def _points(data: Any, path: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(data, list):
        raise ClusterError(f"{path}: {data!r} is not a curve", allowed="a list of points, [size, fraction] each")
    return tuple(_point(p, path) for p in data)


def _point(data: Any, path: str) -> tuple[float, float]:
    numbers = isinstance(data, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in data)
    if not numbers or len(data) != 2:
        raise ClusterError(f"{path}: {data!r} is not a point", allowed="[size, fraction], both numbers")
    return data[0], data[1]


# -- what is refused ---------------------------------------------------------------------------


def _check(cluster: Cluster) -> None:
    """Refuse nonsense by the name of its field."""
    d = cluster.device
    for path, name in (("name", cluster.name), ("device.name", d.name)):
        if not isinstance(name, str):
            raise ClusterError(f"{path}: {name!r}", allowed="a text")
    _one_of(d.kind, DEVICE_KINDS, "device.kind")
    _one_of(cluster.backend, BACKENDS, "backend")
    if not d.flops_per_s:
        raise ClusterError("device.flops_per_s: no dtype has a rate", allowed="at least one, such as f32")
    for dtype, figure in d.flops_per_s.items():
        _one_of(dtype, RATES, "device.flops_per_s")
        _number(figure, f"device.flops_per_s[{dtype}]")
    _number(d.memory_bytes, "device.memory_bytes")
    _number(d.bytes_per_s, "device.bytes_per_s")
    _number(d.launch_s, "device.launch_s", least=0.0)
    _number(d.kernel_s, "device.kernel_s", least=0.0)
    _number(d.host_bytes_per_s, "device.host_bytes_per_s")
    for family, points in d.efficiency.items():
        _curve(points, f"device.efficiency[{family}]")
    if not cluster.levels:
        raise ClusterError("levels: none", next='for one device write one level of size 1, as preset("h200") does')
    for k, level in enumerate(cluster.levels):
        check_level(level, f"levels[{k}]")
        if level.shared > cluster.unit_devices[k]:
            raise ClusterError(
                f"levels[{k}].shared: {level.shared} devices share a link of {level.name}, "
                f"which joins {cluster.unit_devices[k]}",
                allowed=f"1 to {cluster.unit_devices[k]}",
            )
    _number(cluster.collective_s, "collective_s", least=0.0)


def check_level(level: Level, path: str) -> None:
    """Refuse nonsense in a level, which is at `path`."""
    if not isinstance(level.name, str):
        raise ClusterError(f"{path}.name: {level.name!r}", allowed="a text")
    _whole(level.size, f"{path}.size")
    _whole(level.shared, f"{path}.shared")
    _number(level.latency_s, f"{path}.latency_s", least=0.0)
    _number(level.bytes_per_s, f"{path}.bytes_per_s")
    if level.switch_bytes_per_s is not None:
        _number(level.switch_bytes_per_s, f"{path}.switch_bytes_per_s")


def _one_of(value: Any, allowed: tuple[str, ...], path: str) -> None:
    if value not in allowed:
        raise ClusterError(f"{path}: unknown {value!r}", allowed="  ".join(allowed))


def _whole(value: Any, path: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{path}: {value!r}", allowed="a whole number of at least 1")


def _number(figure: Any, path: str, least: float | None = None) -> None:
    """A finite number: above zero, or not below `least`."""
    if not isinstance(figure, Figure):
        raise ClusterError(f"{path}: {figure!r} says not where it comes from", allowed="Figure(value, source, note)")
    _one_of(figure.source, SOURCES, f"{path}.source")
    value = figure.value
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or (value <= 0 if least is None else value < least):
        raise ClusterError(
            f"{path}: {value!r}", allowed="a number above 0" if least is None else f"a number of at least {least:g}"
        )


def _curve(points: tuple[tuple[float, float], ...], path: str) -> None:
    sizes = [size for size, _ in points]
    if not points or sorted(set(sizes)) != sizes:
        raise ClusterError(f"{path}: sizes {sizes} do not rise", allowed="points (size, fraction), sizes rising")
    for size, fraction in points:
        if not (math.isfinite(size) and size > 0 and 0 < fraction <= 1):
            raise ClusterError(f"{path}: point ({size}, {fraction})", allowed="size above 0, fraction in (0, 1]")
