"""The report as one HTML page: a pure function of the report document.

The page is self-contained. It loads nothing and runs no script, follows the light or dark scheme
of the reader, and can be printed. Each chart has a title, a description and a table.
"""

from kcdsl.verdict.html.page import page

__all__ = ["page"]
