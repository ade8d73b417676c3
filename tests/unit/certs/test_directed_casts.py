"""Proofs about directed casts: each word names one kernel; unknown words are rejected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.attack.simulation import Overflowed
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.numerics import specification
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.prover import block, parameters
from tests.support.rationals.exact import recheck_exactly

N = proofs.numerics
Document = dict[str, Any]
WORDS = ("nearest", "toward_zero", "any", "any_toward_zero", "any_direction")
DIRECTED = ("toward_zero", "any_toward_zero", "any_direction")
DOMAINS = ("interval", "affine")


def claimed(made: Document, path: Path) -> Document:
    """Return the document with the derived values as its claim and witness."""
    proof = parse(proofs.dump(made))
    (case,), (record,) = proof.cases, made["cases"]
    bound, sizes = Derivation(proof, read(path).tensors).derive(replace(case, claim=0.0))
    record["claim"] = made["claim"] = bound.hex()
    record["witness"] = [
        {"node": n, "value": v.hex(), "drift": d.hex()} for n, (v, d) in sizes.items()
    ]
    return made


def proof_of(folder: Path, casts: str, domain: str, weights: Any = None) -> tuple[Document, Path]:
    """Return a proof about a multilayer perceptron whose inference kernel has these casts."""
    rng = np.random.default_rng(3)
    graph = proofs.mlp(rng, "gelu")
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = rng.standard_normal(graph.input_shape)
    infer = N("bfloat16", casts, weights=weights, scores="bfloat16")
    made = proofs.document(graph, N("float32", "any"), infer, sha256, centre)
    made["cases"][0]["domain"] = domain
    return claimed(made, path), path


@pytest.mark.sample(3)
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("casts", WORDS)
def test_each_kind_of_cast_has_its_own_bound(
    tmp_path: Path, casts: str, domain: str, follows: Callable[..., None]
) -> None:
    """A proof for one kind is rejected for a kernel with more freedom."""
    made, path = proof_of(tmp_path, casts, domain)
    follows(made)
    assert recheck(proofs.dump(made), path).reason == "ok"
    wider = {"nearest": DIRECTED, "any": DIRECTED[2:], "any_toward_zero": DIRECTED[2:]}
    for other in wider.get(casts, ()):
        changed = copy.deepcopy(made)
        changed["numerics"]["infer"]["casts"] = other
        outcome = recheck(proofs.dump(changed), path)
        assert not outcome.ok, (casts, other)
        assert outcome.reason in ("claim/too-small", "witness/too-small"), outcome


@pytest.mark.parametrize("domain", DOMAINS)
def test_truncated_weights_differ_from_rounded_ones(tmp_path: Path, domain: str) -> None:
    made, path = proof_of(tmp_path, "toward_zero", domain)
    changed = copy.deepcopy(made)
    changed["numerics"]["infer"]["weights"]["rounding"] = "toward_zero"
    assert recheck(proofs.dump(changed), path).reason in ("claim/too-small", "witness/too-small")
    whole = claimed(changed, path)
    assert recheck(proofs.dump(whole), path).reason == "ok"


@pytest.mark.parametrize("casts", DIRECTED)
def test_checker_without_directed_casts_rejects(
    tmp_path: Path, casts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = proof_of(tmp_path, casts, "interval")
    every = specification._CASTS.items()
    known = {word: meaning for word, meaning in every if word not in DIRECTED}
    monkeypatch.setattr(specification, "_CASTS", known)
    for check in (recheck, recheck_exactly):
        outcome = check(proofs.dump(made), path)
        assert (outcome.ok, outcome.reason) == (False, "document/numerics")


BAD: dict[str, dict[str, Any]] = {
    "another word": {"casts": "truncate"},
    "another spelling": {"casts": "toward-zero"},
    "no word": {"casts": None},
    "two words": {"casts": ["toward_zero"]},
    "a quantiser beside it": {"activations": {"format": "fp8_e4m3", "scale": "per_token"}},
    "a free quantiser beside it": {
        "casts": "any_direction",
        "activations": {"format": "int8", "scale": "per_tensor"},
    },
    "codes that are cut off": {
        "weights": {"format": "fp8_e4m3", "scale": "per_channel", "rounding": "toward_zero"}
    },
    "nearest said of weights": {
        "weights": {"format": "bfloat16", "scale": "none", "rounding": "nearest"}
    },
    "weights rounded up": {"weights": {"format": "bfloat16", "scale": "none", "rounding": "up"}},
    "rounding of all": {"rounding": "toward_zero"},
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_record_is_rejected(name: str) -> None:
    record = N("bfloat16", "toward_zero")
    assert parse_kernel(record, "k").inward
    with pytest.raises(Rejected, match="document/numerics"):
        parse_kernel({**record, **BAD[name]}, "k")


def test_prover_refuses_numerics_without_a_rule(tmp_path: Path) -> None:
    """Numerics that no specification produces, passed directly: no bound, no run."""
    graph = proofs.mlp(np.random.default_rng(3), "gelu")
    assert graph.input_shape is not None
    x, radius = torch.zeros(graph.input_shape), torch.zeros(1, 1)
    fine = parameters(graph, N("float32", "any"))
    for casts in DIRECTED:
        record = N("bfloat16", casts, activations=("int8", "per_token"))
        problem = BlockProblem(block(graph), fine, parameters(graph, record))
        for bound in (problem.bound, problem.forms):
            with pytest.raises(NoBound, match="a quantiser beside casts"):
                bound(x.double(), radius.double())
        simulator = problem.simulators()[1]
        symbols = {n: torch.ones(s).double() for n, s in simulator.symbol_shapes().items()}
        with pytest.raises(Overflowed, match="directed casts"):
            simulator.run(x.double(), symbols)
    unknown = BlockProblem(
        block(graph), fine, parameters(graph, {**N("bfloat16"), "casts": "stochastic"})
    )
    for bound in (unknown.bound, unknown.forms):
        with pytest.raises(KeyError, match="stochastic"):
            bound(x.double(), radius.double())
