"""The page of the comparison of two runs: `kcdsl compare --html`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kcdsl.diagnostics.render.terminal import counted
from kcdsl.verdict.html.document import Part, Sheet, SheetCell, document_page
from kcdsl.verdict.model import SIGNS
from kcdsl.verdict.quantities import UNREACHED, distinct_text, quantity, rate_text, scale
from kcdsl.verdict.studies.comparison import (
    MeasureDelta,
    PairedRow,
    PassRate,
    RunComparison,
    band_text,
    baseline_lines,
    worse_text,
)

_CHANGES = {
    "regressed": ("violated", "✗ worse"),
    "improved": ("held", "✓ better"),
    "unchanged": ("none", "= same"),
    "undecided": ("inconclusive", "? not shown"),
    "within_noise": ("none", "≈ within the noise"),
    "not_compared": ("invalid_evidence", "– not compared"),
}
_HEADLINES = {
    "violated": "The candidate is worse",
    "held": "Nothing was shown to be worse",
    "inconclusive": "The runs do not compare",
}


def comparison_page(found: RunComparison) -> str:
    """Return the page of a comparison, with regressions at the top."""
    contract = found.contract
    worse = [f"Worse: {worse_text(row)}" for row in found.regressed]
    worse += [f"Beyond the band of earlier runs: {band_text(row)}" for row in found.beyond]
    parts = [Part("What became worse", lines=worse or ("Nothing was shown to be worse.",))]
    parts += [part for part in _parts(found) if part is not None]
    return document_page(
        Sheet(
            title=f"{contract['name']} {contract['version']}",
            headline=_HEADLINES[found.verdict],
            colour=found.verdict,
            sign=SIGNS[found.verdict],
            parts=parts,
            about=(
                counted(found.history, "earlier run"),
                counted(found.references, "reference build"),
            ),
            facts=[
                (name, str(sum(row.change == change for row in found.rows)))
                for name, change in (("worse", "regressed"), ("better", "improved"))
            ],
            foot="units of the same request are compared with each other; nothing was run",
        )
    )


def _parts(found: RunComparison) -> Iterator[Part | None]:
    lead = (
        "Pass rates with one-sided limits; differences with limits at 95 %. A change is named with"
        f" an error of {100 * found.error:g} % over all rows together. Not shown is no proof of"
        " equality."
    )
    head = ("clause", "slice", "incumbent", "candidate", "worse", "better", "difference", "")
    yield Part("Clauses by slice", lead, head=head, rows=[_row(row) for row in found.rows])
    for kind, title in (("quality", "Quality and reward"), ("cost", "Runtime cost")):
        yield _measures(title, [row for row in found.measures if row.kind == kind])
    yield _baselines(found)
    lines = tuple(baseline_lines(found))
    if lines:
        yield Part("Notes on earlier runs and noise", lines=lines)
    for title, texts in (
        ("What else differs", list(found.changed)),
        (
            "Not compared",
            [f"{r.clause} on {r.slice}: {r.reason}" for r in found.rows if r.reason],
        ),
    ):
        if texts:
            yield Part(title, lines=texts)


def _in_unit(row: PairedRow, value: float | None) -> str:
    return distinct_text(value, row.threshold, scale(row.unit, row.threshold))


def _row(row: PairedRow) -> list[SheetCell]:
    colour, word = _CHANGES[row.change]
    share = row.worse is not None
    delta = _share(row.delta) if share else _in_unit(row, row.delta)
    low, high = ((_share if share else lambda v: _in_unit(row, v))(v) for v in (row.low, row.high))
    limits = "" if row.low is None else f"{low} … {high}"
    return [
        SheetCell(row.clause, f"{row.level} · {row.requirement}"),
        SheetCell(row.slice),
        *(
            SheetCell(_in_unit(row, value), _rate(rate), number=True)
            for value, rate in zip((row.incumbent, row.candidate), row.rates, strict=True)
        ),
        *(
            SheetCell(UNREACHED if n is None else f"{n} of {row.n}", number=True)
            for n in (row.worse, row.better)
        ),
        SheetCell(delta, limits, number=True),
        SheetCell(word, colour=colour),
    ]


def _share(value: float | None) -> str:
    return UNREACHED if value is None else f"{100 * value:+.3g} points"


def _rate(rate: PassRate | None) -> str:
    if rate is None:
        return ""
    ends = [UNREACHED if end is None else rate_text(end) for end in (rate.low, rate.high)]
    return f"{rate_text(rate.rate)} of {rate.n} {rate.of} keep it ({ends[0]} to {ends[1]})"


def _measures(title: str, rows: Sequence[MeasureDelta]) -> Part | None:
    if not rows:
        return None
    made = [
        [
            SheetCell(row.metric, f"{row.better} is better"),
            SheetCell(row.slice),
            SheetCell(str(row.n), number=True),
            *(
                SheetCell(quantity(value, row.unit), number=True)
                for value in (row.incumbent, row.candidate)
            ),
            SheetCell(
                quantity(row.delta, row.unit),
                f"{quantity(row.low, row.unit)} … {quantity(row.high, row.unit)}",
                number=True,
            ),
        ]
        for row in rows
    ]
    lead = (
        "Means over the same requests. The limits at 95 % are of each row alone and decide nothing."
    )
    head = ("metric", "slice", "requests", "incumbent", "candidate", "difference")
    return Part(title, lead, head=head, rows=made)


def _baselines(found: RunComparison) -> Part | None:
    rows = []
    for row in found.rows:
        band, floor = row.band, row.floor
        if band is None and floor is None:
            continue
        cells = [
            SheetCell(row.clause),
            SheetCell(row.slice),
            SheetCell(_in_unit(row, row.candidate), number=True),
        ]
        if band is None or band.state == "inactive":
            runs = 0 if band is None else band.runs
            cells += [
                SheetCell(UNREACHED, counted(runs, "run"), number=True),
                SheetCell("inactive", colour="none"),
            ]
        else:
            limits = f"{_in_unit(row, band.low)} … {_in_unit(row, band.high)}"
            outside = "violated" if band.harmful else "inconclusive"
            colour = "held" if band.state == "inside" else outside
            cells += [
                SheetCell(limits, counted(band.runs, "run"), number=True),
                SheetCell(band.state, colour=colour),
            ]
        if floor is None:
            cells.append(SheetCell("unknown"))
        else:
            above = "the threshold is stricter" if floor.above else counted(floor.builds, "build")
            cells.append(SheetCell(_in_unit(row, floor.value), above, number=True))
        rows.append(cells)
    if not rows:
        return None
    lead = (
        "Bands are two-sided prediction intervals of the next value. A noise floor is what"
        " reference builds differ by on this checkpoint; units are compared with it where a"
        " threshold is stricter."
    )
    head = ("clause", "slice", "candidate", "band", "", "noise floor")
    return Part("Earlier runs and noise floors", lead, head=head, rows=rows)
