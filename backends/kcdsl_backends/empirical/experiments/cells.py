"""Cells of an experiment: what each came to, remembered in a folder.

A cell is one JSON file, written whole. It belongs to what it was measured of: the digests of
contract, model and data, the seed and the versions. Another of these, and it is measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl import __version__
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.files import file_digest
from kcdsl.source.writing import write_bytes

CELL_SCHEMA = "kcdsl.cell/1"


def manifest(program: Program, base: Path, seed: int, **more: Any) -> dict[str, Any]:
    """Return what an experiment is of: digests of contract, weights and data; seed; versions.

    A file that is not there has no digest; what reads it refuses it.
    """
    from importlib.metadata import version

    names = [program.model.checkpoint, program.data, *(s.data for s in program.slices)]
    files = {
        str(name): f"sha256:{file_digest(base / name)}"
        for name in dict.fromkeys(name for name in names if name is not None)
        if (base / name).is_file()
    }
    return {
        "contract": {
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program).removeprefix('sha256:')}",
        },
        "files": files,
        "seed": seed,
        "versions": {
            "kcdsl": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "machine": platform.machine(),
        },
        **more,
    }


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one experiment in a folder; `fresh` measures all of them again."""

    folder: Path
    of: Mapping[str, Any]
    fresh: bool = False

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
        document = {"schema": CELL_SCHEMA, "key": key, "cell": cell}
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        write_bytes(self._file(name), text.encode())
        return cell

    def _known(self, name: str, key: str) -> dict[str, Any] | None:
        try:
            document = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict) or document.get("key") != key:
            return None
        cell = document.get("cell")
        return cell if isinstance(cell, dict) else None

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _key(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


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
