"""What an op costs on one rank: measured, else read off its neighbours, else a roofline with a fitted efficiency.

An op that was measured with these shapes costs what was measured. For any other the roofline says what it would
take at full speed (what its op takes on next to nothing, then the larger of arithmetic and memory traffic), and the
neighbours say how far from that ops like it are. The ratio is a smooth function of the geometry, so its logarithm is a
Gaussian process per family: near to measured shapes it follows them, far away it falls back to what the family
achieves on average, and its variance grows on the way. The same op laid out otherwise counts as a neighbour
a little further off, another op of the family as one further still. How smooth the function is, is chosen by how well
each entry is predicted from the others; that prediction, entry by entry, is also the error that is reported (`check`).

Without measurements: the device's own efficiency curve, or half of its peak, which is a guess and says so in sigma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from laminar.cost.ops.families import COMPUTES, OP_FAMILIES, Traits, measured_traits, traits_of
from laminar.cost.ops.table import Entry, Section, Table, key_of, local_call, nearest_section, numbered
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call

ASSUMED_EFFICIENCY = 0.5
"""Of the peak, where nothing was measured and the device has no curve. A guess."""
SIGMA_ASSUMED, SIGMA_CURVE = 0.5, 0.3
SAME_GROUP, SAME_FAMILY, OTHER_DTYPE = 0.85, 0.5, 0.7
"""How alike two calls are that differ in layout, in op, in dtype: correlations of what the roofline leaves."""
LENGTHS = (1.0, 2.0, 3.0, 5.0, 8.0)
"""Octaves over which efficiency changes; the best of these is taken."""
FAR, FAR_SHARES = 12.0, (0.3, 0.6, 0.85)
"""What an op keeps over a distance as great as this, as a share of its variance; the best of these is taken."""
SMALL_WORK = 2.0
"""A measured call with less work than this many times what being called takes shows what its op takes at least."""
TOGETHER = {"cpu": 1, "gpu": 30}
"""Tensors that one kernel of a fused update does. Assumed: what fits into a kernel's arguments."""
NEAR = 0.5
"""An answer is interpolated, not fitted, where neighbours leave less than this share of the family's variance."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds of an op, and what they rest on."""

    seconds: float
    source: str
    """`measured`, `interpolated`, `roofline` or `free`."""
    sigma: float
    """Standard error of log(seconds)."""


@dataclass(frozen=True, slots=True)
class Check:
    """How well a family's entries are predicted each from the others."""

    family: str
    entries: int
    median: float
    """Of |predicted / measured - 1|."""
    p90: float
    total: float
    """Sum of predictions over sum of measurements, less one."""
    length: float
    """Octaves over which efficiency was found to change."""


@dataclass(frozen=True)
class Rates:
    """What a section reaches at best, and what a call costs at least."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    call_s: float
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    """For ops that were measured on next to nothing: what they take even so. Others take `call_s`."""
    together: int = 1
    """Tensors of an update that are one call."""

    def calls(self, t: Traits) -> float:
        """How often something is called."""
        return 1 + (t.calls - 1) / self.together if t.family == "optimizer" else t.calls

    def work_s(self, t: Traits) -> float:
        """The larger of arithmetic and memory traffic, at full speed."""
        if t.family == "view":
            return 0.0
        rate = self.flops_per_s.get(t.dtype) or self.flops_per_s["f32"]
        return max(t.flops / rate if t.family in COMPUTES else 0.0, t.nbytes / self.bytes_per_s)

    def base_s(self, t: Traits) -> float:
        """The roofline, being called included."""
        fixed = self.fixed_s.get(t.op, self.call_s) if t.calls == 1 else self.call_s * self.calls(t)
        return fixed + self.work_s(t)


class Family:
    """A Gaussian process over what the roofline leaves of a family's entries."""

    def __init__(self, traits: Sequence[Traits], logs: np.ndarray, spreads: np.ndarray) -> None:
        """`logs`: log(measured / roofline)."""
        self.traits, self.logs = list(traits), logs
        self.noise = np.maximum(spreads, 0.01) ** 2
        self.places = np.array([t.geometry for t in traits], dtype=float).reshape(len(traits), -1)
        self.codes = np.array([_codes(t) for t in traits])
        choices = [(length, far) for length in LENGTHS for far in FAR_SHARES]
        fits = [self._fit(*choice) for choice in choices]
        best = max(range(len(fits)), key=lambda i: fits[i][0])
        self.length, self.far = choices[best]
        _, self.mean, self.variance, self.inverse, self.weights = fits[best]
        self.errors = self.weights / np.diag(self.inverse)
        """Measured less predicted from the others, in logarithms."""
        scale = float(np.sqrt(np.mean(self.errors**2 * np.diag(self.inverse)))) if len(logs) > 4 else 1.5
        self.scale = min(max(scale, 0.7), 3.0)
        """By how much errors exceed what the process expects of itself."""

    def _alike(self, places: np.ndarray, codes: np.ndarray, length: float, far: float) -> np.ndarray:
        """Correlations of given calls with the entries."""
        apart = -0.5 * ((places[:, None, :] - self.places[None, :, :]) ** 2).sum(-1)
        near = (1 - far) * np.exp(apart / length**2) + far * np.exp(apart / FAR**2)
        kind, group, dtype = (codes[:, None, i] == self.codes[None, :, i] for i in range(3))
        like = SAME_FAMILY + (SAME_GROUP - SAME_FAMILY) * group + (1 - SAME_GROUP) * kind
        return np.asarray(near * like * np.where(dtype, 1.0, OTHER_DTYPE))

    def _fit(self, length: float, far: float) -> tuple[float, float, float, np.ndarray, np.ndarray]:
        """(log likelihood of leaving each out, mean, variance, inverse covariance, weights)."""
        n = len(self.logs)
        variance = max(float(np.var(self.logs)), 0.02)
        cover = variance * self._alike(self.places, self.codes, length, far) + np.diag(self.noise + 0.02**2)
        inverse = np.linalg.inv(cover)
        mean = float((inverse @ self.logs).sum() / inverse.sum())
        weights = inverse @ (self.logs - mean)
        left = 1.0 / np.diag(inverse)
        errors = weights * left
        score = float(-0.5 * np.sum(np.log(left) + errors**2 / left)) / n
        return score, mean, variance, inverse, weights

    def predict(self, t: Traits) -> tuple[float, float, bool]:
        """log(seconds / roofline), its standard error, and whether neighbours decided it."""
        place, codes = np.array([t.geometry], dtype=float).reshape(1, -1), np.array([_codes(t)])
        cover = self.variance * self._alike(place, codes, self.length, self.far)[0]
        mean = self.mean + float(cover @ self.weights)
        left = max(self.variance - float(cover @ self.inverse @ cover), 0.0)
        doubt = math.sqrt(left + float(np.mean(self.noise)) + 0.02**2)  # of a measurement, which has noise of its own
        return mean, self.scale * doubt, left < NEAR * self.variance


def _codes(t: Traits) -> tuple[int, int, int]:
    return hash((t.group, t.kind)), hash(t.group), hash(t.dtype)


class OpCost:
    """Seconds of ops on one device of a cluster, in one section of its profile."""

    def __init__(self, cluster: Cluster, section: str | None = None) -> None:
        """Without a section: the one there is, or the one with one rank; one that was not measured is taken to be
        like the nearest that was."""
        self.cluster = cluster
        sections = Table.of(cluster.profile).sections
        wanted = section or next(iter(sorted(sections)), "")
        found = nearest_section(wanted, sections) if wanted else None
        self.section, self.exact = found, found == wanted
        """Which section answers, and whether it is the one that was asked for."""
        self.measured: Section = sections[found] if found else Section()
        self._answers: dict[Any, Answer] = {}
        self._families: dict[str, Family | None] = {}

    def __call__(
        self,
        op: str,
        ins: tuple[TensorSpec, ...] = (),
        outs: tuple[TensorSpec | None, ...] = (),
        args: tuple[Any, ...] = (),
        marks: tuple[str, ...] = (),
    ) -> Answer:
        """Seconds of a call with local shapes; `marks` as `cost.layout` gives them."""
        asked = (op, ins, outs, args, marks)
        found = self._answers.get(asked)
        if found is None:
            found = self._answers[asked] = self._answer(numbered(Call(op, args, ins, outs)), marks)
        return found

    def instr(self, instr: Instr, mesh: Mesh, rank: int = 0, marks: tuple[str, ...] = ()) -> Answer:
        """Seconds of one line of a program on one rank."""
        call = local_call(instr, mesh, rank)
        return self(call.op, call.ins, call.outs, call.args, marks)

    # -- how it is found -----------------------------------------------------------------------

    def _answer(self, call: Call, marks: tuple[str, ...]) -> Answer:
        entry = self.measured.ops.get(key_of(call, marks))
        t = traits_of(call, marks)
        if t.family == "view" and self.cluster.device.kind == "gpu":
            return Answer(0.0, "free", 0.0)
        if entry is not None:
            return Answer(entry.seconds, "measured", max(entry.spread, 0.02))
        family = self.family(t.family)
        if family is None:
            return self._unmeasured(t)
        log, sigma, near = family.predict(t)
        sigma = sigma if self.exact else math.hypot(sigma, SIGMA_CURVE)
        source = "free" if t.family == "view" else "interpolated" if near else "roofline"
        return Answer(self.rates.base_s(t) * math.exp(log), source, sigma)

    def _unmeasured(self, t: Traits) -> Answer:
        """From the device's own figures alone."""
        if t.family == "view":
            return Answer(self.rates.call_s, "free", SIGMA_ASSUMED)
        device = self.cluster.device
        curve = device.efficiency.get(t.family if t.family in COMPUTES else "memory")
        size = t.flops if t.family in COMPUTES else t.nbytes
        share = _on_curve(curve, size) if curve else ASSUMED_EFFICIENCY
        fixed = device.kernel_s.value if device.kind == "gpu" else self.rates.call_s
        return Answer(
            fixed * self.rates.calls(t) + self.rates.work_s(t) / share,
            "roofline",
            SIGMA_CURVE if curve else SIGMA_ASSUMED,
        )

    @cached_property
    def rates(self) -> Rates:
        """The best that was measured; where nothing was, the device's figures."""
        device = self.cluster.device
        peaks = {dtype: figure.value for dtype, figure in device.flops_per_s.items()}
        peaks.setdefault("f32", max(peaks.values(), default=1e11))
        for eight in ("f8e4m3", "f8e5m2"):
            peaks.setdefault(eight, peaks.get("f8") or 2 * peaks.get("bf16", peaks["f32"]))
        best: dict[str, float] = {}
        bandwidth = 0.0
        for t, e in self._entries:
            if t.family == "matmul" and t.flops > 1e7:
                best[t.dtype] = max(best.get(t.dtype, 0.0), t.flops / e.seconds)
            if t.family in ("cheap", "fused.pointwise") and t.nbytes > 1 << 22:
                bandwidth = max(bandwidth, t.nbytes / e.seconds)
        if best:
            # A dtype that was not measured keeps its proportion to one that was.
            known = max(best, key=lambda d: best[d])
            ratio = best[known] / peaks.get(known, best[known])
            peaks = {**{d: p * ratio for d, p in peaks.items()}, **best}
        views = [e.seconds for t, e in self._entries if t.family == "view"]
        call = (
            float(np.median(views))
            if views
            else device.launch_s.value
            if device.kind == "cpu"
            else device.kernel_s.value
        )
        found = Rates(peaks, bandwidth or device.bytes_per_s.value, call, together=TOGETHER[device.kind])
        least: dict[str, float] = {}
        for t, e in self._entries:
            if t.calls == 1 and found.work_s(t) < SMALL_WORK * call:
                least[t.op] = min(e.seconds, least.get(t.op, math.inf))
        return replace(found, fixed_s=least)

    @cached_property
    def _entries(self) -> list[tuple[Traits, Entry]]:
        return [(measured_traits(key), entry) for key, entry in self.measured.ops.items()]

    def family(self, name: str) -> Family | None:
        """What was learnt of a family; nothing where nothing of it was measured."""
        if name not in self._families:
            mine = [(t, e) for t, e in self._entries if t.family == name and (len(t.geometry) or name == "view")]
            self._families[name] = self._learnt(mine) if mine else None
        return self._families[name]

    def _learnt(self, mine: list[tuple[Traits, Entry]]) -> Family:
        logs = np.array([math.log(e.seconds / self.rates.base_s(t)) for t, e in mine])
        return Family([t for t, _ in mine], logs, np.array([e.spread for _, e in mine]))

    # -- how good it is --------------------------------------------------------------------------

    def check(self) -> list[Check]:
        """For each family, how well its entries are predicted each from the others."""
        out = []
        for name in OP_FAMILIES:
            family = self.family(name)
            if family is None or len(family.logs) < 2:
                continue
            ratio = np.exp(-family.errors)  # predicted / measured
            seconds = np.exp(family.logs) * np.array([self.rates.base_s(t) for t in family.traits])
            off = np.abs(ratio - 1)
            out.append(
                Check(
                    name,
                    len(ratio),
                    float(np.median(off)),
                    float(np.quantile(off, 0.9)),
                    float((ratio * seconds).sum() / seconds.sum() - 1),
                    family.length,
                )
            )
        return out


def _on_curve(curve: Sequence[tuple[float, float]], size: float) -> float:
    """A fraction between points, in the logarithm of the size."""
    xs = [math.log(max(x, 1.0)) for x, _ in curve]
    return max(0.01, float(np.interp(math.log(max(size, 1.0)), xs, [y for _, y in curve])))
