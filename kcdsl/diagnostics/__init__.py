"""Codes, diagnostics and their renderers."""

from kcdsl.diagnostics.model import Diagnostic, Label, Refusal, Severity, Sink, Suppressed, refuse

__all__ = ["Diagnostic", "Label", "Refusal", "Severity", "Sink", "Suppressed", "refuse"]
