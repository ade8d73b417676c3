"""Code blocks of the documentation that no command prints are valid input for their target."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.route.catalogue import BackendSpec
from kcdsl_certs.signatures import generate, read_policy
from tests.support import pages
from tests.support.files import files_below
from tests.support.pages import Block

REPOSITORY = Path(__file__).resolve().parents[2]
DOCTESTS = {"docs/reference/ir.md"}
"""Pages with doctests, which tests/packaging/test_ir_page.py runs."""


def blocks(*languages: str) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of some languages with their pages."""
    for path in files_below(REPOSITORY):
        name = path.relative_to(REPOSITORY).as_posix()
        if path.suffix == ".md" and not name.startswith("kcdsl/diagnostics/pages/"):
            for block in pages.blocks(path.read_text(encoding="utf-8")):
                if block.language in languages:
                    yield name, block


def the_block(page: str, language: str) -> str:
    (found,) = (block.text for name, block in blocks(language) if name == page)
    return found


@pytest.mark.parametrize(
    ("name", "block"), [pytest.param(*item, id=item[0]) for item in blocks("yaml", "toml", "json")]
)
def test_data_blocks_parse(name: str, block: Block) -> None:
    match block.language:
        case "yaml":
            yaml.compose(block.text)
        case "toml":
            assert tomllib.loads(block.text)
        case _:
            assert json.loads(block.text)


@pytest.mark.parametrize(
    ("name", "block"),
    [pytest.param(*item, id=item[0]) for item in blocks("python") if item[0] not in DOCTESTS],
)
def test_program_blocks_compile(name: str, block: Block) -> None:
    assert compile(block.text, name, "exec")


@pytest.mark.parametrize(("which", "keys"), [(0, 7), (1, 3), (2, 2), (3, 3), (4, 4), (5, 2)])
def test_numerics_on_the_page_equal_those_of_a_kernel(which: int, keys: int) -> None:
    found = [block.text for name, block in blocks("yaml") if name == "docs/reference/numerics.md"]
    assert len(found) == 6
    indented = "".join(f"    {line}\n" for line in found[which].splitlines())
    contract = (
        "kcdsl: 1\ncontract: c\nversion: 1.0.0\n"
        "model: {checkpoint: m.safetensors, architecture: llama}\n"
        f"kernels:\n  train: {{run: torch.eager}}\n  infer:\n    run: torch.sdpa\n{indented}"
        "data: d.jsonl\nslices: {all: {}}\nclauses: {A: {require: max(kl) <= 1, level: L1}}\n"
    )
    sink = Sink()
    analysis = analyse(SourceFile("contract.yaml", contract), sink)
    assert [d.message for d in sink] == []
    assert analysis.program is not None
    assert len(analysis.program.infer.numerics) == keys


def test_catalogue_on_the_page_of_backends_is_valid() -> None:
    scope: dict[str, object] = {}
    exec(compile(the_block("backends/README.md", "python"), "page", "exec"), scope)
    catalogue = scope["CATALOGUE"]
    assert isinstance(catalogue, tuple)
    assert all(isinstance(spec, BackendSpec) for spec in catalogue)
    groups = tomllib.loads(the_block("backends/README.md", "toml"))["project"]["entry-points"]
    assert list(groups) == ["kcdsl.backends"]


def test_trust_policy_on_the_page_of_certificates_is_valid(tmp_path: Path) -> None:
    keys = {name: generate() for name in ("release.pub", "canary.pub")}
    for name, key in keys.items():
        (tmp_path / name).write_bytes(key.public.pem)
    (tmp_path / "policy.toml").write_text(the_block("certs/README.md", "toml"), encoding="utf-8")
    policy = read_policy(tmp_path / "policy.toml")
    assert [key.name for key in policy.keys] == list(keys)
    assert policy.keys[1].stages == frozenset({"shadow", "canary"})
    assert policy.threshold == 1
    assert policy.max_validity == timedelta(days=180)
    assert len(policy.revoked_certificates) == 1
