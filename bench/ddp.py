"""Data parallel on 2 Gloo ranks: forward, backward and gradient reduction, beside DDP.

Three models: a GPT of about 10M parameters, a wide MLP (gradients large against compute), and a CNN
with batch norm over the whole batch (DDP under SyncBatchNorm; where torch's own needs a GPU, its
arithmetic is written with autograd collectives). Both sides run in the same two processes, one
thread each, in paired rounds with a barrier before each. `ddp` is DDP as it comes, `ddp_views` with
`gradient_as_bucket_view=True`, which saves it a copy of the gradients where autograd allows. Both sides'
gradients are compared with one process; a CNN in float32 may differ by more than rounding where a rectifier
sits at zero.

    python bench/ddp.py [gpt mlp cnn] [--rounds 12]

Targets (`ddp` time over laminar time): gpt >= 1.0, mlp >= 1.2, cnn >= 1.0.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import paired, ratio, report
from torch import nn

import laminar
from laminar.api import inputs_of, load_recipe
from laminar.runtime.module import Step
from laminar.runtime.shards import shard
from laminar.runtime.transport import Groups, join

EXAMPLES = Path(__file__).parent.parent / "examples"


def gpt():  # type: ignore[no-untyped-def]
    """The 10M-parameter GPT of the examples, on 8 sequences of 64 tokens so that reduction counts."""
    load_recipe(f"{EXAMPLES}/gpt.py:small")
    module = sys.modules["laminar_recipe_gpt"]
    recipe = module.recipe(module.Config(layers=6, d=384, heads=6, vocab=256, tokens=64, batch=8), lr=1e-3, steps=1)
    return recipe.model(), recipe.loss, next(iter(recipe.data()))


def mlp():  # type: ignore[no-untyped-def]
    """Four wide layers, few samples: 16.8M parameters, and reduction is half of the step."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(2048, 10))
    batch = (torch.randn(64, 2048), torch.randint(0, 10, (64,)))
    return model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch


def cnn():  # type: ignore[no-untyped-def]
    """A small residual CNN with batch norm, 32 x 32 images."""
    recipe = load_recipe(f"{EXAMPLES}/resnet.py:small")
    return recipe.model(), recipe.loss, next(iter(recipe.data()))


MODELS = {"gpt": gpt, "mlp": mlp, "cnn": cnn}
TARGETS = {"gpt": 1.0, "mlp": 1.2, "cnn": 1.0}


class _Synced(torch.autograd.Function):
    """Batch norm over all ranks' samples, as SyncBatchNorm computes it: gather of statistics, reduce in backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):  # type: ignore[no-untyped-def, override]
        dims = (0, *range(2, x.dim()))
        var, mean = torch.var_mean(x, dims, correction=0)
        mine = torch.stack([mean, var])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        stacked = torch.stack(every)
        mean = stacked[:, 0].mean(0)
        var = (stacked[:, 1] + (stacked[:, 0] - mean) ** 2).mean(0)
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        x, weight, mean, rstd = ctx.saved_tensors
        dims = (0, *range(2, x.dim()))
        shape = [1, -1] + [1] * (x.dim() - 2)
        unit = (x - mean.view(shape)) * rstd.view(shape)
        dw, db = (dy * unit).sum(dims), dy.sum(dims)
        both = torch.stack([dw, db])
        dist.all_reduce(both)
        n = x.numel() // x.shape[1] * dist.get_world_size()
        dx = (dy - (both[1] / n).view(shape) - unit * (both[0] / n).view(shape)) * (weight * rstd).view(shape)
        return dx, dw, db, None


class Synced(nn.BatchNorm2d):
    """The module around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Synced.apply(x, self.weight, self.bias, self.eps)


def synced(module: nn.Module) -> nn.Module:
    """The model with every batch norm synchronised."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = Synced(child.num_features, child.eps)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            synced(child)
    return module


def worker(rank: int, world: int, folder: str, name: str, rounds: int, calls: int) -> None:
    """One rank of both sides."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(rank, world, f"{folder}/rendezvous")
    model, loss, batch = MODELS[name]()
    mesh = laminar.Mesh({"dp": world})
    graph = laminar.capture(model, loss, batch)
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    step = Step(program, Groups(mesh))
    whole = inputs_of(graph, model, batch)
    local = [shard(whole[i.name].detach(), i.placed.nd, mesh, rank).clone() for i in program.inputs]

    from laminar.capture.capture import flatten, unflatten

    leaves, tree = flatten(batch)
    mine = unflatten(tree, {k: v.chunk(world)[rank].contiguous() for k, v in leaves.items()})
    one = copy.deepcopy(model)
    loss(one, batch).backward()
    want = {n: p.grad for n, p in one.named_parameters()}
    ddp = nn.parallel.DistributedDataParallel(synced(model))
    views = nn.parallel.DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)

    def run_ddp(model: nn.Module = ddp) -> None:
        for p in model.parameters():
            p.grad = None
        loss(model, mine).backward()

    outs = step(*local)
    run_ddp()
    got = {
        "laminar": {o.name: t for o, t in zip(program.outputs, outs, strict=True) if o.kind == "grad"},
        "ddp": {n: p.grad for n, p in ddp.module.named_parameters()},
    }
    worst = {
        side: max(float((grads[n] - g).abs().max() / g.abs().max().clamp(min=1e-6)) for n, g in want.items())
        for side, grads in got.items()
    }

    def side(run):  # type: ignore[no-untyped-def]
        def go() -> None:
            dist.barrier()
            for _ in range(calls):
                run()

        return go

    sides = {"laminar": lambda: step(*local), "ddp": run_ddp, "ddp_views": lambda: run_ddp(views)}
    times = paired({name: side(run) for name, run in sides.items()}, rounds, 1)
    if rank == 0:
        Path(folder, "times").write_bytes(
            pickle.dumps((times, program.counts(), worst, sum(p.numel() for p in model.parameters())))
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure the models named, or all."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("models", nargs="*", default=[])
    args.add_argument("--rounds", type=int, default=12)
    args.add_argument("--calls", type=int, default=4)
    args.add_argument("--world", type=int, default=2)
    given = args.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in given.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                context.Process(target=worker, args=(r, given.world, folder, name, given.rounds, given.calls))
                for r in range(given.world)
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
            if any(job.exitcode for job in jobs):
                raise SystemExit(f"{name}: a rank failed")
            times, counts, worst, parameters = pickle.loads(Path(folder, "times").read_bytes())
        report(
            f"ddp_{name}",
            {
                "ddp_over_laminar": ratio(times, "ddp", "laminar"),
                "ddp_views_over_laminar": ratio(times, "ddp_views", "laminar"),
                "target": TARGETS[name],
                "ms": {k: round(sorted(v)[len(v) // 2] * 1e3 / given.calls, 2) for k, v in times.items()},
                "ranks": given.world,
                "parameters": parameters,
                "collectives": counts,
                "gradient_error_against_one_process": worst,
            },
        )


if __name__ == "__main__":
    main()
