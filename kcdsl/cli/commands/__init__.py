"""The commands, by name; the module of one is imported only when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcdsl.cli.options import Command


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is, as `module:Class` of this package, and what it does."""

    target: str
    help: str


_TABLE = """
compile    compile:Compile     check a contract, build its IR and show the route of each clause
lint       lint:Lint           check contracts and report what is wrong, without running anything
fmt        fmt:Fmt             write contracts in the house layout; comments and meaning stay
diff       compile:Diff        say whether a contract became stricter or weaker, clause by clause
explain    explain:Explain     explain a code, a metric, or which backends cover a clause and why
verify     verify:Verify       decide the clauses about every input of a region, write certificates
replay     replay:Replay       run a counterexample again, or decide every clause from a trace
plan       studies:Plan        tell how many requests the clauses need to be decidable
evaluate   evaluate:Evaluate   run both kernels on the slices and decide the measured clauses
report     results:Report      write the page of a report again, or show it in another format
attribute  studies:Attribute   split the drift among its sources and blocks
aggregate  studies:Aggregate   count logged tokens by slice, and decide a contract on them
experiment studies:Experiment  sweep kernels, batches, lengths and streams under one contract
status     results:Status      join proofs and measurements: is the whole contract kept?
check      check:Check         verify signature, triple, freshness and coverage of a certificate
transfer   transfer:Transfer   carry the results of a certificate over to later weights
keygen     signing:Keygen      make a key pair for signing certificates
sign       signing:Sign        show and sign the statement of a certificate; no contract is run
lsp        settings:Lsp        serve an editor by the language server protocol
doctor     doctor:Doctor       say what is installed, what that enables, and how to get the rest
backends   doctor:Backends     list the backends, what they decide and what they lack
config     settings:Config     show the options of the configuration and where values came from
completion settings:Completion print the completion script for a shell
"""
COMMANDS: Mapping[str, Entry] = {
    name: Entry(target, help)
    for name, target, help in (line.split(maxsplit=2) for line in _TABLE.strip().splitlines())
}


def load(name: str) -> type[Command]:
    """Import and return a command."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    found: type[Command] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found
