"""The zoo is sound by itself: every recipe trains on one device, in plain PyTorch.

Everything else in the project is judged by whether it gives the numbers that these models give
here, so what is tested is only that they are fit to be judges: small, complete, the same each time,
and well defined in float64, where rounding can be told from a mistake. Nothing is captured or spread.
"""

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

EXAMPLES = Path(__file__).parent.parent / "examples"

TINY = [
    *("mlp.py:tiny", "resnet.py:tiny", "gpt.py:tiny", "gpt.py:narrow", "llama.py:tiny", "bert.py:tiny"),
    *("vit.py:tiny", "t5.py:tiny", "dlrm.py:tiny", "moe.py:tiny", "lstm.py:tiny", "unet.py:tiny"),
    *("hf.py:gpt2", "hf.py:bert"),
]


def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{Path(file).stem}", EXAMPLES / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe(name: str) -> Any:
    file, function = name.split(":")
    return getattr(load(file), function)()


def trained(recipe: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights after `steps` on one device."""
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    torch.manual_seed(7)  # for dropout
    for _, batch in zip(range(steps), recipe.data(), strict=False):
        optimizer.zero_grad()
        loss = recipe.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest activation or gradient that any op makes.

    Other kinds are left out: the fused LSTM keeps a byte tensor as its scratch pad.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors if x.is_floating_point())])
        return out


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_is_trained(name: str) -> None:
    """A parameter without a gradient would make any wrong gradient of it look right."""
    one = recipe(name)
    model = one.model()
    one.loss(model, next(one.data())).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.requires_grad, parameter_name
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.count_nonzero() > 0, parameter_name


@pytest.mark.parametrize("name", TINY)
def test_runs_in_float64(name: str) -> None:
    """In float64 two orders of summation agree to about 1e-12, so a mistake cannot hide as rounding."""
    one = recipe(name)
    model = one.model().double()
    batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, next(one.data()))
    loss = one.loss(model, batch)
    loss.backward()
    assert loss.shape == ()
    if name != "hf.py:gpt2":  # whose loss casts logits to float32 itself
        assert loss.dtype == torch.float64
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_is_tiny(name: str) -> None:
    """Many ranks run in one process in most tests: that is only quick if one of them is."""
    one = recipe(name)
    model = one.model()
    data = one.data()
    with Largest() as largest:
        one.loss(model, next(data)).backward()
    assert 0 < largest.elements < 100_000
    seconds = []
    for _ in range(5):
        batch = next(data)
        start = time.perf_counter()
        one.loss(model, batch).backward()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.25  # 0.05 on an idle machine; tests share theirs


@pytest.mark.parametrize("name", TINY)
def test_is_the_same_every_time(name: str) -> None:
    """Factories seed themselves: what is compared with one device must itself be fixed."""
    one, again = recipe(name), recipe(name)
    losses, weights = trained(one, steps=2)
    losses_again, weights_again = trained(again, steps=2)
    assert losses == losses_again
    assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
    first, second = (tree_leaves(next(r.data())) for r in (one, again))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_learns(name: str) -> None:
    """The data can be learned, so a loss that stays up is a sign and not an accident."""
    one = recipe(name)
    losses, _ = trained(one, one.steps)
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_deep_gpt_needs_no_memory_on_meta() -> None:
    """A plan for a model that does not fit here starts from its shapes alone."""
    with torch.device("meta"):
        model = recipe("gpt.py:deep").model()
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert 400e6 < sum(p.numel() for p in model.parameters()) < 410e6


def test_small_gpt_has_about_ten_million_parameters() -> None:
    """Large enough for a step to be arithmetic and not overhead, small enough for one CPU."""
    with torch.device("meta"):
        model = recipe("gpt.py:small").model()
    assert 9e6 < sum(p.numel() for p in model.parameters()) < 12e6


def test_llama_head_is_the_embedding() -> None:
    """One parameter under two names: a front end has to see one."""
    model = recipe("llama.py:tiny").model()
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_no_expert_is_over_its_capacity() -> None:
    """A place holds one token at most, and a token sits with at most its two experts."""
    one = recipe("moe.py:tiny")
    model = one.model()
    experts = model.blocks[0].experts
    x = torch.randn(8, 16, 32)
    dispatch, combine, balance = experts.route(x)
    assert dispatch.shape == (8, 16, 4, 10)
    assert dispatch.sum(dim=1).max() <= 1
    assert dispatch.sum(dim=(2, 3)).max() <= 2
    assert combine.sum(dim=(2, 3)).max() <= 1 + 1e-6
    assert balance >= 0.5


def test_bert_does_not_read_padding() -> None:
    """What stands in a padded place changes no answer."""
    one = recipe("bert.py:tiny")
    model = one.model().eval()
    batch = next(one.data())
    loss = one.loss(model, batch)
    garbage = batch["ids"].where(batch["is_word"], 9)
    torch.testing.assert_close(one.loss(model, batch | {"ids": garbage}), loss)


def test_t5_does_not_read_the_future() -> None:
    """Logits at a target position depend on the positions before it alone."""
    one = recipe("t5.py:tiny")
    model = one.model()
    batch = next(one.data())
    before = model(batch["source"], batch["target"])
    changed = batch["target"].clone()
    changed[:, 6:] = 5
    after = model(batch["source"], changed)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])
