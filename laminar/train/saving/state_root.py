"""The identity of a run: the Merkle root over all that it is, without a tensor being put together.

Each rank hashes the blocks that it would write in a checkpoint; parts of blocks that go across cuts are sent to whoever
hashes them. So the root is that of the checkpoint which would be saved now, and of every run whose state is the same,
bit for bit, however it lies on ranks.
"""

from __future__ import annotations

from laminar.checkpoint.format.hashing import block_hash
from laminar.checkpoint.format.state_record import StateRecord
from laminar.train.protocol import HasState
from laminar.train.saving.scalars import scalars_of
from laminar.train.saving.snapshots.snapshot import HeldShards, Snapshot
from laminar.train.saving.snapshots.snapshot_plan import SnapshotPlan


def state_record_of(job: HasState) -> StateRecord:
    """All tensors by their blocks' hashes, and scalars; every rank calls this, and gets the same."""
    state, peers = job.state, job.peers
    shards = list(state.shards())
    plan: SnapshotPlan = job.planner.plan(shards)
    held = HeldShards(shards)
    snapshot = Snapshot(plan.of_several_ranks, peers, memoryview(bytearray(plan.of_several_ranks.nbytes)))
    for buffers in (True, False):
        snapshot.copy(shards, buffers)
    snapshot.exchange(peers.host_group)
    sent = {(s.tensor, s.number): n for n, s in enumerate(snapshot.plan.mine)}
    hashes = []
    for share in plan.mine:
        number = sent.get((share.tensor, share.number))
        hashes.append(block_hash(held.block(plan, share) if number is None else snapshot.block(number)))
    everyone = peers.gather_objects(b"".join(hashes))
    return plan.state(plan.in_order(everyone), scalars_of(state, job.gather.notes))
