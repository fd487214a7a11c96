"""Pipelines: a graph cut into stages of equal work, each stage spread over its own ranks.

Forward ops stand in the order of the program; a chain of stages is a choice of cuts. The cost of a stage is the work
of its ops, forward and backward (what it sends travels while it works); `balanced` finds the cuts whose slowest stage
is fastest, exactly, and among those that are nearly as good the ones that send least.

Inside a stage any plan for the whole graph serves: `inner` spreads the graph over one place's mesh, and each stage
keeps what concerns its own ops. A value that passes between stages lies as its maker leaves it, or, where that is
a sum still to be made, as its reader wants it.

Samples of one batch go through the pipe in parts. An op that couples samples (batch statistics, a softmax over the
batch) would compute something else then: such ops are found by splitting the batch over ranks and looking at what
has to be exchanged, and are refused by name unless the caller wants them to see one micro-batch at a time. So are ops
in backward that hang on the size of the loss: a hook that clamps gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from laminar.cost.work import FREE, op_s
from laminar.errors import PlanError
from laminar.ir.codec import Ref
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh, Place
from laminar.ir.patterns import as_patterns, known
from laminar.ir.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp
from laminar.ir.staged import Staged, StagePlan
from laminar.lower.lower import written
from laminar.lower.offload import refuse_stages
from laminar.lower.split import Split, light_ops, split
from laminar.rules.degrees import breaks
from laminar.rules.notation import call_of, calls_in
from laminar.rules.samples import samples_of
from laminar.rules.signing import blocks_in, options, probed_signatures
from laminar.rules.table import RULES
from laminar.search import presets
from laminar.turns import evened

Inner = Mesh | Plan | Callable[[Graph], Plan] | None
MEANS = ("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.mean", "aten.mean.dim", "aten.sum",
         "aten.sum.dim_IntList", "aten.mse_loss", "aten.div.Tensor")  # fmt: skip
"""Sums and means over samples, and a sum over its count, if they are numbers: a step's loss is the mean over its
micro-batches. Where counts differ (ignored labels), `laminar.Loss(total, weight)` is exact."""
LINEAR = FREE | {"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Scalar", "aten.div.Scalar", "aten.neg",
                 "aten._to_copy", "aten.clone"}  # fmt: skip
"""What may be done to such a mean on its way to the loss."""
PRODUCTS = ("aten.mm", "aten.bmm", "aten.mv")
"""What torch makes of a linear layer whose bias it adds apart."""
SLACK = 1.05
"""Cuts whose slowest stage is within this of the best are compared by what they send."""
KNOWN_SLACK = 1.01
"""The same where it is known what ops take."""


def pipeline(
    graph: Graph,
    stages: int | Sequence[str] | Mapping[str, int] = 2,
    microbatches: int = 4,
    virtual: int = 1,
    inner: Inner | Sequence[Inner] = None,
    schedule: str | None = None,
    window: int | None = 0,
    apart: bool | None = None,
    stash: float = 1.0,
    couple: str | None = None,
    registers: Mapping[str, int] | None = None,
    recompute: str | Sequence[str] = (),
    offload: str | Sequence[str] = (),
    speeds: Sequence[float | Mapping[str, float]] | None = None,
    by_place: bool = False,
) -> Staged:
    """A pipeline over the stages' ranks, one place after the other; `graph` is that of one micro-batch.

    `stages`: how many places, cut where work is balanced; or the modules at which later stages begin, in order
    (patterns); or for patterns of modules their stage, which may form any DAG. `virtual` stages per place take turns.
    `inner` spreads each stage: a mesh (data parallel, or tensor parallel if it has a `tp` axis), a plan for
    the whole graph, or a function that makes one; or one of these for each place. `schedule` is 1f1b, or interleaved
    with virtual stages; `window` is how far a place may leave the order, `stash` how many times as many micro-batches
    as the schedule needs may be under way. `couple="microbatch"` lets ops that couple samples see one micro-batch at
    a time. `recompute` names modules and values that backward makes again, besides those that inner plans name.
    `offload` is refused: what stages keep stays on the device. `speeds` says for each place how fast it is beside the
    others, or what each forward op with its backward takes there, in seconds: a faster place gets more of the work.
    `by_place` evens out what places take with all their virtual stages, not what stages do (`turns.py`).
    """
    if couple not in (None, "microbatch"):
        raise PlanError(f"couple={couple!r}", allowed='None  "microbatch"')
    if virtual < 1:
        raise PlanError(f"virtual={virtual}", allowed="a whole number of at least 1")
    if couple is None and microbatches > 1:
        refuse_coupled(graph)
    schedule = schedule or ("interleaved" if virtual > 1 else "1f1b")
    of, count = _assigned(graph, stages, virtual, speeds, microbatches if by_place else 0)
    places = count // virtual
    inners: list[Any] = list(inner) if isinstance(inner, Sequence) else [inner] * places
    if len(inners) != places:
        raise PlanError(f"{len(inners)} inner plans for {places} places")
    found: dict[int, Plan] = {}
    for one in inners:
        if id(one) not in found:
            found[id(one)] = inner_plan(graph, one)
    plans = [found[id(one)] for one in inners]
    for plan in plans:
        refuse_stages(replace(plan, offload=(*plan.offload, *as_patterns(offload))))
    if recompute:
        plans = [presets.again(graph, p, (*p.recompute, *as_patterns(recompute))) for p in plans]
    made = arranged(graph, of, [s % places for s in range(count)], plans, microbatches)
    return replace(
        made,
        schedule=schedule,
        window=window,
        apart=schedule == "zero-bubble" if apart is None else apart,
        stash=stash,
        registers=dict(registers or {}),
        coupled=couple is not None,
        name=f"pipeline({count})",
    )


def arranged(
    graph: Graph, of: Mapping[str, int], at: Sequence[int], plans: Sequence[Plan], microbatches: int
) -> Staged:
    """Stages at places: `of` has the stage of each forward op, `at` the place of each stage, `plans` one per place.

    Places lie one after the other. Stages may form any DAG whose edges lead to higher numbers.
    """
    cut = split(graph, of, len(at))
    sets, first = [], 0
    for plan in plans:
        sets.append(Place(tuple(range(first, first + plan.mesh.ranks)), plan.mesh))
        first += plan.mesh.ranks
    each = [plans[p] for p in at]
    return Staged(
        graph_hash=graph.hash,
        places=tuple(sets),
        stages=tuple(StagePlan(p, stage_plan(graph, cut, s, each)) for s, p in enumerate(at)),
        of={n: s for n, s in cut.of.items() if graph.by_name[n].phase == "forward"},
        micro_batches=microbatches,
        account=_account(graph, cut),
    )


def inner_plan(graph: Graph, inner: Inner) -> Plan:
    """The plan of the whole graph on the mesh of one place."""
    if inner is None:
        return presets.data_parallel(graph, Mesh({"dp": 1}))
    if isinstance(inner, Mesh):
        return (presets.tensor_parallel if "tp" in inner.names else presets.data_parallel)(graph, inner)
    if isinstance(inner, Plan):
        inner.fits(graph)
        return inner
    return inner(graph)


def _assigned(
    graph: Graph, stages: Any, virtual: int, speeds: Any = None, microbatches: int = 0
) -> tuple[dict[str, int], int]:
    """The stage of each forward op, and how many there are."""
    if isinstance(stages, int):
        if stages < 1:
            raise PlanError(f"a pipeline of {stages} stages", allowed="at least 1")
        work = _work(graph, speeds, stages) if speeds else [work_s(graph)] * stages if microbatches else None
        return balanced(graph, stages * virtual, work, microbatches), stages * virtual
    if speeds is not None:
        raise PlanError("speeds with stages that are named", next="say how many stages there are, or leave out speeds")
    if microbatches:
        raise PlanError("by_place with stages that are named", next="say how many stages there are")
    if isinstance(stages, Mapping):
        return _by_pattern(graph, stages), (1 + max(stages.values())) * 1
    return _beginning_at(graph, list(stages)), len(stages) + 1


def _beginning_at(graph: Graph, patterns: list[str]) -> dict[str, int]:
    """Later stages begin at the first op of the modules named."""
    out, stage = {}, 0
    for node in graph.nodes:
        if node.phase == "forward":
            if stage < len(patterns) and re.match(patterns[stage], node.module):
                stage += 1
            out[node.name] = stage
    if stage < len(patterns):
        raise PlanError(f"no module after stage {stage}'s matches {patterns[stage]!r}", allowed=_modules(graph))
    return out


def _by_pattern(graph: Graph, patterns: Mapping[str, int]) -> dict[str, int]:
    """Ops of modules named go where they are told; others to the latest stage that they read from, or read them."""
    used: set[str] = set()
    out: dict[str, int] = {}
    ops = [n for n in graph.nodes if n.phase == "forward"]
    for node in ops:
        for pattern, stage in patterns.items():
            if re.match(pattern, node.module):
                out[node.name] = stage
                used.add(pattern)
                break
    for pattern in patterns:
        if pattern not in used:
            raise PlanError(f"no module matches {pattern!r}", allowed=_modules(graph))
    for node in ops:
        if node.name not in out:
            before = [out[r.name] for r in node.ins if r.name in out]
            if before:
                out[node.name] = max(before)
    for node in reversed(ops):
        after = [out[u.name] for i in range(len(node.outs)) for u in graph.users.get(Ref(node.name, i), ())
                 if u.name in out]  # fmt: skip
        out.setdefault(node.name, min(after, default=0))
    return out


def _modules(graph: Graph) -> str:
    names = dict.fromkeys(n.module for n in graph.nodes if n.phase == "forward" and n.module)
    return ", ".join(list(names)[:12]) + (", ..." if len(names) > 12 else "")


# --- balance


def work_s(graph: Graph) -> dict[str, float]:
    """Seconds of each forward op with its backward ops, by a roofline on an assumed machine."""
    out: dict[str, float] = {}
    calls = calls_in(graph)
    for node in graph.nodes:
        if node.phase == "forward":
            once = op_s(calls[node.name])
            trained = node.op not in FREE and any(r.name in out or graph.specs[r].is_float for r in node.ins)
            out[node.name] = once * (3.0 if trained else 1.0)
    return out


def _work(graph: Graph, speeds: Sequence[float | Mapping[str, float]], places: int) -> list[Mapping[str, float]]:
    """For each place, the seconds of each forward op with its backward ops."""
    if len(speeds) != places:
        raise PlanError(f"{len(speeds)} speeds for {places} places", next="say one for each place")
    assumed = work_s(graph)
    out: list[Mapping[str, float]] = []
    for p, speed in enumerate(speeds):
        if isinstance(speed, Mapping):
            missing = [n for n in assumed if n not in speed]
            if missing:
                raise PlanError(f"speeds[{p}] has no seconds for op %{missing[0]}", also=f"{len(missing) - 1} more")
            out.append(speed)
        elif not speed > 0:
            raise PlanError(f"speeds[{p}] is {speed}", allowed="a number above 0, or seconds by op")
        else:
            out.append({name: seconds / speed for name, seconds in assumed.items()})
    return out


def balanced(
    graph: Graph, stages: int, work: Sequence[Mapping[str, float]] | None = None, microbatches: int = 0
) -> dict[str, int]:
    """Cuts of the forward ops, in order, whose slowest stage is fastest; of nearly equal ones those that send least.

    `work` has the seconds of each op at each place; stages take turns on places. Unless given, places are equal. With
    `microbatches`, stages that take turns are evened out by place (`turns.py`).
    A product and the bias added to it stay together, if there are enough other cuts: with another number of samples it
    may be one op that reads both weight and bias.
    """
    ops, allowed = cuttable(graph)
    if len(ops) < stages:
        raise PlanError(f"{len(ops)} ops can't make {stages} stages", next="ask for fewer stages")
    known: dict[int, np.ndarray] = {}
    for at in (given := work or [work_s(graph)]):
        if id(at) not in known:
            known[id(at)] = np.concatenate(([0.0], np.cumsum([at[n.name] for n in ops])))
    sums = [known[id(at)] for at in given]
    total = [sums[s % len(sums)] for s in range(stages)]
    sent = crossing_bytes(graph, [n.name for n in ops])
    if allowed[1:-1].sum() < stages - 1:
        allowed[:] = True
    slack = SLACK if work is None else KNOWN_SLACK
    if all(at is total[0] for at in total):
        starts = _even_cuts(total[0], np.array(sent), allowed, stages, slack)
    else:
        starts = _cuts(total, np.array(sent), allowed, stages, slack)
    if microbatches and len(given) > 1 and stages > len(given) and stages % len(given) == 0:
        starts = evened(total, np.array(sent), allowed, starts, len(given), microbatches)
    return {node.name: int(np.searchsorted(starts, i, side="right")) - 1 for i, node in enumerate(ops)}


def cuttable(graph: Graph) -> tuple[list[Node], np.ndarray]:
    """Forward ops that belong to one stage, in order; and where a stage may begin: before each, and behind the last."""
    light = light_ops(graph)
    ops = [n for n in graph.nodes if n.phase == "forward" and n.name not in light]
    apart = _inside_layers(graph, ops)
    return ops, np.array([k not in apart for k in range(len(ops) + 1)])


def _cuts(total: Sequence[np.ndarray], sent: np.ndarray, allowed: np.ndarray, stages: int, slack: float) -> list[int]:
    """The first op of each stage; a cut before an op only where that is allowed. `total`: sums of work, by stage."""
    n = len(total[0]) - 1
    best = np.full((stages + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    for k in range(1, stages + 1):
        for j in np.flatnonzero(allowed)[1:]:
            best[k, j] = np.maximum(best[k - 1, :j], total[k - 1][j] - total[k - 1][:j]).min()
    limit = best[stages, n] * slack
    # Among cuts that keep every stage below the limit, the least bytes in all.
    least = np.full((stages + 1, n + 1), np.inf)
    least[0, 0] = 0.0
    back = np.zeros((stages + 1, n + 1), dtype=int)
    for k in range(1, stages + 1):
        for j in np.flatnonzero(allowed)[1:]:
            ok = total[k - 1][j] - total[k - 1][:j] <= limit
            found = np.where(ok, least[k - 1, :j], np.inf)
            back[k, j] = int(found.argmin())
            least[k, j] = found[back[k, j]] + (sent[j] if j < n else 0.0)
    cuts, j = [], n
    for k in range(stages, 0, -1):
        j = int(back[k, j])
        cuts.append(j)
    return sorted(cuts)


def _even_cuts(total: np.ndarray, sent: np.ndarray, allowed: np.ndarray, stages: int, slack: float) -> list[int]:
    """The same where all places are alike, which is found much sooner."""
    where = np.flatnonzero(allowed)
    ends = total[where]
    limit = slowest_s(ends, stages) * slack
    # Among cuts that keep every stage below the limit, the least bytes in all.
    count = len(where)
    least = np.full(count, np.inf)
    least[0] = 0.0
    bytes_at = np.append(sent[where[:-1]], 0.0)
    first = np.searchsorted(ends, ends - limit, side="left")
    reach = np.arange(count) - first  # beginnings from `first` up to the one before
    level = np.log2(np.maximum(reach, 1)).astype(int)  # two stretches of 2 ** level cover them
    right = np.arange(count) - (1 << level)
    backs: list[np.ndarray] = []
    for _ in range(stages):
        # The cheapest beginning in reach, the earliest of equals.
        best = [np.arange(count)]  # by level, of the 2 ** level that begin at each
        for k in range(int(level.max())):
            ahead = best[-1][np.minimum(np.arange(count) + (1 << k), count - 1)]
            best.append(np.where(least[best[-1]] <= least[ahead], best[-1], ahead))
        table = np.stack(best)
        a, b = table[level, np.minimum(first, count - 1)], table[level, right]
        back = np.where(reach > 0, np.where(least[a] <= least[b], a, b), 0)
        least = np.where(reach > 0, least[back] + bytes_at, np.inf)
        backs.append(back)
    cuts, j = [], count - 1
    for back in reversed(backs):
        j = int(back[j])
        cuts.append(int(where[j]))
    return sorted(cuts)


def slowest_s(ends: np.ndarray, stages: int) -> float:
    """Seconds of the slowest of so many stages, as few as can be; `ends` are the seconds before each possible cut."""

    def enough(limit: float) -> bool:
        at = 0
        for _ in range(stages):
            at = int(np.searchsorted(ends, ends[at] + limit, side="right")) - 1
            if at == len(ends) - 1:
                return True
        return False

    low, high = 0.0, float(ends[-1]) * (1 + 1e-9) + 1e-30
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _inside_layers(graph: Graph, ops: Sequence[Node]) -> set[int]:
    """Cuts between a product and the bias that is added to it, with nothing but views between: one layer's.

    Products themselves may be apart, even those of one module: a list of weights used in a loop is as many layers.
    """
    light = light_ops(graph)
    stored = {i.name for i in graph.of_kind("param")}
    for node in graph.nodes:
        if node.name in light and any(r.name in stored for r in node.ins):
            stored.add(node.name)
    found: set[int] = set()
    for k, node in enumerate(ops):
        if node.op != "aten.add.Tensor" or not any(r.name in stored for r in node.ins):
            continue
        first = k
        while first > 0 and ops[first - 1].op in FREE and _reads(ops[first], ops[first - 1]):
            first -= 1
        if first > 0 and ops[first - 1].op in PRODUCTS and _reads(ops[first], ops[first - 1]):
            found.update(range(first, k + 1))
    return found


def _reads(node: Node, other: Node) -> bool:
    return any(r.name == other.name for r in node.ins)


def crossing_bytes(graph: Graph, ops: Sequence[str]) -> list[float]:
    """For a cut before each op, and behind the last, the bytes that forward sends across it."""
    at = {name: i for i, name in enumerate(ops)}
    change = np.zeros(len(ops) + 2)
    for name in ops:
        node = graph.by_name[name]
        for k, spec in enumerate(node.outs):
            readers = [at[u.name] for u in graph.users.get(Ref(name, k), ()) if u.name in at]
            if spec is not None and readers and max(readers) > at[name]:
                change[at[name] + 1] += spec.nbytes
                change[max(readers) + 1] -= spec.nbytes
    return [float(x) for x in np.cumsum(change)[: len(ops) + 1]]


def _account(graph: Graph, cut: Split) -> dict[str, Any]:
    """What `explain` tells about the stages."""
    seconds = {name: op_s(call) for name, call in calls_in(graph).items()}
    whole = sum(seconds.values()) or 1.0
    rows = []
    for s, own in enumerate(cut.graphs):
        modules = list(dict.fromkeys(n.module for n in own.nodes if n.phase == "forward" and n.module))
        rows.append({
            "share": sum(seconds.get(n.name, 0.0) for n in own.nodes) / whole,
            "modules": f"{modules[0]} to {modules[-1]}" if len(modules) > 1 else "".join(modules),
            "sends": sum(graph.specs[e.ref].nbytes for e in cut.edges if e.src == s),
        })  # fmt: skip
    return {"stages": rows, "tied": {n: list(where) for n, where in cut.tied.items()}}


# --- the plan of one stage


def stage_plan(graph: Graph, cut: Split, stage: int, plans: Sequence[Plan]) -> Plan:
    """What a plan of the whole graph says about one stage; `plans` are those of all stages, for what passes between."""
    own, plan = cut.graphs[stage], plans[stage]
    ops = {n.name: plan.ops[cut.like.get(n.name, n.name)] for n in own.nodes}
    inputs: dict[str, NdSbp] = {}
    whole = {e.name: e for e in cut.edges if e.dst == stage}
    for item in own.inputs:
        if item.kind != "given":
            inputs[item.name] = plan.inputs[item.name]
        else:
            inputs[item.name] = passing(plan, graph, whole[item.name].ref, own)
    outputs: dict[str, NdSbp] = {}
    for o in own.outputs:
        if o.kind == "sent":
            outputs[f"sent:{o.name}"] = passing(plan, graph, o.ref, graph)
        else:
            outputs[f"{o.kind}:{o.name}"] = plan.outputs[f"{o.kind}:{o.name}"]
    names = {i.name for i in own.inputs}
    state = {n: nd for n, nd in plan.state.items() if n in names}
    recompute = known(own, plan.recompute)
    return Plan(plan.mesh, own.hash, ops, inputs, outputs, state, name=plan.name, recompute=recompute)


def passing(plan: Plan, graph: Graph, ref: Ref, reader: Graph) -> NdSbp:
    """How a value lies that passes between stages: as made, else as read, and never as a sum still to be made."""
    made: NdSbp = plan.ops[ref.name].outs[ref.index]
    if not any(isinstance(p, Partial) for p in made):
        return made
    for node in graph.users.get(ref, ()):
        choice: Choice = plan.ops[node.name]
        for r, nd in zip(node.ins, choice.ins, strict=True):
            if r == ref and not any(isinstance(p, Partial) for p in nd):
                return nd
    return tuple(B if isinstance(p, Partial) else p for p in made)


# --- ops that couple samples


class Coupled(NamedTuple):
    """An op that gives something else where a batch is run in parts."""

    op: str
    where: str
    linear: bool = True
    """Not so: its samples may be independent, but what it does in backward hangs on the size of the loss."""

    @property
    def said(self) -> str:
        """What is the matter with it."""
        return (
            f"{self.op} couples the samples of a batch"
            if self.linear
            else f"{self.op} in backward is not linear in the gradient of the loss (a hook, or a custom function)"
        )


def coupled_ops(graph: Graph) -> list[Coupled]:
    """Ops that need samples of the whole batch at once, or in backward the size of its loss (`rules/degrees.py`).

    The former are found by splitting the batch over a few ranks: as many as divide it, or dims in which samples and
    something else are merged could not be split. Where forward has none of them, backward has only those of hooks.
    A graph of one sample has nothing to split: the batch that it is a part of is asked, where that is known, else it is
    only seen what normalises over samples by its name.
    """
    if samples_of(graph) < 2:
        graph = graph.notes.get("whole", graph)
    return _mixing(graph) + [Coupled(n.op, n.where, linear=False) for n in breaks(graph)]


def _mixing(graph: Graph) -> list[Coupled]:
    samples = samples_of(graph)
    if samples < 2:
        return [Coupled(n.op, n.where) for n in graph.nodes if n.op == "laminar.batch_norm"]
    ranks = next(n for n in range(2, samples + 1) if samples % n == 0)
    graph = _trained(graph)
    program = written(graph, presets.data_parallel(graph, Mesh({"dp": ranks})))
    phase = {i.name: i.phase for i in program.instrs}
    forward: dict[str, Coupled] = {}
    backward: dict[str, Coupled] = {}
    for instr in program.instrs:
        reader = re.match(r".* for %([^.\s]+)", instr.why)  # an op that is written out has lines like batch_norm_0.2
        node = graph.by_name.get(reader[1]) if reader else None
        if not instr.moves or node is None:
            continue
        if instr.phase == "forward" and not _is_mean(graph, node):
            forward.setdefault(node.name, Coupled(node.op, node.where))
        elif node.phase == "backward" and phase.get(instr.refs[0].name) == "backward":
            lies = instr.ins[0].nd[0]
            if isinstance(lies, Partial):
                mixes = [] if _adds_up(node) else [node]
            else:
                mixes = [] if forward else list(_needing_all(graph, node, instr.refs[0], lies, ranks))
            backward.update({n.name: Coupled(n.op, n.where) for n in mixes})
    return list(forward.values()) or list(backward.values())


def _adds_up(node: Node) -> bool:
    """Whether an op that reads a gradient summed over the batch might as well be done before that sum."""
    return node.op in (*LINEAR, "aten.linalg_matrix_exp") or "_backward" in node.op


def _needing_all(graph: Graph, node: Node, ref: Ref, lies: Sbp, ranks: int) -> Iterator[Node]:
    """Ops from `node` on that need all samples of a gradient; of ops without a rule nothing is known.

    A plan may put samples together before they are needed, where that costs the same.
    """
    blocks, probed = blocks_in(graph), probed_signatures(graph)
    todo, seen = [(node, ref, lies)], {node.name}
    while todo:
        here, read, placed = todo.pop()
        if read not in here.ins:  # what an op is written out to
            continue
        at = here.ins.index(read)
        ways = options(call_of(here, graph.specs), ranks, blocks, probed.get(here.name, ()))
        kept = [s.outs for s in ways if s.ins[at] == placed]
        if not kept and here.op in RULES:
            yield here
        for i, out in enumerate(kept[0] if kept else ()):
            users = graph.users.get(Ref(here.name, i), ()) if out != B and not isinstance(out, Partial) else ()
            todo += [(u, Ref(here.name, i), out) for u in users if u.name not in seen]
            seen.update(u.name for u in users)


def _trained(graph: Graph) -> Graph:
    """Without what is made for metrics alone: those of a batch are the means of its parts' (docs/train.md)."""
    outputs = tuple(o for o in graph.outputs if o.kind != "metric" or o.name in ("loss_total", "loss_weight"))
    if len(outputs) == len(graph.outputs):
        return graph
    live, nodes = {o.ref.name for o in outputs}, []
    for node in reversed(graph.nodes):
        if node.name in live:
            nodes.append(node)
            live.update(r.name for r in node.ins)
    return replace(graph, outputs=outputs, nodes=tuple(reversed(nodes)))


def _is_mean(graph: Graph, node: Node) -> bool:
    """Whether an op only makes a sum or mean over samples of which the loss is a linear function, or adds to one."""
    if node.op not in (*MEANS, *LINEAR) or any(o is not None and o.shape for o in node.outs):
        return False
    todo = [node]
    weights = {o.ref for o in graph.outputs if o.name == "loss_weight"}
    while todo:
        here = todo.pop()
        for i in range(len(here.outs)):
            for user in graph.users.get(Ref(here.name, i), ()):
                if user.phase == "forward":
                    by_weight = user.op == "aten.div.Tensor" and user.args[1] in weights
                    if user.op not in LINEAR and not _by_number(user) and not by_weight:
                        return False
                    todo.append(user)
    return True


def _by_number(node: Node) -> bool:
    """Whether an op multiplies or divides something by a number."""
    return node.op in ("aten.mul.Tensor", "aten.div.Tensor") and isinstance(node.args[0], Ref) and len(node.ins) == 1


def refuse_coupled(graph: Graph) -> None:
    """Refuse a graph that would compute something else micro-batch by micro-batch."""
    found = coupled_ops(graph)
    if found:
        raise PlanError(
            f"{found[0].said}, so micro-batches {'would' if found[0].linear else 'may'} give other numbers",
            at=found[0].where,
            also=f"{len(found) - 1} more such ops" if len(found) > 1 else "",
            next='couple="microbatch" if it may see one micro-batch at a time, or microbatches=1',
        )


# --- another graph of the same model


def again(graph: Graph, staged: Staged) -> Staged:
    """A staged plan's decisions for another graph of the same model: another size of micro-batch, evaluation.

    Weights stay in their stages and lie as they did, and ops are where their weights are; ops without weights are where
    the plan had ops of their name, as far as that lies between the stages before and after them.
    """
    if graph.hash == staged.graph_hash:
        return staged
    count = len(staged.stages)
    of = _reassigned(graph, staged)
    plans = []
    for p in range(len(staged.places)):
        here = [s.plan for s in staged.stages if s.place == p]
        plans.append(presets.like(graph, _together(here)))
    cut = split(graph, of, count)
    own = []
    for s, stage in enumerate(staged.stages):
        plan = stage_plan(graph, cut, s, [plans[t.place] for t in staged.stages])
        own.append(StagePlan(stage.place, replace(plan, recompute=known(cut.graphs[s], stage.plan.recompute))))
    kept = {n: s for n, s in cut.of.items() if graph.by_name[n].phase == "forward"}
    return replace(
        staged, graph_hash=graph.hash, captured_hash="", stages=tuple(own), of=kept, account=_account(graph, cut)
    )


def _reassigned(graph: Graph, staged: Staged) -> dict[str, int]:
    """The stage of each forward op: not before those it reads, nor behind those that read it."""
    homes: dict[str, set[int]] = {}
    for s, stage in enumerate(staged.stages):
        for name in stage.plan.inputs:
            homes.setdefault(name, set()).add(s)
    light = light_ops(graph)
    stored = {i.name: homes[i.name] for i in graph.inputs if i.kind in ("param", "buffer") and i.name in homes}
    ops = [n for n in graph.nodes if n.phase == "forward"]
    low: dict[str, int] = {}
    fixed: dict[str, int] = {}
    for node in ops:
        before = max([low[r.name] for r in node.ins if r.name in low], default=0)
        weights = [stored[r.name] for r in node.ins if r.name in stored]
        if node.name in light:
            if weights:
                stored[node.name] = set.intersection(*weights) or weights[0]
            continue
        if weights:
            common = set.intersection(*weights) or weights[0]
            fixed[node.name] = min([s for s in common if s >= before], default=max(common))
        low[node.name] = max(before, fixed.get(node.name, 0))
    high: dict[str, int] = {}
    for node in reversed(ops):
        if node.name in low:
            users = (u.name for i in range(len(node.outs)) for u in graph.users.get(Ref(node.name, i), ()))
            after = [high[u] for u in users if u in high]
            high[node.name] = fixed.get(node.name, min(after, default=len(staged.stages) - 1))
    out: dict[str, int] = {}
    for node in ops:
        if node.name in low:
            # Names may be those of other ops: a graph of another size need not have the same number of each.
            at = max([low[node.name], *(out[r.name] for r in node.ins if r.name in out)])
            out[node.name] = fixed.get(node.name, min(max(staged.of.get(node.name, at), at), max(high[node.name], at)))
    return out


def _together(plans: Sequence[Plan]) -> Plan:
    """What plans of stages at one place say about weights and batches, as one."""
    first = plans[0]
    out = replace(first, ops={}, inputs={}, outputs={}, state={}, recompute=())
    for plan in plans:
        out.inputs.update(plan.inputs)
        out.outputs.update(plan.outputs)
        out.state.update(plan.state)
    return out
