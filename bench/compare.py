"""Comparison of benchmarks of an earlier commit and of this tree on one machine.

    python -m bench.compare certifier language --before v0.1
    make bench-compare    # certifier, language, evaluator and foundation, before: d557d31
    python -m bench.compare certifier --only 'mlp_0|any order'    # some cases, not recorded

Both trees run alternately, each benchmark in its own process with the packages of this environment;
the order changes with every round. The best values of figures that both trees have are compared,
as other work on the machine only makes a time longer: the loss is now / before if lower values are
better, else before / now. A loss above 1.05 causes another round, up to five. The table is printed
and recorded after each benchmark.

`--only` compares the cases of the certifier whose names match, in one round. For each sentence it
compares the bounds of both domains, which must not grow by more than 0.1 %, and the processor
seconds of the bound on one thread, which other work on the machine affects little.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common import Better, Figure, report

ROOT = Path(__file__).resolve().parents[1]
ROOTS = (".", "backends", "certs", "grammar")
BENCHMARKS = ("certifier", "language", "evaluator", "foundation")
BEFORE = "d557d31"
MOST = 1.05
"""The largest loss that passes."""
ROUNDS = 5
LOOSER = 1.001
"""The largest ratio of two bounds of one statement that passes."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OWN_TIME = "import time\ntime.perf_counter = time.process_time\n"
"""Preamble of the processes of `--only`: time is processor time."""

Values = dict[str, tuple[float, Better]]
Measured = dict[int, dict[str, float]]
"""Bound, interval bound, attack and seconds, by the tokens of a sentence."""


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("names", nargs="*", default=BENCHMARKS, help="benchmarks to run")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="the earlier tree")
    parser.add_argument("--only", metavar="REGEX", help="cases of the certifier alone")
    options = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        extract(options.before, Path(folder))
        if options.only is not None:
            figures = parts(options.only, Path(folder), ROOT)
            return report("compare", figures, Path(folder))
        for name in options.names:
            figures += compared(name, Path(folder), ROOT)
            status = report("compare", figures)
    return status


def extract(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    if packed.returncode:
        raise SystemExit(f"commit {commit} cannot be read; name another one: --before COMMIT")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def compared(name: str, before: Path, now: Path) -> list[Figure]:
    """Run a benchmark in both trees until no loss is left or the rounds are over."""
    rounds: list[tuple[Values, Values]] = []
    while len(rounds) < ROUNDS:
        trees = (before, now) if len(rounds) % 2 == 0 else (now, before)
        print(f"{name}: round {len(rounds) + 1}", file=sys.stderr, flush=True)
        found = {tree: run(name, tree) for tree in trees}
        rounds.append((found[before], found[now]))
        figures = losses(name, rounds)
        if all(figure.within for figure in figures):
            break
    return figures


def run(name: str, tree: Path) -> Values:
    """Run a benchmark of a tree and return its figures.

    Raises SystemExit if it writes no results.
    """
    results = tree / "bench" / "results" / f"{name}.json"
    results.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", f"bench.{name}"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / root) for root in ROOTS)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if not results.exists():
        raise SystemExit(f"bench.{name} of {tree} wrote no results")
    return {
        figure["name"]: (
            math.nan if figure["value"] is None else figure["value"],
            Better(figure["better"]),
        )
        for figure in json.loads(results.read_text(encoding="utf-8"))["figures"]
    }


def parts(only: str, before: Path, now: Path) -> list[Figure]:
    """Compare the certifier's cases whose names match, one by one.

    Raises SystemExit if there is none.
    """
    from bench.certifier import CASES

    names = [case.name for case in CASES if re.search(only, case.name)]
    if not names:
        raise SystemExit(f"no case of bench.certifier matches {only!r}")
    figures: list[Figure] = []
    for number, name in enumerate(names):
        trees = (before, now) if number % 2 == 0 else (now, before)
        found = {tree: part(name, tree) for tree in trees}
        figures += differences(name, found[before], found[now])
        for figure in figures[-3 * len(found[before]) :]:
            print(figure.name, figure.value, figure.conditions, file=sys.stderr, flush=True)
    return figures


def part(name: str, tree: Path) -> Measured:
    """Return the measurements of a case by the certifier of a tree.

    Raises SystemExit if there are none.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(OWN_TIME, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "bench.certifier", name],
            cwd=tree,
            env={
                **os.environ,
                **dict.fromkeys(THREADS, "1"),
                "PYTHONPATH": os.pathsep.join([folder, *(str(tree / root) for root in ROOTS)]),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    found = measured(name, done.stderr)
    if not found:
        raise SystemExit(f"bench.certifier of {tree} measured nothing of {name}: {done.stderr}")
    return found


def measured(name: str, text: str) -> Measured:
    """Parse the certifier's progress output for a case, by tokens."""
    found = {}
    for line in text.splitlines():
        case, mark, fields = line.partition(" Measured(")
        if mark and case == name:
            pairs = (pair.split("=") for pair in fields.removesuffix(")").split(", "))
            values = {key: float(value) for key, value in pairs}
            found[int(values.pop("tokens"))] = values
    return found


def differences(name: str, before: Measured, now: Measured) -> list[Figure]:
    """Return the ratios of bounds and seconds of a case; NaN for a sentence without them."""
    found = []
    for tokens, old in before.items():
        for key, most in (("bound", LOOSER), ("interval", LOOSER), ("seconds", MOST)):
            new = now.get(tokens, {}).get(key, math.nan)
            conditions = f"{old[key]:.6g} → {new:.6g}"
            what = f"{name}, {tokens} tokens: {key}"
            found.append(Figure(what, _ratio(new, old[key]), Better.LOWER, most, conditions))
    return found


def _ratio(worse: float, least: float) -> float:
    return 1.0 if worse == least else worse / least if least else math.inf


def losses(name: str, rounds: Sequence[tuple[Values, Values]]) -> list[Figure]:
    """Return the loss of every figure that both trees have, of the best values over the rounds.

    A figure that only the earlier tree has counts as missing.
    """
    before, now = ([side[number] for side in rounds] for number in (0, 1))
    common = [figure for figure in before[0] if figure in now[0]]
    missing = [figure for figure in before[0] if figure not in now[0]]
    found = [_loss(name, figure, before, now) for figure in common]
    conditions = ", ".join(missing)
    return [*found, Figure(f"{name}: figures missing", len(missing), Better.LOWER, 0, conditions)]


def _loss(
    name: str, figure: str, before: Sequence[Mapping[str, tuple[float, Better]]],
    now: Sequence[Mapping[str, tuple[float, Better]]],
) -> Figure:  # fmt: skip
    better = before[0][figure][1]
    old, new = (_best([values[figure][0] for values in side], better) for side in (before, now))
    worse, least = (new, old) if better is Better.LOWER else (old, new)
    conditions = f"{old:.6g} → {new:.6g}, {len(before)} rounds"
    return Figure(f"{name}: {figure}", _ratio(worse, least), Better.LOWER, MOST, conditions)


def _best(values: Sequence[float], better: Better) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if better is Better.LOWER else max(values)


if __name__ == "__main__":
    sys.exit(main())
