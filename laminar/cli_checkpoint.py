"""`laminar checkpoint ls | verify | diff | export | gc`: what is in a store, whether it is whole, and what may go.

None of these needs the model, and all but `export` do without torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.cli_ask import working
from laminar.errors import StateError
from laminar.planner.report.words import sized

if TYPE_CHECKING:
    from laminar.checkpoint.store.protocol import Store

CHECKPOINT = """\
examples
  laminar checkpoint ls     runs/gpt/checkpoint              runs, steps, sizes: what each added, what it shares
  laminar checkpoint verify s3://bucket/gpt                  read every byte; exit 1, and which tensor, if one is wrong
  laminar checkpoint diff   store#run@100 store#run@200      which tensors and settings differ
  laminar checkpoint export store -o weights                 model.safetensors, as Hugging Face reads it
  laminar checkpoint gc     store --keep "last 3, every 1000"    drop the others of every run, and free their space

A checkpoint is named STORE#RUN@STEP; without @STEP it is the run's last, without #RUN that of the only run.
"""


def checkpoint_options(p: argparse.ArgumentParser) -> None:
    """One verb below `laminar checkpoint`."""
    p.epilog, p.formatter_class = CHECKPOINT, argparse.RawDescriptionHelpFormatter
    verbs = p.add_subparsers(dest="what", required=True, metavar="VERB", help="ls, verify, diff, export or gc")

    def verb(name: str, does: Callable[[argparse.Namespace], int], help_: str, *names: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        for each in names:
            made.add_argument(each, help="a folder or URI" + ("" if each == "store" else ", or STORE#RUN@STEP"))
        unless_above = {"action": "store_true", "default": argparse.SUPPRESS}
        made.add_argument("--json", help="print JSON instead of text", **unless_above)  # type: ignore[arg-type]
        made.add_argument("--debug", help="show full tracebacks of errors", **unless_above)  # type: ignore[arg-type]
        made.set_defaults(does=does)
        return made

    verb("ls", _list, "list checkpoints with their sizes, shared and new", "store")
    verb("verify", _verify, "read every byte of checkpoints; exit 1 if any is not as it was written", "checkpoint")
    verb("diff", _diff, "compare two checkpoints by tensor; exit 1 if they differ", "one", "other")
    out = verb("export", _export, "write a checkpoint's weights as safetensors", "checkpoint")
    out.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for model.safetensors")
    out.add_argument("--ema", action="store_true", help="the moving average of the weights")
    gc = verb("gc", _gc, "remove what no checkpoint needs, and leftovers of runs that died", "store")
    gc.add_argument(
        "--keep", metavar="WHICH", help='first drop checkpoints, such as "last 3, every 1000" (default: none)'
    )


def do_checkpoint(args: argparse.Namespace) -> int:
    """What was asked for."""
    code: int = args.does(args)
    return code


def _list(args: argparse.Namespace) -> int:
    from laminar.checkpoint.read.compare import list_checkpoints

    with working("reading manifests", args.json):
        found = list_checkpoints(_store(args.store))
    if args.json:
        rows = [{**asdict(c.ref), **_sizes(c), "error": c.error and c.error.what} for c in found]
        print(json.dumps(rows))
        return 0
    if not found:
        print(f"no checkpoints in {args.store}")
        return 0
    print(f"{'run':<26} {'step':>8}  {'state':>9} {'stored':>9} {'new':>9}  root")
    for c in found:
        sizes = "  ".join(f"{sized(n):>8}" for n in _sizes(c).values()) if c.error is None else f"{c.error.what:<28}"
        print(f"{c.ref.run:<26} {c.ref.step:>8}  {sizes}  {c.ref.root[:16]}")
    return 0


def _store(name: str) -> Store:
    """A store that is there: looking into it must not make it."""
    from laminar.checkpoint.store.uri import open_store

    if "://" not in name and not Path(name).is_dir():
        raise StateError(f"there is no {name}", next="name a store that a job was saved in: a folder, or a URI")
    return open_store(name)


def _sizes(found: Any) -> dict[str, int]:
    return {"state_bytes": found.state_bytes, "stored_bytes": found.stored_bytes, "new_bytes": found.new_bytes}


def _verify(args: argparse.Namespace) -> int:
    from laminar.checkpoint.history.checkpoint_name import CheckpointName
    from laminar.checkpoint.history.references import list_refs
    from laminar.checkpoint.packs.block_reader import BlockReader
    from laminar.checkpoint.read.verify import verify_checkpoint

    name = CheckpointName.parse(args.checkpoint)
    store = _store(name.store)
    refs = name.all_meant() if name.step is not None else list_refs(store, name.run or None).refs
    damaged = list_refs(store, name.run or None).damaged
    if not refs and not damaged:
        raise StateError(
            f"there is no checkpoint in {args.checkpoint}", next="laminar checkpoint ls shows what is there"
        )
    reader, bad = BlockReader(store), len(damaged)
    rows: list[dict[str, Any]] = []
    for key, error in damaged.items():
        rows.append({"reference": key, "ok": False, "damage": [error.what]})
    with working("verifying", args.json) as say:
        for i, ref in enumerate(refs):
            say(f"verifying checkpoint {i + 1} of {len(refs)}")
            found = verify_checkpoint(store, ref, reader)
            bad += not found.ok
            rows.append(
                {**asdict(ref), "ok": found.ok, "bytes": found.plain_bytes, "damage": list(map(str, found.damage))}
            )
    if args.json:
        print(json.dumps({"ok": not bad, "checkpoints": rows}))
        return 1 if bad else 0
    for row in rows:
        title = row.get("reference") or f"{row['run']} step {row['step']}"
        print(f"{title}: {'whole' if row['ok'] else 'DAMAGED'}")
        for line in row["damage"]:
            print(f"  {line}")
    print(f"{len(rows)} checkpoints, {bad} damaged")
    return 1 if bad else 0


def _diff(args: argparse.Namespace) -> int:
    from laminar.checkpoint.history.checkpoint_name import CheckpointName
    from laminar.checkpoint.history.references import load_checkpoint
    from laminar.checkpoint.read.compare import diff_checkpoints

    names = [CheckpointName.parse(text) for text in (args.one, args.other)]
    one, other = (load_checkpoint(_store(n.store), n.all_meant()[0]) for n in names)
    found = diff_checkpoints(one, other)
    if args.json:
        changes = [{**asdict(c), "key": str(c.key)} for c in found.tensors]
        print(json.dumps({"same": found.same, "tensors": changes, "scalars": list(found.scalars)}))
        return 0 if found.same else 1
    if found.same:
        print(f"the same state, bit for bit: {one.state.root}")
        return 0
    for change in found.tensors:
        if change.blocks:
            print(f"  {change.key}: {change.changed_blocks} of {change.blocks} blocks")
        else:
            print(f"  {change.key}: {change.before or 'not there'} -> {change.after or 'not there'}")
    if found.scalars:
        print(f"  besides tensors: {', '.join(found.scalars)}")
    print(f"{len(found.tensors)} of {len(other.state.tensors)} tensors differ")
    return 1


def _export(args: argparse.Namespace) -> int:
    from laminar.checkpoint.history.checkpoint_name import CheckpointName
    from laminar.train.formats.checkpoint_source import CheckpointSource
    from laminar.train.formats.export import export_source

    with working("exporting", args.json) as say:
        name = CheckpointName.parse(args.checkpoint)
        _store(name.store)
        source = CheckpointSource(name, args.ema)
        files = export_source(source, args.output, lambda name: say(f"exporting {name}"))
    if args.json:
        print(json.dumps({"checkpoint": source.where, "files": files, "directory": args.output}))
    else:
        print(
            f"{source.where}: {len(source.specs)} tensors in {args.output}/{files[0]}" + (" ..." if files[1:] else "")
        )
    return 0


def _gc(args: argparse.Namespace) -> int:
    from laminar.checkpoint.history.gc import collect_garbage
    from laminar.checkpoint.history.references import CheckpointRef, list_refs
    from laminar.checkpoint.history.retention import Keep, drop_checkpoints

    store = _store(args.store)
    with working("collecting", args.json):
        dropped: list[CheckpointRef] = []
        if args.keep:
            keep = Keep.parse(args.keep)
            for run in dict.fromkeys(r.run for r in list_refs(store).refs):
                dropped += drop_checkpoints(store, run, keep)
        collected = collect_garbage(store)
    if args.json:
        print(json.dumps({"dropped": [asdict(r) for r in dropped], **asdict(collected)}))
        return 0
    for ref in dropped:
        print(f"dropped {ref.run} step {ref.step}")
    print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in asdict(collected).items()))
    return 0
