"""Where a rule fits, and what it writes there.

Four shapes of rule, told apart by their left side:

    family   a star outside of `cat`: all values that agree in what has no star are members of one site
    sum      terms of one sum, found through the views between a product and the addition; other terms stay
    part     the pieces of a split, found through a view that leaves the split dim as it is
    tree     anything else: one value

Members may lie all over a model (every decoder layer reads the encoder's output), so families and sums are offered
three ways: members of one module of the user's, those of them that are equally large (equal parts can be split over
ranks, parts of several sizes cannot), and all. What is inside a match and does real work must have no other reader,
or it would be done twice, unless the rule says that this is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.ir.graph import Node
from laminar.ir.ops import FREE
from laminar.ir.serial.codec import Ref
from laminar.rewrite.edit import RESHAPING, SPLITS, Lookup, NoFit, TensorShape, Writer, split_dim
from laminar.rewrite.forms import FORMS, FUNCTIONS, Seen
from laminar.rewrite.language import Pattern, Term, Var, starred, words

LIGHT = FREE | {"aten.cat"}
"""Ops inside a match that others may read as well: they stay for those, and cost little or nothing."""
Bindings = Mapping[str, Any]


@dataclass(frozen=True)
class MemberGroup:
    """Members that become one thing: what every name stands for, starred ones with a value for each member."""

    bound: Bindings
    sizes: TensorShape
    """How long each member's share is, for `part`."""
    count: int


@dataclass(frozen=True)
class Match:
    """A place where the left side of a rule stands."""

    roots: tuple[Ref, ...]
    """The values that are replaced."""
    groups: tuple[MemberGroup, ...]
    nodes: tuple[str, ...]
    """Nodes that do the work which is replaced; two matches that share one exclude each other."""
    division: str = ""
    """Which members were taken together."""
    rest: tuple[Ref, ...] = ()
    """Terms of a sum that stay."""


# --- reading ---------------------------------------------------------------------------------


def read(look: Lookup, pattern: Pattern, value: Any, bound: Bindings) -> Iterator[tuple[Bindings, tuple[str, ...]]]:
    """Every way in which a value is what a pattern says, with the nodes inside; `bound` is what names mean so far."""
    if isinstance(pattern, Var):
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}, ()
        elif bound[pattern.name] == value:
            yield bound, ()
    elif not isinstance(pattern, Term):
        if not isinstance(value, Seen) and value == pattern:
            yield bound, ()
    elif isinstance(value, Seen) and value.shape is None:
        for reading in FORMS[pattern.form].read(look, value.ref):
            for found, inside in _read_all(look, pattern.args, reading.args, bound):
                yield found, (*reading.nodes, *inside)


def _read_all(
    look: Lookup, patterns: Sequence[Pattern], values: Sequence[Any], bound: Bindings
) -> Iterator[tuple[Bindings, tuple[str, ...]]]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield bound, ()
        return
    for found, inside in read(look, patterns[0], values[0], bound):
        for last, more in _read_all(look, patterns[1:], values[1:], found):
            yield last, (*inside, *more)


def _alone(look: Lookup, names: Iterable[str]) -> bool:
    """Whether nobody outside reads what these nodes, one for each reader inside, work out."""
    for name in names:
        node = look.makers[name]
        if node.op not in LIGHT and sum(look.uses(Ref(name, i)) for i in range(len(node.outs))) > 1:
            return False
    return True


def matches(look: Lookup, left: Pattern, right: Pattern, shared: bool = False) -> Iterator[Match]:
    """Every match of a rule. `shared`: what is inside may have other readers."""
    if not isinstance(left, Term):
        return
    if left.form == "sum":
        yield from _sums(look, left.args[0])
    elif left.form == "part":
        yield from _parts(look, left)
    elif starred(left):
        yield from _families(look, left, right)
    else:
        yield from _trees(look, left, shared)


def _values(look: Lookup, term: Term) -> Iterator[tuple[Node, Ref]]:
    """What could be a term, by the op that makes it."""
    for node in look.with_op(FORMS[term.form].ops):
        for i, spec in enumerate(node.outs):
            if spec is not None:
                yield node, Ref(node.name, i)


def _trees(look: Lookup, left: Term, shared: bool) -> Iterator[Match]:
    for _, ref in _values(look, left):
        for bound, nodes in read(look, left, Seen(ref), {}):
            if shared or _alone(look, nodes[1:]):
                yield Match((ref,), (_one(look, left, bound),), _working(look, nodes))
                break


def _one(look: Lookup, left: Pattern, bound: Bindings) -> MemberGroup:
    """The group of a match that stands alone: members only if a `cat` has them."""
    lists = [v for v in bound.values() if isinstance(v, tuple) and v and isinstance(v[0], Seen)]
    if not lists:
        return MemberGroup(bound, (), 1)
    dim = next(t.args[1] for t in _terms(left) if t.form == "cat")
    assert isinstance(dim, int)
    return MemberGroup(bound, tuple((s.shape or look.specs[s.ref].shape)[dim] for s in lists[0]), len(lists[0]))


def _working(look: Lookup, nodes: Iterable[str]) -> tuple[str, ...]:
    """The first node, which is replaced, and those that are no mere views."""
    names = tuple(dict.fromkeys(nodes))
    return tuple(n for k, n in enumerate(names) if k == 0 or look.makers[n].op not in LIGHT)


@dataclass(frozen=True)
class _Member:
    root: Ref
    node: Node
    bound: Bindings
    nodes: tuple[str, ...]


def _families(look: Lookup, left: Term, right: Pattern) -> Iterator[Match]:
    stars = {v.name for v in words(left) if v.star}
    dim = next((t.args[1] for t in _terms(right) if t.form == "part"), None)
    assert isinstance(dim, int), f"{left} has members, so {right} must hand out parts"
    together: dict[Any, list[_Member]] = {}
    for node, ref in _values(look, left):
        found = next(read(look, left, Seen(ref), {}), None)
        if found is not None and _alone(look, found[1][1:]):
            common = tuple(sorted((k, repr(v)) for k, v in found[0].items() if k not in stars))
            member = _Member(ref, node, *found)
            together.setdefault((common, node.phase, look.specs[ref].dtype), []).append(member)
    for members in together.values():
        for division, groups in divisions(look, members, stars):
            for group in groups:
                names = {m.node.name for m in group}
                if any(look.depends(name, names - {name}) for name in names):
                    continue
                sizes = tuple(look.specs[m.root].shape[dim] for m in group)
                nodes = tuple(n for m in group for n in _working(look, m.nodes))
                yield Match(tuple(m.root for m in group), (_group(group, stars, sizes),), nodes, division)


def _group(members: Sequence[_Member], stars: set[str], sizes: TensorShape = ()) -> MemberGroup:
    bound = {k: tuple(m.bound[k] for m in members) if k in stars else v for k, v in members[0].bound.items()}
    return MemberGroup(bound, sizes, len(members))


def divisions(look: Lookup, members: list[_Member], stars: set[str]) -> Iterator[tuple[str, list[list[_Member]]]]:
    """Which members to take together: those of one module, the equally large among them, all of them."""

    def by(key: Any) -> list[list[_Member]]:
        out: dict[Any, list[_Member]] = {}
        for m in members:
            out.setdefault(key(m), []).append(m)
        return [group for group in out.values() if len(group) > 1]

    def module(m: _Member) -> str:
        return m.node.module.rpartition(".")[0]

    def sizes(m: _Member) -> Any:
        tensors = [m.bound[k] for k in sorted(stars) if isinstance(m.bound.get(k), Seen)]
        return module(m), tuple(s.shape or look.specs[s.ref].shape for s in tensors)

    seen: list[Any] = []
    for name, key in (("module", module), ("equal", sizes), ("all", lambda m: None)):
        groups = by(key)
        if groups and groups not in seen:
            seen.append(groups)
            yield name, groups


def _is_sum(look: Lookup, ref: Ref) -> bool:
    node = look.maker(ref, "aten.add.Tensor")
    reads = look.notes[ref.name].reads if node is not None else ()
    if node is None or len(reads) != 2 or tuple(node.args[2:]) not in ((), (1,)):
        return False
    return all(look.specs[r] == look.specs[ref] for r in reads)


def _sums(look: Lookup, inner: Pattern) -> Iterator[Match]:
    stars = {v.name for v in words(inner) if v.star}
    for node in look.with_op(("aten.add.Tensor",)):
        root = Ref(node.name)
        if not _is_sum(look, root) or _inside(look, root):
            continue
        adds, leaves, todo = [], [], [root]
        while todo:
            ref = todo.pop(0)
            if _is_sum(look, ref) and (ref == root or _inside(look, ref)):
                adds.append(ref.name)
                todo = [*look.notes[ref.name].reads, *todo]
            else:
                leaves.append(ref)
        together: dict[Any, list[_Member]] = {}
        behind = {leaf: _term_of_sum(look, inner, leaf) if leaves.count(leaf) == 1 else None for leaf in leaves}
        for found in behind.values():
            if found is not None and found.node.phase == node.phase:
                common = tuple(sorted((k, repr(v)) for k, v in found.bound.items() if k not in stars))
                together.setdefault((common, look.specs[found.root]), []).append(found)
        for members in together.values():
            for division, groups in divisions(look, members, stars):
                taken = {m.root for group in groups for m in group}
                rest = [r for r in leaves if (term := behind[r]) is None or term.root not in taken]
                nodes = (*adds, *(n for group in groups for m in group for n in _working(look, m.nodes)))
                yield Match((root,), tuple(_group(g, stars) for g in groups), nodes, division, tuple(rest))


def _inside(look: Lookup, ref: Ref) -> bool:
    """Whether an addition is only part of a longer one."""
    readers = look.users.get(ref, [])
    if look.uses(ref) != 1 or len(readers) != 1 or look.notes[readers[0].name].reads.count(ref) != 1:
        return False
    return _is_sum(look, Ref(readers[0].name)) and readers[0].phase == look.makers[ref.name].phase


def _term_of_sum(look: Lookup, inner: Pattern, leaf: Ref) -> _Member | None:
    """What a term of a sum is made of, seen through views and casts: products in half precision are summed in more."""
    base = leaf
    while look.uses(base) == 1 and (seen := look.maker(base, *RESHAPING, "aten._to_copy")) is not None:
        if not (look.specs[seen.args[0]].is_float and look.specs[base].is_float):
            return None
        base = seen.args[0]
    if look.uses(base) != 1:
        return None
    for bound, nodes in read(look, inner, Seen(base), {}):
        if _alone(look, nodes):
            return _Member(base, look.makers[base.name], bound, nodes)
    return None


def _parts(look: Lookup, left: Term) -> Iterator[Match]:
    inner, dim = left.args
    for node in look.with_op(SPLITS):
        source, at = node.args[0], split_dim(node, look.specs)
        view = look.maker(source, *RESHAPING)
        base = source
        if view is not None and look.uses(source) == 1:
            shape, before = look.specs[source].shape, look.specs[view.args[0]].shape
            if at == len(shape) - 1 and before and before[-1] == shape[-1]:
                base, at = view.args[0], len(before) - 1
        for bound, nodes in read(look, inner, Seen(base), {}):
            if at == dim and _alone(look, nodes):
                roots = tuple(Ref(node.name, i) for i in range(len(node.outs)))
                sizes = tuple(look.specs[r].shape[split_dim(node, look.specs)] for r in roots)
                yield Match(roots, (MemberGroup(bound, sizes, len(roots)),), (node.name, *_working(look, nodes)))
                break


def _terms(pattern: Pattern) -> Iterator[Term]:
    if isinstance(pattern, Term):
        yield pattern
        for arg in pattern.args:
            yield from _terms(arg)


# --- writing ---------------------------------------------------------------------------------


def write(w: Writer, right: Pattern, match: Match) -> dict[Ref, Ref]:
    """Write what replaces a match; each old value with its new one."""
    w.sign([w.look.makers[r.name] for r in match.roots])
    w.leaving.update(r.name for r in match.roots)
    if match.rest or len(match.groups) > 1:
        (root,) = match.roots
        made = [_like(w, value(w, right, group, None), root) for group in match.groups]
        out = {root: w.total([*match.rest, *made])}
    else:
        (group,) = match.groups
        out = {}
        for member, root in enumerate(match.roots):
            out[root] = _like(w, value(w, right, group, member), root)
    if any(w.specs[new] != w.look.specs[old] for old, new in out.items()):
        raise NoFit
    return out


def _like(w: Writer, new: Ref, old: Ref) -> Ref:
    """A new value in the shape of an old one, and in its dtype if that is another float."""
    spec, want = w.specs[new], w.look.specs[old]
    shaped = w.shaped(new, want.shape)
    return w.cast(shaped, want.dtype) if spec.is_float and want.is_float else shaped


def value(w: Writer, pattern: Pattern, group: MemberGroup, member: int | None) -> Any:
    """A pattern written down: a reference, or a plain argument as it is; for one member where there are several."""
    if isinstance(pattern, Var):
        meant = group.bound[pattern.name]
        if pattern.star:
            assert member is not None, f"{pattern} stands where no member is meant"
            meant = meant[member]
        if isinstance(meant, Seen):
            return meant.ref if meant.shape is None else w.shaped(meant.ref, meant.shape)
        return meant
    if not isinstance(pattern, Term):
        return pattern
    if pattern.form in ("cat", "sum"):
        parts = [value(w, pattern.args[0], group, m) for m in range(group.count)]
        return w.cat(parts, pattern.args[1]) if pattern.form == "cat" else w.total(parts)  # type: ignore[arg-type]
    if pattern.form == "part":
        assert member is not None and isinstance(pattern.args[1], int)
        return w.part(value(w, pattern.args[0], group, None), pattern.args[1], group.sizes, member)
    args = [value(w, a, group, member) for a in pattern.args]
    return FUNCTIONS[pattern.form](*args) if pattern.form in FUNCTIONS else FORMS[pattern.form].write(w, *args)
