"""Refusals of the checker and of releases that no test executed, from the data of a coverage run.

    make coverage    # prints them at the end
    python -m bench.unreached .coverage

A refusal that no test reaches may be wrong, or may go away, unnoticed. Child processes are not
counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("certs/kcdsl_certs", "kcdsl/release")


def refusals(source: str) -> Iterator[tuple[range, str]]:
    """Yield the lines and the text of every raised exception in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1), ast.unparse(node.exc)


def unreached(data: CoverageData, path: Path) -> list[tuple[int, str]]:
    """Return line and text of the refusals of a module that were not executed."""
    run = set(data.lines(str(path)) or ())
    found = refusals(path.read_text(encoding="utf-8"))
    return [(lines.start, text) for lines, text in found if run.isdisjoint(lines)]


def main(file: str = ".coverage") -> int:
    """Print the refusals that no test executed, and their number."""
    data = CoverageData(file)
    data.read()
    count = total = 0
    for path in (p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))):
        total += sum(1 for _ in refusals(path.read_text(encoding="utf-8")))
        for line, text in sorted(unreached(data, path)):
            print(f"{path.relative_to(ROOT)}:{line}: {text[:120]}")
            count += 1
    print(f"{count} of {total} refusals were not executed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
