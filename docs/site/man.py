"""Write the manual page kcdsl(1) from the declarations of the commands: `make man`."""

from __future__ import annotations

import re

from docs.site.reference import ROOT, meaning, spelling, synopsis
from kcdsl import __version__
from kcdsl.cli.application import parser_of
from kcdsl.cli.commands import COMMANDS, GROUPS, load
from kcdsl.exits import Exit

PAGE = ROOT / "docs" / "man" / "kcdsl.1"
FILES = {
    "contract.yaml, *.kc.yaml": "contracts",
    "kcdsl.toml, pyproject.toml": "configuration; kcdsl config show lists every option",
    "out/": "reports, traces and certificates of verify and evaluate, beside the contract",
}


def page() -> str:
    """Return the manual page as roff."""
    parser = parser_of(None, None)
    lines = [
        f'.TH KCDSL 1 "" "kcdsl {__version__}" "User Commands"',
        ".SH NAME",
        r"kcdsl \- contracts between the kernels that train and serve a language model",
        ".SH SYNOPSIS",
        r".B kcdsl",
        r"\fICOMMAND\fR [\fIOPTION\fR...] [\fIARGUMENT\fR...]",
        ".SH DESCRIPTION",
        text(parser.description or ""),
        ".PP",
        text("A contract may be left out where the folder, or its configuration, determines it."),
        text("The environment variable KCDSL_COMMAND_OPTION replaces the default of an"),
        text("option: KCDSL_LINT_FAIL_ON that of kcdsl lint --fail-on."),
        ".SH COMMANDS",
    ]
    for heading, commands in GROUPS.items():
        lines += [".PP", text(f"{heading}: {', '.join(commands)}")]
    for name in COMMANDS:
        lines += _command(name)
    lines += [".SH EXIT STATUS"]
    for code in Exit:
        lines += [".TP", f"\\fB{code.value}\\fR", text(code.name.lower().replace("_", " "))]
    lines += [".SH FILES"]
    for name, what in FILES.items():
        lines += [".TP", f"\\fI{text(name)}\\fR", text(what)]
    lines += [".SH SEE ALSO", text("kcdsl explain PAGE prints a page of the manual.")]
    return "\n".join(lines) + "\n"


def _command(name: str) -> list[str]:
    command = load(name)
    options = [option for _, option in command.options()]
    lines = [f".SS kcdsl {name} {text(synopsis(options))}", f"{text(COMMANDS[name].help)}."]
    for option in options:
        lines += [".TP", f"\\fB{text(spelling(option))}\\fR", text(meaning(option))]
    return lines


def text(words: str) -> str:
    """Return words as roff shows them unchanged."""
    escaped = " ".join(words.split()).replace("\\", r"\e").replace("-", r"\-")
    escaped = escaped.replace("…", "...").replace("`", "")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
