"""What shells offer while a command line is typed.

The scripts ask `kcdsl completion SHELL -- WORD...`. The answer has a first line, `files`, `folders`
or nothing, for what may be named there, then a line for each word, with its help after a tab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kcdsl.cli.application import command_of
from kcdsl.cli.commands import COMMANDS, load
from kcdsl.cli.common import Option
from kcdsl.source.config import Colour

_FILES = {
    "PATH", "FILE", "CONTRACT", "OLD", "NEW", "CERT", "CHECKPOINT", "STATEMENT", "REPORT", "TABLE",
    "KEY", "PUB", "CODE|METRIC|CLAUSE", "FORMAT[=FILE]",
}  # fmt: skip
"""What stands in the help for a file."""
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
    """Yield the answer to a script: what can stand in place of the last of the words."""
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
    """Return the words, of which bash makes three out of `--option=value`."""
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
    """Return what may be named after some words, "files", "folders" or "", and words with help."""
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


def _values(option: Option) -> tuple[str, list[tuple[str, str]]]:
    """Return what the value of an argument may name, and the words that it may be."""
    words = [*option.choices, *(option.words() if option.words else ())]
    kind = "files" if option.metavar in _FILES else ""
    return "folders" if option.metavar in _FOLDERS else kind, [(word, "") for word in words]
