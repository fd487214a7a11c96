"""Samples of different lengths, dealt out exactly: every rank as busy as the others, the batch as the shuffle made it.

`laminar.data.BalancedSampler` is where to begin. Names are resolved when first used; costs and assignments load no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Assignment": "balance.assign",
    "BalancedLoader": "sampling.loader",
    "BalancedSampler": "sampling.sampler",
    "BalancedStream": "sampling.stream",
    "CutBatch": "balance.cut",
    "LoadedStep": "sampling.step_share",
    "OnlineCost": "cost.online_cost",
    "Packed": "packing.packed",
    "RowPiece": "balance.cut",
    "RankSpeeds": "balance.rank_speeds",
    "SampleCost": "cost.sample_cost",
    "StepShare": "sampling.step_share",
    "assign": "balance.assign",
    "assign_steps": "balance.assign",
    "bucket_lengths": "packing.units",
    "cost_of_graphs": "cost.graph_cost",
    "cut_and_assign": "balance.cut",
    "document_mask": "packing.attention",
    "pack": "packing.packed",
    "pack_units": "packing.units",
    "packed_attention": "packing.attention",
    "padded_length": "packing.units",
    "padding_share": "packing.packed",
    "token_loss": "packing.token_loss",
}
__all__ = [
    "Assignment",
    "BalancedLoader",
    "BalancedSampler",
    "BalancedStream",
    "CutBatch",
    "LoadedStep",
    "OnlineCost",
    "Packed",
    "RankSpeeds",
    "RowPiece",
    "SampleCost",
    "StepShare",
    "assign",
    "assign_steps",
    "bucket_lengths",
    "cost_of_graphs",
    "cut_and_assign",
    "document_mask",
    "pack",
    "pack_units",
    "packed_attention",
    "padded_length",
    "padding_share",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'laminar.data' has no attribute {name!r}")
    value = getattr(import_module(f"laminar.data.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from laminar.data.balance.assign import Assignment, assign, assign_steps
    from laminar.data.balance.cut import CutBatch, RowPiece, cut_and_assign
    from laminar.data.balance.rank_speeds import RankSpeeds
    from laminar.data.cost.graph_cost import cost_of_graphs
    from laminar.data.cost.online_cost import OnlineCost
    from laminar.data.cost.sample_cost import SampleCost
    from laminar.data.packing.attention import document_mask, packed_attention
    from laminar.data.packing.packed import Packed, pack, padding_share
    from laminar.data.packing.token_loss import token_loss
    from laminar.data.packing.units import bucket_lengths, pack_units, padded_length
    from laminar.data.sampling.loader import BalancedLoader
    from laminar.data.sampling.sampler import BalancedSampler
    from laminar.data.sampling.step_share import LoadedStep, StepShare
    from laminar.data.sampling.stream import BalancedStream
