"""The command line: one module per command, imported only when that command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from types import ModuleType

from kcdsl import __version__
from kcdsl.diagnostics import Diagnostic, Refusal, refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, INTERNAL, NO_PACKAGE, USAGE
from kcdsl.exits import Exit

COMMANDS: dict[str, str] = {
    "compile": "kcdsl.cli.compile",
    "lint": "kcdsl.cli.lint",
    "fmt": "kcdsl.cli.fmt",
    "diff": "kcdsl.cli.diff",
    "explain": "kcdsl.cli.explain",
    "verify": "kcdsl.cli.verify",
    "replay": "kcdsl.cli.replay",
    "plan": "kcdsl.cli.plan",
    "evaluate": "kcdsl.cli.evaluate",
    "report": "kcdsl.cli.report",
    "attribute": "kcdsl.cli.attribute",
    "aggregate": "kcdsl.cli.aggregate",
    "experiment": "kcdsl.cli.experiment",
    "status": "kcdsl.cli.status",
    "check": "kcdsl.cli.check",
    "transfer": "kcdsl.cli.transfer",
    "keygen": "kcdsl.cli.keygen",
    "sign": "kcdsl.cli.sign",
    "lsp": "kcdsl.cli.lsp",
    "doctor": "kcdsl.cli.doctor",
    "backends": "kcdsl.cli.backends",
    "config": "kcdsl.cli.config",
    "completion": "kcdsl.cli.completion",
}
"""Command name -> module with `HELP: str`, `configure(parser)` and `run(arguments) -> Exit`."""

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `kcdsl.exits`; 130 when interrupted)."""
    if argv is None:
        from kcdsl.cli.isolation import isolate

        isolate()  # the process is ours; a program that calls `main` keeps its search path
    words = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    from kcdsl.cli.colour import coloured, wanted

    with coloured(wanted(words)):
        return _guarded(words)


def _guarded(words: list[str]) -> int:
    """Run one command; whatever stops it becomes a diagnostic and an exit code."""
    traceback = "--traceback" in words or os.environ.get("KCDSL_TRACEBACK") == "1"
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        _report(refusal.diagnostics)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # so a rich console ends a process
            _abandon_stdout()
        else:
            _report((Diagnostic(INTERNAL, f"a program asked to end the process: {stop.code!r}"),))
    except KeyboardInterrupt:
        print("kcdsl: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
    except OSError as error:
        if traceback:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _report((Diagnostic(INPUT_OUTPUT, f"{where}{error.strerror or error}"),))
    except Exception as error:
        if traceback:
            raise
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kcdsl"):
            missing = f"the package {error.name} is not installed"
            _report((Diagnostic(NO_PACKAGE, missing, help="`kcdsl doctor` says how to get it"),))
            return int(Exit.COULD_NOT_RUN)
        _report(
            (
                Diagnostic(
                    INTERNAL,
                    f"{type(error).__name__}: {error}",
                    help="run again with --traceback and report the text",
                ),
            )
        )
    return int(Exit.COULD_NOT_RUN)


def _run(words: list[str]) -> int:
    if any("\0" in word for word in words):  # of a program that calls `main`
        raise refuse(USAGE, "an argument has a zero byte, which no path has")
    name = _command(words)
    if name is not None and name not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `kcdsl {close[0]}`?" if close else "`kcdsl --help` lists the commands"
        raise refuse(USAGE, f"there is no command `{name}`", help=hint)
    parser = _parser((name,) if name is not None else tuple(COMMANDS))
    try:
        arguments, unknown = parser.parse_known_args(words)
    except SystemExit as stop:
        # --help, --version, or words that make no command; nothing that runs may end the process.
        return stop.code if isinstance(stop.code, int) else int(Exit.COULD_NOT_RUN)
    if unknown:
        raise _not_taken(unknown[0], name, parser)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return int(Exit.COULD_NOT_RUN)
    return int(_module(arguments.command).run(arguments))


def _not_taken(word: str, command: str | None, parser: argparse.ArgumentParser) -> Refusal:
    """Return the refusal of a word that is no option, or one argument too many."""
    from difflib import get_close_matches

    where = f"kcdsl {command}" if command is not None else "kcdsl"
    hint = f"`{where} --help` lists what it takes"
    if not word.startswith("-"):
        return refuse(USAGE, f"`{where}` has no use for `{word}`", help=hint)
    name = word.partition("=")[0]
    close = get_close_matches(name, _options(parser), n=1)
    hint = f"did you mean `{close[0]}`?" if close else hint
    return refuse(USAGE, f"`{where}` has no option `{name}`", help=hint)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser and of the commands below it."""
    found = [name for action in parser._actions for name in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [name for child in action.choices.values() for name in _options(child)]
    return found


def _command(words: Sequence[str]) -> str | None:
    """Return the word that names the command: the first that is no option and no value of one."""
    before = ""
    for word in words:
        if not word.startswith("-") and before != "--color":
            return word
        before = word
    return None


def _module(name: str) -> ModuleType:
    return import_module(COMMANDS[name])


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcdsl",
        description="Kernel contracts: state, certify and check how far an inference kernel may "
        "drift from the training kernel.",
        epilog="exit codes: 0 holds, 1 violated or findings, 2 could not run, 3 inconclusive, "
        "4 certificate invalid",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kcdsl {__version__}")
    _add_common(parser, default=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in names:
        if find_spec(COMMANDS[name]) is None:
            continue
        module = _module(name)
        child = commands.add_parser(
            name, help=module.HELP, description=module.HELP, allow_abbrev=False
        )
        _add_common(child, default=argparse.SUPPRESS)
        module.configure(child)
        if any(variable.startswith(f"KCDSL_{name.upper()}_") for variable in os.environ):
            from kcdsl.cli.defaults import set_defaults

            set_defaults(child, name, os.environ)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: bool | str) -> None:
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=default,
        help="show the Python traceback of an internal error",
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default=argparse.SUPPRESS,
        help="when output is coloured (default: auto, where it goes to a terminal)",
    )


def _report(diagnostics: Sequence[Diagnostic]) -> None:
    from kcdsl.diagnostics.render.full import render_full

    print(render_full(diagnostics, sys.stderr), file=sys.stderr)


def _mend_streams() -> None:
    """Make both streams able to take any text: one that is closed takes it to nowhere, and one
    whose encoding lacks a character shows its escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _abandon_stdout() -> None:
    """Point stdout at nothing, so that the interpreter does not fail again on its way out."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = None
