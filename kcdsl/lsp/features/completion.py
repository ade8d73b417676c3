"""Completion of YAML keys and values by their path; of expressions by `suggestions`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lsprotocol import types as lsp
from lsprotocol.types import CompletionItemKind as ItemKind

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.fields import TRACE_FIELDS
from kcdsl.check.expressions.measurements import in_words
from kcdsl.diagnostics.codes import all_codes
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.features.knowledge import (
    FieldHelp,
    describe_metric,
    description_at,
    fields_at,
    schemas_at,
    slice_text,
    values_at,
)
from kcdsl.lsp.text.cursor import Cursor, comment_before, locate, word_before
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.nodes import Path as NodePath
from kcdsl.lsp.text.nodes import language
from kcdsl.lsp.text.positions import Ranges, markup
from kcdsl.metrics import RECORD_NAMES
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode
from kcdsl.units import UNITS, describe

_IGNORE = re.compile(r"\bkcdsl:\s*ignore\[[^\]]*\Z")
_LIBRARIES = (".kc.yaml", ".kc.yml")
_DATA = {
    "data": (".jsonl",),
    "checkpoint": (".safetensors",),
    "onnx": (".onnx",),
    "config": (".json",),
    "tokenizer": (".json",),
    "file": _LIBRARIES,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One completion. `insert` replaces the span, and is a snippet where `snippet` is set; `order`
    sorts, smaller first."""

    label: str
    kind: ItemKind
    span: Span
    insert: str
    detail: str = ""
    documentation: str = ""
    snippet: bool = False
    order: int = 5


def complete(snapshot: Snapshot, offset: int) -> list[Item]:
    """Return the completions at the cursor."""
    source = snapshot.source
    comment = comment_before(source.text, offset)
    if comment is not None:
        return _codes(comment, source.text, offset)
    cursor = locate(source, offset)
    if cursor is None:
        return []
    known = snapshot.near(Span(offset, offset)).settled[0]
    library = known.analysis.raw_library is not None
    span = Span(word_before(source.text, offset), offset)
    if cursor.is_key:
        return _keys(cursor, span, library, source.text)
    start = language(cursor.path, Scalar(None, cursor.before, "plain", span))
    if start is not None:
        from kcdsl.lsp.features.suggestions import suggest

        items = suggest(known, start, cursor.before, offset)
        if cursor.path[-1] == "threshold" and not cursor.before.strip():
            items += _tables(known.analysis, span)
        return items
    holds = [part.get("type") for part in schemas_at(cursor.path, library)]
    items = _values(known, cursor, span, library)
    if "object" in holds and not cursor.before and cursor.style == "plain":
        inner = replace(cursor, siblings=())
        items += _keys(inner, span, library, source.text)
    return items


def _codes(comment: str, text: str, offset: int) -> list[Item]:
    """Complete codes inside `kcdsl: ignore[...]`, and the comment itself."""
    begin = word_before(text, offset)
    if _IGNORE.search(comment):
        span = Span(begin, offset)
        return [
            Item(code.id, ItemKind.Constant, span, code.id, code.title, code.explanation)
            for code in all_codes()
        ]
    if re.fullmatch(r"#\s*\w*", comment):
        insert = "kcdsl: ignore[${1:KC000}] ${2:reason}"
        about = "Suppress a finding of the next line, or of this one, with a reason."
        span = Span(begin, offset)
        return [Item("kcdsl: ignore", ItemKind.Snippet, span, insert, "", about, True)]
    return []


# --- keys ----------------------------------------------------------------------------------------


def _keys(cursor: Cursor, span: Span, library: bool, text: str) -> list[Item]:
    if cursor.path == ("clauses",):
        return _new_clause(span)
    items = []
    present = set(cursor.siblings)
    for number, field in enumerate(fields_at(cursor.path, library)):
        if field.name in present or _excluded(field.name, present):
            continue
        insert, snippet = _key_text(field, text, span)
        order = (0 if field.required else 20) + number
        detail = "required" if field.required else ""
        items.append(
            Item(
                field.name,
                ItemKind.Property,
                span,
                insert,
                detail,
                field.description,
                snippet,
                order,
            )
        )
    return items


_RIVALS = (
    {"require", "metric"},
    {"require", "threshold"},
    {"require", "op"},
    {"budget", "delta"},
    {"budget", "over"},
    {"then", "remediation"},
    {"then", "action"},
    {"remediation", "action"},
    {"architecture", "module"},
    {"architecture", "onnx"},
    {"checkpoint", "onnx"},
    {"module", "onnx"},
    {"contract", "library"},
)


def _excluded(name: str, present: set[str]) -> bool:
    """Return whether a field conflicts with a present one."""
    return any(name in pair and pair - {name} <= present for pair in _RIVALS)


def _key_text(field: FieldHelp, text: str, span: Span) -> tuple[str, bool]:
    """Return the inserted text of a key, with a colon unless one follows."""
    if text[span.end :].lstrip(" ").startswith(":"):
        return field.name, False
    start = text.rfind("\n", 0, span.start) + 1
    indent = text[start : span.start]
    if indent.strip(" -"):
        # Inside a flow mapping, on the line of another key.
        return (
            (f"{field.name}: ", False)
            if field.holds == "value"
            else (
                (f"{field.name}: {{$1}}", True)
                if field.holds == "mapping"
                else (f"{field.name}: [$1]", True)
            )
        )
    deeper = " " * (len(indent) + 2)
    if field.holds == "mapping":
        return f"{field.name}:\n{deeper}", False
    if field.holds == "list":
        return f"{field.name}:\n{deeper}- ", False
    return f"{field.name}: ", False


def _new_clause(span: Span) -> list[Item]:
    """Return the forms of a new clause."""
    forms = {
        "statistic": "${1:N-1}: {require: ${2:p99(kl)} <= ${3:0.02}, level: ${4:L2}}",
        "proof": (
            "${1:N-1}:\n    require: forall x in ${2:points(all)}: "
            "norm_inf(drift(${3:attn_0}, x)) <= ${4:0.01}\n    evidence: proof\n    level: ${5:L2}"
        ),
        "trace fields": "${1:O-1}: {require: has(trace, [${2:rng_seed}]), level: ${3:L3}}",
    }
    about = {
        "statistic": "A bound on a statistic of a metric.",
        "proof": "A bound on the drift of a block, proved for every input of a region.",
        "trace fields": "Fields that every trace record must carry.",
    }
    return [
        Item(f"clause: {name}", ItemKind.Snippet, span, text, "", about[name], True, number)
        for number, (name, text) in enumerate(forms.items())
    ]


# --- values --------------------------------------------------------------------------------------


def _values(known: Snapshot, cursor: Cursor, span: Span, library: bool) -> list[Item]:
    """Return the values for a path, without the present items of a list."""
    listed = _other_items(known.analysis.root, cursor.path)
    found = _every_value(known, cursor, span, library)
    return [item for item in found if item.label not in listed]


def _other_items(root: Node | None, path: NodePath) -> set[str]:
    """Return the texts of the other items of the list at a path."""
    *steps, last = path or ("",)
    if not isinstance(last, int):
        return set()
    node = root
    for step in steps:
        match node:
            case Mapping():
                node = node.get(str(step))
            case SequenceNode(items=items) if isinstance(step, int) and step < len(items):
                node = items[step]
            case _:
                return set()
    items = node.items if isinstance(node, SequenceNode) else ()
    return {item.text for i, item in enumerate(items) if i != last and isinstance(item, Scalar)}


def _every_value(known: Snapshot, cursor: Cursor, span: Span, library: bool) -> list[Item]:
    path, analysis = cursor.path, known.analysis
    parent, name = ("", "", *(step for step in path if isinstance(step, str)))[-2:]
    section = path[0] if path else ""
    if section == "clauses" and name == "slices":
        return _slices(analysis, span)
    if section == "clauses" and name == "metric":
        return _record_names(analysis, span)
    if section == "clauses" and name == "require" and isinstance(path[-1], int):
        return [Item(f, ItemKind.Value, span, f, "trace field") for f in TRACE_FIELDS]
    if section == "imports" and name in {"slices", "kernels", "tables", "train", "infer"}:
        return _offered(analysis, path, "kernels" if name in {"train", "infer"} else name, span)
    if name in _DATA and (section != "imports" or name == "file"):
        return _files(known, name, cursor, span)
    if name == "unit":
        return [
            Item(unit, ItemKind.Unit, span, _plain(unit), describe(u.dimension))
            for unit, u in UNITS.items()
        ]
    listed = values_at(path, library) or _numerics(parent, name)
    about = description_at(path, library)
    return [
        Item(value, ItemKind.Value, span, _plain(value), "", about, order=number)
        for number, value in enumerate(listed)
    ]


def _plain(value: str) -> str:
    """Return a value as plain YAML, or quoted where necessary."""
    return f'"{value}"' if value[:1] in "%<>=@`!&*|" or value == "1" else value


def _numerics(parent: str, name: str) -> list[str]:
    """Return the values of `numerics`, which the schema does not list."""
    from kcdsl.model import presets
    from kcdsl.model.numerics import preset_table
    from kcdsl.model.numerics.formats import FORMATS

    choices: dict[tuple[str, str], Iterable[str]] = {
        ("numerics", "preset"): preset_table.PRESETS,
        ("numerics", "compute"): presets.COMPUTE_FORMATS,
        ("numerics", "accumulate"): presets.ACCUMULATORS,
        ("numerics", "casts"): presets.CASTS,
        ("numerics", "sigmoid"): presets.SIGMOIDS,
        ("numerics", "byte_sums"): presets.BYTE_SUMS,
        ("numerics", "products"): presets.PRODUCTS,
        ("weights", "format"): presets.WEIGHT_FORMATS,
        ("weights", "scale"): presets.WEIGHT_SCALES,
        ("weights", "rounding"): presets.WEIGHT_ROUNDINGS,
        ("weights", "scale_format"): presets.SCALE_FORMATS,
        ("weights", "applied"): presets.WEIGHTS_APPLIED,
        ("activations", "format"): presets.ACTIVATION_FORMATS,
        ("activations", "scale"): presets.ACTIVATION_SCALES,
        ("kv_cache", "format"): presets.CACHE_FORMATS,
        ("kv_cache", "scale"): presets.CACHE_SCALES,
        ("attention", "style"): presets.STYLES,
        ("attention", "probabilities"): ("compute", "accumulate", *FORMATS),
        ("attention", "scores"): ("compute", "accumulate", *FORMATS),
        ("numerics", "tensor_core"): ("none", *preset_table.TENSOR_CORES),
        **{("results", key): ("compute", "accumulate", *FORMATS) for key in presets.RESULTS},
    }
    return list(choices.get((parent, name), ()))


def _slices(analysis: Analysis, span: Span) -> list[Item]:
    return [
        Item(name, ItemKind.Module, span, name, "Slice", slice_text(analysis, name))
        for name in analysis.scope.slices
    ]


def _tables(analysis: Analysis, span: Span) -> list[Item]:
    return [
        Item(f"table({name})", ItemKind.Class, span, f"table({name})", "Table")
        for name in analysis.scope.tables
    ]


def _record_names(analysis: Analysis, span: Span) -> list[Item]:
    metrics = analysis.scope.metrics
    names = [*RECORD_NAMES]
    for definition in metrics.definitions():
        if definition.kind == "aggregate":
            names.append(definition.name)
            continue
        worst, tail = ("max", "p99") if definition.better == "lower" else ("min", "p1")
        words: list[str] = [w for w in ("mean", worst, "rate") if w in definition.statistics]
        words += [tail] if "quantile" in definition.statistics else []
        magnitude = "abs_" if definition.signed else ""
        names += [f"{word}_{magnitude}{definition.name}" for word in words]
    items = []
    for number, name in enumerate(dict.fromkeys(names)):
        record = metrics.find_record(name)
        if record is not None:
            text = describe_metric(metrics[record.metric])
            detail = in_words(name, metrics)
            items.append(Item(name, ItemKind.Variable, span, name, detail, text, order=number))
    return items


def _offered(analysis: Analysis, path: NodePath, what: str, span: Span) -> list[Item]:
    """Return the names that the library of an import declares."""
    number = next((step for step in path if isinstance(step, int)), -1)
    if not 0 <= number < len(analysis.imports):
        return []
    loaded = analysis.imports[number].loaded
    library = loaded.library if loaded is not None else None
    if library is None:
        return []
    names = {
        "slices": [s.name for s in library.slices],
        "kernels": [name for name, _ in library.kernels],
        "tables": [t.name for t in library.tables],
    }[what]
    return [Item(name, ItemKind.Value, span, name, f"of {library.name}") for name in names]


def _files(known: Snapshot, name: str, cursor: Cursor, span: Span) -> list[Item]:
    """Return the files of a kind beside the document, and in the typed folder."""
    folder = known.document.folder
    if folder is None:
        return []
    begun, _, _ = cursor.before.rpartition("/")
    place = folder / begun if begun else folder
    found = []
    for entry in _entries(place):
        if entry.is_dir() and not entry.name.startswith("."):
            found.append(f"{entry.name}/")
        elif entry.name.endswith(_DATA[name]) and entry != known.document.path:
            found.append(entry.name)
    start = span.end - (len(cursor.before) - len(begun) - (1 if begun else 0))
    place_of_name = Span(max(start, 0), span.end)
    return [Item(text, ItemKind.File, place_of_name, text) for text in found]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:500]
    except OSError:
        return []


# --- in the protocol ------------------------------------------------------------------------------


def completion_item(
    item: Item, ranges: Ranges, able: lsp.ClientCompletionItemOptions | None
) -> lsp.CompletionItem:
    """Return a completion for the client; placeholders are removed if it lacks snippet support."""
    snippets = able is not None and bool(able.snippet_support)
    formats = able.documentation_format if able is not None else None
    rich = item.snippet and snippets
    insert = item.insert if rich or not item.snippet else plain(item.insert)
    return lsp.CompletionItem(
        label=item.label,
        kind=item.kind,
        detail=item.detail or None,
        documentation=markup(item.documentation, formats) if item.documentation else None,
        sort_text=f"{item.order:04d}{item.label}",
        filter_text=item.label,
        insert_text_format=lsp.InsertTextFormat.Snippet if rich else lsp.InsertTextFormat.PlainText,
        text_edit=lsp.TextEdit(ranges.of(item.span), insert),
    )


def plain(snippet: str) -> str:
    """Return the text of a snippet without placeholders."""
    text, at = "", 0
    while at < len(snippet):
        if snippet.startswith("${", at):
            end = snippet.index("}", at)
            text += snippet[at:end].partition(":")[2]
            at = end + 1
        elif snippet[at] == "$" and snippet[at + 1 : at + 2].isdigit():
            at += 2
        else:
            text += snippet[at]
            at += 1
    return text
