"""Attacks on keys, trust policies and signing, carried out through the command line.

`ATTACKS` are functions from a `Scene` to an outcome; an accepted one has succeeded. `CONTROLS` are
honest uses of the same scene, which must be accepted, so that attacks are refused for the right
reason.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kcdsl.check.compile import load_program
from kcdsl.release.issue import evidence_entries, issue, result_for
from kcdsl.release.requirements import required_clauses
from kcdsl_certs.encoding.strict import canonical_json, time_text
from kcdsl_certs.signatures import (
    PAYLOAD_TYPE,
    Envelope,
    Signature,
    SigningKey,
    bundle_bytes,
    decode,
    generate,
    pae,
    parse_bundle,
    sign,
)
from kcdsl_certs.statement import NEEDED, Evidence, Verdict, certificate_id
from tests.support.configurations import DECODER_TEXT

CONTRACT = """\
kcdsl: 1
contract: vendor
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 0.02, slices: [all], level: L2}
"""
SPKI_ED25519 = bytes.fromhex("302a300506032b6570032100")
SMALL_ORDER = tuple(
    bytes.fromhex(text)
    for text in (
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    )
)
"""The eight points of small order of Curve25519 in their canonical encodings."""
OTHER_SPELLINGS = tuple(
    bytes.fromhex(text)
    for text in (
        "0100000000000000000000000000000000000000000000000000000000000080",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
"""Non-canonical encodings of some of them."""


class Ran(Protocol):
    """Exit code and output of one run of the command line."""

    @property
    def code(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attack: whether the foreign statement was accepted, and the output."""

    accepted: bool
    code: int
    said: str


@dataclass(slots=True)
class Scene:
    """A delivered contract, a certificate by a trusted key, and the key of a stranger.

    `run` is `kcdsl ARGUMENTS…` in a folder with environment variables.
    """

    root: Path
    run: Callable[..., Ran]
    honest: SigningKey = field(default_factory=generate)
    stranger: SigningKey = field(default_factory=generate)
    payload: bytes = b""

    @property
    def vendor(self) -> Path:
        """Return the folder of the contract; the vendor controls all of its files."""
        return self.root / "vendor"

    @property
    def home(self) -> Path:
        """Return the folder of the checker, with keys, policies and configuration."""
        return self.root / "home"

    def statement(self, **changes: Any) -> bytes:
        """Return the statement with other fields of its predicate."""
        record = json.loads(self.payload)
        record["predicate"].update(changes)
        return canonical_json(record)

    def deliver(self, payload: bytes, *keys: SigningKey) -> Path:
        """Write a certificate of these bytes by these keys to the vendor's folder."""
        bundle = bundle_bytes(sign(payload, keys), keys[0].public.hint)
        return self.write(self.vendor / "out" / "evaluate.cert.json", bundle)

    def write(self, path: Path, data: bytes | str) -> Path:
        """Write a file and return its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def policy(self, text: str, name: str = "policy.toml") -> Path:
        """Write a policy of the checker; the honest key is release.pub beside it."""
        self.write(self.home / "release.pub", self.honest.public.pem)
        self.write(self.home / "other.pub", self.stranger.public.pem)
        return self.write(self.home / name, text)

    def check(self, certificate: Path, *words: Any, **variables: str) -> Outcome:
        """Check a certificate from within the vendor's folder."""
        env = {"XDG_CONFIG_HOME": str(self.home / "configuration"), **variables}
        ran = self.run("check", str(certificate), *map(str, words), cwd=self.vendor, env=env)
        return Outcome(ran.code == 0, ran.code, ran.stdout + ran.stderr)


def scene(root: Path, run: Callable[..., Ran]) -> Scene:
    """Make the folders of a scene."""
    made = Scene(root, run)
    made.vendor.mkdir(parents=True)
    made.home.mkdir()
    made.write(made.vendor / "contract.yaml", CONTRACT)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0)
    made.write(made.vendor / "model.safetensors", weights)
    made.write(made.vendor / "config.json", DECODER_TEXT)
    made.write(made.vendor / "prompts.jsonl", '{"id": "1", "text": "hello"}\n')
    program = load_program(made.vendor / "contract.yaml")
    (required,) = required_clauses(program, made.vendor)
    result = result_for(
        required,
        evidence=Evidence.CENSUS,
        method="census/1",
        verdict=Verdict.PASSED,
        value=Fraction(1, 100),
        n=1,
        counted="requests",
    )
    # the evidence stays with the vendor; the check reports that it is missing
    rests_on = evidence_entries({role: (made.vendor / role, b"") for role in NEEDED})
    bundle = issue(
        program=program,
        base=made.vendor,
        clauses=[result],
        keys=[made.honest],
        evidence=rests_on,
    )
    made.payload = decode(parse_bundle(bundle)).payload
    return made


# --- honest uses ---------------------------------------------------------------------------------


def a_key_of_the_policy(at: Scene) -> Outcome:
    policy = at.policy('trusted-keys = ["release.pub"]\n')
    return at.check(at.deliver(at.payload, at.honest), "--policy", policy)


def a_named_key(at: Scene) -> Outcome:
    at.policy("")
    return at.check(at.deliver(at.payload, at.honest), "--key", at.home / "release.pub")


def a_policy_of_the_environment(at: Scene) -> Outcome:
    policy = at.policy('trusted-keys = ["release.pub"]\n')
    return at.check(at.deliver(at.payload, at.honest), KCDSL_POLICY=str(policy))


def a_policy_of_the_user(at: Scene) -> Outcome:
    at.policy('trusted-keys = ["../../release.pub"]\n', "configuration/kcdsl/policy.toml")
    return at.check(at.deliver(at.payload, at.honest))


def two_keys_of_two(at: Scene) -> Outcome:
    policy = at.policy('threshold = 2\ntrusted-keys = ["release.pub", "other.pub"]\n')
    return at.check(at.deliver(at.payload, at.honest, at.stranger), "--policy", policy)


CONTROLS = (
    a_key_of_the_policy,
    a_named_key,
    a_policy_of_the_environment,
    a_policy_of_the_user,
    two_keys_of_two,
)


# --- what lies beside the contract ---------------------------------------------------------------


def key_beside_the_contract(at: Scene) -> Outcome:
    """The vendor signs with a key of his own and puts its public half beside the contract."""
    at.write(at.vendor / "kcdsl.key.pub", at.stranger.public.pem)
    return at.check(at.deliver(at.payload, at.stranger))


def configuration_beside_the_contract(at: Scene) -> Outcome:
    """A kcdsl.toml of the vendor names his own key as trusted."""
    at.write(at.vendor / "vendor.pub", at.stranger.public.pem)
    at.write(at.vendor / "kcdsl.toml", 'trusted-keys = ["vendor.pub"]\nthreshold = 1\n')
    return at.check(at.deliver(at.payload, at.stranger))


def project_beside_the_contract(at: Scene) -> Outcome:
    """A pyproject.toml of the vendor names his own key as trusted."""
    at.write(at.vendor / "vendor.pub", at.stranger.public.pem)
    at.write(at.vendor / "pyproject.toml", '[tool.kcdsl]\ntrusted-keys = ["vendor.pub"]\n')
    return at.check(at.deliver(at.payload, at.stranger))


def key_beside_a_contract_under_a_policy_of_the_user(at: Scene) -> Outcome:
    """The user has a policy; the vendor has a key beside the contract."""
    at.policy('trusted-keys = ["../../release.pub"]\n', "configuration/kcdsl/policy.toml")
    at.write(at.vendor / "kcdsl.key.pub", at.stranger.public.pem)
    return at.check(at.deliver(at.payload, at.stranger))


def configuration_above_the_contract_replaced(at: Scene) -> Outcome:
    """The checker's own kcdsl.toml lies above; the vendor's is nearer."""
    at.write(at.root / "release.pub", at.honest.public.pem)
    at.write(at.root / "kcdsl.toml", 'trusted_keys = ["release.pub"]\nthreshold = 1\n')
    at.write(at.vendor / "vendor.pub", at.stranger.public.pem)
    at.write(at.vendor / "kcdsl.toml", 'trusted_keys = ["vendor.pub"]\n')
    return at.check(at.deliver(at.payload, at.stranger))


def policy_beside_the_contract(at: Scene) -> Outcome:
    """A policy.toml of the vendor is used in place of the checker's."""
    at.write(at.vendor / "vendor.pub", at.stranger.public.pem)
    at.write(at.vendor / "policy.toml", 'trusted-keys = ["vendor.pub"]\n')
    return at.check(at.deliver(at.payload, at.stranger))


def threshold_beside_the_contract(at: Scene) -> Outcome:
    """Two keys must sign; a kcdsl.toml of the vendor sets the threshold to one."""
    policy = at.policy('threshold = 2\ntrusted-keys = ["release.pub", "other.pub"]\n')
    at.write(at.vendor / "kcdsl.toml", "threshold = 1\n")
    return at.check(at.deliver(at.payload, at.honest), "--policy", policy)


def policy_in_a_relative_home(at: Scene) -> Outcome:
    """The user's HOME is `.`, the folder where the check runs, which the vendor controls."""
    at.write(at.vendor / "vendor.pub", at.stranger.public.pem)
    at.write(at.vendor / ".config/kcdsl/policy.toml", 'trusted-keys = ["../../vendor.pub"]\n')
    return at.check(at.deliver(at.payload, at.stranger), XDG_CONFIG_HOME="", HOME=".")


def malformed_policies(at: Scene) -> Outcome:
    """Lists in place of strings, and integers that Python does not parse.

    Accepted too if one ends in an internal error.
    """
    lists = [f'trusted-keys = [{{path = "release.pub", {n} = [[]]}}]' for n in ("roles", "stages")]
    known = 'trusted-keys = ["release.pub"]\n'
    texts = (
        *lists,
        known + "relaxed-kernel-parts = [{}]",
        known + "revoked-keys = [[]]",
        known + f"threshold = {'9' * 5000}",
    )
    certificate = at.deliver(at.payload, at.honest)
    found = [at.check(certificate, "--policy", at.policy(text)) for text in texts]
    bad = [one for one in found if one.accepted or one.code != 2 or "KC999" in one.said]
    return Outcome(bool(bad), (bad or found)[0].code, (bad or found)[0].said)


# --- limits of keys ------------------------------------------------------------------------------


def _limited(at: Scene, *words: Any, limits: str, more: str = "") -> Outcome:
    """Check with a key named on the command line that a policy limits.

    The limits are where a checker of the tree under attack would write them.
    """
    text = f'{more}trusted-keys = [{{path = "release.pub", {limits}}}]\n'
    at.policy(text)
    certificate = at.deliver(at.payload, at.honest)
    return at.check(
        certificate,
        "--key",
        at.home / "release.pub",
        *words,
        KCDSL_POLICY=str(at.home / "policy.toml"),
    )


def named_key_beyond_its_stages(at: Scene) -> Outcome:
    """The policy lets the key sign canaries; `--key` names the same key for another stage."""
    return _limited(at, limits='stages = ["canary"]')


def named_key_after_its_end(at: Scene) -> Outcome:
    """The key's validity in the policy has ended; `--key` names it."""
    return _limited(at, limits='valid-until = "2026-01-01T00:00:00Z"')


def named_key_beyond_its_role(at: Scene) -> Outcome:
    """The policy lets the key sign transfers; `--key` names it for a certificate."""
    return _limited(at, limits='roles = ["transfer"]')


def named_key_below_the_threshold(at: Scene) -> Outcome:
    """The policy demands two signers; `--key` names one."""
    return _limited(at, limits='stages = ["offline-ci"]', more="threshold = 2\n")


def threshold_lowered_by_an_option(at: Scene) -> Outcome:
    """The policy demands two signers; `--threshold 1` asks for one."""
    policy = at.policy('threshold = 2\ntrusted-keys = ["release.pub", "other.pub"]\n')
    certificate = at.deliver(at.payload, at.honest)
    return at.check(certificate, "--policy", policy, "--threshold", "1")


def revoked_key(at: Scene) -> Outcome:
    """The key was revoked and is named on the command line."""
    revoked = f'revoked-keys = ["{at.honest.public.fingerprint}"]\n'
    return _limited(at, limits='stages = ["offline-ci"]', more=revoked)


def revoked_key_in_a_file(at: Scene) -> Outcome:
    """A file of revocations names the key, by its hint."""
    policy = at.policy('trusted-keys = ["release.pub"]\n')
    listed = at.write(at.home / "revoked.toml", f'revoked-keys = ["{at.honest.public.hint}"]\n')
    certificate = at.deliver(at.payload, at.honest)
    return at.check(certificate, "--policy", policy, "--revocations", listed)


def revoked_certificate(at: Scene) -> Outcome:
    """The certificate was revoked; it is delivered again under a new signature and envelope."""
    policy = at.policy('trusted-keys = ["release.pub"]\n')
    text = f'revoked-certificates = ["{certificate_id(at.payload)}"]\n'
    listed = at.write(at.home / "revoked.toml", text)
    certificate = at.deliver(at.payload, at.honest)
    return at.check(certificate, "--policy", policy, "--revocations", listed)


def excessive_lifetime(at: Scene) -> Outcome:
    """A certificate that is valid for a hundred years."""
    issued = datetime.now(UTC) - timedelta(days=1)
    window = {
        "issuedAt": time_text(issued),
        "validUntil": time_text(issued + timedelta(days=36_500)),
    }
    at.policy("")
    certificate = at.deliver(at.statement(**window), at.honest)
    return at.check(certificate, "--key", at.home / "release.pub")


# --- points and curves ---------------------------------------------------------------------------


def _public_pem(spki: bytes) -> bytes:
    text = base64.encodebytes(spki).replace(b"\n", b"")
    return b"-----BEGIN PUBLIC KEY-----\n" + text + b"\n-----END PUBLIC KEY-----\n"


def _forged(at: Scene, point: bytes) -> Iterator[Outcome]:
    """Forge signatures without a private key: R a point of small order, S zero."""
    key = at.write(at.home / "weak.pub", _public_pem(SPKI_ED25519 + point))
    for number in range(4):
        payload = at.statement(sequence=number)
        for commitment in SMALL_ORDER:
            envelope = Envelope(payload, PAYLOAD_TYPE, (Signature(commitment + bytes(32)),))
            path = at.write(at.vendor / "out" / "forged.cert.json", bundle_bytes(envelope, "x"))
            yield at.check(path, "--key", key)


def _first_accepted(outcomes: Iterator[Outcome]) -> Outcome:
    last = Outcome(False, 2, "nothing was tried")
    for last in outcomes:
        if last.accepted:
            return last
    return last


def signatures_of_small_order(at: Scene) -> Outcome:
    """A trusted key is a point of small order, for which anybody can sign."""
    return _first_accepted(o for point in SMALL_ORDER[:4] for o in _forged(at, point))


def signatures_of_non_canonical_points(at: Scene) -> Outcome:
    """The same with encodings that are not canonical."""
    return _first_accepted(o for point in OTHER_SPELLINGS[:3] for o in _forged(at, point))


def one_key_in_two_encodings(at: Scene) -> Outcome:
    """Two files of one key, one with a compressed point, pose as two signers."""
    private = at.honest.private
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    point = private.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    head = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200")
    at.policy("")
    other = at.write(at.home / "again.pub", _public_pem(head + point))
    keys = ("--key", at.home / "release.pub", "--key", other, "--threshold", "2")
    return at.check(at.deliver(at.payload, at.honest), *keys)


def weak_curves(at: Scene) -> Outcome:
    """Trusted keys on other curves, weaker than P-256 or of its size, sign."""

    def outcomes() -> Iterator[Outcome]:
        for curve in (ec.SECP192R1(), ec.SECP224R1(), ec.SECP256K1(), ec.BrainpoolP256R1()):
            try:
                key = ec.generate_private_key(curve)
            except Exception:
                continue  # this build of OpenSSL does not support the curve
            pem = key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            value = key.sign(pae(PAYLOAD_TYPE, at.payload), ec.ECDSA(hashes.SHA256()))
            envelope = Envelope(at.payload, PAYLOAD_TYPE, (Signature(value),))
            path = at.write(at.vendor / "out" / "weak.cert.json", bundle_bytes(envelope, "x"))
            yield at.check(path, "--key", at.write(at.home / "weak.pub", pem))

    return _first_accepted(outcomes())


def generator_of_the_attacker(at: Scene) -> Outcome:
    """A key with explicit curve parameters: P-256 with the public key as generator.

    Its private key is then 1.
    """
    numbers = generate().private
    assert isinstance(numbers, ec.EllipticCurvePrivateKey)
    own = numbers.public_key().public_numbers()
    spki = _explicit(own.x, own.y)
    key = at.write(at.home / "explicit.pub", _public_pem(spki))
    return at.check(at.deliver(at.payload, at.stranger), "--key", key)


def _explicit(x: int, y: int) -> bytes:
    """Return the SPKI of a point of P-256 with explicit parameters and the point as generator."""
    p = 2**256 - 2**224 + 2**192 + 2**96 - 1
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    n = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    point = b"\x04" + x.to_bytes(32) + y.to_bytes(32)

    def der(tag: int, *parts: bytes) -> bytes:
        body = b"".join(parts)
        size = len(body)
        length = bytes([size]) if size < 128 else bytes([0x82]) + size.to_bytes(2)
        return bytes([tag]) + length + body

    def integer(value: int) -> bytes:
        return der(2, value.to_bytes(value.bit_length() // 8 + 1))

    prime = der(0x30, bytes.fromhex("06072a8648ce3d0101"), integer(p))
    curve = der(0x30, der(4, (p - 3).to_bytes(32)), der(4, b.to_bytes(32)))
    parameters = der(0x30, integer(1), prime, curve, der(4, point), integer(n), integer(1))
    algorithm = der(0x30, bytes.fromhex("06072a8648ce3d0201"), parameters)
    return der(0x30, algorithm, der(3, b"\0" + point))


# --- signing -------------------------------------------------------------------------------------


def _statement_file(at: Scene, payload: bytes) -> Path:
    return at.write(at.vendor / "out" / "evaluate.statement.json", payload)


def _signed_by_the_owner(at: Scene, payload: bytes) -> Outcome:
    """Have the owner of the honest key sign a statement of the vendor; check the result."""
    key = at.write(at.home / "release.key", at.honest.to_pem())
    key.chmod(0o600)
    path = _statement_file(at, payload)
    ran = at.run("sign", str(path), "--key", str(key), cwd=at.vendor, env={})
    return Outcome(ran.code == 0, ran.code, ran.stdout + ran.stderr)


def sign_contradictory_statement(at: Scene) -> Outcome:
    """A statement claims PASSED although its value violates its limit."""
    record = json.loads(at.payload)
    record["predicate"]["clauses"][0]["value"] = "0.5"
    return _signed_by_the_owner(at, canonical_json(record))


def sign_inconsistent_decimal(at: Scene) -> Outcome:
    """A number has two representations; the smaller one is displayed."""
    record = json.loads(at.payload)
    found = record["predicate"]["clauses"][0]
    found["value"] = {"decimal": "0.001", "exact": found["value"]}
    return _signed_by_the_owner(at, canonical_json(record))


def sign_non_canonical_bytes(at: Scene) -> Outcome:
    """The same statement, with blanks and fields in another order."""
    record = dict(reversed(json.loads(at.payload).items()))
    return _signed_by_the_owner(at, json.dumps(record, indent=1).encode())


def sign_unknown_field(at: Scene) -> Outcome:
    """An unknown field in the statement, which verifiers ignore and other tools may read."""
    record = json.loads(at.payload)
    record["also"] = {"subject": "another model"}
    return _signed_by_the_owner(at, canonical_json(record))


def sign_another_subject(at: Scene) -> Outcome:
    """The subject is the digest of another triple than the displayed one."""
    record = json.loads(at.payload)
    record["subject"][0]["digest"]["sha256"] = "0" * 64
    return _signed_by_the_owner(at, canonical_json(record))


def sign_expired_statement(at: Scene) -> Outcome:
    """A statement whose validity has ended."""
    window = {"issuedAt": "2020-01-01T00:00:00Z", "validUntil": "2020-02-01T00:00:00Z"}
    return _signed_by_the_owner(at, at.statement(**window))


def sign_future_statement(at: Scene) -> Outcome:
    """A statement whose validity begins tomorrow, which a checker refuses until then."""
    issued = datetime.now(UTC) + timedelta(days=1)
    window = {
        "issuedAt": time_text(issued),
        "validUntil": time_text(issued + timedelta(days=30)),
    }
    return _signed_by_the_owner(at, at.statement(**window))


def sign_result_without_evidence(at: Scene) -> Outcome:
    """A measured result without references to its evidence."""
    record = json.loads(at.payload)
    del record["predicate"]["evidence"]
    return _signed_by_the_owner(at, canonical_json(record))


def sign_over_changed_evidence(at: Scene) -> Outcome:
    """The trace beside the statement differs from the one that the statement names."""
    record = json.loads(at.payload)
    name = record["predicate"]["evidence"][0]["path"]
    at.write(at.vendor / "out" / name, b"another")
    return _signed_by_the_owner(at, at.payload)


def sign_over_another_signer(at: Scene) -> Outcome:
    """A second run with another key replaces a certificate; accepted if the first one is lost."""
    certificate = at.deliver(at.payload, at.stranger)
    before = certificate.read_bytes()
    told = _signed_by_the_owner(at, at.payload)
    return Outcome(certificate.read_bytes() != before, told.code, told.said)


def sign_twice_with_one_key(at: Scene) -> Outcome:
    """One key signs twice, to count as two signers."""
    key = at.write(at.home / "release.key", at.honest.to_pem())
    key.chmod(0o600)
    certificate = at.deliver(at.payload, at.honest)
    ran = at.run("sign", "--add", str(certificate), "--key", str(key), cwd=at.vendor, env={})
    return Outcome(ran.code == 0, ran.code, ran.stdout + ran.stderr)


def sign_executes_contract_code(at: Scene) -> Outcome:
    """Modules, a configuration and start-up files in the folder of the statement.

    Accepted if any of their code ran.
    """
    trap = f"open({str(at.root / 'caught')!r}, 'a').write(__file__ + chr(10))\n"
    names = ("torch", "numpy", "rfc8785", "rich", "network", "sitecustomize", "kcdsl_backends")
    for name in names:
        at.write(at.vendor / f"{name}.py", trap)
    at.write(at.vendor / "kcdsl.toml", 'metrics = ["network.py"]\n')
    told = _signed_by_the_owner(at, at.payload)
    return Outcome((at.root / "caught").exists(), told.code, told.said)


ATTACKS: tuple[Callable[[Scene], Outcome], ...] = (
    key_beside_the_contract,
    configuration_beside_the_contract,
    project_beside_the_contract,
    key_beside_a_contract_under_a_policy_of_the_user,
    configuration_above_the_contract_replaced,
    policy_beside_the_contract,
    policy_in_a_relative_home,
    malformed_policies,
    threshold_beside_the_contract,
    named_key_beyond_its_stages,
    named_key_after_its_end,
    named_key_beyond_its_role,
    named_key_below_the_threshold,
    threshold_lowered_by_an_option,
    revoked_key,
    revoked_key_in_a_file,
    revoked_certificate,
    excessive_lifetime,
    signatures_of_small_order,
    signatures_of_non_canonical_points,
    one_key_in_two_encodings,
    weak_curves,
    generator_of_the_attacker,
    sign_contradictory_statement,
    sign_inconsistent_decimal,
    sign_non_canonical_bytes,
    sign_unknown_field,
    sign_another_subject,
    sign_expired_statement,
    sign_future_statement,
    sign_result_without_evidence,
    sign_over_changed_evidence,
    sign_over_another_signer,
    sign_twice_with_one_key,
    sign_executes_contract_code,
)


def outcomes(root: Path, run: Callable[..., Ran]) -> Mapping[str, Outcome]:
    """Carry out every attack, each in a new scene below a folder."""
    found = {}
    for attack in ATTACKS:
        folder = root / attack.__name__
        shutil.rmtree(folder, ignore_errors=True)
        found[attack.__name__] = attack(scene(folder, run))
    return found
