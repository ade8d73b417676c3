"""Options that go together, as classes that commands derive from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kcdsl.cli.common.declare import Command, choice, switch, value, values
from kcdsl.cli.common.readers import whole

if TYPE_CHECKING:
    from kcdsl_certs.signatures import Trust

MOST_LOOKS = 10_000
LONGEST_DAYS = 3660


class Stage(StrEnum):
    """What a certificate is for."""

    OFFLINE_CI = "offline-ci"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class RunsCode(Command):
    """A command that runs Python code of its contract, where the user allows that."""

    epilog: ClassVar[str | None] = (
        "This command runs code of the contract, once that is allowed: a model factory, and "
        "metrics of its own. SECURITY.md says when."
    )
    allow_code: bool = switch(
        "run the Python code that the contract names, with your rights (default: only where the "
        "contract is below trusted-folders of your own configuration)"
    )


@dataclass(frozen=True, kw_only=True)
class Looks(Command):
    """How often growing data is looked at."""

    looks: int = value(
        "K",
        "evaluations of growing data that share the error, this one included",
        1,
        read=whole(1, MOST_LOOKS),
        group="looks",
    )
    anytime: bool = switch("limits that hold at every look, however many", group="looks")

    @property
    def looks_taken(self) -> int | None:
        """Return how many looks share the error; None for any number."""
        return None if self.anytime else self.looks


@dataclass(frozen=True, kw_only=True)
class Signs(Command):
    """Who signs what the command writes."""

    sign: tuple[str, ...] = values(
        "KEY",
        "sign in this process, which also ran the kernels, by this private key; repeatable. "
        "`kcdsl sign` keeps the key away from them (default: a statement that it signs)",
    )


@dataclass(frozen=True, kw_only=True)
class Certifies(Signs):
    """What a certificate says beside its results."""

    stage: Stage = choice(Stage, "what the certificate is for", Stage.OFFLINE_CI)
    valid_for: int = value(
        "DAYS", "how long the certificate is valid", 90, read=whole(1, LONGEST_DAYS)
    )

    @property
    def lifetime(self) -> timedelta:
        """Return how long the certificate is valid."""
        return timedelta(days=self.valid_for)


@dataclass(frozen=True, kw_only=True)
class Trusts(Command):
    """Whom a check trusts."""

    policy: str | None = value(
        "FILE",
        "which keys may sign what, and what is revoked (default: $KCDSL_POLICY, then policy.toml "
        "of the user's configuration; never a file of the contract's folder)",
    )
    key: tuple[str, ...] = values(
        "PUB",
        "a trusted public key, repeatable: of those in the policy only these, within the limits "
        "that it sets for them",
    )
    threshold: int | None = value(
        "N", "how many distinct keys must have signed; not below that of the policy", read=int
    )
    revocations: tuple[str, ...] = values(
        "FILE", "certificates and keys that are revoked, beside those of the policy; repeatable"
    )

    def trust_for(self, folder: Path) -> Trust:
        """Return what a check of a contract in a folder goes by; raises Refusal."""
        from kcdsl.release.signing import trusted

        return trusted(self.policy, self.key, self.threshold, self.revocations, folder)
