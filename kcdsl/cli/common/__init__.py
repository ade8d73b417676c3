"""What commands have in common: arguments, the contract, backends, output."""

from kcdsl.cli.common.declare import (
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
