"""Defaults of options from the environment: KCDSL_LINT_FAIL_ON is that of `kcdsl lint --fail-on`.

What the command line says counts more. A list is separated by commas, a switch takes 1 or 0. A
variable that names no option is refused, so that a misspelt one does not pass unnoticed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kcdsl.config import truth
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import USAGE


def prefix(command: str) -> str:
    """Return how the variables of a command begin."""
    return f"KCDSL_{command.upper().replace(' ', '_')}_"


def set_defaults(
    parser: argparse.ArgumentParser, command: str, environment: Mapping[str, str]
) -> None:
    """Make the variables of a command the defaults of its options; raises Refusal."""
    options = {
        option.removeprefix("--").replace("-", "_").upper(): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.dest not in {"help", "traceback", "color"}
    }
    start = prefix(command)
    inside = {
        f"{command} {name}": child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }
    for name, child in inside.items():
        set_defaults(child, name, environment)
    for variable in sorted(name for name in environment if name.startswith(start)):
        if variable.startswith(tuple(prefix(name) for name in inside)):
            continue
        action = options.get(variable.removeprefix(start))
        if action is None:
            from kcdsl.diagnostics.report import suggest

            raise refuse(
                USAGE,
                f"{variable} names no option of `kcdsl {command}`",
                help=suggest(variable, [start + name for name in sorted(options)], "its variables"),
            )
        action.default = _value(action, variable, environment[variable])
        action.required = False


def _value(action: argparse.Action, variable: str, text: str) -> Any:
    if action.nargs == 0:
        value = truth(text)
        if value is None:
            raise _refused(variable, text, "1 or 0")
        return value
    if isinstance(action, argparse._AppendAction):
        parts = (part.strip() for part in text.split(","))
        return _Replaced(_item(action, variable, part) for part in parts if part)
    return _item(action, variable, text)


class _Replaced(list[Any]):
    """A list that the command line begins anew: argparse adds to a copy of the default."""

    def __copy__(self) -> list[Any]:
        return []


def _item(action: argparse.Action, variable: str, text: str) -> Any:
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise _refused(variable, text, str(error)) from error
    if action.choices is not None and value not in action.choices:
        raise _refused(variable, text, f"allowed: {', '.join(map(str, action.choices))}")
    return value


def _refused(variable: str, text: str, help: str) -> Refusal:
    return refuse(USAGE, f"{variable} is {text!r}", help=help)
