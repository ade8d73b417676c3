"""Size and structure of the tree: sizes, cycles, floors and unused definitions.

Each figure is of the working tree and is compared with that of an earlier commit.

    make bench-house
    python -m bench.house --before v0.1 --list    # also name unused definitions and cycles
    python -m bench.house --time                  # also measure `make test`
    python -m bench.house --extend                # also try the additions of examples/extending

Files and lines are those of the folders kcdsl, grammar, backends and certs. A line of code has a
token outside comments and docstrings. A module without imports from the product is on floor 1, any
other is one floor above the highest that it imports; a cycle is one floor.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import subprocess
import sys
import tarfile
import tempfile
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path

from bench.common import Better, Figure, report
from bench.house_code import FOLDERS, PACKAGES, Code, Module, imports, read, unused
from examples.extending.run import Extension, extensions, try_out

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "backends" / "template"
BEFORE = "d557d31"
LIMITS: dict[str, float] = {
    "files": 450,
    "lines": 75_000,
    "largest folder": 12,
    "cycles of modules": 0,
    "cycles of folders": 0,
    "floors: kcdsl_backends.empirical": 8,
    "public classes that share a name": 0,
}
_EMPIRICAL = "kcdsl_backends.empirical"
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
Graph = Mapping[str, set[str]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by name of figure, notes on some of them, and the lists of `--list`."""

    values: dict[str, int]
    remarks: dict[str, str]
    listed: list[str]


def main() -> int:
    """Measure both trees and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="what to compare with")
    parser.add_argument("--list", action="store_true", help="name cycles and what is unused")
    parser.add_argument("--time", action="store_true", help="run `make test` and take its time")
    parser.add_argument("--extend", action="store_true", help="try every addition on a copy")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _extract(arguments.before, Path(folder))
        before = measure(read(Path(folder)))
    now = measure(read(ROOT))
    if arguments.list:
        print("\n".join(now.listed))
    found = figures(now, before, arguments.before)
    found += [_addition(extension, arguments.extend) for extension in extensions()]
    found.append(_backend(arguments.extend))
    return report("house", [*found, _first_tier()] if arguments.time else found)


def figures(now: Measured, before: Measured, commit: str) -> list[Figure]:
    """Return the figures of a tree, each with that of the earlier commit."""
    return [
        Figure(
            name, value, Better.LOWER, LIMITS.get(name),
            f"{_with(now, name)}{commit}: {before.values[name]:,}{_with(before, name, ' (', ')')}",
        )
        for name, value in now.values.items()
    ]  # fmt: skip


def _with(measured: Measured, name: str, before: str = "", after: str = "; ") -> str:
    remark = measured.remarks.get(name)
    return f"{before}{remark}{after}" if remark else ""


def _extract(commit: str, folder: Path) -> None:
    wanted = [*FOLDERS, "tests", "bench", "examples", "pyproject.toml"]
    packed = subprocess.run(
        ["git", "archive", commit, *wanted], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    if packed.returncode:
        raise SystemExit(f"commit {commit} cannot be read; name another one: --before COMMIT")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _addition(extension: Extension, tried: bool) -> Figure:
    """Return the number of files that an addition touches; NaN if its tests fail."""
    wrong = try_out(extension) if tried else ""
    tests = sum(file.startswith("tests/") for file in extension.files)
    remark = f"{tests} of them of tests"
    return _touched(extension.name, len(extension.files), remark, tried, wrong.partition("\n")[0])


def _backend(tried: bool) -> Figure:
    """Return the number of files of the template of a formal backend, which is a distribution of
    its own; its tests install it."""
    files = [file for file in TEMPLATE.iterdir() if file.suffix in (".py", ".toml")]
    tests = [sys.executable, "-m", "pytest", "-q", "tests/unit/backends/test_template.py"]
    failed = tried and subprocess.run(tests, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    wrong = "its tests fail" if failed else ""
    return _touched("backend", len(files), "all in a distribution of its own", tried, wrong)


def _touched(kind: str, files: int, remark: str, tried: bool, wrong: str) -> Figure:
    said = wrong or ("its tests pass" if tried else "not tried: --extend")
    count = math.nan if wrong else files
    name = f"files touched to add: {kind}"
    return Figure(name, count, Better.LOWER, None, f"{remark}; {said}")


def _first_tier() -> Figure:
    started = time.perf_counter()
    status = subprocess.run(["make", "test"], cwd=ROOT, stdout=sys.stderr, check=False).returncode
    taken = time.perf_counter() - started
    said = "passed" if status == 0 else "failed"
    return Figure("first tier of tests, seconds", taken, Better.LOWER, None, f"make test, {said}")


def measure(code: Code) -> Measured:
    """Return all figures of a tree."""
    found = structure(code)
    return replace(found, values={**size(code), **found.values})


def size(code: Code) -> dict[str, int]:
    """Return the numbers of files and lines of a tree and of each folder."""
    values: dict[str, int] = {}
    sizes = {"files": lambda m: 1, "lines": lambda m: len(m.text.splitlines())}
    for name, lines in {**sizes, "lines of code": code_lines}.items():
        by_folder = Counter[str]()
        for module in code.product:
            by_folder[module.path.split("/")[0]] += lines(module)
        values[name] = by_folder.total()
        values |= {f"{name}: {folder}": by_folder[folder] for folder in FOLDERS}
    return values


def structure(code: Code) -> Measured:
    """Return the figures of folders, imports, names and unused definitions."""
    values: dict[str, int] = {}
    remarks: dict[str, str] = {}
    folders = Counter(m.folder for m in code.product if not m.path.endswith("/__init__.py"))
    remarks["largest folder"], values["largest folder"] = folders.most_common(1)[0]

    loaded, typed = imports(code)
    cycles = _cycles(loaded)
    values["cycles of modules"] = len(cycles)
    both = {name: loaded[name] | typed[name] for name in loaded}
    values["cycles of modules, with imports for types"] = len(_cycles(both))
    values["imports for types"] = sum(len(typed[name] - loaded[name]) for name in typed)
    rooms = _cycles(of_folders(code, loaded))
    values["cycles of folders"] = len(rooms)
    remarks["cycles of folders"] = f"of {sum(map(len, rooms))} folders" if rooms else ""
    values["floors"] = floors(loaded)
    for package in (*PACKAGES, _EMPIRICAL):
        values[f"floors: {package}"] = floors(_within(loaded, package))

    dead, tested = unused(code)
    values["definitions that nothing uses"] = len(dead)
    values["definitions that only tests use"] = len(tested)
    values["public classes that share a name"] = len(same_names(code))
    listed = [f"cycle of modules: {' '.join(sorted(each))}" for each in cycles]
    listed += [f"cycle of folders: {' '.join(sorted(each))}" for each in rooms]
    listed += [f"name of two classes: {each}" for each in same_names(code)]
    for what, group in (("unused", dead), ("only of tests", tested)):
        listed += [f"{what}: {each.path}:{each.line} {each.name}" for each in group]
    return Measured(values, remarks, listed)


def code_lines(module: Module) -> int:
    """Return the number of lines with a token outside comments and docstrings."""
    silent = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        text = token.type == tokenize.STRING and token.start[0] in silent
        if token.type not in _LAYOUT and not text:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def same_names(code: Code) -> list[str]:
    """Return public classes that share a name with another public class of the program, as
    MODULE.NAME. The checker is a separate program."""
    places = defaultdict[tuple[str, bool], list[str]](list)
    for name, module in code.installed.items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                program = name.startswith("kcdsl_certs")
                places[node.name, program].append(f"{name}.{node.name}")
    return sorted(place for group in places.values() if len(group) > 1 for place in group)


# --- graphs ---------------------------------------------------------------------------------------


def components(graph: Graph) -> list[frozenset[str]]:
    """Return the strongly connected components of the import graph."""
    reached = {name: _reached(graph, name) for name in graph}
    seen: set[str] = set()
    found = []
    for name in graph:
        if name not in seen:
            found.append(frozenset({name, *(n for n in reached[name] if name in reached[n])}))
            seen |= found[-1]
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    open_ends = [start]
    while open_ends:
        new = graph[open_ends.pop()] - seen
        seen |= new
        open_ends += new
    return seen


def _cycles(graph: Graph) -> list[frozenset[str]]:
    return [each for each in components(graph) if len(each) > 1]


def floors(graph: Graph) -> int:
    """Return the length of the longest chain of imports, a cycle counting as one module."""
    home = {name: each for each in components(graph) for name in each}
    below = {
        each: {home[target] for name in each for target in graph[name]} - {each}
        for each in home.values()
    }
    height: dict[frozenset[str], int] = {}
    for each in TopologicalSorter(below).static_order():
        height[each] = 1 + max((height[under] for under in below[each]), default=0)
    return max(height.values(), default=0)


def of_folders(code: Code, graph: Graph) -> dict[str, set[str]]:
    """Return the import graph between folders."""
    folder = {name: module.folder for name, module in code.installed.items()}
    found: dict[str, set[str]] = {place: set() for place in folder.values()}
    for name, targets in graph.items():
        found[folder[name]].update({folder[each] for each in targets} - {folder[name]})
    return found


def _within(graph: Graph, package: str) -> dict[str, set[str]]:
    return {name: set(_of(graph[name], package)) for name in _of(graph, package)}


def _of(names: Mapping[str, object] | set[str], package: str) -> Iterator[str]:
    return (name for name in names if f"{name}.".startswith(f"{package}."))


if __name__ == "__main__":
    sys.exit(main())
