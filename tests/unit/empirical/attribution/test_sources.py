"""Sources that differ, and the hybrid kernels between both sides."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import ADAPTERS, refuse_unserved
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.hybrids import hybrid
from kcdsl_backends.empirical.attribution.sources import different, mixed, settings, stored
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from tests.support.attributions import EAGER, fixed_requests, pair_of, ref, small_model

FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}
TOKENS = {"format": "fp8_e4m3", "scale": "per_token"}
RUNS = ("torch.eager", "torch.sdpa", "torch.sdpa.math", "torch.sdpa.flash", "torch.sdpa.efficient")


@pytest.mark.parametrize(
    ("train", "infer", "expected"),
    [
        (EAGER, EAGER, ()),
        (EAGER, ref(casts="nearest"), ()),
        (EAGER, ref(preset="torch-eager"), ()),
        (EAGER, ref("torch.sdpa.math"), ("operator",)),
        (EAGER, ref(compute="bfloat16"), ("precision",)),
        (EAGER, ref(weights=FP8), ("weights",)),
        (EAGER, ref(compute="bfloat16", weights={"format": "bfloat16"}), ("precision",)),
        (EAGER, ref(weights={"format": "bfloat16"}), ("weights",)),
        (EAGER, ref("torch.scaled_mm", preset="fp8-w8a8-per-channel", compute="float32"),
         ("operator", "weights", "activations")),
        (ref(preset="fp8-weights"), ref(preset="fp8-weights", compute="bfloat16"), ("precision",)),
        (ref(weights=FP8), ref("torch.sdpa.math", "bfloat16", weights=FP8),
         ("operator", "precision")),
    ],
)  # fmt: skip
def test_differing_sources_are_listed(
    train: KernelRef, infer: KernelRef, expected: tuple[str, ...]
) -> None:
    assert different(train, infer) == expected


def test_overrides_belong_to_weights_and_activations() -> None:
    """A hybrid has the override of the side that the source comes from."""
    plain = {"weights": {"format": "bfloat16"}, "activations": {"format": "none"}}
    fp8 = {"preset": "fp8-w8a8-per-channel", "compute": "bfloat16"}
    train = ref(compute="bfloat16")
    one = ref("torch.scaled_mm", **fp8, overrides={"lm_head": plain})
    assert different(train, one) == ("operator", "weights", "activations")
    weights = ref(
        "torch.eager",
        "bfloat16",
        preset="fp8-weights",
        overrides={"lm_head": {"weights": {"format": "bfloat16"}}},
    )
    assert different(train, weights) == ("weights",)
    assert different(weights, ref("torch.eager", "bfloat16", preset="fp8-weights")) == ("weights",)
    between = resolve(mixed(train, one, ("weights",)))
    assert between.serving("lm_head.weight").weights.format == "bfloat16"
    assert between.serving("up.weight").weights.format == "fp8_e4m3"
    assert between.serving("lm_head").activations.format == "none"
    assert between.serving("up").activations.format == "none"
    between = resolve(mixed(train, one, ("activations",)))
    assert between.serving("lm_head").activations.format == "none"
    assert between.serving("up").activations.format == "fp8_e4m3"
    assert between.serving("up").weights.format == "bfloat16"
    other = ref("torch.scaled_mm", **fp8, overrides={"down": plain})
    with pytest.raises(Refusal, match="name different linears"):
        mixed(one, other, ("weights",))
    words = {setting.source: setting.infer for setting in settings(train, one)}
    assert words["weights"] == "fp8_e4m3 per_channel, 1 override"


def test_end_points_are_the_original_kernels() -> None:
    infer = ref("torch.sdpa.flash", "bfloat16", weights=FP8)
    assert mixed(EAGER, infer, ()) is EAGER
    assert mixed(EAGER, infer, ("batch", "routing")) is EAGER
    assert mixed(EAGER, infer, ("operator", "precision", "weights", "batch")) is infer


@pytest.mark.parametrize(
    ("compute", "run"),
    [(c, run) for c in ("float16", "bfloat16") for run in RUNS[1:]]
    + [("float64", run) for run in RUNS[1:-1]],
)
def test_every_hybrid_satisfies_its_claim(run: str, compute: str) -> None:
    """The adapters of attention programs support the claim of each combination."""
    more = {"accumulate": "float64"} if compute == "float64" else {}
    infer = ref(run, compute, weights=FP8, **more)
    own = different(EAGER, infer)
    for count in range(len(own) + 1):
        for taken in combinations(own, count):
            between = mixed(EAGER, infer, taken)
            numerics = resolve(between)
            adapter = ADAPTERS[between.run]
            refuse_unserved(between.run, adapter, numerics, adapter.devices[0])
            assert between.run == (run if "operator" in taken else "torch.eager")
            assert numerics.compute == (compute if "precision" in taken else "float32")
            weights = stored(numerics)
            assert (weights is not None) == ("weights" in taken)
            if weights is not None:
                assert weights.to_json() == FP8


def test_hybrids_claim_the_weaker_of_both_promises() -> None:
    train = ref(casts="nearest")
    infer = ref("torch.sdpa.math", "bfloat16", casts="any")
    assert resolve(mixed(train, infer, ("precision",))).casts == "any"
    both = mixed(train, ref("torch.sdpa.math", "bfloat16", casts="nearest"), ("precision",))
    assert resolve(both).casts == "nearest"


def test_claims_of_one_program_depend_on_its_formats() -> None:
    train = ref("torch.sdpa.math", weights=FP8)
    infer = ref("torch.sdpa.math", "bfloat16")
    between = resolve(mixed(train, infer, ("precision",)))
    assert between.attention == resolve(infer).attention
    assert stored(between) is not None


def test_errors_of_a_program_stay_with_the_program() -> None:
    """The sigmoid of ONNX Runtime is inaccurate with any weights."""
    infer = ref("onnxruntime.dynamic_int8")
    assert resolve(mixed(EAGER, infer, ("operator",))).sigmoid == "absolute"
    assert resolve(mixed(EAGER, infer, ("weights", "activations"))).sigmoid == "relative"


def test_settings_are_described_in_words() -> None:
    infer = ref("torch.scaled_mm", "bfloat16", weights=FP8, activations=TOKENS)
    assert [(s.source, s.train, s.infer) for s in settings(EAGER, infer)] == [
        ("operator", "torch.eager", "torch.scaled_mm"),
        ("precision", "float32", "bfloat16"),
        ("weights", "as computed", "fp8_e4m3 per_channel"),
        ("activations", "as computed", "fp8_e4m3 per_token"),
    ]


def test_every_source_belongs_to_a_term_of_the_paper() -> None:
    assert set(sources.TERMS) == set(sources.SOURCES)
    assert set(sources.TERMS.values()) == {"operator", "precision", "batch", "routing"}


def test_loaded_hybrids_match_their_description() -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights=FP8)
    pair = pair_of(small_model(), EAGER, infer)
    assert hybrid(pair, ()).kernel is pair.train
    assert hybrid(pair, ("operator", "precision", "weights")).kernel is pair.infer
    made = hybrid(pair, ("precision",)).kernel
    assert isinstance(made, TorchKernel)
    assert (made.ref.run, made.numerics.compute) == ("torch.eager", "bfloat16")


def test_simulated_inputs_equal_the_definition() -> None:
    """The first linear of a simulated kernel gets the values of codes instead of the raw inputs."""
    import torch

    from kcdsl_backends.attack.quantised_inputs import to_nearest

    infer = ref("torch.scaled_mm", weights=FP8, activations=TOKENS)
    pair = pair_of(small_model(), EAGER, infer)
    made = hybrid(pair, ("activations",))
    assert made.simulated
    assert isinstance(made.kernel, TorchKernel)
    seen: list[Any] = []
    linear = made.kernel.module.get_submodule("model.layers.0.self_attn.q_proj")
    linear.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    tokens = fixed_requests(1)[0].tokens
    made.kernel.logits(tokens)
    x = pair.model.block_inputs(tokens, "attn_0")
    assert x is not None
    expected = to_nearest(
        x.to(torch.float64), made.numerics, "model.layers.0.self_attn.q_proj.weight"
    )
    assert torch.equal(seen[0].to(torch.float64), expected)
    assert not torch.equal(seen[0], x)
    assert made.kernel.numerics.activations.format == "fp8_e4m3"
