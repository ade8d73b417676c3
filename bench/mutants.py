"""Defects planted in the checker, one by one: the tests must find each.

A mutant is the checker with one expression of one rule changed: a term dropped, a sign turned, a
radius halved, γ_n without its n, an inflation left out, the larger for the smaller, a refusal left
out. Which mutants a campaign tries is chosen by its seed, from all that the source gives. Each runs
in a process of its own, from changed text; the files stay as they are. A run of a whole tier
without any defect shows which tests call which functions. A mutant meets the tests that call the
function it is in, quick ones first, then the others of their files: those of the first tier, and
where none of these fails those of the second.

    make mutants                                   100 of campaign 1, recorded
    .venv/bin/python -m bench.mutants --count 20 --seed 7
    .venv/bin/python -m bench.mutants --within chain,linear_bounds/  of some modules
    .venv/bin/python -m bench.mutants --only ops/attention/softmax.py:52:half
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from bench import mutants_tests
from bench.common import RESULTS, Better, Figure, report
from bench.mutants_changes import Mutant, mutants_of
from bench.mutants_tests import (
    FIRST,
    ROOT,
    SECOND,
    Function,
    Known,
    Sources,
    files,
    modules,
    name_of,
)

COUNT, SEED = 100, 1
PREPARED = (
    "numpy", "torch", "pytest", "hypothesis", "flint", "ml_dtypes", "jsonschema",
    "safetensors.torch", "scipy.stats", "transformers", "z3", "onnx",
)  # fmt: skip
"""Packages that tests import, loaded once for all mutants."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A mutant, the tests that meet it, and the seconds of a process that they may take."""

    mutant: Mutant
    tests: tuple[str, ...]
    limit: int


def known(file: str, tier: str = FIRST) -> Known:
    """Return what a run of the tests of a file, of one tier, shows of the checker as it is."""
    found = _forked(lambda: mutants_tests.run([file], tier, calls=True))
    return found if isinstance(found, Known) else Known(f"{file}: {found}", {})


def trial(mutant: Mutant, found: Known) -> Trial:
    """Return a mutant with the tests that meet it."""
    tests = found.of(mutant.function)
    return Trial(mutant, tests, found.limit(tests))


def outcome(trial: Trial) -> str:
    """Return the first test that fails on a mutant, "time" if it does not end, "" if none."""
    if not trial.tests:
        return ""

    def changed() -> Known:
        resource.setrlimit(resource.RLIMIT_CPU, (trial.limit, trial.limit + 60))
        mutant = trial.mutant
        change = Sources(lambda name: mutant.tree if name == mutant.module else None)
        sys.meta_path.insert(0, change)
        return mutants_tests.run(trial.tests, calls=False)

    found = _forked(changed)
    return found.failed if isinstance(found, Known) else str(found)


def _forked(task: Callable[[], Known]) -> Any:
    """Return what a task returns in a copy of this process, or how that ended.

    This process has imported what takes long, but not the checker.
    """
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            _answer(task, answer)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            return "time" if os.WTERMSIG(status) == signal.SIGXCPU else "crash"
        answer.seek(0)
        return pickle.load(answer)


def _answer(task: Callable[[], Known], answer: IO[bytes]) -> NoReturn:
    """Write what a task returns, silently, and end the process."""
    try:
        with tempfile.TemporaryFile("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            pickle.dump(task(), answer)
            answer.flush()
        os._exit(0)
    finally:
        os._exit(1)


def chosen(count: int, seed: int, within: Sequence[str] = ("",)) -> list[Mutant]:
    """Return mutants of all modules: shares by the number that a module has, kinds mixed.

    `within` has what the names of modules begin with.
    """
    found = [
        mutant
        for path in modules()
        if any(name_of(path).startswith(start) for start in within)
        for mutant in mutants_of(path)
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


def main() -> int:
    """Try a campaign and print the mutants that no test finds."""
    options = _parser().parse_args()
    os.chdir(ROOT)
    for name in PREPARED:
        importlib.import_module(name)
    assert not any(name.startswith("kcdsl_certs.recheck") for name in sys.modules)
    mutants = chosen(options.count, options.seed, options.within.split(","))
    if options.only:
        wanted = options.only.split(",")
        mutants = [m for m in chosen(10**9, options.seed) if m.name in wanted]
    counts = Counter(mutant.kind for mutant in mutants)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
        try:
            left = _tried(pool, mutants, FIRST)
            survived = _tried(pool, left, SECOND) if left else []
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    for mutant in survived:
        print(f"     {mutant.name:44} SURVIVED: {mutant.change}")
    figures = _figures(counts, survived, len(left) - len(survived))
    return report("mutants", figures, _folder(options))


def _tried(pool: Executor, mutants: list[Mutant], tier: str) -> list[Mutant]:
    """Print which test of a tier finds each mutant; return those that none finds.

    Raises ValueError where a test fails without any defect.
    """
    tests: dict[str, tuple[float, frozenset[Function]]] = {}
    paths = files()
    failed = []
    for number, found in enumerate(pool.map(partial(known, tier=tier), paths), 1):
        if number % 20 == 0:
            print(f"tests without a defect: {number} of {len(paths)} files", flush=True)
        if found.failed:
            failed.append(found.failed)
        tests |= found.tests
    if failed:
        raise ValueError(f"without any defect fail: {', '.join(failed)}")
    all_known = Known("", dict(sorted(tests.items())))
    trials = [trial(mutant, all_known) for mutant in mutants]
    left = []
    for number, (mutant, by) in enumerate(zip(mutants, pool.map(outcome, trials), strict=True), 1):
        if by:
            alone = "" if tier == FIRST else "SECOND TIER ALONE: "
            print(f"{number:4} {mutant.name:44} {alone}{by}", flush=True)
        else:
            left.append(mutant)
    return left


def _folder(options: argparse.Namespace) -> Path:
    partly = options.only or options.within
    recorded = options.count >= COUNT and options.seed == SEED and not partly
    return RESULTS if recorded else Path(tempfile.mkdtemp())


def _figures(counts: Counter[str], survived: list[Mutant], later: int) -> list[Figure]:
    kinds = Counter(mutant.kind for mutant in survived)
    total = sum(counts.values())
    killed: Callable[[str], int] = lambda kind: counts[kind] - kinds[kind]  # noqa: E731
    return [
        Figure("planted", total, Better.HIGHER),
        Figure("found", total - len(survived), Better.HIGHER),
        Figure("found by the second tier alone", later, Better.LOWER, 0),
        *(
            Figure(f"found of {kind}", killed(kind), Better.HIGHER, None, f"of {counts[kind]}")
            for kind in sorted(counts)
        ),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which are chosen")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--only", default="", help="names of mutants, with commas between")
    parser.add_argument("--within", default="", help="what modules begin with, with commas between")
    return parser


if __name__ == "__main__":
    sys.exit(main())
