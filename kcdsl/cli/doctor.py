"""`kcdsl doctor`: what is installed, which backends that enables, what is missing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from kcdsl.cli.environment import Backend, Device, Environment, Package, examine, to_json
from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit

_WIDTH = 100
"""Columns where the output is not a terminal."""

HELP = "say what is installed, which backends that enables, and how to get what is missing"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> Exit:
    """Print the report; 0 where the main road works, 2 where something it needs is missing."""
    environment = examine()
    if arguments.json:
        print(json_for_terminals(json.dumps(to_json(environment), indent=2, ensure_ascii=False)))
    else:
        _print(environment)
    return Exit.HELD if environment.ready else Exit.COULD_NOT_RUN


def _print(environment: Environment) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the doctor must speak where even rich is missing
        print("\n".join(_plain(environment)))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]]], ...] = (
        (
            "packages",
            ("package", "installed", "range", "for", "state"),
            [_package_row(p) for p in environment.packages],
        ),
        (
            "backends",
            ("backend", "decides", "state"),
            [_backend_row(b) for b in environment.backends],
        ),
    )
    console.print(Text(_headline(environment)))
    for title, columns, rows in tables:
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row[:-1], Text(row[-1], style="green" if row[-1] == "ok" else "yellow"))
        console.print(table)
    for line in (*_device_lines(environment.device), *_advice(environment)):
        print(line)  # commands are never wrapped: they are there to be copied


def _plain(environment: Environment) -> Iterator[str]:
    yield _headline(environment)
    for package in environment.packages:
        yield "  ".join(_package_row(package))
    for backend in environment.backends:
        yield "  ".join(_backend_row(backend))
    yield from _device_lines(environment.device)
    yield from _advice(environment)


def _headline(environment: Environment) -> str:
    own = environment.version or "(not installed)"
    return f"kcdsl {own}, Python {environment.python} ({environment.executable})"


def _package_row(package: Package) -> tuple[str, ...]:
    wanted = package.requirement.removeprefix(package.name).strip()
    state = package.problem or "ok"
    if package.problem is not None and not package.required:
        state = f"optional, {state}"
    return (package.name, package.installed or "-", wanted or "any", package.purpose, state)


def _backend_row(backend: Backend) -> tuple[str, ...]:
    state = "ok" if backend.enabled else f"needs {', '.join(backend.missing)}"
    return (backend.name, ", ".join(backend.fragments), state)


def _device_lines(device: Device) -> Iterator[str]:
    match device.kind:
        case "cuda":
            size = f"{(device.memory_bytes or 0) / 2**30:.0f} GiB"
            yield f"device: CUDA, {device.name}, {size}, compute capability {device.capability}"
        case "cpu":
            yield f"device: CPU, {device.name}; no CUDA device is visible to torch"
        case _:
            yield f"device: none; {device.name}"
            return
    storage = "can be stored" if device.float8_storage else "unknown to this torch"
    products = "run on the device" if device.float8_products else "are computed after conversion"
    yield f"float8: {storage}; products of float8 operands {products}"


def _advice(environment: Environment) -> Iterator[str]:
    if environment.python_problem is not None:
        yield f"problem: {environment.python_problem}"
    for problem in environment.problems:
        yield f"problem: {problem}"
    for package in environment.packages:
        if package.required and not package.usable:
            yield f"problem: {package.name}: {package.problem} ({package.purpose})"
    if environment.remedy is not None:
        yield f"run: {environment.remedy}"
    for package in environment.packages:
        if not package.required and package.command is not None:
            yield f"optional {package.name} ({package.purpose}): {package.command}"
    if environment.ready:
        yield "The main road works: compile, verify, evaluate, check."
    else:
        yield "The main road does not work yet."
