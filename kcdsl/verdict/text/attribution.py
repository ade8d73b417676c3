"""An attribution as terminal tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kcdsl.verdict.quantities import UNREACHED
from kcdsl.verdict.studies.attribution import (
    Attribution,
    Candidate,
    EstimatedNumber,
    Layers,
    Source,
)
from kcdsl.verdict.text.console import folded, heading, print_on, table

_BAR = 20
_BLOCKS = 32
"""The largest number of blocks shown: those with the largest gain or loss."""
_PARTS = " ▏▎▍▌▋▊▉█"
_STATUS = {
    "attributed": ("✓ attributed", "green"),
    "no_drift": ("✓ no drift", "green"),
    "inconclusive": ("? inconclusive", "yellow"),
    "invalid_evidence": ("! invalid", "magenta"),
}
_VERDICTS = {
    "most": ("most of the drift", "bold"),
    "part": ("a part of the drift", "none"),
    "against": ("works against the drift", "none"),
    "not_shown": ("not shown", "dim"),
}


def print_attribution(found: Attribution, stream: TextIO) -> None:
    """Print the attribution; colours only where the stream is a terminal."""
    print_on(stream, render(found))


def render(found: Attribution) -> RenderableType:
    """Return the attribution as a rich renderable."""
    parts: list[RenderableType] = [_heading(found), _source_table(found)]
    parts += _remarks(found)
    if found.layers is not None and found.layers.rows:
        parts += [_layer_table(found.layers), *_first(found.layers)]
    if found.candidates:
        parts.append(Text("\ncandidates", style="italic"))
        parts += [line for candidate in found.candidates for line in _candidate(candidate)]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    parts.append(_conclusion(found))
    return Group(*parts)


def _heading(found: Attribution) -> Text:
    unit = "" if found.unit in ("1", "ratio") else f" {found.unit}"
    where = "" if found.slice is None else f" of {found.slice}"
    text = heading(found.contract).append(
        f"\ntrain {found.kernels['train']} | infer {found.kernels['infer']}\n"
        f"{found.statistic}({found.metric}) over {found.requests} requests{where}: "
        f"{_figure(found.total)}{unit}"
    )
    if found.baseline:
        text.append(f", from {found.baseline:.4g} of the training kernel with itself")
    return text


def _source_table(found: Attribution) -> Table:
    columns = (
        *(Column("source", no_wrap=True), folded("train → infer", 27)),
        *(">alone", ">left out", ">share", Column("", no_wrap=True, width=_BAR)),
        Column("bound", no_wrap=True),
    )
    return table(columns, map(_source_cells, found.sources))


def _source_cells(row: Source) -> Iterator[Text]:
    share = UNREACHED if row.share is None else percent(row.share)
    numbers = (_value(row.alone), _value(row.left_out), share)
    for cell in (row.name, _sides(row), *numbers, bar(row.share), _bound(row)):
        yield Text(cell, style="none" if row.shown else "dim")


def _sides(row: Source) -> str:
    if row.state == "differs":
        return f"{row.train} → {row.infer}"
    return "equal" if row.state == "equal" else "absent"


def _bound(row: Source) -> str:
    if row.can_explain is None:
        return UNREACHED
    return "open" if row.reach is None else f"≤ {100 * row.reach:.2g} %"


def percent(share: float) -> str:
    """Return a share in percent, without a sign where it rounds to 0."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"


def bar(share: float | None, width: int = _BAR) -> str:
    """Return a bar for a share of the whole; a negative share begins with a minus sign."""
    if share is None:
        return ""
    eighths = min(8 * width, round(8 * width * abs(share)))
    text = "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")
    return f"-{text}"[:width] if share < 0 and text else text


def _layer_table(layers: Layers) -> Table:
    whole, shown = layers.total, layers.largest(_BLOCKS)
    rows: list[tuple[str, ...]] = [
        (
            row.block,
            f"{row.drift:.3g}",
            f"{row.relative:.2g}",
            f"{row.floor:.2g}",
            *(f"{value:.3g}" for value in (row.logits, row.cumulative, row.gain)),
            bar(row.gain / whole if whole else None),
        )
        for row in shown
    ]
    if len(shown) < len(layers.rows):
        rows.append((f"({len(layers.rows) - len(shown)} that gain less)",))
    rows.append(("outside", "", "", "", "", f"{whole:.3g}", f"{layers.outside:.3g}"))
    numbers = (">drift", ">relative", ">floor", ">alone", ">so far", ">gain")
    columns = (Column("block", no_wrap=True), *numbers, Column("", no_wrap=True, width=_BAR))
    title = f"\nblocks, on {len(layers.requests)} requests"
    return table(columns, rows, title, padding=(0, 1))


def _first(layers: Layers) -> Iterator[Text]:
    if layers.first_block is not None:
        yield Text(f"first block above its floor: {layers.first_block}")
    first = layers.first_mismatch
    if first is not None:
        yield Text(
            f"first different bits: {first.block}, {first.operation}; {first.request}, token "
            f"{first.token}, feature {first.index}: {first.train:.9g} and {first.infer:.9g}"
        )


def _remarks(found: Attribution) -> list[RenderableType]:
    lines: list[RenderableType] = []
    bounded = next((s.envelope_block for s in found.sources if s.envelope_block), None)
    if bounded is not None:
        words = "  bound: the most of the drift of"
        lines.append(Text(f"{words} {bounded} that the source alone can make", style="dim"))
    for row in found.sources:
        if row.reason and row.state != "differs":  # kernels that do not run are listed below
            lines.append(Text(f"  {row.name}: {row.reason}", style="dim"))
    lines += [Text(f"  {line}") for line in _not_run(found)]
    simulated = ["+".join(b.sources) for b in found.between if b.simulated and b.value is not None]
    if simulated:
        lines.append(Text(f"  simulated: {', '.join(simulated)}", style="dim"))
    if found.method == "orders_that_run":
        run, whole = found.orders
        lines.append(Text(f"  shares are means over the {run} of {whole} orders that run"))
    return lines


def _not_run(found: Attribution) -> Iterator[str]:
    """Yield each reason once, with the intermediate kernels that do not run for it."""
    about: dict[str | None, list[str]] = {}
    for between in found.between:
        if between.value is None:
            about.setdefault(between.reason, []).append("+".join(between.sources))
    for reason, names in about.items():
        yield f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not run: {reason}"


def _candidate(candidate: Candidate) -> Iterable[Text]:
    words, style = _VERDICTS[candidate.verdict]
    line = Text.assemble(f" {candidate.rank}. ", (candidate.source, style), f": {words}")
    if candidate.blocks:
        line.append(f"; most in {', '.join(candidate.blocks)}")
    yield line
    for text in candidate.evidence:
        yield Text(f"    {text}", style="dim")
    if candidate.verdict in ("most", "part"):
        for remedy in candidate.remedies:
            yield Text(f"    → {remedy.text} ({remedy.id})")


def _conclusion(found: Attribution) -> Text:
    words, style = _STATUS[found.status]
    text = Text.assemble((words, style))
    if found.reason is not None:
        text.append(f"  {found.reason}")
    return text


def _figure(figure: EstimatedNumber) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:.4g} (no interval)"
    return f"{figure.value:.4g} [{figure.low:.3g}, {figure.high:.3g}]"


def _value(figure: EstimatedNumber | None) -> str:
    return UNREACHED if figure is None else f"{figure.value:.3g}"
