"""Envelopes never exclude a source that a real kernel exhibits, and exclude what exceeds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import KernelRef
from kcdsl.model.numerics import Numerics
from kcdsl.verdict.studies.attribution import Envelope
from kcdsl_backends.empirical.attribution.envelopes import envelopes, interval_bounds, most_of
from kcdsl_backends.empirical.attribution.hybrids import Pair, hybrid
from kcdsl_backends.empirical.bounds.blocks import CertifiedBound, Certify
from kcdsl_backends.empirical.metrics.full_logits import tier_a
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from tests.support.attributions import (
    EAGER,
    attributed,
    fixed_requests,
    pair_of,
    ref,
    small_model,
    subject_of,
)

REQUEST = tuple(replace(r, tokens=r.tokens[:4]) for r in fixed_requests(2))
FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}


def found(pair: Pair, *players: str, make: Any = None) -> dict[tuple[str, str], Envelope]:
    rows = envelopes(pair, players, REQUEST, make or interval_bounds(pair.model))
    return {(row.source, row.block): row for row in rows}


@dataclass(frozen=True)
class Moved:
    """A kernel with a constant added in one block."""

    kernel: TorchKernel
    name: str
    size: float

    def block(self, name: str, x: Tensor) -> Tensor:
        return self.kernel.block(name, x) + (self.size if name == self.name else 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def planted(run: str, name: str, size: float) -> Callable[[KernelRef, TorchKernel], Kernel]:
    return lambda wanted, kernel: Moved(kernel, name, size) if wanted.run == run else kernel


@pytest.mark.full
def test_single_source_is_never_excluded() -> None:
    """The drift of any single source lies inside its own envelope."""
    for infer, name in (
        (ref("torch.sdpa.math"), "operator"),
        (ref(compute="bfloat16"), "precision"),
        (ref(weights=FP8), "weights"),
    ):
        rows = found(pair_of(small_model(), EAGER, infer), name)
        assert len(rows) == 10
        for row in rows.values():
            assert row.can_explain is True
            assert row.can_reach is True
            assert row.ratio is not None
            assert row.ratio <= 1
            assert row.measured is not None
            assert row.certified is not None
            assert row.measured <= row.certified


@pytest.mark.full
def test_fine_sources_are_excluded_beside_coarse_formats() -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights=FP8)
    rows = found(pair_of(small_model(), EAGER, infer), "operator", "precision", "weights", "batch")
    for fine in ("operator", "batch"):
        row = rows[fine, "attn_0"]
        assert row.can_explain is False
        assert row.can_reach is False
        assert row.ratio is not None
        assert row.ratio > 10
    weights = rows["weights", "attn_0"]
    assert weights.certified is not None
    assert 0.9 < weights.certified / weights.observed < 1.1
    assert rows["weights", "norm_0"].can_reach is False  # a norm has no matrix
    assert rows["precision", "norm_0"].can_explain is True


def test_drift_slightly_above_and_below_the_envelope() -> None:
    """The drift is planted and the bound constant."""

    @dataclass(frozen=True)
    class Flat:
        drift_bound: NDArray[np.float64]
        bound_inf: float = 1.0

    def make(train: Numerics, infer: Numerics) -> Certify:
        def certify(block: str, x: Tensor) -> CertifiedBound:
            return Flat(np.full((4, 16 if block != "head" else 128), 1.0))

        return certify

    for size, explains in ((0.999, True), (1.001, False)):
        moved = planted("torch.sdpa.math", "mlp_0", 0.0)
        pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math"), moved)
        pair = replace(pair, infer=Moved(pair.infer.kernel, "mlp_0", size))  # type: ignore[attr-defined]
        if explains:
            row = found(pair, "batch", make=make)["batch", "mlp_0"]
            assert (row.can_explain, row.can_reach) == (True, True)
            assert row.ratio == pytest.approx(size, rel=1e-4)
        else:
            with pytest.raises(Refusal) as refused:  # infer exceeds its own bound
                found(pair, "batch", make=make)
            assert refused.value.diagnostics[0].code == codes.ABOVE_CERTIFIED


@pytest.mark.full
def test_hybrid_beyond_its_envelope_ends_the_attribution() -> None:
    """A hybrid kernel violates its claim, while infer satisfies it."""

    def moved(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        between = wanted.run == "torch.sdpa.math" and dict(wanted.numerics)["compute"] == "float32"
        return Moved(kernel, "attn_1", 0.1) if between else kernel

    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math", "bfloat16"), moved)
    with pytest.raises(Refusal) as refused:
        found(pair, "operator", "precision")
    diagnostic = refused.value.diagnostics[0]
    assert diagnostic.code == codes.ABOVE_CERTIFIED
    assert "attn_1" in diagnostic.message
    with pytest.raises(Refusal) as refused:
        attributed(subject_of(pair, fixed_requests(3)), bounds=True)
    assert refused.value.diagnostics[0].code == codes.ABOVE_CERTIFIED


@pytest.mark.full
def test_batched_block_beyond_its_envelope_ends_the_attribution() -> None:
    @dataclass(frozen=True)
    class InBatches(Moved):
        def block(self, name: str, x: Tensor) -> Tensor:
            return self.kernel.block(name, x) + (0.1 if name == self.name and x.dim() == 3 else 0)

    pair = pair_of(
        small_model(),
        EAGER,
        ref("torch.sdpa.math"),
        lambda wanted, kernel: InBatches(kernel, "mlp_1", 0.0) if wanted == EAGER else kernel,
    )
    with pytest.raises(Refusal, match="mlp_1"):
        found(pair, "batch")
    assert found(pair, "operator")


def test_missing_bound_excludes_nothing() -> None:
    @dataclass(frozen=True)
    class Open:
        drift_bound: NDArray[np.float64]
        bound_inf: float = np.inf
        reason: str = "the variance may be zero"

    def make(train: Numerics, infer: Numerics) -> Certify:
        def certify(block: str, x: Tensor) -> CertifiedBound:
            return Open(np.full((4, 16 if block != "head" else 128), np.inf))

        return certify

    rows = found(pair_of(small_model(), EAGER, ref(compute="bfloat16")), "precision", make=make)
    for row in rows.values():
        assert (row.can_explain, row.can_reach, row.certified) == (None, None, None)
        assert row.reason == "the variance may be zero"


@pytest.mark.full
def test_simulated_kernels_are_not_compared_with_an_envelope() -> None:
    acts = {"format": "fp8_e4m3", "scale": "per_token"}
    infer = ref("torch.scaled_mm", "float32", weights=FP8, activations=acts)
    rows = found(pair_of(small_model(), EAGER, infer), "activations", "weights")
    assert rows["activations", "mlp_0"].measured is None
    assert rows["activations", "mlp_0"].certified is not None
    assert rows["weights", "mlp_0"].measured is not None


@pytest.mark.full
@pytest.mark.parametrize("temperature", [Fraction(1, 2), Fraction(1), Fraction(3)])
@pytest.mark.parametrize("metric", ["kl", "tv", "chi2_infer_train", "logit_span"])
def test_metric_of_any_head_is_within_its_envelope(metric: str, temperature: Fraction) -> None:
    """Apply each hybrid's real head to the training kernel's states, position by position.

    A second head uses all of the envelope in two classes.
    """
    pair = pair_of(small_model(), EAGER, ref(compute="bfloat16", weights=FP8))
    rows = envelopes(
        *(pair, ("precision", "weights"), REQUEST, interval_bounds(pair.model)),
        of_logits=most_of(metric, temperature),
    )
    by_name = {(row.source, row.block): row for row in rows}
    assert all(row.metric is None for row in rows if row.block != "head")
    for source in ("precision", "weights"):
        row = by_name[source, "head"]
        assert row.metric is not None
        kernel = hybrid(pair, (source,)).kernel
        largest = 0.0
        for request in REQUEST:
            x = pair.model.all_block_inputs(list(request.tokens), ["head"])["head"]
            assert x is not None
            with torch.no_grad():
                one, two = (k.block("head", x.float()).double() for k in (pair.train, kernel))
            values = tier_a(one, two, float(temperature), {metric})[metric]
            largest = max(largest, float(values.max()))
        assert 0 < largest <= row.metric


def test_two_classes_attain_the_metric_of_an_envelope() -> None:
    limits = np.array([[0.1, 0.3], [0.2, 0.2]])
    found_ = most_of("tv", Fraction(2))(limits)
    assert found_ == pytest.approx(math.tanh(0.6 / 2 / 4))
    assert most_of("logit_linf", Fraction(2))(limits) == 0.3
    assert most_of("entropy_gap", Fraction(1))(limits) is None
    assert most_of("chi2_infer_train", Fraction(1))(1e6 * limits) is None


def test_request_without_a_bound_removes_the_metric() -> None:
    limits = iter([0.1, np.inf] * 100)

    @dataclass(frozen=True)
    class Some:
        drift_bound: NDArray[np.float64]
        bound_inf: float = np.inf

    def make(train: Numerics, infer: Numerics) -> Certify:
        def certify(block: str, x: Tensor) -> CertifiedBound:
            wide = 16 if block != "head" else 128
            return Some(np.full((4, wide), next(limits) if block == "head" else 1.0))

        return certify

    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math"))
    rows = envelopes(pair, ("batch",), REQUEST, make, of_logits=most_of("kl", Fraction(1)))
    (head,) = (row for row in rows if row.block == "head")
    assert head.metric is None
    assert head.certified is None


def test_routing_source_has_no_envelope() -> None:
    assert found(pair_of(small_model(), EAGER, ref("torch.sdpa.math")), "routing") == {}


@pytest.mark.full
def test_document_lists_exclusions_in_the_largest_block() -> None:
    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math", "bfloat16", weights=FP8))
    document = attributed(subject_of(pair, fixed_requests(24)), bounds=True)
    assert document.layers is not None
    most = max(document.layers.rows, key=lambda row: row.gain).block
    by_name = {s.name: s for s in document.sources}
    for name, least, largest in (("operator", 0.0, 0.01), ("weights", 0.9, 1.5)):
        row = by_name[name]
        assert row.envelope_block == most
        assert row.observed is not None
        assert row.envelope is not None
        assert least < row.envelope / row.observed < largest
        assert row.can_explain is (row.observed <= row.envelope)
        assert (row.reach is None) is row.can_explain
    assert by_name["operator"].excluded
    first = document.candidates[0]
    assert first.source == "weights"
    assert first.blocks
    assert any(most in text for text in first.evidence)
    heads = [row for row in document.envelopes if row.block == "head"]
    assert all(row.metric is not None for row in heads)
    said = f"at most {heads[2].metric:.3g} nat of kl at any position"
    assert any(said in text for text in first.evidence)
    assert heads[2].source == "weights"
    assert torch.is_grad_enabled()
