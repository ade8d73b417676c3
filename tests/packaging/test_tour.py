"""docs/explanation/tour.md names existing functions, and its two values are correct."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kcdsl.check.compile import load_program
from kcdsl.check.expressions.statements import formula
from kcdsl.diagnostics import Sink
from kcdsl.ir.obligations import obligations_of
from kcdsl.model.checkpoint.tensors import load_checkpoint
from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl.release.requirements import required_clauses
from kcdsl.route.goals import goal_of
from kcdsl.source.files import read_source
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml
from kcdsl.syntax.parser import parse_expression
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.packaging.test_formal_pages import LINK, defined

MOST_STEPS = 8
THRESHOLD = Fraction(1, 100)
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(repository: Path) -> Path:
    return repository / "examples" / "tiny_lm"


def test_each_pipeline_has_few_steps_and_existing_functions(repository: Path) -> None:
    page = repository / "docs" / "explanation" / "tour.md"
    text = page.read_text(encoding="utf-8")
    assert WEIGHT in text
    roads = re.findall(r"^\| step \|.*?(?=\n\n)", text, re.M | re.S)
    assert len(roads) == 2
    for road in roads:
        rows = [line for line in road.splitlines() if re.match(r"\| \d", line)]
        assert 3 < len(rows) <= MOST_STEPS
        for number, row in enumerate(rows, 1):
            assert row.startswith(f"| {number} |")
            ((name, file),) = LINK.findall(row)[:1]
            assert name in defined(page.parent / file), row


def test_every_package_has_a_row(repository: Path) -> None:
    text = (repository / "docs" / "explanation" / "tour.md").read_text(encoding="utf-8")
    table = text.partition("| package | content |")[2].partition("\n\n")[0]
    first = " ".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    listed = re.findall(r"`([\w/]+)`", first)
    packages = {"grammar/kcdsl_grammar"}
    for parent in ("kcdsl", "backends/kcdsl_backends", "certs/kcdsl_certs"):
        made = (repository / parent).glob("*/__init__.py")
        packages |= {file.parent.relative_to(repository).as_posix() for file in made}
    assert sorted(listed) == sorted(packages)
    for part in ("`register`", "`promotion`", "`z3`", "`marabou`"):
        assert part in table


def test_threshold_is_exact_at_every_step(tiny: Path) -> None:
    sink = Sink()
    source = read_source(tiny / "contract.yaml")
    root = parse_yaml(source, sink)
    assert isinstance(root, Mapping)
    clauses = root.get("clauses")
    assert isinstance(clauses, Mapping)
    clause = clauses.get("N-ATTN-0")
    assert isinstance(clause, Mapping)
    require = clause.get("require")
    assert isinstance(require, Scalar)
    tree = parse_expression(source, require, sink)
    assert "Fraction(1, 100)" in repr(tree)
    assert not sink.found

    program = load_program(tiny / "contract.yaml")
    compiled = next(c for c in program.clauses if c.id == "N-ATTN-0")
    (obligation,) = obligations_of(compiled, None)
    assert obligation.comparison is not None
    assert obligation.comparison.threshold == THRESHOLD
    goal = goal_of(compiled)
    assert goal is not None
    assert goal.threshold == THRESHOLD
    assert goal.admits(0.01) is (Fraction(0.01) <= THRESHOLD)
    required = next(c for c in required_clauses(program, tiny) if c.id == "N-ATTN-0")
    ((comparison,),) = required.alternatives
    assert comparison.tau == THRESHOLD
    assert comparison.to_json()["tau"] == "0.01"
    assert callable(formula)


def test_both_programs_store_the_same_weight(tiny: Path) -> None:
    program = load_program(tiny / "contract.yaml")
    file = tiny / "model.safetensors"
    ours = load_checkpoint(file)
    single = ours.tensors[WEIGHT].to(torch.float32).numpy()
    digest = array_digest("float32", single.shape, single.tobytes())
    theirs = Parameters(read(file).tensors, {WEIGHT: digest})
    for kernel in (program.train, program.infer):
        numerics = resolve(kernel)
        stored = linear_weight(ours.tensors[WEIGHT].to(torch.float32), numerics)
        again = theirs.linear(WEIGHT, parse_kernel(numerics.to_json(), "train"))
        assert np.array_equal(stored.to(torch.float64).numpy(), again)
