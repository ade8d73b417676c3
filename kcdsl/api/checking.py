"""Checking certificates: signature, triple, freshness and coverage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kcdsl.api.results import Shows

if TYPE_CHECKING:
    from kcdsl_certs.verification.report import Combined

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CheckResult(Shows):
    """What the checks say of certificates, step by step."""

    combined: Combined

    @property
    def valid(self) -> bool:
        """Say whether every certificate is valid and nothing that was demanded is left out."""
        return self.combined.accepted

    def __bool__(self) -> bool:
        return self.valid

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why certificates are not valid, each reason once."""
        found = (reason for _, report in self.combined.reports for reason in report.reasons)
        return tuple(dict.fromkeys(found))

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.check/2`."""
        return self.combined.to_json()

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each step of each certificate."""
        return [
            {
                "certificate": name,
                "step": step.name,
                "outcome": step.outcome.value,
                "reason": step.reason,
                "detail": step.detail,
            }
            for name, report in self.combined.reports
            for step in report.checks
        ]


def check(
    certificates: PathLike | Sequence[PathLike],
    *,
    key: PathLike | Sequence[PathLike] = (),
    contract: PathLike | None = None,
    recheck: bool = False,
    complete: bool = False,
    signature_only: bool = False,
    policy: PathLike | None = None,
    kernels: PathLike | None = None,
    checkpoint: PathLike | None = None,
    at: str | None = None,
) -> CheckResult:
    """Verify certificates about one triple, as `kcdsl check` with the options of these names.

    `contract` is the contract in force, by default that of the current folder. Raises Refusal for
    what cannot be read; a certificate that is not valid gives a result that is false.
    """
    from kcdsl.cli.commands.check import CheckCommand

    def named(path: PathLike | None) -> str | None:
        return None if path is None else os.fspath(path)

    def all_of(paths: PathLike | Sequence[PathLike]) -> tuple[str, ...]:
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        return tuple(os.fspath(path) for path in several)

    command = CheckCommand(
        certificates=all_of(certificates),
        key=all_of(key),
        contract=named(contract),
        recheck=recheck,
        complete=complete,
        signature_only=signature_only,
        policy=named(policy),
        kernels=named(kernels),
        checkpoint=named(checkpoint),
        at=at,
    )
    return command.checked()
