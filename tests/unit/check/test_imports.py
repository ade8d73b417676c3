"""Imports: names from a library, its digest, and every error of an import."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import analyse, load_program
from kcdsl.check.sections.libraries import DEPTH_LIMIT, path_problem, rebase
from kcdsl.check.stored import load_bytes
from kcdsl.diagnostics import Diagnostic, Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, document, library_digest
from kcdsl.ir.terms import ImportedFrom, Library, Program
from kcdsl.source.files import read_source
from tests.support.compiling import compile_contract

LIBRARY = """\
kcdsl: 1
library: fleet
version: 2.1.0
data: prompts.jsonl
slices:
  tail: {where: length > 128}
  safety: {data: ./red/safety.jsonl}
  packaged: {data: "package:prompts/all.jsonl"}
kernels:
  fast: {run: torch.sdpa, numerics: {preset: flash-attention-2, compute: bfloat16}}
tables:
  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}
"""
CONTRACT = """\
kcdsl: 1
contract: c
version: 1
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}}
imports:
  - file: ../shared/fleet.kc.yaml
    digest: "DIGEST"
    slices: [tail, safety]
    kernels: {infer: fast}
    tables: [tau]
clauses:
  A: {require: p99(kl) <= table(tau), slices: [tail], level: L2}
  B: {require: "forall x in points(safety): no_flip(model, x)", level: L3}
"""
INLINE = """\
kcdsl: 1
contract: c
version: 1
model: {checkpoint: m.safetensors, architecture: llama}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.sdpa, numerics: {preset: flash-attention-2, compute: bfloat16}}
slices:
  tail: {data: ../shared/prompts.jsonl, where: length > 128}
  safety: {data: ../shared/red/safety.jsonl}
tables:
  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}
clauses:
  A: {require: p99(kl) <= table(tau), slices: [tail], level: L2}
  B: {require: "forall x in points(safety): no_flip(model, x)", level: L3}
"""


def library_of(path: Path) -> Library:
    """Return a valid library."""
    sink = Sink()
    library = analyse(read_source(path), sink, path.parent).library
    assert library is not None, [d.message for d in sink]
    return library


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the library and the contract."""
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "kcdsl.toml").write_text('allow-folders = ["."]\n')
    file = tmp_path / "shared" / "fleet.kc.yaml"
    file.write_text(LIBRARY)
    text = CONTRACT.replace("DIGEST", library_digest(library_of(file)))
    (tmp_path / "own" / "contract.yaml").write_text(text)
    (tmp_path / "own" / "inline.kc.yaml").write_text(INLINE)
    return tmp_path


def found_in(place: Path, change: Callable[[str], str] = lambda text: text) -> list[Diagnostic]:
    """Return the errors and warnings of the contract after a text change."""
    path = place / "own" / "contract.yaml"
    path.write_text(change(path.read_text()))
    return [d for d in compile_contract(path)[1] if d.severity != "note"]


def mended(place: Path, found: Diagnostic) -> str:
    """Apply the fix of a finding to the contract, and return its text."""
    path = place / "own" / "contract.yaml"
    text = path.read_text()
    assert found.fix is not None
    for edit in sorted(found.fix.edits, key=lambda e: e.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    path.write_text(text)
    return text


def at(found: Diagnostic) -> str:
    """Return the text covered by a finding."""
    assert found.source is not None
    assert found.span is not None
    return found.source.text[found.span.start : found.span.end]


# --- meaning -------------------------------------------------------------------------------------


def test_import_equals_the_inlined_definitions(place: Path) -> None:
    program = load_program(place / "own" / "contract.yaml")
    inline = load_program(place / "own" / "inline.kc.yaml")
    assert program == inline
    assert digest(program) == digest(inline)
    assert program.imports == (
        ImportedFrom(
            "../shared/fleet.kc.yaml",
            library_digest(library_of(place / "shared" / "fleet.kc.yaml")),
        ),
    )
    assert inline.imports == ()


def test_stored_form_states_the_origin_of_parts(place: Path) -> None:
    program = load_program(place / "own" / "contract.yaml")
    again = load_bytes(document(program))
    assert again.imports == program.imports
    assert digest(again) == digest(program)
    forged = document(program).replace(b'"1/100"', b'"1/10"')
    with pytest.raises(Refusal):
        load_bytes(forged)


def test_positions_of_imported_parts_are_at_the_import(place: Path) -> None:
    path = place / "own" / "contract.yaml"
    program, text = load_program(path), path.read_text()
    spans = {s.name: s.span for s in program.slices} | {t.name: t.span for t in program.tables}
    assert {name: text[span.start : span.end] for name, span in spans.items()} == {
        name: name for name in ("tail", "safety", "tau")
    }


@pytest.mark.parametrize(
    ("written", "moved"),
    [
        ("{run: torch.sdpa, checkpoint: SOME/w.safetensors}", True),
        ("{run: hf.transformers, folder: SOME/w}", True),
        ("{run: recorded, format: logits, file: SOME/w.safetensors}", True),
        ("{run: hf.transformers, folder: /abs/w}", False),
        ('{run: torch.sdpa, checkpoint: "package:weights/w.safetensors"}', False),
    ],
)
def test_paths_of_an_imported_kernel_are_relative_to_the_library(
    place: Path, written: str, moved: bool
) -> None:
    file, path = place / "shared" / "fleet.kc.yaml", place / "own" / "contract.yaml"
    old = next(line for line in LIBRARY.splitlines() if line.startswith("  fast:"))
    before = library_digest(library_of(file))
    file.write_text(LIBRARY.replace(old, f"  fast: {written.replace('SOME', 'new')}"))
    path.write_text(path.read_text().replace(before, library_digest(library_of(file))))
    inline = INLINE.replace(
        "{run: torch.sdpa, numerics: {preset: flash-attention-2, compute: bfloat16}}",
        written.replace("SOME", "../shared/new"),
    )
    (place / "own" / "inline.kc.yaml").write_text(inline)
    program = load_program(path)
    assert digest(program) == digest(load_program(place / "own" / "inline.kc.yaml"))
    assert ("../shared/" in str(program.infer)) is moved
    file.write_text(file.read_text().replace("new/", "new/../../").replace("/abs/", "x/../../"))
    found = [d for d in compile_contract(file)[1] if d.code.id == "KC120"]
    assert bool(found) is ("package:" not in written)


def test_names_may_be_renamed_on_import(place: Path) -> None:
    path = place / "own" / "contract.yaml"
    text = path.read_text().replace("[tail, safety]", "{tail: safety, safety: tail}")
    path.write_text(text)
    program = load_program(path)
    assert program.slice("tail").data == "../shared/red/safety.jsonl"
    assert program.slice("safety").data == "../shared/prompts.jsonl"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: "# a comment\n" + t,
        lambda t: t.replace("{where: length > 128}", '\n    where: "128 < length"'),
        lambda t: t.replace("data: prompts.jsonl", "data: ./prompts.jsonl"),
        lambda t: t.replace("value: 0.01", "value: 1e-2 nats"),
        lambda t: t.replace("version: 2.1.0", 'version: "2.1.0"'),
    ],
)
def test_digest_of_a_library_depends_on_its_meaning_only(
    place: Path, change: Callable[[str], str]
) -> None:
    file = place / "shared" / "fleet.kc.yaml"
    before, text = library_digest(library_of(file)), file.read_text()
    file.write_text(change(text))
    assert file.read_text() != text
    assert library_digest(library_of(file)) == before
    assert found_in(place) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("length > 128", "length > 127"),
        ("0.05", "0.06"),
        ("bfloat16", "float16"),
        ("prompts.jsonl", "others.jsonl"),
        ("2.1.0", "2.1.1"),
        ("library: fleet", "library: flock"),
        ("tail:", "tails:"),
        ("torch.sdpa", "torch.eager"),
        ("fast:", "faster:"),
    ],
)
def test_every_change_of_a_library_changes_its_digest(place: Path, old: str, new: str) -> None:
    file = place / "shared" / "fleet.kc.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert "KC122" in [d.code.id for d in found_in(place)]


# --- the digest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", [False, True])
def test_missing_digest_is_inserted_by_a_safe_fix(place: Path, flow: bool) -> None:
    def change(text: str) -> str:
        text = re.sub(r"    digest: .*\n", "", text)
        if flow:
            body = re.search(r"  - (file.*\n(?:    .*\n)+)", text)
            assert body is not None
            fields = ", ".join(line.strip() for line in body[1].splitlines())
            text = text.replace(body[0], f"  - {{{fields}}}\n")
        return text

    (found,) = found_in(place, change)
    assert (found.code.id, at(found)) == ("KC121", "../shared/fleet.kc.yaml")
    assert found.fix is not None
    assert found.fix.safe
    mended(place, found)
    assert found_in(place) == []


def test_digest_is_inserted_before_a_comment(place: Path) -> None:
    (found,) = found_in(
        place,
        lambda t: re.sub(r"    digest: .*\n", "", t).replace("kc.yaml\n", "kc.yaml  # ours\n"),
    )
    assert "kc.yaml  # ours\n    digest: " in mended(place, found)
    assert found_in(place) == []


def test_wrong_digest_shows_both_and_has_an_unsafe_fix(place: Path) -> None:
    (found,) = found_in(place, lambda t: re.sub(r"sha256:\w+", "sha256:" + "0" * 64, t))
    right = library_digest(library_of(place / "shared" / "fleet.kc.yaml"))
    assert found.code.id == "KC122"
    assert found.notes == (f"stated   sha256:{'0' * 64}", f"computed {right}")
    assert found.fix is not None
    assert not found.fix.safe
    mended(place, found)
    assert found_in(place) == []


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("fleet.kc.yaml", True),
        ("./fleet.kc.yaml", True),
        ("shared/fleet.kc.yaml", True),
        ("../../shared/fleet.kc.yaml", True),
        ("/shared/fleet.kc.yaml", False),
        ("~/fleet.kc.yaml", False),
        ("C:/fleet.kc.yaml", False),
        ("shared/../fleet.kc.yaml", False),
        ("shared/./fleet.kc.yaml", False),
        ("shared//fleet.kc.yaml", False),
        ("shared\\fleet.kc.yaml", False),
        ("https://example.org/fleet.kc.yaml", False),
        ("shared/fl\0eet.kc.yaml", False),
        ("shared/fl\neet.kc.yaml", False),
        ("..", False),
        (".", False),
        ("", False),
        ("shared/", False),
    ],
)
def test_paths_of_libraries(text: str, fine: bool) -> None:
    assert (path_problem(text) is None) is fine


def test_data_paths_are_relative_to_the_library() -> None:
    assert rebase("p.jsonl", "../shared/fleet.kc.yaml") == "../shared/p.jsonl"
    assert rebase("../p.jsonl", "../shared/fleet.kc.yaml") == "../p.jsonl"
    assert rebase("p.jsonl", "fleet.kc.yaml") == "p.jsonl"
    assert rebase("package:a/p.jsonl", "../shared/fleet.kc.yaml") == "package:a/p.jsonl"
    assert rebase(None, "../shared/fleet.kc.yaml") is None


def test_import_of_a_special_file_is_refused(place: Path) -> None:
    os.mkfifo(place / "shared" / "pipe.kc.yaml")
    (found,) = found_in(place, lambda t: t.replace("fleet.kc", "pipe.kc"))
    assert (found.code.id, at(found)) == ("KC120", "../shared/pipe.kc.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (2**20 + 1), "larger than"),
        (CONTRACT.encode(), "not a library"),
        (b"[1, 2]", "not a library"),
    ],
)
def test_import_of_other_documents_is_refused(place: Path, content: bytes, words: str) -> None:
    (place / "shared" / "fleet.kc.yaml").write_bytes(content)
    (found,) = found_in(place)
    assert found.code.id == "KC120"
    assert words in found.message


def test_findings_of_a_library_are_placed_in_the_library(place: Path) -> None:
    file = place / "shared" / "fleet.kc.yaml"
    file.write_text(LIBRARY.replace("length > 128", "length >").replace("fast:", "slow:"))
    found = found_in(place)
    assert [d.code.id for d in found] == ["KC120", "KC010"]
    assert found[0].message == "../shared/fleet.kc.yaml has errors"
    assert found[1].source is not None
    assert Path(found[1].source.name).resolve() == file.resolve()
    assert found[1].source.position(found[1].span.start if found[1].span else 0).line == 6


def test_text_without_a_file_cannot_import() -> None:
    sink = Sink()
    assert analyse(SourceFile("x", CONTRACT), sink).program is None
    assert [d.code.id for d in sink] == ["KC120"]


# --- libraries of libraries ----------------------------------------------------------------------


def chain(folder: Path, length: int) -> str:
    """Write libraries that import each other in sequence; return the digest of the last one."""
    (folder / "l0.kc.yaml").write_text(
        "kcdsl: 1\nlibrary: l0\nversion: 1\nslices: {s: {data: deep/d.jsonl}}\n"
    )
    stated = library_digest(library_of(folder / "l0.kc.yaml"))
    for i in range(1, length):
        file = folder / f"l{i}.kc.yaml"
        file.write_text(
            f"kcdsl: 1\nlibrary: l{i}\nversion: 1\nimports:\n"
            f'  - {{file: l{i - 1}.kc.yaml, digest: "{stated}", slices: [s]}}\n'
        )
        sink = Sink()
        library = analyse(read_source(file), sink, folder).library
        stated = "sha256:" + "0" * 64 if library is None else library_digest(library)
    return stated


def test_libraries_re_export_their_imports(place: Path) -> None:
    stated = chain(place / "shared", 3)
    text = CONTRACT.split("imports:")[0].replace(
        "kernels: {", "kernels: {infer: {run: torch.sdpa}, "
    )
    text += f'imports: [{{file: ../shared/l2.kc.yaml, digest: "{stated}", slices: {{all: s}}}}]\n'
    text += "clauses: {A: {require: mean(kl) <= 0.1, level: L1}}\n"
    program = _compiled(place, text)
    assert program.slice("all").data == "../shared/deep/d.jsonl"


def _compiled(place: Path, text: str) -> Program:
    path = place / "own" / "other.kc.yaml"
    path.write_text(text)
    return load_program(path)


@pytest.mark.full
def test_long_import_chains_are_refused(place: Path) -> None:
    chain(place / "shared", DEPTH_LIMIT + 2)
    sink = compile_contract(place / "shared" / f"l{DEPTH_LIMIT + 1}.kc.yaml")[1]
    assert any("one too many" in d.message for d in sink)


def test_import_cycles_are_refused(place: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (place / "shared" / f"{one}.kc.yaml").write_text(
            f"kcdsl: 1\nlibrary: {one}\nversion: 1\nimports:\n"
            f'  - {{file: {other}.kc.yaml, digest: "sha256:{"0" * 64}", slices: [s]}}\n'
        )
    program, sink = compile_contract(place / "shared" / "a.kc.yaml")
    assert program is None
    assert sorted(d.code.id for d in sink) == ["KC120", "KC123"]
    (place / "shared" / "link.kc.yaml").symlink_to("a.kc.yaml")
    file = place / "shared" / "b.kc.yaml"
    file.write_text(file.read_text().replace("a.kc.yaml", "link.kc.yaml"))
    _, sink = compile_contract(place / "shared" / "a.kc.yaml")
    assert "KC123" in [d.code.id for d in sink]


# --- unused imports ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.replace("[tail, safety]", "[tail, packaged, safety]"), "packaged"),
        (lambda t: t.replace("[tail, safety]", "[packaged, tail, safety]"), "packaged"),
        (lambda t: t.replace("[tail, safety]", "[tail, safety, packaged]"), "packaged"),
        (lambda t: t.replace("[tail, safety]", "{tail: tail, p: packaged, safety: safety}"), "p"),
        (
            lambda t: t.replace(
                "slices: [tail, safety]",
                "slices:\n      - tail\n      - packaged\n      - safety",
            ),
            "packaged",
        ),
        (lambda t: t.replace("table(tau)", "0.1"), "tau"),
        (
            lambda t: t.replace("clauses:", "  - file: ../shared/fleet.kc.yaml\n"
            '    digest: "D"\n    slices: [packaged]\nclauses:'),
            "../shared/fleet.kc.yaml",
        ),
        (
            lambda t: t.replace("clauses:", '  - {file: ../shared/fleet.kc.yaml, digest: "D"}\n'
            "clauses:"),
            "../shared/fleet.kc.yaml",
        ),
    ],
)  # fmt: skip
def test_unused_imports_are_removed_by_a_safe_fix(
    place: Path, change: Callable[[str], str], expected: str
) -> None:
    stated = library_digest(library_of(place / "shared" / "fleet.kc.yaml"))
    (found,) = found_in(place, lambda t: change(t).replace('"D"', f'"{stated}"'))
    assert (found.code.id, str(found.severity), at(found)) == ("KC124", "warning", expected)
    before = digest(load_program(place / "own" / "contract.yaml"))
    assert found.fix is not None
    assert found.fix.safe
    mended(place, found)
    assert found_in(place) == []
    assert digest(load_program(place / "own" / "contract.yaml")) == before


def test_removing_the_last_import_removes_the_section(place: Path) -> None:
    text = INLINE.replace(
        "slices:\n",
        'imports:\n  - {file: ../shared/fleet.kc.yaml, digest: "D", slices: [packaged]}\nslices:\n',
        1,
    )
    stated = library_digest(library_of(place / "shared" / "fleet.kc.yaml"))
    (found,) = found_in(place, lambda _: text.replace('"D"', f'"{stated}"'))
    assert mended(place, found) == INLINE


def test_unused_names_of_one_import_are_one_finding(place: Path) -> None:
    (found,) = found_in(
        place,
        lambda t: t.replace("[tail, safety]", "[tail, packaged, safety]").replace(
            'B: {require: "forall x in points(safety): no_flip(model, x)", level: L3}',
            "B: {require: mean(tv) <= 1%, slices: [tail], level: L2}",
        ),
    )
    assert found.message == "no clause uses `packaged` and `safety`, which are imported"
    assert "slices: [tail]" in mended(place, found)


def test_clauses_in_error_do_not_make_imports_unused(place: Path) -> None:
    found = found_in(place, lambda t: t.replace("p99(kl) <=", "p99(klx) <="))
    assert [d.code.id for d in found] == ["KC203"]


def test_name_missing_in_the_library_is_not_reported_as_unused(place: Path) -> None:
    found = found_in(place, lambda t: t.replace("[tail, safety]", "[tail, safety, saftey]"))
    assert [(d.code.id, at(d)) for d in found] == [("KC230", "saftey")]


# --- commands ------------------------------------------------------------------------------------


def test_commands_explain_that_a_file_is_a_library(place: Path, cli: Any) -> None:
    file = place / "shared" / "fleet.kc.yaml"
    ran = cli("compile", file)
    assert ran.code == 0
    assert ran.stdout.splitlines() == [
        "library fleet 2.1.0",
        f"digest  {library_digest(library_of(file))}",
        "slices  packaged, safety, tail",
        "kernels fast",
        "tables  tau",
    ]
    assert cli("lint", file).code == 0
    for arguments in (("evaluate",), ("verify",), ("compile", "--emit", "ir"), ("explain", "A")):
        ran = cli(*arguments, file)
        assert ran.code == 2
        assert "KC125" in ran.stderr


def test_library_in_a_folder_is_not_taken_as_a_contract(place: Path, cli: Any) -> None:
    (place / "shared" / "contract.yaml").write_text(INLINE)
    ran = cli("compile", cwd=place / "shared")
    assert ran.code == 0
    assert ran.stdout.startswith("contract c 1\n")
