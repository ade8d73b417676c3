"""`kcdsl register`, and `kcdsl check` with a register."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.release.issue import issue, utc_now
from kcdsl.release.register import (
    Certificate,
    Promotion,
    PromotionReason,
    PromotionState,
    Register,
    Revoked,
)
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.signatures import SigningKey, TrustedKey, TrustPolicy, generate
from kcdsl_certs.signatures.policy import ROLES
from kcdsl_certs.statement import CertifiedClause, EvidenceFile, ProofReference, Verdict
from tests.support.commands import Ran
from tests.support.release_scenes import NOW

Cli = Callable[..., Ran]
AT = "2026-12-01T00:00:00Z"
LATER = NOW + timedelta(hours=10)


@pytest.fixture
def issued(
    folder: Path,
    key: SigningKey,
    proof: bytes,
    evidence: tuple[EvidenceFile, ...],
    every_result: Callable[[ProofReference], list[CertifiedClause]],
) -> Callable[..., bytes]:
    """Return a function that issues a certificate of the whole contract."""

    def make(*, fails: bool = False, keys: tuple[SigningKey, ...] = (), **options: Any) -> bytes:
        found = every_result(proof_reference("N-ATTN-0", proof))
        given = {"clock": lambda: NOW, **options}
        if fails:
            found[1] = replace(found[1], value=found[1].tau * 2, verdict=Verdict.FAILED)
        return issue(
            program=load_program(folder / "contract.yaml"),
            base=folder,
            clauses=found,
            keys=keys or [key],
            evidence=evidence,
            **given,
        )

    return make


@pytest.fixture
def trust(key: SigningKey) -> Callable[..., TrustPolicy]:
    """Return a function that writes a policy which trusts the folder's key and others."""

    def make(*others: SigningKey) -> TrustPolicy:
        records = [TrustedKey("key", k.public, frozenset(ROLES.values())) for k in (key, *others)]
        return TrustPolicy(keys=tuple(records))

    return make


@pytest.fixture
def place(folder: Path) -> Path:
    """Return where an empty register is."""
    path = folder / "releases.db"
    Register.open(path, create=True, clock=lambda: LATER).close()
    return path


@pytest.fixture
def record(place: Path, trust: Callable[..., TrustPolicy]) -> Callable[..., Certificate]:
    """Return a function that records a bundle."""

    def add(bundle: bytes, *others: SigningKey) -> Certificate:
        with Register.open(place, clock=lambda: LATER) as register:
            (found,) = register.record_certificates([bundle], trust(*others))
            return found

    return add


@pytest.fixture
def check(
    cli: Cli, folder: Path, certificate: Path, place: Path, follows: Callable[..., None]
) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """Return a function that runs `kcdsl check --register`; it returns the code and the steps."""

    def run(
        *words: str, path: Path | None = None, register: Any = place
    ) -> tuple[int, dict[str, dict[str, str]]]:
        common = ("--key", "kcdsl.key.pub", "--format", "json", "--at", AT)
        named = () if register is None else ("--register", register)
        ran = cli("check", path or certificate, *common, *named, *words, cwd=folder)
        report = json.loads(ran.stdout)
        follows(report)
        return ran.code, {step["name"]: step for step in report["checks"]}

    return run


Check = Callable[..., tuple[int, dict[str, dict[str, str]]]]
Issued = Callable[..., bytes]
Record = Callable[..., Certificate]


# --- check ----------------------------------------------------------------------------------------


def test_certificate_in_force_is_valid(check: Check, certificate: Path, record: Record) -> None:
    record(certificate.read_bytes())
    code, steps = check("--complete")
    assert (code, steps["register"]["outcome"]) == (0, "ok")
    assert "event 3 of 4" in steps["register"]["detail"]


def test_check_without_a_register_skips_its_steps(check: Check) -> None:
    code, steps = check(register=None)
    assert code == 0
    assert "register" not in steps


def test_unrecorded_certificate_is_invalid(check: Check) -> None:
    code, steps = check()
    assert (code, steps["register"]["reason"]) == (4, "register/unknown")


@pytest.mark.parametrize("fails", [True, False])
def test_older_pass_is_invalid_after_a_newer_failure(
    check: Check, certificate: Path, record: Record, issued: Issued, fails: bool
) -> None:
    old = record(certificate.read_bytes())
    record(issued(fails=fails, sequence=old.sequence + 1))
    code, steps = check()
    assert code == (4 if fails else 0)
    assert steps["register"]["reason"] == ("register/superseded" if fails else "")
    newest = issued(sequence=old.sequence + 2)
    path = certificate.with_name("newest.cert.json")
    write_bytes(path, newest)
    record(newest)
    assert check(path=path)[0] == 0
    assert check()[0] == (4 if fails else 0)


def test_failure_of_another_stage_does_not_count(
    check: Check, certificate: Path, record: Record, issued: Issued
) -> None:
    old = record(certificate.read_bytes())
    record(issued(fails=True, sequence=old.sequence + 1, stage="canary"))
    assert check()[0] == 0


def test_superseding_certificate_invalidates_the_former(
    check: Check, certificate: Path, record: Record, issued: Issued
) -> None:
    old = record(certificate.read_bytes())
    record(issued(sequence=old.sequence + 1, supersedes=old.identity))
    code, steps = check()
    assert (code, steps["register"]["reason"]) == (4, "register/superseded")


def test_revoked_certificate_is_invalid(
    check: Check, certificate: Path, record: Record, place: Path
) -> None:
    found = record(certificate.read_bytes())
    with Register.open(place) as register:
        register.revoke(found.identity, "wrong data")
    code, steps = check()
    assert (code, steps["register"]["reason"]) == (4, "register/revoked")
    assert "wrong data" in steps["register"]["detail"]


def test_certificate_of_a_triple_that_was_rolled_back_is_invalid(
    check: Check, certificate: Path, record: Record, place: Path, issued: Issued
) -> None:
    """Until the triple has a certificate that is newer than the decision."""
    old = record(certificate.read_bytes())
    with Register.open(place, clock=lambda: LATER) as register:
        contract = register.triples()[0].contract.digest
        decided = Promotion(
            "chat", old.triple, None, contract, "canary", PromotionState.ADVANCED,
            certificates=(old.identity,),
        )  # fmt: skip
        register.promote("chat", 0, decided)
        assert check()[0] == 0
        back = replace(decided, state=PromotionState.ROLLED_BACK, certificates=())
        register.promote("chat", 1, back)
    code, steps = check()
    assert (code, steps["register"]["reason"]) == (4, "register/rolled-back")
    assert "rolled back in chat by event" in steps["register"]["detail"]
    newer = certificate.with_name("newer.cert.json")
    write_bytes(newer, issued(sequence=old.sequence + 1))
    record(newer.read_bytes())
    assert check(path=newer)[0] == 0
    assert check()[0] == 4


def test_certificate_by_a_revoked_key_is_invalid(
    check: Check, certificate: Path, record: Record, place: Path, key: SigningKey
) -> None:
    record(certificate.read_bytes())
    with Register.open(place) as register:
        register.revoke(key.public.fingerprint, "lost", kind=Revoked.KEY)
    code, steps = check()
    assert (code, steps["register"]["reason"]) == (4, "register/key-revoked")


def test_signature_by_a_revoked_key_does_not_count(
    check: Check, issued: Issued, record: Record, place: Path, folder: Path, key: SigningKey
) -> None:
    """The register recorded two signatures; the checker trusts only the revoked key."""
    other = generate()
    both = issued(keys=(key, other))
    record(both, other)
    path = folder / "out" / "both.cert.json"
    write_bytes(path, both)
    assert check(path=path)[0] == 0
    with Register.open(place) as register:
        register.revoke(key.public.fingerprint, "lost", kind=Revoked.KEY)
    code, steps = check(path=path)
    assert (code, steps["register"]["reason"]) == (4, "register/key-revoked")
    write_bytes(folder / "other.pub", other.public.pem)
    assert check("--key", "other.pub", path=path)[0] == 0


def test_unauthentic_certificate_is_not_looked_up(
    check: Check, issued: Issued, record: Record, certificate: Path
) -> None:
    other = generate()
    foreign = issued(keys=(other,))
    record(foreign, other)
    write_bytes(certificate, foreign)
    code, steps = check()
    assert code == 4
    assert steps["register"]["outcome"] == "not_run"


@pytest.mark.parametrize(
    ("name", "code"),
    [("no-such.db", "KC692"), ("", "KC692"), ("mysql://host/db", "KC901"), ("empty.db", "KC692")],
)
def test_unavailable_register_ends_the_check(
    cli: Cli, folder: Path, certificate: Path, name: str, code: str
) -> None:
    sqlite3.connect(folder / "empty.db").close()
    ran = cli("check", certificate, "--key", "kcdsl.key.pub", "--register", name, cwd=folder)
    assert ran.code == 2
    assert code in ran.stderr
    assert "valid" not in ran.stdout


def test_damaged_register_ends_the_check(
    cli: Cli, folder: Path, certificate: Path, place: Path, record: Record
) -> None:
    record(certificate.read_bytes())
    raw = sqlite3.connect(place)
    raw.execute("UPDATE certificates SET record = '{}'")
    raw.commit()
    raw.close()
    words = ("--key", "kcdsl.key.pub", "--at", AT, "--register", place)
    ran = cli("check", certificate, *words, cwd=folder)
    assert ran.code == 2
    assert "KC695" in ran.stderr


@pytest.mark.parametrize("change", ["DELETE FROM revocations", "UPDATE revocations SET kind = 'k'"])
def test_hidden_revocation_ends_the_check(
    cli: Any, folder: Path, certificate: Path, place: Path, record: Any, change: str
) -> None:
    """The table of revocations is not evidence: the events record the revocation."""
    record(certificate.read_bytes())
    words = ("--key", "kcdsl.key.pub", "--at", AT, "--register", place)
    assert cli("check", certificate, *words, cwd=folder).code == 0
    with Register.open(place) as register:
        (known,) = register.certificates()
        register.revoke(known.identity, "wrong data")
    assert cli("check", certificate, *words, cwd=folder).code == 4
    with closing(sqlite3.connect(place)) as raw, raw:
        raw.execute(change)
    ran = cli("check", certificate, *words, cwd=folder)
    assert (ran.code, "KC695" in ran.stderr) == (2, True)


# --- where a register is named --------------------------------------------------------------------


def _configuration(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    own = folder / "own"
    (own / "kcdsl").mkdir(parents=True)
    (own / "kcdsl" / "kcdsl.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own))
    return own / "kcdsl"


def test_user_configuration_names_a_register(
    check: Check, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _configuration(monkeypatch, folder, 'register = "mine.db"\n')
    place.rename(own / "mine.db")
    code, steps = check(register=None)
    assert (code, steps["register"]["reason"]) == (4, "register/unknown")


def test_environment_variable_names_a_register(
    check: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCDSL_REGISTER", str(place))
    assert check(register=None)[1]["register"]["reason"] == "register/unknown"


def test_file_beside_the_contract_cannot_name_a_register(
    cli: Cli, folder: Path, certificate: Path, place: Path
) -> None:
    (folder / "kcdsl.toml").write_text(f'register = "{place}"\n')
    ran = cli("check", certificate, "--key", "kcdsl.key.pub", "--at", AT, cwd=folder)
    assert ran.code == 2
    assert "KC605" in ran.stderr


def test_configured_missing_register_ends_the_check(
    cli: Cli, folder: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _configuration(monkeypatch, folder, 'register = ""\n')
    ran = cli("check", certificate, "--key", "kcdsl.key.pub", "--at", AT, cwd=folder)
    assert ran.code == 2


# --- commands -------------------------------------------------------------------------------------


def test_register_commands_end_to_end(
    cli: Cli, folder: Path, issued: Issued, follows: Callable[..., None]
) -> None:
    """Create, add, show, log, revoke, sign the head and audit, as documents and as text."""

    def run(*words: Any, code: int = 0) -> Ran:
        ran = cli("register", *words, "--register", "own.db", cwd=folder)
        assert ran.code == code, ran.stderr
        return ran

    def document(*words: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(*words, "--format", "json").stdout)
        follows(found)
        return found

    trust = ("--key", "kcdsl.key.pub")
    path = folder / "out" / "now.cert.json"
    write_bytes(path, issued(clock=utc_now))
    assert document("init")["head"]["number"] == 1
    added = document("add", path, *trust, "--policy", _policy(folder))
    (entry,) = added["certificates"]
    assert (entry["standing"], entry["event"]) == ("in force", 3)
    assert document("show", entry["identity"]) == added
    assert document("show", f"sha256:{entry['identity'].upper()}") == added
    assert "in force" in run("show", entry["identity"]).stdout
    assert "standing" in run("add", path, *trust).stdout  # it is recorded already
    log = document("log")
    assert [event["kind"] for event in log["events"]] == [
        "register",
        "triple",
        "certificate",
        "run",
    ]
    assert log["head"]["hash"] == log["events"][-1]["hash"]
    assert [event["number"] for event in document("log", "--since", "2")["events"]] == [3, 4]
    assert "PASSED offline-ci" in run("log").stdout
    run("head", "--sign", "kcdsl.key", "-o", "head.json")
    run("revoke", entry["identity"], "--reason", "wrong\x1b[2Jdata")
    assert "\x1b" not in run("log").stdout
    assert document("revoke", "0" * 64, "--kind", "key", "--reason", "lost")["head"]["number"] == 6
    assert document("show", entry["identity"])["certificates"][0]["standing"] == "revoked"
    with Register.open(folder / "own.db") as register:
        (evaluated,) = register.runs(trusted=True)
    assert evaluated.kind == "evaluate"
    assert evaluated.identity in run("log").stdout.replace("\n", "")
    document("mark", evaluated.identity, "--reason", "noisy host")
    with Register.open(folder / "own.db") as register:
        assert register.runs(trusted=True) == ()
    run("check", "--threshold", "1", code=2)  # of no keys
    audit = document("check", "--head", "head.json", *trust)
    assert (audit["sound"], audit["heads"][0]["number"]) == (True, 4)
    assert document("upgrade")["head"]["number"] == 7
    assert document("slots") == {"schema": "kcdsl.register-slots/1", "slots": []}
    raw = sqlite3.connect(folder / "own.db")
    raw.execute("DELETE FROM revocations")
    raw.commit()
    raw.close()
    found = json.loads(run("check", "--format", "json", code=1).stdout)
    follows(found)
    assert [defect["reason"] for defect in found["defects"]] == ["projection/revocations"]
    assert "not sound" in run("check", code=1).stdout


def _policy(folder: Path) -> Path:
    path = folder / "policy.toml"
    path.write_text('trusted-keys = ["kcdsl.key.pub"]\n')
    return path


def test_slots_show_the_live_triple_and_the_last_decision(
    cli: Cli,
    folder: Path,
    place: Path,
    record: Record,
    issued: Issued,
    follows: Callable[..., None],
) -> None:
    found = record(issued())
    with Register.open(place, clock=lambda: LATER) as register:
        triple = register.triple(found.triple)
        assert triple is not None
        made = Promotion(
            "chat/full",
            found.triple,
            None,
            triple.contract.digest,
            "full",
            PromotionState.PROMOTED,
            certificates=(found.identity,),
        )
        register.promote("chat/full", 0, made)
        held = replace(
            made,
            incumbent=found.triple,
            state=PromotionState.HELD,
            reasons=(PromotionReason("N-KL", "no data", "all"),),
        )
        register.promote("chat/full", 1, held)
    ran = cli("register", "slots", "--register", place, cwd=folder)
    assert ran.code == 0
    assert f"sha256:{found.triple[:16]}" in ran.stdout
    assert "held" in ran.stdout
    again = cli(
        "register", "slots", "chat/full", "--register", place, "--format", "json", cwd=folder
    )
    document = json.loads(again.stdout)
    follows(document)
    (slot,) = document["slots"]
    assert (slot["version"], slot["triple"]["sha256"]) == (2, found.triple)
    assert [each["state"] for each in slot["decisions"]] == ["promoted", "held"]
    log = cli("register", "log", "--register", place, cwd=folder).stdout
    assert "N-KL: no data" in " ".join(log.split())


@pytest.mark.parametrize(
    "words",
    [
        ("log", "surplus"),
        ("add",),
        ("mark", "0" * 64, "--reason", "unknown"),
        ("mark", "0" * 64),
        ("revoke", "0" * 64, "--reason", "x", "--trusted"),
        ("show",),
        ("revoke", "0" * 64),
        ("revoke", "short", "--reason", "no digest"),
        ("show", "0" * 64),
        ("log", "--sign", "kcdsl.key"),
        ("log", "--head", "head.json"),
        ("head", "--sign", "kcdsl.key"),
        ("head", "-o", "head.json"),
        ("check", "--since", "3"),
        ("check", "--head", "no-such.json", "--key", "kcdsl.key.pub"),
        ("slots", "Not A Slot"),
        ("add", "no-such.cert.json", "--key", "kcdsl.key.pub"),
        ("add", "contract.yaml", "--key", "kcdsl.key.pub"),
    ],
)
def test_invalid_arguments_are_refused_without_effect(
    cli: Cli, folder: Path, place: Path, key: SigningKey, words: tuple[str, ...]
) -> None:
    ran = cli("register", *words, "--register", place, cwd=folder)
    assert ran.code == 2
    assert ran.stderr.startswith("error[KC")
    with Register.open(place) as register:
        assert register.head().number == 1
    assert not (folder / "head.json").exists()


def test_register_must_be_named(cli: Cli, folder: Path) -> None:
    ran = cli("register", "log", cwd=folder)
    assert ran.code == 2
    assert "--register" in ran.stderr


def test_head_without_a_trusted_key_is_not_evidence(cli: Cli, folder: Path, place: Path) -> None:
    (folder / "head.json").write_text("{}")
    ran = cli("register", "check", "--head", "head.json", "--register", place, cwd=folder)
    assert ran.code == 2
    assert "KC641" in ran.stderr


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
from kcdsl.cli import main
sys.exit(main())
"""
"""A process in which no file can grow."""


@pytest.mark.parametrize("words", [("init",), ("revoke", "ab" * 32, "--reason", "x")])
def test_full_disk_is_not_reported_as_damage(
    tmp_path: Path, cli: Cli, words: tuple[str, ...]
) -> None:
    place = str(tmp_path / "r.db")
    if words[0] != "init":
        assert cli("register", "init", "--register", place).code == 0
    full = [sys.executable, "-c", FULL_DISK, "register", *words, "--register", place]
    ran = subprocess.run(full, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr[:12]) == (2, "error[KC602]"), ran.stderr
    again = cli("register", *words, "--register", place)
    assert again.code == 0, again.stderr
    assert cli("register", "check", "--register", place).code == 0


ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE events RENAME TO more; CREATE VIEW events AS "
        f"{ENDLESS} n AS number, '' AS kind, '' AS time, '' AS previous, '' AS hash, '' AS body"
        " FROM t",
        f"DROP TABLE alembic_version; CREATE VIEW alembic_version AS {ENDLESS} n AS version_num"
        " FROM t",
        "ALTER TABLE slots ADD COLUMN x AS (hex(zeroblob(100000000)))",
        "CREATE VIRTUAL TABLE more USING fts5(x)",
    ],
    ids=["a view", "a view of the revision", "a computed column", "a virtual table"],
)
@pytest.mark.parametrize("command", ["log", "check", "slots"])
def test_database_with_views_is_refused(
    cli: Cli, tmp_path: Path, change: str, command: str
) -> None:
    """An endless view would never finish."""
    assert cli("register", "init", "--register", tmp_path / "r.db").code == 0
    with closing(sqlite3.connect(tmp_path / "r.db")) as opened:
        opened.executescript(change)
    ran = cli("register", command, "--register", tmp_path / "r.db")
    assert (ran.code, "KC695" in ran.stderr) == (2, True), ran.stderr
    assert "which no register does" in ran.stderr
