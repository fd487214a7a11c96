"""Rules as they stand in public rule files, and what becomes of them."""

from __future__ import annotations

from typing import Any

TEXTS = {
    "factor": "add(mm(A, B), mm(C, B)) => mm(add(A, C), B)",
    "factor-batched": "add(bmm(A, B), bmm(C, B)) => bmm(add(A, C), B)",
    "longer": "add(mm(A, B), mm(C, D)) => mm(join(A, C, 1), join(B, D, 0))",
    "longer-batched": "add(bmm(A, B), bmm(C, D)) => bmm(join(A, C, 2), join(B, D, 1))",
    "wider": "join(mm(A, B), mm(A, C), 1) => mm(A, join(B, C, 1))",
    "wider-batched": "join(bmm(A, B), bmm(A, C), 2) => bmm(A, join(B, C, 2))",
    "relu": "join(relu(A), relu(B), 1) => relu(join(A, B, 1))",
    "relu-batched": "join(relu(A), relu(B), 2) => relu(join(A, B, 2))",
    "distribute": "mul(A, add(B, C)) => add(mul(A, B), mul(A, C))",
    "batch-batched": "join(bmm(A, B), bmm(C, D), 0) => bmm(join(A, C, 0), join(B, D, 0))",
    "gram": "join(mm(A, B), mm(A, t(A)), 1) => mm(A, join(B, t(A), 1))",
    "gram-batched": "join(bmm(A, B), bmm(A, bt(A)), 2) => bmm(A, join(B, bt(A), 2))",
}

Spec = tuple[str, list[Any], dict[str, int]]


def linear(x: Any, w: Any, acti: int = 0) -> Spec:
    """x times w turned."""
    return "OP_LINEAR", [x, w], {"PM_ACTI": acti}


def concat(a: Any, b: Any, axis: int) -> Spec:
    """Two values side by side."""
    return "OP_CONCAT", [a, b], {"PM_NUM_INPUTS": 2, "PM_AXIS": axis, "PM_NUMDIM": 3}


def add(a: Any, b: Any) -> Spec:
    """A sum."""
    return "OP_EW_ADD", [a, b], {}


def mul(a: Any, b: Any) -> Spec:
    """A product element by element."""
    return "OP_EW_MUL", [a, b], {}


def relu(a: Any) -> Spec:
    """What is positive."""
    return "OP_RELU", [a], {}


def split(a: Any, axis: int) -> Spec:
    """Two pieces."""
    return "OP_SPLIT", [a], {"PM_NUM_OUTPUTS": 2, "PM_AXIS": axis}


def rule(name: str, left: list[Spec], right: list[Spec], outputs: list[tuple[int, int, int, int]]) -> dict[str, Any]:
    """One rule as the file has it; inputs are -1, -2, ..., the i-th op is i, one of its results (i, k)."""

    def op(spec: Spec) -> dict[str, Any]:
        ids = [i if isinstance(i, tuple) else (i, 0) for i in spec[1]]
        return {
            "_t": "Operator",
            "type": spec[0],
            "input": [{"_t": "Tensor", "opId": i, "tsId": t} for i, t in ids],
            "para": [{"_t": "Parameter", "key": k, "value": v} for k, v in spec[2].items()],
        }

    maps = [{"_t": "MapOutput", "srcOpId": a, "srcTsId": b, "dstOpId": c, "dstTsId": d} for a, b, c, d in outputs]
    return {"_t": "Rule", "name": name, "srcOp": [*map(op, left)], "dstOp": [*map(op, right)], "mappedOutput": maps}


ONE = [(2, 0, 2, 0)]
RIGHT = {
    "factor": rule("factor", [linear(-1, -4), linear(-2, -4), add(0, 1)], [add(-1, -2), linear(0, -4)], [(2, 0, 1, 0)]),
    "longer": rule(
        "longer", [linear(-1, -4), linear(-2, -5), add(0, 1)], [concat(-1, -2, 2), concat(-4, -5, 2), linear(0, 1)], ONE
    ),
    "wider": rule(
        "wider", [linear(-1, -4), linear(-1, -5), concat(0, 1, 2)], [concat(-4, -5, 1), linear(-1, 0)], [(2, 0, 1, 0)]
    ),
    "relu": rule("relu", [relu(-1), relu(-2), concat(0, 1, 2)], [concat(-1, -2, 2), relu(0)], [(2, 0, 1, 0)]),
    "distribute": rule("distribute", [add(-2, -3), mul(-1, 0)], [mul(-1, -2), mul(-1, -3), add(0, 1)], [(1, 0, 2, 0)]),
    "batch": rule(
        "batch",
        [linear(-1, -4), linear(-2, -5), concat(0, 1, 0)],
        [concat(-1, -2, 0), concat(-4, -5, 0), linear(0, 1)],
        ONE,
    ),
    "gram": rule(
        "gram", [linear(-1, -2), linear(-1, -1), concat(0, 1, 2)], [concat(-2, -1, 1), linear(-1, 0)], [(2, 0, 1, 0)]
    ),
}
TRUE_BUT_UNUSED = {
    "handed out": rule(
        "handed out",
        [linear(-1, -4), linear(-1, -5)],
        [concat(-4, -5, 1), linear(-1, 0), split(1, 2)],
        [(0, 0, 2, 0), (1, 0, 2, 1)],
    ),
    "fused": rule("fused", [linear(-1, -4), relu(0)], [linear(-1, -4, 2)], [(1, 0, 0, 0)]),
    "again": rule("again", [linear(-1, -4), linear(-2, -4), add(0, 1)], [add(-1, -2), linear(0, -4)], [(2, 0, 1, 0)]),
}
WRONG = {
    "relu of a sum": rule("relu of a sum", [add(-1, -2), relu(0)], [relu(-1), relu(-2), add(0, 1)], [(1, 0, 2, 0)]),
    "other order": rule(
        "other order", [concat(-1, -2, 2), relu(0)], [relu(-1), relu(-2), concat(1, 0, 2)], [(1, 0, 2, 0)]
    ),
    "relu too early": rule(
        "relu too early",
        [linear(-1, -4, 2), linear(-2, -4, 2), add(0, 1)],
        [add(-1, -2), linear(0, -4, 2)],
        [(2, 0, 1, 0)],
    ),
    "from nowhere": rule("from nowhere", [linear(-1, -4)], [concat(-4, -6, 0), linear(-1, 0)], [(0, 0, 1, 0)]),
    "too wide": rule("too wide", [linear(-1, -4), add(0, -1)], [concat(-1, -1, 2), linear(0, -4)], [(1, 0, 1, 0)]),
    "placed": rule(
        "placed", [("OP_PARTITION", [-1], {"PM_PARALLEL_DIM": 1, "PM_PARALLEL_DEGREE": 2})], [relu(-1)], [(0, 0, 0, 0)]
    ),
}
