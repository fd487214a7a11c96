"""What users write and `module_db` does not try: options and modules of torch that its samples leave out, with inputs.

For each module pairs of its options and a function that makes what forward is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


MORE: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "nn.InstanceNorm1d": [
        ({"num_features": 3, "track_running_stats": True, "affine": a}, lambda s=s: [_x(*s, 3, 6)])
        for a in (True, False)
        for s in ((4,), ())
    ],
    "nn.InstanceNorm2d": [({"num_features": 3, "track_running_stats": True}, lambda: [_x(4, 3, 4, 5)])],
    "nn.InstanceNorm3d": [({"num_features": 3, "track_running_stats": True}, lambda: [_x(4, 3, 4, 5, 2)])],
    "nn.BatchNorm1d": [
        ({"num_features": 3, "momentum": None, "affine": a}, lambda: [_x(4, 3, 6)]) for a in (True, False)
    ],
    "nn.BatchNorm2d": [({"num_features": 3, "momentum": None}, lambda: [_x(4, 3, 6, 2)])],
    "nn.BatchNorm3d": [({"num_features": 3, "momentum": None}, lambda: [_x(4, 3, 6, 2, 2)])],
    "nn.LazyBatchNorm1d": [({"momentum": m}, lambda: [_x(4, 3, 6)]) for m in (0.1, None)],
    "nn.LazyBatchNorm2d": [({}, lambda: [_x(4, 3, 6, 2)])],
    "nn.LazyInstanceNorm2d": [({"affine": True, "track_running_stats": True}, lambda: [_x(4, 3, 6, 2)])],
    "nn.LazyLinear": [({"out_features": 5}, lambda: [_x(4, 6)])],
    "nn.Dropout": [({"p": p, "inplace": i}, lambda: [_x(4, 6)]) for p in (0.0, 0.4, 1.0) for i in (False, True)],
    "nn.Dropout1d": [({"p": 0.4}, lambda: [_x(4, 6, 3)])],
    "nn.Dropout2d": [({"p": 0.4}, lambda: [_x(4, 6, 3, 2)])],
    "nn.Dropout3d": [({"p": 0.4}, lambda: [_x(4, 6, 3, 2, 2)])],
    "nn.AlphaDropout": [({"p": 0.4}, lambda: [_x(4, 6)])],
    "nn.FeatureAlphaDropout": [({"p": 0.4}, lambda: [_x(4, 6, 3)])],
    "nn.RReLU": [({"inplace": i}, lambda: [_x(4, 6)]) for i in (False, True)],
    "nn.EmbeddingBag": [
        ({"num_embeddings": 7, "embedding_dim": 4, "mode": m, "padding_idx": p}, lambda: [_whole(7, 4, 5)])
        for m in ("sum", "mean", "max")
        for p in (None, 2)
    ],
    "nn.Embedding": [
        (
            {"num_embeddings": 7, "embedding_dim": 4, "padding_idx": 2, "scale_grad_by_freq": f},
            lambda: [_whole(7, 4, 5)],
        )
        for f in (False, True)
    ],
    "nn.PixelShuffle": [({"upscale_factor": 2}, lambda: [_x(4, 8, 3, 2)])],
    "nn.PixelUnshuffle": [({"downscale_factor": 2}, lambda: [_x(4, 2, 6, 4)])],
    "nn.ChannelShuffle": [({"groups": 2}, lambda: [_x(4, 6, 3, 2)])],
    "nn.Upsample": [
        ({"scale_factor": 2, "mode": m}, lambda d=d: [_x(4, 3, *[5] * d)])
        for m, d in (("nearest", 1), ("linear", 1), ("nearest", 2), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
    ],
    "nn.Fold": [({"output_size": (4, 5), "kernel_size": (2, 2)}, lambda: [_x(4, 12, 12)])],
    "nn.Unfold": [({"kernel_size": (2, 3)}, lambda: [_x(4, 3, 5, 6)])],
    "nn.Bilinear": [({"in1_features": 3, "in2_features": 4, "out_features": 5}, lambda: [_x(6, 3), _x(6, 4)])],
    "nn.CosineSimilarity": [({}, lambda: [_x(6, 3), _x(6, 3)])],
    "nn.PairwiseDistance": [({"p": p}, lambda: [_x(6, 3), _x(6, 3) * 0.5]) for p in (1.0, 2.0)],
    "nn.MaxUnpool2d": [
        ({"kernel_size": 2}, lambda: list(torch.nn.functional.max_pool2d(_x(4, 3, 6, 4), 2, return_indices=True)))
    ],
    "nn.FractionalMaxPool2d": [({"kernel_size": 2, "output_size": 3}, lambda: [_x(4, 3, 7, 7)])],
    "nn.AdaptiveLogSoftmaxWithLoss": [
        ({"in_features": 6, "n_classes": 12, "cutoffs": [4, 8]}, lambda: [_x(5, 6), _whole(12, 5)])
    ],
    "nn.TripletMarginLoss": [({"swap": s}, lambda: [_x(6, 3), _x(6, 3) * 0.5, _x(6, 3) + 0.3]) for s in (False, True)],
    "nn.TripletMarginWithDistanceLoss": [({}, lambda: [_x(6, 3), _x(6, 3) * 0.5, _x(6, 3) + 0.3])],
    "nn.CosineEmbeddingLoss": [({"margin": 0.2}, lambda: [_x(6, 3), _x(6, 3) * 0.5, _whole(2, 6) * 2 - 1])],
    "nn.SmoothL1Loss": [({"beta": b}, lambda: [_x(6, 3), _x(6, 3) * 0.5]) for b in (0.0, 0.5)],
    "nn.MultiLabelMarginLoss": [({}, lambda: [_x(3, 4), torch.tensor([[1, 2, -1, 0], [0, -1, 1, 1], [3, 2, 1, 0]])])],
    "nn.RNN": [
        ({"input_size": 3, "hidden_size": 4, "num_layers": 2, "dropout": 0.5, "nonlinearity": f}, lambda: [_x(5, 4, 3)])
        for f in ("tanh", "relu")
    ],
    "nn.GRU": [({"input_size": 3, "hidden_size": 4, "num_layers": 2, "dropout": 0.5}, lambda: [_x(5, 4, 3)])],
    "nn.LSTM": [
        (
            {"input_size": 3, "hidden_size": 4, "num_layers": 2, "dropout": 0.5, "bidirectional": True},
            lambda: [_x(5, 4, 3)],
        ),
        ({"input_size": 3, "hidden_size": 4, "proj_size": 2}, lambda: [_x(5, 4, 3)]),
    ],
    "nn.CrossMapLRN2d": [({"size": 3}, lambda: [_x(4, 6, 3, 2)])],
    "nn.Hardsigmoid": [({}, lambda: [_x(4, 6)])],
    "nn.MaxUnpool1d": [
        ({"kernel_size": 2}, lambda: list(torch.nn.functional.max_pool1d(_x(4, 3, 6), 2, return_indices=True)))
    ],
    "nn.UpsamplingBilinear2d": [({"scale_factor": 2}, lambda: [_x(4, 3, 5, 5)])],
    "nn.UpsamplingNearest2d": [({"scale_factor": 2}, lambda: [_x(4, 3, 5, 5)])],
    "nn.Identity": [({}, lambda: [_x(4, 6)])],
    "nn.Flatten": [({}, lambda: [_x(4, 6, 2)])],
    "nn.Unflatten": [({"dim": 1, "unflattened_size": (2, 3)}, lambda: [_x(4, 6)])],
}
