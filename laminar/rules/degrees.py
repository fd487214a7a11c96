"""How backward depends on the size of the loss: the degree of each of its values in the gradient of the loss.

Autograd itself is linear: twice the loss gives twice every gradient. A hook on a gradient, or the backward of a custom
function, need not be: `g.clamp(-1, 1)` sees other numbers where the loss of a part is divided by the number of parts
before backward, after it, or not at all, so micro-batches give another training than the whole batch.

A value is of degree d if c times the gradient of the loss makes it c**d times as large, for c > 0. Products add
degrees and quotients subtract them, sums and choices need equal ones, views, sums over dims and products of matrices
keep them, a sign or a comparison with zero has degree 0, and so has all that is computed in forward. A clamp at another
number than 0, a tanh, a sum with a constant have none. Every gradient must be of degree 1.

The gradient of the loss by itself is a one, and capture computes with it what depends on nothing else. So a constant
that only backward reads is taken to be of degree 1, or of degree 0 if it multiplies a gradient or explains more of the
graph so; zeros have any degree. Ops that are not known are taken to be linear in what they are given; so is what runs
as opaque code (`laminar.eager`, custom ops), which is not looked into. Not noticed: a constant that a hook adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from laminar.ir.graph import Graph, Node
from laminar.ir.serial.codec import Ref

Degree = float | None
"""None: of a zero."""
BROKEN, BLOCKS = math.inf, -math.inf
"""Of what has no degree; of a tensor whose blocks have several, as the backward of a matrix exponential makes them."""
LOST = 10.0
"""A gradient without a degree counts so much more than one that is of degree 2."""
LOG = 100.0
"""Of the logarithm of a value of degree 1, by which torch's backward of `logcumsumexp` goes."""
HUGE = 1e30
"""Numbers beyond it stand for infinity: zero, behind an exponential."""
CONSTANTS_TRIED = 100
"""So many constants at most are tried at degree 0."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


SCALE_FREE = _names("""sign sgn signbit isnan isinf isfinite isneginf isposinf angle argmax argmin argsort count_nonzero
    count_nonzero.dim_IntList any any.dim any.dims all all.dim all.dims logical_not logical_and logical_or logical_xor
    heaviside""")
"""What does not change if all it reads becomes c times as large."""
EQUAL_DEGREES = _names("""add.Tensor sub.Tensor rsub.Tensor add.Scalar sub.Scalar rsub.Scalar cat stack where.self
    index_put scatter.src scatter.value scatter_add scatter_reduce.two slice_scatter select_scatter
    diagonal_scatter as_strided_scatter copy maximum minimum max.other min.other fmax fmin hypot lerp.Scalar
    complex masked_fill.Tensor masked_fill.Scalar index_add index_copy index_fill.int_Scalar
    index_fill.int_Tensor index_reduce masked_scatter put clamp clamp.Tensor clip clip.Tensor clamp_min
    clamp_max clamp_min.Tensor clamp_max.Tensor hardtanh threshold constant_pad_nd fmod.Tensor remainder.Tensor
    fmod.Scalar remainder.Scalar""")
"""What needs equal degrees of the numbers and tensors it reads, and keeps them."""
NUMBERS = {
    "lerp.Scalar": (),
    "constant_pad_nd": (2,),
    "index_put": (),
    "scatter.value": (3,),
    "hardtanh": (1, 2),
    "threshold": (1, 2),
    "clamp": (1, 2),
    "clip": (1, 2),
    "clamp_min": (1,),
    "clamp_max": (1,),
    "masked_fill.Scalar": (2,),
    "index_fill.int_Scalar": (3,),
    "fmod.Scalar": (1,),
    "remainder.Scalar": (1,),
    "add.Scalar": (1,),
    "sub.Scalar": (1,),
    "rsub.Scalar": (1,),
    "add.Tensor": (0, 1),
    "sub.Tensor": (0, 1),
    "rsub.Tensor": (0, 1),
    "maximum": (0, 1),
    "minimum": (0, 1),
    "where.self": (1, 2),
}
"""Where those of them that take numbers have them."""
PLACED = _names("cat stack index_put slice_scatter select_scatter copy")
ADDED = _names("addmm baddbmm addbmm addmv addr addcmul")
COMPARED = _names(
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar "
    "gt.Scalar ge.Scalar isin.Tensor_Tensor atan2 div.Tensor_mode floor_divide"
)
TIMES = {"aten.sqrt": 0.5, "aten.rsqrt": -0.5, "aten.reciprocal": -1.0, "aten.square": 2.0, "aten.var.correction": 2.0}
"""Degrees are so many times those of the input."""
DEGREE_PRODUCTS = _names("mul.Tensor mul.Scalar mm bmm mv dot vdot outer _trilinear convolution linalg_cross")
LINEAR_IN_FIRST = _names("xlogy.Tensor xlogy.Scalar_Other special_xlog1py special_xlog1py.other_scalar")
CARRIED = _names(
    "log logcumsumexp logsumexp flip view permute t transpose.int expand slice.Tensor select.int index.Tensor"
)
"""What a logarithm goes through on its way to an exponential."""
UNSTEADY = _names("""equal float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor
    __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor __xor__.Scalar __xor__.Tensor acos
    acosh asin asinh atan atanh bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor
    bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not
    bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
    bitwise_xor.Tensor ceil celu cos cosh digamma div.Scalar_mode elu erf erfc erfinv exp exp2 expm1 floor
    floor_divide.Scalar frac frexp.Tensor gcd gelu hardshrink hardsigmoid hardswish i0 igamma igammac
    isin.Tensor_Scalar lcm lgamma log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logit mish
    mvlgamma nextafter polar polygamma pow.Scalar pow.Tensor_Tensor relu6 remainder.Scalar_Tensor round
    round.decimals selu sigmoid silu sin sinc sinh softplus softshrink tan tanh trunc xlogy.Scalar_Other
    xlogy.Scalar_Self xlogy.Tensor glu _softmax _log_softmax _safe_softmax logsumexp logcumsumexp prod
    prod.dim_int cumprod renorm bucketize.Tensor searchsorted.Tensor histc bincount native_layer_norm
    native_group_norm linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet mse_loss smooth_l1_loss
    huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss_forward
    nll_loss2d_forward _fused_rms_norm""")
"""What has a degree only if its inputs are of degree 0; and all that is called `special_`."""


def breaks(graph: Graph) -> list[Node]:
    """Ops of backward on account of which a gradient is not of degree 1, in the order of the graph."""
    early = {r.name for n in graph.nodes if n.phase != "backward" for r in n.ins}
    made = [n.name for n in graph.nodes if not n.ins and _number(n.args[1] if n.op == "aten.full" else 1) is not None]
    seed = 0.0 if graph.of_kind("scale") else 1.0  # where the loss is scaled nothing of its gradient is constant
    open_ = dict.fromkeys((*made, *(c.name for c in graph.constants if c.name not in early)), seed)
    best = _World(graph, open_)
    for name in list(open_)[: CONSTANTS_TRIED if seed else 0]:
        if best.cost == 0:
            return []
        other = _World(graph, open_ | {name: 0.0})
        if other.cost < best.cost:
            best, open_[name] = other, 0.0
    return best.found() if best.cost else []


class _World:
    """The degree of every value if constants are of the degrees given."""

    def __init__(self, graph: Graph, constants: Mapping[str, float]) -> None:
        self.graph = graph
        self.open = set(constants)
        self.at: dict[Ref, Degree] = {Ref(i.name): 1.0 if i.kind == "scale" else 0.0 for i in graph.inputs}
        self.at |= {Ref(c.name): constants.get(c.name, 0.0) for c in graph.constants}
        self.floats = {ref for ref, spec in graph.specs.items() if spec.has_gradient}
        for node in graph.nodes:
            made: Degree = 0.0
            if not node.ins:
                made = constants.get(node.name)
            elif node.op == "aten.expand" and node.args[0].name in self.open:
                made = self.at[node.args[0]]
                self.open.add(node.name)
            elif node.phase == "backward" or any(self.at[r] for r in node.ins if r.name not in constants):
                made = self._made(node)
            for i, spec in enumerate(node.outs):
                if spec is not None:
                    twice = node.op == "aten.var_mean.correction" and i == 0
                    here = _times(made, 2.0) if twice else made
                    self.at[Ref(node.name, i)] = here if spec.has_gradient else 0.0 if made != BROKEN else BROKEN
        self.wrong = [o.ref for o in graph.outputs if o.kind == "grad" and self.at[o.ref] not in (None, 1.0)]
        self.cost = sum(d - 1 if 1 < d < LOST else LOST for r in self.wrong if (d := self.at[r]) is not None)

    def found(self) -> list[Node]:
        """What lost the degree of a gradient, on the way to it."""
        named: set[str] = set()
        seen = {r.name for r in self.wrong}
        todo = list(seen)
        while todo:
            node = self.graph.by_name.get(todo.pop())
            if node is None or node.phase == "forward":
                continue
            if self._lost(node):
                named.add(node.name)
                continue
            for ref in node.ins:
                if ref.name not in seen:
                    seen.add(ref.name)
                    todo.append(ref.name)
        return [n for n in self.graph.nodes if n.name in named]

    def _lost(self, node: Node) -> bool:
        """Whether an op made something else of a value of degree 1."""
        made = [self.at[Ref(node.name, i)] for i, o in enumerate(node.outs) if o is not None]
        read = [self.at[r] for r in node.ins]
        good = (1.0, BLOCKS, LOG)
        had = any(d in good for d in read) and BROKEN not in read
        return had and not any(d is None or d in good for d in made)

    def _made(self, node: Node) -> Degree:
        op, args = node.op, node.args
        each = [self.at[r] for r in node.ins if r in self.floats or self.at[r] == BROKEN]
        if BROKEN in each:
            return BROKEN
        if LOG in each or (op == "aten.log" and each == [1.0]):
            return _logarithm(node, each)
        if op in SCALE_FREE or all(d == 0.0 for d in each) or _cast_to(node, "bool"):
            return 0.0
        if BLOCKS in each:
            return None if op == "aten.linalg_matrix_exp" else BLOCKS if len(each) == 1 or op in PLACED else BROKEN
        if op in EQUAL_DEGREES:
            together = _equal([*each, *_numbers(node)])
            return BLOCKS if together == BROKEN and op in PLACED else together
        if op in COMPARED:
            return BROKEN if _equal([*each, *(_number(a) for a in args[:2])]) == BROKEN else 0.0
        if op in TIMES:
            return _times(each[0], TIMES[op])
        if op == "aten.pow.Tensor_Scalar":
            return _times(each[0], float(args[1])) if args[1] else 0.0
        if op in ("aten.linalg_vector_norm", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim") and args[1] == 0:
            return 0.0
        if op in DEGREE_PRODUCTS:
            found = None if None in each or 0 in args[:2] else _sum(each)
            free = op == "aten.mul.Tensor" and any(r.name in self.open for r in node.ins)
            return 1.0 if free and found == 2.0 else found
        if op in ("aten.div.Tensor", "aten.div.Scalar"):
            top, under = (self.at[a] if isinstance(a, Ref) else 0.0 for a in args[:2])
            return None if top is None else top - (under or 0.0)
        if op in ADDED:
            base, a, b = (self.at[r] for r in args[:3])
            return _equal([base, None if a is None or b is None else a + b])
        if op == "aten.addcdiv":
            base, a, b = (self.at[r] for r in args[:3])
            return _equal([base, None if a is None else a - (b or 0.0)])
        if op == "aten.lerp.Tensor":
            return BROKEN if each[2] else _equal(each[:2])
        if op in LINEAR_IN_FIRST and not any(each[1:]):
            return each[0]
        if op == "aten.linalg_matrix_exp" or op in UNSTEADY or op.startswith("aten.special_") or _cast_to_whole(node):
            return BROKEN if any(each) else 0.0
        return None if each[0] is None else _sum(each)


def _logarithm(node: Node, each: list[Degree]) -> Degree:
    """Of what is made from the logarithm of a gradient: c times the gradient adds the same number everywhere."""
    if node.op == "aten.exp":
        return 1.0
    if node.op in ("aten.add.Tensor", "aten.sub.Tensor"):
        return LOG if each[0] == LOG and not any(each[1:]) else BROKEN
    if node.op in EQUAL_DEGREES:
        return _equal([*each, *_numbers(node)])
    return LOG if node.op in CARRIED else BROKEN


def _number(value: Any) -> Degree:
    """Of a number, or what is none: zeros and infinities stay what they are."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return 0.0 if number and value != 0 and abs(value) < HUGE else None


def _numbers(node: Node) -> list[Degree]:
    return [_number(node.args[at]) for at in NUMBERS.get(node.op.removeprefix("aten."), ()) if at < len(node.args)]


def _equal(each: Iterable[Degree]) -> Degree:
    found = {d for d in each if d is not None}
    return None if not found else found.pop() if len(found) == 1 else BROKEN


def _sum(each: Iterable[Degree]) -> float:
    return sum(d or 0.0 for d in each)


def _times(degree: Degree, factor: float) -> Degree:
    return degree if degree is None or math.isinf(degree) else degree * factor


def _cast_to(node: Node, dtype: str) -> bool:
    return node.op == "aten._to_copy" and node.outs[0] is not None and node.outs[0].dtype == dtype


def _cast_to_whole(node: Node) -> bool:
    return node.op == "aten._to_copy" and node.outs[0] is not None and not node.outs[0].has_gradient
