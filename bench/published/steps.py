"""A whole step of a row: bills priced, depth folded, stages and micro-batches put together, reductions beside.

Each part of a micro-batch is simulated with `cost.simulate`: its kernels in the order of the program, its exchanges on
their own lane. A step without stages is simulated layer by layer (what gathers and reductions hide behind, and what
they do not); a step with stages runs through `pipes`. Then the optimizer, and what ranks wait for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from bench.published import bills
from bench.published.bills import Bill, Bills
from bench.published.choices import Chosen, balanced_layers, choices, shape_of, spread_layers
from bench.published.features import STAGE
from bench.published.layers import SLOWED, in_pieces_s, reduced_s
from bench.published.machines import Gpu, Wiring, wiring
from bench.published.memory import peak_bytes
from bench.published.pipes import pipe_s
from bench.published.prices import Constants, Prices
from bench.published.rows import Row
from laminar.cost.comm.price import split_attention
from laminar.cost.sim.simulate import simulate
from laminar.ir.mesh import Mesh

STEP_S = 0.01
"""What a step costs beside all that: batches, logging, the loop. Assumed."""
ROOM = 0.97
"""Of a device's memory that a step may fill; the rest is the context's, and fragments."""
MERGED_BYTES = (48, 24)
"""For each element of a block's result, what merging it reads and writes in float32: forward, backward. Assumed: four
elementwise kernels, two sums."""
KEPT_EIGHT = 0.7
"""Of what forward keeps, where inputs of products are kept in eight bits. Assumed."""


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    seconds: float
    peak_bytes: int
    chosen: Chosen
    pieces: dict[str, float] = field(default_factory=dict)
    """Seconds by cause, for reading: they need not add up where things overlap."""


def step_of(row: Row, constants: Constants, chosen: Chosen | None = None) -> Step:
    """The step of a row; what the row leaves open is the fastest that fits, or if nothing does, the smallest."""
    found = [_Assembly(row, way, constants).step() for way in ([chosen] if chosen else choices(row))]
    fitting = [s for s in found if s.peak_bytes <= ROOM * row.gpu.most_bytes]
    return min(fitting, key=lambda s: s.seconds) if fitting else min(found, key=lambda s: s.peak_bytes)


class _Assembly:
    def __init__(self, row: Row, chosen: Chosen, constants: Constants) -> None:
        self.row, self.chosen, self.constants = row, chosen, constants
        self.does = row.features
        self.zero = STAGE[row.practice] if row.zero is None else row.zero
        self.split = row.tp > 1 and (row.split_norms or self.does.split_norms)
        self.prices = _prices(row, constants)
        self.mesh = Mesh({"pp": row.pp, "dp": row.dp, "cp": row.cp, "tp": row.tp})
        whole = chosen.recompute == "full" and not self.does.stops_early
        self.bills: Bills = bills.made(
            shape_of(row, chosen, self.does),
            row.tp,
            recompute="none" if whole else chosen.recompute,
            split_norms=self.split and (row.seq // row.cp) % row.tp == 0,
            fused=self.does.fused_ops,
            compiled=self.does.compiled,
        )
        self.whole = self.bills
        if self.chosen.recompute == "full" and not whole:
            self.whole = bills.made(
                shape_of(row, chosen, self.does),
                row.tp,
                recompute="none",
                split_norms=self.split and (row.seq // row.cp) % row.tp == 0,
                fused=self.does.fused_ops,
                compiled=self.does.compiled,
            )
        if whole:  # what is kept of a block is what came in
            self.bills = replace(self.bills, kept_bytes={**self.bills.kept_bytes, "block": self.bills.sent_bytes})
        self.micro_batches = max(1, round(row.gbs / (row.dp * chosen.mbs)))
        self.pieces: dict[str, float] = {}
        self.part_s = {name: self._part_s(name, bill) for name, bill in self.bills.parts.items()}
        if whole:
            self.part_s["Bblock"] += self.part_s["Fblock"]
        if chosen.recompute == "selective" and self.does.fused_attention:
            again = sum(self._attention_s(i) for i in self.bills.parts["Fblock"].items if i[0] == "attention")
            self.part_s["Bblock"] += again
        if row.precision == "f8" and not self.does.dynamic_eight and chosen.recompute != "full":
            kept = round(KEPT_EIGHT * self.bills.kept_bytes["block"])
            self.bills = replace(self.bills, kept_bytes={**self.bills.kept_bytes, "block": kept})
        self.part_s["Bblock"] += self._summing("block")
        self.part_s["Bhead"] += self._summing("head")

    # --- one part of a micro-batch

    def _part_s(self, name: str, bill: Bill) -> float:
        """Its tasks, priced and simulated."""
        eight = self.row.precision == "f8" and name.endswith("block")
        works: list[float] = []
        for item in bill.items:
            kind = item[0]
            if kind == "none":
                works.append(0.0)
            elif kind == "launch":
                works.append(self.constants.launch_s)
            elif kind == "mm":
                works.append(self._product_s(item, eight, name))
            elif kind == "bytes":
                works.append(self.prices.bytes_s(item[1]))
            elif kind == "attention":
                works.append(self._attention_s(item))
            else:
                works.append(self.prices.move_s(item[1], item[2], self.mesh, (3,)))
        if self.row.tp > 1 and self.does.tensor_overlap:
            self._beside(bill, works)
        self._tell(name, bill, works)
        return simulate(bill.load([round(1e9 * w) for w in works], SLOWED)).step / 1e9 + self._dropout_s(name)

    def _product_s(self, item: bills.Item, eight: bool, name: str) -> float:
        _, batch, m, n, k, dtype = item
        if self.row.precision == "tf32":
            dtype = "tf32"
        if not eight or batch > 1:
            return self.prices.product_s(batch, m, n, k, dtype)
        # Eight bits: what goes in is cast, once along rows and once along columns; the gradient's two products share.
        cast = 4.0 * m * k if name[0] == "F" else 2.0 * (m * k + k * n)
        if self.does.dynamic_eight:
            cast *= 2.0
        return self.prices.product_s(1, m, n, k, "f8") + cast / self.prices.bytes_per_s

    def _attention_s(self, item: bills.Item) -> float:
        _, back, heads, q, k, width, causal, nbytes = item
        cp = self.row.cp
        if cp == 1:
            return self.prices.attention_s(back, heads, q, k, width, causal, self.does.attention)
        # Blocks of a balanced ring: on the mean, half of each is masked.
        block = self.prices.attention_s(back, heads, q, k, width, False, self.does.attention) * (0.5 if causal else 1.0)
        group = self.mesh.group((2,), self.mesh.coords(0))
        ways = split_attention(self.prices.links, block, nbytes * (2 if back else 1), group, self.row.tp)
        if not self.does.merged_apart:
            return ways.seconds
        merged = (cp - 1) * heads * q * width * (MERGED_BYTES[1] if back else MERGED_BYTES[0])
        return ways.gathered_s + merged / self.prices.bytes_per_s

    def _beside(self, bill: Bill, works: list[float]) -> None:
        """Exchanges next to products go on beside them in as many pieces as there are ranks."""
        products = [k for k, item in enumerate(bill.items) if item[0] == "mm"]
        for k, item in enumerate(bill.items):
            if item[0] == "move" and item[1] in ("all_gather", "reduce_scatter") and products:
                gathers = item[1] == "all_gather"
                near = [p for p in products if (p > k) == gathers]
                if near:
                    beside = works[min(near, key=lambda p: abs(p - k))]
                    first = works[k] / self.row.tp
                    works[k] = first + max(0.0, works[k] - first - beside)

    def _dropout_s(self, name: str) -> float:
        """Dropout of scores as a kernel of its own: they are written and read once more."""
        does, shape = self.does, shape_of(self.row, self.chosen, self.does)
        if not does.dropout or does.fused_dropout or does.fused_attention or not name.endswith("block"):
            return 0.0
        scores = shape.batch * shape.heads / self.row.tp * shape.tokens**2
        again = name[0] == "B" and self.chosen.recompute == "selective"
        return (2 if again else 1) * self.prices.bytes_s(4 * scores)

    def _tell(self, name: str, bill: Bill, works: list[float]) -> None:
        many = self.row.layers if name.endswith("block") else 1
        for item, work in zip(bill.items, works, strict=True):
            if item[0] not in ("none", "launch"):
                self.pieces[item[0]] = self.pieces.get(item[0], 0.0) + work * many * self.micro_batches / self.row.pp

    def _summing(self, stage: str) -> float:
        """Gradients of a micro-batch are added to those before."""
        if self.does.fused_sums or self.micro_batches == 1:
            return 0.0
        wide = 8 if self.does.wide_grads else 6
        return wide * self.bills.params[stage] / self.prices.bytes_per_s

    # --- exchanges of weights and gradients

    def _data_axes(self) -> tuple[int, ...]:
        return (1, 2) if self.row.cp > 1 else (1,)

    def _gather_s(self, elements: float) -> float:
        """Weights put together from everybody's pieces."""
        wide = 2 if self.row.precision not in ("f32", "tf32") else 4
        if self.row.hybrid:
            return self._inside("all_gather", wide * elements)
        return self.prices.move_s("all_gather", wide * elements, self.mesh, self._data_axes())

    def _reduce_s(self, elements: float) -> float:
        """Gradients summed over data-parallel ranks, whole or in shards."""
        nbytes = (4 if self.does.wide_grads else 2) * elements
        if self.row.hybrid:
            inner = self._inside("reduce_scatter", nbytes)
            nodes = max(1, self.row.gpus // self.row.gpu.node)
            mesh = Mesh({"nodes": nodes, "inside": self.row.gpus // nodes})
            return inner + self.prices.move_s("all_reduce", nbytes / mesh.sizes[1], mesh, (0,))
        kind = "all_reduce" if self.zero == 0 else "reduce_scatter"
        return self.prices.move_s(kind, nbytes, self.mesh, self._data_axes())

    def _inside(self, kind: str, nbytes: float) -> float:
        """Inside a node, where weights are in shards there and repeated across nodes."""
        nodes = max(1, self.row.gpus // self.row.gpu.node)
        return self.prices.move_s(kind, nbytes, Mesh({"nodes": nodes, "inside": self.row.gpus // nodes}), (1,))

    # --- the step

    def step(self) -> Step:
        """All of it."""
        row = self.row
        seconds = self._staged() if row.pp > 1 else self._unstaged()
        seconds += self._optimizer_s() + STEP_S
        seconds *= 1 + self.constants.jitter * math.log2(max(1.0, row.gpus / row.gpu.node))
        peak = peak_bytes(
            row, self.chosen.mbs, self.chosen.vp, self.bills, self.whole, self.does, self.zero, self.micro_batches
        )
        return Step(seconds, peak, self.chosen, self.pieces)

    def _unstaged(self) -> float:
        row, p, many = self.row, self.part_s, self.micro_batches
        once = p["Fembed"] + p["Fhead"] + p["Bhead"] + p["Bembed"] + row.layers * (p["Fblock"] + p["Bblock"])
        self.pieces["micro"] = once
        sharers = row.dp * row.cp
        if sharers == 1:
            return many * once
        ends = self.bills.params["embed"] + (0 if row.tied else self.bills.params["head"])
        if self.zero == 3:
            times = [self._pieces_s(n) for n in (1, 2)] if many > 1 else [self._pieces_s(1)]
            return times[0] + (many - 1) * (times[-1] - times[0] if many > 1 else 0.0)
        # Where tensor-parallel ranks are nodes apart, both kinds of exchange want the same cards.
        if self.does.grad_overlap and row.tp <= row.gpu.node:
            reduce_s, end_s = self._reduce_s(self.bills.params["block"]), self._reduce_s(ends)
            last = reduced_s(
                p["Fembed"] + p["Fhead"] + p["Bhead"],
                p["Fblock"],
                p["Bblock"],
                p["Bembed"],
                row.layers,
                reduce_s,
                end_s,
            )
            seconds = (many - 1) * once + last
        else:
            seconds = many * once + self._reduce_s(ends + row.layers * self.bills.params["block"])
        return seconds + self._gathered_behind(ends + row.layers * self.bills.params["block"], p["Fblock"])

    def _gathered_behind(self, elements: float, forward_s: float) -> float:
        """A distributed optimizer's weights, put together again: before the next step, or beside its forward."""
        if self.zero not in (1, 2) or self.row.dp * self.row.cp == 1:
            return 0.0
        whole = self._gather_s(elements)
        if not self.does.param_overlap:
            return whole
        share = max(1, round(elements / self.bills.params["block"]))
        return whole / share + max(0.0, whole - whole / share - share * forward_s)

    def _pieces_s(self, micro_batches: int) -> float:
        """Weights in shards: gathered ahead of use in forward and again in backward, gradients reduced behind."""
        p, b = self.part_s, self.bills.params
        ends = self._gather_s(b["embed"])
        block_gather, block_reduce = self._gather_s(b["block"]), self._reduce_s(b["block"])
        return in_pieces_s(
            (p["Fembed"], p["Fblock"], p["Fhead"]),
            (p["Bembed"], p["Bblock"], p["Bhead"]),
            self.row.layers,
            micro_batches,
            block_gather,
            block_reduce,
            ends,
            self._reduce_s(b["embed"]),
        )

    def _staged(self) -> float:
        row, p = self.row, self.part_s
        stages = row.pp * self.chosen.vp
        layers = spread_layers(row.layers, stages)
        if self.does.balanced:
            layers = balanced_layers(row.layers, stages, p)
        send_s = self._send_s()
        blocking = 0.0 if self.does.send_overlap else send_s
        forward = [n * p["Fblock"] + blocking for n in layers]
        backward = [n * p["Bblock"] + blocking for n in layers]
        forward[0] += p["Fembed"]
        backward[0] += p["Bembed"]
        forward[-1] += p["Fhead"]
        backward[-1] += p["Bhead"]
        if self.zero == 3 and row.dp * row.cp > 1:
            gather, reduce_s = self._gather_s(self.bills.params["block"]), self._reduce_s(self.bills.params["block"])
            forward = [max(f, n * gather) for f, n in zip(forward, layers, strict=True)]
            backward = [max(f, n * (gather + reduce_s)) for f, n in zip(backward, layers, strict=True)]
        seconds, _ = pipe_s(forward, backward, row.pp, self.micro_batches, 0.0 if blocking else send_s)
        self.pieces["micro"] = (sum(forward) + sum(backward)) / row.pp
        self.pieces["send"] = send_s
        return seconds + self._reduced_behind(layers) + self._tied_s()

    def _tied_s(self) -> float:
        """Embedding and head are one weight on two stages: their gradients are added up when the pipe has run empty."""
        if not self.row.tied:
            return 0.0
        nbytes = (4 if self.does.wide_grads else 2) * self.bills.params["head"]
        return self.prices.move_s("send", nbytes, self.mesh, (0,))

    def _send_s(self) -> float:
        """What a stage sends to the next, from node to node where stages are nodes apart."""
        nbytes = self.bills.sent_bytes
        if not self.split:
            nbytes = nbytes // self.row.tp  # each rank sends its share, gathered inside the node
        return self.prices.move_s("send", nbytes, self.mesh, (0,))

    def _reduced_behind(self, layers: list[int]) -> float:
        """What is left of the reduction of gradients when the pipe has run empty, and gathering weights again."""
        row, b = self.row, self.bills.params
        if row.dp * row.cp == 1 or self.zero == 3:
            return 0.0
        mine = sum(layers[:: row.pp])
        elements = mine * b["block"] + b["embed"]
        whole = self._reduce_s(elements)
        if self.does.grad_overlap:
            chunk = self._reduce_s(layers[0] * b["block"] + b["embed"])
            before = (row.pp - 1) * layers[0] * self.part_s["Bblock"] * self.chosen.vp
            whole = chunk + max(0.0, whole - chunk - before)
        return whole + self._gathered_behind(elements, self.part_s["Fblock"])

    def _optimizer_s(self) -> float:
        """The norm, the update, and what mixed precision does around them, by bytes."""
        row, b = self.row, self.bills.params
        mine = -(-row.layers // row.pp) * b["block"] + b["embed"] + (0 if row.tied or row.pp > 1 else b["head"])
        if self.zero:
            mine /= row.dp * row.cp if not row.hybrid else row.gpu.node
        grads = 4 if self.does.wide_grads else 2
        return (2 * grads + 8 + 24 + 2) * mine / self.prices.bytes_per_s


@lru_cache(maxsize=4096)
def _prices_of(gpu: Gpu, gpus: int, wires: Wiring, constants: Constants) -> Prices:
    return Prices(gpu, gpus, wires, constants)


def _prices(row: Row, constants: Constants) -> Prices:
    wires = wiring(row.system, row.gpu, row.vocab, row.network)
    return _prices_of(row.gpu, max(row.gpus, row.tp * row.pp * row.dp * row.cp), wires, constants)
