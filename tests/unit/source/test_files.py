"""Reading and writing text files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.model.fingerprint import _DigestCache
from kcdsl.source.files import SIZE_LIMIT, decode_source, read_source, user_place
from kcdsl.source.numbers import decimal_text, exact
from kcdsl.source.output import NewFile, write_bytes, write_together


def refused(path: Path) -> str:
    """Return the code of the refusal of a file."""
    with pytest.raises(Refusal) as caught:
        read_source(path)
    return caught.value.diagnostics[0].code.id


def test_text_is_not_normalised(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffa: é\r\n".encode())
    assert read_source(path).text == "\ufeffa: é\r\n"


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.yaml") == "KC601"
    assert refused(tmp_path) == "KC601"
    bad = tmp_path / "latin.yaml"
    bad.write_bytes(b"a: 1\nb: \xe9\n")
    assert refused(bad) == "KC008"
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (SIZE_LIMIT + 1))
    assert refused(large) == "KC011"


@pytest.mark.parametrize(
    ("data", "line", "column", "help"),
    [
        (b"a: 1\nb: \xe9\n", 2, 4, "save it as UTF-8"),
        ("ä: 🚀".encode() + b"\xf0\x9f\x9a", 1, 5, "save it as UTF-8"),
        ("kcdsl: 1".encode("utf-16"), 1, 1, "save it as UTF-8; it begins as UTF-16 does"),
    ],
)
def test_invalid_utf8_is_reported_at_its_position(
    data: bytes, line: int, column: int, help: str
) -> None:
    with pytest.raises(Refusal) as caught:
        decode_source("a.yaml", data)
    found = caught.value.diagnostics[0]
    assert found.source is not None
    assert found.span is not None
    assert found.source.text[found.span.start : found.span.end] == "\N{REPLACEMENT CHARACTER}"
    at = found.source.position(found.span.start)
    assert (at.line, at.column, found.help) == (line, column, help)


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_bytes(path, b"one")
    write_bytes(path, b"two\n")
    assert path.read_bytes() == b"two\n"
    with pytest.raises(Refusal):
        write_bytes(path / "below" / "a file.json", b"x")
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(Refusal):
        write_bytes(target, b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "out.json"]
    write_bytes(target / "made" / "x.json", b"x")
    assert [p.name for p in (target / "made").iterdir()] == ["x.json"]


def test_several_files_are_written_atomically(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    files = [NewFile(one, b"1", 0o600), NewFile(two, b"2", 0o644)]
    write_together(files, replace=False)
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"2")
    assert one.stat().st_mode & 0o777 == 0o600
    one.unlink()
    with pytest.raises(Refusal) as caught:
        write_together(files, replace=False)
    assert caught.value.diagnostics[0].code.id == "KC642"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]
    with pytest.raises(Refusal):
        write_together([files[0], NewFile(tmp_path / "no" / "x", b"", 0o644)], replace=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", Fraction(12)),
        (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("-2.50", Fraction(-5, 2)),
        ("1E+2", Fraction(100)),
        ("", None),
        (".", None),
        ("1e500", None),
        ("e3", None),
        ("1e99999999", None),
    ],
)
def test_decimal_numbers_are_exact(text: str, value: Fraction | None) -> None:
    assert exact(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 20), "0.05"),
        (Fraction(-5, 2), "-2.5"),
        (Fraction(7), "7"),
        (Fraction(1, 3), "1/3"),
        (Fraction(1, 10**20), "1e-20"),
        (Fraction(15, 10**20), "1.5e-19"),
    ],
)
def test_numbers_keep_their_spelling(value: Fraction, text: str) -> None:
    assert decimal_text(value) == text


def test_user_folders_are_never_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    monkeypatch.setenv("HOME", str(home))
    for given, found in (("", home / ".cache"), ("cache", home / ".cache"), (str(other), other)):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert user_place("XDG_CACHE_HOME", ".cache") == found
    monkeypatch.setenv("HOME", ".")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_place("XDG_CACHE_HOME", ".cache") is None


def test_cached_digests_are_not_read_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files there could replace the digests of libraries in fingerprints."""
    root = str(tmp_path / "packages")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = _DigestCache.of("numpy", root).place
    assert place is not None
    place.parent.mkdir(parents=True)
    place.write_text('{"file": ["stamp", "digest"]}')
    assert _DigestCache.of("numpy", root).before == {"file": ["stamp", "digest"]}
    monkeypatch.setenv("HOME", ".")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    known = _DigestCache.of("numpy", root)
    assert known.before == {}
    known.now["file"] = ["stamp", "other"]
    known.keep()
    assert place.read_text() == '{"file": ["stamp", "digest"]}'
