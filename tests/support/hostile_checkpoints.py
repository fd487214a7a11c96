"""Checkpoints that somebody made to do harm, each built by code into a store of its own.

    python -m tests.support.hostile_checkpoints FOLDER

builds and tries all of them with the memory of the process limited, and prints what came of each.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from laminar.checkpoint import (
    CheckpointRef,
    StateReader,
    TensorKey,
    collect_garbage,
    latest_valid,
    list_refs,
    open_store,
    verify_checkpoint,
)
from laminar.checkpoint.format.block_grid import BLOCK_BYTES
from laminar.checkpoint.format.hashing import block_hash, hash_as
from laminar.checkpoint.packs.pack_format import FOOTER, NO_BASE, PACK_END, PACK_MAGIC, RECORD
from laminar.errors import CheckpointError, LaminarError
from tests.support.stored_states import save_arrays, small_state

MEMORY_BYTES = 1 << 30
"""Of addresses that the trying process may use in all, of which Python and numpy take about a third."""
KEY = TensorKey("parameter", "up.weight")


@dataclass
class Hostile:
    """A store with one good checkpoint, about to be spoiled."""

    folder: Path
    ref: CheckpointRef = field(init=False)

    def __post_init__(self) -> None:
        self.ref = save_arrays(open_store(self.folder), small_state())

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifests" / self.ref.manifest).read_bytes())

    def refer(self, data: bytes, **other: Any) -> None:
        """A manifest of these bytes, with the hash it needs, and the reference to it."""
        (self.folder / "manifests" / self.ref.manifest).unlink()
        (self.folder / self.ref.key).unlink()
        manifest = hash_as("manifest", data).hex()
        (self.folder / "manifests" / manifest).write_bytes(data)
        fields = {"run": "run", "sequence": 1, "step": 0, "manifest": manifest, "root": self.ref.root, **other}
        self.refer_as({"laminar_reference": 1, **fields})

    def refer_as(self, fields: dict[str, Any], key: str | None = None) -> None:
        seal = hash_as("reference", text(fields)).hex()
        path = self.folder / (key or self.ref.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text({**fields, "seal": seal}))

    def edit(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """The manifest with something changed, and the root it has then, so that only the change can be refused."""
        whole = self.manifest
        change(whole)
        state = whole.get("state")
        if isinstance(state, dict) and isinstance(state.get("tensors"), list):
            state["root"] = root_of(state)
            self.refer(text(whole), root=state["root"], step=whole.get("step", 0))
        else:
            self.refer(text(whole))

    def tensor(self, **fields: Any) -> None:
        """The weight with other fields."""
        self.edit(lambda whole: whole["state"]["tensors"][-1].update(fields))

    def scalars(self, value: str) -> None:
        """Scalars that say something in the file's own words."""
        whole = self.manifest
        whole["state"]["scalars"] = {"lr": "@"}
        self.refer(text(whole).replace(b'"@"', value.encode()))

    def pack(self, records: list[tuple[Any, ...]], body: bytes, index_length: int | None = None) -> None:
        """In place of the pack: these records, of which a hash is that of the weight's block where None is said."""
        block = bytes.fromhex(self.manifest["state"]["tensors"][-1]["blocks"])
        index = b"".join(RECORD.pack(*(block if v is None else v for v in r)) for r in records)
        length = len(index) if index_length is None else index_length
        self.pack_file(PACK_MAGIC + body + index + FOOTER.pack(length, hash_as("index", index), PACK_END))

    def pack_file(self, data: bytes) -> None:
        (path,) = (self.folder / "packs").iterdir()
        path.write_bytes(data)

    def replace(self, folder: str, make: Callable[[Path], Any]) -> None:
        """The one file of a folder by something else of its name."""
        (path,) = [p for p in (self.folder / folder).rglob("*") if p.is_file()]
        path.unlink()
        make(path)


def text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def root_of(state: dict[str, Any]) -> str:
    """The root of a state, however little sense it makes."""
    hashes = []
    for t in state["tensors"]:
        said = [t.get("kind"), t.get("name"), t.get("entry"), t.get("dtype"), t.get("shape")]
        blocks = t.get("blocks")
        try:
            content = bytes.fromhex(blocks)
        except (ValueError, TypeError):
            content = b""
        hashes.append(hash_as("tensor", text(said) + b"\n" + content))
    return hash_as("state", hash_as("scalars", text(state["scalars"])) + b"".join(hashes)).hex()


class Bomb:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PICKLE_WAS_RUN",)


def bomb(plain: int, said: int | None) -> bytes:
    """A frame of zeros, far larger than it says, or saying nothing."""
    out = io.BytesIO()
    params = {"size": said} if said is not None else {}
    with zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False, **params) as writer:
        for _ in range(plain >> 20):
            writer.write(bytes(1 << 20))
    return out.getvalue()


def coded(data: bytes, plain: int, encoding: int = 1, **more: Any) -> tuple[list[tuple[Any, ...]], bytes]:
    """One record for the weight's block, stored so."""
    depth, base = more.get("depth", 0), more.get("base", NO_BASE)
    return [(None, len(PACK_MAGIC), len(data), plain, encoding, depth, base, block_hash(data))], data


def bombed(h: Hostile, frame: bytes) -> None:
    """A frame where a block of 4 MiB should be, which nobody would miss by its length."""
    h.pack(*coded(frame, BLOCK_BYTES))
    h.tensor(shape=[BLOCK_BYTES], dtype="u8")


def lying_frame() -> bytes:
    """A frame whose header says 4 MiB and whose blocks make 64 MiB."""
    frame = bytearray(bomb(64 << 20, 64 << 20))
    size = frame.index(struct.pack("<I", 64 << 20))
    frame[size : size + 4] = struct.pack("<I", BLOCK_BYTES)
    return bytes(frame)


def delta_cycle(h: Hostile) -> None:
    """Two blocks, each a delta to the other."""
    block = bytes.fromhex(h.manifest["state"]["tensors"][-1]["blocks"])
    other = block_hash(b"other")
    data = zstandard.compress(bytes(768))
    end = len(PACK_MAGIC) + len(data)
    one = (block, len(PACK_MAGIC), len(data), 768, 2, 5, other, block_hash(data))
    two = (other, end, len(data), 768, 2, 5, block, block_hash(data))
    h.pack([one, two], data + data)


def many_copies(h: Hostile) -> None:
    """A hundred packs, in each a copy of each block of a chain, none of which can be read."""
    block = bytes.fromhex(h.manifest["state"]["tensors"][-1]["blocks"])
    chain = [block, *(block_hash(bytes([i])) for i in range(8))]
    data = zstandard.compress(b"\1" * 768)
    records = []
    for i, one in enumerate(chain[:-1]):
        at = len(PACK_MAGIC) + i * len(data)
        records.append((one, at, len(data), 768, 2, 8 - i, chain[i + 1], block_hash(data)))
    h.pack(records, data * len(records))
    (path,) = (h.folder / "packs").iterdir()
    for i in range(100):
        (path.parent / f"copy-{i}.pack").write_bytes(path.read_bytes())


def duplicate(h: Hostile, key: str) -> None:
    data = text(h.manifest)
    h.refer(data.replace(f'"{key}":'.encode(), f'"{key}":0,"{key}":'.encode(), 1))


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../b",
    "a\\b",
    "a\0b",
    "",
    "x" * 5000,
    "\ud800",
    "line\nbreak",
    "..",
    7,
    None,
]
SHAPES: list[Any] = [
    [1 << 40, 1 << 40],
    [1 << 60],
    [-1, -384],
    [16.0, 24],
    [True, 24],
    [1] * 1000,
    "16",
    None,
    [16],
    [16, 25],
]
SHAPES += [[], [0, 24], [10**400], [[16], [24]]]
DTYPES: list[Any] = ["object", "O8", "", "f64", 7, None, "BF16", "i8"]
BLOCKS: list[Any] = ["zz", "A" * 64, "0" * 63, "0" * 64, "0" * 128, "", None, 5, ["0" * 64], "ab " * 32]
NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" + "0" * 5000,
    "[" * 100_000 + "]" * 100_000,
    "1.0e0",
    "01",
    "{}}",
]
FIELDS: list[tuple[str, Any]] = [
    ("run", "../../x"),
    ("run", "Run"),
    ("run", ""),
    ("run", "other"),
    ("step", -1),
    ("step", 1.5),
    ("step", 10**300),
    ("step", True),
    ("parent", "../x"),
    ("parent", 7),
    ("laminar_checkpoint", 2),
    ("laminar_checkpoint", "1"),
    ("laminar_checkpoint", True),
    ("state", []),
    ("about", None),
    ("unknown", 1),
    ("save", None),
]
RAW: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"\x93NUMPY",
    "a pickle": pickle.dumps(Bomb()),
    "a list": b"[]",
    "a number": b"1",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "spaces": b" " * 1000 + b"{}",
    "deep lists": b"[" * (30 << 20),
    "many lists": b"[" + b"[]," * (8 << 20) + b"[]]",
    "many numbers": b"[" + b"1," * (12 << 20) + b"1]",
    "a huge file": b" " * (65 << 20),
}
CASES: dict[str, Callable[[Hostile], Any]] = {}
for _v in NAMES:
    CASES[f"name {str(_v)[:20]!r}"] = lambda h, v=_v: h.tensor(name=v)
for _v in SHAPES:
    CASES[f"shape {str(_v)[:30]}"] = lambda h, v=_v: h.tensor(shape=v)
for _v in DTYPES:
    CASES[f"dtype {_v!r}"] = lambda h, v=_v: h.tensor(dtype=v)
for _v in BLOCKS:
    CASES[f"blocks {str(_v)[:10]} {len(str(_v))}"] = lambda h, v=_v: h.tensor(blocks=v)
for _v in NUMBERS:
    CASES[f"scalar {_v[:12]}"] = lambda h, v=_v: h.scalars(v)
for _f, _v in FIELDS:
    CASES[f"{_f} {str(_v)[:12]}"] = lambda h, f=_f, v=_v: h.edit(lambda whole: whole.update({f: v}))
for _f, _v in RAW.items():
    CASES[f"manifest of {_f}"] = lambda h, v=_v: h.refer(v)
CASES |= {
    "kind pickle": lambda h: h.tensor(kind="pickle"),
    "entry with a path": lambda h: h.tensor(entry="../x"),
    "unknown field of a tensor": lambda h: h.tensor(code="import os"),
    "no shape": lambda h: h.edit(lambda w: w["state"]["tensors"][-1].pop("shape")),
    "a tensor twice": lambda h: h.edit(lambda w: w["state"]["tensors"].append(w["state"]["tensors"][-1])),
    "tensors not in order": lambda h: h.edit(lambda w: w["state"]["tensors"].reverse()),
    "blocks of another tensor": lambda h: h.edit(
        lambda w: w["state"]["tensors"][-1].update(blocks=w["state"]["tensors"][1]["blocks"])
    ),
    "another root": lambda h: h.refer(text(h.manifest | {"state": h.manifest["state"] | {"root": "0" * 64}})),
    "truncated JSON": lambda h: h.refer(text(h.manifest)[:-20]),
    "a key twice": lambda h: duplicate(h, "run"),
    "scalars twice": lambda h: duplicate(h, "scalars"),
    "spaces in JSON": lambda h: h.refer(json.dumps(h.manifest, sort_keys=True).encode()),
    "reference to another root": lambda h: h.refer(text(h.manifest), root="1" * 64),
    "reference to another step": lambda h: h.refer(text(h.manifest), step=5),
    "reference of another run": lambda h: h.refer(text(h.manifest), run="other"),
    "reference of another number": lambda h: h.refer(text(h.manifest), sequence=9),
    "reference with a path": lambda h: h.refer(text(h.manifest), manifest="../../etc/passwd"),
    "reference to nothing": lambda h: h.refer(text(h.manifest), manifest="0" * 64),
    "reference with a field more": lambda h: h.refer(text(h.manifest), code="x"),
    "reference without its seal": lambda h: (h.folder / h.ref.key).write_bytes(text({"run": "run"})),
    "reference of a pickle": lambda h: (h.folder / h.ref.key).write_bytes(pickle.dumps(Bomb())),
    "reference of many bytes": lambda h: (h.folder / h.ref.key).write_bytes(b"[" * (80 << 20)),
    "reference is a link": lambda h: h.replace("refs", lambda p: p.symlink_to("/etc/passwd")),
    "manifest is a link": lambda h: h.replace("manifests", lambda p: p.symlink_to("/etc/passwd")),
    "manifest is a pipe": lambda h: h.replace("manifests", os.mkfifo),
    "pack is a link": lambda h: h.replace("packs", lambda p: p.symlink_to("/dev/zero")),
    "pack is a pipe": lambda h: h.replace("packs", os.mkfifo),
    "pack is a folder": lambda h: h.replace("packs", lambda p: p.mkdir()),
    "packs are a link": lambda h: (h.folder / "packs").rename(h.folder / "p") and (h.folder / "packs").symlink_to("p"),
    "pack of nothing": lambda h: h.pack_file(b""),
    "pack of zeros": lambda h: h.pack_file(bytes(4096)),
    "pack of a pickle": lambda h: h.pack_file(pickle.dumps(Bomb()) * 40),
    "pack without an index": lambda h: h.pack([], b""),
    "index longer than its pack": lambda h: h.pack(*coded(bytes(768), 768, 0), index_length=1 << 62),
    "index of no whole records": lambda h: h.pack(*coded(bytes(768), 768, 0), index_length=100),
    "block of 4 GB": lambda h: h.pack(*coded(bytes(768), (1 << 32) - 1, 0)),
    "block of no bytes": lambda h: h.pack(*coded(b"", 768, 1)),
    "block of other content": lambda h: h.pack(*coded(bytes(768), 768, 0)),
    "block behind the end": lambda h: h.pack([(None, 1 << 60, 768, 768, 0, 0, NO_BASE, NO_BASE)], bytes(768)),
    "blocks that overlap": lambda h: h.pack([(None, 8, 768, 768, 0, 0, NO_BASE, NO_BASE)] * 2, bytes(768)),
    "gaps between blocks": lambda h: h.pack([(None, 8, 768, 768, 0, 0, NO_BASE, NO_BASE)], bytes(800)),
    "unknown encoding": lambda h: h.pack(*coded(bytes(768), 768, 7)),
    "bomb that says its size": lambda h: bombed(h, bomb(1 << 30, 1 << 30)),
    "bomb that says nothing": lambda h: bombed(h, bomb(256 << 20, None)),
    "bomb that lies": lambda h: bombed(h, lying_frame()),
    "bomb of a wide window": lambda h: bombed(h, bomb(256 << 20, 256 << 20)),
    "two frames": lambda h: h.pack(*coded(zstandard.compress(bytes(700)) + zstandard.compress(bytes(68)), 768)),
    "compressed garbage": lambda h: h.pack(*coded(b"\x28\xb5\x2f\xfd" + b"\xff" * 60, 768)),
    "delta to nothing": lambda h: h.pack(*coded(zstandard.compress(bytes(768)), 768, 2, depth=1, base=b"\1" * 32)),
    "delta to itself": lambda h: h.pack(
        *coded(
            zstandard.compress(bytes(768)),
            768,
            2,
            depth=1,
            base=bytes.fromhex(h.manifest["state"]["tensors"][-1]["blocks"]),
        )
    ),
    "deltas in a circle": delta_cycle,
    "a delta too deep": lambda h: h.pack(*coded(zstandard.compress(bytes(768)), 768, 2, depth=200, base=b"\1" * 32)),
    "a delta without depth": lambda h: h.pack(*coded(zstandard.compress(bytes(768)), 768, 2, depth=0, base=b"\1" * 32)),
    "a hundred copies of a chain": many_copies,
}


def try_one(folder: Path) -> str:
    """What comes of reading a store: "refused: ..." where every way of it is, and the collection takes nothing."""
    said = []
    store = open_store(folder)
    before = sorted(str(p) for p in folder.rglob("*") if p.is_file() and p.parent.name in ("packs", "manifests"))
    try:
        found = latest_valid(store, "run")
        if found.ref is not None:
            return "taken as valid"
        said += [d.what for v in found.passed_over for d in v.damage[:1]]
        said += [e.what for e in found.damaged_refs.values()]
        for ref in list_refs(store).refs:
            assert not verify_checkpoint(store, ref).ok
            try:
                StateReader(store, ref).read(KEY)
                return "read"
            except CheckpointError as error:
                said.append(error.what)
    except CheckpointError as error:
        said.append(error.what)
    try:
        collect_garbage(store)
    except CheckpointError as error:
        said.append(error.what)
    after = sorted(str(p) for p in folder.rglob("*") if p.is_file() and p.parent.name in ("packs", "manifests"))
    if said and set(before) - set(after):
        return f"removed {sorted(set(before) - set(after))}"
    return f"refused: {said[0][:200]}" if said else "nothing was said"


def main(folder: Path) -> None:
    """All of them, in a process with little memory."""
    for number, make in enumerate(CASES.values()):
        make(Hostile(folder / str(number)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = {}
    for number, name in enumerate(CASES):
        try:
            out[name] = try_one(folder / str(number))
        except LaminarError as error:
            out[name] = f"refused: {error.what}"
        except BaseException as error:
            out[name] = f"{type(error).__name__}: {error}"[:300]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"cases": out, "peak_bytes": peak}))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    main(Path(sys.argv[1]))
