"""The options that say where the cases of `kcdsl verify` run, and what may be remembered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.numbers import count
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.route.execution import ENGINES, Execution
from kcdsl.source.files import user_place

if TYPE_CHECKING:
    from kcdsl.verdict.outcome import GoalOutcome


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --jobs, --engine, --threads and --cache."""
    add_workers(parser, "cases", "by cores and memory")
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="threads of one case (default: the cores, divided among the cases)",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="folder of what earlier runs found, or `off` (default: kcdsl/certifier in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )


def add_workers(parser: argparse.ArgumentParser, what: str, usual: str = "1") -> None:
    """Add --jobs and --engine; `what` is done by workers, `usual` says how many by default."""
    parser.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help=f"{what} at a time; 1 works in this process (default: {usual})",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help=f"where {what} run: processes of this machine, or a ray cluster (default: processes)",
    )


def execution_of(arguments: argparse.Namespace) -> Execution:
    """Return how the work is spread; the folder of the cache is made if it can be."""
    from kcdsl.source.writing import make_folder

    folder: Path | None = None
    if arguments.cache is None:
        folder = _usual_cache()
    elif arguments.cache != "off":
        folder = Path(arguments.cache).resolve()
        make_folder(folder)
    return Execution(arguments.engine, arguments.jobs, arguments.threads, folder)


def remembering(execution: Execution, *, confirmed: bool) -> Execution:
    """Return the execution, without a cache where no checker looks at what comes out of it."""
    if confirmed or execution.cache is None:
        return execution
    print("note: --confirm off takes nothing from the cache, and keeps nothing", file=sys.stderr)
    return replace(execution, cache=None)


def _usual_cache() -> Path | None:
    """Return the folder of the cache where the user said nothing; None if there can be none."""
    base = user_place("XDG_CACHE_HOME", ".cache")
    if base is not None:
        folder = base / "kcdsl" / "certifier"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    print("note: there is no folder for the cache; nothing is remembered", file=sys.stderr)
    return None


def tell_cached(outcomes: Sequence[GoalOutcome], execution: Execution) -> None:
    """Say how many cases had their bound from an earlier run."""
    cached, cases = sum(o.cached for o in outcomes), sum(len(o.cases) for o in outcomes)
    if cached:
        print(one_line(f"cache: {cached} of {cases} cases from {execution.cache}"), file=sys.stderr)
