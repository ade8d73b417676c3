"""A query and its networks as a program, input boxes and conjunctions of inequalities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm, prod
from typing import Any

import numpy as np
from onnx import TensorProto
from scipy import sparse

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.onnx.files import OnnxFile, type_name
from kcdsl.source.files import excerpt
from kcdsl_backends.vnnlib.layers import ReluQuery, relu_query
from kcdsl_backends.vnnlib.network import NetworkReader, RealTensor
from kcdsl_backends.vnnlib.program import (
    Affine,
    NetworkProgram,
    ProgramBlock,
    constant,
    dense,
    joined,
)
from kcdsl_backends.vnnlib.query import (
    Element,
    Polynomial,
    Query,
    QueryComparison,
    QueryNetwork,
    QueryVariable,
    Relation,
    cases,
    reshaped,
)

MOST_CASES = 4096
_MOST_BOUNDS = 1 << 22
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
"""ONNX types of the supported element types besides real."""
_ENDS = {"bool": (0, 1), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
"""The least and the greatest number of element types that have no fractions."""


@dataclass(frozen=True, slots=True)
class Conjunction:
    """Sums by their row, each in a relation to 0."""

    rows: tuple[int, ...]
    relations: tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class InputRegion:
    """A box of the input (None: no bound) and conjunctions, one of which must hold."""

    lo: tuple[Fraction | None, ...]
    hi: tuple[Fraction | None, ...]
    conjunctions: tuple[Conjunction, ...]

    @property
    def bounded(self) -> bool:
        """Return whether the box is bounded in all directions."""
        return None not in self.lo and None not in self.hi


@dataclass(frozen=True, slots=True)
class QueryProblem:
    """The question whether a region has a point at which one of its conjunctions holds.

    `sums` are sums over blocks of the program. `tensors` has the elements of every variable.
    `whole` marks integer elements of the input, `narrow` those of float32 or a smaller type.
    `layers` has the sums, in order, if the networks are layers with ReLU between them.
    """

    query: Query
    program: NetworkProgram
    sums: Affine
    regions: tuple[InputRegion, ...]
    tensors: Mapping[str, Affine]
    whole: tuple[bool, ...]
    narrow: tuple[bool, ...]
    contradictory: bool
    layers: ReluQuery | None


def query_problem(query: Query, files: Mapping[str, OnnxFile]) -> QueryProblem:
    """Build the problem of a query. Refuse networks that differ from its declarations."""
    query = _fitted(query, files)
    found = cases(query.formula, MOST_CASES)
    if found is None:
        raise refuse(
            codes.VNNLIB_QUERY,
            f"the assertions have more than {MOST_CASES} cases",
            help="split the query into several, one for each part of its disjunctions",
        )
    inputs = [v for n in query.networks for v in n.of("input")]
    owner = {v.name: v for v in inputs}
    places, count = _places(inputs, found)
    if len(found) * count > _MOST_BOUNDS:
        raise refuse(
            codes.VNNLIB_QUERY,
            f"{len(found)} cases of {count} inputs have more than {_MOST_BOUNDS} bounds",
            help="split the query into several, one for each part of its disjunctions",
        )
    whole, narrow = [False] * count, [False] * count
    lo: list[Fraction | None] = [None] * count
    hi: list[Fraction | None] = [None] * count
    for (name, _), place in places.items():
        type = owner[name].type
        narrow[place] |= type not in ("float64", "real")
        if type in _ENDS:
            least, most = map(Fraction, _ENDS[type])
            whole[place] = True
            lo[place] = max(v for v in (lo[place], least) if v is not None)
            hi[place] = min(v for v in (hi[place], most) if v is not None)
    regions, polynomials = _regions([_mapped(case, places) for case in found], lo, hi)
    program, tensors, layers = _programs(query, files, places, count, polynomials)
    sums = _sums(program, tensors, polynomials)
    return QueryProblem(
        query,
        dense(program),
        sums,
        regions,
        tensors,
        tuple(whole),
        tuple(narrow),
        not regions,
        layers,
    )


# --- files ----------------------------------------------------------------------------------------


def _fitted(query: Query, files: Mapping[str, OnnxFile]) -> Query:
    """Check the inputs and outputs of the files; take their shapes for queries of version 1."""
    shapes: dict[str, tuple[int, ...]] = {}
    for network in query.networks:
        file = files[network.name]
        for kind, count in (("input", len(file.inputs)), ("output", len(file.outputs))):
            declared = len([v for v in network.variables if v.kind == kind])
            if declared != count:
                raise _unlike(file, network, f"{count} {kind}s, the query declares {declared}")
        for variable, one in zip(network.of("input"), file.inputs, strict=True):
            sizes = one.sizes
            if sizes is None or (query.version == (1, 0) and None in sizes):
                sizes = tuple(1 if n is None else n for n in sizes or variable.shape)
            if query.version == (1, 0) and prod(n or 1 for n in sizes) == variable.size:
                shapes[variable.name] = tuple(n or 1 for n in sizes)
                continue
            same = len(sizes) == len(variable.shape) and all(
                a in (b, None) for a, b in zip(sizes, variable.shape, strict=True)
            )
            if not same:
                shape = list(variable.shape)
                raise _unlike(file, network, f"the input {one.name} {list(sizes)}, not {shape}")
            wanted = _TYPES.get(variable.type)
            if variable.type != "real" and one.type != wanted:
                named = type_name(one.type)
                raise _unlike(
                    file, network, f"the input {one.name} of {named}, not {variable.type}"
                )
    return reshaped(query, shapes)


def _unlike(file: OnnxFile, network: QueryNetwork, what: str) -> Refusal:
    return refuse(
        codes.VNNLIB_NETWORK,
        f"{file.path}, the network {network.name}, has {excerpt(what)}",
        help="name the file that the query is about: --network NAME=FILE",
    )


def refuse_other_graph(network: QueryNetwork, one: OnnxFile, two: OnnxFile) -> None:
    """Refuse two files that are not isomorphic: the same nodes, on tensors of the same shapes."""
    names = {a.name: b.name for a, b in zip(one.inputs, two.inputs, strict=False)}
    same = len(one.nodes) == len(two.nodes) and len(one.inputs) == len(two.inputs)
    for a, b in zip(one.nodes, two.nodes, strict=False):
        if not same or a.kind != b.kind or len(a.inputs) != len(b.inputs):
            same = False
            break
        for x, y in zip(a.inputs, b.inputs, strict=True):
            held = one.tensors.get(x), two.tensors.get(y)
            if held[0] is not None and held[1] is not None:
                same &= held[0].shape == held[1].shape
            else:
                same &= names.get(x, x if not x else None) == y
        plain = [{k: v for k, v in n.attributes.items() if not hasattr(v, "shape")} for n in (a, b)]
        same &= plain[0] == plain[1] and len(a.outputs) == len(b.outputs)
        names.update(zip(a.outputs, b.outputs, strict=False))
    if not same or [names.get(o) for o in one.outputs] != list(two.outputs):
        assert network.relation is not None
        raise _unlike(two, network, f"another graph than {network.relation[1]}, to be isomorphic")


# --- cases ----------------------------------------------------------------------------------------


def _places(
    inputs: Sequence[QueryVariable], found: Sequence[tuple[QueryComparison, ...]]
) -> tuple[dict[Element, int], int]:
    """Return the index of every input element in the program's input, and its size; elements that
    are equal in all cases share an index."""
    elements = [(v.name, i) for v in inputs for i in range(v.size)]
    known = set(elements)
    shared: set[tuple[Element, Element]] | None = None
    for case in found:
        pairs = set(_equal(case, known))
        shared = pairs if shared is None else shared & pairs
        if not shared:
            break
    first = {e: e for e in elements}

    def root(e: Element) -> Element:
        while first[e] != e:
            e = first[e]
        return e

    order = {e: i for i, e in enumerate(elements)}
    for a, b in sorted(shared or ()):
        x, y = sorted((root(a), root(b)), key=order.__getitem__)
        first[y] = x
    numbers: dict[Element, int] = {}
    for e in elements:
        numbers.setdefault(root(e), len(numbers))
    return {e: numbers[root(e)] for e in elements}, len(numbers)


def _equal(
    case: Iterable[QueryComparison], known: set[Element]
) -> Iterable[tuple[Element, Element]]:
    """Return pairs of input elements that a case equates."""
    below: set[tuple[Element, Element]] = set()
    for one in case:
        keys = sorted(one.polynomial)
        if len(keys) != 2 or any(len(k) != 1 or k[0] not in known for k in keys):
            continue
        (a,), (b,) = keys
        if one.polynomial[keys[0]] != -one.polynomial[keys[1]]:
            continue
        if one.relation == "==":
            yield a, b
        elif one.relation == "<=":
            lower = (a, b) if one.polynomial[keys[0]] > 0 else (b, a)
            if lower[::-1] in below:
                yield a, b
            below.add(lower)


_INPUT = ""
"""The name of the program's input in polynomials."""


def _mapped(
    case: Iterable[QueryComparison], places: Mapping[Element, int]
) -> list[QueryComparison]:
    """Return comparisons with input elements replaced by those of the program's input."""
    found = []
    for one in case:
        polynomial: dict[tuple[Element, ...], Fraction] = {}
        for key, value in one.polynomial.items():
            moved = tuple(sorted((_INPUT, places[e]) if e in places else e for e in key))
            polynomial[moved] = polynomial.get(moved, Fraction(0)) + value
        found.append(replace(one, polynomial={k: v for k, v in polynomial.items() if v}))
    return found


def _regions(
    found: Sequence[list[QueryComparison]],
    least: Sequence[Fraction | None],
    most: Sequence[Fraction | None],
) -> tuple[tuple[InputRegion, ...], list[Polynomial]]:
    """Return the boxes of the cases, within bounds of every input element, with their conjunctions,
    and the polynomials of these."""
    rows: dict[tuple[Any, ...], int] = {}
    polynomials: list[Polynomial] = []
    boxes: dict[Any, list[Conjunction]] = {}
    for case in found:
        lo, hi = list(least), list(most)
        left = _boxed(case, lo, hi)
        empty = any(a is not None and b is not None and a > b for a, b in zip(lo, hi, strict=True))
        if left is None or empty:
            continue
        numbers = []
        for one in left:
            key = tuple(sorted(one.polynomial.items()))
            if key not in rows:
                rows[key] = len(polynomials)
                polynomials.append(one.polynomial)
            numbers.append(rows[key])
        relations = tuple(one.relation for one in left)
        boxes.setdefault((tuple(lo), tuple(hi)), []).append(Conjunction(tuple(numbers), relations))
    regions = [InputRegion(lo, hi, tuple(each)) for (lo, hi), each in boxes.items()]
    return tuple(regions), polynomials


def _boxed(
    case: Iterable[QueryComparison], lo: list[Any], hi: list[Any]
) -> list[QueryComparison] | None:
    """Move bounds of input elements into `lo` and `hi`; return the other comparisons, None if one
    is false."""
    left = []
    for one in case:
        keys = [k for k in one.polynomial if k]
        if not keys:
            value = one.polynomial.get((), Fraction(0))
            true = {"<=": value <= 0, "<": value < 0, "==": value == 0, "!=": value != 0}
            if not true[one.relation]:
                return None
            continue
        if len(keys) > 1 or len(keys[0]) > 1 or keys[0][0][0] != _INPUT or one.relation == "!=":
            left.append(one)
            continue
        place, factor = keys[0][0][1], one.polynomial[keys[0]]
        bound = -one.polynomial.get((), Fraction(0)) / factor
        if factor > 0 or one.relation == "==":
            hi[place] = bound if hi[place] is None else min(hi[place], bound)
        if factor < 0 or one.relation == "==":
            lo[place] = bound if lo[place] is None else max(lo[place], bound)
        if one.relation == "<":
            left.append(one)
    return left


# --- programs -------------------------------------------------------------------------------------


def _programs(
    query: Query,
    files: Mapping[str, OnnxFile],
    places: Mapping[Element, int],
    count: int,
    polynomials: Sequence[Polynomial],
) -> tuple[NetworkProgram, dict[str, Affine], ReluQuery | None]:
    """Return the program of all networks, the elements of every variable, and the query about
    layers (None if it is none)."""
    program = NetworkProgram([ProgramBlock("input", count)])
    ranges: dict[str, range] = {}
    tensors: dict[str, Affine] = {_INPUT: program.whole(0)}
    own: dict[str, tuple[QueryVariable, ...]] = {}
    for network in query.networks:
        file, start = files[network.name], len(program.blocks)
        given = {}
        for variable, one in zip(network.of("input"), file.inputs, strict=True):
            ids = np.asarray([places[variable.name, i] for i in range(variable.size)])
            tensors[variable.name] = program.whole(0).rows(ids)
            given[one.name] = RealTensor(tensors[variable.name], variable.shape, one.type)
        reader = NetworkReader(file, program)
        values = reader.values(given)
        outputs = dict(zip((v.name for v in network.of("output")), file.outputs, strict=True))
        for variable in network.variables:
            if variable.kind == "input":
                continue
            name = outputs.get(variable.name) or _hidden(file, network, variable, values)
            found = reader.real(values[name])
            if query.version != (1, 0) and _squeezed(found.shape) != _squeezed(variable.shape):
                shapes = f"{name} {list(found.shape)}, not {list(variable.shape)}"
                raise _unlike(file, network, f"the tensor {shapes}")
            if found.affine.size != variable.size:
                raise _unlike(file, network, f"{found.affine.size} outputs, not {variable.size}")
            tensors[variable.name] = program.plain(found.affine)
        ranges[network.name] = range(start, len(program.blocks))
        own[network.name] = network.variables
    computed = {n: [v.name for v in own[n] if v.kind != "input"] for n in own}
    layers = None
    if all(len(names) == 1 for names in computed.values()):
        alone = [(ranges[n], names[0]) for n, names in computed.items()]
        layers = relu_query(program, alone, tensors, polynomials)
    for network in query.networks:
        if network.relation is not None:
            first, second = ranges[network.relation[1]], ranges[network.name]
            program = paired(program, first, second, tensors, computed[network.name])
    return program, tensors, layers


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _hidden(
    file: OnnxFile, network: QueryNetwork, variable: QueryVariable, values: Mapping[str, Any]
) -> str:
    """Return the tensor of a hidden variable: of this name, or the first output of the node."""
    asked = variable.node or ""
    of_nodes = {node.outputs[0] for node in file.nodes if node.name == asked and asked}
    found = values.keys() & {asked, *of_nodes}
    if len(found) == 1:
        return found.pop()
    raise _unlike(file, network, f"{'two nodes or tensors' if found else 'no node'} {asked!r}")


def paired(
    program: NetworkProgram,
    first: range,
    second: range,
    tensors: dict[str, Affine],
    names: Iterable[str],
) -> NetworkProgram:
    """Return a program in which the second network is the first plus differences.

    relu(z') = relu(z) + difference(z, z' - z) for networks with the same blocks. Bounds of the
    difference of outputs then propagate differences, which are small if the weights are close.
    `tensors` of these names are changed in place. Networks with other blocks are left unchanged.
    """
    pairs = list(zip(second, first, strict=False))
    shapes = [
        [(program.blocks[i].kind, program.blocks[i].size) for i in r] for r in (first, second)
    ]
    if shapes[0] != shapes[1] or not pairs:
        return program
    found = NetworkProgram(program.blocks[: second.start])
    parts: dict[int, tuple[int, ...]] = {}
    """The blocks whose sum is each later block."""

    def moved(a: Affine) -> Affine:
        terms: dict[int, Any] = {}
        for block, matrix in a.terms.items():
            for part in parts.get(block, (block,)):
                terms[part] = terms[part] + matrix if part in terms else matrix
        return Affine(a.constant, terms)

    partners = dict(pairs)
    for index in range(second.start, len(program.blocks)):
        block = program.blocks[index]
        operands = tuple(moved(a) for a in block.operands)
        partner = partners.get(index)
        if partner is None or block.kind not in ("relu", "linear"):
            found.blocks.append(replace(block, operands=operands))
            parts[index] = (len(found.blocks) - 1,)
            continue
        before = program.blocks[partner].operands[0]
        away = found.plus(operands[0], before, -1.0)
        if block.kind == "relu":
            found.add("difference", before, away)
        else:
            found.add("linear", away)
        parts[index] = (partner, len(found.blocks) - 1)
    for name in tensors:
        tensors[name] = moved(tensors[name])
    return found


def _sums(
    program: NetworkProgram, tensors: Mapping[str, Affine], polynomials: Sequence[Polynomial]
) -> Affine:
    """Return the polynomials as sums, each up to a positive factor."""
    products: dict[tuple[Element, ...], Affine] = {}
    rows = list[Affine]()
    for polynomial in polynomials:
        scale = Fraction(lcm(*(v.denominator for v in polynomial.values())))
        exact = sum(abs(v * scale) for v in polynomial.values()) < 2**53
        if not exact:
            largest = max(abs(v) for v in polynomial.values())
            bits = largest.denominator.bit_length() - largest.numerator.bit_length()
            scale = Fraction(2) ** bits  # the largest becomes about 1
        parts, weights = list[Affine](), list[float]()
        for key, value in polynomial.items():
            if key not in products:
                products[key] = _monomial(program, tensors, key)
            part, weight = products[key], value * scale
            if not exact:  # an inexact coefficient becomes a block
                part, weight = program.add("factor", part, value=(weight,)), Fraction(1)
            parts.append(part)
            weights.append(float(weight))
        whole = joined(parts)
        total: Any = sparse.csr_array(np.asarray([weights]))
        # weights of elements of the same block are added
        terms = {b: sparse.csr_array(total @ m) for b, m in whole.terms.items()}
        fixed = np.asarray(total @ whole.constant)
        rows.append(Affine(fixed, {b: m for b, m in terms.items() if m.nnz}))
    return joined(rows) if rows else constant(np.zeros(0))


def _monomial(
    program: NetworkProgram, tensors: Mapping[str, Affine], key: tuple[Element, ...]
) -> Affine:
    """Return a product of elements as one sum; 1 for the empty product."""
    counts: dict[Element, int] = {}
    for element in key:
        counts[element] = counts.get(element, 0) + 1
    found: Affine | None = None
    for (name, i), count in counts.items():
        one = tensors[name].rows(np.asarray([i]))
        one = program.add("power", one, value=count) if count > 1 else one
        found = one if found is None else program.add("mul", found, one)
    return constant(np.ones(1)) if found is None else found
