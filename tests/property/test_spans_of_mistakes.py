"""A planted error in an expression is reported at its exact characters, in every style.

Its fix, applied to exactly these characters, repairs it.
"""

from __future__ import annotations

from random import Random

import pytest

from kcdsl.check.compile import analyse
from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.model import Diagnostic, Fix
from kcdsl.diagnostics.spans import SourceFile
from tests.support.layouts import STYLES, Where, Written, write

FAST, MANY = 60, 1000
BASE = """\
kcdsl: 1
contract: spans  # é 𝒳
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices:
  all: {}
"""
MISTAKES = (
    ("require", "KC203", "p99(«klx») <= 0.02"),
    ("require", "KC203", "mean(kl) <= 1 - 0.5 * p99( «kll» )"),
    ("require", "KC205", "«meen»(kl) <= 1 or max(tv) <= 0.5"),
    ("require", "KC302", "p95(latency) <= 250 «mss»"),
    ("require", "KC207", "forall x in points(all): «no_flp»(model, x)"),
    ("require", "KC202", "forall x in points(«al»): no_flip(model, x)"),
    ("require", "KC201", "forall x in points(all): no_flip(model, «y»)"),
    ("require", "KC204", "forall x in ball(all, 1e-3): norm_inf(drift(«attn_00», x)) <= 0.05"),
    ("require", "KC208", "has(trace, [«rng_sed», build_fingerprint])"),
    ("require", "KC010", "p99(kl) <= 0.02 «&&» max(tv) <= 0.5"),
    ("require", "KC010", "p99(kl) «=<» 0.02"),
    ("require", "KC010", "p99(kl) «≤» 0.02"),
    ("require", "KC010", "p99(kl) <= 0.02«∧»max(tv) <= 0.5"),
    ("require", "KC010", "abs(mean(log_ratio) «−» 1) <= 0.02"),
    ("require", "KC010", "forall x in points(all): no_flip(model «x»)"),
    ("require", "KC010", "forall x in points(all) «no_flip»(model, x)"),
    ("require", "KC010", "p95(latency) <= 250 «µs»"),
    ("require", "KC010", "p99(kl) <= 0.02«)»"),
    ("require", "KC010", "(p99(kl) <= 0.02«»"),
    ("require", "KC010", "p99(kl) <= 0.02 and«»"),
    ("require", "KC010", "mean(kl) <=«»"),
    ("require", "KC207", "p99(kl) <= 0.02 and «max(tv)»"),
    ("require", "KC010", "p99(kl) <= 0.02 and has(trace, [rng_seed, «'build)»"),
    ("where", "KC207", "category == «safety» and length > 128"),
    ("where", "KC207", "length > 128 and category == «safety»"),
    ("where", "KC207", "not category in ['a', «safety»]"),
)
"""Field, code, and expression with its marked part; a mark at the end means just behind it."""
CUT = tuple(mistake for mistake in MISTAKES if "'" not in mistake[2])
"""Expressions that kcdsl reads without quotation marks inside braces."""
UNMENDED = ("«y»)", "and«»", "<=«»", "«max(tv)»", "«'build)»")


def laid_out(random: Random, marked: str, style: str) -> tuple[str, int, int]:
    """Return an expression with other white space, and the range of the marked part."""
    spaces = [" ", " ", " ", "  "]
    spaces += ["\n", "\n\n"] if style in {"plain", "'"} else ["\n", "\n  ", "\t", "\n\n"]
    text = "".join(random.choice(spaces) if char == " " else char for char in marked)
    if style in {"|", ">", '"'} and random.random() < 0.3:
        text += "\n"
    start = text.index("«")
    end = text.index("»") - 1
    return text.replace("«", "").replace("»", ""), start, end


def contract(random: Random, field: str, text: str, style: str) -> tuple[str, int, Written] | None:
    """Return a contract with an expression, its offset, and its written form."""
    eol = random.choice(["\n", "\r\n"])
    deep = 2 if field == "where" else random.choice([1, 2, 4])
    flow = style not in {"|", ">"} and random.random() < 0.3
    written = write(random, text, style, Where(deep if flow else 2 * deep, eol, flow=flow))
    if written is None:
        return None
    lead = BASE + ("" if field == "where" else "clauses:\n")
    name, other = ("long", "") if field == "where" else ("C-1", "level: L2")
    if flow:
        lead += f"{' ' * deep}{name}: {{{other}{', ' if other else ''}{field}: "
        tail = "}\n"
    else:
        lead += f"{' ' * deep}{name}:\n{' ' * 2 * deep}{other}\n{' ' * 2 * deep}{field}: "
        tail = "\n"
    if field == "where":
        tail += "clauses:\n  C-1: {require: mean(kl) <= 1, level: L2}\n"
    lead, tail = lead.replace("\n", eol), tail.replace("\n", eol)
    return lead + written.source + tail, len(lead), written


def serious(text: str) -> list[Diagnostic]:
    """Return the findings, except for the note that an expression needs quotation marks."""
    sink = Sink()
    analyse(SourceFile("c.kc.yaml", text), sink)
    return [d for d in sink if d.severity is not Severity.NOTE]


def mended(text: str, fix: Fix) -> str:
    for edit in sorted(fix.edits, key=lambda edit: edit.span, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


def examine(random: Random, style: str) -> bool:
    """Plant one error; False where the style cannot represent its expression."""
    field, code, marked = random.choice(MISTAKES)
    text, start, end = laid_out(random, marked, style)
    made = contract(random, field, text, style)
    if made is None:
        return False
    whole, at, written = made
    places = written.moved(at)
    ((_, last),) = places[end - 1]
    ((first, _),) = places[start] if start < end else {(last, last)}
    found = serious(whole)
    shown = [(d.code.id, d.span and whole[d.span.start : d.span.end], d.message) for d in found]
    assert len(found) == 1, (whole, shown)
    assert found[0].code.id == code, (whole, shown)
    assert found[0].span is not None
    assert (found[0].span.start, found[0].span.end) == (first, last), (whole, shown)
    fix = found[0].fix
    broken = "\n" in whole[first:last]  # by a line break that a backslash escapes
    # A plain scalar may contain the colon of a quantifier only if all of that is on one line.
    broken |= style == "plain" and "«no_flip»" in marked and "\n" in written.source
    assert (fix is not None) == (not marked.endswith(UNMENDED)) or broken, (whole, shown)
    if fix is not None:
        after = serious(mended(whole, fix))
        assert not after, (whole, mended(whole, fix), [d.message for d in after])
    return True


def run(style: str, count: int, seed: int) -> None:
    random = Random(f"{style} {seed}")
    done = 0
    while done < count:
        done += examine(random, style)


@pytest.mark.sample(2)
@pytest.mark.parametrize("style", STYLES)
def test_errors_are_reported_at_their_characters(style: str) -> None:
    run(style, FAST, 0)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_thousands_of_errors_are_reported_at_their_characters(style: str) -> None:
    run(style, MANY, 1)


@pytest.mark.parametrize(("field", "code", "marked"), CUT)
def test_errors_in_unquoted_flow_expressions(field: str, code: str, marked: str) -> None:
    """Without quotation marks in braces, where kcdsl reads the commas and brackets of a call."""
    text = marked.replace("«", "").replace("»", "")
    lead = BASE if field == "where" else BASE + "clauses:\n"
    name = "long" if field == "where" else "C-1"
    rest = "" if field == "where" else ", level: L2"
    whole = f"{lead}  {name}: {{{field}: {text}{rest}}}\n"
    if field == "where":
        whole += "clauses:\n  C-1: {require: mean(kl) <= 1, level: L2}\n"
    (found,) = serious(whole)
    assert found.code.id == code
    assert found.span is not None
    start, end = marked.index("«"), marked.index("»") - 1
    at = whole.index(text)
    assert (found.span.start, found.span.end) == (at + start, at + end)
