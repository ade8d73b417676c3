"""Compile a contract file and collect its findings."""

from __future__ import annotations

from pathlib import Path

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics.model import Refusal, Sink
from kcdsl.ir.terms import Program
from kcdsl.source.files import read_source


def compile_contract(path: Path) -> tuple[Program | None, Sink]:
    """Return the program, or None after an error, and the findings; refusals are findings too."""
    sink = Sink()
    try:
        source = read_source(path)
    except Refusal as refusal:
        for diagnostic in refusal.diagnostics:
            sink.add(diagnostic)
        return None, sink
    return compile_source(source, sink, path.parent), sink
