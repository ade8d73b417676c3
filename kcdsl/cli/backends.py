"""`kcdsl backends`: which backends there are, what they decide, and what they lack."""

from __future__ import annotations

import argparse
import json

from kcdsl.exits import Exit
from kcdsl.route.catalogue import BackendSpec, catalogue

HELP = "list the backends, what they decide and what they lack"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON (kcdsl.backends/1)")


def run(arguments: argparse.Namespace) -> Exit:
    """Print the catalogue; nothing heavy is imported."""
    specs = catalogue()
    if arguments.json:
        records = [_record(spec) for spec in specs]
        document = {"schema": "kcdsl.backends/1", "backends": records}
        print(json.dumps(document, indent=2))
        return Exit.HELD
    for spec in specs:
        missing = spec.missing()
        state = f"lacks {', '.join(missing)}" if missing else "ready"
        print(f"{spec.name}  ({state})")
        print(f"  {spec.summary}")
        print(f"  decides {', '.join(sorted(f.value for f in spec.fragments))}")
    return Exit.HELD


def _record(spec: BackendSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "fragments": sorted(fragment.value for fragment in spec.fragments),
        "needs": list(spec.needs),
        "missing": list(spec.missing()),
        "rank": spec.rank,
    }
