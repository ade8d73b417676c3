"""What a plain scalar means: the core schema of YAML 1.2, and where other readers differ."""

from __future__ import annotations

import re

CORE_NULL = {"", "~", "null", "Null", "NULL"}
CORE_BOOL = {w: w.lower() == "true" for w in ("true", "True", "TRUE", "false", "False", "FALSE")}
CORE_INT = re.compile(r"[-+]?[0-9]+")
CORE_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_OLD_BOOL = re.compile(r"(?i:yes|no|on|off)")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_GROUPED = re.compile(
    r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+][0-9]+)?)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
)
_PREFIXED = re.compile(r"[-+]?0[xXoObB][0-9a-fA-F_]+")


def ambiguity(text: str) -> str | None:
    """Say how other readers take a plain scalar that is not what it seems, or None."""
    if _OLD_BOOL.fullmatch(text):
        return "YAML 1.1 takes it for a truth value"
    if _BASE_60.fullmatch(text):
        return "YAML 1.1 takes it for a number in base 60"
    if _DATE.fullmatch(text):
        return "YAML 1.1 takes it for a date"
    if _OCTAL.fullmatch(text):
        return "YAML 1.1 takes it for an octal number"
    if "_" in text and _GROUPED.fullmatch(text):
        return "YAML 1.1 takes it for a number"
    if _PREFIXED.fullmatch(text):
        return "readers take it for a number in another base"
    if text == "=":
        return "YAML 1.1 takes it for a default value"
    return None
