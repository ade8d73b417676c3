"""Run checkpoints: killed evaluations resume, changed ones restart, bad records are dropped."""

from __future__ import annotations

import hmac
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.terms import Compare, Family, Metric, ModelRef, Number, Statistic, UserMetric
from kcdsl_backends.empirical.bounds.blocks import EACH
from kcdsl_backends.empirical.collection import collect
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.metrics.user import UserFunction
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.table import checkpoint as run_checkpoints
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun
from kcdsl_backends.requests import Request
from kcdsl_backends.secret import user_secret
from tests.support.evidence_strategies import same


class Killed(BaseException):
    """Ends an evaluation as a kill does: nothing catches it."""


@dataclass
class Counting:
    """A function of tokens that counts its calls, and ends the process at one of them."""

    function: Callable[[tuple[int, ...]], Any]
    last: int | None = None
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, tokens: tuple[int, ...]) -> Any:
        if self.last is not None and len(self.calls) >= self.last:
            raise Killed
        self.calls.append(tokens)
        return self.function(tokens)


@pytest.fixture
def setting(lab: Any) -> Callable[..., KernelContext]:
    def build(function: Any = None, **changes: Any) -> KernelContext:
        infer = lab.kernel(function or lab.drifting(0.02), name="infer")
        clauses = (
            lab.clause(lab.statistic("max", "kl"), id="N"),
            lab.clause(lab.statistic("mean", "k3"), id="S"),
            lab.clause(lab.statistic("aggregate", "ece_gap"), id="E"),
        )
        found: KernelContext = lab.setting(*clauses, infer=infer, certified=1.0, **changes)
        return found

    return build


def read(path: Path, **options: Any) -> RunCheckpoint:
    told: list[str] = []
    return RunCheckpoint(path, tell=told.append, **options)


def run(setting: KernelContext, path: Path, fresh: bool = False) -> tuple[EvidenceTable, list[str]]:
    """Return the evidence collected with a checkpoint, and the messages.

    Then the process ends, which releases the lock.
    """
    told: list[str] = []
    checkpoint = RunCheckpoint(path, fresh, told.append)
    try:
        return collect(setting, checkpoint=checkpoint), told
    finally:
        checkpoint.close()


def without_resumption(found: EvidenceTable, whole: EvidenceTable) -> EvidenceTable:
    """Return resumed evidence without the record of the resumption."""
    return replace(found, notes=whole.notes)


def plain(lab: Any, function: Any = None) -> Counting:
    return Counting(function or lab.drifting(0.02))


@pytest.mark.sample(2)
@pytest.mark.parametrize("calls", [0, 1, 7, 19, 20, 21, 30])
def test_killed_evaluation_resumes_and_equals_an_uninterrupted_one(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path, calls: int
) -> None:
    path = tmp_path / "evaluate.run-checkpoint"
    whole = collect(setting())
    killed = Counting(lab.drifting(0.02), calls)
    with pytest.raises(Killed):
        run(setting(killed), path)
    done = min(calls, 20)
    again = plain(lab)
    found, told = run(setting(again), path)
    assert told == ([f"resumed: {done} of 20 requests"] if done else [])
    # the first request runs again, to confirm equal bits
    tokens = [request.tokens for request in setting().slices["all"]]
    expected = (tokens[:1] if done else []) + tokens[done:]
    assert again.calls[: len(expected)] == expected
    assert same(whole.runs, found.runs)
    assert same(whole.crosschecks, found.crosschecks)
    assert conclude(whole).dumps() == conclude(without_resumption(found, whole)).dumps()
    said = f"resumed: {done} of 20 requests are of an earlier run, from its checkpoint"
    assert found.notes == (*whole.notes, *([said] if done else ()))


def test_nothing_runs_twice_and_cross_checks_are_kept(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    first, _ = run(setting(), path)
    ran: list[str] = []

    def counted(request: Request, *rest: Any) -> RequestRun:
        ran.append(request.key)
        return run_request(request, *rest)

    for module in ("kernels", "resume"):
        monkeypatch.setattr(f"kcdsl_backends.empirical.collection.{module}.run_request", counted)
    monkeypatch.setattr("kcdsl_backends.empirical.collection.kernels.compare_request", None)
    again, told = run(setting(), path)
    assert told == ["resumed: 20 of 20 requests"]
    assert ran == ["rows.jsonl:0"]
    assert same(first, without_resumption(again, first))


CHANGES: dict[str, Callable[[Any, KernelContext], KernelContext]] = {
    "contract": lambda lab, s: replace(s, program=replace(s.program, version="1.0.1")),
    "threshold": lambda lab, s: replace(
        s, program=lab.program(*(replace(c, level=c.level.L1) for c in s.program.clauses))
    ),
    "model": lambda lab, s: replace(s, model={**s.model, "sha256": "b" * 64}),
    "kernel": lambda lab, s: replace(s, digests={**s.digests, "infer": "9" * 64}),
    "tokens": lambda lab, s: replace(
        s,
        slices={
            "all": (replace(s.slices["all"][0], tokens=(1, 2, 3)), *s.slices["all"][1:]),
            "few": s.slices["few"][1:],
        },
    ),
    "seed": lambda lab, s: replace(s, seed=1),
    "device": lambda lab, s: replace(s, environment={**s.environment, "device": "cuda"}),
    "version": lambda lab, s: replace(s, environment={**s.environment, "torch": "3"}),
    "bounds": lambda lab, s: replace(s, certify=None),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_inputs_restart_the_evaluation(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path, change: str
) -> None:
    path = tmp_path / "j"
    run(setting(), path)
    counting = plain(lab)
    other = CHANGES[change](lab, setting(counting))
    found, told = run(other, path)
    assert told == []
    assert same(collect(other).runs, found.runs)
    assert len(counting.calls) >= 20


def test_irrelevant_changes_resume_the_evaluation(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    path = tmp_path / "j"
    run(setting(), path)
    _, told = run(setting(seconds=2.0, looks=3), path)
    assert told == ["resumed: 20 of 20 requests"]


def test_fresh_option_ignores_the_checkpoint(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    path = tmp_path / "j"
    run(setting(), path)
    counting = plain(lab)
    _, told = run(setting(counting), path, fresh=True)
    assert told == []
    assert len(counting.calls) >= 20
    assert run(setting(), path)[1] == ["resumed: 20 of 20 requests"]


def test_kernels_with_other_bits_restart_the_evaluation(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    """Their fingerprints are equal, but the values differ."""
    path = tmp_path / "j"
    run(setting(), path)
    other = setting(lab.drifting(0.02, seed=9))
    found, told = run(other, path)
    assert told == ["not resumed: the request rows.jsonl:0 gives other bits than it gave before"]
    assert same(collect(other).runs, found.runs)
    assert run(other, path)[1] == ["resumed: 20 of 20 requests"]


def _with_function(setting: KernelContext, function: Callable[..., Any]) -> KernelContext:
    metric = UserMetric(
        "gap", "own.py:gap", Family.NUMERICAL, "token", "lower", "1", "1", ("max",), ("tokens",)
    )
    user = UserFunction(metric, function, ("tokens",), "a" * 64)
    first = setting.program.clauses[0]
    require = Compare("<=", Statistic("max", Metric("gap")), Number(Fraction(9)))
    clauses = (replace(first, require=require), *setting.program.clauses[1:])
    program = replace(setting.program, clauses=clauses, metrics=(metric,))
    return replace(setting, program=program, user=(user,))


@pytest.mark.full
def test_user_function_with_other_values_restarts(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    """Its own file is unchanged but not its callee; the outputs of the kernels are equal."""
    path = tmp_path / "j"
    run(_with_function(setting(), lambda tokens: tokens * 1.0), path)
    other = _with_function(setting(), lambda tokens: tokens * 2.0)
    found, told = run(other, path)
    assert told == ["not resumed: the request rows.jsonl:0 gives other bits than it gave before"]
    assert same(collect(other).runs, found.runs)


@pytest.mark.full
def test_imports_of_a_user_function_belong_to_it(
    lab: Any,
    setting: Callable[..., KernelContext],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An edited helper restarts the evaluation, even if the first request has equal values."""
    folder = tmp_path / "package_of_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("FACTOR = 1.0\n")
    own = "from package_of_user import helper\n\ndef gap(tokens): return tokens * helper.FACTOR\n"
    (folder / "gaps.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    gap = importlib.import_module("package_of_user.gaps").gap
    path = tmp_path / "j"
    run(_with_function(setting(), gap), path)
    assert run(_with_function(setting(), gap), path)[1] == ["resumed: 20 of 20 requests"]
    (folder / "helper.py").write_text("FACTOR = 1.0  # or 2.0, after the first request\n")
    assert run(_with_function(setting(), gap), path)[1] == []
    model = ModelRef("model.safetensors", module="package_of_user.gaps:gap")
    modelled = replace(setting(), program=replace(setting().program, model=model))
    run(modelled, path)
    assert run(modelled, path)[1] == ["resumed: 20 of 20 requests"]
    (folder / "helper.py").write_text("FACTOR = 2.0\n")
    assert run(modelled, path)[1] == []


@pytest.mark.full
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_or_changed_record_is_dropped_with_all_after_it(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "whole"
    if not path.exists():
        run(setting(), path)
    content = path.read_bytes()
    frames = list(run_checkpoints._frames(content))
    assert len(frames) == 1 + 20 + EACH
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        damaged = content[:at]
    else:
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    kept = [frame for frame in frames if frame[3] <= at]
    (tmp_path / "torn").write_bytes(damaged)
    found, told = run(setting(), tmp_path / "torn")
    known = min(max(len(kept) - 1, 0), 20)
    said = [text for text in told if "not written here" not in text]
    assert said == ([f"resumed: {known} of 20 requests"] if known else [])
    assert (tmp_path / "torn").read_bytes().startswith(content[: kept[-1][3] if kept else 0])
    assert len(list(run_checkpoints._frames((tmp_path / "torn").read_bytes()))) == len(frames)
    assert same(found.slices, collect(setting()).slices)


def _forged(content: bytes, secret: bytes, edit: Callable[[list[Any]], list[Any]]) -> bytes:
    """Return a checkpoint of edited frames (kind, content), authenticated by a secret."""
    found, code = b"", b""
    for kind, data in edit([(kind, data) for kind, data, _, _ in run_checkpoints._frames(content)]):
        sum = hmac.new(secret, digestmod="sha256")
        for part in (code, kind, data):
            sum.update(len(part).to_bytes(8, "little") + part)
        code = sum.digest()
        found += run_checkpoints._HEAD.pack(run_checkpoints._MARK, kind, len(data), code) + data
    return found


def _as_the_first(frames: list[Any]) -> list[Any]:
    """Replace all frames by that of the first request, which was harmless."""
    (key, first, *_), runs = frames, [f for f in frames if f[0] == b"R"]
    table = pa.ipc.open_stream(first[1]).read_all()
    forged = [(b"R", _renamed(table, pa.ipc.open_stream(run).read_all())) for _, run in runs]
    return [key, *forged]


def _renamed(table: Any, of: Any) -> bytes:
    """Return the run of one request under the name of another."""
    for name in ("request", "id", "line"):
        if name in table.schema.names:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, of.column(name))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("known", [True, False])
def test_forged_record_is_never_used(
    lab: Any,
    setting: Callable[..., KernelContext],
    tmp_path: Path,
    known: bool,
) -> None:
    """Anyone who can write to the folder can write well-formed frames, but lacks the secret."""
    path = tmp_path / "j"
    whole, _ = run(setting(), path)
    secret = user_secret() if known else bytes(32)
    path.write_bytes(_forged(path.read_bytes(), secret, _as_the_first))
    found, told = run(setting(), path)
    if known:  # the forgery is valid: with the secret it would be accepted
        assert told == ["resumed: 20 of 20 requests"]
        assert not same(found.runs, whole.runs)
    else:
        assert told == [f"{path}: it was changed, or not written here; it is not used"]
        assert same(found.runs, whole.runs)
        assert found.notes == whole.notes


def test_moved_missing_and_foreign_records_are_rejected(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    path, other = tmp_path / "j", tmp_path / "k"
    run(setting(), path)
    run(setting(), other)
    mine, theirs = (
        [content[a:b] for a, b in pairwise([0, *(f[3] for f in run_checkpoints._frames(content))])]
        for content in (path.read_bytes(), other.read_bytes())
    )
    for frames, left in (
        ([mine[0], mine[2], mine[1], *mine[3:]], 0),
        ([*mine[:2], *mine[3:]], 1),
        ([*mine[:3], *theirs[3:]], 2),
        ([theirs[0], *mine[1:]], 0),
    ):
        path.write_bytes(b"".join(frames))
        _, told = run(setting(), path)
        said = [text for text in told if text.startswith("resumed")]
        assert said == ([f"resumed: {left} of 20 requests"] if left else [])
        assert any("not written here" in text for text in told)


def test_secret_is_readable_by_the_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = user_secret()
    path = tmp_path / "kcdsl" / "records.key"
    assert (user_secret(), len(made), path.read_bytes()) == (made, 32, made)
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    assert user_secret() != made, "whoever may read it can forge"
    path.chmod(0o600)
    path.write_bytes(b"short")
    assert user_secret() not in (made, b"short")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    assert len(user_secret()) == 32


def test_secret_is_not_read_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author of a contract there would know it."""
    place = tmp_path / ".local" / "state" / "kcdsl"
    place.mkdir(parents=True)
    (place / "records.key").write_bytes(b"k" * 32)
    (place / "records.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", ".")
    for state in ("", ".local/state"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert user_secret() != b"k" * 32


def test_run_checkpoint_in_use_is_not_touched(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    path = tmp_path / "j"
    told: list[str] = []
    first = RunCheckpoint(path, tell=told.append)
    first.open("key")
    before = path.read_bytes()
    found, said = run(setting(), path)
    assert said == [f"{path} is in use: this evaluation could not be resumed"]
    assert path.read_bytes() == before
    assert same(collect(setting()).runs, found.runs)
    first.remove()
    assert not path.exists()


def test_unwritable_file_is_refused_before_the_run(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    counting = plain(lab)
    with pytest.raises(Refusal) as refused:
        run(setting(counting), tmp_path / "file" / "j")
    assert refused.value.diagnostics[0].code.id == "KC602"
    (tmp_path / "folder").mkdir()
    with pytest.raises(Refusal):
        run(setting(counting), tmp_path / "folder")
    assert counting.calls == []


def test_removal_deletes_folders_created_for_it(tmp_path: Path) -> None:
    made = RunCheckpoint(tmp_path / "made" / "j")
    made.open("key")
    made.remove()
    made.remove()
    assert not (tmp_path / "made").exists()
    (tmp_path / "there").mkdir()
    found = RunCheckpoint(tmp_path / "there" / "j")
    found.open("key")
    found.remove()
    assert (tmp_path / "there").exists()


def test_failures_are_checkpointed(
    lab: Any, setting: Callable[..., KernelContext], tmp_path: Path
) -> None:
    def failing(tokens: tuple[int, ...]) -> Any:
        if tokens == setting().slices["all"][3].tokens:
            raise RuntimeError("out of memory")
        return lab.drifting(0.02)(tokens)

    path = tmp_path / "j"
    first, _ = run(setting(failing), path)
    again, _ = run(setting(failing), path)
    assert again.runs["rows.jsonl:3"].unit.failure == "out of memory"
    assert conclude(first).dumps() == conclude(without_resumption(again, first)).dumps()
