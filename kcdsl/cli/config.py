"""`kcdsl config`: the options of the configuration, their values, and where each came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcdsl.config import OPTIONS, Config, Origin, load_config
from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit

HELP = "show the options of the configuration and where each value came from"
CONFIG_SCHEMA = "kcdsl.config/2"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="show every option", description=HELP)
    show.add_argument(
        "--format", choices=("table", "json"), default="table", help="form of the answer"
    )
    show.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="of a contract (default: .)"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Print the table or the JSON document; a configuration that cannot be used is refused (2)."""
    config = load_config(Path(arguments.folder))
    if arguments.format == "json":
        print(
            json_for_terminals(
                json.dumps(_document(config), indent=2, ensure_ascii=False, default=str)
            )
        )
    else:
        print(_table(config))
    return Exit.HELD


def _document(config: Config) -> dict[str, Any]:
    return {
        "schema": CONFIG_SCHEMA,
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


def _table(config: Config) -> str:
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
            return json_for_terminals(json.dumps(value, ensure_ascii=False))
        case _:
            return str(value)
