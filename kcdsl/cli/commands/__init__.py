"""The commands, by name; the module of one is imported only when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kcdsl.cli.common import Command


class Entry(NamedTuple):
    """Where a command is, as `module:Class` of this package, and what it does."""

    target: str
    help: str


COMMANDS: Mapping[str, Entry] = {
    "compile": Entry(
        "compile:Compile", "check a contract, build its IR and show the route of each clause"
    ),
    "lint": Entry(
        "lint:Lint", "check contracts and report what is wrong, without running anything"
    ),
    "fmt": Entry("compile:Fmt", "write contracts in the house layout; comments and meaning stay"),
    "diff": Entry(
        "compile:Diff", "say whether a contract became stricter or weaker, clause by clause"
    ),
    "explain": Entry(
        "explain:Explain", "explain a code, a metric, or which backends cover a clause and why"
    ),
    "verify": Entry(
        "verify:Verify", "decide the clauses about every input of a region, write certificates"
    ),
    "replay": Entry(
        "results:Replay", "run a counterexample again, or decide every clause from a trace"
    ),
    "plan": Entry("studies:Plan", "tell how many requests the clauses need to be decidable"),
    "evaluate": Entry(
        "evaluate:Evaluate", "run both kernels on the slices and decide the measured clauses"
    ),
    "report": Entry(
        "results:Report", "write the page of a report again, or show it in another format"
    ),
    "attribute": Entry("studies:Attribute", "split the drift among its sources and blocks"),
    "aggregate": Entry(
        "studies:Aggregate", "count logged tokens by slice, and decide a contract on them"
    ),
    "experiment": Entry(
        "studies:Experiment", "sweep kernels, batches, lengths and streams under one contract"
    ),
    "status": Entry("results:Status", "join proofs and measurements: is the whole contract kept?"),
    "check": Entry(
        "check:Check", "verify signature, triple, freshness and coverage of a certificate"
    ),
    "transfer": Entry("check:Transfer", "carry the results of a certificate over to later weights"),
    "keygen": Entry("signing:Keygen", "make a key pair for signing certificates"),
    "sign": Entry(
        "signing:Sign", "show and sign the statement of a certificate; no contract is run"
    ),
    "lsp": Entry("settings:Lsp", "serve an editor by the language server protocol"),
    "doctor": Entry(
        "doctor:Doctor", "say what is installed, what that enables, and how to get the rest"
    ),
    "backends": Entry("doctor:Backends", "list the backends, what they decide and what they lack"),
    "config": Entry(
        "settings:Config", "show the options of the configuration and where values came from"
    ),
    "completion": Entry("settings:Completion", "print the completion script for a shell"),
}


def load(name: str) -> type[Command]:
    """Import and return a command."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    found: type[Command] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found


def command_of(words: Sequence[str]) -> str | None:
    """Return the word that names the command: the first that is no option and no value of one."""
    before = ""
    for word in words:
        if not word.startswith("-") and before != "--color":
            return word
        before = word
    return None
