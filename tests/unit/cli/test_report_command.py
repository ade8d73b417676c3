"""`kcdsl report` and the formats of `kcdsl evaluate`: only a held contract is a success."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from kcdsl_backends.empirical.decision.report import conclude
from tests.support.evidence import CLAUSES, clause, evidence

if TYPE_CHECKING:
    from tests.conftest import Cli

HELD = (clause("N-KL", "max", "kl", "10"),)
OPEN = (clause("N-KL", "quantile", "kl", "1/2", q="99/100", sample=True),)
EXITS = {"held": 0, "violated": 1, "invalid_evidence": 2, "inconclusive": 3}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return a report of each verdict, as text."""
    made: dict[str, dict[str, Any]] = {
        "held": {"clauses": HELD},
        "violated": {"clauses": CLAUSES},
        "invalid_evidence": {"clauses": HELD, "count": 0},
        "inconclusive": {"clauses": OPEN, "count": 5},
    }
    found = {name: conclude(evidence(**changes)).dumps() for name, changes in made.items()}
    assert all(json.loads(text)["verdict"] == name for name, text in found.items())
    return found


@pytest.fixture
def kinds(tmp_path: Path, texts: dict[str, str]) -> dict[str, Path]:
    """Return files with these reports."""
    found = {name: tmp_path / f"{name}.json" for name in texts}
    for name, path in found.items():
        path.write_text(texts[name], encoding="utf-8")
    return found


@pytest.mark.parametrize("verdict", EXITS)
def test_formats_of_every_verdict(cli: Cli, kinds: dict[str, Path], verdict: str) -> None:
    ran = {
        name: cli("report", kinds[verdict], "--format", name)
        for name in ("json", "html", "junit", "github", "sarif", "concise")
    }
    assert {r.code for r in ran.values()} == {EXITS[verdict]}
    assert {r.stderr for r in ran.values()} == {""}
    assert json.loads(ran["json"].stdout) == json.loads(kinds[verdict].read_text())
    suites = ElementTree.fromstring(ran["junit"].stdout)
    failed = int(suites.get("failures", "0")) + int(suites.get("errors", "0"))
    results = json.loads(ran["sarif"].stdout)["runs"][0]["results"]
    levels = {result["level"] for result in results} - {"note"}
    marks = set(re.findall(r"^::(\w+) ", ran["github"].stdout, re.MULTILINE)) - {"notice"}
    expected = {"held": set(), "inconclusive": {"warning"}}.get(verdict, {"error"})
    assert (failed > 0) is (verdict != "held")
    assert levels == marks == expected
    assert int(suites.get("skipped", "0")) == 0


def test_findings_are_positioned_at_their_clauses(
    cli: Cli, tmp_path: Path, kinds: dict[str, Path]
) -> None:
    contract = tmp_path / "contract.yaml"
    contract.write_text(
        "kcdsl: 1\ncontract: demo\nversion: 1.0.0\n"
        "model: {checkpoint: m.safetensors, architecture: llama}\n"
        "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n"
        "data: rows.jsonl\nslices: {all: {}, short: {}, long: {}}\nclauses:\n"
        "  N-OTHER: {require: max(kl) <= 1, slices: [all], level: L2}\n"
        "  N-KL: {require: p99(kl) <= 1e-3, slices: [all, short, long], level: L2}\n",
        encoding="utf-8",
    )
    ran = cli("report", kinds["violated"], "--format", "github", "--contract", contract)
    lines = [line for line in ran.stdout.splitlines() if "KC671" in line and "N-KL" in line]
    assert len(lines) == 3
    assert all("line=10," in line for line in lines)
    junit = cli("report", kinds["violated"], "--format", "junit", "--contract", contract)
    cases = {c.get("name"): c for c in ElementTree.fromstring(junit.stdout).iter("testcase")}
    assert cases["N-KL"].find("failure") is not None
    assert "N-OTHER" not in cases  # an undecided clause is not a passed test case


@pytest.mark.parametrize("verdict", EXITS)
def test_junit_without_the_contract_has_a_case_for_each_clause(
    cli: Cli, kinds: dict[str, Path], verdict: str
) -> None:
    ran = cli("report", kinds[verdict], "--format", "junit")
    cases = {c.get("name"): c for c in ElementTree.fromstring(ran.stdout).iter("testcase")}
    rows = json.loads(kinds[verdict].read_text())["clauses"]
    assert cases.keys() == {"kcdsl", *(row["clause"] for row in rows)}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {row["clause"] for row in rows if row["verdict"] != "held"}


def test_page_includes_the_attribution(cli: Cli, tmp_path: Path, kinds: dict[str, Path]) -> None:
    document = {"schema": "kcdsl.attribution/1", "metric": "kl", "statistic": "mean", "total": 1.0}
    source = {"name": "precision", "shapley": 1.0, "alone": 1.0, "can_explain": None}
    attribution = tmp_path / "attribution.json"
    attribution.write_text(json.dumps({**document, "sources": [source], "layers": []}))
    out = tmp_path / "page.html"
    ran = cli("report", kinds["held"], "--attribution", attribution, "-o", out)
    assert (ran.code, ran.stdout) == (0, "")
    text = out.read_text(encoding="utf-8")
    assert "Where mean kl comes from" in text
    assert "precision" in text


def test_malformed_attribution_is_named(cli: Cli, tmp_path: Path, kinds: dict[str, Path]) -> None:
    attribution = tmp_path / "attribution.json"
    attribution.write_text(
        json.dumps({"schema": "kcdsl.attribution/1", "sources": [{}], "layers": []})
    )
    ran = cli("report", kinds["held"], "--attribution", attribution)
    assert ran.code == 2
    assert f"it or {attribution}: " in ran.stderr


DAMAGE: dict[str, Any] = {
    "no JSON": lambda text: text[: len(text) // 2],
    "not a number": lambda text: text.replace('"exit": 0', '"exit": NaN'),
    "another schema": lambda text: text.replace("kcdsl.report/3", "kcdsl.report/9"),
    "a list": lambda text: "[]",
    "a verdict of its own": lambda text: text.replace(
        '"verdict": "held"', '"verdict": "violated"', 1
    ),
    "an exit of its own": lambda text: text.replace('"exit": 0', '"exit": 1'),
    "an unknown verdict": lambda text: text.replace('"verdict": "held"', '"verdict": "fine"'),
    "no clauses": lambda text: json.dumps({**json.loads(text), "clauses": []}),
    "clauses that are none": lambda text: json.dumps({**json.loads(text), "clauses": [1]}),
    "a part without its field": lambda text: text.replace('"hardware"', '"software"'),
    "a number beyond floats": lambda text: re.sub(
        r'("counts": \[\s*)[0-9]+', rf"\g<1>1{'0' * 400}", text
    ),
    "charts of another shape": lambda text: text.replace('"edges"', '"sides"'),
    "deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_report_is_refused_and_nothing_is_written(
    cli: Cli, tmp_path: Path, kinds: dict[str, Path], damage: str
) -> None:
    path = kinds["held"]
    sound = path.read_text(encoding="utf-8")
    path.write_text(DAMAGE[damage](sound), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != sound
    out = tmp_path / "page.html"
    ran = cli("report", path, "-o", out)
    assert ran.code == 2
    assert "error[KC674]" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not out.exists()


def test_missing_files_and_invalid_attributions_are_refused(
    cli: Cli, tmp_path: Path, kinds: dict[str, Path]
) -> None:
    ran = cli("report", tmp_path / "absent.json")
    assert (ran.code, "KC601" in ran.stderr) == (2, True)
    wrong = tmp_path / "wrong.json"
    for text in ("{", "{}", '{"schema": "kcdsl.attribution/1", "sources": [1], "layers": []}'):
        wrong.write_text(text)
        ran = cli("report", kinds["held"], "--attribution", wrong)
        assert (ran.code, "KC675" in ran.stderr, ran.stdout) == (2, True, "")
