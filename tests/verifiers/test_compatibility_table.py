"""The compatibility table in the manual equals the current results of the verifiers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.common import shown_in
from bench.release import PAGE, Row, rows, table
from tests.support.release_scenes import released

pytestmark = pytest.mark.programs


def _anywhere(text: str) -> str:
    """Remove the version of openssl, the only verifier that no lock file pins."""
    return re.sub(r"openssl \S+,", "openssl,", text)


def test_every_row_equals_the_result_of_its_verifier(tmp_path: Path) -> None:
    found = list(dict.fromkeys(rows(released(tmp_path))))
    assert [row for row in found if row.is_odd] == []
    assert _anywhere(shown_in(PAGE, "release")) == _anywhere(table(found))


@pytest.mark.parametrize(
    "row",
    [
        Row("verifier", "form", honest=False, other=False, detail="an error"),
        Row("verifier", "form", honest=True, other=True),
        Row("verifier", "form", honest=True, other=False, known="no key"),
        Row("verifier", "form", honest=False, other=False, detail="an error", known="no key"),
    ],
)
def test_unexpected_rows_are_only_the_documented_ones(
    row: Row,
) -> None:
    assert row.is_odd
