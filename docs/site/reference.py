"""References made from the code: commands from their declarations, documents from their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kcdsl.cli.commands import COMMANDS, load
from kcdsl.cli.common import Argument, Command

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "grammar" / "kcdsl_grammar" / "contract.schema.json"


# --- commands ------------------------------------------------------------------------------------


def commands() -> str:
    """Return the sections of all commands: synopsis, arguments, options."""
    sections = (_command(name, load(name)) for name in COMMANDS)
    return "\n" + "\n".join(sections)


def _command(name: str, command: type[Command]) -> str:
    help = COMMANDS[name].help
    options = [option for _, option in command.options()]
    lines = [f"## kcdsl {name}", "", f"{help[0].upper()}{help[1:]}.", ""]
    lines += ["```text", f"kcdsl {name}{synopsis(options)}", "```", ""]
    if options:
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {_cell(spelling(o), code=True)} | {_cell(meaning(o))} |" for o in options]
    if command.epilog:
        lines += ["", _cell(command.epilog)]
    return "\n".join([*lines, ""])


def spelling(option: Argument) -> str:
    """Return how an argument is written: its names, and its value."""
    value = "|".join(option.choices) if option.choices else option.metavar or ""
    if not option.names:
        return value
    return " ".join([", ".join(option.names), *([value] if value else [])])


def meaning(option: Argument) -> str:
    """Return what an argument is for, with its default, and whether it may be repeated."""
    repeated = option.many and option.names and "may be repeated" not in option.described
    return f"{option.described}{'; may be repeated' if repeated else ''}"


def synopsis(options: list[Argument]) -> str:
    """Return the positional arguments of a command as usage lines write them, after options."""
    shown = " [OPTION…]" if any(option.names for option in options) else ""
    for option in options:
        if not option.names:
            word = spelling(option)
            many = {"*": f"[{word}…]", "+": f"{word}…", "?": f"[{word}]"}
            shown += " " + many.get(option.positional or "", word)
    return shown


# --- documents -----------------------------------------------------------------------------------

Row = tuple[str, Mapping[str, Any], bool]
"""The path of a field, its schema, and whether it is required."""


def contract_keys() -> str:
    """Return the tables of the keys of a contract."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return f"\n## Keys of a contract, from the schema\n\n{schema_table(schema, level=3)}"


def schema_table(schema: Mapping[str, Any], level: int = 2) -> str:
    """Return the fields of a JSON schema as tables: the document, then each definition."""
    parts = [str(schema["description"])] if "description" in schema else []
    parts.append(_table(schema))
    for name, definition in schema.get("$defs", {}).items():
        parts.append(f"{'#' * level} {name}")
        if "description" in definition:
            parts.append(str(definition["description"]))
        parts.append(_table(definition))
    return "\n\n".join(part for part in parts if part) + "\n\n"


def _table(schema: Mapping[str, Any]) -> str:
    rows = list(_fields(schema, ""))
    if not rows:
        return _type(schema)
    lines = ["| field | type | required | meaning |", "|---|---|---|---|"]
    for name, field, required in rows:
        cells = (_cell(name, code=True), _type(field), "yes" if required else "no")
        lines.append(f"| {' | '.join(cells)} | {_cell(str(field.get('description', '')))} |")
    return "\n".join(lines)


def _fields(schema: Mapping[str, Any], prefix: str) -> Iterator[Row]:
    """Yield the fields of an object, those of nested objects and of items of lists below them."""
    for name, field in schema.get("properties", {}).items():
        if not isinstance(field, Mapping):
            continue
        path = f"{prefix}{name}"
        yield path, field, name in schema.get("required", ())
        yield from _below(field, path)
    yield from _below(schema, prefix.rstrip("."), own=False)


def _below(field: Mapping[str, Any], path: str, own: bool = True) -> Iterator[Row]:
    if own and "properties" in field:
        yield from _fields(field, f"{path}.")
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        inner = field.get(key)
        if isinstance(inner, Mapping) and "properties" in inner:
            yield from _fields(inner, f"{path}{mark}.".lstrip("."))


def _type(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "$ref" in field:
        return _cell(str(field["$ref"]).rpartition("/")[2], code=True)
    if "const" in field:
        return _cell(json.dumps(field["const"]), code=True)
    if "enum" in field:
        return ", ".join(_cell(json.dumps(word), code=True) for word in field["enum"])
    for key in ("oneOf", "anyOf"):
        if key in field:
            return " or ".join(dict.fromkeys(filter(None, map(_type, field[key]))))
    found = field.get("type", "")
    words = " or ".join(found) if isinstance(found, list) else str(found)
    items = field.get("items")
    if "array" in words and isinstance(items, Mapping) and (inner := _type(items)):
        return words.replace("array", f"array of {inner}")
    return words or ("object" if "properties" in field else "any")


def _cell(text: str, code: bool = False) -> str:
    """Return a text for the cell of a table."""
    safe = " ".join(text.split()).replace("|", "\\|")
    if code:
        return f"`{safe}`" if safe else ""
    return safe.replace("<", "&lt;").replace("*", "\\*")


GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    "reference/language.md": contract_keys,
}
"""Text that is added at the end of a page of the manual."""
