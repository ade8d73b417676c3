"""The page of the causes of a failure: `kcdsl why --html`."""

from __future__ import annotations

from kcdsl.verdict.html.comparison import changes_part
from kcdsl.verdict.html.document import Part, Sheet, SheetCell, document_page
from kcdsl.verdict.model import SHOWN, SIGNS
from kcdsl.verdict.quantities import UNREACHED, quantity
from kcdsl.verdict.studies.causes import (
    FOOT,
    INTERACTION,
    STATES,
    TITLES,
    Explanation,
    effect_title,
    history_lines,
)

_CHANGE = "The incumbent is the run before this change, the candidate the one after it."
_INTERACTION = (
    "The incumbent is the run before both changes, the candidate the one after both. The difference"
    " is that of two: what the kernels change on the present checkpoint, and on the previous one."
)
_HEADLINES = {
    0: ("held", "None of the three causes"),
    3: ("inconclusive", "The cause is not decided"),
}


def causes_page(found: Explanation) -> str:
    """Return the page: the three causes first, then their evidence."""
    shown = " and ".join(TITLES[one.cause] for one in found.causes if one.state == "shown")
    colour, headline = _HEADLINES.get(found.exit, ("violated", f"{shown[:1].upper()}{shown[1:]}"))
    causes = []
    for one in found.causes:
        word, key = STATES[one.state]
        missing = "; ".join(f"missing: {why}" for why in one.missing)
        causes.append(
            [
                SheetCell(TITLES[one.cause]),
                SheetCell(word, colour=key),
                SheetCell("; ".join(one.because), missing),
            ]
        )
    runs = [
        [
            SheetCell(run.checkpoint),
            SheetCell(run.kernels),
            SheetCell(run.missing or run.file or "evaluated here"),
            _verdict(run.verdict or "missing"),
        ]
        for run in found.runs
    ]
    agreed = [
        [
            SheetCell(row.clause, f"{row.level} · {row.requirement}"),
            SheetCell(row.slice),
            *(
                SheetCell(UNREACHED if value is None else quantity(value, row.unit), number=True)
                for value in (row.value, row.certified)
            ),
            _verdict(row.verdict),
        ]
        for row in found.agreed
    ]
    head = ("clause", "slice", "value", "certified", "")
    parts = [
        Part("Causes", head=("", "", "evidence"), rows=causes),
        Part("Runs", head=("checkpoint", "kernels", "run", ""), rows=runs),
        Part("Clauses on the trace", head=head, rows=agreed),
    ]
    for effect in found.effects:
        title = effect_title(found, effect.factor, effect.at)
        lead = _INTERACTION if effect.factor == INTERACTION else _CHANGE
        parts.append(changes_part(f"{title[:1].upper()}{title[1:]}", effect.rows, lead))
    parts.append(Part("Triples", lines=list(history_lines(found))))
    return document_page(
        Sheet(
            title=f"{found.contract['name']} {found.contract['version']}",
            headline=headline,
            colour=colour,
            sign=SIGNS[colour],
            parts=parts,
            about=(found.trace,),
            facts=[("runs", str(sum(not run.missing for run in found.runs)))],
            foot=FOOT,
        )
    )


def _verdict(name: str) -> SheetCell:
    if name in SHOWN:
        return SheetCell(SHOWN[name][0], colour=name)
    return SheetCell(name.replace("_", " "), colour="none")
