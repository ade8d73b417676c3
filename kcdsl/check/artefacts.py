"""Checks of a contract against its files: architecture, tensors, blocks and kernels.

What later commands would refuse is found here, from config.json and the headers of the weights:
nothing that the contract names is run, and no weight is read. torch is imported where there are
weights of a built-in architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import NoFlip, Norm, terms_of, walk
from kcdsl.ir.terms import ONNX, KernelRef, Program
from kcdsl.model.adapters import ADAPTERS, refuse_no_file, refuse_unserved
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import refuse_strays, resolve
from kcdsl.route.goals import goal_of

if TYPE_CHECKING:
    from kcdsl.model.architecture import Model


def check_artefacts(program: Program, folder: Path) -> tuple[Diagnostic, ...]:
    """Return what is wrong with the model and the kernels of a contract in a folder.

    Weights that are not there yet, of either kernel, are no error; kernels of other distributions
    are not imported.
    """
    found: list[Diagnostic] = []
    kernels = [k for k in (program.train, program.infer, program.guard, program.fallback) if k]
    measured = any(goal_of(clause) is None for clause in program.clauses)
    for kernel in kernels if measured else ():  # proofs are about numerics, whatever runs
        with _collected(found), at(kernel.span):
            _refuse_unserved(kernel, of_file=program.model.architecture == ONNX)
    for clause in program.clauses if program.infer.own_file is not None else ():
        if goal_of(clause) is not None:
            with _collected(found), at(clause.span):
                resolve(program.infer)
    if found or not _weights_at_hand(program.model.checkpoint, folder):
        return tuple(found)
    with _collected(found):
        from kcdsl.model.architecture import load_structure

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
    """Refuse numerics that the adapter of a kernel serves on no device, and a model that it does
    not run."""
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
    """Yield every block that clauses speak of, with its first place."""
    seen: set[str] = set()
    for clause in program.clauses:
        named = [(t.of.block, t.of.span) for t in terms_of(clause.require) if isinstance(t, Norm)]
        named += [(p.block, p.span) for p in walk(clause.require) if isinstance(p, NoFlip)]
        for block, span in named:
            if block not in seen:
                seen.add(block)
                yield block, span


def _weights_at_hand(named: str, folder: Path) -> bool:
    try:
        Artefacts.of(folder).find_weights(named)
    except Refusal:
        return False
    return True
