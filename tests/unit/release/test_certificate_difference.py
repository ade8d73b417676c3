"""`kcdsl diff` of two certificates: changes, and whether the new one states less."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.signatures import Algorithm, SigningKey, bundle_bytes, generate, sign

VECTORS = Path("certs/vectors").resolve()
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def key() -> SigningKey:
    """Return a key."""
    return generate(Algorithm.ED25519)


@pytest.fixture
def ask(cli: Any, tmp_path: Path, key: SigningKey, follows: Any) -> Callable[[Change], Any]:
    """Return a function that compares a certificate with a changed one: exit code and document."""
    bundle = json.loads((VECTORS / "valid.cert.json").read_bytes())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))

    def write(name: str, content: dict[str, Any]) -> Path:
        payload = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        path = tmp_path / name
        path.write_bytes(bundle_bytes(sign(payload, [key]), key.public.hint))
        return path

    def run(change: Change) -> Any:
        later = copy.deepcopy(statement)
        change(later["predicate"])
        old, new = write("old.cert.json", statement), write("new.cert.json", later)
        ran = cli("diff", old, new, "--format", "json")
        document = json.loads(ran.stdout)
        follows(document, "kcdsl.certificate-diff/1")
        shown = cli("diff", old, new)
        assert shown.code == ran.code
        assert document["relation"] in shown.stdout
        return ran.code, document

    return run


def result(predicate: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the first result of a clause."""
    found: dict[str, Any] = next(c for c in predicate["clauses"] if c["id"] == name)
    return found


def number(value: float) -> dict[str, str]:
    return {"hex": value.hex(), "decimal": repr(value)}


def test_certificate_is_equal_to_itself(ask: Any) -> None:
    code, document = ask(lambda predicate: None)
    assert (code, document["relation"]) == (0, "equal")
    assert document["triple"] == document["changes"] == []
    assert {r["status"] for r in document["results"]} == {"both"}


@pytest.mark.parametrize(
    ("clause", "change", "relation", "name"),
    [
        ("N-ATTN-0", {"tau": "0.1"}, "weaker", "limit"),
        ("N-ATTN-0", {"tau": "0.04"}, "stricter", "limit"),
        ("O-TRACE", {"tau": "0.5"}, "weaker", "limit"),
        ("N-ATTN-0", {"bound": number(0.046875)}, "weaker", "bound"),
        ("N-ATTN-0", {"bound": number(0.015625)}, "stricter", "bound"),
        ("N-ATTN-0", {"verdict": "INCONCLUSIVE"}, "weaker", "verdict"),
        ("N-ATTN-0", {"evidence": "proof-real"}, "weaker", "evidence"),
        ("N-KL", {"evidence": "sample"}, "weaker", "evidence"),
        ("R-LAT", {"budget": "0.1"}, "weaker", "budget"),
        ("R-LAT", {"budget": "0.01"}, "stricter", "budget"),
        ("R-LAT", {"alpha": "0.1"}, "weaker", "confidence"),
        ("R-LAT", {"alpha": "0.01"}, "stricter", "confidence"),
        ("N-ATTN-0", {"weights": "0.01"}, "stricter", "weights"),
        ("N-ATTN-0", {"unit": "nat"}, "incomparable", "unit"),
        (
            "N-ATTN-0",
            {"region": {"kind": "ball", "radius": "0.01", "slice": "short"}},
            "stricter",
            "region",
        ),
        (
            "N-ATTN-0",
            {"region": {"kind": "hull", "radius": "0.01", "slice": "short"}},
            "incomparable",
            "region",
        ),
        ("N-KL", {"sliceDigest": {"sha256": "0" * 64}}, "incomparable", "rows of the slice"),
    ],
)
def test_results_are_ordered_by_strength(
    ask: Any, clause: str, change: dict[str, Any], relation: str, name: str
) -> None:
    code, document = ask(lambda predicate: result(predicate, clause).update(change))
    (found,) = [r for r in document["results"] if r["changes"]]
    assert (found["clause"], found["relation"]) == (clause, relation)
    assert name in {c["name"] for c in found["changes"]}
    assert document["relation"] == relation
    assert code == (0 if relation == "stricter" else 1)


@pytest.mark.parametrize(
    ("clause", "change", "name"),
    [
        ("N-KL", {"value": "0.019"}, "value"),
        ("N-KL", {"n": 100}, "n"),
        ("R-LAT", {"exceed": 13}, "exceed"),
        ("N-ATTN-0", {"low": number(0.0078125)}, "attained"),
    ],
)
def test_other_changed_numbers_are_listed(
    ask: Any, clause: str, change: dict[str, Any], name: str
) -> None:
    code, document = ask(lambda predicate: result(predicate, clause).update(change))
    changes = [c for r in document["results"] for c in r["changes"]]
    assert [(c["name"], c["relation"]) for c in changes] == [(name, None)]
    assert (code, document["relation"]) == (0, "equal")


def test_lost_result_is_weaker_and_added_one_stricter(ask: Any) -> None:
    def lose(predicate: dict[str, Any]) -> None:
        predicate["clauses"] = [c for c in predicate["clauses"] if c["id"] != "O-TRACE"]

    def add(predicate: dict[str, Any]) -> None:
        predicate["clauses"].append({**result(predicate, "O-TRACE"), "obligation": "O-MORE/all/0"})

    def swap(predicate: dict[str, Any]) -> None:
        add(predicate)
        lose_one = result(predicate, "N-ATTN-0")
        predicate["clauses"].remove(lose_one)

    assert ask(lose)[0] == 1
    code, document = ask(add)
    assert (code, document["relation"]) == (0, "stricter")
    code, document = ask(swap)
    assert (code, document["relation"]) == (1, "incomparable")


def test_differing_component_of_the_triple_is_named(ask: Any) -> None:
    def change(predicate: dict[str, Any]) -> None:
        kernel = predicate["triple"]["kernels"]["infer"]
        kernel["fingerprint"]["numerics"]["compute"] = "float16"
        kernel["fingerprint"]["hardware"]["processor"]["model"] = "Processor 2"
        kernel["digest"]["sha256"] = canonical_digest(kernel["fingerprint"])
        predicate["triple"]["checkpoint"]["digest"]["sha256"] = "1" * 64

    code, document = ask(change)
    names = {c["name"]: (c["old"], c["new"]) for c in document["triple"]}
    assert names["infer numerics: compute"] == ("bfloat16", "float16")
    assert names["infer kernel: hardware.processor.model"] == ("Processor 1", "Processor 2")
    assert "checkpoint: digest" in names
    assert not any(name.startswith("train") for name in names)
    assert (code, document["relation"]) == (0, "equal")


@pytest.mark.parametrize(
    ("change", "name", "relation", "code"),
    [
        ({"assumptions": ["the sun rises"]}, "assumption", "weaker", 1),
        ({"nonClaims": []}, "non-claim", "stricter", 0),
        ({"stage": "canary"}, "stage", "incomparable", 1),
        ({"validUntil": "2026-12-28T12:00:00Z"}, "valid until", None, 0),
        ({"sequence": 42}, "sequence", None, 0),
        ({"suppressions": [{"code": "KC1", "reason": "so"}]}, "accepted finding", "weaker", 1),
    ],
)
def test_metadata_of_certificates_is_compared(
    ask: Any, change: dict[str, Any], name: str, relation: str | None, code: int
) -> None:
    answered, document = ask(lambda predicate: predicate.update(change))
    found = {c["name"]: c["relation"] for c in document["changes"]}
    assert found[name] == relation
    assert answered == code


def test_refused_certificate_gives_no_sure_statement(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pub").write_bytes((VECTORS / "a.pub").read_bytes())
    (tmp_path / "policy.toml").write_text('trusted-keys = ["a.pub"]\n')
    monkeypatch.setenv("KCDSL_POLICY", str(tmp_path / "policy.toml"))
    valid, forged = VECTORS / "valid.cert.json", VECTORS / "signature-changed.cert.json"
    ran = cli("diff", valid, forged)
    assert ran.code == 1
    assert "NOT ACCEPTED" in ran.stdout
    assert cli("diff", forged, forged).code == 3
    assert cli("diff", valid, valid).code == 0


def test_files_other_than_certificates_are_refused(cli: Any, tmp_path: Path) -> None:
    valid = VECTORS / "valid.cert.json"
    contract = tmp_path / "contract.yaml"
    contract.write_text("kcdsl: 1\n")
    assert cli("diff", valid, contract).code == 2
    broken = tmp_path / "broken.cert.json"
    broken.write_bytes(valid.read_bytes()[:3000])
    ran = cli("diff", valid, broken)
    assert (ran.code, "Traceback" in ran.stderr) == (2, False)
    assert "json/syntax" in ran.stderr
