"""What a plan's step means for a run: tokens a second, the share of the machine's peak, days and money.

    MFU = operations of the model's products a step / (seconds a step x devices x peak of a device in that precision)

Operations are those of the captured step, forward and backward, as the model is written: what a plan recomputes does
not count. The peak is that of the dtype in which most of them are done.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.cost.ops.roofline import flops
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import Account, ModelWork
from laminar.rules.notation import call_of

COUNTED_PRODUCTS = (
    "mm",
    "bmm",
    "_scaled_mm",
    "addmm",
    "baddbmm",
    "mv",
    "convolution",
    "convolution_backward",
    "attention",
    "attention_backward",
    "lstm",
    "lstm_backward",
)
TORCH_DTYPE_NAMES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
DAY_S = 86400.0


def with_work(account: Account, graph: Graph, precision: str, cluster: Cluster | None, times: int = 1) -> Account:
    """An account that knows what a step of such a graph, run `times` times, computes; and of which samples."""
    from laminar.planner.report.step_breakdown import counted_times  # and scipy with it, which takes a while to load

    by: dict[str, float] = {}
    for node in graph.nodes:
        name = node.op.split(".")[1]
        if node.phase != "recompute" and (name in COUNTED_PRODUCTS or name.startswith("grouped_")):
            call = call_of(node, graph.specs)
            dtype = next((s.dtype for s in call.ins if s.is_float and len(s.shape) > 1), "f32")
            by[dtype] = by.get(dtype, 0.0) + times * flops(call)
    dtype = max(by, key=by.__getitem__, default="f32")
    size = counted_times(graph)
    work = ModelWork(precision=precision, products=dtype, flops=sum(by.values(), 0.0))
    account = replace(account, work=work, samples=times * size.samples)
    if size.tokens:
        account = replace(account, tokens=times * size.tokens)
    if cluster is None:
        return account
    peaks = [(part.device.flops_per_s.get(dtype), part.devices) for part in cluster.parts]
    if all(peak is not None for peak, _ in peaks):
        work = replace(work, peak_flops_per_s=sum(peak.value * n for peak, n in peaks if peak is not None))
    return replace(account, work=work, devices=cluster.devices)


def rates(account: Account, amount: float | None = None, price: float | None = None) -> dict[str, float]:
    """Figures of a run, as far as the account knows what they follow from; `amount` is in tokens, or in samples."""
    unit, count = ("tokens", account.tokens) if account.tokens else ("samples", account.samples)
    if account.step is None or not account.step.step_s or not count:
        return {}
    step_s, work = account.step.step_s, account.work
    out = {f"{unit}_per_s": count / step_s}
    if work is not None and work.peak_flops_per_s:
        out["mfu"] = work.flops / step_s / work.peak_flops_per_s
    if amount:
        out["days"] = amount / out[f"{unit}_per_s"] / DAY_S
        if price is not None and account.devices:
            out["cost"] = out["days"] * 24 * account.devices * price
    return out


def rate_lines(account: Account, amount: float | None = None, price: float | None = None) -> list[str]:
    """The same for people; first, in which precision all this is meant."""
    if account.work is None:
        return []
    how, products = account.work.precision, account.work.products
    what = "as the model is" if how == "f32" else f"--precision {how}"
    lines = [
        "",
        f"precision: {what}, products in {TORCH_DTYPE_NAMES.get(products, products)}"
        + ("; --precision bf16 prices autocast" if how == "f32" and products == "f32" else ""),
    ]
    found = rates(account, amount, price)
    unit = "tokens" if "tokens_per_s" in found else "samples"
    if found:
        text = f"  {found[f'{unit}_per_s']:,.0f} {unit} a second on {account.devices or '?'} devices"
        if "mfu" in found:
            text += f", MFU {found['mfu']:.1%} of the peak in {TORCH_DTYPE_NAMES.get(products, products)}"
        lines.append(text)
    if "days" in found:
        days = found["days"]
        text = f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"
        money = f", {found['cost']:,.4g} at {price:g} for a device-hour" if "cost" in found else ""
        lines.append(f"  {amount:.3g} {unit}: {text}{money}")
    return lines
