"""The formatter of contracts: one layout, every comment kept, the meaning untouched."""

from kcdsl.format.document import edits, format_text

__all__ = ["edits", "format_text"]
