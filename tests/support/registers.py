"""Small certificates, their signing keys, and a register with entries of every kind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from kcdsl.release.register import (
    Certificate,
    Promotion,
    PromotionReason,
    PromotionState,
    Register,
    Revoked,
    Run,
)
from kcdsl_certs.signatures import SigningKey, TrustedKey, TrustPolicy, bundle_bytes, sign
from kcdsl_certs.signatures.policy import ROLES
from kcdsl_certs.statement import (
    CertifiedClause,
    Checkpoint,
    Contract,
    Evaluator,
    Evidence,
    Kernel,
    Predicate,
    Quantity,
    Scope,
    Triple,
    Verdict,
    payload_bytes,
)
from tests.support.vectors.golden import KEY_A, KEY_B, KEY_C

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
KEYS = {"a": KEY_A, "b": KEY_B, "c": KEY_C}
CONTRACT = Contract("registered", "1.0.0", hashlib.sha256(b"contract").hexdigest())


def clock() -> datetime:
    """Return the time at which the tests record."""
    return NOW


def trusted(
    *keys: SigningKey, threshold: int = 1, revoked: Iterable[str] = (), **limits: Any
) -> TrustPolicy:
    """Return a policy that trusts the keys without further limits."""
    records = tuple(
        TrustedKey(key.public.keyid, key.public, frozenset(ROLES.values()), **limits)
        for key in keys
    )
    return TrustPolicy(keys=records, threshold=threshold, revoked_keys=frozenset(revoked))


TRUSTED = trusted(KEY_A)


def triple(name: str = "one", contract: Contract = CONTRACT) -> Triple:
    """Return a triple; each name stands for another checkpoint."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    train = Kernel("torch.eager", {"run": "torch.eager"})
    infer = Kernel("torch.sdpa", {"run": "torch.sdpa"})
    return Triple(Checkpoint(name, digest, digest), train, infer, contract)


def predicate(
    about: Triple,
    *,
    sequence: int = 1,
    verdict: Verdict = Verdict.PASSED,
    stage: str = "offline-ci",
    issued: datetime = NOW - timedelta(hours=1),
    lifetime: timedelta = timedelta(days=30),
    supersedes: str | None = None,
) -> Predicate:
    """Return the body of a certificate with one measured result."""
    value = Fraction(1, 100) if verdict is Verdict.PASSED else Fraction(1, 10)
    clause = CertifiedClause(
        obligation="N-KL/all/0",
        id="N-KL",
        quantity=Quantity("statistic", "mean", (Quantity("metric", "kl"),)),
        op="<=",
        tau=Fraction(1, 50),
        unit="nat",
        evidence=Evidence.CENSUS,
        method="census/1",
        verdict=verdict,
        slice="all",
        slice_digest=hashlib.sha256(b"slice").hexdigest(),
        value=None if verdict is Verdict.INCONCLUSIVE else value,
        n=0 if verdict is Verdict.INCONCLUSIVE else 10,
        counted="requests",
    )
    return Predicate(
        triple=about,
        stage=stage,
        issued_at=issued,
        valid_until=issued + lifetime,
        sequence=sequence,
        scope=Scope(True, (("N-KL", "all"),)),
        clauses=(clause,),
        evaluator=Evaluator("tests", "1"),
        supersedes=supersedes,
    )


def bundle(body: Predicate, *keys: SigningKey) -> bytes:
    """Return the certificate, signed by the keys, by default the first test key."""
    signers = keys or (KEY_A,)
    return bundle_bytes(sign(payload_bytes(body), signers), signers[0].public.hint)


def certified(about: Triple, *keys: SigningKey, **fields: Any) -> bytes:
    """Return a certificate about a triple."""
    return bundle(predicate(about, **fields), *keys)


def recorded(register: Register, data: bytes, policy: TrustPolicy = TRUSTED) -> Certificate:
    """Record one certificate."""
    (found,) = register.record_certificates([data], policy)
    return found


FILLED = "chat/canary"
LAST = 15
"""The slot, and the number of the last event, of a filled register."""


def fill(register: Register) -> None:
    """Record an entry of every kind: `LAST` events."""
    one = recorded(register, certified(triple("one"), sequence=1), TRUSTED)
    two = recorded(register, certified(triple("two"), sequence=1), TRUSTED)
    recorded(
        register,
        certified(triple("two"), sequence=2, stage="shadow", verdict=Verdict.FAILED),
        TRUSTED,
    )
    recorded(register, certified(triple("three"), KEY_B, sequence=9), trusted(KEY_B))
    run = register.record_run(Run("evaluate", one.triple, "shadow", "1" * 64, "2" * 64))
    register.mark_run(run.identity, trusted=False, reason="noise")
    first = Promotion(
        FILLED,
        one.triple,
        None,
        CONTRACT.digest,
        "canary",
        PromotionState.PROMOTED,
        certificates=(one.identity,),
    )
    register.promote(FILLED, 0, first)
    second = replace(
        first, candidate=two.triple, incumbent=one.triple, certificates=(two.identity,)
    )
    register.promote(FILLED, 1, second)
    why = (PromotionReason("N-KL", "p99 is 0.1", "all", {"p99": "0.1"}),)
    back = replace(second, state=PromotionState.ROLLED_BACK, certificates=(), reasons=why)
    register.promote(FILLED, 2, back)
    register.revoke(two.identity, "regression")
    register.revoke(KEY_C.public.fingerprint, "lost", kind=Revoked.KEY)
