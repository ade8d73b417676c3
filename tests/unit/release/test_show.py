"""`kcdsl show`: display of one certificate, from any source."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kcdsl.api.certificates import moment_of
from kcdsl.release.promotion import CandidateState
from kcdsl.release.register import (
    Promotion,
    PromotionReason,
    PromotionState,
    Register,
    Revoked,
)
from kcdsl.verdict.html.certificate import certificate_page
from kcdsl.verdict.studies.certificate_view import CertificateView, certificate_view
from kcdsl_certs.signatures import Algorithm, bundle_bytes, generate, sign, trust
from kcdsl_certs.verification.inspection import inspect
from tests.support.promotions import at
from tests.support.registers import clock, recorded

VECTORS = Path("certs/vectors").resolve()
SCHEMA = jsonschema.Draft202012Validator(
    json.loads(Path("kcdsl/verdict/show.schema.json").read_text())
)
INDEX = json.loads((VECTORS / "index.json").read_text())["vectors"]
AT = "2026-12-01T00:00:00Z"
ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&{{7*7}}\x1b[2J\u202e"


def payload_of(name: str) -> dict[str, Any]:
    """Return the statement of a vector."""
    bundle = json.loads((VECTORS / name).read_bytes())
    found: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return found


def signed(statement: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Return a certificate of a statement, and the public key of its signer."""
    key = generate(Algorithm.ED25519)
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    bundle = bundle_bytes(sign(payload.encode(), [key]), key.public.hint)
    (folder / "own.cert.json").write_bytes(bundle)
    (folder / "own.pub").write_bytes(key.public.pem)
    return folder / "own.cert.json", folder / "own.pub"


def test_trusted_certificate_is_shown_completely(cli: Any) -> None:
    ran = cli("show", VECTORS / "valid.cert.json", "--key", VECTORS / "a.pub", "--at", AT)
    assert ran.code == 0
    text = " ".join(ran.stdout.split())
    for words in (
        "Signature verified: signed by",
        "forall x in",
        "0.0312",
        "0.0123",
        "2.54",
        "proof, 1 case",
        "census, 200 requests",
        "sample, 200",
        "It says nothing about other inputs.",
        "in force, 89 days left",
        "torch.sdpa",
        "bfloat16",
        "not run: subject, components, sequence, contract, clauses, stage, proofs, evidence",
    ):
        assert words in text, words
    assert "NOT" not in ran.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("valid.cert.json",), 3, "SIGNATURE NOT VERIFIED"),
        (("valid.cert.json", "--key", "b.pub"), 4, "NOT ACCEPTED: no trusted key signed"),
        (("signature-changed.cert.json", "--key", "a.pub"), 4, "signature/none-trusted"),
        (("expired.cert.json", "--key", "a.pub"), 4, "validity/expired"),
        (("failed.cert.json", "--key", "a.pub"), 4, "clause/not-passed"),
        (("expired.cert.json",), 4, "SIGNATURE NOT VERIFIED"),
        (("envelope-duplicate-key.cert.json",), 4, "nothing can be read of it"),
        (("valid.cert.json", "--key", "a.pub", "--stage", "full"), 4, "stage/mismatch"),
    ],
)
def test_missing_trust_is_stated_first(
    cli: Any, words: tuple[str, ...], code: int, said: str
) -> None:
    at = () if "expired.cert.json" in words else ("--at", AT)
    given = [VECTORS / w if w.endswith((".json", ".pub")) else w for w in words]
    if "expired.cert.json" in words:
        at = ("--at", "2030-01-01T00:00:00Z")
    ran = cli("show", *given, *at)
    assert ran.code == code
    assert said in " ".join(ran.stdout.split())
    assert "Traceback" not in ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[1].startswith(("SIGNATURE NOT", "NOT ACCEPTED", "Signature ver"))
    refused = code == 4
    assert ("refuses it" in " ".join(ran.stdout.split())) is refused


def test_user_policy_is_used_and_one_without_keys_is_refused(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pub").write_bytes((VECTORS / "a.pub").read_bytes())
    (tmp_path / "policy.toml").write_text('trusted-keys = ["a.pub"]\nmax-validity = "10d"\n')
    monkeypatch.setenv("KCDSL_POLICY", str(tmp_path / "policy.toml"))
    ran = cli("show", VECTORS / "valid.cert.json", "--at", AT)
    assert (ran.code, "validity/too-long" in ran.stdout) == (4, True)
    (tmp_path / "policy.toml").write_text("trusted-keys = []\n")
    assert cli("show", VECTORS / "valid.cert.json").code == 2
    monkeypatch.delenv("KCDSL_POLICY")
    assert cli("show", VECTORS / "valid.cert.json", "--threshold", "2").code == 2
    assert cli("show", tmp_path / "absent.cert.json").code == 2


@pytest.mark.full
def test_every_vector_is_shown_in_every_form(
    cli: Any, tmp_path: Path, schemas: dict[str, Any], follows: Any
) -> None:
    for vector in INDEX:
        bundle = (VECTORS / vector["file"]).read_bytes()
        keys = [VECTORS / name for name in vector["options"]["keys"]]
        trusted = trust(None, keys=keys)
        moment = moment_of(vector["options"]["at"])
        view = certificate_view(vector["file"], inspect(bundle, trusted, moment), trusted, moment)
        follows(json.loads(json.dumps(view.to_json())), "kcdsl.show/1")
        page = certificate_page(view)
        assert ("Signature verified" in page) is (view.signed == "verified")
        assert view.exit == (4 if view.refusals else 0)


def test_transfer_is_shown(cli: Any, tmp_path: Path) -> None:
    statement = payload_of("valid.cert.json")
    own = statement["predicate"]
    body = {
        name: own[name]
        for name in (
            "triple", "stage", "issuedAt", "validUntil", "sequence", "evaluator", "assumptions",
            "nonClaims",
        )
    }  # fmt: skip
    body["base"] = {"digest": {"sha256": "0" * 64}, "path": "base.cert.json"}
    body["carried"] = [{"id": "N-ATTN-0", "slice": "short"}]
    body["left"] = [{"id": "N-KL", "reason": "no-region", "detail": "of one checkpoint alone"}]
    statement["predicateType"] = "urn:kcdsl:attestation:weights-transfer:v0.1"
    statement["predicate"] = body
    file, key = signed(statement, tmp_path)
    ran = cli("show", file, "--key", key, "--at", AT)
    assert ran.code == 0, ran.stdout
    assert "transferred: N-ATTN-0 [short]" in ran.stdout
    assert "not transferred: N-KL: of one checkpoint alone" in ran.stdout
    page = tmp_path / "page.html"
    assert cli("show", file, "--key", key, "--at", AT, "--html", page).code == 0
    assert "N-ATTN-0 on short is transferred" in page.read_text()


def poisoned(value: Any) -> Any:
    """Return a statement with an attack in every text that is not fixed by the format."""
    if isinstance(value, dict):
        return {
            name: {**part, "preset": ATTACK} if name == "numerics" and "compute" in part
            else part + ATTACK if name in FREE and isinstance(part, str)
            else [text + ATTACK for text in part] if name in FREE and isinstance(part, list)
            else poisoned(part)
            for name, part in value.items()
        }  # fmt: skip
    return [poisoned(part) for part in value] if isinstance(value, list) else value


FREE = ("id", "version", "assumptions", "nonClaims", "counted", "reason", "unit", "run", "model")


def test_foreign_texts_are_escaped(cli: Any, tmp_path: Path) -> None:
    from kcdsl_certs.encoding.strict import canonical_digest

    statement = poisoned(payload_of("valid.cert.json"))
    triple = statement["predicate"]["triple"]
    for role in ("train", "infer"):
        kernel = triple["kernels"][role]
        kernel["digest"]["sha256"] = canonical_digest(kernel["fingerprint"])
        kernel["name"] += ATTACK
    file, key = signed(statement, tmp_path)
    ran = cli("show", file, "--key", key, "--at", AT)
    assert "assumptions" in json.dumps(statement)
    assert "nothing can be read" not in ran.stdout
    assert "\x1b" not in ran.stdout
    assert "\u202e" not in ran.stdout
    cli("show", file, "--key", key, "--at", AT, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "alert(1)" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "{{7*7}}" in page
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", page)
    assert "\x1b" not in page


def test_numbers_of_any_size_are_shown(cli: Any, tmp_path: Path) -> None:
    statement = payload_of("valid.cert.json")
    for clause in statement["predicate"]["clauses"]:
        clause["tau"] = "1e999"
        if "value" in clause:
            clause["value"] = "1e-999"
    file, key = signed(statement, tmp_path)
    for more in (
        (),
        ("--format=json",),
        ("--html", tmp_path / "page.html"),
    ):
        ran = cli("show", file, "--key", key, "--at", AT, *more)
        assert ran.code in (0, 4), ran.stderr
        assert "Traceback" not in ran.stderr


def test_show_imports_no_framework(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from kcdsl.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = ('torch', 'numpy', 'scipy', 'pyarrow', 'z3', 'onnx', 'kcdsl_backends')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    words = ["show", str(VECTORS / "valid.cert.json"), "--html", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode in (3, 4), done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_page_needs_no_other_file(tmp_path: Path, cli: Any) -> None:
    page = tmp_path / "page.html"
    ran = cli("show", VECTORS / "valid.cert.json", "--at", AT, "--html", page)
    assert (ran.code, ran.stdout) == (3, "")
    assert "SIGNATURE NOT VERIFIED" in ran.stderr
    text = page.read_text()
    assert "SIGNATURE NOT VERIFIED" in text
    assert "default-src 'none'" in text
    assert "<script" not in text
    for words in (
        "forall x in ball(short, 0.001): norm_inf(drift(attn_0, x)) &lt;= 0.05",
        "up to 5% of requests beyond",
        "sample, 200 requests, 4 beyond, confidence 95%",
    ):
        assert words in text, words
    assert text.index("SIGNATURE NOT VERIFIED") < text.index("<nav")


def test_result_without_a_run_shows_no_ratio() -> None:
    moment = moment_of(AT)
    bundle = (VECTORS / "valid.cert.json").read_bytes()
    view: CertificateView = certificate_view("x", inspect(bundle, None, moment), None, moment)
    assert view.content is not None
    ratios = {result.clause: result.tightness for result in view.content.results}
    assert ratios["N-ATTN-0"] == pytest.approx(0.03125 / 0.0123)
    assert {ratios[name] for name in ("N-KL", "R-LAT", "O-TRACE")} == {None}


def test_confidence_is_shown_without_rounding() -> None:
    """A proof that leaves something to chance is never shown with a confidence of 100 %."""
    moment = moment_of(AT)
    bundle = (VECTORS / "valid.cert.json").read_bytes()
    view: CertificateView = certificate_view("x", inspect(bundle, None, moment), None, moment)
    assert view.content is not None
    result = replace(view.content.results[0], confidence=f"0.{'9' * 20}")
    assert result.rests_on.endswith(f", confidence 99.{'9' * 18}%")


def test_a_register_says_its_standing_and_what_the_gate_answers(cli: Any, tmp_path: Path) -> None:
    """A triple that was frozen keeps a valid certificate, and its gate is closed; after a
    revocation the certificate is refused, too."""
    file, place = VECTORS / "valid.cert.json", tmp_path / "register.db"
    body = inspect(file.read_bytes(), None, moment_of(AT)).body
    assert body is not None
    about = body.triple
    words = ("show", file, "--at", AT, "--key", VECTORS / "a.pub", "--format", "json")

    def shown(code: int) -> tuple[dict[str, str], dict[str, Any]]:
        ran = cli(*words, "--register", place)
        assert ran.code == code, ran.stdout + ran.stderr
        document = json.loads(ran.stdout)
        SCHEMA.validate(document)
        return document["steps"][-1], document

    assert json.loads(cli(*words).stdout)["gates"] is None
    with Register.open(place, create=True, clock=clock) as register:
        register.record_triple(about)
    step, document = shown(4)
    assert (step["name"], step["reason"]) == ("register", "register/unknown")
    assert document["gates"] == []
    with Register.open(place, clock=clock) as register:
        identity = recorded(register, file.read_bytes()).identity
    step, _ = shown(0)
    assert (step["name"], step["outcome"]) == ("register", "ok")
    why = PromotionReason("N-KL", "52 of 600 are beyond", "code")
    frozen = replace(at("shadow"), triple=about.digest, incumbent=None, state=CandidateState.FROZEN)
    with Register.open(place, clock=clock) as register:
        slot = register.slot("chat/production")
        decided = Promotion(
            slot.name, about.digest, None, about.contract.digest, "shadow", PromotionState.FROZEN,
            (why,), progress=frozen.to_json(),
        )  # fmt: skip
        register.promote(slot.name, slot.version, decided)
    _, document = shown(0)
    (gate,) = document["gates"]
    assert (gate["slot"], gate["open"], gate["outcome"]) == (
        "chat/production", False, "Inconclusive",
    )  # fmt: skip
    assert "N-KL on code: 52 of 600 are beyond" in gate["reasons"]
    text = " ".join(cli(*words[:-2], "--register", place).stdout.split())
    assert "`kcdsl gate` is closed in chat/production" in text
    assert cli(*words[:-2], "--register", place, "--html", tmp_path / "s.html").code == 0
    assert "is closed in chat/production" in (tmp_path / "s.html").read_text()
    with Register.open(place, clock=clock) as register:
        register.revoke(identity, "wrong data", kind=Revoked.CERTIFICATE)
    step, _ = shown(4)
    assert (step["reason"], step["outcome"]) == ("register/revoked", "failed")
