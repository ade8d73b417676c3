"""`kcdsl experiment`: what a contract's kernels come to under other conditions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.diagnostics.render.terminal import json_for_terminals, one_line
from kcdsl.exits import Exit

HELP = "sweep kernels, batches, lengths and streams under one contract"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES
    from kcdsl.cli.numbers import count, positive, seed

    parser.add_argument(
        "experiment",
        choices=("e1", "e2"),
        help="e1: one change of the inference kernel at a time; e2: device, length, batch and "
        "concurrent streams",
    )
    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="e1: a variant, or a factor; may be repeated",
    )
    parser.add_argument(
        "--device",
        action="append",
        choices=CHOICES[1:],
        help="e1: where kernels run (default: cpu); e2: may be repeated (default: cpu and cuda)",
    )
    for name, metavar, what in (
        ("--length", "L", "tokens (default: 16, 32, 64, 128)"),
        ("--batch", "B", "requests in a batch (default: 1, 2, 4, 8)"),
        ("--concurrency", "C", "batches at a time (default: 1, 2, 4)"),
    ):
        parser.add_argument(name, action="append", type=count, metavar=metavar, help=f"e2: {what}")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of token sampling")
    parser.add_argument(
        "--seconds", type=positive, default=5.0, metavar="S", help="e1: how long a variant is timed"
    )
    add_allow_code(parser)
    parser.add_argument("--fresh", action="store_true", help="measure cells again that are there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="default: out/e1 or out/e2 beside the contract"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: cells are written as they are measured, the rest together at the end."""
    import json

    from kcdsl.check.compile import load_program
    from kcdsl.cli.discover import find_contract, results_folder
    from kcdsl.cli.progress import progress_bars
    from kcdsl.source.files import in_contract
    from kcdsl.source.writing import make_folder, result, write_together
    from kcdsl.verdict.html.experiment import experiment_page
    from kcdsl.verdict.html.experiment_maps import maps

    kind = arguments.experiment
    _refuse_foreign(kind, arguments)
    path = find_contract(arguments.contract, Path())
    program, base = load_program(path), path.resolve().parent
    refuse_foreign_code(program, path, arguments)
    folder = results_folder(arguments.output, path, kind)
    if not arguments.output:
        results_folder(None, path, kind, "cells")
    backend = _backend()
    with in_contract(path), progress_bars() as progress:
        document = backend.experiment(
            kind,
            program,
            base,
            folder,
            devices=tuple(arguments.device or ()),
            only=tuple(arguments.only or ()),
            lengths=tuple(arguments.length or ()),
            batches=tuple(arguments.batch or ()),
            concurrency=tuple(arguments.concurrency or ()),
            seed=arguments.seed,
            seconds=arguments.seconds,
            fresh=arguments.fresh,
            progress=progress,
        )
    text = (
        json_for_terminals(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))
        + "\n"
    )
    files = [
        result(folder / f"{kind}.json", text.encode()),
        result(folder / f"{kind}.html", experiment_page(document).encode()),
    ]
    if kind == "e2":
        files += [
            result(folder / f"{one.name}.svg", _standalone(one.svg).encode())
            for one in maps(document)
        ]
    make_folder(folder)
    before = _pictures(folder / f"{kind}.json")
    write_together(files, replace=True)
    for stale in before - {file.path.name for file in files}:
        (folder / stale).unlink(missing_ok=True)
    if arguments.json:
        sys.stdout.write(text)
    else:
        from kcdsl.verdict.experiment_text import print_experiment

        print_experiment(document, sys.stdout)
    for file in files:
        print(one_line(f"wrote {file.path}"), file=sys.stderr)
    return Exit.HELD


def _refuse_foreign(kind: str, arguments: argparse.Namespace) -> None:
    """Refuse options of the other experiment, which would not be heeded."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import USAGE

    foreign = ("length", "batch", "concurrency") if kind == "e1" else ("only",)
    for name in foreign:
        if getattr(arguments, name):
            other = "e2" if kind == "e1" else "e1"
            raise refuse(USAGE, f"--{name} is for {other}", help=f"`kcdsl experiment {other}`")
    if kind == "e1" and len(arguments.device or ()) > 1:
        raise refuse(USAGE, "e1 runs on one device", help="give --device once")


def _pictures(path: Path) -> set[str]:
    """Return the names of the pictures that an earlier run wrote beside its document.

    Nothing else in the folder is ours. Of a document that is damaged nothing is known.
    """
    import json

    from kcdsl.diagnostics import Refusal
    from kcdsl.source.files import read_bytes
    from kcdsl.verdict.html.experiment_maps import names
    from kcdsl.verdict.report_file import LARGEST

    try:
        document = json.loads(read_bytes(path, LARGEST))
        found = names(document) if document["experiment"] == "e2" else ()
    except (Refusal, OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {f"{name}.svg" for name in found}


def _standalone(svg: str) -> str:
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _backend() -> Any:
    from kcdsl.cli.aggregate import backend

    return backend()
