"""Arguments shared by several commands, and the parsers of their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.common.declare import Command, argument, choice, value, values
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import FAMILIES, USAGE, all_codes
from kcdsl.source.config import load_config

if TYPE_CHECKING:
    from kcdsl.release.requirements import Fingerprints
    from kcdsl_certs.signatures import Trust


# --- readers of values ----------------------------------------------------------------------------


LARGEST_SEED = 2**63 - 1
"""The largest seed of every random number generator."""
MOST_DIGITS = 400
"""The largest magnitude of the decimal exponent of a number: beyond the range of float64."""


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the parser of an integer in a range."""
    ends = f"of at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {ends}, not {text!r}")
        return value

    return read


count = whole(1)
"""Read how many of something, at least one."""
thread_count = whole(1, 1024)
"""Read a number of threads."""
seed = whole(0, LARGEST_SEED)
"""Read a seed."""


def number(text: str) -> float:
    """Return a finite number, or NaN for any other text, with which no comparison holds."""
    try:
        found = float(text)
    except ValueError:
        return float("nan")
    return found if abs(found) < float("inf") else float("nan")


def _real(what: str, admits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the parser of a finite number that satisfies `admits`."""

    def read(text: str) -> float:
        found = number(text)
        if not admits(found):
            raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")
        return found

    return read


positive = _real("a positive number", lambda found: found > 0)
not_negative = _real("a number that is not negative", lambda found: found >= 0)
probability = _real("a number between 0 and 1", lambda found: 0 < found < 1)
seconds = _real("a number of seconds from 0.001 to 1,000,000", lambda found: 0.001 <= found <= 1e6)
"""Read a time that a solver may take."""


def gigabytes(text: str) -> int:
    """Return a size of memory in bytes."""
    found = not_negative(text)
    if not 0.1 <= found < 2**20:
        raise argparse.ArgumentTypeError("must be at least 0.1")
    return int(found * 2**30)


def fraction(text: str) -> Fraction | None:
    """Return the exact value of a decimal number or a quotient of integers; None for any other
    text, and for numbers beyond the range of float64."""
    try:
        above, quotient, below = text.partition("/")
        numbers = [Decimal(part.strip()) for part in ((above, below) if quotient else (above,))]
    except InvalidOperation:
        return None
    if not all(n.is_finite() and abs(n.adjusted()) <= MOST_DIGITS for n in numbers):
        return None
    first, *rest = map(Fraction, numbers)
    if not rest:
        return first
    return None if rest[0] == 0 else first / rest[0]


def percentile(text: str) -> Fraction:
    """Return a percentile as a share of 1."""
    found = fraction(text)
    if found is None or not 0 < found < 100 or (found * 10**7).denominator != 1:
        raise argparse.ArgumentTypeError("must be between 0 and 100, with at most 7 decimals")
    return found / 100


def requirement(text: str) -> tuple[str, str, Fraction]:
    """Return metric, comparison and limit of a requirement such as `kl <= 0.05`."""
    for op in ("<=", ">=", "<", ">"):
        name, found, limit = text.partition(op)
        if found:
            exact = fraction(limit)
            if name.strip() and exact is not None and abs(exact) <= sys.float_info.max:
                return name.strip(), op, exact
            break
    raise argparse.ArgumentTypeError(
        f"must be METRIC <= NUMBER, or with >=, < or >, not {text!r}; numbers are in base units"
    )


# --- options --------------------------------------------------------------------------------------


PLAIN_HTTP = "use HTTP without TLS for registries, such as one on this machine"
KERNELS = (
    "kernel fingerprints, the kernels.json of `kcdsl evaluate`, instead of those of this machine"
)
RECHECK = "re-derive every proof with the independent checker"


def contract_argument() -> Any:
    """Declare the contract that a command is about."""
    return argument("CONTRACT", "default: the one here", "?")


def code_words() -> tuple[str, ...]:
    """Return the words for diagnostic codes: every code and every family."""
    return (*FAMILIES, *(code.id for code in all_codes()))


class OutputFormat(StrEnum):
    """The forms of what a command prints."""

    TEXT = "text"
    JSON = "json"


def format_option() -> Any:
    """Declare `--format` of a command that prints text, or one JSON document."""
    return choice(OutputFormat, "output format", OutputFormat.TEXT)


def slice_option() -> Any:
    """Declare `--slice`."""
    return values("NAME", "only this slice", name="slice")


def seed_option(what: str = "sampling and resampling") -> Any:
    """Declare `--seed`."""
    return value("N", f"seed of {what}", 0, read=seed)


def output_option(metavar: str, help: str, default: str | None = None) -> Any:
    """Declare `-o` for a FILE or a DIR."""
    return value(metavar, help, default, short="-o", writes=True)


def register_option(what: str) -> Any:
    """Declare `--register`."""
    help = (
        f"the register {what}: a file, or postgresql://HOST/DATABASE (default: `register` of your"
        " own configuration)"
    )
    return value("URL", help)


def register_place(given: str | None) -> str:
    """Return the location of the register: as given, else from the user's own configuration; raises
    Refusal where neither names one."""
    found = given if given is not None else load_config(Path()).register_place
    if found is None:
        raise refuse(
            USAGE,
            "no register is named",
            help="name it, --register FILE, or `register` in your own configuration; "
            "`kcdsl register init` makes one",
        )
    return found


def fingerprints_in(kernels: str | None) -> Fingerprints | None:
    """Return the fingerprints of the file that `--kernels` names."""
    if kernels is None:
        return None
    from kcdsl.release.requirements import read_kernels

    return read_kernels(Path(kernels))


# --- options that go together ---------------------------------------------------------------------


class Stage(StrEnum):
    """The stage of a promotion that a certificate is for."""

    OFFLINE_CI = "offline-ci"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class TrustOptions(Command):
    """Whom a check trusts."""

    policy: str | None = value(
        "FILE",
        "trust policy: keys, their permissions, and revocations (default: $KCDSL_POLICY, then "
        "policy.toml of the user's configuration; never a file of the contract's folder)",
    )
    key: tuple[str, ...] = values(
        "PUB",
        "a trusted public key, repeatable; only these keys of the policy are trusted, within its "
        "limits",
    )
    threshold: int | None = value(
        "N", "number of distinct keys that must have signed; at least that of the policy", read=int
    )
    revocations: tuple[str, ...] = values(
        "FILE", "list of revoked certificates and keys, in addition to the policy; repeatable"
    )

    def trust_for(self, folder: Path) -> Trust:
        """Return the trust settings of a check of a contract in a folder; raises Refusal."""
        from kcdsl.release.signing import trusted

        return trusted(self.policy, self.key, self.threshold, self.revocations, folder)
