"""Defects planted in the checker, one by one: the tests must find each.

A mutant is the checker with one expression of one rule changed: a term dropped, a sign turned, a
radius halved, γ_n without its n, an inflation left out, the larger for the smaller, a refusal left
out. Which mutants a campaign tries is chosen by its seed, from all that the source gives. Tests run
in processes of their own, on changed text; the files stay as they are.

1. The tests near the checker, of the first tier, run without a defect; what each executes is noted.
2. Each mutant alone meets the quickest of them that execute the changed place, of 5 s together.
3. The mutants that are left are planted together and meet the other tests of the first tier, of
   those near the checker the ones that execute a changed place. A test that fails is tried with
   each mutant alone, and without any.
4. What is then left meets the second tier in the same way: of each file near the checker that
   executes it in the first tier, or has no test there, cases by chance of `--most` seconds.

A mutant that another one hides in steps 3 and 4 may be printed as not found, but none is printed as
found that is not. Results are kept in build/mutants: a campaign that was ended goes on where it
was, and after a change of a test that file alone runs again.

    make mutants                                   100 of campaign 1, recorded
    .venv/bin/python -m bench.mutants --count 20 --seed 7
    .venv/bin/python -m bench.mutants --within chain,linear_bounds/  of some modules
    .venv/bin/python -m bench.mutants --only ops/attention/softmax.py:52:half
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.common import RESULTS, Better, Figure, report
from bench.mutants_changes import Mutant, mutants_of
from bench.mutants_tests import NEAR, ROOT, SECOND, Results, files, marked, modules, name_of, quick
from bench.mutants_trials import Journal, Round, Trial, alone, sources, together, without_defect

COUNT, SEED = 100, 1
JOBS, MOST = 2, 30
QUICK = 5
"""Seconds that quick tests of one mutant take together."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PREPARED = (
    "numpy", "torch", "pytest", "hypothesis", "flint", "ml_dtypes", "jsonschema",
    "safetensors.torch", "scipy.stats", "transformers", "z3", "onnx", "kcdsl.cli", "kcdsl.api",
    "kcdsl_backends.drift", "pytest_asyncio", "pytest_lsp", "anyio.pytest_plugin", "xdist.plugin",
)  # fmt: skip
"""Packages that tests and pytest import, loaded once for all mutants, but not the checker."""


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
    # Each file of tests is compiled once, not once for every mutant.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / "build" / "pycache")
    os.environ |= {"HYPOTHESIS_PROFILE": "unshrunk", **dict.fromkeys(THREADS, "1")}
    for name in PREPARED:
        importlib.import_module(name)
    assert not any(name.startswith("kcdsl_certs.recheck") for name in sys.modules)
    for path in modules():
        marked(name_of(path))
    gc.freeze()
    mutants = chosen(options.count, options.seed, options.within.split(","))
    if options.only:
        wanted = options.only.split(",")
        mutants = [m for m in chosen(10**9, options.seed) if m.name in wanted]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=fork) as pool:
        journal = Journal(ROOT / "build" / "mutants" / sources())
        campaign = Campaign(pool, options.jobs, journal, mutants)
        try:
            campaign.learn()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        campaign.meet_quick()
        campaign.meet_first()
        later = len(campaign.left)
        campaign.meet_second(options.most)
    for mutant in campaign.left:
        print(f"     {mutant.name:44} SURVIVED: {mutant.change}")
    later -= len(campaign.left)
    return report("mutants", _figures(mutants, campaign.left, later), _folder(options))


@dataclass(slots=True)
class Campaign:
    """Mutants that are tried, those that are left, and what the first tier executes."""

    pool: Executor
    jobs: int
    journal: Journal
    left: list[Mutant]
    known: dict[str, Results] = field(default_factory=dict)
    """By file of tests, what its first tier does without a defect."""

    def learn(self) -> None:
        """Run the first tier near the checker without a defect.

        Raises ValueError where a test fails.
        """
        paths = [file for file in files() if file.startswith(NEAR)]
        blocks = {mutant.block for mutant in self.left if mutant.block}
        failed: list[str] = []
        found = self.pool.map(partial(without_defect, journal=self.journal), paths)
        for number, (file, results) in enumerate(zip(paths, found, strict=True), 1):
            _progress("files without a defect", number, len(paths))
            failed += results.failed + ((results.ended,) if results.ended else ())
            self.known[file] = results.only(blocks)
        if failed:
            raise ValueError(f"without any defect fail: {', '.join(failed)}")

    def meet_quick(self) -> None:
        """Have each mutant alone meet the quickest tests that execute it."""
        trials = []
        for mutant in self.left:
            tests = quick(list(self.known.values()), mutant.block, QUICK)
            seconds = sum(self.known[test.partition("::")[0]].tests[test].seconds for test in tests)
            trials.append(Trial(mutant, tuple(tests), seconds))
        found = self.pool.map(partial(alone, journal=self.journal), trials)
        for trial, test in zip(trials, found, strict=True):
            if test:
                self._found(trial.mutant, test)

    def meet_first(self) -> None:
        """Have the mutants that are left together meet the first tier, near the checker first."""
        rounds = []
        for file, known in self.known.items():
            met = [mutant for mutant in self.left if known.meeting({mutant.block})]
            if met:
                rounds.append(Round(file, tuple(met), known))
        rounds.sort(key=lambda r: r.known.seconds(r.known.tests) / len(r.mutants) if r.known else 0)
        self._meet(rounds)
        far = [file for file in files() if file not in self.known]
        self._meet([Round(file, tuple(self.left)) for file in far])

    def meet_second(self, most: float) -> None:
        """Have the mutants that are left together meet the second tier, `most` seconds a file."""
        blocks = {mutant.block for mutant in self.left}
        rounds = [
            Round(file, tuple(self.left), None, SECOND, most)
            for file, known in self.known.items()
            if not known.tests or known.meeting(blocks)
        ]
        self._meet(rounds, "SECOND TIER ALONE: ")

    def _meet(self, rounds: Sequence[Round], note: str = "") -> None:
        """Have what is left of the mutants of each round meet its tests, some rounds at a time."""
        running: set[Future[dict[str, str]]] = set()
        for number, round in enumerate(rounds, 1):
            _progress("files that meet what is left", number, len(rounds))
            left = tuple(mutant for mutant in round.mutants if mutant in self.left)
            if left:
                running.add(self.pool.submit(together, replace(round, mutants=left), self.journal))
            if len(running) == self.jobs:
                running = self._ended(running, FIRST_COMPLETED, note)
        self._ended(running, ALL_COMPLETED, note)

    def _ended(
        self, running: set[Future[dict[str, str]]], until: str, note: str
    ) -> set[Future[dict[str, str]]]:
        """Print what rounds that ended have found; return those that go on."""
        ended, others = wait(running, return_when=until)
        by = {key: test for round in ended for key, test in round.result().items()}
        for mutant in [mutant for mutant in self.left if mutant.key in by]:
            self._found(mutant, note + by[mutant.key])
        return others

    def _found(self, mutant: Mutant, by: str) -> None:
        self.left = [other for other in self.left if other is not mutant]
        print(f"     {mutant.name:44} {by}", flush=True)


def _progress(what: str, done: int, of: int) -> None:
    if done % 20 == 0:
        print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)


def _folder(options: argparse.Namespace) -> Path:
    partly = options.only or options.within
    recorded = options.count >= COUNT and options.seed == SEED and not partly
    return RESULTS if recorded else Path(tempfile.mkdtemp())


def _figures(mutants: Iterable[Mutant], survived: Iterable[Mutant], later: int) -> list[Figure]:
    planted = Counter(mutant.kind for mutant in mutants)
    found = planted - Counter(mutant.kind for mutant in survived)
    return [
        Figure("planted", planted.total(), Better.HIGHER),
        Figure("found", found.total(), Better.HIGHER),
        Figure("found by the second tier alone", later, Better.LOWER, 0),
        *(
            Figure(f"found of {kind}", found[kind], Better.HIGHER, None, f"of {planted[kind]}")
            for kind in sorted(planted)
        ),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which are chosen")
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many at a time")
    parser.add_argument(
        "--most", type=float, default=MOST, help="seconds of the second tier, a file"
    )
    parser.add_argument("--only", default="", help="names of mutants, with commas between")
    parser.add_argument("--within", default="", help="what modules begin with, with commas between")
    return parser


if __name__ == "__main__":
    sys.exit(main())
