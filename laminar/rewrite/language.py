"""The language of rewrite rules: one line says what is looked for and what stands there afterwards.

    mm(X, W*) => part(mm(X, cat(W*, 1)), 1)      products that share X become one, its columns handed out again
    sum(mm(A*, B*)) => mm(cat(A*, 1), cat(B*, 0)) a sum of products is one product over a longer inner dim
    mm(scale(A, s), B) => scale(mm(A, B), s)      a number may be multiplied before or behind a product

A word before a parenthesis is a *form* (`forms.py`): an op, or a family of ops that mean the same. A word
that begins with a capital letter is a tensor, one with a small letter a number or another plain argument of an op,
digits are themselves; a word that stands twice must be the same thing twice. A star marks what differs between the
*members* of a site: on the left each member has its own, on the right a star stands below `cat` or `sum`, which take
all members, or outside of them, where every member gets a result of its own. `part(E, d)` is this member's share of E
along dim d: how long each share is, the left side has said (the members' own sizes, the parts of a `cat`, the pieces
of a `split`).

This file knows the words, not the ops: reading, and what follows from the shape of a rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.errors import RuleError

ARROW = "=>"
GATHERS = ("cat", "sum")
"""Forms that take all members of a starred operand."""
_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_]\w*\*?)|(?P<number>-?\d+(?:\.\d+)?)|(?P<mark>[(),]))")


@dataclass(frozen=True, slots=True)
class Var:
    """A name: of a tensor if it begins with a capital letter, of a plain argument otherwise."""

    name: str
    star: bool = False

    @property
    def tensor(self) -> bool:
        """Whether it stands for a tensor."""
        return self.name[0].isupper()

    def __str__(self) -> str:
        return f"{self.name}*" if self.star else self.name


@dataclass(frozen=True, slots=True)
class Term:
    """A form with what stands in its parentheses."""

    form: str
    args: tuple[Term | Var | int | float, ...]

    def __str__(self) -> str:
        return f"{self.form}({', '.join(map(str, self.args))})"


Pattern = Term | Var | int | float


def parse_rewrite(text: str) -> tuple[Pattern, Pattern]:
    """Both sides of a rule; a line that can't be read is refused with the place."""
    left, arrow, right = text.partition(ARROW)
    if not arrow:
        raise RuleError(f"{text!r} has no {ARROW}", next="write what is looked for, =>, and what replaces it")
    sides = _side(left), _side(right)
    known, used = {v.name: v for v in words(sides[0])}, {v.name: v for v in words(sides[1])}
    for name, var in used.items():
        if name not in known:
            raise RuleError(f"{text!r}: {var} stands on the right only", allowed="  ".join(map(str, known.values())))
        if known[name].star != var.star:
            raise RuleError(f"{text!r}: {known[name]} on the left is {var} on the right")
    return sides


def _side(text: str) -> Pattern:
    tokens: list[str] = []
    at, text = 0, text.strip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if not found:
            raise RuleError(f"{text!r} can't be read from {text[at:]!r} on", next="see laminar/rewrite/language.py")
        tokens.append(found.group().strip())
        at = found.end()
    term, rest = _term(tokens, text)
    if rest:
        raise RuleError(f"{text!r}: {''.join(rest)!r} is left over")
    return term


def _term(tokens: list[str], text: str) -> tuple[Pattern, list[str]]:
    if not tokens or tokens[0] in "(),":
        raise RuleError(f"{text!r} ends, or goes on, where a word should stand")
    word, rest = tokens[0], tokens[1:]
    if re.match(r"-?\d", word):
        return (float(word) if "." in word else int(word)), rest
    if not rest or rest[0] != "(":
        return Var(word.rstrip("*"), word.endswith("*")), rest
    args: list[Pattern] = []
    while True:
        arg, rest = _term(rest[1:], text)
        args.append(arg)
        if not rest or rest[0] not in ",)":
            raise RuleError(f"{text!r}: the parenthesis of {word} is not closed")
        if rest[0] == ")":
            return Term(word, tuple(args)), rest[1:]


def words(pattern: Pattern) -> Iterator[Var]:
    """Every name in a pattern, in order, as often as it stands there."""
    if isinstance(pattern, Var):
        yield pattern
    elif isinstance(pattern, Term):
        for arg in pattern.args:
            yield from words(arg)


def starred(pattern: Pattern) -> bool:
    """Whether a pattern is another one for every member: it has a star that no `cat` or `sum` takes."""
    if isinstance(pattern, Var):
        return pattern.star
    return isinstance(pattern, Term) and pattern.form not in GATHERS and any(map(starred, pattern.args))


def forms_in(pattern: Pattern) -> Iterator[str]:
    """The names of the forms a pattern uses."""
    if isinstance(pattern, Term):
        yield pattern.form
        for arg in pattern.args:
            yield from forms_in(arg)
