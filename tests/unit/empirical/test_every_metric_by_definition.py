"""Every metric of the language equals its definition.

`tests/support/metric_definitions.py` defines each in plain Python. Random requests and rollouts are
measured as in an evaluation, and every number is compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl.ir.terms import Metric, Statistic, Term
from kcdsl.metrics import MEASURES, METRICS, RECORDED
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.metrics.measures import AGGREGATES, gradient_function
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.sources.rollouts.prompts import groups_of, run_of, timed
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics, Side, TopLogs
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData
from kcdsl_backends.requests import Request
from tests.support import metric_definitions as defined
from tests.support.metric_definitions import DEFINED, Sequence_, Text

WORDS, WIDTH = 24, 5
SCALES = (1e-6, 1e-3, 0.02, 0.3, 1.5, 4.0)
"""The distances of the kernels at a position."""
REPEATS, PEAK = (7, 9), 1.25e9


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """A kernel that returns the rows of the texts."""

    logits_of: Mapping[tuple[int, ...], list[list[float]]]
    states_of: Mapping[tuple[int, ...], list[list[float]]]
    gold_of: Mapping[tuple[int, ...], list[list[float]]]

    def logits(self, ids: Any) -> Tensor:
        return torch.tensor(self.logits_of[tuple(ids)], dtype=torch.float64)

    def hidden(self, ids: Any) -> Tensor:
        return torch.tensor(self.states_of[tuple(ids)], dtype=torch.float64)

    def gold(self, ids: Any) -> Tensor:
        return torch.tensor(self.gold_of[tuple(ids)], dtype=torch.float64)

    def block(self, name: str, x: Tensor) -> Tensor:
        return x

    def tokens(self, ids: Any) -> Tensor:
        return torch.tensor(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens.tolist())

    def fingerprint(self) -> dict[str, Any]:
        return {}


@cache
def texts() -> tuple[tuple[Text, ...], SliceData]:
    """Return requests, and the measured values.

    The sampled token is inferred from the measured ln w, which must match some token.
    """
    draw = random.Random(11)
    made = []
    for number in range(40):
        ids = (number % WORDS, number // WORDS, *(draw.randrange(WORDS) for _ in range(7)))
        rows: list[list[list[float]]] = [[], [], []]
        for _ in ids:
            row = [draw.gauss(0, 2.5) for _ in range(WORDS)]
            scale = draw.choice(SCALES)
            rows[0].append(row)
            rows[1].append([z + draw.gauss(0, scale) for z in row])
            if number % 4 == 0 and len(rows[1]) == 4:
                lowest = row.index(min(row))
                rows[1][-1][lowest] = max(row) + 3
            rows[2].append([z + draw.gauss(0, 0.1) for z in row])
        states = [[[draw.gauss(0.3, 1) for _ in range(WIDTH)] for _ in ids] for _ in range(2)]
        made.append((ids, rows, states))
    train, infer = (
        Answers(
            {ids: rows[side] for ids, rows, _ in made},
            {ids: states[side] for ids, _, states in made},
            {ids: rows[2] for ids, rows, _ in made},
        )
        for side in (0, 1)
    )
    wanted = frozenset({*MEASURES, *AGGREGATES, "noise_ratio"})
    plan = MeasurementPlan(wanted, 1.0, 5, encoder=False, gradient=gradient_function(2.0, 3.0))
    found, units = [], []
    for number, (ids, rows, states) in enumerate(made):
        request = Request(f"f:{number}", str(number), ids, {}, number + 1)
        unit = run_request(request, train, infer, plan, lambda r, b: torch.ones(1)).unit
        assert unit.failure is None
        drawn = []
        for a, b, ratio in zip(rows[0], rows[1], unit.values["log_ratio"], strict=True):
            apart = [
                abs(p - q - ratio) for p, q in zip(defined.logs(a), defined.logs(b), strict=True)
            ]
            drawn.append(apart.index(min(apart)))
            assert min(apart) < 1e-12
        found.append(Text(ids, rows[0], rows[1], rows[2], (states[0], states[1]), tuple(drawn)))
        units.append(unit)
    known = {**MEASURES, **RECORDED}
    return tuple(found), SliceData("all", tuple(units), (), REPEATS, PEAK, measures=known)


# --- rollouts ------------------------------------------------------------------------------------


def _tops(draw: random.Random, token: int, log: float) -> list[tuple[int, float]]:
    """Return three listed tokens, most likely first; the sampled one may be among them."""
    ids = draw.sample([t for t in range(12) if t != token], 3)
    shares = sorted((draw.uniform(0.02, 0.2) for _ in ids), reverse=True)
    rows = [(t, math.log(share)) for t, share in zip(ids, shares, strict=True)]
    if draw.random() < 0.5:
        rows[-1] = (token, log)
        rows.sort(key=lambda row: -row[1])
    return rows


def _sequence(draw: random.Random, number: int) -> Sequence_:
    size = draw.randrange(4, 12)
    tokens = tuple(draw.randrange(12) for _ in range(size))
    infer = [math.log(draw.uniform(0.05, 0.25)) for _ in tokens]
    bias = draw.gauss(0, 0.2)
    train = [min(q + draw.gauss(bias, 0.3), math.log(0.3)) for q in infer]
    texts = ['{"city": "Rome"}', '{"city": 3}', "[1, 2]", "no json", '{"city": "Oslo", "n": 1}']
    one, other = [draw.choice(texts) for _ in range(2)]
    routes = [[[draw.sample(range(6), 2) for _ in range(3)] for _ in tokens] for _ in range(2)]
    for at in range(size):  # most tokens keep their experts
        for layer in range(3):
            if draw.random() < 0.8:
                routes[1][at][layer] = routes[0][at][layer][::-1]
    arrived = draw.uniform(0, 5)
    stamps = [arrived + draw.uniform(0.1, 0.3)]
    while len(stamps) < size:
        stamps.append(stamps[-1] + draw.uniform(0.01, 0.05))
    return Sequence_(
        tokens,
        train,
        infer,
        (
            [_tops(draw, t, p) for t, p in zip(tokens, train, strict=True)],
            [_tops(draw, t, q) for t, q in zip(tokens, infer, strict=True)],
        ),
        [draw.gauss(0.2, 1) for _ in tokens],
        (draw.random(), draw.random()),
        (draw.random() < 0.5, draw.random() < 0.3),
        (one, other),
        draw.choice(texts),
        ([draw.gauss(1, 1) for _ in range(4)], [draw.gauss(1, 1) for _ in range(4)]),
        (routes[0], routes[1]),
        [[[draw.random() for _ in range(6)] for _ in range(3)] for _ in tokens],
        arrived,
        stamps,
        2 + number % 3,
        (2, 4, 8, 2.0),
    )


def _side(logs: list[float], listed: list[list[tuple[int, float]]]) -> Side:
    ids = np.array([[token for token, _ in row] for row in listed], dtype=np.int64)
    top = TopLogs(ids, np.array([[log for _, log in row] for row in listed]))
    return Side(np.array(logs), Semantics("raw"), top)


def _recorded(one: Sequence_, number: int) -> Rollout:
    """Return a rollout in the form of the file readers."""
    return Rollout(
        f"r{number}",
        (number, *range(one.prompt - 1)),
        one.tokens,
        np.ones(len(one.tokens), dtype=bool),
        _side(one.train, one.tops[0]),
        _side(one.infer, one.tops[1]),
        numbers={
            "train_reward": one.rewards[0],
            "infer_reward": one.rewards[1],
            "train_refused": float(one.refused[0]),
            "infer_refused": float(one.refused[1]),
            "arrived": one.arrived,
        },
        fields={
            "role:train_text": one.texts[0],
            "role:infer_text": one.texts[1],
            "role:reference": one.reference,
            "role:schema": {"city": "string"},
        },
        arrays={
            "advantages": np.array(one.advantages),
            "train_gradient": np.array(one.gradients[0]),
            "infer_gradient": np.array(one.gradients[1]),
            "train_routes": np.array(one.routes[0]),
            "infer_routes": np.array(one.routes[1]),
            "train_router_scores": np.array(one.scores),
            "stamps": np.array(one.stamps),
            "cache": np.array(one.cache),
        },
        place=f"row {number + 1}",
    )


@cache
def rollouts() -> tuple[tuple[Sequence_, ...], SliceData]:
    """Return rollouts with distinct prompts, and the measured values."""
    draw = random.Random(23)
    made = tuple(_sequence(draw, number) for number in range(24))
    rows = [_recorded(one, number) for number, one in enumerate(made)]
    groups = groups_of("f", rows, rows)
    assert len(groups) == len(rows)
    units = tuple(run_of(group, frozenset(METRICS), 0).unit for group in groups)
    assert not [unit.failure for unit in units if unit.failure]
    runs = tuple(run for group in groups for run in timed(group))
    return made, SliceData("all", units, runs, measures={**MEASURES, **RECORDED})


# --- both roads ----------------------------------------------------------------------------------


def statistic(name: str) -> str:
    """Return the statistic for comparing a metric: its mean where clauses allow it."""
    definition = METRICS[name]
    if definition.kind == "aggregate":
        return "aggregate"
    return "mean" if "mean" in definition.statistics else "max"


def read(name: str, data: SliceData) -> float:
    """Return the value that a clause gets."""
    kind = statistic(name)
    term: Term = Metric(name) if kind == "aggregate" else Statistic(kind, Metric(name), None)
    found, _ = evaluate(term, data, "upper", Settings(0, None))
    return float(found.value)


def both(name: str) -> tuple[float, float]:
    """Return the value that a clause gets, and the one by definition."""
    match name:
        case "failure_rate":
            good, lost = SamplingUnit("a", 1), SamplingUnit("b", 1, failure="lost")
            data = SliceData("all", (good,) * 5 + (lost,) * 2)
            return read(name, data), 2 / 7
        case "peak_memory":
            return read(name, texts()[1]), PEAK
        case "determinism":
            return read(name, texts()[1]), REPEATS[0] / REPEATS[1]
    several: Callable[[list[float]], float] = fmean if statistic(name) == "mean" else max
    requests, forward = texts()
    sequences, recorded = rollouts()
    if name in defined.OF_TEXTS:
        values = [value for text in requests for value in defined.OF_TEXTS[name](text)]
        return read(name, forward), several(values)
    if name in defined.OF_SLICES:
        return read(name, forward), defined.OF_SLICES[name](requests)
    if name in defined.OF_ROLLOUTS:
        values = [value for one in sequences for value in defined.OF_ROLLOUTS[name](one)]
        return read(name, recorded), several(values)
    return read(name, recorded), defined.OF_BATCHES[name](sequences)


def test_every_metric_of_the_language_has_a_definition() -> None:
    assert METRICS.keys() == DEFINED
    assert len(METRICS) == len(MEASURES) + len(RECORDED)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_clause_values_equal_the_definition(name: str) -> None:
    measured, expected = both(name)
    assert measured == pytest.approx(expected, rel=1e-7, abs=1e-13)
    # a meaningless value would make the comparison trivial
    assert abs(expected) > 1e-4
    assert expected != 1.0


@pytest.mark.parametrize("name", sorted(METRICS))
def test_relative_error_of_a_millionth_is_detected(name: str) -> None:
    measured, expected = both(name)
    assert measured * (1 + 1e-6) != pytest.approx(expected, rel=1e-7, abs=1e-13)


def test_percentiles_use_the_worst_value_of_each_request() -> None:
    requests, data = texts()
    worst = sorted(max(defined.OF_TEXTS["tv"](text)) for text in requests)
    for percent in (50, 90, 95, 99):
        term = Statistic("quantile", Metric("tv"), Fraction(percent, 100))
        found, _ = evaluate(term, data, "upper", Settings(0, None))
        rank = math.ceil(Fraction(percent, 100) * len(worst))
        assert float(found.value) == pytest.approx(worst[rank - 1], rel=1e-12)
