"""The options that say how often growing data is looked at."""

from __future__ import annotations

import argparse

from kcdsl.cli.numbers import whole

MOST_LOOKS = 10_000


def add_looks(parser: argparse.ArgumentParser) -> None:
    """Add `--looks K` and `--anytime`, of which one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--looks",
        type=whole(1, MOST_LOOKS),
        default=1,
        metavar="K",
        help="evaluations of growing data that share the error, this one included (default: 1)",
    )
    group.add_argument(
        "--anytime", action="store_true", help="limits that hold at every look, however many"
    )
