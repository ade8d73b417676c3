"""The fields of recorded kernels: the format, its columns, and what was recorded."""

from __future__ import annotations

from kcdsl.check.report import Reporter, suggest
from kcdsl.check.services import foreign, read_logprobs
from kcdsl.check.structure import RawContract, RawKernel, StructureReader
from kcdsl.diagnostics.codes import MISSING_FIELD, NOT_ALLOWED, RECORDING, WRONG_KIND
from kcdsl.ir.kernels import Recording
from kcdsl.ir.recordings import FORMATS, LOGITS, ROLES
from kcdsl.ir.terms import KernelRef
from kcdsl.source.yaml_nodes import Scalar

RECORDED = ("recorded",)
"""The adapters that read what was recorded."""
RECORDING_FIELDS = ("format", "columns", "file", "recomputed")
_OF_ROWS = ("columns", "logprobs", "recomputed")


def read_recording(raw: RawKernel, reader: StructureReader) -> Recording | None:
    """Return what a kernel says of its recording; None for other kernels."""
    if raw.run.text not in RECORDED:
        foreign(raw, reader, RECORDING_FIELDS, RECORDED)
        return None
    format = _format(raw, reader)
    file = reader.text(raw.node, "file")
    if format == LOGITS:
        foreign_to_logits = [name for name in _OF_ROWS if raw.node.get(name) is not None]
        for name in foreign_to_logits:
            entry = next(e for e in raw.node.entries if e.key.text == name)
            reader.reporter.error(
                RECORDING,
                f"recorded logits take no `{name}`",
                entry.key.span,
                "logits are what the model gives; leave the field out",
            )
        if raw.node.get("file") is None:
            reader.reporter.error(
                MISSING_FIELD,
                "recorded logits need the field `file`",
                raw.run.span,
                "add `file: logits.safetensors`",
            )
        return Recording(LOGITS, file=None if file is None else file.text)
    if raw.node.get("file") is not None:
        reader.reporter.error(
            RECORDING,
            "the rows of a recording are the data of the contract, so the kernel names no `file`",
            raw.run.span,
            "name the file as `data`, or state `format: logits`",
        )
    return Recording(
        format, _columns(raw, reader), read_logprobs(raw, reader), None, _recomputed(raw, reader)
    )


def _format(raw: RawKernel, reader: StructureReader) -> str:
    node = reader.text(raw.node, "format")
    if node is None:
        return "rows"
    if node.text not in FORMATS:
        reader.reporter.error(
            NOT_ALLOWED,
            f"there is no format `{node.text}` of recordings",
            node.span,
            suggest(node.text, FORMATS),
        )
        return "rows"
    return node.text


def _columns(raw: RawKernel, reader: StructureReader) -> tuple[tuple[str, str], ...]:
    node = reader.mapping(raw.node, "columns", ROLES)
    if node is None:
        return ()
    named = [(e.key.text, reader.as_text(e.value, e.key.text)) for e in node.entries]
    return tuple(sorted((role, name.text) for role, name in named if name is not None))


def _recomputed(raw: RawKernel, reader: StructureReader) -> bool:
    node = raw.node.get("recomputed")
    if node is None:
        return False
    if not isinstance(node, Scalar) or not isinstance(node.value, bool):
        reader.reporter.error(WRONG_KIND, "`recomputed` is true or false", node.span)
        return False
    return node.value


def check_recorded(
    train: KernelRef, infer: KernelRef, raw: RawContract, reporter: Reporter
) -> None:
    """Report kernels that no recording can stand for beside each other."""
    place = raw.train.run.span if raw.train is not None else raw.span
    if train.recording is None or train.recording.format == LOGITS:
        if infer.recording is not None and infer.recording.format != LOGITS and train.recording:
            reporter.error(
                RECORDING,
                "the one side has whole logits and the other ln-probabilities of sampled tokens",
                place,
                "record both in one way, or let the training kernel run",
            )
        return
    if infer.recording is None or infer.recording.format == LOGITS:
        reporter.error(
            RECORDING,
            "sampled tokens are recorded for `train`, but not for `infer`, which must have drawn"
            " them",
            place,
            "record `infer` too, or `infer` alone and let the training kernel run",
        )
    elif infer.recording.format != train.recording.format:
        reporter.error(
            RECORDING,
            f"`train` reads rows as {train.recording.format}, `infer` as {infer.recording.format},"
            " and they are the same rows",
            place,
            f"give both `format: {infer.recording.format}`",
        )
