"""`kcdsl check`: verify signature, triple, freshness and coverage of certificates."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kcdsl.cli.common import argument, choice, switch, value
from kcdsl.cli.common.options import (
    KERNELS,
    PLAIN_HTTP,
    RECHECK,
    OutputFormat,
    Stage,
    TrustOptions,
    format_option,
    register_option,
)
from kcdsl.cli.common.output import long_progress, print_json, write_text
from kcdsl.diagnostics.render.terminal import (
    BOLD,
    DIM,
    GREEN,
    RED,
    json_text,
    one_line,
    paint,
    wants_colour,
    width_of,
)
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl_certs.statement import Expectation
    from kcdsl_certs.verification.report import Combined, Report


_STYLES = {"ok": GREEN, "failed": f"{BOLD};{RED}", "not_run": DIM}
OTHER_KERNELS = (
    "the kernels of this machine were compared; for those of another machine or a server, name the"
    "\nkernels.json of `kcdsl evaluate` there by --kernels"
)


@dataclass(frozen=True, kw_only=True)
class CheckCommand(TrustOptions):
    """Verify signature, triple, freshness and coverage of a certificate."""

    certificates: tuple[str, ...] = argument(
        "CERT",
        "certificates about one triple, or oci://HOST/NAME@sha256:DIGEST for those that are"
        " attached to an image",
        "+",
    )
    contract: str | None = value("CONTRACT", "the contract in force")
    recheck: bool = switch(RECHECK)
    signature_only: bool = switch(
        "check only the signed statement, without its proof and evidence files"
    )
    complete: bool = switch(
        "require every clause of the contract, not only those that the certificates cover"
    )
    kernels: str | None = value("FILE", KERNELS)
    checkpoint: str | None = value("FILE", "the weights, instead of those the contract names")
    infer_checkpoint: str | None = value(
        "FILE", "the weights of the inference kernel, if the contract names separate ones"
    )
    base: str | None = value("FILE", "the earlier weights of a weights transfer")
    stage: Stage | None = choice(Stage, "the stage to check for")
    minimum_sequence: int | None = value(
        "N", "refuse certificates with a lower sequence number", read=int
    )
    at: str | None = value("TIME", "check as of this time, 2026-11-30T12:00:00Z")
    plain_http: bool = switch(PLAIN_HTTP)
    register: str | None = register_option("where each certificate must be in force")
    write_expectation: str | None = value(
        "FILE",
        "also write the expectation for `python -m kcdsl_certs check --expect FILE`",
        writes=True,
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Check certificates: 0 valid, 4 invalid; unreadable files are refused (2)."""
        from kcdsl.api.certificates import CheckSettings, check_certificates

        settings = self.settings(
            CheckSettings, expected=self._write_expectation, progress=long_progress
        )
        report = check_certificates(self.certificates, settings).combined
        if self.format is OutputFormat.JSON:
            print_json(report.to_json())
        else:
            print_report(report)
            refused = (reason for _, one in report.reports for reason in one.reasons)
            if self.kernels is None and any("/kernel-" in reason for reason in refused):
                print(OTHER_KERNELS)
            if self.signature_only and report.accepted:
                print("checked: only the signed statement, no proof and no evidence file")
        return Exit.HELD if report.accepted else Exit.CERTIFICATE_INVALID

    def _write_expectation(self, expectation: Expectation) -> None:
        if self.write_expectation is not None:
            write_text(json_text(expectation.to_json(), indent=1), self.write_expectation)


def print_report(combined: Combined) -> None:
    """Print the results for each certificate, and for all of them."""
    colour = wants_colour(sys.stdout)
    reasons: list[str] = []
    for name, report in combined.reports:
        print(paint(one_line(f"certificate {name}"), BOLD, colour))
        _print_steps(report, colour)
        reasons.extend(report.reasons)
    if combined.coverage is not None and combined.coverage.reason == "clause/missing":
        reasons.append(combined.coverage.reason)
    if combined.accepted:
        for text in combined.assumptions:
            print(one_line(f"assumed: {' '.join(text.split())}"))
    if combined.trust is not None:
        print(one_line(f"trust: {combined.trust}"))
    style = f"{BOLD};{GREEN if combined.accepted else RED}"
    why = f": {', '.join(dict.fromkeys(reasons))}" if reasons else ""
    print(paint(combined.verdict, style, colour) + one_line(why))
    if all(report.accepted for _, report in combined.reports) and combined.outside:
        print(one_line(f"not covered: {', '.join(combined.outside)}"))


def _print_steps(report: Report, colour: bool) -> None:
    """Print a line for each step, and one for all steps that were not run; lines are folded only on
    a terminal."""
    from kcdsl_certs.verification.report import EARLIER_FAILED

    left = max((len(check.name) for check in report.checks), default=0) + len("    not run  ")
    stopped = [check.name for check in report.checks if check.reason == EARLIER_FAILED]
    for check in report.checks:
        if check.reason == EARLIER_FAILED:
            continue
        outcome = check.outcome.value
        shown = paint(f"{outcome.replace('_', ' '):<7}", _STYLES[outcome], colour)
        said = one_line(": ".join(part for part in (check.reason, check.detail) if part))
        if sys.stdout.isatty():
            from textwrap import wrap

            said = f"\n{' ' * left}".join(wrap(said, max(20, width_of(sys.stdout) - left)))
        print(f"  {check.name:<{left - 13}}  {shown}  {said}".rstrip())
    if stopped:
        print(f"  not run, because a step failed: {', '.join(stopped)}")
