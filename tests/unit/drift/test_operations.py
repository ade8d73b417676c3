"""Every operation of block graphs is in the tables of the prover and of the checker."""

from __future__ import annotations

from kcdsl.model.graph import Node
from kcdsl.model.lowering.drafts import LEAVES
from kcdsl.model.lowering.drafts import OPERATIONS as GRAPH
from kcdsl_backends.drift.ops import OPERATIONS, operation_of
from kcdsl_certs.recheck.ops.table import OPERATIONS as CHECKED

WITHOUT_LINEAR_BOUNDS = {"cache", "quantise", "route"}


def test_prover_implements_every_lowered_operation() -> None:
    assert set(OPERATIONS) - {"context", "cache"} == GRAPH - LEAVES


def test_checker_implements_the_operations_of_the_prover() -> None:
    assert set(CHECKED) - LEAVES == set(OPERATIONS) - {"context"}


def test_operations_have_transfers_in_every_domain() -> None:
    without = {name for name, operation in OPERATIONS.items() if operation.linear is None}
    assert without == WITHOUT_LINEAR_BOUNDS


def test_probabilities_times_values_use_the_context_rule() -> None:
    for role, name in (("context", "context"), ("scores", "matmul"), ("", "matmul")):
        assert operation_of(Node("y", "matmul", ("p", "v"), (2, 2), {}, role)) is OPERATIONS[name]
