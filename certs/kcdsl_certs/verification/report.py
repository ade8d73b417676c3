"""Reports of a verification: named steps, each with an outcome and a stable reason.

Several certificates about one triple may together cover a contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import Trust
from kcdsl_certs.statement import Predicate
from kcdsl_certs.verification.proofs import StepOutcome

STEPS = (
    "bundle",
    "encoding",
    "signatures",
    "threshold",
    "payload-type",
    "payload",
    "statement-type",
    "subject",
    "components",
    "validity",
    "sequence",
    "contract",
    "clauses",
    "stage",
    "proofs",
    "evidence",
    "recount",
)
TRANSFER_STEPS = (*STEPS[:12], "base", "weights", *STEPS[12:15])
"""The steps of a weights transfer, including the earlier certificate and the moved weights."""
EARLIER_FAILED = "step/earlier-failed"
"""The reason of a step that was not run because an earlier one failed."""
_OPTIONAL = frozenset({"sequence", "stage", "proofs", "evidence", "recount"})
"""Steps that may be skipped if there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class Check:
    """One named step. `reason` is stable and empty unless the step failed or was not run."""

    name: str
    outcome: StepOutcome
    reason: str = ""
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        """Return plain data."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a verification; `predicate` is None unless its signature verified."""

    checks: tuple[Check, ...]
    certificate: str | None = None
    predicate: Predicate | None = None
    signers: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    """Clauses of the contract outside the scope of a partial certificate."""
    steps: tuple[str, ...] = STEPS
    """The steps of a certificate, or of a weights transfer."""
    assumptions: tuple[str, ...] = ()
    """Unchecked assumptions of the signed results, for people."""

    @property
    def accepted(self) -> bool:
        """Return whether every step that must run is ok and none failed."""
        return tuple(c.name for c in self.checks) == self.steps and all(
            c.outcome is StepOutcome.OK
            or (c.outcome is StepOutcome.NOT_RUN and c.name in _OPTIONAL)
            for c in self.checks
        )

    @property
    def verdict(self) -> str:
        """Return "valid" or "invalid"."""
        return "valid" if self.accepted else "invalid"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reason code of every failed step, in order."""
        return tuple(c.reason for c in self.checks if c.outcome is StepOutcome.FAILED)

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.check/2`."""
        return {
            "schema": "kcdsl.check/2",
            "verdict": self.verdict,
            "certificate": self.certificate,
            "signers": list(self.signers),
            "outside": list(self.outside),
            "assumptions": list(self.assumptions),
            "checks": [check.to_json() for check in self.checks],
        }


def refused(step: str, rejection: Rejected) -> Report:
    """Return the report of a verification that was refused at this step before it began."""
    return Report(
        Log([Check(step, StepOutcome.FAILED, rejection.reason, rejection.detail)]).finish()
    )


class NotRun(Exception):
    """Raised by a step that has nothing to check, with the reason."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason)


class Stop(Exception):
    """Raised to end the steps after a failure."""


@dataclass(slots=True)
class Log:
    """Runs steps in order; any exception is a failure of its step."""

    checks: list[Check] = field(default_factory=list)

    def run(self, name: str, step: Callable[[], str], *, stop: bool = False) -> None:
        self.checks.append(self._outcome(name, step))
        if stop and self.checks[-1].outcome is not StepOutcome.OK:
            raise Stop

    def _outcome(self, name: str, step: Callable[[], str]) -> Check:
        try:
            return Check(name, StepOutcome.OK, "", step())
        except Rejected as error:
            return Check(name, StepOutcome.FAILED, error.reason, error.detail)
        except NotRun as error:
            return Check(name, StepOutcome.NOT_RUN, error.reason, error.detail)
        except Exception as error:
            return Check(
                name, StepOutcome.FAILED, "internal/error", f"{type(error).__name__}: {error}"
            )

    def finish(self, steps: tuple[str, ...] = STEPS) -> tuple[Check, ...]:
        done = {c.name: c for c in self.checks}
        skipped = (Check(n, StepOutcome.NOT_RUN, EARLIER_FAILED) for n in steps)
        return tuple(done.get(check.name, check) for check in skipped)


@dataclass(frozen=True, slots=True)
class Combined:
    """The reports of one or more certificates, by file name.

    Each must be accepted separately, so a certificate cannot repair another one. With `complete`,
    together they must cover the whole contract.
    """

    reports: tuple[tuple[str, Report], ...]
    complete: bool = False
    trust: Trust | None = None
    """The trust settings of the check, and their origin."""

    @property
    def outside(self) -> tuple[str, ...]:
        """Return the results of the contract that no certificate covers."""
        first, *rest = (report.outside for _, report in self.reports)
        return tuple(label for label in first if all(label in other for other in rest))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions of all certificates, each once."""
        return tuple(dict.fromkeys(text for _, r in self.reports for text in r.assumptions))

    @property
    def coverage(self) -> Check | None:
        """Return the step about all certificates together; None for a single certificate."""
        if len(self.reports) == 1:
            return None
        if not all(report.accepted for _, report in self.reports):
            return Check("coverage", StepOutcome.NOT_RUN, EARLIER_FAILED)
        lacking = ", ".join(self.outside)
        if lacking and self.complete:
            return Check(
                "coverage", StepOutcome.FAILED, "clause/missing", f"not covered: {lacking}"
            )
        return Check("coverage", StepOutcome.OK, "", f"not covered: {lacking}" if lacking else "")

    @property
    def accepted(self) -> bool:
        """Return whether every certificate is valid and, with `complete`, nothing is missing."""
        if not self.reports or not all(report.accepted for _, report in self.reports):
            return False
        return not (self.complete and self.outside)

    @property
    def verdict(self) -> str:
        """Return "valid" or "invalid"."""
        return "valid" if self.accepted else "invalid"

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.check/2`: of a single report, or of all together."""
        coverage = self.coverage
        trust = {} if self.trust is None else {"trust": self.trust.to_json()}
        if coverage is None:
            ((_, report),) = self.reports
            return {**report.to_json(), "verdict": self.verdict, **trust}
        parts = [{"file": name, **report.to_json()} for name, report in self.reports]
        checks = [{"file": part["file"], **check} for part in parts for check in part["checks"]]
        return {
            "schema": "kcdsl.check/2",
            "verdict": self.verdict,
            "outside": list(self.outside),
            "assumptions": list(self.assumptions),
            "certificates": parts,
            "checks": [*checks, coverage.to_json()],
            **trust,
        }
