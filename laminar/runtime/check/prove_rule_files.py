"""Rules of a file, proved: what becomes of each, and which are worth searching with.

    found = proved_rules("graph_subst_3_v2.json")
    found.new        # rewrite rules that hold and that Laminar's own table does not imply: those a search is given
    print(found)     # how many were loaded and proved, and why the others were left out

A rule comes from the file (`rewrite/rule_files.py`), where it was tried as the file writes it. Here every rewrite rule
that was made of one is run as the project's own are: its left side is written down as a graph, rewritten, and both are
run on random numbers in float64. What Laminar's table implies is proved like the rest and then left out, for a search
looks at it anyway. Verdicts are kept from one command to the next under the content of the file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laminar.cache import kept
from laminar.errors import RuleError
from laminar.ir.plans.account import FileRules
from laminar.rewrite.apply import Rewrite
from laminar.rewrite.implied import implied
from laminar.rewrite.rule_files import FAILS, NOT_LOADED, Fault, entries, load
from laminar.rewrite.standalone import stage
from laminar.runtime.check.prove_rewrites import PROOF_TOLERANCE, error_on

IN_TABLE = "in Laminar's table already"
NO_PLACE = "nowhere to be found in a graph"
"""A value inside the left side is read twice there, and rewriting would compute it twice."""


@dataclass(frozen=True)
class RuleVerdict:
    """What became of one rule of a file."""

    name: str
    left_out: Fault
    """Why no search is given it, if it is not searched with."""
    proved: bool
    """Whether it holds, whatever came of it."""
    rules: tuple[tuple[str, str, float], ...] = ()
    """What is searched with: names, texts, and the worst error of each."""

    @property
    def loaded(self) -> bool:
        """Whether it could be read, and is about algebra in ops that are known."""
        return self.left_out.reason not in NOT_LOADED

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "name": self.name,
            "reason": str(self.left_out),
            "left_out": self.left_out.reason,
            "detail": self.left_out.detail,
            "loaded": self.loaded,
            "proved": self.proved,
            "rules": [list(rule) for rule in self.rules],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RuleVerdict:
        """A verdict from `to_json`'s data."""
        rules = tuple((name, text, error) for name, text, error in data["rules"])
        return RuleVerdict(data["name"], Fault(data["left_out"], data["detail"]), data["proved"], rules)


@dataclass(frozen=True)
class ProvedRules:
    """What becomes of the rules of a file."""

    file: str
    content: str
    """Its hash."""
    verdicts: tuple[RuleVerdict, ...]

    @property
    def new(self) -> tuple[Rewrite, ...]:
        """What a search is given."""
        return tuple(Rewrite.of_file(name, text) for v in self.verdicts for name, text, _ in v.rules)

    @property
    def errors(self) -> dict[str, float]:
        """The worst relative error of each of these, standing alone."""
        return {name: error for v in self.verdicts for name, _, error in v.rules}

    @property
    def left_out(self) -> dict[str, int]:
        """How many rules of the file no search is given, by reason, the most frequent first."""
        return dict(Counter(v.left_out.reason for v in self.verdicts if v.left_out).most_common())

    def counts(self) -> FileRules:
        """The same in numbers, for the account of a plan."""
        return FileRules(
            file=self.file,
            content=self.content,
            rules=len(self.verdicts),
            loaded=sum(v.loaded for v in self.verdicts),
            proved=sum(v.proved for v in self.verdicts),
            new=sum(bool(v.rules) for v in self.verdicts),
            left_out=self.left_out,
        )

    def __str__(self) -> str:
        n = self.counts()
        return "\n".join(
            [
                f"{self.file}: {n.rules} rules, {n.loaded} loaded, {n.proved} of them proved on random numbers",
                f"  {n.new} are new, and searched with",
                *(f"  {count} left out: {reason}" for reason, count in self.left_out.items()),
            ]
        )


def proved_rules(path: str | Path, progress: Callable[[int, int], None] | None = None) -> ProvedRules:
    """The rules of a file, each with a verdict; `progress` is told how many of how many are through."""
    try:
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise RuleError(f"{path} is no file of rules: {error}") from error
    verdicts = kept(
        "rules",
        {"content": content},
        lambda: _verdicts(path, progress),
        lambda made: [v.to_json() for v in made],
        lambda data: tuple(map(RuleVerdict.from_json, data)),
    )
    return ProvedRules(str(path), content, verdicts)


def _verdicts(path: str | Path, progress: Callable[[int, int], None] | None) -> tuple[RuleVerdict, ...]:
    loaded = load(path)
    made: dict[str, list[Rewrite]] = {}
    for rule in loaded.rules:
        made.setdefault(loaded.origins[rule.name], []).append(rule)
    out: list[RuleVerdict] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these are tensors of a few dozen numbers
    try:
        for entry in entries(path):
            if entry.name in made:
                out.append(_verdict(entry.name, made[entry.name], loaded.shapes))
                if progress is not None:
                    progress(sum(v.name in made for v in out), len(made))
            else:
                out.append(RuleVerdict(entry.name, loaded.rejected[entry.name], entry.name in loaded.holds))
    finally:
        torch.set_num_threads(threads)
    return tuple(out)


def _verdict(name: str, rules: list[Rewrite], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> RuleVerdict:
    """What becomes of a rule of the file that these rewrite rules were made of, for matrices and for batches."""
    found, reason = [], NO_PLACE
    for rule in rules:
        graph = stage(rule, shapes[rule.name])
        if not rule.find(graph):
            continue
        error = error_on(rule, graph)
        if error > PROOF_TOLERANCE:
            return RuleVerdict(name, Fault(FAILS), False)
        if implied(rule, graph):
            reason = IN_TABLE
        else:
            found.append((rule.name, rule.text, error))
    return RuleVerdict(name, Fault("" if found else reason), True, tuple(found))
