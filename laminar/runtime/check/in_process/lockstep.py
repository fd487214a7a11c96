"""All ranks of a program in one process, line by line: how most tests see 16 ranks on 2 cores.

Every line is run for each rank before the next line starts; a collective is done by looking into
all ranks' memories. Nothing is faster or slower than elsewhere here, only the numbers are the
same, and every value of every rank can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import constant_tensor
from laminar.ir.graph import map_refs
from laminar.ir.program import Instr, Program
from laminar.ir.serial.codec import Ref
from laminar.runtime.code.local_op import prepare
from laminar.runtime.comm.boxing_ops import LocalBoxing, reduce
from laminar.runtime.comm.shards import shard

Watcher = Callable[[Instr, list[tuple[Any, ...]]], None]


def run_lockstep(
    program: Program,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None = None,
    watch: Watcher | None = None,
    held: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[dict[str, Tensor]]:
    """Outputs of every rank by `kind:name`, from whole inputs; `watch` sees each line's results.

    `held` are inputs that are given as each rank holds them.
    """
    mesh, device = program.mesh, torch.device("cpu")
    ranks = range(mesh.ranks)
    memory: list[dict[Ref, Any]] = [{} for _ in ranks]
    for item in program.inputs:
        for r in ranks:
            if held is not None and item.name in held:
                memory[r][Ref(item.name)] = held[item.name][r]
            else:
                memory[r][Ref(item.name)] = shard(inputs[item.name].detach(), item.placed.nd, mesh, r)
    known = constants or {c.name: constant_tensor(c) for c in program.constants}
    for r in ranks:
        memory[r].update({Ref(k): v for k, v in known.items()})
    last = _last_use(program)
    with torch.no_grad():
        for k, instr in enumerate(program.instrs):
            results = (
                _box(instr, program, memory)
                if instr.kind
                else [_op(instr, program, r, memory[r], device) for r in ranks]
            )
            for r in ranks:
                memory[r].update({Ref(instr.name, i): v for i, v in enumerate(results[r])})
            if watch is not None:
                watch(instr, results)
            for ref in last.get(k, ()):
                for r in ranks:
                    memory[r].pop(ref, None)
    return [{f"{o.kind}:{o.name}": memory[r][o.ref] for o in program.outputs} for r in ranks]


def _last_use(program: Program) -> dict[int, list[Ref]]:
    keep = {o.ref for o in program.outputs}
    last: dict[Ref, int] = {}
    for k, instr in enumerate(program.instrs):
        last.update(dict.fromkeys(instr.refs, k))
    out: dict[int, list[Ref]] = {}
    for ref, k in last.items():
        if ref not in keep:
            out.setdefault(k, []).append(ref)
    return out


def _op(instr: Instr, program: Program, rank: int, memory: dict[Ref, Any], device: torch.device) -> tuple[Any, ...]:
    target, args, kwargs = prepare(instr, program.mesh, rank, device)
    out = target(*[_fill(a, memory) for a in args], **{k: _fill(v, memory) for k, v in kwargs.items()})
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _fill(arg: Any, memory: dict[Ref, Any]) -> Any:
    if isinstance(arg, list):
        return [_fill(a, memory) for a in arg]
    return map_refs(arg, lambda r: memory[r]) if isinstance(arg, (Ref, tuple)) else arg


def _box(instr: Instr, program: Program, memory: list[dict[Ref, Any]]) -> list[tuple[Any, ...]]:
    mesh = program.mesh
    out: list[list[Any]] = [[] for _ in range(mesh.ranks)]
    for which, ref in enumerate(instr.refs):
        boxes = [LocalBoxing.of(instr, mesh, r, which) for r in range(mesh.ranks)]
        sent: dict[int, list[Tensor]] = {}
        for r, box in enumerate(boxes):
            x = memory[r][ref]
            if instr.kind in ("slice", "pad"):
                out[r].append(getattr(box, instr.kind)(x))
            elif instr.kind == "all_reduce":
                out[r].append(reduce([memory[q][ref] for q in box.ranks], box.op))
            elif instr.kind == "all_gather":
                out[r].append(box.combine([memory[q][ref] for q in box.ranks]))
            else:
                for q in box.ranks:
                    if q not in sent:
                        sent[q] = boxes[q].outgoing(memory[q][ref])
                out[r].append(box.combine([sent[q][box.at] for q in box.ranks]))
    return [tuple(o) for o in out]
