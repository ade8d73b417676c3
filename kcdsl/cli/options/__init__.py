"""How commands declare their arguments, and the arguments that several commands share."""

from kcdsl.cli.options.declare import (
    Command,
    Option,
    argument,
    choice,
    declare,
    from_environment,
    switch,
    value,
    values,
)

__all__ = [
    "Command",
    "Option",
    "argument",
    "choice",
    "declare",
    "from_environment",
    "switch",
    "value",
    "values",
]
