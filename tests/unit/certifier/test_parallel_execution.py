"""Goals decided in one process, several processes, and ray: identical outcomes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.certifier import decision, tasks, worker_pool
from kcdsl_backends.certifier.backend import BACKEND
from kcdsl_backends.certifier.bounds import bound_case
from kcdsl_backends.certifier.decision import _objection, verdict_of
from kcdsl_backends.certifier.tasks import RecheckResult, attack_case
from kcdsl_backends.certifier.worker import TaskResult, Unfinished
from kcdsl_backends.executors import Ray
from kcdsl_certs.recheck import recheck
from tests.support.small_models import write_contract, write_model

if TYPE_CHECKING:
    from tests.conftest import Cli

WANTED = (
    "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01",
    "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1e-9",
    "forall x in points(all): no_flip(head, x)",
    "forall x in ball(all, 1e-3): span(drift(mlp_0, x)) <= 10",
    "forall x in hull(all, 0.01): norm_2(drift(attn_0, x)) <= 1000",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, short prompts of two lengths, and a contract."""
    found = tmp_path_factory.mktemp("spread")
    write_model(found, prompts=("ab", "c", "de", "f"))
    write_contract(found, *WANTED)
    return found


def decided(folder: Path, execution: Execution, **more: Any) -> tuple[GoalOutcome, ...]:
    program = write_contract(folder, *WANTED)
    return BACKEND.decide(program, folder, goals(program), execution=execution, **more)


def same(found: Sequence[GoalOutcome]) -> list[GoalOutcome]:
    """Return outcomes without seconds and memory."""
    return [replace(one, seconds=0.0, peak_bytes=0) for one in found]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[GoalOutcome]:
    """Return the outcomes of this process alone."""
    return same(decided(folder, Execution(jobs=1)))


@pytest.mark.full
def test_several_processes_give_equal_outcomes(
    folder: Path, alone: list[GoalOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, []).append((done, total))

    found = decided(folder, Execution(jobs=2), progress=progress)
    assert same(found) == alone
    assert isinstance(found[0].verdict, Held)
    assert found[0].proof == alone[0].proof
    assert found[0].confirmed
    assert all(one.seconds > 0 and one.peak_bytes > 0 for one in found)
    assert stages["N-0"] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert stages["N-0: attack"] == [(0, 1), (1, 1)]
    assert stages["N-0: check"] == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.full
def test_workers_that_join_later_give_equal_outcomes(
    folder: Path, alone: list[GoalOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "WORTH", 0.0)
    monkeypatch.setattr(worker_pool, "cores", lambda: 2)
    assert same(decided(folder, Execution(threads=1))) == alone


@pytest.mark.full
def test_out_of_memory_makes_only_its_goal_inconclusive(
    folder: Path, alone: list[GoalOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other goals keep their verdicts, and so does one whose attack ran out of memory."""

    def short(factory: Any, goal: Any, case: Any, builder: Any) -> Any:
        if goal.clause.id == "N-0" and case.name == "p1":
            raise MemoryError
        return bound_case(factory, goal, case, builder)

    def tired(factory: Any, goal: Any, case: Any, bounded: Any) -> Any:
        if goal.clause.id == "N-3":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return attack_case(factory, goal, case, bounded)

    monkeypatch.setattr(tasks, "bound_case", short)
    monkeypatch.setattr(tasks, "attack_case", tired)
    found = decided(folder, Execution(jobs=1))
    assert found[0].verdict == Inconclusive("p1: out of memory")
    assert found[0].proof is None
    assert found[3].verdict == alone[3].verdict
    assert found[3].attack is None
    assert "no attack, out of memory" in " ".join(found[3].notes)
    assert [same(found)[i] for i in (1, 2, 4)] == [alone[i] for i in (1, 2, 4)]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([RecheckResult(""), RecheckResult("claim/too-small: p1")], "claim/too-small: p1"),
        ([RecheckResult(""), Unfinished("out of memory")], "did not finish: out of memory"),
        ([RecheckResult("")], "did not see every case"),
        ([], "did not see every case"),
    ],
)
def test_proof_needs_confirmation_of_all_parts(answers: list[Any], words: str) -> None:
    said = _objection([TaskResult(value, 0.0, 0) for value in answers], 2)
    assert said is not None
    assert words in said
    assert _objection([TaskResult(RecheckResult(""), 0.0, 0)] * 2, 2) is None


@pytest.mark.full
def test_checks_of_parts_equal_the_whole_check(folder: Path, alone: list[GoalOutcome]) -> None:
    """Each case belongs to one part, and a part without a case is rejected."""
    proof, weights = alone[0].proof, folder / "model.safetensors"
    assert proof is not None
    assert [recheck(proof, weights, part=(first, 3)).ok for first in range(4)] == [
        True, True, True, True,
    ]  # fmt: skip
    assert (
        recheck(proof, weights, part=(0, 3)).nodes == 2 * recheck(proof, weights, part=(1, 3)).nodes
    )
    for part in ((4, 1), (4, 5), (-1, 1), (0, 0), (0, -1)):
        found = recheck(proof, weights, part=part)
        assert (found.ok, found.reason) == (False, "document/cases"), part
    document = json.loads(proof)
    document["cases"][3]["claim"] = (0.0).hex()
    lied = json.dumps(document).encode()
    assert [recheck(lied, weights, part=(first, 4)).ok for first in range(4)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert not recheck(lied, weights).ok


def test_unfinished_check_leaves_the_goal_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*arguments: Any, **named: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(tasks, "recheck", short)
    found = decided(folder, Execution(jobs=1), attacks=False)
    assert all(one.proof is None and not one.confirmed for one in found)
    assert isinstance(found[0].verdict, Inconclusive)
    assert "did not finish: out of memory" in found[0].verdict.reason


def test_claims_of_the_proof_must_decide_the_goal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound beside a proof that claims more than the limit does not hold the goal."""
    monkeypatch.setattr(decision, "verdict_of", lambda *given, chain: Held())
    found = decided(folder, Execution(jobs=1), attacks=False)
    assert isinstance(found[1].verdict, Inconclusive)
    assert found[1].proof is None
    assert isinstance(found[0].verdict, Held)


def test_empty_list_of_cases_is_not_evidence(folder: Path) -> None:
    (goal, *_) = goals(write_contract(folder, *WANTED))
    assert not isinstance(verdict_of(goal, (), None), Held)
    unknown = CaseOutcome("p0", 1, float("nan"))
    assert isinstance(verdict_of(goal, (unknown,), None), Inconclusive)


@pytest.mark.full
def test_refusal_of_a_worker_has_a_source_position(folder: Path, cli: Cli, tmp_path: Path) -> None:
    """Weights beyond float8 are refused at the drift in the contract, also in a worker."""
    write_model(tmp_path, prompts=("ab", "c"))
    write_contract(tmp_path, WANTED[0])
    path = tmp_path / "contract.yaml"
    text = path.read_text().replace(
        "compute: float32", "compute: float16, weights: {format: fp8_e4m3}"
    )
    path.write_text(text)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    name = next(key for key in weights if "q_proj" in key)
    save_file(weights | {name: weights[name] + 1e4}, tmp_path / "model.safetensors")
    here = cli("verify", "--jobs", "1", cwd=tmp_path)
    there = cli("verify", "--jobs", "2", cwd=tmp_path)
    assert (here.code, here.stdout) == (2, "")
    assert "KC467" in here.stderr
    assert "drift(attn_0, x)" in here.stderr
    assert there == here


@pytest.mark.full
def test_command_output_is_equal_and_reports_the_cache(cli: Cli, folder: Path) -> None:
    ran = [
        cli("verify", "--format", "json", "--jobs", jobs, "--cache", "memory", cwd=folder)
        for jobs in ("2", "1")
    ]
    assert [r.code for r in ran] == [1, 1]
    assert "cache:" not in ran[0].stderr
    assert f"cache: 18 of 18 cases from {folder / 'memory'}" in ran[1].stderr
    first, second = (json.loads(r.stdout) for r in ran)
    assert [goal["cached"] for goal in first["goals"]] == [0, 0, 0, 0, 0]
    assert [goal["cached"] for goal in second["goals"]] == [4, 4, 4, 4, 2]
    for document in (first, second):
        for goal in document["goals"]:
            del goal["seconds"], goal["peak_bytes"], goal["cached"]
    assert first == second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--jobs", "0"), "--jobs"),
        (("--threads", "x"), "--threads"),
        (("--engine", "threads"), "--engine"),
        (("--cache", "contract.yaml"), "KC602"),
    ],
)
def test_wrong_options_are_refused(
    cli: Cli, folder: Path, words: tuple[str, ...], said: str
) -> None:
    ran = cli("verify", *words, cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr


def test_nothing_is_cached_without_a_cache_folder(cli: Cli, folder: Path) -> None:
    ran = cli(
        "verify", "--clause", "N-2", cwd=folder, env={"XDG_CACHE_HOME": str(folder / "config.json")}
    )
    assert "there is no folder for the cache" in ran.stderr
    assert ran.code in (0, 3)


def test_missing_ray_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refusal) as caught:
        decided(folder, Execution(engine="ray", jobs=2))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code.id == "KC903"
    assert diagnostic.help is not None
    assert "kcdsl[ray]" in diagnostic.help


@pytest.mark.slow
def test_ray_gives_equal_outcomes(folder: Path, alone: list[GoalOutcome]) -> None:
    assert same(decided(folder, Execution(engine="ray", jobs=2))) == alone


@pytest.mark.slow
def test_crashed_ray_worker_loses_only_its_task() -> None:
    from kcdsl_backends.executors import WorkerLost

    pool = Ray(2, 1)
    try:
        futures = [pool.submit(_identity, b"a"), pool.submit(_die), pool.submit(_identity, b"c")]
        assert futures[0].result(120) == b"a"
        assert futures[2].result(120) == b"c"
        with pytest.raises(WorkerLost):
            futures[1].result(120)
        assert pool.submit(_identity, b"d").result(120) == b"d"
    finally:
        pool.kill()


def _identity(data: bytes) -> bytes:
    return data


def _die() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


# --- ends ----------------------------------------------------------------------------------------


def _workers(parent: int) -> list[int]:
    """Return the live child processes of one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _running(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start `kcdsl verify` with two busy workers, as the leader of a process group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kcdsl", "verify", "--jobs", "2", "--cache", "off"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while len(found := _workers(process.pid)) < 3:  # two workers and the resource tracker
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, found


def _gone(processes: Sequence[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{number}").exists() for number in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_interrupt_ends_all_workers(tmp_path: Path) -> None:
    write_model(tmp_path, layers=4, prompts=[f"{i} words of some length" for i in range(40)])
    write_contract(tmp_path, "forall x in points(all): norm_inf(drift(model, x)) <= 1e-9")
    process, workers = _running(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == b""
    *progress, last = err.decode().splitlines()
    assert last == "kcdsl: interrupted"
    assert all(line.startswith(("progress: ", "note: ")) for line in progress)
    assert _gone(workers)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path, layers=4, prompts=[f"{i} words of some length" for i in range(40)])
    write_contract(tmp_path, "forall x in points(all): norm_inf(drift(model, x)) <= 1e-9")
    process, workers = _running(tmp_path)
    process.kill()
    process.communicate(timeout=120)
    assert _gone(workers)
