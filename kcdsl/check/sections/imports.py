"""The section `imports`: resolving names to slices, kernels and tables of libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kcdsl.check.sections.fields import IMPORTED, RawImport, RawName
from kcdsl.check.sections.libraries import (
    Import,
    Loaded,
    Loader,
    collide,
    path_problem,
    rebase,
)
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.diagnostics.report import Reporter, nearest, replacement, suggest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.source import yaml_nodes as yaml
from kcdsl.source.files import suggest_file
from kcdsl.source.removal import remove_entry, remove_parts

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ONE = {"slices": "slice", "kernels": "kernel", "tables": "table"}


def resolve_imports(
    raws: Sequence[RawImport],
    folder: Path | None,
    taken: dict[str, dict[str, Span]],
    reporter: Reporter,
    loader: Loader,
) -> tuple[Import, ...]:
    """Resolve imports; errors are in the sink, and parts in error are left out.

    `taken` has the spans of the names declared in the importing file, by `IMPORTED`; imported names
    are added.
    """
    return tuple(_resolve(raw, folder, taken, reporter, loader) for raw in raws)


def _resolve(
    raw: RawImport,
    folder: Path | None,
    taken: dict[str, dict[str, Span]],
    reporter: Reporter,
    loader: Loader,
) -> Import:
    file = raw.file.text if raw.file is not None else ""
    loaded = _load(raw, folder, reporter, loader)
    fresh = {
        what: [name for name in names if not collide(_ONE[what], name.local, taken[what], reporter)]
        for what, names in raw.names
    }
    if loaded is None or loaded.library is None:
        return Import(file, raw.span, loaded)
    _check_digest(raw, loaded, reporter)
    library = loaded.library
    slices = _chosen("slices", fresh, {s.name: s for s in library.slices}, library, reporter)
    kernels = _chosen("kernels", fresh, dict(library.kernels), library, reporter)
    tables = _chosen("tables", fresh, {t.name: t for t in library.tables}, library, reporter)
    return Import(
        file,
        raw.span,
        loaded,
        tuple(
            replace(s, name=name.local.text, data=rebase(s.data, file), span=name.local.span)
            for name, s in slices
        ),
        tuple((name.local.text, _rebased(kernel, file)) for name, kernel in kernels),
        tuple(replace(t, name=name.local.text, span=name.local.span) for name, t in tables),
    )


def _rebased(kernel: ir.KernelRef, file: str) -> ir.KernelRef:
    """Return a kernel of a library with its paths relative to the importing file."""
    recording = kernel.recording
    return replace(
        kernel,
        folder=rebase(kernel.folder, file),
        checkpoint=rebase(kernel.checkpoint, file),
        recording=recording and replace(recording, file=rebase(recording.file, file)),
    )


def _load(raw: RawImport, folder: Path | None, reporter: Reporter, loader: Loader) -> Loaded | None:
    """Return the file of an import; None, or without a library, after an error."""
    if raw.file is None:
        return None
    text, span = raw.file.text, raw.file.span
    problem = path_problem(text)
    if problem is not None:
        reporter.error(
            codes.IMPORT_FILE,
            f"an import {problem}",
            span,
            "such as `shared/fleet.kc.yaml` or `../shared/fleet.kc.yaml`",
        )
        return None
    if folder is None:
        reporter.error(
            codes.IMPORT_FILE,
            "imports are relative to a file, and this text has none",
            span,
            help="save the text beside the files that it imports",
        )
        return None
    if loader.is_open(folder / text):
        reporter.error(
            codes.IMPORT_CYCLE,
            f"{text} imports this library",
            span,
            "move what both need to a third library",
        )
        return None
    loaded = loader.load(folder / text)
    if loaded.problem is not None:
        problem = f"{text} {loaded.problem}"
        reporter.error(codes.IMPORT_FILE, problem, span, suggest_file(text, folder))
    return loaded


def _check_digest(raw: RawImport, loaded: Loaded, reporter: Reporter) -> None:
    digest, node = loaded.digest, raw.digest
    if digest is None or raw.file is None:
        return
    if node is None:
        reporter.error(
            codes.IMPORT_DIGEST,
            f"the import of {raw.file.text} does not state its digest",
            raw.file.span,
            f'add digest: "{digest}"',
            fix=Fix("insert the digest", (_insert_digest(reporter.source, raw, digest),)),
        )
        return
    if not isinstance(node, yaml.Scalar) or not _DIGEST.fullmatch(node.text):
        reporter.error(
            codes.IMPORT_DIGEST,
            "a digest is `sha256:` and 64 hexadecimal digits",
            node.span,
            f'the library means "{digest}"',
            fix=replacement(node.span, f'"{digest}"'),
        )
        return
    if node.text != digest:
        reporter.error(
            codes.IMPORT_CHANGED,
            f"{raw.file.text} means something else than the digest states",
            node.span,
            "review the changes of the library, then state its new digest",
            notes=(f"stated   {node.text}", f"computed {digest}"),
            fix=replacement(node.span, f'"{digest}"'),
        )


def _insert_digest(source: SourceFile, raw: RawImport, digest: str) -> Edit:
    """Return the edit that adds the digest after the file."""
    entry = next(e for e in raw.node.entries if e.key.text == "file")
    text, end = source.text, entry.value.span.end
    if text[raw.node.span.start] == "{":
        return Edit(Span(end, end), f', digest: "{digest}"')
    if text[end - 1] != "\n":
        line_end = text.find("\n", end)
        end = len(text) if line_end < 0 else line_end
        end -= text[end - 1] == "\r"
        indent = " " * (source.position(entry.key.span.start).column - 1)
        return Edit(Span(end, end), f'\n{indent}digest: "{digest}"')
    indent = " " * (source.position(entry.key.span.start).column - 1)
    return Edit(Span(end, end), f'{indent}digest: "{digest}"\n')


Part = TypeVar("Part", ir.Slice, ir.KernelRef, ir.ThresholdTable)


def _chosen(
    what: str,
    fresh: Mapping[str, Sequence[RawName]],
    offered: Mapping[str, Part],
    library: ir.Library,
    reporter: Reporter,
) -> list[tuple[RawName, Part]]:
    """Return the parts of a library by name; report names that it does not declare."""
    found = []
    for name in fresh.get(what, ()):
        part = offered.get(name.theirs.text)
        if isinstance(part, ir.KernelRef):  # its span in the library is not one of the contract
            part = replace(part, span=name.theirs.span)
        if part is not None:
            found.append((name, part))
            continue
        close = nearest(name.theirs.text, offered)
        reporter.error(
            codes.NOT_IN_LIBRARY,
            f"the library {library.name} has no {_ONE[what]} `{name.theirs.text}`",
            name.theirs.span,
            suggest(name.theirs.text, offered, "declared there"),
            fix=None if close is None else replacement(name.theirs.span, close),
        )
    return found


# --- unused imports ------------------------------------------------------------------------------


def report_unused(
    root: yaml.Mapping,
    raws: Sequence[RawImport],
    used: Mapping[str, frozenset[str]],
    reporter: Reporter,
) -> None:
    """Warn of imported names that no clause uses; `used` has the used names by kind.

    Kernels always count as used. The fix removes the names, the field or the import.
    """
    for position, raw in enumerate(raws):
        idle = {
            what: [n for n in names if n.local.text not in used[what]]
            for what, names in raw.names
            if what != "kernels"
        }
        brought = [name for what in IMPORTED for name in raw.brought(what)]
        unused = [name for names in idle.values() for name in names]
        if len(unused) == len(brought):
            reporter.warning(
                codes.UNUSED_IMPORT,
                "no clause uses anything that this import declares"
                if brought
                else "the import brings nothing",
                raw.span,
                "remove it",
                fix=Fix("remove the import", _without_import(root, position, reporter.source)),
            )
            continue
        for what, names in idle.items():
            if names:
                _report_names(raw, what, names, reporter)


def _report_names(raw: RawImport, what: str, names: Sequence[RawName], reporter: Reporter) -> None:
    shown = " and ".join(f"`{name.local.text}`" for name in names)
    entry = next(e for e in raw.node.entries if e.key.text == what)
    if len(names) == len(raw.brought(what)):
        edits: tuple[Edit, ...] = (remove_entry(reporter.source, raw.node, entry),)
    else:
        assert isinstance(entry.value, yaml.Mapping | yaml.SequenceNode)
        chosen = {name.theirs.span for name in names}
        if isinstance(entry.value, yaml.Mapping):
            places = [item.value.span for item in entry.value.entries]
        else:
            places = [item.span for item in entry.value.items]
        indices = {i for i, place in enumerate(places) if place in chosen}
        edits = remove_parts(reporter.source, entry.value, indices)
    plural = "are" if len(names) > 1 else "is"
    reporter.warning(
        codes.UNUSED_IMPORT,
        f"no clause uses {shown}, which {plural} imported",
        names[0].local.span,
        "remove the unused names",
        fix=Fix(f"remove {shown}", edits),
    )


def _without_import(root: yaml.Mapping, position: int, source: SourceFile) -> tuple[Edit, ...]:
    section = next(e for e in root.entries if e.key.text == "imports")
    assert isinstance(section.value, yaml.SequenceNode)
    if len(section.value.items) == 1:
        return (remove_entry(source, root, section),)
    return remove_parts(source, section.value, {position})
