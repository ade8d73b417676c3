"""Codes, diagnostics and their renderers."""

from kcdsl.diagnostics.model import Diagnostic, Label, Refusal, Severity, Sink, refuse

__all__ = ["Diagnostic", "Label", "Refusal", "Severity", "Sink", "refuse"]
