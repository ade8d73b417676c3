"""Mutants of statements, proofs, run checkpoints, traces and paths, tried on the real checker.

`Scene` is a valid certificate: a proof that is re-derived, and measured results with their evidence
files. Each generator yields an endless sequence of mutants. `tried` runs a mutant and returns
whether it was accepted and, if the change is harmless or states less, the row of
docs/proofs/certificate-fields.md that allows it. A mutant that is accepted without such a row is a
wrong acceptance. The answers of the checker are not known in advance.

`python bench/trust_mutants.py --count 50000` tries mutants of all kinds in `--jobs` processes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import hmac
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from kcdsl_backends.empirical.table import checkpoint as run_checkpoints
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.strict import canonical_digest, canonical_json
from kcdsl_certs.signatures import TrustedKey, TrustPolicy, bundle_bytes, generate, sign
from kcdsl_certs.statement import (
    PREDICATE_TYPE,
    CertifiedClause,
    Checkpoint,
    Comparison,
    Contract,
    Evaluator,
    Evidence,
    EvidenceFile,
    Input,
    Kernel,
    Predicate,
    ProofReference,
    Quantity,
    Region,
    RequiredClause,
    Scope,
    SliceSource,
    Triple,
    Verdict,
    build_manifest,
    payload_bytes,
)
from kcdsl_certs.verification.proofs import Rechecker
from kcdsl_certs.verification.report import Report
from kcdsl_certs.verification.verify import verify
from tests.support import proofs
from tests.support.mutation.bases import made
from tests.support.mutation.changes import Change, changes
from tests.support.mutation.documented import accepted_if_derived, stated

BASE = "piecewise and tanh, interval"
NOW = datetime(2026, 12, 1, tzinfo=UTC)
NAMES = ("a", "b", "c")
DATA, PROOF = "rows.jsonl", "N.proof.json"
MACHINE = {
    "device": "cpu",
    "hardware": {"processor": {"model": "EPYC"}, "host": {"cores": 8, "memory": 2**36}},
}
KINDS = ("statement", "envelope", "proof", "trace", "path", "run-checkpoint")


@dataclass(frozen=True)
class Tried:
    """The result of a mutant: whether it was accepted, and the allowing row (empty: none)."""

    kind: str
    what: str
    accepted: bool
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Return whether it was accepted without an allowing row."""
        return self.accepted and not self.reason


Mutant = Callable[[], Tried]


@dataclass
class Scene:
    """A folder with a valid certificate, and its checker."""

    folder: Path
    statement: dict[str, Any] = field(init=False)
    document: dict[str, Any] = field(init=False)
    key: Any = field(default_factory=generate)

    def __post_init__(self) -> None:
        """Create the certificate and its files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.document, self.checkpoint, _ = made(BASE, self.folder)
        self.document["cases"][0]["name"] = NAMES[0]
        region = self.document["cases"][0]["region"]
        self.length = region["centre"]["shape"][0]
        lines = [
            json.dumps({"id": name, "tokens": [index] * (self.length + index)})
            for index, name in enumerate(NAMES)
        ]
        self._write(DATA, "\n".join(lines).encode())
        self.data = hashlib.sha256((self.folder / DATA).read_bytes()).hexdigest()
        first = {"field": "id", "op": "==", "value": NAMES[0]}
        self.slices = {
            "all": SliceSource(DATA, {"all": []}),
            "first": SliceSource(DATA, first),
        }
        self.body = self._body()
        self.statement = json.loads(payload_bytes(self.body))
        self.bundle = self.signed(canonical_json(self.statement))
        self.files = {p.name: p.read_bytes() for p in self.folder.iterdir() if p.is_file()}
        self.allowed = stated("Statements")
        self.allowed_proofs = stated("Proof documents")
        self.anew = accepted_if_derived("Proof documents")

    def _write(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def pin(self, name: str) -> str:
        """Return the digest of a slice."""
        return canonical_digest({"data": self.data, "where": self.slices[name].where})

    @staticmethod
    def _percentile(metric: str, percent: int) -> Quantity:
        of = Quantity("metric", metric)
        return Quantity("statistic", "quantile", (of,), q=Fraction(percent, 100))

    def _body(self) -> Predicate:
        sides = self.document["numerics"]
        train, infer = (
            Kernel(role, {"run": role, "numerics": sides[role], **MACHINE})
            for role in ("train", "infer")
        )
        weights = Checkpoint.of(self.checkpoint.name, build_manifest(self.checkpoint), {})
        triple = Triple(weights, train, infer, Contract("c", "1.0.0", "0" * 64))
        drift = Comparison(
            "N/first/0", Quantity("norm", "inf", block="block_0"), "<=", Fraction(1, 20)
        )
        kl = Comparison("K/all/0", self._percentile("kl", 99), "<=", Fraction(1, 50), "nat")
        late = Comparison("L/all/0", self._percentile("latency", 95), "<=", Fraction(2), "s")
        has = Comparison(
            "T/all/0", Quantity("share", fields=("rng_seed",)), ">=", Fraction(1), "ratio"
        )
        self.required = (
            RequiredClause(
                *("N", "first", ((drift,),)),
                evidence=Evidence.PROOF,
                slice_digest=self.pin("first"),
                region=Region("ball", "first", Fraction(1, 2**10)),
            ),
            RequiredClause("K", "all", ((kl,),), slice_digest=self.pin("all")),
            RequiredClause(
                "L", "all", ((late,),), budget=Fraction(7, 10), slice_digest=self.pin("all")
            ),
            RequiredClause("T", "all", ((has,),), slice_digest=self.pin("all")),
        )
        digest = self._write(PROOF, proofs.dump(self.document))
        self.triple = triple
        clauses = self._clauses(digest)
        return Predicate(
            triple=triple,
            stage="offline-ci",
            issued_at=datetime(2026, 11, 30, tzinfo=UTC),
            valid_until=datetime(2027, 2, 1, tzinfo=UTC),
            sequence=41,
            scope=Scope(True, tuple((r.id, r.slice) for r in self.required)),
            clauses=clauses,
            evaluator=Evaluator("kcdsl", "1"),
            inputs=(Input(DATA, self.data),),
            evidence=self.rest_on(clauses[1:]),
        )

    def _clauses(self, digest: str) -> tuple[CertifiedClause, ...]:
        claim = float.fromhex(self.document["claim"])
        numbers: tuple[dict[str, Any], ...] = (
            {
                "evidence": Evidence.PROOF,
                "method": "interval/1",
                "bound": claim,
                "low": claim / 2,
                "n": 1,
                "proof": ProofReference(digest, PROOF),
                "numerics": tuple(
                    canonical_digest(self.document["numerics"][side]) for side in ("train", "infer")
                ),
            },
            {"evidence": Evidence.CENSUS, "method": "census/1", "value": Fraction(1, 100), "n": 3},
            {
                "evidence": Evidence.SAMPLE,
                "method": "clopper-pearson/1",
                "n": 3,
                "exceed": 0,
                "alpha": Fraction(1, 20),
            },
            {"evidence": Evidence.CENSUS, "method": "census/1", "value": Fraction(1), "n": 3},
        )
        units = ("region", "requests", "requests", "records")
        return tuple(
            CertifiedClause(
                obligation=wanted.alternatives[0][0].obligation,
                id=wanted.id,
                slice=wanted.slice,
                slice_digest=wanted.slice_digest,
                region=wanted.region,
                budget=wanted.budget,
                quantity=wanted.alternatives[0][0].quantity,
                op=wanted.alternatives[0][0].op,
                tau=wanted.alternatives[0][0].tau,
                unit=wanted.alternatives[0][0].unit,
                verdict=Verdict.PASSED,
                **{"counted": unit, **stating},
            )
            for wanted, unit, stating in zip(self.required, units, numbers, strict=True)
        )

    def rest_on(self, measured: tuple[CertifiedClause, ...]) -> tuple[EvidenceFile, ...]:
        """Write the evidence files and return their entries."""
        records = [
            {
                "request": f"{DATA}:{name}",
                "slices": ["all", "first"] if name == NAMES[0] else ["all"],
                "rng_seed": 7,
                "latency_s": [0.5] * 3,
            }
            for name in NAMES
        ]
        rows = [
            {
                "obligation": one.obligation,
                "clause": one.id,
                "slice": one.slice,
                "evidence": one.evidence.value,
                "verdict": "held",
                "n": one.n,
                "exact": {"value": None if one.value is None else real_text(one.value)},
                "exceedance": None if one.exceed is None else {"k": one.exceed, "n": one.n},
            }
            for one in measured
        ]
        contract = {"digest": f"sha256:{'0' * 64}"}
        report = {"schema": "kcdsl.report/3", "contract": contract, "clauses": rows}
        sides = {"train": self.triple.train.fingerprint, "infer": self.triple.infer.fingerprint}
        contents = {
            "trace": ("trace.parquet", b"PAR1" + bytes(64) + b"PAR1"),
            "records": ("trace.jsonl", "\n".join(map(json.dumps, records)).encode()),
            "report": ("report.json", json.dumps(report).encode()),
            "kernels": (
                "kernels.json",
                json.dumps({"schema": "kcdsl.kernels/1", **sides}).encode(),
            ),
        }
        return tuple(
            EvidenceFile(role, name, self._write(name, data))
            for role, (name, data) in contents.items()
        )

    def signed(self, payload: bytes) -> bytes:
        """Return the bundle of a payload, signed by the trusted key."""
        return bundle_bytes(sign(payload, (self.key,)), self.key.public.hint)

    def check(self, bundle: bytes, *, recheck: bool = True) -> Report:
        """Check a bundle in this folder with all demands."""
        kinds = frozenset({PREDICATE_TYPE})
        checker = Rechecker(self.folder, self.checkpoint)
        if not recheck:
            checker = self._known
        return verify(
            bundle,
            trusted=TrustPolicy((TrustedKey("k", self.key.public, kinds),)),
            expected_triple=self.triple,
            clock=lambda: NOW,
            required_clauses=self.required,
            expected_inputs={DATA: self.data},
            stage="offline-ci",
            minimum_sequence=41,
            proofs=checker,
            evidence=self.folder,
            data=lambda name: self.folder / name,
            slices=self.slices,
            strict=True,
        )

    @property
    def _known(self) -> Rechecker:
        """Return a checker that caches the result of each proof object by its digest."""
        if not hasattr(self, "_rechecker"):
            self._rechecker = Rechecker(self.folder, self.checkpoint)
        return self._rechecker

    def restore(self) -> None:
        """Restore every file."""
        for path in self.folder.iterdir():
            if path.is_symlink() or path.name not in self.files:
                path.unlink()
        for name, data in self.files.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)


def _noted(scene: Scene, change: Change) -> str:
    kinds = scene.allowed.get(change.field, frozenset())
    return f"{change.field} {change.kind}" if change.kind in kinds else ""


def _after(document: Any, chosen: list[Change]) -> Any:
    """Apply changes to a document; one whose place was removed earlier has no effect."""
    for change in chosen:
        with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError, ValueError):
            document = change.of(document)
    return document


def mutants_of_statement(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield statements with one, two or three changes, signed again by the trusted key."""
    every = list(changes(scene.statement, {}))
    while True:
        chosen = rng.sample(every, rng.choice((1, 1, 2, 3)))

        def run(chosen: list[Change] = chosen) -> Tried:
            changed = _after(scene.statement, chosen)
            what = "; ".join(map(str, chosen))
            if changed == scene.statement:
                return Tried("statement", what, False)
            payload = json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode()
            accepted = scene.check(scene.signed(payload), recheck=False).accepted
            # A later change may undo an earlier one: compare the result.
            noted = [change for change in chosen if _noted(scene, change)]
            left = _after(scene.statement, noted) == changed
            reason = ", ".join(_noted(scene, change) for change in noted) if left else ""
            return Tried("statement", what, accepted, reason)

        yield run


def mutants_of_envelope(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield bundles with changed bytes that are not signed again."""
    payload = json.loads(scene.bundle)["dsseEnvelope"]["payload"]
    while True:
        at, way = rng.randrange(len(scene.bundle)), rng.choice(("flip", "cut", "drop", "double"))

        def run(at: int = at, way: str = way, bit: int = rng.randrange(8)) -> Tried:
            old = scene.bundle
            new = {
                "flip": old[:at] + bytes([old[at] ^ 1 << bit]) + old[at + 1 :],
                "cut": old[:at],
                "drop": old[:at] + old[at + 1 :],
                "double": old[: at + 1] + old[at:],
            }[way]
            accepted = scene.check(new, recheck=False).accepted
            reason = ""
            if accepted and json.loads(new)["dsseEnvelope"]["payload"] == payload:
                reason = "Envelopes: the payload is the same, the change is of a hint or a blank"
            return Tried("envelope", f"{way} byte {at}", accepted and new != old, reason)

        yield run


def mutants_of_proof(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield changed proof objects, with the old digest or with a newly signed one."""
    every = list(changes(scene.document, {}))
    original = scene.files[PROOF]
    while True:
        change, anew = rng.choice(every), rng.random() < 0.5

        def run(change: Change = change, anew: bool = anew) -> Tried:
            document = change.of(scene.document)
            data = proofs.dump(document)
            if data == original:
                return Tried("proof", str(change), False)
            (scene.folder / PROOF).write_bytes(data)
            bundle, reason = scene.bundle, ""
            if anew:
                statement = copy.deepcopy(scene.statement)
                digest = {"sha256": hashlib.sha256(data).hexdigest()}
                statement["predicate"]["clauses"][0]["proofDigest"] = digest
                bundle = scene.signed(canonical_json(statement))
                listed = change.kind in scene.allowed_proofs.get(change.field, frozenset())
                if listed or change.field in scene.anew:
                    reason = f"Proof documents: {change.field} {change.kind}"
            accepted = scene.check(bundle).accepted
            (scene.folder / PROOF).write_bytes(original)
            return Tried("proof", f"{change}{', signed anew' if anew else ''}", accepted, reason)

        yield run


def mutants_of_trace(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield changed evidence and data files, and records that are omitted, doubled, renamed or
    moved, with a statement of their digests."""
    names = (DATA, *(file.path for file in scene.body.evidence))
    records = scene.files["trace.jsonl"].split(b"\n")
    while True:
        name, at, place = rng.choice(names), rng.random(), rng.randrange(len(records))
        way = rng.choice(("flip", "cut", "append", "gone", "drop", "double", "rename", "slice"))
        if name == DATA and way in ("drop", "double", "rename", "slice"):
            way = "flip"

        def run(name: str = name, at: float = at, place: int = place, way: str = way) -> Tried:
            bundle, old = scene.bundle, scene.files[name]
            index = int(at * len(old))
            what = f"{name}: {way} at {index}"
            if way in ("drop", "double", "rename", "slice"):
                one = json.loads(records[place])
                one["request"] = f"{DATA}:{'x' * (1 + int(at * 5))}"
                moved = json.loads(records[place])
                moved["slices"] = ["first"] if at < 0.5 else []
                new = {
                    "drop": [*records[:place], *records[place + 1 :]],
                    "double": [*records, records[place]],
                    "rename": [*records[:place], json.dumps(one).encode(), *records[place + 1 :]],
                    "slice": [*records[:place], json.dumps(moved).encode(), *records[place + 1 :]],
                }[way]
                data = b"\n".join(new)
                name, what = "trace.jsonl", f"record {place}: {way} {at:.3f}, signed anew"
                files = tuple(
                    dataclasses.replace(f, sha256=hashlib.sha256(data).hexdigest())
                    if f.path == name
                    else f
                    for f in scene.body.evidence
                )
                bundle = scene.signed(
                    payload_bytes(dataclasses.replace(scene.body, evidence=files))
                )
            else:
                changed = old[:index] + bytes([old[index] ^ 1]) + old[index + 1 :]
                data = {"flip": changed, "cut": old[:index], "append": old + b" ", "gone": b""}[way]
            path = scene.folder / name
            path.unlink() if way == "gone" else path.write_bytes(data)
            accepted = scene.check(bundle, recheck=False).accepted
            path.write_bytes(scene.files[name])
            return Tried("trace", what, accepted)

        yield run


def mutants_of_path(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield statements with other paths of proofs and evidence, signed anew, and moved files."""
    marks = ("..", ".", "/", "\\", "\0", ":", "~", " ", "%2e", "\u2025", "\n", "a", "")
    names = (PROOF, *(file.path for file in scene.body.evidence))
    outside = scene.folder.parent / f"{scene.folder.name}-outside"
    outside.mkdir(exist_ok=True)
    for name in names:
        (outside / name).write_bytes(scene.files[name])
    while True:
        name = rng.choice(names)
        path = "".join(rng.choice((*marks, name, outside.name)) for _ in range(rng.randint(1, 4)))

        def run(name: str = name, path: str = path) -> Tried:
            if path == name:
                return Tried("path", path, False)
            statement = copy.deepcopy(scene.statement)
            predicate = statement["predicate"]
            if name == PROOF:
                predicate["clauses"][0]["proofPath"] = path
            else:
                (item,) = [f for f in predicate["evidence"] if f["path"] == name]
                item["path"] = path
            payload = json.dumps(statement, ensure_ascii=False).encode()
            accepted = scene.check(scene.signed(payload), recheck=False).accepted
            return Tried("path", f"{name!r} as {path!r}", accepted)

        yield run


def mutants_of_run_checkpoint(scene: Scene, rng: random.Random) -> Iterator[Mutant]:
    """Yield run checkpoints changed by someone who can write them but not read the secret."""
    kept = {f"answer {n}": bytes(rng.randbytes(40)) for n in range(6)}
    path = scene.folder.parent / f"{scene.folder.name}.run-checkpoint"

    def written() -> tuple[bytes, list[tuple[bytes, bytes, bytes]]]:
        path.unlink(missing_ok=True)
        checkpoint = RunCheckpoint(path)
        checkpoint.open("key")
        for name, content in kept.items():
            checkpoint.keep_note(name, content)
        checkpoint.close()
        data = path.read_bytes()
        return data, [
            (kind, content, code) for kind, content, code, _ in run_checkpoints._frames(data)
        ]

    whole, frames = written()
    _, others = written()
    while True:
        way = rng.choice(("flip", "cut", "forged", "unkeyed", "swap", "leave out", "other"))
        at, place = rng.randrange(len(whole)), rng.randrange(1, len(frames))
        secret, bit = rng.randbytes(32), rng.randrange(8)

        def run(
            way: str = way, at: int = at, place: int = place, secret: bytes = secret, bit: int = bit
        ) -> Tried:
            kind, content, _ = frames[place]
            forged = content[:-1] + bytes([content[-1] ^ 1 << bit])
            own = list(frames)
            match way:
                case "flip":
                    data = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
                case "cut":
                    data = whole[:at]
                case "forged":
                    before = own[place - 1][2]
                    seal = hmac.new(secret, digestmod="sha256")
                    for part in (before, kind, forged):
                        seal.update(len(part).to_bytes(8, "little") + part)
                    own[place] = (kind, forged, seal.digest())
                    data = _joined(own)
                case "unkeyed":
                    own[place] = (kind, forged, hashlib.sha256(kind + forged).digest())
                    data = _joined(own)
                case "swap":
                    after = 1 + place % (len(own) - 1)
                    own[place], own[after] = own[after], own[place]
                    data = _joined(own)
                case "leave out":
                    data = _joined([*own[:place], *own[place + 1 :]])
                case _:
                    data = _joined([*own[:place], *others[place:]])
            path.write_bytes(data)
            checkpoint = RunCheckpoint(path)
            checkpoint.open("key")
            found = {name: checkpoint.note(name) for name in kept}
            checkpoint.close()
            taken = {name: note for name, note in found.items() if note is not None}
            order = list(kept)
            first = taken == {name: kept[name] for name in order[: len(taken)]}
            return Tried("run-checkpoint", f"{way} record {place} byte {at}", not first)

        yield run


def _joined(frames: list[tuple[bytes, bytes, bytes]]) -> bytes:
    return b"".join(
        run_checkpoints._HEAD.pack(run_checkpoints._MARK, kind, len(content), code) + content
        for kind, content, code in frames
    )


GENERATORS: Mapping[str, Callable[[Scene, random.Random], Iterator[Mutant]]] = {
    "statement": mutants_of_statement,
    "envelope": mutants_of_envelope,
    "proof": mutants_of_proof,
    "trace": mutants_of_trace,
    "path": mutants_of_path,
    "run-checkpoint": mutants_of_run_checkpoint,
}
SHARES = {
    "statement": 0.30, "envelope": 0.20, "proof": 0.06, "trace": 0.20, "path": 0.10,
    "run-checkpoint": 0.14,
}  # fmt: skip


@dataclass
class Tally:
    """Numbers of mutants by kind, those accepted by an allowing row, and those accepted wrongly."""

    tried: Counter[str] = field(default_factory=Counter)
    accepted: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[Tried] = field(default_factory=list)

    def add(self, found: Tried) -> None:
        """Add one result."""
        self.tried[found.kind] += 1
        if found.wrong:
            self.wrong.append(found)
        elif found.accepted:
            self.accepted[found.kind, found.reason] += 1

    def join(self, other: Tally) -> None:
        """Add the results of another tally."""
        self.tried += other.tried
        self.accepted += other.accepted
        self.wrong += other.wrong


def part(kind: str, count: int, seed: int) -> Tally:
    """Try `count` mutants of a kind in a new scene."""
    found = Tally()
    with tempfile.TemporaryDirectory(prefix="kcdsl-trust-") as place:
        scene = Scene(Path(place) / "scene")
        valid = scene.check(scene.bundle)
        if not valid.accepted:
            raise RuntimeError(f"the certificate is not valid to begin with: {valid.to_json()}")
        for mutant in islice(GENERATORS[kind](scene, random.Random(f"{kind} {seed}")), count):
            found.add(mutant())
        scene.restore()
        if not scene.check(scene.bundle).accepted:
            raise RuntimeError(f"the certificate is not valid after the {kind} mutants")
    return found


def campaign(count: int, seed: int = 0, jobs: int = 2) -> Tally:
    """Try `count` mutants of all kinds in `jobs` processes; return the results."""
    asked = [(kind, round(count * share)) for kind, share in SHARES.items()]
    asked[0] = (asked[0][0], asked[0][1] + count - sum(n for _, n in asked))
    pieces = [
        (k, n // jobs + (j < n % jobs), seed * jobs + j) for k, n in asked for j in range(jobs)
    ]
    whole = Tally()
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(part, *zip(*pieces, strict=True)):
            whole.join(found)
    return whole


def main() -> int:
    """Run a campaign and print its results; return 1 if a mutant was accepted wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    found = campaign(options.count, options.seed, options.jobs)
    for kind in KINDS:
        print(f"{kind}: {found.tried[kind]} tried")
    print("accepted although changed:")
    for (kind, reason), number in sorted(found.accepted.items()):
        print(f"  {kind}: {number} x {reason}")
    for one in found.wrong:
        print(f"WRONG {one.kind}: {one.what}")
    seconds = time.monotonic() - started
    print(f"{found.tried.total()} mutants, {len(found.wrong)} wrong, {seconds:.0f} s")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
