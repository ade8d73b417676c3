"""Defects planted by bench/mutants.py: in every checker module, tried against the right tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from bench.mutants_changes import Mutant, apart, changed, mutants_of
from bench.mutants_tests import (
    CHECKER,
    NEAR,
    ROOT,
    Result,
    Results,
    files,
    modules,
    name_of,
    parsed,
    quick,
    with_marks,
)  # fmt: skip

PLANTED = {name_of(path): path for path in modules()}


def test_files_of_the_checker_are_ordered_first() -> None:
    found = files()
    assert len(set(found)) == len(found) > 100
    assert all((ROOT / file).is_file() for file in found)
    assert "/certs/" in found[0]
    assert not found[-1].startswith(NEAR)
    assert not any("unit/bench" in file for file in found)


def test_module_without_executable_code_has_no_mutants() -> None:
    """A package with only a docstring and imports offers nothing to mutate."""
    for path in CHECKER.rglob("__init__.py"):
        assert list(mutants_of(path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "affine/remainders.py",
        pytest.param("documents/hints.py", marks=pytest.mark.full),
        pytest.param("linear_bounds/tape.py", marks=pytest.mark.full),
    ],
)
def test_mutant_changes_the_module_and_states_its_line(name: str) -> None:
    plain = ast.unparse(parsed(name))
    found = list(mutants_of(PLANTED[name]))
    assert len({mutant.key for mutant in found}) == len(found)
    assert len({_text(name, mutant) for mutant in found}) > 2
    for mutant in found:
        assert _text(name, mutant) != plain
        assert mutant.module == name
        before, after = mutant.change.split(" → ")
        assert before != after or len(before) == 90  # the change itself may be on a later line
        if mutant.block is not None:
            assert mutant.block[0] == name
            assert mutant.block[1] <= mutant.line or mutant.kind == "refusal"
    assert any(mutant.block is not None for mutant in found)


@pytest.mark.full
def test_every_mutation_site_records_its_execution() -> None:
    """Otherwise no test would meet the mutant."""
    for name, path in PLANTED.items():
        lines = {place for code in _codes(with_marks(name, parsed(name))) for place in _marks(code)}
        assert {mutant.block for mutant in mutants_of(path)} <= {None, *lines}, name


def test_mutants_of_different_statements_share_a_process() -> None:
    name = "affine/remainders.py"
    found = list(mutants_of(PLANTED[name]))
    groups = apart(found)
    assert sorted(mutant.key for group in groups for mutant in group) == sorted(
        mutant.key for mutant in found
    )
    assert len(groups) > 1
    first, *_ = groups
    assert len(first) > 2
    each = {_text(name, mutant) for mutant in first}
    assert _text(name, *first) not in each
    assert changed("affine/tape.py", first) is None
    for group in groups:
        assert len({mutant.statement for mutant in group}) == len(group)


def test_omitted_rejection_is_assigned_to_the_tests_that_reach_it() -> None:
    name = "graphs/any_length.py"
    mutant = next(m for m in mutants_of(PLANTED[name]) if m.kind == "refusal")
    lines = PLANTED[name].read_text(encoding="utf-8").splitlines()
    assert mutant.block is not None
    assert lines[mutant.block[1] - 1].strip().startswith("raise ")
    assert _text(name, mutant).count("raise ") == ast.unparse(parsed(name)).count("raise ") - 1


def _text(name: str, *mutants: Mutant) -> str:
    tree = changed(name, mutants)
    assert tree is not None
    return ast.unparse(tree)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _marks(code: CodeType) -> Iterator[tuple[str, int]]:
    for constant in code.co_consts:
        match constant:
            case (str(module), int(line)):
                yield module, line


f, g, h = ("a.py", 1), ("a.py", 9), ("b.py", 4)
ONE = Results(
    {
        "one.py::slow": Result(0.9, frozenset({f, g})),
        "one.py::quick": Result(0.1, frozenset({f})),
        "one.py::other": Result(0.0, frozenset()),
    }
)
TWO = Results({"two.py::only": Result(0.5, frozenset({g}))})


def test_tests_that_execute_the_block_run_first_by_speed() -> None:
    assert ONE.meeting({f}) == ["one.py::quick", "one.py::slow", "one.py::other"]
    assert ONE.meeting({g, h}) == ["one.py::slow", "one.py::quick", "one.py::other"]
    assert ONE.meeting({h}) == []
    assert set(ONE.meeting({None})) == set(ONE.tests)
    assert ONE.only({g}).tests["one.py::slow"].blocks == {g}


def test_quick_tests_fill_the_time_grouped_by_file() -> None:
    assert quick([ONE, TWO], f, 9) == ["one.py::quick", "one.py::slow"]
    assert quick([ONE, TWO], g, 9) == ["two.py::only", "one.py::slow"]
    assert quick([ONE, TWO], g, 0.7) == ["two.py::only"]
    assert quick([ONE, TWO], h, 9) == []
    assert quick([ONE, TWO], None, 0.7) == ["one.py::other", "one.py::quick", "two.py::only"]


FINDS = """
import pathlib, sys
import bench.mutants_trials as trials
from bench.mutants_changes import mutants_of
from bench.mutants_tests import CHECKER
from bench.mutants_trials import ResultCache, Round, Trial, alone, together, without_defect

file = "tests/unit/certs/test_recheck_formats.py"
cache = ResultCache(pathlib.Path(sys.argv[1]))
known = without_defect(file, cache)
assert not any(name.startswith("kcdsl_certs.recheck") for name in sys.modules)
print(known.failed, len(known.tests) > 5, any(result.blocks for result in known.tests.values()))
here = list(mutants_of(CHECKER / "numerics" / "formats.py"))
some = [mutant for mutant in here if mutant.kind in ("extreme", "sign")][:2]
elsewhere = next(mutants_of(CHECKER / "documents" / "hints.py"))
trial = lambda mutant: Trial(mutant, tuple(known.meeting({mutant.block})), 9)
print(len(some), {alone(trial(mutant), cache).partition("::")[0] for mutant in some})
print(repr(alone(trial(elsewhere), cache)))
found = together(Round(file, (*some, elsewhere), known), cache)
print(set(found) == {mutant.key for mutant in some}, {t in known.tests for t in found.values()})
trials.forked = None  # what was found out once is not asked again
assert without_defect(file, cache) == known
print(together(Round(file, (some[0],), known), cache) == {some[0].key: found[some[0].key]})
"""


@pytest.mark.full
def test_defect_is_found_in_its_own_process(tmp_path: Path) -> None:
    """Alone, among others, and from the cache; a defect that no test reaches is not found."""
    done = _ran(FINDS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "() True True",
        "2 {'tests/unit/certs/test_recheck_formats.py'}",
        "''",
        "True {True}",
        "True",
    ]


FAILS = """
import pathlib, sys
import bench.mutants_tests, bench.mutants_trials as trials
from bench.mutants_changes import mutants_of
from bench.mutants_tests import CHECKER, SECOND
from bench.mutants_trials import ResultCache, Round, failure, forked, together, without_defect

folder = pathlib.Path(sys.argv[1])
file = str(folder / "test_small.py")
cache = ResultCache(folder / "cache")
trials.ROOT = folder
some = [m for m in mutants_of(CHECKER / "numerics" / "formats.py") if m.kind == "sign"][:1]
text = "import os\\nimport kcdsl_certs.recheck.numerics.formats\\ndef test_it():\\n    {}\\n"
mark = "import pytest\\npytestmark = pytest.mark.full\\n"
for what in ("assert 0", "os._exit(3)", "pass"):
    pathlib.Path(file).write_text(text.format(what))
    answers = [failure(without_defect(file, cache)) for _ in range(2)]
    pathlib.Path(file).write_text(mark + text.format(what))
    later = Round(file, (*some,), tier=SECOND)
    print(*(a.rpartition(":")[2] for a in answers), together(later, cache))
print(len(list(cache.folder.iterdir())))
print(failure(forked((), [str(folder / "test_absent.py")])) != "")
"""


@pytest.mark.full
def test_that_fails_without_a_defect_is_discarded(tmp_path: Path) -> None:
    done = _ran(FAILS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "test_it test_it {}",
        "test_it test_it {}",
        "  {}",
        "4",
        "True",
    ]


def _ran(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
