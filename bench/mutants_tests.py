"""The parts of the checker that each test executes."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "certs" / "kcdsl_certs" / "recheck"
PACKAGE = "kcdsl_certs.recheck"
FOLDERS = ("tests/unit", "tests/property", "tests/kernels")
"""Folders of tests that may find a defect of the checker."""
NEAR = ("tests/unit/certs", "tests/property", "tests/kernels")
"""Folders of tests of the checker itself, which find most defects."""
FOREIGN = ("tests/unit/lsp", "tests/unit/bench")
"""Folders among them whose tests do not use the checker, or run mutation campaigns."""

Block = tuple[str, int]
"""Consecutive statements of a function: a module and the line of the first one."""


def modules() -> list[Path]:
    """Return every module of the checker's rules except `__init__` modules."""
    return [path for path in sorted(CHECKER.rglob("*.py")) if path.name != "__init__.py"]


def files() -> list[str]:
    """Return the test files, those of `NEAR` in order first."""
    found = {
        str(path.relative_to(ROOT)): path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("test_*.py")
    }
    own = [name for name in found if not name.startswith(FOREIGN)]
    return sorted(own, key=lambda name: (*(not name.startswith(near) for near in NEAR), name))


def name_of(path: Path) -> str:
    """Return a module's name: its path inside the checker."""
    return str(path.relative_to(CHECKER))


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of the checker from given code instead of their files.

    `code` returns the code for a module's name; `names` are added to its globals.
    """

    def __init__(self, code: Callable[[str], CodeType], names: Mapping[str, Any]) -> None:
        self.code, self.names = code, names

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a specification for a module of the checker."""
        place = _module_path(fullname)
        return None if place is None else importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the given code."""
        place = _module_path(module.__name__)
        assert place is not None
        module.__dict__.update(self.names)
        exec(self.code(name_of(place)), module.__dict__)


def _module_path(fullname: str) -> Path | None:
    if not fullname.startswith(f"{PACKAGE}."):
        return None
    place = CHECKER / f"{fullname.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py"
    return place if place.is_file() else None


def parsed(module: str) -> ast.Module:
    """Return the syntax tree of an unchanged module of the checker."""
    return ast.parse((CHECKER / module).read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the statement lists directly below a node, such as body and else."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


@cache
def marked(module: str) -> CodeType:
    """Return the code of a module with calls that record executed blocks."""
    return with_marks(module, parsed(module))


def with_marks(module: str, tree: ast.Module) -> CodeType:
    """Return the code of a tree with calls that record executed blocks of functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node): node for function in functions for node in ast.walk(function)}
    for node in inside.values():
        if isinstance(node, ast.ClassDef):
            continue
        for body in statements(node):
            mark = ast.parse(f"_executed_(({module!r}, {body[0].lineno}))").body[0]
            documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
            body.insert(int(documented), mark)
    return compile(ast.fix_missing_locations(tree), str(CHECKER / module), "exec")


@dataclass(frozen=True, slots=True)
class Result:
    """A test that was run: its seconds and the blocks of the checker that it executed."""

    seconds: float
    blocks: frozenset[Block]


@dataclass(frozen=True, slots=True)
class Results:
    """Tests that were run, by name; those that failed; a test that ended the process.

    `failed` also names a file that cannot be imported, or how pytest ended without a failed test.
    """

    tests: Mapping[str, Result]
    failed: tuple[str, ...] = ()
    ended: str = ""

    def only(self, wanted: Collection[Block]) -> Results:
        """Return the results restricted to the wanted blocks."""
        tests = {
            test: Result(result.seconds, result.blocks & frozenset(wanted))
            for test, result in self.tests.items()
        }
        return Results(tests, self.failed, self.ended)

    def seconds(self, tests: Iterable[str]) -> float:
        """Return the total seconds of tests."""
        return sum(self.tests[test].seconds for test in tests)

    def meeting(self, blocks: Collection[Block | None]) -> list[str]:
        """Return the tests that execute one of the blocks, quick ones first, then the others.

        The others may use what a test before them made. There are none if no test executes one.
        None stands for code that is executed at import, on which every test depends.
        """
        ordered = sorted(self.tests, key=lambda test: self.tests[test].seconds)
        if None in blocks:
            return ordered
        near = [test for test in ordered if not self.tests[test].blocks.isdisjoint(blocks)]
        others = [test for test in self.tests if test not in set(near)]
        return near + others if near else []


def quick(found: Sequence[Results], block: Block | None, most: float) -> list[str]:
    """Return the quickest tests that execute a block, `most` seconds together.

    Tests of one file are consecutive, as each file takes time to import.
    """
    near = sorted(
        (result.seconds, test)
        for results in found
        for test, result in results.tests.items()
        if block is None or block in result.blocks
    )
    taken: dict[str, list[str]] = {}
    for seconds, test in near:
        most -= seconds
        if most < 0:
            break
        taken.setdefault(test.partition("::")[0], []).append(test)
    return [test for tests in taken.values() for test in tests]


@dataclass(slots=True, eq=False)
class Recorder:
    """A pytest plugin that records `Results`.

    `order` selects and orders the tests if it is not empty; otherwise, with a limit of seconds,
    they run in a fixed random order.
    """

    executed: set[Block]
    """The blocks that were executed; emptied before each test."""
    order: Mapping[str, int]
    most: float
    """Seconds after which no further test begins."""
    started: Callable[[str], None]
    """Called with each test before it begins."""
    failed: dict[str, None] = field(default_factory=dict)
    tests: dict[str, Result] = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select and order the tests."""
        if self.order:
            wanted = [item for item in items if item.nodeid in self.order]
            items[:] = sorted(wanted, key=lambda item: self.order[item.nodeid])
        elif self.most < math.inf:
            random.Random(0).shuffle(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Record a test."""
        self.executed.clear()
        self.started(item.nodeid)
        began = time.process_time()
        try:
            return (yield)
        finally:
            seconds = time.process_time() - began
            self.tests[item.nodeid] = Result(seconds, frozenset(self.executed))
            self.most -= seconds
            if self.most < 0:
                item.session.shouldstop = "the seconds are over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure."""
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that cannot be imported."""
        if report.failed:
            self.failed[report.nodeid] = None


FIRST, SECOND = (
    "not full and not slow and not gpu and not programs",
    "full and not slow and not gpu and not programs",
)
"""The two tiers of the suite, as pytest selects them."""


def run(
    change: Callable[[str], ast.Module | None], paths: Sequence[str], *options: str,
    tests: Sequence[str] = (), most: float = math.inf, started: Callable[[str], None],
) -> Results:  # fmt: skip
    """Run tests of files in this process on a changed checker, which must not be imported yet.

    `change` returns the tree of a module, None for an unchanged file; `tests` selects and orders;
    no test begins after `most` seconds.
    """
    executed: set[Block] = set()

    def code(module: str) -> CodeType:
        tree = change(module)
        return marked(module) if tree is None else with_marks(module, tree)

    sys.meta_path.insert(0, Sources(code, {"_executed_": executed.add}))
    recorder = Recorder(executed, {test: k for k, test in enumerate(tests)}, most, started)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *options, *paths], plugins=[recorder])
    right = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if status not in right and not recorder.failed and recorder.most >= 0:
        recorder.failed[f"exit {status}"] = None
    return Results(recorder.tests, tuple(recorder.failed))
