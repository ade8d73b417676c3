"""`kcdsl lsp`: the language server, for editors."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PACKAGE
from kcdsl.exits import Exit

HELP = "serve an editor by the language server protocol"
_NEEDED = ("pygls", "lsprotocol")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--stdio",
        action="store_true",
        help="talk on standard input and output, which it does in any case",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Serve until the client ends the session."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise refuse(
            NO_PACKAGE,
            f"the language server needs {' and '.join(missing)}, not installed",
            help='pip install "kcdsl[lsp]"',
        )
    from kcdsl.lsp.server import serve

    serve()
    return Exit.HELD
