"""Ways to do a collective: how long a group waits for hops, and how long its bytes take.

Each is a formula in words and in code, on a `Team` (`laminar.cost.comm.topology`), whose levels say how many units are
joined and at what rate the group gets out of one. A tensor of `nbytes` is counted as in
`laminar.cost.comm.price`. All links carry bytes in both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laminar.cost.comm.topology import Team

SENDS_AT_ONCE = 8
"""How many messages of an exchange are on their way together. Assumed."""
CHAIN_SHARE = 0.55
"""Of a link's rate that devices reach which are a chain in both trees, and have their node's cards to serve besides:
nine tenths of that is 112 of 227 GB/s on A100, where NCCL counts on 110 at most."""
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

    Every unit is inside one tree and a leaf of the other, so it receives the tensor twice in an all-reduce and once in
    a broadcast. Of two units each is the root of one tree: what the other sends it up one tree and down the other comes
    to the tensor once. `chained`: innermost units are chains, as NCCL has them, at a share of the links' rate.
    """
    rounds = 2 if kind == "all_reduce" else 1
    wait = moved_s = 0.0
    for k, h in enumerate(t.hops):
        chain = k == 0 and chained
        wait += rounds * (h.fan - 1 if chain else _log2(h.fan)) * h.latency_s
        times = 0 if h.fan == 1 else 1 if h.fan == 2 else rounds
        moved_s = max(moved_s, times * nbytes / h.bytes_per_s / (CHAIN_SHARE if chain and t.level > 0 else 1.0))
    return Terms("tree", wait, moved_s)


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

    Each rank fetches the sum of 1/n of it and hands it to all; they wait for each other before and after. Where a group
    has several units that have a switch each, sums of 1/n are summed over units by trees in between.
    """
    inner, outer = t.hops[0], replace(t, hops=t.hops[1:])
    wait, moved_s = 2 * inner.fan * inner.latency_s, nbytes / bytes_per_s
    if not outer.crossed:
        return Terms("switch", wait, moved_s)
    across = tree("all_reduce", nbytes, outer, chained=False)
    return Terms("switch and tree", wait + across.latency_s, max(moved_s, across.bytes_s))


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
