"""Every vector of certs/vectors fails at the step and with the reason in the index."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kcdsl_certs.__main__ import INVALID, VALID, main
from kcdsl_certs.statement.triple import INFER_CHECKPOINT
from tests.support.vectors.make import main as make

_HERE = Path(__file__).resolve().parents[3] / "certs" / "vectors"
_VECTORS = json.loads((_HERE / "index.json").read_text())["vectors"]


def _arguments(vector: dict[str, object]) -> list[str]:
    options = vector["options"]
    assert isinstance(options, dict)
    words = ["check", str(_HERE / str(vector["file"])), "--format", "json"]
    words += ["--expect", str(_HERE / "expectation.json")]
    words += ["--checkpoint", str(_HERE / "model.safetensors"), "--at", options["at"]]
    words += ["--threshold", str(options["threshold"])]
    words += ["--data", str(_HERE)]
    for key in options["keys"]:
        words += ["--key", str(_HERE / key)]
    for name in options.get("revocations", ()):
        words += ["--revocations", str(_HERE / name)]
    for name in ("stage", "minimum_sequence"):
        if name in options:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    return [*words, "--complete"] if options.get("complete") else words


@pytest.mark.parametrize("vector", _VECTORS, ids=[v["file"] for v in _VECTORS])
def test_vector_has_the_expected_result(
    vector: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(_arguments(vector))
    report = json.loads(capsys.readouterr().out)
    failed = [(c["name"], c["reason"]) for c in report["checks"] if c["outcome"] == "failed"]
    assert report["verdict"] == vector["expect"]
    if vector["expect"] == "valid":
        assert code == VALID
        assert failed == []
    else:
        assert code == INVALID
        assert failed[0] == (vector["step"], vector["reason"])


def test_there_are_valid_and_invalid_vectors_for_every_step() -> None:
    steps = {v["step"] for v in _VECTORS}
    assert {v["expect"] for v in _VECTORS} == {"valid", "invalid"}
    assert steps >= {
        "bundle", "encoding", "signatures", "threshold", "payload-type", "payload",
        "statement-type", "subject", "components", "validity", "sequence", "clauses", "stage",
    }  # fmt: skip


def test_vectors_are_reproduced_byte_for_byte(tmp_path: Path) -> None:
    make([str(tmp_path)])
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in _HERE.iterdir() if path.is_file()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []


def test_golden_payload_follows_the_published_schema(repository: Path) -> None:
    import base64

    schema = json.loads(
        (repository / "certs" / "kcdsl_certs" / "certificate.schema.json").read_text()
    )
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for name in ("valid.cert.json", "valid-partial.cert.json", "failed.cert.json"):
        bundle = json.loads((_HERE / name).read_text())
        payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        assert list(validator.iter_errors(payload)) == []
        payload["predicate"]["clauses"][0]["tau"] = 0.05
        assert list(validator.iter_errors(payload)) != []


# --- options and documents of the command ---------------------------------------------------------

_VALID = next(v for v in _VECTORS if v["expect"] == "valid")


def test_contradicting_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--recheck", "--complete"):
        assert main([*_arguments(_VALID), "--signature-only", option]) != VALID
        assert "options/contradict" in capsys.readouterr().err


def test_recheck_without_numpy_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcdsl_certs.__main__.find_spec", lambda name: None)
    assert main([*_arguments(_VALID), "--recheck"]) != VALID
    assert "recheck/no-numpy" in capsys.readouterr().err


def test_weights_of_the_inference_kernel_are_demanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((_HERE / "expectation.json").read_text())
    document["triple"]["checkpoint"]["companions"] = {INFER_CHECKPOINT: {"sha256": "0" * 64}}
    (tmp_path / "expectation.json").write_text(json.dumps(document))
    words = _arguments(_VALID)
    words[words.index("--expect") + 1] = str(tmp_path / "expectation.json")
    assert main(words) != VALID
    assert "options/infer-checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "kcdsl.expectation/0"}'])
def test_malformed_expectations_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "expectation.json").write_text(text)
    words = _arguments(_VALID)
    words[words.index("--expect") + 1] = str(tmp_path / "expectation.json")
    assert main(words) != VALID
    assert "expectation/malformed" in capsys.readouterr().err
