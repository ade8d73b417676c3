"""Which functions of the checker each test calls."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "certs" / "kcdsl_certs" / "recheck"
PACKAGE = "kcdsl_certs.recheck"
FOLDERS = ("tests/unit", "tests/property", "tests/kernels")
"""Where the tests are that may find a defect of the checker."""
FOREIGN = ("tests/unit/lsp", "tests/unit/bench")
"""Folders among them whose tests do not meet the checker, or run campaigns of their own."""

Function = tuple[str, int]
"""A module and the line on which a function begins."""


def modules() -> list[Path]:
    """Return every module of the checker's rules; a package has no code of its own."""
    return [path for path in sorted(CHECKER.rglob("*.py")) if path.name != "__init__.py"]


def files() -> list[str]:
    """Return the files of tests, those of the checker itself first."""
    found = {
        str(path.relative_to(ROOT)): path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("test_*.py")
    }
    own = [name for name in found if not name.startswith(FOREIGN)]
    return sorted(own, key=lambda name: ("/certs/" not in name, name))


def name_of(path: Path) -> str:
    """Return a module's name: its path inside the checker."""
    return str(path.relative_to(CHECKER))


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of the checker from other text than that of their files.

    `change` gives the tree to execute for a module's name, None for the file as it is; `names` are
    what that text finds among its globals.
    """

    def __init__(
        self, change: Callable[[str], ast.Module | None], names: Mapping[str, Any] | None = None
    ) -> None:
        self.change, self.names = change, names or {}

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a specification for a module whose text changes."""
        place = _module_path(fullname)
        if place is None or self.change(name_of(place)) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the changed text."""
        place = _module_path(module.__name__)
        assert place is not None
        tree = self.change(name_of(place))
        assert tree is not None
        module.__dict__.update(self.names)
        exec(compile(tree, str(place), "exec"), module.__dict__)


def _module_path(fullname: str) -> Path | None:
    if not fullname.startswith(f"{PACKAGE}."):
        return None
    place = CHECKER / f"{fullname.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py"
    return place if place.is_file() else None


def begin_of(function: ast.FunctionDef) -> int:
    """Return the line on which a function begins, its decorators included."""
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def _marked(module: str) -> ast.Module:
    """Return a module whose functions say that they are called."""
    tree = ast.parse((CHECKER / module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            mark = ast.parse(f"_called_(({module!r}, {begin_of(node)}))").body[0]
            documented = ast.get_docstring(node) is not None
            node.body.insert(int(documented), mark)
    return ast.fix_missing_locations(tree)


@dataclass(frozen=True, slots=True)
class Known:
    """Results of tests without any defect: a test that fails, if one does, and by test the seconds
    that it took and the functions of the checker that it called."""

    failed: str
    tests: Mapping[str, tuple[float, frozenset[Function]]]

    def limit(self, tests: Iterable[str]) -> int:
        """Return after how many seconds of its own a process with a defect is ended."""
        return int(60 + 4 * sum(self.tests[test][0] for test in tests))

    def of(self, function: Function | None) -> tuple[str, ...]:
        """Return the tests that call a function; those of one file together, quick files first.

        Of a file that calls it, its other tests follow: they may read what a test before them made.
        None is what is executed when a module is imported, which every test reads.
        """
        files = list(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        near = [self._of_file(file, function) for file in files]
        near.sort(key=lambda pair: sum(self.tests[test][0] for test in pair[0]))
        return tuple(test for some, _ in near for test in some) + tuple(
            test for _, others in near for test in others
        )

    def _of_file(self, file: str, function: Function | None) -> tuple[list[str], list[str]]:
        some = [test for test in self.tests if test.partition("::")[0] == file]
        called = [t for t in some if function is None or function in self.tests[t][1]]
        others = [t for t in some if t not in called] if called else []
        return sorted(called, key=lambda test: self.tests[test][0]), others


@dataclass(slots=True, eq=False)
class Recorder:
    """A plugin of pytest that takes down what `Known` holds."""

    called: set[Function]
    """The functions that were called; emptied before each test."""
    failed: str = ""
    tests: dict[str, tuple[float, frozenset[Function]]] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Take down a test."""
        self.called.clear()
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = time.process_time() - began, frozenset(self.called)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down a failure."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take down a module that cannot be imported."""
        self.failed = self.failed or (report.nodeid if report.failed else "")


FIRST, SECOND = (
    "not full and not slow and not gpu and not programs",
    "full and not slow and not gpu and not programs",
)
"""The two tiers of the suite, as pytest selects them."""


def run(tests: Sequence[str], tier: str = "", *, calls: bool) -> Known:
    """Run tests in this process until one fails; those of one tier where it is given.

    `calls` says whether to take down the functions of the checker that they call, which must not
    have been imported.
    """
    called: set[Function] = set()
    if calls:
        sys.meta_path.insert(0, Sources(_marked, {"_called_": called.add}))
    recorder = Recorder(called)
    options = ["-x", "-q", "-p", "no:cacheprovider", *(["-m", tier] if tier else [])]
    code = pytest.main([*options, *tests], plugins=[recorder])
    right = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = recorder.failed or ("" if code in right else f"exit {code}")
    return Known(failed, recorder.tests)
