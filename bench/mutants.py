"""Mutation tests of the checker: the tests must find each planted defect.

A mutant is the checker with one expression of one rule changed: a term dropped, a sign turned, a
radius halved, γ_n without its n, an inflation left out, the larger for the smaller, a refusal left
out. The seed of a campaign selects its mutants from all that the source gives. Tests run in
separate processes on changed text; the files are not modified.

1. The first-tier tests near the checker run without a defect; the blocks that each executes are
   recorded.
2. Each mutant alone runs under the quickest of them that execute the changed place, 5 s together.
3. The remaining mutants are planted together and run under the other tests of the first tier; of
   those near the checker only the ones that execute a changed place. A test that fails runs again
   with each mutant alone, and without any.
4. The rest runs under the second tier in the same way: random cases of `--most` seconds from each
   file near the checker that executes it in the first tier or has no test there.

A mutant that is masked by another in steps 3 and 4 may be reported as not found, but none is
reported as found wrongly. Results are stored in build/mutants: an interrupted campaign continues,
and after a change of a test only its file runs again.

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
from bench.mutants_trials import ResultCache, Round, Trial, alone, sources, together, without_defect

COUNT, SEED = 100, 1
JOBS, MOST = 2, 30
QUICK = 5
"""Total seconds of the quick tests of one mutant."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PREPARED = (
    "numpy", "torch", "pytest", "hypothesis", "flint", "ml_dtypes", "jsonschema",
    "safetensors.torch", "scipy.stats", "transformers", "z3", "onnx", "kcdsl.cli", "kcdsl.api",
    "kcdsl_backends.drift", "pytest_asyncio", "pytest_lsp", "anyio.pytest_plugin", "xdist.plugin",
)  # fmt: skip
"""Packages that tests and pytest import, without the checker; loaded once for all mutants."""


def chosen(count: int, seed: int, within: Sequence[str] = ("",)) -> list[Mutant]:
    """Return mutants of all modules, in proportion to their numbers, with mixed kinds.

    `within` has prefixes of the names of modules.
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
    """Run a campaign and print the mutants that no test finds."""
    options = _parser().parse_args()
    os.chdir(ROOT)
    # Each test file is compiled once, not once for every mutant.
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
        cache = ResultCache(ROOT / "build" / "mutants" / sources())
        campaign = Campaign(pool, options.jobs, cache, mutants)
        try:
            campaign.learn()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        campaign.run_quick()
        campaign.run_first_tier()
        later = len(campaign.left)
        campaign.run_second_tier(options.most)
    for mutant in campaign.left:
        print(f"     {mutant.name:44} SURVIVED: {mutant.change}")
    later -= len(campaign.left)
    return report("mutants", _figures(mutants, campaign.left, later), _folder(options))


@dataclass(slots=True)
class Campaign:
    """The mutants of a campaign, those not yet found, and the recorded first tier."""

    pool: Executor
    jobs: int
    cache: ResultCache
    left: list[Mutant]
    known: dict[str, Results] = field(default_factory=dict)
    """Results of the first tier without a defect, by test file."""

    def learn(self) -> None:
        """Run the first tier near the checker without a defect.

        Raises ValueError if a test fails.
        """
        paths = [file for file in files() if file.startswith(NEAR)]
        blocks = {mutant.block for mutant in self.left if mutant.block}
        failed: list[str] = []
        found = self.pool.map(partial(without_defect, cache=self.cache), paths)
        for number, (file, results) in enumerate(zip(paths, found, strict=True), 1):
            _progress("files without a defect", number, len(paths))
            failed += results.failed + ((results.ended,) if results.ended else ())
            self.known[file] = results.only(blocks)
        if failed:
            raise ValueError(f"without any defect fail: {', '.join(failed)}")

    def run_quick(self) -> None:
        """Run the quickest tests that execute it on each mutant alone."""
        trials = []
        for mutant in self.left:
            tests = quick(list(self.known.values()), mutant.block, QUICK)
            seconds = sum(self.known[test.partition("::")[0]].tests[test].seconds for test in tests)
            trials.append(Trial(mutant, tuple(tests), seconds))
        found = self.pool.map(partial(alone, cache=self.cache), trials)
        for trial, test in zip(trials, found, strict=True):
            if test:
                self._found(trial.mutant, test)

    def run_first_tier(self) -> None:
        """Run the first tier on the remaining mutants together, near the checker first."""
        rounds = []
        for file, known in self.known.items():
            met = [mutant for mutant in self.left if known.meeting({mutant.block})]
            if met:
                rounds.append(Round(file, tuple(met), known))
        rounds.sort(key=lambda r: r.known.seconds(r.known.tests) / len(r.mutants) if r.known else 0)
        self._run_rounds(rounds)
        far = [file for file in files() if file not in self.known]
        self._run_rounds([Round(file, tuple(self.left)) for file in far])

    def run_second_tier(self, most: float) -> None:
        """Run the second tier on the remaining mutants together, `most` seconds per file."""
        blocks = {mutant.block for mutant in self.left}
        rounds = [
            Round(file, tuple(self.left), None, SECOND, most)
            for file, known in self.known.items()
            if not known.tests or known.meeting(blocks)
        ]
        self._run_rounds(rounds, "SECOND TIER ALONE: ")

    def _run_rounds(self, rounds: Sequence[Round], note: str = "") -> None:
        """Run the tests of each round on its remaining mutants, several rounds at a time."""
        running: set[Future[dict[str, str]]] = set()
        for number, round in enumerate(rounds, 1):
            _progress("files that meet what is left", number, len(rounds))
            left = tuple(mutant for mutant in round.mutants if mutant in self.left)
            if left:
                running.add(self.pool.submit(together, replace(round, mutants=left), self.cache))
            if len(running) == self.jobs:
                running = self._ended(running, FIRST_COMPLETED, note)
        self._ended(running, ALL_COMPLETED, note)

    def _ended(
        self, running: set[Future[dict[str, str]]], until: str, note: str
    ) -> set[Future[dict[str, str]]]:
        """Print the findings of finished rounds; return the running ones."""
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
