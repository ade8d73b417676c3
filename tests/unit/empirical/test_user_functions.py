"""Functions of user metrics: loaded, called, and checked for invalid results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kcdsl.check.compile import load_program
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.terms import EvidenceKind, Family, Program, UserMetric
from kcdsl.verdict.model import InvalidEvidence, Verdict
from kcdsl_backends.empirical.metrics.user import (
    UserFunction,
    functions_record,
    load_functions,
    measures_of,
)

if TYPE_CHECKING:
    from tests.unit.empirical.conftest import Lab

Function = Callable[..., Any]


def declared(
    counted: str = "token",
    needs: tuple[str, ...] = ("logits",),
    unit: str = "nats",
    dimension: str = "nat",
    lower: str | None = "0",
    upper: str | None = None,
) -> UserMetric:
    """Return the declaration of a metric called `gap`."""
    return UserMetric(
        "gap",
        "own.py:gap",
        Family.NUMERICAL,
        counted,
        "lower",
        unit,
        dimension,
        ("max", "mean", "min", "quantile"),
        needs,
        lower=None if lower is None else Fraction(lower),
        upper=None if upper is None else Fraction(upper),
    )


def distance(train_logits: Any, infer_logits: Any) -> Any:
    """Return the largest difference of logits at each token."""
    return np.abs(train_logits - infer_logits).max(axis=-1)


def evaluated(
    lab: Lab,
    function: Function,
    metric: UserMetric | None = None,
    parameters: tuple[str, ...] = ("train_logits", "infer_logits"),
    limit: str = "100",
    **changes: Any,
) -> Any:
    """Return the row of `max(gap) <= limit` for two different kernels, beside `max(tv) <= 1`."""
    from dataclasses import replace

    user = UserFunction(metric or declared(), function, parameters, "a" * 64)
    clauses = (
        lab.clause(lab.statistic("max", "gap"), "<=", limit, id="OWN"),
        lab.clause(lab.statistic("max", "tv"), "<=", "1", id="TV"),
    )
    found = lab.setting(*clauses, infer=lab.kernel(lab.drifting(0.1)), user=(user,), **changes)
    program = replace(found.program, metrics=(user.metric,))
    from tests.support.evaluation import evaluate

    report = evaluate(replace(found, program=program)).report
    rows = {row.clause: row for row in report.clauses}
    assert not isinstance(rows["TV"].verdict, InvalidEvidence), "the other clauses go on"
    return rows["OWN"]


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict, InvalidEvidence), verdict
    return verdict.reason


def test_user_metric_per_token_equals_a_built_in_one(lab: Lab) -> None:
    own = evaluated(lab, distance)
    same = lab.evaluate(
        lab.clause(lab.statistic("max", "logit_linf"), "<=", "100"),
        infer=lab.kernel(lab.drifting(0.1)),
    ).report.clauses[0]
    assert own.value == same.value
    assert (own.unit, own.n, own.evidence) == ("nat", same.n, "census")
    assert own.estimators[0].formula == "own.py:gap"


def test_values_are_converted_from_the_unit_of_the_function(lab: Lab) -> None:
    metric = declared(unit="ms", dimension="s")
    found = evaluated(lab, lambda train_logits: np.full(len(train_logits), 250), metric,
                      ("train_logits",), limit="1/4")  # fmt: skip
    assert (found.value, found.unit) == (0.25, "s")
    assert str(found.verdict).startswith("Held")


@pytest.mark.parametrize("value", [3, np.float32(3), np.array([3]), True, [3.0]])
def test_user_metric_per_request(lab: Lab, value: Any) -> None:
    metric = declared("request", ("tokens",))
    found = evaluated(lab, lambda tokens: value, metric, ("tokens",))
    assert found.value == (1 if value is True else 3)


def test_arguments_of_a_user_function(lab: Lab) -> None:
    seen: dict[str, Any] = {}

    def look(**given: Any) -> Any:
        seen.update(given)
        return np.zeros(len(given["tokens"]))

    names = ("train_logits", "infer_logits", "train_hidden", "infer_hidden", "tokens", "labels",
             "sampled", "temperature")  # fmt: skip
    metric = declared(needs=("logits", "hidden", "tokens", "labels", "sampled"))
    found = evaluated(lab, look, metric, names)
    (row,) = lab.requests(1)
    shapes = {name: np.shape(seen[name]) for name in names}
    assert shapes == {
        "train_logits": (6, 16), "infer_logits": (6, 16), "train_hidden": (6, 4),
        "infer_hidden": (6, 4), "tokens": (6,), "labels": (6,), "sampled": (6,), "temperature": (),
    }  # fmt: skip
    assert {seen[name].dtype.name for name in names[:4]} == {"float64"}
    assert {seen[name].dtype.name for name in names[4:7]} == {"int64"}
    assert seen["labels"].tolist() == [*seen["tokens"].tolist()[1:], -1]
    assert len(row.tokens) == 6
    assert found.evidence == "sample", "values at sampled tokens vary from run to run"
    assert not seen["train_logits"].flags.writeable


def test_sampled_tokens_equal_those_of_built_in_metrics(lab: Lab) -> None:
    def ratio(train_logits: Any, infer_logits: Any, sampled: Any) -> Any:
        rows = np.arange(len(sampled))
        train = torch.log_softmax(torch.tensor(train_logits), -1).numpy()[rows, sampled]
        infer = torch.log_softmax(torch.tensor(infer_logits), -1).numpy()[rows, sampled]
        return np.abs(train - infer)

    metric = declared(needs=("logits", "sampled"))
    own = evaluated(lab, ratio, metric, ("train_logits", "infer_logits", "sampled"))
    same = lab.evaluate(
        lab.clause(lab.statistic("max", "log_ratio", magnitude=True), "<=", "100"),
        infer=lab.kernel(lab.drifting(0.1)),
    ).report.clauses[0]
    assert own.value == pytest.approx(same.value, rel=1e-12)


def raising(train_logits: Any) -> Any:
    raise KeyError("the file of weights")


def leaving(train_logits: Any) -> Any:
    raise SystemExit("gone")


def writing(train_logits: Any) -> Any:
    train_logits[0, 0] = 0
    return train_logits[:, 0]


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda train_logits: np.full(6, np.nan),
            "6 of the 6 values of the function are",
        ),
        (lambda train_logits: np.array([1, 2, 3, 4, 5, np.inf]), "1 of the 6"),
        (lambda train_logits: np.zeros(5), "shape [5], not one value per token"),
        (lambda train_logits: np.zeros((6, 1)), "shape [6, 1]"),
        (lambda train_logits: 0.0, "shape []"),
        (lambda train_logits: [], "shape [0]"),
        (lambda train_logits: None, "object, not numbers"),
        (lambda train_logits: ["1"] * 6, "not numbers"),
        (lambda train_logits: np.zeros(6) + 0j, "complex128, not numbers"),
        (lambda train_logits: np.full(6, -1.0), "returned -1.0, beyond the declared 0.0"),
        (raising, "raised KeyError: 'the file of weights'"),
        (leaving, "raised SystemExit: gone"),
        (writing, "read-only"),
        (lambda other: np.zeros(6), "raised TypeError"),
    ],
)
def test_invalid_results_are_invalid_evidence(lab: Lab, function: Function, why: str) -> None:
    assert why in reason(evaluated(lab, function, parameters=("train_logits",)).verdict)


def test_values_above_the_declared_range_are_invalid(lab: Lab) -> None:
    def high(train_logits: Any) -> Any:
        return np.full(len(train_logits), 1.5)

    metric = declared(upper="1")
    assert "beyond the declared 1.0" in reason(
        evaluated(lab, high, metric, ("train_logits",)).verdict
    )


def test_nondeterministic_function_is_not_evidence(lab: Lab) -> None:
    chance = np.random.default_rng(0)

    def random(train_logits: Any) -> Any:
        return chance.random(len(train_logits))

    found = evaluated(lab, random, parameters=("train_logits",))
    assert "other values when it is called again" in reason(found.verdict)


def test_encoder_provides_no_logits_to_user_functions(lab: Lab) -> None:
    with pytest.raises(Refusal, match="has no logits"):
        evaluated(lab, distance, encoder=True)


def test_ranges_and_noise_are_declared(lab: Lab) -> None:
    from dataclasses import replace

    program = replace(lab.program(), metrics=(declared(upper="2", needs=("sampled",)),))
    measure = measures_of(program)["gap"]
    assert (measure.low, measure.high, measure.noisy, measure.tier) == (0.0, 2.0, True, "C")
    assert measures_of(program)["kl"].name == "kl"


@pytest.mark.parametrize("name", ["reward_delta", "refusal_flip", "json_parse_gap"])
def test_metrics_without_inputs_are_refused(lab: Lab, name: str) -> None:
    kind = "rate" if name == "refusal_flip" else "aggregate"
    clause = lab.clause(lab.statistic(kind, name), "<=", "0.1")
    with pytest.raises(Refusal, match="carry no") as caught:
        lab.evaluate(clause)
    assert [d.code.id for d in caught.value.diagnostics] == ["KC624"]
    proved = lab.clause(lab.statistic(kind, name), "<=", "0.1", id="P", evidence=EvidenceKind.PROOF)
    other = lab.clause(lab.statistic("max", "kl"), "<=", "1", id="N")
    assert "P" in lab.evaluate(proved, other).report.deferred


# --- loading -------------------------------------------------------------------------------------

MODULE = """from kcdsl import metric


@metric(family="numerical", unit="1", better="lower", counted="request", needs=["tokens"])
def gap(tokens):
    return len(tokens)
"""
CONTRACT = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}}
clauses:
  A: {require: mean(gap) <= 3, level: L1}
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Program]:
    """Return a function that compiles a contract about `gap` of a module."""

    def compile_(module: str = MODULE, name: str = "own.py") -> Program:
        (tmp_path / "kcdsl.toml").write_text(f"metrics = [{json.dumps(name)}]\n")
        path = tmp_path / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module)
        (tmp_path / "contract.kc.yaml").write_text(CONTRACT)
        return load_program(tmp_path / "contract.kc.yaml")

    return compile_


def test_files_are_imported_by_their_path(
    compiled: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (found,) = load_functions(compiled(), tmp_path)
    assert (found.parameters, found.function(tokens=[1, 2])) == (("tokens",), 2)
    assert functions_record((found,)) == {
        "metrics": [{"name": "gap", "function": "own.py:gap", "sha256": found.sha256}]
    }
    assert len(found.sha256) == 64
    assert "own" not in sys.modules


def test_modules_are_imported_by_their_name(
    compiled: Callable[..., Program], tmp_path: Path
) -> None:
    program = compiled(MODULE, "userpack.inner.gaps")
    (found,) = load_functions(program, tmp_path)
    assert found.function.__module__ == "userpack.inner.gaps"
    assert str(tmp_path) not in sys.path


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (MODULE.replace('"lower"', '"lower", upper=9'), "declared otherwise"),
        (MODULE.replace("def gap", "def other"), "declares the metric `gap`"),
        (MODULE + "import no_such_module\n", "ModuleNotFoundError"),
        (MODULE + "raise SystemExit(3)\n", "SystemExit: 3"),
        (MODULE + "gap = 3\n", "is not the declared function"),
        (MODULE + "def gap(tokens): return 0\n", "is not the declared function"),
    ],
)
def test_changed_module_is_refused(
    compiled: Callable[..., Program], tmp_path: Path, module: str, why: str
) -> None:
    program = compiled()
    (tmp_path / "own.py").write_text(module)
    with pytest.raises(Refusal, match=why) as caught:
        load_functions(program, tmp_path)
    assert [d.code.id for d in caught.value.diagnostics] == ["KC626"]


def test_other_module_of_the_same_name_is_refused(
    compiled: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import ModuleType

    program = compiled(MODULE, "sharedname")
    other = ModuleType("sharedname")
    other.__file__ = "/elsewhere/sharedname.py"
    monkeypatch.setitem(sys.modules, "sharedname", other)
    with pytest.raises(Refusal, match="was read from"):
        load_functions(program, tmp_path)
