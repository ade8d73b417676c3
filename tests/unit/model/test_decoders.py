"""Every form of the decoder agrees with transformers on the same checkpoint."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.model import registry
from kcdsl.model.decoder import mixtral_key, name_in_mixtral
from kcdsl.model.decoder.experts import MixtureOfExperts
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.functionals import drift_bound
from tests.support.decoders import (
    EVERY_FORM,
    FORMS,
    MIXTURES,
    SURE,
    TOKENS,
    distance_from_transformers,
    proved,
    random_changes,
    randomise,
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


_ROUTED = """\
kcdsl: 1
contract: routed
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
data: requests.jsonl
slices: {all: {}}
clauses:
  N-POINTS: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 4", level: L2}
  N-BALL: {require: "forall x in ball(all, 1): norm_inf(drift(mlp_0, x)) <= 4", level: L2}
"""


@pytest.mark.parametrize("name", EVERY_FORM)
def test_each_form_agrees_with_transformers(name: str) -> None:
    assert distance_from_transformers(EVERY_FORM[name], 1) <= 1e-10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", EVERY_FORM)
def test_random_configurations_agree_with_transformers(name: str, seed: int) -> None:
    form = EVERY_FORM[name]
    assert distance_from_transformers(form, seed, **random_changes(form, seed)) <= 1e-10


@pytest.mark.parametrize(("name", "change"), LOOK_ALIKES)
def test_look_alikes_are_refused(name: str, change: dict[str, Any]) -> None:
    assert refused(name, change)


@pytest.mark.parametrize("name", EVERY_FORM)
def test_unchanged_configurations_of_look_alikes_are_accepted(name: str) -> None:
    assert not refused(name, {})


def test_form_is_read_without_torch() -> None:
    listed = ", ".join({form.architecture for form in FORMS.values()})
    code = (
        f"import sys; from kcdsl.model.architectures import {listed}; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMS)
def test_blocks_are_proved_and_rechecked(name: str, block: str, tmp_path: Path) -> None:
    found = proved(saved_model(name, tmp_path), block, KERNELS["bfloat16"])
    assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
    assert 0 < found.bound < 4


@pytest.mark.full
@pytest.mark.parametrize("block", ["mlp_0", "attn_0"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_of_experts_with_a_stable_route_is_proved(
    name: str, block: str, tmp_path: Path
) -> None:
    model = saved_model(name, tmp_path, SURE[name])
    found = proved(model, block, KERNELS["bfloat16"], True)
    assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
    assert 0 < found.attack <= found.bound < 4


@pytest.mark.full
def test_unstable_route_has_no_bound(tmp_path: Path) -> None:
    model = saved_model("Mixtral", tmp_path)
    with pytest.raises(NoBound, match=r"at position \d the \w+ kernel may choose expert \d"):
        proved(model, "mlp_0", KERNELS["bfloat16"], radius=1.0)


@pytest.mark.full
def test_run_with_other_experts_is_reported(tmp_path: Path, cli: Any) -> None:
    """In a wide region an input is found with another route; at the prompts the block is proved."""
    saved_model("Mixtral", tmp_path, SURE["Mixtral"])
    (tmp_path / "contract.kc.yaml").write_text(_ROUTED)
    (tmp_path / "requests.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")
    said = {}
    for words in ((), ("--attack", "off", "--clause", "N-BALL")):
        ran = cli("verify", "--format", "json", "--cache", "off", *words, cwd=tmp_path)
        assert ran.code == 3, ran.stderr
        goals = {goal["clause"]: goal for goal in json.loads(ran.stdout)["goals"]}
        assert goals["N-BALL"]["verdict"] == "inconclusive"
        assert words or goals["N-POINTS"]["verdict"] == "held"
        said[words[:2]] = goals["N-BALL"]["reason"]
    assert all("the route is not sure: at position" in text for text in said.values())
    assert re.search(
        r"a run of the (training|inference) kernel at an input of the region chooses expert \d in"
        r" place of \d at position \d: its logit is larger by [\d.e-]+$",
        said[()],
    )
    assert "chooses" not in said["--attack", "off"]


@pytest.mark.parametrize("name", MIXTURES)
def test_fixed_route_equals_the_choice_of_the_router(name: str) -> None:
    """With its own route fixed, a mixture gives equal float64 results."""
    config = registry.load(EVERY_FORM[name].architecture)
    module = config.build(EVERY_FORM[name].saved()).double()
    randomise(module, 0)
    part = next(m for m in module.modules() if isinstance(m, MixtureOfExperts))
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(5, part.gate.in_features, generator=drawn, dtype=torch.float64)
    with torch.no_grad():
        own = part(x)
        route = part.gate(x).topk(part.mixture.chosen).indices.sort(-1).values
        part.take(route)
        given = part(x)
        part.take(torch.arange(part.mixture.chosen).expand(5, -1))
        other = part(x)
    assert torch.allclose(own, given, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(own, other, rtol=1e-3, atol=1e-3)
    for wrong in (route[:, :-1], route.flip(-1), route + part.mixture.experts):
        with pytest.raises(ValueError, match="experts, in ascending order"):
            part.take(wrong)


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MIXTURES)
def test_attacks_are_within_the_bound_of_a_mixture(name: str, kernel: str, tmp_path: Path) -> None:
    """With real routes: unstable ones end with a reason, other bounds contain every run found."""
    sure = 0
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        model = saved_model(name, folder, SURE[name] if seed == 7 else seed)
        try:
            found = proved(model, "mlp_0", KERNELS[kernel], True, 2.0**-10)
        except NoBound as no:
            assert "the route is not sure" in str(no)  # noqa: PT017
            continue
        sure += 1
        assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
        assert 0 < found.attack <= found.bound
    assert sure


def test_draft_for_a_mixture_proves_only_its_attention(tmp_path: Path, cli: Any) -> None:
    saved_model("Mixtral", tmp_path)
    assert cli("init", ".", "--for", "release", cwd=tmp_path).code == 0
    text = (tmp_path / "contract.yaml").read_text()
    assert "drift(attn_0" in text
    assert "mlp_0" not in text


def test_expert_names_in_mixtral_checkpoints() -> None:
    experts = "model.layers.0.block_sparse_moe.experts.4."
    assert mixtral_key(experts + "w2.weight") == "model.layers.0.mlp.experts.4.down_proj.weight"
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert mixtral_key(gate) == "model.layers.0.mlp.gate.weight"
    for key in (experts + "w1.weight", gate, "model.layers.0.self_attn.q_proj.weight"):
        assert name_in_mixtral(mixtral_key(key) or "") == key


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block", ["attn_0", "mlp_0", "norm_0", "layer_1"])
@pytest.mark.parametrize("name", FORMS)
def test_attacks_are_within_the_bound(name: str, block: str, kernel: str, tmp_path: Path) -> None:
    seed = len(name) + len(block)
    changes = random_changes(FORMS[name], seed) | {"num_hidden_layers": 2}
    changes = {k: v for k, v in changes.items() if k not in ("layer_types", "no_rope_layers")}
    found = proved(saved_model(name, tmp_path, seed, **changes), block, KERNELS[kernel], True)
    assert found.rechecked == pytest.approx(found.bound, rel=1e-6)
    assert 0 < found.attack <= found.bound


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", ["attn_0", "mlp_0", "norm_0", "layer_0"])
@pytest.mark.parametrize("name", FORMS)
def test_module_is_within_the_bound(
    name: str, block: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = saved_model(name, tmp_path, seed=len(name))
    x = model.block_inputs(TOKENS, block)
    assert x is not None
    half = copy.deepcopy(model.block(block)).to(dtype)
    real = float((half(x.to(dtype)).double() - model.block(block)(x).double()).abs().max())
    compute = str(dtype).removeprefix("torch.")
    bound = proved(model, block, {"preset": "torch-eager", "compute": compute}).bound
    assert 0 < real <= bound


def test_kernel_without_score_capping_is_refused(tmp_path: Path, cli: Any) -> None:
    """At compile time; a draft selects a kernel with score capping."""
    saved_model("Gemma 2", tmp_path)
    drafted = cli("init", ".", cwd=tmp_path)
    assert drafted.code == 0, drafted.stderr
    contract = tmp_path / "contract.yaml"
    text = contract.read_text()
    assert "run: torch.eager" in text
    assert "torch.sdpa" not in text
    assert cli("compile", cwd=tmp_path).code == 0
    fused = text.replace("run: torch.eager", "run: torch.sdpa")
    contract.write_text(fused.replace("torch-eager", "torch-sdpa-flash"))
    ran = cli("compile", cwd=tmp_path)
    assert ran.code == 2
    assert "caps its attention scores" in ran.stdout + ran.stderr


@pytest.mark.full
def test_computed_gain_is_bounded_at_any_length(tmp_path: Path) -> None:
    """The gain 1 + weight is expanded if the number of rows is known, and kept otherwise."""
    model = saved_model("Gemma 3", tmp_path)
    kernel = resolve(KERNELS["bfloat16"])
    factory = ProblemFactory(model, resolve({"preset": "torch-eager"}), kernel, torch.device("cpu"))
    problem, centre = factory.problem("attn_0", TOKENS), factory.centre("attn_0", TOKENS)
    assert centre is not None
    point = torch.zeros(1, 1, dtype=torch.float64)
    boxes = drift_bound(problem.bound(centre, point).output.drift, "inf")
    forms = drift_bound(problem.forms(centre, point, None).box(), "inf")
    assert forms < boxes / 2
    assert factory.sequences("attn_0", 8).graph.input_shape == (2, 16)
