"""The certifier on a device gives the answers of the CPU, bit for bit.

The device is a simulated one (tests/support/pretend_device.py), which refuses CPU tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kcdsl_backends.attack as search
from bench import large_layer
from kcdsl.ir.terms import Program
from kcdsl.model.architecture import Model
from kcdsl.model.presets import resolve
from kcdsl.route.goals import goals
from kcdsl.verdict.counterexample import Replayed
from kcdsl.verdict.model import Violated
from kcdsl.verdict.outcome import GoalOutcome
from kcdsl_backends.attack import batched_search
from kcdsl_backends.certifier import tasks
from kcdsl_backends.certifier.backend import BACKEND
from kcdsl_backends.certifier.statements.problems import (
    Graphs,
    ProblemFactory,
    certified_block_drift,
)
from kcdsl_backends.drift.affine_forms import AffineForms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.functionals import functional_bound, order_margins
from kcdsl_backends.drift.interval import Bounds
from kcdsl_backends.drift.linear_bounds import SlopeEffort
from tests.support.pretend_device import Held, pretend_device
from tests.support.random_models import random_model
from tests.support.small_models import write_contract, write_model

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 128, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
TOKENS = (3, 1, 2)
DEVICES = ("cpu", "cuda")
BALL = 2.0**-10
FLOAT8 = {"format": "fp8_e4m3", "scale": "per_channel"}
NUMERICS: dict[str, dict[str, Any]] = {
    "float32, fused": {"preset": "torch-sdpa-flash"},
    "float64": {"preset": "torch-eager", "compute": "float64"},
    "bfloat16": {"preset": "torch-sdpa-flash", "compute": "bfloat16"},
    "bfloat16, nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "float16, tiles": {"preset": "torch-sdpa-cudnn", "compute": "float16"},
    "toward zero": {"preset": "torch-eager", "compute": "bfloat16", "casts": "toward_zero"},
    "either way": {"preset": "torch-eager", "compute": "float16", "casts": "any_direction"},
    "coarse sums": {"preset": "torch-eager", "compute": "bfloat16", "accumulate": "float16"},
    "matrix unit": {"preset": "fp8-w8a8-per-channel", "tensor_core": "hopper_fp8"},
    "half unit": {"preset": "torch-eager", "compute": "float16", "tensor_core": "hopper_16"},
    "fp8 rows": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    "fp8 tensor": {"preset": "fp8-w8a8-per-tensor", "casts": "nearest"},
    "fp8 blocks": {"preset": "fp8-w8a8-blocks", "casts": "nearest"},
    "mx": {"preset": "mxfp8", "casts": "nearest"},
    "fp8 static": {
        "preset": "torch-eager", "compute": "bfloat16", "casts": "nearest", "weights": FLOAT8,
        "activations": {"format": "fp8_e4m3", "scale": "static", "input_scale": 0.05},
    },
    "int8 rows": {"preset": "torchao-int8-dynamic"},
    "uint8": {"preset": "onnxruntime-int8", "casts": "nearest"},
    "int4": {"preset": "torchao-int4-weights"},
    "fp8 probabilities": {
        "preset": "torch-eager", "compute": "bfloat16", "casts": "nearest",
        "attention": {"scores": "bfloat16", "probabilities": "fp8_e4m3"},
    },
}  # fmt: skip


ROWS = ("bfloat16, nearest", "fp8 probabilities")
"""Numerics under which attention has bounds at a point and on a ball."""
WIDE = ("bfloat16, nearest", "fp8 tensor")
"""Numerics under which every mode of the domains is tested."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """Return a small decoder and a small encoder."""
    one, two = (
        random_model(config, tmp_path_factory.mktemp("device"), 4) for config in (LLAMA, BERT)
    )
    return one, two


def on(device: str) -> AbstractContextManager[None]:
    """Return a context in which code that names this device runs."""
    return pretend_device() if device == "cuda" else nullcontext()


def plain(value: Any) -> Any:
    """Return the contents of an answer from any device, as comparable values."""
    if isinstance(value, Held):
        return plain(value.inside)
    if isinstance(value, Tensor):
        return [list(value.shape), [float(x).hex() for x in value.detach().flatten().double()]]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.hex() if isinstance(value, float) else value


def said(factory: ProblemFactory, block: str, radius: float, wide: bool) -> list[Any]:
    """Return the result of each domain on a ball around states, or the reason for none."""
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), radius, dtype=torch.float64, device=factory.device)

    def boxes(found: Bounds) -> list[Any]:
        return [found.output.drift.lo, found.output.drift.hi, found.witness]

    def read(forms: AffineForms) -> list[Any]:
        box = forms.box()
        kinds = ("inf", "2", "span")
        bounds = [functional_bound(forms, box, kind, lambda value: False) for kind in kinds]
        return [box.lo, box.hi, forms.witness(), bounds, order_margins(forms, 2), forms.passes]

    def planes() -> list[Any]:
        found = problem.planes(centre, spread, SlopeEffort(limit=None), lambda output: False)
        return [found.box.lo, found.box.hi, found.witness, found.hints]

    def block_alone() -> Any:
        found = certified_block_drift(
            factory.model, block, centre.cpu().float(), factory.train, factory.infer, factory
        )
        return [found.reason, found.bound_inf, found.drift_bound.tolist()]

    asked: list[Callable[[], Any]] = [
        block_alone,
        lambda: boxes(problem.bound(centre, spread)),
        lambda: read(problem.forms(centre, spread)),
    ]
    if wide:
        near = replace(problem, weight_ball=factory.weight_ball(block, Fraction(1, 10**4)))
        asked += [
            lambda: read(problem.forms(centre, spread, Fraction(1, 10**9))),
            planes,
            lambda: boxes(near.bound(centre, spread)),
            lambda: read(near.forms(centre, spread)),
            lambda: boxes(factory.sequences(block, 9).bound(centre[:1], spread)),
        ]
    return [plain(_answer(one)) for one in asked]


def _answer(asked: Callable[[], Any]) -> Any:
    try:
        return asked()
    except NoBound as no:
        return str(no)


@pytest.mark.full
@pytest.mark.parametrize("name", NUMERICS)
def test_every_domain_gives_equal_answers(models: tuple[Model, Model], name: str) -> None:
    model = models[list(NUMERICS).index(name) % 2]
    blocks = [("mlp_0", BALL), *((("attn_0", BALL), ("attn_0", 0.0)) if name in ROWS else ())]
    train, infer = resolve({"preset": "torch-eager"}), resolve(NUMERICS[name])
    answers: list[Any] = []
    graphs: Graphs = {}
    for device in DEVICES:
        with on(device):
            factory = ProblemFactory(model, train, infer, torch.device(device), graphs)
            answers.append([said(factory, b, r, wide=name in WIDE and r > 0) for b, r in blocks])
    assert answers[0] == answers[1]
    assert all(isinstance(part, list) for part in answers[0][0][:3]), "a domain has no bound"


CLAUSES = {
    "point": "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1e-9",
    "ball": "forall x in ball(all, 1e-3): norm_2(drift(mlp_0, x)) <= 1e-9",
    "rows": "forall x in rows(all, 9): norm_inf(drift(attn_0, x)) <= 1e-9",
    "model": "forall x in points(all): norm_inf(drift(model, x)) <= 1e-9",
    "flip": "forall x in points(all): no_flip(model, x)",
}


@pytest.fixture
def contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Program]:
    """Return a folder with a decoder, two prompts and a violated contract; short searches."""
    short = {"_SMOOTHED_STEPS": 2, "_SELECTION_PERIOD": 2, "_GRADIENTS": 1, "_MEMBERS": 2}
    short |= {"_REFINED": 1}
    for name, value in short.items():
        monkeypatch.setattr(batched_search, name, value)
    monkeypatch.setattr(batched_search, "_RECORDED", 1)
    monkeypatch.setattr(search, "_SAMPLES", 1)
    quick = partial(search.attack, candidates=1, rounds=1, samples=4)
    monkeypatch.setattr(tasks, "attack", quick)
    write_model(tmp_path, prompts=("ab",), config=LLAMA)
    return tmp_path, write_contract(tmp_path, *CLAUSES.values(), compute="bfloat16")


@pytest.fixture
def stepped(contract: tuple[Path, Program]) -> tuple[Path, Program]:
    """Return the same contract about a kernel that rounds to nearest, for batched attacks."""
    steps = write_contract(contract[0], *CLAUSES.values(), compute="bfloat16, casts: nearest")
    return contract[0], steps


def outcomes(
    place: tuple[Path, Program], device: str, names: str, attacks: bool = False, **more: Any
) -> list[GoalOutcome]:
    """Return the backend's answers for some clauses, with proofs and counterexamples."""
    folder, program = place
    known = dict(zip(CLAUSES, goals(program), strict=True))
    how = {"attacks": attacks, "chain": more.pop("chain", False)}
    asked = [replace(known[name], **more) for name in names.split()]
    with on(device):
        found = BACKEND.decide(program, folder, asked, device=device, **how)
    return [replace(one, seconds=0.0, peak_bytes=0) for one in found]


@pytest.mark.full
def test_attacks_on_the_device_are_reproduced_on_the_cpu(stepped: tuple[Path, Program]) -> None:
    """Bounds, attacks, counterexamples, and their replays."""
    folder, program = stepped
    cheap = ("interval", "affine")
    here, there = (
        outcomes(stepped, device, "model ball", attacks=True, domains=cheap) for device in DEVICES
    )
    assert here == there
    assert [isinstance(one.verdict, Violated) for one in here] == [True] * 2
    for one in here:
        assert one.counterexample is not None
        document = json.loads(one.counterexample)
        ran: list[Replayed] = []
        for device in DEVICES:
            with on(device):
                ran.append(BACKEND.replay(program, folder, document, device=device))
        assert ran[0] == ran[1]
        assert ran[0].exact
        assert ran[0].refutes


@pytest.mark.full
@pytest.mark.parametrize(
    "mode",
    [
        {"weights": Fraction(1, 10**4), "states": Fraction(1, 10**4)},
        {"alpha": Fraction(1, 10**9)},
        {"chain": True},
        {"domains": ("interval", "affine", "planes")},
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_proofs_on_the_device_equal_those_on_the_cpu(
    contract: tuple[Path, Program], mode: dict[str, Any]
) -> None:
    """Certificates have equal bytes, and the independent checker accepts them."""
    names = {"chain": "model flip", "domains": "ball rows"}.get(next(iter(mode)), "point")
    easy: dict[str, Any] = {} if "domains" in mode else {"threshold": Fraction(99)}
    here, there = (outcomes(contract, device, names, **easy, **mode) for device in DEVICES)
    assert here == there
    if easy:
        assert here[0].proof
        assert here[0].confirmed


@pytest.mark.full
def test_layer_of_a_large_model_is_bounded_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    monkeypatch.setattr(large_layer, "CONFIG", {**large_layer.CONFIG, **small})
    for block in large_layer.BLOCKS:
        found = []
        for device in DEVICES:
            with on(device):
                found.append(large_layer._cost(block, 2, device).largest)
        assert found[0] == found[1] > 0
