"""Statements: results, requirements, the triple and its digest, verdicts of numbers.

Rarely needed statements (transfers, classes, heads of registers) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcdsl_certs.statement.certificate import (
    KERNEL_CLASS_TYPE,
    LARGEST_PAYLOAD,
    NEEDED,
    PREDICATE_TYPE,
    REGISTER_HEAD_TYPE,
    ROLES,
    STAGES,
    STATEMENT_TYPE,
    TRANSFER_TYPE,
    AcceptedFinding,
    Evaluator,
    EvidenceFile,
    Input,
    Predicate,
    Scope,
    Statement,
    certificate_id,
    parse_predicate,
    parse_statement,
    payload_bytes,
)
from kcdsl_certs.statement.clauses import (
    IMPLIED,
    LOWER,
    OPERATORS,
    UPPER,
    WIDEST,
    CertifiedClause,
    Evidence,
    ProofReference,
    Verdict,
    holds,
)
from kcdsl_certs.statement.manifest import Manifest, build_manifest, files_of
from kcdsl_certs.statement.quantities import Quantity, Region
from kcdsl_certs.statement.requirements import (
    ChainTerms,
    Comparison,
    Expectation,
    RequiredClause,
    SliceSource,
    uncovered,
)
from kcdsl_certs.statement.triple import (
    PARTS,
    Checkpoint,
    Contract,
    Kernel,
    Triple,
    differences,
    numerics_digest,
    relaxed,
    states,
    states_machine,
)
from kcdsl_certs.statement.verdicts import (
    ATTACK,
    LARGEST_ALPHA,
    LEAST_ALPHA,
    MEASURED,
    admissible,
    certifies,
    check_verdict,
    lower_tail,
    overall,
)

if TYPE_CHECKING:
    from kcdsl_certs.statement.kernel_class import (
        ClassMember,
        KernelClass,
        class_bytes,
        parse_class,
    )
    from kcdsl_certs.statement.register_head import (
        RegisterHead,
        head_bytes,
        parse_head,
    )
    from kcdsl_certs.statement.transfer import (
        ExcludedResult,
        Transfer,
        TransferredResult,
        parse_transfer,
        transfer_bytes,
        transferred_predicate,
    )

__all__ = [
    "ATTACK", "IMPLIED", "KERNEL_CLASS_TYPE", "LARGEST_ALPHA", "LARGEST_PAYLOAD", "LEAST_ALPHA",
    "LOWER", "MEASURED", "NEEDED", "OPERATORS", "PARTS", "PREDICATE_TYPE", "REGISTER_HEAD_TYPE",
    "ROLES", "STAGES", "STATEMENT_TYPE", "TRANSFER_TYPE", "UPPER", "WIDEST", "AcceptedFinding",
    "CertifiedClause", "ChainTerms", "Checkpoint", "ClassMember", "Comparison", "Contract",
    "Evaluator", "Evidence", "EvidenceFile", "ExcludedResult", "Expectation", "Input", "Kernel",
    "KernelClass", "Manifest", "Predicate", "ProofReference", "Quantity", "Region", "RegisterHead",
    "RequiredClause", "Scope", "SliceSource", "Statement", "Transfer", "TransferredResult",
    "Triple", "Verdict", "admissible", "build_manifest", "certificate_id", "certifies",
    "check_verdict", "class_bytes", "differences", "files_of", "head_bytes", "holds", "lower_tail",
    "numerics_digest", "overall", "parse_class", "parse_head", "parse_predicate", "parse_statement",
    "parse_transfer", "payload_bytes", "relaxed", "states", "states_machine", "transfer_bytes",
    "transferred_predicate", "uncovered",
]  # fmt: skip

_LATER = {
    "kernel_class": ("ClassMember", "KernelClass", "class_bytes", "parse_class"),
    "register_head": ("RegisterHead", "head_bytes", "parse_head"),
    "transfer": (
        "TransferredResult",
        "ExcludedResult",
        "Transfer",
        "transferred_predicate",
        "parse_transfer",
        "transfer_bytes",
    ),
}
"""The names of each module that is imported on first use."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        for module, names in _LATER.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
