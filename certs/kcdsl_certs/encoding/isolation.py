"""Keep the working folder out of what the checker imports."""

from __future__ import annotations

import os
import sys


def isolate() -> None:
    """Drop the working folder from where modules are looked for.

    `python -m kcdsl_certs`, and an entry of `PYTHONPATH` that is empty or relative, have Python
    look there first, and beside a certificate that came from elsewhere may be an `rfc8785.py`. An
    absolute entry of `PYTHONPATH` stays: its user wrote it. By now Python has imported parts of its
    own library; with `python -I -m kcdsl_certs` it found those in their place as well.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    chosen = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(e)]
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    library = os.path.dirname(os.__file__)
    before = sys.path.index(library) if library in sys.path else len(sys.path)
    sys.path[:before] = [
        entry for entry in sys.path[:before] if entry in (*chosen, here) or not _working(entry)
    ]


def _working(entry: str) -> bool:
    try:
        return entry == "" or os.path.samefile(entry, os.curdir)
    except OSError:
        return False
