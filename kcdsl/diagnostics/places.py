"""Places for refusals of what runs: it knows the compiled contract, but not the contract's text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kcdsl.diagnostics.model import Diagnostic, Refusal
from kcdsl.diagnostics.spans import Span


@contextmanager
def at(span: Span) -> Iterator[None]:
    """Give refusals that have no place this one: a span of the contract, whose text is not here."""
    try:
        yield
    except Refusal as refusal:
        refusal.diagnostics = tuple(
            replace(d, span=span) if d.source is None and d.span is None else d
            for d in refusal.diagnostics
        )
        raise


@contextmanager
def in_contract(path: Path) -> Iterator[None]:
    """Give refusals with a span of the contract its text, read again from `path`.

    A program that was not compiled from a text has empty spans, which say nothing.
    """
    try:
        yield
    except Refusal as refusal:
        refusal.diagnostics = tuple(_in_text(d, path) for d in refusal.diagnostics)
        raise


def _in_text(diagnostic: Diagnostic, path: Path) -> Diagnostic:
    from kcdsl.source.files import read_source

    span = diagnostic.span
    if diagnostic.source is not None or span is None:
        return diagnostic
    try:
        source = read_source(path)
    except Refusal:
        return replace(diagnostic, span=None)
    if not span.start < span.end <= len(source.text):
        return replace(diagnostic, span=None)
    return replace(diagnostic, source=source)
