"""`plan.explain()`: what a plan does, what its step takes, what a search has proved, and why other plans lost."""

from __future__ import annotations

from laminar.errors import PlanError
from laminar.ir.plans.account import Account, EstimatedPlan, OffloadSaving, RecomputeSaving, StageWork
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.rewrites import carried, described
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import show
from laminar.planner.report.words import difference, sized

OVERRUN_S = 0.5
"""Seconds beyond its budget that a search may take without a word."""
ESTIMATES_SHOWN = 4
"""Plans that were only looked at that are told."""


def explain(plan: Planned, price: float | None = None) -> str:
    """All of it; `price` is that of a device-hour."""
    assert isinstance(plan, Plan | Staged)
    lines = _staged_lines(plan) if isinstance(plan, Staged) else _plan_lines(plan)
    account = plan.account
    if account.step is not None:
        lines += ["", forecast(plan)]
    lines += search_lines(account, price)
    if account.completion is not None and account.completion.unsplit and isinstance(plan, Plan):
        lines += ["", "computed whole on every rank, because nothing says how to split them"]
        for row in account.completion.unsplit:
            lines.append(f"  {row.op:<28} {row.share:6.2%} of the work  {row.where}")
    return "\n".join(lines)


def _plan_lines(plan: Plan) -> list[str]:
    """What is placed where, and what is exchanged."""
    lines = [f"plan {plan.hash[:12]} ({plan.name}), graph {plan.graph_hash[:12]}, {plan.mesh}, {plan.mesh.ranks} ranks"]
    lines += ["", "inputs, grouped by placement"]
    groups: dict[str, list[str]] = {}
    for name, nd in plan.inputs.items():
        groups.setdefault(show(nd), []).append(name)
    for placement, names in sorted(groups.items(), key=lambda g: -len(g[1])):
        lines.append(f"  {placement:<28} {len(names):>4}  {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
    account = plan.account
    if plan.recompute:
        lines += ["", f"recomputed in backward: {', '.join(plan.recompute)}", *_recomputed(account.recompute)]
    if plan.offload:
        lines += ["", f"kept in the host's memory: {', '.join(plan.offload)}", *_offloaded(account.offload)]
    if plan.gather_once:
        lines += ["", "parameters in shards are gathered once a step: what forward has gathered stays for backward"]
    if plan.rewrites:
        lines += ["", f"rewritten before it is spread: {described(plan.rewrites)}"]
        lines += [f"  {name}, from a file: {text}" for name, text in carried(plan.rewrites).items()]
    if account.proof is not None:
        lines.append(f"  {account.proof}")
    if account.eager:
        lines += ["", "runs as it is, in plain PyTorch", *(f"  {row}" for row in account.eager)]
    traffic, completion = account.traffic, account.completion
    if traffic is not None:
        lines += ["", f"collectives per step: {traffic.count}, {traffic.bytes:,} bytes received per rank"]
        for row in traffic.collectives:
            lines.append(f"  {row.kind:<15} over {row.axes:<8} x{row.count:<4} {row.bytes:>14,} B  {row.why}")
        lines += [
            "",
            f"parameters per rank: {traffic.parameter_bytes:,} of {traffic.parameter_bytes_whole:,} bytes",
        ]
    if completion is not None:
        lines.append(
            f"cost on an assumed machine, without overlap: {completion.cost_s * 1e3:.3f} ms; "
            f"everything on every rank instead: {completion.replicated_s * 1e3:.3f} ms"
        )
        lines.append(completion.solver)
    return lines


def _recomputed(saving: RecomputeSaving | None) -> list[str]:
    """What recompute saves and costs, where known."""
    if saving is None:
        return []
    return [
        f"  {saving.blocks} blocks and {saving.values} values: {saving.lines} lines run twice, "
        f"{saving.kept_bytes:,} instead of {saving.whole_bytes:,} bytes of activations kept per rank"
    ]


def _offloaded(saving: OffloadSaving | None) -> list[str]:
    """What offload takes off the device, where known."""
    if saving is None:
        return []
    return [
        f"  {saving.tensors} tensors of {saving.blocks} blocks, {saving.bytes:,} bytes there and back in a step; "
        f"{saving.kept_bytes:,} instead of {saving.whole_bytes:,} bytes of activations kept per rank"
    ]


def _staged_lines(plan: Staged) -> list[str]:
    """What runs where, in which order, and what each stage sends."""
    window = "any order" if plan.window is None else f"window {plan.window}" if plan.window else "fixed order"
    lines = [
        f"plan {plan.hash[:12]} ({plan.name}), graph {plan.graph_hash[:12]}, {len(plan.stages)} stages at "
        f"{len(plan.places)} places, {plan.ranks} ranks",
        f"{plan.micro_batches} micro-batches, {plan.schedule}, {window}",
    ]
    if plan.rewrites:
        lines.append(f"rewritten before it is cut: {described(plan.rewrites)}")
        lines += [f"  {name}, from a file: {text}" for name, text in carried(plan.rewrites).items()]
    if plan.account.proof is not None:
        lines.append(f"  {plan.account.proof}")
    known = plan.account.stages or (StageWork(),) * len(plan.stages)
    for s, (stage, about) in enumerate(zip(plan.stages, known, strict=False)):
        share = f", {about.share:.1%} of the work" if about.share is not None else ""
        lines.append(f"stage {s} at place {stage.place} ({plan.places[stage.place]}){share}")
        if about.modules is not None:
            lines.append(f"  {about.modules}")
        if stage.plan.recompute:
            lines.append(f"  recomputed in backward: {', '.join(stage.plan.recompute)}")
        if about.sends is not None:
            lines.append(f"  sends {about.sends:,} bytes per micro-batch")
    return lines


def forecast(plan: Planned) -> str:
    """Seconds and bytes of a step as predicted, the 90 % interval, and how prices are known or which places idle."""
    step = plan.account.step
    if step is None:
        raise PlanError("nobody has predicted what this plan takes", next="laminar.predict(graph, plan, cluster)")
    if isinstance(plan, Staged):
        how = f"places idle: {', '.join(f'{b:.0%}' for b in step.bubbles)}"
    else:
        how = "prices: " + ", ".join(f"{share:.0%} {how}" for how, share in step.known.items() if share >= 0.005)
    return (
        f"a step on {step.cluster}: {step.step_s * 1e3:.3f} ms predicted "
        f"({step.step_low_s * 1e3:.3f} to {step.step_high_s * 1e3:.3f}, 90 %)\n"
        f"  {how}\n"
        f"  memory of the fullest rank: {step.peak_bytes:,} bytes"
        + (", all registers counted" if isinstance(plan, Staged) else "")
    )


# --- what a search has to say


def search_lines(account: Account, price: float | None = None) -> list[str]:
    """What a search has proved, what a step spends its time on, and why other plans lost."""
    lines = _proved(account) + _batches(account) + _binding(account) + _lost(account) + _measured(account)
    return lines + costs(account, price)


def _proved(account: Account) -> list[str]:
    proof, mine = account.certificate, account.choice
    if proof is None or mine is None:
        return []
    search_s = account.search_s or 0.0
    over_s = search_s - account.budget_s if account.budget_s is not None else 0.0
    over = f", {over_s:.1f} s over its budget: plans with a name are always priced" if over_s > OVERRUN_S else ""
    return [
        "",
        f"searched: {account.searched or mine.plan}",
        f"  {proof}",
        f"  {proof.cells} cells: {proof.looked_at} looked at, {proof.pruned} ruled out by their bounds, "
        f"{proof.unfit} too large, {proof.unfinished} left; {search_s:.1f} s{over}",
        *(f"  outside: {text}" for text in proof.outside),
    ]


def _batches(account: Account) -> list[str]:
    """Where the batch was free: which was taken, and why the others were not."""
    found = account.batch
    if found is None:
        return []
    rate = found.samples_per_s
    lines = ["", f"batch: {found.samples} of {found.captured} samples, {rate:,.1f} samples a second"]
    for row in found.others:
        mine, most = row.samples_per_s, row.bound_samples_per_s
        figures = f": {mine:,.1f} samples a second, {100 * (1 - mine / rate):.1f} % less" if mine else ""
        figures = figures or (f": at most {most:,.1f} samples a second" if most else "")
        lines.append(f"  {row.samples}, {row.why}{figures}")
    return lines


def _binding(account: Account) -> list[str]:
    found, mine, step = account.binding, account.choice, account.step
    if found is None or mine is None or step is None:
        return []
    shares = {name: s / step.step_s for name, s in sorted(mine.spent.items(), key=lambda kv: -kv[1])}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    lines = ["", f"what binds: {found.resource}, {found.share:.0%} of the step" if found.resource else ""]
    lines += [f"  a step: {parts}"] if parts else []
    if found.memory_bytes is not None:
        held = ", ".join(f"{k} {sized(n)}" for k, n in account.memory.items())
        lines.append(
            f"  memory: {sized(step.peak_bytes)} of {sized(found.memory_bytes)} on the fullest rank"
            + (f" ({held})" if held else "")
        )
    if found.kept_out is not None:
        row = found.kept_out
        lines.append(
            f"  memory binds too: {row.plan} would take about {row.step_s * 1e3:.3f} ms, but {sized(row.peak_bytes)}"
        )
    return lines


def _lost(account: Account) -> list[str]:
    mine, rows = account.choice, account.runners_up
    if mine is None:
        return []
    lines = ["", "other plans that were simulated in full"] if rows else []
    for row in rows:
        slower = 100 * (row.step_s / mine.step_s - 1)
        why = f"{slower:.1f} % slower" if slower >= 0 else f"{-slower:.1f} % faster, but less simple"
        said = [f"  {row.plan}: {row.step_s * 1e3:.3f} ms, {why}"]
        if said[0] in lines:  # written in another way, it takes as long
            continue
        more = difference(mine.spent, row.spent, mine.step_s)
        lines += [*said, f"    {more}"] if more else said
    if account.wins is not None:
        share, assumed = account.wins.share, account.wins.assumed
        lines += [f"this plan is the fastest of these with a probability of {share:.0%}: {assumed}"]
    told = {mine.plan, *(row.plan for row in rows)}
    best: dict[str, EstimatedPlan] = {}
    for seen in account.looked_at:
        if seen.fits and seen.plan not in told:
            best.setdefault(seen.plan, seen)
    if best:
        lines += ["", "others that were looked at, from shallow models of them"]
    for seen in list(best.values())[:ESTIMATES_SHOWN]:
        slower = 100 * (seen.step_s / mine.step_s - 1)
        lines.append(f"  {seen.plan}: about {seen.step_s * 1e3:.3f} ms, {slower:+.1f} %")
    return lines


def _measured(account: Account) -> list[str]:
    found = account.measured
    if found is None:
        return ["", f"not measured: {account.unmeasured}"] if account.unmeasured else []
    parts = found.micro_batches
    every = f"; a step of {parts} micro-batches, one of which is predicted" if parts > 1 else ""
    lines = ["", f"measured on this machine, by turns in {found.rounds} rounds{every}"]
    for row in found.rows:
        mark = "*" if row.taken else " "
        lines.append(
            f" {mark} {row.plan}: {row.step_s * 1e3:.3f} ms ({row.low_s * 1e3:.3f} to "
            f"{row.high_s * 1e3:.3f}, quartiles), {row.predicted_s * 1e3:.3f} predicted"
        )
    lines += [f"   {one.plan}: out, {one.why}" for one in found.out]
    return [*lines, f"  {found.says}"]


def costs(account: Account, price: float | None) -> list[str]:
    """Money for a million tokens, or samples, at so much for a device-hour."""
    unit, count = ("tokens", account.tokens) if account.tokens else ("samples", account.samples)
    if price is None or account.step is None or account.devices is None or not count:
        return []
    step_s = account.step.step_s
    each = 1e6 * step_s * account.devices * price / 3600 / count
    return [
        "",
        f"at {price:g} for a device-hour: {each:.4g} for a million {unit} "
        f"({account.devices} devices, {count / step_s:,.0f} {unit} a second)",
    ]
