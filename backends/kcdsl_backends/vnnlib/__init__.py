"""VNN-LIB queries about ONNX networks, in real arithmetic (docs/reference/vnnlib.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kcdsl_backends.vnnlib.foreign import ask_solver
from kcdsl_backends.vnnlib.verify import QueryAnswer, capability, verify_query

__all__ = ["QUERIES", "QueryCommands"]


@dataclass(frozen=True, slots=True)
class QueryCommands:
    """What `kcdsl vnnlib` asks for."""

    verify: Callable[[Path, Mapping[str, Path], float], QueryAnswer]
    ask: Callable[[str, Path, Mapping[str, Path], float], QueryAnswer]
    capability: Callable[[str], str]


QUERIES = QueryCommands(verify_query, ask_solver, capability)
