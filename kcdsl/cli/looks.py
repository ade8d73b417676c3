"""The options that say how often growing data is looked at."""

from __future__ import annotations

import argparse

MOST_LOOKS = 10_000


def add_looks(parser: argparse.ArgumentParser) -> None:
    """Add `--looks K` and `--anytime`, of which one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--looks",
        type=_looks,
        default=1,
        metavar="K",
        help="evaluations of growing data that share the error, this one included (default: 1)",
    )
    group.add_argument(
        "--anytime", action="store_true", help="limits that hold at every look, however many"
    )


def _looks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST_LOOKS:
        raise argparse.ArgumentTypeError(f"must be between 1 and {MOST_LOOKS}")
    return value
