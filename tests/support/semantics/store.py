"""The IR as a hash-consed graph: equal meanings share one node.

The compiler builds trees whose nodes know their places in the source. A store keeps the meaning of
such trees: it drops the places, brings names and orders into the form of `kcdsl.ir.canonical`, and
returns one node per meaning. Within a store, `a is b` if and only if two formulas, terms,
predicates, clauses or programs mean the same, and the digests of two programs are equal if and only
if their stored forms are identical. The nodes are those of `kcdsl.ir.terms`; every pass that takes
a tree takes a stored node. Nothing here recurses, so the depth of terms is limited by memory alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from kcdsl.check.stored import formula_from_json, from_json, term_from_json
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import formula_json, normal_formula, term_json, to_json

Node = TypeVar("Node")
Result = TypeVar("Result")


@dataclass(slots=True)
class Store:
    """Nodes by their meaning; a node lives as long as its store."""

    _unique: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _canonical: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of different nodes."""
        return len(self._unique)

    def intern(self, node: Node) -> Node:
        """Return the node that equals `node` except for places and wording.

        Works for every node of `kcdsl.ir.terms`. Parts that occur twice, in this node or in one
        that was interned before, are shared.
        """
        done: dict[int, Any] = {}
        for part in postorder(node):
            done[id(part)] = self._one(part, done)
        found: Node = done[id(node)]
        return found

    def formula(self, formula: ir.Formula) -> ir.Formula:
        """Return the stored form of a formula."""
        return self._in_canonical_form(
            formula, lambda f: formula_from_json(formula_json(normal_formula(f)))
        )

    def term(self, term: ir.Term) -> ir.Term:
        """Return the stored form of a term."""
        return self._in_canonical_form(term, lambda t: term_from_json(term_json(t)))

    def program(self, program: ir.Program) -> ir.Program:
        """Return the stored form of a program: slices and clauses in the order of their names."""
        return self._in_canonical_form(program, lambda p: from_json(to_json(p)))

    def _in_canonical_form(self, node: Node, form: Callable[[Node], Node]) -> Node:
        own = self.intern(node)
        if id(own) not in self._canonical:
            self._canonical[id(own)] = self.intern(form(own))
        found: Node = self._canonical[id(own)]
        return found

    def _one(self, node: Any, done: dict[int, Any]) -> Any:
        names = _meaning(node)
        values = tuple(_rebuilt(getattr(node, name), done) for name in names)
        key = (type(node), *(_key(value) for value in values))
        if key not in self._unique:
            self._unique[key] = type(node)(**dict(zip(names, values, strict=True)))
        return self._unique[key]


def clause_digest(program: ir.Program, clause_id: str, store: Store | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of the meaning of one clause of a program.

    It covers the canonical JSON of the clause and of every slice, table and user's metric that it
    names, each slice with the data that it is read from: clauses with equal digests hold of the
    same kernels. Raises KeyError for a clause that the program does not have.
    """
    import rfc8785

    held = (Store() if store is None else store).program(program)
    clause = next((c for c in held.clauses if c.id == clause_id), None)
    if clause is None:
        raise KeyError(clause_id)
    document = to_json(held)
    nodes = list(postorder(clause))
    named = {
        "slices": {*clause.slices, *(n.slice for n in nodes if isinstance(n, ir.Region))},
        "tables": {n.name for n in nodes if isinstance(n, ir.TableValue)},
        "metrics": {n.name for n in nodes if isinstance(n, ir.Metric)},
    }
    said: dict[str, Any] = {
        section: [entry for entry in document.get(section, ()) if entry["name"] in names]
        for section, names in named.items()
    }
    for entry in said["slices"]:
        entry["data"] = document["data"] if entry["data"] is None else entry["data"]
    said["clause"] = next(c for c in document["clauses"] if c["id"] == clause_id)
    return hashlib.sha256(rfc8785.dumps(said)).hexdigest()


# --- walking -------------------------------------------------------------------------------------


def postorder(root: Any, children: Callable[[Any], tuple[Any, ...]] | None = None) -> Iterator[Any]:
    """Yield every node below and including `root`, each object once, parts before wholes."""
    parts = _parts if children is None else children
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((part, False) for part in reversed(parts(node)) if id(part) not in seen)


def fold(
    root: Any,
    combine: Callable[[Any, tuple[Result, ...]], Result],
    children: Callable[[Any], tuple[Any, ...]] | None = None,
) -> Result:
    """Return `combine(node, results of its parts)` for the root; each object is combined once."""
    parts = _parts if children is None else children
    done: dict[int, Result] = {}
    for node in postorder(root, parts):
        done[id(node)] = combine(node, tuple(done[id(part)] for part in parts(node)))
    return done[id(root)]


def _parts(node: Any) -> tuple[Any, ...]:
    """Return the nodes directly below a node, in the order of its fields."""
    found: list[Any] = []
    pending = [getattr(node, name) for name in reversed(_meaning(node))]
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending.extend(reversed(value))
        elif is_dataclass(value):
            found.append(value)
    return tuple(found)


def _meaning(node: Any) -> tuple[str, ...]:
    """Return the fields of a node that carry meaning: all except places and wording."""
    kind: Any = type(node)
    return _compared(kind)


@cache
def _compared(kind: Any) -> tuple[str, ...]:
    every: tuple[Field[Any], ...] = fields(kind)
    return tuple(f.name for f in every if f.compare)


def _rebuilt(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_rebuilt(item, done) for item in value)
    return done[id(value)] if is_dataclass(value) else value


def _key(value: Any) -> Any:
    """Return a key that is equal only for equal meanings: in Python True == 1 == Fraction(1)."""
    if isinstance(value, tuple):
        return tuple(_key(item) for item in value)
    if is_dataclass(value):
        return id(value)
    return type(value), value
