"""What foreign code prints: a user's metrics, a user's model, libraries that speak while loading.

Stdout is for results, and a `print` of somebody else's would stand inside of a document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def prints_aside(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with whatever is printed while it runs on stderr."""

    @wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        with redirect_stdout(sys.stderr):
            return function(*arguments, **named)

    return called
