"""The inputs of a contract, loaded so that its kernels can be run: model, data, kernels, bounds."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl import __version__
from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.ir.canonical import digest
from kcdsl.ir.tables import expand_tables, gaps, whole_of
from kcdsl.ir.terms import KernelRef, Program, Slice
from kcdsl.model.adapters import unproved
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.ranges import weights_digest
from kcdsl.model.files import Artefacts
from kcdsl.model.fingerprint import fingerprint_digest
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.comparison import compared_program
from kcdsl_backends.empirical.bounds.blocks import Certify
from kcdsl_backends.empirical.bounds.requests import ModelBound
from kcdsl_backends.empirical.collection.chat import renderer
from kcdsl_backends.empirical.collection.context import KernelContext, Progress, spoiled_slices
from kcdsl_backends.empirical.collection.recordings import (
    RolloutContext,
    prepare_logits,
    prepare_recorded,
    stated_vocabulary,
)
from kcdsl_backends.empirical.diagnoses.reference import reference_of
from kcdsl_backends.empirical.diagnoses.weights import watch_weights, weights_digests
from kcdsl_backends.empirical.metrics.user import functions_record, load_functions
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from kcdsl_backends.empirical.sources.rollouts.logits import load_recorded_logits
from kcdsl_backends.empirical.sources.servers.kernel import load_server
from kcdsl_backends.empirical.table.requirements import holds_logits
from kcdsl_backends.requests import Request, requests_of, select

PREPARE_STEPS = 3


def prepare(
    program: Program,
    base: Path,
    *,
    device: str = "cpu",
    slices: Sequence[str] = (),
    seed: int = 0,
    seconds: float = 20.0,
    looks: int | None = 1,
    crosscheck: bool = True,
    bound_seconds: float = 0.0,
    progress: Progress = lambda stage, done, total: None,
    artefacts: Artefacts | None = None,
) -> KernelContext | RolloutContext:
    """Load the inputs of a contract in the folder `base`.

    Args:
        program: the compiled contract.
        base: the folder that its paths are relative to.
        device: "cpu" or "cuda".
        slices: only these slices; empty means all.
        seed: of token sampling and of resampling.
        seconds: time limit of the timed runs.
        looks: number of evaluations of growing data that share the error; None for any number.
        crosscheck: compare a built-in architecture with transformers, and measured block drift
            with certified bounds.
        bound_seconds: time limit for bounds of the whole model, over all requests.
        progress: called with (stage, done, total).
        artefacts: the files of the command, in which the digests of all read files are recorded.

    Raises:
        Refusal: the model, the data or a kernel cannot be used.
    """
    files = artefacts or Artefacts.of(base)
    place = torch.device(device)
    served = program.infer.service is not None
    sides = (program.train, program.infer)
    recorded = any(kernel.recording is not None for kernel in sides)
    shown = (
        not served
        and not recorded
        and all(kernel.claims for kernel in sides)
        and not any(unproved(kernel.run) is not None for kernel in sides)
    )
    bounded = crosscheck and shown
    user = load_functions(program, base)
    for function in user:
        files.record(function.metric.function.rpartition(":")[0], function.sha256)
    chosen = _chosen(program, slices)
    stated, program = program, expand_tables(program)
    names = {s.name for s in chosen}
    missed = tuple(gap for gap in gaps(stated) if gap.whole in names)
    declared = {s.name for s in stated.slices}  # the others are buckets of their tables
    chosen += tuple(
        s for s in program.slices if s.name not in declared and whole_of(s.name) in names
    )
    data_of = {s.name: _data_of(program, s) for s in (*chosen, *(gap.slice for gap in missed))}
    common: dict[str, Any] = {
        "program": stated,
        "contract": _identity(stated),
        "environment": {**_environment(place), **functions_record(user)},
        "seed": seed,
        "looks": looks,
    }
    unread = {
        "checkpoint": stated.model.checkpoint,
        "sha256": None,
        "architecture": stated.model.architecture or stated.model.module,
        "encoder": False,
    }
    if program.infer.recording is not None and not holds_logits(program.infer):
        scoring = load_model(stated.model, files) if stated.train.recording is None else None
        progress("load", 1, PREPARE_STEPS)
        found = prepare_recorded(
            files,
            chosen,
            missed,
            data_of,
            train=None if scoring is None else load_kernel(stated.train, scoring, place),
            vocabulary=stated_vocabulary(stated, files) if scoring is None else scoring.limits[0],
            progress=progress,
            model={**unread, "sha256": None if scoring is None else scoring.checkpoint.sha256},
            device=place.type,
            **common,
        )
        if scoring is None or not crosscheck:
            return found
        texts = (r.prompt + r.tokens for rows in found.rows.values() for r in rows)
        return replace(found, model={**found.model, **_compared(program, scoring, texts)})
    if all(holds_logits(kernel) for kernel in sides):
        vocabulary = stated_vocabulary(stated, files)
        return prepare_logits(
            files, chosen, missed, data_of, vocabulary, model=unread, user=user, **common
        )
    model = load_model(program.model, files)
    progress("load", 1, PREPARE_STEPS)
    tokenizer = model.tokenizer_source
    tokenize = None if tokenizer is None else tokenizer.encode
    render = None if tokenizer is None else renderer(program.model.checkpoint, files, tokenizer)
    data = {
        name: requests_of(files, name, tokenize, model.ids, render)
        for name in dict.fromkeys(data_of[s.name] for s in chosen)
    }
    selected = {s.name: select(data[data_of[s.name]], s) for s in chosen}
    texts = (request.tokens for rows in selected.values() for request in rows)
    train = _kernel(program.train, model, place, selected)
    infer = _kernel(program.infer, model, place, selected)
    progress("load", 2, PREPARE_STEPS)
    spoiled = spoiled_slices(
        (gap, select(data[data_of[gap.slice.name]], gap.slice)) for gap in missed
    )
    progress("load", 3, PREPARE_STEPS)
    return KernelContext(
        train=train,
        infer=infer,
        block_input=_block_inputs(model),
        files=data,
        slices=selected,
        encoder=model.encoder_only,
        blocks=frozenset(model.block_names() if shown else ()),
        weights=weights_digests(
            train, infer, model.checkpoint.sha256, weights_digest(model.checkpoint.path)
        ),
        digests={
            side: fingerprint_digest(kernel.fingerprint())
            for side, kernel in (("train", train), ("infer", infer))
        },
        model={
            **unread,
            "sha256": model.checkpoint.sha256,
            "encoder": model.encoder_only,
            **(_compared(program, model, texts) if crosscheck else {}),
        },
        device=place,
        artefacts=files,
        certify=_certify(program, model) if bounded else None,
        bound_model=_bound_model(program, model) if bounded and not served else None,
        bound_seconds=bound_seconds,
        seconds=seconds,
        user=user,
        spoiled=spoiled,
        changed_weights=watch_weights({"train": train, "infer": infer}),
        reference=None
        if served or not all(kernel.claims for kernel in sides)
        else reference_of(model, resolve(program.train), resolve(program.infer)),
        **common,
    )


def _compared(program: Program, model: Model, rows: Iterable[Sequence[int]]) -> dict[str, str]:
    """Return `program` of the report's model: the result of a comparison with transformers."""
    said = compared_program(program.model.architecture, model, rows)
    return {} if said is None else {"program": said}


def _identity(stated: Program) -> dict[str, str]:
    """Return the identification of a contract: its name, version, and canonical digest."""
    return {
        "name": stated.name,
        "version": stated.version,
        "digest": f"sha256:{digest(stated).removeprefix('sha256:')}",
    }


def _chosen(program: Program, names: Sequence[str]) -> tuple[Slice, ...]:
    known = [s.name for s in program.slices]
    refuse_unknown(names, known, codes.UNKNOWN_SLICE, "the contract has no slice", "slices")
    return tuple(s for s in program.slices if not names or s.name in names)


def _kernel(
    kernel: KernelRef,
    model: Model,
    place: torch.device,
    selected: Mapping[str, Sequence[Request]],
) -> Kernel:
    """Load a kernel or its recording; a server draws on trial after a request."""
    if holds_logits(kernel):
        every = {r.key: r for rows in selected.values() for r in rows}
        return load_recorded_logits(kernel, model.files, list(every.values()))
    if kernel.own_file is not None:
        from kcdsl_backends.empirical.sources.kernels.onnx_file import load_own_file

        return load_own_file(kernel, model)
    if kernel.service is None:
        return load_kernel(kernel, model, place)
    first = next((rows[0].tokens for rows in selected.values() if rows), (0,))
    return load_server(kernel, model, first)


def _data_of(program: Program, slice_: Slice) -> str:
    name = slice_.data if slice_.data is not None else program.data
    if name is None:
        raise refuse(
            codes.FILE_MISSING,
            f"the slice {slice_.name!r} names no data, and the contract has no default",
            help="add `data: FILE.jsonl` to the contract or to the slice",
            span=None,
        )
    return name


def _block_inputs(model: Model) -> Any:
    """Return the cached function from (request, block) to the input of the block."""
    known: dict[tuple[str, str], Tensor] = {}

    def block_input(request: Request, block: str) -> Tensor:
        key = (request.key, block)
        if key not in known:
            found = model.block_inputs(list(request.tokens), block)
            if found is None:
                raise refuse(
                    codes.METRIC_OUT_OF_REACH,
                    f"the block {block} takes tokens, not states; it has no measured drift",
                    help="name a block that takes hidden states, such as attn_0, or demand a "
                    "drift of the logits, such as max(logit_linf)",
                )
            known[key] = found
        return known[key]

    return block_input


def _certify(program: Program, model: Model) -> Certify:
    """Return the certified bounds of the interval backend for the numerics the kernels claim."""
    from kcdsl_backends.certifier.statements.problems import ProblemFactory, certified_block_drift

    train, infer = resolve(program.train), resolve(program.infer)
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    return lambda block, x: certified_block_drift(model, block, x, train, infer, factory)


def _bound_model(program: Program, model: Model) -> ModelBound:
    """Return the bounds of the whole model for the numerics that the kernels claim."""
    from kcdsl_backends.certifier.statements.problems import ProblemFactory
    from kcdsl_backends.empirical.bounds.model import AffineBound

    train, infer = resolve(program.train), resolve(program.infer)
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    return AffineBound(factory, program.train.run, program.infer.run)


def _environment(device: torch.device) -> Mapping[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "kcdsl": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "device": device.type,
        "hardware": name,
    }
