"""yaml-language-server with our JSON schema alone: validation, completion, hover."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rpc import Client

pytestmark = pytest.mark.programs

GOOD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
  N-KL:
    require: p99(kl) <= 0.02
    level: L2
    family: numerical
"""


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Client]:
    program = repository / "tests" / "editors" / "node_modules" / ".bin" / "yaml-language-server"
    assert program.exists(), "`make tools` installs it"
    schema = repository / "grammar" / "kcdsl_grammar" / "contract.schema.json"
    settings = {
        "yaml": {
            "schemas": {schema.as_uri(): ["*.kc.yaml"]},
            "schemaStore": {"enable": False},
            "validate": True,
            "hover": True,
            "completion": True,
        }
    }
    client = Client([str(program), "--stdio"], settings=settings)
    capabilities = {"textDocument": {}, "workspace": {"configuration": True}}
    client.request("initialize", {"processId": None, "rootUri": None, "capabilities": capabilities})
    client.notify("initialized", {})
    client.notify("workspace/didChangeConfiguration", {"settings": settings})
    _wait_for_the_schema(client)
    yield client
    client.close()


def _wait_for_the_schema(client: Client) -> None:
    """Open an invalid document and wait for findings: the settings apply after a delay."""
    for attempt in range(50):
        if opened(client, f"first-{attempt}", "kcdsl: 2\n")[1]:
            return
        time.sleep(0.1)
    raise AssertionError("the server did not take the schema")


def opened(server: Client, name: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Open a document; return its address and its first findings."""
    uri = f"file:///contracts/{name}.kc.yaml"
    document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
    server.notify("textDocument/didOpen", {"textDocument": document})
    while True:
        told = server.told("textDocument/publishDiagnostics")
        if told["uri"] == uri:
            return uri, told["diagnostics"]


def test_valid_contract_has_no_findings(server: Client) -> None:
    assert opened(server, "good", GOOD)[1] == []


def test_valid_documents_have_no_findings(server: Client, repository: Path) -> None:
    # Bare expressions that other YAML readers misread are supported by our server alone.
    corpus = repository / "grammar" / "corpus" / "accepted"
    example = repository / "examples" / "tiny_lm" / "contract.yaml"
    for path in (corpus / "record-form.kc.yaml", corpus / "module.kc.yaml", example):
        text = path.read_text(encoding="utf-8")
        assert opened(server, f"accepted-{path.stem}", text)[1] == [], path


def test_invalid_value_is_marked_at_its_range(server: Client) -> None:
    text = GOOD.replace("family: numerical", "family: numerica")
    found = opened(server, "wrong-value", text)[1]
    assert len(found) == 1
    assert found[0]["range"] == {
        "start": {"line": 11, "character": 12},
        "end": {"line": 11, "character": 20},
    }
    assert "numerical" in found[0]["message"]


def test_unknown_field_is_reported(server: Client) -> None:
    found = opened(server, "unknown-field", GOOD.replace("    level: L2", "    levl: L2"))[1]
    assert any("levl" in d["message"] for d in found)


def test_fields_are_completed(server: Client) -> None:
    uri, _ = opened(server, "completion", GOOD + "    \n")
    result = server.request(
        "textDocument/completion",
        {"textDocument": {"uri": uri}, "position": {"line": 12, "character": 4}},
    )
    labels = {item["label"] for item in result["items"]}
    assert {"budget", "then", "evidence", "slices", "holdout"} <= labels


def test_levels_are_completed(server: Client) -> None:
    uri, _ = opened(server, "levels", GOOD.replace("level: L2", "level: "))
    result = server.request(
        "textDocument/completion",
        {"textDocument": {"uri": uri}, "position": {"line": 10, "character": 11}},
    )
    assert {"L1", "L2", "L3"} <= {item["label"] for item in result["items"]}


def test_hover_describes_a_field(server: Client) -> None:
    uri, _ = opened(server, "hover", GOOD)
    result = server.request(
        "textDocument/hover",
        {"textDocument": {"uri": uri}, "position": {"line": 10, "character": 6}},
    )
    contents = result["contents"]
    text = contents["value"] if isinstance(contents, dict) else str(contents)
    assert "safety or correctness" in text
