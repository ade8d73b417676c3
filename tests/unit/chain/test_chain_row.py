"""The certified column of one row, and the reference measurement beside it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from kcdsl.chain import CertifiedRow, ChainDomainError, bound, certified_row, exact_row
from kcdsl.chain.row import measured_beyond_certified, tightness
from kcdsl.verdict.model import InvalidEvidence


def certified(**arguments: object) -> CertifiedRow:
    row = certified_row(**arguments)  # type: ignore[arg-type]
    assert isinstance(row, CertifiedRow), row
    return row


def test_every_number_follows_from_s() -> None:
    row = certified(s=0.3, osc=2.0, amax=1.5, g=4.0)
    for name in ("tv", "kl", "jeffreys", "chi2", "ess", "js", "hellinger2", "abs_log_ratio"):
        assert getattr(row, name) == bound(name, 0.3)
    assert row.reward == pytest.approx(2 * math.tanh(0.075))
    assert row.grad_bias == pytest.approx(12 * math.tanh(0.075))
    assert row.top1_stable is None
    assert row.tv_rule == row.kl_rule == "generic"
    assert certified(s=0.3).reward is None


def test_intervals_give_the_span_over_the_temperature() -> None:
    row = certified(intervals=[(-0.1, 0.2), (0.0, 0.3)], temperature=Fraction(1, 2))
    assert row.s == pytest.approx(0.8)
    assert row.temperature == Fraction(1, 2)


def test_a_confident_row_sharpens_everything_that_rests_on_the_total_variation() -> None:
    generic, known = certified(s=0.2, osc=1.0), certified(s=0.2, osc=1.0, p=[0.99, 0.01])
    assert known.tv_rule == known.kl_rule == "confident"
    assert known.tv < generic.tv / 20
    assert known.kl < generic.kl / 10
    assert known.reward is not None
    assert known.reward == pytest.approx(known.tv)
    assert known.chi2 == generic.chi2


def test_rank_stability_uses_the_best_premise_at_hand() -> None:
    logits, shift = [2.0, 1.0], [(5.0, 5.4), (5.0, 5.4)]
    assert certified(intervals=shift, logits=logits).top1_stable is True
    assert certified(s=0.4, temperature=2, logits=logits).top1_stable is True  # span 0.8 < 1
    assert certified(s=0.6, temperature=2, logits=logits).top1_stable is False
    p = [math.e / (1 + math.e), 1 / (1 + math.e)]
    assert certified(s=0.99, p=p).top1_stable is True
    assert certified(s=1.01, p=p).top1_stable is False
    assert certified(s=0.0, p=[0.5, 0.5]).top1_stable is False


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"s": 0.1, "intervals": [(0.0, 0.1), (0.0, 0.1)]},
        {"s": math.nan},
        {"s": math.inf},
        {"s": -0.1},
        {"s": 0.1, "temperature": 0},
        {"s": 0.1, "temperature": -1.0},
        {"s": 0.1, "temperature": math.nan},
        {"intervals": []},
        {"intervals": [(0.0, 0.1)]},
        {"intervals": [(0.0, math.nan), (0.0, 0.1)]},
        {"intervals": [(-math.inf, 0.0), (0.0, 0.1)]},
        {"intervals": [(0.2, 0.1), (0.0, 0.1)]},
        {"s": 0.1, "p": [1.0]},
        {"s": 0.1, "p": []},
        {"s": 0.1, "p": [0.7, 0.7]},
        {"s": 0.1, "p": [math.nan, 1.0]},
        {"s": 0.1, "logits": [-math.inf, 0.0]},
        {"s": 0.1, "p": [0.5, 0.5], "logits": [0.0, 1.0, 2.0]},
        {"intervals": [(0.0, 0.1), (0.0, 0.1)], "p": [0.2, 0.3, 0.5]},
        {"s": 0.1, "osc": -1.0},
        {"s": 0.1, "osc": math.nan},
        {"s": 0.1, "amax": 1.0},
        {"s": 0.1, "amax": 1.0, "g": math.inf},
    ],
)
def test_what_is_no_evidence_gives_invalid_evidence(arguments: dict[str, object]) -> None:
    found = certified_row(**arguments)  # type: ignore[arg-type]
    assert isinstance(found, InvalidEvidence)
    assert found.reason


# --- measurement beside the certificate ----------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "infer"),
    [
        ([], []),
        ([1.0], [1.0]),
        ([1.0, 2.0], [1.0]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, math.inf], [1.0, math.inf]),
        ([-math.inf, 0.0, 1.0], [0.0, 0.0, 1.0]),
        ([0.0, 0.0, 1.0], [-math.inf, 0.0, 1.0]),
        ([-math.inf, 0.0], [-math.inf, 0.0]),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(train: list[float], infer: list[float]) -> None:
    with pytest.raises(ChainDomainError):
        exact_row(train, infer)


def test_a_common_mask_drops_out() -> None:
    masked = exact_row([-math.inf, 0.0, 1.0], [-math.inf, 0.1, 1.3])
    assert masked == exact_row([0.0, 1.0], [0.1, 1.3])


@pytest.mark.parametrize("sd", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_the_measured_kl_agrees_with_sixty_digits(sd: float) -> None:
    rng = np.random.default_rng(7)
    z = (rng.normal(size=300) * 3).tolist()
    y = [a + d for a, d in zip(z, (rng.normal(size=300) * sd).tolist(), strict=True)]
    row = exact_row(z, y)
    with mpmath.workdps(60):
        a, b = [mpmath.exp(mpmath.mpf(v)) for v in z], [mpmath.exp(mpmath.mpf(v)) for v in y]
        sum_a, sum_b = mpmath.fsum(a), mpmath.fsum(b)
        kl = mpmath.fsum(
            (p / sum_a) * mpmath.log((p / sum_a) / (q / sum_b)) for p, q in zip(a, b, strict=True)
        )
        tv = mpmath.fsum(abs(p / sum_a - q / sum_b) for p, q in zip(a, b, strict=True)) / 2
    assert row.kl >= 0.0
    assert row.kl == pytest.approx(float(kl), rel=1e-8)
    assert row.tv == pytest.approx(float(tv), rel=1e-8)
    assert row.kl <= bound("kl", row.span)


def test_the_naive_sum_in_float32_fails_where_the_measurement_does_not() -> None:
    def log_softmax(row: np.ndarray) -> np.ndarray:
        shifted = row.astype(np.float32) - np.float32(row.max())
        return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))

    errors = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        z = rng.normal(size=32_000)
        y = z + rng.normal(size=32_000) * 1e-4
        lp, lq = log_softmax(z), log_softmax(y)
        naive = float((np.exp(lp) * (lp - lq)).sum(dtype=np.float32))
        exact = exact_row(z.tolist(), y.tolist()).kl
        assert exact == pytest.approx(0.5e-8, rel=0.2)
        errors.append(abs(naive - exact) / exact)
    assert max(errors) > 5.0


def test_a_measurement_beyond_the_bound_is_named() -> None:
    exact = exact_row([0.0, 1.0, 0.5], [0.1, 0.9, 0.5])
    row = certified(s=exact.span)
    assert measured_beyond_certified(row, exact) == ()
    assert measured_beyond_certified(row, replace(exact, tv=row.tv * 1.001)) == ("tv",)
    assert measured_beyond_certified(row, replace(exact, kl=math.nan)) == ("kl",)
    assert measured_beyond_certified(row, replace(exact, ess=row.ess * 0.99)) == ("ess",)
    assert "tv" in measured_beyond_certified(certified(s=exact.span / 10), exact)


def test_tightness_is_certified_over_measured() -> None:
    assert tightness({"tv": 0.2, "kl": 1.0, "js": 1.0}, {"tv": 0.1, "kl": 0.0}) == {
        "tv": 2.0,
        "kl": math.inf,
    }


def test_the_chain_imports_the_standard_library_alone() -> None:
    code = (
        "import sys, kcdsl.chain; "
        "heavy = {'numpy', 'torch', 'z3', 'scipy', 'mpmath'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
