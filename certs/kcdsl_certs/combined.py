"""Several certificates about one triple, which together may cover a contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kcdsl_certs.policy import Trust
from kcdsl_certs.proofs import Outcome
from kcdsl_certs.report import Check, Report


@dataclass(frozen=True, slots=True)
class Combined:
    """The reports of one or more certificates, by file name.

    Each must be accepted by itself, so that a second certificate never repairs a first. With
    `complete`, together they must leave nothing of the contract out.
    """

    reports: tuple[tuple[str, Report], ...]
    complete: bool = False
    trust: Trust | None = None
    """What the check went by, and where that came from."""

    @property
    def outside(self) -> tuple[str, ...]:
        """Return the results of the contract that no certificate covers."""
        first, *rest = (report.outside for _, report in self.reports)
        return tuple(label for label in first if all(label in other for other in rest))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return what any of the certificates counts on, each once."""
        return tuple(dict.fromkeys(text for _, r in self.reports for text in r.assumptions))

    @property
    def coverage(self) -> Check | None:
        """Return the step that looks at all certificates together; None where there is one."""
        if len(self.reports) == 1:
            return None
        if not all(report.accepted for _, report in self.reports):
            return Check("coverage", Outcome.NOT_RUN, "step/earlier-failed")
        lacking = ", ".join(self.outside)
        if lacking and self.complete:
            return Check("coverage", Outcome.FAILED, "clause/missing", f"not covered: {lacking}")
        return Check("coverage", Outcome.OK, "", f"not covered: {lacking}" if lacking else "")

    @property
    def accepted(self) -> bool:
        """Say whether every certificate is valid and, with `complete`, nothing is left out."""
        if not self.reports or not all(report.accepted for _, report in self.reports):
            return False
        return not (self.complete and self.outside)

    @property
    def verdict(self) -> str:
        """Return "valid" or "invalid"."""
        return "valid" if self.accepted else "invalid"

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.check/2`: that of the one report, or all of them together."""
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
