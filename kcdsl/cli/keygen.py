"""`kcdsl keygen`: make a key pair for signing certificates."""

from __future__ import annotations

import argparse
from pathlib import Path

from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

HELP = "make a key pair for signing certificates"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "-o",
        "--output",
        default="kcdsl.key",
        metavar="FILE",
        help="the private key; the public one is FILE.pub (default: kcdsl.key)",
    )
    parser.add_argument(
        "--algorithm",
        choices=("ecdsa-p256", "ed25519"),
        default="ecdsa-p256",
        help="default: ecdsa-p256, the one that every verifier of DSSE envelopes accepts",
    )
    parser.add_argument(
        "--password-env",
        metavar="VAR",
        help="encrypt the private key with the password in this environment variable",
    )
    parser.add_argument("--force", action="store_true", help="replace a key that is already there")


def run(arguments: argparse.Namespace) -> Exit:
    """Write both files or none; the private one is readable by its owner alone."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import INPUT_OUTPUT
    from kcdsl.release.keys import password_from
    from kcdsl.source.writing import NewFile, make_folder, write_together
    from kcdsl_certs.keys import Algorithm, generate

    variable = arguments.password_env
    password = None if variable is None else password_from(variable)
    key = generate(Algorithm(arguments.algorithm))
    private = Path(arguments.output)
    public = private.with_name(private.name + ".pub")
    for path in (private, public):
        if path.is_symlink():
            raise refuse(INPUT_OUTPUT, f"{path} is a link", help="name the file itself")
    make_folder(private.parent)
    write_together(
        [
            NewFile(private, key.to_pem(password), 0o600),
            NewFile(public, key.public.pem, 0o644),
        ],
        replace=arguments.force,
    )
    print(one_line(f"private key  {private}  (keep it secret, out of version control)"))
    print(one_line(f"public key   {public}  ({key.public.algorithm}, hint {key.public.hint})"))
    return Exit.HELD
