"""The house is counted: folders that can be looked over, functions that fit on a screen, nothing twice, no circles.

`pyproject.toml` says which room and folder may import which; here is what import-linter does not count.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import networkx

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "laminar"
MOST_MODULES = 12
MOST_LINES = 60
REPEATED = 6
MOST_BY_HAND = 30
REASON = "# Long because "
ENTRIES = ("laminar", "laminar.__main__", "laminar.cli", "laminar.checkpoint", "laminar.data")
"""What users import and start."""
AWAITED: dict[str, str] = {}
"""Modules that nothing here reaches, and why they are here all the same."""
TORCHS = "laminar.capture.torch_private"
"""The one module whose purpose is to hand on names of others: torch's private ones."""


def dotted(path: Path) -> str:
    """The name a module is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    """All modules of the package by name."""
    return {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text())


def named(name: str) -> Iterator[str]:
    """Modules of the package that a module names: in imports anywhere in it, for types or when run, and in strings."""
    for node in ast.walk(tree(modules()[name])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one if one in modules() else node.module for one in inside)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value.partition(":")[0]


@lru_cache(maxsize=1)
def imports() -> networkx.DiGraph:
    """Who names whom."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules())
    graph.add_edges_from((one, other) for one in modules() for other in named(one) if other in modules())
    graph.remove_edges_from([(one, one) for one in modules()])
    return graph


def test_folders_can_be_looked_over() -> None:
    """A dozen modules in a folder; beyond that a reader searches instead of reading."""
    count: dict[Path, int] = defaultdict(int)
    for path in modules().values():
        count[path.parent] += path.name != "__init__.py"
    assert not {str(folder): n for folder, n in count.items() if n > MOST_MODULES}


def test_functions_fit_on_a_screen_or_say_why_not() -> None:
    """The reason stands in the function: `# Long because ...`."""
    long = []
    for path in modules().values():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own = lines[node.lineno - 1 : node.end_lineno]
                if len(own) > MOST_LINES and not any(line.strip().startswith(REASON) for line in own):
                    long.append(f"{dotted(path)}.{node.name}: {len(own)} lines")
    assert not long


def passed_over(file: ast.Module) -> set[int]:
    """Lines whose repetition says nothing: imports, docstrings, three dots, and what a function is given."""
    out: set[int] = set()
    for node in ast.walk(file):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, (ast.Import, ast.ImportFrom)):
            out.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            out.update(range(min(d.lineno for d in (node, *node.decorator_list)), node.body[0].lineno))
    return out


def test_no_block_of_six_lines_stands_twice() -> None:
    """What is written twice is changed once."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, path in modules().items():
        over = passed_over(tree(path))
        text = [(k, line.strip()) for k, line in enumerate(path.read_text().splitlines(), 1) if k not in over]
        text = [(k, line) for k, line in text if line]
        for at in range(len(text) - REPEATED + 1):
            block = text[at : at + REPEATED]
            places[tuple(line for _, line in block)].append(f"{name}:{block[0][0]}")
    assert not {block[0]: where for block, where in places.items() if len(where) > 1}


def test_there_are_no_circles_of_any_kind() -> None:
    """Not for types alone, not inside functions, not by a module's name in a string."""
    circles = [sorted(group) for group in networkx.strongly_connected_components(imports()) if len(group) > 1]
    assert not circles


def test_every_module_is_reached_from_what_users_import() -> None:
    """What only tests reach belongs to the tests."""
    reached = set(ENTRIES).union(*(networkx.descendants(imports(), entry) for entry in ENTRIES))
    rest = {name for name in modules() if name not in reached and modules()[name].name != "__init__.py"}
    assert rest == set(AWAITED)


def defined(file: ast.Module) -> set[str]:
    """Names that a file gives a meaning to, by itself."""
    out: set[str] = set()
    for node in ast.walk(file):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            out.add(node.id)
    return out


def test_names_are_imported_from_where_they_are_defined() -> None:
    """A name that is handed on has two homes, and a reader finds the wrong one first."""
    known = {name: defined(tree(path)) for name, path in modules().items()}
    handing_on = {TORCHS, *(name for name, names in known.items() if "__all__" in names)}
    strange = []
    for folder in ("laminar", "tests", "bench", "examples", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ImportFrom) and node.module in known and node.module not in handing_on:
                    for alias in node.names:
                        if f"{node.module}.{alias.name}" not in known and alias.name not in known[node.module]:
                            strange.append(f"{path.relative_to(ROOT)}: {alias.name} of {node.module}")
    assert not strange


def test_the_formatter_lays_out_all_but_a_few_tables() -> None:
    """Layout by hand is for tables that it would tear apart."""
    mark = re.compile(r"# fmt: (?:skip|off)$", flags=re.M)
    found = {
        str(path.relative_to(ROOT)): len(mark.findall(path.read_text()))
        for folder in ("laminar", "tests", "bench", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sum(found.values()) < MOST_BY_HAND, {name: n for name, n in found.items() if n}


ERRORS = frozenset(n.name for n in ast.parse((PACKAGE / "errors.py").read_text()).body if isinstance(n, ast.ClassDef))
READS = frozenset("search match fullmatch findall finditer startswith endswith partition split find".split())
"""Ways to look for something in a text."""
TAKEN_APART = frozenset("partition rpartition split rsplit startswith endswith find index count removeprefix".split())


def said(node: ast.AST, name: str) -> bool:
    """Whether this is the text of an error, `str(error)`."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
    return called and any(isinstance(arg, ast.Name) and arg.id == name for arg in node.args)


def test_no_code_reads_the_sentences_of_our_own_errors() -> None:
    """An error carries fields (`what`, `lines` and those of its kind); its text is for people, and may be rewritten."""
    found = []
    for path in modules().values():
        for handler in (n for n in ast.walk(tree(path)) if isinstance(n, ast.ExceptHandler) and n.type):
            if handler.name is None or ERRORS.isdisjoint(
                n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)
            ):
                continue
            for node in ast.walk(handler):
                method = isinstance(node, ast.Attribute) and node.attr in TAKEN_APART and said(node.value, handler.name)
                if method or (isinstance(node, ast.Compare) and any(said(c, handler.name) for c in node.comparators)):
                    found.append(f"{dotted(path)}:{node.lineno}")
                if isinstance(node, ast.Subscript) and any(said(n, handler.name) for n in ast.walk(node.value)):
                    found.append(f"{dotted(path)}:{node.lineno}")
    assert not found


def test_no_pattern_is_searched_in_what_is_written_for_people() -> None:
    """Regular expressions read files, names and what other programs print; reasons, notes and reports are fields."""
    words = re.compile(r"recomputed|in shards|sharded|because|kept whole|offloaded|instead")
    found = []
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found += [f"{dotted(path)}:{node.lineno}: {text}" for text in texts if words.search(text)]
    assert not found
