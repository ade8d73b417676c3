"""Static analysis of a tree: modules, imports and unused definitions.

The analysis is by name and imports no module. A definition counts as used if its name is loaded, is
an attribute, or occurs in a string that is not a sentence or in a data file, whatever it means
there. So a reported definition is unused, but a common name may hide an unused one. Uses inside the
definition itself or inside other unused ones do not count. Excluded are definitions with an unknown
decorator, dunder names, and methods that may be called from outside the product: those of classes
with an external base, and those that call a method of the same name.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = {
    "kcdsl": "kcdsl",
    "kcdsl_grammar": "grammar/kcdsl_grammar",
    "kcdsl_backends": "backends/kcdsl_backends",
    "kcdsl_certs": "certs/kcdsl_certs",
}
FOLDERS = tuple(place.split("/")[0] for place in PACKAGES.values())
_USERS = ("tests", "bench", "examples")
_DATA = {".lark", ".j2", ".json", ".toml"}
_PLAIN = {
    "abstractmethod", "cache", "cached_property", "classmethod", "contextmanager", "dataclass",
    "deleter", "final", "lru_cache", "overload", "override", "property", "runtime_checkable",
    "setter", "staticmethod", "total_ordering", "wraps",
}  # fmt: skip
_HARMLESS = {
    "ABC", "Enum", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "TypedDict", "object",
}  # fmt: skip
_WORD = re.compile(r"[^\W\d]\w*")
_Made = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A Python file; `name` is None unless it is in an installed package."""

    path: str
    text: str
    name: str | None = None

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return the nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        """Return the folder, from the root of the tree."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Code:
    """A tree: modules of the product, modules that use it, and the words of its data files."""

    product: tuple[Module, ...]
    users: tuple[Module, ...]
    words: frozenset[str]

    @property
    def installed(self) -> dict[str, Module]:
        """Return the modules of packages by name."""
        return {module.name: module for module in self.product if module.name is not None}


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, class or method; `name` has the names of the classes around it."""

    path: str
    line: int
    end: int
    name: str

    @property
    def word(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition(".")[2]

    def __contains__(self, place: tuple[str, int]) -> bool:
        """Return whether a line of a file belongs to this definition."""
        return place[0] == self.path and self.line <= place[1] <= self.end


def read(root: Path) -> Code:
    """Read the product of a tree and its tests, benches and examples."""
    product = tuple(module for top in FOLDERS for module in _modules(root, top))
    users = tuple(module for top in _USERS for module in _modules(root, top))
    words = {
        word
        for place in PACKAGES.values()
        for path in (root / place).rglob("*")
        if path.suffix in _DATA and not path.name.endswith(".schema.json")
        for word in _WORD.findall(path.read_text(encoding="utf-8"))
    }
    project = root / "pyproject.toml"
    if project.is_file():
        words.update(_entry_points(project.read_text(encoding="utf-8")))
    return Code(product, users, frozenset(words))


def _modules(root: Path, top: str) -> Iterator[Module]:
    for path in sorted((root / top).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if not {"node_modules", ".venv"} & set(path.parts):
            yield Module(place, path.read_text(encoding="utf-8"), _name(place))


def _name(place: str) -> str | None:
    for package, folder in PACKAGES.items():
        if place.startswith(f"{folder}/"):
            inside = place.removeprefix(folder).removesuffix(".py").removesuffix("/__init__")
            return package + inside.replace("/", ".")
    return None


def _entry_points(text: str) -> Iterator[str]:
    import tomllib

    project = tomllib.loads(text).get("project", {})
    for group in (project.get("scripts", {}), *project.get("entry-points", {}).values()):
        for target in group.values():
            yield from _WORD.findall(target)


# --- imports --------------------------------------------------------------------------------------


def imports(code: Code) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the product modules that each module imports at load time, and for types only.

    A package does not count as imported if only a module in it is.
    """
    installed = code.installed
    loaded: dict[str, set[str]] = {name: set() for name in installed}
    typed: dict[str, set[str]] = {name: set() for name in installed}
    for name, module in installed.items():
        package = module.path.endswith("/__init__.py")
        for node, for_types in _at_load(module.tree.body):
            graph = typed if for_types else loaded
            graph[name].update(set(_targets(node, name, package, installed)) - {name})
    return loaded, typed


def _at_load(body: Iterable[ast.AST], typed: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typed
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _at_load(node.body, True)
            yield from _at_load(node.orelse, typed)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr):
            yield from _at_load(ast.iter_child_nodes(node), typed)


def _targets(
    node: ast.AST, name: str, package: bool, installed: Mapping[str, Module]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        wanted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parts = name.split(".")
        start = parts[: len(parts) - node.level + package] if node.level else []
        source = ".".join([*start, *([node.module] if node.module else [])])
        wanted = [f"{source}.{alias.name}" for alias in node.names]
    else:
        return
    for target in wanted:
        while target and target not in installed:
            target = target.rpartition(".")[0]
        if target:
            yield target


# --- definitions ----------------------------------------------------------------------------------


def unused(code: Code) -> tuple[list[Definition], list[Definition]]:
    """Return unused definitions, and those used only by tests, benches and examples.

    Members of an unused class are not listed.
    """
    candidates = list(_candidates(code))
    wanted = {each.word for each in candidates}
    places = _uses((module for module in code.product if module.name is not None), wanted)
    idle = _unused_only(candidates, places)
    found = [d for d in idle if not any(_inside(d, other) for other in idle)]
    beside = _uses(code.users if found else (), wanted)
    tested = {d for d in found if any(beside[e.word] for e in idle if e == d or _inside(e, d))}
    while more := {
        d
        for d in set(found) - tested
        if any(place in other for place in places[d.word] if place not in d for other in tested)
    }:
        tested |= more
    return [d for d in found if d not in tested], [d for d in found if d in tested]


def _unused_only(
    candidates: Iterable[Definition], places: Mapping[str, set[tuple[str, int]]]
) -> list[Definition]:
    """Return definitions used only in themselves or in other unused ones, by location."""
    idle: dict[str, set[Definition]] = defaultdict(set)
    left = list(candidates)
    while True:
        new = [
            d
            for d in left
            if all(
                place in d or any(place in other for other in idle[place[0]])
                for place in places[d.word]
            )
        ]
        if not new:
            break
        for each in new:
            idle[each.path].add(each)
        left = [d for d in left if d not in idle[d.path]]
    found = [d for group in idle.values() for d in group]
    return sorted(found, key=lambda d: (d.path, d.line))


def _inside(inner: Definition, outer: Definition) -> bool:
    return inner.name.startswith(f"{outer.name}.") and (inner.path, inner.line) in outer


def _candidates(code: Code) -> Iterator[Definition]:
    installed = code.installed.values()
    bases: dict[str, set[str]] = defaultdict(set)
    for module in installed:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                bases[node.name].update(map(_last, node.bases))
    for module in installed:
        for name, node, owner in _made(module.tree.body):
            hidden = node.name.startswith("__") or node.name in code.words
            registered = any(_last(each) not in _PLAIN for each in node.decorator_list)
            awaited = owner is not None and (
                any(_external(_last(base), bases) for base in owner.bases) or _delegates(node)
            )
            if not (hidden or registered or awaited):
                end = node.end_lineno or node.lineno
                yield Definition(module.path, node.lineno, end, name)


def _made(
    body: Iterable[ast.stmt], outer: str = "", owner: ast.ClassDef | None = None
) -> Iterator[tuple[str, _Made, ast.ClassDef | None]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _made([*node.body, *node.orelse], outer, owner)
        elif isinstance(node, _Made):
            yield f"{outer}{node.name}", node, owner
            if isinstance(node, ast.ClassDef):
                yield from _made(node.body, f"{outer}{node.name}.", node)


def _external(base: str, bases: Mapping[str, set[str]], seen: frozenset[str] = frozenset()) -> bool:
    """Return whether code outside the product may call methods through this base class."""
    if base in bases and base not in seen:
        return any(_external(each, bases, seen | {base}) for each in bases[base])
    built = getattr(builtins, base, None)
    error = isinstance(built, type) and issubclass(built, BaseException)
    return base not in bases and base not in _HARMLESS and not error


def _delegates(method: _Made) -> bool:
    """Return whether a method calls one of the same name, so that it may be called in its place."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == method.name
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(method)
    )


def _last(node: ast.expr) -> str:
    """Return the last name of a decorator or of a base."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ast.unparse(node)


def _uses(modules: Iterable[Module], wanted: set[str]) -> dict[str, set[tuple[str, int]]]:
    """Return the files and lines where each wanted name is used."""
    found: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for module in modules:
        exports = module.name not in PACKAGES
        for word, line in _loaded(module.nodes, exports):
            if word in wanted:
                found[word].add((module.path, line))
    return found


def _loaded(nodes: Sequence[ast.AST], exports: bool) -> Iterator[tuple[str, int]]:
    """Yield used names; with `exports`, entries of `__all__` do not count as uses."""
    silent = {id(each) for node in nodes for each in _silent(node, exports)}
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name, node.lineno
            case ast.ImportFrom(names=names):
                yield from ((a.name, a.lineno) for a in names if a.asname not in (None, a.name))
            case ast.MatchClass(kwd_attrs=names):
                yield from ((name, node.lineno) for name in names)
            case ast.Constant(value=str(text)) if id(node) not in silent and _may_name(text):
                yield from ((word, node.lineno) for word in _WORD.findall(text))


def _silent(node: ast.AST, exports: bool) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Constant() as text):
            yield text
        case ast.Assign(targets=[ast.Name(id="__all__")], value=value) if exports:
            yield from ast.walk(value)


def _may_name(text: str) -> bool:
    """Return whether a string may refer to a name: a word, an expression or a program."""
    if not re.search(r"\s", text) or "import" in text:
        return True
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True
