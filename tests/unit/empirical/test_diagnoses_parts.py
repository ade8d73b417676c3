"""Parts of the diagnoses: repairs, filters, noise, order, and which clauses each one blocks."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.ir.terms import Family, KernelRef
from kcdsl.model.architectures import bert
from kcdsl.model.presets import resolve
from kcdsl.verdict.model import Held, InvalidEvidence
from kcdsl_backends.empirical.diagnoses import reference
from kcdsl_backends.empirical.diagnoses.alignment import (
    deviating_run,
    swapped_sides,
    token_equality,
    visibility,
)
from kcdsl_backends.empirical.diagnoses.kernels import _masks
from kcdsl_backends.empirical.diagnoses.model import (
    DIAGNOSES,
    POSITIONS,
    Probe,
    Repair,
    RoundingNoise,
    blocking,
    cause_of,
    empty_slice,
    finite,
    not_applicable,
    outcome,
)
from kcdsl_backends.empirical.diagnoses.model import outcome as outcome_of
from kcdsl_backends.empirical.diagnoses.policies import (
    support_check,
    temperature_fit,
    truncation_mass,
)
from kcdsl_backends.empirical.diagnoses.probes import batch_invariance
from kcdsl_backends.empirical.diagnoses.reference import reference_of
from kcdsl_backends.empirical.diagnoses.weights import localise
from kcdsl_backends.empirical.table.evidence import SamplingUnit
from kcdsl_backends.requests import Request
from tests.support.planted_bugs import kernel, prompts, tiny_model, top_k, top_p


def probe(change: Any, rows: int = 40, seed: int = 0) -> Probe:
    """Return a probe whose inference logits are modified training logits."""
    generator = torch.Generator().manual_seed(seed)
    train = 2 * torch.randn(rows, 50, generator=generator, dtype=torch.float64)
    request = Request("r:0", "0", tuple(range(rows)), {}, 1)
    return Probe(request, train, change(train), (True, True))


def min_p(logits: torch.Tensor, share: float) -> torch.Tensor:
    """Return logits without tokens below a share of the maximum."""
    below = logits < logits.amax(-1, keepdim=True) + math.log(share)
    return logits.masked_fill(below, -torch.inf)


def test_repair_with_the_smallest_residual_is_the_cause() -> None:
    some = [Repair("a", "", 0.2), Repair("b", "", 0.1), Repair("c", "", None), Repair("d", "", 1)]
    best = cause_of(some)
    assert best is not None
    assert best.name == "b"
    assert cause_of([Repair("a", "", 0.25), Repair("b", "", math.nan)]) is None
    assert cause_of([]) is None


@pytest.mark.parametrize("claims", [False, True])
def test_visible_future_tokens_are_a_wrong_mask(claims: bool) -> None:
    """A kernel of unknown numerics may have scales of whole sequences."""
    table = torch.randn(40, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def causal(tokens: list[int]) -> torch.Tensor:
        return table[tokens].cumsum(0)

    def whole(tokens: list[int]) -> torch.Tensor:
        return causal(tokens) + table[tokens].sum(0)

    found = visibility(probe(lambda x: x, 16), (causal, whole), 1.0, claim=(True, claims))
    assert "infer sees token" in found.detail
    assert found.explains == claims
    other = visibility(probe(lambda x: x, 16), (whole, causal), 1.0, claim=(True, claims))
    assert "train sees token" in other.detail
    assert other.explains


@pytest.mark.parametrize("checkpoint", [None, "served.onnx"])
def test_only_a_served_file_may_have_scales_of_whole_sequences(checkpoint: str | None) -> None:
    table = torch.randn(40, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    train = SimpleNamespace(
        logits=lambda ids: table[ids].cumsum(0), ref=KernelRef("torch.eager", ())
    )
    infer = SimpleNamespace(
        logits=lambda ids: table[ids].cumsum(0) + table[ids].sum(0),
        ref=KernelRef("onnxruntime.file", (), checkpoint=checkpoint),
    )
    subject: Any = SimpleNamespace(
        train=train, infer=infer, kernels=(train, infer), encoder=False, temperature=1.0
    )
    tokens = list(range(16))
    sides = train.logits(tokens), infer.logits(tokens)
    found = _masks(subject, [replace(probe(lambda x: x, 16), train=sides[0], infer=sides[1])], None)
    assert found is not None
    assert "infer sees token" in found.detail
    assert found.explains == (checkpoint is None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda z: top_p(z, 0.95), "top-p 0.95 on the side of infer"),
        (lambda z: top_p(z, 0.8), "top-p 0.8 "),
        (lambda z: top_k(z, 7), "top-k 7 "),
        (lambda z: top_k(z, 1), "top-k 1 "),
        (lambda z: top_k(z + 0.1 * torch.sin(1e3 * z), 20), "top-k 20 "),
        (lambda z: top_k(z + 1.0 * torch.arange(50), 47), "top-k 47 "),
        (lambda z: torch.where(torch.arange(50) > 46, -torch.inf, z), "a mask of 3 token ids"),
        (lambda z: min_p(z, 0.05), "min-p 0.05 "),
        (lambda z: torch.where(torch.arange(50) == 3, -torch.inf, z), "a mask of 1 token ids"),
        (lambda z: torch.where(torch.arange(50) < 3, -1e30, z), "a mask of 3 token ids"),
    ],
)
def test_sampling_filters_are_distinguished(change: Any, words: str) -> None:
    found = truncation_mass([probe(change)], 1.0)
    assert found.explains or found.seen
    assert words in found.detail
    assert found.value is not None
    assert found.value > 0


def test_filter_with_another_fault_is_not_reported_as_filter() -> None:
    found = truncation_mass([probe(lambda z: top_k(z.roll(1, -1), 20))], 1.0)
    assert not found.explains
    assert found.seen
    clean = truncation_mass([probe(lambda z: z)], 1.0)
    assert not clean.explains
    assert not clean.seen
    assert truncation_mass([], 1.0).left is None


@pytest.mark.parametrize("mask", [-torch.inf, -1e4, torch.finfo(torch.float32).min])
def test_excluded_tokens_are_detected_for_any_mass(mask: float) -> None:
    def excluded(z: torch.Tensor) -> torch.Tensor:
        least = z <= z.topk(45, -1).values[..., -1:]
        return torch.where(least, mask, z + 0.3 * torch.sin(1e3 * z))

    found = truncation_mass([probe(excluded)], 1.0)
    assert found.seen
    assert found.value is not None
    assert found.value < 0.1
    assert not truncation_mass([probe(lambda z: z - 300 * (z > z.mean()))], 1.0).seen


def test_incomparable_positions_do_not_pass() -> None:
    lost = probe(lambda z: torch.full_like(z, torch.nan))
    short = replace(lost, train=lost.train[:3], infer=lost.train[:3])
    assert deviating_run([lost, short], None, 1.0).left is None


def test_noise_is_not_reported_as_temperature() -> None:
    noisy = probe(lambda z: z + 0.1 * torch.sin(1e3 * z))
    assert not temperature_fit([noisy], 1.0).explains
    hot = temperature_fit([probe(lambda z: z / 1.002)], 1.0)
    assert hot.explains
    assert hot.value == pytest.approx(1.002, rel=1e-4)
    assert temperature_fit([], 1.0).left is None


def test_swapped_sides_need_different_claims() -> None:
    right = RoundingNoise((1e-6, 1e-2), (1e-6, 1e-2))
    assert not swapped_sides(right).explains
    assert swapped_sides(RoundingNoise((1e-2, 1e-6), (1e-6, 1e-2))).explains
    assert swapped_sides(RoundingNoise((2e-2, 5e-7), (1e-6, 1e-2))).explains
    assert swapped_sides(RoundingNoise((1e-6, 1e-6), (1e-6, 2e-6))).left is None
    assert swapped_sides(None).left is None
    stale = RoundingNoise((1e-2, 1e-2), (1e-6, 1e-2))
    assert not swapped_sides(stale).explains
    assert (stale.beyond, right.beyond) == ((0,), ())


def test_run_without_a_reference_needs_a_large_contrast() -> None:
    def inside(z: torch.Tensor) -> torch.Tensor:
        changed = z.clone()
        changed[5:12] = 0
        return changed

    found = deviating_run([probe(inside)], None, 1.0)
    assert found.explains
    assert "positions 5 to 11 of 40" in found.detail
    assert not deviating_run([probe(lambda z: z + 0.1 * torch.sin(z))], None, 1.0).explains
    assert not deviating_run([probe(lambda z: z)], None, 1.0).explains


def test_few_requests_do_not_show_missing_mass() -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.05, 30)
    for ratios in ([drawn], [drawn[:10], drawn[10:]]):
        assert support_check(ratios).outcome == "passed"
    assert support_check([drawn - 0.2]).outcome == "failed"
    assert support_check([np.full(100, 0.99)]).outcome == "failed"
    assert support_check([np.array([1.0, math.nan])]).outcome == "failed"
    assert support_check([]).outcome == "not_applicable"
    assert support_check([np.zeros(0)]).outcome == "not_applicable"


def test_mean_of_too_few_ratios_is_inconclusive() -> None:
    """Among up to 25 tokens none can be five standard errors off, so a pass is meaningless."""
    worst = [[np.full(n, 100.0)] for n in (1, 3, 25)]
    assert {support_check(ratios).outcome for ratios in worst} == {"not_applicable"}
    assert support_check([np.full(26, 100.0)]).outcome == "failed"


@pytest.mark.parametrize("w", [1e90, 1e150, 1e308])
def test_overflowing_ratios_are_evaluated(w: float) -> None:
    assert support_check([np.full(30, w)]).outcome == "failed"
    assert support_check([np.array([w, *[1.0] * 29])]).outcome == "passed"
    lost = support_check([np.array([math.inf, *[1.0] * 29])])
    assert (lost.outcome, lost.value) == ("failed", math.inf)


def test_only_non_finite_numbers_block() -> None:
    fine, lost = SamplingUnit("a", 3), SamplingUnit("b", 3, failure="out of memory")
    assert finite([fine], {}).outcome == "passed"
    assert not finite([fine, lost], {"b": 0}).blocking
    spoiled = finite([fine, lost], {"b": 2})
    assert (spoiled.outcome, spoiled.blocking, spoiled.value) == ("failed", True, 0.5)
    assert finite([], {}).outcome == "failed"


def test_empty_slices_are_reported() -> None:
    assert empty_slice({"all": 3, "some": 1}).outcome == "passed"
    found = empty_slice({"all": 3, "none": 0})
    assert (found.outcome, found.blocking) == ("failed", False)
    assert "none" in found.detail


def test_properties_of_a_kernel_do_not_block() -> None:
    names = ("self_determinism", "batch_invariance", "coarser_layer", "empty_slice")
    assert blocking([outcome(name, False, "") for name in names]) is None
    assert blocking([not_applicable("stale_weights", "")]) is None
    assert blocking([outcome("stale_weights", True, "")]) is None
    for name in ("alignment_shift", "mask_provenance", "stale_weights", "swapped_sides"):
        reason = blocking([outcome(name, False, "why")])
        assert reason == f"precheck {name} failed: why"


def test_non_finite_numbers_block_all_but_traces_and_runtime(lab: Any) -> None:
    from kcdsl.ir.terms import HasFields

    one = lab.requests()[4].tokens

    def broken(tokens: tuple[int, ...]) -> torch.Tensor:
        return lab.base(tokens) * (math.nan if tokens == one else 1.0)

    clauses = (
        lab.clause(lab.statistic("mean", "kl"), id="N-1", slices=("few",)),
        lab.clause(
            lab.statistic("aggregate", "failure_rate"),
            limit="1/10",
            id="R-1",
            family=Family.RUNTIME,
        ),
        lab.clause(HasFields(("rng_seed",)), id="O-1", family=Family.OBSERVABILITY),
    )
    found = lab.evaluate(*clauses, infer=lab.kernel(broken))
    verdicts = {row.clause: row.verdict for row in found.report.clauses}
    assert isinstance(verdicts["R-1"], Held)
    assert isinstance(verdicts["O-1"], Held)
    assert isinstance(verdicts["N-1"], InvalidEvidence)
    assert "finite" in verdicts["N-1"].reason


def test_empty_slice_is_reported_beside_others(lab: Any) -> None:
    clause = lab.clause(lab.statistic("mean", "kl"), slices=("all", "few"))
    found = lab.evaluate(clause, slices={"all": lab.requests(), "few": ()})
    failed = [p.name for p in found.report.prechecks if p.outcome == "failed"]
    assert failed == ["empty_slice"]
    verdicts = {row.slice: row.verdict for row in found.report.clauses}
    assert isinstance(verdicts["all"], Held)
    assert isinstance(verdicts["few"], InvalidEvidence)


def test_too_large_model_has_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = resolve({"preset": "torch-eager"})
    assert reference_of(tiny_model(), claim, claim) is not None
    monkeypatch.setattr(reference, "LARGEST", 10)
    assert reference_of(tiny_model(), claim, claim) is None


def test_reference_error_is_at_least_the_kernel_error() -> None:
    for numerics in (
        {"compute": "bfloat16"},
        {"preset": "int8-weights"},
        {"preset": "fp8-weights"},
    ):
        own = kernel("torch.eager", numerics)
        found = reference_of(tiny_model(), own.numerics, own.numerics)
        assert found is not None
        assert torch.equal(found.run(own.numerics, range(20)), own.logits(range(20)))
        assert "layer_0" not in found.blocks()
        assert {"attn_0", "mlp_1", "head"} <= set(found.blocks())


def test_batch_diagnosis_is_not_applicable_without_batches() -> None:
    pair = tuple(Request(f"r:{i}", str(i), (i, 2, 3, 4), {}, 1) for i in range(2))

    def single(ids: Any) -> torch.Tensor:
        if torch.as_tensor(ids).dim() != 1:
            raise ValueError("one sequence at a time")
        return torch.zeros(len(ids), 5, dtype=torch.float64)

    assert len(pair) == 2
    chosen = (pair[0], pair[1])
    alone = batch_invariance(chosen, (single, single), None, encoder=False)
    assert alone.outcome == "not_applicable"
    assert batch_invariance(None, (single, single), None, encoder=False).outcome == "not_applicable"


def test_encoder_is_checked_block_by_block() -> None:
    config = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    module = bert.build(config).eval().requires_grad_(False)
    claim = resolve({"preset": "torch-eager"})
    found = reference_of(replace(tiny_model(), module=module, config=config), claim, claim)
    assert found is not None
    assert {"attn_0", "mlp_0", "attn_1", "mlp_1"} <= set(found.blocks())
    assert not {"layer_0", "layer_1", "model"} & set(found.blocks())


@pytest.mark.parametrize("where", ["in a batch", "in the other order", "padded in a batch"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_regrouping_that_gives_nan_is_reported(where: str, broken: float) -> None:
    """The maximum of distances with a NaN is NaN, at any position."""
    one, two = (Request(f"r:{i}", str(i), tuple(range(i, i + 6)), {}, 1) for i in (0, 1))

    def marked(ids: list[list[int]]) -> bool:
        if where == "padded in a batch":
            return len(ids[0]) > 6
        return ids[0] == list((one if where == "in a batch" else two).tokens)

    def forward(ids: Any) -> torch.Tensor:
        rows = torch.tensor(ids, dtype=torch.float64)[..., None] * torch.arange(5.0).double()
        if isinstance(ids[0], list) and marked(ids):
            rows[..., 0, 0] = broken
        return rows

    found = batch_invariance((one, two), (forward, forward), None, encoder=False)
    assert found.outcome == "failed"
    assert where in found.detail


def test_incomparable_outputs_are_not_reported_as_equal() -> None:
    unit = SamplingUnit("r:0", 4, failure="out of memory")
    assert token_equality([unit], []).outcome == "not_applicable"
    assert token_equality([], []).outcome == "failed"


def test_block_that_gives_nan_does_not_count_as_correct() -> None:
    own = kernel("torch.eager", {"compute": "float32"})
    found = reference_of(tiny_model(), own.numerics, own.numerics)
    assert found is not None

    class Lost:
        def __init__(self, names: set[str]) -> None:
            self.names = names

        def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
            right = own.block(name, x)
            return torch.full_like(right, math.nan) if name in self.names else right

    request = prompts()[0]
    logits = own.logits(request.tokens).double()
    at = Probe(request, logits, logits, (True, True))
    none: Any = Lost(set())
    two: Any = Lost({"mlp_0", "head"})
    all_: Any = Lost(set(found.blocks()))
    every: Any = localise(at, (own, own), found)
    sound: Any = localise(at, (own, none), found)
    some: Any = localise(at, (own, two), found)
    assert every.blocks == sound.blocks == len(found.blocks())
    assert some.blocks == len(found.blocks()) - 2
    assert some.deviating == ()
    assert localise(at, (own, all_), found) is None


@pytest.mark.full
def test_block_fault_late_in_a_long_request_is_found() -> None:
    own = kernel("torch.eager", {"compute": "float32"})
    found = reference_of(tiny_model(), own.numerics, own.numerics)
    assert found is not None
    request = max(prompts(), key=lambda r: r.length)
    assert request.length > POSITIONS + 8

    class Late:
        def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
            right = own.block(name, x)
            return torch.cat([right[:POSITIONS], right[POSITIONS:] * 1.5])

    late: Any = Late()
    logits = own.logits(request.tokens)[:POSITIONS].double()
    at = Probe(request, logits, logits, (True, True))
    localised: Any = localise(at, (own, late), found)
    assert {found_block.block for found_block in localised.deviating} == set(found.blocks())


def test_long_requests_are_compared_within_a_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = kernel("torch.eager", {"compute": "float32"})
    model = tiny_model()
    found = reference_of(model, own.numerics, own.numerics)
    assert found is not None
    request = max(prompts(), key=lambda r: r.length)
    vocabulary = own.logits(request.tokens).shape[-1]
    assert {len(x) for x in found.inputs(request.tokens, found.blocks()).values()} == {
        request.length
    }
    monkeypatch.setattr(reference, "RESULT", vocabulary * (POSITIONS + 8))
    entering = found.inputs(request.tokens, found.blocks())
    assert len(entering["head"]) == POSITIONS + 8
    assert len(entering["mlp_0"]) == request.length
    monkeypatch.setattr(reference, "RESULT", 1)
    assert {len(x) for x in found.inputs(request.tokens, found.blocks()).values()} == {POSITIONS}


def test_documentation_lists_every_diagnosis() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs" / "reference"
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (docs / "evaluate.md").read_text("utf-8"), re.M)
    asked = {name: question for name, question in rows if name in DIAGNOSES}
    assert asked == {d.name: d.question for d in DIAGNOSES.values() if "kernels" in d.of}
    recorded = (docs / "rollouts.md").read_text("utf-8")
    for diagnosis in DIAGNOSES.values():
        if diagnosis.of == {"recordings"}:
            assert f"`{diagnosis.name}`" in recorded, diagnosis.name


def test_outcome_without_a_diagnosis_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing_known"):
        outcome_of("nothing_known", True, "")
