"""Terminal output of a fleet: the matrix of pairs and the classes."""

from __future__ import annotations

from typing import TextIO

from rich.text import Text

from kcdsl.verdict.studies.fleet import NOTE, UNCHECKED, Fleet, reasons
from kcdsl.verdict.text.console import print_on, table

_SHOWN = {"agree": ("✓", "green"), "disagree": ("✗", "bold red"), "open": ("?", "yellow")}


def print_fleet(found: Fleet, stream: TextIO) -> None:
    """Print the matrix, the classes, and the reasons of disagreements."""
    print_on(stream, Text(f"{found.contract['name']} {found.contract['version']}", "bold"))
    labels = [kernel.label for kernel in found.kernels]
    rows = []
    for kernel in found.kernels:
        cells = [
            Text("=", "dim")
            if label == kernel.label
            else Text(*_SHOWN[found.pair(kernel.label, label).agreement])
            for label in labels
        ]
        rows.append((kernel.label, kernel.name, kernel.digest[:12], *cells))
    print_on(stream, table(("", "kernel", "sha256", *labels), rows), "")
    for number, one in enumerate(found.classes, 1):
        used = f" ({len(one.certificates)} certificates)" if one.certificates else " (alone)"
        print_on(stream, Text(f"class {number}: {', '.join(one.members)}{used}"))
    for line in reasons(found):
        print_on(stream, Text(line))
    for done in found.checked:
        words = "accepted" if done.accepted else f"not accepted: {done.detail} ({done.reason})"
        style = "bold green" if done.accepted else "bold red"
        print_on(stream, Text.assemble(f"{done.file}: ", (words, style)))
    for file, why in found.unused.items():
        print_on(stream, Text(f"not used: {file}: {why}"))
    print_on(stream, Text(NOTE, "dim"), Text(UNCHECKED, "dim"))
