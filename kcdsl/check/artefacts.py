"""Checks of a contract against its files: architecture, tensors, blocks, kernels and requests.

A contract may be compiled before any of its files exist. If some files of its model exist, all the
others that it names must exist too. Defects that later commands would refuse are found here, from
config.json, the headers of the weights and the first rows of requests: no code of the contract is
run, and no weight is read. torch is imported if there are weights of a built-in architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import NoFlip, Norm, terms_of, walk
from kcdsl.ir.predicates import tests_of
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef, Program, Slice
from kcdsl.model.adapters import ADAPTERS, refuse_no_file, refuse_unserved
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import refuse_strays, resolve
from kcdsl.route.goals import goal_of
from kcdsl.source.files import is_file, open_file, shown

if TYPE_CHECKING:
    from kcdsl.model.architecture import Model

_ROWS = 1000
"""The number of rows of requests that are checked."""


def check_artefacts(program: Program, folder: Path) -> tuple[Diagnostic, ...]:
    """Return the defects of the model and the kernels of a contract in a folder.

    A model without any file is no error; kernels of other distributions are not imported.
    """
    found: list[Diagnostic] = []
    if _has_files(program.model, folder):
        found += _absent(program, folder)
    kernels = [k for k in (program.train, program.infer, program.guard, program.fallback) if k]
    measured = any(goal_of(clause) is None for clause in program.clauses)
    for kernel in kernels if measured else ():  # proofs are about numerics, not adapters
        with _collected(found), at(kernel.span):
            _refuse_unserved(kernel, of_file=program.model.architecture == ONNX)
    for clause in program.clauses if program.infer.own_file is not None else ():
        if goal_of(clause) is not None:
            with _collected(found), at(clause.span):
                resolve(program.infer)
    if found or not _weights_at_hand(program.model.checkpoint, folder):
        return tuple(found)
    with _collected(found):
        from kcdsl.model.loader import load_structure

        own = program.model.served
        at_hand = own is None or _weights_at_hand(own, folder)
        model = load_structure(
            program.model if at_hand else replace(program.model, served=None), folder
        )
        if model is None:
            return tuple(found)
        for block, span in _blocks(program):
            with _collected(found), at(span):
                model.block(block)
        linears = model.linears()
        for kernel in kernels if measured else ():
            with _collected(found), at(kernel.span):
                _refuse_uncapped(kernel, model)
        for kernel in kernels:
            if kernel.claims:
                with _collected(found), at(kernel.span):
                    refuse_strays(resolve(kernel), linears, model.quantised_tensors)
    return tuple(found)


@contextmanager
def _collected(found: list[Diagnostic]) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        found.extend(refusal.diagnostics)


def _refuse_unserved(kernel: KernelRef, *, of_file: bool) -> None:
    """Refuse numerics that the adapter of a kernel supports on no device, and a model that it
    cannot run."""
    adapter = ADAPTERS.get(kernel.run)
    own_file = kernel.own_file is not None
    if adapter is not None and adapter.engine not in ("server", "recorded"):
        refuse_no_file(kernel.run, adapter, of_file=of_file or own_file)
        if own_file and not adapter.of_file:
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"{kernel.run} does not run {kernel.own_file}",
                help="run onnxruntime.file",
            )
    if adapter is None or not kernel.claims or adapter.engine in ("server", "recorded"):
        return
    numerics, last = resolve(kernel), None
    for device in adapter.devices:
        try:
            refuse_unserved(kernel.run, adapter, numerics, device)
        except Refusal as refusal:
            last = last or refusal
        else:
            return
    if last is not None:
        raise last


def _refuse_uncapped(kernel: KernelRef, model: Model) -> None:
    """Refuse a kernel whose attention does not cap scores for a model that does."""
    from kcdsl.model.attention import caps_scores, uncapped

    adapter = ADAPTERS.get(kernel.run)
    if adapter is not None and adapter.style == "fused" and caps_scores(model.module):
        raise uncapped(kernel.run)


def _blocks(program: Program) -> Iterator[tuple[str, Span]]:
    """Yield every block in clauses, with its first span."""
    seen: set[str] = set()
    for clause in program.clauses:
        named = [(t.of.block, t.of.span) for t in terms_of(clause.require) if isinstance(t, Norm)]
        named += [(p.block, p.span) for p in walk(clause.require) if isinstance(p, NoFlip)]
        for block, span in named:
            if block not in seen:
                seen.add(block)
                yield block, span


def _has_files(model: ModelRef, folder: Path) -> bool:
    """Return whether the folder has weights or their configuration."""
    place = weights_folder(folder / model.checkpoint)
    there = is_file(place / "config.json") or any(place.glob("*.safetensors"))
    return there or _weights_at_hand(model.checkpoint, folder)


def _absent(program: Program, folder: Path) -> Iterator[Diagnostic]:
    """Yield the diagnostics of missing weights and data, and of the first row without a field that
    a slice tests."""
    files, model = Artefacts.of(folder), program.model
    found: list[Diagnostic] = []
    adapters = [ADAPTERS.get(kernel.run) for kernel in (program.train, program.infer)]
    recorded = [adapter is not None and adapter.engine == "recorded" for adapter in adapters]
    for weights in (model.checkpoint, model.served) if not all(recorded) else ():
        if weights is not None:
            with _collected(found), at(model.span):
                files.find_weights(weights)
    seen: set[tuple[str, str | None]] = set()
    for one in program.slices:
        data = one.data or program.data
        if data is None:
            continue
        if (data, None) not in seen:
            seen.add((data, None))
            with _collected(found), at(one.span):
                files.find(data)
        fields = [test.field for test in tests_of(one.where) if (data, test.field) not in seen]
        path = files.at_hand(data)
        if path is not None and path.suffix == ".jsonl" and not any(recorded):
            seen |= {(data, field) for field in fields}
            with _collected(found), at(one.span):
                _refuse_lacking(one, fields, path)
    yield from found


def _refuse_lacking(one: Slice, fields: Sequence[str], path: Path) -> None:
    """Refuse requests if one of the first rows lacks a field that a slice tests."""
    with open_file(path) as lines:
        for number, line in enumerate(islice(lines, _ROWS if fields else 0), 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a blank line, or an error that the reader of requests reports
            for field in fields if isinstance(row, dict) else ():
                if row.get(field) is None and field != "length":
                    raise refuse(
                        codes.REQUEST_FIELD,
                        f"{shown(path)}, line {number}: the row has no field `{field}`, which the "
                        f"slice `{one.name}` tests",
                        help="give the field to every row, or name a field that all rows have",
                    )


def _weights_at_hand(named: str, folder: Path) -> bool:
    try:
        Artefacts.of(folder).find_weights(named)
    except Refusal:
        return False
    return True
