"""`kcdsl config`, `completion` and `lsp`: the configuration, shells and editors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kcdsl.cli.commands import COMMANDS, command_of, load
from kcdsl.cli.common import Argument, Command, argument, choice, switch
from kcdsl.cli.common.options import OutputFormat, format_option
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PACKAGE
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.exits import Exit
from kcdsl.source.config import OPTIONS, Colour, Origin, load_config
from kcdsl.source.config import Config as Configuration

_SERVER_NEEDS = ("pygls", "lsprotocol")


# --- config --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigCommand(Command):
    """Show the configuration and the source of each value."""

    action: str = choice(["show"], "show every option", positional="")
    folder: str | None = argument("FOLDER", "folder of a contract (default: the current one)", "?")
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Print the table or the JSON document; a configuration that cannot be used is refused
        (2)."""
        config = load_config(Path(self.folder or "."))
        if self.format is OutputFormat.JSON:
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
class CompletionCommand(Command):
    """Print the completion script for a shell."""

    shell: Shell = choice(Shell, "the shell that reads the script", positional="")
    words: tuple[str, ...] = argument(
        "WORD", "used by the script: the words after `kcdsl`, up to the cursor", "*"
    )

    def run(self) -> Exit:
        """Print the script for `source <(kcdsl completion bash)` or similar, or the completions of
        the last word."""
        if not self.words:
            print(SCRIPTS[self.shell], end="")
            return Exit.HELD
        for line in offered(self.words):
            print(line)
        return Exit.HELD


# --- lsp -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LspCommand(Command):
    """Run the language server for editors."""

    stdio: bool = switch("use standard input and output; accepted for editors, always on")

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


# --- what shells offer ----------------------------------------------------------------------------


_FOLDERS = {"DIR", "FOLDER"}
_COMMON = {
    "--help": "show this help message and exit",
    "-h": "show this help message and exit",
    "--traceback": "show the Python traceback of an internal error",
    "--color": "when output is coloured",
}

SCRIPTS = {
    "bash": r"""_kcdsl() {
  local IFS=$'\n' word="${COMP_WORDS[COMP_CWORD]}" found
  found=($(kcdsl completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  [[ "$word" == "=" ]] && word=""
  COMPREPLY=("${found[@]:1}")
  COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
  case "${found[0]}" in
    files*) COMPREPLY+=($(compgen -f -- "$word")) ;;
    folders*) COMPREPLY+=($(compgen -d -- "$word")) ;;
  esac
}
complete -o filenames -F _kcdsl kcdsl
""",
    "zsh": r"""#compdef kcdsl
_kcdsl() {
  local -a found offered
  found=("${(@f)$(kcdsl completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ $PREFIX == --*=* ]]; then compset -P '*='; fi
  offered=("${(@)${(@)found[2,-1]//:/\\:}/$'\t'/:}")
  (( $#found > 1 )) && _describe -o word offered
  case $found[1] in
    files*) _files ;;
    folders*) _files -/ ;;
  esac
}
if [[ "$funcstack[1]" == _kcdsl ]]; then _kcdsl "$@"; else compdef _kcdsl kcdsl; fi
""",
    "fish": r"""function __kcdsl_offered
  set -l word (commandline -ct)
  set -l found (kcdsl completion fish -- (commandline -opc)[2..] "$word" 2>/dev/null)
  string match -qr '^--\S+=' -- $word; and set -l before (string replace -r '=.*' = -- $word)
  test (count $found) -gt 1; and printf "$before%s\n" $found[2..]
  switch "$found[1]"
    case 'files*'
      __fish_complete_path (string replace -r '^--\S+=' '' -- $word)
    case 'folders*'
      __fish_complete_directories (string replace -r '^--\S+=' '' -- $word)
  end
end
complete -c kcdsl -f -a '(__kcdsl_offered)'
""",
}
"""The script of each shell."""


def offered(words: Sequence[str]) -> Iterator[str]:
    """Yield the completions of the last word, for a completion script."""
    *before, last = _joined(words)
    name, _, _ = last.partition("=")
    if last.startswith("--") and "=" in last:
        before, last = [*before, name], last[len(name) + 1 :]
    kind, found = _candidates(before, last)
    yield f"{kind}:"
    for word, help in found:
        if word.startswith(last):
            yield f"{word}\t{' '.join(help.split())}" if help else word


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words with `--option=value` joined, which bash splits into three."""
    found: list[str] = []
    for word in words:
        if word == "=" and found and found[-1].startswith("--"):
            found[-1] += "="
        elif found and found[-1].startswith("--") and found[-1].endswith("="):
            found[-1] += word
        else:
            found.append(word)
    return found


def _candidates(before: Sequence[str], last: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the kind of paths to complete ("files", "folders" or ""), and words with help."""
    previous = before[-1] if before else ""
    if previous == "--color":
        return "", [(colour.value, "") for colour in Colour]
    name = command_of(before)
    if name is None:
        if last.startswith("-"):
            return "", [*_COMMON.items(), ("--version", "show the version and exit")]
        return "", [(command, entry.help) for command, entry in COMMANDS.items()]
    if name not in COMMANDS:
        return "", []
    options = [option for _, option in load(name).options()]
    for option in options:
        if previous in option.names and not option.is_switch:
            return _values(option)
    if last.startswith("-"):
        own = [(word, option.described) for option in options for word in option.names]
        return "", [*own, *_COMMON.items()]
    kinds, found = [], []
    for option in options:
        if option.positional is not None:
            kind, words = _values(option)
            kinds.append(kind)
            found += words
    return next(filter(None, kinds), ""), found


def _values(option: Argument) -> tuple[str, list[tuple[str, str]]]:
    """Return the kind of paths and the words that the value of an argument may be."""
    words = [*option.choices, *(option.words() if option.words else ())]
    kind = "files" if option.is_file else ""
    return "folders" if option.metavar in _FOLDERS else kind, [(word, "") for word in words]
