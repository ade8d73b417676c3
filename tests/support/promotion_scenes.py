"""The tiny contract during promotion: certificates, reports, windows of traffic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kcdsl.api.certificates import CheckSettings
from kcdsl.api.promotion import PromoteSettings, promote
from kcdsl.check.compile import load_program
from kcdsl.release.issue import issue
from kcdsl.release.register import Register
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.signatures import SigningKey, load_private
from kcdsl_certs.statement import CertifiedClause
from tests.support.commands import run_here
from tests.support.release_scenes import evidence_of, results, stand_in, tiny

START = datetime.fromisoformat("2026-11-30T12:00:00+00:00")
HOUR = timedelta(hours=1)
SLOT = "chat/production"


@dataclass
class Pipeline:
    """A folder with the tiny contract, a key, a register and a settable clock."""

    folder: Path
    now: datetime = START
    made: int = 0
    window: timedelta = HOUR
    requests: int = 100
    keys: tuple[str, ...] = ("release.key",)
    """The files of the keys that sign certificates."""
    url: str | None = None
    """The URL of the register; None for a file in the folder."""

    @classmethod
    def of(cls, folder: Path, url: str | None = None) -> Pipeline:
        """Write the contract and a key, and make the register."""
        tiny(folder)
        assert run_here("keygen", "-o", "release.key", cwd=folder).code == 0
        pipeline = cls(folder, url=url)
        with Register.open(pipeline.place, create=True, clock=lambda: START):
            return pipeline

    @property
    def place(self) -> str:
        """Return where the register is."""
        return self.url or str(self.folder / "register.db")

    @property
    def contract(self) -> Path:
        """Return the contract."""
        return self.folder / "contract.yaml"

    def results(self) -> list[CertifiedClause]:
        """Return results that show every clause of the contract as it is now."""
        program = load_program(self.contract)
        proof = stand_in(program, self.folder)
        return results(program, self.folder, proof_reference("N-ATTN-0", proof))

    def private_keys(self) -> list[SigningKey]:
        """Return the keys that sign certificates."""
        return [load_private((self.folder / name).read_bytes()) for name in self.keys]

    def certificate(
        self,
        stage: str,
        clauses: Sequence[CertifiedClause] | None = None,
        days: int = 30,
    ) -> Path:
        """Issue a certificate of a stage now, with its evidence beside it."""
        self.made += 1
        out = self.folder / f"out-{self.made}"
        program = load_program(self.contract)
        found = list(self.results() if clauses is None else clauses)
        write_bytes(out / "N-ATTN-0.proof.json", stand_in(program, self.folder))
        measured = [c for c in found if not c.evidence.is_proof]
        bundle = issue(
            program=program,
            base=self.folder,
            clauses=found,
            keys=self.private_keys(),
            clock=lambda: self.now,
            stage=stage,
            lifetime=timedelta(days=days),
            evidence=evidence_of(program, out, measured),
        )
        path = out / f"{stage}.cert.json"
        write_bytes(path, bundle)
        return path

    def traffic(
        self, stage: str, *, kl: float = 0.001, beyond: int = 0, n: int = 600, **options: Any
    ) -> Path:
        """Log an hour of traffic and aggregate it: `beyond` of n requests have a drift of 0.05.

        Advances the clock to the end of the window.
        """
        self.made += 1
        rows = range(n)
        columns = {
            "request": [f"{self.made}-{i}" for i in rows],
            "length": [10] * n,
            "kl": [0.05 if i < beyond else kl for i in rows],
            "tv": [0.01] * n,
        }
        table = self.folder / f"traffic-{self.made}.parquet"
        pq.write_table(pa.table({**columns, **options.pop("columns", {})}), table)
        start, self.now = self.now, self.now + HOUR
        return self.aggregate(stage, [table], start, self.now)

    def aggregate(self, stage: str, tables: Sequence[Path], start: datetime, end: datetime) -> Path:
        """Run `kcdsl aggregate` on tables as a window."""
        output = self.folder / f"window-{self.made}.json"
        times = ("--from", time_text(start), "--until", time_text(end))
        ran = run_here(
            "aggregate", *map(str, tables), "--contract", "contract.yaml", "--stage", stage,
            *times, "-o", output.name, cwd=self.folder,
        )  # fmt: skip
        assert output.is_file(), (ran.code, ran.stderr)
        return output

    def promote(self, stage: str, *evidence: Path, **changes: Any) -> Any:
        """Run `promote` at the present time; return its result with the step."""
        settings = PromoteSettings(
            register=self.place,
            slot=SLOT,
            stage=stage,
            evidence=evidence,
            contract=str(self.contract),
            window=self.window,
            requests=self.requests,
            checks=CheckSettings(key=(str(self.folder / "release.key.pub"),)),
            clock=lambda: self.now,
        )
        return promote(replace(settings, **changes))

    def copy(self, folder: Path) -> Pipeline:
        """Return the same scene in another folder."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return replace(self, folder=folder)

    def until(self, stage: str) -> None:
        """Advance the triple into a stage."""
        for one in ("offline-ci", "shadow", "canary"):
            if one == stage:
                return
            self.pass_stage(one)

    def pass_stage(self, stage: str) -> Any:
        """Advance the triple through a stage."""
        self.now += timedelta(minutes=1)
        evidence = [self.certificate(stage)]
        if stage != "offline-ci":
            evidence.append(self.traffic(stage))
        found = self.promote(stage, *evidence)
        assert found.exit == 0, (found.step, found.unused, found.invalid)
        return found

    def register(self) -> Register:
        """Open the register."""
        return Register.open(self.place, clock=lambda: self.now)

    def change_weights(self, *values: float) -> None:
        """Write other weights."""
        from tests.support.release_scenes import weights

        (self.folder / "model.safetensors").write_bytes(weights(*values))


def edited(path: Path, **fields: Any) -> Path:
    """Write a JSON document again with other fields; return its path."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for name, value in fields.items():
        *way, last = name.split("__")
        inner = document
        for step in way:
            inner = inner[step]
        inner[last] = value
    other = path.with_name(f"edited-{path.name}")
    other.write_text(json.dumps(document), encoding="utf-8")
    return other
