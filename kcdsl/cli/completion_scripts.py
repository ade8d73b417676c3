"""What the shells read: one function per shell, from plain data about the commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """An option or a positional argument, which has no names: its help, whether a value follows,
    the words that this may be, and whether it may be one of the "files" or "folders"."""

    names: tuple[str, ...]
    help: str
    valued: bool
    words: tuple[str, ...]
    takes: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command, by all its words; none stands for what comes before it. `words` may stand there
    beside the options, with their help, and so may what it `takes`."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[tuple[str, str], ...]
    takes: str

    @property
    def names(self) -> list[str]:
        """Return the names of the options."""
        return [name for option in self.options for name in option.names]


# --- bash ----------------------------------------------------------------------------------------


def bash(commands: Sequence[Command]) -> str:
    """Return the script for bash, which reads it with `source`."""
    values, places = [], []
    for command in commands:
        for option in command.options:
            if option.valued:
                keys = "|".join(f'"{command.name}:{name}"' for name in option.names)
                values.append(f"    {keys}) {_bash(option.words, option.takes)}; return ;;")
        place = _bash([word for word, _ in command.words], command.takes)
        places.append(
            f'    "{command.name}") if [[ "$word" == -* ]]; then {_bash(command.names, "")}\n'
            f"      else {place}; fi ;;"
        )
    return f"""_kcdsl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="" i
  COMPREPLY=()
  if [[ "$word" == "=" ]]; then word=""
  elif [[ "$before" == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$command ${{COMP_WORDS[i]}}" in
      " --color") i=$((i + 1)); [[ "${{COMP_WORDS[i]}}" == "=" ]] && i=$((i + 1)) ;;
{_known(commands, "      ", '"', ")", "command=")}
    esac
  done
  case "$command:$before" in
{_lines(values)}
  esac
  case "$command" in
{_lines(places)}
  esac
}}
complete -o filenames -F _kcdsl kcdsl
"""


def _bash(words: Iterable[str], takes: str) -> str:
    parts = []
    if listed := " ".join(words):
        parts.append(f'COMPREPLY+=($(compgen -W "{listed}" -- "$word"))')
    if takes:
        kind = "-f" if takes == "files" else "-d"
        parts.append(f"local IFS=$'\\n'; COMPREPLY+=($(compgen {kind} -- \"$word\"))")
    return "; ".join(parts) or ":"


def _known(commands: Iterable[Command], margin: str, mark: str, end: str, set: str) -> str:
    """Return a case for each word that names a command, or an action of the command before."""
    lines = []
    for command in commands:
        if command.name:
            before, _, word = command.name.rpartition(" ")
            lines.append(f'{margin}{mark}{before} {word}{mark}{end} {set}"{command.name}" ;;')
    return _lines(lines)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


# --- zsh -----------------------------------------------------------------------------------------


def zsh(commands: Sequence[Command]) -> str:
    """Return the script for zsh, which reads it with `source`, or finds it in `fpath`."""
    values, places = [], []
    for command in commands:
        for option in command.options:
            if option.valued:
                keys = "|".join(f"'{command.name}:{name}'" for name in option.names)
                values.append(f"    {keys}) {_zsh(option.words, option.takes)}; return ;;")
        options = [f"{name}:{option.help}" for option in command.options for name in option.names]
        words = [f"{word}:{help}" if help else word for word, help in command.words]
        places.append(
            f"    '{command.name}') if [[ $PREFIX == -* ]]; then\n"
            f"        offered=({_quoted_all(options)}); _describe -o option offered\n"
            f"      else {_zsh(words, command.takes)}; fi ;;"
        )
    return f"""#compdef kcdsl
_kcdsl() {{
  local command="" before="$words[CURRENT-1]" i
  local -a offered
  if [[ $PREFIX == --*=* ]]; then before="${{PREFIX%%=*}}"; compset -P '*='; fi
  for ((i = 2; i < CURRENT; i++)); do
    case "$command $words[i]" in
      ' --color') ((i++)) ;;
{_known(commands, "      ", "'", ")", "command=")}
    esac
  done
  case "$command:$before" in
{_lines(values)}
  esac
  case "$command" in
{_lines(places)}
  esac
}}
if [[ "$funcstack[1]" == _kcdsl ]]; then _kcdsl "$@"; else compdef _kcdsl kcdsl; fi
"""


def _zsh(words: Sequence[str], takes: str) -> str:
    parts = []
    if words:
        parts.append(f"offered=({_quoted_all(words)}); _describe word offered")
    if takes:
        parts.append("_files" if takes == "files" else "_files -/")
    return "; ".join(parts) or ":"


def _quoted_all(texts: Iterable[str]) -> str:
    return " ".join("'" + text.replace("'", "'\\''") + "'" for text in texts)


# --- fish ----------------------------------------------------------------------------------------
_FOLDERS = "(__fish_complete_directories)"


def fish(commands: Sequence[Command]) -> str:
    """Return the script for fish, which reads it with `source`."""
    lines = ["complete -c kcdsl -f"]
    for command in commands:
        there = f"-n {_quoted(_where(command, commands))}"
        for option in command.options:
            lines.append(f"complete -c kcdsl {there} {_fish(option)} -d {_quoted(option.help)}")
        for word, help in command.words:
            about = f" -d {_quoted(help)}" if help else ""
            lines.append(f"complete -c kcdsl {there} -a {word}{about}")
        if command.takes:
            found = "-F" if command.takes == "files" else f"-a '{_FOLDERS}'"
            lines.append(f"complete -c kcdsl {there} {found}")
    return "\n".join(lines) + "\n"


def _where(command: Command, commands: Iterable[Command]) -> str:
    """Return the condition that a command has been named, and none of its actions yet."""
    parts = [f"__fish_seen_subcommand_from {word}" for word in command.name.split()]
    depth = len(parts) + 1
    below = [
        c.name.split()[-1]
        for c in commands
        if len(c.name.split()) == depth and f"{c.name} ".startswith(f"{command.name} ".lstrip())
    ]
    parts += [f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else []
    return "; and ".join(parts)


def _fish(option: Option) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name.lstrip('-')}"
        for name in option.names
    )
    if not option.valued:
        return names
    words = f" -a '{' '.join(option.words)}'" if option.words else ""
    match option.takes:
        case "files":
            return f"{names} -r -F{words}"
        case "folders":
            return f"{names} -x -a '{_FOLDERS}'"
        case _:
            return f"{names} -x{words}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
