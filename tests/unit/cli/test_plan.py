"""`kcdsl plan`: what is needed, what there is, prior traces, looks, and every way to go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir.canonical import digest
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit, Timing
from kcdsl_backends.empirical.table.trace import trace_bytes
from kcdsl_backends.requests import Request
from tests.support.configurations import DECODER_TEXT
from tests.support.small_models import PROMPTS, write_contract, write_model

CONTRACT = """\
kcdsl: 1
contract: planned
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, tokenizer: bytes}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: rows.jsonl
slices:
  all: {}
  long: {where: length > 20}
  none: {where: length > 9999}
clauses:
%s
"""
CLAUSES = {
    "P99": "{require: p99(kl) <= 1e-3, slices: [all, long], evidence: sample, level: L2}",
    "MAX": "{require: max(kl) <= 1e-3, evidence: sample, level: L3}",
    "SOFT": "{require: max(kl) <= 1e-3, budget: 5% of requests, evidence: sample, level: L2}",
    "WINDOWS": "{require: p95(kl) <= 1e-3, budget: 10% of windows, evidence: sample, level: L2}",
    "MEAN": "{require: mean(kl) <= 1e-3, evidence: sample, level: L1}",
    "LATENCY": "{require: p95(latency) <= 2 s, level: L1}",
    "CENSUS": "{require: p99(tv) <= 1e-3, slices: [all, none], level: L1}",
    "TRACE": "{require: 'has(trace, [rng_seed])', level: L1}",
    "GAP": "{require: ece_gap <= 1%, evidence: sample, level: L1}",
    "NOISY": "{require: mean(k3) <= 1e-3, evidence: census, level: L1}",
    "FLIPS": "{require: rate(top1_flip) <= 1%, evidence: sample, level: L1}",
    "TOP1": "{require: mean(top1_overlap) >= 99%, evidence: sample, level: L1}",
    "FAILED": "{require: failure_rate <= 5%, evidence: sample, level: L1}",
    "SAME": "{require: determinism >= 90%, evidence: sample, level: L1}",
    "SPEED": "{require: throughput >= 9 tok/s, budget: 10% of windows, level: L1}",
    "RATE": "{require: throughput >= 9 tok/s, level: L1}",
    "PEAK": "{require: peak_memory <= 9 GiB, budget: 10% of windows, level: L1}",
    "EXACT": "{require: mean(kl) == 0, evidence: sample, level: L1}",
    "SIZE": "{require: abs(mean(log_ratio)) <= 1e-2, level: L1}",
    "PROVED": "{require: p99(kl) <= 1e-3, evidence: proof, level: L1}",
}
USUAL = (
    *("P99", "MAX", "SOFT", "WINDOWS", "MEAN", "LATENCY", "CENSUS", "TRACE", "GAP", "NOISY"),
    "PROVED",
)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a contract and n rows, every third of them long."""

    def contract(n: int | None, *names: str) -> Path:
        chosen = {name: CLAUSES[name] for name in names or USUAL}
        lines = "\n".join(f"  {name}: {text}" for name, text in chosen.items())
        (tmp_path / "contract.yaml").write_text(CONTRACT % lines)
        (tmp_path / "model.safetensors").write_bytes(b"")
        (tmp_path / "config.json").write_text(DECODER_TEXT)
        if n is not None:
            rows = ({"id": str(i), "text": f"{i:0{30 if i % 3 == 0 else 10}}"} for i in range(n))
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return tmp_path

    return contract


@pytest.fixture
def planned(cli: Any, follows: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `kcdsl plan` and returns its rows by clause and slice."""

    def run(folder: Path, *options: str) -> dict[str, Any]:
        ran = cli("plan", "--format", "json", *options, cwd=folder)
        assert (ran.code, ran.stderr) == (0, "")
        document = json.loads(ran.stdout)
        follows(document)
        return {f"{row['clause']} {row['slice']}": row for row in document["rows"]} | {"": document}

    return run


def test_plan_has_a_row_per_clause_and_slice(write: Write, planned: Any) -> None:
    found = planned(write(300))
    states = {name: row["state"] for name, row in found.items() if name}
    assert states == {
        "P99 all": "enough", "P99 long": "too_few", "MAX all": "never", "SOFT all": "enough",
        "WINDOWS all": "too_few", "MEAN all": "unknown", "LATENCY all": "enough",
        "CENSUS all": "census", "CENSUS none": "too_few", "TRACE all": "census",
        "GAP all": "unknown", "NOISY all": "never",
    }  # fmt: skip
    p99 = found["P99 all"]
    assert (p99["have"], p99["allowed"], p99["unit"]) == (300, "1/100", "requests")
    assert (p99["without_any"], p99["at_half"], p99["with_power"]) == (299, 1182, 1941)
    assert p99["may_exceed"] == 0
    assert p99["shows"] == pytest.approx(1 - 0.05 ** (1 / 300))
    assert found["P99 long"]["have"] == 100
    assert found["SOFT all"]["may_exceed"] == 8
    windows = found["WINDOWS all"]
    assert (windows["have"], windows["without_any"], windows["unit"]) == (18, 29, "windows")
    assert found["MAX all"]["allowed"] == "0"
    assert found["MAX all"]["without_any"] is None
    assert "proof or a census" in found["MAX all"]["note"]
    latency = found["LATENCY all"]
    assert (latency["have"], latency["unit"], latency["without_any"]) == (300, "requests", 59)
    assert latency["note"] == "a request counts once, however often it is timed"
    assert found["TRACE all"]["unit"] == "records"
    assert list(found[""]["elsewhere"]) == ["PROVED"]


def test_requests_with_equal_prompts_are_one_unit(write: Write, planned: Any) -> None:
    folder = write(300)
    rows = ({"id": str(i), "text": f"{i % 7:010}"} for i in range(300))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = planned(folder)
    assert found["P99 all"]["have"] == 7
    assert found["P99 all"]["state"] == "too_few"
    assert {row["have"] for name, row in found.items() if name and row["state"] == "census"} == {
        300
    }


@pytest.mark.parametrize(
    ("options", "fewest"), [((), 299), (("--looks", "10"), 528), (("--anytime",), 377)]
)
def test_more_looks_need_more(write: Write, planned: Any, options: Any, fewest: int) -> None:
    found = planned(write(300, "P99", "MEAN"), *options)
    assert found["P99 all"]["without_any"] == fewest
    assert found["P99 all"]["state"] == ("enough" if fewest <= 300 else "too_few")
    assert found["MEAN all"]["state"] == ("never" if options == ("--anytime",) else "unknown")


def test_timed_clauses_have_no_plan_for_anytime_evaluation(write: Write, planned: Any) -> None:
    """Each evaluation repeats its runs, so limits at every look do not hold for them."""
    found = planned(write(300, "LATENCY", "FAILED", "SAME"), "--anytime")
    assert {row["state"] for name, row in found.items() if name} == {"never"}
    assert "plan the looks (--looks K)" in found["LATENCY all"]["note"]
    found = planned(write(300, "LATENCY", "FAILED", "SAME"), "--looks", "2")
    assert found["LATENCY all"]["without_any"] is not None
    assert found["FAILED all"]["state"] == "enough"


def test_planned_sample_size_is_exact_for_evaluate(write: Write, planned: Any) -> None:
    """One row fewer is too few; the allowed number of violations keeps a sampled verdict held."""
    from fractions import Fraction

    from kcdsl_backends.empirical.statistics import estimates, rates

    for n, state in ((298, "too_few"), (299, "enough"), (1000, "enough")):
        row = planned(write(n, "P99"))["P99 all"]
        assert row["state"] == state
        k = row["may_exceed"]
        if k is not None:
            rate = Fraction(1, 100)
            assert rates.shows_below(k, n, rate, estimates.ONE_LOOK)
            assert not rates.shows_below(k + 1, n, rate, estimates.ONE_LOOK)


def test_plan_works_without_data(write: Write, planned: Any) -> None:
    row = planned(write(None, "P99"))["P99 all"]
    assert (row["state"], row["have"], row["without_any"]) == ("unknown", None, 299)
    assert row["note"] == "the data is not here yet"


def test_printed_plan(cli: Any, write: Write) -> None:
    ran = cli("plan", cwd=write(300))
    assert ran.code == 0
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert "held if at most 0 of 300 requests are beyond" in ran.stdout
    assert "199 more requests, none of them beyond, would show it" in ran.stdout
    assert "5 of 12 rows can be shown with what there is" in ran.stdout
    assert "not measured: PROVED: demands proof" in ran.stdout
    looks = cli("plan", "--looks", "5", cwd=write(300)).stdout
    assert "95 % for each clause over 5 looks together" in looks


def test_plan_of_one_slice(write: Write, planned: Any, cli: Any) -> None:
    folder = write(300)
    assert [name for name in planned(folder, "--slice", "long") if name] == ["P99 long"]
    ran = cli("plan", "--slice", "lnog", cwd=folder)
    assert ran.code == 2
    assert "error[KC202]" in ran.stderr
    assert "long" in ran.stderr


def test_time_windows_count_requests_and_some_metrics_have_none(write: Write, planned: Any) -> None:
    found = planned(write(320, "SPEED", "PEAK"))
    assert (found["SPEED all"]["have"], found["SPEED all"]["without_any"]) == (20, 29)
    assert found["PEAK all"]["state"] == "never"
    assert found["PEAK all"]["note"] == "one window by itself has no peak_memory"


@pytest.mark.parametrize(("rows", "state"), [(19, "too_few"), (20, "unknown")])
def test_throughput_is_planned_like_a_mean(
    write: Write, planned: Any, rows: int, state: str
) -> None:
    found = planned(write(rows, "RATE"))["RATE all"]
    assert (found["state"], found["have"]) == (state, rows)


def test_shares_of_requests_are_planned_like_budgets(write: Write, planned: Any) -> None:
    """`failure_rate` and `determinism` are decided and planned by the binomial tail.

    A rate over tokens is a mean, of which only the best case can be counted.
    """
    found = planned(write(60, "FAILED", "SAME", "FLIPS", "TOP1", "EXACT"))
    failed, same = found["FAILED all"], found["SAME all"]
    assert (failed["allowed"], failed["without_any"], failed["state"]) == ("1/20", 59, "enough")
    assert (same["allowed"], same["without_any"], same["may_exceed"]) == ("1/10", 29, 1)
    for name in ("FLIPS all", "TOP1 all"):
        row = found[name]
        assert (row["allowed"], row["without_any"], row["at_half"]) == (None, 299, None)
        assert (row["state"], row["may_exceed"]) == ("unknown", None)
        assert "a prior trace determines how many" in row["note"]
    assert "equal to a number" in found["EXACT all"]["note"]


# --- prior traces --------------------------------------------------------------------------------


def record(
    i: int, value: float, failure: str | None = None, **values: Sequence[float]
) -> SamplingUnit:
    """Return the result of a request: ten tokens with one value of `kl`, or other values."""
    given = values or {"kl": [value] * 10}
    arrays = {name: np.array(each, dtype=np.float64) for name, each in given.items()}
    return SamplingUnit(f"rows.jsonl:{i}", 10, {} if failure else arrays, failure=failure)


def prior(folder: Path, units: Sequence[SamplingUnit]) -> tuple[str, str]:
    """Write the trace of an evaluation of these requests, each timed twice; return the options."""
    program = load_program(folder / "contract.yaml")
    keys = tuple(unit.key for unit in units)
    times = [
        SamplingUnit(key, 10, {"latency": np.array([seconds])})
        for seconds in (0.5, 0.25)
        for key in keys
    ]
    evidence = EvidenceTable(
        program=program,
        requests=tuple(Request(key, key, (i, 2), {}, 1) for i, key in enumerate(keys)),
        runs={unit.key: RequestRun(unit, 0, {}, 0) for unit in units},
        slices={"all": keys},
        measured=frozenset(name for unit in units for name in unit.values),
        encoder=False,
        contract={
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program)}",
        },
        model={},
        kernels={side: {"digest": "sha256:0"} for side in ("train", "infer")},
        data=(),
        environment={},
        timing=Timing(tuple(times)),
    )
    (folder / "prior.parquet").write_bytes(trace_bytes(evidence, {}))
    return "--prior", "prior.parquet"


def test_trace_is_accepted_as_prior(write: Write, planned: Any) -> None:
    folder = write(300, "P99", "SOFT", "MEAN", "LATENCY", "WINDOWS")
    values = [2e-3 if i < 3 else 1e-4 * (1 + i % 7) for i in range(200)]
    found = planned(folder, *prior(folder, [record(i, v) for i, v in enumerate(values)]))
    soft = found["SOFT all"]["prior"]
    assert (soft["k"], soft["n"]) == (3, 200)
    assert soft["needed"] > found["SOFT all"]["without_any"]
    assert soft["threshold"] == sorted(values)[200 - 5 - 1]
    assert found["P99 all"]["prior"]["threshold"] is None
    assert found["P99 all"]["prior"]["needed"] is None
    latency = found["LATENCY all"]["prior"]  # each request was timed twice
    assert (latency["n"], latency["k"], latency["threshold"]) == (200, 0, 0.5)
    assert found["WINDOWS all"]["prior"] is None
    mean = found["MEAN all"]
    assert mean["prior"]["value"] == pytest.approx(sum(values) / 200)
    assert mean["prior"]["needed"] >= 20
    assert mean["state"] == "enough"
    assert found["P99 long"]["prior"] is None


@pytest.mark.full
def test_trace_written_by_evaluate_is_accepted_as_prior(
    tmp_path: Path, cli: Any, planned: Any
) -> None:
    write_model(tmp_path)
    write_contract(tmp_path, "p90(kl) <= 1e-3", "mean(kl) <= 1e-3", evidence="sample")
    ran = cli("evaluate", "--bound-seconds", "0", "--seconds", "0.1", cwd=tmp_path)
    assert ran.code == 3, ran.stderr
    found = planned(tmp_path, "--prior", "out/trace.parquet")
    assert found["N-0 all"]["prior"]["n"] == len(PROMPTS)
    log = cli("plan", "--prior", "out/trace.jsonl", cwd=tmp_path)
    assert (log.code, "error[KC630]" in log.stderr) == (2, True)
    damaged = bytearray((tmp_path / "out/trace.parquet").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    refused = cli("plan", "--prior", "damaged.parquet", cwd=tmp_path)
    assert refused.code == 2
    assert "error[KC631]" in refused.stderr


def test_prior_with_a_failed_request_gives_no_estimate(write: Write, planned: Any) -> None:
    folder = write(300, "P99", "MEAN")
    units = [record(0, 1.0), record(1, 1.0, failure="out of memory")]
    found = planned(folder, *prior(folder, units))
    assert found["P99 all"]["prior"] is None
    assert found["MEAN all"]["prior"] is None


def test_mean_beyond_its_threshold_has_no_plan(write: Write, planned: Any) -> None:
    folder = write(300, "MEAN")
    units = [record(i, 1.0 + i % 2) for i in range(30)]
    row = planned(folder, *prior(folder, units))["MEAN all"]
    assert (row["state"], row["prior"]["needed"]) == ("unknown", None)
    assert "not within the threshold" in row["note"]


def flipped(i: int, flips: int) -> SamplingUnit:
    """Return the result of a request of 50 tokens, `flips` of them with another first token."""
    one = [float(at < flips) for at in range(50)]
    return record(i, 0.0, top1_flip=one, top1_overlap=[1.0 - flip for flip in one])


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [8, 15, 40])
def test_power_of_planned_samples_with_rare_flips(write: Write, planned: Any, every: int) -> None:
    """Requests drawn as in the prior trace, as many as it names, hold the clause in about 80 %:
    too few have no flips to resample, and such a sample shows nothing."""
    from kcdsl_backends.empirical.statistics.bootstrap import clustered_ratio

    flips = np.array([float(i % every == 0) for i in range(240)])
    folder = write(300, "FLIPS", "TOP1")
    found = planned(folder, *prior(folder, [flipped(i, int(n)) for i, n in enumerate(flips)]))
    needed = found["FLIPS all"]["prior"]["needed"]
    assert found["TOP1 all"]["prior"]["needed"] == needed
    generator, runs, held = np.random.default_rng(every), 120, 0
    for run in range(runs):
        drawn = flips[generator.integers(0, flips.size, needed)]
        limit = clustered_ratio(drawn, np.full(needed, 50.0), seed=run, bounds=(0.0, 1.0)).high
        held += limit is not None and limit <= 0.01
    assert 0.65 <= held / runs <= 0.95


def test_prior_without_flips_uses_the_bound_for_equal_values(write: Write, planned: Any) -> None:
    """1 - 0.05^(1/n) <= 1 % takes 299 requests; with an open range equal values show nothing."""
    folder = write(300, "FLIPS", "MEAN")
    same = [0.0] * 50
    units = [record(i, 0, top1_flip=same, kl=same) for i in range(40)]
    found = planned(folder, *prior(folder, units))
    assert found["FLIPS all"]["prior"]["needed"] == 299
    assert found["FLIPS all"]["state"] == "enough"
    assert found["MEAN all"]["prior"]["needed"] is None
    assert "shows nothing of others" in found["MEAN all"]["note"]


def test_failures_and_magnitudes_in_a_trace(write: Write, planned: Any) -> None:
    folder = write(300, "FAILED", "SIZE", "P99")
    rng = [(-1) ** i * 1e-2 + 1e-3 for i in range(100)]
    units = [record(i, 0, log_ratio=[v, v]) for i, v in enumerate(rng)]
    size = planned(folder, *prior(folder, units))["SIZE all"]
    assert size["prior"]["value"] == pytest.approx(1e-3)
    assert size["state"] == "enough"
    units.append(record(100, 0, failure="out of memory"))
    found = planned(folder, *prior(folder, units))
    assert (found["FAILED all"]["prior"]["k"], found["FAILED all"]["prior"]["n"]) == (1, 101)
    assert found["SIZE all"]["prior"] is None
    assert found["P99 all"]["note"] == "the prior trace has no data for it"


def test_infinite_mean_gives_no_estimate(write: Write, planned: Any) -> None:
    folder = write(300, "MEAN")
    units = [record(i, 0, kl=[1.7e308]) for i in range(30)]
    assert planned(folder, *prior(folder, units))["MEAN all"]["prior"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_invalid_values_give_no_estimate(write: Write, planned: Any, value: float) -> None:
    folder = write(300, "P99", "SOFT", "MEAN")
    units = [*(record(i, 1e-4) for i in range(30)), record(30, value)]
    found = planned(folder, *prior(folder, units))
    assert all(row["prior"] is None for name, row in found.items() if name)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "null", "NaN", "[" * 100_000, '{"schema": "kcdsl.report/3"}',
        '{"schema": "kcdsl.report/3", "clauses": [{}]}', '{"schema": "kcdsl.trace/1"}',
        '{"schema": "kcdsl.trace/1"', "\x00", '{"schema": "kcdsl.kernels/1"}', "kcdsl: 1",
    ],
)  # fmt: skip
def test_other_files_are_refused_as_priors(cli: Any, write: Write, text: str) -> None:
    folder = write(300, "P99")
    (folder / "prior.json").write_text(text)
    ran = cli("plan", "--prior", "prior.json", cwd=folder)
    assert ran.code == 2
    assert "error[KC630]" in ran.stderr
    assert ran.stdout == ""


# --- refused -------------------------------------------------------------------------------------


def test_damaged_row_is_refused_with_its_line(cli: Any, write: Write) -> None:
    folder = write(3, "P99")
    with (folder / "rows.jsonl").open("a") as stream:
        stream.write('{"id": 3\n')
    ran = cli("plan", cwd=folder)
    assert ran.code == 2
    assert "error[KC620]" in ran.stderr
    assert "rows.jsonl:4" in ran.stderr


def test_contract_without_empirical_clauses_is_refused(cli: Any, write: Write) -> None:
    ran = cli("plan", cwd=write(3, "PROVED"))
    assert ran.code == 2
    assert "error[KC623]" in ran.stderr


@pytest.mark.parametrize(
    "options",
    [("--power", "1"), ("--power", "0"), ("--looks", "0"), ("--looks", "2", "--anytime")],
)
def test_out_of_range_options_are_refused(cli: Any, write: Write, options: tuple[str, ...]) -> None:
    assert cli("plan", *options, cwd=write(3, "P99")).code == 2


def test_planning_imports_no_torch(cli_process: Any, write: Write) -> None:
    import subprocess
    import sys

    folder = write(30, "P99", "MEAN")
    code = (
        "import sys; from kcdsl.cli import main; code = main(['plan']); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0


def test_planner_and_backend_agree_on_kinds_of_metrics() -> None:
    """The planner reads the table of the language, the backend its own measures."""
    from kcdsl.metrics import MEASURES, METRICS
    from kcdsl_backends.empirical.questions.plan import NOISY

    for name, measure in MEASURES.items():
        assert bool(set(METRICS[name].needs) & NOISY) == measure.noisy, name
