"""The documentation is consistent: links resolve, tables equal the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from docs.site import man
from docs.site.assemble import pages as pages_of_the_manual
from kcdsl.cli import COMMANDS
from kcdsl.diagnostics.codes import FAMILIES, all_codes
from kcdsl.diagnostics.pages import Page, manual_page, manual_pages
from kcdsl.exits import Exit
from kcdsl.metrics import BUILT_IN

if TYPE_CHECKING:
    from tests.conftest import Cli

LINK = re.compile(r"\[(?:[^\]\n]|\n(?!\n))+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages(project_files: tuple[Path, ...]) -> list[Path]:
    """Return the Markdown files."""
    return [path for path in project_files if path.suffix == ".md"]


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links of a page, except in code blocks."""
    yield from LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings."""
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that do not resolve."""
    bad = []
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name) if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            bad.append(target)
    return bad


def table(text: str, header: str) -> list[list[str]]:
    """Return the rows of the Markdown table whose header line starts with `header`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_relative_links_resolve(repository: Path, pages: list[Path]) -> None:
    assert repository / "README.md" in pages
    assert {str(p.relative_to(repository)): broken(p) for p in pages if broken(p)} == {}


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a\nb](none.md) [b](#one-two) [c](#three) [d](https://x.y)\n")
    assert broken(page) == ["none.md", "#three"]


def test_every_folder_of_tests_is_listed(repository: Path) -> None:
    rows = table((repository / "CONTRIBUTING.md").read_text(encoding="utf-8"), "| folder | what |")
    listed = {re.match(r"`tests/(\w+)", name) for name, _ in rows}
    tests = {path.parent for path in (repository / "tests").rglob("test_*.py")}
    parts = {path.relative_to(repository / "tests").parts for path in tests}
    folders = {part[0] for part in parts if part and "node_modules" not in part} | {"typing"}
    assert {found[1] for found in listed if found is not None} == folders


def test_every_page_is_listed(repository: Path) -> None:
    index = repository / "docs" / "README.md"
    listed = {target.partition("#")[0] for target in links(index)}
    pages = {
        path.relative_to(index.parent).as_posix()
        for path in index.parent.rglob("*.md")
        if not {"adr", "node_modules"} & set(path.parts) and path != index
    }
    assert len(pages) > 10
    assert pages <= listed
    examples = (repository / "examples").glob("*/README.md")
    assert {f"../{path.relative_to(repository).as_posix()}" for path in examples} <= listed


def test_every_page_is_in_the_navigation_of_the_manual(repository: Path) -> None:
    """Decision records and diagnostic codes are reached from their indexes."""
    navigation = (repository / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"- (?:[\w ]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    places = [place for _, place in pages_of_the_manual()]
    indexed = {place for place in places if re.match(r"adr/\d|reference/codes/", place)}
    assert len(places) == len(set(places))
    assert sorted(listed) == sorted(set(places) - indexed)


def test_man_page_equals_the_help_of_the_commands() -> None:
    assert man.PAGE.read_text(encoding="utf-8") == man.page(), "run `make man`"


def test_exit_code_table_is_the_enumeration(repository: Path) -> None:
    text = (repository / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    rows = table(text, "| code | name |")
    assert [(int(code), name.strip("`")) for code, name, _ in rows] == [
        (e.value, e.name) for e in Exit
    ]


def test_exit_code_table_has_every_command(repository: Path) -> None:
    text = (repository / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    rows = table(text, "| command | may answer |")
    assert {command.strip("`").removeprefix("kcdsl ") for command, _ in rows} == set(COMMANDS)
    known = {str(e.value) for e in Exit}
    assert all(set(codes.split()) <= known for _, codes in rows)


def test_page_of_commands_names_every_command(repository: Path) -> None:
    text = (repository / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`kcdsl {name}" in text


def test_messages_refer_to_installed_pages(project_files: tuple[Path, ...]) -> None:
    """A message refers to `kcdsl explain PAGE`, since the wheel has no docs/."""
    known = {*manual_pages(), *BUILT_IN.names()}
    for path in project_files:
        if path.suffix != ".py" or not {"kcdsl", "backends", "certs"} & set(path.parts):
            continue
        text = path.read_text(encoding="utf-8")
        if "tests" in path.parts or not re.search(r"docs/[a-z]|kcdsl explain|[A-Z]\.md", text):
            continue
        tree = ast.parse(text)
        prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in prose and isinstance(node.value, str):
                page = (
                    r"docs/[\w-]+[/.]|(README|SECURITY|CONTRIBUTING)\.md .| .*(README|SECURITY)\.md"
                )
                assert not re.search(page, node.value), f"{path}: {node.value}"
                named = re.findall(r"kcdsl explain ([a-z][\w-]*)", node.value)
                assert set(named) <= known, f"{path}: {node.value}"


def test_explained_pages_refer_to_installed_pages(repository: Path) -> None:
    """A link is printed as `kcdsl explain NAME`; files that only a checkout has, as their path."""
    shipped = re.compile(r"docs/(?!adr/|README|images/)|(grammar|certs|backends)/README|SECURITY")
    printed = {name: manual_page(name) for name in manual_pages()}
    printed |= {code.id: code.page for code in all_codes()}
    assert {"certs", "grammar", "backends", "security", "verify", "KC203"} <= set(printed)
    cited = set()
    for name, page in printed.items():
        assert page is not None
        for text in (page.plain, page.markdown):
            bare = re.sub(r"^ {4}.*$|`[^`\n]+`", "", FENCE.sub("", text), flags=re.MULTILINE)
            assert not re.search(r"\]\((?![a-z]+:)", bare), name
            paths = re.findall(r"\(`([\w/.-]+\.md)`\)", FENCE.sub("", page.markdown))
            assert [path for path in paths if shipped.match(path)] == [], name
            cited |= set(re.findall(r"`kcdsl explain ([\w-]+)`", text))
    known = {*printed, *BUILT_IN.names(), *FAMILIES}
    assert {name for name in cited if not name.isupper()} <= known
    assert {"certs", "grammar", "security"} <= cited


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[policies](../../certs/README.md#trust)", "policies (`kcdsl explain certs`)"),
        ("[certs/README.md](../../certs/README.md)", "`kcdsl explain certs`"),
        ("[verify.md](verify.md#a)", "`kcdsl explain verify`"),
        ("[a\nrule](../proofs/chains.md)", "a\nrule (`kcdsl explain chains`)"),
        ("[`f`](../../kcdsl/exits.py)", "`f` (`kcdsl/exits.py`)"),
        ("[here](#below)", "here"),
        ("[elsewhere](https://example.org/a.md)", "[elsewhere](https://example.org/a.md)"),
        ("`[no](link.md)`", "`[no](link.md)`"),
    ],
)
def test_links_of_explained_pages(text: str, said: str) -> None:
    assert Page(f"# A page\n\n{text}\n", "docs/reference").markdown == f"# A page\n\n{said}\n"


def test_make_targets_named_in_the_docs_exist(repository: Path, pages: list[Path]) -> None:
    targets = set(
        re.findall(
            r"^([a-z][a-z-]*):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    for page in pages:
        named = set(
            re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.M)
        )
        missing = {name for name in named if not name.startswith("bench-")} - targets
        assert not missing, f"{page.name} names {missing}"


def test_readme_contract_compiles_without_a_finding(
    repository: Path, tmp_path: Path, cli: Cli
) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    (contract,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "contract.yaml").write_text(contract, encoding="utf-8")
    for name in ("model.safetensors", "prompts.jsonl"):
        (tmp_path / name).touch()
    found = cli("lint", "contract.yaml", cwd=tmp_path)
    assert found.code == 0
    assert not re.search(r"^(error|warning|note)\b", found.stdout + found.stderr, re.MULTILINE)
    assert cli("fmt", "--check", "contract.yaml", cwd=tmp_path).code == 0
    (tmp_path / "model.safetensors").unlink()
    compiled = cli("compile", cwd=tmp_path)
    assert compiled.code == 0
    assert re.search(r"N-ATTN-0 .* interval", compiled.stdout)
    assert re.search(r"N-KL .* empirical", compiled.stdout)


@pytest.mark.parametrize("number", range(1, 8))
def test_decision_records_have_their_three_sections(repository: Path, number: int) -> None:
    (page,) = (repository / "docs" / "adr").glob(f"{number:04d}-*.md")
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {number:04d} ")
    positions = [text.index(f"## {part}") for part in ("Context", "Decision", "Consequences")]
    assert positions == sorted(positions)
    index = (repository / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    assert f"({page.name})" in index


def test_every_published_schema_is_listed(
    repository: Path, schemas: dict[str, dict[str, Any]]
) -> None:
    page = repository / "docs" / "reference" / "documents.md"
    rows = table(page.read_text(encoding="utf-8"), "| document | schema | file |")
    listed = {}
    for _, name, link in rows:
        (target,) = LINK.findall(link)
        schema = json.loads((page.parent / target).read_text(encoding="utf-8"))
        listed[schema["$id"]] = schema
        assert name.startswith("(") or name == f"`{schema['$id']}`"
    assert listed == schemas


def test_backend_documentation_lists_every_fragment_and_backend(repository: Path) -> None:
    from kcdsl.route.catalogue import Fragment
    from kcdsl_backends import CATALOGUE

    text = (repository / "backends" / "README.md").read_text(encoding="utf-8")
    assert [row[0].strip("`") for row in table(text, "| fragment |")] == [f.value for f in Fragment]
    for spec in CATALOGUE:
        assert f"`kcdsl_backends/{spec.name}/`" in text or f"the backend `{spec.name}`" in text
