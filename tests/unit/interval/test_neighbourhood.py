"""Weight balls: supported domains bound them, and all others refuse them."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.route.catalogue import BackendSpec, Fragment
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.state import Rows
from kcdsl_backends.drift.boxes.weight_ball import WeightBall, near
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.recheck import recheck
from tests.support import proofs, prover

RHO = Fraction(1, 64)
RECORDS = proofs.numerics("float32", "nearest"), proofs.numerics("bfloat16", "nearest")


def graph() -> Any:
    return proofs.mlp(np.random.default_rng(3), "relu")


def problem(some: Any, rho: Fraction = RHO) -> BlockProblem:
    sides = [prover.parameters(some, record) for record in RECORDS]
    tensors = {key: torch.from_numpy(array) for key, array in some.tensors.items()}
    one, two = (prover.numerics(record) for record in RECORDS)
    around = WeightBall(rho, tensors, one, two, torch.device("cpu"))
    return BlockProblem(prover.block(some), *sides, weight_ball=around)


def states(some: Any) -> tuple[torch.Tensor, torch.Tensor]:
    centre = np.random.default_rng(4).standard_normal(some.input_shape).astype(np.float32)
    return torch.from_numpy(centre).double(), torch.zeros(1, 1, dtype=torch.float64)


def drift_of(some: Any) -> float:
    """Return the largest drift by affine forms and boxes together."""
    found = problem(some)
    box = found.forms(*states(some)).box().meet(found.bound(*states(some)).output.drift)
    return float(box.mag().amax())


def stated(some: Any, path: Path, weights: Any, **case: Any) -> bytes:
    sha256 = proofs.write_safetensors(path, some.tensors)
    document = proofs.document(some, *RECORDS, sha256, states(some)[0].numpy())
    document["cases"][0] |= case
    if weights is not None:
        document["cases"][0]["region"]["weights"] = weights
    return json.dumps(document).encode()


def test_bound_grows_from_that_of_the_checkpoint() -> None:
    some = graph()
    known = replace(problem(some), weight_ball=None).bound(*states(some)).output.drift.mag().amax()
    sizes = [
        float(problem(some, Fraction(rho)).bound(*states(some)).output.drift.mag().amax())
        for rho in ("1e-12", "1e-6", "1e-4", "1e-2", "0.5")
    ]
    assert sizes[0] == pytest.approx(float(known), rel=1e-6)
    assert sizes == sorted(sizes)
    assert sizes[-1] > 4 * sizes[0]


def test_affine_forms_support_weight_balls(tmp_path: Path) -> None:
    """Both programs agree, on a larger bound than for the checkpoint alone."""
    some = graph()
    path = tmp_path / "model.safetensors"
    known = recheck(stated(some, path, None, domain="affine"), path)
    found = recheck(stated(some, path, "0.015625", domain="affine"), path)
    assert known.ok, known
    assert found.ok, found
    assert float.fromhex(found.bound) > 1.2 * float.fromhex(known.bound)
    assert float.fromhex(found.bound) <= drift_of(some) * (1 + 2.0**-10)
    assert drift_of(some) <= float.fromhex(found.bound) * 1.1


def test_constant_gain_of_a_norm_is_not_perturbed(tmp_path: Path) -> None:
    some = graph()
    norm = next(node for node in some.nodes if node["op"] == "layer_norm")
    gain = next(node for node in some.nodes if node["name"] == norm["inputs"][1])
    moving = drift_of(some)
    gain["op"] = "constant"
    some.constants[gain["attrs"]["key"]] = some.tensors.pop(gain["attrs"]["key"])
    fixed = drift_of(some)
    assert fixed < moving
    path = tmp_path / "model.safetensors"
    found = recheck(stated(some, path, "0.015625", domain="affine"), path)
    assert found.ok, found
    assert fixed <= float.fromhex(found.bound) * 1.1


def test_perturbed_rope_table_has_no_bound() -> None:
    some = proofs.attention(np.random.default_rng(2))
    rope = next(node for node in some.nodes if node["op"] == "rope")
    for name in rope["inputs"][1:]:
        table = next(node for node in some.nodes if node["name"] == name)
        table["op"] = "param"
        some.tensors[table["attrs"]["key"]] = some.constants.pop(table["attrs"]["key"])
    for way in ("bound", "forms"):
        with pytest.raises(NoBound, match="rotation"):
            getattr(problem(some), way)(*states(some))


def test_linear_bounds_refuse_weight_balls(monkeypatch: pytest.MonkeyPatch) -> None:
    some = graph()
    found = problem(some)
    kernels: list[Any] = []
    monkeypatch.setattr(
        "kcdsl_backends.certifier.statements.problems.propagate",
        lambda graph, k, *rest: kernels.append(k),
    )
    found.bound(*states(some))
    with pytest.raises(NoBound, match="around the weights"):
        planes(found.graph, kernels[0], *states(some))


def test_proofs_of_any_length_refuse_weight_balls(tmp_path: Path) -> None:
    some = graph()
    known = problem(some)
    rows = replace(known, rows=Rows(2, {}, {}))
    for way in ("bound", "forms"):
        with pytest.raises(NoBound, match="any length"):
            getattr(rows, way)(*states(some))
    path = tmp_path / "model.safetensors"
    document = json.loads(stated(some, path, "0.015625"))
    assert recheck(json.dumps(document).encode(), path).ok
    centre = proofs.array(states(some)[0].numpy()[:1])
    document["cases"][0]["region"] |= {"kind": "rows", "longest": 4, "centre": centre}
    outcome = recheck(json.dumps(document).encode(), path)
    assert (outcome.ok, outcome.reason) == (False, "document/region")


@pytest.mark.parametrize(
    "text", ["0", "0.0", "1e-2", "0.010", ".5", "0.6", "1", "-0.5", "1/3.0", "2/6", "nan", None]
)
def test_radius_has_one_spelling(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "model.safetensors"
    outcome = recheck(stated(graph(), path, "x" if text is None else text), path)
    assert (outcome.ok, outcome.reason) == (False, "document/region")


def test_proof_of_a_smaller_ball_does_not_cover_a_larger_one(tmp_path: Path) -> None:
    some, path = graph(), tmp_path / "model.safetensors"
    small = recheck(stated(some, path, "0.015625"), path)
    large = recheck(stated(some, path, "0.25"), path)
    claim = small.bound
    assert float.fromhex(large.bound) > float.fromhex(claim)
    document = json.loads(stated(some, path, "0.25"))
    document["claim"] = document["cases"][0]["claim"] = claim
    assert recheck(json.dumps(document).encode(), path).reason == "claim/too-small"


def test_exceeded_static_scales_have_no_bound() -> None:
    w = torch.full((2, 4), 2.0**-110)
    one, two = (
        prover.numerics(record)
        for record in (RECORDS[0], proofs.numerics(weights=("int8", "per_channel")))
    )
    around = WeightBall(RHO, {"w": w}, one, two, torch.device("cpu"))
    from kcdsl.model.graph import Node

    with pytest.raises(NoBound, match="scale"):
        around.held(Node("n", "param", (), (2, 4), {"key": "w"}, ""), linear=True)


def test_ends_are_float32_numbers_around_the_region() -> None:
    w = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**-149, 3.4e38, 2.0**-126], dtype=torch.float32)
    for rho in (Fraction(1, 2), Fraction("1e-4"), Fraction(1, 2**30)):
        box = near(w.double(), rho)
        assert bool((box.lo.float().double() == box.lo).all())
        for low, value, high in zip(box.lo.tolist(), w.tolist(), box.hi.tolist(), strict=True):
            centre = Fraction(value)
            assert Fraction(low) <= centre <= Fraction(high)
            beyond = torch.tensor(high, dtype=torch.float32).nextafter(torch.tensor(torch.inf))
            if value != 0 and bool(torch.isfinite(beyond)):
                assert Fraction(float(beyond)) > centre + rho * abs(centre)


def test_backend_without_declared_support_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kcdsl.api.backends import formal_backend
    from kcdsl.diagnostics import Refusal

    silent = BackendSpec("silent", "json:loads", frozenset({Fragment.UNIVERSAL_DRIFT}))
    monkeypatch.setattr("kcdsl.api.backends.catalogue", lambda: (silent,))
    backend: Any = formal_backend(None)
    assert backend.spec is silent
    with pytest.raises(Refusal) as refused:
        formal_backend(None, around_weights=True)
    assert refused.value.diagnostics[0].code.id == "KC475"
