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
        "--stdio", action="store_true", help="talk on standard input and output (the default)"
    )
    parser.add_argument(
        "--tcp", type=_port, metavar="PORT", help="listen at a port of this machine instead"
    )


def _port(text: str) -> int:
    value = int(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError("must be a number from 1 to 65535")
    return value


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

    serve(arguments.tcp)
    return Exit.HELD
