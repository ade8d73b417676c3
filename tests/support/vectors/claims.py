"""Vectors about the claims of a certificate: triple, clause results, freshness."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

from kcdsl_certs.statement import (
    IMPLIED,
    Evidence,
    EvidenceFile,
    Input,
    Kernel,
    Predicate,
    Quantity,
    Region,
    Scope,
    Verdict,
)
from tests.support.vectors.building import Vector, certificate, with_result
from tests.support.vectors.golden import (
    INFER,
    ISSUED,
    KEY_B,
    TRAIN,
    fewer,
    numerics,
    report,
    sha,
)


def triples(body: Predicate) -> list[Vector]:
    own = body.triple
    manifest_only = replace(own.checkpoint, digest=sha("renamed"))
    weights = replace(own.checkpoint, digest=sha("w"), root_digest=sha("r"))
    config = replace(own.checkpoint, companions={"config": sha("other")})
    train = Kernel("torch.eager", {**TRAIN.fingerprint, "run": "torch.compile"})
    infer = Kernel("torch.sdpa", {**INFER.fingerprint, "numerics": numerics("float16")})
    contract = replace(own.contract, digest=sha("stricter"))
    older = replace(own.contract, version="0.9.0", digest=sha("older"))
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("other-weights", "another checkpoint", {"checkpoint": weights}, "checkpoint"),
        (
            "renamed-file",
            "same contents, another name",
            {"checkpoint": manifest_only},
            "checkpoint",
        ),
        ("other-config", "another configuration", {"checkpoint": config}, "checkpoint"),
        ("other-train-kernel", "another training kernel", {"train": train}, "kernel-train"),
        ("other-infer-kernel", "another inference kernel", {"infer": infer}, "kernel-infer"),
        (
            "kernels-exchanged",
            "train and infer exchanged",
            {"train": INFER, "infer": TRAIN},
            "kernel-train",
        ),
        ("other-contract", "another contract", {"contract": contract}, "contract"),
        ("older-contract", "an older version", {"contract": older}, "contract"),
        (
            "weights-and-kernel",
            "two components",
            {"checkpoint": weights, "infer": infer},
            "checkpoint",
        ),
        (
            "weights-and-contract",
            "two components",
            {"checkpoint": weights, "contract": contract},
            "checkpoint",
        ),
        (
            "kernel-and-contract",
            "two components",
            {"infer": infer, "contract": contract},
            "kernel-infer",
        ),
    ]
    made = [
        Vector(
            name,
            text,
            certificate(replace(body, triple=replace(own, **changes))),
            "subject",
            f"triple/{part}-mismatch",
        )
        for name, text, changes, part in cases
    ]
    data = replace(body, inputs=(Input("prompts.jsonl", sha("other")),))
    made.append(
        Vector(
            "other-data",
            "evaluated on other rows",
            certificate(data),
            "components",
            "input/mismatch",
        )
    )
    hidden = replace(body, inputs=())
    made.append(
        Vector(
            "data-not-named", "data not named", certificate(hidden), "components", "input/missing"
        )
    )
    return made


def results(body: Predicate) -> list[Vector]:
    drop_slice = replace(body, clauses=(*body.clauses[:2], *body.clauses[3:]))
    drop_clause = replace(
        body, clauses=body.clauses[:-1], scope=Scope(False, body.scope.covers[:-1])
    )
    stray = replace(body, clauses=(*body.clauses, replace(body.clauses[1], slice="night")))
    implied = replace(
        body.clauses[1],
        evidence=Evidence.PROOF,
        method=IMPLIED,
        implied_by="R-LAT",
        bound=0.001,
        value=None,
    )
    loose: dict[str, Any] = {"bound": 0.001, "value": None, "assumptions": ("real numbers",)}
    fails = with_result(body, 1, value=Fraction(1, 2), verdict=Verdict.FAILED)
    hard_sample: dict[str, Any] = {"evidence": Evidence.SAMPLE, "method": "one-sided-limits/1"}
    census = {
        "evidence": Evidence.CENSUS,
        "method": "census/1",
        "proof": None,
        "value": Fraction("0.0123"),
    }
    mean = Quantity("statistic", "mean", (Quantity("metric", "kl"),))
    cases: list[tuple[str, str, Predicate, str]] = [
        ("missing-slice", "a slice of the contract is left out", drop_slice, "clause/missing"),
        (
            "missing-clause",
            "complete is demanded, a clause is left out",
            drop_clause,
            "clause/missing",
        ),
        ("unknown-clause", "a slice the contract does not know", stray, "clause/unknown"),
        (
            "scope-too-small",
            "a result outside the scope",
            replace(body, scope=Scope(False, body.scope.covers[1:])),
            "scope/inconsistent",
        ),
        ("failed", "an honest FAILED is not a pass", fails, "clause/not-passed"),
        (
            "inconclusive",
            "nor is INCONCLUSIVE",
            with_result(body, 1, verdict=Verdict.INCONCLUSIVE),
            "clause/not-passed",
        ),
        (
            "bound-above-tau",
            "PASSED with a bound above the limit",
            with_result(body, 0, bound=0.0501),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "bound-just-above-tau",
            "the double 0.05 lies above 1/20",
            with_result(body, 0, bound=0.05),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "value-above-tau",
            "PASSED with a value above the limit",
            with_result(body, 1, value=Fraction(3, 10)),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "failed-with-passing-numbers",
            "FAILED although it holds",
            with_result(body, 1, verdict=Verdict.FAILED),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "attack-beyond-bound",
            "a run reached more than the bound",
            with_result(body, 0, low=0.04),
            "clause/attack-beyond-bound",
        ),
        (
            "hard-sample",
            "a hard clause passed on a sample",
            with_result(body, 1, **hard_sample),
            "clause/evidence-overstated",
        ),
        (
            "too-few-units",
            "0 of 20 does not show 5 %",
            with_result(body, 3, n=20, exceed=0),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "naive-rate",
            "9 of 200 lies below 5 %, not significantly",
            with_result(body, 3, exceed=9),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "exceed-above-n",
            "more exceed than were looked at",
            with_result(body, 3, exceed=201),
            "clause/counts",
        ),
        (
            "nothing-looked-at",
            "PASSED after zero units",
            with_result(body, 1, n=0),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "lenient-alpha",
            "a confidence of one half",
            with_result(body, 3, alpha=Fraction(1, 2)),
            "clause/alpha",
        ),
        (
            "other-tau",
            "a weaker limit than the contract's",
            with_result(body, 1, tau=Fraction(1, 2), value=Fraction(3, 10)),
            "clause/threshold-mismatch",
        ),
        (
            "other-quantity",
            "the mean instead of the percentile",
            with_result(body, 1, quantity=mean),
            "clause/threshold-mismatch",
        ),
        (
            "other-functional",
            "a bound of another norm of the same block",
            with_result(body, 0, quantity=replace(body.clauses[0].quantity, name="2")),
            "clause/threshold-mismatch",
        ),
        (
            "other-block",
            "a bound of another block",
            with_result(body, 0, quantity=replace(body.clauses[0].quantity, block="mlp_0")),
            "clause/threshold-mismatch",
        ),
        (
            "other-unit",
            "a quarter of something else than a second",
            with_result(body, 3, unit="nat"),
            "clause/threshold-mismatch",
        ),
        (
            "other-direction",
            "at least instead of at most",
            with_result(body, 1, op=">=", value=Fraction(3, 10)),
            "clause/threshold-mismatch",
        ),
        (
            "rounded-tau",
            "the double next to the limit, which is larger",
            with_result(body, 1, tau=Fraction(0.02)),
            "clause/threshold-mismatch",
        ),
        (
            "other-obligation",
            "the result of another obligation",
            with_result(body, 1, obligation="N-KL/long/0"),
            "clause/threshold-mismatch",
        ),
        (
            "other-budget",
            "a larger budget than the contract's",
            with_result(body, 3, budget=Fraction(1, 2)),
            "clause/budget-mismatch",
        ),
        (
            "evidence-too-weak",
            "a census where a proof is demanded",
            with_result(body, 0, **census | {"verdict": Verdict.INCONCLUSIVE}),
            "clause/evidence-too-weak",
        ),
        (
            "census-of-every-run",
            "a census of what is said of every admissible run",
            with_result(body, 0, **census),
            "clause/verdict-contradicts-numbers",
        ),
        (
            "other-region",
            "a smaller region",
            with_result(body, 0, region=Region("points", "short")),
            "clause/region-mismatch",
        ),
        (
            "other-slice-rows",
            "a slice with other rows",
            with_result(body, 1, slice_digest=sha("x")),
            "clause/slice-mismatch",
        ),
        (
            "census-not-pinned",
            "a census of nothing in particular",
            with_result(body, 1, slice_digest=None),
            "clause/census-not-pinned",
        ),
        (
            "proof-not-named",
            "a proof is claimed, none is named",
            with_result(body, 0, proof=None),
            "clause/proof-missing",
        ),
        (
            "other-numerics",
            "a proof about other numerics",
            with_result(body, 0, numerics=(sha("a"), sha("b"))),
            "clause/numerics-mismatch",
        ),
        (
            "assumption-unnamed",
            "real arithmetic without saying so",
            with_result(body, 0, evidence=Evidence.PROOF_REAL),
            "clause/assumption-unnamed",
        ),
        (
            "real-proof-not-named",
            "a proof over real numbers that nobody can look at",
            with_result(body, 1, evidence=Evidence.PROOF_REAL, **loose),
            "clause/proof-missing",
        ),
        (
            "latency-proved",
            "a proof object for times",
            with_result(
                body,
                3,
                evidence=Evidence.PROOF_REAL,
                budget=None,
                proof=body.clauses[0].proof,
                **loose,
            ),
            "clause/evidence-kind",
        ),
        (
            "method-of-nothing",
            "a method that nobody knows",
            with_result(body, 1, method="inspection/1"),
            "clause/method",
        ),
        (
            "result-twice",
            "one result twice",
            replace(body, clauses=(*body.clauses, body.clauses[1])),
            "clause/duplicate",
        ),
        (
            "implied-by-unproved",
            "follows from what is not proved",
            replace(body, clauses=(body.clauses[0], implied, *body.clauses[2:])),
            "clause/implied-by-unproved",
        ),
    ]
    options = {"missing-clause": {"complete": True}}
    other_domain = with_result(body, 0, method="affine/1")
    few = EvidenceFile(
        "report", "fewer.report.json", hashlib.sha256(report(fewer()[1:])).hexdigest()
    )
    one_unit = replace(body, clauses=fewer(), evidence=(*body.evidence[:2], few, body.evidence[3]))
    unnamed = replace(body, evidence=body.evidence[1:])
    changed = replace(body.evidence[2], sha256=sha("another report"))
    other_report = replace(body, evidence=(*body.evidence[:2], changed, body.evidence[3]))
    files: list[tuple[str, str, Predicate, str, str]] = [
        (
            "evidence-not-named",
            "measured, and no trace is named",
            unnamed,
            "evidence",
            "evidence/unnamed",
        ),
        (
            "other-report",
            "another report than was signed",
            other_report,
            "evidence",
            "evidence/digest-mismatch",
        ),
        (
            "result-not-in-report",
            "a value that the report does not have",
            with_result(body, 1, value=Fraction("0.0041")),
            "evidence",
            "evidence/report-mismatch",
        ),
        (
            "one-unit",
            "one record in place of all of them, though the report says so too",
            one_unit,
            "recount",
            "recount/count",
        ),
    ]
    return [
        *(
            Vector(name, text, certificate(case), step, why)
            for name, text, case, step, why in files
        ),
        *(
            Vector(name, text, certificate(case), "clauses", reason, options.get(name, {}))
            for name, text, case, reason in cases
        ),
        Vector(
            "other-domain",
            "another domain than the proof uses",
            certificate(other_domain),
            "proofs",
            "proof/method-mismatch",
        ),
    ]


def freshness(body: Predicate, golden: bytes) -> list[Vector]:
    backwards = certificate(replace(body, valid_until=ISSUED))
    return [
        Vector(
            "expired",
            "checked at its end",
            golden,
            "validity",
            "validity/expired",
            {"at": "2027-02-28T12:00:00Z"},
        ),
        Vector(
            "not-yet-valid",
            "the clock was moved back",
            golden,
            "validity",
            "validity/not-yet",
            {"at": "2026-11-30T11:59:59Z"},
        ),
        Vector("never-valid", "it ends when it begins", backwards, "validity", "validity/empty"),
        Vector(
            "valid-too-long",
            "it is valid for a second more than a year",
            certificate(replace(body, valid_until=ISSUED + timedelta(days=366, seconds=1))),
            "validity",
            "validity/too-long",
        ),
        Vector(
            "revoked",
            "its identity is in a file of revocations",
            golden,
            "sequence",
            "sequence/revoked",
            {"revocations": ["revoked-certificate.toml"]},
        ),
        Vector(
            "revoked-key",
            "signed by a key that is in a file of revocations",
            certificate(body, KEY_B),
            "signatures",
            "signature/key-revoked",
            {"keys": ["a.pub", "b.pub"], "revocations": ["revoked-key.toml"]},
        ),
        Vector(
            "rollback",
            "an older one is replayed",
            golden,
            "sequence",
            "sequence/rollback",
            {"minimum_sequence": 42},
        ),
        Vector(
            "other-stage",
            "issued for another stage",
            golden,
            "stage",
            "stage/mismatch",
            {"stage": "full"},
        ),
    ]
