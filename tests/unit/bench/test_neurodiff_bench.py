"""The comparison with published network pairs: without their data, and on other data."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench import neurodiff

SIZES = (6, 5, 4, 3)


def nnet(path: Path, rng: np.random.Generator, digits: int) -> None:
    """Write a random network in the `.nnet` text format, with weights of so many digits."""

    def line(values: np.ndarray) -> str:
        return ",".join(f"{v:.{digits}f}" for v in values) + ","

    lines = ["// a comment", "3,6,3,6,", ",".join(map(str, SIZES)) + ",", "0,"]
    lines += ["0," * 6] * 4
    for inputs, outputs in pairwise(SIZES):
        lines += [line(row) for row in rng.standard_normal((outputs, inputs))]
        lines += [line(rng.standard_normal(1)) for _ in range(outputs)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return two networks that differ by rounding, and one query that is too wide to bound."""
    for name, digits in (("fine.nnet", 6), ("coarse.nnet", 2)):
        nnet(tmp_path / name, np.random.default_rng(2), digits)
    case = {
        "image": [10, 20, 255, 0, 128, 90],
        "published": {"lower": [-9.0] * 3, "upper": [9.0] * 3},
    }
    queries = {"networks": ["fine.nnet", "coarse.nnet"], "perturbation": 30, "cases": {"7": case}}
    (tmp_path / neurodiff.QUERIES).write_text(json.dumps(queries), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("value", [None, "", "/nonexistent"])
def test_missing_data_is_reported(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(neurodiff.FOLDER, raising=False)
    if value is not None:
        monkeypatch.setenv(neurodiff.FOLDER, value)
    assert neurodiff.main() == 2
    shown = capsys.readouterr()
    assert neurodiff.FOLDER in shown.err
    assert "not in this repository" in shown.err
    assert shown.out == ""


def test_written_networks_are_read_back(folder: Path) -> None:
    network = neurodiff.read_nnet(folder / "fine.nnet")
    assert network.sizes == SIZES
    weights = np.random.default_rng(2).standard_normal((5, 6))
    assert np.allclose(network.tensors["0.weight"].numpy(), weights, atol=1e-6)
    assert [tuple(t.shape) for t in network.tensors.values()] == [
        (5, 6), (5,), (4, 5), (4,), (3, 4), (3,),
    ]  # fmt: skip


def test_region_contains_the_clipped_box() -> None:
    image = [0, 2, 3, 100, 253, 255]
    centre, radius = neurodiff.region(image, 3)
    for pixel, c, r in zip(image, centre[0].tolist(), radius[0].tolist(), strict=True):
        low, high = max(pixel - 3, 0) / 255, min(pixel + 3, 255) / 255
        assert c - r <= low
        assert high <= c + r
        assert 2 * r <= (high - low) * (1 + 1e-4)


@pytest.mark.full
def test_bound_lies_between_the_attack_and_the_interval_domain(folder: Path) -> None:
    train, infer = (neurodiff.read_nnet(folder / n) for n in ("fine.nnet", "coarse.nnet"))
    case = json.loads((folder / neurodiff.QUERIES).read_text(encoding="utf-8"))["cases"]["7"]
    found = neurodiff.measure(neurodiff.problem(train, infer), "7", case, 30)
    assert 0 < found.reached <= found.planes <= found.first <= found.interval
    assert found.planes < 0.9 * found.interval
    assert found.published == 54.0


def test_picture_shows_every_image(folder: Path, tmp_path: Path) -> None:
    found = [
        neurodiff.Measured(str(image), 0.01, 0.011, 0.2, 0.002, 0.05, 1.0) for image in range(3)
    ]
    neurodiff.draw(found, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert text.count("<circle") == 4 * 3 + 4
    assert text.startswith("<svg ")
    assert text.endswith("</svg>\n")
