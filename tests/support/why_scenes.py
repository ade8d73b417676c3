"""Runs of two checkpoints with two kernel pairs on the same requests, and their register."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from kcdsl.api.causes import WhySettings, explain
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Clause
from kcdsl.release.register import Promotion, PromotionReason, PromotionState, Register, Run
from kcdsl.verdict.studies.causes import Explanation
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.table.evidence import EvidenceTable
from kcdsl_backends.empirical.table.trace import trace_bytes
from kcdsl_certs.statement import CertifiedClause, Checkpoint, Contract, Kernel, Scope, Triple
from tests.support.evidence import clause, evidence
from tests.support.registers import TRUSTED, bundle, clock, predicate, recorded

CLAUSES = (
    clause("N-KL", "quantile", "kl", "1/1000", q="9/10"),
    clause("N-MEAN", "mean", "tv", "1"),
)
COUNT, BAD = 40, 12
GOOD_KL, BAD_KL = 1e-4, 1e-2
FILES = {"previous": "old", "present": "new"}


def weights_of(name: str) -> str:
    """Return the sha256 of the one file of a checkpoint."""
    return hashlib.sha256(f"weights {name}".encode()).hexdigest()


def kernel_of(role: str, name: str) -> Kernel:
    """Return a kernel of a build."""
    run = {"train": "torch.eager", "infer": "torch.sdpa"}[role]
    build = name if role == "infer" else "the same"
    return Kernel(run, {"run": run, "software": {"torch": build}, "hardware": {"host": "ci"}})


@dataclass
class Scene:
    """A folder with traces and a register.

    `bad` is the number of requests beyond the threshold, by checkpoint and kernels ("old" or
    "new").
    """

    folder: Path
    bad: Mapping[tuple[str, str], int] = field(default_factory=dict)
    clauses: tuple[Clause, ...] = CLAUSES
    count: int = COUNT

    @property
    def place(self) -> Path:
        """Return the file of the register."""
        return self.folder / "register.db"

    def table(self, checkpoint: str, kernels: str, **changes: Any) -> EvidenceTable:
        """Return the measured values of a checkpoint with a kernel pair."""
        found = evidence(self.clauses, count=self.count, **changes)
        beyond = self.bad.get((checkpoint, kernels), 0)
        runs = {}
        for i, (key, run) in enumerate(found.runs.items()):
            worst = BAD_KL if i < beyond else GOOD_KL
            kl = np.full(run.unit.tokens, worst)
            values = {**run.unit.values, "kl": kl, "tv": np.sqrt(kl / 2)}
            runs[key] = replace(run, unit=replace(run.unit, values=values))
        prechecks = tuple(replace(one, outcome="passed") for one in found.prechecks)
        return replace(
            found,
            runs=runs,
            slices={"all": found.slices["all"]},
            certified={},
            floor={},
            crosschecks=(),
            prechecks=prechecks,
            contract={
                "name": "demo", "version": "1.0.0", "digest": f"sha256:{digest(found.program)}",
            },
            model={**found.model, "sha256": weights_of(checkpoint)},
            kernels={
                role: {
                    "run": found.kernels[role]["run"],
                    "digest": f"sha256:{kernel_of(role, kernels).digest}",
                    "fingerprint": kernel_of(role, kernels).fingerprint,
                }
                for role in ("train", "infer")
            },
        )  # fmt: skip

    def write(self, found: EvidenceTable, name: str) -> Path:
        """Write a trace."""
        path = self.folder / f"{name}.parquet"
        path.write_bytes(trace_bytes(found, conclude(found).to_json()))
        return path

    def trace(self, checkpoint: str, kernels: str) -> Path:
        """Write the trace of a checkpoint with a kernel pair, once."""
        path = self.folder / f"{checkpoint}-{kernels}.parquet"
        return path if path.exists() else self.write(self.table(checkpoint, kernels), path.stem)

    def triple(self, checkpoint: str, kernels: str) -> Triple:
        """Return the triple of a checkpoint with a pair of kernels."""
        weights = weights_of(checkpoint)
        root = hashlib.sha256(bytes.fromhex(weights)).hexdigest()
        named = hashlib.sha256(f"manifest {weights}".encode()).hexdigest()
        program = evidence(self.clauses, count=1).program
        return Triple(
            Checkpoint("model.safetensors", named, root),
            kernel_of("train", kernels),
            kernel_of("infer", kernels),
            Contract("demo", "1.0.0", digest(program)),
        )

    def register(self, *triples: Triple, promoted: bool = False) -> None:
        """Record triples in order; with `promoted`, each replaces the one before in a slot."""
        with Register.open(self.place, create=True, clock=clock) as register:
            for one in triples:
                register.record_triple(one)
                if promoted:
                    signed = recorded(register, bundle(predicate(one)))
                    slot = register.slot("chat/production")
                    decided = Promotion(
                        slot.name, one.digest, slot.triple, one.contract.digest, "full",
                        PromotionState.PROMOTED, certificates=(signed.identity,),
                    )  # fmt: skip
                    register.promote(slot.name, slot.version, decided)

    def refuse(
        self, triple: Triple, *reasons: PromotionReason, evidence: tuple[str, ...] = ()
    ) -> None:
        """Record that a triple was frozen."""
        with Register.open(self.place, create=True, clock=clock) as register:
            slot = register.slot("chat/production")
            decided = Promotion(
                slot.name, triple.digest, slot.triple, triple.contract.digest, "canary",
                PromotionState.FROZEN, reasons, evidence=evidence,
            )  # fmt: skip
            register.promote(slot.name, slot.version, decided)

    def certify(self, triple: Triple, result: CertifiedClause, sequence: int = 1) -> None:
        """Record a certificate of one result."""
        body = predicate(triple, sequence=sequence, verdict=result.verdict)
        body = replace(body, clauses=(result,), scope=Scope(True, ((result.id, result.slice),)))
        with Register.open(self.place, create=True, clock=clock) as register:
            recorded(register, bundle(body), TRUSTED)

    def record(self, path: Path, triple: Triple, *, trusted: bool = True) -> None:
        """Record the run of a trace, and mark it."""
        file = hashlib.sha256(path.read_bytes()).hexdigest()
        with Register.open(self.place, create=True, clock=clock) as register:
            register.record_triple(triple)
            run = register.record_run(Run("evaluate", triple.digest, "full", "1" * 64, file))
            if not trusted:
                register.mark_run(run.identity, trusted=False, reason="the machine overheated")

    def why(
        self,
        failed: tuple[str, str] | Path,
        *others: tuple[str, str] | Path,
        **more: Any,
    ) -> Explanation:
        """Explain a run by other runs."""
        paths = [one if isinstance(one, Path) else self.trace(*one) for one in (failed, *others)]
        more = {"register": str(self.place), "clock": clock, **more}
        return explain(WhySettings(trace=paths[0], evidence=[str(p) for p in paths[1:]], **more))


def both(folder: Path, broken: Collection[tuple[str, str]], bad: int = BAD) -> Scene:
    """Return a problem in which checkpoint and kernels changed, and some combinations fail."""
    problem = Scene(folder, dict.fromkeys(broken, bad))
    problem.register(problem.triple("old", "old"), problem.triple("new", "new"))
    return problem


def certified(**changes: Any) -> CertifiedClause:
    """Return a certified result of the clause N-KL."""
    found = predicate(Scene(Path()).triple("new", "new")).clauses[0]
    return replace(found, tau=Fraction(1, 1000), value=Fraction(1, 10000), **changes)
