"""The fields of kernels with their source: a folder, a server, or a recording."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.check.sections.fields import RawKernel, StructureReader
from kcdsl.check.sections.structure import RawContract
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.report import Reporter, suggest
from kcdsl.ir.kernels import (
    DRAWN,
    FORMATS,
    LOGITS,
    MOST_AT_ONCE,
    MOST_DRAWN,
    MOST_TOP,
    ROLES,
    TOP,
    LogProbabilities,
    Recording,
    Service,
)
from kcdsl.ir.terms import Constants, KernelRef
from kcdsl.source.removal import without
from kcdsl.source.yaml_nodes import Mapping, Scalar

SERVERS = ("server",)
"""The adapters of servers."""
SAMPLERS = ("server", "recorded")
"""The adapters that must state the distribution of their log-probabilities."""
FOLDERS = ("hf.transformers", "hf.transformers.sdpa")
"""The adapters that read a folder."""
WITH_CHECKPOINT = (
    *("torch.eager", "torch.sdpa", "torch.sdpa.math", "torch.sdpa.flash", "torch.sdpa.efficient"),
    *("torch.sdpa.cudnn", "torch.compile", "onnxruntime.file", *SAMPLERS),
)
"""The adapters that may have a checkpoint of their own; they do not quantise weights."""
SERVER_FIELDS = ("url", "model", "key", "tokens", "concurrency", "logprobs")
LOGPROBS_FIELDS = ("values", "temperature", "top_p", "top_k", "min_p", "top")
VALUES = ("raw", "processed")
_URL = re.compile(r"https?://(?P<user>[^/@\s]*@)?[^/@?#\s:]+(:\d{1,5})?(?P<path>/[^?#\s]*)?")
_VARIABLE = re.compile(r"KCDSL_SERVER_KEY(_[A-Z0-9_]+)?")
_ABOVE = "more than"
_FROM = "at least"


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of numbers from `low` (excluded if `open`) to `high`, integers only if `whole`."""

    low: int
    high: int | None = None
    open: bool = False
    whole: bool = False

    def __contains__(self, value: Fraction) -> bool:
        above = value > self.low if self.open else value >= self.low
        fits = self.high is None or value <= self.high
        return above and fits and (not self.whole or value.denominator == 1)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        start = f"{kind} of {_ABOVE if self.open else _FROM} {self.low}"
        return start if self.high is None else f"{start}, at most {self.high}"


_RANGES = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, open=True),
    "min_p": _Range(0, 1),
    "top_k": _Range(0, MOST_DRAWN, whole=True),
    "top": _Range(0, MOST_TOP, whole=True),
    "tokens": _Range(1, MOST_DRAWN, whole=True),
    "concurrency": _Range(1, MOST_AT_ONCE, whole=True),
}
_USUAL = {
    "temperature": 1,
    "top_p": 1,
    "min_p": 0,
    "top_k": 0,
    "top": TOP,
    "tokens": DRAWN,
    "concurrency": 1,
}


def read_folder(raw: RawKernel, reader: StructureReader) -> str | None:
    """Return the folder of a kernel; report one that its adapter does not use."""
    node = reader.text(raw.node, "folder")
    if raw.node.get("folder") is not None and raw.run.text not in FOLDERS:
        foreign(raw, reader, ("folder",), FOLDERS)
    return None if node is None else node.text


def read_checkpoint(raw: RawKernel, reader: StructureReader) -> str | None:
    """Return the own checkpoint of a kernel; report one that its adapter does not use."""
    node = reader.text(raw.node, "checkpoint")
    if raw.node.get("checkpoint") is not None and raw.run.text not in WITH_CHECKPOINT:
        foreign(raw, reader, ("checkpoint",), WITH_CHECKPOINT)
    return None if node is None else node.text


def read_service(raw: RawKernel, reader: StructureReader) -> Service | None:
    """Return the server of a kernel; None for other kernels, and after an error."""
    if raw.run.text not in SERVERS:
        shared = ("logprobs",) if raw.run.text in SAMPLERS else ()
        foreign(raw, reader, tuple(n for n in SERVER_FIELDS if n not in shared), SERVERS)
        return None
    url, key = _url(raw, reader), _variable(raw, reader)
    model = reader.text(raw.node, "model")
    tokens, at_once = (_number(raw.node, name, reader) for name in ("tokens", "concurrency"))
    for name, example in (("url", "http://127.0.0.1:8000"), ("logprobs", "{values: processed}")):
        if raw.node.get(name) is None:
            reader.reporter.error(
                codes.MISSING_FIELD,
                f"a kernel that asks a server needs the field `{name}`",
                raw.run.span,
                f"add `{name}: {example}`",
            )
    logs = read_logprobs(raw, reader)
    node = raw.node.get("logprobs")
    if url is None or logs is None or not isinstance(node, Mapping):
        return None
    if not _are_samples(logs, node, reader):
        return None
    return Service(
        url,
        logs,
        None if model is None else model.text,
        key,
        DRAWN if tokens is None else int(tokens),
        1 if at_once is None else int(at_once),
    )


def foreign(
    raw: RawKernel, reader: StructureReader, fields: tuple[str, ...], adapters: tuple[str, ...]
) -> None:
    """Report fields of a kernel that only other adapters have."""
    for index, entry in enumerate(raw.node.entries):
        if entry.key.text in fields:
            reader.reporter.error(
                codes.FOREIGN_KERNEL_FIELD,
                f"`{raw.run.text}` does not take the field `{entry.key.text}`",
                entry.key.span,
                f"kernels with it: run: {' or '.join(adapters)}",
                fix=without(reader.reporter.source, raw.node, [index]),
            )


def _url(raw: RawKernel, reader: StructureReader) -> str | None:
    node = reader.text(raw.node, "url")
    if node is None:
        return None
    found = _URL.fullmatch(node.text)
    if found is None or found["user"]:
        reader.reporter.error(
            codes.SERVER_ADDRESS,
            "`url` is no address of a server"
            if found is None
            else "`url` holds a name or a password",
            node.span,
            "write http://HOST:PORT, or https://HOST/PATH, without what comes before /v1"
            if found is None
            else "write the address alone, and `key: VARIABLE` for the variable that has the key",
        )
        return None
    return node.text.rstrip("/").removesuffix("/v1")


def _variable(raw: RawKernel, reader: StructureReader) -> str | None:
    node = reader.text(raw.node, "key")
    if node is None:
        return None
    if not _VARIABLE.fullmatch(node.text):
        reader.reporter.error(
            codes.NOT_ALLOWED,
            "`key` does not name a variable for keys of servers",
            node.span,
            "write `key: KCDSL_SERVER_KEY`, or KCDSL_SERVER_KEY_NAME; never the key itself",
        )
        return None
    return node.text


def read_logprobs(raw: RawKernel, reader: StructureReader) -> LogProbabilities | None:
    """Return the description of a kernel's log-probabilities; None without one."""
    node = reader.mapping(raw.node, "logprobs", LOGPROBS_FIELDS, ("values",))
    if node is None:
        return None
    values = reader.text(node, "values")
    numbers = {name: _number(node, name, reader) for name in LOGPROBS_FIELDS if name != "values"}
    if values is not None and values.text not in VALUES:
        reader.reporter.error(
            codes.NOT_ALLOWED,
            f"`values` is {' or '.join(VALUES)}, not `{values.text}`",
            values.span,
            suggest(values.text, VALUES),
        )
        return None
    broken = any(node.get(name) is not None and found is None for name, found in numbers.items())
    if values is None or broken:
        return None
    temperature, top_p = numbers["temperature"], numbers["top_p"]
    return LogProbabilities(
        values.text,
        Fraction(1) if temperature is None else temperature,
        Fraction(1) if top_p is None else top_p,
        int(numbers["top_k"] or 0),
        numbers["min_p"] or Fraction(0),
        TOP if numbers["top"] is None else int(numbers["top"]),
    )


def _number(node: Mapping, name: str, reader: StructureReader) -> Fraction | None:
    """Return the number under a name; None where there is none, or after an error."""
    value = node.get(name)
    if value is None:
        return None
    allowed, help = _RANGES[name], f"write a number, such as `{name}: {_USUAL[name]}`"
    number = reader.number(value, name, help)
    if number is not None and number not in allowed:
        reader.reporter.error(codes.OUT_OF_RANGE, f"`{name}` is {allowed}", value.span, help)
        return None
    return number


def _are_samples(logs: LogProbabilities, node: Mapping, reader: StructureReader) -> bool:
    """Return whether tokens are sampled from the distribution of the log-probabilities; report if
    not."""
    problem = logs.problem()
    if problem is None:
        return True
    name, message, help = problem
    place = node.get(name) or node
    reader.reporter.error(codes.NO_SAMPLES, message, place.span, help)
    return False


def check_together(
    train: KernelRef, infer: KernelRef, raw: RawContract, constants: Constants, reporter: Reporter
) -> None:
    """Report a training kernel that cannot score given tokens, and different temperatures."""
    if train.run in SERVERS:
        reporter.error(
            codes.NOT_ALLOWED,
            f"`{train.run}` cannot be the training kernel: it does not score given tokens exactly",
            raw.kernels["train"].run.span if "train" in raw.kernels else raw.span,
            "let a kernel on this machine be `train`, such as `run: torch.eager`",
        )
    if infer.service is None:
        return
    drawn = infer.service.logprobs.temperature
    if drawn != constants.temperature:
        stated_by = raw.kernels.get("infer")
        node = raw.constants if stated_by is None else stated_by.node.get("logprobs")
        stated = node.get("temperature") if isinstance(node, Mapping) else None
        place = stated or node
        reporter.error(
            codes.TWO_TEMPERATURES,
            f"the server draws at temperature {float(drawn):g}, and the training kernel is read at "
            f"{float(constants.temperature):g}, that of `constants`",
            raw.span if place is None else place.span,
            f"write `constants: {{temperature: {float(drawn):g}}}`, or let the server draw at "
            f"{float(constants.temperature):g}",
        )


RECORDED = ("recorded",)
"""The adapters of recordings."""
RECORDING_FIELDS = ("format", "columns", "file", "recomputed")
_OF_ROWS = ("columns", "logprobs", "recomputed")


def read_recording(raw: RawKernel, reader: StructureReader) -> Recording | None:
    """Return the recording of a kernel; None for other kernels."""
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
                codes.RECORDING,
                f"recorded logits take no `{name}`",
                entry.key.span,
                "logits are what the model gives; leave the field out",
            )
        if raw.node.get("file") is None:
            reader.reporter.error(
                codes.MISSING_FIELD,
                "recorded logits need the field `file`",
                raw.run.span,
                "add `file: logits.safetensors`",
            )
        return Recording(LOGITS, file=None if file is None else file.text)
    if raw.node.get("file") is not None:
        reader.reporter.error(
            codes.RECORDING,
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
            codes.NOT_ALLOWED,
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
        reader.reporter.error(
            codes.WRONG_KIND,
            "`recomputed` is true or false",
            node.span,
            help="write `recomputed: true`, or leave it out",
        )
        return False
    return node.value


def check_recorded(
    train: KernelRef, infer: KernelRef, raw: RawContract, reporter: Reporter
) -> None:
    """Report pairs of recorded kernels that cannot be compared."""
    place = raw.kernels["train"].run.span if "train" in raw.kernels else raw.span
    if train.recording is None or train.recording.format == LOGITS:
        if infer.recording is not None and infer.recording.format != LOGITS and train.recording:
            reporter.error(
                codes.RECORDING,
                "the one side has whole logits and the other ln-probabilities of sampled tokens",
                place,
                "record both in one way, or let the training kernel run",
            )
        return
    if infer.recording is None or infer.recording.format == LOGITS:
        reporter.error(
            codes.RECORDING,
            "sampled tokens are recorded for `train`, but not for `infer`, which must have drawn"
            " them",
            place,
            "record `infer` too, or `infer` alone and let the training kernel run",
        )
    elif infer.recording.format != train.recording.format:
        reporter.error(
            codes.RECORDING,
            f"`train` reads rows as {train.recording.format}, `infer` as {infer.recording.format},"
            " and they are the same rows",
            place,
            f"give both `format: {infer.recording.format}`",
        )
