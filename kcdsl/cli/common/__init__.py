"""The common parts of commands: arguments, the contract, backends, output."""

from kcdsl.cli.common.declare import (
    Argument,
    Command,
    argument,
    choice,
    declare,
    from_environment,
    switch,
    value,
    values,
)

__all__ = [
    "Argument",
    "Command",
    "argument",
    "choice",
    "declare",
    "from_environment",
    "switch",
    "value",
    "values",
]
