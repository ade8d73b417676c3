"""Tensor cores in the numerics of a proof: invalid records are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.mutation.bases import CORE


def parsed(**change: int) -> Any:
    core = {**CORE, "linears": {**CORE["linears"], **change}}
    return parse_kernel({**proofs.numerics(), "tensor_core": core}, "kernel")


def test_record_of_a_unit_is_parsed() -> None:
    assert parsed() != parsed(promote=4)
    assert parsed(promote=0) != parsed()


@pytest.mark.parametrize(
    "change",
    [
        {"promote": 6},  # within an instruction of 4 products
        {"promote": 2},
        {"fraction_bits": 65},
        {"result_bits": 24},
        {"fraction_bits": 0},
        {"chunk": 0},
        {"promote": -4},
    ],
)
def test_invalid_unit_is_rejected(change: dict[str, int]) -> None:
    with pytest.raises(Rejected, match=r"numerics|tensor_core"):
        parsed(**change)
