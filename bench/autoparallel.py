"""How long do Meta's autoparallel and our search take for the same model on the same mesh?

24-layer GPT of 355M (`examples/gpt.py`), 8 sequences of 1,024 tokens a device, bfloat16, prices of an H100; no device
is at hand, so both plan for one that is not there. autoparallel is told the mesh (it searches placements only) and that
the batch is split; ours is pinned to the same mesh and one stage. Processor seconds, children included: from the model
to something to plan (`ready`), and for the plan. autoparallel is no package of the index: give its checkout. On a CPU
build of torch its attention has no strategy and is replicated, and it is told the device's name.

    python bench/autoparallel.py --checkout DIR [--mesh 8 8x8]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import report

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt


def spent() -> float:
    """Processor seconds of this process and what it started."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in each)


def model_of(devices: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """The model without weights, and its global batch."""
    config = gpt.Config(layers=24, d=1024, heads=16, vocab=50304, tokens=1024, batch=8 * devices)
    with torch.device("meta"):
        return gpt.GPT(config).to(dtype), torch.zeros(8 * devices, 1024, dtype=torch.long, device="meta")


def theirs(shape: tuple[int, ...], checkout: str) -> dict[str, Any]:
    """Placements by autoparallel."""
    sys.path.insert(0, checkout)
    from autoparallel.api import AutoParallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.placement_types import Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cpu.get_device_name = lambda device=None: "NVIDIA H100"  # type: ignore[attr-defined]
    devices = math.prod(shape)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    model, ids = model_of(devices, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    begun = spent()
    with AutoParallel(model, lambda: torch.zeros(ids.shape, dtype=torch.long), mesh, policy) as planner:
        ready = spent()
        planner.add_parameter_memory_constraint(low=None, high=None)
        split = (Shard(0), *(Replicate(),) * (mesh.ndim - 1))
        planner.add_input_constraints([split])
        planner.add_output_constraints([split])
        planner.optimize_placement()
        return {"ready_s": round(ready - begun, 2), "plan_s": round(spent() - ready, 2)}


def ours(shape: tuple[int, ...], _: str) -> dict[str, Any]:
    """A plan by our search, with its gap."""
    import laminar

    devices = math.prod(shape)
    model, ids = model_of(devices, torch.bfloat16)
    begun = spent()
    graph = laminar.capture(model, gpt.loss, {"ids": ids, "target": ids})
    ready = spent()
    pin = {"dp": shape[0], "tp": (*shape, 1)[1], "stages": 1, "microbatches": 1}
    found = laminar.plan(graph, f"{devices}xh100", pin=pin, budget_s=600)
    return {
        "ready_s": round(ready - begun, 2),
        "plan_s": round(spent() - ready, 2),
        "gap": round(found.account["certificate"]["gap"], 4),
    }


def _alone(side: Any, shape: tuple[int, ...], checkout: str, out: Any) -> None:
    out.put(side(shape, checkout))


def main() -> None:
    """One line for each mesh."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--checkout", required=True, help="a checkout of autoparallel; its packages must be installed")
    args.add_argument("--mesh", nargs="*", default=["8", "8x8"])
    given = args.parse_args()
    told = ["git", "-C", given.checkout, "rev-parse", "--short", "HEAD"]
    version = subprocess.run(told, capture_output=True, text=True).stdout.strip() or "unknown"
    context = multiprocessing.get_context("spawn")
    for text in given.mesh:
        row: dict[str, Any] = {"mesh": text, "autoparallel_version": version}
        for name, side in (("autoparallel", theirs), ("laminar", ours)):
            queue = context.Queue()
            child = context.Process(target=_alone, args=(side, tuple(map(int, text.split("x"))), given.checkout, queue))
            child.start()
            row[name] = queue.get()
            child.join()
        report("autoparallel", row)


if __name__ == "__main__":
    main()
