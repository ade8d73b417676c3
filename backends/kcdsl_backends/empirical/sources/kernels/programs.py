"""Programs that run on this machine: libraries they need, and compiled modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.numerics import Numerics
from kcdsl.model.weights import linear_weight

Program = Callable[[Tensor], Tensor]


class Engine(Protocol):
    """Gives the program of a part. Asked again for the same name, it gives the same program."""

    def __call__(self, name: str, part: Program) -> Program:
        """Return what is run in place of `part`, the block of this name."""
        ...


def as_it_is(name: str, part: Program) -> Program:
    """Run the part itself."""
    return part


def need(library: tuple[str, ...], run: str) -> None:
    """Refuse where what an adapter needs is not installed: the extra, and what that brings."""
    missing = [package for package in library[1:] if find_spec(package) is None]
    if missing:
        raise refuse(
            codes.NO_PACKAGE,
            f"{run} needs {' and '.join(missing)}, which is not installed",
            help=f'pip install "kcdsl[{library[0]}]"',
        )


def expected_weights(
    module: nn.Module, originals: Mapping[str, Tensor], numerics: Numerics
) -> dict[str, Tensor]:
    """Return what the numerics say of the weight of every linear of a module, by its name."""
    return {
        name: linear_weight(originals[f"{name}.weight"], numerics, f"{name}.weight")
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }


def refuse_other_weight(run: str, name: str, held: Tensor, expected: Tensor) -> None:
    """Refuse where a library stores another weight than the numerics define, in any element."""
    shown = held.detach().to("cpu", torch.float64)
    wanted = expected.detach().to("cpu", torch.float64)
    if shown.shape == wanted.shape and torch.equal(shown, wanted):
        return
    raise other_weight(run, name)


def other_weight(run: str, name: str) -> Refusal:
    """Return the refusal of a library's weight."""
    return refuse(
        codes.KERNEL_NUMERICS,
        f"{run} stores another weight for {name} than its numerics define",
        help="the library quantises otherwise than the release that docs/numerics.md names, or the"
        " weight has a row of zeros or of other numbers that it cannot quantise",
    )


# --- compiled ------------------------------------------------------------------------------------


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
