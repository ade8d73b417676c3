"""The sections `model` and `kernels`: checked names, and numerics as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as AnyMapping
from dataclasses import fields, replace
from fractions import Fraction

from kcdsl.check.sections.fields import SLICE_NAME, RawKernel, StructureReader, identifier
from kcdsl.check.sections.sources import (
    RECORDED,
    SERVERS,
    read_checkpoint,
    read_folder,
    read_recording,
    read_service,
)
from kcdsl.check.sections.structure import MODEL_FIELDS
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label, Refusal
from kcdsl.diagnostics.report import Reporter, did_you_mean, replacement, suggest
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef
from kcdsl.model import registry
from kcdsl.model.adapters import adapter_names, is_adapter
from kcdsl.model.numerics import Activations, KvCache, MatrixUnit, Numerics, TensorCore, Weights
from kcdsl.model.presets import RESULTS, resolve
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode

_SECTIONS: dict[str, type] = {
    "": Numerics,
    "weights": Weights,
    "activations": Activations,
    "kv_cache": KvCache,
    "tensor_core": TensorCore,
    "linears": MatrixUnit,
    "others": MatrixUnit,
}
_NUMERICS_FIELDS: dict[str, tuple[str, ...]] = {
    **{name: tuple(field.name for field in fields(kind)) for name, kind in _SECTIONS.items()},
    "override": ("weights", "activations"),
    "attention": ("style", "tile", "probabilities", "scores", "exp_ulps"),
    "results": RESULTS,
}
_NUMBERS = {"tile", "exp_ulps", "shards", *_NUMERICS_FIELDS["linears"]}
_BY_NAME = {"input_scale", "input_zero_point", "key_scale", "value_scale", "quantisers"}
"""Numbers that may be in mappings from names of linears or tensors, and in lists; kept as
written."""
_AS_WRITTEN = {"least_scale", "amax_limit", "batch_amax"}
"""Numbers that are kept as written, as decimals or float.hex()."""
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Pairs = tuple[tuple[str, object], ...]


def read_model(node: Mapping | None, reader: StructureReader) -> ModelRef | None:
    """Check the section `model`; None after an error."""
    if node is None:
        return None
    texts = {name: reader.text(node, name) for name in MODEL_FIELDS if name != "blocks"}
    if node.get("onnx") is not None:
        return _read_graph(node, texts, reader)
    if (blocks := node.get("blocks")) is not None:
        reader.reporter.error(
            codes.UNKNOWN_FIELD,
            "`blocks` belongs to `onnx`",
            blocks.span,
            "the blocks of another model are those of its program",
        )
    del texts["onnx"]
    architecture, module = texts["architecture"], texts["module"]
    if node.get("architecture") is not None and node.get("module") is not None:
        first, second = (
            next(e.key for e in node.entries if e.key.text == name)
            for name in ("architecture", "module")
        )
        reader.reporter.error(
            codes.CONFLICTING_FIELDS,
            "the model has `architecture` and `module`",
            second.span,
            "keep one of them",
            (Label(first.span, "here too"),),
        )
    elif node.get("architecture") is None and node.get("module") is None:
        reader.reporter.error(
            codes.MISSING_FIELD,
            "the model needs `architecture` or `module`",
            node.entries[0].key.span if node.entries else node.span,
            f"architecture: one of {', '.join(registry.names())}; or module: "
            "package.module:factory",
        )
    if architecture is not None and architecture.text not in registry.names():
        reader.reporter.error(
            codes.UNKNOWN_ARCHITECTURE,
            f"there is no architecture `{architecture.text}`",
            architecture.span,
            _or_module(suggest(architecture.text, registry.names())),
        )
    if module is not None and not _FACTORY.fullmatch(module.text):
        reader.reporter.error(
            codes.NOT_ALLOWED,
            f"`{module.text}` does not name a factory",
            module.span,
            "write package.module:factory",
        )
    values = {name: scalar.text for name, scalar in texts.items() if scalar is not None}
    if "checkpoint" not in values:
        return None
    return ModelRef(
        values["checkpoint"],
        values.get("architecture"),
        values.get("module"),
        values.get("config"),
        values.get("tokenizer"),
        span=node.span,
    )


def _read_graph(
    node: Mapping, texts: AnyMapping[str, Scalar | None], reader: StructureReader
) -> ModelRef | None:
    """Check a model that is an ONNX file; None after an error."""
    path, good = texts["onnx"], True
    for entry in node.entries:
        if entry.key.text in ("checkpoint", "architecture", "module"):
            good = False
            reader.reporter.error(
                codes.CONFLICTING_FIELDS,
                f"the model has `onnx` and `{entry.key.text}`",
                entry.key.span,
                "an ONNX file holds the program and the weights",
            )
    blocks: list[tuple[str, str, str]] = []
    named = reader.mapping(node, "blocks")
    for entry in named.entries if named is not None else ():
        name = identifier(reader, entry.key, SLICE_NAME, "block")
        ends = reader.mapping(named, entry.key.text, ("from", "to"), ("from", "to"))
        first, last = reader.text(ends, "from"), reader.text(ends, "to")
        if entry.key.text == "model":
            name = None
            reader.reporter.error(
                codes.BAD_IDENTIFIER,
                "`model` cannot name a block",
                entry.key.span,
                "`model` is the whole program",
            )
        if name is None or first is None or last is None:
            good = False
            continue
        blocks.append((name.text, first.text, last.text))
    if path is None or not good:
        return None
    given = {name: scalar.text for name, scalar in texts.items() if scalar is not None}
    config, tokenizer = given.get("config"), given.get("tokenizer")
    return ModelRef(
        path.text, ONNX, None, config, tokenizer, span=node.span, blocks=tuple(sorted(blocks))
    )


def _or_module(help: str) -> str:
    return help + (" For" if help.endswith("?") else "; for") + " another: module: package:factory"


_OF_VALUE = re.compile(r"([^\s:]+) is .*; (?:allowed:|it must be) ")
_MEANT = re.compile(r"did you mean '([\w.-]+)'\?")


def read_kernel(raw: RawKernel | None, reporter: Reporter) -> KernelRef | None:
    """Check one kernel; None after an error in its structure."""
    if raw is None:
        return None
    before = len(reporter.sink.found)
    if not is_adapter(raw.run.text):
        reporter.error(
            codes.UNKNOWN_ADAPTER,
            f"no adapter is called `{raw.run.text}`",
            raw.run.span,
            _other_adapter(raw.run.text),
        )
    numerics: Pairs = ()
    if raw.numerics is not None:
        numerics = _pairs(raw.numerics, "", StructureReader(reporter))
    reader = StructureReader(reporter)
    kernel = KernelRef(
        raw.run.text,
        numerics,
        raw.span,
        read_folder(raw, reader),
        read_service(raw, reader),
        read_recording(raw, reader),
        read_checkpoint(raw, reader),
    )
    if raw.run.text in (*SERVERS, *RECORDED) and raw.numerics is None:
        return kernel  # it claims no numerics
    if kernel.own_file is not None and raw.numerics is None:
        return kernel
    _check_numerics(kernel, raw, reporter, whole=len(reporter.sink.found) == before)
    return kernel


def _other_adapter(name: str) -> str:
    longer = f"torch.{name}"
    if is_adapter(longer):
        return did_you_mean(longer, f"did you mean `{longer}`?")
    return suggest(name, adapter_names(), "adapters")


def _check_numerics(kernel: KernelRef, raw: RawKernel, reporter: Reporter, whole: bool) -> None:
    """Report invalid numerics, at the named value or at the whole mapping.

    A refused value is removed, and the others are checked again. Once a value is missing (from the
    start unless the numerics are `whole`), only values that are never allowed are reported, because
    inconsistencies may be due to the missing value.
    """
    leaves = dict(_leaves(raw.numerics)) if raw.numerics is not None else {}
    numerics = kernel.numerics
    while True:
        try:
            resolve(replace(kernel, numerics=numerics))
        except Refusal as refusal:
            diagnostic = refusal.diagnostics[0]
        else:
            return
        value = _OF_VALUE.match(diagnostic.message)
        leaf = leaves.pop(value[1], None) if value is not None else None
        if leaf is not None:
            fix = _instead(diagnostic.help, leaf.span)
            reporter.sink.add(replace(diagnostic, source=reporter.source, span=leaf.span, fix=fix))
        elif whole:
            span = raw.numerics.span if raw.numerics is not None else raw.run.span
            reporter.sink.add(replace(diagnostic, source=reporter.source, span=span))
        if leaf is None or value is None:
            return
        numerics, whole = _without(numerics, value[1]), False


def _without(numerics: Pairs, name: str) -> Pairs:
    """Return the numerics without a value, which may be in a section."""
    found: list[tuple[str, object]] = []
    for key, value in numerics:
        rest = name.removeprefix(f"{key}.")  # a key may contain dots, as a name of a linear
        if rest != name and isinstance(value, tuple):
            found.append((key, _without(value, rest)))
        elif key != name and rest == name:
            found.append((key, value))
    return tuple(found)


def _instead(help: str | None, span: Span) -> Fix | None:
    """Return the fix that writes the word suggested by a help text."""
    word = _MEANT.match(help or "")
    return None if word is None else replacement(span, word[1])


def _leaves(node: Mapping, before: str = "") -> Iterator[tuple[str, Scalar]]:
    """Yield the values with their names, such as `attention.tile`."""
    for entry in node.entries:
        name = before + entry.key.text
        if isinstance(entry.value, Mapping):
            yield from _leaves(entry.value, f"{name}.")
        elif isinstance(entry.value, Scalar):
            yield name, entry.value


def _pairs(node: Mapping, section: str, reader: StructureReader) -> Pairs:
    allowed = _NUMERICS_FIELDS[section]
    reader.fields(node, f"`{section or 'numerics'}`", allowed)
    pairs: list[tuple[str, object]] = []
    for entry in node.entries:
        name = entry.key.text
        if name not in allowed:
            continue
        if name == "overrides":
            pairs.append((name, _overrides(entry.value, reader)))
            continue
        if name in _BY_NAME:
            written = _written(entry.value, name, reader)
            if written is not None:
                pairs.append((name, written))
            continue
        named = name == "tensor_core" and isinstance(entry.value, Scalar)
        if name in _NUMERICS_FIELDS and not named:
            child = reader.mapping(node, name)
            if child is not None:
                pairs.append((name, _pairs(child, name, reader)))
            continue
        value = _leaf(entry.value, name, reader)
        if value is not None:
            pairs.append((name, value))
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _overrides(node: Node, reader: StructureReader) -> Pairs:
    """Return the overrides, by names of linears."""
    if not isinstance(node, Mapping):
        wanted = "a mapping of linears"
        reader.reporter.error(
            codes.WRONG_KIND,
            f"`overrides` takes {wanted} and is {node.kind}",
            node.span,
            help="such as `overrides: {lm_head: {weights: {format: int8}}}`",
        )
        return ()
    pairs: list[tuple[str, object]] = []
    for entry in node.entries:
        name = entry.key.text
        if isinstance(entry.value, Mapping):
            pairs.append((name, _pairs(entry.value, "override", reader)))
        else:
            kind, span = entry.value.kind, entry.value.span
            wanted = "`weights` and `activations`"
            reader.reporter.error(
                codes.WRONG_KIND,
                f"an override takes a mapping of {wanted} and is {kind}",
                span,
                help="such as `lm_head: {weights: {format: int8}}`",
            )
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _written(node: Node, name: str, reader: StructureReader) -> object:
    """Return a number or list of numbers as one text, and a mapping as sorted pairs of these."""
    match node:
        case Scalar() if isinstance(node.value, int | Fraction | str) and node.value is not True:
            return node.text
        case SequenceNode() if node.items and all(isinstance(item, Scalar) for item in node.items):
            return " ".join(item.text for item in node.items if isinstance(item, Scalar))
        case Mapping():
            pairs = ((e.key.text, _written(e.value, name, reader)) for e in node.entries)
            return tuple(sorted((key, value) for key, value in pairs if value is not None))
    wanted = "a number, a list of numbers or a mapping of names"
    reader.reporter.error(
        codes.WRONG_KIND,
        f"`{name}` takes {wanted} and is {node.kind}",
        node.span,
        help="write a number, such as 0.5, or a list of numbers, such as [0.5, 0.25]",
    )
    return None


def _leaf(node: Node, name: str, reader: StructureReader) -> object:
    if name in _AS_WRITTEN and isinstance(node, Scalar) and node.value is not True:
        return node.text
    if name not in _NUMBERS:
        scalar = reader.as_text(node, name)
        return None if scalar is None else scalar.text
    if isinstance(node, Scalar) and not isinstance(node.value, bool):
        if isinstance(node.value, int):
            return node.value
        if isinstance(node.value, Fraction):
            return float(node.value)
    reader.reporter.error(
        codes.WRONG_KIND,
        f"`{name}` takes a number and is {node.kind}",
        node.span,
        help="write it in digits, without quotation marks",
    )
    return None
