"""Goals whose answer is known without a solver.

Every block is small enough that its largest drift can be derived by hand; `because` has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

FLOAT32 = {"preset": "torch-eager", "casts": "nearest"}
BFLOAT16 = {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"}
FREE = {"preset": "torch-eager", "compute": "bfloat16", "casts": "any"}
FLOAT16 = {"preset": "torch-eager", "compute": "float16", "casts": "nearest"}


class KnownAnswer(StrEnum):
    """The correct answer to a goal; an undecided verdict with a reason is admitted too."""

    TRUE = "held"
    FALSE = "violated"
    OPEN = "open"
    """No decision is correct: there is no evidence, or no number to compare."""


@dataclass(frozen=True, slots=True)
class KnownGoal:
    """A goal about the block `mlp_0`, with its answer.

    Args:
        steps: the parts of the block (`network.STEPS`).
        rows: the inputs [T, D] of the block, as rows of the embedding.
        require: the clause.
        least: a drift that a run attains; no finite bound is below it.
        parameters: parameters of the block by name; others are zero.
        where: a condition of the slice.
    """

    name: str
    steps: tuple[str, ...]
    rows: Sequence[Sequence[float]]
    require: str
    answer: KnownAnswer
    because: str
    train: Mapping[str, Any] = field(default_factory=lambda: FLOAT32)
    infer: Mapping[str, Any] = field(default_factory=lambda: BFLOAT16)
    least: float = 0.0
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    where: str = ""


def _drift(op: str, limit: float, region: str = "points(all)") -> str:
    return f"forall x in {region}: norm_inf(drift(mlp_0, x)) {op} {limit!r}"


def _cast(name: str, scale: float) -> list[KnownGoal]:
    """Return goals on a number a quarter of a step above a bfloat16 number: the cast to nearest
    moves it by that quarter, and ReLU does not round."""
    number, quarter = scale * (1 + 2.0**-9), scale * 2.0**-9
    goals = [
        ("is at most a little more", "<=", 1.001 * quarter, KnownAnswer.TRUE),
        ("is not below a little less", "<", 0.999 * quarter, KnownAnswer.FALSE),
    ]
    if scale == 1:  # the limits have few digits
        goals += [
            ("is at most itself", "<=", quarter, KnownAnswer.TRUE),
            ("is not less than itself", "<", quarter, KnownAnswer.FALSE),
        ]
    why = "bfloat16 numbers near it are 2^-7 of its power of two apart"
    return [
        KnownGoal(
            f"{name}: a rounding {detail}",
            *(("relu",), [[number, number]], _drift(op, limit), answer, why),
            least=quarter,
        )
        for detail, op, limit, answer in goals
    ]


def known_goals() -> tuple[KnownGoal, ...]:
    """Return all goals with known answers."""
    one, quarter = 1 + 2.0**-9, 2.0**-9
    nan, infinite = torch.tensor([[float("nan"), 0.0], [0.0, 1.0]]), torch.eye(2) * float("inf")
    eye, zero = torch.eye(2), torch.zeros(2, 2)
    slope = {"part.0.weight": 3 * eye}
    steep, at_one = ("linear", "relu"), [[1.0, 1.0]]
    ball = "ball(all, 0.5)"
    return (
        KnownGoal(
            *(
                "no drift is at most 0",
                ("relu",),
                [[one, -one]],
                _drift("<=", 0.0),
                KnownAnswer.TRUE,
            ),
            "neither kernel rounds: the numbers are of float32",
            infer=FLOAT32,
        ),
        *_cast("ordinary numbers", 1.0),
        *_cast("tiny numbers", 2.0**-100),
        *_cast("huge numbers", 2.0**100),
        KnownGoal(
            "a free cast moves a number by up to 2^-8 of itself: enough room",
            *(("relu",), [[one, one]], _drift("<=", 0.00393), KnownAnswer.TRUE),
            "2^-8·(1 + 2^-9) and 2^-8 of that",
            infer=FREE,
            least=quarter,
        ),
        KnownGoal(
            "a free cast moves a number by up to 2^-8 of itself: too little room",
            *(("relu",), [[one, one]], _drift("<=", 0.0038), KnownAnswer.FALSE),
            "2^-8·(1 + 2^-9)",
            infer=FREE,
            least=quarter,
        ),
        KnownGoal(
            "a slope in a ball: enough room",
            *(steep, at_one, _drift("<=", 0.03, ball), KnownAnswer.TRUE),
            "3·2^-8 of the input, 2^-6 of the result, and what float32 rounds: below 0.0274",
            parameters=slope,
        ),
        KnownGoal(
            "a slope in a ball: too little room",
            *(steep, at_one, _drift("<=", 0.001, ball), KnownAnswer.FALSE),
            "near x = 1.25 the cast of the input alone moves the result by 3·2^-9 and more",
            parameters=slope,
        ),
        KnownGoal(
            "constant input: the result does not read it",
            *(("linear",), at_one, _drift("<=", 2 * quarter, "ball(all, 1)"), KnownAnswer.TRUE),
            "only the bias is cast, by a quarter of a step",
            parameters={"part.0.weight": zero, "part.0.bias": torch.tensor([one, one])},
            least=quarter,
        ),
        KnownGoal(
            "constant input: what it is cast by is not nothing",
            *(("linear",), at_one, _drift("<=", quarter / 2, "ball(all, 1)"), KnownAnswer.FALSE),
            "only the bias is cast, by a quarter of a step",
            parameters={"part.0.weight": zero, "part.0.bias": torch.tensor([one, one])},
            least=quarter,
        ),
        KnownGoal(
            *("an empty region", ("relu",), at_one, _drift("<=", 1.0), KnownAnswer.OPEN),
            "a statement about no input is no evidence",
            where="length > 100",
        ),
        KnownGoal(
            *("a weight is NaN", ("linear",), at_one, _drift("<=", 1e9), KnownAnswer.OPEN),
            "no run has a number to compare",
            parameters={"part.0.weight": nan},
        ),
        KnownGoal(
            *("a weight is infinite", ("linear",), at_one, _drift("<=", 1e9), KnownAnswer.OPEN),
            "the result is infinite or NaN in both kernels",
            parameters={"part.0.weight": infinite},
        ),
        KnownGoal(
            *(
                "an overflow is reached",
                ("relu",),
                [[1e5, 1.0]],
                _drift("<=", 1e9),
                KnownAnswer.FALSE,
            ),
            "float16 ends at 65504",
            infer=FLOAT16,
            least=float("inf"),
        ),
        KnownGoal(
            "an overflow is reached in a part of the region",
            *(("linear",), at_one, _drift("<=", 1e9, "ball(all, 0.5)"), KnownAnswer.FALSE),
            "float16 ends at 65504, which 50000·1.5 exceeds",
            infer=FLOAT16,
            parameters={"part.0.weight": 5e4 * eye},
            least=float("inf"),
        ),
    )


LADDER = tuple(2.0**power for power in range(-14, 3, 2))
"""Rising limits of one goal: if one holds, all larger ones hold, and no run violates them."""
