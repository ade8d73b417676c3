"""`kcdsl verify --chain`: certificates with chain proofs, and their display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kcdsl.api import verification as verify
from kcdsl.api.backends import formal_backends
from kcdsl.diagnostics import Refusal
from tests.support.small_models import write_contract, write_model

MODEL = "forall x in points(all): norm_inf(drift(model, x)) <= 0.1"
BALL = "forall x in ball(all, 0.001): norm_2(drift(layer_1, x)) <= 9"
HALVES = "forall x in points(all): norm_inf(drift(layer_1, x)) <= 0.1"
FLIP = "forall x in points(all): no_flip(model, x, 1)"
QUICK = ("--attack", "off", "--cache", "off")
WHOLE = "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model of two layers and one prompt."""
    write_model(tmp_path, layers=2, prompts=("ab",))
    return tmp_path


@pytest.mark.parametrize("clauses", [(BALL,), pytest.param((MODEL, FLIP), marks=pytest.mark.full)])
def test_chain_is_certified_and_checked(
    cli: Any, follows: Any, folder: Path, clauses: tuple[str, ...]
) -> None:
    write_contract(folder, *clauses)
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    ran = cli("verify", "--chain", "--format", "json", *QUICK, "--sign", "kcdsl.key", cwd=folder)
    assert ran.code == 0, ran.stderr
    document = json.loads(ran.stdout)
    follows(document)
    for goal in document["goals"]:
        assert goal["evidence"]["confirmed"]
        (case,) = goal["cases"]
        assert [link["cached"] for link in case["links"]] == [False] * len(case["links"])
        assert case["links"][-1]["bound"] == case["bound"]
        proof = json.loads((folder / "out" / f"{goal['clause']}.proof.json").read_bytes())
        follows(proof, "kcdsl.chain-proof/3")
    checked = cli(
        *(
            "check",
            document["certificate"],
            "--recheck",
            "--key",
            "kcdsl.key.pub",
            "--format=json",
        ),
        cwd=folder,
    )
    assert checked.code == 0, checked.stdout


@pytest.mark.full
def test_chain_about_another_subject_is_rejected(cli: Any, folder: Path) -> None:
    """The clause is bound to a chain as to any proof: by block, region, functional and cases."""
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.verification.proofs import bind

    write_contract(folder, MODEL)
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    assert cli("verify", "--chain", *QUICK, "--sign", "kcdsl.key", cwd=folder).code == 0
    proof = json.loads((folder / "out" / "N-0.proof.json").read_bytes())
    clause, triple = stated(folder)
    bind(proof, clause, triple)
    (case,) = proof["cases"]
    others: dict[str, Any] = {
        "block-mismatch": {"block": "layer_0"},
        "region-mismatch": {"cases": [{**case, "region": {**case["region"], "kind": "hull"}}]},
        "functional-mismatch": {"functional": {"kind": "2", "k": 1}},
        "numerics-mismatch": {"numerics": {"train": {}, "infer": {}}},
        "checkpoint-mismatch": {"checkpoint": {"sha256": "0" * 64}},
    }
    for reason, other in others.items():
        with pytest.raises(Rejected, match=f"proof/{reason}"):
            bind({**proof, **other}, clause, triple)
    with pytest.raises(Rejected, match="2 regions are proved, 1 are stated"):
        bind({**proof, "cases": [case, {**case, "name": "again"}]}, clause, triple)


def stated(folder: Path) -> tuple[Any, Any]:
    """Return the clause and the triple of a certificate."""
    import base64

    from kcdsl_certs.statement import parse_predicate, parse_statement

    bundle = json.loads((folder / "out" / "verify.cert.json").read_bytes())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    predicate, _ = parse_predicate(parse_statement(json.loads(payload)).predicate)
    return predicate.clauses[0], predicate.triple


@pytest.mark.full
def test_slack_of_each_link_is_shown(cli: Any, folder: Path) -> None:
    write_contract(folder, HALVES)
    first = cli("verify", "--chain", "--cache", folder / "cache", cwd=folder)
    second = cli("verify", "--chain", "--cache", folder / "cache", cwd=folder)
    assert (first.code, second.code) == (0, 0)
    for ran, known in ((first, 0), (second, 2)):
        lines = ran.stdout.splitlines()
        (start,) = [i for i, line in enumerate(lines) if line.startswith("N-0, p0: stage")]
        table = lines[start + 1 : start + 3]
        assert [line.split()[0] for line in table] == ["layer_1[0]", "layer_1[1]"]
        assert sum("known" in line for line in table) == known
    assert "growth" in first.stdout
    without = cli("verify", *QUICK, cwd=folder)
    assert ": stage" not in without.stdout


@pytest.mark.full
def test_block_without_links_is_reported(cli: Any, folder: Path) -> None:
    write_contract(folder, WHOLE)
    ran = cli("verify", "--chain", *QUICK, cwd=folder)
    assert ran.code == 3
    assert "does not fall apart into stages" in " ".join(ran.stdout.split())


def test_backend_without_chains_is_refused() -> None:
    others = [spec.name for spec in formal_backends() if spec.name != "interval"]
    assert others
    verify._refuse_unchained("interval")
    for name in others:
        with pytest.raises(Refusal) as refused:
            verify._refuse_unchained(name)
        assert "does not prove blocks stage by stage" in refused.value.diagnostics[0].message
