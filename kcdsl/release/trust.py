"""Which keys are trusted: what the one who checks says, and never what lies beside a contract."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from kcdsl.config import load_config, user_folder
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    NO_TRUSTED_KEY,
    TRUST_POLICY,
    UNREADABLE_KEY,
)
from kcdsl_certs.policy import Policy, Trust, read_policy, trust
from kcdsl_certs.rejected import Rejected

POLICY_VARIABLE = "KCDSL_POLICY"
POLICY_FILE = "policy.toml"


def trusted(
    policy: str | None,
    keys: Sequence[str],
    threshold: int | None,
    revocations: Sequence[str],
    folder: Path,
) -> Trust:
    """Return what a check goes by; raises Refusal where it says nothing or cannot be used.

    The policy is the file given, else that of the environment, else of the user's configuration.
    The configuration of the contract's `folder` can only refuse more: accepted findings.
    """
    try:
        source, chosen = _policy(policy)
        found = trust(
            chosen,
            source,
            keys=[Path(name) for name in keys],
            threshold=threshold,
            revocations=[Path(name) for name in revocations],
        )
    except Rejected as error:
        raise _refused(error) from error
    if not load_config(folder).refuse_suppressions:
        return found
    return dataclasses.replace(
        found, rules=dataclasses.replace(found.rules, refuse_suppressions=True)
    )


def _policy(given: str | None) -> tuple[str | None, Policy | None]:
    variable = os.environ.get(POLICY_VARIABLE)
    if given is not None:
        return "--policy", read_policy(Path(given))
    if variable is not None:
        return POLICY_VARIABLE, read_policy(Path(variable))
    own = user_folder()
    if own is not None and os.path.lexists(own / POLICY_FILE):
        return "user configuration", read_policy(own / POLICY_FILE)
    return None, None


def _refused(error: Rejected) -> Refusal:
    text = f"{error.detail} ({error.reason})"
    match error.reason:
        case "policy/no-key":
            return refuse(
                NO_TRUSTED_KEY,
                error.detail,
                help="name a key, --key PUB, or a policy, --policy FILE; what lies beside the "
                "contract is not asked",
            )
        case "policy/malformed" | "policy/unknown":
            return refuse(BAD_CONFIGURATION, text, help="certs/README.md describes policies")
        case reason if reason.startswith("policy/"):
            return refuse(
                TRUST_POLICY,
                error.detail,
                help="the threshold lies between that of the policy and the number of distinct "
                "keys; repeat --key",
            )
        case _:
            return refuse(UNREADABLE_KEY, text, help="`kcdsl keygen` makes a key pair")
