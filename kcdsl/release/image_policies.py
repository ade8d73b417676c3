"""Policies for the statement of a certified image, in the two languages that cosign reads.

Values are JSON strings, which both languages parse in the same way. Only the Rego policy compares
the time, since CUE has no clock. CUE constraints are patterns, because a value would fill a missing
field instead of rejecting the statement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_REGO = """\
# Admits an image if a signed statement says that the contract below is kept, now.
# cosign verify-attestation --policy THIS.rego; the tool itself compares the digest of the image.
package signature

import rego.v1

default allow := false

allow if {
	input._type == "https://in-toto.io/Statement/v1"
	input.predicateType == %(kind)s
	count(input.subject) == 1
	regex.match("^[0-9a-f]{64}$", input.subject[0].digest.sha256)
	input.predicate.verdict == "PASSED"
	input.predicate.contract.digest.sha256 == %(contract)s
	input.predicate.stage == %(stage)s
	stated := {level | some level in input.predicate.levels}
	wanted := {level | some level in %(levels)s}
	count(wanted - stated) == 0
	count(input.predicate.certificates) > 0
	now := time.now_ns()
	time.parse_rfc3339_ns(input.predicate.issuedAt) <= now
	now < time.parse_rfc3339_ns(input.predicate.validUntil)
}
"""
_CUE = """\
// Admits an image if a signed statement says that the contract below was kept.
// cosign verify-attestation --policy THIS.cue; the tool itself compares the digest of the image.
// CUE has no clock: the time until which the statement holds is not compared. The Rego policy does.
"_type":       =~"^https://in-toto\\\\.io/Statement/v1$"
predicateType: =~%(kind)s
subject: [{
	digest: sha256: =~"^[0-9a-f]{64}$"
}]
predicate: {
	verdict: =~"^PASSED$"
	contract: digest: sha256: =~%(contract)s
	stage: =~%(stage)s
	levels: [%(levels)s, ...string]
	certificates: [{digest: sha256: =~"^[0-9a-f]{64}$"}, ...]
	issuedAt:   =~%(time)s
	validUntil: =~%(time)s
}
"""
_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"


def rego_policy(kind: str, contract: str, stage: str, levels: Sequence[str]) -> bytes:
    """Return a Rego policy (`data.signature.allow`) for statements of a type, contract and stage.

    `contract` is the digest of the contract in hex; the statement must include all `levels`.
    """
    values = {
        "kind": json.dumps(kind),
        "contract": json.dumps(contract),
        "stage": json.dumps(stage),
        "levels": json.dumps(list(levels)),
    }
    return (_REGO % values).encode("utf-8")


def cue_policy(kind: str, contract: str, stage: str, levels: Sequence[str]) -> bytes:
    """Return a CUE policy for the same; `levels` must be the first ones stated."""
    values = {
        "kind": _exactly(kind),
        "contract": _exactly(contract),
        "stage": _exactly(stage),
        "levels": ", ".join(f"=~{_exactly(level)}" for level in levels),
        "time": json.dumps(_TIME),
    }
    return (_CUE % values).encode("utf-8")


def _exactly(text: str) -> str:
    return json.dumps(f"^{re.escape(text)}$")
