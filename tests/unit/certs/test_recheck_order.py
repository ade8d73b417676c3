"""The checker on the order of the largest columns, by affine forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import output, recheck
from tests.support import proofs

Floats = np.ndarray
FREE = proofs.numerics("float32", "any")
INT8 = proofs.numerics("float32", "any", weights=("int8", "per_tensor"))
COARSE = proofs.numerics("bfloat16", "any")


def head(weight: Floats, rows: int = 2) -> Any:
    """Return a linear without a bias, as the head of a language model."""
    g = proofs.Graph((rows, weight.shape[1]))
    x = g.add("input", [], (rows, weight.shape[1]))
    w = g.param("head.weight", weight)
    g.add("linear", [x, w], (rows, weight.shape[0]))
    return g


def common(columns: int = 5, width: int = 4) -> Floats:
    """Return rows with a large common part, so that all outputs move together."""
    weight = np.full((columns, width), 8.0)
    weight[np.arange(columns), np.arange(columns) % width] += 2.0 ** -np.arange(columns)
    return weight


def outcome(
    folder: Path,
    weight: Floats,
    centre: Floats,
    *,
    kernels: tuple[Any, Any] = (FREE, FREE),
    radius: float = 0.0,
    k: int = 1,
    domain: str = "affine",
) -> str:
    graph, path = head(weight, centre.shape[0]), folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, *kernels, sha256, centre, radius, "no_flip")
    document["functional"]["k"] = k
    document["cases"][0]["domain"] = domain
    found = recheck(proofs.dump(document), path)
    assert found.ok == (found.bound == "held")
    return found.reason


ONES = np.ones((2, 4))


def test_columns_that_move_together_keep_their_order(tmp_path: Path) -> None:
    """In a ball the boxes of the elements overlap; only their differences decide."""
    assert outcome(tmp_path, common(), ONES, radius=2.0**-5) == "ok"
    interval = outcome(tmp_path, common(), ONES, radius=2.0**-5, domain="interval")
    assert interval == "claim/too-small"


def test_order_is_proved_by_pairwise_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_MOST", 0)
    assert outcome(tmp_path, common(), ONES, radius=2.0**-5) == "claim/too-small"


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_order_of_top_k_sets(tmp_path: Path, k: int) -> None:
    assert outcome(tmp_path, common(), ONES, radius=2.0**-7, k=k) == "ok"


@pytest.mark.parametrize(("k", "reason"), [(5, "document/field"), (6, "document/field")])
def test_order_needs_more_than_k_columns(tmp_path: Path, k: int, reason: str) -> None:
    assert outcome(tmp_path, common(), ONES, k=k) == reason


@pytest.mark.parametrize("k", [0, -1, True, None, "1"])
def test_k_must_be_a_count(tmp_path: Path, k: Any) -> None:
    assert outcome(tmp_path, common(), ONES, k=k).startswith("document/")


@pytest.mark.parametrize("radius", [0.0, 2.0**-7])
def test_tie_is_refused(tmp_path: Path, radius: float) -> None:
    weight = common()
    weight[1] = weight[0]
    for k, reason in ((1, "claim/too-small"), (2, "ok")):
        assert outcome(tmp_path, weight, ONES, radius=radius, k=k) == reason


def test_tie_in_one_row_is_refused(tmp_path: Path) -> None:
    centre = ONES.copy()
    centre[1] = 0.0
    assert outcome(tmp_path, common(), centre) == "claim/too-small"


@pytest.mark.parametrize("kernels", [(FREE, INT8), (INT8, FREE)])
def test_both_kernels_must_keep_the_order(tmp_path: Path, kernels: tuple[Any, Any]) -> None:
    """One step of int8 is 1/16 here: columns that differ in float32 are equal in int8."""
    weight = np.full((3, 4), 7.9375)
    weight[0] += 2.0**-8
    weight[2] = -7.9375
    assert outcome(tmp_path, weight, ONES) == "ok"
    assert outcome(tmp_path, weight, ONES, kernels=kernels) == "claim/too-small"
    assert outcome(tmp_path, weight, ONES, kernels=(INT8, INT8)) == "claim/too-small"


@pytest.mark.parametrize(
    ("apart", "reason"), [(2.0**-4, "claim/too-small"), (1.0, "ok"), (-1.0, "ok")]
)
def test_coarse_casts_may_change_the_order(tmp_path: Path, apart: float, reason: str) -> None:
    weight = np.full((3, 4), 8.0)
    weight[0] += apart
    weight[2] -= 2.0
    kernels = (FREE, COARSE)
    assert outcome(tmp_path, weight, ONES, kernels=kernels, k=1 + (apart < 0)) == reason


def test_ball_that_contains_a_flip_is_refused(tmp_path: Path) -> None:
    weight = np.array([[1.0, 0.0], [0.0, 1.0]])
    centre = np.array([[1.0, 0.75]])
    assert outcome(tmp_path, weight, centre, radius=0.12) == "ok"
    assert outcome(tmp_path, weight, centre, radius=0.13) == "claim/too-small"


def test_single_column_is_refused(tmp_path: Path) -> None:
    assert outcome(tmp_path, np.ones((1, 4)), ONES) == "document/field"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_order_inputs_are_refused(tmp_path: Path, value: float) -> None:
    weight = common()
    weight[3, 1] = value
    assert outcome(tmp_path, weight, ONES) == "parameter/not-finite"
