"""Every kernel of a CUDA device loads and runs on a simulated device.

The simulation refuses mixed devices and whatever PyTorch's kernels refuse
(tests/support/pretend_device.py), so test_gpu_kernels.py cannot fail on a real device for such a
reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels_device
from bench.kernels import Case
from bench.kernels_device import FP8_UNITS, cases, measure
from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import KERNEL_FAILED, KERNEL_NUMERICS
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.architecture import Model
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from tests.support.pretend_device import pretend_device
from tests.support.random_models import random_model
from tests.support.small_models import DECODER, write_model

HOPPER = (9, 0)
KERNELS = [pair for pair in cases(HOPPER) if ADAPTERS[pair[1].run].engine != "compile"]
"""All but compiled kernels: Inductor would generate code for a missing device."""
LOADED = [name for name, one in ADAPTERS.items() if one.tier == "A" and "cuda" in one.devices]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the model of the kernel measurements."""
    folder: Path = tmp_path_factory.mktemp("pretended")
    return kernels_device.random_model(folder)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with widths that 16 does not divide, and heads of 4."""
    return random_model(DECODER, tmp_path_factory.mktemp("odd"), 3)


@contextmanager
def refused(code: Any, *words: str) -> Iterator[None]:
    with pytest.raises(Refusal) as caught:
        yield
    (found,) = caught.value.diagnostics
    assert found.code == code
    text = f"{found.message} {found.help}"
    assert all(word in text for word in words), text


@pytest.mark.full
@pytest.mark.parametrize(("block", "case"), KERNELS, ids=lambda part: getattr(part, "name", part))
def test_measured_kernels_load_on_the_device(
    model: Model, block: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_device, "LENGTHS", (1, 2))
    monkeypatch.setattr(kernels_device, "LONGEST_AFFINE", 0)
    with pretend_device(HOPPER):
        found = measure(model, case, block)
    assert found.runs >= 6
    assert found.told >= 4
    assert found.ratio <= 1


@pytest.mark.parametrize("run", [name for name in LOADED if ADAPTERS[name].engine != "compile"])
def test_logits_of_every_kernel_are_returned_on_the_cpu(model: Model, run: str) -> None:
    """Blocks are on the CPU too, and values are near those of the training kernel."""
    if ADAPTERS[run].engine == "hf":
        (model.checkpoint.path.parent / "config.json").write_text(json.dumps(kernels_device.CONFIG))
    numerics = {} if "float32" in ADAPTERS[run].computes_on("cuda") else {"compute": "bfloat16"}
    exact = load_kernel(Case("torch.eager").ref(), model, "cpu").logits([3, 1, 2])
    with pretend_device(HOPPER):
        kernel = load_kernel(Case(run, numerics).ref(), model, "cuda")
        logits = kernel.logits([3, 1, 2])
        both = kernel.logits([[3, 1, 2], [3, 1, 2]])
        digest = kernel.weights_digest()
    assert type(logits) is type(both) is torch.Tensor
    assert float((both[0].double() - logits.double()).abs().max()) < 0.1
    assert float((logits.double() - exact).abs().max()) < 0.5
    assert len(digest) == 64


def test_unsupported_kernels_are_refused(odd: Model) -> None:
    with pretend_device(HOPPER):
        with refused(KERNEL_NUMERICS, "widths that 16 divides", "k_proj has 16 and 8", "cpu"):
            load_kernel(Case("torch.scaled_mm").ref(), odd, "cuda")
        for run in ("torch.sdpa.flash", "torch.sdpa.efficient"):
            wide = "float32" if run == "torch.sdpa.flash" else "float64"
            with refused(KERNEL_NUMERICS, run, f"does not compute in {wide}"):
                load_kernel(Case(run, {"compute": wide}).ref(), odd, "cuda")
        with refused(KERNEL_FAILED, "torch.sdpa.cudnn", "No available kernel"):
            load_kernel(Case("torch.sdpa.cudnn").ref(), odd, "cuda")
    with refused(KERNEL_NUMERICS, "torch.sdpa.efficient runs on cuda"):
        load_kernel(Case("torch.sdpa.efficient").ref(), odd, "cpu")
    load_kernel(Case("torch.sdpa.flash").ref(), odd, "cpu")


def test_cudnn_attention_does_not_support_one_token(model: Model) -> None:
    with pretend_device(HOPPER):
        kernel = load_kernel(Case("torch.sdpa.cudnn").ref(), model, "cuda")
        assert kernel.logits([3, 1]).shape == (2, 64)
        with refused(KERNEL_FAILED, "No available kernel", "torch.sdpa.math"):
            kernel.logits([3])


@pytest.mark.parametrize("capability", [*FP8_UNITS, (8, 0), (12, 0)])
def test_tensor_cores_are_those_of_the_device(capability: tuple[int, int]) -> None:
    """Float8 products are measured only where their accumulator is published."""
    runs = [case.run for _, case in cases(capability)]
    assert ("torch.scaled_mm" in runs) == (capability in FP8_UNITS)
    for _, case in cases(capability):
        numerics = resolve(case.ref())
        assert (numerics.tensor_core is None) == (numerics.compute == "float32")


EVALUATED = """\
kcdsl: 1
contract: evaluated
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: max(kl) <= 1, level: L2}
  N-FLIP: {require: rate(top1_flip) <= 50%, level: L2}
  N-HIDDEN: {require: max(hidden_linf) <= 9, level: L2}
"""


@pytest.mark.full
def test_evaluation_on_the_device_equals_that_on_the_cpu(cli: Any, tmp_path: Path) -> None:
    write_model(tmp_path, prompts=("ab", "abc"))
    (tmp_path / "contract.yaml").write_text(EVALUATED)
    measured = []
    for device in ("cpu", "cuda"):
        quick = ("--seconds", "0.1", "--bound-seconds", "0.1", "--format", "json", "-o", device)
        with pretend_device(HOPPER) if device == "cuda" else nullcontext():
            ran = cli("evaluate", "--device", device, *quick, cwd=tmp_path)
        assert ran.code in (0, 3), ran.stderr
        report = json.loads(ran.stdout)
        measured.append(
            [
                [clause[key] for key in ("clause", "value", "verdict", "n", "exceedance")]
                for clause in report["clauses"]
            ]
        )
        assert (
            json.loads((tmp_path / device / "kernels.json").read_text())["infer"]["device"]
            == device
        )
    assert measured[0] == measured[1]
    assert len(measured[0]) == 3
