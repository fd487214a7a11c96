"""A machine as data: short names mean what they say, nothing is lost on the way through a file, nonsense is refused.

Refusals must name the field, because a description of a cluster is written by hand or by another tool, and
"bad value" in forty numbers helps nobody. Whether the numbers are right is not tested here: a number
carries its source, and `tests/cost/test_collective_cost.py` holds links against published measurements.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar import Cluster, ClusterError, Mesh
from laminar.ir.clusters import device_presets
from laminar.ir.clusters.cluster import SOURCES, Device, Figure, Level

PRESETS = """h200 b200 a100-40g 8xv100 v100-16g 64xh100 16x4xa100 128x8xa100-80g 2xcpu 4x2xcpu 16x8xh100@ib400
16x8xh100@eth100 4xh100@pcie 16x8xh100@pcie+eth100/4 3x1xh200 4x2xcpu@ib100""".split()


def figures(value: Any, path: str = "") -> list[tuple[str, Figure]]:
    """Every figure in a value, with its path."""
    if isinstance(value, Figure):
        return [(path, value)]
    if isinstance(value, (Device, Level, Cluster)):
        return [f for key, x in vars(value).items() for f in figures(x, f"{path}.{key}")]
    if isinstance(value, (tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [f for key, x in pairs for f in figures(x, f"{path}[{key}]")]
    return []


def small(**changes: Any) -> Cluster:
    """Three levels: pairs, nodes of three pairs, two nodes."""
    fine = Figure(1e9, "measured", "here")
    wait = Figure(1e-6)
    device = Device("toy", "gpu", {"f32": Figure(1e12)}, Figure(8e9), Figure(1e11), wait, wait)
    levels = (Level("pair", 2, wait, fine), Level("node", 3, wait, fine, 2), Level("all", 2, wait, fine, 6))
    return Cluster(**{"name": "toy", "device": device, "levels": levels, "backend": "nccl", **changes})


# --- presets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes", "device", "backend"),
    [
        ("64xh100", (8, 8), "h100", "nccl"),
        ("16x4xa100", (4, 16), "a100-80g", "nccl"),
        ("128x8xa100-80g", (8, 128), "a100-80g", "nccl"),
        ("4xv100", (4,), "v100-32g", "nccl"),
        ("B200", (1,), "b200", "nccl"),
        ("2xcpu", (2,), "cpu", "shared"),
        ("64xcpu", (64,), "cpu", "shared"),
        ("4x2xcpu", (2, 4), "cpu", "gloo"),
    ],
)
def test_a_short_name_says_how_many_of_what(text: str, sizes: tuple[int, ...], device: str, backend: str) -> None:
    """GPUs stand eight to a node unless told; cores of one machine share memory."""
    cluster = Cluster.preset(text)
    assert tuple(level.size for level in cluster.levels) == sizes
    assert cluster.devices == math.prod(sizes)
    assert (cluster.device.name, cluster.backend) == (device, backend)


def test_a_fabric_is_part_of_the_name() -> None:
    """Rates are shares of what the cable carries; Ethernet has one card a node unless told, InfiniBand one a GPU."""
    ib, eth, half = (Cluster.preset(f"16x8xh100@{f}").levels[1] for f in ("ib400", "eth100", "ib400/2"))
    assert (ib.shared, eth.shared, half.shared) == (1, 8, 2)
    assert ib.bytes_per_s.value == pytest.approx(0.95 * 50e9)
    assert eth.bytes_per_s.value == pytest.approx(0.8 * 12.5e9)
    nvlink, pcie = (Cluster.preset(f"8xh100@{f}").levels[0].bytes_per_s.value for f in ("nvlink", "pcie"))
    assert pcie < nvlink / 5
    assert Cluster.preset("16x8xh100") == replace(Cluster.preset("16x8xh100@nvlink+ib400"), name="16x8xh100")


@pytest.mark.parametrize("text", PRESETS)
def test_every_number_says_where_it_comes_from(text: str) -> None:
    """A guess that looks like a measurement is the worst number there is."""
    found = figures(Cluster.preset(text))
    assert len(found) >= 10
    for path, figure in found:
        assert figure.source in SOURCES, path
        assert figure.note or figure.source == "assumed", path


def test_devices_carry_eight_bit_rates_where_the_hardware_has_them() -> None:
    """A plan for H100 may use FP8 products; one for A100 may not."""
    rates = {name: dict(device_presets.DEVICES[name].flops_per_s) for name in device_presets.DEVICES}
    assert {name for name in rates if "f8" in rates[name]} == {"h100", "h200", "b200"}
    assert all(r["f8"].value == pytest.approx(2 * r["bf16"].value, rel=1e-3) for r in rates.values() if "f8" in r)
    assert not any("bf16" in rates[name] for name in ("v100-16g", "v100-32g"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64xh900", "device: 'h900'"),
        ("h100x8", "device: 'h100x8'"),
        ("", "not the name"),
        ("8x8x8xh100", "not the name"),
        ("0xh100", "count: '0xh100'"),
        ("4x0xh100", "count: '4x0xh100'"),
        ("00xcpu", "count: '00xcpu'"),
        ("12xh100", "count: 12 devices do not fill nodes of 8"),
        ("16xh100@token_ring", "fabric: 'token_ring'"),
        ("16xh100@ib0", "fabric: 'ib0'"),
        ("16xh100@ib100+eth100", "fabric: 'eth100'"),
        ("16xh100@nvlink+pcie", "fabric: 'pcie'"),
        ("16xh100@ib400/16", "fabric: 16 devices share"),
        ("2xcpu@nvlink", "fabric: 'nvlink'"),
    ],
)
def test_a_name_that_means_nothing_is_refused_by_its_part(text: str, says: str) -> None:
    """And the message says what could stand there."""
    with pytest.raises(ClusterError) as error:
        Cluster.preset(text)
    assert says in str(error.value)
    assert "allowed" in str(error.value) or "next" in str(error.value)


# --- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", PRESETS)
def test_a_cluster_survives_a_file(text: str, tmp_path: Path) -> None:
    """Same value, same hash, and the file is what `json` calls JSON."""
    cluster = Cluster.preset(text).with_profile(
        {"ops": {"cpu": {"device": "x", "versions": {}, "ops": {"mm": [1, 2.5, 3]}}}}
    )
    cluster.save(tmp_path / "here.json")
    again = Cluster.load(tmp_path / "here.json")
    assert again == cluster
    assert again.hash == cluster.hash
    assert len({cluster, again}) == 1
    assert json.loads((tmp_path / "here.json").read_text())["version"] == 1


def test_the_hash_sees_every_number() -> None:
    """Two machines that differ in one source or one measured row are not the same machine."""
    cluster = small()
    level = replace(cluster.levels[0], latency_s=Figure(1e-6, "measured"))
    others = [
        replace(cluster, name="other"),
        replace(cluster, levels=(level, *cluster.levels[1:])),
        replace(cluster, profile={"x": 1}),
        replace(cluster, collective_s=Figure(1e-6)),
        replace(cluster, device=replace(cluster.device, efficiency={"matmul": ((1.0, 0.5),)})),
    ]
    assert len({c.hash for c in (cluster, *others)}) == 6


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A deep copy with one field set, or taken away."""
    data = json.loads(json.dumps(data))
    *way, last = path.split(".")
    at: Any = data
    for key in way:
        at = at[int(key)] if key.isdigit() else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", 2, "version: a cluster written as version 2"),
        ("name", ..., "name: missing"),
        ("device", ..., "device: missing"),
        ("device.kind", "tpu", "device.kind: unknown 'tpu'"),
        ("device.launch_s", ..., "device.launch_s: missing"),
        ("device.launch_s", [-1e-6, "assumed"], "device.launch_s: -1e-06"),
        ("device.kernel_s", [float("nan"), "assumed"], "device.kernel_s: nan"),
        ("device.memory_bytes", [0, "datasheet"], "device.memory_bytes: 0"),
        ("device.memory_bytes", 80e9, "device.memory_bytes: 80000000000.0 is not a figure"),
        ("device.bytes_per_s", [float("inf"), "datasheet"], "device.bytes_per_s: inf"),
        ("device.flops_per_s", {}, "device.flops_per_s: no dtype"),
        ("device.flops_per_s", [], "device.flops_per_s: [] is not a table"),
        ("device.flops_per_s", {"f33": [1, "assumed"]}, "device.flops_per_s: unknown 'f33'"),
        ("device.flops_per_s", {"f32": [True, "assumed"]}, "device.flops_per_s[f32]: True"),
        ("device.flops_per_s", {"f32": [1e12, "rumour"]}, "device.flops_per_s[f32].source: unknown 'rumour'"),
        ("device.efficiency", {"matmul": [[1e9, 0.5], [1e8, 0.6]]}, "device.efficiency[matmul]: sizes"),
        ("device.efficiency", {"matmul": [[1e9, 1.5]]}, "device.efficiency[matmul]: point"),
        ("device.efficiency", {"matmul": [1e9]}, "device.efficiency[matmul]: 1000000000.0 is not a point"),
        ("levels", {}, "levels: not a list"),
        ("levels", [], "levels: none"),
        ("levels.1.size", 0, "levels[1].size: 0"),
        ("levels.1.size", 2.0, "levels[1].size: 2.0"),
        ("levels.2.shared", 13, "levels[2].shared: 13 devices"),
        ("levels.1.bytes_per_s", [0.0, "measured"], "levels[1].bytes_per_s: 0.0"),
        ("levels.1.bytes_per_s", [-5, "measured"], "levels[1].bytes_per_s: -5"),
        ("levels.0.bytes_per_s", ["fast", "measured"], "levels[0].bytes_per_s: 'fast'"),
        ("levels.0.latency_s", [-1e-6, "measured"], "levels[0].latency_s: -1e-06"),
        ("levels.0.switch_bytes_per_s", [0, "measured"], "levels[0].switch_bytes_per_s: 0"),
        ("backend", "mpi", "backend: unknown 'mpi'"),
        ("collective_s", [-1, "assumed"], "collective_s: -1"),
        ("profile", [], "profile: a list, not an object"),
    ],
)
def test_nonsense_is_refused_by_field(path: str, value: Any, says: str) -> None:
    """Forty numbers, one of them wrong: the message says which."""
    data = changed(small().to_json(), path, value)
    with pytest.raises(ClusterError) as error:
        Cluster.from_json(data)
    assert str(error.value).startswith(says)


def test_a_number_without_a_source_is_refused() -> None:
    """In Python too."""
    with pytest.raises(ClusterError, match=r"levels\[0\].bytes_per_s: 1.0 says not where"):
        small(levels=(Level("pair", 2, Figure(0.0), 1.0),))  # type: ignore[arg-type]


def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    """Missing, or not JSON, or JSON of something else."""
    with pytest.raises(ClusterError, match=r"no cluster at .*gone.json"):
        Cluster.load(tmp_path / "gone.json")
    for text, says in (("{", "is not a cluster"), ("[1]", "version: missing")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ClusterError, match=says):
            Cluster.load(tmp_path / "bad.json")


# --- ranks on devices --------------------------------------------------------------------------


def test_more_ranks_than_devices_are_refused() -> None:
    """Fewer are fine: the rest stand idle."""
    cluster = Cluster.preset("2xcpu")
    cluster.fits(Mesh({"dp": 2}))
    cluster.fits(Mesh({"dp": 1}))
    with pytest.raises(ClusterError, match=r"Mesh\(dp=2, tp=2\) has 4 ranks, cluster 2xcpu has 2 devices"):
        cluster.fits(Mesh({"dp": 2, "tp": 2}))


@pytest.mark.parametrize(
    ("ranks", "level", "units", "members"),
    [
        ((3,), -1, (1, 1, 1), (1, 1, 1)),
        ((2, 3), 0, (1, 1, 1), (2, 2, 2)),
        ((1, 2), 1, (2, 1, 1), (1, 2, 2)),
        ((0, 1, 2, 3, 4, 5), 1, (3, 1, 1), (2, 6, 6)),
        ((0, 6), 2, (2, 2, 1), (1, 1, 2)),
        ((0, 1, 4, 11), 2, (3, 2, 1), (2, 3, 4)),
    ],
)
def test_a_group_lies_at_the_level_that_holds_it(
    ranks: tuple[int, ...], level: int, units: tuple[int, ...], members: tuple[int, ...]
) -> None:
    """Pairs in nodes in a cluster: counted by hand."""
    reach = small().span(ranks)
    assert (reach.level, reach.units, reach.members) == (level, units, members)


@given(st.data())
def test_units_and_members_fit_each_other(data: st.DataObject) -> None:
    """However deep the nesting: no unit has more than it can hold, and nobody is lost."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    wait, rate = Figure(0.0), Figure(1e9)
    cluster = small(levels=tuple(Level(f"l{k}", n, wait, rate) for k, n in enumerate(sizes)))
    ranks = data.draw(st.sets(st.integers(0, cluster.devices - 1), min_size=1))
    reach = cluster.span(tuple(ranks))
    for unit, units, members in zip(cluster.unit_devices, reach.units, reach.members, strict=True):
        assert members <= unit
        assert -(-len(ranks) // units) <= members <= len(ranks) - units + 1
    assert reach.units[-1] == 1
    assert all(n > 1 for n in reach.units[: max(reach.level, 0)])


def test_ranks_without_a_device_are_refused() -> None:
    """Nor may a group name one twice."""
    for ranks, says in (((0, 12), "rank 12"), ((-1,), "rank -1"), ((1, 1), "twice"), ((), "empty")):
        with pytest.raises(ClusterError, match=says):
            small().span(ranks)
