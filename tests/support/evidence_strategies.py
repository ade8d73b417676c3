"""Hypothesis strategies for evidence, and bitwise comparison of values."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Budget,
    Clause,
    Compare,
    Connective,
    Drift,
    EvidenceKind,
    Family,
    FieldTest,
    Formula,
    HasFields,
    KernelRef,
    Level,
    Metric,
    ModelRef,
    Norm,
    Not,
    Number,
    Program,
    Quantified,
    Region,
    RegionKind,
    Slice,
    Statistic,
    TableRow,
    TableValue,
    Term,
    ThresholdTable,
    UserMetric,
)
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit, Timing
from kcdsl_backends.requests import Request

METRICS = ("kl", "tv", "latency", "measured_drift[attn_0].inf", "my_metric", "ünlike")
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_FLOATS = st.one_of(
    st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("<d", raw)[0]),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324]),
)
_RATES = st.fractions(0, 1, max_denominator=1000)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are bitwise equal; a tuple may have become a list."""
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name))
            for f in dataclasses.fields(one)
            if f.compare
        )
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and one.hex() == other.hex()
    return type(one) is type(other) and bool(one == other)


# --- arrays and units ----------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn, most: int = 5) -> np.ndarray:
    """Draw float64 values with arbitrary bits, including payloads of NaN."""
    raw = draw(st.binary(max_size=8 * most))
    some = draw(st.lists(_FLOATS, max_size=most))
    found = np.frombuffer(raw[: len(raw) // 8 * 8], dtype=np.float64)
    return np.concatenate([found, np.array(some, dtype=np.float64)])


def units(key: str) -> st.SearchStrategy[SamplingUnit]:
    """Draw the values of a request or a run of it."""
    values = st.dictionaries(st.sampled_from(METRICS), arrays(), max_size=4)
    return st.builds(
        SamplingUnit,
        st.just(key),
        st.integers(0, 2**40),
        values.map(lambda found: dict(sorted(found.items()))),
        st.none() | _TEXT,
        st.dictionaries(_TEXT, _TEXT, max_size=2),
    )


def _requests(key: str) -> st.SearchStrategy[Request]:
    fields = st.dictionaries(_TEXT, _TEXT | st.booleans() | st.fractions(), max_size=3)
    tokens = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
    return st.builds(Request, st.just(key), _TEXT, tokens, fields, st.integers(1, 10**6))


# --- programs ------------------------------------------------------------------------------------


def _terms() -> st.SearchStrategy[Term]:
    metric = st.sampled_from(["kl", "tv", "log_ratio", "my_metric"]).map(Metric)
    statistics = st.one_of(
        st.builds(Statistic, st.sampled_from(["mean", "max", "min"]), metric | metric.map(Abs)),
        st.builds(lambda of, q: Statistic("quantile", of, q), metric, _RATES),
    )
    norm = st.builds(
        lambda kind, variable: Norm(kind, Drift("attn_0", variable, True)),
        st.sampled_from(["inf", "2", "span"]),
        st.sampled_from(["x", "z"]),
    )
    numbers = st.fractions(max_denominator=10**6).map(Number)
    leaves = statistics | norm | numbers
    return leaves | st.builds(Arith, st.sampled_from(["+", "-", "*", "/"]), leaves, leaves)


def _formulas() -> st.SearchStrategy[Formula]:
    compares = st.builds(Compare, st.sampled_from(["<=", "<", ">=", ">", "=="]), _terms(), _terms())
    fields = st.permutations(["b", "rng_seed", "a"]).map(lambda names: HasFields(tuple(names)))
    leaves: st.SearchStrategy[Formula] = compares | fields

    def wider(inner: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
        parts = st.lists(inner, min_size=2, max_size=2).map(tuple)
        region = Region(RegionKind.POINTS, "few", Fraction(0))
        return st.one_of(
            inner.map(Not),
            st.builds(Connective, st.sampled_from(["and", "or", "implies"]), parts),
            st.builds(lambda body: Quantified("forall", "row", region, body), inner),
        )

    return st.recursive(leaves, wider, max_leaves=4)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a contract with arbitrary wording and order."""
    from kcdsl.ir.escalation import build_escalation

    row = TableRow(FieldTest("length", "<=", Fraction(draw(st.integers(1, 9)))), draw(_RATES))
    table = ThresholdTable("limits", "ratio", (row,), draw(st.none() | _RATES))
    own = UserMetric(
        "my_metric",
        "module:function",
        Family.NUMERICAL,
        "token",
        "lower",
        "nats",
        "nat",
        ("mean", "quantile"),
        ("infer_logits", "train_logits"),
        upper=draw(st.none() | st.fractions()),
    )
    of_table = Compare("<=", Statistic("max", Metric("kl")), TableValue("limits", "ratio"))
    names = draw(st.permutations(["Z-1", "A-1", "M-1"]))
    clauses = [
        Clause(
            name,
            draw(st.sampled_from(list(Family))),
            draw(_formulas()),
            draw(st.sampled_from(list(Level))),
            tuple(draw(st.permutations(["all", "few"])))[: draw(st.integers(1, 2))],
            draw(st.none() | st.builds(Budget, _RATES, st.sampled_from(["requests", "windows"]))),
            draw(st.none() | st.sampled_from(list(EvidenceKind))),
            draw(st.none() | _TEXT),
            draw(_TEXT),
            holdout=draw(st.booleans()),
        )
        for name in names
    ]
    clauses.append(Clause("T-1", Family.NUMERICAL, of_table, Level.L1, ("few",)))
    kernel = KernelRef("torch.eager", (("compute", "float32"),))
    return Program(
        draw(_TEXT),
        "1.0.0",
        ModelRef("model.safetensors", architecture="llama"),
        kernel,
        kernel,
        "rows.jsonl",
        tuple(draw(st.permutations([Slice("all"), Slice("few")]))),
        tuple(clauses),
        build_escalation({}, {}),
        tables=(table,),
        metrics=(own,),
    )


# --- evidence ------------------------------------------------------------------------------------


@st.composite
def evidences(draw: st.DrawFn) -> EvidenceTable:
    """Draw evidence, including some that no run could produce."""
    keys = [f"rows.jsonl:{i}" for i in range(draw(st.integers(0, 4)))]
    requests = tuple(draw(_requests(key)) for key in keys)
    digests = st.dictionaries(_TEXT, _TEXT, max_size=3)
    runs = {
        key: RequestRun(draw(units(key)), draw(st.integers(0, 2**63)), draw(digests), draw(_COUNTS))
        for key in keys
    }
    some = st.lists(st.sampled_from(keys), max_size=5) if keys else st.just([])
    repeats = dict.fromkeys(draw(some), (1, 2))
    timed = tuple(draw(units(key)) for key in draw(some))
    program = draw(programs())
    reals = _FLOATS.filter(lambda x: x == x) | st.just(float("nan"))
    return EvidenceTable(
        program=program,
        requests=requests,
        runs=runs,
        slices={
            "all": tuple(draw(st.permutations(keys))),
            "few": tuple(dict.fromkeys(draw(some))),
            "[none]": (),
        },
        measured=frozenset(draw(st.sets(st.sampled_from(METRICS)))),
        encoder=draw(st.booleans()),
        contract={
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program)}",
        },
        model={"sha256": draw(_TEXT), "encoder": draw(st.booleans())},
        kernels={
            side: {"run": "torch.eager", "digest": draw(_TEXT), "fingerprint": {"a": [1, 2.5]}}
            for side in ("train", "infer")
        },
        data=({"name": "rows.jsonl", "sha256": "0", "rows": len(keys)},),
        environment={"kcdsl": "1", "metrics": [{"name": draw(_TEXT)}]},
        timing=Timing(timed, repeats, draw(st.none() | reals)),
        prechecks=tuple(
            draw(
                st.lists(
                    st.builds(Precheck, _TEXT, _TEXT, _TEXT, st.none() | reals, st.booleans()),
                    max_size=3,
                )
            )
        ),
        crosschecks=tuple(
            draw(
                st.lists(
                    st.builds(CrossCheck, _TEXT, _COUNTS, reals, reals, st.none() | reals, _TEXT),
                    max_size=2,
                )
            )
        ),
        certified={key: draw(units(key)) for key in dict.fromkeys(draw(some))},
        bounding={"norm": "inf", "seconds": 1.5},
        floor={key: draw(units(key)) for key in dict.fromkeys(draw(some))},
        spoiled=draw(st.dictionaries(_TEXT, _TEXT, max_size=2)),
        implied=(ImpliedClause("A", "all", "B", ("one", "two")),) if draw(st.booleans()) else (),
        notes=tuple(draw(st.lists(_TEXT, max_size=2))),
        accepted=tuple(draw(st.lists(_TEXT, max_size=2))),
        seed=draw(st.integers(0, 2**40)),
        looks=draw(st.none() | st.integers(1, 5)),
    )


_COUNTS = st.integers(0, 2**40)
