"""Refusals without tests are found in the data of a coverage run."""

from __future__ import annotations

from pathlib import Path

from coverage import CoverageData

from bench.unreached import unreached

SOURCE = """\
def read(value):
    if value < 0:
        raise ValueError(
            "negative"
        )
    if value > 9:
        raise ValueError("large")
    try:
        return value
    except TypeError:
        raise
"""


def test_refusals_that_were_not_executed_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    data = CoverageData(str(tmp_path / "data"))
    data.add_lines({str(path): [1, 2, 3, 6]})
    assert unreached(data, path) == [(7, "ValueError('large')")]
    data.add_lines({str(path): [7]})
    assert unreached(data, path) == []
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    assert [line for line, _ in unreached(data, other)] == [3, 7]
