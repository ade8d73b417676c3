"""Changes of one expression of a module of the checker, each a defect."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.mutants_tests import Block, name_of, parsed, statements

INFLATIONS = {"raised", "up", "above", "down", "lifted", "product_up"}
RADII = {
    "radius", "error", "reach", "cast", "own", "rest", "spread", "wide", "half", "carried", "wrong",
    "theta", "kappa", "slack", "lost", "element", "mean", "shrink", "chi", "along", "moved",
    "inexact", "loose", "far", "off", "most",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed module: place and kind of the change. `block` is None outside functions.

    `node` is the index of the changed node in a walk of the syntax tree, `number` selects one of
    the changes directly below it. An omitted rejection belongs to the block of the rejection, as
    only tests that execute it can find it.
    """

    module: str
    line: int
    kind: str
    change: str
    block: Block | None
    statement: int
    """The line of the innermost statement around the change."""
    node: int
    number: int

    @property
    def name(self) -> str:
        """Return file, line and kind."""
        return f"{self.module}:{self.line}:{self.kind}"

    @property
    def key(self) -> str:
        """Return the unique name among the mutants of the same sources."""
        return f"{self.name}:{self.node}:{self.number}"


def changed(module: str, mutants: Iterable[Mutant]) -> ast.Module | None:
    """Return a module with all changes of its mutants; None if there are none.

    No two of them may be in one statement.
    """
    own = [mutant for mutant in mutants if mutant.module == module]
    if not own:
        return None
    tree = parsed(module)
    nodes = list(ast.walk(tree))
    made = [(nodes[m.node], list(_changes(nodes[m.node]))[m.number]) for m in own]
    for node, (_, place, new) in made:
        _put(node, place, ast.copy_location(new, _at(node, place)))
    return ast.fix_missing_locations(tree)


def apart(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Return groups of mutants such that no two of a group change one statement."""
    groups: list[dict[tuple[str, int], Mutant]] = []
    for mutant in mutants:
        place = (mutant.module, mutant.statement)
        group = next((group for group in groups if place not in group), None)
        if group is None:
            groups.append(group := {})
        group[place] = mutant
    return [list(group.values()) for group in groups]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    module = name_of(path)
    tree = parsed(module)
    around = dict(_around(tree, None, 0, inside=False))
    for at, node in enumerate(ast.walk(tree)):
        for number, (kind, place, new) in enumerate(_changes(node)):
            old = _at(node, place)
            before, after = (" ".join(ast.unparse(part).split()) for part in (old, new))
            if before == after:
                continue
            line, statement = around[id(old)]
            if isinstance(old, ast.If) and line is not None:
                line = old.body[0].lineno
            block = None if line is None else (module, line)
            change = f"{before[:90]} → {after[:90]}"
            yield Mutant(module, old.lineno, kind, change, block, statement, at, number)


def _around(
    node: ast.AST, block: int | None, statement: int, *, inside: bool
) -> Iterator[tuple[int, tuple[int | None, int]]]:
    """Yield for every node the lines of its block and of its statement.

    `inside` says whether the node is in a function; elsewhere there are no blocks.
    """
    if isinstance(node, ast.stmt):
        statement = node.lineno
    yield id(node), (block, statement)
    inside = inside or isinstance(node, ast.FunctionDef)
    bodies = list(statements(node))
    for body in bodies:
        own = body[0].lineno if inside and not isinstance(node, ast.ClassDef) else block
        for each in body:
            yield from _around(each, own, statement, inside=inside)
    within = {id(child) for body in bodies for child in body}
    for child in ast.iter_child_nodes(node):
        if id(child) not in within:
            yield from _around(child, block, statement, inside=inside)


def _at(node: ast.AST, place: str) -> Any:
    name, _, index = place.partition(".")
    found = getattr(node, name)
    return found[int(index)] if index else found


def _put(target: ast.AST, place: str, new: ast.AST) -> None:
    name, _, index = place.partition(".")
    if index:
        getattr(target, name)[int(index)] = new
    else:
        setattr(target, name, new)


def _changes(parent: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield changes of the direct children of a node: kind, field and replacement."""
    for name, value in ast.iter_fields(parent):
        items = value if isinstance(value, list) else [value]
        for index, node in enumerate(items):
            place = f"{name}.{index}" if isinstance(value, list) else name
            if isinstance(node, ast.AST):
                yield from ((kind, place, new) for kind, new in _replacements(node))


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _numbers(left, right):
            yield "drop", left
            yield "drop-left", right
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if _numbers(left, right):
            yield "sign", ast.BinOp(left, ast.Add(), right)
        case ast.Call(func=ast.Name(id="gamma"), args=[_, u]):
            yield "gamma", ast.Call(ast.Name("gamma", ast.Load()), [ast.Constant(1), u], [])
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in INFLATIONS:
            yield "inflation", first
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in INFLATIONS - {
            "product_up"
        }:
            yield "inflation", first
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr=name), args=args) if (
            name in ("maximum", "minimum") and len(args) == 2
        ):
            other = "minimum" if name == "maximum" else "maximum"
            func = ast.Attribute(ast.Name("np", ast.Load()), other, ast.Load())
            yield "extreme", ast.Call(func, args, [])
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in RADII:
            half = ast.BinOp(value, ast.Mult(), ast.Constant(0.5))
            yield "half", ast.Assign(node.targets, half, lineno=node.lineno)
        case ast.If(test=test, body=[ast.Raise() as rejection], orelse=[]):
            yield "refusal", ast.If(test, [ast.copy_location(ast.Pass(), rejection)], [])


def _numbers(*nodes: ast.AST) -> bool:
    """Return whether operands may be numbers, not strings, tuples or small counts."""
    return not any(
        isinstance(n, ast.Constant | ast.JoinedStr | ast.Tuple | ast.List) for n in nodes
    )
