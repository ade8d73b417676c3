"""Commands as data: a command is a dataclass, and each field declares one of its arguments.

The declaration determines the argparse argument, the environment variable of its default, and the
shell completion. The command line overrides the environment: KCDSL_LINT_FAIL_ON is the default of
`kcdsl lint --fail-on`. In a variable, a list is separated by commas and a switch is 1 or 0. A
variable without a matching option is refused, to find misspelt ones.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.diagnostics.report import suggest
from kcdsl.exits import Exit
from kcdsl.source.config import truth

Settings = TypeVar("Settings")
_FILES = {
    "PATH", "FILE", "CONTRACT", "OLD", "NEW", "CERT", "CHECKPOINT", "STATEMENT", "REPORT", "TABLE",
    "TRACE", "KEY", "PUB", "CODE|METRIC|CLAUSE", "FORMAT[=FILE]", "INCUMBENT", "CANDIDATE",
    "EVIDENCE", "QUERY", "NAME=FILE", "URL",
}  # fmt: skip
"""The metavars of files in the help."""


@dataclass(frozen=True, slots=True)
class Argument:
    """The declaration of an argument.

    Args:
        help: the help text, without the default.
        metavar: the name of its value in the help; None for a switch and for `choices`.
        default: its default value.
        read: turns a text into a value; raises ValueError or ArgumentTypeError.
        choices: the allowed texts.
        many: whether it may be repeated; its value is a tuple.
        positional: the `nargs` of argparse ("" for one); None for an option.
        name: the name of an option, if it differs from that of the field.
        short: a one-letter name.
        group: a group of mutually exclusive options.
        words: further completions, besides `choices`.
        writes: whether its value is a file or a folder for results.
    """

    help: str
    metavar: str | None = None
    default: Any = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    many: bool = False
    positional: str | None = None
    name: str | None = None
    short: str | None = None
    group: str | None = None
    words: Callable[[], Iterable[str]] | None = None
    writes: bool = False

    @property
    def is_file(self) -> bool:
        """Return whether its value names a file."""
        return self.metavar in _FILES

    @property
    def is_switch(self) -> bool:
        """Return whether it has no value."""
        return self.metavar is None and not self.choices

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of an option, the long one last; none of a positional argument."""
        if self.positional is not None:
            return ()
        return tuple(filter(None, (self.short, f"--{self.name}")))

    @property
    def described(self) -> str:
        """Return the help with the default."""
        default = self.default
        if default is None or default is False or default == ():
            return self.help
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        return f"{self.help} (default: {shown})"

    def add_to(self, parser: argparse._ActionsContainer, field: str) -> None:
        """Add the argument to a parser; the namespace has only given values."""
        more: dict[str, Any] = {"help": self.described.replace("%", "%%")}
        if self.is_switch:
            more["action"] = "store_true"
        else:
            more |= {"metavar": self.metavar, "type": self.read}
            more |= {"choices": self.choices} if self.choices else {}
            more |= {"nargs": self.positional} if self.positional else {}
            more |= {"action": "append"} if self.many and self.positional is None else {}
        if self.names:
            more["dest"] = field
        parser.add_argument(*(self.names or (field,)), default=argparse.SUPPRESS, **more)

    def spelled(self, variable: str, text: str) -> Any:
        """Return the value of an environment variable; raises Refusal."""
        if self.is_switch:
            found = truth(text)
            if found is None:
                raise _refused(variable, text, "1 or 0")
            return found
        if self.many:
            parts = (part.strip() for part in text.split(","))
            return tuple(self._item(variable, part) for part in parts if part)
        return self._item(variable, text)

    def _item(self, variable: str, text: str) -> Any:
        try:
            found = self.read(text)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise _refused(variable, text, str(error)) from error
        if self.choices and found not in self.choices:
            raise _refused(variable, text, f"allowed: {', '.join(self.choices)}")
        return found


def _refused(variable: str, text: str, help: str) -> Refusal:
    return refuse(USAGE, f"{variable} is {text!r}", help=help)


# --- declarations of fields ----------------------------------------------------------------------


def argument(metavar: str, help: str, nargs: str = "", **more: Any) -> Any:
    """Declare a positional argument; `nargs` is that of argparse."""
    many = nargs in {"*", "+"}
    return _declared(
        Argument(help, metavar, () if many else None, many=many, positional=nargs, **more)
    )


def value(metavar: str, help: str, default: Any = None, **more: Any) -> Any:
    """Declare an option with a value."""
    return _declared(Argument(help, metavar, default, **more))


def values(metavar: str, help: str, default: tuple[Any, ...] | None = (), **more: Any) -> Any:
    """Declare an option that may be repeated."""
    return _declared(Argument(help, metavar, default, many=True, **more))


def switch(help: str, **more: Any) -> Any:
    """Declare an option without a value."""
    return _declared(Argument(help, default=False, **more))


def choice(words: Iterable[str], help: str, default: Any = None, **more: Any) -> Any:
    """Declare an option, or a positional argument, with a fixed set of values, such as the members
    of an enum."""
    members = {str(word): word for word in words}

    def read(text: str) -> str:
        return members.get(text, text)

    return _declared(Argument(help, None, default, read, tuple(members), **more))


def _declared(option: Argument) -> Any:
    return field(default=option.default, metadata={"option": option})


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with its arguments."""

    epilog: ClassVar[str | None] = None
    """The epilog of its help."""

    def run(self) -> Exit:
        """Run the command; raises Refusal where it cannot."""
        raise NotImplementedError

    def settings(self, kind: type[Settings], **more: Any) -> Settings:
        """Return settings, a dataclass: `more`, and the values of the other fields from arguments
        and properties of the command, with enum members as words."""
        wanted = (f.name for f in fields(kind) if f.name not in more)  # type: ignore[arg-type]  # data
        found = {name: getattr(self, name) for name in wanted if hasattr(self, name)}
        plain = {n: v.value if isinstance(v, Enum) else v for n, v in found.items()}
        return kind(**plain, **more)

    def named_files(self, *, written: bool) -> Iterator[str]:
        """Yield the existing files that arguments name: those for results, or all others."""
        for name, option in self.options():
            if option.is_file and option.writes is written:
                found = getattr(self, name)
                for word in found if isinstance(found, tuple) else (found or "",):
                    path = word.partition("=")[2] if "=" in (option.metavar or "") else word
                    if os.path.isfile(path):
                        yield path

    @classmethod
    def options(cls) -> Iterator[tuple[str, Argument]]:
        """Yield field and declaration of each argument: own ones, then inherited ones."""
        declared = {f.name: f.metadata["option"] for f in fields(cls) if f.metadata}
        for owner in cls.__mro__:
            for name in get_annotations(owner):
                if name in declared:
                    option = declared.pop(name)
                    yield name, replace(option, name=option.name or name.replace("_", "-"))


def declare(parser: argparse.ArgumentParser, command: type[Command]) -> None:
    """Add the arguments of a command to its parser."""
    groups: dict[str, argparse._ActionsContainer] = {}
    for name, option in command.options():
        target: argparse._ActionsContainer = parser
        if option.group is not None:
            if option.group not in groups:
                groups[option.group] = parser.add_mutually_exclusive_group()
            target = groups[option.group]
        option.add_to(target, name)


def from_environment(
    name: str, command: type[Command], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of arguments from environment variables, by field; raises Refusal."""
    start = f"KCDSL_{name.upper()}_"
    given = sorted(variable for variable in environment if variable.startswith(start))
    if not given:
        return {}
    known = {
        start + option.names[-1].removeprefix("--").replace("-", "_").upper(): (field, option)
        for field, option in command.options()
        if option.names
    }
    found = {}
    for variable in given:
        if variable not in known:
            raise refuse(
                USAGE,
                f"{variable} names no option of `kcdsl {name}`",
                help=suggest(variable, sorted(known), "its variables"),
            )
        field, option = known[variable]
        found[field] = option.spelled(variable, environment[variable])
    return found
