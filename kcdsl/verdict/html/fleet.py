"""The page of a fleet: `kcdsl fleet --html`."""

from __future__ import annotations

from kcdsl.verdict.html.document import Part, Sheet, SheetCell, document_page
from kcdsl.verdict.model import SIGNS
from kcdsl.verdict.studies.fleet import NOTE, UNCHECKED, Fleet, reasons

_CELLS = {"agree": "held", "disagree": "violated", "open": "inconclusive"}
_HEADLINES = {
    0: ("held", "All kernels agree"),
    1: ("violated", "Some kernels disagree"),
    3: ("inconclusive", "Some pairs or contracts are not decided"),
    4: ("violated", "The certificate of a class is not valid"),
}


def fleet_page(found: Fleet) -> str:
    """Return the page: the matrix, the classes, and the reasons of disagreements."""
    colour, headline = _HEADLINES[int(found.exit)]
    labels = [kernel.label for kernel in found.kernels]
    matrix = []
    for kernel in found.kernels:
        cells = [SheetCell(f"{kernel.label} {kernel.name}", kernel.digest[:16])]
        for label in labels:
            if label == kernel.label:
                cells.append(SheetCell("="))
                continue
            state = found.pair(kernel.label, label).agreement
            cells.append(SheetCell(f"{SIGNS[_CELLS[state]]} {state}", colour=_CELLS[state]))
        matrix.append(cells)
    classes = [
        [
            SheetCell(f"class {n}"),
            SheetCell(", ".join(one.members)),
            SheetCell(str(len(one.certificates))),
        ]
        for n, one in enumerate(found.classes, 1)
    ]
    lines = reasons(found)
    unused = [f"{file}: {why}" for file, why in found.unused.items()]
    parts = [
        Part("Pairs", head=("", *labels), rows=matrix, matrix=True),
        Part(
            "Classes",
            f"{NOTE[0].upper()}{NOTE[1:]}.",
            head=("", "kernels", "certificates"),
            rows=classes,
        ),
    ]
    parts += [Part("Why pairs do not agree", lines=lines)] if lines else []
    signed = [f"{c.file}: {c.detail or 'accepted'}" for c in found.checked]
    parts += [Part("Certificates of classes", lines=signed)] if signed else []
    parts += [Part("Not used", lines=unused)] if unused else []
    parts.append(
        Part("Identity", pairs=[(k.label, f"{k.name} sha256:{k.digest}") for k in found.kernels])
    )
    return document_page(
        Sheet(
            title=f"{found.contract['name']} {found.contract['version']}",
            headline=headline,
            colour=colour,
            sign=SIGNS[colour],
            parts=parts,
            about=(f"checkpoint sha256:{found.checkpoint[:16]}",),
            facts=[("kernels", str(len(found.kernels))), ("classes", str(len(found.classes)))],
            foot=UNCHECKED,
        )
    )
