"""The zoo is sound by itself: every recipe trains on one device, in plain PyTorch.

Everything else in the project is judged by whether it gives the numbers that these models give
here, so what is tested is only that they are fit to be judges: small, complete, the same each time,
and well defined in float64, where rounding can be told from a mistake. The larger recipes are for
people: their data must have something to learn that averages do not give away. Nothing is spread.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import data
import demo
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import laminar
from tests.support.example_recipes import EXAMPLES, TINY, load
from tests.support.marks import slow


def recipe(name: str) -> Any:
    file, function = name.split(":")
    return getattr(load(file), function)()


def scalar(loss: Any) -> torch.Tensor:
    """A loss as one number, if it came as a total and a weight."""
    return loss.total / loss.weight if isinstance(loss, laminar.Loss) else loss


def trained(recipe: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights after `steps` on one device."""
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    torch.manual_seed(7)  # for dropout
    for _, batch in zip(range(steps), recipe.data(), strict=False):
        optimizer.zero_grad()
        loss = scalar(recipe.loss(model, batch))
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


# --- recipes for people ------------------------------------------------------------------------

BIG = (
    "gpt.py:demo",
    "gpt.py:small",
    "bert.py:small",
    "moe.py:small",
    "resnet.py:small",
    "dlrm.py:small",
    "hf.py:gpt2_text",
)

BY_FREQUENCY = 3.0
"""Nats. Less than any guess by frequency of characters reaches; `test_text_can_be_learned` sees to that."""
BY_NUMBERS = 0.6
"""Nats. Less than is to be had from the numbers of a click log without its ids."""


@pytest.mark.parametrize(
    ("name", "steps", "bound"),
    [
        slow("gpt.py:demo", 40, BY_FREQUENCY),
        slow("moe.py:small", 40, BY_FREQUENCY),
        slow("bert.py:small", 260, BY_FREQUENCY),
        pytest.param("resnet.py:small", 50, 0.75 * math.log(10), marks=pytest.mark.slow),
        slow("dlrm.py:small", 250, BY_NUMBERS),
    ],
)
def test_learns_more_than_averages(name: str, steps: int, bound: float) -> None:
    """A fraction of the recipe's steps is enough to get below what no model of averages can reach.

    On held-out batches, and without dropout or the running statistics of a batch norm that has seen little.
    """
    one = recipe(name)
    model = one.model()
    optimizer = one.optimizer(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        scalar(one.loss(model, one.data()[number])).backward()
        optimizer.step()
    model.train(name == "resnet.py:small")
    with torch.no_grad():
        losses = [float(scalar(one.loss(model, batch))) for batch in one.evaluate()]
    assert sum(losses) / len(losses) < bound


@pytest.mark.parametrize("name", BIG)
def test_evaluation_ends_and_is_new(name: str) -> None:
    """Batches to evaluate on are few, of the shape of those to train on, and not among them."""
    one = recipe(name)
    held_out = list(one.evaluate())
    first = next(iter(one.data()))
    assert 1 < len(held_out) <= 20
    assert [x.shape for x in tree_leaves(held_out[0])] == [x.shape for x in tree_leaves(first)]
    assert not any(torch.equal(tree_leaves(b)[0], tree_leaves(first)[0]) for b in held_out)


def test_text_can_be_learned() -> None:
    """A few megabytes, from the characters that are named, and predictable far below their frequencies."""
    train, held_out = data.corpus()
    assert 2e6 < len(train) < 20e6
    assert 0.03 < len(held_out) / len(train) < 0.3
    assert int(train.max()) < data.VOCAB == 96
    sample = data.decode(train[:200_000])
    assert sample.count("import ") > 20 and sample.count("    def ") > 20
    assert torch.equal(data.encode(sample), train[:200_000])
    assert data.counted_loss(0) > BY_FREQUENCY + 0.05
    assert data.counted_loss(1) < BY_FREQUENCY - 0.4


def test_text_is_the_same_in_every_process() -> None:
    """Ranks build the corpus on their own: sets and directory listings must not order it."""
    code = (
        "import data, hashlib, itertools; b = data.windows(4, 32)[1000]['ids'];"
        "print(hashlib.sha256(data.corpus()[0].numpy().tobytes() + b.numpy().tobytes()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=EXAMPLES, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_any_batch_can_be_had_by_its_number() -> None:
    """What makes resuming cheap: batch 1000 does not need the thousand before it."""
    for draw in (data.windows(4, 16), data.masked(4, 16), data.gratings(4, 8, 5), recipe("dlrm.py:small").data()):
        in_order = [next(draw) for _ in range(3)]
        for number in (2, 0, 1):
            again = tree_leaves(draw[number])
            assert all(torch.equal(a, b) for a, b in zip(tree_leaves(in_order[number]), again, strict=True))
        assert not torch.equal(tree_leaves(in_order[0])[0], tree_leaves(in_order[1])[0])


def test_masked_text_has_an_uneven_number_of_questions() -> None:
    """Halves of a batch differ in weight, or a mean of means would pass for the mean."""
    batch = data.masked(batch=64, tokens=32)[0]
    asked = batch["label"] != data.IGNORE
    assert (asked.sum(dim=1) > 0).all()
    assert asked[:32].sum() != asked[32:].sum()
    assert (batch["ids"][asked] == data.MASK).all()
    assert (batch["ids"][~batch["is_word"]] == data.PAD).all()
    assert not (asked & ~batch["is_word"]).any()


def test_parts_of_a_weighted_loss_add_up() -> None:
    """Totals and weights of two uneven parts make the loss of the whole; their means do not."""
    one = recipe("bert.py:small")
    model = one.model().eval().double()
    batch = next(one.data())
    parts = [one.loss(model, {k: v[rows] for k, v in batch.items()}) for rows in (slice(0, 9), slice(9, None))]
    whole = scalar(one.loss(model, batch))
    torch.testing.assert_close(sum(p.total for p in parts) / sum(p.weight for p in parts), whole)
    mean_of_means = (9 * scalar(parts[0]) + 55 * scalar(parts[1])) / 64
    assert abs(mean_of_means - whole).item() > 1e-5


def test_the_average_grating_is_grey() -> None:
    """No template can tell one class from another: each averages out to nothing."""
    batch = data.gratings(batch=4000, size=8, classes=4, noise=0.0)[0]
    for label in range(4):
        of_class = batch["image"][batch["label"] == label]
        assert of_class.mean(dim=0).abs().max() < 0.15 < 0.5 < of_class.std()


def test_numbers_alone_do_not_explain_clicks() -> None:
    """Whoever gets below the bound has read the ids: a perfect model of everything else can't."""
    log = data.ClickLog(numbers=13, tables=[1_000, 2_000, 5_000], bag_rows=2_000, bag=4)
    batch = log.batches(50_000)[0]
    click, odds = batch["click"], log.odds(batch["numbers"], batch["ids"], batch["bag"])
    score = (batch["numbers"] @ log.direction).requires_grad_(False)
    line = torch.zeros(2, requires_grad=True)  # the best use of the numbers: log-odds that rise along their direction
    fit = torch.optim.LBFGS([line], max_iter=50)

    def loss() -> torch.Tensor:
        fit.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(line[0] * score + line[1], click)
        value.backward()
        return value

    fit.step(loss)
    assert loss().item() > BY_NUMBERS + 0.02
    assert float(torch.nn.functional.binary_cross_entropy_with_logits(odds, click)) < BY_NUMBERS - 0.1
    often, rarely = ((batch["ids"][:, 2] == i).float().mean() for i in (0, 4000))
    assert often > 0.05 and rarely < 0.001  # a power law


@pytest.mark.parametrize("name", BIG)
def test_captures(name: str) -> None:
    """What people train is captured whole: parameters all have gradients, a weighted loss keeps its parts."""
    one = recipe(name)
    graph = laminar.capture(one.model(), one.loss, next(iter(one.data())))
    grads = {o.name for o in graph.outputs if o.kind == "grad"}
    assert grads == {i.name for i in graph.of_kind("param")}
    metrics = [o.name for o in graph.outputs if o.kind == "metric"]
    assert metrics == (["loss_total", "loss_weight"] if name == "bert.py:small" else [])


def test_recipes_are_found_from_anywhere(tmp_path: Path) -> None:
    """A recipe may import what lies beside it, wherever the command was typed."""
    code = f"import laminar; print(laminar.load_recipe({str(EXAMPLES / 'gpt.py:demo')!r}).steps)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) == recipe("gpt.py:demo").steps


# --- the demonstration -------------------------------------------------------------------------


def test_the_demonstration_trains_twice_and_agrees(tmp_path: Path) -> None:
    """What `make demo` runs, with few steps: two real ranks, a plain loop, and a clear answer."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "6"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=quiet, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "YES: two ranks and one process" in done.stdout
    assert re.search(r"step 6/6 +loss 3\.\d+", done.stdout)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_the_demonstration_can_say_no() -> None:
    """A wrong weight anywhere, or one that is not a number, is no rounding."""
    weights = recipe("gpt.py:demo").model().state_dict()
    assert demo.Distance.between(weights, weights).small
    for wrong in (1e-3, float("nan")):
        name = "blocks.2.mlp.up.weight"
        off = {**weights, name: weights[name].clone()}
        off[name][3, 5] += wrong
        distance = demo.Distance.between(off, weights)
        assert not distance.small
        assert distance.where == name
    with pytest.raises(ValueError, match="names or shapes"):
        demo.Distance.between({k: v for k, v in weights.items() if k != "head.weight"}, weights)
