"""A batch of any type that people use reaches the loss as that type, with the numbers of an ordinary loop.

Each batch is captured with a loss that insists on the type it would get in plain PyTorch, and its graph is held
against eager; then it goes through jobs, micro-batches and loaders.
"""

from __future__ import annotations

import json
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BatchFeature
from transformers.modeling_outputs import BaseModelOutput

import laminar
from laminar.capture.model.batches import flatten, mapped, unflatten
from laminar.errors import BatchError
from tests.support.capture_check import same


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Older = namedtuple("Older", "x y")


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "a"
    extra: Tensor | None = None

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass
class Late:
    x: Tensor
    y: Tensor
    made: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.x + self.y


class Held(Mapping):  # type: ignore[type-arg]
    """A mapping that is neither a dict nor can be made from one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.inside = {"x": x, "y": y}

    def __getitem__(self, key: str) -> Tensor:
        return self.inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inside)

    def __len__(self) -> int:
        return len(self.inside)


class Marked(dict):  # type: ignore[type-arg]
    """A dict with something beside its items."""


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1)


def marked() -> Marked:
    out = Marked(x=X, y=Y)
    out.weight = torch.linspace(0, 1, 8)[:, None]
    return out


BATCHES: dict[str, Any] = {
    "dict": {"x": X, "y": Y},
    "ordered": OrderedDict(x=X, y=Y),
    "default": defaultdict(list, x=X, y=Y),
    "user": UserDict(x=X, y=Y),
    "encoding": BatchEncoding({"x": X, "y": Y}),
    "feature": BatchFeature({"x": X, "y": Y}),
    "output": BaseModelOutput(last_hidden_state=X, hidden_states=(Y,)),
    "proxy": types.MappingProxyType({"x": X, "y": Y}),
    "mapping": Held(X, Y),
    "marked": marked(),
    "pair": Pair(X, Y),
    "older": Older(X, Y),
    "dataclass": Sample(X, Y),
    "frozen": Frozen(X, Y),
    "late": Late(X, Y),
    "nested": {"a": [Pair(X, Y), None, 2.0], "b": Sample(X, Y, extra=Y), 3: "text"},
    "size": (X, Y, X.shape),
}


def leaves_of(value: Any) -> list[Tensor]:
    """Tensors as a loss would find them, without the code under test."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        more = [value.weight] if isinstance(value, Marked) else []
        return [t for v in [*value.values(), *more] for t in leaves_of(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in leaves_of(v)]
    if isinstance(value, (Sample, Frozen, Late)):
        names = [n for n in ("x", "y", "extra", "doubled", "made") if hasattr(value, n)]
        return [t for n in names for t in leaves_of(getattr(value, n))]
    return []


def shape_of(value: Any) -> Any:
    """Types all the way down."""
    if isinstance(value, Mapping):
        return type(value), {k: shape_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(v) for v in value]
    return None if isinstance(value, Tensor) else (type(value), getattr(value, "note", value if value != value else ""))


@pytest.mark.parametrize("kind", BATCHES)
def test_the_loss_gets_the_type_of_an_ordinary_loop(kind: str) -> None:
    """What a loss does with `batch.x`, `**batch` or `a, b = batch` must work as it does without us."""
    batch = BATCHES[kind]
    want = shape_of(batch)

    def loss(model: nn.Module, given: Any) -> Tensor:
        assert shape_of(given) == want
        found = leaves_of(given)
        return sum((model(t.expand(8, 4)) * (i + 1)).pow(2).mean() for i, t in enumerate(found))  # type: ignore

    assert len(leaves_of(batch)) >= 2
    same(lambda: nn.Linear(4, 3), loss, batch)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_structure_survives_being_written_down(kind: str) -> None:
    """Graphs keep the structure as JSON, and stand-ins of other sizes are put into it from there."""
    leaves, tree = flatten(BATCHES[kind])
    again = unflatten(json.loads(json.dumps(tree)), {n: t + 1 for n, t in leaves.items()})
    assert shape_of(again) == shape_of(BATCHES[kind])
    assert all(torch.equal(a, b + 1) for a, b in zip(leaves_of(again), leaves_of(BATCHES[kind]), strict=True))
    assert json.dumps(flatten(again)[1]) == json.dumps(tree)
    moved = mapped(BATCHES[kind], lambda t: t * 3)
    assert shape_of(moved) == shape_of(BATCHES[kind])
    assert all(torch.equal(a, b * 3) for a, b in zip(leaves_of(moved), leaves_of(BATCHES[kind]), strict=True))


def test_a_default_dict_keeps_its_factory() -> None:
    """A loss may count on keys that are not there yet."""
    leaves, tree = flatten(BATCHES["default"])
    assert unflatten(json.loads(json.dumps(tree)), leaves)["new"] == []


def test_what_a_tokenizer_knows_is_no_part_of_the_structure() -> None:
    """Encodings of a fast tokenizer are other objects in every batch; a graph for each of them would be madness."""
    trees = []
    for number in (1, 2):
        batch = BatchEncoding({"x": X})
        batch._encodings = [object() for _ in range(number)]
        trees.append(flatten(batch)[1])
        assert mapped(batch, lambda t: t)._encodings == batch._encodings
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.ones(3)}, "batch.x is a ndarray"),
        ({"x": X, "y": {1, 2}}, "batch.y is a set"),
        ({"a.b": X, "a": {"b": Y}}, "two tensors of the batch would be called batch.a.b"),
        ({"x": X, (1, 2): Y}, "batch has the key (1, 2)"),
    ],
)
def test_what_can_not_be_in_a_batch_is_refused_by_name(batch: Any, says: str) -> None:
    """A leaf that is dropped, or overwritten by another, would be trained on silently."""
    with pytest.raises(BatchError, match="^" + says.replace("(", r"\(").replace(")", r"\)")):
        flatten(batch)


@pytest.mark.parametrize("kind", ["encoding", "dataclass", "pair"])
def test_a_job_trains_on_such_batches_as_a_loop_does(kind: str) -> None:
    """Through parts of a batch, loaders and the step: the same weights as in an ordinary loop."""
    batch, target = BATCHES[kind], type(BATCHES[kind])

    def loss(model: nn.Module, given: Any) -> Tensor:
        assert type(given) is target
        x, y = (given["x"], given["y"]) if isinstance(given, Mapping) else (given.x, given.y)
        return (model(x) - y).pow(2).mean()

    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    model = nn.Linear(4, 1)
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job = laminar.parallelize(model, loss, sgd, batch=batch, micro_batches=2)
    for given in job.prefetch([batch] * 3):
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
        job.step(given)
    for name, want in plain.state_dict().items():
        torch.testing.assert_close(job.state_dict()[name], want, rtol=1e-5, atol=1e-7)


def test_a_changed_number_in_a_batch_is_another_graph() -> None:
    """Numbers and texts are part of the structure: one that changes must not be trained with its first value."""

    def loss(model: nn.Module, given: Any) -> Tensor:
        return model(given["x"]).mean() * given["scale"]

    model = nn.Linear(4, 1)
    job = laminar.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), batch={"x": X, "scale": 1.0})
    first, second = (job.step({"x": X, "scale": s}).loss for s in (1.0, 3.0))
    assert second == pytest.approx(3 * first, rel=1e-5)
