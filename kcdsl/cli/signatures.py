"""Options about signatures: who signs, and whom a check trusts."""

from __future__ import annotations

import argparse
from datetime import timedelta

from kcdsl.cli.numbers import whole

STAGES = ("offline-ci", "shadow", "canary", "full")
DEFAULT_DAYS = 90
LONGEST_DAYS = 3660


def add_trust_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say what is trusted."""
    parser.add_argument(
        "--policy",
        metavar="FILE",
        help="which keys may sign what, and what is revoked (default: $KCDSL_POLICY, then "
        "policy.toml of the user's configuration; never a file of the contract's folder)",
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="PUB",
        help="a trusted public key, repeatable: of those in the policy only these, within the "
        "limits that it sets for them",
    )
    parser.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help="how many distinct keys must have signed; not below that of the policy",
    )
    parser.add_argument(
        "--revocations",
        action="append",
        default=[],
        metavar="FILE",
        help="certificates and keys that are revoked, beside those of the policy; repeatable",
    )


def add_signing_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of commands that write statements."""
    add_sign_option(parser)
    parser.add_argument(
        "--stage",
        choices=STAGES,
        default=STAGES[0],
        help=f"what the certificate is for (default: {STAGES[0]})",
    )
    parser.add_argument(
        "--valid-for",
        type=_days,
        default=timedelta(days=DEFAULT_DAYS),
        metavar="DAYS",
        help=f"how long the certificate is valid (default: {DEFAULT_DAYS})",
    )


def add_sign_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--sign`."""
    parser.add_argument(
        "--sign",
        action="append",
        default=[],
        metavar="KEY",
        help="sign in this process, which also ran the kernels, by this private key; repeatable. "
        "`kcdsl sign` keeps the key away from them (default: a statement that it signs)",
    )


def _days(text: str) -> timedelta:
    return timedelta(days=whole(1, LONGEST_DAYS)(text))
