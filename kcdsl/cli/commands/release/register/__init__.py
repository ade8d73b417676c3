"""`kcdsl register`: keep certificates, see what is in force and what is live, audit the record."""

from kcdsl.cli.commands.release.register.command import RegisterCommand

__all__ = ["RegisterCommand"]
