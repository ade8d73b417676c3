"""A valid proof about another subject does not prove a clause."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.statement import (
    CertifiedClause,
    Evidence,
    Predicate,
    ProofReference,
    Region,
)
from kcdsl_certs.verification.proofs import INDEPENDENT, SOME_MARGIN, Rechecker, StepOutcome
from tests.support.quantities import margin, norm
from tests.support.vectors.golden import radius


@dataclass(frozen=True)
class _Rederived:
    ok: Any = True
    reason: str = "ok"
    detail: str = ""
    bound: str = (0.03).hex()
    seconds: float = 0.1
    nodes: int = 7


@pytest.fixture
def recheck(
    golden: ModuleType, body: Predicate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[StepOutcome, str]]:
    """Return a function that rechecks the golden clause with an edited proof or outcome."""
    monkeypatch.delitem(sys.modules, "kcdsl_certs.recheck", raising=False)
    checker = ModuleType("kcdsl_certs.recheck")
    monkeypatch.setitem(sys.modules, "kcdsl_certs.recheck", checker)

    def run(
        edit: Callable[[dict[str, Any]], object] = lambda proof: None,
        outcome: Any = None,
        **changes: Any,
    ) -> tuple[StepOutcome, str]:
        document = json.loads(golden.proof())
        edit(document)
        raw = json.dumps(document).encode()
        (tmp_path / golden.PROOF_NAME).write_bytes(raw)
        reference = ProofReference(hashlib.sha256(raw).hexdigest(), golden.PROOF_NAME)
        clause: CertifiedClause = dataclasses.replace(body.clauses[0], proof=reference)
        clause = dataclasses.replace(clause, **changes)
        found = _Rederived() if outcome is None else outcome
        monkeypatch.setattr(checker, "recheck", lambda proof, path, served: found, raising=False)
        result = Rechecker(tmp_path, tmp_path / "w")(clause, body.triple)
        return result.outcome, result.reason

    return run


Recheck = Callable[..., tuple[StepOutcome, str]]


def _rows(longest: int, margin: str = "0") -> Region:
    return Region("rows", "all", Fraction(margin), longest)


NOT_CONFIRMED = (StepOutcome.FAILED, "proof/bound-not-confirmed")


def test_golden_proof_is_bound_to_its_clause(recheck: Recheck) -> None:
    assert recheck() == (StepOutcome.OK, "")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda p: p.update(block="attn_1"), "proof/block-mismatch"),
        (lambda p: p["numerics"]["train"].update(compute="float64"), "proof/numerics-mismatch"),
        (lambda p: p["numerics"]["infer"].update(compute="float32"), "proof/numerics-mismatch"),
        (lambda p: p["functional"].update(kind="2"), "proof/functional-mismatch"),
        (lambda p: p["functional"].update(kind="span"), "proof/functional-mismatch"),
        (lambda p: p["functional"].update(kind="no_flip"), "proof/functional-mismatch"),
        (lambda p: p["functional"].update(kind="odd"), "proof/functional-mismatch"),
        (lambda p: p["checkpoint"].update(sha256="0" * 64), "proof/checkpoint-mismatch"),
        (lambda p: p["checkpoint"].update(infer="0" * 64), "proof/checkpoint-mismatch"),
        (lambda p: p["cases"][0]["region"].update(kind="points"), "proof/region-mismatch"),
        (lambda p: p.update(cases=[]), "proof/region-mismatch"),
        (lambda p: p["cases"].append(p["cases"][0]), "proof/region-mismatch"),
        (lambda p: p["cases"].append(p["cases"][0] | {"name": "b"}), "proof/region-mismatch"),
        (lambda p: p["cases"][0]["region"].update(radius=radius(0.0009)), "proof/region-mismatch"),
        (
            lambda p: p["cases"][0]["region"].update(radius=radius(float("nan"))),
            "proof/region-mismatch",
        ),
        (lambda p: p.pop("block"), "statement/malformed"),
        (lambda p: p.pop("numerics"), "statement/malformed"),
    ],
)
def test_proof_about_another_subject_is_rejected(
    edit: Callable[[dict[str, Any]], object], reason: str, recheck: Recheck
) -> None:
    assert recheck(edit) == (StepOutcome.FAILED, reason)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (_Rederived(ok=False, reason="claim/too-small"), "proof/not-confirmed"),
        (_Rederived(ok=1), "proof/not-confirmed"),
        (_Rederived(bound=(0.032).hex()), "proof/bound-not-confirmed"),
        (_Rederived(bound=""), "number/malformed"),
        (_Rederived(bound="held"), "number/malformed"),
        (_Rederived(bound="nan"), "number/malformed"),
        (object(), "proof/checker-failed"),
    ],
)
def test_unconfirmed_bound_is_rejected(outcome: Any, reason: str, recheck: Recheck) -> None:
    assert recheck(outcome=outcome) == (StepOutcome.FAILED, reason)


def test_clause_bound_below_the_proof_is_rejected(recheck: Recheck) -> None:
    assert recheck(bound=0.03) == (StepOutcome.OK, "")
    assert recheck(bound=0.0299) == (StepOutcome.FAILED, "proof/bound-not-confirmed")
    assert recheck(bound=None) == (StepOutcome.FAILED, "proof/bound-not-confirmed")


@pytest.mark.parametrize(
    "stated",
    [
        {"quantity": norm("2", "attn_0")},
        {"quantity": norm("span", "attn_0")},
        {"quantity": norm("inf", "attn_0", measured=True)},
        {"quantity": margin("attn_0")},
    ],
)
def test_result_about_another_functional_is_rejected(
    stated: dict[str, Any], recheck: Recheck
) -> None:
    assert recheck(**stated) == (StepOutcome.FAILED, "proof/functional-mismatch")


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quantity": norm("inf", "attn_1")}, "proof/block-mismatch"),
        ({"region": Region("ball", "short", Fraction(1, 500))}, "proof/region-mismatch"),
        ({"region": Region("hull", "short")}, "proof/region-mismatch"),
        ({"region": None}, "proof/region-mismatch"),
    ],
)
def test_result_about_another_block_or_region_is_rejected(
    stated: dict[str, Any], reason: str, recheck: Recheck
) -> None:
    assert recheck(**stated) == (StepOutcome.FAILED, reason)


def test_margin_is_proved_by_the_order_alone(recheck: Recheck) -> None:
    def about_flips(k: int) -> Callable[[dict[str, Any]], object]:
        return lambda p: p.update(functional={"kind": "no_flip", "k": k})

    flip: dict[str, Any] = {
        "quantity": margin("attn_0"), "op": ">", "tau": Fraction(0), "bound": SOME_MARGIN,
    }  # fmt: skip
    held = _Rederived(bound="held")
    assert recheck(about_flips(1), held, **flip) == (StepOutcome.OK, "")
    assert recheck(about_flips(2), held, **flip) == (
        StepOutcome.FAILED,
        "proof/functional-mismatch",
    )
    for more in (2 * SOME_MARGIN, 0.5, None):
        stated = {**flip, "bound": more}
        assert recheck(about_flips(1), held, **stated) == NOT_CONFIRMED
    drift = _Rederived(bound=(0.0).hex())
    assert recheck(about_flips(1), drift, **flip) == NOT_CONFIRMED


@pytest.mark.parametrize("op", [">=", ">", "=="])
def test_upper_bound_of_a_drift_proves_no_lower_bound(op: str, recheck: Recheck) -> None:
    """A bound of 0.03 does not show that the drift is at least 0.01, whatever is stated."""
    for stated in (0.01, 0.02, 0.03, 1.0):
        assert recheck(op=op, tau=Fraction(1, 100), bound=stated) == NOT_CONFIRMED


def test_number_of_hulls_must_equal_the_stated_one(recheck: Recheck) -> None:
    """One hull per length of the requests: a missing length means uncovered requests."""

    def hulls(number: int) -> Callable[[dict[str, Any]], object]:
        def edit(proof: dict[str, Any]) -> None:
            case = proof["cases"][0]
            case["region"].update(kind="hull")
            proof["cases"] = [{**case, "name": f"hull-{length}"} for length in range(number)]

        return edit

    hull: dict[str, Any] = {"region": Region("hull", "all", Fraction(1, 20))}
    assert recheck(hulls(2), **hull, n=2) == (StepOutcome.OK, "")
    for n in (1, 3, None):
        assert recheck(hulls(2), **hull, n=n) == (StepOutcome.FAILED, "proof/region-mismatch")


def test_proof_is_rechecked_once_for_all_clauses(
    golden: ModuleType, body: Predicate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    checker = ModuleType("kcdsl_certs.recheck")

    def rederive(proof: bytes, path: Path, served: Path | None) -> _Rederived:
        calls.append(path)
        return _Rederived()

    monkeypatch.setattr(checker, "recheck", rederive, raising=False)
    monkeypatch.setitem(sys.modules, "kcdsl_certs.recheck", checker)
    (tmp_path / golden.PROOF_NAME).write_bytes(golden.proof())
    run = Rechecker(tmp_path, tmp_path / "w")
    for _ in range(2):
        assert run(body.clauses[0], body.triple).outcome is StepOutcome.OK
    assert calls == [tmp_path / "w"]


@pytest.mark.parametrize(
    ("stated", "proved", "outcome"),
    [
        (_rows(64), 64, (StepOutcome.OK, "")),
        (_rows(64, "0.05"), 64, (StepOutcome.OK, "")),
        (_rows(64), 65, (StepOutcome.OK, "")),
        (_rows(64), 63, (StepOutcome.FAILED, "proof/region-mismatch")),
        (_rows(64, "0.05"), 63, (StepOutcome.FAILED, "proof/region-mismatch")),
        (Region("rows", "all"), 64, (StepOutcome.FAILED, "proof/region-mismatch")),
        (Region("hull", "all"), 64, (StepOutcome.FAILED, "proof/region-mismatch")),
    ],
)
def test_proof_about_shorter_sequences_is_rejected(
    stated: Region, proved: int, outcome: tuple[StepOutcome, str], recheck: Recheck
) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["cases"] = document["cases"][:1]
        document["cases"][0]["region"].update(kind="rows", longest=proved)

    assert recheck(edit, region=stated, n=1) == outcome


@pytest.mark.parametrize("longest", [None, "64", 64.0, True])
def test_longest_sequence_must_be_a_number(longest: object, recheck: Recheck) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["cases"] = document["cases"][:1]
        document["cases"][0]["region"].update(kind="rows", longest=longest)

    assert recheck(edit, region=Region("rows", "all", longest=64), n=1)[0] is StepOutcome.FAILED


def test_clause_must_state_the_probability_of_its_proof(recheck: Recheck) -> None:
    def edit(proof: dict[str, Any]) -> None:
        proof["cases"][0]["chance"] = {"alpha": "0.000001", "functionals": 4096}

    overstated = (StepOutcome.FAILED, "clause/evidence-overstated")
    assert recheck(edit) == overstated
    assert recheck(edit, alpha=Fraction(1, 100)) == overstated
    stated = INDEPENDENT.format(alpha="0.000001")
    likely = {"evidence": Evidence.PROBABILISTIC, "assumptions": (stated,)}
    assert recheck(edit, **likely) == overstated
    assert recheck(edit, **likely, alpha=Fraction(1, 10**7)) == overstated
    assert recheck(edit, **likely, alpha=Fraction(1, 10**6)) == (StepOutcome.OK, "")
    assert recheck(**likely, alpha=Fraction(1, 10**6)) == (StepOutcome.OK, "")
    unnamed = (StepOutcome.FAILED, "clause/assumption-unnamed")
    for text in ("exp is within 2 ulp", INDEPENDENT.format(alpha="0.000000001"), stated[:21]):
        other = {**likely, "assumptions": (text,)}
        assert recheck(edit, **other, alpha=Fraction(1, 10**6)) == unnamed
