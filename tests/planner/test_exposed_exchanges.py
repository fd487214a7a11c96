"""Exchanges that a step waits for: the inequality behind them, which ones they are, and that the bound counts them."""

from __future__ import annotations

import random

import gpt
import pytest
import torch
import torch.nn.functional as F

import laminar
from laminar.cost.sim.simulate import simulate
from laminar.cost.sim.tasks import FULL_SPEED, Drag, Lane, Load, Task
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.placement import presets
from laminar.planner.bounds import piece_bound as leasts
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.exposed_exchanges import Exposed
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request

LANES = (Lane(0, "compute"), Lane(0, "communication:tp"), Lane(0, "communication:dp"))


def step(works: list[int], moved: list[tuple[int, int, int, int]], drag: Drag) -> int:
    """Ticks of a rank's lines and exchanges: (level, ticks, line that it waits for or -1, line that waits for it)."""
    tasks: list[Task] = []
    ends: dict[int, list[int]] = {}
    at: dict[int, int] = {}
    for k, work in enumerate(works):
        for n, (level, ticks, behind, before) in enumerate(moved):
            if behind == k - 1:
                tasks.append(Task(f"x{n}", (1 + level,), ticks, (at[k - 1],) if k else (), (level,)))
                ends.setdefault(before, []).append(len(tasks) - 1)
        at[k] = len(tasks)
        tasks.append(Task(f"w{k}", (0,), work, tuple(ends.get(k, ()))))
    return simulate(Load(LANES, tuple(tasks), 2, drag)).step


def proved(works: list[int], moved: list[tuple[int, int, int, int]], drag: Drag, mean: float, whole: bool) -> float:
    """What is claimed: every exchange by its level's share, and those that the next line waits for besides.

    `whole`: these in full instead, as if exchanges of the other level could not use the time.
    """
    hidden = min(1.0, (1 - drag.compute / FULL_SPEED) / (drag.transfer / FULL_SPEED))
    share = (mean, 1 - mean)
    total = float(sum(works))
    for level, ticks, behind, before in moved:
        waits = before == behind + 1
        total += ticks if waits and whole else hidden * share[level] * ticks + waits * (1 - hidden) * ticks
    return total


def drawn(rng: random.Random) -> tuple[list[int], list[tuple[int, int, int, int]], Drag, float]:
    """Lines, exchanges of which at most one between two lines is waited for by the second, and a mean."""
    works = [rng.choice([1, 50, 1000, 20_000]) * 10 for _ in range(rng.randint(1, 6))]
    moved = [
        (rng.randrange(2), rng.choice([10, 500, 30_000]), k - 1, k) for k in range(len(works)) if rng.random() < 0.6
    ]
    for _ in range(rng.randint(0, 4)):
        behind = rng.randint(-1, len(works) - 2)
        if behind + 2 < len(works):
            moved.append(
                (rng.randrange(2), rng.choice([10, 500, 30_000]), behind, rng.randint(behind + 2, len(works) - 1))
            )
    return works, moved, Drag.fractions(rng.choice([0.5, 0.9, 1.0]), rng.choice([0.6, 0.9, 1.0])), rng.random()


def test_no_step_is_shorter_than_its_work_its_exchanges_by_their_share_and_what_is_waited_for() -> None:
    """The inequality of `planner/bounds/exposed_exchanges.py`, against the simulator, on two levels of links."""
    rng, close = random.Random(5), 0
    for _ in range(2000):
        works, moved, drag, mean = drawn(rng)
        took, claimed = step(works, moved, drag), proved(works, moved, drag, mean, whole=False)
        assert took >= claimed * (1 - 1e-6) - len(works), (works, moved, drag, mean)
        close += took <= 1.01 * claimed
    assert close > 20  # it says something


def test_time_that_is_waited_is_not_lost_to_the_other_level() -> None:
    """Counting what is waited for in full and all other exchanges besides is refuted: they may use that time."""
    drag = Drag.fractions(0.9, 0.9)
    works, moved = [1000, 1000], [(0, 5000, -1, 0), (1, 5000, -1, 1)]
    took = step(works, moved, drag)
    assert took < proved(works, moved, drag, 0.5, whole=True)
    assert took >= proved(works, moved, drag, 0.5, whole=False)


class Tables(torch.nn.Module):
    """A table, a small one beside it, and products."""

    def __init__(self, width: int = 1024, vocabulary: int = 65536) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Embedding(64, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(64, device=ids.device))
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.fixture(scope="module")
def tables() -> Graph:
    with torch.device("meta"):
        model, ids = Tables(), torch.zeros((256, 64), dtype=torch.int64)
    return laminar.capture(model, lambda model, ids: model(ids), ids)


def test_the_first_op_waits_for_the_table_and_not_for_what_can_come_later(tables: Graph) -> None:
    """All work but the positions' comes from the table's rows."""
    found = Exposed(tables).first
    assert found is not None
    parameter, reader, beside = found
    assert parameter == "embed.weight" and tables.by_name[reader].op == "aten.embedding"
    assert all(n.module in ("position", "") for n in beside)


def test_exchanges_that_are_waited_for_follow_each_other(tables: Graph) -> None:
    """Of any two, the reader of one leads to the value of the other: else they might run at once."""
    exposed = Exposed(tables)
    names = {n.name: n for n in tables.nodes}

    def leads(one: str, other: str) -> bool:
        todo, seen = [other], set()
        while todo:
            here = todo.pop()
            if here == one:
                return True
            if here in names and here not in seen:
                seen.add(here)
                todo += [r.name for r in names[here].ins]
        return False

    found = list(exposed.values)
    assert len(found) > 3
    for k, (ref, reader) in enumerate(found):
        for other, by in found[:k]:
            assert leads(reader, other.name) or leads(by, ref.name)


def test_two_readers_of_one_value_do_not_both_wait_for_it() -> None:
    """What one has fetched serves the other: queries and keys that are views of the same rows."""

    class Same(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(512, 512, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x @ self.a
            return (h.view(64, 8, 512) @ h.view(64, 8, 512).transpose(1, 2)).square().mean()

    graph = laminar.capture(Same(), lambda model, x: model(x), torch.zeros(1, 512).expand(512, 512))
    values = [ref for ref, _ in Exposed(graph).values]
    assert len(values) == len(set(values))


@pytest.fixture(scope="module")
def deep() -> Graph:
    """A GPT of six layers in bf16, eight sequences of 1,024 tokens a device on eight."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(layers=6, d=1024, heads=16, vocab=50304, tokens=1024, batch=64)).to(torch.bfloat16)
        ids = torch.zeros((64, 1024), dtype=torch.int64)

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["target"].flatten())

    return laminar.capture(model, loss, {"ids": ids, "target": ids})


def test_the_bound_knows_that_the_first_op_waits(deep: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that it is lower, by what rows of a table in shards take to come together. ZeRO 3 is above it."""
    cluster, cell = Cluster.preset("8xh100"), Cell(1, 1, 1, 8, 1)
    model = Model(deep, Request(cluster))
    found = Bounds(model).of(cell).seconds
    plan = presets.zero(deep, Mesh({"dp": 8}), 3, gather_once=True)
    assert found < predict(deep, plan, cluster).seconds
    monkeypatch.setattr(leasts.Least, "_waiting", lambda self, seconds, beside: 0.0 * seconds)
    assert Bounds(model).of(cell).seconds < found - 5e-5
