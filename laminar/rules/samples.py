"""Draws and the samples they are for: where a batch is run in parts, each sample keeps its own random numbers.

A draw is a function of a key and of an element's place in the tensor. If the tensor holds something for every sample
(the mask of a dropout), the place is counted in the tensor of the *whole* batch: then a sample has the same numbers
whether its batch is run whole, or in parts of any size. A draw that holds nothing for samples (noise on a
weight) is the same for all parts.

Which dim holds the samples is found from the rules: with as many ranks as there are samples, the batch is split by
sample, every op follows its inputs, and a draw lies as whoever reads it wants it. The split that it ends with says
which dim it is, and what comes before the samples in a merged one: `[tokens * batch, d]` is `S(0, blocks=tokens)`.

Such a draw has a fifth argument, (samples, elements from one sample to the next), and the key has two more numbers: the
first sample of this part, and how many the batch has (`capture.kernels`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.ops import DRAWS
from laminar.ir.sbp import B, Partial, Sbp, Split
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Signature, call_of
from laminar.rules.signing import Blocks, Probed, blocks_in, options, probed_signatures

SAMPLE_KEY = TensorSpec((4,), "i64")
"""Seed, step, the first sample, samples in the batch."""

SamplePlaces = Mapping[int, Split | None]
"""By the number of a draw (its site): which dim holds samples, or None if it is the same for all of them."""


def samples_of(graph: Graph) -> int:
    """How many samples: the length that most leaves of the batch have."""
    lengths = Counter(i.spec.shape[0] for i in graph.of_kind("batch") if i.spec.shape)
    return lengths.most_common(1)[0][0] if lengths else 1


def draws_of(graph: Graph) -> list[Node]:
    """The draws of a graph; one that is done again in backward stands twice, with the same number."""
    return [n for n in graph.nodes if n.op in DRAWS]


def sample_places(graph: Graph) -> dict[int, Split | None]:
    """Where each draw has the samples, as far as rules tell; of a graph with two samples or more."""
    found = _Follow(graph).placed
    out: dict[int, Split | None] = {}
    for node in draws_of(graph):
        lies = found.get(Ref(node.name))
        if isinstance(lies, Split) or node.args[2] not in out:
            out[node.args[2]] = lies if isinstance(lies, Split) else None
    return out


def doubtful(graph: Graph, known: SamplePlaces) -> list[Node]:
    """Draws that are taken to be the same for all samples, though their size would allow for some of each."""
    n = samples_of(graph)
    return [d for d in draws_of(graph) if known[d.args[2]] is None and math.prod(d.args[0]) % n == 0]


def compared(graph: Graph, larger: Graph, known: SamplePlaces) -> dict[int, Split | None]:
    """Doubts settled by a graph of the same model with more samples: a dim that has grown holds samples.

    Such a draw goes into an op that needs all samples at once. In a merged dim, samples are taken to come first.
    """
    out = dict(known)
    there = {d.args[2]: d for d in draws_of(larger)}
    few, many = samples_of(graph), samples_of(larger)
    for node in doubtful(graph, known):
        other = there.get(node.args[2])
        if other is None or len(other.args[0]) != len(node.args[0]):
            raise PlanError(
                f"%{node.name} draws other numbers when there are {many} samples",
                at=node.where,
                next="run the batch in one part",
            )
        grown = [d for d, (a, b) in enumerate(zip(node.args[0], other.args[0], strict=True)) if a != b]
        if not grown:
            continue
        d = grown[0]
        if len(grown) > 1 or node.args[0][d] * many != other.args[0][d] * few:
            raise PlanError(
                f"%{node.name} draws {list(node.args[0])} for {few} samples and {list(other.args[0])} for {many}: "
                "which number is whose can't be told",
                at=node.where,
                next="draw as many for every sample, or run the batch in one part",
            )
        out[node.args[2]] = Split(d)
    return out


def places_of(traced: Callable[[int], Graph], samples: int) -> dict[int, Split | None]:
    """Where draws have the samples of a batch: the same at any size. `traced` gives the graph at any size."""
    some = max(samples, 2)
    graph = traced(some)
    known = sample_places(graph)
    return compared(graph, traced(some + 1), known) if doubtful(graph, known) else known


def in_parts(graph: Graph, known: SamplePlaces) -> Graph:
    """The graph of a part of a batch, whose draws are those of its samples in the whole batch."""
    if not graph.of_kind("rng"):
        return graph
    n = samples_of(graph)

    def changed(node: Node) -> Node:
        lies = known.get(node.args[2]) if node.op in DRAWS else None
        if lies is None:
            return node
        shape = node.args[0]
        if shape[lies.dim] % (lies.blocks * n):
            raise PlanError(
                f"%{node.name} draws {list(shape)}, which is not so many for each of {n} samples",
                at=node.where,
                next="run the batch in one part",
            )
        between = shape[lies.dim] // (lies.blocks * n) * math.prod(shape[lies.dim + 1 :])
        return replace(node, args=(*node.args[:4], (n, between)))

    inputs = tuple(replace(i, spec=SAMPLE_KEY) if i.kind == "rng" else i for i in graph.inputs)
    return replace(graph, inputs=inputs, nodes=tuple(map(changed, graph.nodes)))


class _Follow:
    """Placements on an axis with a rank for each sample: what follows from the batch, forwards and backwards."""

    def __init__(self, graph: Graph) -> None:
        self.parts = samples_of(graph)
        self.placed: dict[Ref, Sbp] = {}
        for item in graph.inputs:
            split = item.kind == "batch" and item.spec.shape[:1] == (self.parts,)
            self.placed[Ref(item.name)] = Split(0) if split else B
        self.placed |= {Ref(c.name): B for c in graph.constants}
        blocks: Blocks = blocks_in(graph)
        probed = probed_signatures(graph)
        nodes = [n for n in graph.nodes if n.phase != "backward"]
        ways = {n.name: self._ways(n, graph, blocks, probed.get(n.name, ())) for n in nodes}
        for node in nodes:
            self._settle(node, ways[node.name])
        open_ = [n for n in nodes if self._unknown(n)]
        while open_:
            before = len(self.placed)
            for node in (*reversed(open_), *open_):
                self._settle(node, ways[node.name])
            if len(self.placed) == before:
                return
            open_ = [n for n in open_ if self._unknown(n)]

    def _ways(self, node: Node, graph: Graph, blocks: Blocks, probed: Probed) -> tuple[Signature, ...]:
        return options(call_of(node, graph.specs), self.parts, blocks, probed)

    def _unknown(self, node: Node) -> bool:
        return any(r not in self.placed for r in (*node.ins, *_made(node)))

    def _settle(self, node: Node, ways: Sequence[Signature]) -> None:
        """Place what all ways to run an op, given what is known around it, agree on."""
        have = [self.placed.get(r) for r in node.ins]
        made = [self.placed.get(Ref(node.name, i)) for i in range(len(node.outs))]
        fit = list(_fitting(ways, have, made))
        if not fit and any(isinstance(p, Partial) for p in have):
            fit = list(_fitting(ways, [B if isinstance(p, Partial) else p for p in have], made))
        if not fit:
            # It needs all samples at once, and so does whoever gives it something nobody else has a wish for.
            fit = [Signature(tuple(B for _ in have), tuple(B for _ in made))]
        for i, ref in enumerate(node.ins):
            self._agree(ref, [s.ins[i] for s in fit])
        for ref in _made(node):
            self._agree(ref, [s.outs[ref.index] for s in fit])

    def _agree(self, ref: Ref, wishes: Iterable[Sbp]) -> None:
        if ref not in self.placed and len(found := set(wishes)) == 1:
            self.placed[ref] = found.pop()


def _made(node: Node) -> list[Ref]:
    return [Ref(node.name, i) for i, o in enumerate(node.outs) if o is not None]


def _fitting(ways: Iterable[Signature], have: Sequence[Sbp | None], made: Sequence[Sbp | None]) -> Iterable[Signature]:
    """Ways that agree with what is known; what is not known yet is never a sum still to be made."""
    for s in ways:
        pairs = zip((*s.ins, *s.outs), (*have, *made), strict=True)
        early = any(isinstance(p, Partial) for p, want in zip(s.ins, have, strict=True) if want is None)
        if not early and all(want == p for p, want in pairs if want is not None):
            yield s
