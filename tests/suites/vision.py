"""Every public model of torchvision that classifies, segments or watches films, on small pictures.

The library is installed beside the environment, not in it (`make setup`): it is built for GPUs, its compiled ops don't
load everywhere, and whoever finds it (transformers does) would import it and fail. Models need none of those ops; two
that it insists on registering are declared before it is loaded.

Models are as wide as they are shipped, but runs of equal blocks are cut to two (`shallow`): the second of
them is the last that has anything new to say. Huge classifiers of VGG and AlexNet are made narrow.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.suites.harness import Case

WHERE = Path(sys.prefix) / "vision"
CLASSES, N = 5, 4
SIDES = {
    "inception_v3": 299,
    "maxvit_t": 224,
    "mvit_v1_b": 32,
    "mvit_v2_s": 32,
    "s3d": 224,
    "swin3d_t": 64,
    "swin3d_s": 64,
    "swin3d_b": 64,
    "alexnet": 64,
    "mnasnet1_3": 64,
    "squeezenet1_0": 64,
    "squeezenet1_1": 64,
    "googlenet": 64,
    "densenet121": 64,
    "densenet161": 64,
    "densenet169": 64,
    "densenet201": 64,
}
"""Pixels of a side, where 32 are too few; and the attention of some is made for one size."""
FRAMES = {"s3d": 14}
FEW = {"s3d": 2, "maxvit_t": 2, "inception_v3": 2}
"""Pictures, where four take long."""
LONG = 3
"""A run of so many equal blocks or more is cut to two."""


@functools.cache
def library() -> Any:
    """`torchvision.models`, whether or not the library's compiled ops load.

    It is on the path only while it is loaded: processes that are started later, without the ops defined here, would
    find it and fail in the middle of loading transformers.
    """
    if find_spec("torchvision") is not None:  # the environment has one of its own, with its ops
        import torchvision

        return torchvision.models
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(WHERE))
    try:
        import torchvision
    finally:
        sys.path.remove(str(WHERE))
    return torchvision.models


def families() -> dict[str, str]:
    """Names of models and of what they do."""
    models = library()
    out = dict.fromkeys(models.list_models(models), "classification")
    out |= dict.fromkeys(models.list_models(models.segmentation), "segmentation")
    return out | dict.fromkeys(models.list_models(models.video), "video")


def shallow(model: nn.Module) -> nn.Module:
    """The same model with runs of equal blocks cut to two."""
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            kept: list[tuple[str, nn.Module]] = []
            before: Any = None
            run = 0
            for name, child in module.named_children():
                looks = _looks(child)
                run = run + 1 if looks == before and looks else 1
                before = looks
                if run < LONG:
                    kept.append((name, child))
            if len(kept) < len(module):
                _replace(module, kept)
    return model


def _looks(module: nn.Module) -> Any:
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    parts = tuple(
        (n, type(m).__name__, m.extra_repr())
        for n, m in module.named_modules()
        if "drop" not in n.lower() and "StochasticDepth" not in type(m).__name__
    )
    return (type(module), shapes, parts) if shapes else None


def _replace(module: nn.Module, kept: list[tuple[str, nn.Module]]) -> None:
    module._modules.clear()
    for i, (name, child) in enumerate(kept):
        module._modules[str(i) if isinstance(module, nn.ModuleList) or name.isdigit() else name] = child


def made(name: str, depth: bool = False) -> nn.Module:
    """A model with the weights it always gets, in training mode; at its full depth if asked for."""
    torch.manual_seed(0)
    kind, models = families()[name], library()
    options: dict[str, Any] = {"num_classes": CLASSES}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if kind == "segmentation":
        options["weights_backbone"] = None
    if name.startswith("vit_"):
        options["image_size"] = 2 * {"vit_h_14": 14}.get(name, int(name[-2:]))
    if name.startswith("vgg") or name == "alexnet":
        options["num_classes"] = 1
    with _uninitialised(), _any_size(models):
        model: nn.Module = models.get_model(name, weights=None, **options)
        model = model if depth else shallow(model)
        if name.startswith("vgg") or name == "alexnet":
            _narrow(model)
    return (model if depth else _initialised(model).double()).train()


@contextlib.contextmanager
def _uninitialised() -> Iterator[None]:
    """Models whose weights are made but never touched: most of them are thrown away."""
    names = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]
    kept = {n: getattr(nn.init, n) for n in names}
    for n in names:
        setattr(nn.init, n, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for n, function in kept.items():
            setattr(nn.init, n, function)


@contextlib.contextmanager
def _any_size(models: Any) -> Iterator[None]:
    """Multiscale vision transformers for small pictures; how large they are is written into their functions."""
    module = sys.modules[models.video.MViT.__module__]
    inner = module._mvit
    module._mvit = lambda **options: inner(**{**options, "spatial_size": (32, 32), "temporal_size": 4})
    try:
        yield
    finally:
        module._mvit = inner


def _narrow(model: nn.Module) -> None:
    """Classifiers of a hundred million weights, with 16 features inside."""
    layers = [m for m in model.classifier if isinstance(m, nn.Linear)]  # type: ignore[union-attr]
    sizes = [layers[0].in_features, 16, 16, CLASSES]
    for layer, a, b in zip(layers, sizes, sizes[1:], strict=False):
        layer.weight, layer.bias = nn.Parameter(torch.empty(b, a)), nn.Parameter(torch.empty(b))
        layer.in_features, layer.out_features = a, b


def _initialised(model: nn.Module) -> nn.Module:
    """Random weights, none of them zero: that would hide what lies behind it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and p.numel() > p.shape[0]:
                p.normal_(std=1.0 / p[0].numel() ** 0.5, generator=generator)
            else:
                p.normal_(mean=1.0 if name.endswith("weight") else 0.0, std=0.1, generator=generator)
    return model


def pictures(name: str, kind: str) -> Tensor:
    """What a model looks at."""
    side = SIDES.get(name, 32)
    if name.startswith("vit_"):
        side = 2 * {"vit_h_14": 14}.get(name, int(name[-2:]))
    generator = torch.Generator().manual_seed(1)
    n = FEW.get(name, N)
    shape = (n, 3, FRAMES.get(name, 4), side, side) if kind == "video" else (n, 3, side, side)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of classes, of pixels too, and of the heads that some have in training only."""
    out = model(batch["x"])
    if isinstance(out, dict):
        return sum(F.cross_entropy(o, batch["y"]) for o in out.values())  # type: ignore[return-value]
    heads = out if isinstance(out, tuple) else (out,)
    return sum(F.cross_entropy(o, batch["y"]) for o in heads)  # type: ignore[return-value]


def find(name: str) -> Case:
    """A model as a case of the harness."""
    kind = families()[name]
    x = pictures(name, kind)
    generator = torch.Generator().manual_seed(2)
    shape = (len(x), *x.shape[-2:]) if kind == "segmentation" else (len(x),)
    y = torch.randint(0, CLASSES, shape, generator=generator)
    return Case(functools.partial(made, name), loss, {"x": x, "y": y}, torch.float64)
