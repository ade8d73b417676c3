"""The texts of codes: each has one, in its page or in its declaration, never in both."""

from __future__ import annotations

from pathlib import Path

from kcdsl.diagnostics.codes import all_codes
from kcdsl.diagnostics.pages import names

INDEX = "docs/codes.md"
FAMILIES = {
    "KC0": "YAML and lexing",
    "KC1": "structure",
    "KC2": "names and types",
    "KC3": "shapes, formats, units",
    "KC4": "fragments, routing, vacuity, model and kernel support",
    "KC5": "statistics",
    "KC6": "evidence, files and certificates",
    "KC7": "layout",
    "KC9": "the tool itself",
}


def test_each_code_has_one_text() -> None:
    paged = set(names())
    for code in all_codes():
        assert code.explanation, code
        assert (code.text == "") == (code.id in paged), f"{code}: one text, in its page"


def index() -> str:
    """Return the index of codes, as it should be."""
    lines = [
        "# Diagnostic codes",
        "",
        "A code keeps its meaning; a number is never used again. `kcdsl explain KC203` "
        "prints the page of a code.",
    ]
    paged = set(names())
    for family, words in FAMILIES.items():
        lines += [
            "",
            f"## {family}: {words}",
            "",
            "| code | title | what it means |",
            "|---|---|---|",
        ]
        for code in all_codes():
            if code.id.startswith(family):
                link = f"[{code.id}](../kcdsl/diagnostics/pages/{code.id}.md)"
                shown = link if code.id in paged else code.id
                text = code.explanation.split(". ")[0].rstrip(".").replace("|", "\\|")
                lines.append(f"| {shown} | {code.title} | {text} |")
    return "\n".join(lines) + "\n"


def test_the_index_is_that_of_the_codes(repository: Path) -> None:
    assert (repository / INDEX).read_text(encoding="utf-8") == index(), "run `make pages`"


def test_every_code_is_in_a_family() -> None:
    assert all(code.id[:3] in FAMILIES for code in all_codes())
