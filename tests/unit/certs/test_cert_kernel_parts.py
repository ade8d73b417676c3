"""Parts of a kernel's fingerprint that may differ, or must be stated, by the checker's policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcdsl.metrics import METRICS
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import generate, read_policy, trust
from kcdsl_certs.statement import (
    PARTS,
    Contract,
    Kernel,
    Predicate,
    Triple,
    Verdict,
    relaxed,
    states,
    states_machine,
)
from kcdsl_certs.statement import Checkpoint as Weights
from kcdsl_certs.statement.quantities import OF_A_MACHINE, Quantity
from kcdsl_certs.verification.proofs import StepOutcome
from kcdsl_certs.verification.report import Report


def triple(**changes: Any) -> Triple:
    gpu = {"model": "H100", "driver": changes.pop("driver", "550.54.15")}
    fingerprint = {
        "schema": "kcdsl.kernel-fingerprint/2",
        "software": {"torch": {"version": "2.13.0"}, "compiler": "g++ 12"},
        "hardware": {"processor": {"model": "EPYC"}, "gpu": gpu, "host": {"cores": 8}},
        "switches": {"environment": {}},
        **changes,
    }
    kernel = Kernel("torch.eager", fingerprint)
    return Triple(Weights("w", "0" * 64, "1" * 64), kernel, kernel, Contract("c", "1", "2" * 64))


def test_different_drivers_are_accepted_only_by_policy() -> None:
    one, other = triple(), triple(driver="570.86.10")
    assert one.digest != other.digest
    assert relaxed(one, other, ["driver"]).digest == one.digest
    for part in PARTS.keys() - {"driver", "gpu"}:
        assert relaxed(one, other, [part]).digest != one.digest
    changed = triple(driver="570.86.10", switches={"environment": {"OMP_NUM_THREADS": "4"}})
    assert relaxed(one, changed, ["driver"]).digest != one.digest
    assert relaxed(one, changed, ["driver", "switches"]).digest == one.digest


def test_unstated_part_can_be_ignored_by_policy() -> None:
    bare = triple()
    found = dict(bare.infer.fingerprint)
    del found["switches"]
    kernel = Kernel("torch.eager", found)
    without = Triple(bare.checkpoint, kernel, kernel, bare.contract)
    assert relaxed(bare, without, ["switches"]).digest == bare.digest
    assert relaxed(without, bare, ["switches"]).digest == without.digest
    assert not states(kernel, "switches")
    assert states(kernel, "driver")


def test_policy_names_parts(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('relaxed-kernel-parts = ["driver"]\nrequired-kernel-parts = ["gpu"]\n')
    found = read_policy(path)
    assert (sorted(found.relaxed_parts), sorted(found.required_parts)) == (["driver"], ["gpu"])
    (tmp_path / "a.pub").write_bytes(generate().public.pem)
    shown = str(trust(found, keys=[tmp_path / "a.pub"]))
    assert shown.endswith("kernels may differ in driver, kernels must state gpu")
    path.write_text('relaxed-kernel-parts = ["everything"]\n')
    with pytest.raises(Rejected) as caught:
        read_policy(path)
    assert caught.value.reason == "policy/malformed"


HERE = {
    "processor": {"model": "EPYC"},
    "gpu": {"model": "H100"},
    "host": {"cores": 8, "memory": 64},
}


@pytest.mark.parametrize(
    ("device", "change", "named"),
    [
        ("cuda", {}, True),
        ("cpu", {"gpu": None}, True),
        ("cuda", {"gpu": None}, False),
        ("cuda", {"gpu": {"model": None}}, False),
        ("cpu", {"processor": {"model": " "}}, False),
        ("cpu", {"processor": "EPYC"}, False),
        ("cpu", {"host": {"cores": 8}}, False),
        ("cpu", {"host": {"cores": True, "memory": 64}}, False),
        ("cpu", {"host": None}, False),
        (None, {}, False),
    ],
)
def test_machine_is_identified_by_processor_host_and_device(
    device: str | None, change: dict[str, Any], named: bool
) -> None:
    fingerprint = {"device": device, "hardware": HERE | change}
    assert states_machine(Kernel("torch.eager", fingerprint)) is named


def without_machine(body: Predicate) -> Predicate:
    """Return a body whose inference kernel states no machine, as that of a recording."""
    bare = {k: v for k, v in body.triple.infer.fingerprint.items() if k != "hardware"}
    infer = Kernel(body.triple.infer.name, bare)
    return replace(body, triple=replace(body.triple, infer=infer))


def test_times_without_their_machine_are_refused(
    body: Predicate, certify: Callable[..., bytes], check: Callable[..., Report]
) -> None:
    bare = without_machine(body)
    report = check(certify(bare), expected_triple=bare.triple)
    failed = {c.reason for c in report.checks if c.outcome is StepOutcome.FAILED}
    assert "clause/machine-unnamed" in failed
    assert not report.accepted


def test_metrics_of_the_clock_the_memory_and_repeated_runs_are_of_a_machine() -> None:
    of_a_machine = {"timing", "memory", "repeats"}
    names = {m.name for m in METRICS.values() if not of_a_machine.isdisjoint(m.needs)}
    assert names == OF_A_MACHINE
    for name in (*METRICS, "decoder_error", "memory_of_context"):
        mean = Quantity("statistic", "mean", (Quantity("metric", name),))
        assert mean.is_of_a_machine is (name in names)


def test_results_other_than_times_need_no_machine(
    body: Predicate, certify: Callable[..., bytes], check: Callable[..., Report]
) -> None:
    bare = without_machine(body)
    (place,) = (n for n, clause in enumerate(bare.clauses) if clause.quantity.is_of_a_machine)
    results = list(bare.clauses)
    results[place] = replace(results[place], verdict=Verdict.INCONCLUSIVE)
    report = check(
        certify(replace(bare, clauses=tuple(results))),
        expected_triple=bare.triple,
    )
    failed = {c.reason for c in report.checks if c.outcome is StepOutcome.FAILED}
    assert "clause/not-passed" in failed
    assert "clause/machine-unnamed" not in failed
