"""Key files: what is read, and what a missing or closed key says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.release.keys import PASSWORD_VARIABLE, read_private_key, read_public_key
from kcdsl.release.signing import signing_key
from kcdsl_certs.keys import generate


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without a password."""
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


def test_the_key_beside_the_contract_signs_unless_another_is_named(tmp_path: Path) -> None:
    assert signing_key(None, tmp_path) is None
    beside, other = generate(), generate()
    (tmp_path / "kcdsl.key").write_bytes(beside.to_pem(None))
    (tmp_path / "other.key").write_bytes(other.to_pem(None))
    found = signing_key(None, tmp_path)
    assert found is not None
    assert found.public.pem == beside.public.pem
    named = signing_key(str(tmp_path / "other.key"), tmp_path)
    assert named is not None
    assert named.public.pem == other.public.pem


def test_an_encrypted_key_opens_with_its_password_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path = generate(), tmp_path / "kcdsl.key"
    path.write_bytes(key.to_pem(b"word"))
    for password in (None, "", "other"):
        if password is not None:
            monkeypatch.setenv(PASSWORD_VARIABLE, password)
        with pytest.raises(Refusal) as caught:
            read_private_key(path)
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code.id == "KC640"
        assert PASSWORD_VARIABLE in str(diagnostic.help)
    monkeypatch.setenv(PASSWORD_VARIABLE, "word")
    assert read_private_key(path).public.pem == key.public.pem


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    key = generate()
    (tmp_path / "a.pub").write_bytes(key.public.pem)
    (tmp_path / "a.key").write_bytes(key.to_pem(None))
    (tmp_path / "long").write_bytes(key.public.pem + b"\n" * 65536)
    assert read_public_key(tmp_path / "a.pub").pem == key.public.pem
    for read, name in (
        (read_public_key, "a.key"),
        (read_private_key, "a.pub"),
        (read_public_key, "long"),
        (read_public_key, "absent"),
        (read_private_key, "absent"),
        (read_private_key, "."),
    ):
        with pytest.raises(Refusal) as caught:
            read(tmp_path / name)
        assert caught.value.diagnostics[0].code.id == "KC640"
