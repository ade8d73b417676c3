"""Request files: parsing, and refusals with their line."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, refuse
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Slice
from kcdsl_backends.requests import RequestFile, load_requests, select


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def load(folder: Path, *lines: str) -> RequestFile:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return load_requests(path, "rows.jsonl", tokenize)


def refused(folder: Path, *lines: str) -> tuple[str, int | None, str]:
    with pytest.raises(Refusal) as caught:
        load(folder, *lines)
    first = caught.value.diagnostics[0]
    assert first.source is not None
    assert first.span is not None
    return first.code.id, first.source.position(first.span.start).line, first.message


def test_rows_have_tokens_length_and_fields(tmp_path: Path) -> None:
    file = load(
        tmp_path,
        '{"id": "a", "text": "one three", "category": "safety", "score": 0.1}',
        "",
        '{"id": 7, "tokens": [1, 2, 3], "safe": true, "note": null, "tags": ["x"]}',
    )
    first, second = file.requests
    assert (first.key, first.tokens, first.line) == ("rows.jsonl:a", (3, 5), 1)
    assert first.fields["score"] == Fraction(1, 10)
    assert first.fields["length"] == 2
    assert (second.id, second.tokens, second.line) == ("7", (1, 2, 3), 3)
    assert second.fields == {"id": 7, "safe": True, "length": 3}
    assert len(file.sha256) == 64


def test_given_length_is_kept(tmp_path: Path) -> None:
    assert (
        load(tmp_path, '{"id": "a", "text": "x", "length": 99}').requests[0].fields["length"] == 99
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"text"',
        "null",
        '{"id": "", "text": "x"}',
        '{"id": null, "text": "x"}',
        '{"id": true, "text": "x"}',
        '{"id": "a"}',
        '{"id": "a", "text": 3}',
        '{"id": "a", "text": ""}',
        '{"id": "a", "text": "\\ud800"}',
        '{"id": "a", "tokens": []}',
        '{"id": "a", "tokens": [1, -2]}',
        '{"id": "a", "tokens": [1, true]}',
        '{"id": "a", "tokens": "12"}',
        '{"id": "a", "text": "x", "score": NaN}',
        '{"id": "a", "text": "x", "score": Infinity}',
        '{"id": "a", "text": "x", "score": 1e999999999}',
        '{"id": "a", "text": "x", "score": 1e99999999999999999999}',
        f'{{"id": "a", "text": "x", "score": 0.{"1" * 5000}}}',
        '{"id": "a", "text": "x", "text": "y"}',
        '{"id": "a", "text": "x"} {"id": "b", "text": "y"}',
    ],
)
def test_malformed_lines_are_refused_with_their_line(tmp_path: Path, line: str) -> None:
    code, number, _ = refused(tmp_path, '{"id": "fine", "text": "x"}', line)
    assert (code, number) == ("KC620", 2)


def test_byte_order_mark_is_refused_with_help(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        load(tmp_path, '\ufeff{"id": "a", "text": "x"}')
    found = caught.value.diagnostics[0]
    assert found.code == codes.MALFORMED_REQUEST
    assert found.message == "the file begins with a byte order mark, and JSON does not"
    assert found.help == "save the file as UTF-8 without a byte order mark"
    assert found.source is not None
    assert found.span is not None
    assert found.source.position(found.span.start).line == 1


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    code, number, message = refused(
        tmp_path, '{"id": "1", "text": "x"}', '{"id": "b", "text": "x"}', '{"id": 1, "text": "y"}'
    )
    assert (code, number) == ("KC621", 3)
    assert "line 1" in message


def test_row_without_an_id_is_named_by_its_tokens(tmp_path: Path) -> None:
    one, two = '{"text": "one"}', '{"tokens": [5]}'
    first = [r.id for r in load(tmp_path, one, two, one, one).requests]
    assert len(set(first)) == 4
    assert first[2:] == [f"{first[0]}-2", f"{first[0]}-3"]
    other = load(tmp_path, two, '{"id": "a", "text": "x"}', one).requests
    assert [r.id for r in other] == [first[1], "a", first[0]]
    assert other[0].key.endswith(f":{first[1]}")


@pytest.mark.parametrize("id", ['""', "null", "true", "[1]"])
def test_id_must_be_a_name_or_absent(tmp_path: Path, id: str) -> None:
    code, number, _ = refused(tmp_path, '{"text": "x"}', f'{{"id": {id}, "text": "x"}}')
    assert (code, number) == ("KC620", 2)


def test_name_from_tokens_is_unique_among_given_ones(tmp_path: Path) -> None:
    (request,) = load(tmp_path, '{"tokens": [5]}').requests
    code, _, message = refused(
        tmp_path, f'{{"id": "{request.id}", "tokens": [3]}}', '{"tokens": [5]}'
    )
    assert code == "KC621"
    assert "line 1" in message


def test_tokens_must_agree_with_the_text_beside_them(tmp_path: Path) -> None:
    fine = load(tmp_path, '{"id": "a", "text": "one three", "tokens": [3, 5]}')
    assert fine.requests[0].tokens == (3, 5)
    code, _, message = refused(tmp_path, '{"id": "a", "text": "one three", "tokens": [3, 4]}')
    assert code == "KC620"
    assert "position 1" in message
    _, _, message = refused(tmp_path, '{"id": "a", "text": "one three", "tokens": [3, 5, 6]}')
    assert "position 2" in message


def test_refusals_of_model_and_tokenizer_have_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "x y"}\n', encoding="utf-8")

    def check(tokens: object) -> None:
        if len(list(tokens)) > 1:  # type: ignore[call-overload]
            raise refuse(codes.SEQUENCE, "the sequence is too long")

    with pytest.raises(Refusal) as caught:
        load_requests(path, "rows.jsonl", tokenize, check)
    first = caught.value.diagnostics[0]
    assert first.source is not None
    assert first.span is not None
    assert first.source.position(first.span.start).line == 2
    assert "too long" in first.message
    assert first.code is codes.SEQUENCE
    with pytest.raises(Refusal, match="no tokenizer"):
        load_requests(path, "rows.jsonl", None)


@pytest.mark.parametrize("data", [b"\xff\xfe", b'{"id": "a", "text": "\xe9"}'])
def test_other_encodings_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(Refusal) as caught:
        load_requests(path, "rows.jsonl", tokenize)
    assert caught.value.diagnostics[0].code is codes.NOT_UTF8


def test_missing_request_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        load_requests(tmp_path / "none.jsonl", "none.jsonl", tokenize)
    assert caught.value.diagnostics[0].code is codes.FILE_MISSING


def test_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert load(tmp_path, "").requests == ()


LONG = FieldTest("length", ">", Fraction(2))
SAFE = FieldTest("category", "==", "safety")


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (AllOf(), "abc"),
        (AnyOf(), ""),
        (LONG, "bc"),
        (SAFE, "ab"),
        (AllOf((LONG, SAFE)), "b"),
        (AnyOf((LONG, SAFE)), "abc"),
        (NoneOf(SAFE), "c"),
        (FieldTest("category", "!=", "safety"), "c"),
        (FieldTest("length", "<=", Fraction(1)), "a"),
        (FieldTest("length", ">=", Fraction(3)), "bc"),
        (FieldTest("length", "<", Fraction(3)), "a"),
        (FieldTest("id", "==", "b"), "b"),
    ],
)
def test_slices_select_rows(tmp_path: Path, where: Predicate, chosen: str) -> None:
    file = load(
        tmp_path,
        '{"id": "a", "text": "x", "category": "safety"}',
        '{"id": "b", "text": "x y z", "category": "safety"}',
        '{"id": "c", "text": "x y z", "category": "chat"}',
    )
    assert "".join(r.id for r in select(file, Slice("s", None, where))) == chosen


@pytest.mark.parametrize(
    "where",
    [
        SAFE,
        AllOf((FieldTest("length", ">", Fraction(99)), SAFE)),
        AnyOf((FieldTest("length", ">", Fraction(0)), SAFE)),
        NoneOf(SAFE),
    ],
)
@pytest.mark.parametrize("field", ["", ', "category": null', ', "category": 3'])
def test_row_without_a_predicate_field_is_refused(
    tmp_path: Path, where: Predicate, field: str
) -> None:
    file = load(
        tmp_path,
        '{"id": "a", "text": "x", "category": "safety"}',
        '{"id": "b", "text": "x"' + field + "}",
    )
    with pytest.raises(Refusal) as caught:
        select(file, Slice("refusals", None, where))
    first = caught.value.diagnostics[0]
    assert first.code.id == "KC622"
    assert first.span is not None
    assert file.source is not None
    assert file.source.position(first.span.start).line == 2
    assert "`category`" in first.message
    assert "`refusals`" in first.message
