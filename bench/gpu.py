"""One GPU: is a step through Laminar as fast and as small as torch.compile with a fused optimizer?

`gpt`: GPT-2 medium (355M parameters, embedding and head tied), 16 sequences of 1024 tokens, bfloat16 autocast
over float32 weights, fused AdamW. `cnn`: the residual network of the examples at 17M parameters, 128 images of
112 by 112, the same autocast, fused SGD with momentum. Sides: `eager`, plain PyTorch; `compile`, torch.compile
around model and loss; `laminar`, `laminar.parallelize(..., precision="bf16")`; `bare`, the compiled program with
the optimizer called by hand, which is `laminar` without gradient norm and bookkeeping.

    python bench/gpu.py [gpt cnn] [--sides eager compile laminar] [--rounds 12] [--calls 5] [--profile DIR]

Memory and the seconds of the first step are measured with each side alone in a process of its own, with an empty
compile cache (cold), then with what that left (warm). `reserved` is what a process holds of the device after a few
steps, its cache emptied after the first. That is the figure to compare: memory of CUDA graphs, which `laminar` replays
and `compile` by default does not, counts as allocated only while they are recorded. Times are from rounds that
alternate between sides in one process. Utilisation counts 6 flops per matrix parameter and token and 12 per layer,
width and token of context for attention (the causal half not deducted), over a dense peak of 989 Tflop/s.

Targets: laminar over compile at most 1.00 in time and 1.02 in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import paired, ratio, report
from torch import nn

import laminar
from laminar.api import inputs_of, load_recipe
from laminar.runtime.code.inductor_step import Compiled
from laminar.runtime.comm.transport import Null

EXAMPLES = Path(__file__).parent.parent / "examples"
PEAK_FLOPS = 989e12
Run = Callable[[], Any]


def gpt(small: bool):  # type: ignore[no-untyped-def]
    """Model, loss, batch, optimizer, flops of a step."""
    load_recipe(f"{EXAMPLES}/gpt.py:tiny")
    module = sys.modules["laminar_recipe_gpt"]
    config = (
        module.Config(layers=2, d=64, heads=4, vocab=128, tokens=32, batch=4)
        if small
        else module.Config(layers=24, d=1024, heads=16, vocab=50304, tokens=1024, batch=16)
    )
    torch.manual_seed(0)
    model = module.GPT(config)
    model.head.weight = model.embed.weight
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    tokens = config.batch * config.tokens
    flops = tokens * (6 * matrices + 12 * config.layers * config.d * config.tokens)
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab, (config.batch, config.tokens + 1), generator=rng)
    batch = {"ids": ids[:, :-1].contiguous(), "target": ids[:, 1:].contiguous()}
    make = lambda params: torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)  # noqa: E731
    return model, module.loss, batch, make, flops


def cnn(small: bool):  # type: ignore[no-untyped-def]
    """The same for the residual network; flops by counting its convolutions on a dry run."""
    load_recipe(f"{EXAMPLES}/resnet.py:tiny")
    module = sys.modules["laminar_recipe_resnet"]
    torch.manual_seed(0)
    model = module.ResNet(widths=[8, 16] if small else [64, 128, 256, 512], blocks=1 if small else 3, classes=10)
    batch = next(module.images(batch=4 if small else 128, size=16 if small else 112, classes=10))
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        shape = batch["image"].shape
        module.ResNet(widths=[8, 16] if small else [64, 128, 256, 512], blocks=1 if small else 3, classes=10)(
            torch.empty(shape)
        )
    make = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)  # noqa: E731
    return model, module.loss, batch, make, 3 * counter.get_total_flops()


MODELS = {"gpt": gpt, "cnn": cnn}


def autocast(loss: Callable[[Any, Any], Any], device: str) -> Callable[[Any, Any], Any]:
    """A loss in bfloat16 where that is safe."""

    def run(model: Any, batch: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(model, batch)

    return run


def side(name: str, case: str, device: str, small: bool) -> Run:
    """One side's whole step: forward, backward, update. Returns the loss, on the device."""
    model, loss, batch, make, _ = MODELS[case](small)
    batch = {k: v.to(device) for k, v in batch.items()}
    model = model.to(device)
    if name == "laminar":
        job = laminar.parallelize(model, loss, make, batch=batch, precision="bf16", device=device, compile=True)
        return lambda: job.step(batch)
    if name == "bare":
        return bare(model, autocast(loss, device), batch, make, device)
    optimizer = make(model.parameters())
    forward = autocast(loss, device)
    if name == "compile":
        forward = torch.compile(forward)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        out = forward(model, batch)
        out.backward()
        optimizer.step()
        return out.detach()

    return step


def bare(model: Any, loss: Any, batch: Any, make: Any, device: str) -> Run:
    """The program itself, without a job around it."""
    graph = laminar.capture(model, loss, batch)
    mesh = laminar.Mesh({"dp": 1})
    program = laminar.lower(graph, laminar.plans.data_parallel(graph, mesh))
    static = [i for i, item in enumerate(program.inputs) if item.kind in ("param", "buffer")]
    run = Compiled(program, Null(mesh, device=device), None, static)
    whole = inputs_of(graph, model, batch)
    given = [whole[i.name].detach().to(device) for i in program.inputs]
    params = dict(model.named_parameters())
    optimizer = make(model.parameters())
    grads = [(params[o.name], k) for k, o in enumerate(program.outputs) if o.kind == "grad"]
    buffers = [(whole[o.name], k) for k, o in enumerate(program.outputs) if o.kind == "buffer"]

    def step() -> Any:
        out = run(*given)
        for p, k in grads:
            p.grad = out[k]
        for b, k in buffers:
            b.copy_(out[k])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out[0]

    return step


def alone(name: str, case: str, device: str, small: bool, calls: int = 5) -> dict[str, float]:
    """First step and memory of one side that has the process to itself."""
    start = time.perf_counter()
    run = side(name, case, device, small)
    run()
    sync(device)
    first = time.perf_counter() - start
    out: dict[str, float] = {"first_step_s": round(first, 1)}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(calls):
            run()
        sync(device)
        out["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        if name in ("eager", "compile"):
            out["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return out


def sync(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def child(name: str, case: str, small: bool, cache: str) -> dict[str, float]:
    """`alone`, in a process of its own."""
    command = [sys.executable, __file__, case, "--alone", name, *(["--small"] if small else [])]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{name} alone failed")
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def profiled(run: Run, path: Path, device: str) -> None:
    """Write a table of kernels of three steps."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else [])
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            run()
        sync(device)
    rows = profile.key_averages()
    path.write_text(
        rows.table(
            sort_by=f"{device}_time_total" if device == "cuda" else None, row_limit=90, max_name_column_width=110
        )
    )


def main() -> None:
    """Each model: every side alone, then all of them in turns."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("models", nargs="*", default=["gpt", "cnn"])
    args.add_argument("--sides", nargs="*", default=["eager", "compile", "laminar"])
    args.add_argument("--rounds", type=int, default=12)
    args.add_argument("--calls", type=int, default=5)
    args.add_argument("--profile", type=Path)
    args.add_argument("--alone")
    args.add_argument("--together-only", action="store_true", help="skip what each side does alone")
    args.add_argument("--small", action="store_true", help="a size for trying the benchmark itself, on any device")
    given = args.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.small:
        print("skipped: there is no GPU here; --small tries the benchmark itself on the CPU", file=sys.stderr)
        return
    if given.alone:
        print(json.dumps(alone(given.alone, given.models[0], device, given.small)))
        return
    for case in given.models:
        found: dict[str, dict[str, Any]] = {name: {} for name in given.sides}
        if not given.together_only:
            with tempfile.TemporaryDirectory() as where:
                for name in given.sides:
                    cold = child(name, case, given.small, f"{where}/{name}")
                    warm = child(name, case, given.small, f"{where}/{name}") if name != "eager" else cold
                    found[name] = {**warm, "cold_s": cold["first_step_s"], "warm_s": warm.pop("first_step_s")}
        runs = {name: side(name, case, device, given.small) for name in given.sides}
        for name, run in runs.items():
            for _ in range(3):
                run()
            sync(device)
            if given.profile:
                given.profile.mkdir(exist_ok=True, parents=True)
                profiled(run, given.profile / f"{case}_{name}.txt", device)

        def several(run: Run) -> Run:
            def repeat() -> None:
                for _ in range(given.calls):
                    run()
                sync(device)

            return repeat

        times = paired({n: several(r) for n, r in runs.items()}, given.rounds, 1)
        flops = MODELS[case](given.small)[-1]
        middle = {n: sorted(t)[len(t) // 2] / given.calls for n, t in times.items()}
        for name in found:
            found[name] |= {"ms": round(middle[name] * 1e3, 2), "mfu": round(flops / middle[name] / PEAK_FLOPS, 3)}
        over = {
            f"{name}_over_compile": ratio(times, name, "compile")
            for name in given.sides
            if name != "compile" and "compile" in given.sides
        }
        if "reserved_gb" in found.get("compile", {}):
            base = found["compile"]["reserved_gb"]
            over |= {
                f"{n}_memory_over_compile": round(f["reserved_gb"] / base, 3)
                for n, f in found.items()
                if n != "compile"
            }
        result = {"model": case, **over, "sides": found, "rounds": given.rounds, "calls": given.calls}
        print(json.dumps(result)) if given.small else report("gpu", result)


if __name__ == "__main__":
    main()
