"""The cost of a sample read off captured graphs: one graph for each of a few lengths.

Every op of the step, forward and backward, is counted as the cost model counts it. The sum is a polynomial in the
length, so two lengths give its two coefficients and a third gives what does not depend on the length at all, which is
left out: it is paid per step or per unit, whoever has the sample. More lengths are fitted, and have to agree with the
fit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from laminar.cost.ops.roofline import flops
from laminar.data.cost.sample_cost import SampleCost
from laminar.errors import DataError
from laminar.ir.graph import Graph
from laminar.ir.ops import FREE
from laminar.rules.notation import calls_in

POLYNOMIAL_ERROR = 0.02
"""Relative error at which a polynomial of degree two is no description of a graph (assumed)."""


def graph_flops(graph: Graph) -> float:
    """Operations of the whole step of a graph."""
    return sum(flops(call) for call in calls_in(graph).values() if call.op not in FREE)


def cost_of_graphs(graphs: Mapping[int, Graph], samples: int = 1, causal: bool = True) -> SampleCost:
    """The cost of one sample, from graphs by the length of the `samples` equally long samples in each."""
    lengths = np.asarray(sorted(graphs), dtype=np.float64)
    if len(lengths) < 2 or lengths[0] < 1 or samples < 1:
        raise DataError(
            f"graphs of lengths {sorted(graphs)} with {samples} samples each",
            allowed="two lengths or more, of at least one token, and a sample or more",
            next="capture the same model and loss on batches of, say, 64, 128 and 256 tokens",
        )
    work = np.asarray([graph_flops(graphs[int(n)]) / samples for n in lengths])
    degrees = (0, 1, 2) if len(lengths) > 2 else (1, 2)
    columns = np.stack([lengths**d for d in degrees], axis=1)
    found = np.linalg.lstsq(columns / work[:, None], np.ones_like(work), rcond=None)[0]
    error = float(np.abs(columns @ found / work - 1).max())
    if error > POLYNOMIAL_ERROR:
        raise DataError(
            f"the work of these graphs is no polynomial of degree two in the length: {error:.1%} off",
            next="give lengths above any that the model pads or caps to",
        )
    linear, square = (max(float(x), 0.0) for x in found[-2:])
    return SampleCost(per_token=linear, per_square=square, causal=causal)
