"""Resolution of numerics: presets, overrides, and refusals that list the valid values."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import NUMERICS
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.fingerprint import fingerprint_digest, kernel_fingerprint
from kcdsl.model.numerics import Activations, Attention, Weights
from kcdsl.model.numerics.formats import CASTS
from kcdsl.model.numerics.preset_table import PRESETS, TENSOR_CORES
from kcdsl.model.presets import resolve
from tests.support.kernel_refs import kernel


def refused(*words: str) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        text = f"{found.message} {found.help}"
        return found.code is NUMERICS and all(w in text for w in words)

    return pytest.RaisesExc(Refusal, check=matches)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_under_its_name(name: str) -> None:
    found = resolve({"preset": name})
    assert found.preset == name
    assert found.casts == "any"
    assert resolve(kernel("torch.eager", preset=name)) == found
    record = found.to_json()
    assert resolve(record).to_json() == record


def test_documented_presets_exist() -> None:
    assert set(PRESETS) == {
        "vllm-fp8-kv-cache",
        "torch-eager", "torch-sdpa-math", "torch-sdpa-flash", "torch-sdpa-efficient",
        "flash-attention-2", "flash-attention-3", "fp8-weights", "fp8-w8a8-per-tensor",
        "fp8-w8a8-per-channel", "int8-weights", "mxfp8", "onnxruntime-float32",
        "onnxruntime-int8", "onnxruntime-int8-pairs", "torch-compile", "torch-scaled-mm",
        "torchao-float8-weights",
        "torchao-int8-weights", "torchao-int8-dynamic", "torchao-int4-weights",
        "torch-sdpa-cudnn", "fp8-w8a8-blocks", "vllm-fp8-per-token",
        "fp8-w8a8-blocks-e8m0", "awq-int4", "nvfp4-weights", "nvfp4", "mxfp4",
    }  # fmt: skip
    assert {preset for one in ADAPTERS.values() for preset in one.presets} <= set(PRESETS)


def test_defaults_depend_on_the_style() -> None:
    composed = resolve({"preset": "torch-eager", "compute": "bfloat16"})
    assert composed.attention == Attention("composed", "bfloat16", "bfloat16", 32, 4)
    assert composed.weights == Weights("bfloat16")
    assert composed.activations == Activations()
    fused = resolve({"preset": "flash-attention-2"})
    assert fused.attention == Attention("fused", "float32", "bfloat16", 32, 32)
    turned = resolve({"preset": "torch-eager", "attention": {"style": "fused"}})
    assert turned.attention == Attention("fused", "float32", "float32", 32, 32)
    back = resolve({"preset": "flash-attention-3", "attention": {"style": "composed"}})
    assert back.attention == Attention("composed", "bfloat16", "bfloat16", 32, 4)


def test_fast_cpu_exponential_is_admitted_where_it_is_used() -> None:
    ulps = {
        c: resolve({"preset": "torch-sdpa-flash", "compute": c}).attention.exp_ulps
        for c in ("float64", "float32", "float16", "bfloat16")
    }
    assert ulps == {"float64": 32, "float32": 32, "float16": 1024, "bfloat16": 1024}


def test_contract_overrides_the_preset_key_by_key() -> None:
    found = resolve(
        kernel(
            "torch.sdpa",
            preset="flash-attention-2",
            compute="float16",
            casts="nearest",
            weights={"format": "fp8_e5m2", "scale": "block_128"},
            attention={"tile": Fraction(64), "probabilities": "accumulate"},
        )
    )
    assert (found.compute, found.casts) == ("float16", "nearest")
    assert found.weights == Weights("fp8_e5m2", "block_128")
    assert found.attention == Attention("fused", "float32", "float32", 64, 32)


def test_partial_section_keeps_the_rest_of_the_preset() -> None:
    found = resolve({"preset": "fp8-w8a8-per-channel", "weights": {"scale": "per_tensor"}})
    assert found.weights == Weights("fp8_e4m3", "per_tensor")
    assert found.activations == Activations("fp8_e4m3", "per_token")
    plain = resolve({"preset": "fp8-weights", "weights": {"format": "bfloat16"}})
    assert plain.weights == Weights("bfloat16")
    none = resolve({"preset": "mxfp8", "activations": {"format": "none"}})
    assert none.activations == Activations()


def test_static_scales_are_float32_numbers_of_named_linears() -> None:
    """Numbers, texts and float.hex(), single or per channel, are equivalent."""
    found = resolve(
        kernel(
            "torch.scaled_mm",
            activations={
                "format": "uint8",
                "scale": "static",
                "input_scale": {"*": 0.1, "a.b": "0.1 0x1p-2", "c": Fraction(1, 10)},
                "input_zero_point": 128,
            },
        )
    )
    tenth = float.fromhex("0x1.99999a0000000p-4")
    given = (("*", (tenth,)), ("a.b", (tenth, 0.25)), ("c", (tenth,)))
    assert found.activations == Activations("uint8", "static", given, (("*", 128),))
    assert resolve(found.to_json()) == found
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    one = found.activations.calibrated("a.b.weight")
    assert one is not None
    assert (one.scales, one.zero_point) == ((tenth, 0.25), 128)
    assert found.activations.calibrated("") is None
    other = found.activations.calibrated("other.weight")
    assert other is not None
    assert other.scales == (tenth,)
    named = resolve(
        {
            "preset": "torch-eager",
            "activations": {"format": "int8", "scale": "static", "input_scale": {"a": 1}},
        }
    )
    assert named.activations.calibrated("b.weight") is None


STATIC = {"format": "int8", "scale": "static"}
BYTES = {"format": "uint8", "scale": "static", "input_scale": 1}


@pytest.mark.parametrize(
    ("activations", "words"),
    [
        (STATIC, ("need `input_scale`",)),
        ({**STATIC, "input_scale": {}}, ("names no linear",)),
        ({**STATIC, "input_scale": {"": 1}}, ("names no linear",)),
        ({**STATIC, "input_scale": []}, ("empty list",)),
        ({**STATIC, "input_scale": ""}, ("empty list",)),
        *(
            ({**STATIC, "input_scale": wrong}, ("input_scale is", "2^-100"))
            for wrong in (
                0,
                -1.0,
                "1e9",
                "nan",
                "inf",
                float("nan"),
                True,
                None,
                "x",
                "1/0",
                "1e999",
            )
        ),
        ({**STATIC, "input_scale": {"a.b": [1, 0]}}, ("input_scale.a.b is 0",)),
        ({**STATIC, "input_scale": {"a": {"b": 1}}}, ("input_scale.a is",)),
        ({**STATIC, "input_scale": 1, "input_zero_point": 3}, ("no zero point",)),
        ({"format": "int8", "scale": "per_token", "input_scale": 1}, ("no `scale: static`",)),
        ({"format": "int8", "scale": "per_token", "input_zero_point": 1}, ("input_zero_point",)),
        ({"format": "none", "input_scale": 1}, ("no `scale: static`",)),
        ({"format": "none", "scale": "static", "input_scale": 1}, ("no format",)),
        (BYTES, ("need `input_zero_point`",)),
        *(
            ({**BYTES, "input_zero_point": wrong}, ("input_zero_point is", "0 to 255"))
            for wrong in (-1, 256, 0.5, "x", True)
        ),
        (
            {**BYTES, "input_scale": {"a": 1}, "input_zero_point": {"b": 1}},
            ("no scale of 'b'",),
        ),
        (
            {**BYTES, "input_scale": {"a": 1, "b": 1}, "input_zero_point": {"b": 1}},
            ("no zero point of 'a'",),
        ),
    ],
)
def test_invalid_static_scales_are_refused(
    activations: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(*words):
        resolve({"preset": "torch-eager", "activations": activations})


def test_static_scales_of_weights_are_refused() -> None:
    with refused("weights.scale", "per_tensor"):
        resolve({"preset": "torch-eager", "weights": {"format": "int8", "scale": "static"}})


def test_activations_in_the_compute_format_are_not_quantised() -> None:
    found = resolve(
        {"preset": "torch-eager", "compute": "bfloat16", "activations": {"format": "bfloat16"}}
    )
    assert found.activations == Activations()


def test_kernel_without_a_preset_uses_that_of_its_adapter() -> None:
    assert resolve(kernel("torch.sdpa.math")).preset == "torch-sdpa-math"
    with refused("name no preset", "torch-eager"):
        resolve({})
    with refused("name no preset"):
        resolve(kernel("some.kernel"))


@pytest.mark.parametrize(
    ("numerics", "words"),
    [
        ({"preset": "torch-eagr"}, ("'torch-eagr'", "did you mean 'torch-eager'", "mxfp8")),
        ({"compute": "bfloat61"}, ("compute", "did you mean 'bfloat16'", "float32")),
        ({"compute": "fp8_e4m3"}, ("compute", "allowed")),
        ({"compute": 16}, ("compute",)),
        ({"accumulat": "float32"}, ("'accumulat'", "did you mean 'accumulate'")),
        ({"accumulate": "float16"}, ("coarser than compute",)),
        ({"casts": "round"}, ("casts", "nearest, any")),
        ({"casts": "truncate"}, ("casts", "toward_zero")),
        ({"casts": "any_direcion"}, ("casts", "did you mean 'any_direction'")),
        (
            {"casts": "toward_zero", "activations": {"format": "int8", "scale": "per_token"}},
            ("'toward_zero'", "quantised to int8", "round to nearest"),
        ),
        ({"weights": {"rounding": "up"}}, ("weights.rounding", "nearest, toward_zero")),
        (
            {"weights": {"format": "int8", "scale": "per_channel", "rounding": "toward_zero"}},
            ("weights with a scale", "toward_zero"),
        ),
        ({"weights": "int8"}, ("weights", "mapping")),
        ({"weights": {"format": "int8"}}, ("have no scale 'none'", "per_channel")),
        ({"weights": {"format": "bfloat16", "scale": "per_tensor"}}, ("have no scale",)),
        ({"weights": {"format": "int8", "scale": "mx"}}, ("mx",)),
        ({"weights": {"format": "fp8_e4m3", "scale": "per_row"}}, ("weights.scale", "per_channel")),
        ({"weights": {"formt": "int8"}}, ("'formt'", "did you mean 'format'")),
        ({"activations": {"format": "bfloat16"}}, ("activations.format", "not quantised")),
        ({"activations": {"scale": "per_token"}}, ("no format",)),
        ({"activations": {"format": "int8"}}, ("have no scale 'none'", "per_token")),
        ({"activations": {"format": "uint8", "scale": "mx"}}, ("have no scale 'mx'",)),
        ({"weights": {"format": "fp4_e2m1", "scale": "group_32"}}, ("allowed: mx, nvfp4",)),
        ({"weights": {"format": "uint4", "scale": "mx"}}, ("uint4 weights", "group_128")),
        (
            {"weights": {"format": "fp8_e4m3", "scale": "mx", "scale_format": "float16"}},
            ("scales of 'mx'", "float32"),
        ),
        (
            {"activations": {"format": "fp8_e4m3", "scale": "per_batch"}},
            ("need `batch_amax`",),
        ),
        (
            {"activations": {"format": "int8", "scale": "per_token", "batch_amax": 3}},
            ("`batch_amax`", "per_token"),
        ),
        (
            {"activations": {"format": "uint8", "scale": "per_token", "least_scale": 0.1}},
            ("`least_scale`",),
        ),
        (
            {"activations": {"format": "int8", "scale": "per_token", "amax_limit": 1e30}},
            ("activations.amax_limit", "2^24"),
        ),
        ({"attention": {"style": "flash"}}, ("attention.style", "composed, fused")),
        ({"attention": {"tile": 0}}, ("attention.tile", "integer")),
        ({"attention": {"tile": 2.5}}, ("attention.tile",)),
        ({"attention": {"tile": True}}, ("attention.tile",)),
        ({"attention": {"exp_ulps": "4"}}, ("attention.exp_ulps",)),
        ({"attention": {"coarse_exp_ulps": 4}}, ("'coarse_exp_ulps'",)),
        ({"attention": {"scores": "int8"}}, ("attention.scores",)),
        ({"attention": {"tile": float("nan")}}, ("attention.tile",)),
        ({"attention": {"tile": float("inf")}}, ("attention.tile",)),
    ],
)
def test_invalid_numerics_are_refused(numerics: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused(*words):
        resolve({"preset": "torch-eager"} | numerics)


def test_fingerprints_distinguish_kernels() -> None:
    first = kernel_fingerprint(kernel("torch.eager"))
    assert first == kernel_fingerprint(kernel("torch.eager", preset="torch-eager"))
    others = [
        kernel_fingerprint(kernel("torch.sdpa")),
        kernel_fingerprint(kernel("torch.eager", compute="bfloat16")),
        kernel_fingerprint(kernel("torch.eager"), "cuda:0"),
    ]
    digests = {fingerprint_digest(f) for f in (first, *others)}
    assert len(digests) == 4
    assert others[2]["device"] == "cuda"
    assert first["schema"] == "kcdsl.kernel-fingerprint/2"


@pytest.mark.full
def test_fingerprint_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys\n"
        "from kcdsl.ir.terms import KernelRef\n"
        "from kcdsl.model.fingerprint import kernel_fingerprint, fingerprint_digest\n"
        "print(kernel_fingerprint(KernelRef('torch.eager', ()))['software']['torch']['version'])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    import torch

    assert ran.stdout.strip() == torch.__version__


def test_results_may_have_separate_formats() -> None:
    found = resolve(
        kernel(
            "torch.eager",
            compute="float64",
            results={"input": "bfloat16", "context": "bfloat16", "add": "compute"},
        )
    )
    assert found.results == (("context", "bfloat16"), ("input", "bfloat16"))
    assert found.stored_format("input", "") == "bfloat16"
    assert found.stored_format("matmul", "context") == "bfloat16"
    assert found.stored_format("matmul", "scores") == "float64"
    assert found.stored_format("add", "") == "float64"
    record = found.to_json()
    assert record["results"] == {"context": "bfloat16", "input": "bfloat16"}
    assert resolve(record) == found
    with refused("results has no key 'scores'"):
        resolve({"preset": "torch-eager", "results": {"scores": "bfloat16"}})
    with refused("results.add is 'int8'"):
        resolve({"preset": "torch-eager", "results": {"add": "int8"}})


def test_record_of_ordinary_numerics_is_unchanged() -> None:
    record = resolve({"preset": "torch-eager"}).to_json()
    assert "results" not in record
    assert "tensor_core" not in record


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_tensor_cores_by_name_and_in_numbers(name: str) -> None:
    preset = {"preset": "fp8-w8a8-per-channel", "tensor_core": name}
    found = resolve(preset)
    assert found.tensor_core == TENSOR_CORES[name]
    assert resolve(found.to_json()) == found
    assert resolve({**preset, "tensor_core": "none"}).tensor_core is None


def test_invalid_tensor_cores_are_refused() -> None:
    base = {"preset": "torch-eager", "compute": "bfloat16"}
    with refused("hopper_16", "did you mean"):
        resolve({**base, "tensor_core": "hoper_16"})
    with refused("not quantised to fp8"):
        resolve({**base, "tensor_core": "hopper_fp8"})
    with refused("compute is float32"):
        resolve({"preset": "torch-eager", "tensor_core": "hopper_16"})
    unit = {"fraction_bits": 25, "chunk": 16, "result_bits": 23}
    for wrong, words in (
        ({**unit, "promote": 40}, "integer number of chunks"),
        ({**unit, "chunk": 0}, "tensor_core.linears.chunk"),
        ({**unit, "chunks": 1}, "no key 'chunks'"),
    ):
        with refused(words):
            resolve({**base, "tensor_core": {"linears": wrong, "others": unit}})


def test_casts_other_than_to_nearest() -> None:
    """Each word states whether a cast is free, its direction, and its number of roundoffs."""
    cut = {"format": "bfloat16", "rounding": "toward_zero"}
    given = {"preset": "torch-eager", "compute": "bfloat16"}
    found = resolve({**given, "casts": "toward_zero", "weights": cut})
    assert (found.cast.free, found.cast.toward_zero, found.cast.units) == (False, True, 2)
    assert found.weights == Weights("bfloat16", rounding="toward_zero")
    record = found.to_json()
    assert record["casts"] == "toward_zero"
    assert record["weights"] == {**cut, "scale": "none"}
    assert resolve(record) == found
    assert resolve({**given, "casts": "any"}).cast.units == 1
    assert resolve({**given, "casts": "any_direction"}).cast == CASTS["any_direction"]
    assert set(CASTS) == {"nearest", "any", "toward_zero", "any_toward_zero", "any_direction"}


def test_record_of_casts_to_nearest_is_unchanged() -> None:
    """`rounding` is recorded only for other casts, so no digest changes."""
    plain = resolve({"preset": "torch-eager", "weights": {"rounding": "nearest"}})
    assert plain == resolve({"preset": "torch-eager"})
    assert plain.to_json()["weights"] == {"format": "float32", "scale": "none"}
