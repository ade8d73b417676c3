"""The commands, by name; the module of a command is imported only when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kcdsl.cli.common import Command


class CommandEntry(NamedTuple):
    """The location of a command, as `module:Class` of this package, and its summary."""

    target: str
    help: str


GROUPS: Mapping[str, Mapping[str, CommandEntry]] = {
    "write a contract": {
        "init": CommandEntry(
            "init:InitCommand", "draft a contract from a model, recorded rollouts, or nothing"
        ),
        "compile": CommandEntry(
            "compile:CompileCommand",
            "check a contract, build its IR and show the route of each clause",
        ),
        "lint": CommandEntry(
            "lint:LintCommand", "check contracts and report what is wrong, without running anything"
        ),
        "fmt": CommandEntry(
            "compile:FmtCommand", "format contracts; comments and meaning are kept"
        ),
        "diff": CommandEntry(
            "compile:DiffCommand",
            "check whether a contract or a certificate became weaker",
        ),
        "explain": CommandEntry(
            "explain:ExplainCommand",
            "explain a code, a metric, or which backends cover a clause and why",
        ),
    },
    "decide it": {
        "verify": CommandEntry(
            "verify:VerifyCommand",
            "decide clauses for all inputs of a region, and write certificates",
        ),
        "replay": CommandEntry(
            "results:ReplayCommand",
            "run a counterexample again, or decide every clause from a trace",
        ),
        "plan": CommandEntry(
            "studies:PlanCommand", "estimate how many requests are needed to decide the clauses"
        ),
        "evaluate": CommandEntry(
            "evaluate:EvaluateCommand",
            "run both kernels on the slices and decide the measured clauses",
        ),
        "report": CommandEntry(
            "results:ReportCommand",
            "render a report again, as a page or in another format",
        ),
        "compare": CommandEntry(
            "results:CompareCommand", "compare a candidate with the incumbent on the same requests"
        ),
        "attribute": CommandEntry(
            "studies:AttributeCommand", "split the drift among its sources and blocks"
        ),
        "aggregate": CommandEntry(
            "studies:AggregateCommand",
            "count logged tokens by slice, and decide a contract on them",
        ),
        "experiment": CommandEntry(
            "studies:ExperimentCommand",
            "sweep kernels, batches, lengths and streams under one contract",
        ),
        "status": CommandEntry(
            "results:StatusCommand",
            "combine proofs and measurements into a verdict on the contract",
        ),
    },
    "release what it covers": {
        "keygen": CommandEntry(
            "release.signing:KeygenCommand", "make a key pair for signing certificates"
        ),
        "sign": CommandEntry(
            "release.signing:SignCommand",
            "show and sign the statement of a certificate; no contract is run",
        ),
        "check": CommandEntry(
            "release.check:CheckCommand",
            "verify signature, triple, freshness and coverage of a certificate",
        ),
        "show": CommandEntry(
            "release.signing:ShowCommand",
            "show a certificate in readable form, in the terminal or as a page",
        ),
        "register": CommandEntry(
            "release.register:RegisterCommand",
            "manage a register of certificates: record, revoke, list, audit",
        ),
        "promote": CommandEntry(
            "release.promotion:PromoteCommand",
            "advance, hold, freeze or roll back a candidate, by the evidence of a stage",
        ),
        "gate": CommandEntry(
            "release.promotion:GateCommand",
            "check whether a triple may serve at a stage, also over HTTP",
        ),
        "why": CommandEntry(
            "release.why:WhyCommand",
            "find why a triple failed: loose contract, kernel build, or model update",
        ),
        "fleet": CommandEntry(
            "release.fleet:FleetCommand", "list the kernels that agree pairwise under one contract"
        ),
        "transfer": CommandEntry(
            "release.transfer:TransferCommand",
            "transfer the results of a certificate to later weights",
        ),
        "companions": CommandEntry(
            "release.signing:CompanionsCommand",
            "write attestations of an OCI image in the formats of other verifiers",
        ),
        "attach": CommandEntry(
            "release.signing:AttachCommand", "attach certificates to an image in an OCI registry"
        ),
    },
    "tools": {
        "vnnlib": CommandEntry(
            "verify:VnnlibCommand",
            "answer VNN-LIB queries about ONNX networks, as their solvers do",
        ),
        "lsp": CommandEntry("settings:LspCommand", "run the language server for editors"),
        "doctor": CommandEntry(
            "doctor:DoctorCommand",
            "show what is installed, what it enables, and how to install the rest",
        ),
        "backends": CommandEntry(
            "doctor:BackendsCommand", "list the backends, what they decide and what they lack"
        ),
        "config": CommandEntry(
            "settings:ConfigCommand",
            "show the configuration and the source of each value",
        ),
        "completion": CommandEntry(
            "settings:CompletionCommand", "print the completion script for a shell"
        ),
    },
}
"""The commands by purpose."""
COMMANDS: Mapping[str, CommandEntry] = {
    name: entry for group in GROUPS.values() for name, entry in group.items()
}


def load(name: str) -> type[Command]:
    """Import and return a command."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    found: type[Command] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found


def command_of(words: Sequence[str]) -> str | None:
    """Return the name of the command: the first word that is no option or value of an option."""
    before = ""
    for word in words:
        if not word.startswith("-") and before != "--color":
            return word
        before = word
    return None
