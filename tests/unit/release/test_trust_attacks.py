"""Attacks on keys, policies and signing are refused; their honest counterparts are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trust_attacks import (
    ATTACKS,
    CONTROLS,
    Outcome,
    Scene,
    scene,
    sign_executes_contract_code,
)

Act = Callable[[Scene], Outcome]


@pytest.fixture
def at(tmp_path: Path, cli: Any) -> Scene:
    """Return a scene whose commands run in this process."""
    return scene(tmp_path / "scene", cli)


@pytest.mark.sample(23)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attacks_are_refused(at: Scene, attack: Act) -> None:
    outcome = attack(at)
    assert not outcome.accepted, outcome.said
    assert outcome.code in {0, 2, 4}
    assert "Traceback" not in outcome.said
    assert "internal" not in outcome.said


def test_signing_process_runs_no_code_of_the_folder(tmp_path: Path, cli_process: Any) -> None:
    outcome = sign_executes_contract_code(scene(tmp_path / "scene", cli_process))
    assert (outcome.accepted, outcome.code) == (False, 0), outcome.said


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_honest_uses_are_accepted_and_name_the_policy_used(at: Scene, control: Act) -> None:
    outcome = control(at)
    assert outcome.accepted, outcome.said
    origin = {
        "a_key_of_the_policy": "(--policy)",
        "a_named_key": "no policy",
        "a_policy_of_the_environment": "(KCDSL_POLICY)",
        "a_policy_of_the_user": "(user configuration)",
        "two_keys_of_two": "2 of 2 key(s)",
    }[control.__name__]
    (line,) = [line for line in outcome.said.splitlines() if line.startswith("trust:")]
    assert origin in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trusted-keys = []", "KC641"),
        ("threshold = 1", "KC641"),
        ("trusted-keys = 1", "KC605"),
        ("trusted-keys = [1]", "KC605"),
        ('trusted-keys = [{path = "release.pub", role = "x"}]', "did you mean `roles`?"),
        ('trusted-keys = [{path = "release.pub", roles = ["x"]}]', "KC605"),
        ('trusted-keys = [{path = "release.pub", roles = []}]', "KC605"),
        ('trusted-keys = [{path = "release.pub", stags = ["full"]}]', "did you mean `stages`?"),
        ('trusted-keys = [{path = "release.pub", stages = ["canry"]}]', "KC605"),
        ('trusted-keys = [{path = "release.pub", stages = "full"}]', "KC605"),
        ('trusted-keys = [{path = "release.pub", valid-from = "x"}]', "KC605"),
        ('trusted-keys = [{path = "release.pub", valid-from = "x", valid_from = "y"}]', "KC605"),
        (f'trusted-keys = [{{path = "release.pub", sha256 = "{"0" * 64}"}}]', "KC643"),
        ('trusted-keys = ["gone.pub"]', "KC640"),
        ('trusted-keys = ["."]', "KC640"),
        ('trusted-keys = ["release.pub", "release.pub"]', "KC643"),
        ('trusted-keys = ["release.pub"]\nthreshold = 0', "KC643"),
        ('trusted-keys = ["release.pub"]\nthreshold = 2', "KC643"),
        ('trusted-keys = ["release.pub"]\nthreshold = "1"', "KC605"),
        ('trusted-keys = ["release.pub"]\nthreshold = true', "KC605"),
        ('trusted-keys = ["release.pub"]\nmax-validity = 90', "KC605"),
        ('trusted-keys = ["release.pub"]\nmax-validity = "0d"', "KC605"),
        ('trusted-keys = ["release.pub"]\nrefuse-suppressions = "no"', "KC605"),
        ('trusted-keys = ["release.pub"]\nrevoked-keys = "x"', "KC605"),
        ('trusted-keys = ["release.pub"]\nrevoked-keys = ["abc"]', "KC605"),
        ('trusted-keys = ["release.pub"]\nrevoked = []', "KC605"),
        ("trusted-keys = [", "KC605"),
        ("\ufeff[", "KC605"),
    ],
)
def test_invalid_policy_is_refused(at: Scene, text: str, said: str) -> None:
    policy = at.policy(text)
    outcome = at.check(at.deliver(at.payload, at.honest), "--policy", policy)
    assert (outcome.code, said in outcome.said) == (2, True), outcome.said


@pytest.mark.parametrize("text", ["", "trusted-keys = []", "revoked-keys = 1", "{"])
def test_empty_revocation_file_is_refused(at: Scene, text: str) -> None:
    policy = at.policy('trusted-keys = ["release.pub"]\n')
    listed = at.write(at.home / "revoked.toml", text)
    words = ("--policy", policy, "--revocations", listed)
    assert at.check(at.deliver(at.payload, at.honest), *words).code == 2
    words = ("--policy", policy, "--revocations", at.home / "absent.toml")
    assert at.check(at.deliver(at.payload, at.honest), *words).code == 2


def test_missing_named_policy_is_not_replaced(at: Scene) -> None:
    at.policy('trusted-keys = ["../../release.pub"]\n', "configuration/kcdsl/policy.toml")
    certificate = at.deliver(at.payload, at.honest)
    assert at.check(certificate).code == 0
    assert at.check(certificate, KCDSL_POLICY=str(at.home / "absent.toml")).code == 2
    assert at.check(certificate, KCDSL_POLICY="").code == 2
    assert at.check(certificate, "--policy", at.home / "absent.toml").code == 2


def test_report_names_the_policy_and_keys(
    at: Scene, follows: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        'trusted-keys = [{path = "release.pub", stages = ["offline-ci"]}]\nmax-validity = "90d"\n'
    )
    policy = at.policy(text)
    keys = ("--key", at.home / "release.pub", "--key", at.home / "other.pub")
    certificate = at.deliver(at.payload, at.honest)
    outcome = at.check(certificate, "--policy", policy, *keys, "--format", "json")
    report = json.loads(outcome.said)
    follows(report)
    trust = report["trust"]
    assert (trust["source"], trust["policy"]["file"]) == ("--policy", str(policy))
    assert [(key["listed"], key["stages"]) for key in trust["keys"]] == [
        (True, ["offline-ci"]),
        (False, None),
    ]
    assert (trust["threshold"], trust["maxValidityDays"]) == (1, 90)
    alone = json.loads(at.check(certificate, *keys, "--format", "json").said)
    follows(alone)
    assert (alone["trust"]["source"], alone["trust"]["policy"]) == ("--key", None)


def test_both_signatures_count_after_the_second_is_added(at: Scene, cli: Any) -> None:
    at.policy("")
    certificate = at.deliver(at.payload, at.honest)
    key = at.write(at.home / "other.key", at.stranger.to_pem())
    key.chmod(0o600)
    words = ("--key", at.home / "release.pub", "--key", at.home / "other.pub", "--threshold", "2")
    assert at.check(certificate, *words).code == 4
    shown = cli("sign", "--add", certificate, "--key", key, cwd=at.vendor)
    assert shown.code == 0, shown.stderr
    assert "not checked here" in shown.stdout
    assert at.check(certificate, *words).code == 0
    assert at.check(certificate, *words[:2]).code == 0


def test_signing_shows_the_statement_and_needs_a_key(at: Scene, cli: Any) -> None:
    statement = at.write(at.vendor / "out" / "evaluate.statement.json", at.payload)
    shown = cli("sign", statement, cwd=at.vendor)
    assert shown.code == 0
    assert "nothing was signed" in shown.stderr
    for words in ("vendor 1.0.0", "N-KL [all]", "PASSED, census", "prompts.jsonl", "offline-ci"):
        assert words in shown.stdout
    assert not (at.vendor / "out" / "evaluate.cert.json").exists()


def test_names_in_a_statement_are_escaped(at: Scene, cli: Any) -> None:
    record = at.statement(evaluator={"id": "kcdsl", "version": "1"}, assumptions=["a\x1b[2Jb\nc"])
    statement = at.write(at.vendor / "out" / "evaluate.statement.json", record)
    shown = cli("sign", statement, cwd=at.vendor)
    assert shown.code == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "b c" in shown.stdout
