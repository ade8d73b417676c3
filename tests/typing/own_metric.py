"""A user's code that declares a metric, as input for type checkers.

mypy and pyright read this file; nothing runs it. A comment `type: ignore` marks a mistake that both
must report; both also report a comment that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import kcdsl

assert_type(kcdsl.__version__, str)


@kcdsl.metric(
    family="numerical",
    unit="1",
    better="lower",
    counted="token",
    needs=["logits"],
    statistics=("max", "quantile"),
)
def spread(train: list[float], infer: list[float]) -> float:
    """Return the largest distance of two rows of logits."""
    return max(abs(a - b) for a, b in zip(train, infer, strict=True))


assert_type(spread([0.0], [1.0]), float)
spread([0.0])  # type: ignore[call-arg]

kept: Callable[[list[float], list[float]], float] = spread

kcdsl.metric(family="speed", unit="1", better="lower", counted="token", needs=[])  # type: ignore[arg-type]
kcdsl.metric(family="runtime", unit="s", better="faster", counted="token", needs=[])  # type: ignore[arg-type]
kcdsl.metric(family="runtime", unit="s", better="lower", counted="token")  # type: ignore[call-arg]
kcdsl.metric("runtime")  # type: ignore[call-arg]


def undecorated(**features: Any) -> float:
    """Serve as a function whose arguments are known by name alone."""
    return float(len(features))


again = kcdsl.metric(family="runtime", unit="s", better="lower", counted="request", needs=[])(
    undecorated
)
assert_type(again(logits=1), float)
