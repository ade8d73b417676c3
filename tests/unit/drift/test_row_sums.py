"""Sums over rows: both programs bound the float64 sum of all rows but one, tightly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.first_hour_verify import OPTIONS, Row, write_case
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.row_sums import (
    BoundedRows,
    KeyRows,
    KeyVectors,
    RowBound,
    RowSums,
    ValueRows,
    Vectors,
    WeightedRows,
)
from kcdsl_certs.recheck.affine import adjoint as checker_adjoint
from kcdsl_certs.recheck.affine.many_rows import (
    Line,
    ManyRows,
    Places,
    RowErrors,
    Through,
    Weighted,
)

HEADS, COUNT, KEYS, WIDTH, INPUTS = 3, 40, 37, 4, 24
OWN = 5


def _draw(scale: float, *, values: bool, keys: bool, heads: int = HEADS) -> dict[str, Any]:
    """Return numpy arrays of functionals of row 5, of a region of 37 rows."""
    rng = np.random.default_rng(int(values) + 2 * int(keys) + heads)
    drawn: dict[str, Any] = {
        "radius": scale * rng.random((KEYS, INPUTS)) ** 8,
        "along": rng.standard_normal((2, KEYS, INPUTS)),
        "size": scale * rng.random((2, KEYS)),
    }
    if values:
        drawn["p"] = rng.random((heads, KEYS)) ** 6
        drawn["each"] = rng.standard_normal((heads, COUNT, WIDTH)) * 1e-3
        drawn["weight"] = rng.standard_normal((heads, WIDTH, INPUTS)) * 1e3
    if keys:
        drawn["s"] = rng.standard_normal((heads, COUNT, KEYS - 2)) * 1e4
        drawn["k"] = rng.standard_normal((heads, KEYS - 2, INPUTS)) * 1e-5
    return drawn


def _exact(drawn: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return α [B, keys, n] in float64, and the bound of all rows but row 5."""
    alpha = np.zeros((COUNT, KEYS, INPUTS))
    if "p" in drawn:
        alpha += np.einsum("hj,hbn->bjn", drawn["p"], drawn["each"] @ drawn["weight"])
    if "s" in drawn:
        alpha[:, 1:-1] += np.einsum("hbj,hjn->bjn", drawn["s"], drawn["k"])
    each = (np.abs(alpha) * drawn["radius"]).sum(-1)
    each += (np.abs(np.einsum("bjn,kjn->bkj", alpha, drawn["along"])) * drawn["size"]).sum(1)
    return alpha, np.delete(each, OWN, axis=1).sum(-1)


def _prover(drawn: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tensors = {name: torch.from_numpy(part) for name, part in drawn.items()}
    bound = BoundedRows.of(RowBound(tensors["radius"], tensors["along"], tensors["size"]))
    found = None
    if "p" in drawn:
        vectors = Vectors.of(tensors["each"], tensors["weight"], bound)
        values = ValueRows(vectors, tensors["p"], tensors["p"])
        found = RowSums(bound, OWN, 0, KEYS, COUNT, values=values)
    if "s" in drawn:
        ways, top = tensors["k"], 2.0 ** math.frexp(float(tensors["k"].abs().max()))[1]
        known = KeyVectors(ways / top, top, bound, 1, KEYS - 2)
        keys = KeyRows(tensors["s"].transpose(0, 1), known, slice(0, len(ways)))
        other = RowSums(bound, OWN, 1, KEYS - 1, COUNT, keys=keys)
        found = other if found is None else found.plus(other)
    assert found is not None
    row = found.row.values[:, 0].numpy()
    return row, found.magnitude().numpy(), found.all_rows.values.numpy()


def _checker(drawn: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lines = [Line(*pair) for pair in zip(drawn["along"], drawn["size"], strict=True)]
    rows, found = RowErrors(drawn["radius"], tuple(lines)), None
    if "p" in drawn:
        through = Through.of(drawn["each"], drawn["weight"], rows)
        found = ManyRows(rows, OWN, COUNT, drawn["p"], through, drawn["p"])
    if "s" in drawn:
        weights, places = drawn["s"].swapaxes(0, 1), Places(drawn["k"], rows, 1)
        other = ManyRows(rows, OWN, COUNT, weights=weights, places=places)
        found = other if found is None else found.joined(other)
    assert found is not None
    return found.row.values[:, 0], found.bound(), found.all_rows.values


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(
    ("values", "keys", "heads"),
    [(True, True, 3), (True, False, 3), (False, True, 3), (False, True, 1)],
)
def test_bounds_hold_and_are_tight(scale: float, values: bool, keys: bool, heads: int) -> None:
    drawn = _draw(scale, values=values, keys=keys, heads=heads)
    alpha, exact = _exact(drawn)
    for row, bound, rows in (_prover(drawn), _checker(drawn)):
        assert (bound >= exact).all()
        assert (bound <= exact * (1 + 2.0**-12)).all()
        assert np.allclose(row, alpha[:, OWN], rtol=1e-5, atol=1e-6 * np.abs(alpha).max())
        assert np.allclose(rows, alpha, rtol=1e-5, atol=1e-6 * np.abs(alpha).max())


def test_an_only_row_counts_where_float32_underflows() -> None:
    """Row 0 reads itself alone, and its functional is 2^-160 of the unit of all heads."""
    drawn = _draw(1.0, values=True, keys=False, heads=2)
    drawn["size"][:] = 0
    for name, by in (("each", 2.0**-80), ("weight", 2.0**80)):
        drawn[name][0] *= by
        drawn[name][1] /= by
    alpha, _ = _exact({**drawn, "p": np.ones((2, KEYS))})
    exact = (np.abs(alpha[:, 0]) * drawn["radius"][0]).sum(-1)
    tensors = {name: torch.from_numpy(part) for name, part in drawn.items()}
    limit = BoundedRows.of(RowBound(tensors["radius"], tensors["along"], tensors["size"]))
    vectors, ones = Vectors.of(tensors["each"], tensors["weight"], limit), torch.ones(2, 1)
    values = ValueRows(vectors, ones.double(), ones.double())
    prover = RowSums(limit, 0, 0, 1, COUNT, values=values)
    rows = RowErrors(drawn["radius"])
    through, share = Through.of(drawn["each"], drawn["weight"], rows), np.ones((2, 1))
    checker = ManyRows(rows, 0, COUNT, share, through, share)
    for row, bound in (
        (prover.row.values[:, 0].numpy(), prover.magnitude().numpy()),
        (checker.row.values[:, 0], checker.bound()),
    ):
        assert (np.abs(row) @ drawn["radius"][0] + bound >= exact).all()


def test_own_parts_of_rows_are_formed_some_at_a_time() -> None:
    drawn = _draw(1.0, values=True, keys=False)
    alpha, _ = _exact(drawn)
    tensors = {name: torch.from_numpy(part) for name, part in drawn.items()}
    bound = BoundedRows.of(RowBound(tensors["radius"], tensors["along"], tensors["size"]))
    vectors = Vectors.of(tensors["each"], tensors["weight"], bound)
    lines = [Line(*pair) for pair in zip(drawn["along"], drawn["size"], strict=True)]
    rows = RowErrors(drawn["radius"], tuple(lines))
    through = Through.of(drawn["each"], drawn["weight"], rows)
    for t in (0, OWN, OWN + 1, 3, KEYS - 1, 8, 7):
        one = vectors.row(tensors["p"], t).numpy()
        two = ManyRows(rows, t, COUNT, drawn["p"], through, drawn["p"]).row.values[:, 0]
        for found in (one, two):
            assert np.allclose(found, alpha[:, t], rtol=1e-5, atol=1e-6 * np.abs(alpha).max())


NEAR = 5.0
"""The largest excess of norms over exact sums of rows with errors of different sizes."""


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(("keys", "heads"), [(True, 3), (False, 3), (True, 1)])
def test_norms_of_many_rows_hold_and_agree_in_both_programs(
    monkeypatch: pytest.MonkeyPatch, scale: float, keys: bool, heads: int
) -> None:
    monkeypatch.setattr("kcdsl_backends.drift.affine.row_sums.MANY", 1)
    monkeypatch.setattr("kcdsl_certs.recheck.affine.many_rows._LARGE", 1)
    drawn = _draw(scale, values=True, keys=keys, heads=heads)
    _, exact = _exact(drawn)
    (_, prover, _), (_, checker, _) = _prover(drawn), _checker(drawn)
    assert (prover >= exact).all()
    assert (checker >= exact).all()
    assert (prover > exact * (1 + 2.0**-12)).any()  # these are norms
    assert (prover <= exact * NEAR).all()
    assert np.allclose(prover, checker, rtol=2.0**-14, atol=0)


@pytest.mark.full
def test_checker_confirms_norm_bounds_of_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any
) -> None:
    goals = list[dict[str, Any]]()
    write_case(tmp_path, Row("attn_0", 128, 6))
    prover, checker = "kcdsl_backends.drift.affine.row_sums", "kcdsl_certs.recheck.affine.many_rows"
    monkeypatch.setattr("kcdsl_backends.drift.affine.error_bounds.at_once", lambda tape: 128)
    for least in (2**40, 1):  # exact sums, norms
        monkeypatch.setattr(f"{prover}.MANY", least)
        monkeypatch.setattr(f"{checker}._LARGE", least)
        ran = cli("verify", tmp_path / "contract.yaml", "--format", "json", *OPTIONS)
        assert ran.code == 0, ran.stderr
        goals += json.loads(ran.stdout)["goals"]
    exact, norms = (goal["bound"] for goal in goals)
    assert all(goal["verdict"] == "held" for goal in goals)
    assert exact < norms <= 1.5 * exact


@pytest.mark.full
def test_checker_confirms_norm_bounds_of_small_functionals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any
) -> None:
    goals = list[dict[str, Any]]()
    write_case(tmp_path, Row("attn_0", 128, 6))
    prover, checker = "kcdsl_backends.drift.affine.tape", "kcdsl_certs.recheck.affine.tape"
    for least in (2**40, 1):
        monkeypatch.setattr(f"{prover}.MANY_PRODUCTS", least)
        monkeypatch.setattr(f"{checker}._MANY", least)
        ran = cli("verify", tmp_path / "contract.yaml", "--format", "json", *OPTIONS[2:])
        assert ran.code == 0, ran.stderr
        goals += json.loads(ran.stdout)["goals"]
    rows, norms = (goal["bound"] for goal in goals)  # of each row, of all rows together
    assert all(goal["verdict"] == "held" and goal["evidence"]["confirmed"] for goal in goals)
    assert rows != norms
    assert 0.99 * rows <= norms <= 1.1 * rows
    assert all(0.7 * rows <= goal["attack"] <= goal["bound"] for goal in goals)


def test_norms_are_exact_for_equal_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcdsl_backends.drift.affine.row_sums.MANY", 1)
    monkeypatch.setattr("kcdsl_certs.recheck.affine.many_rows._LARGE", 1)
    drawn = _draw(1.0, values=True, keys=False)
    drawn["radius"] = np.broadcast_to(np.linspace(1, 2, KEYS)[:, None], (KEYS, INPUTS)).copy()
    drawn["size"][:] = 0
    drawn["weight"] = 1e3 * np.sign(drawn["weight"])
    drawn["each"][:, :, 1:] = 0
    drawn["each"][1:] = 0
    _, exact = _exact(drawn)
    for _, bound, _ in (_prover(drawn), _checker(drawn)):
        assert (bound >= exact).all()
        assert (bound <= exact * (1 + 2.0**-12)).all()


def _through_weight(
    drawn: dict[str, Any], weight: np.ndarray, alpha: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what both programs say of functionals [B, m] of outputs of row 5, from `first` on."""
    tensors = {name: torch.from_numpy(drawn[name]) for name in ("radius", "along", "size")}
    bound = BoundedRows.of(RowBound(tensors["radius"], tensors["along"], tensors["size"]))
    window, shape = ((OWN, OWN + 1), (first, first + alpha.shape[1])), (KEYS, len(weight))
    prover = WeightedRows(torch.from_numpy(weight), bound)
    one = prover.magnitude(Adjoint(torch.from_numpy(alpha[:, None]), window, shape)).numpy()
    lines = [Line(*pair) for pair in zip(drawn["along"], drawn["size"], strict=True)]
    checker = Weighted(weight, RowErrors(drawn["radius"], tuple(lines)))
    return one, checker.bound(checker_adjoint.Adjoint(alpha[:, None], (OWN, first)))


@pytest.mark.parametrize("outputs", [9, 60])
@pytest.mark.parametrize(("scale", "by"), [(1.0, 1.0), (1e-30, 1e20), (1e30, 1e-200)])
def test_functionals_through_a_weight_are_bounded_without_their_product(
    scale: float, by: float, outputs: int
) -> None:
    drawn, rng = _draw(scale, values=False, keys=False), np.random.default_rng(outputs)
    weight = rng.standard_normal((outputs, INPUTS)) * 2.0 ** rng.integers(-9, 9, (outputs, 1))
    alpha = rng.standard_normal((COUNT, 7)) * by
    alpha[0] = 0.0
    product = alpha @ weight[2:9]
    exact = np.abs(product) @ drawn["radius"][OWN]
    for along, size in zip(drawn["along"], drawn["size"], strict=True):
        exact += np.abs(product @ along[OWN]) * size[OWN]
    one, two = _through_weight(drawn, weight, alpha, 2)
    assert (one >= exact).all()
    assert (two >= exact).all()
    assert np.allclose(one[1:], two[1:], rtol=2.0**-14, atol=0)
    assert max(one[0], two[0]) <= 2.0**-100 * scale


def test_a_weight_with_one_direction_meets_its_bound() -> None:
    """Of all functionals the one along the only left singular vector is as large as the bound says,
    where the radius of the row is as large as the product."""
    drawn, rng = _draw(1.0, values=False, keys=False), np.random.default_rng(8)
    left, right = rng.standard_normal(11), rng.standard_normal(INPUTS)
    drawn["radius"] = np.tile(np.abs(right), (KEYS, 1))
    drawn["size"][:] = 0
    measure = np.abs(right) / np.abs(right).max()
    weight, alpha = np.outer(left, right / measure), left[None] / np.linalg.norm(left)
    exact = np.abs(alpha @ weight) @ drawn["radius"][OWN]
    for found in _through_weight(drawn, weight, alpha, 0):
        assert exact <= found
        assert found <= exact * (1 + 2.0**-12)


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**-520])
def test_squares_below_float64_leave_a_bound(scale: float) -> None:
    drawn, rng = _draw(1.0, values=False, keys=False), np.random.default_rng(2)
    weight, alpha = rng.standard_normal((9, INPUTS)), rng.standard_normal((4, 9)) * scale
    exact = np.abs(alpha @ weight) @ drawn["radius"][OWN]
    for found in _through_weight(drawn, weight, alpha, 0):
        assert (found >= exact).all()


def test_rows_without_errors_contribute_almost_nothing() -> None:
    drawn = _draw(0.0, values=True, keys=True)
    assert (_prover(drawn)[1] <= 1e-20).all()
    assert (_checker(drawn)[1] <= 1e-20).all()


def test_products_ignore_the_matmul_precision_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "medium", PyTorch may multiply float32 in bfloat16 on processors that support it."""
    drawn, seen = _draw(1.0, values=True, keys=True), set()
    for name in ("mm", "mv", "bmm"):
        plain = getattr(torch, name)

        def spied(*arguments: Any, plain: Any = plain, **more: Any) -> Any:
            if arguments[0].dtype is torch.float32:
                seen.add(torch.get_float32_matmul_precision())
            return plain(*arguments, **more)

        monkeypatch.setattr(torch, name, spied)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        _prover(drawn)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}
