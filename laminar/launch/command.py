"""`laminar train`: its options, and what it does with them.

The same command is the launcher and, started by it or by torchrun with a rank's environment, one of
the ranks. The launcher checks what can be checked without torch, so that a wrong mesh or a port in
use is said at once and leaves nothing behind; then it makes the run directory, starts the ranks with
the very arguments it was given, and shows what they tell.

`train` and `load_recipe` come from the front door, which is above this room.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laminar import events
from laminar.errors import MeshError, PlanError, RecipeError, StateError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.plans.staged import Staged, load_plan
from laminar.launch import rundir
from laminar.launch.blame import Verdict
from laminar.launch.display import display, summary
from laminar.launch.rank import RankPlace, agree_on, leave, run_rank
from laminar.launch.vocabulary import PRECISIONS, hidden, plan_name
from laminar.train.options import DEFAULTS, PLANS
from laminar.train.saving.existing import holds_a_checkpoint

TRAIN_EPILOG = """\
examples
  laminar train examples/gpt.py:tiny                                one process
  laminar train examples/gpt.py:tiny --workers 2                    two ranks on this machine, data parallel
  laminar train examples/gpt.py:tiny --workers 4 --plan zero3       parameters, gradients and optimizer state sharded
  laminar train examples/gpt.py:tiny --mesh dp=2,tp=2 --plan tensor
  laminar train examples/gpt.py:tiny --plan plan.json               as many ranks as the plan has
  laminar train examples/gpt.py:tiny --cluster here.json            search the fastest plan for a profiled machine
  laminar train examples/gpt.py:tiny --steps 200 --checkpoint here  save a checkpoint at the end, or every 10m,
  laminar train examples/gpt.py:tiny --steps 400 --checkpoint here --resume    and continue from the last one
  laminar train examples/gpt.py:tiny --workers 2 --timeline         record what each rank does in a step
  torchrun --nproc-per-node 2 -m laminar train examples/gpt.py:tiny under another launcher, on many machines

the run directory (default: runs/RECIPE-TIME)
  config.json  plan.json  events.jsonl (other ranks: events.rankN.jsonl)  logs/rankN.log
  timeline.json (with --timeline)  checkpoint/ (or where --checkpoint says)

exit codes
  0    trained to the last step
  1    failed: a rank raised an error or died, ran out of memory, or the loss was not finite
  2    refused before the first step: wrong options, recipe, plan or mesh, or a port in use
  130  stopped by Ctrl-C (SIGINT); 143 by SIGTERM, 129 by SIGHUP
"""
TIMEOUT_S = 600.0


def train_options(p: argparse.ArgumentParser) -> None:
    """What `laminar train` can be told; the rest is the recipe's."""
    p.epilog, p.formatter_class = TRAIN_EPILOG, argparse.RawDescriptionHelpFormatter
    _where_options(p)
    _training_options(p)
    _run_options(p)


def _where_options(p: argparse.ArgumentParser) -> None:
    """On what it trains, and by which plan."""
    whole = _at_least(1, int)
    add = p.add_argument_group("where and how").add_argument
    add("--workers", type=whole, metavar="N", help="ranks on this machine (default: as many as the mesh has, or 1)")
    add(
        "--plan",
        type=plan_name,
        default="auto",
        metavar="PLAN",
        help=", ".join(PLANS) + ", or a plan file (default: auto)",
    )
    add(
        "--cluster",
        metavar="CLUSTER",
        help="with --plan auto: search the fastest plan for this cluster, a file from `laminar profile` or a name such "
        "as 8xh100",
    )
    add(
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --cluster: run the best candidates on these ranks for up to 15 s and take the fastest (default: "
        "yes, where copies of the model fit)",
    )
    add("--mesh", metavar="MESH", help="axes and sizes, such as dp=2,tp=2 (default: dp=N, or tp=N for --plan tensor)")
    add(
        "--exact",
        nargs="?",
        const="",
        metavar="units=8,slices=1,context=1,stages=1",
        help="the same bits for any number of workers: the batch is computed in so many units, the model in so many "
        "stages, and --plan says what workers store",
    )
    add(
        "--rebalance",
        action="store_true",
        help="with --exact: move units from slow workers to fast ones, by their own computing time (changes no bit)",
    )
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU for each rank")
    add("--precision", default=DEFAULTS.precision, choices=PRECISIONS, help="default: %(default)s")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile the step (default: on GPUs only)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.check,
        help="compare the first batch with the model in plain PyTorch (default: yes)",
    )


def _training_options(p: argparse.ArgumentParser) -> None:
    """What changes the weights that come out, or how long a step takes."""
    whole, positive, amount = _at_least(1, int), _at_least(0, int), _at_least(0, float)
    add = p.add_argument_group("training").add_argument
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="total steps, counting those before --resume (default: the recipe's)",
    )
    add(
        "--seed",
        type=positive,
        default=DEFAULTS.seed,
        metavar="N",
        help="random seed of weights, dropout and data (default: %(default)s)",
    )
    add(
        "--micro-batches",
        type=whole,
        default=DEFAULTS.micro_batches,
        metavar="M",
        help="micro-batches per batch, run one after the other (default: %(default)s)",
    )
    hidden(p, "--microbatches", "--micro-batches", type=whole)
    add(
        "--prefetch",
        type=positive,
        metavar="N",
        help="batches to load ahead while steps run; 0: none (default: 2; 0 for --plan ddp)",
    )
    add("--clip-norm", type=amount, metavar="X", help="clip gradients to this global norm")
    add("--clip-value", type=amount, metavar="X", help="clip each gradient value to this size")
    add(
        "--ema",
        type=amount,
        metavar="DECAY",
        help="keep a moving average of the weights with this decay, such as 0.999",
    )
    add(
        "--detect-anomaly", action="store_true", help="stop at the op that first makes a NaN or Inf, and name it (slow)"
    )


def _run_options(p: argparse.ArgumentParser) -> None:
    """What is written down, and when a run ends."""
    whole, positive, amount = _at_least(1, int), _at_least(0, int), _at_least(0, float)
    add = p.add_argument_group("the run").add_argument
    add("--run-dir", metavar="DIR", help="directory for logs, events and results (default: runs/RECIPE-TIME)")
    add(
        "--checkpoint",
        metavar="STORE",
        help="save here at the end or on SIGTERM: a folder, or s3://bucket/prefix (default: in the run directory)",
    )
    add(
        "--checkpoint-every",
        default="0",
        metavar="N",
        help="also every N steps, or every 30s, 10m, 2h, written beside the steps (default: 0, only at the end)",
    )
    add(
        "--keep",
        default="",
        metavar="WHICH",
        help='checkpoints of this run that stay, such as "last 3, every 1000" (steps); the default keeps all',
    )
    add("--hash-every", type=positive, default=0, metavar="N", help="log the hash of all state every N steps")
    add(
        "--resume",
        nargs="?",
        const="must",
        default="",
        choices=["must", "auto"],
        metavar="auto",
        help="continue the run in --checkpoint (STORE#RUN where it holds several); with `auto`, only if there is one",
    )
    add(
        "--timeline",
        nargs="?",
        const="",
        metavar="FILE",
        help="record what every rank does in a step (default FILE: timeline.json in the run directory)",
    )
    add(
        "--timeline-steps",
        type=whole,
        default=3,
        metavar="N",
        help="steps to record once warmed up; the median one is kept (default: 3)",
    )
    add(
        "--log-every",
        type=whole,
        metavar="K",
        help="read the losses from the device every K steps (default: 1 on CPU, 10 on GPU)",
    )
    add("--master-port", type=positive, default=0, metavar="P", help="port at which ranks meet (default: a free one)")
    add(
        "--timeout",
        type=amount,
        default=TIMEOUT_S,
        metavar="S",
        help=f"stop if no rank makes progress for S seconds (default: {TIMEOUT_S:.0f})",
    )


def _at_least(least: int, kind: type) -> Callable[[str], Any]:
    """A number for argparse that is not below `least`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    number.__name__ = "whole number" if kind is int else "number"  # argparse's word for it in errors
    return number


def run_train(args: argparse.Namespace, train: Callable[..., Any], load_recipe: Callable[[str], Any]) -> int:
    """Be the launcher, or a rank where the environment says so; the exit code."""
    place = RankPlace.of(os.environ)
    world = world_of(args, place)
    path, _, function = args.recipe.partition(":")
    if not function or not Path(path).is_file():
        load_recipe(args.recipe)  # says what is wrong with the name
    if args.resume and not args.checkpoint and not args.run_dir:
        raise RecipeError(
            "--resume needs --checkpoint DIR, the place to resume from",
            next="or --run-dir DIR, a run that kept its own",
        )
    if args.checkpoint and "://" not in args.checkpoint and (place is None or place.rank == 0):
        refuse_unwritable(Path(args.checkpoint.partition("#")[0]))
    if args.timeline and not Path(args.timeline).absolute().parent.is_dir():
        raise RecipeError(f"--timeline {args.timeline}: there is no such folder", next="make it first")
    if place is not None:
        return be_a_rank(args, place, train)
    return start(args, world)


def refuse_unwritable(checkpoint: Path) -> None:
    """Find out that nothing can be written there now, not after the last step."""
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
        probe = checkpoint / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StateError(
            f"--checkpoint {checkpoint} can't be written: {error.strerror}", next="name a folder that can"
        ) from None


def world_of(args: argparse.Namespace, place: RankPlace | None) -> int:
    """How many ranks; refused here where plan, mesh and workers do not agree, before any rank starts."""
    mesh = args.mesh
    if args.plan.endswith(".json"):
        loaded = load_plan(args.plan)
        if mesh is not None and isinstance(loaded, Staged):
            raise MeshError(f"{args.plan} has stages with meshes of their own", next="leave out --mesh")
        if mesh is not None and mesh != loaded.mesh:
            raise MeshError(f"{args.plan} is for {loaded.mesh}, not for {mesh}", next="leave out --mesh")
        mesh = loaded.mesh
    elif args.plan not in PLANS:
        raise PlanError(f"there is no plan {args.plan!r}", allowed="  ".join(PLANS) + "  FILE.json")
    if args.cluster is not None and mesh is None and not args.workers and place is None:
        return Cluster.named(args.cluster).devices
    world = place.world if place is not None else args.workers or (mesh.ranks if mesh else 1)
    if args.workers and args.workers != world:
        raise MeshError(f"--workers {args.workers} among {world} ranks", next="leave out --workers under torchrun")
    if mesh is not None and mesh.ranks != world:
        raise MeshError(
            f"{mesh} has {mesh.ranks} ranks, and there are {world} workers",
            next=f"use --workers {mesh.ranks}, or a mesh of {world}",
        )
    return int(world)


def start(args: argparse.Namespace, world: int) -> int:
    """The launcher: ranks on this machine until they are done."""
    from laminar.launch import local

    listener = local.reserve(args.master_port) if world > 1 else None
    where = rundir.make(args.recipe, args.run_dir, bool(args.resume))
    rundir.write_config(where, _asked(args), world)
    show = display(quiet=args.json)
    try:
        arguments = [*args.argv, "--run-dir", str(where)]
        ended = local.launch(arguments, world, where, listener, show.on, show.tick, args.timeout)
    finally:
        show.close()
    if isinstance(ended, Verdict):
        return _failed(args, ended, where)
    _done(args, ended, where)
    return 0


def be_a_rank(args: argparse.Namespace, place: RankPlace, train: Callable[..., Any]) -> int:
    """One rank. The process ends here. Under another launcher than ours, rank 0 shows the progress."""
    mine = args.run_dir or str(Path("runs") / rundir.default_name(args.recipe))
    where = rundir.RunDir(Path(mine if args.run_dir else agree_on(place, mine, os.environ)))
    speaks = place.rank == 0 and not place.launched
    if speaks:
        rundir.make(args.recipe, str(where), bool(args.resume))
        rundir.write_config(where, _asked(args), place.world)
    show = display(quiet=args.json or not speaks)
    events.subscribe(show.on)
    ended: dict[str, Any] = {}
    checkpoint = args.checkpoint or str(where.checkpoint)
    resume = args.resume == "must" or (args.resume == "auto" and holds_a_checkpoint(checkpoint))

    def body() -> None:
        outcome = train(
            args.recipe,
            steps=args.steps,
            seed=args.seed,
            log_every=args.log_every,
            checkpoint=checkpoint,
            resume=resume,
            plan_file=where.plan,
            plan=args.plan,
            cluster=args.cluster,
            mesh=args.mesh,
            device=args.device,
            precision=args.precision,
            micro_batches=args.micro_batches,
            clip_norm=args.clip_norm,
            clip_value=args.clip_value,
            ema=args.ema,
            compile=args.compile,
            detect_anomaly=args.detect_anomaly,
            timeout_s=max(args.timeout, 1.0),
            timeline_steps=args.timeline_steps,
            prefetch=args.prefetch,
            checkpoint_every=args.checkpoint_every,
            keep=args.keep,
            check=args.check,
            measure=args.measure,
            exact=args.exact,
            rebalance=args.rebalance,
            hash_every=args.hash_every,
            timeline=None if args.timeline is None else Path(args.timeline or where.timeline),
        )
        ended.update(asdict(outcome))

    found = run_rank(body, place, where)
    show.close()
    code = 0
    if found is not None:
        code = found.code if place.launched else _failed(args, found, where)
    elif speaks:
        _done(args, ended, where)
    leave(code)


def _done(args: argparse.Namespace, ended: dict[str, Any], where: rundir.RunDir) -> None:
    """The last words of a run that went well."""
    checkpoint = args.checkpoint or str(where.checkpoint)
    if args.json:
        print(json.dumps(events.json_value({**ended, "run_dir": str(where), "checkpoint": checkpoint})))
    else:
        print(summary(ended, str(where), checkpoint))


def _failed(args: argparse.Namespace, found: Verdict, where: rundir.RunDir) -> int:
    """What went wrong: the traceback first, then one error."""
    name = type(found.error).__name__
    if found.traceback and (args.debug or not found.plain):
        print(((args.debug and found.full) or found.traceback).rstrip() + "\n", file=sys.stderr)
    if args.json:
        said = {"error": name, "message": str(found.error), "rank": found.rank, "run_dir": str(where)}
        print(json.dumps(said))
    print(f"{name}: {found.error}\nrun directory  {where}", file=sys.stderr, flush=True)
    return found.code


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as the run directory keeps them."""
    asked = {k: v for k, v in vars(args).items() if k not in ("run", "argv", "verb", "debug", "json")}
    return {**asked, "mesh": args.mesh.to_json() if args.mesh else None}
