"""A second judge of results, written from certs/README.md alone, on every vector.

It covers the results, the scope, the expectation and the slices of the page: steps 13 and 14, and
what `numerics`, `sliceDigest` and `contract.digest` are. test_page_reader.py covers the envelope,
the statement and the subject.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir.canonical import digest, document

VECTORS = Path(__file__).resolve().parents[3] / "certs" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())["vectors"]
EXPECTED = json.loads((VECTORS / "expectation.json").read_text())
ORDER = ("proof", "proof-real", "probabilistic", "census", "sample")
PROOFS = ORDER[:3]
DOMAIN = "(affine|chain|interval|planes|splits)"
OF_DOMAINS = re.compile(rf"({DOMAIN}\+)*{DOMAIN}/1")
MEASURED = {
    "census": ("census/1",),
    "sample": ("clopper-pearson/1", "one-sided-limits/1", "attack/1"),
}


class Wrong(Exception):
    """Raised for a certificate that is rejected."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def canonical(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def exact(value: Any) -> Fraction:
    text = value["hex"] if isinstance(value, dict) else value
    return Fraction(float.fromhex(text)) if "0x" in text else Fraction(text)


def passes(left: Fraction, op: str, right: Fraction) -> bool:
    signs = {"<=": left <= right, "<": left < right, ">=": left >= right, ">": left > right}
    return {**signs, "==": left == right}[op]


def budget_of(record: dict[str, Any]) -> Fraction:
    return exact(record["budget"]) if "budget" in record else Fraction(0)


def is_of_runs(quantity: dict[str, Any]) -> bool:
    """Whether it is about every admitted run: a norm of a drift that was not measured, a margin."""
    if quantity["kind"] == "norm":
        return not quantity.get("measured", False)
    return quantity["kind"] == "margin"


def is_of_units(quantity: dict[str, Any]) -> bool:
    named = quantity["kind"] == "statistic" and quantity["name"] in ("max", "min")
    return named or quantity["kind"] in ("share", "norm", "margin")


# --- one result -----------------------------------------------------------------------------------


def judge(result: dict[str, Any]) -> set[str]:
    """Return the verdicts that the numbers admit."""
    evidence, method, op = result["evidence"], result["method"], result["op"]
    need(result.get("exceed", 0) <= result.get("n", 0) or "exceed" not in result, "counts")
    proved, implied = "proofDigest" in result, "impliedBy" in result
    if evidence in PROOFS:
        need(proved != implied, "a proof object or what implies it")
        need(result["quantity"]["kind"] in ("norm", "margin") or implied, "proofs are of drifts")
        need(method == "bound-chain/1" if implied else bool(OF_DOMAINS.fullmatch(method)), "method")
        need(evidence == "proof" or bool(result.get("assumptions")), "assumption")
        return _proved(result, op)
    need(not proved and not implied, "measured results have no proof")
    need(method in MEASURED[evidence], "method")
    found = _census(result, op) if evidence == "census" else _sample(result, op)
    if is_of_runs(result["quantity"]) or method == "attack/1":
        found = (found - {"PASSED"}) or {"INCONCLUSIVE"}
    return found


def _proved(result: dict[str, Any], op: str) -> set[str]:
    reached, tau = result.get("low" if op in ("<=", "<") else "high"), exact(result["tau"])
    bound = result.get("bound")
    if bound is not None and reached is not None:
        inside = passes(exact(reached), "<=" if op in ("<=", "<") else ">=", exact(bound))
        need(inside, "a run beyond the bound")
    if bound is not None and passes(exact(bound), op, tau):
        return {"PASSED", "INCONCLUSIVE"}
    if reached is not None and not passes(exact(reached), op, tau):
        return {"FAILED"}
    return {"INCONCLUSIVE"}


def _census(result: dict[str, Any], op: str) -> set[str]:
    need("sliceDigest" in result, "a census of no pinned slice")
    budget, beyond = budget_of(result), result.get("exceed")
    if not result.get("n"):
        return {"INCONCLUSIVE"}
    if budget:
        kept = beyond is not None and beyond <= budget * result["n"]
    elif "value" in result:
        kept = passes(exact(result["value"]), op, exact(result["tau"]))
        kept = kept and not (beyond and is_of_units(result["quantity"]))
    else:
        kept = beyond == 0
    return {"PASSED", "INCONCLUSIVE"} if kept else {"FAILED"}


def _sample(result: dict[str, Any], op: str) -> set[str]:
    n, beyond, budget = result.get("n", 0), result.get("exceed"), budget_of(result)
    alpha = exact(result["alpha"]) if "alpha" in result else None
    need(alpha is None or 0 < alpha <= Fraction(1, 20), "alpha")
    tau = exact(result["tau"])
    if not n:
        return {"INCONCLUSIVE"}
    if budget:
        if beyond is None or alpha is None:
            return {"INCONCLUSIVE"}
        if beyond > budget * n:
            return {"FAILED", "INCONCLUSIVE"}
        tail = sum(comb(n, i) * budget**i * (1 - budget) ** (n - i) for i in range(beyond + 1))
        return {"PASSED", "INCONCLUSIVE"} if tail <= alpha else {"INCONCLUSIVE"}
    if "value" in result and not passes(exact(result["value"]), op, tau):
        return {"FAILED", "INCONCLUSIVE"}
    if is_of_units(result["quantity"]):
        return {"FAILED", "INCONCLUSIVE"} if beyond else {"INCONCLUSIVE"}
    limit = result.get("high" if op in ("<=", "<") else "low")
    shown = alpha is not None and limit is not None and passes(exact(limit), op, tau)
    return {"PASSED", "INCONCLUSIVE"} if shown else {"INCONCLUSIVE"}


# --- a certificate --------------------------------------------------------------------------------


def states(result: dict[str, Any], wanted: dict[str, Any]) -> bool:
    named = ("obligation", "quantity", "op", "unit")
    same = all(result[name] == wanted[name] for name in named)
    return same and exact(result["tau"]) == exact(wanted["tau"])


def check(body: dict[str, Any], *, complete: bool, stage: str | None) -> None:
    """Raise Wrong for a certificate whose results, scope or stage are rejected."""
    scope = [(one["id"], one.get("slice")) for one in body["scope"]["covers"]]
    required = {(one["id"], one.get("slice")): one for one in EXPECTED["clauses"]}
    need(len(set(scope)) == len(scope) and set(scope) <= set(required), "scope")
    need(not body["scope"]["complete"] or set(scope) == set(required), "scope is not complete")
    kernels = body["triple"]["kernels"]
    seen = []
    for result in body["clauses"]:
        label = result["id"], result.get("slice")
        need(label in required, "a result that the contract does not ask for")
        need(label in scope, "a result outside the scope")
        need(result["verdict"] in judge(result), "the verdict contradicts the numbers")
        for role, found in result.get("numerics", {}).items():
            own = canonical(kernels[role]["fingerprint"]["numerics"])
            need(found["sha256"] == own, "numerics")
        key = [result["obligation"], result["quantity"], result["op"], exact(result["tau"])]
        need(key not in seen, "stated twice")
        seen.append(key)
        _fits(result, required[label])
        if "impliedBy" in result:
            source = [r for r in body["clauses"] if r["id"] == result["impliedBy"]]
            blocks = [r["quantity"]["block"] for r in source if "proofDigest" in r]
            need("model" in blocks, "implied by nothing that is proved")
    verdicts = {result["verdict"] for result in body["clauses"]}
    worst = next((one for one in ("FAILED", "INCONCLUSIVE") if one in verdicts), "PASSED")
    worst = worst if verdicts else "INCONCLUSIVE"
    need(worst == body["verdict"], "verdict of the whole")
    demanded = set(required) if complete else set(scope)
    for label in demanded:
        about = [r for r in body["clauses"] if (r["id"], r.get("slice")) == label]
        need(_shown(about, required[label]), f"{label} is not shown")
    need(stage is None or body["stage"] == stage, "stage")


def _fits(result: dict[str, Any], required: dict[str, Any]) -> None:
    every = [one for some in required["alternatives"] for one in some]
    need(any(states(result, one) for one in every), "another comparison")
    proved = result["evidence"] in PROOFS
    need(proved or budget_of(result) == budget_of(required), "another budget")
    weakest = required.get("evidence", "sample")
    need(ORDER.index(result["evidence"]) <= ORDER.index(weakest), "evidence too weak")
    for name in ("region", "sliceDigest"):
        need(name not in required or result.get(name) == required[name], f"another {name}")


def _shown(results: list[dict[str, Any]], required: dict[str, Any]) -> bool:
    for some in required["alternatives"]:
        found = [[r["verdict"] for r in results if states(r, one)] for one in some]
        if all(verdicts and set(verdicts) == {"PASSED"} for verdicts in found):
            return True
    return False


@pytest.mark.parametrize(
    "vector",
    [
        pytest.param(v, id=v["file"].removesuffix(".cert.json"))
        for v in INDEX
        if v["expect"] == "valid" or v["step"] in ("clauses", "stage")
    ],
)
def test_the_page_is_enough_to_judge_results(vector: dict[str, Any]) -> None:
    options = vector["options"]
    payload = json.loads((VECTORS / vector["file"]).read_bytes())["dsseEnvelope"]["payload"]
    body = json.loads(base64.urlsafe_b64decode(payload.replace("+", "-").replace("/", "_")))
    try:
        check(
            body["predicate"], complete=options.get("complete", False), stage=options.get("stage")
        )
    except Wrong:
        assert vector["expect"] == "invalid"
    else:
        assert vector["expect"] == "valid", vector["description"]


def test_the_page_says_what_a_slice_digest_covers() -> None:
    data = {
        source["data"]: hashlib.sha256((VECTORS / source["data"]).read_bytes()).hexdigest()
        for source in EXPECTED["slices"].values()
    }
    for clause in EXPECTED["clauses"]:
        source = EXPECTED["slices"][clause["slice"]]
        pinned = canonical({"data": data[source["data"]], "where": source["where"]})
        assert clause["sliceDigest"]["sha256"] == pinned


def test_the_page_says_what_the_digest_of_a_contract_covers() -> None:
    program = load_program(Path("examples/tiny_lm/contract.yaml"))
    stored = json.loads(document(program))
    covered = {name: part for name, part in stored.items() if name not in ("digest", "imports")}
    assert canonical(covered) == stored["digest"] == digest(program)
