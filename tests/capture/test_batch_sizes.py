"""Graphs of batch sizes that nobody traced are the ones that tracing would have given, or are traced."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import gpt
import llama
import lstm
import mlp
import pytest
import resnet
import t5
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laminar
from laminar.capture.capture import capture
from laminar.capture.graph.batch_sizes import Predictor, solved, weights_for

SMALL = ((8, 12), (8, 8), (8, 10), (8, 6), (6, 12), (6, 10), (4, 7), (2, 11))
"""Samples and tokens of batches, in the order in which they come."""


def resized(batch: Any, samples: int, tokens: int) -> Any:
    """The batch with other numbers of samples, and of tokens where it has integers in two dims."""

    def cut(x: Tensor) -> Tensor:
        x = torch.cat([x] * 4)[:samples]
        return torch.cat([x] * 4, 1)[:, :tokens] if x.dim() == 2 and not x.is_floating_point() else x

    return torch.utils._pytree.tree_map(cut, batch)


@pytest.mark.parametrize(
    "zoo", [llama, lstm, mlp, *[pytest.param(m, marks=pytest.mark.slow) for m in (gpt, resnet, t5)]]
)
def test_a_predicted_graph_is_the_traced_one(zoo: Any) -> None:
    """To the last argument and constant: nothing about a batch size may depend on the order in which sizes came."""
    recipe = zoo.tiny()
    model, batch = recipe.model(), next(iter(recipe.data()))
    predictor, predicted = Predictor(), 0
    for samples, tokens in SMALL:
        some = resized(batch, samples, tokens)
        known = len(predictor.samples)
        graph = capture(model, recipe.loss, some, predictor=predictor)
        if len(predictor.samples) == known:
            predicted += 1
            assert graph.to_json() == capture(model, recipe.loss, some).to_json()
    assert predicted >= 1, "every size was traced"


class Branching(nn.Module):
    """Long sequences take another way, which three short ones don't show."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu() if x.shape[1] > 16 else self.up(x).tanh()


class Doubled(torch.autograd.Function):
    """Its backward looks at a size, which forward does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (2 if grads[0].shape[1] <= 16 else 3)


class Hooked(Branching):
    """A hook that looks at a size."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y.register_hook(lambda g: g * (2 if g.shape[1] <= 16 else 3))
        return y.tanh()


class Windowed(Branching):
    """A window that is cut off by the length: linear at first, constant then."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[:, : min(x.shape[1], 16)].tanh()


class Listed(Branching):
    """A constant whose values change with the length, though not its shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.tensor([1.0, 2.0, 3.0, 4.0 if x.shape[1] <= 16 else 5.0])


class Custom(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.up(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Branching, Custom, Hooked, Windowed, Listed])
def test_what_another_size_does_differently_is_traced(model: Callable[[], nn.Module]) -> None:
    """The mistake this could make is the worst one: the wrong function for a length that comes later."""
    torch.manual_seed(0)
    made, predictor = model(), Predictor()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    for tokens in (6, 8, 10, 12, 20, 24):
        x = torch.randn(2, tokens, 4)
        assert capture(made, loss, x, predictor=predictor).to_json() == capture(made, loss, x).to_json()


def test_steps_of_a_predicted_size_train_as_plain_pytorch_does() -> None:
    """A job meets lengths in any order; from the fourth on it does not trace."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)).double()
    plain = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)).double()
    plain.load_state_dict(model.state_dict())

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    batches = [torch.randint(0, 16, (4, n)) for n in (12, 9, 7, 11, 5, 8, 12)]
    job = laminar.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batches[0])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        result = job.step(batch)
        optimizer.zero_grad()
        want = loss(plain, batch)
        want.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert result.loss == pytest.approx(want.item(), rel=1e-12)
    for name, value in job.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)
    (known,) = job.tracer._predictors.values()
    assert [predictor.traced for predictor, _ in known] == [3]


def test_sizes_that_must_all_be_traced_come_with_advice() -> None:
    """Each costs a second or more; nobody should find out from the clock."""
    model = Custom()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    batches = [torch.randn(2, n, 4) for n in range(2, 15)]
    job = laminar.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch=batches[0])
    for batch in batches[:-2]:
        job.step(batch)
    with pytest.warns(UserWarning, match="12 sizes of batches had to be captured one by one.*multiples of 64"):
        job.step(batches[-2])


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=3, max_size=8, unique=True),
    st.tuples(st.integers(2, 40), st.integers(2, 40)),
    st.tuples(*[st.integers(-5, 5)] * 4),
)
def test_numbers_bilinear_in_sizes_are_found_exactly(
    known: list[tuple[int, int]], new: tuple[int, int], c: tuple[int, int, int, int]
) -> None:
    """Whatever sizes are known: a number is right or not predicted."""

    def number(s: tuple[int, int]) -> int:
        return c[0] + c[1] * s[0] + c[2] * s[1] + c[3] * s[0] * s[1]

    found = weights_for(known, new)
    if found is not None:
        assert solved([[number(known[i])] for i in found.rows], found) == [number(new)]
        assert sum(found.new) == Fraction(1)


def test_numbers_of_another_kind_are_not_predicted() -> None:
    """A square fits a line through two points; the third tells."""
    found = weights_for([(4,), (6,), (9,)], (12,))
    assert found is not None
    assert solved([n * n for n in (4, 6, 9)], found) is None
    assert solved([[n, f"f32[{n},3]", n / (n - 1)] for n in (4, 6, 9)], found) == [12, "f32[12,3]", 12 / 11]
    assert solved(["abc1", "abc2", "abc3"], found) is None
