"""Output formats for other programs: GitHub Actions, SARIF, JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import jsonschema
import pytest

from kcdsl.diagnostics.codes import ANCHOR, DOUBTFUL_NAME, UNKNOWN_METRIC
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity, Suppressed
from kcdsl.diagnostics.render import Checked, LintRun, render
from kcdsl.diagnostics.spans import SourceFile, Span

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


def test_github_format() -> None:
    lines = render([ONE, TWO, NOWHERE], "github").splitlines()
    assert lines == [
        "::error file=dir/with space/c%2C1.kc.yaml,line=1,endLine=1,col=6,endColumn=8,"
        "title=KC203%3A unknown metric::there is no metric `kll`, 100%25 sure%0Anote: first%0A"
        "help: did you mean `kl`?",
        "::warning file=dir/with space/c%2C1.kc.yaml,line=2,endLine=3,"
        "title=KC003%3A anchor or alias::two lines",
        "::notice title=KC208%3A doubtful name::nowhere",
    ]


def test_sarif_format() -> None:
    run = kept(json.loads(render([ONE, TWO, NOWHERE], "sarif")))
    assert run["columnKind"] == "unicodeCodePoints"
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["KC003", "KC203", "KC208"]
    first, second, third = run["results"]
    assert [r["level"] for r in run["results"]] == ["error", "warning", "note"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "dir/with%20space/c%2C1.kc.yaml"
    region = {"startLine": 1, "startColumn": 6, "endLine": 1, "endColumn": 9}
    assert place["region"] == region
    assert first["relatedLocations"][0]["message"]["text"] == "beside"
    (change,) = first["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [{"deletedRegion": region, "insertedContent": {"text": "kl"}}]
    assert second["locations"][0]["physicalLocation"]["region"]["endLine"] == 3
    assert third["locations"] == []


def _object(required: str, optional: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    known = [*required.split(), *optional.split()]
    assert set(properties) <= set(known)
    return {
        "type": "object",
        "required": required.split(),
        "properties": {name: properties.get(name, {}) for name in known},
        "additionalProperties": False,
    }


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


TEXT_ALONE = {"type": "string", "minLength": 1}
NUMBER = {"type": "integer", "minimum": 1}
MESSAGE = _object("text", "markdown", text=TEXT_ALONE, markdown=TEXT_ALONE)
ARTIFACT = _object("uri", uri={"type": "string", "pattern": r"^[A-Za-z0-9._~!$&'()*+,;=:@/%-]+$"})
REGION = _object(
    "startLine", "startColumn endLine endColumn",
    startLine=NUMBER, startColumn=NUMBER, endLine=NUMBER, endColumn=NUMBER,
)  # fmt: skip
LOCATION = _object(
    "physicalLocation", "id message",
    physicalLocation=_object(
        "artifactLocation", "region", artifactLocation=ARTIFACT, region=REGION
    ),
    id={"type": "integer", "minimum": 0},
    message=MESSAGE,
)  # fmt: skip
RULE = _object(
    "id name shortDescription fullDescription help", "helpUri",
    id={"pattern": "^KC[0-9]{3}$"}, name={"pattern": "^[A-Za-z0-9]+$"}, shortDescription=MESSAGE,
    fullDescription=MESSAGE, help=MESSAGE, helpUri={"type": "string", "pattern": "^https?://"},
)  # fmt: skip
FIX = _object(
    "artifactChanges", "description properties",
    description=MESSAGE,
    properties={"type": "object"},
    artifactChanges={
        "minItems": 1,
        **_list(
            _object(
                "artifactLocation replacements",
                artifactLocation=ARTIFACT,
                replacements={
                    "minItems": 1,
                    **_list(
                        _object(
                            "deletedRegion", "insertedContent",
                            deletedRegion=REGION,
                            insertedContent=_object("text", text={"type": "string"}),
                        )
                    ),
                },
            )
        ),
    },
)  # fmt: skip
SUPPRESSION = _object(
    "kind", "status justification location",
    kind={"enum": ["inSource", "external"]},
    status={"enum": ["accepted", "underReview", "rejected"]},
    justification=TEXT_ALONE,
    location=LOCATION,
)  # fmt: skip
RESULT = _object(
    "message ruleId ruleIndex level locations", "relatedLocations fixes suppressions",
    message=MESSAGE,
    ruleId={"pattern": "^KC[0-9]{3}$"},
    ruleIndex={"type": "integer", "minimum": 0},
    level={"enum": ["none", "note", "warning", "error"]},
    locations=_list(LOCATION),
    relatedLocations={"uniqueItems": True, **_list(LOCATION)},
    fixes={"uniqueItems": True, **_list(FIX)},
    suppressions={"uniqueItems": True, **_list(SUPPRESSION)},
)  # fmt: skip
RUN = _object(
    "tool results", "invocations artifacts columnKind",
    tool=_object(
        "driver",
        driver=_object(
            "name", "version semanticVersion rules",
            name=TEXT_ALONE,
            version=TEXT_ALONE,
            semanticVersion={"pattern": r"^\d+\.\d+\.\d+"},
            rules={"uniqueItems": True, **_list(RULE)},
        ),
    ),
    results=_list(RESULT),
    invocations=_list(
        _object(
            "executionSuccessful", "exitCode",
            executionSuccessful={"type": "boolean"}, exitCode={"type": "integer"},
        )
    ),
    artifacts={"uniqueItems": True, **_list(_object("location", location=ARTIFACT))},
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
)  # fmt: skip
SARIF = _object(
    "version runs", "$schema", version={"const": "2.1.0"}, runs={"minItems": 1, **_list(RUN)}
)
"""The objects of SARIF 2.1.0 (OASIS standard, sections 3.13 to 3.58) that are written here."""


def kept(document: dict[str, Any]) -> dict[str, Any]:
    """Return the run of a SARIF document that follows the format, with rules and results."""
    jsonschema.Draft7Validator(SARIF).validate(document)
    run: dict[str, Any] = document["runs"][0]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    # If one result states whether it is suppressed, all do (3.27.23).
    assert len({"suppressions" in result for result in run["results"]}) <= 1
    return run


def test_sarif_is_valid_for_any_characters() -> None:
    odd = SourceFile('/folder/a b/\u00e4%,:#?\n"\\.kc.yaml', TEXT)
    hostile = Diagnostic(ANCHOR, "a\x00b\x1b \ud800", odd, KLL, notes=("n\n",), help="h")
    accepted = Suppressed(TWO, "known \u00e4", 1)
    run = LintRun(
        files=(Checked(SOURCE.name), Checked(odd.name), Checked("<stdin>"), Checked(SOURCE.name)),
        suppressed=(accepted,),
        docs_url="https://example.invalid/{code}.html",
        exit_code=2,
    )
    text = render([ONE, TWO, NOWHERE, hostile], "sarif", run=run)
    found = kept(json.loads(text.encode("utf-8", "backslashreplace")))
    urls = [rule["helpUri"] for rule in found["tool"]["driver"]["rules"]]
    assert urls[0] == "https://example.invalid/KC003.html"
    assert found["invocations"] == [{"executionSuccessful": False, "exitCode": 2}]
    assert [r["suppressions"] != [] for r in found["results"]] == [False] * 4 + [True]
    (suppression,) = found["results"][-1]["suppressions"]
    assert suppression["justification"] == "known \u00e4"
    plain = kept(json.loads(render([], "sarif")))
    assert plain["results"] == []


def test_sarif_fixes_insert_and_delete() -> None:
    edits = (Edit(Span(5, 5), "x"), Edit(Span(8, 10), ""))
    both = Diagnostic(ANCHOR, "m", SOURCE, KLL, fix=Fix("t", edits))
    found = kept(json.loads(render([both], "sarif")))
    (change,) = found["results"][0]["fixes"][0]["artifactChanges"]
    insert, delete = change["replacements"]
    assert insert["deletedRegion"]["startColumn"] == insert["deletedRegion"]["endColumn"]
    assert insert["insertedContent"] == {"text": "x"}
    assert "insertedContent" not in delete
    assert (delete["deletedRegion"]["startLine"], delete["deletedRegion"]["endLine"]) == (1, 2)


def test_github_format_escapes_special_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = SourceFile("a,b:c%d\r\ne.kc.yaml", TEXT)
    hostile = Diagnostic(ANCHOR, "one\n::error::two\r\x1b[31m 100%", odd, KLL)
    text = render([hostile], "github")
    assert "\n" not in text
    assert "\r" not in text
    assert "\x1b" not in text
    assert text.startswith("::error file=a%2Cb%3Ac%25d%0D%0Ae.kc.yaml,line=1,")
    assert "::one%0A::error::two" in text
    assert text.endswith(" 100%25")
    folder = tmp_path / "checkout" / "contracts"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "checkout"))
    for name, wanted in (
        ("a.kc.yaml", "contracts/a.kc.yaml"),
        (str(folder / "a.kc.yaml"), "contracts/a.kc.yaml"),
        ("../a.kc.yaml", "a.kc.yaml"),
        ("../../a.kc.yaml", "../../a.kc.yaml"),
    ):
        shown = render([Diagnostic(ANCHOR, "m", SourceFile(name, TEXT), KLL)], "github")
        assert shown.startswith(f"::error file={wanted},line=1")


def test_junit_format() -> None:
    run = LintRun(files=(Checked("good.kc.yaml"),))
    root = xml.fromstring(render([ONE, TWO, NOWHERE], "junit", run=run))
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


def test_junit_omits_forbidden_characters() -> None:
    hostile = Diagnostic(ANCHOR, "a\x00b\x1bc <&> ]]>", SOURCE, KLL)
    root = xml.fromstring(render([hostile], "junit"))
    failure = next(root.iter("failure"))
    assert "<&> ]]>" in failure.attrib["message"]
    assert "\x00" not in failure.attrib["message"]


def test_empty_results_give_a_document() -> None:
    assert render([], "github") == ""
    assert json.loads(render([], "sarif"))["runs"][0]["results"] == []
    run = LintRun(files=(Checked("a"),))
    assert xml.fromstring(render([], "junit", run=run)).attrib["failures"] == "0"
