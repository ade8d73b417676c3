"""Sign certificates for the vectors, and damage them."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.signatures import PAYLOAD_TYPE, SigningKey, bundle_bytes, sign
from kcdsl_certs.statement import Predicate, payload_bytes
from tests.support.vectors.golden import (
    KEY_A,
)


@dataclass(frozen=True, slots=True)
class Vector:
    """A certificate and the expected result of its check; an empty reason means valid."""

    name: str
    description: str
    data: bytes
    step: str = ""
    reason: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def certificate(body: Predicate, *keys: SigningKey) -> bytes:
    """Sign a body (by key A unless others are given)."""
    return bundle_bytes(
        sign(payload_bytes(body), keys or (KEY_A,)), (keys or (KEY_A,))[0].public.hint
    )


def signed(payload: bytes, kind: str = PAYLOAD_TYPE) -> bytes:
    """Sign arbitrary payload bytes by key A."""
    return bundle_bytes(sign(payload, [KEY_A], kind), KEY_A.public.hint)


def edited(body: Predicate, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """Sign a statement after an edit of its data, as a careless signer would."""
    statement = json.loads(payload_bytes(body))
    edit(statement)
    return signed(canonical_json(statement))


def rewrapped(data: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """Edit the bundle around a payload without signing again."""
    bundle = copy.deepcopy(json.loads(data))
    edit(bundle)
    return json.dumps(bundle, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def with_payload(data: bytes, old: bytes, new: bytes) -> bytes:
    """Replace text inside the payload without signing again."""

    def edit(bundle: dict[str, Any]) -> None:
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
        if old not in payload:
            raise ValueError(f"{old!r} is not in the payload")
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload.replace(old, new, 1)).decode()

    return rewrapped(data, edit)


def with_result(body: Predicate, index: int, **changes: Any) -> Predicate:
    """Change one clause result."""
    results = list(body.clauses)
    results[index] = replace(results[index], **changes)
    return replace(body, clauses=tuple(results))
