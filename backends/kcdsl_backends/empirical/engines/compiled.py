"""torch.compile: every part is one graph of Inductor, whatever the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kcdsl_backends.empirical.engines.programs import Program

_LIMIT = 1 << 16
"""Compilations of one function: beyond the limit, which is 8, PyTorch would run it uncompiled."""
OPTIONS: dict[str, Any] = {"pattern_matcher": False}
"""Inductor's patterns make `addmm` of a product and a sum after it. That starts with the addend and
rounds it once for every few hundred terms, which no numerics admits."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiles each part when it runs for the first time; a part that breaks the graph fails."""

    _programs: dict[str, Program] = field(default_factory=dict)

    def __call__(self, name: str, part: Program) -> Program:
        """Return the compiled part."""
        if name not in self._programs:
            self._programs[name] = _compiled(part)
        return self._programs[name]


def _compiled(part: Program) -> Program:
    program = torch.compile(part, fullgraph=True, dynamic=True, options=OPTIONS)
    settings: Any = torch._dynamo.config

    def run(argument: Tensor) -> Tensor:
        with settings.patch(recompile_limit=_LIMIT, accumulated_recompile_limit=_LIMIT):
            result: Tensor = program(argument)
            return result

    return run
