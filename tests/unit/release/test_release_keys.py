"""Key files: accepted forms, and messages about missing or encrypted keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.release.signing import PASSWORD_VARIABLE, read_private_key, signing_keys
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import generate, load_key


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without a password."""
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


def test_named_keys_sign_once_each(tmp_path: Path) -> None:
    assert signing_keys(()) == ()
    one, other = tmp_path / "kcdsl.key", tmp_path / "other.key"
    for path in (one, other):
        path.write_bytes(generate().to_pem(None))
        path.chmod(0o600)
    assert len(signing_keys([str(one), str(other)])) == 2
    with pytest.raises(Refusal) as caught:
        signing_keys([str(one), str(other), str(one)])
    assert caught.value.diagnostics[0].code.id == "KC649"


def test_readable_private_key_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kcdsl.key"
    path.write_bytes(generate().to_pem(None))
    for mode, told in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        read_private_key(path)
        assert ("others may read the private key" in capsys.readouterr().err) is told, oct(mode)


def test_encrypted_key_needs_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_invalid_key_is_refused(tmp_path: Path) -> None:
    key = generate()
    (tmp_path / "a.pub").write_bytes(key.public.pem)
    (tmp_path / "a.key").write_bytes(key.to_pem(None))
    (tmp_path / "long").write_bytes(key.public.pem + b"\n" * 65536)
    os.mkfifo(tmp_path / "pipe")
    assert load_key(tmp_path / "a.pub").pem == key.public.pem
    for name in ("a.key", "long", "absent", ".", "pipe", "\0"):
        with pytest.raises(Rejected):
            load_key(tmp_path / name)
    for name in ("a.pub", "absent", ".", "pipe", "\0"):
        with pytest.raises(Refusal) as caught:
            read_private_key(tmp_path / name)
        assert caught.value.diagnostics[0].code.id == "KC640"
