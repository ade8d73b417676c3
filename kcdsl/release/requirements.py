"""Requirements of a verifier: the clauses of a contract, and the deployed triple.

The triple is built from the files to be deployed; kernel fingerprints may come from a file. No
tensor library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, KERNELS_FILE
from kcdsl.ir.obligations import (
    Obligation,
    conjunction,
    obligations_of,
    regions_of,
    slices_of,
)
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    AnyOf,
    Arith,
    FieldTest,
    HasFields,
    KernelRef,
    Metric,
    NoFlip,
    NoneOf,
    Norm,
    Number,
    Predicate,
    Program,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.ir.terms import Region as DemandedRegion
from kcdsl.metrics import find_metric
from kcdsl.model.files import Artefacts
from kcdsl.model.registry import is_encoder
from kcdsl.release.artefacts import checkpoint_manifest, companions, data_digests
from kcdsl.source.files import open_regular
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest, strict_load
from kcdsl_certs.statement import (
    ChainTerms,
    Checkpoint,
    Comparison,
    Contract,
    Evidence,
    Expectation,
    Kernel,
    Quantity,
    Region,
    RequiredClause,
    SliceSource,
    Triple,
)
from kcdsl_certs.statement.manifest import Told
from kcdsl_certs.verification.rows import BYTES


def required_clauses(program: Program, base: Path | Artefacts) -> tuple[RequiredClause, ...]:
    """Return every (clause, slice) of the contract, in its order.

    A clause with a table is required on each bucket of its slices separately, with its threshold.
    `base` is the folder of the contract; the data of the slices is hashed. Raises Refusal where a
    data file is missing.
    """
    files = Artefacts.of(base)
    program = expand_tables(program)
    digests: dict[str, str | None] = {}
    required: list[RequiredClause] = []
    for clause in program.clauses:
        regions = {region.slice: region for region in regions_of(clause.require)}
        for name in slices_of(clause):
            region = regions.get(name) if name is not None else None
            if name is not None and name not in digests:
                digests[name] = slice_digest(program, files, name)
            required.append(
                RequiredClause(
                    id=clause.id,
                    slice=name,
                    alternatives=conjunction(
                        [stated_alternatives(one, program) for one in obligations_of(clause, name)]
                    ),
                    budget=None if clause.budget is None else clause.budget.rate,
                    evidence=None if clause.evidence is None else Evidence(clause.evidence.value),
                    slice_digest=None if name is None else digests[name],
                    region=None if region is None else _region(region),
                    inside=() if name is None else containing_slices(program, name),
                )
            )
    return tuple(required)


def stated_alternatives(
    obligation: Obligation, program: Program
) -> tuple[tuple[Comparison, ...], ...]:
    """Return the alternatives of an obligation in the form of a certificate; none where it has no
    normal form."""
    return tuple(
        tuple(
            Comparison(
                obligation.id,
                quantity_of(one.quantity),
                one.op,
                one.threshold,
                one.unit,
                _chain(one.quantity, program),
            )
            for one in choice
        )
        for choice in obligation.alternatives
    )


def slice_digest(program: Program, files: Artefacts, name: str) -> str | None:
    """Return the digest that pins a slice: its data file and its predicate; None without data."""
    declared = program.slice(name)
    data = declared.data if declared.data is not None else program.data
    if data is None:
        return None
    record = {"data": files.digest(files.find(data)), "where": _predicate(declared.where)}
    return canonical_digest(record)


def slice_sources(program: Program, files: Artefacts) -> dict[str, SliceSource]:
    """Return the source of rows of every slice with data, buckets of tables included.

    A model without a tokenizer reads bytes. Kernels that sample after prompts, or read rollouts,
    are measured in other units than rows.
    """
    program = expand_tables(program)
    beside = companions(replace(program.model, served=None), files)
    tokens = "other" if "tokenizer" in beside else BYTES
    kernels = (program.train, program.infer)
    drawn = any(k.service is not None or k.recording is not None for k in kernels)
    found = {}
    for declared in program.slices:
        data = declared.data if declared.data is not None else program.data
        if data is not None:
            where, units = _predicate(declared.where), "other" if drawn else "rows"
            found[declared.name] = SliceSource(data, where, tokens, units)
    return found


def containing_slices(program: Program, name: str) -> tuple[str, ...]:
    """Return the slices that contain this one syntactically: same data, fewer conditions."""
    inner = program.slice(name)
    return tuple(
        outer.name
        for outer in program.slices
        if (outer.data or program.data) == (inner.data or program.data)
        and _conditions(outer.where) <= _conditions(inner.where)
    )


def _conditions(predicate: Predicate) -> frozenset[Predicate]:
    return frozenset(predicate.parts if isinstance(predicate, AllOf) else (predicate,))


def _predicate(predicate: Predicate) -> Any:
    match predicate:
        case FieldTest(field, op, value):
            stated = {"real": real_text(value)} if isinstance(value, Fraction) else value
            return {"field": field, "op": op, "value": stated}
        case AllOf(parts):
            return {"all": [_predicate(part) for part in parts]}
        case AnyOf(parts):
            return {"any": [_predicate(part) for part in parts]}
        case NoneOf(part):
            return {"none": _predicate(part)}


# --- comparisons ---------------------------------------------------------------------------------


def quantity_of(term: Term | NoFlip | HasFields) -> Quantity:
    """Return the quantity of a comparison in the form of a certificate."""
    match term:
        case Number(value):
            return Quantity("number", value=value)
        case Metric(name):
            return Quantity("metric", name)
        case Statistic(kind, of, q):
            return Quantity("statistic", kind, (quantity_of(of),), q=q)
        case Norm(kind, of):
            return Quantity("norm", kind, block=of.block, measured=of.measured)
        case Abs(of):
            return Quantity("abs", of=(quantity_of(of),))
        case Arith(op, left, right):
            return Quantity("arithmetic", op, (quantity_of(left), quantity_of(right)))
        case NoFlip(block, _, k):
            return Quantity("margin", block=block, k=k)
        case HasFields(fields):
            return Quantity("share", fields=fields)
        case TableValue(name):
            raise ValueError(f"table({name}) was not expanded")


def _region(region: DemandedRegion) -> Region:
    return Region(region.kind.value, region.slice, region.radius, region.longest)


def _chain(quantity: Term | NoFlip | HasFields, program: Program) -> ChainTerms | None:
    """Return the inputs of the bound chain for a quantity; None where the chain does not bound
    it."""
    metric = None if isinstance(quantity, NoFlip | HasFields) else _metric_inside(quantity)
    if metric is None or is_encoder(program.model.architecture):
        return None
    constants = program.constants
    stated = tuple(
        (name, value)
        for name in ("advantage_max", "reward_range", "score_norm_max")
        if (value := getattr(constants, name)) is not None
    )
    return ChainTerms(metric, constants.temperature, stated)


def _metric_inside(term: Term) -> str | None:
    """Return the metric in a term that is its value or statistic: a bound of it bounds the term."""
    match term:
        case Metric(name):
            definition = find_metric(name)
            return name if definition is None else definition.name
        case Abs(of):
            return _metric_inside(of)
        case Statistic("mean" | "max" | "min" | "quantile" | "aggregate", of):
            return _metric_inside(of)
        case _:
            return None


# --- triple ---------------------------------------------------------------------------------------


Fingerprints = Mapping[str, Mapping[str, Any]]
"""Kernel fingerprints by role, "train" and "infer": plain data without floats."""


def build_triple(
    program: Program,
    base: Path | Artefacts,
    *,
    fingerprints: Fingerprints | None = None,
    checkpoint: Path | None = None,
    served: Path | None = None,
    told: Told | None = None,
) -> Triple:
    """Return the triple of a compiled contract whose folder is `base`.

    `fingerprints` are those of the deployed kernels, by default those on this machine.
    `checkpoint` and `served` replace paths of the contract. `told` is called with the progress of
    hashing. Raises Refusal where a file is missing or must not be trusted.
    """
    from kcdsl.ir.canonical import digest

    files = Artefacts.of(base)
    path = checkpoint if checkpoint is not None else files.locate(program.model.checkpoint)
    manifest = checkpoint_manifest(path, told)
    kernels = {}
    for role, ref in (("train", program.train), ("infer", program.infer)):
        given = None if fingerprints is None else fingerprints.get(role)
        kernels[role] = _kernel(
            ref, kernel_here(program, ref, files) if given is None else given, role
        )
    return Triple(
        Checkpoint.of(path.name, manifest, companions(program.model, files, served)),
        kernels["train"],
        kernels["infer"],
        Contract(program.name, program.version, digest(program).removeprefix("sha256:")),
    )


def kernel_here(
    program: Program, ref: KernelRef, files: Artefacts, device: str = "cpu"
) -> dict[str, Any]:
    """Return the fingerprint of a kernel on this machine; that of a recording comes from its files.

    Raises Refusal where a recording is missing.
    """
    from kcdsl.model.fingerprint import kernel_fingerprint  # needs numpy, which gates may not have

    found = kernel_fingerprint(ref, device)
    if ref.recording is None:
        return found
    logits = ref.recording.file
    if logits is not None:
        path = files.find(logits)
        return {**found, "recorded": {path.name: files.digest(path)}}
    data = (declared.data or program.data for declared in program.slices)
    names = sorted({name for name in data if name is not None})
    digests = {name: files.digest(files.find(name)) for name in names}
    return {**found, "recorded": digests}


def _kernel(ref: KernelRef, given: Mapping[str, Any], role: str) -> Kernel:
    kernel = Kernel(ref.run, dict(given))
    try:
        _ = kernel.digest
    except Rejected as error:
        raise refuse(
            KERNELS_FILE,
            f"the fingerprint of the {role} kernel has no canonical form: {error}",
            help="use kernels.json as `kcdsl evaluate` wrote it",
        ) from error
    return kernel


def build_expectation(
    program: Program,
    base: Path | Artefacts,
    *,
    fingerprints: Fingerprints | None = None,
    checkpoint: Path | None = None,
    served: Path | None = None,
    told: Told | None = None,
) -> Expectation:
    """Return the expectation of a verifier: triple, clauses, data digests, slices."""
    files = Artefacts.of(base)
    return Expectation(
        build_triple(
            *(program, files),
            fingerprints=fingerprints,
            checkpoint=checkpoint,
            served=served,
            told=told,
        ),
        required_clauses(program, files),
        data_digests(program, files),
        slice_sources(program, files),
    )


# --- the file of fingerprints ---------------------------------------------------------------------


KERNELS_SCHEMA = "kcdsl.kernels/1"
_LARGEST = 2**20


def kernels_document(fingerprints: Fingerprints) -> bytes:
    """Return the document `kcdsl.kernels/1` (kernels.schema.json) of both kernels."""
    document = {
        "schema": KERNELS_SCHEMA,
        "train": dict(fingerprints["train"]),
        "infer": dict(fingerprints["infer"]),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_kernels(path: Path) -> Fingerprints:
    """Read the fingerprints of `train` and `infer`; raises Refusal where that fails."""
    try:
        with open_regular(path) as stream:
            value: Any = strict_load(stream.read(_LARGEST + 1), _LARGEST)
    except OSError as error:
        raise refuse(
            FILE_MISSING,
            f"{path} cannot be read: {error.strerror}",
            help="name the kernels.json that `kcdsl evaluate` wrote",
        ) from error
    except Rejected as error:
        raise _refused(path, f": {error.detail} ({error.reason})") from error
    match value:
        case {"schema": schema, "train": dict(train), "infer": dict(infer), **rest}:
            if schema == KERNELS_SCHEMA and not rest:
                return {"train": train, "infer": infer}
        case _:
            pass
    raise _refused(path, "")


def _refused(path: Path, why: str) -> Refusal:
    return refuse(
        KERNELS_FILE,
        f"{path} is no document of the schema {KERNELS_SCHEMA}{why}",
        help="`kcdsl evaluate` writes one, kernels.json; it has the objects `train` and `infer`",
    )
