"""What `kcdsl lint` was asked to do: command line over environment over configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kcdsl.config import CODES_HELP, Config, code_or_beginning, load_config
from kcdsl.diagnostics import Diagnostic, Severity, refuse
from kcdsl.diagnostics.codes import BAD_CONFIGURATION, USAGE
from kcdsl.diagnostics.render import FORMATS, SUFFIXES

_RANK = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


@dataclass(frozen=True, slots=True)
class Output:
    """A format, and the file that it is written to; None for standard output."""

    format: str
    file: Path | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one run; `select` and `ignore` hold codes and beginnings of codes."""

    paths: tuple[str, ...]
    outputs: tuple[Output, ...]
    fail_on: Severity
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    statistics: bool
    fix: bool
    unsafe: bool
    diff: bool
    exit_zero: bool
    stdin_filename: str
    config: Config

    def shows(self, diagnostic: Diagnostic) -> bool:
        """Say whether a diagnostic is shown: every error is."""
        if diagnostic.severity is Severity.ERROR:
            return True
        code = diagnostic.code.id
        return (not self.select or code.startswith(self.select)) and not code.startswith(
            self.ignore
        )

    def fails(self, severity: Severity) -> bool:
        """Say whether a finding of this severity gives exit code 1."""
        return _RANK[severity] >= _RANK[self.fail_on]


def read_options(arguments: argparse.Namespace) -> Options:
    """Return the options; raises Refusal where they cannot be used."""
    config = load_config(Path())
    outputs = _outputs(arguments, config)
    if arguments.statistics and any(o.file is None and o.format not in _LISTS for o in outputs):
        raise refuse(
            USAGE,
            "--statistics is for people",
            help=f"use it with the format {' or '.join(_LISTS)}",
        )
    return Options(
        paths=tuple(arguments.paths),
        outputs=outputs,
        fail_on=Severity(arguments.fail_on or config.fail_on),
        select=_codes(arguments.select, config, "select"),
        ignore=_codes(_ignored(arguments), config, "ignore"),
        statistics=arguments.statistics,
        fix=arguments.fix and not arguments.diff,
        unsafe=arguments.unsafe_fixes,
        diff=arguments.diff,
        exit_zero=arguments.exit_zero,
        stdin_filename=arguments.stdin_filename,
        config=config,
    )


_LISTS = ("full", "concise")


def _refuse_elsewhere(name: str, config: Config) -> None:
    """Refuse a file that the configuration of a folder would have written outside of it."""
    origin = config.origin("format")
    if origin.source is not config.file or config.file is None:
        return
    if not Path(name).resolve().is_relative_to(origin.folder):
        raise refuse(
            BAD_CONFIGURATION,
            f"`format` names the file {name}, which is not below {origin.folder}",
            help="name a file below the folder of the configuration, or use --format",
            source=origin.source,
            span=origin.span,
        )


def _outputs(arguments: argparse.Namespace, config: Config) -> tuple[Output, ...]:
    """Return where findings go, in which form; at most one goes to standard output."""
    found: list[Output] = []
    for word in arguments.format or config.format:
        format, sign, name = word.partition("=")
        if format not in FORMATS or (sign and not name):
            raise refuse(USAGE, f"there is no format `{word}`", help=f"one of {', '.join(FORMATS)}")
        if sign and not arguments.format:
            _refuse_elsewhere(name, config)
        found.append(Output(format, Path(name) if sign else None))
    if arguments.output is not None:
        path = Path(arguments.output)
        if path.suffix not in SUFFIXES:
            raise refuse(
                USAGE,
                f"the suffix of {path} says no format",
                help=f"one of {', '.join(SUFFIXES)}, or --format FORMAT={path}",
            )
        found.append(Output(SUFFIXES[path.suffix], path))
    if sum(output.file is None for output in found) > 1:
        raise refuse(USAGE, "two formats for standard output", help="give one of them a file")
    if not any(output.file is None for output in found) and arguments.output is None:
        actions = os.environ.get("GITHUB_ACTIONS") == "true"
        found.insert(0, Output("github" if actions else "full", None))
    return tuple(found)


def _ignored(arguments: argparse.Namespace) -> list[str] | None:
    """Return what the command line leaves out; what it asks for by `--select` and no more, the
    configuration cannot leave out."""
    if arguments.ignore is None and arguments.select is not None:
        return []
    ignored: list[str] | None = arguments.ignore
    return ignored


def _codes(given: Sequence[str] | None, config: Config, name: str) -> tuple[str, ...]:
    """Return codes and beginnings of codes; each must fit a code that there is."""
    if given is None:
        configured: tuple[str, ...] = getattr(config, name)
        return configured
    found = []
    for word in (part.strip() for item in given for part in item.split(",")):
        fitting = code_or_beginning(word) if word else None
        if word and fitting is None:
            raise refuse(USAGE, f"--{name}: no code begins with `{word}`", help=CODES_HELP)
        found += [] if fitting is None else [fitting]
    return tuple(found)
