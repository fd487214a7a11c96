"""The glossary is about this code: each term once, all cross-references lead somewhere, and the code uses the terms."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

import laminar
from laminar.capture.ops import kernels

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^\*\*(.+?)\*\*(?:, (?:as in|or) ([\w ]+?))?:", TEXT, flags=re.M)
TERMS = [term for terms, other in ENTRIES for term in (*terms.split(", "), *([other] if other else []))]
GIVEN_UP = ("yard", "made again in backward", "blocks made again")
"""Words for which the glossary has another one: shared memory is an arena, activations are recomputed."""


@lru_cache(maxsize=1)
def written() -> str:
    """All that the package says: names, docstrings, comments, messages; names word by word."""
    files = sorted((ROOT / "laminar").rglob("*.py"))
    text = "\n".join(f"{path.stem} {path.read_text()}" for path in files)
    return re.sub(r"[_\s\-]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", text)).lower()


def test_a_term_has_one_entry() -> None:
    """Two entries are two meanings sooner or later."""
    assert not {term: n for term, n in Counter(TERMS).items() if n > 1}


def test_what_an_entry_refers_to_has_an_entry() -> None:
    """Words in italics; plurals and the like lead to the word itself."""
    known = {term.lower() for term in TERMS}
    asked = {" ".join(word.lower().split()) for word in re.findall(r"(?<![*\w])\*([^*]+)\*(?!\*)", TEXT)}
    asked = {"axis" if word == "axes" else word for word in asked} - {"italics"}
    assert not {word for word in asked if not {word, word.removesuffix("s"), re.sub(r"e?s$", "", word)} & known}


@pytest.mark.parametrize("term", TERMS)
def test_the_code_uses_the_word(term: str) -> None:
    """An entry for something that nothing in the package is called is about another program."""
    word = re.escape(re.sub(r"[_\s\-]+", " ", term).lower())
    assert re.search(rf"\b{word}", written())


def test_names_that_the_glossary_quotes_are_there() -> None:
    """Public names, canonical ops, and files."""
    for name in re.findall(r"`laminar\.(\w+)", TEXT):
        assert name in dir(laminar) or name in vars(kernels), name
    for path in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert (ROOT / path).exists() or (ROOT / "laminar" / path).exists(), path


@pytest.mark.parametrize("word", GIVEN_UP)
def test_words_that_were_given_up_do_not_come_back(word: str) -> None:
    """Neither in the package nor in the text around it."""
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    assert not re.search(rf"\b{word}s?\b", pages.lower())
    assert not re.search(rf"\b{word}s?\b", written())
