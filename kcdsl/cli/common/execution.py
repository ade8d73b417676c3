"""Options of the commands that run kernels and write certificates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar

from kcdsl.cli.common.declare import Command, choice, switch, value, values
from kcdsl.cli.common.options import Stage, count, whole
from kcdsl.route.catalogue import ENGINES

MOST_LOOKS = 10_000
LONGEST_DAYS = 3660


class Device(StrEnum):
    """Devices that kernels run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Engine(StrEnum):
    """Places where workers run."""

    PROCESSES = ENGINES[0]
    RAY = ENGINES[1]


def device_option(default: Device = Device.AUTO) -> Any:
    """Declare `--device`."""
    return choice(Device, "device of the kernels; auto uses CUDA if available", default)


def jobs_option(what: str, usual: str) -> Any:
    """Declare `--jobs`; `usual` describes the default."""
    return value(
        "N", f"number of {what} run in parallel; 1: in this process (default: {usual})", read=count
    )


def engine_option(what: str) -> Any:
    """Declare `--engine`."""
    help = f"where {what} run: in processes of this machine, or on a ray cluster"
    return choice(Engine, help, Engine.PROCESSES)


@dataclass(frozen=True, kw_only=True)
class CodeOptions(Command):
    """A command that runs Python code of its contract, where the user allows that."""

    epilog: ClassVar[str | None] = (
        "This command runs code of the contract, once that is allowed: a model factory, and "
        "metrics of its own. `kcdsl explain security` says when."
    )
    allow_code: bool = switch(
        "run the Python code that the contract names, with your privileges (default: only if the "
        "contract is below trusted-folders of your own configuration)"
    )


@dataclass(frozen=True, kw_only=True)
class Looks(Command):
    """The number of looks at growing data."""

    looks: int = value(
        "K",
        "number of evaluations of growing data that share the error, including this one",
        1,
        read=whole(1, MOST_LOOKS),
        group="looks",
    )
    anytime: bool = switch("use limits that hold at any number of looks", group="looks")

    @property
    def looks_taken(self) -> int | None:
        """Return the number of looks that share the error; None for any number."""
        return None if self.anytime else self.looks


@dataclass(frozen=True, kw_only=True)
class SigningOptions(Command):
    """Options of commands that sign what they write."""

    sign: tuple[str, ...] = values(
        "KEY",
        "private key to sign with in this process, which also runs the kernels; repeatable. "
        "`kcdsl sign` keeps the key out of that process (default: write a statement for it)",
    )


@dataclass(frozen=True, kw_only=True)
class CertificateOptions(SigningOptions):
    """Options of commands that write certificates."""

    stage: Stage = choice(Stage, "stage of use of the certificate", Stage.OFFLINE_CI)
    valid_for: int = value(
        "DAYS", "validity of the certificate in days", 90, read=whole(1, LONGEST_DAYS)
    )

    @property
    def lifetime(self) -> timedelta:
        """Return how long the certificate is valid."""
        return timedelta(days=self.valid_for)
