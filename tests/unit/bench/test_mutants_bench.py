"""Defects that bench/mutants.py plants: in every module of the checker, met by the right tests."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from bench.mutants_changes import mutants_of
from bench.mutants_tests import CHECKER, ROOT, Known, files, modules, name_of

PLANTED = {name_of(path): path for path in modules()}


def test_files_are_those_of_both_tiers_and_the_checkers_own_come_first() -> None:
    found = files()
    assert len(set(found)) == len(found) > 100
    assert all((ROOT / file).is_file() for file in found)
    assert "/certs/" in found[0]
    assert "/certs/" not in found[-1]
    assert not any("unit/bench" in file for file in found)


def test_a_module_without_code_to_run_gives_none() -> None:
    """Packages say what is in them and nothing else: there is nothing to plant."""
    for path in CHECKER.rglob("__init__.py"):
        assert list(mutants_of(path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "affine/curves.py",
        pytest.param("documents/hints.py", marks=pytest.mark.full),
        pytest.param("linear_bounds/tape.py", marks=pytest.mark.full),
    ],
)
def test_a_mutant_is_another_module_and_says_where(name: str) -> None:
    plain = PLANTED[name].read_text(encoding="utf-8")
    found = list(mutants_of(PLANTED[name]))
    assert len({ast.unparse(mutant.tree) for mutant in found}) > 2
    for mutant in found:
        assert ast.unparse(ast.parse(plain)) != ast.unparse(mutant.tree)
        assert mutant.module == name
        before, after = mutant.change.split(" → ")
        assert before != after or len(before) == 90  # the change itself may be further on
        if mutant.function is not None:
            line = plain.splitlines()[mutant.function[1] - 1].strip()
            assert line.startswith(("def ", "@")), line
    assert any(mutant.function is not None for mutant in found)


def test_tests_that_call_a_function_come_by_file_and_quick_ones_first() -> None:
    f, g, h = ("a.py", 1), ("a.py", 9), ("b.py", 4)
    known = Known(
        "",
        {
            "one.py::slow": (0.9, frozenset({f, g})),
            "one.py::quick": (0.1, frozenset({f})),
            "one.py::other": (0.0, frozenset()),
            "two.py::only": (0.5, frozenset({g})),
        },
    )
    assert known.of(f) == ("one.py::quick", "one.py::slow", "one.py::other")
    assert known.of(g) == ("two.py::only", "one.py::slow", "one.py::quick", "one.py::other")
    assert known.of(h) == ()
    assert set(known.of(None)) == set(known.tests)
    assert known.limit(["one.py::slow", "two.py::only"]) == 65


FINDS = """
import sys
from bench.mutants import known, outcome, trial
from bench.mutants_changes import mutants_of
from bench.mutants_tests import CHECKER, FIRST, SECOND

found = known("tests/unit/certs/test_recheck_formats.py")
assert not any(name.startswith("kcdsl_certs.recheck") for name in sys.modules)
print(repr(found.failed), len(found.tests) > 0, any(calls for _, calls in found.tests.values()))
mutants = mutants_of(CHECKER / "numerics" / "formats.py")
some = [m for m in mutants if m.kind in ("extreme", "sign")][:2]
print(len(some), {outcome(trial(m, found)).partition("::")[0] for m in some})
print(repr(outcome(trial(next(mutants_of(CHECKER / "documents" / "hints.py")), found))))
print(known("tests/unit/certs/test_that_is_not_there.py").failed != "")
fields = "tests/unit/certs/test_exchanged_fields.py"
first, second = (set(known(fields, tier).tests) for tier in (FIRST, SECOND))
print(len(first) > 0, len(second) > 0, first & second)
"""


@pytest.mark.full
def test_a_defect_is_found_in_a_process_of_its_own() -> None:
    """One that tests know; one that none of these tests meets; and tests that fail without any."""
    run = [sys.executable, "-c", FINDS]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "'' True True",
        "2 {'tests/unit/certs/test_recheck_formats.py'}",
        "''",
        "True",
        "True True set()",
    ]
