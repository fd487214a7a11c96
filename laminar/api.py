"""The front door: the assembly of the rooms behind the names users type."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import LaminarError, PlanError, RecipeError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.exact import Exact
from laminar.ir.graph import RNG, SCALE, Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import SearchOptions
from laminar.ir.plans.plan import Plan, runs_ddp
from laminar.ir.plans.rewrites import carried_sites
from laminar.ir.plans.staged import Staged
from laminar.ir.sbp import Sbp
from laminar.placement import presets
from laminar.placement.presets import Patterns
from laminar.planner.report.program_traffic import with_traffic
from laminar.rewrite.variants import rewritten
from laminar.staging.stage_plans import for_other_graph as restaged
from laminar.staging.stage_plans import pipeline
from laminar.train.options import DEFAULTS, JobOptions

if TYPE_CHECKING:
    from laminar.planner.space.request import Request
    from laminar.runtime.check.prove_rule_files import ProvedRules
    from laminar.train.job.verify_exact import ExactReport
    from laminar.train.loop import Callback
    from laminar.train.protocol import TrainingJob


@dataclass(frozen=True)
class Recipe:
    """What to train: factories, so that planning for a huge model never allocates it."""

    model: Callable[[], Any]
    """Makes the `nn.Module`; may be called under `torch.device("meta")`."""
    loss: Callable[[Any, Any], Any]
    """`loss(model, batch)`: a scalar tensor, `laminar.Loss(total, weight)`, or a dict or tuple of loss and metrics."""
    data: Callable[[], Iterable[Any]]
    """Makes an iterable of batches: the same ones on every rank; begun anew when they run out."""
    optimizer: Callable[[Any], Any] | None = None
    """Makes the optimizer from an iterable of parameters."""
    steps: int = 100
    schedule: Callable[[Any], Any] | None = None
    """Makes a learning-rate scheduler from the optimizer; stepped after every step."""
    evaluate: Callable[[], Iterable[Any]] | None = None
    """Makes a finite iterable of batches to evaluate on, at the end of training."""
    evaluate_every: int = 0
    """Evaluate every so many steps as well."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    """What to measure in evaluations: functions of model and batch by name, with results like a loss's."""
    on_step: Callable[[Any, Any], Any] | None = None
    """Called after every step with the job and the step's result; returning `True` ends the run."""
    callbacks: Sequence[Any] = ()
    """Objects that are told what happens around steps; see `laminar.Callback`."""


def load_recipe(name: str) -> Recipe:
    """The recipe that `path/to/file.py:function` names."""
    path_text, _, function = name.partition(":")
    path = Path(path_text)
    if not function:
        raise RecipeError(f"{name!r} does not name a recipe", next="write path/to/file.py:function")
    if not path.is_file():
        raise RecipeError(f"no file {path_text}", next="recipes are named path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"laminar_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)  # as Python does for a script: a recipe may import files beside it
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if make is None:
        here = [
            k
            for k, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == spec.name and not k.startswith("_")
        ]
        raise RecipeError(f"{path_text} has no {function}", allowed="  ".join(here))
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{name} returned a {type(recipe).__name__}, not a laminar.Recipe")
    return recipe


def capture(model: Any, loss: Callable[[Any, Any], Any], batch: Any) -> Graph:
    """Forward, loss and backward of one step as a logical graph; ops without a rule are probed."""
    from laminar.capture.capture import capture as trace
    from laminar.runtime.check.probe_rules import probe

    return probe(trace(model, loss, batch))


def captured(name: str, whole: bool = False, parts: int = 1) -> tuple[Recipe, Any, Any, Graph]:
    """A recipe by name, its model, its first batch and their graph; the model has weights only if it is to be run.

    With several `parts` the batch is the first of so many micro-batches.
    """
    recipe, batch = _begun(name, parts)
    model = recipe.model() if whole else _on_meta(recipe.model)
    return recipe, model, batch, capture(model, recipe.loss, batch)


def graph_of(name: str, parts: int = 1, precision: str = "f32", device: str = "cuda") -> Graph:
    """The graph of a recipe's first batch, or of the first of so many micro-batches; kept for the next time.

    In a `precision` of `parallelize`, as it is computed on such a device.
    """
    import torch

    from laminar.capture.kept.saved_graphs import kept_graph
    from laminar.capture.model.batches import flatten, unflatten
    from laminar.train.optimizer.precision import Precision

    recipe, batch = _begun(name, parts)
    model, policy = _on_meta(recipe.model), Precision.of(precision)
    loss = policy.around(recipe.loss, torch.device(device))
    if policy.weights is not None:
        model.to(dtype=policy.weights)
        tensors, tree = flatten(batch)
        batch = unflatten(tree, {n: policy.leaf(t) for n, t in tensors.items()})
    tensors, tree = flatten(batch)
    return kept_graph(model, loss, tensors, tree, {}, lambda: capture(model, loss, batch))


def _begun(name: str, parts: int) -> tuple[Recipe, Any]:
    """A recipe by name, and its first (micro-)batch."""
    recipe = load_recipe(name)
    batch = next(iter(recipe.data()), None)
    if batch is None:
        raise RecipeError(f"{name} gives no batch", next="data() must yield at least one")
    return recipe, micro_batches(batch, parts)[0] if parts > 1 else batch


def _on_meta(make: Callable[[], Any]) -> Any:
    """A model without its weights; one that looks at them while it is made is made for real."""
    import torch

    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError):
        return make()


def _refuse_rules(request: Request) -> None:
    """Rules of a file are of no use to a search that may not rewrite graphs."""
    if not request.allows("rewrite"):
        raise PlanError(
            "rules of a file rewrite the graph, and this search may not",
            allowed="  ".join(request.only),
            next="leave out rules, or add rewrite to what may be used",
        )
    if len(request.cluster.parts) > 1:
        raise PlanError(
            f"{request.cluster.name} has several kinds of devices, and no graph is rewritten for such clusters",
            next="leave out rules, or plan for one kind of device",
        )


def plan(
    graph: Graph,
    cluster: Cluster | str,
    *,
    memory_bytes: float | None = None,
    budget_s: float = 10.0,
    pin: Mapping[str, int | str] | None = None,
    only: str | Sequence[str] | None = None,
    optimizer: str = "adamw",
    proposals: int = 0,
    margin: float | None = None,
    batch: str = "fixed",
    rules: str | Path | ProvedRules | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan | Staged:
    """The fastest plan for a graph on a cluster that a search finds, and how far it can be from the best there is.

    graph         of the *global* batch (`laminar.capture`)
    batch         "fixed": that batch; "free": that or an equal part of it, whichever trains most samples a second.
                  `plan.account["batch"]` says which, and what became of the others
    cluster       what there is, or its name: needs none of the hardware
    memory_bytes  memory limit per rank; default: the device's memory less the margin
    margin        share of a device's memory left free, default 0.08; not together with memory_bytes
    budget_s      CPU seconds; the best found by then is returned, and the certificate says what was left
    pin           numbers that are fixed: dp, tp, stages, micro_batches, virtual, zero, recompute, offload; and
                  placements of tensors by pattern: {"tp": 8, "blocks.*.mlp.up.weight": "S(0)"}
    only          dimensions that may be used: "data", "tensor", "pipeline", "zero", "recompute", "offload", "rewrite"
    optimizer     whose update and state are priced
    proposals     so many random moves are tried around the best plan, if it has no stages (300,000 take some 10 s)
    rules         a file of rewrite rules as TASO and FlexFlow publish them (JSON): those that hold on random numbers
                  are searched with beside Laminar's own. `plan.account["rules"]` counts them, and those the plan uses
    progress      told in words whenever a better plan is found

    `plan.step_s` is simulated, `plan.bound_s` is below the simulated time of every plan in the space that was
    searched, `plan.account["certificate"]` says the rest. A plan with stages is one of micro-batches. A plan may carry
    rewrites of the graph, which are run on random numbers before they are used; `laminar.rewritten(graph, plan)` is
    the graph that such a plan places.
    """
    from laminar.planner.search.entry import best
    from laminar.planner.space.request import asking

    machine = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    request = asking(machine, memory_bytes, budget_s, optimizer, pin, only, proposals, margin, batch)
    if rules is None:
        return _proved(graph, best(graph, request, progress), request, {}, progress)
    _refuse_rules(request)
    from laminar.runtime.check.prove_rule_files import ProvedRules, proved_rules

    read = rules if isinstance(rules, ProvedRules) else proved_rules(rules)
    request = replace(request, rules=read.new)
    found = _proved(graph, best(graph, request, progress), request, read.errors, progress)
    used = replace(read.counts(), used=carried_sites(found.rewrites))
    return replace(found, account=replace(found.account, rules=used))


def _proved(
    graph: Graph, found: Plan | Staged, request: Request, errors: Mapping[str, float], progress: Any
) -> Plan | Staged:
    """A plan whose rewrites hold when run on random numbers: the one found, or without rules of a file, or without any.

    `errors` are those of the rules of a file.
    """
    from laminar.planner.search.entry import best

    shown = None
    while found.rewrites:
        from laminar.runtime.check.prove_rewrites import proof

        shown = proof(found.origin.graph if found.origin else graph, found, errors)
        if shown.holds:
            break
        plainer = {"rules": ()} if request.rules else {"only": tuple(d for d in request.only if d != "rewrite")}
        request = replace(request, **plainer)
        found = best(graph, request, progress)
    return found if shown is None else replace(found, account=replace(found.account, proof=str(shown)))


def replan(
    graph: Graph,
    plan: Plan | Staged,
    *,
    lost: Sequence[int] = (),
    cluster: Cluster | str | None = None,
    memory_bytes: float | None = None,
    margin: float | None = None,
) -> Plan | Staged:
    """A plan that goes on as a former one did, on what is left of its cluster; in about a second.

    graph         of the *global* batch
    plan          the former one, of any kind
    lost          devices that are gone, by their numbers in the cluster; the others are numbered anew
    cluster       what they are lost from, unless given the plan's own; without `lost`, what is left
    memory_bytes  what a rank may fill, and `margin`: as the plan was asked for, unless given

    Nothing is proved about the result; `laminar.plan(graph, left)` searches, where
    `left = cluster.without([7])`.
    """
    from laminar.planner.report.graph_of_plan import cluster_for, graph_of_own_batch
    from laminar.planner.search.replan import replanned as planned_anew
    from laminar.planner.space.request import asking

    if not lost and cluster is None:
        raise PlanError("nothing is lost", next="name the devices: lost=[7]; or what is left: cluster=...")
    former = plan.account.options or SearchOptions()
    if memory_bytes is None and margin is None:
        memory_bytes, margin = former.memory_bytes, former.margin
    request = asking(
        cluster_for(plan, cluster).without(lost),
        memory_bytes,
        optimizer=former.optimizer,
        only=former.only or None,
        margin=margin,
        rules=former.rules,
    )
    return planned_anew(graph_of_own_batch(plan, graph), plan, request)


class plans:
    """Plans with names. Each takes a graph and a mesh; ops and tensors nobody placed are filled in at
    minimum cost.

    `recompute="blocks.*"` drops what the modules of that name compute inside and recomputes it in backward; see
    `laminar.ir.plans.patterns` for what else can be named. `offload="blocks.*"` keeps it in the host's memory instead.
    """

    @staticmethod
    def data_parallel(graph: Graph, mesh: Mesh, recompute: Patterns = (), offload: Patterns = ()) -> Plan:
        """The batch split over every axis, parameters whole, gradients summed."""
        return with_traffic(graph, presets.data_parallel(graph, mesh, recompute, offload))

    @staticmethod
    def zero(
        graph: Graph,
        mesh: Mesh,
        stage: int = 3,
        recompute: Patterns = (),
        offload: Patterns = (),
        gather_once: bool = False,
    ) -> Plan:
        """Data parallel with optimizer state (1), gradients (2) and parameters (3) in shards.

        With `gather_once` what forward has gathered of parameters stays for backward: a third less is exchanged, and
        parameters are whole on every rank while a step lasts.
        """
        return with_traffic(graph, presets.zero(graph, mesh, stage, recompute, offload, gather_once))

    @staticmethod
    def tensor_parallel(
        graph: Graph, mesh: Mesh, axis: str | None = None, recompute: Patterns = (), offload: Patterns = ()
    ) -> Plan:
        """Weights split over `axis` (`tp` unless named), the residual stream whole; other axes data parallel."""
        return with_traffic(graph, presets.tensor_parallel(graph, mesh, axis, recompute, offload))

    @staticmethod
    def context_parallel(
        graph: Graph,
        mesh: Mesh,
        axis: str | None = None,
        recompute: Patterns = (),
        offload: Patterns = (),
        stretches: int | None = None,
    ) -> Plan:
        """Sequences split by token over `axis` (`cp` unless named), parameters whole; other axes data parallel.

        Each rank does its rows of every attention, causal or not, against keys and values that are gathered for it. It
        has so many `stretches` of a sequence, evenly apart; unless told as many as make causal attention nearly as much
        work on every rank.
        """
        return with_traffic(graph, presets.context_parallel(graph, mesh, axis, recompute, offload, stretches))

    @staticmethod
    def named(
        name: str,
        graph: Graph,
        mesh: Mesh,
        recompute: Patterns = (),
        offload: Patterns = (),
        gather_once: bool = False,
    ) -> Plan:
        """The plan that `laminar.parallelize(plan=name)` runs.

        "data", "zero1", "zero2", "zero3", "tensor" or "context".
        """
        return with_traffic(graph, presets.preset_plan(name, graph, mesh, recompute, offload, gather_once))

    @staticmethod
    def placed(
        graph: Graph,
        mesh: Mesh,
        seeds: Mapping[str, Mapping[str, Sbp]],
        recompute: Patterns = (),
        offload: Patterns = (),
    ) -> Plan:
        """A few tensors placed by name pattern, the rest filled in at minimum cost."""
        return with_traffic(graph, presets.seeded(graph, mesh, seeds, recompute, offload))

    seeded = placed
    """The name from before."""

    @staticmethod
    def pipeline(
        graph: Graph,
        stages: int | Sequence[str] | Mapping[str, int] = 2,
        micro_batches: int = 4,
        virtual: int = 1,
        inner: Any = None,
        cluster: Cluster | str | None = None,
        **options: Any,
    ) -> Staged:
        """Stages of equal work at different ranks, through which micro-batches pass; see
        `laminar.staging.stage_plans.pipeline`.

        With a `cluster`, stages are equal by what their ops take on the devices of their places, which may differ:
        faster ones get more of the model.
        """
        micro_batches = options.pop("microbatches", micro_batches)  # the spelling from before
        if cluster is None:
            return pipeline(graph, stages, micro_batches, virtual, inner, **options)
        from laminar.planner.estimate.mixed_pipelines import pipeline_on

        machine = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
        return pipeline_on(graph, machine, stages, micro_batches, virtual, inner, **options)


def inputs_of(
    graph: Graph, model: Any, batch: Any, seed: int = 0, step: int = 0, first: int = 0, samples: int = 0
) -> dict[str, Any]:
    """Whole inputs of a graph by name: the model's own tensors, the batch's leaves, the RNG key.

    For the graph of a micro-batch: `first` is the number of its first sample among the `samples` of its batch.
    """
    import torch

    from laminar.capture.capture import check_batch, state_of

    key = torch.tensor([seed, step, first, samples])
    given = {**state_of(model), **check_batch(graph, batch), RNG: key, SCALE: torch.ones((), dtype=torch.float64)}
    return {i.name: given[i.name][: i.spec.numel] if i.kind == "rng" else given[i.name] for i in graph.inputs}


def verify(
    model: Any,
    loss: Callable[[Any, Any], Any],
    batches: Any,
    plan: Plan | Staged,
    ranks: str = "inprocess",
    dtype: str = "f64",
    graph: Graph | None = None,
    tolerance: float | None = None,
) -> Any:
    """Loss, gradients and new buffers of a plan against one device, and of what was captured against the model itself.

    `batches` is a list or iterator of batches, of as many samples as the plan is for.
    `ranks="inprocess"` runs the code of all ranks here, in turns;
    `ranks="processes"` starts one Gloo process per rank.
    The plan is held against the captured graph, in float64 unless `dtype` says otherwise, and the graph, in its own
    dtypes, against the model run eagerly in plain PyTorch. Both must agree.
    """
    from laminar.planner.search.batch_size import fitted, refuse_other
    from laminar.rules.samples import samples_of
    from laminar.runtime.check.verify import verify_program
    from laminar.train.check.check_graph import against_eager

    found = list(batches)
    if isinstance(plan, Staged):
        return _verify_staged(model, loss, found, plan, dtype, tolerance)
    graph = graph or capture(model, loss, found[0])
    refuse_other(plan, samples_of(graph))
    plan = fitted(graph, plan)
    whole = [inputs_of(graph, model, batch, step=i) for i, batch in enumerate(found)]
    report = verify_program(graph, plan, whole, dtype, ranks, tolerance, text=True)
    return against_eager(report, graph, model, loss, found, whole)


def verify_exact(
    recipe: str,
    exact: Any = True,
    processes: int = 2,
    steps: int = 3,
    seed: int = 0,
    precision: str = "f32",
    micro_batches: int = 1,
) -> ExactReport:
    """Train a recipe in exact mode on one process and on several, scattered and in shards, and compare hashes.

    Where they part, what comes back names the first step, op and tensor that differ.
    """
    from laminar.train.job.verify_exact import ExactTrial
    from laminar.train.job.verify_exact import verify_trial as compared

    asked = Exact.of(exact) or Exact()
    if load_recipe(recipe).optimizer is None:
        raise RecipeError(f"{recipe} has no optimizer", next="give Recipe(optimizer=lambda params: AdamW(params))")
    if not 1 <= processes <= asked.ranks:
        raise LaminarError(f"{processes} processes for {asked}", allowed=f"1 to {asked.ranks}")
    options = JobOptions(seed=seed, precision=precision, micro_batches=micro_batches, check=False)
    return compared(ExactTrial(partial(load_recipe, recipe), asked, steps, options, processes))


def _verify_staged(model: Any, loss: Any, batches: list[Any], plan: Staged, dtype: str, tolerance: float | None) -> Any:
    """Micro-batches through the stages against one device on whole batches, which are all of one shape."""
    import json

    from laminar.capture.capture import capture as trace
    from laminar.capture.model.batches import unflatten
    from laminar.planner.search.batch_size import refuse_other
    from laminar.rules.samples import in_parts, places_of, samples_of
    from laminar.runtime.check.probe_rules import probe
    from laminar.runtime.check.verify import verify_stages, weighted
    from laminar.train.batch.leaves import Leaves
    from laminar.train.check.check_graph import against_eager

    whole, leaves = capture(model, loss, batches[0]), Leaves.of(batches[0])
    refuse_other(plan, samples_of(whole))

    def traced(samples: int) -> Graph:
        stand_ins = leaves.like(samples)
        batch = unflatten(json.loads(stand_ins.tree), stand_ins.tensors)
        return probe(trace(model, loss, batch, scaled=weighted(whole)))  # gradients of totals add up

    cut = [micro_batches(batch, plan.micro_batches) for batch in batches]
    sizes = [m.samples for m in leaves.split(plan.micro_batches)]
    graphs = {n: traced(n) for n in dict.fromkeys(sizes)}
    if plan.micro_batches > 1 and whole.of_kind("rng"):
        known = places_of(lambda n: whole if n == samples_of(whole) else traced(n), samples_of(whole))
        graphs = {n: in_parts(graph, known) for n, graph in graphs.items()}
    graphs = {n: rewritten(graph, plan) for n, graph in graphs.items()}
    plans = {n: restaged(graph, plan) for n, graph in graphs.items()}
    given = [inputs_of(whole, model, batch, step=i) for i, batch in enumerate(batches)]
    fed = [
        [
            inputs_of(graphs[n], model, m, step=i, first=sum(sizes[:k]), samples=sum(sizes))
            for k, (n, m) in enumerate(zip(sizes, parts, strict=True))
        ]
        for i, parts in enumerate(cut)
    ]
    report = verify_stages(whole, [(graphs[n], plans[n]) for n in sizes], sizes, given, fed, dtype, tolerance)
    return against_eager(report, whole, model, loss, batches, given)


def micro_batches(batch: Any, count: int | Sequence[int]) -> list[Any]:
    """A batch in so many parts, as equal as they can be, or in parts of so many samples, as steps cut it."""
    import json

    from laminar.capture.model.batches import unflatten
    from laminar.train.batch.leaves import Leaves, Sized

    leaves = Leaves.of(batch if isinstance(count, int) else Sized(batch, count))
    parts = leaves.split(count if isinstance(count, int) else len(count))
    return [unflatten(json.loads(m.tree), m.tensors) for m in parts]


def for_plan(plan: Plan | Staged, batch: Any) -> Any:
    """As many samples of a batch as a plan is for, the first ones, where its batch was free and is a part of this."""
    from laminar.train.batch.leaves import Leaves

    known = plan.account.batch.samples if plan.account.batch else 0
    samples = Leaves.of(batch).samples if known else 0
    return micro_batches(batch, samples // known)[0] if known and known < samples and samples % known == 0 else batch


def parallelize(
    model: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Any,
    *,
    batch: Any,
    plan: Any = "auto",
    mesh: Mesh | None = DEFAULTS.mesh,
    device: Any = DEFAULTS.device,
    precision: str = DEFAULTS.precision,
    micro_batches: int = DEFAULTS.micro_batches,
    clip_norm: float | None = DEFAULTS.clip_norm,
    clip_value: float | None = DEFAULTS.clip_value,
    ema: float | None = DEFAULTS.ema,
    seed: int = DEFAULTS.seed,
    compile: bool | None = DEFAULTS.compile,
    detect_anomaly: bool = DEFAULTS.detect_anomaly,
    timeout_s: float = DEFAULTS.timeout_s,
    cluster: Cluster | str | None = None,
    elementwise: bool = DEFAULTS.elementwise,
    check: bool = DEFAULTS.check,
    unguarded: Sequence[str] = DEFAULTS.unguarded,
    measure: bool = True,
    exact: Any = None,
) -> TrainingJob:
    """A job that trains `model` on all ranks as if they were one.

    model          any `nn.Module`; rank 0's weights are taken, and stay in it as this rank's parts. DDP, Accelerate
                   and torch.compile around it are taken off
    loss           `loss(model, batch)`: a scalar, or `laminar.Loss(total, weight)` where counts are uneven; or a dict,
                   a tuple or a model's output with it, of which `loss` or the first entry trains and the rest is
                   reported as `result.metrics`
    optimizer      a torch optimizer over the model's parameters, or a function that makes one from them
    batch          an example of the *global* batch: tensors in nested dicts, lists, tuples, dataclasses, ...
    plan           "auto", "data", "zero1", "zero2", "zero3", "tensor", "context", a plan file, a `Plan`, a plan with
                   stages (`plans.pipeline`), a function of graph and mesh, or "ddp" for a model that can't be captured
                   (torch's own, with its limits)
    mesh           named axes; unless given one axis over all ranks
    device         this rank's device; unless given its own GPU if every rank has one, else the CPU
    precision      "f32", "bf16", "fp16", "bf16-kahan", "bf16-stochastic", "bf16-pure"
    micro_batches  run each batch in so many parts, one after the other; gradients are summed
    clip_norm      clip the norm of the whole gradient; `clip_value` clips each element
    ema            decay of a moving average of the weights, for `job.state_dict(ema=True)`
    seed           of dropout and other draws, which don't depend on the layout
    compile        through Inductor; unless given on GPUs only
    detect_anomaly stop at the first NaN or infinity and name the module and op that made it
    cluster        for plan="auto": the machine, a file of `laminar profile` or a name, for which the fastest plan
                   without stages is searched; unless given, "auto" is data parallel, in shards if memory asks for it
    elementwise    the optimizer updates each element by itself, so it may be run on pieces; torch's own are known
    check          compare loss, gradients and buffers of the first (micro-)batch with the model run in plain PyTorch
    unguarded      names of attributes whose changes between steps don't matter; others are followed
    measure        with a cluster: run copies of the model under the plans that the search finds fastest, and under data
                   parallel, for some seconds on these ranks, and take the fastest; where that costs little
    exact          `True` or `laminar.Exact(units=8, slices=1)`: `job.hash()` is the same for any number of processes
                   and any hosting. The batch is computed in so many units, whoever computes them (weights
                   in slices, sequences in parts with `context=2`, the model in stages with `stages=2`); `plan` then
                   says what processes store: "data", "zero1", "zero3"

    Works alone in one process, under `laminar train`, and under `torchrun`. All methods of a job are
    collective: every rank calls them, in the same order.
    """
    # Long because its options are named and explained in one place; the ways to run are one or two lines each.
    if cluster is not None and (plan != "auto" or mesh is not None):
        raise LaminarError("a cluster is what a plan is searched for", next='leave out mesh, and say plan="auto"')
    options = JobOptions(
        mesh=mesh,
        device=device,
        precision=precision,
        micro_batches=micro_batches,
        clip_norm=clip_norm,
        clip_value=clip_value,
        ema=ema,
        seed=seed,
        compile=compile,
        detect_anomaly=detect_anomaly,
        timeout_s=timeout_s,
        elementwise=elementwise,
        check=check,
        unguarded=unguarded,
    )
    from laminar.capture.model.lazy_layers import initialise
    from laminar.capture.model.unwrap import unwrapped

    model = unwrapped(model)
    initialise(model, loss, batch)
    if (asked := Exact.of(exact)) is not None:
        from laminar.train.job.exact_job import ExactJob

        if cluster is not None:
            raise LaminarError(
                "cluster= searches a plan, and in exact mode who computes what belongs to the run",
                next="leave it out: hosting follows from the number of processes",
            )
        return ExactJob(model, loss, optimizer, batch, asked, plan, options)
    if plan == "ddp":
        from laminar.train.job.ddp_job import DdpJob

        return DdpJob(model, loss, optimizer, batch, options)
    from laminar.train.job import plan_for

    world = None
    if cluster is not None:
        from laminar.train.auto import plan_search  # and the planner with it, which takes a while to load

        world, plan = plan_search.begun(model, loss, optimizer, batch, cluster, options, measure)
    plan = plan_for.loaded(plan)
    if world is None and isinstance(plan, Plan | Staged) and plan.account.batch is not None:
        from laminar.planner.search.batch_size import refuse_other
        from laminar.train.batch.leaves import Leaves

        parts = 1 if isinstance(plan, Staged) else micro_batches
        refuse_other(plan, Leaves.of(batch).split(parts)[0].samples, parts)
    if isinstance(plan, Plan) and runs_ddp(plan):
        from laminar.train.auto.ddp_fits import refuse_others
        from laminar.train.job.ddp_job import DdpJob

        if world is None:
            refuse_others(model, loss, batch, options)
        return DdpJob(model, loss, optimizer, batch, options, plan, world)
    if isinstance(plan, Staged):
        from laminar.train.job.pipeline_job import StagedJob

        return StagedJob(model, loss, optimizer, batch, plan, options)
    from laminar.train.job.job import Job

    return Job(model, loss, optimizer, batch, plan, options, world=world)


def _job_of(name: str, recipe: Recipe, seed: int, options: Mapping[str, Any]) -> TrainingJob:
    """A job for a recipe's model and first batch, both made from the seed."""
    from laminar.events import emit

    if recipe.optimizer is None:
        raise RecipeError(f"{name} has no optimizer", next="give Recipe(optimizer=lambda params: AdamW(params))")
    _seed_everything(seed)
    batch = next(iter(recipe.data()), None)
    if batch is None:
        raise RecipeError(f"{name} gives no batch", next="data() must yield at least one")
    emit("phase", name="making the model")
    _seed_everything(seed)
    return parallelize(recipe.model(), recipe.loss, recipe.optimizer, batch=batch, seed=seed, **options)


def train(
    recipe: str,
    *,
    steps: int | None = None,
    seed: int = DEFAULTS.seed,
    log_every: int | None = None,
    checkpoint: str | None = None,
    checkpoint_every: int | str = 0,
    keep: str = "",
    resume: bool = False,
    plan_file: Path | None = None,
    timeline: Path | None = None,
    timeline_steps: int = 3,
    prefetch: int | None = None,
    hash_every: int = 0,
    rebalance: bool = False,
    **options: Any,
) -> Any:
    """Train a recipe on this rank, alone or among others; what `laminar train` runs on every rank.

    `prefetch` batches are loaded ahead: 2 unless given, or none with plan="ddp", whose models draw from the same
    generator as their data. `options` are those of `parallelize`. Rank 0 saves the plan as `plan_file`, and as
    `timeline`, if given, what all ranks did in a step. Every `hash_every` steps there is an event with the job's hash.
    With `rebalance` units of an exact job go from slow ranks to fast ones.
    """
    from laminar.events import emit

    emit("phase", name="loading the recipe")
    from laminar.train.loop import HashEvery, OnStep, loop  # and torch with it

    found = load_recipe(recipe)
    job = _job_of(recipe, found, seed, options)
    if plan_file is not None and job.rank == 0 and job.plan is not None:
        job.plan.save(str(plan_file))
    own: list[Callback] = [
        *([OnStep(found.on_step)] if found.on_step else []),
        *([HashEvery(hash_every)] if hash_every else []),
    ]
    own += [rebalancing()] if rebalance else []
    outcome = loop(
        job,
        found.data,
        found.steps if steps is None else steps,
        log_every=log_every,
        schedule=found.schedule,
        evaluate=found.evaluate,
        evaluate_every=found.evaluate_every,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=checkpoint if resume else None,
        timeline=timeline,
        timeline_steps=timeline_steps,
        prefetch=(2 if job.plan is not None else 0) if prefetch is None else prefetch,
        metrics=found.metrics,
        callbacks=[*own, *found.callbacks],
    )
    job.close()
    return outcome


def rebalancing() -> Callback:
    """What keeps units of an exact job where they are computed fastest."""
    from laminar.train.auto.rebalance import Rebalance

    return Rebalance()


def _seed_everything(seed: int) -> None:
    """Every rank draws the same weights and data, in recipes that do not seed themselves."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
