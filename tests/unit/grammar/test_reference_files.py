"""The files of the language reference: a library, and a contract that imports it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from kcdsl.check.compile import analyse
from kcdsl.diagnostics import Sink
from kcdsl.source.files import read_source
from kcdsl_grammar import text

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = (ROOT / "grammar" / "README.md").read_text("utf-8")
_BLOCK = re.compile(r"^```(?:yaml|toml) file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = dict(_BLOCK.findall(REFERENCE))
FILES = {name: BLOCKS[name] for name in ("shared/fleet.kc.yaml", "contract/contract.yaml")}
LIBRARIES = sorted((ROOT / "grammar" / "corpus" / "libraries").glob("*.kc.yaml"))
SHARED = ROOT / "examples" / "tiny_lm" / "shared" / "fleet.kc.yaml"
RIGHT = [path for path in (*LIBRARIES, SHARED) if path.name[:6] not in {"broken", "cycle."}]


def test_files_compile_together(tmp_path: Path) -> None:
    for name, content in {**FILES, "kcdsl.toml": BLOCKS["kcdsl.toml"]}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    for name in FILES:
        sink = Sink()
        analysis = analyse(read_source(tmp_path / name), sink, (tmp_path / name).parent)
        found = [d.message for d in sink if d.severity != "note"]
        assert found == []
        assert analysis.program is not None or analysis.library is not None


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_files_follow_the_schema(content: str) -> None:
    validator = jsonschema.Draft7Validator(json.loads(text("contract.schema.json")))
    validator.validate(yaml.safe_load(content))


@pytest.mark.parametrize("path", RIGHT, ids=lambda p: p.name)
def test_libraries_compile_and_follow_the_schema(path: Path) -> None:
    sink = Sink()
    assert analyse(read_source(path), sink, path.parent).library is not None, list(sink)
    validator = jsonschema.Draft7Validator(json.loads(text("contract.schema.json")))
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
