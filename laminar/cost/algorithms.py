"""Ways to do a collective: how long a group waits for hops, and how long its bytes take.

Each is a formula in words and in code, on a `Team` (`laminar.cost.links`), whose levels say how many units are
joined and at what rate the group gets out of one. A tensor of `nbytes` is counted as in
`laminar.cost.collectives`. All links carry bytes in both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.cost.links import Team

SENDS_AT_ONCE = 8
"""How many messages of an exchange are on their way together. Assumed."""
EVERYBODY_SUMS_BYTES = 1 << 16
"""Up to this size, or with two ranks, everybody sums everything in shared memory: as in the runtime."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one way to do it, by cause."""

    algorithm: str
    latency_s: float
    bytes_s: float
    start_s: float = 0.0
    """The part that a rank works on when the exchange starts, of both together."""
    finish_s: float = 0.0
    """The part it works on when the result is needed."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.latency_s + self.bytes_s


def ring(kind: str, nbytes: float, t: Team) -> Terms:
    """Around the chain of ranks, every link busy all the time: the slowest link decides.

    Gather and scatter pass n-1 hops with 1/n of the bytes each, an all-reduce is one after the other. A broadcast
    flows through the chain once.
    """
    rounds = 2 if kind == "all_reduce" else 1
    part = 1.0 if kind == "broadcast" else (t.ranks - 1) / t.ranks
    wait = rounds * sum(h.chain * h.latency_s for h in t.crossed)
    return Terms("ring", wait, rounds * part * max(nbytes / h.bytes_per_s for h in t.crossed))


def tree(kind: str, nbytes: float, t: Team, chained: bool = True) -> Terms:
    """Two binary trees over the units, for an all-reduce up and down again.

    Every rank is inside one tree and a leaf of the other, so it receives the tensor twice in an
    all-reduce and once in a broadcast. `chained`: innermost units are chains, as NCCL has them.
    """
    rounds = 2 if kind == "all_reduce" else 1
    steps = [h.fan - 1 if k == 0 and chained else _log2(h.fan) for k, h in enumerate(t.hops)]
    wait = rounds * sum(n * h.latency_s for n, h in zip(steps, t.hops, strict=True))
    part = 0.5 if t.ranks == 2 and kind == "all_reduce" else 1.0
    return Terms("tree", wait, rounds * part * max(nbytes / h.bytes_per_s for h in t.crossed))


def halving_doubling(kind: str, nbytes: float, t: Team) -> Terms:
    """All-reduce by exchanging halves with partners at doubling distance, then back.

    Nearest partners first, so that outer levels see what inner ones have left. Where a level joins no power of
    two, those beyond it hand their tensor to a partner first and get the sum back at the end.
    """
    wait = moved = 0.0
    for h in t.crossed:
        low = 1 << (h.fan.bit_length() - 1)
        extra = 1 if low != h.fan else 0
        wait += 2 * (low.bit_length() - 1 + extra) * h.latency_s
        moved += 2 * ((low - 1) / low + extra) * nbytes / h.bytes_per_s
    return Terms("halving-doubling", wait, moved)


def hierarchical(kind: str, nbytes: float, t: Team) -> Terms:
    """Reduce-scatter inside, the same across with what is left, and back with all-gathers; a ring at each level.

    One level after the other. Against one ring through all ranks it pays at the innermost level what it saves outside:
    with N units across it is faster for large tensors if the inside is more than N times faster.
    """
    rounds = 2 if kind == "all_reduce" else 1
    wait = rounds * sum((h.fan - 1) * h.latency_s for h in t.crossed)
    return Terms("hierarchical", wait, rounds * sum((h.fan - 1) / h.fan * nbytes / h.bytes_per_s for h in t.crossed))


def direct(kind: str, nbytes: float, t: Team) -> Terms:
    """Everybody sends a piece of 1/n to everybody; levels are links of their own, the slowest decides."""
    piece = nbytes / t.ranks
    wait = sum(-(-h.peers // SENDS_AT_ONCE) * h.latency_s for h in t.crossed)
    return Terms("direct", wait, max(h.inside * h.peers * piece / h.bytes_per_s for h in t.crossed))


def send(kind: str, nbytes: float, t: Team) -> Terms:
    """From one rank to another; in a larger group, between the two neighbours that lie farthest apart."""
    h = t.hops[-1]
    return Terms("send", h.latency_s, nbytes / h.one_bytes_per_s)


def by_switch(nbytes: float, t: Team, bytes_per_s: float) -> Terms:
    """All-reduce in the switch: the tensor goes there once and its sum comes back.

    Each rank fetches the sum of 1/n of it and hands it to all; they wait for each other before and after.
    """
    return Terms("switch", 2 * t.ranks * t.hops[0].latency_s, nbytes / bytes_per_s)


def through_memory(kind: str, nbytes: float, t: Team, resident: bool = False) -> Terms:
    """Ranks of one machine copy in, tell each other, and copy or add up what others have written.

    Counted in bytes read plus written, at twice the rate of a copy. `resident`: the tensor is made where the
    others can read it, as gradients in buckets are.
    """
    n, h = t.ranks, t.hops[-1]
    waits = 1
    before, after = 2.0 * nbytes, 2.0 * nbytes
    if kind == "all_reduce":
        before = 0.0 if resident else 2.0 * nbytes
        if resident or (n > 2 and nbytes > EVERYBODY_SUMS_BYTES):
            waits = 2
            after = nbytes + nbytes / n + 2 * nbytes
        else:
            after = (n + 1.0) * nbytes
    elif kind == "all_gather":
        before, after = 4 * nbytes / n, 2 * (n - 1) / n * nbytes
    elif kind == "reduce_scatter":
        after = nbytes + nbytes / n
    start, finish = before / (2 * h.bytes_per_s), after / (2 * h.bytes_per_s)
    return Terms("shared memory", waits * h.latency_s, start + finish, start, finish)


def _log2(n: int) -> int:
    return (n - 1).bit_length()
