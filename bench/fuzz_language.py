"""Damaged documents: no crash, no hang, and accepted documents keep their meaning.

Mutants of bytes, tokens and trees are made from the corpus, the examples, the pages of diagnostic
codes and generated documents; each is linted, rendered, formatted, fixed and edited. A mutant is
identified by the numbers of its campaign and its own, so that it can be repeated.

    make fuzz-language                    20,000 mutants, recorded
    make fuzz-language COUNT=500 SEED=7   fewer, of another campaign, not recorded
    .venv/bin/python -m bench.fuzz_language --seed 7 --only 123
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common import RESULTS, Better, Figure, report
from tests.fuzz.campaign import Finding, Tally, examine_mutant, reduced, run, smaller
from tests.fuzz.examination import SECONDS
from tests.fuzz.mutants import KINDS, mutant

COUNT = 20_000
SEED = 1
ACCEPTED = COUNT // 4
"""Least number of accepted documents, on which the formatter is tested."""


def main() -> int:
    """Run a campaign; show each kind of defect with a small document."""
    options = _parser().parse_args()
    if options.only is not None:
        return _show(options.seed, options.only)
    numbers = range(options.first, options.first + options.count)
    with _progress(options.count) as progress:
        tally = run(options.seed, numbers, workers=options.workers, progress=progress)
    for finding, data in reduced(options.seed, tally.findings):
        _print(options.seed, finding, data)
    figures = figures_of(tally, options.seed, options.workers)
    if options.count >= COUNT:
        return report("fuzz-language", figures, RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        return report("fuzz-language", figures, Path(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuzz-language", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="the number of the campaign")
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--workers", type=int, default=1, help="how many processes")
    parser.add_argument("--only", type=int, help="show one mutant and what is wrong with it")
    return parser


def figures_of(tally: Tally, seed: int, workers: int = 1) -> list[Figure]:
    """Return the figures of a campaign."""
    lower, higher = Better.LOWER, Better.HIGHER
    longest, stage, number = tally.longest()
    lint, linted = tally.slowest.get("lint", (0.0, 0))
    whole = tally.examined >= COUNT
    counts = [
        Figure("documents", tally.examined, higher, COUNT if whole else None, f"campaign {seed}"),
        Figure("different documents", len(tally.texts), higher),
        *(Figure(f"mutants of {kind}", tally.kind(kind), higher) for kind in KINDS),
        *(Figure(name, tally.outcome(name), higher, None, why) for name, why in OUTCOMES.items()),
        *(Figure(f"accepted of {kind}", tally.outcome("accepted", kind), higher) for kind in KINDS),
        Figure(
            "accepted in all",
            tally.outcome("accepted") + tally.outcome("library"),
            higher,
            ACCEPTED if whole else None,
            "by parser and type checker",
        ),
        Figure("accepted and changed by fmt", tally.changed, higher),
        Figure("kinds of diagnostics", len(tally.codes), higher, None, "codes that were raised"),
    ]
    defects = [
        Figure(name, sum(map(of_kind, tally.findings)), lower, 0)
        for name, of_kind in DEFECTS.items()
    ]
    each = 1e3 * tally.seconds / max(1, tally.examined)
    return [
        *counts,
        *defects,
        Figure("slowest lint, s", lint, lower, SECONDS, f"processor time; mutant {linted}"),
        Figure(
            "slowest stage, s", longest, lower, SECONDS, f"processor time; {stage}, mutant {number}"
        ),
        Figure("each document, ms", each, lower, None, f"wall time, all stages, {workers} process"),
    ]


def _is_hang(finding: Finding) -> bool:
    return finding.failure.key == "hang"


def _is_meaning(finding: Finding) -> bool:
    return finding.failure.stage == "meaning" and not _is_traceback(finding)


def _is_traceback(finding: Finding) -> bool:
    return finding.failure.raised


def _is_other(finding: Finding) -> bool:
    return not (_is_hang(finding) or _is_meaning(finding) or _is_traceback(finding))


OUTCOMES = {
    "accepted": "contracts",
    "library": "libraries that are accepted",
    "rejected": "readable, with errors",
    "not YAML": "linted and mended by the server",
    "not text": "not UTF-8",
}
DEFECTS: dict[str, Callable[[Finding], bool]] = {
    "tracebacks": _is_traceback,
    f"stages over {SECONDS:g} s": _is_hang,
    "other meanings after fmt": _is_meaning,
    "other broken promises": _is_other,
}


def _print(seed: int, finding: Finding, data: bytes) -> None:
    failure = finding.failure
    print(f"\n--- mutant {finding.number} ({finding.kind}) of {finding.seed}", file=sys.stderr)
    print(f"    again: python -m bench.fuzz_language --seed {seed} --only {finding.number}",
          file=sys.stderr)  # fmt: skip
    print(f"    {failure.stage}: {failure.detail}\n    {data!r}", file=sys.stderr)


def _show(seed: int, number: int) -> int:
    """Show one mutant, its defect, and a reduced document with the same defect."""
    made = mutant(seed, number)
    failure = examine_mutant(made).failure
    if failure is None:
        sys.stdout.buffer.write(made.data)
        print(f"\nmutant {number} of {made.seed.name}: nothing is wrong", file=sys.stderr)
        return 0
    small = smaller(made, (failure.stage, failure.key), 60)
    _print(seed, Finding(number, made.kind, made.seed.name, failure), small)
    return 1


@contextmanager
def _progress(count: int) -> Iterator[Callable[[Tally], None]]:
    """Show a progress bar with the remaining time, or without a terminal a line for each tenth; and
    each finding at once."""
    from kcdsl.cli.common.output import progress_bars

    step, shown = max(1, count // 10), 0
    with progress_bars() as bars:

        def show(tally: Tally) -> None:
            nonlocal shown
            bars("mutants", tally.examined, count)
            for finding in tally.findings[shown:]:
                failure = finding.failure
                print(f"mutant {finding.number}: {failure.stage}: {failure.key}", file=sys.stderr)
            shown = len(tally.findings)
            if not sys.stderr.isatty() and tally.examined % step == 0:
                found = f"{tally.examined:,} of {count:,} mutants, {len(tally.findings)} findings"
                print(found, file=sys.stderr)

        yield show


if __name__ == "__main__":
    sys.exit(main())
