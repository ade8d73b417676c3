"""The report as one HTML page: a pure function of the report document.

The page holds everything it shows. It loads nothing and runs no script, follows the light or dark
scheme of the reader, and prints. Each chart has a title, a description and a table beside it.
"""

from kcdsl.verdict.html.page import page

__all__ = ["page"]
