"""Weights whose scales multiply sums of products of codes, as in Marlin's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import term_roundings
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine_walk import drift as affine
from kcdsl_certs.recheck.bounds_walk import derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.prover import block, parameters

N = proofs.numerics
EXACT = N("float64", "any", accumulate="float64")
ROWS, WIDTH, OUT = 2, 70, 6
HALVES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Floats = np.ndarray
CASES = [
    ("int4_full", "per_channel", "stored_sums"),
    ("int8", "per_channel", "stored_sums"),
    ("int8_full", "per_tensor", "stored_sums"),
    ("fp8_e4m3", "per_channel", "sums"),
    ("fp8_e4m3", "group_32", "sums"),
    ("int4_full", "group_64", "sums"),
    ("uint4", "group_32", "sums"),
    ("uint4", "per_channel", "stored_sums"),
    ("fp4_e2m1", "mx", "sums"),
]


def record(compute: str, casts: str, stored: tuple[str, str, str]) -> Any:
    found = N(compute, casts)
    format, scale, applied = stored
    found["weights"] = {"format": format, "scale": scale, "applied": applied}
    return found


def linear(rng: np.random.Generator, size: float, biased: bool) -> Any:
    g = proofs.Graph((ROWS, WIDTH))
    x = g.add("input", [], (ROWS, WIDTH))
    scales = np.exp(rng.uniform(-2, 2, (OUT, 1))) * size
    w = g.param("w.weight", rng.standard_normal((OUT, WIDTH)) * scales / WIDTH**0.5)
    names = [x, w]
    if biased:
        names.append(g.param("w.bias", rng.standard_normal(OUT) * size))
    g.add("linear", names, (ROWS, OUT))
    return g


def codes(w: Floats, format: str, layout: str) -> tuple[Floats, Floats]:
    """Return codes minus zero points, and their scales: by definition, in float32."""
    columns = int(w.shape[1])
    widths: dict[str, int] = {"per_channel": columns, "group_32": 32, "group_64": 64, "mx": 32}
    width = widths.get(layout, columns)
    if layout == "per_tensor":
        groups = [(slice(None), slice(None))]
    else:
        groups = [
            (slice(i, i + 1), slice(k, k + width))
            for i in range(w.shape[0])
            for k in range(0, columns, width)
        ]
    code, scale = np.zeros(w.shape, np.float32), np.zeros(w.shape, np.float32)
    one = np.float32(1)
    for where in groups:
        part = w[where]
        amax = np.abs(part).max()
        match format:
            case "uint4":
                low = part.min()
                s = np.maximum(part.max() - low, np.float32(1e-5)) / np.float32(15)
                zero = np.clip(-np.rint(low / s), 0, 15)
                found = np.clip(np.rint(part / s) + zero, 0, 15) - zero
            case "int8_full" | "int4_full":
                most = 128 if format == "int8_full" else 8
                s = np.maximum(amax / np.float32(most - 0.5), np.float32(2.0**-23))
                found = np.clip(np.rint(part * (one / s)), -most, most - 1)
            case "int8":
                s = amax / np.float32(127)
                found = np.clip(np.rint(part / s), -127, 127)
            case "fp8_e4m3":
                s = amax / np.float32(448)
                found = np.clip(part / s, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            case _:
                s = np.exp2(np.floor(np.log2(amax)) - 2).astype(np.float32)
                found = np.clip(part / s, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        code[where], scale[where] = np.asarray(found).astype(np.float32), s
    return code, scale


def run(
    x: Floats, code: Floats, scale: Floats, bias: Floats | None, compute: str, applied: str,
    rng: np.random.Generator,
) -> Floats:  # fmt: skip
    """Return a run in float32: every group summed in some order, then multiplied by its scale."""
    half = HALVES.get(compute, np.float32)
    x = x.astype(half).astype(np.float32)
    out = np.zeros((x.shape[0], code.shape[0]), np.float32)
    for i in range(x.shape[0]):
        for j in range(code.shape[0]):
            total = np.float32(0)
            for s in rng.permutation(np.unique(scale[j])):
                part = np.float32(0)
                for k in rng.permutation(np.flatnonzero(scale[j] == s)):
                    part = part + x[i, k] * code[j, k]
                if applied == "stored_sums":
                    part = np.float32(half(part))
                total = total + part * s
            out[i, j] = total
    if bias is not None:
        if applied == "stored_sums":
            out = out.astype(half).astype(np.float32)
        out = out + bias.astype(half).astype(np.float32)
    return out.astype(half).astype(np.float64)


def boxes(graph: Any, given: Any, centre: Floats, radius: float, path: Path) -> Any:
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, EXACT, given, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    problem = BlockProblem(block(graph), parameters(graph, EXACT), parameters(graph, given))
    point, spread = torch.from_numpy(centre), torch.full((1, 1), radius, dtype=torch.float64)
    with np.errstate(all="ignore"):
        derived = {n.name: numeric(v) for n, v in propagate(scene)}[graph.output].d
        found = {
            "interval": problem.bound(point, spread).output.drift,
            "affine": affine_forms(
                problem.graph, problem.train, problem.infer, point, spread
            ).box(),
            "planes": planes(problem.graph, problem.kernels(), point, spread).output.drift,
        }
        checked = {
            "interval": derived,
            "affine": affine(scene).output,
            "planes": derive(scene).output.d,
        }
    return (
        {name: (box.lo.numpy(), box.hi.numpy()) for name, box in found.items()},
        {name: (box.lo, box.hi) for name, box in checked.items()},
        scene,
    )


@pytest.mark.sample(19)
@pytest.mark.parametrize("size", [1.0, 2.0**-40, 2.0**20])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", CASES, ids=" ".join)
def test_runs_with_late_scales_are_within_every_box(
    tmp_path: Path, stored: tuple[str, str, str], compute: str, casts: str, biased: bool,
    size: float,
) -> None:  # fmt: skip
    if compute == "float16" and size != 1.0:
        size = 2.0**-6 if size < 1 else 8.0
    rng = np.random.default_rng([CASES.index(stored), len(compute), len(casts), biased])
    graph, given = linear(rng, size, biased), record(compute, casts, stored)
    radius = 0.0 if biased else 2.0**-9
    centre = np.rint(rng.standard_normal((ROWS, WIDTH)) * 2**12) / 2**12
    mine, theirs, scene = boxes(graph, given, centre, radius, tmp_path / "model.safetensors")
    for name in ("interval", "planes"):
        wide = 2.0**-12 * (mine[name][1] - mine[name][0]) + 2.0**-38 * size
        assert all(
            (np.abs(a - b) <= wide).all() for a, b in zip(mine[name], theirs[name], strict=True)
        )
    w = graph.tensors["w.weight"].astype(np.float32)
    code, scale = codes(w, *stored[:2])
    assert np.array_equal(
        scene.parameters.linear("w.weight", scene.infer), (code * scale).astype(np.float64)
    )
    node = block(graph).nodes[1]
    assert np.array_equal(parameters(graph, given).linear(node).numpy(), code * scale)
    bias = graph.tensors.get("w.bias")
    for _ in range(3):
        x = centre + radius * rng.choice([-1.0, 0.0, 1.0], centre.shape)
        exact = x @ w.astype(np.float64).T + (0 if bias is None else bias.astype(np.float64))
        moved = run(x, code, scale, bias, compute, stored[2], rng) - exact
        slack = 2.0**-44 * np.abs(exact).max()
        for found in (*mine.values(), *theirs.values()):
            assert (found[0] - slack <= moved).all()
            assert (moved <= found[1] + slack).all()


def test_stored_sums_exceed_the_bound_of_dequantised_weights(tmp_path: Path) -> None:
    """bfloat16 runs with stored sums exceed the bound of the same kernel without them."""
    rng = np.random.default_rng(1)
    graph = linear(rng, 1.0, True)
    centre = np.rint(rng.standard_normal((ROWS, WIDTH)) * 2**12) / 2**12
    stored = ("int8", "per_channel", "stored_sums")
    fine = record("bfloat16", "nearest", stored)
    plain = N("bfloat16", "nearest", weights=("int8", "per_channel"))
    w = graph.tensors["w.weight"].astype(np.float32)
    code, scale = codes(w, *stored[:2])
    exact = centre @ w.astype(np.float64).T + graph.tensors["w.bias"]
    moved = run(centre, code, scale, graph.tensors["w.bias"], "bfloat16", "stored_sums", rng)
    moved = moved - exact
    inside = []
    for given in (fine, plain):
        low, high = boxes(graph, given, centre, 0.0, tmp_path / "m.safetensors")[0]["interval"]
        inside.append(bool(((low <= moved) & (moved <= high)).all()))
    assert inside == [True, False]


def test_possibly_overflowing_sums_of_codes_have_no_bound(tmp_path: Path) -> None:
    """Scales below one make codes larger than weights: their sum may overflow float16."""
    rng = np.random.default_rng(2)
    graph = linear(rng, 1.0, False)
    centre = np.full((ROWS, WIDTH), 16.0)
    given = record("float16", "any", ("int8", "per_channel", "stored_sums"))
    train, infer = parameters(graph, EXACT), parameters(graph, given)
    point = torch.from_numpy(centre), torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(NoBound):
        BlockProblem(block(graph), train, infer).bound(*point)
    sha256 = proofs.write_safetensors(tmp_path / "m.safetensors", graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, EXACT, given, sha256, centre, 0.0)))
    scene = Derivation(proof, read(tmp_path / "m.safetensors").tensors).problem(proof.cases[0])
    with pytest.raises(Rejected, match="may overflow"):
        list(propagate(scene))
    given = record("float16", "any", ("int8", "per_channel", "sums"))
    BlockProblem(block(graph), train, parameters(graph, given)).bound(*point)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": {"format": "float16", "applied": "sums"}}, "weights.scale 'none'"),
        ({"weights": {"format": "fp4_e2m1", "scale": "nvfp4", "applied": "sums"}}, "'nvfp4'"),
        (
            {"weights": {"format": "int8", "scale": "group_32", "applied": "stored_sums"}},
            "a scale for a whole",
        ),
        ({"weights": {"format": "int8", "scale": "per_channel", "applied": "late"}}, "allowed"),
        (
            {
                "weights": {"format": "int8", "scale": "per_channel", "applied": "sums"},
                "activations": {"format": "int8", "scale": "per_token"},
            },
            "activations are quantised",
        ),
        (
            {
                "compute": "bfloat16",
                "accumulate": "bfloat16",
                "weights": {"format": "int8", "scale": "per_channel", "applied": "sums"},
            },
            "formed in float32",
        ),
        (
            {
                "compute": "bfloat16",
                "shards": 2,
                "weights": {"format": "int8", "scale": "per_channel", "applied": "stored_sums"},
            },
            "shards",
        ),
        (
            {
                "compute": "float16",
                "accumulate": "float16",
                "activations": {"format": "fp8_e4m3", "scale": "per_token"},
                "weights": {"format": "fp8_e4m3", "scale": "per_channel"},
            },
            "exceed the largest number of float16",
        ),
    ],
)
def test_kernels_without_a_rule_are_refused(given: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        resolve({"preset": "torch-eager", **given})
    try:
        spec = resolve(
            {"preset": "torch-eager", **{k: v for k, v in given.items() if k == "compute"}}
        )
    except Refusal:
        return
    written = {**spec.to_json(), **given}
    written["activations"] = given.get("activations", {"format": "none", "scale": "none"})
    written["weights"] = {"scale": "none", **given["weights"]}
    with pytest.raises(Rejected):
        parse_kernel(written, "kernel")


def test_numerics_record_states_late_scales() -> None:
    spec: Numerics = resolve(
        {
            "preset": "fp8-weights",
            "weights": {"format": "fp8_e4m3", "scale": "per_channel", "applied": "sums"},
        }
    )
    assert spec.to_json()["weights"]["applied"] == "sums"
    assert resolve(spec.to_json()) == spec
    assert parse_kernel(spec.to_json(), "kernel").late == "sums"


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        ({"format": "fp4_e2m1", "scale": "nvfp4"}, {"format": "fp8_e4m3", "scale": "per_token"}, 5),
        ({"format": "fp4_e2m1", "scale": "nvfp4"}, {"format": "none", "scale": "none"}, 2),
        ({"format": "fp4_e2m1", "scale": "nvfp4"}, {"format": "fp4_e2m1", "scale": "nvfp4"}, 6),
        ({"format": "fp4_e2m1", "scale": "mx"}, {"format": "fp8_e4m3", "scale": "per_token"}, 4),
    ],
)
def test_product_scale_is_rounded_separately(weights: Any, activations: Any, expected: int) -> None:
    """float32(m·s), times the code, the input's code and its scale: five roundings."""
    spec = resolve({"preset": "torch-eager", "weights": weights, "activations": activations})
    assert term_roundings(Rounding(spec)) == expected
    assert parse_kernel(spec.to_json(), "kernel").before_sums == expected
