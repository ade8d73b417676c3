"""The triple (checkpoint, kernel pair, contract) and its digest, the only subject.

There are never three subjects: generic in-toto tools accept a match of ANY subject, so a statement
that lists the components would verify for a swapped kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields, canonical_digest, sha256_of
from kcdsl_certs.statement.manifest import Manifest

SCHEMA = "kcdsl.triple/1"
INFER_CHECKPOINT = "infer_checkpoint"
"""The role, among the companions, of the inference kernel's own checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """θ. `name` is a hint. `companions` are the sha256 of files that belong to the weights
    (configuration, tokenizer), by role."""

    name: str
    digest: str
    root_digest: str
    companions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        name: str, manifest: Manifest, companions: Mapping[str, str] | None = None
    ) -> Checkpoint:
        """Return the checkpoint of a manifest."""
        return Checkpoint(name, manifest.digest, manifest.root_digest, dict(companions or {}))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel build. Its digest is that of the canonical fingerprint; `name` is a hint."""

    name: str
    fingerprint: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical fingerprint."""
        return canonical_digest(dict(self.fingerprint))


def numerics_digest(kernel: Kernel) -> str | None:
    """Return the sha256 (hex) of the numerics in a fingerprint, or None without numerics."""
    numerics = kernel.fingerprint.get("numerics")
    return None if numerics is None else canonical_digest(numerics)


@dataclass(frozen=True, slots=True)
class Contract:
    """C, by the digest of its compiled form."""

    id: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Triple:
    """(θ, K, C)."""

    checkpoint: Checkpoint
    train: Kernel
    infer: Kernel
    contract: Contract

    def manifest(self) -> dict[str, Any]:
        """Return the canonical triple manifest: digests, contract id and version, no hints."""
        return {
            "schema": SCHEMA,
            "checkpoint": {
                "digest": {"sha256": self.checkpoint.digest},
                "rootDigest": {"sha256": self.checkpoint.root_digest},
                "companions": {k: {"sha256": v} for k, v in self.checkpoint.companions.items()},
            },
            "kernels": {
                "train": {"digest": {"sha256": self.train.digest}},
                "infer": {"digest": {"sha256": self.infer.digest}},
            },
            "contract": {
                "id": self.contract.id,
                "version": self.contract.version,
                "digest": {"sha256": self.contract.digest},
            },
        }

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical manifest: the subject of a certificate."""
        return canonical_digest(self.manifest())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest with the hints for people."""
        record = self.manifest()
        record["checkpoint"]["name"] = self.checkpoint.name
        for role, kernel in (("train", self.train), ("infer", self.infer)):
            record["kernels"][role]["name"] = kernel.name
            record["kernels"][role]["fingerprint"] = dict(kernel.fingerprint)
        return record

    @staticmethod
    def from_json(value: Any, place: str = "triple") -> Triple:
        """Read the record of `to_json`; each fingerprint must hash to the digest beside it."""
        fields = Fields.of(value, place)
        if fields.text("schema") != SCHEMA:
            raise Rejected("statement/malformed", f"{place}.schema is not {SCHEMA}")
        checkpoint = _checkpoint(fields.inner("checkpoint"))
        kernels = fields.inner("kernels")
        train, infer = _kernel(kernels.inner("train")), _kernel(kernels.inner("infer"))
        kernels.done()
        inner = fields.inner("contract")
        contract = Contract(inner.text("id"), inner.text("version"), inner.sha256("digest"))
        inner.done()
        fields.done()
        return Triple(checkpoint, train, infer, contract)


def _checkpoint(fields: Fields) -> Checkpoint:
    companions = {
        name: sha256_of(value.get("sha256") if isinstance(value, dict) else None, name)
        for name, value in fields.inner("companions").record.items()
    }
    checkpoint = Checkpoint(
        fields.text("name"), fields.sha256("digest"), fields.sha256("rootDigest"), companions
    )
    fields.done()
    return checkpoint


def _kernel(fields: Fields) -> Kernel:
    kernel = Kernel(fields.text("name"), fields.inner("fingerprint").record)
    claimed = fields.sha256("digest")
    fields.done()
    if kernel.digest != claimed:
        raise Rejected(
            "triple/fingerprint-inconsistent",
            f"{fields.place}: the fingerprint does not hash to the digest beside it",
        )
    return kernel


PARTS: Mapping[str, tuple[str, ...]] = {
    "software": ("software",),
    "compiler": ("software", "compiler"),
    "processor": ("hardware", "processor"),
    "gpu": ("hardware", "gpu"),
    "driver": ("hardware", "gpu", "driver"),
    "host": ("hardware", "host"),
    "switches": ("switches",),
}
"""The parts of a kernel fingerprint that a policy can ignore or demand."""


def relaxed(claimed: Triple, expected: Triple, parts: Iterable[str]) -> Triple:
    """Return the expected triple, with these parts of the kernels taken from a certificate."""
    kernels = {"train": (claimed.train, expected.train), "infer": (claimed.infer, expected.infer)}
    for part in sorted(parts):
        for role, (one, other) in kernels.items():
            fingerprint = _with_part(one.fingerprint, other.fingerprint, PARTS[part])
            kernels[role] = (one, Kernel(other.name, fingerprint))
    return replace(expected, train=kernels["train"][1], infer=kernels["infer"][1])


def _with_part(
    source: Mapping[str, Any], target: Mapping[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    """Return the target with the value of the source at a path, or without it if missing."""
    name, rest = path[0], path[1:]
    found = dict(target)
    inner, own = source.get(name), found.get(name)
    if rest:
        if isinstance(inner, Mapping) and isinstance(own, Mapping):
            found[name] = _with_part(inner, own, rest)
    elif name in source:
        found[name] = inner
    else:
        found.pop(name, None)
    return found


def states(kernel: Kernel, part: str) -> bool:
    """Return whether a fingerprint has a part; those of servers and recordings have none."""
    found: Any = kernel.fingerprint
    for name in PARTS[part]:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found is not None


def states_machine(kernel: Kernel) -> bool:
    """Return whether a fingerprint names the machine of times and memory: the model of the
    processor, cores and memory of the host, and the model of a device other than the CPU."""
    hardware = kernel.fingerprint.get("hardware")
    found = hardware if isinstance(hardware, Mapping) else {}
    device = kernel.fingerprint.get("device")
    named = ["processor"] if device == "cpu" else ["processor", "gpu"]
    host = found.get("host")
    sizes = [host.get(name) for name in ("cores", "memory")] if isinstance(host, Mapping) else []
    return (
        isinstance(device, str)
        and all(_names_model(found.get(part)) for part in named)
        and len(sizes) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes)
    )


def _names_model(part: Any) -> bool:
    model = part.get("model") if isinstance(part, Mapping) else None
    return isinstance(model, str) and bool(model.strip())


@dataclass(frozen=True, slots=True)
class Difference:
    """One component in which two triples differ."""

    reason: str
    detail: str


def differences(claimed: Triple, expected: Triple) -> tuple[Difference, ...]:
    """Return the differing components, with the values of the certificate and of the deployment."""
    found: list[Difference] = []
    found.extend(_checkpoint_differences(claimed.checkpoint, expected.checkpoint))
    for role, one, other in (
        ("train", claimed.train, expected.train),
        ("infer", claimed.infer, expected.infer),
    ):
        if one.digest != other.digest:
            parts = ", ".join(_fingerprint_differences(one.fingerprint, other.fingerprint))
            detail = f"another {role} kernel: {parts}"
            found.append(Difference(f"triple/kernel-{role}-mismatch", detail))
    if claimed.contract != expected.contract:
        detail = "another contract: " + ", ".join(
            f"{name} {one} is now {other}"
            for name, one, other in (
                ("id", claimed.contract.id, expected.contract.id),
                ("version", claimed.contract.version, expected.contract.version),
                ("digest", claimed.contract.digest[:12], expected.contract.digest[:12]),
            )
            if one != other
        )
        found.append(Difference("triple/contract-mismatch", detail))
    return tuple(found)


def _checkpoint_differences(one: Checkpoint, other: Checkpoint) -> list[Difference]:
    found: list[str] = []
    if one.root_digest != other.root_digest:
        found.append("the weights changed")
    elif one.digest != other.digest:
        found.append("a file was renamed")
    found.extend(
        f"the {role} changed"
        for role in sorted(one.companions.keys() | other.companions.keys())
        if one.companions.get(role) != other.companions.get(role)
    )
    if not found:
        return []
    detail = f"another checkpoint ({other.name}): {', '.join(found)}"
    return [Difference("triple/checkpoint-mismatch", detail)]


def _fingerprint_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in sorted(one.keys() | other.keys()):
        before, now = one.get(key), other.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            found.extend(f"{key}.{part}" for part in _fingerprint_differences(before, now))
        else:
            found.append(f"{key} {before!r} is now {now!r}")
    return found
