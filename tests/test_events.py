"""The event stream: cheap when nobody listens, readable while it is written, and never in a run's way."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path

import pytest

from laminar import events
from laminar.events import Event, Follower, JsonLines


def test_a_listener_hears_what_is_emitted_while_it_listens() -> None:
    """Before and after, nothing."""
    heard: list[Event] = []
    events.emit("before")
    with events.listening(heard.append):
        events.emit("step", step=1, loss=2.5)
    events.emit("after")
    assert [(e.kind, e.fields) for e in heard] == [("step", {"step": 1, "loss": 2.5})]
    assert heard[0].time > 1e9


def test_without_a_listener_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms emit in the middle of a step: the clock is not even read."""
    monkeypatch.setattr(events, "Event", None)
    monkeypatch.setattr(events.time, "time", None)
    events.emit("step", step=1)


def test_a_listener_that_fails_is_dropped_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk must not stop a training run, nor print a line for every step of it."""
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise OSError("no space left on device")

    with events.listening(broken), events.listening(heard.append):
        events.emit("a")
        events.emit("b")
    assert [e.kind for e in heard] == ["a", "b"]
    assert capsys.readouterr().err.count("no space left on device") == 1


def test_a_file_has_one_line_of_strict_json_for_each_event(tmp_path: Path) -> None:
    """Any tool can read it: no NaN, no objects, the rank on every line."""

    def strict(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    sink = JsonLines(tmp_path / "events.jsonl", rank=3)
    with events.listening(sink):
        events.emit("step", loss=math.nan, norm=math.inf, low=-math.inf, where=Path("a"), shape=(2, 3), ok=True)
        lines = (tmp_path / "events.jsonl").read_text().splitlines()  # there before anybody closes it
        events.emit("text", traceback="two\nlines")
    data = json.loads(lines[0], parse_constant=strict)
    assert data.pop("time") > 1e9
    assert data == {
        "rank": 3,
        "kind": "step",
        "loss": "nan",
        "norm": "inf",
        "low": "-inf",
        "where": "a",
        "shape": [2, 3],
        "ok": True,
    }
    assert math.isnan(float(data["loss"])) and float(data["norm"]) == math.inf
    sink.close()
    assert [e.fields.get("traceback") for e in events.read_events(tmp_path / "events.jsonl")] == [None, "two\nlines"]


def test_scalars_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    """A loss that is still a tensor is written as the number it holds."""
    import torch

    assert events.json_value({"loss": torch.tensor(1.5), "n": torch.tensor(3)}) == {"loss": 1.5, "n": 3}
    assert events.json_value(torch.tensor(math.nan)) == "nan"
    assert isinstance(events.json_value(torch.ones(2)), str)


def test_reading_along_sees_whole_lines_once(tmp_path: Path) -> None:
    """A line is often caught half written; what is no event is passed over."""
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    whole = Event("step", {"step": 1}, 5.0, 2).line()
    path.write_text(whole[:10])
    assert follower.new() == []
    path.write_text(whole + "\nnot json\n[1]\n" + whole[:20])
    assert follower.new() == [Event("step", {"step": 1}, 5.0, 2)]
    path.write_text(whole + "\nnot json\n[1]\n" + whole + "\n")
    assert follower.new() == [Event("step", {"step": 1}, 5.0, 2)] and follower.new() == []
    assert Follower(path, from_end=True).new() == []


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    """Checkpoints and loaders emit from threads of their own."""
    sink = JsonLines(tmp_path / "events.jsonl")
    with events.listening(sink):
        threads = [
            threading.Thread(target=lambda k=k: [events.emit("t", k=k, i=i, pad="x" * 300) for i in range(200)])
            for k in range(4)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    sink.close()
    found = [(e.fields["k"], e.fields["i"]) for e in events.read_events(tmp_path / "events.jsonl")]
    assert sorted(found) == [(k, i) for k in range(4) for i in range(200)]


def test_events_load_no_framework() -> None:
    """Every room may call this one, those that plan without torch too."""
    import subprocess

    code = "import sys, laminar.events; print('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "False", done.stderr
