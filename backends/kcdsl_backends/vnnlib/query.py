"""Queries of VNN-LIB 2.0 and 1.0: networks, their variables, and a formula of polynomials.

The grammar of 2.0 is in chapter 3 of the VNN-LIB standard; 1.0 is the format of earlier
competitions. Numbers are exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import ClassVar, Literal

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.files import excerpt, read_source

Element = tuple[str, int]
"""A variable and the index of one of its elements, in row-major order."""
Polynomial = Mapping[tuple[Element, ...], Fraction]
"""Coefficients of products of elements; the empty product is the constant."""
Relation = Literal["<=", "<", "==", "!="]
Kind = Literal["input", "hidden", "output"]

TYPES = frozenset({
    *("real", "float16", "float32", "float64", "bfloat16", "float8e4m3fn", "float8e5m2"),
    *("float8e4m3fnuz", "float8e5m2fnuz", "float4e2m1", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128", "bool"),
})  # fmt: skip
_LARGEST = 1 << 27
_DEEPEST = 200
_MOST_TERMS = 20_000
_MOST_ELEMENTS = 1 << 20
_LONGEST_NUMBER = 400
_DEGREE = 8


@dataclass(frozen=True, slots=True)
class QueryVariable:
    """A tensor of a network: its name, element type, shape, role, and the node of a hidden one."""

    name: str
    type: str
    shape: tuple[int, ...]
    kind: Kind
    node: str | None = None

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class QueryNetwork:
    """A declared network; `relation` is "equal-to" or "isomorphic-to" and the network it names."""

    name: str
    variables: tuple[QueryVariable, ...]
    relation: tuple[str, str] | None = None

    def of(self, kind: Kind) -> tuple[QueryVariable, ...]:
        """Return the variables of a kind, in their order."""
        return tuple(v for v in self.variables if v.kind == kind)


@dataclass(frozen=True, slots=True)
class QueryComparison:
    """A polynomial that is compared with 0."""

    polynomial: Polynomial
    relation: Relation


@dataclass(frozen=True, slots=True)
class Junction:
    """A conjunction (`every`) or a disjunction of formulas."""

    every: bool
    parts: tuple[Formula, ...]


Formula = QueryComparison | Junction


@dataclass(frozen=True, slots=True)
class Query:
    """The question whether some assignment agrees with the networks and satisfies the formula."""

    version: tuple[int, int]
    networks: tuple[QueryNetwork, ...]
    formula: Formula

    @property
    def variables(self) -> tuple[QueryVariable, ...]:
        """Return the variables of all networks, in the order of their declaration."""
        return tuple(v for network in self.networks for v in network.variables)


def read_query(path: Path) -> Query:
    """Read a query file. Refuse text that does not follow the grammar, with its place."""
    return parse_query(read_source(path, _LARGEST))


def parse_query(source: SourceFile) -> Query:
    """Parse a query. Refuse text that does not follow the grammar, with its place."""
    forms = _forms(source)
    if forms and isinstance(forms[0], _Form) and forms[0].head == "vnnlib-version":
        return _Second(source).query(forms)
    return _First(source).query(forms)


# --- forms in parentheses -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Form:
    """Tokens and forms between two parentheses."""

    items: tuple[_Token | _Form, ...]
    start: int
    end: int

    @property
    def head(self) -> str:
        first = self.items[0] if self.items else None
        return first.text if isinstance(first, _Token) else ""


_LEXEME = re.compile(
    r"\s+|;[^\n]*|(?P<token>[()\[\],]|\"(?:[^\"\\\n]|\\.)*\"|[^\s()\[\],;\"]+)|(?P<bad>.)", re.S
)


def _forms(source: SourceFile) -> list[_Token | _Form]:
    stack: list[tuple[int, list[_Token | _Form]]] = []
    here: list[_Token | _Form] = []
    for found in _LEXEME.finditer(source.text):
        text, start, end = found["token"], found.start(), found.end()
        if found["bad"] is not None:
            raise _wrong(source, Span(start, end), "a quotation mark has no partner on its line")
        if text == "(":
            stack.append((start, here))
            here = []
            if len(stack) > _DEEPEST:
                raise _wrong(source, Span(start, end), f"more than {_DEEPEST} forms are nested")
        elif text == ")":
            if not stack:
                raise _wrong(source, Span(start, end), "this parenthesis closes nothing")
            first, outer = stack.pop()
            outer.append(_Form(tuple(here), first, end))
            here = outer
        elif text is not None:
            here.append(_Token(text, start, end))
    if stack:
        raise _wrong(source, Span(stack[-1][0], stack[-1][0] + 1), "this parenthesis stays open")
    return here


def _wrong(source: SourceFile, span: Span, what: str, help: str | None = None) -> Refusal:
    return refuse(codes.VNNLIB_QUERY, what, help=help, source=source, span=span)


# --- formulas -------------------------------------------------------------------------------------

_TURNED = {">=": "<=", ">": "<"}
_RELATIONS: dict[str, Relation] = {"<=": "<=", "<": "<", "==": "==", "!=": "!="}


@dataclass(slots=True)
class _Reader:
    """Base of the readers of both versions: numbers, terms and formulas."""

    source: SourceFile
    equals: ClassVar[tuple[str, ...]] = ("==",)
    number: ClassVar[re.Pattern[str]] = re.compile(r"-?\d+(\.\d+)?", re.ASCII)

    def wrong(self, part: _Token | _Form, what: str, help: str | None = None) -> Refusal:
        return _wrong(self.source, Span(part.start, part.end), what, help)

    def variable(self, items: Sequence[_Token | _Form], place: int) -> tuple[Element, int]:
        """Return the element that begins at an item, and the index of the item after it."""
        raise NotImplementedError

    def formula(self, part: _Token | _Form) -> Formula:
        """Parse a formula. The language has no negation."""
        if not isinstance(part, _Form) or not part.items:
            raise self.wrong(part, "expected a comparison, `and` or `or`, in parentheses")
        head, rest = part.head, part.items[1:]
        if head in ("and", "or"):
            if not rest:
                raise self.wrong(part, f"`{head}` has no operand")
            return Junction(head == "and", tuple(self.formula(one) for one in rest))
        relation = "==" if head in self.equals else _TURNED.get(head, head)
        if relation not in _RELATIONS:
            raise self.wrong(
                part.items[0], f"{excerpt(head)!r} is no comparison", "<, <=, >, >=, == and !="
            )
        sides = self.terms(part, rest)
        if len(sides) != 2:
            raise self.wrong(part, f"`{head}` compares two terms, not {len(sides)}")
        left, right = reversed(sides) if head in _TURNED else sides
        return QueryComparison(_sum(left, right, Fraction(-1)), _RELATIONS[relation])

    def terms(self, form: _Form, items: Sequence[_Token | _Form]) -> list[Polynomial]:
        """Parse a sequence of terms."""
        found: list[Polynomial] = []
        place = 0
        while place < len(items):
            one = items[place]
            if isinstance(one, _Form):
                found.append(self._operation(one))
                place += 1
            elif self.number.fullmatch(one.text):
                found.append({(): self.rational(one)})
                place += 1
            else:
                element, place = self.variable(items, place)
                found.append({(element,): Fraction(1)})
            if len(found[-1]) > _MOST_TERMS:
                raise self.wrong(form, f"a term has more than {_MOST_TERMS} products")
        return found

    def rational(self, token: _Token) -> Fraction:
        """Return the exact value of a number."""
        mantissa, _, exponent = token.text.lower().partition("e")
        if len(mantissa) > _LONGEST_NUMBER or len(exponent) > 5 or abs(int(exponent or 0)) > 400:
            raise self.wrong(token, f"the number has more than {_LONGEST_NUMBER} digits")
        return Fraction(token.text)

    def _operation(self, form: _Form) -> Polynomial:
        head, operands = form.head, self.terms(form, form.items[1:])
        if head not in ("+", "-", "*") or not operands:
            raise self.wrong(form, f"{excerpt(head)!r} is no operation", "+, - and * are")
        first = operands[0]
        if head == "-" and len(operands) == 1:
            return _sum({}, first, Fraction(-1))
        for other in operands[1:]:
            if head == "*":
                first = self._product(form, first, other)
            else:
                first = _sum(first, other, Fraction(1 if head == "+" else -1))
        return first

    def _product(self, form: _Form, one: Polynomial, two: Polynomial) -> Polynomial:
        found: dict[tuple[Element, ...], Fraction] = {}
        if len(one) * len(two) > _MOST_TERMS:
            raise self.wrong(form, f"a term has more than {_MOST_TERMS} products")
        for a, x in one.items():
            for b, y in two.items():
                key = tuple(sorted((*a, *b)))
                if len(key) > _DEGREE:
                    raise self.wrong(form, f"a product has more than {_DEGREE} variables")
                found[key] = found.get(key, Fraction(0)) + x * y
        return {k: v for k, v in found.items() if v}


def _sum(one: Polynomial, two: Polynomial, sign: Fraction) -> Polynomial:
    found = dict(one)
    for key, value in two.items():
        found[key] = found.get(key, Fraction(0)) + sign * value
    return {k: v for k, v in found.items() if v}


# --- version 2 ------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_DIGITS = re.compile(r"\d{1,9}", re.ASCII)
_RELATED = ("equal-to", "isomorphic-to")


@dataclass(slots=True)
class _Second(_Reader):
    """A query of version 2.0."""

    known: dict[str, QueryVariable] = field(default_factory=dict)

    def query(self, forms: Sequence[_Token | _Form]) -> Query:
        version = self._version(forms[0])
        networks: dict[str, QueryNetwork] = {}
        asserted: list[Formula] = []
        for form in forms[1:]:
            head = form.head if isinstance(form, _Form) else ""
            if head == "declare-network" and not asserted and isinstance(form, _Form):
                network = self._network(form, networks)
                networks[network.name] = network
            elif head == "assert" and networks and isinstance(form, _Form):
                if len(form.items) != 2:
                    raise self.wrong(form, "`assert` has one operand")
                asserted.append(self.formula(form.items[1]))
            else:
                raise self.wrong(form, "expected declarations of networks, followed by assertions")
        if not asserted:
            raise self.wrong(forms[-1], "the query has no network, or no assertion")
        return Query(version, tuple(networks.values()), Junction(True, tuple(asserted)))

    def _version(self, form: _Token | _Form) -> tuple[int, int]:
        second = form.items[1] if isinstance(form, _Form) and len(form.items) == 2 else form
        text = second.text if isinstance(second, _Token) else ""
        if text not in ("<2.0>",):
            raise self.wrong(form, f"the version is {excerpt(text)}, not <2.0>")
        return 2, 0

    def _network(self, form: _Form, before: Mapping[str, QueryNetwork]) -> QueryNetwork:
        name = self._name(form, 1)
        if name in before:
            raise self.wrong(form.items[1], f"there are two networks {name}")
        relation: tuple[str, str] | None = None
        own: list[QueryVariable] = []
        order: list[Kind] = ["input", "hidden", "output"]
        for part in form.items[2:]:
            head = part.head if isinstance(part, _Form) else ""
            kind = next((k for k in order if head == f"declare-{k}"), None)
            if head in _RELATED and isinstance(part, _Form) and relation is None and not own:
                relation = head, self._name(part, 1)
                other = before.get(relation[1])
                if other is None or other.relation is not None:
                    raise self.wrong(
                        part, f"{relation[1]} is no network before this one without a relation"
                    )
            elif kind is not None and isinstance(part, _Form):
                if own and order.index(kind) < order.index(own[-1].kind):
                    raise self.wrong(part, "inputs come first, then hidden nodes, then outputs")
                own.append(self._declared(part, kind))
            else:
                raise self.wrong(part, "expected a relation or the declaration of a variable")
        network = QueryNetwork(name, tuple(own), relation)
        if not network.of("input") or not network.of("output"):
            raise self.wrong(form, f"the network {name} has no input, or no output")
        if relation is not None:
            _refuse_unlike(self, form, network, before[relation[1]])
        return network

    def _declared(self, form: _Form, kind: Kind) -> QueryVariable:
        name, type = self._name(form, 1), self._name(form, 2)
        type = "real" if type == "Real" else type
        if type not in TYPES:
            raise self.wrong(form.items[2], f"{excerpt(type)!r} is no element type")
        sizes, place = self._bracket(form.items, 3, form)
        rest = [one.text if isinstance(one, _Token) else "(" for one in form.items[place:]]
        node = None
        if kind == "hidden" and len(rest) == 1 and rest[0].startswith('"'):
            node = re.sub(r"\\(.)", r"\1", rest[0][1:-1])
        elif rest:
            raise self.wrong(form, "the declaration has text after the shape")
        elif kind == "hidden":
            raise self.wrong(form, "a hidden variable names its node, in quotation marks")
        if 0 in sizes:
            raise self.wrong(form, "the variable has no element", "leave the variable out")
        if prod(sizes) > _MOST_ELEMENTS:
            raise self.wrong(form, f"the variable has more than {_MOST_ELEMENTS} elements")
        if name in self.known:
            raise self.wrong(form.items[1], f"there are two variables {name}")
        self.known[name] = QueryVariable(name, type, sizes, kind, node)
        return self.known[name]

    def _name(self, form: _Form, place: int) -> str:
        one = form.items[place] if len(form.items) > place else form
        if not isinstance(one, _Token) or not _NAME.fullmatch(one.text):
            raise self.wrong(one, "expected a name of letters, digits and _")
        return one.text

    def _bracket(
        self, items: Sequence[_Token | _Form], place: int, form: _Token | _Form
    ) -> tuple[tuple[int, ...], int]:
        """Return the counts between brackets, and the index of the item after them."""
        texts = [one.text if isinstance(one, _Token) else "(" for one in items[place : place + 66]]
        if not texts or texts[0] != "[" or "]" not in texts:
            raise self.wrong(form, "expected counts in brackets, such as [2,3]")
        inner = texts[1 : texts.index("]")]
        good = all(
            _DIGITS.fullmatch(t) if i % 2 == 0 else t == "," for i, t in enumerate(inner)
        ) and (len(inner) % 2 == 1 or not inner)
        if not good:
            raise self.wrong(items[place], "expected counts in brackets, such as [2,3]")
        return tuple(int(t) for t in inner[::2]), place + texts.index("]") + 1

    def variable(self, items: Sequence[_Token | _Form], place: int) -> tuple[Element, int]:
        one = items[place]
        assert isinstance(one, _Token)
        declared = self.known.get(one.text)
        if declared is None:
            raise self.wrong(one, f"{excerpt(one.text)!r} is neither a number nor a variable")
        after = items[place + 1] if len(items) > place + 1 else None
        indices: tuple[int, ...] = ()
        place += 1
        if isinstance(after, _Token) and after.text == "[":
            indices, place = self._bracket(items, place, one)
        if len(indices) != len(declared.shape) or any(
            i >= n for i, n in zip(indices, declared.shape, strict=False)
        ):
            shape = list(declared.shape)
            raise self.wrong(one, f"{one.text}{list(indices)} is no element of the shape {shape}")
        flat = 0
        for i, n in zip(indices, declared.shape, strict=True):
            flat = flat * n + i
        return (one.text, flat), place


def _refuse_unlike(
    reader: _Reader, form: _Form, network: QueryNetwork, other: QueryNetwork
) -> None:
    for kind in ("input", "output"):
        shapes = [[v.shape for v in n.of(kind)] for n in (network, other)]
        if shapes[0] != shapes[1]:
            raise reader.wrong(
                form, f"the {kind}s of {network.name} do not have the shapes of {other.name}'s"
            )


# --- version 1 ------------------------------------------------------------------------------------

_PLAIN = re.compile(r"([XY])_(0|[1-9]\d{0,7})", re.ASCII)


@dataclass(slots=True)
class _First(_Reader):
    """A query of version 1.0: one network with input elements X_i and output elements Y_j."""

    equals: ClassVar[tuple[str, ...]] = ("=", "==")
    number: ClassVar[re.Pattern[str]] = re.compile(
        r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII
    )
    known: dict[str, dict[int, _Token | _Form]] = field(default_factory=lambda: {"X": {}, "Y": {}})

    def query(self, forms: Sequence[_Token | _Form]) -> Query:
        counts = self.known
        asserted: list[Formula] = []
        for form in forms:
            head = form.head if isinstance(form, _Form) else ""
            words = [i.text if isinstance(i, _Token) else "(" for i in getattr(form, "items", ())]
            found = _PLAIN.fullmatch(words[1]) if len(words) == 3 else None
            if head == "declare-const" and found is not None and words[2] == "Real":
                if int(found[2]) in counts[found[1]]:
                    raise self.wrong(
                        form, f"{words[1]} is declared twice", "leave one of the declarations out"
                    )
                counts[found[1]][int(found[2])] = form
            elif head == "assert" and isinstance(form, _Form) and len(words) == 2:
                asserted.append(self.formula(form.items[1]))
            else:
                raise self.wrong(
                    form,
                    "expected a declaration (declare-const X_0 Real) or an assertion",
                    "queries of version 2 begin with (vnnlib-version <2.0>)",
                )
        sizes = {name: len(found) for name, found in counts.items()}
        if not asserted or not all(sizes.values()):
            raise _wrong(self.source, Span(0, 0), "the query has no X, no Y or no assertion")
        for name, places in counts.items():
            last = max(places)
            if last >= len(places):
                raise self.wrong(
                    places[last],
                    f"{name}_{last} is declared, but only {len(places)} elements of {name} are",
                    f"number the elements of {name} from 0 on, without gaps",
                )
        variables = (
            QueryVariable("X", "real", (sizes["X"],), "input"),
            QueryVariable("Y", "real", (sizes["Y"],), "output"),
        )
        return Query((1, 0), (QueryNetwork("N", variables),), Junction(True, tuple(asserted)))

    def variable(self, items: Sequence[_Token | _Form], place: int) -> tuple[Element, int]:
        one = items[place]
        assert isinstance(one, _Token)
        found = _PLAIN.fullmatch(one.text)
        if found is None or int(found[2]) not in self.known[found[1]]:
            raise self.wrong(one, f"{excerpt(one.text)!r} is neither a number nor declared")
        return (found[1], int(found[2])), place + 1


# --- cases ----------------------------------------------------------------------------------------


def cases(formula: Formula, most: int) -> list[tuple[QueryComparison, ...]] | None:
    """Return the disjunctive normal form; None if it has more than `most` conjunctions."""
    if isinstance(formula, QueryComparison):
        return [(formula,)]
    parts = [cases(part, most) for part in formula.parts]
    found: list[tuple[QueryComparison, ...]] = [()] if formula.every else []
    for part in parts:
        if part is None:
            return None
        found = [(*a, *b) for a in found for b in part] if formula.every else found + part
        if len(found) > most:
            return None
    return found


def comparisons(formula: Formula) -> Iterator[QueryComparison]:
    """Return the comparisons of a formula."""
    if isinstance(formula, QueryComparison):
        yield formula
        return
    for part in formula.parts:
        yield from comparisons(part)


# --- text -----------------------------------------------------------------------------------------


def decimal(value: Fraction) -> str | None:
    """Return a rational number as an exact decimal without exponent; None if it has none."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        return None
    places = max(twos, fives, 1)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def written(query: Query) -> str:
    """Return a query as text of version 2.0. Raises ValueError if a number is no decimal."""
    shapes = {v.name: v.shape for v in query.variables}
    lines = ["(vnnlib-version <2.0>)", ""]
    for network in query.networks:
        lines.append(f"(declare-network {network.name}")
        lines += [f"    ({' '.join(network.relation)})"] if network.relation else []
        for v in network.variables:
            escaped = None if v.node is None else re.sub(r'(["\\])', r"\\\1", v.node)
            node = "" if escaped is None else f' "{escaped}"'
            lines.append(f"    (declare-{v.kind} {v.name} {v.type} {_counts(v.shape)}{node})")
        lines += [")", ""]
    parts = query.formula.parts if isinstance(query.formula, Junction) else (query.formula,)
    lines += [f"(assert {_formula(part, shapes)})" for part in parts]
    return "\n".join(lines) + "\n"


def _counts(counts: Sequence[int]) -> str:
    return f"[{','.join(map(str, counts))}]"


def _formula(formula: Formula, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if isinstance(formula, Junction):
        parts = " ".join(_formula(part, shapes) for part in formula.parts)
        return f"({'and' if formula.every else 'or'} {parts})"
    constant = -formula.polynomial.get((), Fraction(0))
    terms = [_term(k, v, shapes) for k, v in sorted(formula.polynomial.items()) if k]
    left = f"(+ {' '.join(terms)})" if len(terms) > 1 else terms[0] if terms else "0.0"
    return f"({formula.relation} {left} {_number(constant)})"


def _term(key: tuple[Element, ...], value: Fraction, shapes: Mapping[str, tuple[int, ...]]) -> str:
    names = []
    for name, flat in key:
        indices: list[int] = []
        for n in reversed(shapes[name]):
            flat, index = divmod(flat, n)
            indices.insert(0, index)
        names.append(f"{name}{_counts(indices)}" if indices else name)
    if value == 1:
        return names[0] if len(names) == 1 else f"(* {' '.join(names)})"
    return f"(* {_number(value)} {' '.join(names)})"


def _number(value: Fraction) -> str:
    found = decimal(value)
    if found is None:
        raise ValueError(f"{value} is no decimal")
    return found


def reshaped(query: Query, shapes: Mapping[str, tuple[int, ...]]) -> Query:
    """Return a query with new shapes, of the same sizes, for some variables."""
    networks = tuple(
        replace(
            n,
            variables=tuple(replace(v, shape=shapes.get(v.name, v.shape)) for v in n.variables),
        )
        for n in query.networks
    )
    return replace(query, networks=networks)
