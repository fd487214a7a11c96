"""Orders and registers of pipelines: the known shapes, and that every layout gets a net that finishes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from laminar.errors import NetError
from laminar.ir.net import Net
from laminar.lower.stages.deadlock import check_net
from laminar.lower.stages.pipeline_net import Layout, Stage, StageEdge, StageLoader, chain
from laminar.lower.stages.schedules import SCHEDULE_ORDERS, Item, by_priority, dag_net
from tests.support.net_machine import Machine, random_layout, random_schedule


def oldest_first(layout: Layout, item: Item) -> tuple[int, ...]:
    """The micro-batch that has been under way longest, gradients before activations."""
    part, s, k = item
    return (part == "W", k, "BFW".index(part), layout.depth[s])


def line(stages: int, micro_batches: int, apart: bool = False, virtual: int = 1, **stage: bool) -> Layout:
    """A chain over as many places as there are stages of one round."""
    made = [Stage(place=s % stages, stash_bytes=1, **stage) for s in range(stages * virtual)]
    return chain(made, micro_batches, apart=apart)


def written(net: Net, place: int) -> str:
    """The order of a place on one line."""
    return " ".join(f"{name}.{k}" for name, k in net.orders[place])


def registers(net: Net) -> dict[str, int]:
    """Queue -> registers."""
    return {q.name: q.registers for q in net.queues}


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    """And stashes every micro-batch."""
    net = dag_net(line(2, 3), schedule="gpipe")
    assert written(net, 0) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 R0.0 O0.0"
    assert registers(net)["F0->B0"] == registers(net)["F1->B1"] == 3


def test_one_f_one_b_is_the_familiar_order() -> None:
    """Depth many forwards, then in turns, then what is left of the backwards."""
    net = dag_net(line(3, 4))
    assert written(net, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 R0.0 O0.0"
    assert written(net, 1) == "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3 R1.0 O1.0"
    assert written(net, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 R2.0 O2.0"


@pytest.mark.parametrize("stages, micro_batches", [(2, 8), (4, 8), (8, 4), (5, 5)])
def test_stage_s_of_a_chain_stashes_depth_many_under_one_f_one_b(stages: int, micro_batches: int) -> None:
    """S - s registers at stage s, and never more than there are micro-batches."""
    counts = registers(dag_net(line(stages, micro_batches)))
    assert [counts[f"F{s}->B{s}"] for s in range(stages)] == [min(stages - s, micro_batches) for s in range(stages)]


def test_a_larger_stash_lets_forwards_run_further_ahead() -> None:
    """The order fills the stash it is given."""
    net = dag_net(line(2, 6), stash=2)
    assert written(net, 1).startswith("F1.0 F1.1 B1.0 F1.2 B1.1")
    assert written(net, 0).startswith("F0.0 F0.1 F0.2 F0.3 B0.0 F0.4")
    assert registers(net)["F0->B0"] == 4 and registers(net)["F1->B1"] == 2 and registers(net)["F0->F1"] == 4


def test_interleaved_runs_rounds_of_micro_batches_through_the_stages_of_a_place() -> None:
    """Two places, two stages each: the second stage of a place follows after one round of the first."""
    net = dag_net(line(2, 4, virtual=2), schedule="interleaved")
    assert written(net, 0).startswith("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0")
    assert written(net, 1).startswith("F1.0 F1.1 F3.0 B3.0 F3.1 B3.1")
    with pytest.raises(NetError, match="not interleaved"):
        dag_net(chain([Stage(place=0), Stage(place=0), Stage(place=1)], 2), schedule="interleaved")


def test_zero_bubble_delays_weight_parts_but_stashes_no_more_than_one_f_one_b() -> None:
    """Input parts come first wherever they can; what waits for a weight part counts as stashed."""
    net = dag_net(line(4, 8, apart=True), schedule="zero-bubble")
    for s in range(4):
        order = [name[0] for name, _ in net.orders[s]]
        assert registers(net)[f"F{s}->W{s}"] <= 4 - s
        under_way = most = 0
        for part in order:
            under_way += (part == "F") - (part == "W")
            most = max(most, under_way)
        assert most <= 4 - s
    wide = dag_net(line(4, 8, apart=True), schedule="zero-bubble", stash=2)
    late = [written(wide, 3).split().index(f"W3.{k}") - written(wide, 3).split().index(f"I3.{k}") for k in range(8)]
    assert max(late) > 1
    with pytest.raises(NetError, match="apart"):
        dag_net(line(2, 2), schedule="zero-bubble")


def test_frozen_stages_have_no_weight_part_and_the_first_of_them_no_backward() -> None:
    """Gradients pass a frozen stage only on their way to one that is trained."""
    stages = [Stage(place=0, trained=False), Stage(place=1), Stage(place=2, trained=False)]
    layout = chain(stages, 3, apart=True)
    assert layout.differentiated == (False, True, True)
    net = dag_net(layout, schedule="zero-bubble")
    assert {a.name for a in net.actors} == {"F0", "F1", "I1", "W1", "R1", "O1", "F2", "I2"}
    assert written(net, 0) == "F0.0 F0.1 F0.2"
    assert check_net(net).finishes


def test_a_merged_last_stage_does_forward_and_backward_in_one_firing() -> None:
    """It needs no stash, and reads what comes from the stage before."""
    net = dag_net(chain([Stage(place=0), Stage(place=1, merged=True)], 4, [5]))
    assert written(net, 1) == "B1.0 B1.1 B1.2 B1.3 R1.0 O1.0"
    assert "F1->B1" not in registers(net)
    assert net.by_name["B1"].kind == "backward" and [q.name for q in net.reads["B1"]] == ["F0->F1", "O1->B1"]
    with pytest.raises(NetError, match="stage 0 is merged, but others read it"):
        chain([Stage(place=0, merged=True), Stage(place=1)], 2)


def test_rates_join_micro_batches_to_one_optimizer_step() -> None:
    """A reduction takes all sums at once; the optimizer fills the weights for all micro-batches of the next step."""
    net = dag_net(line(1, 5))
    sums = next(q for q in net.queues if q.name == "B0->R0")
    weights = next(q for q in net.queues if q.name == "O0->F0,B0")
    assert sums.taken("R0") == 5 and sums.gives == 1
    assert weights.gives == 5 and weights.filled == 5 and weights.taken("F0") == 1


def test_no_forward_reads_old_weights_in_any_interleaving() -> None:
    """A forward of the second step begins only when the optimizer of its stage has fired."""
    net = dag_net(line(3, 3), window=None, stash=2)
    for seed in range(40):
        rng = random.Random(seed)
        machine = Machine(net, 3)
        while True:
            moves = [(p, at) for p in range(3) for at in machine.entries(p)]
            if not moves:
                break
            place, at = rng.choice(moves)
            machine.begin(place, at)
            name, _ = machine.end(place)
            if name[0] in "FB":
                assert (machine.fired[name] - 1) // 3 == machine.fired[f"O{name[1:]}"]
        assert machine.finished


def test_branches_are_as_deep_as_where_they_join() -> None:
    """Two towers of different length that meet: the short one is one deeper than the join."""
    stages = tuple(Stage(place=s) for s in range(5))
    edges = (StageEdge(0, 1, 4), StageEdge(1, 3, 4), StageEdge(2, 3, 4), StageEdge(3, 4, 4), StageEdge(0, 4, 4))
    layout = Layout(stages=stages, edges=edges, places=5, micro_batches=6)
    assert layout.depth == (4, 3, 3, 2, 1)
    counts = registers(dag_net(layout))
    assert [counts[f"F{s}->B{s}"] for s in range(5)] == [4, 3, 3, 2, 1]
    assert counts["F0->F4"] >= 4  # a skip is held while the trunk catches up
    assert check_net(dag_net(layout)).finishes


def test_labels_that_skip_stages_have_no_gradient() -> None:
    """An edge without gradient bytes has no queue back."""
    edges = (StageEdge(0, 1, 4), StageEdge(1, 2, 4), StageEdge(0, 2, 1, 0))
    layout = Layout(stages=tuple(Stage(place=s) for s in range(3)), edges=edges, places=3, micro_batches=4)
    names = registers(dag_net(layout))
    assert "F0->F2" in names and "B2->B0" not in names and "B2->B1" in names


def test_loaders_savers_and_a_common_decision_are_part_of_the_net() -> None:
    """A loader beside the pipe, one at the place of a stage, a saver, and optimizers that wait for all reductions."""
    loads = (StageLoader(place=2, stages=(0,), depth=3), StageLoader(place=1, stages=(1,), bytes=8))
    stages = (Stage(place=0), Stage(place=1))
    layout = Layout(
        stages=stages, edges=(StageEdge(0, 1, 4),), places=3, micro_batches=3, loads=loads, saves=(1,), decide=True
    )
    net = dag_net(layout)
    assert written(net, 2) == "load0.0 load0.1 load0.2"
    assert written(net, 1) == "load1.0 F1.0 B1.0 load1.1 F1.1 B1.1 load1.2 F1.2 B1.2 R1.0 O1.0 save1.0"
    assert registers(net)["load0->F0"] == 3
    assert {q.name for q in net.reads["O0"]} == {"R0->O0", "R1->all"}
    assert check_net(net).finishes


def test_tied_weights_are_updated_from_the_sums_of_both_stages() -> None:
    """An embedding used at both ends: each optimizer waits for both reductions, and the net still finishes."""
    stages = tuple(Stage(place=s) for s in range(3))
    edges = (StageEdge(0, 1, 4), StageEdge(1, 2, 4))
    layout = Layout(stages=stages, edges=edges, places=3, micro_batches=4, tied=(StageEdge(0, 2, 64),))
    net = dag_net(layout)
    assert {q.producer for q in net.reads["O0"]} == {q.producer for q in net.reads["O2"]} == {"R0", "R2"}
    assert check_net(net).finishes
    frozen = (*stages[:2], Stage(place=2, trained=False))
    with pytest.raises(NetError, match="stages 0 and 2 can't be tied"):
        Layout(stages=frozen, edges=edges, places=3, micro_batches=4, tied=(StageEdge(0, 2, 64),))


@pytest.mark.parametrize("seed", range(300))
def test_every_layout_and_schedule_gives_a_net_that_finishes(seed: int) -> None:
    """Chains, virtual stages, branches, several stages at a place, frozen and merged ones, loaders: kept to the letter
    or with any window, with any stash; the counts of registers suffice."""
    rng = random.Random(seed)
    layout = random_layout(rng)
    schedule = random_schedule(rng, layout)
    for window in (0, rng.choice([1, 2, 5]), None):
        net = dag_net(layout, schedule=schedule, stash=rng.choice([1, 1.5, 2, 3]), window=window)
        assert check_net(net).finishes, f"{schedule}\n{net}"
    for free in ("backward-first", by_priority(layout, oldest_first)):
        assert check_net(dag_net(layout, schedule=free, window=None)).finishes


def test_registers_can_be_set_by_name_and_unknown_names_are_refused() -> None:
    """The caller who knows better is heard; a typing error is not."""
    assert registers(dag_net(line(2, 4), registers={"F0->F1": 3}))["F0->F1"] == 3
    with pytest.raises(NetError, match=r"no queue is called F0->F9"):
        dag_net(line(2, 4), registers={"F0->F9": 3})
    with pytest.raises(NetError, match="no schedule is called 'waltz'"):
        dag_net(line(2, 4), schedule="waltz")


@pytest.mark.parametrize("schedule", sorted(SCHEDULE_ORDERS))
def test_orders_keep_each_micro_batch_in_order(schedule: str) -> None:
    """At a place forward comes before backward, and that before the weight part, except in lists of priorities."""
    net = dag_net(line(3, 6, apart=True, virtual=2), schedule=schedule, window=None)
    spots = {firing: at for order in net.orders for at, firing in enumerate(order)}
    for s in range(6):
        for k in range(6):
            parts = [spots[f"{part}{s}", k] for part in "FIW"]
            assert schedule == "backward-first" or all(a < b for a, b in pairwise(parts))
        assert spots[f"W{s}", 5] < spots[f"R{s}", 0] < spots[f"O{s}", 0]
