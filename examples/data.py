"""Data that every machine already has: text, pictures and click logs, with nothing to download.

The text is Python's own standard library, sources and help pages, as characters: a few megabytes that
are the same wherever the Python version is. Pictures are gratings, clicks come from hidden
preferences; both are drawn by a rule that can be learned but not by looking at averages, so a loss
that falls below what averages give means that something was learned.

Batches are drawn by keys: batch number i is a function of (seed, i) alone. Every rank sees the same
global batches, so does every run, and one that resumes at step i need not draw those before it.
"""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
"""What the text is made of: a character's id is its place here."""
VOCAB = len(SYMBOLS)
HELD_OUT = 12
"""One in so many documents is kept for validation."""


class Batches(Iterator[Any]):
    """Batches without end, in order by `next`, or any of them by its number."""

    def __init__(self, draw: Callable[[Generator], Any], seed: int = 1) -> None:
        self.draw, self.seed, self.at = draw, seed, 0

    def __getitem__(self, number: int) -> Any:
        key = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=4).digest()
        return self.draw(Generator().manual_seed(int.from_bytes(key, "big")))

    def __next__(self) -> Any:
        self.at += 1
        return self[self.at - 1]


# --- text --------------------------------------------------------------------------------------


def documents() -> Iterator[str]:
    """Sources of the standard library in order of their names, then Python's help pages.

    Only single-file modules, which keeps it to a few megabytes, and only those Python lists as its
    own: what a distribution or a build left beside them differs from machine to machine.
    """
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        path = library / f"{name}.py"
        if path.is_file():
            source = path.read_bytes()
            if source.isascii():
                yield source.decode("ascii")
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions put it into a package of its own
        return
    for name in sorted(topics):
        yield topics[name]


def encode(text: str) -> Tensor:
    """Ids of characters; what is not among the symbols is read as a space."""
    table = bytearray([SYMBOLS.index(" ")] * 256)
    for i, symbol in enumerate(SYMBOLS):
        table[ord(symbol)] = i
    known = text.expandtabs(4).encode("ascii", "replace").translate(bytes(table))
    return torch.frombuffer(bytearray(known), dtype=torch.uint8)


def decode(ids: Tensor) -> str:
    """The text that ids stand for."""
    return "".join(SYMBOLS[i] for i in ids.tolist())


@cache
def corpus() -> tuple[Tensor, Tensor]:
    """Ids of the text to train on and of the text held out, whole documents in each."""
    parts: tuple[list[str], list[str]] = ([], [])
    for i, text in enumerate(documents()):
        parts[i % HELD_OUT == HELD_OUT - 1].append(text)
    if not parts[1]:
        library = sysconfig.get_path("stdlib")
        raise RuntimeError(f"{library} holds no sources to train on: this Python was installed without them")
    train, held_out = (encode("\n".join(part)) for part in parts)
    return train, held_out


def windows(batch: int, tokens: int, seed: int = 1, held_out: bool = False) -> Batches:
    """Pieces of text from random places: `ids`, and as `target` the character after each of them."""
    text = corpus()[held_out]
    reach = torch.arange(tokens + 1)

    def draw(rng: Generator) -> dict[str, Tensor]:
        start = torch.randint(len(text) - tokens, (batch, 1), generator=rng)
        piece = text[start + reach].long()
        return {"ids": piece[:, :-1].contiguous(), "target": piece[:, 1:].contiguous()}

    return Batches(draw, seed)


PAD, MASK = 0, 1
IGNORE = -100
"""The label of a character that is not asked for; also the default of `F.cross_entropy`."""
MASKED_VOCAB = VOCAB + 2
"""Padding and the mask come first, then the symbols."""


def masked(batch: int, tokens: int, share: float = 0.15, seed: int = 1, held_out: bool = False) -> Batches:
    """Pieces of text of uneven length, padded, some characters of which are masked and to be guessed.

    The number of masked characters differs from piece to piece. The second one of every piece is always
    among them, so that no part of a batch is without a question.
    """
    text = corpus()[held_out]
    place = torch.arange(tokens)

    def draw(rng: Generator) -> dict[str, Tensor]:
        start = torch.randint(len(text) - tokens, (batch, 1), generator=rng)
        length = torch.randint(tokens // 2, tokens + 1, (batch, 1), generator=rng)
        piece = text[start + place].long() + 2
        is_word = place < length
        asked = (torch.rand(batch, tokens, generator=rng) < share) & is_word | (place == 1)
        return {
            "ids": piece.masked_fill(asked, MASK).where(is_word, PAD),
            "segments": (place >= length // 2).long(),
            "is_word": is_word,
            "label": piece.where(asked, IGNORE),
        }

    return Batches(draw, seed)


@cache
def counted_loss(context: int) -> float:
    """Nats per character of held-out text under counts of the training text.

    With `context` 0 a character is guessed by its frequency, with 1 by its frequency after the
    character before it. A model that has learned nothing but averages can't do better than the first.
    """
    train, held_out = (ids.long() for ids in corpus())
    if context == 0:
        counts = train.bincount(minlength=VOCAB).double() + 1
        return -float((counts / counts.sum()).log()[held_out].mean())
    if context == 1:
        pairs = (VOCAB * train[:-1] + train[1:]).bincount(minlength=VOCAB**2).double().view(VOCAB, VOCAB) + 0.1
        chance = pairs / pairs.sum(dim=1, keepdim=True)
        return -float(chance.log()[held_out[:-1], held_out[1:]].mean())
    raise ValueError(f"counted for a context of 0 or 1 characters, not of {context}")


# --- pictures ----------------------------------------------------------------------------------


def gratings(batch: int, size: int, classes: int, noise: float = 1.0, seed: int = 1) -> Batches:
    """Coloured stripes under noise; the class is their direction.

    Phase, spacing and colour are drawn afresh for each picture, so the average picture of every
    class is grey, and no template tells one from another.
    """
    axis = torch.arange(size) - (size - 1) / 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")

    def draw(rng: Generator) -> dict[str, Tensor]:
        label = torch.randint(classes, (batch,), generator=rng)
        angle = (math.pi / classes * label).view(-1, 1, 1)
        spacing = 4 + 4 * torch.rand(batch, 1, 1, generator=rng)
        phase = 2 * math.pi * torch.rand(batch, 1, 1, generator=rng)
        stripes = torch.sin(2 * math.pi / spacing * (x * angle.cos() + y * angle.sin()) + phase)
        colour = torch.randn(batch, 3, 1, 1, generator=rng)
        image = colour * stripes.unsqueeze(1) + noise * torch.randn(batch, 3, size, size, generator=rng)
        return {"image": image, "label": label}

    return Batches(draw, seed)


# --- clicks ------------------------------------------------------------------------------------


class ClickLog:
    """Who was shown what, and whether they clicked: drawn from preferences that are never shown.

    Every id of every table, and every id that goes into a bag, has a hidden vector. The chance of a
    click rises with how well the vectors of the first two tables agree, with how well the bag suits the first, and with
    one direction among the numbers. Ids follow a power law: a few are everywhere, most are rare.
    """

    def __init__(self, *, numbers: int, tables: list[int], bag_rows: int, bag: int, hidden: int = 4) -> None:
        rng = Generator().manual_seed(0)
        self.numbers, self.tables, self.bag_rows, self.bag = numbers, tables, bag_rows, bag
        self.vectors = [torch.randn(rows, hidden, generator=rng) / hidden**0.5 for rows in [*tables, bag_rows]]
        self.direction = torch.randn(numbers, generator=rng) / numbers**0.5

    def odds(self, numbers: Tensor, ids: Tensor, bag: Tensor) -> Tensor:
        """Log-odds of a click: what a perfect model would answer."""
        who, what = (self.vectors[i][ids[:, i]] for i in (0, 1))
        shelf = self.vectors[-1][bag].sum(dim=1) / self.bag**0.5
        return 3 * (who * what).sum(dim=1) + 2 * (who * shelf).sum(dim=1) + numbers @ self.direction - 0.5

    def batches(self, batch: int, seed: int = 1) -> Batches:
        """`numbers`, one id per table, a bag of ids, and `click`, 0 or 1."""

        def power_law(rows: int, shape: tuple[int, ...], rng: Generator) -> Tensor:
            """Ids of which number r comes up about as often as 1/(r+1)."""
            return ((rows + 1) ** torch.rand(shape, generator=rng) - 1).long().clamp_max(rows - 1)

        def draw(rng: Generator) -> dict[str, Tensor]:
            numbers = torch.randn(batch, self.numbers, generator=rng)
            ids = torch.stack([power_law(rows, (batch,), rng) for rows in self.tables], dim=1)
            bag = power_law(self.bag_rows, (batch, self.bag), rng)
            chance = self.odds(numbers, ids, bag).sigmoid()
            click = (torch.rand(batch, generator=rng) < chance).to(numbers.dtype)
            return {"numbers": numbers, "ids": ids, "bag": bag, "click": click}

        return Batches(draw, seed)
