"""Stored parameters of kernels, compared with ml_dtypes and with the exact tier."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.graphs.graph import Block, Node, array_digest
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval import parameters as stored
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.state import DriftProblem, State, StoredMatrix
from kcdsl_certs.recheck.interval.tensors import Tensor, as_float32
from kcdsl_certs.recheck.interval.weight_ball import both
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops.leaves import parameter_value
from kcdsl_certs.recheck.ops.linear.linear import linear_interval
from tests.support import proofs
from tests.support.rationals.weights import RationalParameters

CODES: dict[str, Any] = {
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344),
    "int8": (None, 127),
    "int8_full": (None, 127.5),
    "int4_full": (None, 7.5),
}
SCALED = [
    (kind, scale)
    for kind in CODES
    for scale in ("per_tensor", "per_channel", "block_128", "group_128", "mx")
    if not (kind.startswith("int") and scale == "mx")
]


def kernel(kind: str, scale: str, compute: str = "bfloat16") -> KernelNumerics:
    attention = {"style": "composed", "scores": compute, "probabilities": compute}
    return parse_kernel(
        {
            "preset": "",
            "compute": compute,
            "accumulate": "float32",
            "casts": "any",
            "weights": {"format": kind, "scale": scale},
            "activations": {"format": "none", "scale": "none"},
            "attention": {**attention, "tile": 1, "exp_ulps": 1},
        },
        "numerics",
    )


def tensor(value: np.ndarray, dtype: str = "F32") -> Tensor:
    return Tensor(dtype, value.shape, memoryview(value.tobytes()))


def parameters(value: np.ndarray, tier: Any = Parameters) -> Any:
    digest = array_digest("float32", value.shape, value.tobytes())
    return tier({"w": tensor(value)}, {"w": digest})


def weight(rng: np.random.Generator, rows: int = 130, columns: int = 140) -> np.ndarray:
    found = rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)) * 3)
    found[3] = 0
    return found.astype(np.float32)


def reference(w: np.ndarray, kind: str, scale: str) -> np.ndarray:
    """Quantise tile by tile, with one float32 operation for each step."""
    rows, columns = w.shape
    height, width = {
        "per_tensor": (rows, columns),
        "per_channel": (1, columns),
        "block_128": (128, 128),
        "group_128": (1, 128),
        "mx": (1, 32),
    }[scale]
    dtype, largest = CODES[kind]
    found = np.empty_like(w)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            tile = w[i : i + height, j : j + width]
            amax = np.abs(tile).max()
            s = amax / np.float32(largest)
            if scale == "mx" and amax:
                emax = {"fp8_e4m3": 8, "fp8_e5m2": 15}[kind]
                s = np.float32(2.0 ** (np.floor(np.log2(float(amax))) - emax))
            s = s if amax else np.float32(1)
            if kind.endswith("_full"):
                s = max(amax / np.float32(largest), np.float32(2.0**-23))
                code = np.clip(np.rint(tile * (np.float32(1) / s)), -largest - 0.5, largest - 0.5)
                found[i : i + height, j : j + width] = code * s
                continue
            ratio = np.clip(tile / s, -largest, largest).astype(np.float32)
            code = np.rint(ratio) if dtype is None else ratio.astype(dtype).astype(np.float32)
            found[i : i + height, j : j + width] = code * s
    return found


@pytest.mark.parametrize(("kind", "scale"), SCALED)
def test_scaled_weights_equal_the_reference(kind: str, scale: str) -> None:
    w = weight(np.random.default_rng(0))
    found = parameters(w).linear("w", kernel(kind, scale))
    expected = reference(w, kind, scale).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("kind", "scale"), [*SCALED, ("fp8_e5m2", "none"), ("float16", "none")])
def test_exact_tier_stores_equal_weights(kind: str, scale: str) -> None:
    w = weight(np.random.default_rng(1), 5, 70)
    rule = kernel(kind, scale)
    found = parameters(w).linear("w", rule)
    exact = parameters(w, RationalParameters).linear("w", rule)
    assert [pair[0] for pair in exact.pairs] == [Fraction(float(v)) for v in found.ravel()]
    plain = parameters(w).plain("w", rule)
    exact = parameters(w, RationalParameters).plain("w", rule)
    assert [pair[0] for pair in exact.pairs] == [Fraction(float(v)) for v in plain.ravel()]


def test_plain_parameters_are_rounded_once() -> None:
    w = weight(np.random.default_rng(2))
    found = parameters(w).plain("w", kernel("fp8_e4m3", "per_channel"))
    np.testing.assert_array_equal(found, w.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_overflowing_cast_is_refused() -> None:
    w = np.full((1, 1), 500, dtype=np.float32)
    for tier in (Parameters, RationalParameters):
        with pytest.raises(Rejected, match="overflow"):
            parameters(w, tier).linear("w", kernel("fp8_e4m3", "none"))


@pytest.mark.parametrize("most", [2.0**-149, 2.0**-140, 2.0**-133, 2.0**-120])
@pytest.mark.parametrize(("kind", "scale"), SCALED)
def test_scales_at_the_limits_of_float32(kind: str, scale: str, most: float) -> None:
    """A scale that would be 0 becomes 1, and that of mx is at least 2^-127, as in model loading."""
    shares = np.array([[1, -0.75, 0.5], [0.25, 0, -0.125]])
    w = (shares * most).astype(np.float32)
    numerics = {"preset": "torch-eager", "weights": {"format": kind, "scale": scale}}
    held = linear_weight(torch.from_numpy(w), resolve(numerics)).numpy().astype(np.float64)
    rule = kernel(kind, scale, "float32")
    np.testing.assert_array_equal(parameters(w).linear("w", rule), held)
    exact = parameters(w, RationalParameters).linear("w", rule)
    assert [pair[0] for pair in exact.pairs] == [Fraction(v) for v in held.ravel().tolist()]


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
def test_unscaled_weights_are_rounded_to_the_compute_format(
    rounding: str,
) -> None:
    """Only codes with a scale keep the format of their product."""
    w = weight(np.random.default_rng(3), 4, 5)
    weights = {"format": "float32", "scale": "none", "rounding": rounding}
    activations = {"format": "uint8", "scale": "per_tensor"}
    given = resolve(
        {
            "preset": "torch-eager",
            "compute": "bfloat16",
            "weights": weights,
            "activations": activations,
        }
    )
    held = linear_weight(torch.from_numpy(w), given).numpy().astype(np.float64)
    assert (held != w).any()
    rule = parse_kernel(given.to_json(), "numerics")
    np.testing.assert_array_equal(parameters(w).linear("w", rule), held)
    exact = parameters(w, RationalParameters).linear("w", rule)
    assert [pair[0] for pair in exact.pairs] == [Fraction(v) for v in held.ravel().tolist()]


@pytest.mark.parametrize("tier", [Parameters, RationalParameters])
def test_invalid_weights_are_refused(tier: Any) -> None:
    good = np.ones((2, 2), dtype=np.float32)
    with pytest.raises(Rejected, match="parameter/missing"):
        tier({}, {"w": "0" * 64})
    with pytest.raises(Rejected, match="parameter/digest"):
        tier({"w": tensor(good)}, {"w": "0" * 64})
    for bad in (np.nan, np.inf):
        with pytest.raises(Rejected, match="parameter/not-finite"):
            tier({"w": tensor(np.array([bad], dtype=np.float32))}, {"w": "0" * 64})
    with pytest.raises(Rejected, match="parameter/dtype"):
        tier({"w": tensor(np.ones(2, dtype=np.int64), "I64")}, {"w": "0" * 64})


@pytest.mark.parametrize("shape", [(4,), (1, 4, 4), ()])
def test_weights_of_linears_are_matrices(shape: tuple[int, ...]) -> None:
    """Numpy would take the tiles of one number for those of all."""
    w = np.ones(shape, dtype=np.float32)
    for kind, scale in (("int8", "per_channel"), ("fp8_e4m3", "none"), ("int4_full", "group_128")):
        with pytest.raises(Rejected, match="'w' is not a matrix") as rejected:
            parameters(w).linear("w", kernel(kind, scale))
        assert rejected.value.reason == "parameter/shape"
        with pytest.raises(Rejected, match="'w' is not a matrix") as rejected:
            both(w.astype(np.float64), Fraction(1, 1000), (kernel(kind, scale),) * 2, True, "w")
        assert rejected.value.reason == "parameter/shape"


def test_kernel_of_another_checkpoint_needs_it() -> None:
    w = np.ones((2, 2), dtype=np.float32)
    with pytest.raises(Rejected, match="there is no checkpoint of the inference kernel"):
        parameters(w).linear("w", replace(kernel("float32", "none"), served=True))


def test_other_dtypes_are_converted_to_float32() -> None:
    values = np.array([0.1, -3.0, 2.0**-140, 65504.0])
    half = values.astype(np.float16)
    brain = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_float32(tensor(half, "F16"), "w"), half.astype(np.float32))
    np.testing.assert_array_equal(as_float32(tensor(brain, "BF16"), "w"), brain.astype(np.float32))
    np.testing.assert_array_equal(as_float32(tensor(values, "F64"), "w"), values.astype(np.float32))
    for value, dtype in ((half, "F16"), (brain, "BF16"), (values, "F64")):
        single = as_float32(tensor(value, dtype), "w")
        digest = array_digest("float32", single.shape, single.tobytes())
        exact = RationalParameters({"w": tensor(value, dtype)}, {"w": digest})
        found = exact.plain("w", kernel("float32", "none", "float32"))
        assert [pair[0] for pair in found.pairs] == [Fraction(float(v)) for v in single]


@pytest.mark.parametrize("computes", [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_row_by_row_products_of_large_matrices_are_equal(
    monkeypatch: pytest.MonkeyPatch, computes: tuple[str, str]
) -> None:
    """The results agree up to the order of float64 sums."""
    rng = np.random.default_rng(5)
    w, bias = rng.standard_normal((7, 5)).astype(ml_dtypes.bfloat16), rng.standard_normal(7)
    single = {"w": w.astype(np.float32), "b": bias.astype(np.float32)}
    digests = {k: array_digest("float32", v.shape, v.tobytes()) for k, v in single.items()}
    tensors = {"w": tensor(w, "BF16"), "b": tensor(single["b"])}
    train, infer = (kernel("float32", "none", compute) for compute in computes)
    one, two = (
        Node(name, "param", (), v.shape, Reader({"key": name}, name), "")
        for name, v in single.items()
    )
    linear = Node("y", "linear", ("x", "w", "b"), (2, 7), Reader({}, "y"), "")
    block = Block("none", (one, two, linear), "y", {}, None)
    x, moved = rng.standard_normal((2, 2, 5))
    state = State(box.exact(x), Box(x - 0.1, x + np.abs(moved)), Box(x * 0 - 0.1, np.abs(moved)))
    found = []
    for most in (0, stored._LARGE):
        monkeypatch.setattr(stored, "_LARGE", most)
        monkeypatch.setattr(stored, "_AT_ONCE", 10)
        held = Parameters(tensors, digests)
        problem = DriftProblem(
            *(block, train, infer, held, {"w": "w", "b": "b"}, frozenset({"w"}), None, None)
        )
        weight, added = (parameter_value(problem, leaf, []) for leaf in (one, two))
        assert isinstance(weight, StoredMatrix) == (most == 0)
        found.append(linear_interval(problem, linear, [state, weight, added]))
        if isinstance(weight, StoredMatrix):
            sizes = [np.abs(held.linear("w", side)).max() for side in (train, infer)]
            apart = np.abs(held.linear("w", infer) - held.linear("w", train)).max()
            assert weight.value == max(sizes)
            assert weight.drift >= apart
    for part in ("t", "i", "d"):
        for end in ("lo", "hi"):
            rows, whole = (getattr(getattr(f, part), end) for f in found)
            np.testing.assert_allclose(rows, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_large_matrices_are_checked_row_by_row(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(stored, "_LARGE", 0)
    monkeypatch.setattr(stored, "_AT_ONCE", 4)
    kind = ml_dtypes.bfloat16 if dtype == "BF16" else np.float16
    w = np.random.default_rng(6).standard_normal((5, 4)).astype(kind)
    single = w.astype(np.float32)
    digest = array_digest("float32", single.shape, single.tobytes())
    held, plain = Parameters({"w": tensor(w, dtype)}, {"w": digest}), kernel("float32", "none")
    (rows,) = zip(*(held.rows("w", part, plain) for part in held.parts("w", plain)), strict=True)
    np.testing.assert_array_equal(np.concatenate(rows), held.linear("w", plain))
    np.testing.assert_array_equal(held.singles("w"), single)
    assert not held.parts("w", plain, kernel("int8", "per_channel"))
    w[4, 3] += 1
    with pytest.raises(Rejected, match="parameter/digest"):
        Parameters({"w": tensor(w, dtype)}, {"w": digest})
    w[4, 3] = np.nan
    with pytest.raises(Rejected, match="parameter/not-finite"):
        Parameters({"w": tensor(w, dtype)}, {"w": digest})


def reason(tmp_path: Path, w: np.ndarray, infer: Any, *, rho: str = "", size: float = 1) -> str:
    """Return the checker's answer to a proof of a linear, with a region around its weights."""
    rows, columns = w.shape
    graph = proofs.Graph((2, columns))
    x = graph.add("input", [], (2, columns))
    graph.add("linear", [x, graph.param("w", w)], (2, rows))
    path, train = tmp_path / "model.safetensors", proofs.numerics("float32")
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.full((2, columns), float(size))
    document = proofs.document(graph, train, infer, sha256, centre)
    if rho:
        document["cases"][0]["region"]["weights"] = rho
    found = recheck(proofs.dump(document), path)
    return f"{found.reason}: {found.detail}"


LATE = {"weights": {"format": "int8", "scale": "per_channel", "applied": "sums"}}
HALVES = {"weights": {"format": "int8", "scale": "per_channel", "scale_format": "bfloat16"}}
BYTES: Any = {"weights": ("int8", "per_channel"), "activations": ("uint8", "per_tensor")}
COARSE = {"fraction_bits": 1, "chunk": 4, "result_bits": 4, "promote": 0}


@pytest.mark.parametrize(
    ("infer", "size", "message"),
    [
        (proofs.numerics("float32") | LATE, 1.0, "parameter/scale: .* whose scales come late"),
        (proofs.numerics("float32") | HALVES, 1.0, "parameter/scale: .* stored as int8 per_chan"),
        *(
            (proofs.numerics("float32", weights=weights), 1.0, "parameter/scale: .* stored as")
            for weights in (
                ("fp4_e2m1", "nvfp4"),
                ("int4_full", "group_128"),
                ("uint4", "group_128"),
            )
        ),
        *(
            (proofs.numerics("float32", weights=(kind, "per_channel")), 2.0**-145, "is too small")
            for kind in ("int8", "fp8_e4m3")
        ),
        (proofs.numerics("float16"), 65500.0, "parameter/overflow: .* may overflow float16"),
        (proofs.numerics("float32", weights=("fp8_e4m3", "none")), 447.9, "may overflow fp8_e4m3"),
        (
            proofs.numerics("float32", byte_sums="int16_pairs", **BYTES),
            1.0,
            "rule/weight: .* a weight that is not known",
        ),
    ],
)
def test_regions_around_weights_without_a_rule_are_refused(
    tmp_path: Path, infer: Any, size: float, message: str
) -> None:
    w = np.full((4, 8), size, dtype=np.float32)
    assert reason(tmp_path, w, infer, size=2.0**-10).startswith("ok")
    assert re.search(message, reason(tmp_path, w, infer, rho="0.05", size=2.0**-10))


@pytest.mark.parametrize(
    ("infer", "size", "message"),
    [
        (proofs.numerics("float16", shards=2), 127.9, "a sum of parts may overflow float16"),
        (
            proofs.numerics("float32", accumulate="float16", tensor_core={
                "linears": COARSE, "others": COARSE
            }),
            127.0,
            "a sum of a matrix unit may overflow",
        ),
    ],
)  # fmt: skip
def test_sums_that_may_overflow_are_refused(
    tmp_path: Path, infer: Any, size: float, message: str
) -> None:
    w = np.full((4, 8), 64.0, dtype=np.float32)
    assert reason(tmp_path, w, infer, size=1).startswith("ok")
    assert re.search(f"bound/overflow: .*{message}", reason(tmp_path, w, infer, size=size))
