"""The golden certificate of certs/vectors, and a verifier that expects it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.signatures import SigningKey, TrustedKey, TrustPolicy, bundle_bytes, sign
from kcdsl_certs.statement import PREDICATE_TYPE, Predicate, payload_bytes
from kcdsl_certs.verification.proofs import PresentProofs
from kcdsl_certs.verification.report import Report
from kcdsl_certs.verification.verify import verify
from tests.support.vectors import golden as golden_certificate


@pytest.fixture(scope="session")
def vectors_folder(repository: Path) -> Path:
    """Return the folder of the vectors."""
    return repository / "certs" / "vectors"


@pytest.fixture(scope="session")
def golden() -> ModuleType:
    """Return the module that makes the golden certificate."""
    return golden_certificate


@pytest.fixture
def body(golden: ModuleType, vectors_folder: Path) -> Predicate:
    """Return the body of the golden certificate."""
    predicate: Predicate = golden.predicate(vectors_folder)
    return predicate


def trust(key: SigningKey, name: str = "a", **limits: Any) -> TrustedKey:
    """Return a policy entry that trusts a key for kernel certificates."""
    return TrustedKey(name, key.public, frozenset({PREDICATE_TYPE}), **limits)


@pytest.fixture
def trusted(golden: ModuleType) -> TrustPolicy:
    """Return a policy that trusts key A alone."""
    return TrustPolicy((trust(golden.KEY_A),))


@pytest.fixture
def certify(golden: ModuleType) -> Callable[..., bytes]:
    """Return a function that signs a body, by key A unless others are given."""

    def make(body: Predicate, *keys: SigningKey) -> bytes:
        signing = keys or (golden.KEY_A,)
        return bundle_bytes(sign(payload_bytes(body), signing), signing[0].public.hint)

    return make


@pytest.fixture
def check(golden: ModuleType, vectors_folder: Path, trusted: TrustPolicy) -> Callable[..., Report]:
    """Return `verify` with the expectation of the vectors."""
    expected = golden.expectation(vectors_folder)

    def run(bundle: bytes, **options: Any) -> Report:
        filled: dict[str, Any] = {
            "trusted": trusted,
            "expected_triple": expected.triple,
            "clock": lambda: parse_time(golden.AT),
            "required_clauses": expected.clauses,
            "expected_inputs": expected.inputs,
            "proofs": PresentProofs(vectors_folder),
            "evidence": vectors_folder,
            "data": lambda name: vectors_folder / name,
            "slices": expected.slices,
        }
        return verify(bundle, **{**filled, **options})

    return run
