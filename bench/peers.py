"""Comparison with benchmarks and verifiers of other projects: one machine, the same goals.

Each section is a module with a function `figures`; `--only NAME` runs some of them. Networks and
published figures belong to other people and are not in this repository; a section is left out, with
a message on stderr, if its environment variable does not name their folder.

| section | module | data |
|---|---|---|
| acas | bench/equivalence.py | `KCDSL_ACAS` |
| neurodiff | bench/neurodiff_splits.py | `KCDSL_NEURODIFF` |
| blocks | bench/peers_blocks.py | the package of MiniLM, which `make setup` installs |
| qebverif | bench/qebverif.py | `KCDSL_QEBVERIF` |

    KCDSL_ACAS=FOLDER KCDSL_NEURODIFF=FOLDER KCDSL_QEBVERIF=FOLDER make bench-peers
    python -m bench.peers --only blocks --case "tiny LM norm_0"
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench import equivalence, neurodiff_splits, peers_blocks, qebverif
from bench.common import Figure, report
from bench.neurodiff import FOLDER as NEURODIFF

SECONDS = 20
"""Processor time of a method on a pair of networks of ACAS-Xu."""
SECTIONS: dict[str, tuple[str, Callable[[Path, str], list[Figure]]]] = {
    "acas": ("KCDSL_ACAS", lambda folder, _: equivalence.figures(folder, SECONDS)),
    "neurodiff": (NEURODIFF, lambda folder, _: neurodiff_splits.figures(folder)),
    "blocks": ("", lambda _, case: peers_blocks.figures(case)),
    "qebverif": ("KCDSL_QEBVERIF", lambda folder, _: qebverif.figures(folder)),
}
"""The environment variable of the folder of each section, and its module."""


def main() -> int:
    """Measure the sections with available data and report them as one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=tuple(SECTIONS), help="a section")
    parser.add_argument("--case", default="", help="blocks whose name contains this")
    asked = parser.parse_args()
    wanted = asked.only or list(SECTIONS)
    found: list[Figure] = []
    for name in wanted:
        variable, measure = SECTIONS[name]
        folder = os.environ.get(variable, "") if variable else "."
        if not folder or not Path(folder).is_dir():
            print(f"bench peers: {name} is left out: set {variable} to its folder", file=sys.stderr)
            continue
        found += measure(Path(folder), asked.case)
    if not found:
        return 2
    whole = len(wanted) == len(SECTIONS)
    return report("peers" if whole else f"peers_{'_'.join(wanted)}", found)


if __name__ == "__main__":
    sys.exit(main())
