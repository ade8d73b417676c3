"""`kcdsl compare`: a candidate against the incumbent, request by request."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import stats

from kcdsl.ir.obligations import Obligation, obligations_of
from kcdsl.ir.terms import Clause, Compare, Family, Level, Metric, Number, Statistic
from kcdsl.release.register import Register, Run
from kcdsl.verdict.model import Held, InvalidEvidence
from kcdsl.verdict.result import ClauseResult
from kcdsl.verdict.studies.comparison import OF_TIMED_RUNS, PairedRow, worse_text
from kcdsl_backends.empirical.decision.aligned import change_of, equally_timed, linear
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.questions import baselines, pairs
from kcdsl_backends.empirical.statistics import paired
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData
from kcdsl_certs.statement import Checkpoint, Contract, EvidenceFile, Kernel, Triple
from tests.support.commands import run_here
from tests.support.registers import TRUSTED, bundle, clock, predicate, recorded
from tests.support.small_models import DECODER, write_model

CONTRACT = """\
kcdsl: 1
contract: pair
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: COMPUTE}}
data: prompts.jsonl
slices: {all: {}, some: {where: length >= 6}}
clauses:
  KL: {require: p95(kl) <= LIMIT, slices: [all, some], level: L2}
  MEAN: {require: mean(kl) <= 1, slices: [all], level: L1}
  BOTH: {require: p99(kl) <= 2 * p50(kl) + 1, slices: [all], level: L1}
  FAILED: {require: failure_rate <= 0.5, slices: [all], level: L3}
"""
_ROW = ClauseResult(
    "A", "numerical", "L1", "all", "mean(kl) <= 1", "mean(kl)", "nat", "<=", 1.0, None, None, 12,
    "requests", 1.0, Held(), "census", 0.95, obligation="A/all/0",
)  # fmt: skip
SCHEMA = jsonschema.Draft202012Validator(
    json.loads(Path("kcdsl/verdict/compare.schema.json").read_text())
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluate one contract with kernels of two precisions, and with another threshold."""
    folder = tmp_path_factory.mktemp("compare")
    rows = [{"id": f"p{i}", "text": f"prompt {i} {'x' * (i % 7)}"} for i in range(12)]
    write_model(folder, config=DECODER, rows=rows)
    found = {}
    runs = (("fine", "float32", "1e-7"), ("coarse", "bfloat16", "1e-7"), ("other", "float32", "1"))
    for name, compute, limit in runs:
        text = CONTRACT.replace("COMPUTE", compute).replace("LIMIT", limit)
        (folder / "contract.yaml").write_text(text)
        ran = run_here("evaluate", "--bound-seconds", "0", "-o", name, cwd=folder)
        assert ran.code in (0, 1, 3), ran.stderr
        found[name] = folder / name / "trace.parquet"
    return found


def _compare(cli: Any, one: Path, two: Path, code: int, *more: Any) -> dict[str, Any]:
    ran = cli("compare", one, two, "--format", "json", *more)
    assert ran.code == code, ran.stdout + ran.stderr
    document = json.loads(ran.stdout)
    SCHEMA.validate(document)
    assert isinstance(document, dict)
    return document


@pytest.mark.full
def test_coarser_kernel_is_reported_with_its_worse_slices(
    cli: Any, traces: dict[str, Path]
) -> None:
    document = _compare(cli, traces["fine"], traces["coarse"], 1)
    rows = {row["obligation"]: row for row in document["rows"]}
    for name in ("KL/all/0", "KL/some/0", "MEAN/all/0"):
        assert rows[name]["change"] == "regressed", rows[name]
    assert rows["KL/all/0"]["worse"] == rows["KL/all/0"]["n"] == 12
    assert rows["KL/all/0"]["delta"] == -1.0
    assert rows["MEAN/all/0"]["candidate"] > rows["MEAN/all/0"]["incumbent"]
    assert rows["MEAN/all/0"]["low"] > 0
    assert rows["BOTH/all/0"]["change"] == "not_compared"
    assert rows["FAILED/all/0"]["change"] == "unchanged"
    assert any("infer kernel" in name and "compute" in name for name in document["changed"])
    shown = cli("compare", traces["fine"], traces["coarse"])
    assert "worse: KL all (L2): 12 of 12 requests kept the threshold before" in shown.stdout


@pytest.mark.full
def test_finer_kernel_is_better_and_an_equal_one_unchanged(
    cli: Any, traces: dict[str, Path]
) -> None:
    better = _compare(cli, traces["coarse"], traces["fine"], 0)
    assert {r["change"] for r in better["rows"] if r["clause"] in ("KL", "MEAN")} == {"improved"}
    same = _compare(cli, traces["fine"], traces["fine"], 0)
    assert {row["change"] for row in same["rows"]} == {"unchanged", "not_compared"}
    assert same["changed"] == []
    assert "nothing was shown to be worse" in cli("compare", traces["fine"], traces["fine"]).stdout


def test_other_threshold_is_reported_as_a_difference(cli: Any, traces: dict[str, Path]) -> None:
    document = _compare(cli, traces["other"], traces["fine"], 0)
    rows = [row for row in document["rows"] if row["clause"] == "KL"]
    assert {row["change"] for row in rows} == {"not_compared"}
    assert all("asks something else" in row["reason"] for row in rows)
    assert "clauses, slices or constants of the contract" in document["changed"]


@pytest.mark.full
def test_other_requests_cannot_be_compared(cli: Any, traces: dict[str, Path]) -> None:
    folder = traces["fine"].parents[1]
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "fewer.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    text = CONTRACT.replace("COMPUTE", "float32").replace("LIMIT", "1").replace("prompts", "fewer")
    (folder / "contract.yaml").write_text(text)
    assert run_here("evaluate", "--bound-seconds", "0", "-o", "fewer", cwd=folder).code in (0, 1, 3)
    ran = cli("compare", traces["fine"], folder / "fewer" / "trace.parquet")
    assert ran.code == 2
    assert "error[KC632]" in ran.stderr
    assert cli("compare", traces["fine"], folder / "config.json").code == 2


def test_pass_rates_are_shown_with_confidence_limits(cli: Any, traces: dict[str, Path]) -> None:
    document = _compare(cli, traces["fine"], traces["coarse"], 1)
    row = next(r for r in document["rows"] if r["obligation"] == "KL/all/0")
    before, after = row["rates"]
    assert (before["kept"], before["n"], before["rate"]) == (12, 12, 1.0)
    assert (after["kept"], after["rate"]) == (0, 0.0)
    limits = stats.binomtest(12, 12, alternative="greater").proportion_ci(0.95, method="exact")
    assert before["low"] == pytest.approx(limits.low, rel=1e-6)
    assert before["high"] == 1.0


def test_other_metrics_are_compared_without_a_verdict(cli: Any, traces: dict[str, Path]) -> None:
    document = _compare(cli, traces["fine"], traces["coarse"], 1)
    found = {(m["metric"], m["slice"]): m for m in document["measures"]}
    top = found["top1_overlap", "all"]
    assert (top["kind"], top["n"], top["better"]) == ("quality", 12, "higher")
    assert top["low"] <= top["delta"] <= top["high"]
    assert top["delta"] == pytest.approx(top["candidate"] - top["incumbent"])


# --- earlier runs and reference builds ------------------------------------------------------------


def report(folder: Path, source: Path, name: str, change: Any = lambda document: None) -> Path:
    """Write a changed copy of the report beside a trace."""
    document = json.loads(source.with_name("report.json").read_text())
    document["notes"] = [*document["notes"], name]
    change(document)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def value_of(number: float) -> Any:
    """Return a change that sets the value of every row of KL and MEAN, and removes other values."""

    def change(document: dict[str, Any]) -> None:
        for row in document["clauses"]:
            known = number if row["clause"] in ("KL", "MEAN") else None
            row["value"] = row["low"] = row["high"] = known

    return change


def options(name: str, files: list[Path]) -> list[Any]:
    return [word for file in files for word in (name, file)]


@pytest.mark.full
def test_band_needs_runs_and_marks_the_harmful_side(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    fine, coarse = traces["fine"], traces["coarse"]
    values = [1e-13 * (1 + i / 100) for i in range(8)]
    files = [report(tmp_path, fine, f"run{i}", value_of(v)) for i, v in enumerate(values)]
    few = _compare(cli, coarse, coarse, 0, *options("--history", files[:7]))
    assert {row["band"]["state"] for row in few["rows"]} == {"inactive"}
    assert few["history"] == 7
    document = _compare(cli, coarse, coarse, 1, *options("--history", files))
    row = next(r for r in document["rows"] if r["obligation"] == "MEAN/all/0")
    band = row["band"]
    assert (band["runs"], band["state"], band["harmful"]) == (8, "above", True)
    active = [r for r in document["rows"] if r["band"]["state"] != "inactive"]
    half = float(stats.t.ppf(1 - 0.025 / len(active), 7)) * np.std(values, ddof=1)
    half *= np.sqrt(9 / 8)
    assert band["high"] == pytest.approx(np.mean(values) + half)
    assert band["low"] == pytest.approx(np.mean(values) - half)
    shown = cli("compare", coarse, coarse, *options("--history", files))
    assert "beyond its band: MEAN all" in shown.stdout
    high = [report(tmp_path, fine, f"high{i}", value_of(1.0 + v)) for i, v in enumerate(values)]
    good = _compare(cli, coarse, coarse, 0, *options("--history", high))
    row = next(r for r in good["rows"] if r["obligation"] == "MEAN/all/0")
    assert (row["band"]["state"], row["band"]["harmful"]) == ("below", False)


def test_incomparable_and_untrusted_runs_are_ignored(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    fine, coarse = traces["fine"], traces["coarse"]

    def other_data(document: dict[str, Any]) -> None:
        document["data"][0]["sha256"] = "0" * 64

    files = {
        "good": report(tmp_path, fine, "good"),
        "other": report(tmp_path, fine, "other", other_data),
        "bad": report(tmp_path, fine, "bad"),
        "own": coarse.with_name("report.json"),
    }
    copy = tmp_path / "copy.json"
    copy.write_bytes(files["good"].read_bytes())
    named = [*files.values(), copy]
    document = _compare(
        cli, coarse, coarse, 0, *options("--history", named), "--untrusted", files["bad"]
    )
    assert document["history"] == 1
    why = {Path(name).stem: reason for name, reason in document["unused"].items()}
    assert why["other"] == "it is about other data"
    assert why["bad"] == "named by --untrusted"
    assert why["report"] == why["copy"]
    assert "of one named before" in why["copy"]


def test_runs_marked_untrusted_in_a_register_are_ignored(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    """Also as a copy in other bytes, and on another host.

    A report that a certificate names counts, and so does one about other weights, another contract
    or another kernel.
    """

    def host(document: dict[str, Any]) -> None:
        for kernel in document["kernels"].values():
            kernel["fingerprint"]["hardware"]["host"] = {"processor": "another"}

    def weights(document: dict[str, Any]) -> None:
        document["model"]["sha256"] = "0" * 64

    def contract(document: dict[str, Any]) -> None:
        document["contract"]["digest"] = f"sha256:{'0' * 64}"

    def kernel(document: dict[str, Any]) -> None:
        document["kernels"]["infer"]["fingerprint"]["run"] = "another"

    fine = traces["fine"]
    names = ("marked", "copy", "signed", "revoked")
    files = {name: report(tmp_path, fine, name) for name in names}
    for change in (host, weights, contract, kernel):
        files[change.__name__] = report(tmp_path, fine, change.__name__, change)
    about = triple_of(json.loads(files["marked"].read_text()))
    place = tmp_path / "register.db"

    def compared(named: dict[str, Path]) -> dict[str, str]:
        more = (*options("--history", [*named.values()]), "--register", str(place))
        document = _compare(cli, fine, fine, 0, *more)
        assert document["history"] == len(named) - len(document["unused"])
        return {Path(name).stem: why for name, why in document["unused"].items()}

    def digest(name: str) -> str:
        return hashlib.sha256(files[name].read_bytes()).hexdigest()

    with Register.open(place, create=True, clock=clock) as register:
        for sequence, name in enumerate(("signed", "revoked"), 1):
            evidence = (EvidenceFile("report", "report.json", digest(name)),)
            body = replace(predicate(about, sequence=sequence), evidence=evidence)
            signed = recorded(register, bundle(body), TRUSTED)
        register.revoke(signed.identity, "the key was lost")
        run = register.record_run(Run("evaluate", about.digest, "offline-ci", digest("marked")))
        assert compared(files) == {}
        register.mark_run(run.identity, trusted=False, reason="the machine was hot")
    why = compared(files)
    assert why.keys() == {"marked", "copy", "revoked", "host"}
    assert why["marked"] == "the register does not trust it: the machine was hot"
    for name in ("copy", "revoked", "host"):
        assert (
            why[name] == f"no certificate names it, and it may be of another run: {why['marked']}"
        )
    floating = report(tmp_path, fine, "floating", lambda d: d["kernels"].update(train={"run": 0.5}))
    ran = cli("compare", fine, fine, "--history", floating, "--register", str(place))
    assert (ran.code, "error[KC674]" in ran.stderr) == (2, True), ran.stderr


def triple_of(document: dict[str, Any]) -> Triple:
    """Return the triple of a report."""
    weights, named = document["model"]["sha256"], document["contract"]
    root = hashlib.sha256(bytes.fromhex(weights)).hexdigest()
    train, infer = (
        Kernel("torch.eager", document["kernels"][role]["fingerprint"])
        for role in ("train", "infer")
    )
    digest = named["digest"].removeprefix("sha256:")
    contract = Contract(named["name"], named["version"], digest)
    return Triple(Checkpoint("model.safetensors", weights, root), train, infer, contract)


def test_times_of_other_machines_are_not_in_a_band() -> None:
    row = replace(_ROW, family="runtime")
    here = {"kernels": {"infer": {"fingerprint": {"hardware": {"processor": "a"}}}}}
    there = {"kernels": {"infer": {"fingerprint": {"hardware": {"processor": "b"}}}}}
    clause = {"obligation": row.obligation, "requirement": row.requirement, "value": 1.0}
    documents = [{**where, "clauses": [clause]} for where in (here, there) for _ in range(8)]
    (band,) = baselines.bands([row], here, documents, 0.05).values()
    assert band.runs == 8
    numbers = [float("nan"), None, True, "1", float("inf")]
    documents += [{**here, "clauses": [{**clause, "value": v}]} for v in numbers]
    documents += [{**here, "clauses": [{**clause, "verdict": "invalid_evidence"}]}]
    documents += [{**here, "clauses": [{**clause, "requirement": "other"}]}]
    (band,) = baselines.bands([row], here, documents, 0.05).values()
    assert (band.runs, band.low, band.high, band.state) == (8, 1.0, 1.0, "inside")
    (other,) = baselines.bands([replace(row, value=1.0000001)], here, documents, 0.05).values()
    assert (other.state, other.harmful) == ("above", True)


def test_threshold_is_at_least_the_noise_floor_of_reference_builds(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    fine, coarse = traces["fine"], traces["coarse"]
    wide = report(tmp_path, fine, "wide", value_of(10.0))

    def other_model(document: dict[str, Any]) -> None:
        value_of(10.0)(document)
        document["model"]["sha256"] = "0" * 64

    elsewhere = report(tmp_path, fine, "elsewhere", other_model)
    document = _compare(cli, fine, coarse, 1, "--reference", elsewhere)
    assert "another checkpoint" in next(iter(document["unused"].values()))
    document = _compare(cli, fine, coarse, 0, "--reference", wide)
    rows = {row["obligation"]: row for row in document["rows"]}
    row = rows["KL/all/0"]
    assert row["floor"] == {"value": 10.0, "builds": row["floor"]["builds"], "above": True}
    assert (row["change"], row["worse"], row["compared_at"]) == ("unchanged", 0, 10.0)
    mean = rows["MEAN/all/0"]
    assert (mean["change"], mean["floor"]["above"]) == ("within_noise", True)
    shown = cli("compare", fine, coarse, "--reference", wide).stdout
    assert "below the noise floor: KL all asks <=" in " ".join(shown.split())
    stricter = sum(one["floor"] is not None and one["floor"]["above"] for one in rows.values())
    floored = sum(one["floor"] is not None for one in rows.values())
    words = f"noise floors: 1 reference report; {stricter} of {floored} thresholds are stricter"
    assert words in shown
    narrow = report(tmp_path, fine, "narrow", value_of(1e-30))
    document = _compare(cli, fine, coarse, 1, "--reference", narrow)
    rows = {row["obligation"]: row for row in document["rows"]}
    assert rows["KL/all/0"]["change"] == "regressed"
    assert rows["KL/all/0"]["compared_at"] == 1e-7


def test_report_at_another_temperature_is_no_reference(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    """Its values are of other laws: it would make a regression one within noise."""

    def warmer(document: dict[str, Any]) -> None:
        value_of(10.0)(document)
        assert document["environment"]["temperature"] == "1"
        document["environment"]["temperature"] = "2"

    other = report(tmp_path, traces["fine"], "other", warmer)
    document = _compare(cli, traces["fine"], traces["coarse"], 1, "--reference", other)
    assert document["unused"] == {str(other): "it is at another temperature"}


def test_report_of_an_edited_metric_is_no_reference(traces: dict[str, Path]) -> None:
    own, other = (json.loads(traces["fine"].with_name("report.json").read_text()) for _ in "ab")
    for document, digest in ((own, "0"), (other, "1")):
        document["environment"]["metrics"] = [{"name": "gap", "sha256": digest}]
    for history, references in (({"x": other}, {}), ({}, {"x": other})):
        found = baselines.usable(own, history, references, {})
        assert found.unused == {"x": "another file computed gap"}


def test_sampled_reference_uses_its_confidence_limit() -> None:
    base = {"obligation": "A/all/0", "metric": "mean(kl)", "op": "<=", "unit": "nat"}
    sampled = {**base, "value": 1.0, "high": 2.0, "evidence": "sample"}
    row = replace(_ROW, metric="mean(kl)", threshold=1.5)
    (floor,) = baselines.floors([row], {}, [{"clauses": [sampled]}]).values()
    assert (floor.value, floor.above) == (2.0, True)
    census = {**sampled, "evidence": "census"}
    (floor,) = baselines.floors([row], {}, [{"clauses": [census]}]).values()
    assert (floor.value, floor.above) == (1.0, False)
    invalid = [{**sampled, "verdict": "invalid_evidence"}, {**sampled, "value": None}]
    assert baselines.floors([row], {}, [{"clauses": invalid}]) == {}


@pytest.mark.parametrize("name", ["all", "all[tau: length > 9]"])
def test_redefined_slice_is_neither_earlier_run_nor_reference(name: str) -> None:
    """Another contract may select other rows of the same data under one name."""
    row = replace(_ROW, slice=name, threshold=1.5)
    own = {"slices": [{"slice": "all", "requests": 12, "tokens": 80}], "kernels": {}}
    other = {**own, "slices": [{"slice": "all", "requests": 12, "tokens": 79}]}
    base = {"obligation": row.obligation, "metric": row.metric, "op": "<=", "unit": "nat"}
    clause = {**base, "requirement": row.requirement, "value": 9.0, "evidence": "census"}
    for document, counts in ((own, True), (other, False)):
        earlier = [{**document, "clauses": [clause]}] * 8
        (band,) = baselines.bands([row], own, earlier, 0.05).values()
        assert band.runs == (8 if counts else 0)
        assert bool(baselines.floors([row], own, earlier)) is counts


def test_malformed_report_is_refused(cli: Any, traces: dict[str, Path], tmp_path: Path) -> None:
    def spoil(document: dict[str, Any]) -> None:
        document["data"] = ["x"]

    bad = report(tmp_path, traces["fine"], "bad", spoil)
    ran = cli("compare", traces["fine"], traces["fine"], "--history", bad)
    assert (ran.code, "error[KC674]" in ran.stderr) == (2, True)
    (tmp_path / "none.json").write_text("{}")
    assert cli("compare", *[traces["fine"]] * 2, "--history", tmp_path / "none.json").code == 2


@pytest.mark.full
def test_page_agrees_with_the_terminal_output(
    cli: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    wide = report(tmp_path, traces["fine"], "wide", value_of(10.0))
    ran = cli("compare", traces["fine"], traces["coarse"], "--html", page)
    assert (ran.code, ran.stdout) == (1, "")
    text = page.read_text()
    assert "The candidate is worse" in text
    assert "Worse: KL all (L2): 12 of 12 requests kept the threshold before" in text
    assert "Quality and reward" in text
    assert "<script" not in text
    cli("compare", traces["fine"], traces["coarse"], "--reference", wide, "--html", page)
    text = page.read_text()
    assert "Nothing was shown to be worse" in text
    assert "within the noise" in text


# --- statistics -----------------------------------------------------------------------------------


def test_shares_are_compared_by_mcnemars_exact_test() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        before, after = rng.random(60) < 0.8, rng.random(60) < 0.7
        found = paired.change_of_shares((before, after))
        worse, better = int((before & ~after).sum()), int((~before & after).sum())
        expected = stats.binomtest(worse, worse + better, alternative="greater").pvalue
        assert found.harm == pytest.approx(expected)
        assert found.delta == pytest.approx(after.mean() - before.mean())
        assert found.low <= found.delta <= found.high


def test_one_changed_unit_is_not_significant() -> None:
    kept = np.ones(1000, dtype=bool)
    one_lost = kept.copy()
    one_lost[0] = False
    assert paired.change_of_shares((kept, one_lost)).harm == 0.5
    assert paired.change_of_shares((kept, kept)).harm == 1.0


@pytest.mark.full
def test_equal_kernels_are_rarely_reported_as_different() -> None:
    """Twenty rows of two runs that differ by chance: a false alarm in at most 5 % of pairs."""
    rng, false = np.random.default_rng(1), 0
    for _ in range(300):
        chances = []
        for _ in range(20):
            before, after = rng.random(80) < 0.9, rng.random(80) < 0.9
            chances.append(paired.change_of_shares((before, after)).harm)
        false += bool(paired.rejected(chances))
    assert stats.binomtest(false, 300, 0.05, alternative="greater").pvalue > 1e-3


def test_paired_test_detects_a_change_of_the_mean() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(5, 200, 400).astype(float)
    level = rng.lognormal(0, 1, 400)
    sums = level * sizes
    moved = (level * 1.02 + 0.01 * rng.standard_normal(400)) * sizes
    (one, first), (two, second) = linear(sums, sizes), linear(moved, sizes)
    away = second - first
    spread = np.std(away, ddof=1) * np.sqrt(400)
    assert (two - one) / spread > 10
    apart = np.hypot(np.std(first), np.std(second)) * np.sqrt(400)
    assert (two - one) / apart < 1


def test_invalid_evidence_has_no_comparison(
    cli: Any, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled_report(evidence: Any) -> Any:
        report = conclude(evidence)
        spoiled = [replace(row, verdict=InvalidEvidence("stale")) for row in report.clauses[:1]]
        return replace(report, clauses=(*spoiled, *report.clauses[1:]))

    monkeypatch.setattr(pairs, "conclude", spoiled_report)
    document = _compare(cli, traces["fine"], traces["fine"], 3)
    (row,) = [row for row in document["rows"] if "invalid_evidence" in row["verdicts"]]
    assert (row["change"], row["reason"]) == ("not_compared", "invalid evidence: stale")


@pytest.mark.full
@pytest.mark.parametrize("runs", [8, 20])
def test_next_run_is_rarely_outside_its_band(runs: int) -> None:
    rng, outside = np.random.default_rng(runs), 0
    for _ in range(2000):
        *earlier, value = rng.normal(1, 0.1, runs + 1)
        low, high = baselines.prediction(earlier, 0.05)
        outside += not low <= value <= high
    assert 0.035 < outside / 2000 < 0.065


def test_timed_runs_of_one_request_count_as_one_request() -> None:
    def timed(seconds: float) -> SliceData:
        runs = [
            SamplingUnit(f"p{i}", 4, {"latency": np.array([seconds + i / 10 + r / 1000])})
            for r in range(5)
            for i in range(20)
        ]
        return SliceData("all", (), tuple(runs))

    term = Statistic("mean", Metric("latency"))
    _, found = change_of(term, (timed(1.0), timed(1.1)), upward=False)
    assert found.n == 20
    assert found.delta == pytest.approx(0.1)
    assert found.harm < 1e-5


def _of_latency(limit: str) -> Obligation:
    clause = Clause(
        "R", Family.RUNTIME, Compare("<=", Statistic("quantile", Metric("latency"), Fraction(1, 2)),
        Number(Fraction(limit))), Level.L1, ("all",),
    )  # fmt: skip
    (found,) = obligations_of(clause, "all")
    return found


def _timed_at(seconds: np.ndarray) -> SliceData:
    """Return a slice with the runs of requests [requests, rounds], round after round."""
    runs = (
        SamplingUnit(f"p{i}", 4, {"latency": np.array([seconds[i, turn]])})
        for turn in range(seconds.shape[1])
        for i in range(seconds.shape[0])
    )
    return SliceData("all", (), tuple(runs))


@pytest.mark.full
def test_timed_runs_of_a_request_are_not_separate_units() -> None:
    """Two processes in which each request is slightly faster or slower by chance.

    With each of the 20 runs as a unit, a third of the comparisons would report one process as
    "worse".
    """
    rng, worse, runs = np.random.default_rng(5), 0, 60
    for _ in range(runs):
        sides = [
            _timed_at(1 + rng.normal(0, 0.02, (20, 1)) + rng.normal(0, 0.01, (20, 20)))
            for _ in range(2)
        ]
        found = pairs._changed(_of_latency("1"), sides, None)
        assert found.n == 20
        worse += found.harm <= 0.05
    assert worse / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5


def test_more_frequent_slow_requests_are_worse() -> None:
    early, late = np.full((9, 300), 0.5), np.full((9, 300), 0.5)
    late[:8, :200] = 2.0
    late[8], early[8, :299] = 2.0, 2.0
    found = pairs._changed(_of_latency("1"), [_timed_at(early), _timed_at(late)], None)
    assert (found.n, found.worse, found.better) == (9, 9, 0)
    assert found.harm == 2.0**-9
    row = PairedRow(
        "R/all/0", "R", "all", "p50(latency) <= 1", "L1", "regressed", "s", OF_TIMED_RUNS,
        ("held", "held"), n=9, worse=9, better=0,
    )  # fmt: skip
    assert worse_text(row) == (
        "R all (L1): 9 of 9 requests keep the threshold in fewer timed runs than before, 0 in more"
    )


def test_runs_that_were_timed_more_often_count_by_their_first_rounds() -> None:
    """The number of rounds depends on the times; the first three do not."""
    few, many = np.full((9, 5), 0.5), np.full((9, 40), 0.5)
    few[:, 4], many[:, :2], many[:, 3:] = 9.0, 2.0, 9.0
    one, two = equally_timed([_timed_at(few), _timed_at(many)])
    assert len(one.runs) == len(two.runs) == 27
    found = pairs._changed(_of_latency("1"), [one, two], None)
    assert (found.n, found.worse, found.better) == (9, 9, 0)
    (mean, later), change = change_of(
        Statistic("mean", Metric("latency")), [one, two], upward=False
    )
    assert (mean, change.n) == (0.5, 9)
    assert later == pytest.approx((2 + 2 + 0.5) / 3)
    same = [_timed_at(many), _timed_at(many)]
    assert equally_timed(same) == same
    with pytest.raises(NotMeasurable, match="other requests"):
        change_of(
            Statistic("mean", Metric("latency")),
            equally_timed([_timed_at(few), _timed_at(np.full((8, 5), 0.5))]),
            upward=False,
        )


# --- what rewards and texts say -------------------------------------------------------------------

RECORDED = """\
kcdsl: 1
contract: rollouts
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels:
  train: {run: recorded, logprobs: {values: raw, temperature: 1}}
  infer: {run: recorded, logprobs: {values: raw, temperature: 1}}
data: batch.jsonl
slices: {all: {}}
clauses:
  REWARD: {require: reward_delta <= 0.1, slices: [all], level: L3}
  JSON: {require: json_parse_gap <= 0.1, slices: [all], level: L2}
"""


def _recorded(folder: Path, shift: float) -> Path:
    """Evaluate rollouts whose rewards differ by `shift` and noise; return the trace."""
    folder.mkdir()
    random, rows = np.random.default_rng(7), []
    noise = np.random.default_rng(8 if shift > 0 else 9).normal(0, 0.02, 40)
    for i in range(40):
        logs = (-1 - 0.1 * random.random(8)).tolist()
        reward = float(random.random())
        rows.append(
            {
                "id": str(i), "prompt": [1, 2, i], "tokens": list(range(8)), "mask": [1] * 8,
                "train_logs": logs, "infer_logs": [x + 1e-4 * (i % 3) for x in logs],
                "train_reward": reward, "infer_reward": reward + shift + noise[i],
                "train_text": "{}", "infer_text": "{}" if shift > 0 or i % 2 else "no",
            }
        )  # fmt: skip
    (folder / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "contract.yaml").write_text(RECORDED)
    ran = run_here("evaluate", cwd=folder)
    assert ran.code in (0, 1, 3), ran.stderr
    return folder / "out" / "trace.parquet"


@pytest.mark.full
def test_rewards_and_texts_are_compared_with_limits_and_sign(cli: Any, tmp_path: Path) -> None:
    """A candidate that earns 0.3 less is worse by its clause, where the gap of the incumbent had
    the other sign; the deltas of the means keep the sign."""
    one, two = _recorded(tmp_path / "one", 0.05), _recorded(tmp_path / "two", -0.25)
    document = _compare(cli, one, two, 1)
    rows = {row["clause"]: row for row in document["rows"]}
    assert {row["change"] for row in rows.values()} == {"regressed"}
    assert rows["REWARD"]["delta"] == pytest.approx(0.2, abs=0.02)
    found = {(m["kind"], m["metric"]): m for m in document["measures"]}
    reward, texts = found["quality", "reward_delta"], found["quality", "json_parse_gap"]
    assert (reward["n"], reward["better"]) == (40, "higher")
    assert reward["delta"] == pytest.approx(-0.3, abs=0.02)
    assert reward["low"] < reward["delta"] < reward["high"] < 0
    assert (texts["incumbent"], texts["candidate"]) == (0, -0.5)
    back = _compare(cli, two, one, 0)
    assert {row["change"] for row in back["rows"]} == {"improved"}
