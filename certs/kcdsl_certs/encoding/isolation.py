"""Keep the working folder out of the module search path of the checker."""

from __future__ import annotations

import os
import sys


def isolate() -> None:
    """Remove the working folder from the module search path.

    With `python -m kcdsl_certs`, or an empty or relative entry of `PYTHONPATH`, Python searches it
    first, and an `rfc8785.py` may lie beside an untrusted certificate. Absolute entries of
    `PYTHONPATH` are kept, since the user set them. Parts of the standard library are imported
    before this call; `python -I -m kcdsl_certs` protects those imports, too.
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
