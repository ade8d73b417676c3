"""An evaluation of recorded logits: both sides are read, no model is loaded and nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.kernels import LOGITS, KernelRef
from kcdsl.ir.tables import Gap
from kcdsl.ir.terms import Program, Slice
from kcdsl.model.files import Artefacts
from kcdsl.model.fingerprint import fingerprint_digest
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.collection.context import KernelContext, spoiled_slices
from kcdsl_backends.empirical.diagnoses.model import not_applicable
from kcdsl_backends.empirical.sources.rollouts.logits import load_recorded_logits
from kcdsl_backends.requests import Request, requests_of, select

NOTHING_RAN = (
    "both kernels are recorded: the checkpoint was not read, and nothing here says that it ran"
)


def holds_logits(kernel: KernelRef) -> bool:
    """Say whether a kernel is a recording of whole logits."""
    return kernel.recording is not None and kernel.recording.format == LOGITS


def prepare_logits(
    stated: Program,
    artefacts: Artefacts,
    chosen: Sequence[Slice],
    missed: Sequence[Gap],
    data_of: Mapping[str, str],
    vocabulary: int | None,
    **settings: Any,
) -> KernelContext:
    """Read the requests and both recordings; `settings` are further fields of `KernelContext`.

    Requests give their tokens, for no tokenizer is loaded.
    """

    def known(tokens: Sequence[int]) -> None:
        wrong = next((t for t in tokens if vocabulary is not None and t >= vocabulary), None)
        if wrong is not None:
            raise refuse(codes.SEQUENCE, f"token {wrong} is out of the vocabulary of {vocabulary}")

    names = dict.fromkeys(data_of.values())
    files = {name: requests_of(artefacts, name, None, known) for name in names}
    slices = {s.name: select(files[data_of[s.name]], s) for s in chosen}
    distinct = list({r.key: r for rows in slices.values() for r in rows}.values())
    train, infer = (
        load_recorded_logits(kernel, artefacts, distinct) for kernel in (stated.train, stated.infer)
    )
    return KernelContext(
        program=stated,
        train=train,
        infer=infer,
        block_input=_no_block,
        files=files,
        slices=slices,
        encoder=False,
        blocks=frozenset(),
        weights={},
        digests={
            side: fingerprint_digest(kernel.fingerprint())
            for side, kernel in (("train", train), ("infer", infer))
        },
        device=torch.device("cpu"),
        certify=None,
        spoiled=spoiled_slices(
            (gap, select(files[data_of[gap.slice.name]], gap.slice)) for gap in missed
        ),
        **settings,
    )


def _no_block(request: Request, block: str) -> Tensor:
    raise refuse(codes.METRIC_OUT_OF_REACH, f"a recording has no block {block}")


def recorded_sides(program: Program) -> int:
    """Return how many of the two kernels are recordings of whole logits."""
    return sum(holds_logits(side) for side in (program.train, program.infer))


def of_recordings(program: Program, prechecks: Sequence[Precheck]) -> tuple[Precheck, ...]:
    """Return prechecks with what recorded logits cannot say left open.

    A recording is read twice, not run twice; it holds no weights; no request of it is batched.
    """
    recorded, whys = recorded_sides(program), dict[str, str]()
    if recorded:
        whys["batch_invariance"] = "a recording takes no batches"
        whys["self_determinism"] = "a recording is read twice, not run twice"
    if recorded == 2:
        whys["weights_checksum"] = "a recording of logits holds no weights"
    return tuple(
        not_applicable(check.name, whys[check.name]) if check.name in whys else check
        for check in prechecks
    )
