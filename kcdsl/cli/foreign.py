"""Code that a contract brings along, and whether it may run.

A contract names Python code in two places: the factory of its model, and metrics of its own. Only
`verify`, `evaluate`, `replay`, `attribute`, `experiment` and `transfer` run it, and only where the
user allows that; everything else reads files. `SECURITY.md` has the rules.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Declare the option by which the user allows it, and say at the end of the help that it is
    needed."""
    parser.epilog = (
        "This command runs code of the contract, once that is allowed: a model factory, and "
        "metrics of its own. SECURITY.md says when."
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the Python code that the contract names, with your rights (default: only where "
        "the contract is below trusted-folders of your own configuration)",
    )


def refuse_foreign_code(
    program: Program, path: Path, arguments: argparse.Namespace, *, metrics: bool = True
) -> None:
    """Raise Refusal where a command would run code of the contract at `path` that nobody allowed.

    Without `metrics` the command runs the model alone.
    """
    if arguments.allow_code:
        return
    base = path.resolve().parent
    named = [] if program.model.module is None else [(program.model.module, base)]
    if metrics and program.metrics:
        from kcdsl.check.user_metrics import configured_functions

        folders = configured_functions(base)
        functions = [metric.function for metric in program.metrics]
        named += [(name, folders[name]) for name in functions if name in folders]
    if not named:
        return
    from kcdsl.config import load_config, user_file

    config = load_config(base)
    origin = config.origin("trusted-folders")
    trusted = [(origin.folder / Path(f).expanduser()).resolve() for f in config.trusted_folders]
    unknown = [
        name
        for name, folder in named
        if not all(any(f.is_relative_to(t) for t in trusted) for f in (base, folder))
    ]
    if not unknown:
        return
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import FOREIGN_CODE
    from kcdsl.diagnostics.model import at
    from kcdsl.source.files import in_contract

    listed = ", ".join(unknown[:3]) + (" and others" if len(unknown) > 3 else "")
    mine = user_file()
    where = f", or list the folder in `trusted-folders` of {mine}" if mine is not None else ""
    with in_contract(path), at(program.model.span):
        raise refuse(
            FOREIGN_CODE,
            f"the contract names Python code that would run with your rights: {listed}",
            help=f"read the code; then pass --allow-code{where}",
        )
