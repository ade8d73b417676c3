"""Findings of the contract checks, with the claims behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.diagnostics.codes import Code
from kcdsl.ir import terms as ir
from kcdsl_backends.smt.claims import Claim
from kcdsl_backends.smt.findings import Findings, Implication


@dataclass(slots=True)
class Recorder(Findings):
    """Findings that record the claims."""

    heard: Any = None

    def add(self, code: Code, claims: Sequence[Claim], reasons: Sequence[str] = ()) -> None:
        self.heard.append((code, tuple(claims)))
        Findings.add(self, code, claims, reasons)

    def redundant(self, clause: ir.Clause, every: bool, found: Sequence[Implication]) -> None:
        self.heard.extend(found)
        Findings.redundant(self, clause, every, found)
