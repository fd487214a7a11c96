"""One device: a graph run node by node on whole tensors. The oracle that programs are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import caller, constant_tensor, unplain
from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.serial.codec import Ref


def constants_of(graph: Graph, wide: bool = False) -> dict[str, Tensor]:
    """The graph's constants; in a widened graph floating ones are float64."""
    out = {c.name: constant_tensor(c) for c in graph.constants}
    return {k: widened_tensor(v) if wide else v for k, v in out.items()}


def widened_tensor(value: Tensor) -> Tensor:
    """A floating tensor in float64, a complex one in complex128, another as it is."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def run_graph(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None = None,
    watch: Callable[[Node, tuple[Any, ...]], None] | None = None,
    change: Callable[[Node, tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> dict[str, Tensor]:
    """Outputs by `kind:name`; `watch` sees what every node makes, `change` puts something else in its place."""
    memory: dict[Ref, Any] = {Ref(i.name): inputs[i.name].detach() for i in graph.inputs}
    memory |= {Ref(k): v for k, v in (constants or constants_of(graph)).items()}
    with torch.no_grad():
        for node in graph.nodes:
            out = caller(node.op)(*[unplain(map_refs(a, memory.__getitem__)) for a in node.args])
            results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            if change is not None:
                results = change(node, results)
            memory.update({Ref(node.name, i): v for i, v in enumerate(results)})
            if watch is not None:
                watch(node, results)
    return {f"{o.kind}:{o.name}": memory[o.ref] for o in graph.outputs}
