"""Run one command: parse arguments, and convert exceptions to a diagnostic and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from kcdsl import __version__
from kcdsl.cli.commands import COMMANDS, GROUPS, command_of, load
from kcdsl.cli.common import Command, declare, from_environment
from kcdsl.diagnostics import Diagnostic, Refusal, refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, INTERNAL, NO_PACKAGE, USAGE
from kcdsl.exits import INTERRUPTED, Exit
from kcdsl.source.config import Colour

COLOR = "--color"
COMMON = ("--traceback", COLOR)
"""Options allowed before the command and among its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `kcdsl.exits`)."""
    from kcdsl.cli import process

    if argv is None:
        process.isolate()  # it is ours; a program that calls `main` keeps its search path
        process.use_large_pages()
        process.raise_collection_threshold()
    words = list(sys.argv[1:] if argv is None else argv)
    process.mend_streams()
    with process.coloured(words):
        code = _guarded(words)
    if argv is None:
        process.skip_final_collection()
    return code


def _guarded(words: list[str]) -> int:
    """Run one command; convert exceptions to a diagnostic and an exit code."""
    from kcdsl.cli.process import discard_stdout

    traceback = "--traceback" in words or os.environ.get("KCDSL_TRACEBACK") == "1"
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        report(refusal.diagnostics)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # so a rich console ends a process
            discard_stdout()
        else:
            report(
                [
                    Diagnostic(
                        INTERNAL,
                        f"a program asked to end the process: {stop.code!r}",
                        help="run again with --traceback and report the text",
                    )
                ]
            )
    except KeyboardInterrupt:
        print("kcdsl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
    except Exception as error:
        if traceback:
            raise
        report([_diagnosed(error)])
    return int(Exit.COULD_NOT_RUN)


def _diagnosed(error: Exception) -> Diagnostic:
    """Return the diagnostic of an unexpected exception."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Diagnostic(
            INPUT_OUTPUT,
            f"{where}{error.strerror or error}",
            help="make the file readable or writable for you, or name another one",
        )
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kcdsl"):
        missing = f"the package {error.name} is not installed"
        return Diagnostic(NO_PACKAGE, missing, help="`kcdsl doctor` shows how to install it")
    help = "run again with --traceback and report the text"
    return Diagnostic(INTERNAL, f"{type(error).__name__}: {error}", help=help)


def report(diagnostics: Sequence[Diagnostic]) -> None:
    """Print diagnostics on stderr."""
    from kcdsl.diagnostics.render.full import render_full

    print(render_full(diagnostics, sys.stderr), file=sys.stderr)


def _run(words: list[str]) -> int:
    if any("\0" in word for word in words):  # of a program that calls `main`
        raise refuse(
            USAGE,
            "an argument has a zero byte, which no path has",
            help="give the arguments without it",
        )
    name = command_of(words)
    if name is not None and name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `kcdsl {close[0]}`?" if close else "`kcdsl --help` lists the commands"
        raise refuse(USAGE, f"there is no command `{name}`", help=hint)
    command = None if name is None else load(name)
    parser = parser_of(name, command)
    try:
        given, unknown = parser.parse_known_args(gathered(words, name, command))
    except SystemExit as stop:
        # --help, --version, or words that make no command; nothing that runs may end the process.
        return stop.code if isinstance(stop.code, int) else int(Exit.COULD_NOT_RUN)
    unknown = [word for word in unknown if word != "--"]
    if unknown:
        raise _not_taken(unknown[0], name, command)
    if name is None or command is None:
        parser.print_help(sys.stderr)
        return int(Exit.COULD_NOT_RUN)
    made = built(name, command, vars(given))
    _refuse_overwriting(made)
    return int(made.run())


def _refuse_overwriting(command: Command) -> None:
    """Refuse a file for results that the command also reads, such as the contract."""
    targets = tuple(command.named_files(written=True))
    if not targets:
        return
    from kcdsl.api.contract import find_contract
    from kcdsl.cli.common.output import refuse_replacing

    read = [*command.named_files(written=False)]
    if getattr(command, "contract", "") is None:
        with suppress(Refusal):
            read.append(str(find_contract(None, Path())))
    refuse_replacing(targets, read)


def gathered(words: Sequence[str], name: str | None, command: type[Command] | None) -> list[str]:
    """Return the words of a command with its positional arguments moved to the end.

    argparse does not fill an optional positional argument that follows an option.
    """
    if name is None or command is None:
        return list(words)
    start = words.index(name) + 1
    valued = {n for _, option in command.options() for n in option.names if not option.is_switch}
    options = list(words[:start])
    positionals: list[str] = []
    rest = iter(words[start:])
    for word in rest:
        if word == "--":
            positionals += rest
        elif not word.startswith("-") or word == "-":
            positionals.append(word)
        else:
            options.append(word)
            options += islice(rest, int(word in valued or word == COLOR))
    return [*options, "--", *positionals] if positionals else options


def built(name: str, command: type[Command], given: dict[str, Any]) -> Command:
    """Return a command with arguments from the environment and the command line."""
    fields = {**from_environment(name, command, os.environ), **given}
    many = {name for name, option in command.options() if option.many}
    return command(
        **{
            field: tuple(found) if field in many and found is not None else found
            for field, found in fields.items()
            if field not in {"command", "traceback", "color"}
        }
    )


def parser_of(name: str | None, command: type[Command] | None) -> argparse.ArgumentParser:
    """Return the parser of one command; without one, a parser whose help lists all of them."""
    parser = argparse.ArgumentParser(
        prog="kcdsl",
        usage="kcdsl [-h] [--version] [--traceback] [--color WHEN] COMMAND ...",
        description="Kernel contracts: state, certify and check how far an inference kernel may "
        "drift\nfrom the training kernel.",
        epilog=_listed() if name is None else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kcdsl {__version__}")
    _add_common(parser)
    children = parser.add_subparsers(dest="command", prog="kcdsl", help=argparse.SUPPRESS)
    for each in COMMANDS if name is None else (name,):
        about = COMMANDS[each].help
        child = children.add_parser(each, description=about, allow_abbrev=False)
        if command is not None:
            _add_common(child)
            child.epilog = command.epilog
            declare(child, command)
    return parser


def _listed() -> str:
    """Return the commands under their headings, and the exit codes, as wide as the terminal."""
    from shutil import get_terminal_size
    from textwrap import fill

    width = get_terminal_size().columns - 2
    lines = []
    for heading, commands in GROUPS.items():
        lines.append(f"{heading}:")
        for name, entry in commands.items():
            lines.append(
                fill(entry.help, width, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
            )
        lines.append("")
    codes = (
        "0 holds, 1 violated or findings, 2 could not run, 3 inconclusive, 4 certificate invalid"
    )
    return "\n".join([*lines, fill(f"exit codes: {codes}", width)])


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the Python traceback of an internal error",
    )
    parser.add_argument(
        COLOR,
        choices=tuple(colour.value for colour in Colour),
        default=argparse.SUPPRESS,
        help="when output is coloured (default: auto, where it goes to a terminal)",
    )


def _not_taken(word: str, name: str | None, command: type[Command] | None) -> Refusal:
    """Return the refusal of an unknown option or a surplus argument."""
    from difflib import get_close_matches

    where = f"kcdsl {name}" if name is not None else "kcdsl"
    hint = f"`{where} --help` lists what it takes"
    if not word.startswith("-"):
        return refuse(USAGE, f"`{where}` does not take `{word}`", help=hint)
    option = word.partition("=")[0]
    own = [] if command is None else [n for _, o in command.options() for n in o.names]
    close = get_close_matches(option, ["-h", "--help", *COMMON, *own], n=1)
    hint = f"did you mean `{close[0]}`?" if close else hint
    return refuse(USAGE, f"`{where}` has no option `{option}`", help=hint)
