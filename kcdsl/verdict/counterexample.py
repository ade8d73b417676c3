"""Counterexamples as documents: a run that breaks a clause, with everything needed to repeat it.

The schema is counterexample.schema.json; docs/reference/counterexamples.md describes the fields.
The document is canonical JSON (RFC 8785); `sha256` is the digest of all other fields.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import COUNTEREXAMPLE_FILE, FILE_MISSING
from kcdsl.exits import Exit
from kcdsl.ir.terms import Program
from kcdsl.route.goals import Goal
from kcdsl.source.files import open_regular

COUNTEREXAMPLE_SCHEMA = "kcdsl.counterexample/1"
REPLAY_SCHEMA = "kcdsl.replay/1"
LARGEST = 2**30
"""The largest document in bytes."""

_SIDES = {"train", "infer"}
_FIELDS = {
    "schema": str,
    "contract": dict,
    "clause": str,
    "block": str,
    "functional": str,
    "limit": dict,
    "case": dict,
    "checkpoint": dict,
    "graph": dict,
    "numerics": dict,
    "region": dict,
    "input": (dict, type(None)),
    "symbols": dict,
    "orders": dict,
    "attained": dict,
    "sha256": str,
}
_INNER: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "contract": {"name": str, "version": str, "sha256": str},
    "limit": {"op": str, "value": str},
    "case": {"name": str, "tokens": list},
    "checkpoint": {"sha256": str},
    "graph": {"sha256": str},
    "numerics": {"train": dict, "infer": dict},
    "region": {"kind": str, "centre": (dict, type(None)), "radius": (dict, type(None))},
    "symbols": {"train": dict, "infer": dict},
    "orders": {"train": dict, "infer": dict},
    "attained": {"value": str, "row": list, "column": int, "train": str, "infer": str},
}
_ARRAY: Mapping[str, type | tuple[type, ...]] = {"kind": str, "shape": list, "data": str}


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of simulating the run of a counterexample.

    `value` is the functional of the drift, rounded down; `exact`: it equals the number of the
    document bit for bit. `symbols` counts the nonzero rounding symbols, `ordered` the sums with a
    concrete order. `moved` is the distance of the region from the one this machine computes (0:
    the same).
    """

    value: float
    row: tuple[int, ...]
    column: int
    train: float
    infer: float
    exact: bool
    refutes: bool
    symbols: int
    ordered: int
    moved: float

    @property
    def exit(self) -> Exit:
        """Return 1 where the run breaks the clause, 3 where it does not."""
        return Exit.VIOLATED if self.refutes else Exit.INCONCLUSIVE


def counterexample(program: Program, goal: Goal, record: Mapping[str, Any]) -> bytes:
    """Return the document of a run that breaks a goal.

    `record` has the backend's fields: case, checkpoint, graph, numerics, region, input, symbols,
    orders, attained.
    """
    from kcdsl.ir.canonical import digest

    if goal.threshold is None:
        raise ValueError("the goal has no limit that a run could exceed")
    body = {
        "schema": COUNTEREXAMPLE_SCHEMA,
        "contract": {"name": program.name, "version": program.version, "sha256": digest(program)},
        "clause": goal.clause.id,
        "block": goal.block,
        "functional": goal.functional,
        "limit": {"op": goal.op, "value": str(goal.threshold)},
        **record,
    }
    return canonical(body | {"sha256": digest_of(body)})


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of a document."""
    import rfc8785

    return bytes(rfc8785.dumps(dict(document)))


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of a document without its field `sha256`."""
    rest = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(canonical(rest)).hexdigest()


def read_counterexample(path: Path) -> dict[str, Any]:
    """Read a document and check its form and its digest; raises Refusal where that fails."""
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.encoding.strict import strict_load

    try:
        with open_regular(path) as stream:
            document: Any = strict_load(stream.read(LARGEST + 1), LARGEST)
    except OSError as error:
        raise refuse(
            FILE_MISSING,
            f"{path} cannot be read: {error.strerror}",
            help="name the *.counterexample.json that `kcdsl verify` wrote",
        ) from error
    except Rejected as error:
        raise unusable(path, f"{error.detail} ({error.reason})") from error
    wrong = _misshapen(document)
    if wrong is not None:
        raise unusable(path, wrong)
    if document["sha256"] != digest_of(document):
        raise unusable(path, "it was changed after it was written: its digest is another")
    found: dict[str, Any] = document
    return found


def unusable(path: Path, why: str) -> Refusal:
    """Return the refusal of a document that is no counterexample."""
    return refuse(
        COUNTEREXAMPLE_FILE,
        f"{path} is no usable counterexample: {why}",
        help="`kcdsl verify` writes one beside its certificate for every clause that is violated; "
        "an evaluation is replayed from its trace.parquet",
    )


def _misshapen(document: Any) -> str | None:
    """Return a defect in the form of a document; None where it is well formed."""
    if not isinstance(document, dict) or document.get("schema") != COUNTEREXAMPLE_SCHEMA:
        return f"its schema is not {COUNTEREXAMPLE_SCHEMA}"
    problem = _fields(document, _FIELDS, "the document")
    for name, fields in _INNER.items():
        problem = problem or _fields(document[name], fields, f"`{name}`")
    if problem is not None:
        return problem
    known = [document["input"], document["region"]["centre"], document["region"]["radius"]]
    arrays = [array for array in known if array is not None]
    arrays += [value for side in _SIDES for value in document["symbols"][side].values()]
    for array in arrays:
        problem = problem or _fields(array, _ARRAY, "an array")
    if problem is not None:
        return problem
    counts = [*document["case"]["tokens"], *document["attained"]["row"]]
    counts += [size for array in arrays for size in array["shape"]]
    if not all(type(count) is int and count >= 0 for count in counts):
        return "tokens, shapes and places are numbers from 0 on"
    orders = [order for side in _SIDES for order in document["orders"][side].values()]
    if not all(isinstance(order, str) for order in orders):
        return "an order is a name"
    numbers = [document["attained"][name] for name in ("value", "train", "infer")]
    return None if all(map(_finite, numbers)) else "what is attained are finite numbers"


def _fields(value: Any, fields: Mapping[str, Any], what: str) -> str | None:
    if not isinstance(value, dict):
        return f"{what} is no object"
    for name, kind in fields.items():
        if name not in value:
            return f"{what} lacks `{name}`"
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            return f"`{name}` of {what} is of another kind"
    extra = sorted(set(value) - set(fields))
    return f"{what} has `{extra[0]}`, which means nothing" if extra else None


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float.fromhex(text))
    except (ValueError, OverflowError):
        return False
