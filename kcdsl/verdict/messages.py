"""Numbers, findings and diagnostics of a report document, as sentences.

In diagnostics for build servers, violated clauses and invalid evidence are errors, open clauses are
warnings that fail too, and only a held clause is a success. Everything else is a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.diagnostics.render import WITHOUT_FILE, Checked, LintRun, render
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.verdict.model import HELD, SIGNS, WORST_FIRST
from kcdsl.verdict.quantities import distinct_text, quantity, scale
from kcdsl.verdict.report import not_decided

_WORDS = {
    "held": "held",
    "violated": "violated",
    "inconclusive": "not decided",
    "invalid_evidence": "invalid evidence",
}
VERDICTS = {name: (sign, _WORDS[name]) for name, sign in SIGNS.items()}
"""Sign and word of each verdict, readable without colours."""

_HEADLINES = {
    "held": "Every clause that was decided holds",
    "violated": "The contract is violated",
    "inconclusive": "The evidence does not decide the contract",
    "invalid_evidence": "The evidence cannot be trusted",
}
_ADVICE = {
    "held": "Every clause of the contract was decided here. Nothing has to be done.",
    "violated": "Do not promote this kernel.",
    "inconclusive": "This is not a pass: collect the missing evidence of the open clauses.",
    "invalid_evidence": "Mend the cause that is named below, then evaluate again.",
}
_NONE = "–"


def brief(value: float) -> str:
    """Return a number in a few characters: 0.25, 1.2e-6, 12k."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return _NONE if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if 1e-3 <= size < 1e4:
        return f"{value:.3g}" if size < 1000 else f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def shown(value: float | None, unit: str) -> str:
    """Return a value with its unit; a dash where there is none."""
    return _with_unit(quantity(value, unit), unit)


def against(value: float | None, row: Mapping[str, Any]) -> str:
    """Return a value of a row with its unit, with enough digits to differ from the threshold."""
    unit = scale(row["unit"], row["threshold"])
    return _with_unit(distinct_text(value, row["threshold"], unit), unit)


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit in ("nat", "tok") and text != _NONE else text


def share(count: int, n: int) -> str:
    """Return count of n in percent, with both numbers."""
    return f"{100 * count / n:.3g} % ({count} of {n})" if n else "none"


def headline(report: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence."""
    return _HEADLINES[report["verdict"]]


def advice(report: Mapping[str, Any]) -> list[str]:
    """Return what to do, most urgent first."""
    found = []
    blocking = [
        check
        for check in report["prechecks"]
        if check["outcome"] == "failed" and check.get("blocking")
    ]
    for check in blocking:
        found.append(f"Precondition {check['name']} failed: {check['detail']}")
    open_clauses = not_decided(report["deferred"])
    if not open_clauses or report["verdict"] != HELD:
        found.append(_ADVICE[report["verdict"]])
    if open_clauses:
        found.append(f"This is {open_clauses}.")
    if report["action"] != "log":
        action = report["action"].replace("_", " ")
        found.append(f"The escalation policy asks for: {action}.")
    needed = [row for row in report["clauses"] if row.get("needed")]
    for row in needed[:3]:
        found.append(
            f"{row['clause']} on {row['slice']}: about {row['needed']} {row['counted']} would "
            "decide it if they are like these."
        )
    return found


def findings(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results that are not held: the clause, its slice, and by how much it fails.

    Results without usable evidence for the same reason are combined in one finding (`of`).
    """
    rows = [row for row in report["clauses"] if row["verdict"] != HELD]
    rows.sort(key=lambda row: (WORST_FIRST.index(row["verdict"]), -_deviation(row)))
    groups: dict[str | int, list[Mapping[str, Any]]] = {}
    for at, row in enumerate(rows):
        shared = row["verdict"] == "invalid_evidence" and row.get("reason")
        groups.setdefault(str(shared) if shared else at, []).append(row)
    return [
        {
            "verdict": first["verdict"],
            "sign": VERDICTS[first["verdict"]][0],
            "word": VERDICTS[first["verdict"]][1],
            "of": _by_clause(group),
            "far": how_far(first),
            "where": where(first),
            "action": ", ".join(dict.fromkeys(_action(row) for row in group if _action(row))),
        }
        for group in groups.values()
        for first in group[:1]
    ]


def _by_clause(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return clause, level, requirement and slices of results, one entry per requirement."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        one = {name: row[name] for name in ("clause", "level", "requirement")}
        entry = found.setdefault((row["clause"], row["requirement"]), {**one, "slices": []})
        if row["slice"] not in entry["slices"]:
            entry["slices"].append(row["slice"])
    return list(found.values())


def _action(row: Mapping[str, Any]) -> str:
    return (row.get("action") or "").replace("_", " ")


def _deviation(row: Mapping[str, Any]) -> float:
    found = row.get("deviation")
    return math.inf if found is None else float(found)


def how_far(row: Mapping[str, Any]) -> str:
    """Return by how much a clause fails, or why it is not decided."""
    if row["verdict"] != "violated":
        return str(row.get("reason") or "")
    value, threshold = row["value"], row["threshold"]
    counted = row.get("exceedance")
    if row.get("budget") and counted:
        beyond = share(counted["k"], counted["n"])
        return f"{beyond} of the {counted['of']} are beyond, {row['budget']} may be"
    if value is None or threshold is None:
        return "the requirement does not hold"
    text = f"{against(value, row)} instead of {row['op']} {against(threshold, row)}"
    if threshold and value and row["op"] in ("<=", "<") and value / threshold >= 1.005:
        text += f", {brief(float(f'{value / threshold:.3g}'))} times the limit"
    return text


def where(row: Mapping[str, Any]) -> str:
    """Return the request and token that are worst."""
    example = row.get("counterexample") or {}
    if "request" in example:
        token = f", token {example['token']}" if "token" in example else ""
        return f"worst at {example['request']}{token}: {brief(float(example['worst']))}"
    if example.get("records"):
        return "without the fields: " + ", ".join(map(str, example["records"]))
    return ""


def limit_of(row: Mapping[str, Any]) -> float | None:
    """Return the limit that decides a sampled row; a census has no sampling error."""
    if row["evidence"] != "sample":
        return None
    found = row["low"] if row["op"] in (">=", ">") else row["high"]
    return None if found is None else float(found)


def looks_in_words(looks: int | None) -> str:
    """Return in words the number of looks at growing data that share an error."""
    if looks is None:
        return "over any number of looks"
    return "at one look" if looks == 1 else f"over {looks} looks together"


# --- the context of results -----------------------------------------------------------------------


def without_implied_unit(value: float | None, row: Mapping[str, Any]) -> str:
    """Return a value as `against` does, without a unit that the metric implies."""
    return distinct_text(value, row["threshold"], scale(row["unit"], row["threshold"]))


def context_rows(
    clauses: Sequence[Mapping[str, Any]],
    write: Callable[[float | None, Mapping[str, Any]], str] = against,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the measured value, certified bound and noise floor of each threshold, in words.

    The second list has the reasons of missing numbers, each once; `certified_note` and
    `floor_note` of a row are indices in it, from 1, and 0 for none.
    """
    found: list[dict[str, Any]] = []
    reasons: list[str] = []

    def note(part: Mapping[str, Any]) -> int:
        why = part.get("reason")
        if not why:
            return 0
        if why not in reasons:
            reasons.append(why)
        return reasons.index(why) + 1

    for row in clauses:
        context = row.get("context") or {}
        spread = context.get("measured")
        if spread is None:
            continue
        certified, floor = context.get("certified") or {}, context.get("noise_floor") or {}
        value, partial = certified.get("value"), certified.get("partial")
        bounded = f"{certified.get('requests')}/{certified.get('of')}"
        found.append(
            {
                **{name: row[name] for name in ("clause", "slice", "verdict", "metric")},
                **{name: write(spread[name], row) for name in ("p50", "p99", "worst")},
                "value": write(row["value"], row),
                "threshold": f"{row['op']} {write(row['threshold'], row)}",
                "certified": "no bound" if certified and value is None else write(value, row),
                "partial": ""
                if value is not None or partial is None
                else f"{write(partial, row)} on {bounded}",
                "certified_note": note(certified),
                "floor": write(floor.get("value"), row),
                "floor_note": note(floor),
                "above": bool(floor.get("above")),
            }
        )
    return found, reasons


# --- diagnostics ----------------------------------------------------------------------------------


_FOUND = {
    "violated": (codes.CLAUSE_VIOLATED, Severity.ERROR),
    "invalid_evidence": (codes.CLAUSE_INVALID, Severity.ERROR),
    "inconclusive": (codes.CLAUSE_OPEN, Severity.WARNING),
}
Places = Mapping[str, Span]
"""The span of each clause in the contract."""


def in_format(
    report: Mapping[str, Any],
    format: str,
    command: str,
    source: SourceFile | None = None,
    places: Places | None = None,
) -> str:
    """Return a report as junit, github, sarif, concise or text, located at its clauses."""
    known = places or {}
    decided = dict.fromkeys(row["clause"] for row in report["clauses"])
    checked: tuple[Checked, ...] = ()
    if source is None and format == "junit":  # no places: a number tells the clauses apart
        known = {name: Span(at, at) for at, name in enumerate(decided)}
        checked = (Checked(WITHOUT_FILE, tuple(known.items())),)
    if source is not None:
        clauses = tuple((name, known[name]) for name in decided if name in known)
        checked = (Checked(source.name, clauses),)
    run = LintRun(command, checked, fail_on=Severity.WARNING, exit_code=report["exit"])
    return render(list(diagnostics(report, source, known)), format, None, run)


def diagnostics(
    report: Mapping[str, Any], source: SourceFile | None, places: Places
) -> Iterator[Diagnostic]:
    """Yield a finding for each result that is not held, then the notes."""
    for row in report["clauses"]:
        if row["verdict"] == "held":
            continue
        code, severity = _FOUND[row["verdict"]]
        yield Diagnostic(
            code,
            f"`{row['clause']}` on {row['slice']}: {how_far(row)}",
            source,
            places.get(row["clause"]),
            notes=tuple(filter(None, (f"requires {row['requirement']}", where(row)))),
            help=_way_out(row),
            severity=severity,
        )
    for warned in report.get("warnings", ()):
        explained = codes.find(warned["code"])
        if explained is None:
            raise ValueError(f"no such code: {warned['code']}")
        yield Diagnostic(
            explained,
            f"`{warned['clause']}` on {warned['slice']}: {warned['message']}",
            source,
            places.get(warned["clause"]),
            severity=Severity.NOTE,
        )


def _way_out(row: Mapping[str, Any]) -> str | None:
    if row["verdict"] == "inconclusive" and row.get("needed"):
        return f"about {row['needed']} {row['counted']} would decide it if they are like these"
    if row.get("action"):
        return f"the escalation policy asks for: {row['action'].replace('_', ' ')}"
    return None
