"""`kcdsl completion`: completion scripts for shells, made from the declared arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kcdsl.cli.completion_scripts import Command, Option, bash, fish, zsh
from kcdsl.exits import Exit

HELP = "print the completion script for a shell"
SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
_FILES = {
    "PATH", "FILE", "CONTRACT", "OLD", "NEW", "CERT", "KEY", "PUB", "CODE|CLAUSE", "FORMAT[=FILE]",
}  # fmt: skip
"""What stands in the help for a file."""
_FOLDERS = {"DIR", "FOLDER"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that will read the script")


def run(arguments: argparse.Namespace) -> Exit:
    """Print the script; a shell reads it with `source <(kcdsl completion bash)` or the like."""
    print(SHELLS[arguments.shell](commands()), end="")
    return Exit.HELD


def commands() -> list[Command]:
    """Return what can be written: for no command yet (whose name is empty), for each command, and
    for each action of one, such as `config show`."""
    from kcdsl.cli import COMMANDS, _parser

    return list(_commands(_parser(tuple(COMMANDS)), "", ""))


def _commands(parser: argparse.ArgumentParser, name: str, help: str) -> Iterator[Command]:
    words: tuple[tuple[str, str], ...] = ()
    takes, options, below = "", [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            words += tuple((word, helps.get(word, "")) for word in action.choices)
            below = [(child, word, helps.get(word, "")) for word, child in action.choices.items()]
            continue
        about = Option(
            tuple(action.option_strings),
            " ".join((action.help or "").split()).replace("%%", "%"),
            action.nargs != 0,
            _words(name, action),
            _takes(action),
        )
        if about.names:
            options.append(about)
        else:
            words += tuple((word, "") for word in about.words)
            takes = takes or about.takes
    yield Command(name, help, tuple(options), words, takes)
    for child, word, text in below:
        yield from _commands(child, f"{name} {word}".strip(), text)


def _words(command: str, action: argparse.Action) -> tuple[str, ...]:
    """Return the words that an argument may be, where they are known."""
    from kcdsl.diagnostics.codes import FAMILIES, all_codes
    from kcdsl.diagnostics.render import FORMATS

    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    match command, action.dest:
        case "lint", "format":
            return FORMATS
        case ("lint", "select" | "ignore") | ("explain", "topic"):
            return (*FAMILIES, *(code.id for code in all_codes()))
        case _:
            return ()


def _takes(action: argparse.Action) -> str:
    """Return "files", "folders", or nothing."""
    if action.metavar in _FILES:
        return "files"
    return "folders" if action.metavar in _FOLDERS else ""
