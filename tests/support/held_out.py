"""How well ops of whole programs are predicted that were never measured: the question a profile has to answer.

Every distinct local op of a program is predicted from a cluster's profile, then measured in the same section, by as
many ranks. What counts is the sum over the program: errors of single ops that go either way cancel in a step. The
measured times are thrown away; only the comparison is kept.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from laminar.cost.ops.families import measured_traits
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.table import Table, key_of, parse_key
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.program import Program
from laminar.profile.sweep import measure_instrs
from tests.support.local_layouts import local_layouts


@dataclass(frozen=True)
class HeldOut:
    """One program's ops, predicted and measured."""

    name: str
    ops: int
    """Distinct local ops that were not in the profile."""
    known: int
    """Distinct local ops that were, which are left out of everything here."""
    predicted_s: float
    """Sum over the program's lines."""
    measured_s: float
    median: float
    """Of |predicted / measured - 1| over distinct ops."""
    p90: float
    worst: tuple[tuple[str, float, float], ...]
    """Keys with most seconds of error, with seconds predicted and measured per call."""
    families: Mapping[str, tuple[float, float]]
    """By family: seconds predicted and measured in a step."""

    @property
    def error(self) -> float:
        """Of the sum, as a fraction of what was measured."""
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.predicted_s * 1e3:.3f} ms predicted, {self.measured_s * 1e3:.3f} ms measured "
            f"({self.error:+.1%}); {self.ops} ops, median error {self.median:.0%}, p90 {self.p90:.0%}"
        )


def held_out(cluster: Cluster, programs: Mapping[str, Program], section: str, budget_s: float = 20.0) -> list[HeldOut]:
    """Compare, program by program; `budget_s` is for measuring each."""
    cost = OpCost(cluster, section)
    out = []
    for name, program in programs.items():
        calls, lying = local_layouts(program)
        lines = [i for i in program.instrs if not i.kind]
        count = Counter(key_of(calls[i.name], lying.marks[i.name]) for i in lines)
        bare = Cluster(cluster.name, cluster.device, cluster.levels, cluster.backend)
        found = Table.of(measure_instrs(bare, [program], section, budget_s).profile).sections[section].ops
        fresh = [k for k in count if k in found and k not in cost.measured.ops]
        if not fresh:
            continue
        predicted = {}
        for key in fresh:
            call, marks = parse_key(key)
            predicted[key] = cost(call.op, call.ins, call.outs, call.args, marks).seconds
        measured = {key: found[key].seconds for key in fresh}
        off = sorted(abs(predicted[k] / measured[k] - 1) for k in fresh)
        worst = sorted(fresh, key=lambda k: -abs(predicted[k] - measured[k]) * count[k])[:5]
        families: dict[str, tuple[float, float]] = {}
        for key in fresh:
            family = measured_traits(key).family
            p, m = families.get(family, (0.0, 0.0))
            families[family] = (p + predicted[key] * count[key], m + measured[key] * count[key])
        out.append(
            HeldOut(
                name,
                len(fresh),
                len(count) - len(fresh),
                sum(predicted[k] * count[k] for k in fresh),
                sum(measured[k] * count[k] for k in fresh),
                statistics.median(off),
                off[int(0.9 * (len(off) - 1))],
                tuple((k, predicted[k], measured[k]) for k in worst),
                families,
            )
        )
    return out
