"""`kcdsl register`: record certificates, show their status and live triples, audit the log."""

from kcdsl.cli.commands.release.register.command import RegisterCommand

__all__ = ["RegisterCommand"]
