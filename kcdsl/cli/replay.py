"""`kcdsl replay`: run a counterexample again, or conclude again from the trace of an evaluation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kcdsl.ir.terms import Program
    from kcdsl.verdict.counterexample import Replayed

HELP = "run a counterexample again, or decide every clause again from a trace"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES

    parser.add_argument(
        "file",
        metavar="FILE",
        help="a counterexample that `kcdsl verify` wrote, or trace.parquet of `kcdsl evaluate`",
    )
    parser.add_argument(
        "--contract",
        metavar="CONTRACT",
        help="of a counterexample (default: the one here); for a trace, a changed contract",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="the weights of a counterexample, instead of those the contract names",
    )
    parser.add_argument("--device", choices=CHOICES, default="cpu", help="default: cpu")
    add_allow_code(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> Exit:
    """Replay; what is not reproduced is refused (2).

    A counterexample: 1 its run breaks its clause, 3 it does not. A trace: as the evaluation did.
    """
    from kcdsl.cli.replay_trace import is_trace, replay_trace

    file = Path(arguments.file)
    if is_trace(file):
        return replay_trace(file, arguments)
    return _replay_counterexample(file, arguments)


def _replay_counterexample(file: Path, arguments: argparse.Namespace) -> Exit:
    from kcdsl.check.compile import load_contract
    from kcdsl.cli.devices import choose_device
    from kcdsl.cli.discover import find_contract
    from kcdsl.source.files import in_contract
    from kcdsl.verdict.counterexample import REPLAY_SCHEMA, read_counterexample

    document = read_counterexample(file)
    path = find_contract(arguments.contract, Path())
    (program, _), base = load_contract(path), path.resolve().parent
    refuse_foreign_code(program, path, arguments, metrics=False)
    device = choose_device(arguments.device)
    backend = _backend()
    with in_contract(path):
        replayed: Replayed = backend.replay(
            program, base, document, device=device, checkpoint=arguments.checkpoint
        )
    if arguments.json:
        body = {
            "schema": REPLAY_SCHEMA,
            "counterexample": str(file),
            "clause": document["clause"],
            "case": document["case"]["name"],
            "limit": document["limit"],
            "value": replayed.value,
            "claimed": float.fromhex(document["attained"]["value"]),
            "exact": replayed.exact,
            "train": replayed.train,
            "infer": replayed.infer,
            "drift": replayed.infer - replayed.train,
            "row": list(replayed.row),
            "column": replayed.column,
            "symbols": replayed.symbols,
            "ordered_sums": replayed.ordered,
            "region_moved": replayed.moved,
            "violated": replayed.refutes,
            "exit": int(replayed.exit),
        }
        print(json.dumps(body, indent=2, allow_nan=False))
    else:
        _print(program, document, replayed)
    if replayed.moved > 0:
        print(
            f"note: the region is {replayed.moved:.2g} away from the activations that this machine "
            "computes",
            file=sys.stderr,
        )
    return replayed.exit


def _backend() -> Any:
    """Return the backend that runs counterexamples; refuse where none is installed."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND
    from kcdsl.route.catalogue import Fragment, catalogue

    for spec in catalogue():
        if Fragment.UNIVERSAL_DRIFT in spec.fragments and not spec.missing():
            backend = spec.load()
            if hasattr(backend, "replay"):
                return backend
    raise refuse(
        NO_BACKEND,
        "no installed backend runs counterexamples",
        help="`kcdsl doctor` says how to install what is missing",
    )


def _print(program: Program, document: Mapping[str, Any], found: Replayed) -> None:
    from kcdsl.diagnostics.render.terminal import printable
    from kcdsl.ir.words import region_text
    from kcdsl.route.goals import goals
    from kcdsl.verdict.goal_report import functional_of

    goal = next(g for g in goals(program) if g.clause.id == document["clause"])
    limit = document["limit"]
    claimed = float.fromhex(document["attained"]["value"])
    same = "bit for bit" if found.exact else f"{claimed!r} was claimed: within roundings"
    parts = [f"{found.symbols} rounding symbols"]
    if found.ordered:
        parts.append(f"{found.ordered} sums in concrete orders")
    lines = {
        "clause": f"{document['clause']}: {functional_of(goal)} {limit['op']} "
        f"{float(goal.threshold or 0):g}, x in {region_text(goal.region)}",
        "case": f"{document['case']['name']}, {len(document['case']['tokens'])} tokens",
        "run": ", ".join(parts),
        "place": f"row {list(found.row)}, feature {found.column}",
        "training": repr(found.train),
        "inference": repr(found.infer),
        "drift": repr(found.infer - found.train),
        "value": f"{found.value!r} ({same})",
    }
    for name, text in lines.items():
        print(f"{name:<10} {printable(text)}")
    print(
        "✗ violated: an admitted run of both kernels exceeds the limit"
        if found.refutes
        else "? the run is admitted and does not exceed the limit"
    )
