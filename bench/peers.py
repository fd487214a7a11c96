"""The peers: a full training step by DDP, by FSDP2 and by eager DTensor, and ours, behind one face.

Every side takes the same global batches and starts from the same weights; AdamW is fused on all of them, and so is
SGD for the cases that ask for it, but on DTensors. Peers get their own share of each batch cut beforehand and their
usual fast settings: DDP with `gradient_as_bucket_view`, `static_graph` and no broadcast of buffers, FSDP2 with every
block sharded and gathered again in backward and the root as it comes, DTensor with the column-then-row split that
needs one all-reduce per pair. Of these only FSDP2's grouping of DLRM's tables was tried in several ways (one by one
is fastest).

What torch does not have on a CPU is written here with its own parts: batch norm over all ranks
(`SyncBatchNorm` needs a GPU) and convolutions split by channel (`parallelize_module` knows linear
layers and embeddings; DTensor's own convolution rule knows no split of channels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import laminar

LR = 1e-4


@dataclass
class Side:
    """One way to train: `step(i)` does a whole step on batch i, `memory()` counts this rank's bytes."""

    step: Callable[[int], Any]
    loss: Callable[[Any], float]
    """The loss over the whole batch, of what a step gave back."""
    memory: Callable[[], dict[str, int]]
    counts: dict[str, int] | None = None
    same: bool = True
    """Whether it computes what ours computes."""
    runs: str = ""
    """Of ours: two sides that run the same program have the same."""


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of every side. DTensors and plain tensors can't share a fused call, so they are two groups."""
    every = list(params)
    groups = [[p for p in every if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return torch.optim.AdamW([{"params": g} for g in groups if g], lr=LR, fused=True)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Plain SGD, whose step on a sparse gradient is its step on the dense one. DTensor has no fused one."""
    every = list(params)
    return torch.optim.SGD(every, lr=0.1, fused=not any(isinstance(p, DTensor) for p in every))


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


class Several:
    """Optimizers that step together: fused calls don't take sparse gradients."""

    def __init__(self, each: list[torch.optim.Optimizer]) -> None:
        self.each = each

    @property
    def state(self) -> dict[Any, Any]:
        """What all of them keep."""
        return {k: v for one in self.each for k, v in one.state.items()}

    def zero_grad(self) -> None:
        """All of them."""
        for one in self.each:
            one.zero_grad()

    def step(self) -> None:
        """All of them."""
        for one in self.each:
            one.step()


def sparsely(module: nn.Module, case: Case) -> Several:
    """Tables updated where they were read: by SGD as it is, or by SparseAdam, which is not what AdamW does."""
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    known = {id(t) for t in tables}
    rest = OPTIMIZERS[case.optimizer](p for p in module.parameters() if id(p) not in known)
    lr = rest.param_groups[0]["lr"]
    theirs = torch.optim.SGD(tables, lr=lr) if case.optimizer == "sgd" else torch.optim.SparseAdam(tables, lr=lr)
    return Several([rest, theirs])


def ours(case: Case, plan: Any, exact: Any = None, micro_batches: int = 1) -> Side:
    """`laminar.parallelize` with a plan by name, or a function that makes one; in exact mode if asked."""
    how = {"batch": case.batches[0], "plan": plan, "exact": exact, "micro_batches": micro_batches}
    job = laminar.parallelize(fresh(case), case.loss, OPTIMIZERS[case.optimizer], device="cpu", **how)
    program = getattr(job, "program", None)  # jobs with stages have several
    return Side(
        lambda i: job.step(case.batches[i % len(case.batches)]),
        lambda r: float(r.loss),
        lambda: dict(job.memory()),
        program.counts() if program is not None else None,
        runs="" if program is None else program.runs_hash,
    )


def ddp(case: Case, sync: bool = True) -> Side:
    """DistributedDataParallel. `sync=False` leaves batch norm to each rank, which computes something else."""
    model = synced(fresh(case)) if sync else fresh(case)
    wrapped = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    side = _eager(case, wrapped, split=True)
    side.same = sync
    return side


def alone(case: Case) -> Side:
    """Plain PyTorch, every rank on the whole batch: what data parallel comes to where there is nothing to split."""
    return _eager(case, fresh(case), split=False)


def ddp_sparse(case: Case) -> Side:
    """DDP that sends and updates only the rows of tables that were read; comparable where all sides use SGD."""
    model = fresh(case)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    side = _eager(case, wrapped, split=True, optimizer=sparsely(model, case))
    side.same = case.optimizer == "sgd"
    return side


def fsdp(case: Case) -> Side:
    """FSDP2: each block, then the root, which by its default stays gathered between forward and backward."""
    model = synced(fresh(case))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return _eager(case, model, split=True)


def dtensor(case: Case) -> Side:
    """`parallelize_module` by the case's table of ways; the batch and the loss are whole."""
    model = fresh(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, module in model.named_modules():
        way = next((w for end, w in case.ways.items() if name == end or name.endswith(f".{end}")), None)
        if way is None:
            continue
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            by_channel(module, mesh, way)
        else:
            styles = {
                "column": ColwiseParallel(),
                "row": RowwiseParallel(),
                "vocab": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(module, mesh, styles[way])
    return _eager(case, model, split=False)


def fresh(case: Case) -> nn.Module:
    """The model with the weights every side starts from."""
    torch.manual_seed(0)
    return case.model()


def _eager(case: Case, model: nn.Module, split: bool, optimizer: Any = None) -> Side:
    """An ordinary training loop's step."""
    optimizer = optimizer or OPTIMIZERS[case.optimizer](model.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = case.batches
    if split:
        batches = [{k: v.chunk(world)[rank].contiguous() for k, v in b.items()} for b in batches]

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def whole(loss: Tensor) -> float:
        loss = loss.clone()
        if split:
            dist.all_reduce(loss)
            loss /= world
        return float(loss)

    def memory() -> dict[str, int]:
        params = list(model.parameters())
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return {
            "parameters": _bytes(params),
            "gradients": _bytes(p.grad for p in params if p.grad is not None),
            "state": _bytes(state),
        }

    return Side(step, whole, memory)


def _bytes(tensors: Iterable[Any]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


class _Synced(torch.autograd.Function):
    """Batch norm over all ranks' samples as SyncBatchNorm computes it: statistics gathered, sums reduced back."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm):  # type: ignore[no-untyped-def, override]
        dims = (0, *range(2, x.dim()))
        var, mean = torch.var_mean(x, dims, correction=0)
        mine = torch.stack([mean, var])
        every = mine.new_empty(dist.get_world_size() * 2, mine.shape[1])
        dist.all_gather_into_tensor(every, mine)
        stacked = every.view(-1, 2, mine.shape[1])
        mean = stacked[:, 0].mean(0)
        var = (stacked[:, 1] + (stacked[:, 0] - mean) ** 2).mean(0)
        n = x.numel() // x.shape[1] * dist.get_world_size()
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(var * (n / (n - 1)), norm.momentum)
        norm.num_batches_tracked += 1
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + norm.eps))
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, norm.eps, False)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        x, weight, mean, rstd = ctx.saved_tensors
        dims = (0, *range(2, x.dim()))
        shape = [1, -1] + [1] * (x.dim() - 2)
        unit = (x - mean.view(shape)).mul_(rstd.view(shape))
        both = torch.stack([(dy * unit).sum(dims), dy.sum(dims)])
        dw, db = both.clone()
        dist.all_reduce(both)
        both /= x.numel() // x.shape[1] * dist.get_world_size()
        dx = unit.mul_(both[0].view(shape)).add_(both[1].view(shape)).neg_().add_(dy).mul_((weight * rstd).view(shape))
        return dx, dw, db, None


class Synced(nn.BatchNorm2d):
    """The module around it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Synced.apply(x, self.weight, self.bias, self)


def synced(module: nn.Module) -> nn.Module:
    """The model with every batch norm over all ranks."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = Synced(child.num_features, child.eps)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            synced(child)
    return module


def by_channel(module: nn.Module, mesh: Any, way: str) -> None:
    """A convolution or batch norm split by channel: weights are DTensors, arithmetic is on their local parts.

    `column`: outputs are split, so what flows back to a whole input is a term of a sum (batch norm has no
    such input: it follows a split convolution). `row`: inputs are split, the output is a term of a sum.
    """
    for name, p in list(module.named_parameters(recurse=False)):
        dim = 1 if way == "row" else 0
        setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dim)])))
    if isinstance(module, nn.BatchNorm2d):
        for name in ("running_mean", "running_var"):
            setattr(module, name, getattr(module, name).chunk(mesh.size())[mesh.get_local_rank()].clone())

        def norm(x: Tensor) -> Tensor:
            module.num_batches_tracked += 1
            weight, bias = module.weight.to_local(), module.bias.to_local()
            return F.batch_norm(
                x, module.running_mean, module.running_var, weight, bias, True, module.momentum, module.eps
            )

        module.forward = norm  # type: ignore[method-assign]
        return
    assert isinstance(module, nn.Conv2d) and module.bias is None

    def conv(x: Tensor) -> Tensor:
        if way == "column":
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        y = F.conv2d(x, module.weight.to_local(), None, module.stride, module.padding)
        if way == "row":
            y = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
        return y

    module.forward = conv  # type: ignore[method-assign]
