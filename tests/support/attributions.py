"""A small random decoder, requests for it, and kernel pairs with planted differences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.verdict.studies.attribution import Attribution
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.backend import conclude
from kcdsl_backends.empirical.attribution.document import AttributionSubject
from kcdsl_backends.empirical.attribution.hybrids import Batches, Pair
from kcdsl_backends.empirical.attribution.measurement import (
    AttributedMetric,
    MeasuredCoalitions,
    measure,
)
from kcdsl_backends.empirical.sources.kernels import Kernel, MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from kcdsl_backends.requests import Request
from tests.support.small_models import write_model

EAGER = KernelRef("torch.eager", (("compute", "float32"),))


def ref(run: str = "torch.eager", compute: str = "float32", **more: Any) -> KernelRef:
    """Return a kernel as a contract names it."""
    return KernelRef(run, (("compute", compute), *more.items()))


@cache
def small_model() -> Model:
    """Return a decoder of two layers and 128 tokens, in memory."""
    with TemporaryDirectory() as folder:
        write_model(Path(folder), layers=2)
        return load_model(
            ModelRef("model.safetensors", config="config.json", architecture="llama"), Path(folder)
        )


def fixed_requests(count: int, longest: int = 20) -> tuple[Request, ...]:
    """Return a fixed list of requests of 4 tokens and more."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for i in range(count):
        length = 4 + (5 * i) % (longest - 3)
        tokens = torch.randint(0, 128, (length,), generator=generator).tolist()
        found.append(Request(f"f:{i}", str(i), tuple(tokens), {}, i + 1))
    return tuple(found)


@dataclass(frozen=True)
class Changed:
    """A kernel whose logits are replaced by `function(logits, token ids)`."""

    kernel: TorchKernel
    change: Callable[[Tensor, Any], Tensor]

    def logits(self, ids: Any) -> Tensor:
        """Return the changed logits."""
        return self.change(self.kernel.logits(ids), ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def pair_of(
    model: Model,
    train: KernelRef,
    infer: KernelRef,
    planted: Callable[[KernelRef, TorchKernel], Kernel] = lambda ref, kernel: kernel,
) -> Pair:
    """Return both kernels; `planted` may replace either one after it is loaded."""

    def load(wanted: KernelRef) -> Kernel:
        loaded = load_kernel(wanted, model, "cpu")
        assert isinstance(loaded, TorchKernel)
        return planted(wanted, loaded)

    return Pair(train, infer, load(train), load(infer), model, load)


def subject_of(
    pair: Pair, requests: tuple[Request, ...], *, batch: int = 1, metric: str = "kl"
) -> AttributedMetric:
    """Return the evaluation that is attributed."""
    plan = MeasurementPlan(frozenset({metric}), 1.0, 0, encoder=False)
    better = "higher" if metric == "top1_overlap" else "lower"
    batches = Batches(batch, padding=True) if batch > 1 else None
    return AttributedMetric(pair, requests, plan, metric, better, batches)


def frame_of(subject: AttributedMetric, **more: Any) -> AttributionSubject:
    """Return the header of the attribution document."""
    usual: Mapping[str, Any] = {
        "contract": {"name": "t", "version": "1.0.0", "digest": "sha256:" + "0" * 64},
        "kernels": {"train": subject.pair.train_ref.run, "infer": subject.pair.infer_ref.run},
        "slice": None,
        "metric": subject.metric,
        "statistic": "mean",
        "unit": "nat",
        "better": subject.better,
        "batch": 1 if subject.batches is None else subject.batches.size,
        "seed": 0,
        "settings": sources.settings(subject.pair.train_ref, subject.pair.infer_ref),
    }
    return AttributionSubject(**{**usual, **more})


def attributed(subject: AttributedMetric, *, bounds: bool = False, **more: Any) -> Attribution:
    """Return the attribution document of a subject."""
    found: MeasuredCoalitions = measure(subject)
    return conclude(subject, frame_of(subject, **more), found, bounds=bounds)


def with_module(kernel: TorchKernel, change: Callable[[Any], None]) -> TorchKernel:
    """Return a kernel with a modified copy of its module."""
    module = copy.deepcopy(kernel.module)
    change(module)
    return replace(kernel, module=module)
