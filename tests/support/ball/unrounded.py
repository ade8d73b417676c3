"""Kernels without rounding, for both programs: a bound then covers the verifier's error alone."""

from __future__ import annotations

import pytest

from kcdsl.model.numerics import formats as prover_formats
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_certs.recheck.numerics import formats, kernel

PRECISION, LARGEST = 400, float.fromhex("0x1.fffffffffffffp+1023")


def round_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make float64 a format of 400 bits in the kernels of both programs."""
    exact = formats.Format("float64", PRECISION, -1022, LARGEST)
    monkeypatch.setitem(formats.FORMATS, "float64", exact)
    monkeypatch.setattr(kernel, "FLOAT64", exact)
    other = prover_formats.Format("float64", PRECISION, -1022, LARGEST)
    monkeypatch.setitem(prover_formats.FORMATS, "float64", other)
    monkeypatch.setattr(Rounding, "u_function", property(lambda self: 2.0**-PRECISION))
    monkeypatch.setattr(Rounding, "eta_function", property(lambda self: 0.0))
