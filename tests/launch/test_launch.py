"""`laminar train` from outside: real processes that train, fail, die, hang and are stopped.

Each failure must end by itself, with one error that names the cause, an exit code that says so, and
no process left. Recipes do what they are told to in FAULT, on the rank and at the batch it names. Every
process of a run carries a mark in its environment, by which those left over would be found. How long
things take is not asserted: the outer limit only says that they end. Not covered: NCCL, several machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar import events
from laminar.checkpoint.history.references import list_refs
from laminar.checkpoint.read.verify import verify_checkpoint
from laminar.checkpoint.store.uri import open_store
from laminar.cli import main
from laminar.ir.plans.plan import Plan
from laminar.launch.local import Launch
from laminar.launch.rundir import RunDir
from tests.support.marks import slow
from tests.support.rank_pool import heed_interrupts

LIMIT_S = 200
"""Far more than any of these takes, far less than a hang."""
SLOW = pytest.mark.slow
"""For one of two that end in the same way."""

RECIPE = '''
"""A small model, and every misfortune."""
import os, signal, sys, time
import torch
from torch import nn
from laminar import Recipe

FAULT, WHO, AT = (os.environ.get("FAULT", "none:0:0")).split(":")
MINE = FAULT != "none" and WHO in ("all", os.environ.get("RANK", "0"))

def fault(x):
    if FAULT == "raise":
        raise ValueError("boom")
    if FAULT == "memory":
        torch.empty(1 << 50)
    if FAULT == "nan":
        x["x"][0, 0] = float("nan")
    if FAULT == "short":
        return {k: v[:4] for k, v in x.items()}
    if FAULT == "quit":
        os._exit(3)
    if FAULT == "exit":
        sys.exit(4)
    if FAULT.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, FAULT))
        time.sleep(60)
    if FAULT == "hang":
        time.sleep(10000)
    return x

if MINE and AT == "import":
    fault({})

def batches():
    generator = torch.Generator().manual_seed(1)
    for i in range(100):
        x = torch.randn(8, 6, generator=generator)
        batch = {"x": x, "y": (x.sum(dim=1) > 0).long()}
        yield fault(batch) if MINE and AT == str(i) else batch
        time.sleep(float(os.environ.get("PAUSE", "0")))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def model():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

def good():
    print("this is rank", os.environ.get("RANK"))
    return Recipe(model=model, loss=loss, data=batches, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), steps=12)

def scheduled():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return Recipe(model=model, loss=loss, data=batches, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), steps=12,
                  schedule=schedule, evaluate=lambda: list(batches())[:3], evaluate_every=8)

def without():
    return Recipe(model=model, loss=loss, data=batches)

'''


class Run:
    """`laminar train` as a process of its own, and whatever it starts."""

    def __init__(
        self, folder: Path, *argv: str, fault: str = "none:0:0", pause: float = 0.0, command: Any = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        own = {"FAULT": fault, "PAUSE": str(pause), "LAMINAR_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER"))} | own
        self.run_dir = folder / "run"
        command = command or [sys.executable, "-m", "laminar"]
        argv = ("train", f"{folder / 'own.py'}:good" if ".py" not in argv[0] else argv[0], *argv[1:])
        if "--run-dir" not in argv and command[-1] == "laminar" and "torch.distributed.run" not in command:
            argv = (*argv, "--run-dir", str(self.run_dir))
        self.process = subprocess.Popen(
            [*command, *argv],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; nothing of it is left running."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"did not end\n{out}\n{err}") from None
        left = self.alive()
        self.kill()
        assert left == [], f"left running: {left}\n{out}\n{err}"
        return self.process.returncode, out, err

    def alive(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                dead = (path.parent / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if f"LAMINAR_TEST_MARK={self.mark}".encode() in path.read_bytes() and not dead:
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """For a test that failed: nothing of it disturbs the next."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def until_step(self, step: int, rank: int = 0) -> None:
        """Wait until a rank has made a step."""
        path = self.run_dir / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")
        stop = time.monotonic() + LIMIT_S
        while time.monotonic() < stop and self.process.poll() is None:
            if path.exists() and any(e.kind == "step" and e.fields["step"] >= step for e in events.read_events(path)):
                return
            time.sleep(0.05)
        self.kill()
        raise AssertionError("never got there: " + "".join(map(str, self.process.communicate())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For refusals that need no process of their own."""
    monkeypatch.chdir(folder)
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    yield folder


def steps_of(path: Path) -> list[float]:
    return [float(e.fields["loss"]) for e in events.read_events(path) if e.kind == "step"]


# --- a run that goes well ------------------------------------------------------------------------------


def test_two_ranks_train_and_leave_a_run_directory(folder: Path) -> None:
    """Everything the run was is in open files; the numbers are those of one process."""
    code, out, err = Run(folder, "good", "--workers", "2", "--checkpoint", "saved").end()
    assert code == 0, err
    assert "step 12/12" in out and "samples/s" in out and "loading the recipe" in out
    assert "run directory" in out and str(folder / "run") in out and err == ""
    run = folder / "run"
    config = json.loads((run / "config.json").read_text())
    assert config["world"] == 2 and config["arguments"]["workers"] == 2 and config["versions"]["torch"]
    assert Plan.load(str(run / "plan.json")).mesh.ranks == 2
    assert "this is rank 1" in (run / "logs/rank1.log").read_text()
    kinds = [e.kind for e in events.read_events(run / "events.jsonl")]
    assert kinds[0] == "rank" and kinds[-1] == "end" and kinds.count("step") == 12
    assert {"start", "plan", "phase"} <= set(kinds) and (folder / "saved").is_dir()
    assert {e.rank for e in events.read_events(run / "events.rank1.jsonl")} == {1}
    losses = steps_of(run / "events.jsonl")
    assert losses == steps_of(run / "events.rank1.jsonl") and losses[-1] < losses[0]

    code, out, err = Run(folder, "good", "--json", "--run-dir", "alone").end()
    assert code == 0, err
    (line,) = out.splitlines()
    ended = json.loads(line)
    assert ended["steps"] == 12 and ended["unit"] == "samples" and ended["run_dir"] == "alone" and ended["per_s"] > 0
    assert ended["loss"] == pytest.approx(losses[-1], rel=1e-4)
    assert steps_of(folder / "alone/events.jsonl") == pytest.approx(losses, rel=1e-4)
    assert ended["checkpoint"] == "alone/checkpoint" and (folder / "alone/checkpoint/refs").is_dir()
    assert not (run / "checkpoint").exists()  # where another place was named, it is there


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(folder: Path) -> None:
    """Weights, optimizer, schedule and data stand where they stood; the world may be another."""
    whole = [f"{folder}/own.py:scheduled", "--steps", "20", "--run-dir", "whole"]
    code, _, err = Run(folder, *whole).end()
    assert code == 0, err
    part = [f"{folder}/own.py:scheduled", "--checkpoint", "saved", "--run-dir", "part"]
    code, _, err = Run(folder, *part, "--steps", "9", "--resume", "auto").end()  # there is nothing to resume yet
    assert code == 0, err
    code, out, err = Run(folder, *part, "--steps", "20", "--resume", "auto", "--workers", "2").end()
    assert code == 0, err
    assert "evaluation" in out
    one, two = (events.read_events(folder / name / "events.jsonl") for name in ("whole", "part"))
    for key, tolerance in (("loss", 1e-4), ("lr", 1e-12)):
        wanted, found = ([e.fields[key] for e in es if e.kind == "step"] for es in (one, two))
        assert len(wanted) == 20 and found == pytest.approx(wanted, rel=tolerance)
    assert [e.fields["step"] for e in two if e.kind == "eval"] == [8, 9, 16, 20]


def test_torchrun_starts_the_same_command(folder: Path) -> None:
    """Another launcher, the same contract: rank 0 speaks, and all agree on one run directory."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, out, err = Run(folder, "good", command=[*torchrun, "-m", "laminar"]).end()
    assert code == 0, err
    assert out.count("trained to step 12") == 1 and "step 1/12" in out
    (made,) = (folder / "runs").iterdir()
    assert made.name.startswith("own-good-") and Plan.load(str(made / "plan.json")).mesh.ranks == 2
    assert len(steps_of(made / "events.jsonl")) == len(steps_of(made / "events.rank1.jsonl")) == 12


# --- a rank that fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [slow(0), 1])
def test_a_rank_that_raises_is_heard_first(folder: Path, who: int) -> None:
    """Its traceback, then which ranks were stopped; not the other's complaint that its peer has gone."""
    code, _, err = Run(folder, "good", "--workers", "2", fault=f"raise:{who}:3").end()
    assert code == 1
    assert err.startswith("Traceback (most recent call last)") and "ValueError: boom" in err
    last = err[err.index("RankError") :]
    assert f"RankError: rank {who} of 2 failed after step 3: ValueError: boom" in last
    assert f"stopped  rank {1 - who}" in last and f"rank{who}.log" in last
    assert err.count("Traceback") == 1 and "gloo" not in err.lower()
    assert "ValueError: boom" in (folder / f"run/logs/rank{who}.log").read_text()
    assert any(
        e.kind == "error" for e in events.read_events(folder / "run" / ("events.jsonl", "events.rank1.jsonl")[who])
    )


@pytest.mark.slow
def test_a_rank_that_fails_before_the_others_meet_it(folder: Path) -> None:
    """The other one waits at the store, for minutes if nobody stopped it."""
    code, _, err = Run(folder, "good", "--workers", "2", fault="raise:1:import").end()
    assert code == 1 and "ValueError: boom" in err
    assert "RankError: rank 1 of 2 failed before the first step" in err and "stopped  rank 0" in err


@pytest.mark.slow
def test_ranks_that_all_fail_in_the_same_way_are_told_once(folder: Path) -> None:
    """A mistake in a recipe happens on every rank."""
    for n in range(5):  # one that takes half a second longer to fail than the other is stopped before it can
        code, _, err = Run(folder, "good", "--workers", "2", "--run-dir", f"run{n}", fault="raise:all:2").end()
        assert code == 1 and err.count("Traceback") == 1 and err.count("RankError") == 1
        if "also     rank" in err:
            break
    assert "also     rank" in err and "failed in the same way" in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGSEGV", "own.py"),
        slow("SIGKILL", "out-of-memory killer"),
        slow("SIGTERM", ""),
    ],
)
def test_a_rank_that_is_killed_is_named_with_its_signal(folder: Path, name: str, words: str) -> None:
    """It can't say anything itself; after a crash its log holds the line it was at."""
    code, _, err = Run(folder, "good", "--workers", "2", "--prefetch", "0", fault=f"{name}:1:4").end()
    assert code == 1
    assert f"RankError: rank 1 of 2 was ended by {name}" in err and words in err
    assert "after step 4" in err and "stopped  rank 0" in err


@pytest.mark.slow
def test_out_of_memory_says_what_to_do(folder: Path) -> None:
    """Torch's words are long and name a file in its source; ours name the next step."""
    code, _, err = Run(folder, "good", "--workers", "2", fault="memory:1:2").end()
    assert code == 1
    last = err[err.index("OutOfMemoryError: rank 1 of 2 ran out of memory after step 2") :]
    assert "zero3" in last and "--micro-batches" in last and "bf16" in last


def test_a_loss_that_is_not_finite_ends_the_run(folder: Path) -> None:
    """With the step it happened in, and how to find where."""
    code, out, err = Run(folder, "good", "--workers", "2", "--json", fault="nan:all:5").end()
    assert code == 1 and "Traceback" not in err
    assert "NonFiniteError: the loss of step 6 is nan (rank" in err and "--detect-anomaly" in err
    said = json.loads(out)
    assert said["error"] == "NonFiniteError" and said["run_dir"].endswith("run")
    assert len(steps_of(folder / "run/events.jsonl")) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [("quit:1:3", "exit code 3, without a word"), slow("exit:1:3", "exit code 4")],
)
def test_a_rank_that_leaves_is_missed(folder: Path, fault: str, words: str) -> None:
    """The others would wait for it."""
    code, _, err = Run(folder, "good", "--workers", "2", "--prefetch", "0", fault=fault).end()
    assert code == 1 and f"RankError: rank 1 of 2 ended with {words}, after step 3" in err


@pytest.mark.slow
def test_ranks_with_different_batches_are_told_so(folder: Path) -> None:
    """Their programs differ, and would wait for each other or mix their numbers."""
    code, _, err = Run(folder, "good", "--workers", "2", fault="short:1:3").end()
    assert code == 1 and "BatchError: step 4" in err and "another batch than rank" in err
    assert err.count("Error:") == 1


@pytest.mark.slow
def test_a_run_that_stands_still_is_stopped(folder: Path) -> None:
    """Every rank's stack is in its log, so one sees where it hangs."""
    for timeout_s in (6, 30, 100):  # a machine that needs longer only to begin gets more time
        run_dir = f"run{timeout_s}"
        more = ("--timeout", str(timeout_s), "--run-dir", run_dir)
        code, _, err = Run(folder, "good", "--workers", "2", *more, fault="hang:1:3").end()
        assert code == 1
        if "3 steps" in err:
            break
    assert "RankError" in err and ("no rank has made progress" in err or "did not answer" in err)
    assert "rank 1" in err and "3 steps" in err
    assert "in fault" in (folder / run_dir / "logs/rank1.log").read_text()


# --- a run that is stopped -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [
        (signal.SIGINT, True, 130),
        slow(signal.SIGTERM, False, 143),
        slow(signal.SIGINT, False, 130),
    ],
)
def test_a_signal_stops_all_ranks(folder: Path, number: int, group: bool, code: int) -> None:
    """To the launcher alone, or to its whole group as a terminal sends it."""
    run = Run(folder, "good", "--workers", "2", "--steps", "100000", pause=0.02)
    run.until_step(5)
    (os.killpg if group else os.kill)(run.process.pid, number)
    found, _, err = run.end()
    assert found == code, err
    assert f"StoppedError: stopped by {signal.Signals(number).name} after step" in err and "Traceback" not in err
    assert len(steps_of(folder / "run/events.jsonl")) >= 5
    for line in (folder / "run/events.rank1.jsonl").read_text().splitlines():
        json.loads(line)


def test_sigterm_ends_a_run_after_a_last_checkpoint(folder: Path) -> None:
    """Of the step that is told, by all ranks: whoever resumes goes on from there."""
    run = Run(folder, "good", "--workers", "2", "--steps", "100000", "--checkpoint", "saved", pause=0.02)
    run.until_step(5)
    os.kill(run.process.pid, signal.SIGTERM)
    code, _, err = run.end()
    assert code == 143 and "a checkpoint of step" in err, err
    (ref,) = list_refs(open_store(folder / "saved")).refs
    assert f"a checkpoint of step {ref.step} was saved" in err and f"after step {ref.step}" in err
    assert verify_checkpoint(open_store(folder / "saved"), ref).ok


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_all_ranks(folder: Path) -> None:
    """While torch is being loaded, or ranks wait for each other."""
    run = Run(folder, "good", "--workers", "2", fault="hang:1:import")
    while not (folder / "run/logs/rank1.log").exists() and run.process.poll() is None:
        time.sleep(0.02)
    time.sleep(1)
    os.kill(run.process.pid, signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and "StoppedError" in err


def test_signals_that_are_ignored_stay_ignored(tmp_path: Path) -> None:
    """`nohup laminar train` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        one = Launch([], 1, RunDir(tmp_path), None, 1.0)
        with one.catching():
            os.kill(os.getpid(), signal.SIGHUP)
            assert one.signalled is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert one.signalled == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(folder: Path) -> None:
    """Nobody is there to stop them: they notice."""
    run = Run(folder, "good", "--workers", "2", "--steps", "100000", pause=0.02)
    run.until_step(3, rank=1)
    assert len(run.alive()) == 3
    run.process.kill()
    run.process.communicate()
    stop = time.monotonic() + LIMIT_S
    while run.alive() and time.monotonic() < stop:
        time.sleep(0.1)
    left = run.alive()
    run.kill()
    assert left == []


# --- refused before the first step -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["missing.py:good"], "RecipeError: no file missing.py"),
        (["own.py"], "RecipeError: 'own.py' does not name a recipe"),
        (["own.py:good", "--mesh", "dp=2,tp=2", "--workers", "3"], "MeshError: Mesh(dp=2, tp=2) has 4 ranks"),
        (["own.py:good", "--plan", "fast"], "PlanError: there is no plan 'fast'"),
        (["own.py:good", "--plan", "missing.json"], "PlanError: no plan file"),
        (["own.py:good", "--resume"], "RecipeError: --resume needs --checkpoint"),
        (["own.py:good", "--run-dir", "taken"], "RecipeError: taken holds a run already"),
        (["own.py:good", "--checkpoint", "own.py/there"], "StateError: --checkpoint own.py/there can't be written"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    here: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a rank is started, or a directory made."""
    (here / "taken").mkdir()
    (here / "taken/config.json").write_text("{}")
    assert main(["train", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(words) and "Traceback" not in err
    assert not (here / "runs").exists() and not (here / "taken/logs").exists()


def test_a_plan_for_more_ranks_than_workers_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan's mesh is in its file; no rank needs to start to see that."""
    assert main(["plan", "own.py:good", "--mesh", "dp=4", "-o", "four.json", "--json"]) == 0
    assert main(["train", "own.py:good", "--plan", "four.json", "--workers", "2"]) == 2
    assert "MeshError: Mesh(dp=4) has 4 ranks, and there are 2 workers" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--workers", "0"], ["--precision", "f8"], ["--steps", "-1"], ["--ema", "x"]])
def test_a_wrong_option_is_refused_by_its_name(
    here: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse's way: exit code 2 and the option."""
    with pytest.raises(SystemExit) as end:
        main(["train", "own.py:good", *option])
    assert end.value.code == 2 and option[0] in capsys.readouterr().err


def test_a_port_in_use_is_said_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not after every rank has tried for minutes to meet there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["train", "own.py:good", "--workers", "2", "--master-port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"RendezvousError: port {port} can't be used") and "--master-port" in err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        slow("none", "RecipeError: "),
        ("without", "has no optimizer"),
    ],
)
def test_a_wrong_recipe_is_refused_by_the_ranks(folder: Path, recipe: str, words: str) -> None:
    """It takes the recipe's own code to know; still one error, no traceback and exit code 2."""
    code, _, err = Run(folder, f"{folder}/own.py:{recipe}", "--workers", "2").end()
    assert code == 2 and words in err and "Traceback" not in err and err.count("Error:") == 1


def test_the_launcher_loads_no_torch(folder: Path) -> None:
    """It must be quick to say no, and light beside the ranks. With several it does, once they run: for the store."""
    program = (
        "import sys; from laminar.cli import main; "
        f"code = main(['train', {str(folder / 'own.py')!r} + ':good', '--run-dir', 'light', '--steps', '2']); "
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_teaches() -> None:
    """Examples, exit codes, and where things are written."""
    done = subprocess.run(
        [sys.executable, "-m", "laminar", "train", "--help"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0
    for word in ("torchrun", "--workers", "exit codes", "130", "events.jsonl", "--detect-anomaly"):
        assert word in done.stdout
