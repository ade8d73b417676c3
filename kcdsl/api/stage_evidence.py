"""Collecting the evidence of a stage: checks certificates, reads reports and windows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.certificates import CheckSettings, check_certificates, read_certificate
from kcdsl.api.contract import Contract, PathLike
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import PROMOTION_EVIDENCE
from kcdsl.model.files import Artefacts
from kcdsl.release.promotion import DemandedObligation, EvidenceDocument
from kcdsl.release.promotion.certificates import document_of, states_failure
from kcdsl.release.promotion.documents import OtherSubject, read_evidence, schema_of
from kcdsl.release.requirements import build_expectation, read_kernels

if TYPE_CHECKING:
    from kcdsl_certs.signatures import Trust
    from kcdsl_certs.statement import Expectation, Triple
    from kcdsl_certs.verification.report import Report


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """Evidence of a stage before its candidate is known.

    Args:
    expected: the deployed triple; None if files that must not be trusted prevented it, with the
    reason in `invalid`.
    certificates: those that are valid or state a failure, by file, with their bundles.
    others: the files of reports and windows.
    invalid: why certificates are not valid, by file.
    trust: the trust settings of the check.
    """

    expected: Expectation | None
    certificates: Mapping[str, tuple[Report, bytes]]
    others: tuple[Path, ...]
    invalid: Mapping[str, tuple[str, ...]]
    trust: Trust | None

    @property
    def triple(self) -> Triple | None:
        """Return the triple of the certificates; None without certificates.

        Raises Refusal (KC698) where they have different triples, for instance of several hosts.
        """
        stated = {
            report.predicate.triple.digest: report.predicate.triple
            for report, _ in self.certificates.values()
            if report.predicate is not None
        }
        if len(stated) > 1:
            raise refuse(
                PROMOTION_EVIDENCE,
                "the certificates are about several triples, such as those of several hosts",
                help="let one machine verify and evaluate, or promote its certificates alone",
            )
        return next(iter(stated.values()), None)

    @property
    def relaxed_parts(self) -> frozenset[str]:
        """Return the parts of kernels that the policy ignores."""
        return frozenset() if self.trust is None else self.trust.rules.relaxed_parts

    def documents(
        self, demands: Sequence[DemandedObligation], candidate: Triple, stage: str
    ) -> tuple[tuple[EvidenceDocument, ...], dict[str, str]]:
        """Return the documents about a candidate, and why other files are ignored; raises Refusal
        for a file that is no evidence."""
        assert self.expected is not None
        found = [
            document_of(name, report, demands, self.expected)
            for name, (report, _) in self.certificates.items()
        ]
        unused: dict[str, str] = {}
        for path in self.others:
            try:
                found.append(
                    read_evidence(
                        path, demands, candidate, self.expected.inputs, stage, self.relaxed_parts
                    )
                )
            except OtherSubject as error:
                unused[str(path)] = str(error)
        return tuple(found), unused


def gather(
    contract: Contract, evidence: Iterable[PathLike], checks: CheckSettings
) -> StageEvidence:
    """Check the certificates among the evidence as `kcdsl check` does, with these settings.

    Raises Refusal for a file that cannot be read.
    """
    names = list(dict.fromkeys(os.fspath(name) for name in evidence))
    signed = [name for name in names if schema_of(Path(name)) is None]
    others = tuple(Path(name) for name in names if name not in signed)
    if not signed:
        kernels = None if checks.kernels is None else read_kernels(Path(checks.kernels))
        given = (checks.checkpoint, checks.infer_checkpoint)
        weights, served = (None if path is None else Path(path) for path in given)
        expected = build_expectation(
            contract.program,
            Artefacts.of(contract.base),
            fingerprints=kernels,
            checkpoint=weights,
            served=served,
        )
        return StageEvidence(expected, {}, others, {}, None)
    told: list[Expectation] = []
    checks = replace(checks, promoting=True, expected=told.append)
    checked = check_certificates(signed, checks).combined
    found: dict[str, tuple[Report, bytes]] = {}
    invalid: dict[str, tuple[str, ...]] = {}
    for name, report in checked.reports:
        if report.predicate is not None and (report.accepted or states_failure(report)):
            found[name] = (report, read_certificate(Path(name)))
        else:
            invalid[name] = report.reasons or ("statement/transfer",)
    return StageEvidence(told[0] if told else None, found, others, invalid, checked.trust)
