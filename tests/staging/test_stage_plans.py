"""Staged plans: whatever the stages, their ranks and their inner plans, the numbers are those of one device."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.errors import PlanError
from laminar.ir.mesh import Mesh
from laminar.ir.plans.staged import Staged
from laminar.lower.stages.split_stages import light_ops
from laminar.lower.stages.stage_net import piped
from laminar.lower.stages.stage_programs import KEPT, stages
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.in_process.loopback import TRANSPORTS
from laminar.staging.balance import CUT_SLACK, balanced, work_s
from laminar.staging.stage_plans import arranged, inner_plan, pipeline
from tests.support.seeds import dice
from tests.support.staged_errors import worst
from tests.support.zoo import MOST, NAMES, Specimen, captured, specimen, wide

MESHES = ({"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2})


def drawn(one: Specimen, rng: random.Random, stages: int | dict[str, int] | None = None) -> Staged:
    """A staged plan of which nothing is sensible."""
    count = rng.choice((1, 2, 3, 4)) if stages is None else stages
    places = count if isinstance(count, int) else len({*count.values()})
    virtual = rng.choice((1, 1, 2)) if stages is None and places < 4 else 1
    graph = one.graph
    inners = [partial(random_plan, mesh=Mesh(rng.choice(MESHES)), seed=rng.randrange(10**6)) for _ in range(places)]
    paths = sorted({n.module for n in graph.nodes if n.module and n.phase == "forward"})
    again = rng.sample(paths, min(len(paths), rng.choice((0, 1, 2, 5))))
    again = [p for p in again if not any(p != q and p.startswith(f"{q}.") for q in again)]
    how = {"window": rng.choice((0, 0, 1, None)), "stash": rng.choice((1.0, 2.0)), "apart": rng.random() < 0.5}
    return pipeline(graph, count, 2, virtual, inners, couple="microbatch", recompute=again, **how)


def check(one: Specimen, rng: random.Random, stages: int | dict[str, int] | None = None) -> Staged:
    """One random staged plan, in one of the ways ranks exchange."""
    staged = drawn(one, rng, stages)
    assert worst(one, staged, rng.choice(TRANSPORTS)) <= 1e-9, staged.explain()
    assert Staged.from_json(staged.to_json()).hash == staged.hash
    return staged


@pytest.mark.parametrize("name", MOST)
def test_random_staged_plans_give_the_numbers_of_one_device(name: str) -> None:
    """Stages, virtual stages, places of different sizes, random placements inside, backward in one part or two,
    values that are recomputed: through the actors, registers, edges and exchanges that real ranks have."""
    one = specimen(name, "f64")
    rng = random.Random(f"staged {name}")
    for _ in range(8 if len(one.graph.nodes) < 100 else 3 if len(one.graph.nodes) < 250 else 2):
        check(one, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_more_random_staged_plans_give_the_numbers_of_one_device(name: str) -> None:
    """The same, fresh ones in every run."""
    rng = dice(f"more staged {name}")
    for _ in range(12):
        check(specimen(name, "f64"), rng)


def test_parts_leave_each_other_what_they_take() -> None:
    """Written, not run, so there can be many: what forward sends is made by forward, from nothing that backward makes,
    and a value that is sent and kept too has two names where it lies in two ways."""
    one, rng, twice = specimen("moe.py:tiny", "f64"), random.Random("more staged moe.py:tiny 1794850662"), 0
    for number in range(60):
        if number >= 8 and twice:
            break
        made = stages(one.graph, drawn(one, rng))
        for own in made.parts:
            there = {i.name for part in own for i in part.program.inputs if i.kind == "given"}
            for part in own:
                assert part.takes <= there, f"{part.name} takes {part.takes - there}"
                outs = [(o.name, o.ref) for o in part.program.outputs if o.kind in ("sent", KEPT)]
                assert len({name for name, _ in outs}) == len(set(outs)), part.name
                twice += any(name.endswith("_kept") for name, _ in outs)
                there |= part.gives
        for edge in (wire.edge for wire in made.wires if wire.edge.phase == "forward"):
            forward = made.parts[edge.src][0].program
            assert edge.name in {o.name for o in forward.outputs if o.kind == "sent"}, edge
    assert twice


class Fork(nn.Module):
    """Towers side by side, of which one reads another, and a head that reads them all."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))
        self.late = nn.Linear(6, 6)
        self.head = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (tower(x) for tower in self.towers)
        return self.head(torch.cat([a, self.late(a + b), c.tanh()], 1))


def forked() -> Specimen:
    """The towers captured, in float64."""
    torch.manual_seed(0)
    data = torch.randn(8, 6), torch.randint(0, 5, (8,))
    made = laminar.Recipe(Fork, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), lambda: [data])
    return wide(captured(made, "fork"))


def test_random_branches_give_the_numbers_of_one_device() -> None:
    """Stages that form no chain: towers that run side by side, skip places, or stand where others do."""
    one, rng = forked(), dice("branches")
    made = set()
    for _ in range(12):
        towers = {f"towers.{i}": rng.randrange(3) for i in range(3)}
        join = max(towers["towers.0"], towers["towers.1"])
        of = {**towers, "late": rng.randint(join, 3), "head": 3}
        number = {s: i for i, s in enumerate(sorted({*of.values()}))}
        staged = check(one, rng, {k: number[s] for k, s in of.items()})
        made |= {(len(staged.stages), bool(s.plan.recompute)) for s in staged.stages}
    assert {n for n, _ in made} >= {2, 3, 4} and any(again for _, again in made)


class Loop(nn.Module):
    """Three products with weights of one module, kept in different ways."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        ws = [nn.Parameter(torch.randn((8, 8, 3) if kept == "kernels" else (64, 64)) / 8) for _ in range(3)]
        if kept == "attributes":
            self.a, self.b, self.c = ws
            self.d, self.e, self.f = (nn.Parameter(torch.randn(64)) for _ in range(3))
        elif kept == "stack":
            self.ws = nn.Parameter(torch.stack(ws))
        else:
            self.ws = nn.ParameterDict(dict(zip("abc", ws, strict=True))) if kept == "dict" else nn.ParameterList(ws)

    def forward(self, x: Tensor) -> Tensor:
        if self.kept == "attributes":
            for w, b in ((self.a, self.d), (self.b, self.e), (self.c, self.f)):
                x = F.linear(x, w, b).relu()
            return x
        for w in self.ws.values() if self.kept == "dict" else self.ws:
            x = F.conv1d(x.view(-1, 8, 8), w, padding=1).relu() if self.kept == "kernels" else (x @ w).relu()
        return x


def looped(kept: str) -> Specimen:
    """Such a module captured."""
    torch.manual_seed(0)
    made = laminar.Recipe(lambda: Loop(kept), lambda model, x: model(x).square().mean(), lambda: [torch.randn(16, 64)])
    return captured(made, kept)


LOOPS = ("list", "dict", "attributes", "stack", "kernels")


@pytest.mark.parametrize("kept", LOOPS)
def test_stages_cut_between_products_of_one_module(kept: str) -> None:
    """A stage may end between two of them, wherever their weights are kept, and the numbers stay."""
    one = looped(kept)
    products = ("aten.mm", "aten.addmm", "aten.convolution")
    heavy = [n.name for n in one.graph.nodes if n.phase == "forward" and n.op in products]
    assert len(heavy) == 3
    for count in (2, 3):
        of = balanced(one.graph, count)
        assert len({of[n] for n in heavy}) > 1, of
        check(wide(one), random.Random(f"{kept} {count}"), count)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["mlp.py:tiny", "lstm.py:tiny", *LOOPS])
def test_stages_are_balanced(name: str, stages: int) -> None:
    """No choice of cuts has a slowest stage that is faster by more than the slack; brute force over all of them."""
    graph = (looped(name) if name in LOOPS else specimen(name)).graph
    light = light_ops(graph)
    ops = [n.name for n in graph.nodes if n.phase == "forward" and n.name not in light]
    seconds = work_s(graph)

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(ops)]
        return max(sum(seconds[n] for n in ops[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(ops)), stages - 1))
    of = balanced(graph, stages)
    found = [sum(seconds[n] for n in ops if of[n] == s) for s in range(stages)]
    assert max(found) <= CUT_SLACK * best + 1e-15
    assert [of[n] for n in ops] == sorted(of[n] for n in ops) and set(of.values()) == set(range(stages))


def test_stages_that_are_numbered_against_their_order_are_refused_by_name() -> None:
    """Whoever writes a plan by hand, or edits its file, may count from the end."""
    graph = specimen("mlp.py:tiny").graph
    whole = inner_plan(graph, None)
    of = {name: 1 - stage for name, stage in pipeline(graph, 2, 1).of.items()}
    turned = arranged(graph, of, [0, 1], [whole, whole], 1)
    with pytest.raises(PlanError, match=r"stage 0 reads %\w+ in forward, which stage 1 makes"):
        piped(stages(graph, turned))
