"""Every private name of torch that Laminar leans on, in one place.

Nothing here is promised by torch; it is tried on 2.11 to 2.13 by the tests of capture and runtime. When
a new torch moves something, this is the file to change, and no other file spells an underscore of torch's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import logging
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._decomp import get_decompositions as get_decompositions
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.proxy_tensor import get_proxy_slot as get_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

LOOKS_AT_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    UnsupportedFakeTensorException,
)
"""What fake tensors say when asked for values, or for an op that has no form for them."""

LOW_RANK = "torch._lowrank"
"""Where approximate decompositions are written in Python."""
torch_assert: Any = torch._assert
dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version
"""Another number after every change of a dict."""
disable_current_modes = torch.utils._python_dispatch._disable_current_modes
gelu, silu = torch._C._nn.gelu, torch._C._nn.silu
multilabel_margin_loss = torch._C._nn.multilabel_margin_loss
grouped_mm = torch._grouped_mm
lstm, gru, rnn_tanh, rnn_relu = torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu
foreach_copy, foreach_add, foreach_mul = torch._foreach_copy_, torch._foreach_add_, torch._foreach_mul_
foreach_norm, foreach_lerp, foreach_clamp_max, foreach_clamp_min = (
    torch._foreach_norm,
    torch._foreach_lerp_,
    torch._foreach_clamp_max_,
    torch._foreach_clamp_min_,
)


def step_hooks(optimizer: Any) -> int:
    """How many functions run before or after each step of an optimizer, its own and those of all optimizers."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own + len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


def schema(op: Any) -> Any:
    """The schema of an op overload; None for anything else."""
    return getattr(op, "_schema", None)


def composite(op: Any) -> bool:
    """Whether an op is made of others on every device, so that its schema need not tell what it gives back."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(op.name(), "CompositeImplicitAutograd")) and not has(op.name(), "CPU")


def overload_name(op: Any) -> str:
    """The overload part of an op's name."""
    return str(op._overloadname)


def wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is another one in the hands of `torch.func`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def autograd_node() -> Any:
    """The autograd node whose backward is running, or None."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """The number of the autograd node made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


@contextlib.contextmanager
def nodes_made(proxy: Any) -> Iterator[list[Any]]:
    """A list that on leaving holds the nodes traced meanwhile."""
    found: list[Any] = []
    root = proxy.tracer.graph._root
    last = root.prev
    yield found
    node = last.next
    while node is not root:
        found.append(node)
        node = node.next


without_function_modes = torch._C.DisableTorchFunction


def function_modes() -> list[Any]:
    """The torch-function modes that are active."""
    return list(torch.overrides._get_current_function_mode_stack())


@contextlib.contextmanager
def checkpoints(again: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, every checkpointed region is of the kind that recomputes by running `again(fn)` instead of `fn`."""
    module: Any = torch.utils.checkpoint
    inner, compiling = module._checkpoint_without_reentrant_generator, module._is_compiling
    entry = module.CheckpointFunction.__dict__.get("apply")  # inherited, unless someone has changed it

    def generator(fn: Any, preserve: bool, *rest: Any, **kw: Any) -> Any:
        # Torch runs the region for the first time itself: this is called to run it again.
        return inner(again(fn), False, *rest, **kw)

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            with torch.no_grad():  # as torch's own: what is inside then gets no gradient, parameters included
                return function(*args)
        return module.checkpoint(function, *args, use_reentrant=False)

    module._checkpoint_without_reentrant_generator = generator
    module.CheckpointFunction.apply = reentrant
    module._is_compiling = lambda *_: False  # selective policies then keep what they say
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = inner
        if entry is None:
            del module.CheckpointFunction.apply
        else:
            module.CheckpointFunction.apply = entry
        module._is_compiling = compiling


_TALKERS = (
    "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_impls",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what torch logs about tensors that hold nothing is kept back: the error that follows says it in words."""
    found = [(log, log.disabled) for log in map(logging.getLogger, _TALKERS)]
    for log, _ in found:
        log.disabled = True
    try:
        yield
    finally:
        for log, before in found:
            log.disabled = before


@contextlib.contextmanager
def detecting(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, transformer layers ask another function whether a mask is causal."""
    module: Any = torch.nn.modules.transformer
    detect = module._detect_is_causal_mask
    module._detect_is_causal_mask = change(detect)
    try:
        yield
    finally:
        module._detect_is_causal_mask = detect


@contextlib.contextmanager
def applied(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, a custom autograd function is given its arguments changed; no mode sees that it is called."""
    cls: Any = torch.autograd.Function
    apply, here = cls.__dict__["apply"], threading.get_ident()

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return apply.__func__(self, *args, **kwargs)
        return apply.__func__(self, *map(change, args), **{k: change(v) for k, v in kwargs.items()})

    cls.apply = classmethod(changed)
    try:
        yield
    finally:
        cls.apply = apply


def uncompiled() -> Any:
    """What a user has compiled is traced through; whoever never compiled does not pay for loading the compiler."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler.config.patch(error_on_nested_fx_trace=False) if compiler else contextlib.nullcontext()


@contextlib.contextmanager
def tensor_checks(around: Callable[[Any, int], Any]) -> Iterator[None]:
    """Inside, torch's checks of whether all of a tensor is true are `around(check, place of the tensor)`."""
    kept = torch._check_tensor_all_with, torch._check_tensor_all
    module: Any = torch
    module._check_tensor_all_with, module._check_tensor_all = around(kept[0], 1), around(kept[1], 0)
    try:
        yield
    finally:
        module._check_tensor_all_with, module._check_tensor_all = kept


def compiled_inside(model: Any) -> Any:
    """The module that `torch.compile` was given to make this one; None if it was not made so."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return model._orig_mod if compiler is not None and isinstance(model, compiler.OptimizedModule) else None


def is_fully_sharded(module: Any) -> bool:
    """Whether torch's FSDP, in either form, keeps this module's parameters in shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


def is_distributed_tensor(value: Any) -> bool:
    """Whether a tensor is a DTensor; whoever never made one does not pay for loading them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def gather_into(out: Tensor, x: Tensor, group: Any) -> Any:
    """All-gather into one tensor, under whichever name this torch has for it."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, x, group=group, async_op=True)


def scatter_into(out: Tensor, pieces: Tensor, op: Any, group: Any) -> Any:
    """Reduce-scatter from one tensor, under whichever name this torch has for it."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, pieces.flatten(0, 1) if pieces.dim() > 1 else pieces, op=op, group=group, async_op=True)


def default_store() -> Any:
    """The key-value store that the default process group met through."""
    return dist.distributed_c10d._get_default_store()


# --- attention on a GPU, and Inductor --------------------------------------------------------

FLASH, EFFICIENT, CUDNN = 1, 2, 3


def sdp_choice(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> int:
    """Which fused attention torch itself would take for tensors that lie like these, without a mask.

    Asked for one sample, because the batch does not matter, and in a thread of its own: there no mode is
    active, so tensors that are only being traced give the same answer as real ones.
    """
    cuda = torch.backends.cuda
    allowed = cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    layouts = tuple(((1, *t.shape[1:]), t.stride()) for t in (q, k, v))
    return _choice(layouts, q.dtype, q.device, causal, scale, allowed)


@functools.cache
def _choice(layouts: Any, dtype: Any, device: Any, causal: bool, scale: float, allowed: Any) -> int:
    def ask() -> int:
        q, k, v = (torch.empty_strided(*layout, dtype=dtype, device=device) for layout in layouts)
        return int(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale))

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


def abandon_recording(device: torch.device, pool: Any, stream: Any) -> None:
    """Put right what torch leaves behind when a CUDA graph can't be recorded: stream, allocator and generator."""
    torch.cuda.set_stream(stream)
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    generator = torch.cuda.default_generators[index]  # still believes in the recording
    generator.graphsafe_set_state(generator.clone_state())


def compiled_graph(fn: Callable[..., Any], inputs: list[Tensor], late: bool, mine: list[int], shown: list[int]) -> Any:
    """A function of tensors through Inductor: call it with a list of tensors, which it empties as it goes.

    `late` says that this is part of backward; then inputs at the positions `mine` may be overwritten.
    Outputs at the positions `shown` keep the strides they have in eager PyTorch.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what the compiler says about torch itself is nothing a user could change
        return _through_inductor(fn, inputs, late, mine, shown)


def _through_inductor(fn: Any, inputs: list[Tensor], late: bool, mine: list[int], shown: list[int]) -> Any:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())  # without symbols here, but the cache insists on one
    fakes = [fake_mode.from_tensor(t.detach(), static_shapes=True) for t in inputs]
    with fake_mode:
        functional = torch.func.functionalize(fn, remove="mutations")
        gm = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)
    context: Any = TracingContext(fake_mode)
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=mine, static_input_indices=[])
    # Inductor's cache does not look at what may be overwritten or is shown, so that goes into the key.
    settings: Any = torch.compiler.config
    tag = f"{settings.cache_key_tag} mine={mine} shown={shown}"
    with tracing(context), settings.patch(cache_key_tag=tag):
        with fake_mode, V.set_fake_mode(fake_mode):
            gm = joint_graph_passes(gm)
        gm.graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"] = shown
        return compile_fx_inner(
            gm, fakes, cudagraphs=BoxedBool(False), is_backward=late, static_input_idxs=(), graph_id=next(_numbers)
        )


_numbers = itertools.count(1 << 20)


def changes_seen(tensor: Tensor) -> int:
    """How often torch has seen a tensor change in place; what goes through `.data` it does not see."""
    return int(tensor._version)


_MADE: dict[type, dict[int, weakref.ref[Any]]] = {}
"""Objects of a class of torch's that are alive, by id, from when somebody began to remember them."""


def remember_made(kind: type) -> None:
    """Remember all objects of a class from now on, and find those that are there: nobody else keeps a list of them."""
    if kind in _MADE:
        return
    known = _MADE[kind] = {}

    def note(each: Any) -> None:
        at = id(each)
        known[at] = weakref.ref(each, lambda _: known.pop(at, None))

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        further: Any = super(kind, cls).__new__  # type: ignore[arg-type] # a class that is mixed in may have its own
        fresh = further(cls) if further is object.__new__ else further(cls, *args, **kwargs)
        note(fresh)
        return fresh

    kind.__new__ = made  # type: ignore[method-assign,assignment]
    for each in gc.get_objects():
        if issubclass(type(each), kind):  # isinstance would ask odd objects
            note(each)


def alive_of(kind: type) -> list[Any]:
    """Those of a class that is remembered."""
    return [each for each in (there() for there in list(_MADE[kind].values())) if each is not None]
