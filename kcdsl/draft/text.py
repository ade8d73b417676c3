"""The text of a draft: a contract in YAML with a one-line comment on each part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from kcdsl.diagnostics import Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.draft.clauses import USUAL, DraftClause, DraftPurpose
from kcdsl.draft.quantisation import DraftKernel
from kcdsl.draft.rows import DraftSlice
from kcdsl.ir.terms import ONNX

_WIDTH = 96
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS_OF_YAML = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """A recorded kernel of a draft: its layout, and the kind of its log-probabilities."""

    format: str
    values: str
    temperature: str
    recomputed: bool = False

    @property
    def tempered(self) -> bool:
        """Return whether its log-probabilities are those of another temperature than 1."""
        return self.values == "processed" and self.temperature != "1"


@dataclass(frozen=True, slots=True)
class Draft:
    """The content of a drafted contract."""

    name: str
    purpose: DraftPurpose
    checkpoint: str
    architecture: str
    about_model: str
    train: DraftKernel | RecordedKernel
    infer: DraftKernel | RecordedKernel
    data: str
    slices: tuple[DraftSlice, ...]
    clauses: tuple[DraftClause, ...]
    blocks: tuple[tuple[str, str, str], ...] = ()
    """Blocks of an ONNX file: name, first and last tensor."""
    notes: tuple[str, ...] = ()
    """Omissions and assumptions of the draft, printed and written as comments at the kernels."""


def contract_text(draft: Draft) -> str:
    """Return the text of a contract in the house layout."""
    from kcdsl.format import format_text

    raw = "\n".join(_lines(draft)) + "\n"
    sink = Sink()
    text = format_text(SourceFile("contract.yaml", raw), sink)
    if text is None:
        raise Refusal(tuple(sink))
    return text


def _lines(draft: Draft) -> Iterator[str]:
    yield from _comment(
        f"How far the inference kernel may drift from the training kernel: a draft for "
        f"{_FOR[draft.purpose]}. Read it, change what you know better, and raise the version."
    )
    yield "kcdsl: 1"
    yield f"contract: {_scalar(draft.name)}"
    yield "version: 0.1.0"
    yield ""
    yield from _comment(draft.about_model)
    yield "model:"
    if draft.architecture == ONNX:
        yield f"  onnx: {_scalar(draft.checkpoint)}"
        if draft.blocks:
            yield "  # The parts between sums of the graph, each from one tensor to another."
            yield "  blocks:"
        for name, first, last in draft.blocks:
            yield f"    {name}: {{from: {_scalar(first)}, to: {_scalar(last)}}}"
    else:
        yield f"  checkpoint: {_scalar(draft.checkpoint)}"
        yield f"  architecture: {_scalar(draft.architecture)}"
    yield ""
    yield from _comment(
        "The two programs. `run` is what is measured, `numerics` what is proved about it: number "
        "formats, and roundings in any place that they leave free."
    )
    for note in draft.notes:
        yield from _comment(f"Note: {note}.")
    yield "kernels:"
    for role, kernel in (("train", draft.train), ("infer", draft.infer)):
        yield f"  {role}:"
        yield from (f"    {line}" for line in _kernel(kernel, recomputed=role == "train"))
    yield ""
    if isinstance(draft.infer, RecordedKernel) and draft.infer.tempered:
        yield from _comment("The policy that clauses compare divides logits by the temperature.")
        yield f"constants: {{temperature: {draft.infer.temperature}}}"
        yield ""
    yield from _comment("The requests that are measured, one JSON object a line or a row each.")
    yield f"data: {_scalar(draft.data)}"
    yield ""
    yield from _comment("Parts of the requests; a clause holds on each of its slices by itself.")
    yield "slices:"
    used = {name for clause in draft.clauses for name in _slices(clause)}
    for each in draft.slices:
        if each.name in used:
            where = f"{{where: {_quoted(each.where)}}}" if each.where else "{}"
            yield f"  {each.name}: {where}  # {each.why}"
    yield ""
    if any(clause.note == USUAL for clause in draft.clauses):
        yield from _comment(
            "A usual limit comes from other models: `kcdsl init --measure` proposes limits from "
            "runs of this one."
        )
    yield "clauses:"
    for clause in draft.clauses:
        yield from (f"  {line}" for line in _clause(clause))
    yield from _comment(
        "The action for a violated clause, by its level; `then` of a clause comes first."
    )
    yield "escalation:"
    yield "  {L1: log, L2: guard, L3: fallback, observability: {L2: freeze, L3: rollback}}"


_FOR = {
    DraftPurpose.SERVING: "serving",
    DraftPurpose.RL: "reinforcement learning",
    DraftPurpose.RELEASE: "a release gate",
}


def _slices(clause: DraftClause) -> Sequence[str]:
    return clause.slices if clause.block is None else ("short",)


def _kernel(kernel: DraftKernel | RecordedKernel, *, recomputed: bool) -> Iterator[str]:
    if isinstance(kernel, DraftKernel):
        yield f"run: {kernel.run}  # {kernel.says}"
        if kernel.checkpoint is not None:
            yield f"checkpoint: {_scalar(kernel.checkpoint)}"
        if kernel.numerics:
            yield f"numerics: {_flow(kernel.numerics)}"
        return
    yield "run: recorded"
    if kernel.format != "rows":
        yield f"format: {kernel.format}"
    if kernel.values == "processed":
        yield f"logprobs: {{values: processed, temperature: {kernel.temperature}}}"
    else:
        yield f"logprobs: {{values: raw, temperature: {kernel.temperature}}}"
    if recomputed and kernel.recomputed:
        yield "recomputed: true"


def _clause(clause: DraftClause) -> Iterator[str]:
    yield from _comment(clause.why + (f" Limit: {clause.note}." if clause.note else ""))
    yield f"{clause.id}:"
    require = clause.require if clause.op else clause.goal
    yield f"  require: {_scalar(require) if clause.block is None else json.dumps(require)}"
    if clause.block is None:
        yield f"  slices: [{', '.join(clause.slices)}]"
    if clause.evidence:
        yield f"  evidence: {clause.evidence}"
    yield f"  level: {clause.level}"
    if clause.then:
        yield f"  then: {clause.then}"
    yield ""


def _comment(text: str) -> Iterator[str]:
    for line in wrap(" ".join(text.split()), _WIDTH - 2):
        yield f"# {line}"


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)


def _quoted(text: str) -> str:
    """Return a printable text in double quotes, or in single ones where it has double ones."""
    return "'" + text.replace("'", "''") + "'" if '"' in text else json.dumps(text)


def _flow(section: Mapping[str, Any]) -> str:
    parts = (
        f"{_scalar(key)}: "
        + (
            _flow(value)
            if isinstance(value, Mapping)
            else str(value)
            if isinstance(value, float | int | list)
            else _scalar(str(value))
        )
        for key, value in section.items()
    )
    return f"{{{', '.join(parts)}}}"
