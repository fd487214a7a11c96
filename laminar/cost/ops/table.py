"""What was measured, kept as text: one line per op, its local shapes and how its operands lie.

A key is the call as a reader would write it, with shapes for tensors, and what it makes:

    aten.mm(f32[64,128],f32[128,32]')->f32[64,32]       ' the last two dims are swapped in memory
    aten.sum.dim_IntList(f32[8,64],[0],F,-)->f32[64]     - is None, T and F are bools
    aten.clone(f32[8,4,16]{102},-)->f32[8,4,16]          {..} the dims from the outermost in memory to the innermost
    aten.mm(f32[64,128]',f32[64,32])->f32[128,32]!       ! written where it is told, not into fresh memory
    optimizer.adamw(12,1048576)                           not an op of a program: plain numbers

`{s}` is an operand whose rows lie apart (a slice), `{e}` one that repeats itself (an expansion). A
number that does not change the time (an epsilon, a scale) is written `~`; exponents are kept. Keys can be
read back, so a list of keys is all that ranks need to measure.

Entries stand in *sections*, since an op's time depends on who else computes: `cpu/ranks=2/threads=1` is two
processes at once with one thread each, `cuda/<name>` one GPU. The JSON form lives in `Cluster.profile["ops"]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from laminar.errors import LaminarError
from laminar.ir.mesh import Mesh
from laminar.ir.ops import DRAWS
from laminar.ir.program import Instr
from laminar.ir.sbp import Split
from laminar.ir.serial.codec import Dtype, Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import SIZED, STRETCHED, Call, local_args, one_call, stretched

KEY = TensorSpec((2,), "i64")
CUT = "cut"
"""Last argument of a draw whose result is one rank's piece: it goes the way through index tables."""
_KEEPS_NUMBERS = ("aten.pow.",)
STRETCHES = {"laminar.attention_at": "laminar.attention", "laminar.attention_backward_at": "laminar.attention_backward"}
"""Local forms that are priced as the op itself with fewer queries than keys: of its stretches the last one, which takes
longest, and which the others wait for. So it costs the same to who has a program and to who only has a signature."""
PLAIN_NUMBER = 0.5
"""What a number that was not written down is taken to be when its op is run."""


# --- calls as ranks make them -------------------------------------------------------------------


def local_call(instr: Instr, mesh: Mesh, rank: int = 0) -> Call:
    """The call one rank makes for a line of a program, in the form that keys are made from."""
    ins = tuple(p.local(mesh, rank) for p in instr.ins)
    outs = tuple(p.local(mesh, rank) if p else None for p in instr.outs)
    if instr.op in STRETCHES:
        op = STRETCHES[instr.op]
        nd = instr.ins[STRETCHED[op].reads].nd
        return numbered(Call(op, stretched(op, instr.args[:-4], nd), ins, outs))
    if len(instr.args) >= 4 and instr.args[-4] == "offset":
        args = instr.args
    else:
        given = instr.args
        if (box := instr.boxing) is not None:
            given = (given, box.axes, box.gives, box.takes, box.reduction)
        whole = Call(
            instr.op, given, tuple(p.spec for p in instr.ins), tuple(p.spec if p else None for p in instr.outs)
        )
        args = local_args(whole, ins, outs)
    if instr.op in DRAWS and instr.outs[0] is not None and any(isinstance(p, Split) for p in instr.outs[0].nd):
        args = (*args, CUT)
    return numbered(Call(instr.op, args, ins, outs))


def numbered(call: Call) -> Call:
    """The call with tensors numbered and with sizes that follow from the shapes written as they follow."""
    args, op = call.args, call.op
    fit = SIZED.get(op)
    if fit is not None and args and not (len(args) >= 4 and args[-4] == "offset"):
        if op in ("aten.slice_backward", "aten.slice_scatter"):
            args = _from_zero(call)
        elif op != "aten.slice.Tensor":
            args = fit(call, call.ins, call.outs)
    if op in DRAWS and len(args) > 2:
        # Neither the number of the place that draws nor whose samples these are costs anything.
        args = (*args[:2], 0, *args[3:4], *(CUT for last in args[4:] if last == CUT))
        call = replace(call, ins=(KEY,))
    return one_call(op, _numbered(args, count()), call.ins, call.outs)


def _numbered(arg: Any, numbers: Iterator[int]) -> Any:
    """Arguments with their tensors numbered one after the other."""
    # Not inside of `canonical`: a function that calls itself is a circle, which only the garbage collector ends.
    if isinstance(arg, Ref):
        return Ref("", next(numbers))
    return tuple([_numbered(a, numbers) for a in arg]) if isinstance(arg, (tuple, list)) else arg


def _from_zero(call: Call) -> tuple[Any, ...]:
    """A slice's bounds: how much of the dim matters, not where."""
    args = list(call.args)
    part = call.ins[0] if call.op == "aten.slice_backward" else call.ins[1]
    if call.op == "aten.slice_backward":
        args[1] = call.out.shape
    d = args[2] % len(part.shape)
    args[3], args[4] = 0, part.shape[d] * (args[5] if len(args) > 5 and args[5] else 1)
    return tuple(args)


# --- keys -----------------------------------------------------------------------------------------


def key_of(call: Call, marks: Sequence[str] = ()) -> str:
    """The text under which a call's time is kept.

    `marks` say how each operand lies, "" for as usual; one mark more, "!", says that the result has its place.
    """
    read = ",".join([_shown(a, call, marks) for a in call.args])
    made = ",".join("-" if o is None else str(o) for o in call.outs)
    told = "!" if len(marks) > len(call.ins) and marks[len(call.ins)] == "!" else ""
    return f"{call.op}({read})" + (f"->{made}" if made else "") + told


def _shown(arg: Any, call: Call, marks: Sequence[str]) -> str:
    if isinstance(arg, Ref):
        mark = marks[arg.index] if arg.index < len(marks) else ""
        return f"{call.ins[arg.index]}{mark if mark in ('', chr(39)) else '{' + mark + '}'}"
    if isinstance(arg, (tuple, list)):
        return f"[{','.join([_shown(a, call, marks) for a in arg])}]"
    if arg is None:
        return "-"
    if isinstance(arg, bool):
        return "T" if arg else "F"
    if isinstance(arg, float):
        return repr(arg) if call.op.startswith(_KEEPS_NUMBERS) else "~"
    if isinstance(arg, Dtype):
        return f":{arg.name}"
    return f"${arg}" if isinstance(arg, str) else str(arg)


_SPEC = re.compile(r"([a-z][a-z0-9]*\[[\d,]*\])('|\{\w+\})?")
_WORD = re.compile(r"[^,\]]*")


def parse_key(key: str) -> tuple[Call, tuple[str, ...]]:
    """The call and the marks that a key was made of."""
    op, _, rest = key.partition("(")
    inside, _, made = rest.rpartition(")")
    told = ("!",) if made.endswith("!") else ()
    ins: list[TensorSpec] = []
    marks: list[str] = []

    def one(at: int) -> tuple[Any, int]:
        if inside[at] == "[":
            items, at = many(at + 1)
            return tuple(items), at + 1
        found = _SPEC.match(inside, at)
        if found:
            ins.append(TensorSpec.parse(found[1]))
            marks.append((found[2] or "").strip("{}"))
            return Ref("", len(ins) - 1), found.end()
        word = _WORD.match(inside, at)
        assert word is not None
        return _plain(word[0]), word.end()

    def many(at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while at < len(inside) and inside[at] != "]":
            item, at = one(at)
            items.append(item)
            if at < len(inside) and inside[at] == ",":
                at += 1
        return items, at

    try:
        args, _ = many(0)
        texts = re.findall(r"-|[a-z][a-z0-9]*\[[\d,]*\]", made.removeprefix("->"))
        outs = tuple(None if t == "-" else TensorSpec.parse(t) for t in texts)
    except (ValueError, IndexError) as error:
        raise LaminarError(
            f"{key!r} is not the key of a measured op: {error}", next="measure the profile again"
        ) from None
    return Call(op, tuple(args), tuple(ins), outs), (*marks, *told)


def _plain(word: str) -> Any:
    fixed = {"-": None, "T": True, "F": False, "~": PLAIN_NUMBER}
    if word in fixed:
        return fixed[word]
    if word[:1] == ":":
        return Dtype(word[1:])
    if word[:1] == "$":
        return word[1:]
    return float(word) if any(c in word for c in ".einf") else int(word)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One op's time."""

    seconds: float
    """Median over repeats, per call."""
    spread: float
    """Standard error of the median over the median, from the quartiles."""
    repeats: int

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise LaminarError(f"a measured op can't take {self.seconds} s", next="measure the profile again")


@dataclass(frozen=True)
class Section:
    """What was measured on one device, with one number of ranks at once."""

    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, Entry] = field(default_factory=dict)

    def extended(self, newer: Section) -> Section:
        """With newer entries added; those of the same key replace the older."""
        same = not self.versions or (self.device, dict(self.versions)) == (newer.device, dict(newer.versions))
        return replace(newer, ops={**(self.ops if same else {}), **newer.ops})


@dataclass(frozen=True)
class Table:
    """Sections by name."""

    sections: Mapping[str, Section] = field(default_factory=dict)

    def extended(self, newer: Table) -> Table:
        """Both tables in one. A section measured with other library versions is replaced, not mixed."""
        merged = dict(self.sections)
        for name, section in newer.sections.items():
            merged[name] = merged[name].extended(section) if name in merged else section
        return Table(merged)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as it stands under "ops" in a profile."""
        return {
            name: {
                "device": s.device,
                "versions": dict(s.versions),
                "ops": {k: [e.seconds, round(e.spread, 5), e.repeats] for k, e in s.ops.items()},
            }
            for name, s in self.sections.items()
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Table:
        """The inverse."""
        try:
            return Table(
                {
                    name: Section(s["device"], s["versions"], {k: Entry(*e) for k, e in s["ops"].items()})
                    for name, s in data.items()
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise LaminarError(f"the profile's ops can't be read: {error!r}", next="measure it again") from None

    @staticmethod
    def of(profile: Mapping[str, Any]) -> Table:
        """The table inside a cluster's profile; an empty one if nothing was measured."""
        return Table.from_json(profile.get("ops", {}))


def cpu_section(ranks: int, threads: int) -> str:
    """Name of the section for ranks that compute at once, with so many threads each."""
    return f"cpu/ranks={ranks}/threads={threads}"


def nearest_section(wanted: str, names: Iterable[str]) -> str | None:
    """The section itself, or the one of the same kind of device that is most like it."""
    names = list(names)
    if wanted in names:
        return wanted
    alike = [n for n in names if n.split("/")[0] == wanted.split("/")[0]]

    def distance(name: str) -> float:
        mine, theirs = ([int(x) for x in re.findall(r"=(\d+)", n)] for n in (wanted, name))
        pairs = list(zip(mine, theirs, strict=False))
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)

    return min(alike, key=distance, default=None)
