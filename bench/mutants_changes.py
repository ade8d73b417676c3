"""Changes of one expression of a module of the checker, each a defect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.mutants_tests import CHECKER, Function, begin_of, name_of

INFLATIONS = {"raised", "up", "above", "down", "lifted", "product_up"}
RADII = {
    "radius", "error", "reach", "cast", "own", "rest", "spread", "wide", "half", "carried", "wrong",
    "theta", "kappa", "slack", "lost", "element", "mean", "shrink", "chi", "along", "moved",
    "inexact", "loose", "far", "off", "most",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed module: where and what was done. `function` is None outside of any.

    `node` is the place of what is changed in a walk of the syntax tree, `number` says which of the
    changes directly below it is made.
    """

    module: str
    line: int
    kind: str
    change: str
    function: Function | None
    node: int
    number: int

    @property
    def name(self) -> str:
        """Return file, line and kind."""
        return f"{self.module}:{self.line}:{self.kind}"

    @property
    def tree(self) -> ast.Module:
        """Return the changed module."""
        tree = _parsed(CHECKER / self.module)
        node = next(n for k, n in enumerate(ast.walk(tree)) if k == self.node)
        _, place, new = list(_changes(node))[self.number]
        _put(node, place, new)
        return ast.fix_missing_locations(tree)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    tree = _parsed(path)
    module = name_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for at, node in enumerate(ast.walk(tree)):
        for number, (kind, place, new) in enumerate(_changes(node)):
            old = _at(node, place)
            before, after = (" ".join(ast.unparse(part).split()) for part in (old, new))
            if before == after:
                continue
            begin = _begin(functions, old.lineno)
            function = None if begin is None else (module, begin)
            change = f"{before[:90]} → {after[:90]}"
            yield Mutant(module, old.lineno, kind, change, function, at, number)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _begin(functions: list[ast.FunctionDef], line: int) -> int | None:
    """Return where the innermost function around a line begins, with its decorators."""
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or f.lineno)]
    if not around:
        return None
    return begin_of(max(around, key=lambda f: f.lineno))


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
    """Yield changes of what stands directly below a node: kind, field and its replacement."""
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
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            yield "refusal", ast.If(ast.Constant(False), [ast.Expr(test)], [])


def _numbers(*nodes: ast.AST) -> bool:
    """Say whether an operation may be one of numbers, and not of texts, tuples or small counts."""
    return not any(
        isinstance(n, ast.Constant | ast.JoinedStr | ast.Tuple | ast.List) for n in nodes
    )
