"""Kernel contracts in Python: load, verify, evaluate and check them (docs/reference/python.md).

Everything but `metric` is imported when it is first used. `kcdsl.check` is a function, and the
package of the checker of contracts as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcdsl.declare import metric

if TYPE_CHECKING:
    from kcdsl.api.certificates import CheckResult, check
    from kcdsl.api.contract import Contract, load
    from kcdsl.api.evaluation import Evaluation
    from kcdsl.api.verification import Verification
    from kcdsl.diagnostics import Diagnostic, Refusal
    from kcdsl.ir.terms import Clause
    from kcdsl.verdict.report import Report

__version__ = "0.1.0"
__all__ = [
    "CheckResult",
    "Clause",
    "Contract",
    "Diagnostic",
    "Evaluation",
    "Refusal",
    "Report",
    "Verification",
    "__version__",
    "check",
    "load",
    "metric",
]

_PLACES = {
    "CheckResult": "kcdsl.api.certificates",
    "Clause": "kcdsl.ir.terms",
    "Contract": "kcdsl.api.contract",
    "Diagnostic": "kcdsl.diagnostics",
    "Evaluation": "kcdsl.api.evaluation",
    "Refusal": "kcdsl.diagnostics",
    "Report": "kcdsl.verdict.report",
    "Verification": "kcdsl.api.verification",
    "load": "kcdsl.api.contract",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name == "check":
            return import_module("kcdsl.check")
        if name not in _PLACES:
            raise AttributeError(f"module 'kcdsl' has no attribute {name!r}")
        return getattr(import_module(_PLACES[name]), name)
