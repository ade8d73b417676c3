"""Every form of the decoder is the program that transformers runs on the same checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.decoders import (
    FORMS,
    distance_from_transformers,
    proved,
    random_changes,
    saved_model,
)
from tests.support.look_alikes import LOOK_ALIKES, refused

pytest.importorskip("transformers")

BFLOAT16 = {"compute": "bfloat16"}
KERNELS: dict[str, dict[str, Any]] = {
    "float32": {"preset": "torch-eager"},
    "bfloat16": {"preset": "torch-eager"} | BFLOAT16,
    "bfloat16 nearest": {"preset": "torch-eager", "casts": "nearest"} | BFLOAT16,
    "float16": {"preset": "torch-eager", "compute": "float16"},
    "float8 weights": {"preset": "fp8-weights"},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_the_program_of_transformers(name: str) -> None:
    assert distance_from_transformers(FORMS[name], 1) <= 1e-10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FORMS)
def test_a_random_configuration_is_the_program_of_transformers(name: str, seed: int) -> None:
    form = FORMS[name]
    assert distance_from_transformers(form, seed, **random_changes(form, seed)) <= 1e-10


@pytest.mark.parametrize(("name", "change"), LOOK_ALIKES)
def test_a_look_alike_is_refused(name: str, change: dict[str, Any]) -> None:
    assert refused(name, change)


@pytest.mark.parametrize("name", FORMS)
def test_what_look_alikes_change_is_taken(name: str) -> None:
    assert not refused(name, {})


def test_the_form_is_read_without_torch() -> None:
    listed = ", ".join({form.architecture for form in FORMS.values()})
    code = (
        f"import sys; from kcdsl.model.architectures import {listed}; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FORMS)
def test_blocks_are_proved_and_the_checker_agrees(name: str, block: str, tmp_path: Path) -> None:
    found = proved(saved_model(name, tmp_path), block, KERNELS["bfloat16"])
    assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
    assert 0 < found.bound < 4


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block", ["attn_0", "mlp_0", "norm_0", "layer_1"])
@pytest.mark.parametrize("name", FORMS)
def test_no_run_found_leaves_the_bound(name: str, block: str, kernel: str, tmp_path: Path) -> None:
    seed = len(name) + len(block)
    changes = random_changes(FORMS[name], seed) | {"num_hidden_layers": 2}
    changes = {k: v for k, v in changes.items() if k not in ("layer_types", "no_rope_layers")}
    found = proved(saved_model(name, tmp_path, seed, **changes), block, KERNELS[kernel], True)
    assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
    assert 0 < found.attack <= found.bound
