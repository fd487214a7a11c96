"""What README and docs say to type is true: every block of Python runs, commands run or are read by the real parser.

A page's blocks of Python run one after the other in one namespace, as a reader would paste them, after a prelude with
what the text takes for granted (a model, a loss, batches). Its shell blocks run in the page's order in a folder that
holds nothing but the examples. A block that takes too long, needs a launcher or another machine is marked in the
source of the page, with the reason:

    <!-- parsed only: trains on two ranks -->

It is not run then, but read: verbs, options and their values by the parser, recipes in their files, targets of make.
Blocks called `text` are formulas and output, not commands.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laminar
from laminar.api import graph_of
from laminar.cli import main, parser
from tests.support.rank_pool import Ranks
from tests.support.room_map import rows

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "examples/README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
SLOW = ("docs/use/plan.md", "docs/use/pipelines.md")
"""Pages whose Python takes several searches, or two ranks."""
SHOWN = ("docs/use/add_a_rule.md",)
"""Pages whose Python is quoted from the package and the tests instead of being pasted: it has to stand there."""
MARK = re.compile(r"<!-- parsed only: (.+) -->\n$")


@dataclass(frozen=True)
class Fenced:
    """A block of a page."""

    page: str
    language: str
    text: str
    why_not: str
    """Why it is only parsed; empty if it runs."""


def fenced(page: str) -> Iterator[Fenced]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M):
        mark = MARK.search(text[: found.start()])
        yield Fenced(page, found[1], found[2], mark[1] if mark else "")


def lines(page: str) -> Iterator[tuple[str, bool]]:
    """Commands of a page, and whether they run."""
    for block in fenced(page):
        if block.language in ("sh", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield line.strip().removeprefix("$ "), not block.why_not


# --- commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_that_is_known(page: str) -> None:
    """Python and shell are executed; the rest is called text. Indented blocks would be executed by nobody."""
    assert {b.language for b in fenced(page)} <= {"python", "sh", "console", "text"}
    outside = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
    assert not re.findall(r"^ {4}(?:laminar|python|make|torchrun) .*", outside, flags=re.M)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_that_exists(page: str) -> None:
    """Verbs, options and their values; recipes that are in their files; targets of make; modules of ours."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for line, _ in lines(page):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets, f"{page}: {line}"
        elif "laminar" in words:
            _parses(page, line, words[words.index("laminar") + 1 :])
        else:
            assert words[0] == "python", f"{page}: {line}"
            module = words[words.index("-m") + 1] if "-m" in words else words[1]
            assert (
                module == "pytest" or (ROOT / module).exists() or (ROOT / (module.replace(".", "/") + ".py")).exists()
            )


def _parses(page: str, line: str, words: list[str]) -> None:
    try:
        found = parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"{page}: {line}")
    recipe = getattr(found, "recipe", None)
    if recipe is not None:
        path, _, function = recipe.partition(":")
        assert f"def {function}(" in (ROOT / path).read_text(), f"{page}: {line}"


RUN = [page for page in PAGES if any(runs and line.startswith("laminar") for line, runs in lines(page))]


@pytest.mark.parametrize("page", RUN)
def test_commands_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds nothing but the examples, in the order of the page."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line, runs in lines(page):
        words = shlex.split(line, comments=True)
        if runs and words[0] == "laminar":
            assert main(words[1:]) == 0, line


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


def prelude(plain: bool = False) -> dict[str, Any]:
    """What pages take for granted."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(8, 8), "y": torch.randint(5, (8,))} for _ in range(4)]
    model = Net()
    loss = (lambda model, batch: some_loss(model, batch)["loss"]) if plain else some_loss
    return {
        "torch": torch,
        "F": F,
        "laminar": laminar,
        "model": model,
        "loss": loss,
        "data": data,
        "batches": data,
        "some": data,
        "batch": data[0],
        "micro_batch": {k: v[:2] for k, v in data[0].items()},
        "top5": top5,
        "accuracy": top5,
        "Stopper": Stopper,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "graph": laminar.capture(model, loss, data[0]),
        "mesh": laminar.Mesh({"dp": 2}),
        "config": None,
    }


def python(page: str) -> list[str]:
    """Blocks of Python that run."""
    return [b.text for b in fenced(page) if b.language == "python" and not b.why_not]


def ran(page: str, names: dict[str, Any], only: slice = slice(None)) -> dict[str, Any]:
    for number, block in enumerate(python(page)[only]):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def training(page: str) -> None:
    """All of the page, in its order."""
    found = ran(page, prelude())
    assert Path("timeline.json").is_file() and found["job"].steps > 8


def recipes(page: str) -> None:
    """The function is a recipe."""
    recipe = ran(page, prelude())["tiny"]()
    assert isinstance(recipe, laminar.Recipe) and recipe.metrics and len(recipe.callbacks) == 1


def predictions(page: str) -> None:
    """A prediction, taken apart."""
    names = prelude(plain=True)
    names["plan"] = laminar.plans.data_parallel(names["graph"], names["mesh"])
    assert ran(page, names)["found"].seconds > 0


def sequences(page: str) -> None:
    """Plans for the smallest GPT of the examples."""
    graph = graph_of(str(ROOT / "examples" / "gpt.py") + ":tiny", device="cpu")
    assert ran(page, {"laminar": laminar, "graph": graph})["plan"].inputs["batch.ids"] == (laminar.S(1),)


def exact(page: str) -> None:
    """One process: the hostings are those of one."""
    threads = torch.get_num_threads()
    try:
        job = ran(page, prelude())["job"]
    finally:
        torch.set_num_threads(threads)
    assert job.steps == 4 and len(job.hash()) == 64


def balanced(page: str) -> None:
    """All of the page: what is cut is balanced, and the loader has learnt."""
    names = ran(page, prelude(plain=True))
    state = names["loader"].state_dict()
    assert names["cut"].slowest_over_mean <= 1.005 and names["state"]["epoch"] == 1 and state["samples"] == 0


def readme(page: str) -> None:
    """The first block is for a model of transformers; the others for any."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    ids = torch.randint(31, (2, 8))
    first = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [{"input_ids": ids, "labels": ids}],
    }
    ran(page, first, slice(0, 1))
    assert Path("weights/model.safetensors").is_file()
    names = ran(page, prelude(plain=True), slice(1, None))
    assert names["report"].ok and names["plan"].name


def checkpoints(page: str) -> None:
    """A job saves beside its steps, and goes on."""
    job = ran(page, prelude(plain=True))["job"]
    assert job.steps and Path("store/refs").is_dir()


HOW: dict[str, Callable[[str], None]] = {
    "README.md": readme,
    "docs/use/train.md": training,
    "docs/use/command_line.md": recipes,
    "docs/use/exact.md": exact,
    "docs/use/predict.md": predictions,
    "docs/use/data.md": balanced,
    "docs/use/checkpoints.md": checkpoints,
    "docs/how/long_sequences.md": sequences,
}


@pytest.mark.parametrize("page", [page for page in PAGES if python(page) and page not in (*SLOW, *SHOWN)])
def test_blocks_of_python_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with Python that nobody runs fails here."""
    monkeypatch.chdir(tmp_path)
    HOW[page](page)


def _pipelines(folder: str) -> int:
    os.chdir(folder)
    return len(ran("docs/use/pipelines.md", prelude(plain=True))["plan"].recompute)


@pytest.mark.slow
def test_the_blocks_about_pipelines_run(two: Ranks, tmp_path: Path) -> None:
    """On as many ranks as the plan has."""
    assert two.run(_pipelines, str(tmp_path)) == [1, 1]


@pytest.mark.slow
def test_the_blocks_about_the_search_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several searches."""
    monkeypatch.chdir(tmp_path)
    recipe = laminar.load_recipe(f"{ROOT}/examples/gpt.py:tiny")
    names = prelude(plain=True)
    names |= {
        "graph": laminar.capture(recipe.model(), recipe.loss, next(iter(recipe.data()))),
        "cluster": laminar.Cluster.preset("8xh100"),
    }
    ran("docs/use/plan.md", names)


def _bodies(text: str) -> set[str]:
    """Statements and definitions of a text, without comments and layout."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)}


def test_the_blocks_about_rules_are_quoted_from_the_code() -> None:
    """They are lines of the table of rules and of the cases that judge it."""
    there: set[str] = set()
    for path in (*(ROOT / "laminar" / "rules").rglob("*.py"), ROOT / "tests" / "support" / "rule_cases.py"):
        there |= _bodies(path.read_text())
    for block in python(SHOWN[0]):
        for node in ast.parse(block).body:
            assert ast.unparse(node) in there, ast.unparse(node)


# --- text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a file that is there, and to a heading of it."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)
            assert heading in {re.sub(r"[^\w\s-]", "", t.lower()).replace(" ", "-") for t in titles}, (
                f"{page}: {target}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    """In the package, or from the root of the repository."""
    for path in set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md|txt|jsonl))(?::\w+)?`", (ROOT / page).read_text())):
        assert (ROOT / path).exists() or (ROOT / "laminar" / path).exists(), f"{page}: {path}"


def test_the_map_of_the_package_is_what_is_there() -> None:
    """A map that drifts misleads; `python -m tests.support.room_map` prints it anew."""
    told = (ROOT / "docs" / "architecture.md").read_text()
    assert "\n".join(rows()) in told
