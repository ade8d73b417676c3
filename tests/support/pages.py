"""Run the examples of the pages of diagnostic codes."""

from __future__ import annotations

from pathlib import Path

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.source.text import SourceFile

BASE = {
    "kcdsl": "kcdsl: 1\n",
    "contract": "contract: example\n",
    "version": "version: 1.0.0\n",
    "model": "model: {checkpoint: model.safetensors, architecture: llama}\n",
    "kernels": "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n",
    "data": "data: requests.jsonl\n",
    "slices": 'slices:\n  all: {}\n  long: {where: "length > 128"}\n',
    "clauses": "clauses:\n  BASE: {require: mean(tv) <= 5%, slices: [long], level: L1}\n",
}
"""The sections that an example which leaves them out gets."""
FILES = ("model.safetensors", "requests.jsonl", "config.json", "tokenizer.json")


def completed(text: str) -> str:
    """Return an example with the sections it leaves out, which stand before it; an example that
    begins with `kcdsl:` or is no mapping of sections is whole already."""
    first = text.lstrip()
    whole = first.startswith(("kcdsl:", "%", "---", "- ", "[", "{")) or not first
    starts = {line.split(":")[0].strip("'\" ") for line in text.splitlines() if line[:1].strip()}
    if whole or not starts & {*BASE, "escalation", "constants", "tables", "imports"}:
        return text
    return text + "".join(part for name, part in BASE.items() if name not in starts)


def found(text: str, folder: Path) -> tuple[SourceFile, list[Diagnostic]]:
    """Return what an example reports in a folder where the usual files are."""
    for name in FILES:
        (folder / name).touch()
    source, sink = SourceFile("contract.yaml", completed(text)), Sink()
    analyse(source, sink, folder)
    return source, sink.found


def consoles(text: str) -> list[tuple[list[str], str]]:
    """Return the commands of a console block, each with what it prints."""
    import shlex

    runs: list[tuple[list[str], str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            runs.append((shlex.split(line[2:], comments=True), ""))
        elif runs:
            runs[-1] = (runs[-1][0], runs[-1][1] + line)
    return runs
