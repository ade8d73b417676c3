"""`kcdsl config`, `kcdsl completion` and `kcdsl lsp`: the configuration, shells, and editors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kcdsl.cli.common import Command, argument, choice, switch
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PACKAGE
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.exits import Exit
from kcdsl.source.config import OPTIONS, Origin, load_config
from kcdsl.source.config import Config as Configuration

_SERVER_NEEDS = ("pygls", "lsprotocol")


# --- config --------------------------------------------------------------------------------------


class Form(StrEnum):
    """The forms of the configuration."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class Config(Command):
    """Show the options of the configuration and where each value came from."""

    action: str = choice(["show"], "show every option", positional="")
    folder: str | None = argument("FOLDER", "of a contract (default: the current one)", "?")
    format: Form = choice(Form, "form of the answer", Form.TABLE)

    def run(self) -> Exit:
        """Print the table or the JSON document; a configuration that cannot be used is refused
        (2)."""
        config = load_config(Path(self.folder or "."))
        if self.format is Form.JSON:
            print_json(_document(config))
        else:
            print(_table(config))
        return Exit.HELD


def _document(config: Configuration) -> dict[str, Any]:
    return {
        "schema": "kcdsl.config/2",
        "file": None if config.file is None else config.file.name,
        "own": None if config.own is None else config.own.name,
        "options": [
            {
                "name": option.name,
                "value": _plain(getattr(config, option.field)),
                "default": _plain(option.default),
                "variable": option.variable,
                "origin": _origin(config.origin(option.name)),
                "help": option.help,
            }
            for option in OPTIONS
        ],
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _origin(origin: Origin) -> dict[str, Any]:
    if origin.variable is not None:
        return {"kind": "environment", "variable": origin.variable}
    if origin.source is None or origin.span is None:
        return {"kind": "default"}
    at = origin.source.position(origin.span.start)
    return {"kind": "file", "file": origin.source.name, "line": at.line, "column": at.column}


def _table(config: Configuration) -> str:
    rows = [("option", "value", "from")]
    for option in OPTIONS:
        value = _plain(getattr(config, option.field))
        rows.append((option.name, _toml(value), str(config.origin(option.name))))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows]
    file = "none" if config.file is None else config.file.name
    own = [] if config.own is None else [f"your own: {config.own.name}"]
    return "\n".join([f"configuration file: {file}", *own, "", *lines])


def _toml(value: Any) -> str:
    """Write a value as TOML does; nothing as a dash."""
    match value:
        case None:
            return "-"
        case list():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case Mapping():
            return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
        case str() | bool() | int():
            return json_text(value).rstrip("\n")
        case _:
            return str(value)


# --- completion ----------------------------------------------------------------------------------


class Shell(StrEnum):
    """The shells that can complete command lines."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print the completion script for a shell."""

    shell: Shell = choice(Shell, "the shell that will read the script", positional="")
    words: tuple[str, ...] = argument(
        "WORD", "what the script asks for: the words after `kcdsl`, up to the cursor", "*"
    )

    def run(self) -> Exit:
        """Print the script, which a shell reads with `source <(kcdsl completion bash)` or the
        like, or what can stand in place of the last of the words."""
        from kcdsl.cli.completion import SCRIPTS, offered

        if not self.words:
            print(SCRIPTS[self.shell], end="")
            return Exit.HELD
        for line in offered(self.words):
            print(line)
        return Exit.HELD


# --- lsp -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Lsp(Command):
    """Serve an editor by the language server protocol."""

    stdio: bool = switch("talk on standard input and output, which it does in any case")

    def run(self) -> Exit:
        """Serve until the client ends the session."""
        missing = [name for name in _SERVER_NEEDS if find_spec(name) is None]
        if missing:
            raise refuse(
                NO_PACKAGE,
                f"the language server needs {' and '.join(missing)}, not installed",
                help='pip install "kcdsl[lsp]"',
            )
        from kcdsl.lsp.server import serve

        serve()
        return Exit.HELD
