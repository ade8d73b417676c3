"""examples/pipeline: the script prints what its README shows; manifests are valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kcdsl.cli.application import parser_of
from kcdsl.cli.commands import load
from kcdsl.release.promotion.gate_server import _PATHS, question
from tests.support.pages import agrees, blocks

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pipeline"
SCHEMAS = Path(__file__).resolve().parent / "manifests.schema.json"
MANIFESTS = ("gate.yaml", "argo-web.yaml", "argo-job.yaml", "flagger.yaml", "kserve.yaml")


@pytest.mark.full
def test_script_output_equals_the_readme(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "run.py", tmp_path / "out"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    shown = "\n".join(block.text for block in blocks(text) if block.language == "console")
    printed = "\n".join(line for line in done.stdout.splitlines() if line.strip())
    wanted = "\n".join(line for line in shown.splitlines() if line.strip())
    for one, other in zip(wanted.splitlines(), printed.splitlines(), strict=False):
        assert agrees(one, other), f"the page shows\n{one}\nand the script prints\n{other}"
    assert agrees(wanted, printed)
    assert len(wanted.splitlines()) == len(printed.splitlines()) > 100


# --- manifests ------------------------------------------------------------------------------------


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    text = (FOLDER / "deploy" / name).read_text(encoding="utf-8")
    return [found for found in yaml.safe_load_all(text) if found is not None]


def validate(document: dict[str, Any]) -> None:
    """Validate a manifest against the relevant part of its tool's schema."""
    known = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    schema = known["$defs"][f"{document['apiVersion']} {document['kind']}"]
    jsonschema.Draft202012Validator({**schema, "$defs": known["$defs"]}).validate(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schemas_of_their_tools(name: str) -> None:
    found = documents(name)
    assert found
    for document in found:
        validate(document)


@pytest.mark.parametrize(
    ("name", "way", "value"),
    [
        ("argo-web.yaml", ("spec", "metrics", 0, "provider", "web", "uri"), "http://gate"),
        ("argo-web.yaml", ("spec", "metrics", 0, "sucessCondition"), "true"),
        ("argo-job.yaml", ("spec", "metrics", 0, "provider", "job", "spec", "retries"), 1),
        ("flagger.yaml", ("spec", "analysis", "webhooks", 0, "type"), "confirm"),
        ("flagger.yaml", ("spec", "analysis", "interval"), "soon"),
        ("flagger.yaml", ("spec", "targetRef", "kind"), "Pod"),
        ("kserve.yaml", ("spec", "predictor", "canaryPercent"), 5),
        ("kserve.yaml", ("spec", "predictor", "initContainers", 0, "arguments"), []),
    ],
)
def test_unknown_manifest_field_is_reported(name: str, way: tuple[Any, ...], value: Any) -> None:
    document = documents(name)[0]
    inner: Any = document
    for part in way[:-1]:
        inner = inner[part]
    inner[way[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def commands() -> list[list[str]]:
    """Return the command lines of every manifest and of the workflow."""
    found = []
    for name in MANIFESTS:
        for document in documents(name):
            found += [words for words in _arguments(document) if words[0] == "gate"]
    workflow = yaml.safe_load((FOLDER / "deploy" / "promote.yml").read_text(encoding="utf-8"))
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                plain = re.split(r" \|\|? ", line.strip())[0]
                if plain.startswith("kcdsl "):
                    found.append(shlex.split(plain)[1:])
    return found


def _arguments(part: Any) -> list[list[str]]:
    if isinstance(part, dict):
        own = [part["args"]] if isinstance(part.get("args"), list) else []
        inner = [words for value in part.values() for words in _arguments(value)]
        return [*(w for w in own if all(isinstance(x, str) for x in w)), *inner]
    if isinstance(part, list):
        return [words for value in part for words in _arguments(value)]
    return []


def test_manifest_commands_accept_their_options() -> None:
    found = commands()
    assert len(found) == 7
    for words in found:
        plain = [re.sub(r"\{\{args\.stage\}\}", "canary", word) for word in words]
        plain = [re.sub(r"(sha256:TRIPLE|\{\{args\.triple\}\})", "0" * 64, w) for w in plain]
        parsed = parser_of(plain[0], load(plain[0])).parse_args(plain)
        assert parsed.command == plain[0]


def test_manifest_commands_name_every_required_argument() -> None:
    (flagger,) = documents("flagger.yaml")
    hooks = flagger["spec"]["analysis"]["webhooks"]
    for hook in hooks:
        path = "/" + hook["url"].rpartition("/")[2]
        assert "POST" in _PATHS[path]
        given = {**hook["metadata"], "triple": "0" * 64}
        assert question(given, {})[1] == given["stage"]
    assert [hook["type"] for hook in hooks][-1] == "rollback"
    (argo,) = documents("argo-web.yaml")
    (metric,) = argo["spec"]["metrics"]
    url = metric["provider"]["web"]["url"]
    assert "GET" in _PATHS["/" + url.partition("?")[0].rpartition("/")[2]]
    assert re.findall(r"(\w+)=", url.partition("?")[2]) == ["slot", "stage", "triple"]
    assert metric["provider"]["web"]["jsonPath"] == "{$.outcome}"


def test_manifests_contain_no_secret() -> None:
    for name in (*MANIFESTS, "promote.yml"):
        text = (FOLDER / "deploy" / name).read_text(encoding="utf-8")
        assert "BEGIN" not in text
        assert not re.search(r"://[^/@\s]+:[^/@\s]+@", text)
