"""What README and docs tell people to type: commands are those that the command line takes, blocks of Python run.

Blocks of a page run one after the other in one namespace, as a reader would paste them, behind the things that the text
takes for granted (a model, a loss, batches). Commands that take long are only read by the parser.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.cli import main, parser
from tests.support.rank_pool import Ranks
from tests.support.room_map import rows

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "examples/README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
CHEAP = [
    "laminar capture examples/gpt.py:tiny --report",
    "laminar plan    examples/gpt.py:tiny --mesh dp=2,tp=2 --preset tensor_parallel -o plan.json",
    "laminar explain plan.json",
]


def commands(page: str) -> list[str]:
    """Lines that begin with our command, or with torchrun's for it."""
    text = (ROOT / page).read_text()
    return [line.strip() for line in text.splitlines() if re.match(r" {4}(laminar (?!/)|torchrun )[^/]", line)]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_exists(page: str) -> None:
    """Verbs, options and their values; recipes that are in their files."""
    for line in commands(page):
        words = shlex.split(line, comments=True)
        words = words[words.index("laminar") + 1 :]
        try:
            found = parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page}: {line}")
        recipe = getattr(found, "recipe", None)
        if recipe is not None:
            path, _, function = recipe.partition(":")
            assert f"def {function}(" in (ROOT / path).read_text(), f"{page}: {line}"


def test_the_first_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds nothing but the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    written = (ROOT / "README.md").read_text()
    for line in CHEAP:
        assert line in written
        assert main(shlex.split(line)[1:]) == 0, line


# --- blocks of Python -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Blocks with the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


class Stopper(laminar.Callback):
    """A callback that does nothing."""


def some_loss(model: Any, batch: Any) -> dict[str, Tensor]:
    logits = model(batch["x"])
    right = logits.argmax(-1) == batch["y"]
    return {"loss": F.cross_entropy(logits, batch["y"]), "accuracy": right.float().mean()}


def top5(model: Any, batch: Any) -> Tensor:
    return (model(batch["x"]).topk(5, -1).indices == batch["y"][:, None]).any(-1).float().mean()


def given(plain: bool = False) -> dict[str, Any]:
    """What pages take for granted."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(8, 8), "y": torch.randint(5, (8,))} for _ in range(4)]
    model = Net()
    loss = (lambda model, batch: some_loss(model, batch)["loss"]) if plain else some_loss
    return {
        "torch": torch, "F": F, "laminar": laminar, "model": model, "loss": loss, "data": data, "batches": data,
        "some": data, "batch": data[0], "micro_batch": {k: v[:2] for k, v in data[0].items()}, "top5": top5,
        "accuracy": top5, "Stopper": Stopper, "optimizer": torch.optim.AdamW(model.parameters()),
        "graph": laminar.capture(model, loss, data[0]), "mesh": laminar.Mesh({"dp": 2}), "config": None,
    }  # fmt: skip


def blocks(page: str) -> list[str]:
    """Fenced blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.S | re.M)


def ran(page: str, names: dict[str, Any], only: slice = slice(None)) -> dict[str, Any]:
    for number, block in enumerate(blocks(page)[only]):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def test_the_blocks_about_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the page, in its order."""
    monkeypatch.chdir(tmp_path)
    found = ran("docs/train.md", given())
    assert (tmp_path / "timeline.json").is_file() and found["job"].steps > 8
    recipe = found["tiny"]()
    assert isinstance(recipe, laminar.Recipe) and recipe.metrics and len(recipe.callbacks) == 1


def test_the_blocks_about_cost_run() -> None:
    """A prediction, taken apart."""
    names = given(plain=True)
    names["plan"] = laminar.plans.data_parallel(names["graph"], names["mesh"])
    assert ran("docs/cost.md", names)["found"].seconds > 0


def _pipelines(folder: str) -> int:
    os.chdir(folder)
    return len(ran("docs/pipelines.md", given(plain=True))["plan"].recompute)


@pytest.mark.slow
def test_the_blocks_about_pipelines_run(two: Ranks, tmp_path: Path) -> None:
    """On as many ranks as the plan has."""
    assert two.run(_pipelines, str(tmp_path)) == [1, 1]


def test_the_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is for a model of transformers; the others for any."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    ids = torch.randint(31, (2, 8))
    first = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()),
             "batches": [{"input_ids": ids, "labels": ids}]}  # fmt: skip
    ran("README.md", first, slice(0, 1))
    assert (tmp_path / "checkpoint/model.safetensors").is_file()
    names = ran("README.md", given(plain=True), slice(1, None))
    assert names["report"].ok and names["plan"].name


@pytest.mark.slow
def test_the_blocks_about_the_search_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several searches."""
    monkeypatch.chdir(tmp_path)
    recipe = laminar.load_recipe(f"{ROOT}/examples/gpt.py:tiny")
    names = given(plain=True)
    names |= {"graph": laminar.capture(recipe.model(), recipe.loss, next(iter(recipe.data()))),
              "cluster": laminar.Cluster.preset("8xh100")}  # fmt: skip
    ran("docs/search.md", names)


def test_the_map_of_the_package_is_what_is_there() -> None:
    """A map that drifts misleads; `python -m tests.support.room_map` prints it anew."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    assert "\n".join(rows()) in told
