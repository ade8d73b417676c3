"""The decorator by which a Python function becomes a metric of contracts.

Contracts are compiled without running Python: the arguments are read from the text of the module,
so each of them is a literal. `grammar/README.md` says what a function is given and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__kcdsl_metric__"


def metric(
    *,
    family: Literal["numerical", "statistical", "runtime", "observability"],
    unit: str,
    better: Literal["lower", "higher"],
    counted: Literal["token", "request"],
    needs: Sequence[Literal["logits", "hidden", "tokens", "labels", "sampled"]],
    name: str | None = None,
    statistics: Sequence[Literal["mean", "max", "min", "quantile", "rate"]] = (
        "mean",
        "max",
        "min",
        "quantile",
    ),
    summary: str | None = None,
    signed: bool = False,
    lower: float | None = 0,
    upper: float | None = None,
) -> Callable[[Function], Function]:
    """Declare a function as a metric; the function itself stays as it is.

    Args:
        family: the clause family of the metric.
        unit: the unit in which the function returns its values, such as "nats" or "1".
        better: which values are good.
        counted: what has one value: each token of a request, or the request.
        needs: what the function is given.
        name: the name in contracts; the name of the function if left out.
        statistics: those that a contract may form.
        summary: one line for people; the first line of the docstring if left out.
        signed: both signs are bad, and contracts bound the metric through `abs(...)`; it has then
            no `lower` unless one is stated.
        lower: the smallest value possible in `unit`, None where there is none.
        upper: the largest value possible in `unit`, None where there is none.
    """
    declared = {
        "family": family,
        "unit": unit,
        "better": better,
        "counted": counted,
        "needs": tuple(needs),
        "name": name,
        "statistics": tuple(statistics),
        "summary": summary,
        "signed": signed,
        "lower": lower,
        "upper": upper,
    }

    def mark(function: Function) -> Function:
        setattr(function, MARK, declared)
        return function

    return mark
