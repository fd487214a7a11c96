"""Rules as they stand in public rule files, and what becomes of them."""

from __future__ import annotations

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
