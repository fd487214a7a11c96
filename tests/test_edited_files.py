"""Files that somebody has edited: refused by name, with the place in the file, or right.

Plans, graphs, programs, clusters and timelines are JSON, and people change them: by hand, by merging, by a script that
half works. So thousands of random edits are made (`tests/support/spoiled_json.py`), and each file is loaded and used
as the commands use it. Whatever is not refused as a `LaminarError` must still give the numbers of one device.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.cost.ops.families import measured_traits
from laminar.errors import ClusterError, LaminarError, PlanError, TimelineError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.staged import Staged, plan_of
from laminar.ir.program import Program
from laminar.ir.timeline import Timeline
from laminar.placement.random_plan import random_plan
from laminar.runtime.check.verify import verify_program
from laminar.staging.stage_plans import pipeline
from tests.support.seeds import dice, first
from tests.support.spoiled_json import mutated
from tests.support.staged_errors import worst
from tests.support.zoo import specimen

NAME = "mlp.py:tiny"
FEW, MANY = 150, 3000
PROFILE = Path(__file__).parents[1] / "bench" / "results" / "profile_2.json"


@cache
def cluster() -> Cluster:
    return Cluster.preset("8xh100")


@cache
def plan() -> Any:
    return laminar.plans.tensor_parallel(specimen(NAME).graph, Mesh({"dp": 2, "tp": 2}))


@cache
def program() -> Program:
    return laminar.lower(specimen(NAME).graph, plan())


def use_plan(data: Any) -> None:
    one, found = specimen(NAME), plan_of(data)
    found.explain(price=2.0)
    predict(one.graph, found, cluster())
    report = verify_program(one.graph, found, [one.inputs])
    assert report.ok, str(report)


def use_staged(data: Any) -> None:
    one, found = specimen(NAME, "f64"), plan_of(data)
    found.explain()
    found.fits(one.graph)
    assert worst(one, found) <= 1e-9


def use_graph(data: Any) -> None:
    found = Graph.from_json(data)
    assert str(found)
    laminar.plans.data_parallel(found, Mesh({"dp": 2}))


def use_cluster(data: Any) -> None:
    predict(specimen(NAME).graph, plan(), Cluster.from_json(data))


def use_profile(data: Any) -> None:
    plan = laminar.plans.data_parallel(specimen(NAME).graph, Mesh({"dp": 2}))
    assert predict(specimen(NAME).graph, plan, Cluster.from_json(data)).seconds > 0


def use_mixed(data: Any) -> None:
    found = Cluster.from_json(data)
    assert str(found) and found.hash
    plan = laminar.plans.pipeline(specimen(NAME).graph, 2, 2, inner=Mesh({"dp": 4}))
    assert predict_staged(specimen(NAME).graph, plan, found).seconds > 0


def use_program(data: Any) -> None:
    found = Program.from_json(data)
    runs, wanted = ([replace(i, where="", module="") for i in p.instrs] for p in (found, program()))
    assert str(found) and runs == wanted and replace(found, instrs=()) == replace(program(), instrs=())


def use_timeline(data: Any) -> None:
    found = Timeline.from_json(data)
    assert str(found) and json.dumps(found.to_chrome())


def staged() -> Staged:
    inner = [partial(random_plan, mesh=Mesh({"a": 2}), seed=1)] * 2
    return pipeline(specimen(NAME, "f64").graph, 2, 2, 1, inner, couple="microbatch")


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "plan": (lambda: plan().to_json(), use_plan),
    "staged plan": (lambda: staged().to_json(), use_staged),
    "graph": (lambda: specimen(NAME).graph.to_json(), use_graph),
    "profile": (lambda: Cluster.load(PROFILE).to_json(), use_profile),
    "mixed cluster": (lambda: Cluster.preset("4xh100+4xa100").to_json(), use_mixed),
    "cluster": (lambda: cluster().to_json(), use_cluster),
    "program": (lambda: program().to_json(), use_program),
    "timeline": (lambda: predict(specimen(NAME).graph, plan(), cluster()).timeline.to_json(), use_timeline),
}


def tried(kind: str, seeds: range) -> tuple[int, int]:
    """How many edits were refused and how many taken; anything else fails, with the edit that did it."""
    make, use = KINDS[kind]
    whole = json.loads(json.dumps(make()))
    use(whole)
    refused = 0
    for seed in seeds:
        data, said = mutated(whole, random.Random(seed))
        try:
            use(data)
        except LaminarError as error:
            refused += 1
            assert str(error).strip()
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}: {said}")
            raise
    return refused, len(seeds) - refused


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_file_is_refused_by_name_or_right(kind: str) -> None:
    """No KeyError from within, and no other numbers."""
    refused, taken = tried(kind, range(FEW))
    assert refused > FEW // 4 and taken > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_edited_files_are_refused_by_name_or_right(kind: str) -> None:
    """Fresh edits in every run."""
    tried(kind, range(first(FEW), first(FEW) + MANY))


def edited(change: Callable[[Any], None]) -> str:
    """What is said about a plan after an edit."""
    data = json.loads(json.dumps(plan().to_json()))
    change(data)
    with pytest.raises(PlanError) as caught:
        use_plan(data)
    return str(caught.value)


def test_the_place_in_the_file_is_named() -> None:
    """Somebody has edited one line of ten thousand: which one?"""
    name = next(iter(plan().ops))
    assert f"ops.{name}[0][0]: 'S(x)' is not a placement" in edited(
        lambda d: d["ops"][name][0].__setitem__(0, "S(x)|B")
    )
    assert f"ops.{name}[1][0]: 'B' places on 1 axes, the mesh has 2" in edited(
        lambda d: d["ops"][name][1].__setitem__(0, "B")
    )
    assert f"ops.{name}: 1 items, not 2" in edited(lambda d: d["ops"][name].pop())
    assert "no field 'inputs'" in edited(lambda d: d.pop("inputs"))
    assert "name: 3, not a text" in edited(lambda d: d.update(name=3))
    assert "account: a list, not an object" in edited(lambda d: d.update(account=[]))
    assert "account: no field 'solver'" in edited(lambda d: d["account"].pop("solver"))
    assert "gather_once: 'yes', not true or false" in edited(lambda d: d.update(gather_once="yes"))
    assert "does not place output loss:loss" in edited(lambda d: d["outputs"].pop("loss:loss"))


def test_an_op_with_too_few_placements_is_named() -> None:
    """It loads: only the graph knows how many there should be."""
    name = next(n for n, c in plan().ops.items() if len(c.ins) > 1)
    said = edited(lambda d: d["ops"][name][0].pop())
    assert f"that %{name} reads" in said and "allowed" in said


def test_a_stage_that_does_not_place_its_loss_is_named() -> None:
    """Stages have plans of their own, which are looked at before anything is made of them."""
    data = json.loads(json.dumps(staged().to_json()))
    data["stages"][-1]["plan"]["outputs"].pop("loss:loss")
    with pytest.raises(PlanError, match="does not place output loss:loss"):
        use_staged(data)


def test_a_rate_that_is_no_number_is_named() -> None:
    """Before rates are put in order, which a text and a number can't be."""
    data = json.loads(json.dumps(cluster().to_json()))
    family = next(iter(data["device"]["efficiency"]))
    data["device"]["efficiency"][family][0][0] = "fast"
    with pytest.raises(ClusterError, match=rf"efficiency\[{family}\].*is not a point"):
        use_cluster(data)
    data["device"]["efficiency"][family] = 0.5
    with pytest.raises(ClusterError, match=rf"efficiency\[{family}\].*is not a curve"):
        use_cluster(data)


@pytest.mark.parametrize("reason", [-2, 10**6])
def test_a_reason_that_is_no_span_is_named(reason: int) -> None:
    """Too large it would be an IndexError, below nothing another span's."""
    data = json.loads(json.dumps(predict(specimen(NAME).graph, plan(), cluster()).timeline.to_json()))
    data["spans"]["because"][7] = reason
    with pytest.raises(TimelineError, match=rf"spans\.because\[7\]: {reason}, not the number of a span"):
        use_timeline(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["collectives"][3].pop("seconds"), r"profile\.collectives\[3\]: no field 'seconds'"),
        (
            lambda p: p["collectives"][3].update(seconds=-1.0),
            r"profile\.collectives\[3\]\.seconds: -1\.0, not a number",
        ),
        (lambda p: p["collectives"][3].update(level="moon"), r"profile\.collectives\[3\]\.level: 'moon'"),
        (lambda p: p["overlap"][0].update(compute_left="much"), r"profile\.overlap\[0\]\.compute_left: 'much'"),
        (lambda p: next(iter(p["calibration"].values()))["extra_s"].update(lines=-1e-6), r"extra_s\.lines: -1e-06"),
        (lambda p: p.update(calibration=[]), r"profile\.calibration: a list, not an object"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(change: Callable[[Any], None], said: str) -> None:
    """One number of thousands, and everything that is priced with it would be nonsense."""
    data = json.loads(PROFILE.read_text())
    change(data["profile"])
    with pytest.raises(ClusterError, match=said):
        use_profile(data)


def test_the_name_of_a_measured_op_is_an_op_or_refused() -> None:
    """Names in a profile are calls written down: any letter of them may be another one, or none."""
    keys = [key for section in Cluster.load(PROFILE).to_json()["profile"]["ops"].values() for key in section["ops"]]
    letters = sorted({letter for key in keys for letter in key})
    rng, refused = dice("measured ops"), 0
    for _ in range(3000):
        key = rng.choice(keys)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(key) + 1)
            cut = rng.choice((0, 1, 1, len(key) // 3))
            key = key[:at] + rng.choice(("", rng.choice(letters))) + key[at + cut :]
        try:
            assert measured_traits(key).family
        except LaminarError as error:
            refused += 1
            assert "is not the key of a measured op" in str(error), key
    assert refused > 300
    for key in ("", "batch.0", "aten.mm", "aten.mm()", "aten.mm(f32[2,3])->f32[2,3]", "aten.add.Tensor(f32[2],f32[2])"):
        with pytest.raises(LaminarError, match="is not the key of a measured op"):
            measured_traits(key)
