"""A tiny contract with weights and data, and a signed certificate about it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from kcdsl.check.compile import load_program
from kcdsl.ir.terms import Program
from kcdsl.release.issue import issue
from kcdsl.release.register import Register, store
from kcdsl.release.register.database import upgrade
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.signatures import SigningKey, load_private
from kcdsl_certs.statement import CertifiedClause, EvidenceFile, ProofReference
from tests.support.registries import FakeRegistry, serving
from tests.support.release_scenes import (
    NOW,
    SLICES,
    evidence_of,
    results,
    stand_in,
    tiny,
)

VALID_AT = datetime(2026, 12, 1, tzinfo=UTC)
"""A time at which the certificate of `certificate` is valid."""


@pytest.fixture(scope="session")
def register_tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the statements by which Alembic creates the tables of a register in SQLite."""
    place = tmp_path_factory.mktemp("tables") / "register.db"
    Register.open(place, create=True).close()
    with contextlib.closing(sqlite3.connect(place)) as made:
        listed = made.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        (revision,) = made.execute("SELECT version_num FROM alembic_version").fetchone()
    return (*(sql for (sql,) in listed), f"INSERT INTO alembic_version VALUES ('{revision}')")


@pytest.fixture(autouse=True)
def _tables_from_statements(
    request: pytest.FixtureRequest,
    register_tables: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Create SQLite registers without Alembic, which takes 50 ms; tests of registers use it."""
    if request.path.parent.name == "register":
        return

    def made(connection: Connection) -> None:
        if connection.dialect.name != "sqlite" or inspect(connection).get_table_names():
            upgrade(connection)
            return
        for statement in register_tables:
            connection.exec_driver_sql(statement)

    monkeypatch.setattr(store, "upgrade", made)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the contract, its weights, configuration and data."""
    tiny(tmp_path)
    return tmp_path


@pytest.fixture
def program(folder: Path) -> Program:
    """Return the compiled contract."""
    return load_program(folder / "contract.yaml")


@pytest.fixture
def bound_proof(program: Program, folder: Path) -> Callable[..., bytes]:
    """Return a function that makes a placeholder proof with other fields."""
    return lambda **changes: stand_in(program, folder, **changes)


@pytest.fixture
def proof(program: Program, folder: Path) -> bytes:
    """Return a placeholder for the proof of N-ATTN-0."""
    return stand_in(program, folder)


@pytest.fixture
def rest_on(program: Program) -> Callable[..., tuple[EvidenceFile, ...]]:
    """Return a function that writes the evidence of measured results and returns references."""
    return lambda folder, found, slices=SLICES: evidence_of(program, folder, found, slices)


@pytest.fixture
def evidence(program: Program, folder: Path, proof: bytes) -> tuple[EvidenceFile, ...]:
    """Write the evidence of the certificate's results beside it."""
    found = results(program, folder, proof_reference("N-ATTN-0", proof))
    return evidence_of(program, folder / "out", found[1:])


@pytest.fixture
def every_result(
    program: Program, folder: Path
) -> Callable[[ProofReference], list[CertifiedClause]]:
    """Return a function from a proof to results that show every clause."""
    return lambda proof: results(program, folder, proof)


@pytest.fixture
def key(folder: Path, cli: Callable[..., Any]) -> SigningKey:
    """Make a key pair beside the contract and return it."""
    assert cli("keygen", cwd=folder).code == 0
    return load_private((folder / "kcdsl.key").read_bytes())


@pytest.fixture
def certificate(
    folder: Path,
    program: Program,
    key: SigningKey,
    proof: bytes,
    evidence: tuple[EvidenceFile, ...],
) -> Path:
    """Write a certificate of all clauses, with a placeholder for its proof."""
    write_bytes(folder / "out" / "N-ATTN-0.proof.json", proof)
    reference = proof_reference("N-ATTN-0", proof)
    bundle = issue(
        program=program,
        base=folder,
        clauses=results(program, folder, reference),
        keys=[key],
        clock=lambda: NOW,
        evidence=evidence,
    )
    path = folder / "out" / "tiny.cert.json"
    write_bytes(path, bundle)
    return path


@pytest.fixture
def while_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the clock to the certificate's validity, without credentials and registry clients."""
    monkeypatch.setattr("kcdsl.release.oci.repository.SETTLED", 0.0)
    monkeypatch.setattr("kcdsl.api.certificates.moment_of", lambda text: VALID_AT)
    monkeypatch.setattr("kcdsl.release.issue.utc_now", lambda: VALID_AT)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "no.json"))


@pytest.fixture
def plain() -> Iterator[FakeRegistry]:
    """Serve a registry with the referrers API."""
    with serving(FakeRegistry()) as served:
        yield served


@pytest.fixture
def attach(cli: Callable[..., Any], folder: Path, certificate: Path) -> Callable[..., Any]:
    """Return a function that attaches the certificate to an image."""

    def run(image: str, path: Path = certificate) -> Any:
        return cli("attach", path, image, "--plain-http", cwd=folder)

    return run


@pytest.fixture
def check(cli: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Return a function that checks what is attached to an image."""

    def run(image: str, *words: str, plain_http: bool = True) -> Any:
        given = (*(["--plain-http"] if plain_http else []), "--key", "kcdsl.key.pub", *words)
        return cli("check", f"oci://{image}", *given, cwd=folder)

    return run
