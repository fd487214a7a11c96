"""Do steps get shorter when samples are dealt out by what they cost? Real processes, lengths as of code on GitHub.

A small GPT is trained data-parallel on CPU ranks over Gloo by one loop that all sides share: samples packed into
micro-batches, attention inside of each sample, gradients of the total loss summed in one all-reduce, every token
weighing the same. Sides differ in who gets which samples of a global batch, and in nothing else:

    torch order   every rank-th sample, as `DistributedSampler` deals them out
    equal counts  as many samples for each rank, balanced by tokens: what Flatflow's stable mode does (`rivals.py`)
    ours          whole samples, by `laminar.data.assign`, with a cost learnt from measured times beforehand
    ours, cut     the same with samples that are longer than a share cut by rows (`cut_and_assign`), their keys and
                  values exchanged layer by layer, forward and backward

In every step all sides train on the same batch, in turning order; each has a model of its own, from the same weights.
Figures are seconds of the slowest rank, from a barrier to the end of the update, planning included. Where ranks share
cores these say little; `busy` is processor time of the slowest rank's own compute, which is what a core for each
would show.

    python bench/balance_real.py [--ranks 2] [--batch 256] [--steps 12] [--layers 2] [--width 128] [--longest 4096]

Lengths are log-normal (7.0, 1.6) up to 131072, divided so that the longest has `--longest` tokens.
Targets, on 8 ranks: torch order over ours at least 1.8, equal counts over ours at least 1.4, losses that agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ratio, report
from length_cases import drawn
from rivals import equal_counts, torch_order
from torch import Tensor, nn

from laminar.capture.ops.attention import attention_at, attention_backward_at
from laminar.data import OnlineCost, RowPiece, SampleCost, assign, cut_and_assign, pack, pack_units, packed_attention

HEADS, VOCABULARY = 4, 256
TRIALS = 24
"""Micro-batches that are timed to learn what samples cost."""
LOOSE = 1.03
"""Slowest over mean at which nothing more is cut: an exchange costs more than it wins then (assumed)."""

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Sample = list[int]


class Block(nn.Module):
    """Attention, then two products."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(attention(self.number, q, k, v).transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """Over one row of tokens; who attends to what is handed in."""

    def __init__(self, layers: int, width: int, longest: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, number) for number in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor, attention: Attention) -> Tensor:
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(self.norm(x))


# --- samples that are cut -------------------------------------------------------------------------------


class Exchanged(torch.autograd.Function):
    """Causal attention of one piece, with keys and values from those who have earlier pieces of the sample.

    Sends are waited for at the end of the step only (`Wire.finish`): nobody stands still for one who is late.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, wire: Wire, piece: RowPiece, layer: int) -> Tensor:
        holders = wire.holders[piece.sample]
        at = next(i for i, (rank, own) in enumerate(holders) if rank == wire.rank and own.start == piece.start)
        both = torch.stack([k, v])
        for number, (rank, _) in enumerate(holders[at + 1 :], at + 1):
            wire.send(both, rank, (piece.sample, layer, at, number, 0))
        earlier = [
            (own, wire.receive((2, HEADS, own.rows, k.shape[-1]), rank, (piece.sample, layer, i, at, 0)))
            for i, (rank, own) in enumerate(holders[:at])
        ]
        parts = [wire.got(received) for _, received in earlier]
        keys, values = torch.cat([*parts, both], dim=2)[:, None]
        scale = q.shape[-1] ** -0.5
        out, lse = attention_at(q[None], keys, values, None, True, scale, piece.start)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.about = wire, piece, layer, at, holders, scale
        return out[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, keys, values, out, lse = ctx.saved_tensors
        wire, piece, layer, at, holders, scale = ctx.about
        later = [
            wire.receive((2, HEADS, piece.rows, q.shape[-1]), rank, (piece.sample, layer, number, at, 1))
            for number, (rank, _) in enumerate(holders[at + 1 :], at + 1)
        ]
        dq, dk, dv = attention_backward_at(
            grads[0][None].contiguous(), q[None], keys, values, None, out, lse, True, scale, piece.start
        )
        both = torch.cat([dk, dv])
        for i, (rank, own) in enumerate(holders[:at]):
            wire.send(both[:, :, own.start : own.stop], rank, (piece.sample, layer, at, i, 1))
        mine = both[:, :, piece.start : piece.stop]
        for received in later:
            mine = mine + wire.got(received)
        return dq[0], mine[0], mine[1], None, None, None


class Wire:
    """Messages between the holders of a sample's pieces, told apart by tags."""

    def __init__(self, rank: int, pieces: Sequence[Sequence[RowPiece]]) -> None:
        self.rank = rank
        self.holders: dict[int, list[tuple[int, RowPiece]]] = {}
        for holder, mine in enumerate(pieces):
            for piece in mine:
                if not piece.whole:
                    self.holders.setdefault(piece.sample, []).append((holder, piece))
        for found in self.holders.values():
            found.sort(key=lambda pair: pair[1].start)
        self._under_way: list[Any] = []

    @staticmethod
    def _tag(key: tuple[int, ...]) -> int:
        sample, layer, source, target, backward = key
        return (((sample * 64 + layer) * 64 + source) * 64 + target) * 2 + backward

    def send(self, tensor: Tensor, rank: int, key: tuple[int, ...]) -> None:
        """Begin to; the tensor is kept until the step is over."""
        kept = tensor.contiguous()
        self._under_way.append((dist.isend(kept, rank, tag=self._tag(key)), kept))

    def receive(self, shape: tuple[int, ...], rank: int, key: tuple[int, ...]) -> tuple[Any, Tensor]:
        """Make room and begin to wait."""
        room = torch.empty(shape)
        return dist.irecv(room, rank, tag=self._tag(key)), room

    @staticmethod
    def got(received: tuple[Any, Tensor]) -> Tensor:
        """What has come."""
        received[0].wait()
        return received[1]

    def finish(self) -> None:
        """All that was sent has arrived."""
        for work, _ in self._under_way:
            work.wait()


# --- a step ---------------------------------------------------------------------------------------------


def labels_of(sample: Sample) -> list[int]:
    """What follows each token."""
    return [*sample[1:], -100]


def micro_batches(samples: Sequence[Sample], tokens: int) -> list[Any]:
    """Packed; the same for all sides."""
    rows = [{"tokens": sample, "labels": labels_of(sample)} for sample in samples]
    return [pack([rows[i] for i in unit]) for unit in pack_units([len(s) for s in samples], tokens)]


def whole_loss(model: Gpt, unit: Any) -> Tensor:
    """The loss of a micro-batch, summed."""
    logits = model(unit.tokens, unit.positions, lambda layer, q, k, v: packed_attention(q, k, v, unit))
    return F.cross_entropy(logits, unit.fields["labels"], reduction="sum")


def cut_loss(model: Gpt, pieces: Sequence[RowPiece], batch: Sequence[Sample], wire: Wire) -> Tensor:
    """The loss of this rank's pieces of samples that are cut, summed."""
    rows = [
        {"tokens": batch[p.sample][p.start : p.stop], "labels": labels_of(batch[p.sample])[p.start : p.stop]}
        for p in pieces
    ]
    unit = pack(rows, starts=[p.start for p in pieces])

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = [slice(a, b) for a, b in zip(unit.bounds, unit.bounds[1:], strict=False)]
        outs = [
            Exchanged.apply(q[:, s], k[:, s], v[:, s], wire, piece, layer)
            for s, piece in zip(each, pieces, strict=True)
        ]
        return torch.cat(outs, dim=1)

    logits = model(unit.tokens, unit.positions, attention)
    return F.cross_entropy(logits, unit.fields["labels"], reduction="sum")


class Side:
    """A way to deal out samples, with a model of its own."""

    def __init__(self, name: str, model: Gpt, tokens: int, cost: SampleCost) -> None:
        self.name, self.model, self.tokens, self.cost = name, model, tokens, cost
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        self.seconds: list[float] = []
        self.busy: list[list[float]] = []
        self.losses: list[float] = []
        self.cuts = 0

    def pieces(self, lengths: list[int]) -> Sequence[Sequence[RowPiece]]:
        """By rank, what it gets of a batch."""
        if self.name == "ours, cut":
            return cut_and_assign(lengths, self.ranks, self.cost, rows=16, close=LOOSE).pieces
        if self.name == "ours":
            found = assign(self.cost.of(lengths), self.ranks)
            parts = [found.of_rank(r) for r in range(self.ranks)]
        elif self.name == "equal counts":
            parts = equal_counts(lengths, self.ranks)
        else:
            parts = torch_order(len(lengths), self.ranks)
        return [[RowPiece(s, 0, lengths[s], lengths[s]) for s in part] for part in parts]

    def step(self, batch: Sequence[Sample]) -> None:
        """Plan, compute, sum, update."""
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        lengths = [len(s) for s in batch]
        labels = sum(lengths) - len(lengths)
        pieces = self.pieces(lengths)
        wire = Wire(self.rank, pieces)
        self.cuts += len(wire.holders)
        mine = pieces[self.rank]
        total = torch.zeros(())
        cut = [p for p in mine if not p.whole]
        # Forward of pieces comes first and backward last: whoever waits for them is served early, and there late.
        waits = cut_loss(self.model, cut, batch, wire) if cut else None
        alone = len(cut) == len(mine)
        if waits is not None and alone:
            (waits / labels).backward()
        for unit in micro_batches([batch[p.sample] for p in mine if p.whole], self.tokens) if not alone else []:
            loss = whole_loss(self.model, unit)
            (loss / labels).backward()
            total += loss.detach()
        if waits is not None:
            if not alone:
                (waits / labels).backward()
            total += waits.detach()
        wire.finish()
        busy = time.process_time() - worked
        params = list(self.model.parameters())
        flat = torch.cat(
            [*(torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params), total[None]]
        )
        dist.all_reduce(flat)
        for param, grad in zip(params, flat[:-1].split([p.numel() for p in params]), strict=True):
            param.grad = grad.view_as(param)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        both = torch.tensor([seconds, busy])
        all_ranks = [torch.empty_like(both) for _ in range(self.ranks)]
        dist.all_gather(all_ranks, both)
        self.seconds.append(max(float(t[0]) for t in all_ranks))
        self.busy.append([float(t[1]) for t in all_ranks])
        self.losses.append(float(flat[-1]) / labels)


def learnt_cost(model: Gpt, lengths: Any, tokens: int) -> SampleCost:
    """What samples cost here, in processor time, from micro-batches that all ranks run at once; the same on all."""
    found, dice = OnlineCost(SampleCost(per_token=1.0, per_square=1e-3)), np.random.default_rng(5)
    tries = [dice.choice(lengths, 1 + number % 6 * 10) for number in range(TRIALS)]
    tries += [np.asarray([tokens // k]) for k in (1, 2, 4, 8)] * 2
    for number, sizes in enumerate([*tries[:2], *tries]):  # the first two warm up
        unit = micro_batches([random_sample(int(n), dice) for n in sizes], 1 << 30)[0]
        dist.barrier()
        begin = time.process_time()
        whole_loss(model, unit).backward()
        took = torch.tensor([time.process_time() - begin])
        model.zero_grad()
        dist.all_reduce(took)
        if number >= 2:
            found.observe(unit.lengths, float(took) / dist.get_world_size())
    return found.cost


def random_sample(length: int, dice: np.random.Generator) -> Sample:
    """Tokens of which each follows from the one before, but for one in ten: there is something to learn."""
    steps = np.where(dice.random(length) < 0.1, dice.integers(0, VOCABULARY, length), 7)
    return ((np.cumsum(steps) + int(dice.integers(VOCABULARY))) % VOCABULARY).tolist()  # type: ignore[no-any-return]


def work(rank: int, given: argparse.Namespace, port: int) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    count = given.batch * (given.steps + 1)
    lengths = np.maximum(drawn("github", count, given.seed) * given.longest // 131072, 1)
    torch.manual_seed(0)
    model = Gpt(given.layers, given.width, given.longest)
    cost = learnt_cost(model, lengths, given.longest)
    state = model.state_dict()
    sides = []
    for name in ("torch order", "equal counts", "ours", "ours, cut"):
        own = Gpt(given.layers, given.width, given.longest)
        own.load_state_dict(state)
        sides.append(Side(name, own, given.longest, cost))
    dice = np.random.default_rng(given.seed)
    for number, sizes in enumerate(lengths.reshape(-1, given.batch)):
        batch = [random_sample(int(n), dice) for n in sizes]
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            side.step(batch)
    if rank == 0:
        tell(given, sides, cost)
    dist.destroy_process_group()


def tell(given: argparse.Namespace, sides: list[Side], cost: SampleCost) -> None:
    """One JSON line; the first step warms up."""
    times = {side.name: side.seconds[1:] for side in sides}
    losses = {side.name: side.losses for side in sides}
    apart = max(abs(x / y - 1) for name in losses for x, y in zip(losses[name], losses["torch order"], strict=True))
    over = {side.name: [max(c) / statistics.mean(c) for c in side.busy[1:]] for side in sides}
    busy = {side.name: [max(c) for c in side.busy[1:]] for side in sides}
    row: dict[str, Any] = {
        "ranks": given.ranks,
        "batch": given.batch,
        "steps": given.steps,
        "model": f"GPT, {given.layers} x {given.width}",
        "lengths": f"github, up to {given.longest}",
        "cost_us": {
            "sample": round(1e6 * cost.per_sample, 2),
            "token": round(1e6 * cost.per_token, 3),
            "square": round(1e6 * cost.per_square, 6),
        },
        "step_s": {name: round(statistics.mean(t), 4) for name, t in times.items()},
        "slowest_busy_s": {name: round(statistics.mean(x), 4) for name, x in busy.items()},
        "slowest_busy_over_mean": {name: round(statistics.mean(x), 3) for name, x in over.items()},
    }
    for name in ("torch order", "equal counts"):
        for best in ("ours", "ours, cut"):
            row[f"{name} over {best}"] = {
                "all": round(sum(times[name]) / sum(times[best]), 3),
                **ratio(times, name, best),
                "busy": round(sum(busy[name]) / sum(busy[best]), 3),
            }
    row["samples_cut"] = sides[-1].cuts
    row["losses"] = [round(x, 4) for x in (losses["ours"][0], losses["ours"][-1])]
    row["losses_apart"] = float(f"{apart:.2g}")
    report("balance_real", {**row, "target": {"torch order over ours, cut": 1.8, "equal counts over ours, cut": 1.4}})


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--batch", type=int, default=256)
    args.add_argument("--steps", type=int, default=12)
    args.add_argument("--layers", type=int, default=2)
    args.add_argument("--width", type=int, default=128)
    args.add_argument("--longest", type=int, default=4096)
    args.add_argument("--seed", type=int, default=0)
    given = args.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    torch.multiprocessing.spawn(work, (given, port), nprocs=given.ranks)


if __name__ == "__main__":
    main()
