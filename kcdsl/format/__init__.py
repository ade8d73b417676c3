"""The formatter of contracts: one layout; comments and meaning are kept."""

from kcdsl.format.document import edits, format_text

__all__ = ["edits", "format_text"]
