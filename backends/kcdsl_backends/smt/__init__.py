"""The SMT backend: contract consistency, and clauses implied by a proved drift. z3 loads late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcdsl.diagnostics import Diagnostic
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import Program
from kcdsl.verdict.outcome import Implied, ImpliedBound, ProvedDrift
from kcdsl.verdict.studies.difference import Difference

__all__ = ["BACKEND", "Implied", "ImpliedBound", "ProvedDrift", "SmtBackend"]


class SmtBackend:
    """The interface that commands call; every method imports z3 on its first use."""

    name = "smt"

    def consistency(
        self,
        program: Program,
        timeout_ms: int = 2000,
        source: SourceFile | None = None,
        total_ms: int | None = None,
        report: Callable[[str, int, int], None] | None = None,
    ) -> list[Diagnostic]:
        """Return the findings of `smt.consistency.consistency` about a contract."""
        from kcdsl_backends.smt.consistency import consistency

        return consistency(program, timeout_ms, source, total_ms, report)

    def difference(
        self,
        old: Program,
        new: Program,
        timeout_ms: int = 2000,
        total_ms: int | None = None,
        report: Callable[[str, int, int], None] | None = None,
    ) -> Difference:
        """Return how one contract differs from another, clause by clause."""
        from kcdsl_backends.smt.difference import difference

        return difference(old, new, timeout_ms, total_ms, report)

    def derive(
        self, program: Program, proved: Sequence[ProvedDrift], timeout_ms: int = 2000
    ) -> tuple[Implied, ...]:
        """Return the clauses that follow from the proved drifts by the bound chain."""
        from kcdsl_backends.smt.derivation import derive

        return derive(program, proved, timeout_ms)


BACKEND = SmtBackend()
