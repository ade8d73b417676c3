"""What one sampling unit of an evaluation is: a request, or all rollouts of a prompt."""

from __future__ import annotations

from kcdsl.ir.recordings import LOGITS
from kcdsl.ir.terms import Program


def prompts_are_units(program: Program) -> bool:
    """Say whether rollouts are read from a file: those of one prompt are one sampling unit, and a
    slice with some of them has a unit of its own."""
    recordings = (kernel.recording for kernel in (program.train, program.infer))
    return any(found is not None and found.format != LOGITS for found in recordings)


def sampling_unit(program: Program) -> str:
    """Return what one sampling unit is called: "prompt" or "request"."""
    return "prompt" if prompts_are_units(program) else "request"
