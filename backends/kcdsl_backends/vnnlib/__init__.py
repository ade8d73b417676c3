"""VNN-LIB queries about ONNX networks, in real arithmetic (docs/reference/vnnlib.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl_backends.vnnlib.foreign import ask_solver
from kcdsl_backends.vnnlib.verify import QueryAnswer, capability, verify_query

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.route.goals import Goal
    from kcdsl_backends.vnnlib.export import ExportedCase

__all__ = ["QUERIES", "QueryCommands"]


@dataclass(frozen=True, slots=True)
class QueryCommands:
    """The functions that `kcdsl vnnlib` calls."""

    verify: Callable[[Path, Mapping[str, Path], float], QueryAnswer]
    ask: Callable[[str, Path, Mapping[str, Path], float], QueryAnswer]
    capability: Callable[[str], str]
    exported: Callable[[Program, Artefacts, Goal], Sequence[ExportedCase]]


def _exported(program: Program, files: Artefacts, goal: Goal) -> Sequence[ExportedCase]:
    from kcdsl_backends.vnnlib.export import exported  # imports torch

    return exported(program, files, goal)


QUERIES = QueryCommands(verify_query, ask_solver, capability, _exported)
