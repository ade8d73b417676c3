"""The first hour with a user's model: supported inputs, proofs, measurements and costs.

Each section is a module with a function `figures()`; `--only NAME` runs some of them.

    make bench-first-hour
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from bench.common import Figure, report

SECTIONS = {
    "road": "bench.first_hour_road",
    "architectures": "bench.first_hour_architectures",
    "verify": "bench.first_hour_verify",
    "rollouts": "bench.first_hour_rollouts",
}
"""The module of each section of the table."""


def main() -> int:
    """Measure the sections and report them as one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section")
    wanted = parser.parse_args().only or list(SECTIONS)
    found: list[Figure] = []
    for name in wanted:
        measure: Callable[[], list[Figure]] = import_module(SECTIONS[name]).figures
        found += measure()
    whole = len(wanted) == len(SECTIONS)
    return report("first_hour" if whole else f"first_hour_{'_'.join(wanted)}", found)


if __name__ == "__main__":
    sys.exit(main())
