"""`kcdsl attribute`: which source makes the kernels drift, and in which block."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.verdict.attribution import Attribution

HELP = "split the drift among its sources and blocks"
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES
    from kcdsl.cli.numbers import count, seed

    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument(
        "--metric", metavar="NAME", help="what is split (default: kl; of encoders hidden_l2)"
    )
    parser.add_argument(
        "--statistic",
        choices=STATISTICS,
        default="mean",
        help="of it: mean over tokens, or of the worst tokens of requests (default: mean)",
    )
    parser.add_argument("--slice", metavar="NAME", help="only this slice")
    parser.add_argument(
        "--batch",
        type=count,
        default=4,
        metavar="N",
        help="requests that the inference side runs together (default: 4)",
    )
    parser.add_argument(
        "--no-bounds", action="store_true", help="leave out what certified bounds exclude"
    )
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="default: cuda where there is one"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of sampling and resampling"
    )
    add_allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print the document as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder of attribution.json and attribution.svg (default: out beside the contract)",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: attribute, write the files, print what was found."""
    from kcdsl.check.compile import load_program
    from kcdsl.cli.devices import choose_device
    from kcdsl.cli.discover import find_contract, results_folder
    from kcdsl.cli.progress import progress_bars
    from kcdsl.source.files import in_contract

    path = find_contract(arguments.contract, Path())
    program = load_program(path)
    refuse_foreign_code(program, path, arguments)
    folder = results_folder(arguments.output, path)
    device = choose_device(arguments.device)
    attributor = _attributor()
    with in_contract(path), progress_bars() as progress:
        found: Attribution = attributor(
            program,
            path.resolve().parent,
            device=device,
            metric=arguments.metric,
            statistic=arguments.statistic,
            slice_name=arguments.slice,
            batch=arguments.batch,
            bounds=not arguments.no_bounds,
            seed=arguments.seed,
            progress=progress,
        )
    written = _write(folder, found)
    if arguments.json:
        sys.stdout.write(found.dumps())
    else:
        from kcdsl.verdict.attribution_text import print_attribution

        print_attribution(found, sys.stdout)
    for name in written:
        print(one_line(f"wrote {name}"), file=sys.stderr)
    return found.exit


def _attributor() -> Any:
    """Return what splits a drift; refuse where what it needs is not installed."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND
    from kcdsl.route.catalogue import catalogue

    able = [spec for spec in catalogue() if spec.attributor]
    for spec in able:
        if not spec.missing():
            return spec.load_attributor()
    lacking = ", ".join(sorted({name for spec in able for name in spec.missing()}))
    raise refuse(
        NO_BACKEND,
        f"no installed backend attributes: {lacking} missing"
        if lacking
        else "no backend attributes",
        help="`kcdsl doctor` says how to install what is missing",
    )


def _write(folder: Path, found: Attribution) -> list[str]:
    """Write both files, or none; return their names."""
    from kcdsl.source.writing import make_folder, result, write_together
    from kcdsl.verdict.attribution_svg import picture

    make_folder(folder)
    files = [
        result(folder / "attribution.json", found.dumps().encode()),
        result(folder / "attribution.svg", picture(found).encode()),
    ]
    write_together(files, replace=True)
    return [str(file.path) for file in files]
