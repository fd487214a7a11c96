"""Reading JSON that people may have edited: every part knows where in the file it is, and says so when it is wrong.

    corrupt plan: ops.mm_3[0][1]: 'S(x)' is not a placement

A `JsonPart` hands out what is inside it by name or number, and itself as a value of the type that is wanted; anything
else is refused as the kind of error the file belongs to. It knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from laminar.errors import LaminarError

T = TypeVar("T")
TYPE_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}
WRONG = (LaminarError, KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading raises where a value is not what it should be."""
LARGEST_WHOLE = 1 << 53
"""Whole numbers beyond this are no counts of anything."""


class JsonPart:
    """A value of a JSON document, and where it is."""

    __slots__ = ("at", "error", "value")

    def __init__(self, value: Any, error: Callable[[str], LaminarError], at: str = "") -> None:
        self.value, self.error, self.at = value, error, at

    def wrong(self, what: str) -> LaminarError:
        """The error that something is wrong here."""
        return self.error(f"{self.at}: {what}" if self.at else what)

    def _is(self, kind: type) -> Any:
        if not isinstance(self.value, kind) or (isinstance(self.value, bool) and kind is not bool):
            shown = repr(self.value) if not isinstance(self.value, (dict, list)) else TYPE_WORDS[type(self.value)]
            raise self.wrong(f"{shown[:60]}, not {TYPE_WORDS[kind]}")
        return self.value

    # -- inside

    def __getitem__(self, key: str) -> JsonPart:
        if key not in self._is(dict):
            raise self.wrong(f"no field {key!r}")
        return JsonPart(self.value[key], self.error, f"{self.at}.{key}" if self.at else key)

    def get(self, key: str, other: Any) -> JsonPart:
        """A field, or a value in its place."""
        return (
            self[key] if key in self._is(dict) else JsonPart(other, self.error, f"{self.at}.{key}" if self.at else key)
        )

    def __contains__(self, key: str) -> bool:
        return key in self._is(dict)

    def rows(self, count: int | None = None) -> list[JsonPart]:
        """The items of a list, of so many if that is said."""
        found = self._is(list)
        if count is not None and len(found) != count:
            raise self.wrong(f"{len(found)} items, not {count}")
        return [JsonPart(v, self.error, f"{self.at}[{i}]") for i, v in enumerate(found)]

    def fields(self) -> dict[str, JsonPart]:
        """The fields of an object."""
        return {k: JsonPart(v, self.error, f"{self.at}.{k}" if self.at else k) for k, v in self._is(dict).items()}

    # -- itself

    def text(self) -> str:
        """As a text."""
        return self._is(str)  # type: ignore[no-any-return]

    def flag(self) -> bool:
        """As true or false."""
        return self._is(bool)  # type: ignore[no-any-return]

    def whole(self, least: int = 0) -> int:
        """As a whole number of at least so many."""
        value = self._is(int)
        if not least <= value <= LARGEST_WHOLE:
            raise self.wrong(f"{value}, not a whole number of at least {least}")
        return value  # type: ignore[no-any-return]

    def number(self, least: float = float("-inf")) -> float:
        """As a number of at least so much."""
        if isinstance(self.value, int) and not isinstance(self.value, bool) and abs(self.value) <= LARGEST_WHOLE:
            value = float(self.value)
        else:
            value = self._is(float)
        if not value >= least:
            raise self.wrong(f"{self.value}, not a number of at least {least}")
        return value

    def object(self) -> dict[str, Any]:
        """As an object whose inside is nobody's business here."""
        return self._is(dict)  # type: ignore[no-any-return]

    def read(self, make: Callable[[Any], T]) -> T:
        """As what `make` makes of it; what it does not take is wrong here."""
        try:
            return make(self.value)
        except WRONG as error:
            said = str(error) if isinstance(error, LaminarError) else f"{type(error).__name__}: {error}"
            raise self.wrong(said) from error
