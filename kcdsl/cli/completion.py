"""`kcdsl completion`: completion scripts for shells, made from the declared arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module

from kcdsl.exits import Exit

HELP = "print the completion script for a shell"
SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read the script")


def run(arguments: argparse.Namespace) -> Exit:
    """Print the script; a shell reads it with `source <(kcdsl completion bash)` or the like."""
    match arguments.shell:
        case "bash":
            print(_bash(_commands()))
        case "zsh":
            print(_zsh(_commands()))
        case _:
            print(_fish(_commands()))
    return Exit.HELD


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    help: str
    options: tuple[tuple[str, str], ...]
    """Option with its help text."""
    choices: tuple[tuple[str, tuple[str, ...]], ...]
    """Option -> its values; the option "" stands for the positional arguments."""


def _commands() -> list[_Command]:
    from kcdsl.cli import COMMANDS

    found = []
    for name, target in COMMANDS.items():
        module = import_module(target)
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--help", action="store_true", help="show the help")
        module.configure(parser)
        options: list[tuple[str, str]] = []
        choices: dict[str, tuple[str, ...]] = {}
        for action in parser._actions:
            for option in action.option_strings:
                options.append((option, " ".join((action.help or "").split())))
            if action.choices:
                for option in action.option_strings or [""]:
                    choices[option] = tuple(str(choice) for choice in action.choices)
        found.append(_Command(name, module.HELP, tuple(options), tuple(choices.items())))
    return found


def _bash(commands: list[_Command]) -> str:
    cases = []
    for command in commands:
        cases.append(f"    {command.name})")
        cases.append('      case "$before" in')
        for option, values in command.choices:
            if option:
                words = " ".join(values)
                cases.append(
                    f'        {option}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;'
                )
        cases.append("      esac")
        words = " ".join(option for option, _ in command.options)
        cases.append(
            f'      if [[ "$word" == -* ]]; then COMPREPLY=($(compgen -W "{words}" -- "$word"))'
        )
        plain = dict(command.choices).get("")
        if plain is not None:
            cases.append(f'      else COMPREPLY=($(compgen -W "{" ".join(plain)}" -- "$word"))')
        else:
            cases.append('      else COMPREPLY=($(compgen -f -- "$word"))')
        cases.append("      fi ;;")
    names = " ".join(command.name for command in commands)
    body = "\n".join(cases)
    return f"""_kcdsl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{body}
  esac
}}
complete -o filenames -F _kcdsl kcdsl"""


def _zsh(commands: list[_Command]) -> str:
    cases = []
    for command in commands:
        cases.append(f"    {command.name})")
        cases.append("      case $words[CURRENT-1] in")
        for option, values in command.choices:
            if option:
                cases.append(f"        {option}) compadd -- {' '.join(values)}; return ;;")
        cases.append("      esac")
        options = " ".join(option for option, _ in command.options)
        cases.append(f"      if [[ $PREFIX == -* ]]; then compadd -- {options}")
        plain = dict(command.choices).get("")
        offered = "_files" if plain is None else f"compadd -- {' '.join(plain)}"
        cases.append(f"      else {offered}")
        cases.append("      fi ;;")
    names = " ".join(command.name for command in commands)
    body = "\n".join(cases)
    return f"""#compdef kcdsl
_kcdsl() {{
  if (( CURRENT == 2 )); then
    compadd -- {names} --help --version
    return
  fi
  case $words[2] in
{body}
  esac
}}
compdef _kcdsl kcdsl"""


def _fish(commands: list[_Command]) -> str:
    lines = ["complete -c kcdsl -f -n __fish_use_subcommand -l version -d 'show the version'"]
    for command in commands:
        help = _quoted(command.help)
        lines.append(f"complete -c kcdsl -f -n __fish_use_subcommand -a {command.name} -d {help}")
        inside = f"'__fish_seen_subcommand_from {command.name}'"
        choices = dict(command.choices)
        for option, text in command.options:
            sort = "-l" if option.startswith("--") else "-s"
            values = choices.get(option)
            more = f" -x -a '{' '.join(values)}'" if values else ""
            name = option.lstrip("-")
            lines.append(f"complete -c kcdsl -n {inside} {sort} {name}{more} -d {_quoted(text)}")
        if "" in choices:
            lines.append(f"complete -c kcdsl -f -n {inside} -a '{' '.join(choices[''])}'")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
