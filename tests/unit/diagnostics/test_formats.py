"""The formats for other programs: GitHub Actions, SARIF, JUnit."""

from __future__ import annotations

import json
from xml.etree import ElementTree as xml

from kcdsl.diagnostics.codes import ANCHOR, DOUBTFUL_NAME, UNKNOWN_METRIC
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity
from kcdsl.diagnostics.render import render
from kcdsl.source.text import SourceFile, Span

TEXT = "a: 🚀 kll\nb: two\n  lines\n"
SOURCE = SourceFile("dir/with space/c,1.kc.yaml", TEXT)
KLL = Span(5, 8)
ONE = Diagnostic(
    UNKNOWN_METRIC,
    "there is no metric `kll`, 100% sure",
    SOURCE,
    KLL,
    labels=(Label(Span(9, 10), "beside"),),
    notes=("first",),
    help="did you mean `kl`?",
    fix=Fix("write `kl`", (Edit(KLL, "kl"),), safe=False),
)
TWO = Diagnostic(ANCHOR, "two lines", SOURCE, Span(12, 23), severity=Severity.WARNING)
NOWHERE = Diagnostic(DOUBTFUL_NAME, "nowhere", severity=Severity.NOTE)


def test_github() -> None:
    lines = render([ONE, TWO, NOWHERE], "github").splitlines()
    assert lines == [
        "::error file=dir/with space/c%2C1.kc.yaml,line=1,endLine=1,col=6,endColumn=8,"
        "title=KC203%3A unknown metric::there is no metric `kll`, 100%25 sure%0Anote: first%0A"
        "help: did you mean `kl`?",
        "::warning file=dir/with space/c%2C1.kc.yaml,line=2,endLine=3,"
        "title=KC003%3A anchor or alias::two lines",
        "::notice title=KC208%3A doubtful name::nowhere",
    ]


def test_sarif() -> None:
    document = json.loads(render([ONE, TWO, NOWHERE], "sarif"))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    assert run["columnKind"] == "unicodeCodePoints"
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["KC003", "KC203", "KC208"]
    first, second, third = run["results"]
    assert [r["level"] for r in run["results"]] == ["error", "warning", "note"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "dir/with%20space/c%2C1.kc.yaml"
    region = {"startLine": 1, "startColumn": 6, "endLine": 1, "endColumn": 9}
    assert place["region"] == region
    assert first["relatedLocations"][0]["message"]["text"] == "beside"
    (change,) = first["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [{"deletedRegion": region, "insertedContent": {"text": "kl"}}]
    assert second["locations"][0]["physicalLocation"]["region"]["endLine"] == 3
    assert third["locations"] == []


def test_junit() -> None:
    root = xml.fromstring(render([ONE, TWO, NOWHERE], "junit", files=["good.kc.yaml"]))
    cases = {case.attrib["name"]: case for case in root.iter("testcase")}
    assert set(cases) == {"good.kc.yaml", SOURCE.name, "kcdsl"}
    assert list(cases["good.kc.yaml"]) == []
    failure = cases[SOURCE.name].find("failure")
    assert failure is not None
    assert failure.attrib["type"] == "KC203"
    assert "c,1.kc.yaml:1:6: error[KC203]" in (failure.text or "")
    assert cases["kcdsl"].find("failure") is None
    assert root.attrib["tests"] == "3"
    assert root.attrib["failures"] == "1"


def test_junit_keeps_forbidden_characters_out() -> None:
    hostile = Diagnostic(ANCHOR, "a\x00b\x1bc <&> ]]>", SOURCE, KLL)
    root = xml.fromstring(render([hostile], "junit"))
    failure = next(root.iter("failure"))
    assert "<&> ]]>" in failure.attrib["message"]
    assert "\x00" not in failure.attrib["message"]


def test_nothing_found_is_a_document_too() -> None:
    assert render([], "github") == ""
    assert json.loads(render([], "sarif"))["runs"][0]["results"] == []
    assert xml.fromstring(render([], "junit", files=["a"])).attrib["failures"] == "0"
