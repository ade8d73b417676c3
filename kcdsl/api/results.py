"""The common part of results: their display in notebooks, and their rows as tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PACKAGE

Progress = Callable[[str, int, int], None]
"""A progress callback: the name of a stage, the work done, and the total work."""


Method = TypeVar("Method", bound=Callable[..., Any])


def offered(method: Method) -> Method:
    """Mark a method that only programs and notebooks call."""
    return method


class TableResult(ABC):
    """A result with rows: shown as a table in notebooks, and converted to data frames."""

    __slots__ = ()

    @property
    @abstractmethod
    def says(self) -> str:
        """Return the result in a line."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.says}>"

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the result as rows of plain values."""

    @offered
    def to_arrow(self) -> Any:
        """Return the rows as a pyarrow.Table."""
        import pyarrow

        return pyarrow.Table.from_pylist(self.rows())

    @offered
    def to_pandas(self) -> Any:
        """Return the rows as a pandas.DataFrame; raises Refusal where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise refuse(
                NO_PACKAGE,
                "to_pandas needs pandas, which is not installed",
                help="pip install 'kcdsl[pandas]'",
            ) from None
        return pandas.DataFrame(self.rows())

    @offered
    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.says)}</p>{html_table(self.rows())}"


def html_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as an HTML table; every value is escaped."""
    from html import escape

    if not rows:
        return "<p>no rows</p>"
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = (
        "<tr>" + "".join(f"<td>{escape(_shown(row.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def no_progress() -> Iterator[Progress]:
    """Report no progress."""
    yield lambda stage, done, total: None


def discard_message(text: str) -> None:
    """Discard the message."""
