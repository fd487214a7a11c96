"""What plans have in common, with stages or without: figures, the text of a search, and questions that can be asked.

A plan carries an account, plain data that whoever made it wrote: `step_s`, `bound_s`, what was looked at and why it
lost. It is saved with the plan. A plan that comes straight from a search also remembers its origin, the graph and what
was asked; that is not saved, so a plan from a file is handed its graph again where a question needs one.

Questions (`space`, `certificate`, `why`, `what_if`, `flags`, `dot`, `draw`) are answered by the planner, which stands
above this room. It is looked up by name when someone asks: values stay plain data, and whoever only reads plans never
loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import LaminarError, PlanError
from laminar.ir.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.reading import WRONG, Part

ANSWERS = {
    "space": "laminar.planner.space.plan_space",
    "certificate": "laminar.planner.space.certificate",
    "why": "laminar.planner.report.why",
    "what_if": "laminar.planner.search.what_if",
    "flags": "laminar.planner.report.flags",
    "dot": "laminar.planner.report.draw",
    "draw": "laminar.planner.report.draw",
}
"""Who answers what; each module has a function of that name, whose first argument is the plan."""
SLIGHT_S = 0.002
"""Differences below this share of a step are not told."""
OVER_S = 0.5
"""Seconds beyond its budget that a search may take without a word."""
LOOKED_AT = 4
"""Plans that were only looked at that are told."""


@dataclass(frozen=True)
class Origin:
    """What a plan was made from. Not part of its identity, and not saved."""

    graph: Graph
    """Of the whole batch."""
    cluster: Cluster
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options of the search: memory_bytes, margin, pin, only, optimizer, budget_s."""
    others: tuple[Any, ...] = ()
    """Other plans that were simulated in full, best first."""


class Planned:
    """A plan of either kind."""

    if TYPE_CHECKING:

        @property
        def account(self) -> dict[str, Any]:
            """What the plan costs."""

        @property
        def origin(self) -> Origin | None:
            """What it was made from, where known."""

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step, where known."""
        return self.account.get("step_s")

    @property
    def peak_bytes(self) -> int | None:
        """Predicted bytes on the fullest rank, where known."""
        return self.account.get("peak_bytes")

    @property
    def bound_s(self) -> float | None:
        """No plan in the space searched is faster than this, where known."""
        return self.account.get("bound_s")

    @property
    def space(self) -> Any:
        """The plans that it was searched among, as a value: it prints, and `plan.space.contains(other)` says why."""
        return self._asked("space")

    @property
    def certificate(self) -> Any:
        """What was proved about them, as a value: it prints, and has `bound_s`, `gap` and `outside`."""
        return self._asked("certificate")

    def _asked(self, question: str, *args: Any, **options: Any) -> Any:
        return getattr(import_module(ANSWERS[question]), question)(self, *args, **options)

    def why(self, name: str, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> Any:
        """Why a tensor lies as it does: each other placement it could have, with the seconds and bytes of that step.

        A plan from a file is handed the graph of its batch; `cluster` is that of the plan unless given.
        """
        return self._asked("why", name, graph=graph, cluster=cluster)

    def what_if(self, *, graph: Graph | None = None, cluster: Cluster | str | None = None, **changes: Any) -> Any:
        """The search done again with something changed, and the difference in words.

        memory_bytes, margin, cluster, devices (so many of the same kind), pin, only, link (a factor on the speed of
        links), budget_s, batch ("free"). What is not named stays as it was asked.
        """
        return self._asked("what_if", graph=graph, cluster=cluster, **changes)

    def flags(self, style: str, *, graph: Graph | None = None) -> Any:
        """The same plan as flags of "megatron" or "torchtitan", or what stands in the way."""
        return self._asked("flags", style, graph=graph)

    def dot(self, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> str:
        """The graph with placements and costs, in DOT; layers that repeat are drawn once."""
        return str(self._asked("dot", graph=graph, cluster=cluster))

    def draw(self, path: str | Path, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> None:
        """The same as a picture; the kind of file follows from the name."""
        self._asked("draw", path, graph=graph, cluster=cluster)


@contextmanager
def reading_account() -> Iterator[None]:
    """Inside, an account that is not as Laminar wrote it is named as what is wrong."""
    try:
        yield
    except LaminarError:
        raise
    except WRONG as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"corrupt plan: account: {what}",
            why="what a plan says about its costs is no longer what was written",
            next="make the plan again, or empty its account: it may run without one",
        ) from error


ACCOUNTED: dict[str, type | tuple[type, ...]] = {"batch": dict, "cluster": str, "cluster_file": str, "recipe": str}
"""What others read of an account besides those who explain it."""


def account_of(part: Part) -> dict[str, Any]:
    """The account in the JSON of a plan."""
    for key, kind in ACCOUNTED.items():
        if key in part and not isinstance(part[key].value, kind):
            raise part[key].wrong("not what an account says there")
    if "batch" in part:
        part["batch"]["samples"].whole(1)
    return part.object()


def graph_for(plan: Planned, graph: Graph | None) -> Graph:
    """The graph of a plan's whole batch: given, or remembered; where its batch was free, cut from a larger one."""
    if graph is not None and "batch" in plan.account:
        return import_module("laminar.planner.search.batch_size").own(plan, graph)  # type: ignore[no-any-return]
    if graph is not None:
        return graph
    if plan.origin is None:
        recipe = plan.account.get("recipe")
        where = f"laminar.api.graph_of({recipe!r})" if recipe else "laminar.capture(model, loss, batch)"
        raise PlanError("this plan does not carry its graph", next=f"hand it over: graph={where}")
    return plan.origin.graph


def cluster_for(plan: Planned, cluster: Cluster | str | None) -> Cluster:
    """The cluster of a plan: given, remembered, or the one its account names."""
    if isinstance(cluster, str):
        return Cluster.load(cluster) if cluster.endswith(".json") else Cluster.preset(cluster)
    if cluster is not None:
        return cluster
    if plan.origin is not None:
        return plan.origin.cluster
    found = plan.account.get("cluster_file") or plan.account.get("cluster")
    if not found:
        raise PlanError(
            "this plan does not say which cluster it is for", next='hand one over: cluster="8xh100", or --cluster'
        )
    return cluster_for(plan, str(found))


def sized(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


# --- the text of a search


def searched(account: Mapping[str, Any], price: float | None = None) -> list[str]:
    """What a search has proved, what a step spends its time on, and why other plans lost."""
    proof = account.get("certificate")
    lines: list[str] = []
    if proof:
        cells, mine = proof["cells"], account["choice"]
        lines += ["", f"searched: {account.get('searched', mine['plan'])}", f"  {proof['sentence']}"]
        lines.append(
            f"  {cells['all']} cells: {cells['looked_at']} looked at, {cells['pruned']} ruled out by their bounds, "
            f"{cells['unfit']} too large, {cells['unfinished']} left; {account['search_s']:.1f} s" + _overrun(account)
        )
        lines += [f"  outside: {text}" for text in proof["outside"]]
    lines += _batches(account)
    lines += _binding(account)
    lines += _lost(account)
    lines += _measured(account)
    return lines + costs(account, price)


def _overrun(account: Mapping[str, Any]) -> str:
    """How much longer than it was given a search took, where that is worth a word."""
    over_s = account["search_s"] - account.get("budget_s", account["search_s"])
    return f", {over_s:.1f} s over its budget: plans with a name are always priced" if over_s > OVER_S else ""


def _batches(account: Mapping[str, Any]) -> list[str]:
    """Where the batch was free: which was taken, and why the others were not."""
    found = account.get("batch")
    if not found:
        return []
    rate = found["samples_per_s"]
    lines = ["", f"batch: {found['samples']} of {found['captured']} samples, {rate:,.1f} samples a second"]
    for row in found["others"]:
        mine, most = row["samples_per_s"], row["bound_samples_per_s"]
        figures = f": {mine:,.1f} samples a second, {100 * (1 - mine / rate):.1f} % less" if mine else ""
        figures = figures or (f": at most {most:,.1f} samples a second" if most else "")
        lines.append(f"  {row['samples']}, {row['why']}{figures}")
    return lines


def _binding(account: Mapping[str, Any]) -> list[str]:
    if "binding" not in account:
        return []
    found, spent, held = account["binding"], account["choice"].get("spent", {}), account.get("memory", {})
    step_s = account["step_s"]
    parts = ", ".join(f"{name} {s / step_s:.0%}" for name, s in sorted(spent.items(), key=lambda kv: -kv[1])
                      if s / step_s >= 0.005)  # fmt: skip
    lines = ["", f"what binds: {found['resource']}, {found['share']:.0%} of the step" if found.get("resource") else ""]
    lines += [f"  a step: {parts}"] if parts else []
    if "memory_bytes" in found:
        lines.append(
            f"  memory: {sized(account['peak_bytes'])} of {sized(found['memory_bytes'])} on the fullest rank"
            + (" (" + ", ".join(f"{k} {sized(n)}" for k, n in held.items()) + ")" if held else "")
        )
    if found.get("kept_out"):
        row = found["kept_out"]
        lines.append(
            f"  memory binds too: {row['plan']} would take about {row['step_s'] * 1e3:.3f} ms, "
            f"but {sized(row['peak_bytes'])}"
        )
    return lines


def _lost(account: Mapping[str, Any]) -> list[str]:
    rows = account.get("runners_up") or []
    mine = account.get("choice", {})
    told = {mine.get("plan"), *(row["plan"] for row in rows)}
    lines = ["", "other plans that were simulated in full"] if rows else []
    for row in rows:
        slower = 100 * (row["step_s"] / mine["step_s"] - 1)
        why = f"{slower:.1f} % slower" if slower >= 0 else f"{-slower:.1f} % faster, but less simple"
        said = [f"  {row['plan']}: {row['step_s'] * 1e3:.3f} ms, {why}"]
        if said[0] in lines:  # written in another way, it takes as long
            continue
        more = difference(mine.get("spent", {}), row.get("spent", {}), mine["step_s"])
        lines += [*said, f"    {more}"] if more else said
    wins = account.get("wins")
    if wins:
        lines += [f"this plan is the fastest of these with a probability of {wins['share']:.0%}: {wins['assumed']}"]
    seen = [r for r in account.get("looked_at") or [] if r["plan"] not in told and r["fits"]]
    best: dict[str, Mapping[str, Any]] = {}
    for row in seen:
        best.setdefault(row["plan"], row)
    if best:
        lines += ["", "others that were looked at, from shallow models of them"]
    for row in list(best.values())[:LOOKED_AT]:
        slower = 100 * (row["step_s"] / mine["step_s"] - 1)
        lines.append(f"  {row['plan']}: about {row['step_s'] * 1e3:.3f} ms, {slower:+.1f} %")
    return lines


def difference(mine: Mapping[str, float], other: Mapping[str, float], step_s: float) -> str:
    """What another plan spends more and less on, in words, the largest first; nothing if one of them is not known."""
    if not mine or not other:
        return ""
    apart = {k: other.get(k, 0.0) - mine.get(k, 0.0) for k in {*mine, *other}}
    told = sorted((k for k, s in apart.items() if abs(s) > SLIGHT_S * step_s), key=lambda k: -abs(apart[k]))
    more = [f"{apart[k] * 1e3:.3f} ms more on {k}" for k in told if apart[k] > 0][:3]
    less = [f"{-apart[k] * 1e3:.3f} ms less on {k}" for k in told if apart[k] < 0][:2]
    return ", ".join(more + less)


def _measured(account: Mapping[str, Any]) -> list[str]:
    found = account.get("measured")
    if not found:
        return ["", f"not measured: {account['unmeasured']}"] if account.get("unmeasured") else []
    parts = found.get("micro_batches", 1)
    every = f"; a step of {parts} micro-batches, one of which is predicted" if parts > 1 else ""
    lines = ["", f"measured on this machine, by turns in {found['rounds']} rounds{every}"]
    for row in found["rows"]:
        mark = "*" if row["taken"] else " "
        lines.append(
            f" {mark} {row['plan']}: {row['step_s'] * 1e3:.3f} ms ({row['low_s'] * 1e3:.3f} to "
            f"{row['high_s'] * 1e3:.3f}, quartiles), {row['predicted_s'] * 1e3:.3f} predicted"
        )
    lines += [f"   {row['plan']}: out, {row['why']}" for row in found.get("out", ())]
    return [*lines, f"  {found['says']}"]


def costs(account: Mapping[str, Any], price: float | None) -> list[str]:
    """Money for a million tokens, or samples, at so much for a device-hour."""
    if price is None or "step_s" not in account or "devices" not in account:
        return []
    unit = "tokens" if account.get("tokens") else "samples"
    count = account.get(unit)
    if not count:
        return []
    step = account["step_s"] * account["devices"] * price / 3600
    return ["", f"at {price:g} for a device-hour: {1e6 * step / count:.4g} for a million {unit} "
            f"({account['devices']} devices, {count / account['step_s']:,.0f} {unit} a second)"]  # fmt: skip
