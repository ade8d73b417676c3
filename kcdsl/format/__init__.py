"""The formatter of contracts: one layout, every comment kept, the meaning untouched."""

from kcdsl.format.document import format_text
from kcdsl.format.lines import edits

__all__ = ["edits", "format_text"]
