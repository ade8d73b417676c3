"""Every field of the IR takes part in the digest or is declared not to; programs load again.

The mutations are made by walking the dataclasses of `kcdsl.ir`, so a field that is added
without a place in the canonical form, in the loader or in the programs of this file is found here.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.check.stored import from_json, load_bytes
from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import formulas
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest, document, library_digest, normal_formula, to_json
from kcdsl.ir.kernels import LogProbabilities, Recording, Service

# --- programs ------------------------------------------------------------------------------------

FRACTIONS = st.fractions(min_value=-5, max_value=5, max_denominator=12)
POSITIVE = st.fractions(min_value=0, max_value=5, max_denominator=12)
NAMES = st.sampled_from(["a", "b", "all", "long", "x1", "Ω"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=4)
FAMILIES, LEVELS = st.sampled_from(list(ir.Family)), st.sampled_from(list(ir.Level))
ACTIONS = st.sampled_from(["log", "guard", "rollback"])
SLICES = ("all", "long", "short")
TABLES = ("t", "u")
METRICS = ("kl", "tv", "own")


def _terms(*leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(*leaves),
        lambda inner: st.one_of(
            st.builds(ir.Abs, inner), st.builds(ir.Arith, st.sampled_from("+-*/"), inner, inner)
        ),
        max_leaves=3,
    )


NUMBERS = st.builds(ir.Number, FRACTIONS, st.sampled_from(["1", "nat", "ratio"]))
POINTWISE = _terms(st.builds(ir.Metric, st.sampled_from(METRICS)), NUMBERS)
STATISTICS = st.one_of(
    st.builds(
        ir.Statistic, st.sampled_from(["mean", "max", "min", "rate", "aggregate"]), POINTWISE
    ),
    st.builds(ir.Statistic, st.just("quantile"), POINTWISE, POSITIVE),
)
VARIABLES = st.sampled_from(["x", "y", "z"])
BLOCKS = st.sampled_from(["attn_0", "model"])
NORMS = st.builds(
    ir.Norm,
    st.sampled_from(["inf", "2", "span"]),
    st.builds(ir.Drift, BLOCKS, VARIABLES, st.booleans()),
)
TABLE_VALUES = st.builds(ir.TableValue, st.sampled_from(TABLES), st.just("nat"))
COMPARISONS = st.sampled_from(["<=", "<", ">=", ">", "=="])
ONE_BY_ONE = [kind for kind in ir.RegionKind if kind is not ir.RegionKind.ROWS]
REGIONS = st.one_of(
    st.builds(ir.Region, st.sampled_from(ONE_BY_ONE), st.sampled_from(SLICES), POSITIVE),
    st.builds(
        ir.Region,
        st.just(ir.RegionKind.ROWS),
        st.sampled_from(SLICES),
        POSITIVE,
        longest=st.integers(1, ir.MOST_ROWS),
    ),
)
FORMULAS = st.recursive(
    st.one_of(
        st.builds(ir.Compare, COMPARISONS, _terms(STATISTICS, NUMBERS, NORMS), NUMBERS),
        st.builds(ir.Compare, COMPARISONS, STATISTICS, TABLE_VALUES),
        st.builds(ir.Compare, COMPARISONS, STATISTICS, STATISTICS),
        st.builds(ir.NoFlip, BLOCKS, VARIABLES, st.integers(1, 9)),
        st.builds(ir.HasFields, st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(tuple)),
    ),
    lambda inner: st.one_of(
        st.builds(ir.Not, inner),
        st.builds(
            ir.Connective,
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=2, max_size=3).map(tuple),
        ),
        st.builds(ir.Connective, st.just("implies"), st.tuples(inner, inner)),
        st.builds(ir.Quantified, st.sampled_from(["forall", "exists"]), VARIABLES, REGIONS, inner),
    ),
    max_leaves=5,
)
PREDICATES = st.recursive(
    st.builds(
        ir.FieldTest,
        TEXTS,
        st.sampled_from(["==", "!=", "<=", "<", ">=", ">"]),
        st.one_of(TEXTS, FRACTIONS, st.booleans()),
    ),
    lambda inner: st.one_of(
        st.builds(ir.AllOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(ir.AnyOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(ir.NoneOf, inner),
    ),
    max_leaves=5,
)
OPTIONAL_TEXT, OPTIONAL = st.none() | TEXTS, st.none() | FRACTIONS
NUMERICS = st.fixed_dictionaries(
    {},
    optional={
        "compute": TEXTS,
        "attention": st.fixed_dictionaries({}, optional={"tile": st.integers(1, 9)}).map(
            lambda found: tuple(sorted(found.items()))
        ),
    },
).map(lambda found: tuple(sorted(found.items())))
LOGPROBS = st.builds(
    LogProbabilities,
    st.sampled_from(["raw", "processed"]),
    FRACTIONS,
    FRACTIONS,
    st.integers(0, 9),
    FRACTIONS,
    st.integers(0, 9),
)
SERVICES = st.builds(Service, TEXTS, LOGPROBS, OPTIONAL_TEXT, OPTIONAL_TEXT, st.integers(1, 9))
KERNELS = st.builds(
    ir.KernelRef, TEXTS, NUMERICS, folder=OPTIONAL_TEXT, service=st.none() | SERVICES
)
TOTAL = st.builds(
    ir.Escalation,
    st.tuples(*(st.tuples(st.just(level), ACTIONS) for level in ir.Level)),
    st.tuples(
        *(
            st.tuples(st.just(family), st.just(level), ACTIONS)
            for family in ir.Family
            for level in ir.Level
        )
    ),
)


@st.composite
def clauses(draw: st.DrawFn, name: str) -> ir.Clause:
    """Return a clause as a compiler makes it: in normal form, its slices by name."""
    return ir.Clause(
        name,
        draw(FAMILIES),
        normal_formula(draw(FORMULAS)),
        draw(LEVELS),
        tuple(sorted(draw(st.sets(st.sampled_from(SLICES))))),
        draw(st.none() | st.builds(ir.Budget, POSITIVE, st.sampled_from(["requests", "windows"]))),
        draw(st.none() | st.sampled_from(list(ir.EvidenceKind))),
        draw(st.none() | ACTIONS),
        holdout=draw(st.booleans()),
    )


@st.composite
def metrics(draw: st.DrawFn) -> ir.UserMetric:
    """Return a metric of the user."""
    return ir.UserMetric(
        "own",
        draw(TEXTS),
        draw(FAMILIES),
        draw(st.sampled_from(["token", "request"])),
        draw(st.sampled_from(["lower", "higher"])),
        "nats",
        "nat",
        tuple(sorted(draw(st.sets(st.sampled_from(["mean", "max", "rate"]), min_size=1)))),
        tuple(sorted(draw(st.sets(TEXTS, min_size=1, max_size=2)))),
        draw(st.booleans()),
        draw(OPTIONAL),
        draw(OPTIONAL),
    )


@st.composite
def programs(draw: st.DrawFn) -> ir.Program:
    """Return a program in the order of the stored form."""
    rows = st.lists(st.builds(ir.TableRow, PREDICATES, FRACTIONS), min_size=1, max_size=3)
    return ir.Program(
        draw(TEXTS),
        draw(TEXTS),
        draw(st.builds(ir.ModelRef, TEXTS, *([OPTIONAL_TEXT] * 4))),
        draw(KERNELS),
        draw(KERNELS),
        draw(OPTIONAL_TEXT),
        tuple(ir.Slice(name, draw(OPTIONAL_TEXT), draw(PREDICATES)) for name in SLICES),
        tuple(draw(clauses(name)) for name in ("A", "B")),
        draw(TOTAL),
        draw(st.builds(ir.Constants, FRACTIONS, OPTIONAL, OPTIONAL, OPTIONAL)),
        tuple(ir.ThresholdTable(n, "nat", tuple(draw(rows)), draw(OPTIONAL)) for n in TABLES),
        draw(st.lists(st.builds(ir.ImportedFrom, TEXTS, TEXTS), max_size=1).map(tuple)),
        (draw(metrics()),),
    )


@pytest.mark.full
@given(programs())
def test_what_is_stored_loads_again(program: ir.Program) -> None:
    assert from_json(to_json(program)) == program
    again = load_bytes(document(program))
    assert again == program
    assert again.imports == program.imports
    assert digest(again) == digest(program)


@pytest.mark.full
@given(programs(), programs())
def test_the_digest_tells_programs_apart(one: ir.Program, other: ir.Program) -> None:
    assert (digest(one) == digest(other)) is (one == other)


@pytest.mark.full
@given(FORMULAS)
def test_the_normal_form_is_one(formula: ir.Formula) -> None:
    once = normal_formula(formula)
    assert normal_formula(once) == once


# --- mutations -----------------------------------------------------------------------------------

BODY = ir.Connective(
    "and",
    (
        ir.Compare(
            "<=",
            ir.Norm("inf", ir.Drift("attn_0", "x", True)),
            ir.Number(Fraction(1, 2), "1"),
        ),
        ir.NoFlip("model", "x", 2),
    ),
)
REGION = ir.Region(ir.RegionKind.BALL, "all", Fraction(1))
WHERE = ir.AllOf(
    (
        ir.AnyOf((ir.FieldTest("length", ">", Fraction(9)), ir.FieldTest("a", "==", "b"))),
        ir.NoneOf(ir.FieldTest("flag", "==", True)),
    )
)
SERVICE = Service("url", LogProbabilities("processed"), "model", "KEY", concurrency=2)
RECORDING = Recording("rows", (("tokens", "ids"),), LogProbabilities("raw"), "file")
EVERYTHING = ir.Program(
    "name",
    "1",
    ir.ModelRef("model.safetensors", "llama", "package:factory", "config.json", "tokenizer.json"),
    ir.KernelRef("torch.eager", (("attention", (("tile", 64),)), ("compute", "float32"))),
    ir.KernelRef("torch.sdpa", (), folder="folder", service=SERVICE, recording=RECORDING),
    "data.jsonl",
    (ir.Slice("all", "own.jsonl", WHERE),),
    (
        ir.Clause(
            "A",
            ir.Family.NUMERICAL,
            ir.Compare(
                "<=",
                ir.Statistic("quantile", ir.Abs(ir.Metric("kl")), Fraction(9, 10)),
                ir.TableValue("t", "nat"),
            ),
            ir.Level.L2,
            ("all",),
            ir.Budget(Fraction(1, 100), "requests"),
            ir.EvidenceKind.SAMPLE,
            "guard",
            "as written",
            Span(1, 2),
            True,
        ),
        ir.Clause(
            "B",
            ir.Family.NUMERICAL,
            ir.Not(ir.Quantified("exists", "x", REGION, BODY)),
            ir.Level.L1,
        ),
        ir.Clause(
            "C",
            ir.Family.NUMERICAL,
            ir.Compare(
                "<",
                ir.Arith("*", ir.Number(Fraction(2)), ir.Statistic("mean", ir.Metric("tv"))),
                ir.Statistic("max", ir.Metric("own")),
            ),
            ir.Level.L1,
        ),
        ir.Clause("D", ir.Family.OBSERVABILITY, ir.HasFields(("seed", "trace")), ir.Level.L3),
    ),
    ir.Escalation(
        tuple((level, "log") for level in ir.Level),
        tuple((family, level, "guard") for family in ir.Family for level in ir.Level),
        Fraction(1, 2),
        Fraction(9),
    ),
    ir.Constants(Fraction(1), Fraction(2), Fraction(3), Fraction(4)),
    (
        ir.ThresholdTable(
            "t",
            "nat",
            (ir.TableRow(WHERE, Fraction(1)), ir.TableRow(ir.AllOf(), Fraction(2))),
            Fraction(3),
        ),
    ),
    (ir.ImportedFrom("fleet.kc.yaml", "sha256:0"),),
    (
        ir.UserMetric(
            "own", "m.py:own", ir.Family.NUMERICAL, "token", "lower", "nats", "nat",
            ("max", "mean"), ("logits",), False, Fraction(0), Fraction(1),
        ),
    ),
    ir.KernelRef("torch.sdpa", ()),
    ir.KernelRef("torch.eager", (), folder="another"),
)  # fmt: skip
LIBRARY = ir.Library(
    "fleet",
    "1",
    EVERYTHING.slices,
    (("fast", EVERYTHING.train),),
    EVERYTHING.tables,
)
DECLARED = {
    value
    for value in vars(ir).values()
    if isinstance(value, type)
    and dataclasses.is_dataclass(value)
    and value.__module__ in {ir.__name__, formulas.__name__}
}

Site = tuple[type, str]
"""A field: the class and its name."""
Path = tuple[Site, ...]
"""The fields that lead to a value, from the outside in."""


def mutated(node: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every copy of a node in which one value is another, with the way to it."""
    for field in dataclasses.fields(node):
        hint = typing.get_type_hints(type(node))[field.name]
        for path, value in changed(getattr(node, field.name), hint):
            here: Site = (type(node), field.name)
            yield (here, *path), dataclasses.replace(node, **{field.name: value})


def changed(value: Any, hint: Any) -> Iterator[tuple[Path, Any]]:
    """Yield other values of an annotated type, each with the way to what differs."""
    match value:
        case Span():
            yield (), Span(value.start + 7, value.end + 7)
        case bool():
            yield (), not value
        case Enum():
            yield (), next(member for member in type(value) if member is not value)
        case str():
            yield (), value + "'"
        case int() | Fraction():
            yield (), value + 1
        case None:
            yield (), sample(hint)
        case tuple():
            yield from _changed_tuple(value, hint)
        case _ if dataclasses.is_dataclass(value):
            yield from mutated(value)
        case _:
            raise AssertionError(f"no mutation of {value!r}: {hint}")
    if value is not None and types.NoneType in typing.get_args(hint):
        yield (), None


def _changed_tuple(value: tuple[Any, ...], hint: Any) -> Iterator[tuple[Path, Any]]:
    for position, item in enumerate(value):
        for path, other in changed(item, object):
            yield path, (*value[:position], other, *value[position + 1 :])
    if value and not isinstance(value[0], str):
        yield (), value[1:]
    elif not value and typing.get_args(hint)[-1] is Ellipsis:
        yield (), (sample(typing.get_args(hint)[0]),)


SAMPLES = {
    str: "another",
    int: 7,
    Fraction: Fraction(7),
    object: "another",
    ir.Budget: ir.Budget(Fraction(1, 7), "windows"),
    ir.FieldTest: ir.FieldTest("f", "==", "g"),
    ir.EvidenceKind: ir.EvidenceKind.PROOF,
    ir.KernelRef: ir.KernelRef("torch.eager", ()),
    Service: SERVICE,
    Recording: RECORDING,
    LogProbabilities: LogProbabilities("raw"),
}


def sample(hint: Any) -> Any:
    """Return some value of an annotated type other than None."""
    if typing.get_origin(hint) is tuple:
        return tuple(sample(part) for part in typing.get_args(hint))
    for choice in (hint, *typing.get_args(hint)):
        if choice in SAMPLES:
            return SAMPLES[choice]
    raise AssertionError(f"no sample of {hint}")


def takes_part(path: Path) -> bool:
    """Return whether a value belongs to the meaning: each field on the way to it is compared.

    What the inference kernel reads stands at the kernel; a program repeats it at the model.
    """
    return (ir.ModelRef, "served") not in path and all(
        f.compare for kind, name in path for f in dataclasses.fields(kind) if f.name == name
    )


@pytest.mark.parametrize(
    ("root", "name"),
    [(EVERYTHING, digest), (LIBRARY, library_digest)],
    ids=["program", "library"],
)
def test_every_value_takes_part_or_none(root: Any, name: Any) -> None:
    before = name(root)
    wrong = [
        path for path, other in mutated(root) if (name(other) != before) is not takes_part(path)
    ]
    assert wrong == []


def test_every_field_is_mutated() -> None:
    """A new class or field must stand in the programs above, and so in the digest."""
    reached = {site for root in (EVERYTHING, LIBRARY) for path, _ in mutated(root) for site in path}
    expected = {(kind, f.name) for kind in DECLARED for f in dataclasses.fields(kind)}
    assert expected - reached == set()


def is_sound(program: ir.Program) -> bool:
    """Return whether a program is one: it loads again, and names nothing that is not there."""
    try:
        return from_json(to_json(program)) == program
    except Refusal:
        return False


def test_different_mutations_have_different_digests() -> None:
    found: dict[str, Any] = {}
    for path, other in mutated(EVERYTHING):
        if takes_part(path) and is_sound(other):
            assert found.setdefault(digest(other), other) == other, path
    assert len(found) > 100


def test_what_is_no_part_of_the_digest_is_stored_all_the_same() -> None:
    moved = dataclasses.replace(EVERYTHING, imports=())
    assert digest(moved) == digest(EVERYTHING)
    assert document(moved) != document(EVERYTHING)


@pytest.mark.parametrize("field", ["slices", "clauses", "tables"])
def test_order_takes_no_part_where_names_tell_apart(field: str) -> None:
    more: dict[str, Any] = {
        "slices": ir.Slice("b"),
        "clauses": dataclasses.replace(EVERYTHING.clauses[0], id="Z"),
        "tables": ir.ThresholdTable("u", "s", ()),
    }
    parts = (*getattr(EVERYTHING, field)[1:], more[field], getattr(EVERYTHING, field)[0])
    forward: Any = {field: parts}
    backward: Any = {field: parts[::-1]}
    assert digest(dataclasses.replace(EVERYTHING, **forward)) == digest(
        dataclasses.replace(EVERYTHING, **backward)
    )


def test_the_order_of_rows_takes_part() -> None:
    (table,) = EVERYTHING.tables
    turned = dataclasses.replace(table, rows=table.rows[::-1])
    assert digest(dataclasses.replace(EVERYTHING, tables=(turned,))) != digest(EVERYTHING)
