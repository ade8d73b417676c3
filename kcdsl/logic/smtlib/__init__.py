"""Export of contracts to SMT-LIB 2.6, with the standard library alone."""

from kcdsl.logic.smtlib.script import consistency, implication

__all__ = ["consistency", "implication"]
