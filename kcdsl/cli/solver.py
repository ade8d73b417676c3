"""The backend that asks z3, for commands that need it, found through the catalogue."""

from __future__ import annotations

import argparse
from typing import Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_BACKEND
from kcdsl.route.catalogue import catalogue

QUESTION_MS = 2000
"""The most that a single question may take."""


def solver_backend(purpose: str) -> Any:
    """Return the backend `smt`; raises Refusal where it, or what it needs, is not installed."""
    spec = next((spec for spec in catalogue() if spec.name == "smt"), None)
    if spec is None or spec.missing():
        lacking = "the backend smt" if spec is None else ", ".join(spec.missing())
        raise refuse(
            NO_BACKEND,
            f"{purpose} needs {lacking}, which is not installed",
            help="pip install z3-solver",
        )
    return spec.load()


def add_timeout(parser: argparse.ArgumentParser, help: str) -> None:
    """Declare `--timeout SECONDS`, the time for all questions; 60 by default."""
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help=f"{help} (default: 60)"
    )


def limits(timeout: float) -> tuple[int, int]:
    """Return the milliseconds for each question and for all of them."""
    total = max(1, int(1000 * timeout))
    return min(total, QUESTION_MS), total


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.001 <= value <= 1e6:
        raise argparse.ArgumentTypeError("a number of seconds from 0.001 to 1,000,000")
    return value
