"""Weights before a step and gradients behind it: whole where a stage is hosted, in parts where they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laminar.ir.exact import Exact, Hosting
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, Split
from laminar.ir.tensor import TensorSpec
from laminar.runtime.comm.shards import shard
from laminar.train.engine.stage_exchange import StageExchange
from tests.support.hosted_runs import ThreadStageHosts, ThreadWorld
from tests.support.seeds import dice

SHAPES = {"a": (7, 3), "b": (12,), "c": (5, 6, 2), "d": (1,), "e": (4, 4)}


def stored(chance: object, name: str) -> NdSbp:
    """Some placement of a tensor on one axis."""
    dim = chance.randrange(len(SHAPES[name]))  # type: ignore[attr-defined]
    blocks = 2 if SHAPES[name][dim] % 2 == 0 and chance.random() < 0.3 else 1  # type: ignore[attr-defined]
    return (Split(dim, blocks),)


@pytest.mark.parametrize("seed", range(6))
def test_weights_come_together_where_their_stage_is_and_gradients_go_back(seed: int) -> None:
    chance = dice(f"stage exchange {seed}")
    exact = Exact(2, stages=chance.randint(2, 3))
    processes = chance.randint(2, exact.ranks)
    hosting, mesh = Hosting.drawn(exact.ranks, processes, seed), Mesh({"dp": processes})
    torch.manual_seed(seed)
    whole = {n: torch.randn(s) for n, s in SHAPES.items()}
    at = {n: stored(chance, n) for n in SHAPES}
    specs = {n: TensorSpec(s, "f32") for n, s in SHAPES.items()}
    home = {n: chance.randrange(exact.stages) for n in SHAPES}
    wanted = [[n for n in SHAPES if home[n] == s or n == "a"] for s in range(exact.stages)]
    kept = {n: (B,) if chance.random() < 0.3 else nd for n, nd in at.items()}
    world = ThreadWorld(seed)

    def one(process: int) -> None:
        hosts = ThreadStageHosts(exact, hosting, process, world)
        exchange = StageExchange(hosts, mesh)
        held = {n: shard(x, at[n], mesh, process) for n, x in whole.items()}
        for _ in range(2):
            found = exchange.weights(wanted, held, specs, at.__getitem__)
            here = {n for s, names in enumerate(wanted) if process in hosts.members[s] for n in names}
            assert found.keys() == here, "no weight of a stage that is not hosted"
            assert all(torch.equal(x, whole[n]) for n, x in found.items())
            mine = {n: whole[n] * 2 for n, s in home.items() if process in hosts.members[s]}
            parts = exchange.parts(home, mine, specs, kept.__getitem__)
            assert parts.keys() == whole.keys()
            for n, x in parts.items():
                assert torch.equal(x, shard(whole[n] * 2, kept[n], mesh, process)), n

    world.turns.run([lambda p=p: one(p) for p in range(processes)])  # type: ignore[misc]


def test_gradients_of_stages_that_share_a_weight_are_added_in_their_order() -> None:
    exact = Exact(1, stages=3)
    terms = [torch.tensor([1.0, 1e8]), torch.tensor([1e8, 1.0]), torch.tensor([-1e8, -1e8])]
    want = (terms[0] + terms[1]) + terms[2]
    for processes in ((0, 0, 0), (0, 1, 0), (0, 1, 2), (1, 0, 0), (2, 0, 1)):
        world = ThreadWorld()

        def one(process: int, processes: tuple[int, ...] = processes, world: ThreadWorld = world) -> None:
            hosts = ThreadStageHosts(exact, Hosting(processes), process, world)
            mine: dict[tuple[int, str], Tensor] = {
                (s, "w"): x.clone() for s, x in enumerate(terms) if processes[s] == process
            }
            StageExchange(hosts, Mesh({"dp": 1})).tied({"w": [0, 1, 2]}, mine, {"w": ((2,), torch.float32)})
            if processes[0] == process:
                assert torch.equal(mine[0, "w"], want)

        world.turns.run([lambda p=p, one=one: one(p) for p in range(max(processes) + 1)])  # type: ignore[misc]
