"""The command line does what it says: verbs, exit codes, JSON, and errors a person can read.

Verbs are called in this process, because starting Python and torch takes seconds; a few real
processes at the end show that the installed command is the same thing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.capture.ops.torch_ops import find_op
from laminar.cli import main
from laminar.cli_plan import parse_mesh, parse_seeds
from laminar.errors import LaminarError
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import S

ROOT = Path(__file__).parents[2]
MLP = "examples/mlp.py:tiny"
VERBS = ("capture", "profile", "plan", "explain", "simulate", "verify", "train", "diff")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes are named from the root of the checkout, as in the documentation."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a verb: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as end:  # argparse's own refusals and --help
            code = int(end.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    here = Path.cwd()
    assert main(["plan", str(ROOT / "examples/mlp.py:tiny"), "--mesh", "dp=2", "-o", str(path), "--json"]) == 0
    assert Path.cwd() == here
    return path


# --- capture -------------------------------------------------------------------------------------


def test_capture_reports_names_and_rules(said: Any) -> None:
    """A user's first question: did it understand my model?"""
    code, out, err = said("capture", MLP, "--report")
    assert code == 0 and err == ""
    assert "every op has a rule" in out and "batch." in out
    graph_line = out.splitlines()[0]
    assert graph_line.startswith("graph ") and "forward" in graph_line and "parameters in" in graph_line
    assert [line for line in out.splitlines() if line.strip().startswith("param ") and ".weight" in line]


def test_capture_prints_json(said: Any, tmp_path: Path) -> None:
    """Scripts read what people read."""
    path = tmp_path / "graph.json"
    code, out, _ = said("capture", MLP, "--json", "-o", str(path))
    data = json.loads(out)
    assert code == 0 and data["without_rule"] == [] and data["parameters"] > 0 and data["nodes"] > 0
    assert Graph.from_json(json.loads(path.read_text())).hash == data["graph"]


RANKED = '''
"""A recipe whose model has an op of its own."""
import torch
from laminar import Recipe

@torch.library.custom_op("laminar_cli_test::ranked", mutates_args=())
def ranked(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.flatten().argsort().argsort().view(x.shape))

@ranked.register_fake
def _(x):
    return torch.empty_like(x)

ranked.register_autograd(lambda ctx, g: g * 2)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        return ranked(self.a(x))

def here():
    torch.manual_seed(0)
    return Recipe(model=Model, loss=lambda m, b: m(b).square().mean(), data=lambda: iter([torch.ones(4, 4)]))

def broken():
    raise ValueError("no such data set")

def looks():
    def loss(m, b):
        y = m(b)
        return y.sum() if y.sum() > 0 else -y.sum()
    return Recipe(model=Model, loss=loss, data=lambda: iter([torch.ones(4, 4)]))

def empty():
    return Recipe(model=Model, loss=lambda m, b: m(b).sum(), data=lambda: iter([]))

def stubborn():
    def model():
        made = Model()
        made.scale = float(made.a.weight.abs().sum())
        return made
    def loss(m, b):
        return (m.a(b) * m.scale).square().mean()
    return Recipe(model=model, loss=loss, data=lambda: iter([torch.ones(4, 4)]))
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "own.py"
    path.write_text(RANKED)
    return path


def test_an_op_without_a_rule_is_reported_with_share_and_line(said: Any, own: Path, tmp_path: Path) -> None:
    """What can't be split costs the same on every rank, so a user must see it before planning."""
    code, out, _ = said("capture", f"{own}:here", "--report")
    assert code == 0 and "ops without a rule" in out
    (line,) = [line for line in out.splitlines() if "laminar_cli_test.ranked" in line]
    assert "computed whole on every rank" in line and "own.py:" in line and "ranked(self.a(x))" in line and "%" in line
    plan = tmp_path / "plan.json"
    assert said("plan", f"{own}:here", "--mesh", "dp=2", "-o", str(plan))[0] == 0
    assert "laminar_cli_test.ranked" in said("explain", str(plan))[1]


def test_a_recipe_read_again_registers_its_ops_again(said: Any, own: Path) -> None:
    """Torch drops an op when its name is registered anew: an overload kept from before is a dangling pointer."""
    said("capture", f"{own}:here")
    before = find_op("laminar_cli_test.ranked")
    said("capture", f"{own}:here")
    assert find_op("laminar_cli_test.ranked") is not before
    assert [said("capture", f"{own}:here")[0] for _ in range(5)] == [0] * 5


def test_a_model_that_can_not_be_built_on_meta_is_built(said: Any, own: Path) -> None:
    """Shapes alone are enough for most models, not for one that reads its weights while it is made."""
    assert said("capture", f"{own}:stubborn", "--json")[0] == 0


# --- plan, explain, verify -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["data", "zero1", "zero2", "zero3", "tensor"])
def test_every_preset_plans_and_explains(said: Any, preset: str, tmp_path: Path) -> None:
    """What a plan does is said when it is made, and again when it is read."""
    path = tmp_path / "plan.json"
    code, out, _ = said("plan", MLP, "--mesh", "dp=2,tp=2", "--preset", preset, "-o", str(path))
    assert code == 0 and "inputs, grouped by placement" in out and "collectives per step" in out
    assert f"written to {path}" in out
    code, again, _ = said("explain", str(path))
    assert code == 0 and again.strip() in out


def test_seeds_place_tensors_by_pattern(said: Any, tmp_path: Path) -> None:
    """A few tensors by name, the rest completed."""
    graph = json.loads(said("capture", MLP, "--json")[1])
    weights = [line for line in said("capture", MLP, "--report")[1].split() if line.endswith(".weight:")]
    name = weights[0].rstrip(":")
    path = tmp_path / "plan.json"
    seeds = ("--place", f"{name}=tp:S(0);dp:B", "--place", "batch.*=dp:S(0)")
    code, out, _ = said("plan", MLP, "--mesh", "dp=2,tp=2", *seeds, "-o", str(path), "--json")
    data = json.loads(out)
    assert code == 0 and data["graph"] == graph["graph"] and data["mesh"] == {"dp": 2, "tp": 2}
    assert Plan.load(path).inputs[name][1] == S(0)


def test_the_program_can_be_printed(said: Any) -> None:
    """What a rank runs is no secret."""
    code, out, _ = said("plan", MLP, "--mesh", "dp=2", "--program")
    assert code == 0 and "program on Mesh(dp=2)" in out and "all_reduce[dp]" in out and "return loss" in out
    code, out, _ = said("plan", MLP, "--mesh", "dp=2", "--program", "--json")
    assert code == 0 and json.loads(out)["program"]["instrs"]


def test_explain_prints_json(said: Any, plan_file: Path) -> None:
    """The whole plan, and its hash."""
    code, out, _ = said("explain", str(plan_file), "--json")
    data = json.loads(out)
    assert code == 0 and data["plan"] == Plan.load(plan_file).hash and data["mesh"] == {"dp": 2}


def test_verify_says_how_close(said: Any, plan_file: Path) -> None:
    """The proof is one command."""
    code, out, _ = said("verify", MLP, "--plan", str(plan_file), "--batches", "2")
    assert code == 0 and "2 ranks" in out and "2 batches" in out
    code, out, _ = said("verify", MLP, "--plan", str(plan_file), "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] and data["max_rel_error"] < data["tolerance"] and len(data["losses"]) == 1


def test_verify_exits_1_where_numbers_differ(said: Any, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code that a script can trust: here one rank's share of every sum is lost on purpose."""
    from laminar.runtime.check.in_process import lockstep, loopback
    from laminar.runtime.comm import shm_collectives

    for how in (loopback, lockstep):  # the code that ranks run, and the interpreter that names the op
        monkeypatch.setattr(how, "reduce", lambda terms, op: terms[0])
    monkeypatch.setattr(shm_collectives, "reduce_into", lambda terms, op, out: out.copy_(terms[0]))
    code, out, _ = said("verify", MLP, "--plan", str(plan_file))
    assert code == 1 and "first difference" in out
    code, out, _ = said("verify", MLP, "--plan", str(plan_file), "--json")
    assert code == 1 and not json.loads(out)["ok"]


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        (["capture", "examples/mlp.py"], "RecipeError", "path/to/file.py:function"),
        (["capture", "examples/none.py:tiny"], "RecipeError", "no file"),
        (["capture", "examples/mlp.py:huge"], "RecipeError", "tiny"),
        (["plan", MLP, "--mesh", "dp"], "MeshError", "dp=2,tp=4"),
        (["plan", MLP, "--mesh", "dp=two"], "MeshError", "dp=2,tp=4"),
        (["plan", MLP, "--mesh", "dp=2,dp=2"], "MeshError", "twice"),
        (["plan", MLP, "--mesh", "dp=0"], "MeshError", "at least 1"),
        (["plan", MLP, "--mesh", "dp=2", "--place", "nothing"], "PlanError", "pattern=axis:S(0)"),
        (["plan", MLP, "--mesh", "dp=2", "--place", "nothing=S(0)"], "PlanError", "names no axis"),
        (["plan", MLP, "--mesh", "dp=2", "--place", "nothing=dp:S(0)"], "PlanError", "matches no parameter"),
        (["plan", MLP, "--mesh", "dp=2", "--place", "batch.*=dp:Q(0)"], "PlacementError", "not a placement"),
        (["plan", MLP, "--mesh", "dp=2", "--place", "batch.*=tp:S(0)"], "MeshError", "no axis 'tp'"),
        (["explain", "missing.json"], "PlanError", "no plan file"),
        (["explain", "pyproject.toml"], "PlanError", "is not a plan"),
        (["verify", MLP, "--plan", "missing.json"], "PlanError", "no plan file"),
    ],
)
def test_errors_exit_2_without_a_traceback(said: Any, argv: list[str], kind: str, words: str) -> None:
    """A user's mistake is not our stack."""
    code, out, err = said(*argv)
    assert code == 2 and out == ""
    assert err.startswith(f"{kind}: ") and words in err and "Traceback" not in err


def test_a_plan_for_another_model_is_refused(said: Any, plan_file: Path) -> None:
    """Plans and recipes get mixed up."""
    code, _, err = said("verify", "examples/gpt.py:tiny", "--plan", str(plan_file))
    assert code == 2 and "PlanError" in err and "is for graph" in err


def test_errors_of_the_recipe_itself_are_shown_in_one_line(said: Any, own: Path) -> None:
    """Their text is the user's own, and --debug shows the rest."""
    code, _, err = said("capture", f"{own}:broken")
    assert code == 2 and err.startswith("ValueError: no such data set") and "--debug" in err
    with pytest.raises(ValueError, match="no such data set"):
        main(["capture", f"{own}:broken", "--debug"])
    code, _, err = said("capture", f"{own}:empty")
    assert code == 2 and err.startswith("RecipeError") and "no batch" in err


def test_a_refusal_to_capture_names_the_line(said: Any, own: Path) -> None:
    """The same words as in Python."""
    code, _, err = said("capture", f"{own}:looks")
    assert (
        code == 2
        and err.startswith("CaptureError: the truth of a tensor")
        and "own.py:" in err
        and "y.sum() > 0" in err
    )


def test_errors_are_json_where_json_was_asked_for(said: Any) -> None:
    """A script gets one object, whatever happens."""
    code, out, err = said("explain", "missing.json", "--json")
    assert code == 2 and json.loads(out) == {"error": "PlanError", "message": "no plan file missing.json"}
    assert "no plan file" in err
    code, out, _ = said("capture", "examples/mlp.py:huge", "--json")
    assert code == 2 and json.loads(out)["error"] == "RecipeError"


def test_debug_raises(plan_file: Path) -> None:
    """Whoever asks for the traceback gets it."""
    with pytest.raises(LaminarError):
        main(["explain", "missing.json", "--debug"])


@pytest.mark.parametrize("argv", [["--help"], *[[verb, "--help"] for verb in VERBS]], ids=lambda a: " ".join(a))
def test_help_lists_verbs_and_options(said: Any, argv: list[str]) -> None:
    """The manual is one flag away."""
    code, out, _ = said(*argv)
    assert code == 0
    for word in VERBS if argv == ["--help"] else ("--json", "--debug"):
        assert word in out


def test_an_unknown_verb_or_preset_is_refused(said: Any) -> None:
    """argparse does this, and lists what there is."""
    assert said("train-faster")[0] == 2
    code, _, err = said("plan", MLP, "--mesh", "dp=2", "--preset", "fast")
    assert code == 2 and "tensor" in err


def test_meshes_and_seeds_are_read_as_written() -> None:
    """The two small languages of the command line."""
    assert parse_mesh("dp=2, tp=4").to_json() == {"dp": 2, "tp": 4}
    seeds = parse_seeds(["a.*=tp:S(0, blocks=3);dp:B", "b=tp:S(1)"])
    assert seeds["a.*"]["tp"] == S(0, blocks=3) and list(seeds) == ["a.*", "b"]


# --- as processes --------------------------------------------------------------------------------------


def process(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laminar", *argv], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def test_the_installed_command_captures(tmp_path: Path) -> None:
    """From a shell, nothing but the answer on stdout."""
    done = process("capture", MLP, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] > 0


def test_the_installed_command_refuses_quickly() -> None:
    """Explaining a plan loads no torch, and an error is one block of text."""
    done = process("explain", "missing.json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("PlanError: no plan file") and "Traceback" not in done.stderr


def test_explaining_a_plan_needs_no_torch(plan_file: Path) -> None:
    """A plan is plain data; reading it must be instant."""
    code = (
        "import sys; from laminar.cli import main; "
        f"code = main(['explain', {str(plan_file)!r}]); sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cluster_alone_means_search(said: Any, tmp_path: Path) -> None:
    """The plan that is found says what was proved about it, what lost, and is one that can be verified."""
    path = tmp_path / "plan.json"
    code, out, err = said("plan", MLP, "--cluster", "2xcpu", "--budget", "2", "--compare", "-o", str(path))
    assert code == 0, err
    assert "No plan in space" in out and "gap" in out and "plans that were looked at" in out
    code, out, _ = said("plan", MLP, "--cluster", "2xcpu", "--budget", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["bound_s"] <= found["step_s"] and found["certificate"]["cells"]["all"] > 0
    assert said("verify", MLP, "--plan", str(path))[0] == 0
    assert "No plan in space" in said("explain", str(path))[1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--pin", "tp"], "--pin tp=8"),
        (["--pin", "pp=2"], "can be pinned"),
        (["--only", "luck"], "no dimension"),
        (["--memory", "1KB"], "no plan fits"),
        (["--memory", "1GB", "--margin", "0.1"], "both say what a rank may fill"),
        (["--margin", "8"], "a margin of 8"),
        (["--mesh", "dp=2", "--budget", "3"], "is for a search"),
        (["--mesh", "dp=2", "--margin", "0"], "is for a search"),
        (["--program"], "do not go with a search"),
        (["--what-if", "memry=40"], "nothing called 'memry' can be changed"),
        (["--what-if", "rows.weight=S(0)"], "'rows.weight' names no tensor"),
        (["--what-if", "memry=40"], "memory  margin  cluster  only"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(more: list[str], says: str, said: Any) -> None:
    """By the name of what is wrong, with the next step."""
    code, _, err = said("plan", MLP, "--cluster", "2xcpu", *more)
    assert code == 2 and says in err and "Traceback" not in err
