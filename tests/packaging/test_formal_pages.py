"""The pages of the proof rules: numbered statements, each with its two implementations."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

PAGES = (
    "bound-chain.md",
    "relational-interval.md",
    "affine-forms.md",
    "difference-planes.md",
    "any-length.md",
    "chains.md",
    "weights-region.md",
)
STATEMENT = re.compile(r"^\*\*(Definition|Lemma|Rule|Statement|Assumption) (\d+\.\d+)\b", re.M)
LINK = re.compile(r"\[`(\w+(?:\.\w+)?)`\]\(((?:\.\./)+[^)]+\.py)\)")
PROVER = ("../../backends/kcdsl_backends/", "../../kcdsl/", "../../bench/")
CHECKER = ("../../certs/kcdsl_certs/", "../../bench/qebverif_checker.py")
IMPLEMENTED = {"Definition", "Lemma", "Rule"}


def table(text: str) -> list[tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]]:
    """Return the rows of the table of implementations: rules, names and files on both sides."""
    _, _, section = text.partition("## Implementation\n")
    rows = []
    for line in section.splitlines():
        if not line.startswith("| ") or line.startswith("| rules"):
            continue
        rules, prover, checker = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append((rules.split(", "), LINK.findall(prover), LINK.findall(checker)))
    return rows


@functools.cache
def defined(path: Path) -> set[str]:
    """Return the names that a file defines: functions, classes, methods and constants."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                methods = {f"{name}.{m.name}" for m in body if isinstance(m, ast.FunctionDef)}
                found |= {name, *methods}
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_statements_are_numbered_in_order(repository: Path, page: str) -> None:
    text = (repository / "docs" / "proofs" / page).read_text(encoding="utf-8")
    numbers = [tuple(map(int, number.split("."))) for _, number in STATEMENT.findall(text)]
    assert len(numbers) >= 5
    assert numbers == sorted(set(numbers))
    for section in {section for section, _ in numbers}:
        own = [number for where, number in numbers if where == section]
        assert own == list(range(1, len(own) + 1)), f"section {section}"


@pytest.mark.parametrize("page", PAGES)
def test_every_rule_has_an_implementation_in_both_programs(repository: Path, page: str) -> None:
    path = repository / "docs" / "proofs" / page
    text = path.read_text(encoding="utf-8")
    rows = table(text)
    listed = [rule for rules, _, _ in rows for rule in rules]
    assert sorted(listed) == sorted(
        {n for kind, n in STATEMENT.findall(text) if kind in IMPLEMENTED}
    )
    for rules, prover, checker in rows:
        assert {file for _, file in prover}.isdisjoint(file for _, file in checker), rules
        for side, found in ((PROVER, prover), (CHECKER, checker)):
            assert found, f"{rules}: none in {side}"
            for name, file in found:
                assert file.startswith(side), file
                assert name in defined(path.parent / file), f"{name} is not in {file}"


@pytest.mark.parametrize("page", PAGES)
def test_formula_delimiters_are_balanced(repository: Path, page: str) -> None:
    text = (repository / "docs" / "proofs" / page).read_text(encoding="utf-8")
    plain = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    assert plain.count("$$") % 2 == 0
    inline = re.sub(r"\$\$.*?\$\$", "", plain, flags=re.S)
    for paragraph in inline.split("\n\n"):
        assert paragraph.count("$") % 2 == 0, paragraph[:100]
        for formula in re.findall(r"\$([^$]*)\$", paragraph):
            assert formula == formula.strip() != "", formula
            assert formula.count("{") == formula.count("}"), formula
