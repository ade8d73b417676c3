"""Linears with their own weights and activations: runs inside every domain of both programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.model.presets import refuse_strays, resolve
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine_walk import drift as affine
from kcdsl_certs.recheck.bounds_walk import derive as checked_planes
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.numerics.kernel import fits
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import kernels, proofs
from tests.support.prover import block, numerics, parameters

N, OWN = proofs.numerics, proofs.override
FULL = N("float32", "any")
MODES = ("random", "signs", "up", "down")
SECTIONS = (
    (("bfloat16", "none"), ("none", "none")),
    (("fp8_e4m3", "per_channel"), ("none", "none")),
    (("fp8_e4m3", "per_channel"), ("fp8_e4m3", "per_token")),
    (("int8", "per_tensor"), ("uint8", "per_tensor")),
    (("int8_full", "per_channel"), ("int8_full", "per_token")),
    (("fp8_e5m2", "mx"), ("fp8_e4m3", "mx")),
    (("float16", "none"), ("int8", "group_128")),
)
BLOCKS = {"attention": ("q", "k", "v", "o"), "mlp": ("up", "gate", "down")}


def drawn(rng: np.random.Generator, names: tuple[str, ...], casts: str, compute: str) -> Any:
    """Return a kernel with sections for some linears, by name or by pattern."""

    def section() -> Any:
        return SECTIONS[rng.integers(len(SECTIONS))]

    weights, activations = section()
    chosen = [name for name in names if rng.random() < 0.6] or [names[0]]
    overrides = {name: OWN(*section()) for name in chosen}
    if rng.random() < 0.5:
        overrides[rng.choice(["*", f"{names[-1][:1]}*", f"?{names[0][1:]}"])] = OWN(*section())
    pairs = {"byte_sums": "int16_pairs"}
    bytes_there = any(
        (w[0], a[0]) == ("int8", "uint8")
        for w, a in [(weights, activations)]
        + [((o["weights"]["format"],), (o["activations"]["format"],)) for o in overrides.values()]
    )
    other: dict[str, Any] = pairs if bytes_there and rng.random() < 0.5 else {}
    return N(
        compute,
        casts,
        weights=weights,
        activations=activations,
        overrides=dict(sorted(overrides.items())),
        **other,
    )


@pytest.mark.full
@pytest.mark.parametrize("radius", [0.0, 2.0**-10])
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("seed", range(4))
def test_runs_with_overrides_are_within_the_boxes(
    tmp_path: Path, kind: str, casts: str, radius: float, seed: int
) -> None:
    rng = np.random.default_rng([sorted(BLOCKS).index(kind), seed, len(casts), int(radius > 0)])
    graph = proofs.attention(rng) if kind == "attention" else proofs.mlp(rng, "silu")
    record = drawn(rng, BLOCKS[kind], casts, ("float32", "bfloat16", "float16")[seed % 3])
    train = FULL if seed % 2 else drawn(rng, BLOCKS[kind], casts, "float32")
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, train, record, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    problem = BlockProblem(block(graph), parameters(graph, train), parameters(graph, record))
    point, spread = torch.from_numpy(centre), torch.full((1, 1), radius, dtype=torch.float64)
    boxes: list[tuple[Any, Any]] = []
    found = problem.bound(point, spread).output.drift
    with np.errstate(all="ignore"):
        derived = numeric({n.name: v for n, v in propagate(scene)}[graph.output]).d
    boxes += [(found.lo.numpy(), found.hi.numpy()), (derived.lo, derived.hi)]
    near = 2.0**-16 * (boxes[0][1] - boxes[0][0]) + 1e-12
    assert all((np.abs(a - b) <= near).all() for a, b in zip(*boxes[:2], strict=True))
    try:
        forms = affine_forms(problem.graph, problem.train, problem.infer, point, spread).box()
    except NoBound:
        with pytest.raises(Rejected):
            affine(scene)
    else:
        again = affine(scene).output
        boxes += [(forms.lo.numpy(), forms.hi.numpy()), (again.lo, again.hi)]
    flat = planes(problem.graph, problem.kernels(), point, spread).output.drift
    with np.errstate(all="ignore"):
        flatter = checked_planes(scene).output.d
    boxes += [(flat.lo.numpy(), flat.hi.numpy()), (flatter.lo, flatter.hi)]
    for trial in range(12):
        x = centre + radius * rng.choice([-1.0, 0.0, 1.0, 0.5], centre.shape)
        runs = []
        for numbers, kernel in ((train, scene.train), (record, scene.infer)):
            run = kernels.Run(numbers, np.random.default_rng(trial), MODES[trial % 4])
            values = kernels.simulate(
                graph,
                run,
                x,
                lambda key, k=kernel: scene.parameters.plain(key, k),
                lambda key, k=kernel: scene.parameters.linear(key, k),
            )
            runs.append(values[graph.output])
        moved = runs[1] - runs[0]
        slack = 2.0**-44 * np.abs(runs[0]).max()
        for low, high in boxes:
            assert (low - slack <= moved).all()
            assert (moved <= high + slack).all()


@pytest.mark.parametrize("seed", range(6))
def test_both_programs_store_equal_weights_with_overrides(tmp_path: Path, seed: int) -> None:
    """By name, by pattern, and as a kernel whose default equals the section of the linear."""
    rng = np.random.default_rng(seed)
    graph = proofs.attention(rng)
    record = drawn(rng, BLOCKS["attention"], "nearest", "bfloat16")
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    assert graph.input_shape is not None
    shape = np.zeros(graph.input_shape)
    proof = parse(proofs.dump(proofs.document(graph, FULL, record, sha256, shape)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    stored, nodes = parameters(graph, record), block(graph).nodes
    for name in BLOCKS["attention"]:
        key = f"{name}.weight"
        node = next(n for n in nodes if n.op == "param" and n.attrs["key"] == key)
        mine = stored.linear(node).numpy()
        assert np.array_equal(mine, scene.parameters.linear(key, scene.infer)), name
        fitting = kernels.overriding(record["overrides"], name)
        section = record["overrides"][fitting[0]] if fitting else {}
        alone = {k: v for k, v in {**record, **section}.items() if k not in ("overrides",)}
        alone.pop("byte_sums", None)
        assert np.array_equal(mine, parameters(graph, alone).linear(node).numpy()), name


def test_attack_quantises_inputs_by_override() -> None:
    """A simulated run quantises the inputs of each linear as a kernel of its section does."""
    rng = np.random.default_rng(3)
    graph = proofs.mlp(rng, "silu")
    record = N(
        "float32",
        "nearest",
        activations=("fp8_e4m3", "per_token"),
        overrides={
            "down": OWN(("float32", "none")),
            "up": OWN(("int8", "per_tensor"), ("int8", "per_tensor")),
        },
    )
    made = parameters(graph, record)
    simulated = Simulator(block(graph), made.numerics, made)
    linears = {
        simulated._weight(node): node for node in simulated.graph.nodes if node.op == "linear"
    }
    for key, node in linears.items():
        x = rng.standard_normal((3, simulated.graph.node(node.inputs[0]).shape[-1]))
        x = x.astype(np.float32).astype(np.float64)
        seen = simulated._quantised(node, torch.from_numpy(x), None).numpy()
        served = kernels.Run(record, rng, "random").serving(key)
        assert np.array_equal(seen, served.quantised(x, key)), key
        assert np.array_equal(seen, x) == (key == "down.weight")
    free = N(
        "float32", "any", overrides={"up": OWN(("int8", "per_tensor"), ("int8", "per_tensor"))}
    )
    symbols = Simulator(block(graph), numerics(free), parameters(graph, free)).symbol_shapes()
    names = [name for name in symbols if name.startswith("quantised ")]
    assert names == [f"quantised {linears['up.weight'].name}"]


def test_name_precedes_patterns_and_patterns_must_agree() -> None:
    def section(format: str) -> dict[str, Any]:
        return {"weights": {"format": format}}

    given: dict[str, Any] = {
        "preset": "fp8-weights",
        "overrides": {
            "a.0.up.weight": section("bfloat16"),
            "a.*": section("float16"),
            "*.down": section("fp8_e5m2"),
            "?.1.up": section("float16"),
        },
    }
    spec = resolve(given)
    kernel = parse_kernel(spec.to_json(), "kernel")
    for key, format in (
        ("a.0.up.weight", "bfloat16"),
        ("a.0.gate.weight", "float16"),
        ("a.1.up.weight", "float16"),
        ("b.down.weight", "fp8_e5m2"),
        ("b.up.weight", "fp8_e4m3"),
        ("b.down.bias", "fp8_e4m3"),
        ("bb1.1.up", "fp8_e4m3"),
    ):
        assert spec.serving(key).weights.format == format
        assert kernel.serving(key).weights[0] == format
    with pytest.raises(Refusal, match=r"overrides '\*.down' and 'a.\*' differ"):
        spec.serving("a.2.down.weight")
    with pytest.raises(Rejected, match="disagree"):
        kernel.serving("a.2.down.weight")
    assert resolve(spec.to_json()) == spec


@pytest.mark.sample(11)
@pytest.mark.parametrize("seed", range(20))
def test_patterns_match_equally_in_three_implementations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(300):
        pattern = "".join(rng.choice(list("ab.*?*!\n"), rng.integers(1, 7)))
        name = "".join(rng.choice(list("ab.!\n"), rng.integers(1, 9)))
        mine = fits(pattern, name)
        assert mine == bool(kernels.overriding([pattern], name))
        found = resolve(
            {"preset": "torch-eager", "overrides": {pattern: {"weights": {"format": "float16"}}}}
        )
        assert mine == found.overrides[0].fits(f"{name}.weight")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"up": {}}, "changes nothing"),
        ({"up": {"casts": "any"}}, "has no key 'casts'"),
        ({"up": 3}, "must be a mapping"),
        ({"[qk]": {"weights": {"format": "float16"}}}, "must be the name of a linear"),
        ({"": {"weights": {"format": "float16"}}}, "must be the name of a linear"),
        ({"x" * 257: {"weights": {"format": "float16"}}}, "must be the name of a linear"),
        (
            {"a": {"weights": {}}, "a.weight": {"weights": {}}},
            "names 'a' twice",
        ),
        ({"up": {"weights": {"format": "int8"}}}, "overrides.up.int8 weights have no scale"),
        ({"up": {"weights": {"format": "fp9"}}}, "overrides.up.weights.format is 'fp9'"),
        ({"up": {"activations": {"format": "int4_full"}}}, "activations.format is 'int4_full'"),
        ({f"{k}*": {"weights": {}} for k in range(65)}, "there are more than"),
    ],
)
def test_invalid_overrides_are_refused(overrides: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        resolve({"preset": "torch-eager", "overrides": overrides})


def test_rules_of_a_kernel_apply_to_overrides() -> None:
    coded = {"activations": {"format": "int8", "scale": "per_token"}}
    for kernel in (
        {"preset": "torch-eager", "compute": "bfloat16", "casts": "toward_zero"},
        {"preset": "fp8-w8a8-per-channel", "tensor_core": "hopper_fp8"},
    ):
        resolve(kernel)
        with pytest.raises(Refusal):
            resolve({**kernel, "overrides": {"up": coded}})
    record = N("float32", "toward_zero", overrides={"up": OWN(("float32", "none"), ("int8", "mx"))})
    with pytest.raises(Rejected):
        parse_kernel(record, "kernel")
    plain = {"weights": {"format": "float32"}, "activations": {"format": "none"}}
    spec = resolve({"preset": "onnxruntime-int8-pairs", "overrides": {"up": plain}})
    assert (spec.byte_sums, spec.serving("up").byte_sums) == ("int16_pairs", "wide")
    checked = parse_kernel(spec.to_json(), "kernel")
    assert (checked.paired, checked.serving("up.weight").paired) == (True, False)


def test_override_of_an_unknown_linear_is_refused() -> None:
    spec = resolve(
        {"preset": "fp8-weights", "overrides": {"lm_haed": {"weights": {"format": "bfloat16"}}}}
    )
    refuse_strays(resolve({"preset": "fp8-weights"}), {})
    with pytest.raises(Refusal, match="no linear of the model has the name 'lm_haed'") as refusal:
        refuse_strays(spec, {name: (name,) for name in ("lm_head.weight", "up.weight")})
    assert refusal.value.diagnostics[0].help == "did you mean 'lm_head'?"
    tied = {"lm_head.weight": ("embed_tokens.weight", "lm_head.weight")}
    spec = resolve(
        {"preset": "fp8-weights", "overrides": {"lm_head": {"weights": {"format": "bfloat16"}}}}
    )
    with pytest.raises(Refusal, match="are one weight"):
        refuse_strays(spec, tied)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"": OWN(("bfloat16", "none"))},
        {"[a]": OWN(("bfloat16", "none"))},
        {"a.weight": OWN(("bfloat16", "none"))},
        {"a": {"weights": {"format": "bfloat16", "scale": "none"}}},
        {"a": {**OWN(("bfloat16", "none")), "overrides": {}}},
        {"a": OWN(("int8", "none"))},
        {"a" * 257: OWN(("bfloat16", "none"))},
        {f"{k}*": OWN(("bfloat16", "none")) for k in range(65)},
        {f"{k}": OWN(("bfloat16", "none")) for k in range(4097)},
        [],
    ],
)
def test_invalid_override_records_are_rejected(change: Any) -> None:
    with pytest.raises(Rejected):
        parse_kernel(N("bfloat16", "any", overrides=change), "kernel")
