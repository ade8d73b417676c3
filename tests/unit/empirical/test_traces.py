"""Traces: evidence is restored bit for bit, and modified files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import digest
from kcdsl.ir.kernels import LogProbabilities, Recording
from kcdsl.ir.terms import (
    Budget,
    EvidenceKind,
    Family,
    HasFields,
    KernelRef,
    Level,
    UserMetric,
)
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.metrics.user import UserFunction
from kcdsl_backends.empirical.table import trace
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit, Timing
from kcdsl_backends.empirical.table.rows import records
from kcdsl_backends.empirical.table.trace import (
    Trace,
    read_trace,
    stated_json,
    stated_program,
    trace_bytes,
)
from tests.support.evaluation import Evaluation, evaluate
from tests.support.evidence_strategies import evidences, programs, same

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def save(data: bytes) -> Path:
        (tmp_path / "trace.parquet").write_bytes(data)
        return tmp_path / "trace.parquet"

    return save


def evaluated(lab: Any, *clauses: Any, **changes: Any) -> Evaluation:
    """Return an evaluation whose contract has its own digest, as the backend returns it."""
    program = lab.program(*clauses)
    contract = {"name": "test", "version": "1.0.0", "digest": f"sha256:{digest(program)}"}
    found: Evaluation = lab.evaluate(*clauses, contract=contract, **changes)
    return found


def whole(lab: Any) -> tuple[Any, ...]:
    """Return clauses of every kind that an evaluation decides."""
    return (
        lab.clause(lab.statistic("quantile", "kl", "99/100"), limit="1/100", id="N-KL"),
        lab.clause(lab.statistic("mean", "kl"), id="S-KL", evidence=EvidenceKind.SAMPLE),
        lab.clause(lab.statistic("mean", "k3"), id="S-K3", family=Family.STATISTICAL),
        lab.clause(lab.statistic("aggregate", "ess_frac"), ">=", "1/2", id="S-ESS"),
        lab.clause(lab.statistic("aggregate", "ece_gap"), id="S-ECE"),
        lab.clause(
            lab.statistic("max", "tv"), limit="1/1000", id="B-TV", budget=("1/10", "requests")
        ),
        lab.clause(
            lab.statistic("quantile", "latency", "9/10"),
            limit="3600",
            id="R-TIME",
            family=Family.RUNTIME,
            budget=("1/10", "windows"),
        ),
        lab.clause(lab.statistic("aggregate", "determinism"), ">=", id="R-SAME"),
        lab.clause(
            HasFields(("rng_seed", "replay_signature")),
            id="O-TRACE",
            family=Family.OBSERVABILITY,
            level=Level.L3,
        ),
    )


def replayed(found: Evaluation, write: Write) -> Trace:
    """Return the trace of an evaluation after a round trip that reproduced its report."""
    trace = read_trace(write(trace_bytes(found.evidence, found.report.to_json())))
    assert conclude(trace.evidence).dumps() == found.report.dumps()
    assert json.dumps(trace.report) == json.dumps(found.report.to_json())
    return trace


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.full
@given(evidence=evidences())
def test_any_evidence_is_restored_bitwise(evidence: EvidenceTable) -> None:
    data = trace_bytes(evidence, {"any": "report"})
    assert trace.is_intact(data)
    found = trace._read(data, "trace", "seal")
    assert same(evidence, found.evidence)
    assert list(evidence.slices) == list(found.evidence.slices)
    assert found.report == {"any": "report"}
    assert trace_bytes(found.evidence, found.report) == data


@pytest.mark.full
@given(programs())
def test_program_keeps_its_wording_and_order(program: Any) -> None:
    found = stated_program(json.loads(json.dumps(stated_json(program))))
    assert same(program, found)
    assert [clause.text for clause in found.clauses] == [clause.text for clause in program.clauses]


def test_traces_store_every_field_of_evidence() -> None:
    """A field missing in traces would be lost silently."""
    held = {"program", "requests", "runs", "slices", "measured", "encoder", "timing"}
    held |= {"contract", "model", "kernels", "data", "environment", "prechecks", "crosschecks"}
    held |= {"certified", "bounding", "floor", "spoiled", "implied", "notes", "accepted"}
    held |= {"seed", "looks"}
    assert {field.name for field in fields(EvidenceTable)} == held
    assert {field.name for field in fields(SamplingUnit)} == {
        "key", "tokens", "values", "failure", "problems"
    }  # fmt: skip
    assert {field.name for field in fields(RequestRun)} == {"unit", "seed", "digests", "nonfinite"}
    assert {field.name for field in fields(Timing)} == {"runs", "repeats", "peak_memory"}


def test_user_metric_is_decided_again_from_a_trace(lab: Any, write: Write) -> None:
    """The trace contains its declaration and its values; its function is not called again."""
    metric = UserMetric(
        "my_gap", "gap.py:gap", Family.NUMERICAL, "token", "lower", "1", "1",
        ("max", "mean"), ("logits",), lower=Fraction(0),
    )  # fmt: skip

    def gap(train_logits: Any, infer_logits: Any) -> Any:
        return np.abs(train_logits - infer_logits).max(axis=1)

    names = ("train_logits", "infer_logits")
    clause = lab.clause(lab.statistic("max", "my_gap"), limit="1/100")
    program = replace(lab.program(clause), metrics=(metric,))
    contract = {"name": "test", "version": "1.0.0", "digest": f"sha256:{digest(program)}"}
    setting = lab.setting(clause, infer=lab.kernel(lab.drifting(0.05)), contract=contract)
    found = evaluate(
        replace(setting, program=program, user=(UserFunction(metric, gap, names, "0"),))
    )
    assert found.report.verdict == "violated"
    assert found.report.clauses[0].metric == "max(my_gap)"
    trace = replayed(found, write)
    assert trace.evidence.program.metrics == (metric,)


@pytest.mark.full
def test_row_groups_are_restored_in_order(
    lab: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluated(lab, *whole(lab), infer=lab.kernel(lab.drifting(0.01)))
    monkeypatch.setattr(trace, "_TOKENS", 13)
    data = trace_bytes(found.evidence, {})
    assert pq.ParquetFile(pa.BufferReader(data)).metadata.num_row_groups > 5
    assert same(found.evidence, read_trace(write(data)).evidence)


def test_values_of_another_type_are_a_defect(lab: Any) -> None:
    found = evaluated(lab, *whole(lab))
    key, run = next(iter(found.evidence.runs.items()))
    narrow: Any = {"kl": np.zeros(3, dtype=np.float32)}
    runs = {**found.evidence.runs, key: replace(run, unit=replace(run.unit, values=narrow))}
    with pytest.raises(TypeError, match="float32"):
        trace_bytes(replace(found.evidence, runs=runs), {})


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("looks", [1, 4, None], ids=["one look", "four looks", "any time"])
def test_every_kind_of_clause_is_decided_again_from_a_trace(
    lab: Any, write: Write, looks: int | None
) -> None:
    found = evaluated(lab, *whole(lab), infer=lab.kernel(lab.drifting(0.05)), looks=looks, seed=7)
    verdicts = {row.to_json()["verdict"] for row in found.report.clauses}
    assert {"held", "violated"} <= verdicts
    trace = replayed(found, write)
    assert same(found.evidence, trace.evidence)
    assert trace.evidence.timing.runs


def test_failures_and_non_finite_numbers_survive_a_trace(lab: Any, write: Write) -> None:
    def broken(tokens: tuple[int, ...]) -> Any:
        if sum(tokens) % 3 == 0:
            raise RuntimeError("out of memory")
        logits = lab.base(tokens)
        return logits * float("nan") if sum(tokens) % 3 == 1 else logits

    found = evaluated(lab, *whole(lab), infer=lab.kernel(broken))
    assert any(run.unit.failure == "out of memory" for run in found.evidence.runs.values())
    assert any(run.nonfinite for run in found.evidence.runs.values())
    replayed(found, write)


def test_encoder_is_decided_again_from_a_trace(lab: Any, write: Write) -> None:
    clause = lab.clause(lab.statistic("max", "hidden_l2"))
    found = evaluated(lab, clause, infer=lab.kernel(lab.drifting(0.05)), encoder=True)
    trace = replayed(found, write)
    assert trace.evidence.encoder


@pytest.mark.full
def test_rows_are_readable_as_parquet(lab: Any, write: Write) -> None:
    found = evaluated(lab, *whole(lab), infer=lab.kernel(lab.drifting(0.05)))
    path = write(trace_bytes(found.evidence, {}))
    rows = duckdb.execute(
        f"select request, rng_seed, replay_signature, list_max(metrics.kl) from '{path}' "
        "where kind = 'request' and list_contains(slices, 'few')"
    ).fetchall()
    runs = found.evidence.runs
    assert len(rows) == 3
    for key, seed, signature, worst in rows:
        assert (seed, signature) == (runs[key].seed, runs[key].replay_signature)
        assert worst == runs[key].unit.values["kl"].max()


def test_sampling_parameters_are_the_stated_ones(lab: Any, write: Write) -> None:
    """Servers and recordings draw tokens elsewhere: unstated parameters are not invented."""
    clause = lab.clause(HasFields(("sampling_params",)), id="O", family=Family.OBSERVABILITY)
    found = evaluated(lab, clause)
    plain = lab.program(clause)
    logs = LogProbabilities("processed", Fraction(4, 5), Fraction(9, 10), 40, Fraction(1, 20))
    whole_law = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    stated = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    for recording, wanted in (
        (None, whole_law),
        (Recording("logits", file="logits.safetensors"), whole_law),
        (Recording(logprobs=logs), stated),
        (Recording(), None),
    ):
        program = replace(plain, infer=KernelRef("recorded", (), recording=recording))
        contract = {**found.evidence.contract, "digest": f"sha256:{digest(program)}"}
        evidence = replace(found.evidence, program=program, contract=contract)
        assert all(record["sampling_params"] == wanted for record in records(evidence).values())
        report = conclude(evidence)
        assert report.verdict == ("violated" if wanted is None else "held")
        path = write(trace_bytes(evidence, report.to_json()))
        header = json.loads(pq.read_schema(path).metadata[b"kcdsl.trace"])
        assert header["sampling_params"] == wanted
        assert conclude(read_trace(path).evidence).dumps() == report.dumps()


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact() -> bytes:
    from tests.unit.empirical.conftest import Lab

    lab = Lab()
    found = evaluated(lab, lab.clause(lab.statistic("max", "kl")), rows=lab.requests(3))
    return trace_bytes(found.evidence, found.report.to_json())


@pytest.fixture(scope="module")
def timed() -> bytes:
    from tests.unit.empirical.conftest import Lab

    lab = Lab()
    found = evaluated(lab, *whole(lab))
    return trace_bytes(found.evidence, found.report.to_json())


def code_of(path: Path) -> str:
    with pytest.raises(Refusal) as refused:
        read_trace(path)
    (found,) = refused.value.diagnostics
    return found.code.id


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_is_refused(intact: bytes, write: Write, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(intact) - 1))
    other = data.draw(st.integers(1, 255))
    changed = intact[:at] + bytes([intact[at] ^ other]) + intact[at + 1 :]
    assert code_of(write(changed)) in ("KC630", "KC631")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_truncated_or_extended_trace_is_refused(
    intact: bytes, write: Write, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(intact) - 1))
    assert code_of(write(intact[:end])) in ("KC630", "KC631")
    assert code_of(write(intact + intact[:end] + b"\0")) in ("KC630", "KC631")


def test_seal_is_the_digest_of_the_file_with_a_zeroed_seal(intact: bytes) -> None:
    import hashlib

    seal = trace.seal_of(intact)
    assert seal is not None
    assert intact.count(seal.encode()) == 1
    blank = intact.replace(seal.encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == seal
    assert trace.sealed(blank) == intact


def rewritten(data: bytes, change: Callable[[pa.Table, dict[str, Any]], pa.Table]) -> bytes:
    """Return a trace with other columns or another header, with a new seal."""
    file = pq.ParquetFile(pa.BufferReader(data))
    header = json.loads(file.metadata.metadata[b"kcdsl.trace"])
    table = change(file.read().replace_schema_metadata(None), header)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {"kcdsl.trace": json.dumps(header), trace.SEAL: trace.UNSEALED}
        )
    return trace.sealed(sink.getvalue().to_pybytes())


def test_rewritten_trace_is_identical(intact: bytes, write: Write) -> None:
    before = read_trace(write(intact))
    after = read_trace(write(rewritten(intact, lambda table, header: table)))
    assert same(before.evidence, after.evidence)


def _without(name: str) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    return lambda table, header: table.drop_columns([name])


def _with(name: str, values: list[Any], kind: pa.DataType) -> Callable[..., pa.Table]:
    return lambda table, header: table.set_column(
        table.schema.get_field_index(name), name, pa.array(values, kind)
    )


def _header(**changes: Any) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    def change(table: pa.Table, header: dict[str, Any]) -> pa.Table:
        header.update(changes)
        return table

    return change


def _header_without(name: str) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    def change(table: pa.Table, header: dict[str, Any]) -> pa.Table:
        del header[name]
        return table

    return change


def _other_program(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["program"]["canonical"]["version"] = "2.0.0"
    return table


def _other_wording(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["program"]["clauses"][0]["require"]["right"]["value"] = "2/1"
    return table


def _other_contract(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["contract"]["digest"] = "sha256:" + "0" * 64
    return table


def _row_twice(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["rows"]["request"] += 1
    return pa.concat_tables([table, table.slice(0, 1)])


def _last_less(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    """Drop the last row, which no later row reveals."""
    return table.slice(0, table.num_rows - 1)


def _first_less(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["rows"]["request"] -= 1
    return table.slice(1)


def _timed_run_less(table: pa.Table, header: dict[str, Any]) -> pa.Table:
    header["rows"]["timed_run"] = 1
    return table


def _shorter(name: str) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    """Leave the last value of an array out, in every row that has one."""

    def change(table: pa.Table, header: dict[str, Any]) -> pa.Table:
        rows = table.column("metrics").to_pylist()
        for row in rows:
            row[name] = row[name][:-1] if row[name] else row[name]
        return _with("metrics", rows, table.schema.field("metrics").type)(table, header)

    return change


def _field(number: str) -> Callable[[pa.Table, dict[str, Any]], pa.Table]:
    text = json.dumps({"a": {"number": number}})

    def change(table: pa.Table, header: dict[str, Any]) -> pa.Table:
        fields = [text, *["{}"] * (table.num_rows - 1)]
        return _with("fields", fields, pa.string())(table, header)

    return change


DAMAGED = {
    "schema": (_header(schema="kcdsl.trace/4"), "its schema is kcdsl.trace/4, not kcdsl.trace/3"),
    "no seed": (_header_without("seed"), "KeyError: 'seed'"),
    "other program": (_other_program, "digest"),
    "other requirement": (_other_wording, "the program is another than its digest says"),
    "other contract": (_other_contract, "the program is another than the contract's digest says"),
    "no metrics": (_without("metrics"), "it has no column metrics"),
    "no failures": (_without("failure"), "it has no column failure"),
    "narrow seeds": (_with("rng_seed", [1, 2, 3], pa.int8()), "its column rng_seed holds int8"),
    "no key": (_with("request", ["a", None, "c"], pa.string()), "a row has no `request`"),
    "other signature": (
        _with("replay_signature", ["sha256:0"] * 3, pa.string()),
        "the replay signature does not belong to the digests",
    ),
    "other kind": (_with("kind", ["request", "x", "request"], pa.string()), "kind 'x'"),
    "a row twice": (_row_twice, "is given twice"),
    "a row more": (lambda t, header: pa.concat_tables([t, t.slice(0, 1)]), "has more than were"),
    "the last row less": (_last_less, "it lacks rows"),
    "a timed run less": (_timed_run_less, "it lacks rows"),
    "the first row less": (_first_less, "lacks a request"),
    "a field 1/0": (_field("1/0"), "ZeroDivisionError"),
    "a field of many digits": (_field("1e300000"), "ValueError: invalid literal"),
    "a negative seed": (_header(seed=-1), "its seed is -1"),
    "a seed of text": (_header(seed="0"), "its seed is '0'"),
    "no looks": (_header(looks=0), "its number of looks is 0"),
    "looks of text": (_header(looks="1"), "its number of looks is '1'"),
    "no kernels": (_header(kernels={}), "KeyError: 'train'"),
    "no environment": (_header(environment=None), "is no object"),
    "no reasons": (_header(spoiled={"all": 1}), "is no text"),
    "names of metrics": (_header(measured=[1]), "is no text"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_resealed_trace_must_be_consistent(intact: bytes, write: Write, damage: str) -> None:
    change, why = DAMAGED[damage]
    with pytest.raises(Refusal, match=why) as refused:
        read_trace(write(rewritten(intact, change)))
    assert [found.code.id for found in refused.value.diagnostics] == ["KC630"]
    assert refused.value.diagnostics[0].help


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("latency", "has no time, or several"),
        ("ece_infer", "ece_infer, ece_infer_right differ in their numbers of values"),
        ("margin", "margin, top1_overlap differ in their numbers of values"),
    ],
)
def test_arrays_of_a_resealed_trace_must_belong_together(
    timed: bytes, write: Write, name: str, why: str
) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        read_trace(write(rewritten(timed, _shorter(name))))
    assert [found.code.id for found in refused.value.diagnostics] == ["KC630"]


@pytest.mark.parametrize("equal", [0, 1, -1])
def test_repeats_of_a_resealed_trace_must_have_been_made(
    timed: bytes, write: Write, equal: int
) -> None:
    """0 of 0 equal repeats would count as deterministic."""

    def change(table: pa.Table, header: dict[str, Any]) -> pa.Table:
        known = table.column("repeats_made").to_pylist()
        for name, number in (("repeats_equal", equal), ("repeats_made", 0)):
            cells = [None if made is None else number for made in known]
            table = _with(name, cells, pa.int64())(table, header)
        return table

    with pytest.raises(Refusal, match=f"{equal} of 0 repeats of .* are equal") as refused:
        read_trace(write(rewritten(timed, change)))
    assert [found.code.id for found in refused.value.diagnostics] == ["KC630"]


def test_missing_trace_and_folder_are_refused_by_name(tmp_path: Path) -> None:
    assert code_of(tmp_path / "none.parquet") != "KC630"
    assert code_of(tmp_path) != "KC630"


def test_budget_is_counted_again_from_a_trace(lab: Any, write: Write) -> None:
    clause = lab.clause(lab.statistic("max", "kl"), limit="1/100000", budget=("1/4", "windows"))
    found = evaluated(lab, clause, infer=lab.kernel(lab.drifting(0.05)))
    trace = replayed(found, write)
    assert trace.evidence.program.clauses[0].budget == Budget(clause.budget.rate, "windows")
