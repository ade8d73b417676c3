"""Cells of an experiment: what each came to, remembered in a folder.

A cell is one JSON file, written whole. It belongs to what it was measured of: the digests of
contract, weights, data and the files that belong to them, the seed, the versions and the processor.
Another of these, and it is measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kcdsl import __version__
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts, file_digest
from kcdsl.model.own_code import imported_code
from kcdsl.release.artefacts import companions, data_digests
from kcdsl.source.files import is_file, read_bytes
from kcdsl.source.writing import write_bytes
from kcdsl_backends.secret import sealed

Prepare = Callable[..., Any]
"""Loads a contract: `EmpiricalBackend.prepare`."""
CELL_SCHEMA = "kcdsl.cell/2"


def manifest(program: Program, base: Path, seed: int, **more: Any) -> dict[str, Any]:
    """Return what an experiment is of: digests of the contract and of every file that its numbers
    rest on; seed; versions and processor.

    A file that is not there has no digest; what reads it refuses it.
    """
    files: dict[str, str] = {}
    artefacts = Artefacts.of(base)
    for read in (_weights, _companions, data_digests):
        with suppress(Refusal):
            files.update(read(program, artefacts))
    return {
        "contract": {
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program).removeprefix('sha256:')}",
        },
        "files": {name: f"sha256:{digest}" for name, digest in sorted(files.items())},
        "seed": seed,
        "versions": {
            "kcdsl": __version__,
            "python": platform.python_version(),
            **_libraries(),
            "machine": platform.machine(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        },
        **more,
    }


def _weights(program: Program, artefacts: Artefacts) -> dict[str, str]:
    """Return the digest of the checkpoint, of every file of it where it is a folder."""
    name = program.model.checkpoint
    path = artefacts.locate(name)
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return {f"{name}/{file.relative_to(path)}": file_digest(file) for file in inside}
    return {name: file_digest(path)}


def _companions(program: Program, artefacts: Artefacts) -> dict[str, str]:
    return {f"({role})": digest for role, digest in companions(program.model, artefacts).items()}


def _libraries() -> dict[str, str]:
    """Return the versions of the libraries that run kernels, as far as they are installed."""
    found = {}
    for name in ("torch", "torchao", "onnxruntime", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one experiment in a folder; `fresh` measures all of them again.

    A cell carries an authentication code under the secret of the user (`kcdsl_backends.secret`):
    one that anybody changed, wrote or moved who cannot read the secret is measured again. So is one
    for which own code of the contract was imported that is another now.
    """

    folder: Path
    of: Mapping[str, Any]
    fresh: bool = False
    base: Path = Path()
    """The folder of the contract."""

    def cell(
        self, name: str, spec: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a cell: as it was remembered, or as it is measured now.

        A refusal is what a cell came to, with its reason; so nothing is silently absent. It is not
        remembered: what is missing now may be there next time.
        """
        key = _key({"of": self.of, "spec": spec})
        known = None if self.fresh else self._known(name, key)
        if known is not None:
            return known
        try:
            cell = {**spec, "status": "ran", "reason": None, **measure()}
        except Refusal as error:
            first = error.diagnostics[0]
            return {**spec, "status": "not_run", "reason": f"{first.code}: {first.message}"}
        code = {str(path): digest for path, (_, digest) in self._code().items()}
        document = {"schema": CELL_SCHEMA, "key": key, "code": code, "cell": cell}
        document["seal"] = _seal(name, document)
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        write_bytes(self._file(name), text.encode(), own_name=True)
        return cell

    def _known(self, name: str, key: str) -> dict[str, Any] | None:
        try:
            document = json.loads(read_bytes(self._file(name)))
        except (Refusal, ValueError):
            return None
        if not isinstance(document, dict) or document.get("key") != key:
            return None
        seal = document.pop("seal", None)
        if not isinstance(seal, str) or not compare_digest(
            seal.encode(), _seal(name, document).encode()
        ):
            return None
        if any(not _is_still(Path(path), digest) for path, digest in document["code"].items()):
            return None
        cell: dict[str, Any] = document["cell"]
        return cell

    def _code(self) -> Mapping[Path, tuple[str, str]]:
        return imported_code(Artefacts.of(self.base))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _is_still(path: Path, digest: str) -> bool:
    return is_file(path) and file_digest(path) == digest


def _seal(name: str, document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return sealed(b"cell", name.encode(), text.encode()).hex()


def _key(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def failed_checks(prechecks: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return name and detail of the preconditions that failed."""
    return [
        {"name": check["name"], "detail": check["detail"]}
        for check in prechecks
        if check["outcome"] == "failed"
    ]


def pass_record(row: Mapping[str, Any], narrow: Sequence[str]) -> dict[str, Any]:
    """Return a row of a report as a cell shows it: its pass rate with limits (Clopper-Pearson, each
    one-sided at the confidence of the clause), and why it is narrow."""
    beyond = row["exceedance"]
    rates: dict[str, float | None] = {"rate": None, "low": None, "high": None}
    if beyond is not None:
        n, k = beyond["n"], beyond["k"]
        rates["rate"] = (n - k) / n
        rates["low"] = None if beyond["high"] is None else 1 - beyond["high"]
        rates["high"] = None if beyond["low"] is None else 1 - beyond["low"]
    return {
        "clause": row["clause"],
        "slice": row["slice"],
        "requirement": row["requirement"],
        "metric": row["metric"],
        "op": row["op"],
        "value": row["value"],
        "threshold": row["threshold"],
        "unit": row["unit"],
        "verdict": row["verdict"],
        "reason": row["reason"],
        "n": row["n"] if beyond is None else beyond["n"],
        "passed": None if beyond is None else beyond["n"] - beyond["k"],
        **rates,
        "narrow": list(narrow),
    }
