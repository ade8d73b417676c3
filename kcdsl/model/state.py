"""What a module remembers from one run to the next: a program that does is not one program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse

_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch keeps of every module; of them, buffers and parameters count."""
_CHANGED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules that changed, and what of them: their next run may change nothing more."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Run a module inside. Refuse one that has changed an attribute, a buffer or a parameter then:
    a table that it made on its first run is of the format and the length of that run.

    Containers and objects of attributes are followed; what functions and globals hold is not seen.
    """
    if module not in _CHANGED:
        before, kept = _state(module)
        yield
        after, _ = _state(module)
        del kept  # not before, so that no object takes the identity of another
        places = [p for p in dict.fromkeys((*after, *before)) if before.get(p) != after.get(p)]
        if not places:
            return
        _CHANGED[module] = places[0]
    raise refuse(
        codes.MODEL_FACTORY,
        f"the model changes its {_CHANGED[module]!r} when it runs: what it computes depends on what"
        " ran before",
        help="make what is kept in __init__, and tables as buffers",
    )


def _state(module: nn.Module) -> tuple[dict[str, Any], list[Any]]:
    """Return what each attribute holds, by its path, and the objects that this speaks of."""
    seen: dict[int, Any] = {}
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k not in _OWN}
        for name, value in {**part._buffers, **part._parameters, **own}.items():
            found[f"{path}.{name}".removeprefix(".")] = _held(value, seen)
    return found, list(seen.values())


def _held(value: Any, seen: dict[int, Any]) -> Any:
    """Return what compares equal while a value is the same; an object is followed once."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    match value:
        case Tensor():
            return id(value), None if value.is_inference() else value._version
        case list() | tuple():
            return [_held(v, seen) for v in value]
        case dict():
            return [(_held(k, seen), _held(v, seen)) for k, v in value.items()]
        case set() | frozenset():
            return {repr(v) for v in value}
        case np.ndarray():
            return id(value), value.tobytes()
        case type() | FunctionType() | ModuleType():
            return id(value)
        case _:
            return id(value), _held(getattr(value, "__dict__", None), seen)
