"""The `empirical` backend of the catalogue: loads what a contract names and evaluates it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl import __version__
from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.buckets import Gap, expand_tables, gaps, whole_of
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program, Slice
from kcdsl.model.architecture import Model, load_model
from kcdsl.model.files import file_digest
from kcdsl.model.fingerprint import fingerprint_digest
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.crosscheck import Certify
from kcdsl_backends.empirical.diagnoses import reference_of, watch_weights, weights_digests
from kcdsl_backends.empirical.evaluation import Evaluation, Progress, evaluate
from kcdsl_backends.empirical.kernels import load_kernel
from kcdsl_backends.empirical.setting import Setting
from kcdsl_backends.empirical.user_metrics import functions_record, load_functions
from kcdsl_backends.requests import Request, RequestFile, load_requests, select

PREPARE_STEPS = 3


class EmpiricalBackend:
    """Decides statistical, runtime and trace clauses by running both kernels."""

    name = "empirical"

    def evaluate(
        self,
        program: Program,
        base: Path,
        *,
        device: str = "cpu",
        slices: Sequence[str] = (),
        seed: int = 0,
        seconds: float = 20.0,
        looks: int | None = 1,
        crosscheck: bool = True,
        progress: Progress = lambda stage, done, total: None,
    ) -> Evaluation:
        """Evaluate a contract whose folder is `base`.

        Args:
            program: the compiled contract.
            base: the folder that its paths are relative to.
            device: "cpu" or "cuda".
            slices: only these slices; empty means all.
            seed: of token sampling and of resampling.
            seconds: how long runs may be timed.
            looks: how many evaluations of growing data share the error; None for any number.
            crosscheck: compare measured block drift with certified bounds.
            progress: told (stage, done, total).

        Raises:
            Refusal: the model, the data or a kernel cannot be used, nothing can be decided, or a
                measured drift lies above its certified bound (KC625).
        """
        place = torch.device(device)
        user = load_functions(program, base)
        chosen = _chosen(program, slices)
        stated, program = program, expand_tables(program)
        names = {s.name for s in chosen}
        missed = tuple(gap for gap in gaps(stated) if gap.whole in names)
        chosen += _buckets(program, stated, names)
        model = load_model(program.model, base)
        progress("load", 1, PREPARE_STEPS)
        train = load_kernel(program.train, model, place)
        infer = load_kernel(program.infer, model, place)
        progress("load", 2, PREPARE_STEPS)
        files = _files(program, chosen, base, model)
        selected = {s.name: select(files[_data_of(program, s)], s) for s in chosen}
        spoiled = _spoiled(
            (gap, select(files[_data_of(program, gap.slice)], gap.slice)) for gap in missed
        )
        progress("load", 3, PREPARE_STEPS)
        setting = Setting(
            program=program,
            train=train,
            infer=infer,
            block_input=_block_inputs(model),
            files=files,
            slices=selected,
            encoder=model.encoder_only,
            blocks=frozenset(model.block_names()),
            weights=weights_digests(
                train, infer, model.checkpoint.sha256, file_digest(model.checkpoint.path)
            ),
            digests={
                side: fingerprint_digest(kernel.fingerprint())
                for side, kernel in (("train", train), ("infer", infer))
            },
            contract={
                "name": program.name,
                "version": program.version,
                "digest": f"sha256:{digest(stated).removeprefix('sha256:')}",
            },
            model={
                "checkpoint": program.model.checkpoint,
                "sha256": model.checkpoint.sha256,
                "architecture": program.model.architecture or program.model.module,
                "encoder": model.encoder_only,
            },
            environment={**_environment(place), **functions_record(user)},
            device=place,
            certify=_certify(program, model) if crosscheck else None,
            seed=seed,
            seconds=seconds,
            looks=looks,
            user=user,
            spoiled=spoiled,
            changed_weights=watch_weights({"train": train, "infer": infer}),
            reference=reference_of(model, resolve(program.train), resolve(program.infer)),
        )
        return evaluate(setting, progress)


BACKEND = EmpiricalBackend()


def _chosen(program: Program, names: Sequence[str]) -> tuple[Slice, ...]:
    known = [s.name for s in program.slices]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise refuse(
                codes.UNKNOWN_SLICE,
                f"the contract has no slice {name!r}",
                help=f"did you mean {near[0]!r}?" if near else f"slices: {', '.join(known)}",
            )
    return tuple(s for s in program.slices if not names or s.name in names)


def _buckets(program: Program, stated: Program, chosen: set[str]) -> tuple[Slice, ...]:
    """Return the slices that stand for buckets of the chosen ones."""
    declared = {s.name for s in stated.slices}
    return tuple(s for s in program.slices if s.name not in declared and whole_of(s.name) in chosen)


def _spoiled(found: Iterable[tuple[Gap, Sequence[Request]]]) -> dict[str, str]:
    """Return why a slice has no usable evidence, for tables that miss requests of it."""
    return {
        name: f"{len(rows)} requests, {rows[0].id!r} first, are in no row of the table {gap.table}"
        for gap, rows in found
        if rows
        for name in gap.spoils
    }


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


def _files(
    program: Program, chosen: Sequence[Slice], base: Path, model: Model
) -> dict[str, RequestFile]:
    tokenizer = model.tokenizer_source
    tokenize = None if tokenizer is None else tokenizer.encode
    names = dict.fromkeys(_data_of(program, s) for s in chosen)
    return {name: load_requests(base / name, name, tokenize, model.ids) for name in names}


def _block_inputs(model: Model) -> Any:
    """Return the function from (request, block) to what enters the block, remembered per pair."""
    known: dict[tuple[str, str], Tensor] = {}

    def block_input(request: Request, block: str) -> Tensor:
        key = (request.key, block)
        if key not in known:
            found = model.block_inputs(list(request.tokens), block)
            if found is None:
                raise refuse(
                    codes.METRIC_OUT_OF_REACH,
                    f"the block {block} takes tokens, not states; it has no measured drift",
                )
            known[key] = found
        return known[key]

    return block_input


def _certify(program: Program, model: Model) -> Certify:
    """Return the certified bounds of the interval backend for the numerics the kernels claim."""
    from kcdsl_backends.certifier.workshop import Workshop, certified_block_drift

    train, infer = resolve(program.train), resolve(program.infer)
    shop = Workshop(model, train, infer, torch.device("cpu"))
    return lambda block, x: certified_block_drift(model, block, x, train, infer, shop)


def _environment(device: torch.device) -> Mapping[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "kcdsl": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "device": device.type,
        "hardware": name,
    }
