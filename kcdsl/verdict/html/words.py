"""Numbers and findings in words, as the page writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl.verdict.model import HELD, SIGNS, WORST_FIRST
from kcdsl.verdict.quantities import quantity, scale, stated, told
from kcdsl.verdict.report import not_decided

_WORDS = {
    "held": "held",
    "violated": "violated",
    "inconclusive": "not decided",
    "invalid_evidence": "invalid evidence",
}
VERDICTS = {name: (sign, _WORDS[name]) for name, sign in SIGNS.items()}
"""Sign and word of each verdict, so that no colour is needed to tell them apart."""

_HEADLINES = {
    "held": "Every clause that was decided holds",
    "violated": "The contract is violated",
    "inconclusive": "The evidence does not decide the contract",
    "invalid_evidence": "The evidence cannot be trusted",
}
_ADVICE = {
    "held": "Every clause of the contract was decided here. Nothing has to be done.",
    "violated": "Do not promote this kernel.",
    "inconclusive": "Do not read this as a pass: gather what the open clauses lack.",
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


def threshold_of(row: Mapping[str, Any]) -> str:
    """Return what a row asks for, as it was stated: <= 0.1 nat."""
    return f"{row['op']} {_with_unit(stated(row['threshold'], row['unit']), row['unit'])}"


def against(value: float | None, row: Mapping[str, Any]) -> str:
    """Return a value of a row with its unit, told from its threshold."""
    unit = scale(row["unit"], row["threshold"])
    return _with_unit(told(value, row["threshold"], unit), unit)


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
    """Return what is not held: the clause, its slice, and by how much it fails.

    Results without usable evidence for one and the same reason are one finding `of` all of them.
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
    """Return clause, level, requirement and slices of results, one entry for each requirement."""
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
    text = f"{against(value, row)} instead of {threshold_of(row)}"
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
    """Return the worse limit of a sampled row; a census has no sampling error."""
    if row["evidence"] != "sample":
        return None
    found = row["low"] if row["op"] in (">=", ">") else row["high"]
    return None if found is None else float(found)
