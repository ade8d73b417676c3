"""The command line."""

from kcdsl.cli.application import main
from kcdsl.cli.commands import COMMANDS

__all__ = ["COMMANDS", "main"]
