"""The time of one op, taken so that it is the time the op has inside a step.

An op is run exactly as a program runs it (`local.prepare`), on operands that lie as its key says. A tight loop
would flatter it: a view that takes 0.6 us there takes 1.5 us between other small ops and 6 us between large ones,
because code and data have left the caches meanwhile. So CPU ops are measured *stirred*: some dozens at once,
each called once a round between the others, in a new order every round; only its first operand is read before, if
small, since in a step the op before has just made it. The sum over a step's ops then is the step's
own time within a few per cent (a tight loop: half of it for a small model). On several ranks all measure the same
ops at the same time, since they share memory and caches.

CPU ops of one thread are timed by the thread's own clock, which stands still while others have the processor; what
several threads or ranks do together is timed by the wall clock, and the lower quartile is taken.
GPU ops are recorded into a CUDA graph over operands that fill the cache, and timed by events between replays that
are queued without waiting: the host's launches are not in the figure, and the device is busy all the while, as in a
step. Heavy ops are first run for a while, because clocks fall when a device has used much power. What can't be
recorded is timed in a loop.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laminar.capture import torch_private
from laminar.capture.ops.torch_ops import DTYPES
from laminar.cost.ops.strides import strides_of
from laminar.cost.ops.table import CUT, Entry, parse_key
from laminar.ir.mesh import Mesh
from laminar.ir.ops import DRAWS
from laminar.ir.program import Instr, Placed
from laminar.ir.sbp import B, S
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import STRETCHED, Call
from laminar.runtime.code.eager_step import OUT_VARIANTS
from laminar.runtime.code.fused_lstm import FUSED, LSTM_BACKWARD, LSTM_FORWARD
from laminar.runtime.code.local_op import prepare

TARGET = 0.02
"""Measuring ends when the standard error of the median is this small a part of it."""
LEAST_ROUNDS, MOST_ROUNDS, WARM_ROUNDS = 7, 60, 2
WARM_BYTES = 1 << 20
LARGE_BYTES = 31 << 20
"""The C library takes fresh memory from the system for everything larger, until something so large was freed."""
FOOTPRINT_BYTES = 64 << 20
"""What rotating sets of operands of a GPU op fill together: about its cache."""
MOST_SETS, LEAST_CALLS = 48, 8
HEAVY_S, HEAT_S, WARM_S = 1e-4, 0.12, 0.008
"""A GPU op that takes longer than the first is repeated for the second before it is timed, any other for the third."""

TimedCall = Callable[[], Any]


# --- making an op runnable ----------------------------------------------------------------------


def runs_of(key: str, device: torch.device, sets: int | None = None) -> list[TimedCall]:
    """Ready calls of the op a key names, one per set of operands; as many as fill a cache, if not told."""
    call, marks = parse_key(key)
    if call.op.startswith("optimizer."):
        return _update(call, device)
    instr, mesh = _instr(call)
    target, args, kwargs = prepare(instr, mesh, 0, device)
    each = sum(s.nbytes for s in call.ins) + sum(o.nbytes for o in call.outs if o)
    sets = sets or max(1, min(MOST_SETS, FOOTPRINT_BYTES // max(each, 1)))
    told = len(marks) > len(call.ins)
    below = _bounds(call)
    out: list[TimedCall] = []
    for _ in range(sets):
        given = [operand(s, m, device, below.get(i, 2)) for i, (s, m) in enumerate(zip(call.ins, marks, strict=False))]
        more = {k: _fill(v, given) for k, v in kwargs.items()}
        if told:
            target, more["out"] = OUT_VARIANTS[call.op], operand(call.out, "", device)
        filled = _filled(args, given)
        if call.op in FUSED and device.type == "cpu":
            target, filled = FUSED[call.op], _with_workspace(filled) if call.op == LSTM_BACKWARD else filled
        out.append(partial(target, *filled, **more))
    return out


def _with_workspace(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a recurrent layer's backward, with what its forward keeps for it where both run fused."""
    inputs, reverse = args[3:8], args[11]
    with torch.no_grad():
        made = FUSED[LSTM_FORWARD](*inputs, None, reverse)
    return (*args[:9], *made[3:], reverse)


def _instr(call: Call) -> tuple[Instr, Mesh]:
    """The line of a program of one rank that makes this call; a draw of a piece is one of two ranks'."""
    args, mesh = call.args, Mesh({"one": 1})
    outs = tuple(Placed(o, (B,)) if o else None for o in call.outs)
    if call.op in DRAWS and args[-1] == CUT:
        args, mesh = args[:-1], Mesh({"one": 2})
        shape = call.out.shape
        outs = (Placed(TensorSpec((2 * shape[0], *shape[1:]), call.out.dtype), (S(0),)),)
    op, args = _last_stretch(call, args)
    refs = tuple(Ref("", i) for i in range(len(call.ins)))
    return Instr("op", op, args, refs, tuple(Placed(s, (B,)) for s in call.ins), outs), mesh


def _last_stretch(call: Call, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Causal attention of fewer queries than keys is priced as the last stretch of them, so that is what runs.

    Or stretches evenly apart, where the call says that there are several.
    """
    if call.op not in STRETCHED or not args[STRETCHED[call.op].arg]:
        return call.op, args
    reads, at = STRETCHED[call.op]
    rows, keys, parts = call.ins[reads].shape[2], call.ins[reads + 1].shape[2], int(args[at])
    if rows >= keys:
        return call.op, args
    each, apart = rows // parts, keys // parts
    starts = [(k * apart + apart - each, each) for k in range(parts)]
    return f"{call.op}_at", (*args[:at], True, *args[at + 1 :], starts if parts > 1 else keys - rows)


def operand(spec: TensorSpec, mark: str, device: torch.device, below: int = 2) -> Tensor:
    """A tensor that lies as the mark says: floats as `_noise` has them, integers below a bound."""
    dtype = DTYPES[spec.dtype]
    strides = strides_of(spec.shape, mark)
    room = 1 + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) if spec.numel else 0
    if dtype.is_floating_point or dtype.is_complex:
        flat = _noise(room, device).to(dtype)
    elif dtype == torch.bool:
        flat = _noise(room, device, plain=True) > 0.6
    else:
        flat = ((_noise(room, device, plain=True) - 0.1) * below).long().clamp_(0, below - 1).to(dtype)
    return flat.as_strided(spec.shape, strides)


_BLOCK: dict[tuple[torch.device, bool], Tensor] = {}


def _noise(count: int, device: torch.device, plain: bool = False) -> Tensor:
    """Fresh memory with numbers, copied from one block, because drawing them takes longer.

    Between 0.1 and 1.1 on a CPU, where roots and logarithms of others take other paths. On a GPU, unless `plain`, as
    weights and activations are: products of numbers of one sign draw less power, and run faster than they would.
    """
    normal = device.type == "cuda" and not plain
    if (device, normal) not in _BLOCK:
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn if normal else torch.rand
        _BLOCK[device, normal] = (draw(1 << 18, generator=generator) + (0.0 if normal else 0.1)).to(device)
    block = _BLOCK[device, normal]
    if count <= block.numel():
        return block[:count].clone()
    return block.repeat(-(-count // block.numel()))[:count]


def _bounds(call: Call) -> dict[int, int]:
    """For operands that are indices: what they index has so many rows."""
    op, ins = call.op, call.ins
    short = op.split(".")[1]
    if short in ("embedding", "embedding_at"):
        return {1: ins[0].shape[0]}
    if short in ("embedding_dense_backward", "embedding_backward_at"):
        return {1: call.out.shape[0]}
    if short in ("gather", "gather_at", "index_select", "scatter", "scatter_add", "index_add", "scatter_reduce"):
        return {1: ins[0].shape[call.args[1] % len(ins[0].shape)]}
    if short in ("index", "index_put"):
        places = call.args[1]
        return {r.index: ins[0].shape[d] for d, r in enumerate(places) if isinstance(r, Ref)}
    if short in ("nll_loss_forward", "nll_loss2d_forward", "nll_at"):
        return {1: ins[0].shape[min(1, len(ins[0].shape) - 1)]}
    if short in ("nll_loss_backward", "nll_loss2d_backward", "nll_backward_at"):
        return {2: ins[1].shape[min(1, len(ins[1].shape) - 1)]}
    if short == "max_pool2d_with_indices_backward":
        return {2: ins[1].shape[-1] * ins[1].shape[-2]}
    return {}


def _filled(args: Sequence[Any], given: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple(_fill(a, given) for a in args)


def _fill(arg: Any, given: Sequence[Tensor]) -> Any:
    if isinstance(arg, Ref):
        return given[arg.index]
    return [_fill(a, given) for a in arg] if isinstance(arg, list) else arg


def _update(call: Call, device: torch.device) -> list[TimedCall]:
    """A whole update of `tensors` parameters with `elements` in all, as `train/optimizer/optimizer.py` has it run."""
    tensors, elements = call.args
    params = [
        torch.nn.Parameter(operand(TensorSpec((elements // tensors,), "f32"), "", device)) for _ in range(tensors)
    ]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    record = device.type == "cuda"  # the same kernels, and the optimizer lets itself be recorded
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "optimizer.adamw": lambda: torch.optim.AdamW(params, fused=True, capturable=record),
        "optimizer.adam": lambda: torch.optim.Adam(params, fused=True, capturable=record),
        "optimizer.sgd": lambda: torch.optim.SGD(params, lr=1e-3, fused=True),
        "optimizer.momentum": lambda: torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True),
    }
    return [make[call.op]().step]


# --- timing it ------------------------------------------------------------------------------------


def error_of(times: Sequence[float]) -> float:
    """Standard error of the median over the median, from the quartiles, which outliers don't move."""
    if len(times) < 3:
        return 1.0
    low, middle, high = statistics.quantiles(times, n=4)
    return 0.93 * (high - low) / len(times) ** 0.5 / middle if middle > 0 else 1.0


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile: by the wall clock others only ever add, whole time slices where ranks wait for each other."""
    return statistics.quantiles(times, n=4)[0] if len(times) >= 4 else statistics.median(times)


More = Callable[[bool], bool]
"""Asked after every round with this rank's wish to go on. Where ranks measure together it gives all the same
answer, so that none measures while another has stopped."""


def stirred(keys: Sequence[str], limit_s: float, more: More = bool, seed: int = 0) -> dict[str, Entry]:
    """Times of CPU ops, each call between calls of the others, in a new order every round."""
    device = torch.device("cpu")
    runs: list[TimedCall] = [runs_of(key, device, 1)[0] for key in keys]
    runs.append(partial(_nothing))
    alone = torch.get_num_threads() == 1
    clock = time.thread_time_ns if alone else time.perf_counter_ns
    times: list[list[int]] = [[] for _ in runs]
    warm = [_activation(run) for run in runs]
    kept: list[Any] = [None] * len(runs)
    rng = random.Random(seed)  # the same order on every rank: they run the same op at about the same time
    order = list(range(len(runs)))
    start = time.perf_counter()
    rounds = 0
    torch.empty(LARGE_BYTES, dtype=torch.uint8)  # freed at once: from here on memory is used again, as in later steps
    with torch.no_grad():
        while True:
            rng.shuffle(order)
            for i in order:
                run, x = runs[i], warm[i]
                if x is not None:
                    torch.sum(x)
                began = clock()
                kept[i] = run()
                times[i].append(clock() - began)
            rounds += 1
            steady = rounds >= LEAST_ROUNDS and all(error_of(t) < TARGET for t in times[:-1])
            late = time.perf_counter() - start > limit_s and rounds >= WARM_ROUNDS + 3
            if not more(not steady and not late and rounds < MOST_ROUNDS):
                break
    base = statistics.median(times[-1])
    out = {}
    for key, each in zip(keys, times, strict=False):
        taken = [max(t - base, 20) * 1e-9 for t in each[WARM_ROUNDS:]]
        middle = statistics.median(taken) if alone else undisturbed(taken)
        out[key] = Entry(middle, error_of(taken), len(taken))
    return out


def _activation(run: TimedCall) -> Tensor | None:
    """What the op before has just made, in a step: the first operand, if it fits into a cache. It is read before."""
    given = getattr(run, "args", ())
    flat = [a for arg in given for a in (arg if isinstance(arg, list) else [arg])]
    first = next((a for a in flat if isinstance(a, Tensor) and a.is_floating_point()), None)
    return first if first is not None and 0 < first.numel() * first.element_size() <= WARM_BYTES else None


def _nothing() -> None:
    """What it costs to measure nothing."""


class Timer:
    """Times calls that need no stirring: whole exchanges, and everything on a GPU."""

    def __init__(self, device: torch.device | str = "cpu", limit_s: float = 0.1, more: More = bool) -> None:
        self.device, self.limit_s, self.more = torch.device(device), limit_s, more

    def __call__(self, runs: Sequence[TimedCall], before: TimedCall | None = None) -> Entry:
        """Time per call, going round over `runs`; by the wall clock on a CPU, since an exchange waits.

        `before` is called before each of them there, and not timed.
        """
        with torch.no_grad():
            return self._on_gpu(runs) if self.device.type == "cuda" else self._on_cpu(runs, before)

    def _on_cpu(self, runs: Sequence[TimedCall], before: TimedCall | None) -> Entry:
        ring = itertools.cycle(runs)
        start = time.perf_counter()

        def once() -> float:
            if before is not None:
                before()
            began = time.perf_counter()
            next(ring)()
            return time.perf_counter() - began

        once(), once()
        return self._steady(once, start)

    def _steady(self, repeat: Callable[[], float], start: float) -> Entry:
        """Repeats in rounds of growing length, until all ranks are content. Rounds are equally long on all ranks."""
        times: list[float] = []
        while True:
            times += [repeat() for _ in range(max(LEAST_ROUNDS, len(times) // 2))]
            if not self.more(error_of(times) > TARGET and time.perf_counter() - start < self.limit_s):
                return Entry(max(undisturbed(times), 1e-9), error_of(times), len(times))

    def _on_gpu(self, runs: Sequence[TimedCall]) -> Entry:
        start = time.perf_counter()
        replay, count = recorded(runs, self.device)

        def turn(rounds: int) -> list[float]:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
            marks[0].record()
            for mark in marks[1:]:
                replay()
                mark.record()
            marks[-1].synchronize()
            return [float(a.elapsed_time(b)) * 1e-3 / count for a, b in itertools.pairwise(marks)]

        once = max(turn(2)[-1], 1e-7) * count
        heat_s = HEAT_S if once / count >= HEAVY_S else WARM_S
        turn(max(1, min(MOST_ROUNDS * 10, round(heat_s / once))))
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, round(self.limit_s / 4 / once)))
        times: list[float] = []
        while True:
            times += turn(rounds)
            if not self.more(error_of(times) > TARGET and time.perf_counter() - start < self.limit_s):
                return Entry(max(statistics.median(times), 1e-9), error_of(times), len(times))


_STREAMS: dict[torch.device, Any] = {}


def recorded(runs: Sequence[TimedCall], device: torch.device) -> tuple[TimedCall, int]:
    """A CUDA graph of the calls, ready to be replayed, and how many it holds; a plain loop where there is none."""
    count = max(len(runs), LEAST_CALLS)

    def loop() -> list[Any]:
        kept: list[Any] = []
        for run in itertools.islice(itertools.cycle(runs), count):
            kept.append(run())
            del kept[: -len(runs)]
        return kept

    torch.cuda.set_device(device)
    before = torch.cuda.current_stream()
    side = _STREAMS.setdefault(device, torch.cuda.Stream())  # libraries take memory for every stream, so it is one
    side.wait_stream(before)
    with torch.cuda.stream(side):
        loop()
    torch.cuda.synchronize()
    # Not `torch.cuda.graph`, which empties caches and collects garbage, which takes longer than measuring.
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            loop()
            graph.capture_end()
    except RuntimeError:  # it waits for the device, or does something else that can't be recorded
        with contextlib.suppress(RuntimeError), torch.cuda.stream(side):
            graph.capture_end()
        torch_private.abandon_recording(device, pool, before)
        torch.cuda.synchronize()
        return loop, count
    return graph.replay, count


def workspace_bytes(device: torch.device) -> int:
    """What the library for products takes of a GPU's memory when it is first used, and keeps."""
    before = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            x = operand(TensorSpec((256, 256), "f32"), "", device).to(dtype)
            torch.mm(x, x)
            torch.addmm(x[0], x, x.t())
            del x
    torch.cuda.synchronize(device)
    _BLOCK.clear()
    return int(torch.cuda.memory_allocated(device)) - before


def launch_s(device: torch.device) -> float:
    """Host time to launch one small kernel: calls are queued without waiting, so the device is not in it."""
    x = torch.ones(64, device=device)
    out = torch.empty_like(x)
    times = []
    for _ in range(30):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            torch.add(x, x, out=out)
        times.append((time.perf_counter() - began) / 50)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return statistics.median(times)
