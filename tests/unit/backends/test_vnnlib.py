"""VNN-LIB: queries with known answers, query files, other solvers (docs/reference/vnnlib.md)."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.vnnlib import QUERIES
from kcdsl_backends.vnnlib.export import case_files
from kcdsl_backends.vnnlib.program import NetworkProgram, ProgramBlock, TooLarge
from kcdsl_backends.vnnlib.query import QueryComparison, parse_query, written
from kcdsl_backends.vnnlib.verify import OLDEST_OPSET
from tests.support.networks import box, declared, model_of, moved, perceptron, saved
from tests.support.random_modules import model_of as kernels_of
from tests.support.small_models import write_contract, write_model

if TYPE_CHECKING:
    from tests.conftest import Cli

START = "(vnnlib-version <2.0>)\n"
ONE = START + declared("N", "X", "Y", 2, 2) + "\n" + box("X", 2, -1.0, 1.0) + "\n"
PAIR = (
    START
    + declared("N", "X", "Y", 2, 2)
    + declared("M", "U", "V", 2, 2, "(isomorphic-to N)")
    + box("X", 2, -1.0, 1.0)
    + "(assert (and (== X[0,0] U[0,0]) (== X[0,1] U[0,1])))\n"
)
FIRST = """; version 1
(declare-const X_0 Real) (declare-const X_1 Real)
(declare-const Y_0 Real) (declare-const Y_1 Real)
(assert (>= X_0 -1e0)) (assert (<= X_0 1.0)) (assert (>= X_1 -1)) (assert (<= X_1 1))
"""


def one_network(declarations: str) -> str:
    """Return a query about a network with these declarations."""
    return START + f"(declare-network N {declarations})(assert (<= 0.0 1.0))"


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return relu(x) as N, and M, which is N with its second output raised by relu(x_1) / 8."""
    folder = tmp_path_factory.mktemp("networks")
    found = {}
    for name, factor in (("N", 1.0), ("M", 1.125)):
        weight = numpy_helper.from_array(np.diag([1.0, factor]).astype(np.float32), "w")
        nodes = [
            helper.make_node("Relu", ["x"], ["h"]),
            helper.make_node("MatMul", ["h", "w"], ["y"]),
        ]
        found[name] = saved(model_of(nodes, [weight], [1, 2], [1, 2]), folder / f"{name}.onnx")
    return found


def answer(tmp_path: Path, text: str, networks: dict[str, Path], seconds: float = 20.0) -> str:
    """Return the output of `verify`."""
    path = tmp_path / "query.vnnlib"
    path.write_text(text, encoding="utf-8")
    return str(QUERIES.verify(path, networks, seconds).text)


@pytest.mark.parametrize(
    ("asserted", "expected"),
    [
        ("(assert (< Y[0,0] 0.0))", "unsat"),  # strict
        ("(assert (<= Y[0,0] 0.0))", "sat"),  # and not
        ("(assert (>= Y[0,0] 1.0))", "sat"),  # only at one corner
        ("(assert (> Y[0,0] 1.0))", "unsat"),
        ("(assert (== Y[0,0] 0.3))", "sat"),
        ("(assert (or (> Y[0,0] 1.5) (> Y[0,1] 1.5)))", "unsat"),
        ("(assert (and (>= (+ Y[0,0] Y[0,1]) 1.5) (<= X[0,0] X[0,1])))", "sat"),
        ("(assert (> (* Y[0,0] Y[0,1]) 1.001))", "unsat"),
        ("(assert (!= X[0,0] X[0,0]))", "unsat"),  # of constants
        ("(assert (!= Y[0,0] 0.0))", "sat"),
        ("(assert (<= 0.0 1.0))", "sat"),
        ("(assert (<= X[0,0] -1.5))", "unsat"),  # an empty box
    ],
)
def test_queries_about_one_network(
    asserted: str, expected: str, tmp_path: Path, networks: dict[str, Path]
) -> None:
    found = answer(tmp_path, ONE + asserted, {"N": networks["N"]})
    assert found.splitlines()[0] == expected
    assert (len(found.splitlines()) > 1) == (expected == "sat")


def test_queries_about_two_networks(tmp_path: Path, networks: dict[str, Path]) -> None:
    """|Y - V| <= 1/8, which is attained."""
    for limit, expected in (("0.125", "sat"), ("0.1251", "unsat")):
        text = PAIR + f"(assert (>= (- V[0,1] Y[0,1]) {limit}))"
        lines = answer(tmp_path, text, networks).splitlines()
        assert lines[0] == expected
        if expected == "sat":
            assert lines[1:3] == ["X float32 [1,2]", lines[2]]
            assert [line.split()[0] for line in lines if line[0].isalpha()][1:] == list("XYUV")
            assert float(lines[3]) == 1.0


def test_networks_without_relu_are_split(tmp_path: Path) -> None:
    """Each assertion can hold alone, and both only if they are less apart."""
    weight = numpy_helper.from_array(np.array([[1, 1], [-1, 1]], dtype=np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    files = {"N": saved(model_of([node], [weight], [1, 2], [1, 2]), tmp_path / "N.onnx")}
    for least, expected in (("0.5", "unsat"), ("-0.5", "sat")):
        both = f"(assert (and (>= Y[0,0] {least}) (<= Y[0,0] (- (* 0.5 X[0,0]) (* 0.5 X[0,1])))))"
        text = ONE + both + "(assert (<= (- X[0,0] X[0,1]) 0.25))"
        assert answer(tmp_path, text, files).startswith(f"{expected}\n")


@pytest.mark.parametrize(
    ("type", "asserted", "expected"),
    [
        ("bool", "(> Y[0] 1.0)", "unsat"),
        ("bool", "(< Y[0] 0.0)", "unsat"),
        ("bool", "(and (> Y[0] 0.0) (< Y[0] 1.0))", "unsat"),
        ("bool", "(>= Y[0] 1.0)", "sat"),
        ("int32", "(> Y[0] 2147483647.0)", "unsat"),
        ("int32", "(<= Y[0] -2147483648.0)", "sat"),
    ],
)
def test_inputs_are_numbers_of_their_type(
    type: str, asserted: str, expected: str, tmp_path: Path
) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    model = model_of([node], [], [1], [1])
    model.graph.input[0].type.tensor_type.elem_type = getattr(TensorProto, type.upper())
    files = {"N": saved(model, tmp_path / "N.onnx")}
    declared = f"(declare-input X {type} [1]) (declare-output Y float32 [1])"
    text = f"{START}(declare-network N {declared})(assert {asserted})"
    assert answer(tmp_path, text, files).startswith(f"{expected}\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("X_00", "expected a declaration"),
        ("X_0", "X_0 is declared twice"),
        ("X_9", "X_9 is declared, but only 3 elements of X are"),
    ],
)
def test_elements_have_one_spelling_one_declaration_and_no_gaps(
    name: str, why: str, tmp_path: Path, networks: dict[str, Path]
) -> None:
    text = f"{FIRST}(declare-const {name} Real) (assert (>= {name} 2)) (assert (>= Y_0 0))"
    with pytest.raises(Refusal, match=why) as refused:
        answer(tmp_path, text, {"N": networks["N"]})
    assert refused.value.diagnostics[0].span is not None


def test_equal_networks_with_separate_inputs(tmp_path: Path, networks: dict[str, Path]) -> None:
    text = (
        START
        + declared("N", "X", "Y", 2, 2)
        + declared("M", "U", "V", 2, 2, "(equal-to N)")
        + box("X", 2, 0.0, 0.5)
        + box("U", 2, 0.5, 1.0)
    )
    one = {"N": networks["N"]}
    assert answer(tmp_path, text + "(assert (< V[0,0] Y[0,0]))", one) == "unsat\n"
    assert answer(tmp_path, text + "(assert (<= V[0,0] Y[0,0]))", one).startswith("sat\n")
    with pytest.raises(Refusal, match="equal to 'N'"):
        answer(tmp_path, text + "(assert (< V[0,0] Y[0,0]))", networks)


def test_point_is_printed_as_a_decimal_of_the_declared_type(
    tmp_path: Path, networks: dict[str, Path]
) -> None:
    """float32 cannot represent 0.1, but the box of one point still prints this decimal."""
    text = START + declared("N", "X", "Y", 2, 2) + box("X", 2, 0.1, 0.1)
    found = answer(tmp_path, text + "(assert (== Y[0,0] 0.1))", {"N": networks["N"]})
    assert found == "sat\nX float32 [1,2]\n0.1\n0.1\nY float32 [1,2]\n0.1\n0.1\n"
    wide = ONE + "(assert (>= Y[0,0] 0.7))"
    inputs = answer(tmp_path, wide, {"N": networks["N"]}).splitlines()[2:4]
    assert all(Fraction(float(np.float32(x))) == Fraction(float(x)) for x in inputs)


def test_version_1_queries_are_read(tmp_path: Path, networks: dict[str, Path]) -> None:
    one = {"model": networks["N"]}
    assert answer(tmp_path, FIRST + "(assert (< Y_0 0))", one) == "unsat\n"
    found = answer(tmp_path, FIRST + "(assert (or (and (>= Y_0 1)) (>= Y_1 2)))", one)
    lines = found.splitlines()
    assert lines[:2] == ["sat", "((X_0 1.0)"]
    assert lines[-1] == f" (Y_1 {lines[-1].split()[1]}"
    assert answer(tmp_path, FIRST + "(assert (>= Y_0 0))", one, 0.0) == "timeout\n"


def test_zero_time_limit_times_out(tmp_path: Path, networks: dict[str, Path]) -> None:
    text = ONE + "(assert (>= Y[0,0] 1.0))"
    assert answer(tmp_path, text, {"N": networks["N"]}, 0.0) == "timed-out\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (START + "(assert (<= X[0] 1.0))", "declarations of networks"),
        (ONE + "(assert (<= X[0,2] 1.0))", "no element of the shape"),
        (ONE + "(assert (<= X[0,0] 1e-3))", "neither a number"),
        (ONE + "(assert (<= X[0,0] nan))", "neither a number"),
        (ONE + "(assert (<= X[0,0] inf))", "neither a number"),
        (ONE + "(assert (= X[0,0] 1.0))", "is no comparison"),
        (ONE + "(assert (not (<= X[0,0] 1.0)))", "is no comparison"),
        (ONE + "(assert (<= X[0,0] 1.0 2.0))", "compares two terms"),
        (ONE + "(assert (<= X[0,0] 1.0)", "stays open"),
        (ONE + "(assert (<= X[0,0] 1.0)))", "closes nothing"),
        (ONE + "(assert " + "(and " * 300 + "(<= X[0,0] 1.0)" + ")" * 301, "forms are nested"),
        (ONE + "(assert (<= (* " + "X[0,0] " * 9 + ") 1.0))", "more than 8 variables"),
        (ONE.replace("float32", "float33") + "(assert (<= 0.0 1.0))", "no element type"),
        (ONE.replace("<2.0>", "<3.0>") + "(assert (<= 0.0 1.0))", "not <2.0>"),
        (ONE.replace("[1,2]", "[1,99999999]"), "more than"),
        (PAIR.replace("isomorphic-to N", "isomorphic-to K"), "no network before"),
        (FIRST + "(assert (<= X_7 1))", "neither a number nor declared"),
        (FIRST + "(assert (<= X_0 \u0661))", "neither a number nor declared"),
        (ONE + "(assert (<= X[0,0] \u0661.0))", "neither a number"),
        (ONE + "(assert (<= X[0,\u0661] 1.0))", "counts in brackets"),
        (ONE + "(assert (<= X[0,] 1.0))", "counts in brackets"),
        (ONE + "(assert x)", "expected a comparison"),
        (ONE + "(assert ())", "expected a comparison"),
        (ONE + "(assert)", "has one operand"),
        (ONE + "(assert (<= (/ X[0,0] 2.0) 1.0))", "'/' is no operation"),
        (ONE + "(assert (<= (+) 1.0))", "'\\+' is no operation"),
        (START + declared("N", "X", "Y", 2, 2), "no network, or no assertion"),
        (START + 2 * declared("N", "X", "Y", 2, 2), "two networks N"),
        (
            one_network("(declare-output Y real [1]) (declare-input X real [1])"),
            "inputs come first",
        ),
        (one_network("(declare-input X real [1])"), "no input, or no output"),
        (
            one_network("(declare-input X real [1] X) (declare-output Y real [1])"),
            "after the shape",
        ),
        (one_network("(declare-input X real [1]) (declare-output X real [1])"), "two variables X"),
        (one_network("(declare-input X real) (declare-output Y real [1])"), "counts in brackets"),
        (one_network("(declare-input X real [-1]) (declare-output Y real [1])"), "counts in"),
        (one_network("(declare-input X real [0]) (declare-output Y real [1])"), "has no element"),
        ("", "no X, no Y"),
        ('"', "no partner"),
    ],
)
def test_hostile_queries_are_refused(text: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        parse_query(SourceFile("query.vnnlib", text))


def test_networks_that_differ_from_the_query_are_refused(
    tmp_path: Path, networks: dict[str, Path]
) -> None:
    text = ONE + "(assert (< Y[0,0] 0.0))"
    other = saved(perceptron(np.random.default_rng(0), (2, 3, 2)), tmp_path / "other.onnx")
    wide = saved(perceptron(np.random.default_rng(0), (3, 2)), tmp_path / "wide.onnx")
    nan = onnx.load(str(networks["N"]))
    nan.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.full((2, 2), np.nan, np.float32), "w")
    )
    odd = model_of([helper.make_node("Sin", ["x"], ["y"])], [], [1, 2], [1, 2])
    for given, message in (
        ({}, "has no file"),
        ({"K": networks["N"]}, "no network 'K'"),
        ({"N": wide}, r"the input x \[1, 3\]"),
        ({"N": tmp_path / "absent.onnx"}, "there is no file"),
        ({"N": saved(nan, tmp_path / "nan.onnx")}, "not finite"),
        ({"N": saved(odd, tmp_path / "odd.onnx")}, "Sin of node y is an operator without"),
    ):
        with pytest.raises(Refusal, match=message):
            answer(tmp_path, text, given)
    with pytest.raises(Refusal, match="isomorphic"):
        answer(tmp_path, PAIR + "(assert (< Y[0,0] 0.0))", {"N": networks["N"], "M": other})
    with pytest.raises(Refusal, match="of FLOAT, not float64"):
        answer(tmp_path, text.replace("float32", "float64"), {"N": networks["N"]})


WIDE = {"w": np.ones((2, 6000), np.float32), "v": np.ones((1, 6000), np.float32),
        "shape": np.asarray([1, 1, 6000]), "k": np.ones((6000, 1, 1), np.float32)}  # fmt: skip
HIDDEN = [helper.make_node("Relu", ["x"], ["h"], "a"), helper.make_node("Neg", ["h"], ["y"], "h")]


@pytest.mark.parametrize(
    ("nodes", "hidden", "message"),
    [
        (["h = MatMul (x, v)"], "", "MatMul of node h multiplies rows and columns of other"),
        (["h = Reshape (x, shape)"], "", "Reshape of node h fails"),
        (["h = Softmax <axis = 2> (x)"], "", "Softmax of node h has no such dimension"),
        (["h = ReduceSum (x, shape)"], "", "ReduceSum of node h has no such dimension"),
        (
            ["h = MatMul (x, w)", "t = Transpose (h)", "y = MatMul (t, v)"],
            "",
            "MatMul of node y has more coefficients than are followed",
        ),
        (
            ["h = MatMul (x, w)", "t = Reshape (h, shape)", "y = Conv (t, k)"],
            "",
            "Conv of node y has more coefficients than are followed",
        ),
        (["y = Concat <axis = 1> (x, x)"], "", r"the tensor y \[1, 4\], not \[1, 2\]"),
        (HIDDEN, '(declare-hidden H float32 [1,2] "other")', "no node 'other'"),
        (HIDDEN, '(declare-hidden H float32 [2,2] "a")', r"the tensor h \[1, 2\], not \[2, 2\]"),
        (HIDDEN, '(declare-hidden H float32 [1,2] "h")', "two nodes or tensors 'h'"),
    ],
)
def test_networks_that_cannot_be_followed_are_refused(
    tmp_path: Path, nodes: list[Any], hidden: str, message: str
) -> None:
    made = [onnx.parser.parse_node(n) if isinstance(n, str) else n for n in nodes]
    held = [numpy_helper.from_array(value, name) for name, value in WIDE.items()]
    if made[-1].output[0] != "y":
        made.append(helper.make_node("Relu", [made[-1].output[0]], ["y"]))
    file = saved(model_of(made, held, [1, 2], [1, 2]), tmp_path / "N.onnx")
    text = one_network(f"(declare-input X float32 [1,2]) {hidden} (declare-output Y float32 [1,2])")
    with pytest.raises(Refusal, match=message):
        answer(tmp_path, text, {"N": file})


def test_outputs_of_another_number_are_refused(tmp_path: Path, networks: dict[str, Path]) -> None:
    text = FIRST.replace("(declare-const Y_1 Real)", "") + "(assert (<= Y_0 0))"
    with pytest.raises(Refusal, match="2 outputs, not 1"):
        answer(tmp_path, text, {"N": networks["N"]})


def test_numbers_without_a_decimal_are_not_written() -> None:
    third = QueryComparison({(): Fraction(1, 3)}, "<=")
    query = parse_query(SourceFile("query.vnnlib", ONE + "(assert (<= 0.0 1.0))"))
    with pytest.raises(ValueError, match="-1/3 is no decimal"):
        written(replace(query, formula=third))


def test_coefficients_beyond_what_is_followed_are_not_multiplied() -> None:
    program = NetworkProgram([ProgramBlock("input", 1)])
    with pytest.raises(TooLarge):
        program.linear(program.whole(0), SimpleNamespace(nnz=2**25 + 1))


@pytest.mark.parametrize("command", ["", "'", " "])
def test_a_solver_is_a_command(
    tmp_path: Path, networks: dict[str, Path], command: str, cli: Cli
) -> None:
    path = tmp_path / "query.vnnlib"
    path.write_text(ONE + "(assert (< Y[0,0] 0.0))", encoding="utf-8")
    network = f"N={networks['N']}"
    ran = cli("vnnlib", "verify", str(path), "--network", network, "--solver", command)
    assert (ran.code, "is no command" in ran.stderr) == (2, True)


def test_input_without_bounds(tmp_path: Path, networks: dict[str, Path]) -> None:
    """z3 decides it; with operators outside of z3's it stays unknown, whatever intervals give."""
    text = START + declared("N", "X", "Y", 2, 2) + "(assert (< Y[0,0] 0.0))"
    assert answer(tmp_path, text, {"N": networks["N"]}) == "unsat\n"
    node = helper.make_node("Sigmoid", ["x"], ["y"])
    smooth = saved(model_of([node], [], [1, 2], [1, 2]), tmp_path / "smooth.onnx")
    assert answer(tmp_path, text, {"N": smooth}, 1.0) == "unknown\n"


def test_undefined_value_satisfies_nothing(tmp_path: Path) -> None:
    """1 / 0 and log(-1) are undefined, so they make no assignment satisfy the query."""
    for kind, low in (("Reciprocal", "0.0"), ("Log", "-1.0"), ("Sqrt", "-1.0")):
        node = helper.make_node(kind, ["x"], ["y"])
        file = saved(model_of([node], [], [1, 2], [1, 2]), tmp_path / "odd.onnx")
        text = START + declared("N", "X", "Y", 2, 2) + box("X", 2, float(low), float(low))
        for comparison in ("(<= Y[0,0] 0.0)", "(> Y[0,0] 0.0)"):
            found = answer(tmp_path, text + f"(assert {comparison})", {"N": file}, 0.2)
            assert not found.startswith("sat"), kind


@pytest.mark.parametrize(
    ("kind", "attributes", "more"),
    [
        ("Clip", {}, [np.float32(np.inf), np.float32(0)]),  # ONNX Runtime returns 0, not x
        ("Clip", {}, [np.float32(-1), np.float32(-np.inf)]),
        ("MaxPool", {"kernel_shape": [2], "auto_pad": "VALID", "pads": [1, 0]}, []),
        ("MaxPool", {"kernel_shape": [2], "auto_pad": "SAME_UPPER", "dilations": [2]}, []),
        ("Conv", {"auto_pad": "VALID", "pads": [1, 0]}, [np.ones((1, 1, 2), np.float32)]),
    ],
)
def test_operands_on_which_runtimes_differ_are_refused(
    kind: str, attributes: dict[str, Any], more: list[Any], tmp_path: Path
) -> None:
    held = [numpy_helper.from_array(np.asarray(v), f"i{i}") for i, v in enumerate(more)]
    node = helper.make_node(kind, ["x", *(one.name for one in held)], ["y"], **attributes)
    file = saved(model_of([node], held, [1, 1, 4], [1, 1, 4]), tmp_path / "odd.onnx")
    text = START + "(declare-network N (declare-input X float32 [1,1,4])"
    text += " (declare-output Y float32 [1,1,4]))(assert (<= X[0,0,0] Y[0,0,0]))"
    with pytest.raises(Refusal, match=kind):
        answer(tmp_path, text, {"N": file})


def test_outputs_at_a_discontinuity_are_exact(tmp_path: Path) -> None:
    """An interval of floor(1) contains 0 as well; the printed value is 1."""
    nodes = [helper.make_node("Floor", ["x"], ["y"])]
    file = saved(model_of(nodes, [], [1, 1], [1, 1]), tmp_path / "steps.onnx")
    text = START + declared("N", "X", "Y", 1, 1) + box("X", 1, 1.0, 1.0)
    found = answer(tmp_path, text + "(assert (<= Y[0,0] 5.0))", {"N": file})
    assert found.split() == ["sat", "X", "float32", "[1,1]", "1.0", "Y", "float32", "[1,1]", "1.0"]


def test_underflowing_products_are_decided_exactly(tmp_path: Path) -> None:
    """2^-600 relu(2^-950 x) is 2^-550 at x = 2^1000, though 2^-600 · 2^-950 is 0 in float64."""
    held = [numpy_helper.from_array(np.asarray(2.0**n), f"w{n}") for n in (-950, -600)]
    nodes = [
        helper.make_node("Mul", ["x", "w-950"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Mul", ["r", "w-600"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [1, 1]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    text = START + declared("N", "X", "Y", 1, 1).replace("float32", "real")
    text += f"(assert (>= X[0,0] {2**900}.0))(assert (<= X[0,0] {2**1000}.0))"
    text += f"(assert (>= Y[0,0] 0.{'0' * 170}1))"
    file = saved(model, tmp_path / "faint.onnx")
    assert answer(tmp_path, text, {"N": file}).startswith("sat")


@pytest.mark.parametrize(
    ("asserted", "expected"),
    [
        # float64 cannot represent 1.00000000000000001 and rounds it to 1
        ("(>= (- (* 1.00000000000000001 Y[0,0]) V[0,0]) 0.000000000000000001)", "sat"),
        ("(> (* 1.00000000000000001 Y[0,0]) 1.0)", "sat"),
        ("(> (* 0.99999999999999999 Y[0,0]) 1.0)", "unsat"),
        (f"(<= (+ (* 0.{'0' * 380}1 Y[0,0]) 0.{'0' * 381}1) 0.0)", "unsat"),
        (f"(>= (* 1{'0' * 390}.0 Y[0,0]) 1.0)", "sat"),
    ],
)
def test_coefficients_outside_float64_are_exact(
    asserted: str, expected: str, tmp_path: Path, networks: dict[str, Path]
) -> None:
    given = {"N": networks["N"], "M": networks["N"]}
    assert answer(tmp_path, PAIR + f"(assert {asserted})", given).startswith(expected)


def test_inputs_beyond_float64_are_decided(tmp_path: Path, networks: dict[str, Path]) -> None:
    """z3 decides on boxes that are unbounded in float64; its point may exceed float64 too."""
    far = f"1{'0' * 390}.0"
    text = START + declared("N", "X", "Y", 2, 2)
    boxed = "".join(f"(assert (and (<= X[0,{i}] {far}) (>= X[0,{i}] -{far})))" for i in (0, 1))
    given = {"N": networks["N"]}
    for place in (boxed, f"(assert (>= X[0,0] {far}))"):
        assert answer(tmp_path, text + place + "(assert (< Y[0,0] 0.0))", given) == "unsat\n"
        assert answer(tmp_path, text + place + "(assert (> Y[0,0] 1.0))", given).startswith("sat")


# --- the reference parser, and other people's suites ----------------------------------------------


@pytest.mark.parametrize("text", [ONE + "(assert (or (> Y[0,0] 1.0) (== X[0,0] 0.5)))", PAIR
    + "(assert (and (<= (- V[0,1] Y[0,1]) -0.25) (!= (* 2.0 X[0,0] Y[0,0]) 0.1)))"])  # fmt: skip
def test_reference_parser_reads_written_queries(text: str) -> None:
    vnnlib = pytest.importorskip("vnnlib")
    query = parse_query(SourceFile("query.vnnlib", text))
    again = written(query)
    assert parse_query(SourceFile("again.vnnlib", again)) == query
    parsed = vnnlib.parse_query_string(again)
    assert [n.name for n in parsed.networks] == [n.name for n in query.networks]
    assert len(parsed.assertions) == again.count("(assert ")


@pytest.mark.full
def test_refusals_agree_with_the_reference_parser() -> None:
    """Queries that the reference parser rejects are refused here."""
    vnnlib = pytest.importorskip("vnnlib")
    asserted = ["(<= X[0,0] 1e-3)", "(= X[0,0] 1.0)", "(<= Z[0,0] 1.0)", "(<= X[0,2] 1.0)",
                "(not (<= X[0,0] 1.0))", "(and)", "(<= (/ X[0,0] 2.0) 1.0)"]  # fmt: skip
    for one in asserted:
        text = ONE + f"(assert {one})\n"
        with pytest.raises(vnnlib.VNNLibException):
            vnnlib.parse_query_string(text)
        with pytest.raises(Refusal):
            parse_query(SourceFile("query.vnnlib", text))


@pytest.mark.full
def test_known_answers_of_the_suite(tmp_path: Path) -> None:
    """The one refusal is demanded by the standard (5.3.2)."""
    registry = pytest.importorskip("vnntest.core.registry")
    wrong, count = [], 0
    for case in registry.get_cases(suite="full"):
        count += 1
        file = saved(case.build_onnx_model(), tmp_path / f"{case.id}.onnx")
        spec = case.build_vnnlib_spec()
        text = spec if isinstance(spec, str) else "\n".join(spec)
        query = parse_query(SourceFile(case.id, text))
        given = {n.name: file for n in query.networks if (n.relation or "..")[0] != "equal-to"}
        try:
            found = answer(tmp_path, text, given).splitlines()[0]
        except Refusal as refusal:
            found = refusal.diagnostics[0].code.id
        if found != case.expected_output().lower():
            wrong.append((case.id, found))
    assert count >= 178
    assert wrong == [("network_isomorphic01", "KC486")]


@pytest.mark.full
def test_capabilities_follow_the_standard(tmp_path: Path) -> None:
    compliance = pytest.importorskip("vnntest.core.compliance")
    assert compliance.validate_opset_versions(QUERIES.capability("onnx-opset-versions")) is None
    assert compliance.validate_vnnlib_versions(QUERIES.capability("vnnlib-versions")) is None
    serialise = QUERIES.capability("serialise-assignments")
    assert compliance.validate_serialise_assignments(serialise) is None
    assert QUERIES.capability("onnx-opset-versions").startswith(f"{OLDEST_OPSET}\n")


# --- a solver behind us ---------------------------------------------------------------------------


def program(tmp_path: Path, printed: str, more: str = "") -> str:
    """Return a solver that prints a text."""
    path = tmp_path / "solver.py"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{more}\nprint({printed!r})\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def asked(tmp_path: Path, solver: str, text: str, networks: dict[str, Path]) -> tuple[str, str]:
    path = tmp_path / "query.vnnlib"
    path.write_text(text, encoding="utf-8")
    found = QUERIES.ask(solver, path, {"N": networks["N"]}, 5.0)
    return found.text, " ".join((found.reason, *found.notes))


def test_points_of_an_external_solver_are_evaluated(
    tmp_path: Path, networks: dict[str, Path]
) -> None:
    text = ONE + "(assert (>= Y[0,0] 0.5))"
    good = "sat\nX float32 [1,2]\n0.75\n0.5\nY float32 [1,2]\n9.0\n9.0"
    found, _ = asked(tmp_path, program(tmp_path, good), text, networks)
    assert found == "sat\nX float32 [1,2]\n0.75\n0.5\nY float32 [1,2]\n0.75\n0.5\n"
    for bad in ("sat", "sat\nX float32 [1,2]\n0.25\n0.5", "sat\nX float32 [1,2]\n2.0\n0.5",
                "sat\nX float32 [1,2]\nnan\n0.5", "sat\nX float32 [1,2]\n0.75"):  # fmt: skip
        assert asked(tmp_path, program(tmp_path, bad), text, networks)[0] == "unknown\n"


def test_result_line_of_an_external_solver_is_parsed(
    tmp_path: Path, networks: dict[str, Path]
) -> None:
    held, broken = ONE + "(assert (< Y[0,0] 0.0))", ONE + "(assert (<= Y[0,0] 0.0))"
    unsat = program(tmp_path, "unsat")
    assert asked(tmp_path, unsat, held, networks)[0] == "unsat\n"
    with pytest.raises(Refusal, match="a point satisfies the query"):
        asked(tmp_path, unsat, broken, networks)
    for printed, more, message in (
        ("Unsat!", "", "no answer"),
        ("unsat", "sys.exit('out of memory')", "out of memory"),
    ):
        with pytest.raises(Refusal, match=message):
            asked(tmp_path, program(tmp_path, printed, more), held, networks)
    with pytest.raises(Refusal, match="cannot be run"):
        asked(tmp_path, str(tmp_path / "absent"), held, networks)


@pytest.mark.full
def test_solver_of_the_standard(tmp_path: Path, networks: dict[str, Path]) -> None:
    pytest.importorskip("vnnlib_test_solver")
    rule = '[solver]\nname = "t"\nversion = "1.0.0"\n[[rules]]\nmatch = "*.vnnlib"\nresult = "{}"\n'
    config = tmp_path / "solver.toml"
    solver = (
        f"{sys.executable} -c 'import sys; from vnnlib_test_solver.cli import main;"
        f" sys.exit(main())' --config {config}"
    )
    text = ONE + "(assert (>= Y[0,0] 0.5))"
    point = "[rules.assignments]\nX = [0.75, 0.5]\nY = [0.75, 0.5]\n"
    for result, more, expected in (
        ("unknown", "", "unknown"),
        ("timed-out", "", "timed-out"),
        ("sat", "", "unknown"),
        ("sat", point, "sat"),
    ):
        config.write_text(rule.format(result) + more)
        found, _ = asked(tmp_path, solver, text, networks)
        assert found.splitlines()[0] == expected, (result, more)


# --- the command ----------------------------------------------------------------------------------


def test_vnnlib_command(cli: Cli, tmp_path: Path, networks: dict[str, Path]) -> None:
    path = tmp_path / "query.vnnlib"
    path.write_text(ONE + "(assert (>= Y[0,0] 1.0))", encoding="utf-8")
    found = cli("vnnlib", "verify", path, "--network", f"N={networks['N']}", "--timeout", "9")
    assert (found.code, found.stdout.splitlines()[0]) == (0, "sat")
    assert "about real numbers; the query declares float32" in found.stderr
    operators = cli("vnnlib", "supports", "--onnx-operators").stdout.split()
    assert {"Gemm", "Relu", "Conv", "Constant"} <= set(operators)
    for words in (
        ("verify",),
        ("verify", path, "--network", "N"),
        ("verify", path, "--network", "N=a", "--network", "N=b"),
        ("supports",),
        ("supports", "--onnx-operators", "--network", "N=a"),
    ):
        assert cli("vnnlib", *words).code == 2


@pytest.mark.full
def test_random_pairs_agree_with_samples(tmp_path: Path) -> None:
    """No sample violates `unsat`, and points of `sat` are confirmed by ONNX's reference."""
    answers = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        one = perceptron(generator, (2, 5, 4, 2), ("Relu", "LeakyRelu"))
        two = moved(one, generator, 0.02)
        files = {"N": saved(one, tmp_path / "n.onnx"), "M": saved(two, tmp_path / "m.onnx")}
        limit = (0.02, 0.05, 0.1)[seed % 3]
        text = PAIR + f"(assert (or (> (- V[0,0] Y[0,0]) {limit}) (< (- V[0,0] Y[0,0]) -{limit})))"
        found = answer(tmp_path, text, files).splitlines()
        answers.append(found[0])
        runs = [ReferenceEvaluator(model) for model in (one, two)]
        points = generator.uniform(-1, 1, (500, 2)).astype(np.float32)
        if found[0] == "sat":
            points = np.asarray([[float(found[2]), float(found[3])]], dtype=np.float32)
        outputs = [
            np.concatenate([np.asarray(r.run(None, {"x": p[None]}))[0] for p in points])
            for r in runs
        ]
        away = np.abs(outputs[1][:, 0] - outputs[0][:, 0]).max()
        assert away >= limit - 1e-5 if found[0] == "sat" else away <= limit + 1e-5
    assert {"sat", "unsat"} == set(answers)


def test_external_data_behind_a_symlink_is_not_read(
    tmp_path: Path, networks: dict[str, Path]
) -> None:
    """Nothing outside of the folder of a network is read."""
    folder = tmp_path / "networks"
    folder.mkdir()
    model = onnx.load(networks["N"])
    onnx.save(model, folder / "n.onnx", save_as_external_data=True, location="w", size_threshold=0)
    text = ONE + "(assert (< Y[0,0] 0.0))"
    assert answer(tmp_path, text, {"N": folder / "n.onnx"}) == "unsat\n"
    (folder / "w").rename(tmp_path / "elsewhere")
    (folder / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match="leads outside"):
        answer(tmp_path, text, {"N": folder / "n.onnx"})


def test_old_onnx_files_are_read(tmp_path: Path) -> None:
    """Opset 9, weights among the inputs, and two types of weights."""
    weight = numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x, w], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    file = saved(model, tmp_path / "old.onnx")
    assert answer(tmp_path, ONE + "(assert (< Y[0,0] 0.0))", {"N": file}) == "unsat\n"


# --- goals of contracts as queries ----------------------------------------------------------------


class Rectified(torch.nn.Module):
    """x + B relu(A x + a) of width 2."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = (4, 2), (4,), (2, 4)
        parts = (0.5 * torch.randn(shape, generator=generator) for shape in shapes)
        self.a, self.c, self.b = (torch.nn.Parameter(part) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, 2]."""
        return x + torch.relu(x @ self.a.T + self.c) @ self.b.T


@pytest.mark.full
@pytest.mark.parametrize("kernel", [
    {"preset": "torch-eager", "compute": "bfloat16"},
    {"preset": "torch-eager", "weights": {"format": "fp8_e4m3", "scale": "per_tensor"}},
])  # fmt: skip
def test_goal_exported_as_a_query_has_the_right_answer(
    kernel: dict[str, Any], tmp_path: Path
) -> None:
    """`unsat` appears only above an attained drift.

    Far above it the answer is `unsat`; the reference parser reads the query, and the networks
    without errors equal the block.
    """
    vnnlib = pytest.importorskip("vnnlib")
    train, infer = (resolve(one) for one in ({"preset": "torch-eager"}, kernel))
    part = Rectified()
    factory = ProblemFactory(kernels_of(part, 2), train, infer, torch.device("cpu"))
    problem = factory.problem("part", (1,))
    centre = torch.full((1, 2), 0.125, dtype=torch.float64)
    radius = torch.full((1, 1), 0.25, dtype=torch.float64)
    low = attack(*problem.simulators(), "inf", centre, radius, candidates=2, rounds=4).value
    assert low > 0
    answers = []
    for limit in (Fraction(low / 2), Fraction(low * 8)):
        found = case_files(problem, "p", (centre, radius), limit, "<=")
        files = dict(found.files)
        for suffix, data in files.items():
            (tmp_path / suffix).write_bytes(data)
        vnnlib.parse_query_file(str(tmp_path / "vnnlib"))
        networks = {name: tmp_path / f"{name}.onnx" for name in ("train", "infer")}
        answers.append(QUERIES.verify(tmp_path / "vnnlib", networks, 60.0))
    assert answers[0].answer != "unsat"
    assert answers[1].answer == "unsat", answers[1].reason
    model = onnx.load(str(tmp_path / "train.onnx"))
    feeds = {i.name: np.zeros([d.dim_value for d in i.type.tensor_type.shape.dim])
             for i in model.graph.input}  # fmt: skip
    feeds["input"] = centre.numpy()
    got = np.asarray(ReferenceEvaluator(model).run(None, feeds))[0]
    assert np.allclose(got, part(centre.float()).detach().numpy(), atol=1e-5)


@pytest.mark.full
def test_explain_writes_queries(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path, prompts=("a b",))
    wanted = "forall x in ball(all, 0.001): norm_inf(drift({}, x)) <= 0.5"
    write_contract(tmp_path, wanted.format("mlp_0"), wanted.format("attn_0"))
    for clause, small in (("N-0", True), ("N-1", False)):
        ran = cli("explain", clause, "contract.yaml", "--vnnlib", f"asked-{clause}", cwd=tmp_path)
        assert ran.code == 0, ran
        files = sorted(p.name for p in (tmp_path / f"asked-{clause}").glob("*"))
        names = [f"{clause}-0-infer.onnx", f"{clause}-0-train.onnx", f"{clause}-0.vnnlib"]
        assert files == (names if small else []), ran.stdout
