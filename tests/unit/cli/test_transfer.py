"""`kcdsl transfer` and its check: later weights, valid and hostile."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.check.compile import load_program
from kcdsl.release.requirements import build_triple
from kcdsl.release.transfer import ASSUMPTIONS, TransferPlan, transfer_of
from kcdsl_certs.encoding.reals import parse_real
from kcdsl_certs.encoding.strict import canonical_json, strict_load
from kcdsl_certs.signatures import bundle_bytes, decode, generate, load_private, parse_bundle, sign
from kcdsl_certs.statement import (
    Predicate,
    Transfer,
    TransferredResult,
    certificate_id,
    parse_statement,
    parse_transfer,
    payload_bytes,
    transfer_bytes,
)
from kcdsl_certs.verification.admission import read_statement
from tests.support.onnx_files import save_decoder
from tests.support.small_models import write_contract, write_model

RHO = 0.01
Tensors = dict[str, torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, keys and a certificate on balls of weights and states."""
    from kcdsl.cli import main

    folder = tmp_path_factory.mktemp("made")
    write_model(folder, layers=2, prompts=("hello", "a b"))
    write_contract(
        folder,
        "forall x in points(all): norm_inf(drift(attn_0, x)) <= 5",
        "forall x in ball(all, 1e-3): norm_inf(drift(mlp_1, x)) <= 5",
        compute="bfloat16",
    )
    contract = str(folder / "contract.yaml")
    assert main(["keygen", "-o", str(folder / "kcdsl.key")]) == 0
    options = ["--weights", str(RHO), "--states", "0.05", "--attack", "off", "--cache", "off"]
    assert main(["verify", contract, *options, "--sign", str(folder / "kcdsl.key")]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def later(folder: Path, change: Change | None = None, **others: Any) -> Path:
    """Write a later checkpoint: every weight inside the region, or changed by `change`."""
    generator = torch.Generator().manual_seed(2)

    def near(name: str, w: torch.Tensor) -> torch.Tensor:
        by = 2 * torch.rand(w.shape, generator=generator, dtype=torch.float64) - 1
        return (w.double() * (1 + 0.9 * RHO * by)).float()

    tensors: Tensors = load_file(folder / "model.safetensors")
    changed = {name: (change or near)(name, w) for name, w in tensors.items()}
    path = folder / "later" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({**changed, **others}, path)
    return path


def run(cli: Any, folder: Path, path: Path, *more: str, sign: bool = True) -> Any:
    certificate = str(folder / "out" / "verify.cert.json")
    given = ["--contract", str(folder / "contract.yaml"), "--key", str(folder / "kcdsl.key.pub")]
    if sign:
        given += ["--sign", str(folder / "kcdsl.key")]
    return cli("transfer", certificate, str(path), *given, *more)


def check(cli: Any, folder: Path, path: Path, *more: str, base: str | None = "model") -> Any:
    given = [] if base is None else ["--base", str(folder / f"{base}.safetensors")]
    return cli(
        *("check", str(folder / "out" / "verify.transfer.json"), "--format", "json"),
        *("--contract", str(folder / "contract.yaml"), "--checkpoint", str(path), *given, *more),
        *("--key", str(folder / "kcdsl.key.pub")),
    )


def reasons(found: Any) -> set[str]:
    """Return the reasons of all failed steps."""
    steps = json.loads(found.stdout)["checks"]
    return {step["reason"] for step in steps if step["outcome"] == "failed"}


@pytest.mark.full
def test_later_weights_in_the_ball_need_no_proof(cli: Any, folder: Path, follows: Any) -> None:
    path = later(folder)
    found = run(cli, folder, path, "--format", "json")
    assert found.code == 0, found.stderr
    document = json.loads(found.stdout)
    follows(document)
    assert {item["id"] for item in document["carried"]} == {"N-0", "N-1"}
    moved = float.fromhex(document["carried"][0]["moved"]["hex"])
    assert 0.8 * RHO < moved <= 0.9 * RHO * 1.001
    bundle = (folder / "out" / "verify.transfer.json").read_bytes()
    statement = json.loads(decode(parse_bundle(bundle)).payload)
    follows(statement, "urn:kcdsl:schema:transfer:v0.1")
    checked = check(cli, folder, path, "--recheck", "--complete")
    assert checked.code == 0, checked.stdout
    follows(json.loads(checked.stdout))
    steps = {step["name"]: step for step in json.loads(checked.stdout)["checks"]}
    assert "0.01" in steps["weights"]["detail"]
    assert "all weights within 0.01" in steps["clauses"]["detail"]
    assert "re-derived" in steps["proofs"]["detail"]
    counted_on = json.loads(checked.stdout)["assumptions"]
    assert counted_on[0] == ASSUMPTIONS[0]
    assert "both kernels obey the numerics specifications named in the goal" in counted_on


def test_standalone_checker_accepts_a_transfer(cli: Any, folder: Path) -> None:
    from kcdsl_certs.__main__ import main

    path = later(folder)
    assert run(cli, folder, path).code == 0
    expectation = str(folder / "expected.json")
    assert check(cli, folder, path, "--write-expectation", expectation).code == 0
    words = [
        *("check", str(folder / "out" / "verify.transfer.json"), "--expect", expectation),
        *("--key", str(folder / "kcdsl.key.pub"), "--checkpoint", str(path)),
        *("--data", str(folder)),
    ]
    assert main([*words, "--base", str(folder / "model.safetensors"), "--complete"]) == 0
    assert main(words) == 4


@pytest.mark.full
def test_block_outside_the_ball_is_verified_again(cli: Any, folder: Path, cache_home: Path) -> None:
    """Other blocks transfer, and the cache still has the unchanged ones."""

    def change(name: str, w: torch.Tensor) -> torch.Tensor:
        moved = w.clone()
        if name == "model.layers.1.mlp.up_proj.weight":
            moved[3, 2] *= 1.5
        return moved

    contract, cache = folder / "contract.yaml", str(folder / "cache")
    verify = ["verify", str(contract), "--attack", "off", "--weights", str(RHO), "--cache", cache]
    verify += ["--states", "0.05", "--format", "json"]
    assert cli(*verify).code == 0
    path = later(folder, change)
    found = run(cli, folder, path)
    assert found.code == 3
    assert "model.layers.1.mlp.up_proj.weight[3, 2]" in found.stdout
    assert "kcdsl verify --block mlp_1" in found.stdout
    assert "attn_0" not in found.stdout.split("not transferred")[1]
    partly = check(cli, folder, path)
    assert partly.code == 0
    assert json.loads(partly.stdout)["outside"] == ["N-1 [all]"]
    assert check(cli, folder, path, "--complete").code == 4
    old = folder / "old.safetensors"
    shutil.copy(folder / "model.safetensors", old)
    shutil.copy(path, folder / "model.safetensors")
    again = cli(*verify, "-o", str(folder / "again"))
    assert again.code == 0
    cached = {goal["clause"]: goal["cached"] for goal in json.loads(again.stdout)["goals"]}
    assert cached == {"N-0": 2, "N-1": 0}
    only = [*verify, "--block", "mlp_1", "-o", str(folder / "again")]
    only += ["--sign", str(folder / "kcdsl.key")]
    assert cli(*only).code == 0
    together = cli(
        *("check", str(folder / "out" / "verify.transfer.json")),
        *(str(folder / "again" / "verify-mlp_1.cert.json"), "--complete", "--format", "json"),
        *("--contract", str(contract), "--base", str(old)),
        *("--key", str(folder / "kcdsl.key.pub")),
    )
    assert together.code == 0, together.stdout


def test_block_with_changed_input_states_is_not_transferred(cli: Any, folder: Path) -> None:
    """The block's weights are unchanged, but earlier blocks moved its input."""

    def change(name: str, w: torch.Tensor) -> torch.Tensor:
        return w * 3 if name.startswith("model.layers.0.self_attn.o_proj") else w.clone()

    found = run(cli, folder, later(folder, change), "--format", "json")
    assert found.code == 3
    left = {item["id"]: item["reason"] for item in json.loads(found.stdout)["left"]}
    assert left == {"N-0": "weights", "N-1": "states"}
    assert json.loads(found.stdout)["transfer"] is None
    assert not (folder / "out" / "verify.transfer.json").exists()


def _with(name: str, value: float) -> Change:
    def change(key: str, w: torch.Tensor) -> torch.Tensor:
        moved = w.clone()
        if key == name:
            moved.view(-1)[0] = value
        return moved

    return change


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(cli: Any, folder: Path, value: float) -> None:
    found = run(cli, folder, later(folder, _with(Q, value)))
    assert found.code == 2
    assert "KC" in found.stderr
    assert not (folder / "out" / "verify.transfer.json").exists()


def test_other_tensors_are_refused(cli: Any, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    folder_of = folder / "later"
    folder_of.mkdir()
    path = folder_of / "model.safetensors"
    hostile: Mapping[str, Tensors] = {
        "missing": {name: w for name, w in tensors.items() if name != Q},
        "renamed": {(f"{name}.x" if name == Q else name): w for name, w in tensors.items()},
        "more": {**tensors, "model.more.weight": torch.zeros(2)},
        "transposed": {**tensors, Q: tensors[Q].reshape(-1, 2).contiguous()},
        "another dtype": {**tensors, Q: tensors[Q].double()},
    }
    for what, some in hostile.items():
        save_file(some, path)
        found = run(cli, folder, path)
        assert found.code == 2, what
        assert "KC665" in found.stderr, what


def test_other_integers_are_refused(tmp_path: Path) -> None:
    """A graph holds them as constants, so no proof reads them by name."""
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.verification.transfers import Weights

    for name, codes in (("one", [1, 2]), ("same", [1, 2]), ("other", [1, 3])):
        state = {"w": torch.ones(2), "codes": torch.tensor(codes, dtype=torch.int8)}
        save_file(state, tmp_path / f"{name}.safetensors")
    one = tmp_path / "one.safetensors"
    Weights(one, tmp_path / "same.safetensors")
    with pytest.raises(Rejected, match="transfer/tensors: 'codes'"):
        Weights(one, tmp_path / "other.safetensors")


ONNX_CONTRACT = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {onnx: model.onnx}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16, casts: any}}
data: rows.jsonl
slices: {all: {}}
clauses:
  N-0: {require: "forall x in points(all): norm_inf(drift(model, x)) <= 100", level: L2}
"""


def test_program_of_an_onnx_file_is_not_transferred(cli: Any, tmp_path: Path) -> None:
    """The later file has the same tensors and another program."""
    model = onnx.load(save_decoder(tmp_path))
    (norm,) = (node for node in model.graph.node if node.op_type == "LayerNormalization")
    for attribute in norm.attribute:
        if attribute.name == "epsilon":
            attribute.f = 100.0
    path = tmp_path / "later" / "model.onnx"
    path.parent.mkdir()
    onnx.save(model, path)
    (tmp_path / "contract.yaml").write_text(ONNX_CONTRACT)
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    key, contract = tmp_path / "kcdsl.key", str(tmp_path / "contract.yaml")
    assert cli("keygen", "-o", str(key)).code == 0
    options = ("--weights", "0.001", "--attack", "off", "--cache", "off", "--sign", str(key))
    assert cli("verify", contract, *options).code == 0
    found = run(cli, tmp_path, path)
    assert found.code == 2, found.stdout
    assert "has a program beside the weights" in found.stderr
    bundle = (tmp_path / "out" / "verify.cert.json").read_bytes()
    payload = decode(parse_bundle(bundle)).payload
    body = read_statement(payload)
    assert isinstance(body, Predicate)
    triple = build_triple(load_program(tmp_path / "contract.yaml"), tmp_path, checkpoint=path)
    carried = (TransferredResult("N-0", "all", parse_real("0.001"), 0.0, "down"),)
    about = (body, certificate_id(payload), "verify.cert.json", triple, TransferPlan(carried, ()))
    signed(tmp_path, transfer_of(*about, body.issued_at))
    refused = check(cli, tmp_path, path, "--base", str(tmp_path / "model.onnx"), base=None)
    assert refused.code == 4, refused.stdout
    assert "transfer/tensors" in reasons(refused)


def test_zeros_are_fixed_and_the_ball_is_closed(tmp_path: Path) -> None:
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.recheck.interval.tensors import read
    from kcdsl_certs.recheck.interval.weight_ball import moved, same_tensors

    def tensors(name: str, w: torch.Tensor) -> Any:
        save_file({"w": w}, tmp_path / name)
        return read(tmp_path / name).tensors

    before = torch.tensor([0.0, 1.0, -0.0, -2.0])
    one = tensors("a", before)
    for value, inside in ((0.0, True), (-0.0, True), (2.0**-149, False)):
        after = before.clone()
        after[0] = value
        (found,) = moved(one, tensors("b", after), ["w"], parse_real("0.5"))
        assert found.inside is inside, value
        assert found.ratio == (0.0 if inside else float("inf"))
    for rho, inside in (("1/1024", True), ("0.0009765624999", False), ("0.0009765625001", True)):
        after = before * (1 + 2.0**-10)
        (found,) = moved(one, tensors("b", after), ["w"], parse_real(rho))
        assert found.inside is inside, rho
        assert found.ratio >= 2.0**-10
    with pytest.raises(Rejected, match="transfer/tensors"):
        same_tensors(one, tensors("b", before.double()))
    with pytest.raises(Rejected, match="not-finite"):
        moved(one, tensors("b", before / 0), ["w"], parse_real("0.5"))
    with pytest.raises(Rejected, match="transfer/tensors"):
        moved(one, one, ["v"], parse_real("0.5"))


@pytest.mark.parametrize("which", ["later", "earlier"])
def test_weights_changed_during_transfer_are_refused(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The comparison uses the verified weights, not the present file."""
    from kcdsl.cli.commands.release.transfer import TransferCommand

    path = later(folder)
    honest = TransferCommand._verified
    changing = path if which == "later" else folder / "model.safetensors"

    def verified(*given: Any) -> Any:
        found = honest(*given)
        tensors = load_file(changing)
        first = min(tensors)
        tensors[first] = tensors[first] * (1 + 2.0**-20)
        save_file(tensors, changing)
        return found

    monkeypatch.setattr(TransferCommand, "_verified", verified)
    found = run(cli, folder, path)
    assert found.code == 2, found.stdout
    assert "KC665" in found.stderr
    assert "transfer/changed" in found.stderr
    assert not (folder / "out" / "verify.transfer.json").exists()


def test_edge_of_the_ball_is_exact() -> None:
    """A radius one double below an element's movement is too small, one above is not.

    This holds even where the product of radius and weight would round up to the distance.
    """
    from kcdsl_certs.recheck.interval.tensors import Tensor as Stored
    from kcdsl_certs.recheck.interval.weight_ball import moved

    def stored(values: Any) -> Mapping[str, Stored]:
        return {"w": Stored("F32", values.shape, memoryview(values.tobytes()))}

    generator = np.random.default_rng(7)
    size = np.exp2(generator.integers(-149, 127, 400)).astype(np.float32)
    one = (size * generator.uniform(1, 2, 400)).astype(np.float32)
    by = generator.uniform(-0.49, 0.49, 400) * np.exp2(-generator.integers(0, 22, 400))
    two = (one * (1 + by)).astype(np.float32)
    decided = set()
    for before, after in zip(one, two, strict=True):
        exact = abs(Fraction(float(after)) - Fraction(float(before))) / Fraction(float(before))
        if not 0 < exact < Fraction(1, 2):
            continue
        nearest = float(exact)
        steps = (nearest, math.nextafter(nearest, 0.0), math.nextafter(nearest, 1.0))
        for rho in (exact, *map(Fraction, steps), Fraction(f"{nearest:.3g}")):
            (found,) = moved(stored(before[None]), stored(after[None]), ["w"], rho)
            assert found.inside is (exact <= rho), (before, after, rho)
            assert Fraction(found.ratio) >= exact
            decided.add((found.inside, exact == rho))
    assert decided == {(True, True), (True, False), (False, False)}


def signed(folder: Path, transfer: Transfer) -> None:
    key = load_private((folder / "kcdsl.key").read_bytes())
    bundle = bundle_bytes(sign(transfer_bytes(transfer), [key]), key.public.hint)
    (folder / "out" / "verify.transfer.json").write_bytes(bundle)


def written(folder: Path) -> Transfer:
    bundle = (folder / "out" / "verify.transfer.json").read_bytes()
    payload = decode(parse_bundle(bundle)).payload
    return parse_transfer(parse_statement(strict_load(payload, len(payload))).predicate)


def test_signed_false_transfer_is_rejected(cli: Any, folder: Path) -> None:
    """The holder of a key may sign false statements; the checker derives everything derivable."""
    path = later(folder)
    assert run(cli, folder, path).code == 0
    honest = written(folder)
    first, *rest = honest.carried
    assert first.moved is not None
    lies: Mapping[str, tuple[Transfer, str]] = {
        "moved less": (
            replace(honest, carried=(replace(first, moved=first.moved / 2), *rest)),
            "transfer/moved-further",
        ),
        "a larger region": (
            replace(honest, carried=(replace(first, weights=parse_real("0.02")), *rest)),
            "transfer/region-mismatch",
        ),
        "a smaller region": (
            replace(honest, carried=(replace(first, weights=parse_real("0.005")), *rest)),
            "transfer/region-mismatch",
        ),
        "a result that is not there": (
            replace(honest, carried=(*honest.carried, TransferredResult("N-7", "all"))),
            "transfer/unknown",
        ),
        "no region": (
            replace(honest, carried=(TransferredResult(first.id, first.slice), *rest)),
            "transfer/region-mismatch",
        ),
        "another certificate": (replace(honest, base="0" * 64), "transfer/another-base"),
        "another file": (replace(honest, path="absent.cert.json"), "transfer/no-base"),
        "itself": (replace(honest, path="verify.transfer.json"), "transfer/another-base"),
        "longer than the certificate": (
            replace(honest, valid_until=honest.valid_until + timedelta(seconds=1)),
            "validity/beyond-base",
        ),
        "another stage": (replace(honest, stage="full"), "stage/mismatch"),
    }
    signed(folder, honest)
    assert check(cli, folder, path).code == 0
    for what, (lie, reason) in lies.items():
        signed(folder, lie)
        found = check(cli, folder, path)
        assert found.code == 4, what
        assert reason in reasons(found), (what, reasons(found))


def test_certificate_cannot_claim_a_larger_ball(cli: Any, folder: Path) -> None:
    """Neither by another number, nor for a proof of one checkpoint, nor without a proof."""
    target = folder / "out" / "verify.cert.json"
    key = load_private((folder / "kcdsl.key").read_bytes())
    original = json.loads(decode(parse_bundle(target.read_bytes())).payload)
    words = ["check", str(target), "--contract", str(folder / "contract.yaml"), "--format", "json"]
    words += ["--key", str(folder / "kcdsl.key.pub")]

    def changed(**fields: Any) -> set[str]:
        statement = json.loads(json.dumps(original))
        clause = statement["predicate"]["clauses"][0]
        for name, value in fields.items():
            clause.pop(name, None)
            if value is not None:
                clause[name] = value
        data = canonical_json(statement)
        target.write_bytes(bundle_bytes(sign(data, [key]), key.public.hint))
        return reasons(cli(*words, "--recheck"))

    assert original["predicate"]["clauses"][0]["weights"] == "0.01"
    assert changed() == set()
    assert changed(weights="0.005") == set()
    assert changed(weights=None) == set()
    assert changed(weights="0.010001") == {"proof/weights-mismatch"}
    assert changed(weights="1/2") == {"proof/weights-mismatch"}
    assert "clause/weights" in changed(weights="0.6")
    assert "clause/weights" in changed(weights="0")
    sample = {"proofDigest": None, "proofPath": None, "evidence": "sample", "method": "attack/1"}
    assert "clause/weights" in changed(**sample, verdict="INCONCLUSIVE")


def test_refused_certificate_is_no_base(cli: Any, folder: Path) -> None:
    """One of other kernels, of another contract or by another key, whatever the transfer says."""
    path = later(folder)
    assert run(cli, folder, path).code == 0
    honest, target = written(folder), folder / "out" / "verify.cert.json"
    key = load_private((folder / "kcdsl.key").read_bytes())
    body = read_statement(decode(parse_bundle(target.read_bytes())).payload)
    assert isinstance(body, Predicate)
    contract = replace(body.triple.contract, digest="0" * 64)
    lies = {
        "triple/kernel-infer-mismatch": replace(body.triple, infer=body.triple.train),
        "triple/contract-mismatch": replace(body.triple, contract=contract),
    }
    for reason, triple in lies.items():
        payload = payload_bytes(replace(body, triple=triple))
        target.write_bytes(bundle_bytes(sign(payload, [key]), key.public.hint))
        signed(folder, replace(honest, base=certificate_id(payload)))
        found = check(cli, folder, path)
        assert found.code == 4
        assert reason in reasons(found)
    signed(folder, honest)
    target.write_bytes(bundle_bytes(sign(payload_bytes(body), [generate()]), "x"))
    found = check(cli, folder, path)
    assert found.code == 4
    assert "signature/none-trusted" in reasons(found)


def test_other_weights_are_rejected(cli: Any, folder: Path) -> None:
    path = later(folder)
    assert run(cli, folder, path).code == 0
    honest = written(folder)
    assert "transfer/no-base" in reasons(check(cli, folder, path, base=None))
    assert reasons(check(cli, folder, folder / "model.safetensors")) >= {
        "triple/checkpoint-mismatch"
    }
    shutil.copy(path, folder / "wrong.safetensors")
    assert "transfer/base-checkpoint" in reasons(check(cli, folder, path, base="wrong"))
    # Weights outside the ball, with a matching triple and signature.
    path = later(folder, _with(Q, 7.0))
    program = load_program(folder / "contract.yaml")
    signed(folder, replace(honest, triple=build_triple(program, folder, checkpoint=path)))
    assert "transfer/outside" in reasons(check(cli, folder, path))


def test_unsigned_or_changed_transfer_is_invalid(cli: Any, folder: Path) -> None:
    path = later(folder)
    assert run(cli, folder, path).code == 0
    target = folder / "out" / "verify.transfer.json"
    document = json.loads(target.read_bytes())
    payload = bytearray(base64.b64decode(document["dsseEnvelope"]["payload"]))
    payload[payload.index(b'"carried"') + 2] ^= 1
    document["dsseEnvelope"]["payload"] = base64.b64encode(bytes(payload)).decode()
    target.write_text(json.dumps(document))
    assert check(cli, folder, path).code == 4
    target.unlink()
    assert run(cli, folder, path, sign=False).code == 0
    statement = folder / "out" / "verify.transfer.statement.json"
    shutil.copy(statement, target)
    unsigned = check(cli, folder, path)
    assert unsigned.code == 2
    assert "is a statement that is not signed" in unsigned.stderr
    target.unlink()
    assert cli("sign", str(statement), "--key", str(folder / "kcdsl.key")).code == 0
    assert check(cli, folder, path).code == 0


def test_transfer_is_not_a_base_and_needs_the_proofs(cli: Any, folder: Path) -> None:
    path = later(folder)
    assert run(cli, folder, path).code == 0
    from_transfer = cli(
        *("transfer", str(folder / "out" / "verify.transfer.json"), str(path)),
        *("--contract", str(folder / "contract.yaml"), "-o", str(folder / "out" / "two.json")),
        *("--key", str(folder / "kcdsl.key.pub")),
    )
    assert from_transfer.code == 4
    assert "carry over the certificate that it names" in from_transfer.stdout
    proof = folder / "out" / "N-0.proof.json"
    kept = proof.read_bytes()
    proof.unlink()
    assert "proof/missing" in reasons(check(cli, folder, path))
    assert run(cli, folder, path).code == 4
    proof.write_bytes(kept.replace(b'"0.01"', b'"0.02"'))
    assert "proof/digest-mismatch" in reasons(check(cli, folder, path))


def test_certificates_of_one_checkpoint_do_not_transfer(cli: Any, folder: Path) -> None:
    contract = str(folder / "contract.yaml")
    key = ("--sign", str(folder / "kcdsl.key"))
    assert cli("verify", contract, "--attack", "off", "--cache", "off", *key).code == 0
    found = run(cli, folder, later(folder), "--format", "json")
    assert found.code == 3
    assert {item["reason"] for item in json.loads(found.stdout)["left"]} == {"no-region"}


@pytest.mark.parametrize("text", ["5%", "0", "-1e-4", "0.6", "nan", "1e", ""])
def test_radius_must_be_a_number(cli: Any, folder: Path, text: str) -> None:
    found = cli("verify", str(folder / "contract.yaml"), f"--weights={text}")
    assert found.code == 2
    assert "KC475" in found.stderr


def test_chains_refuse_weight_balls(cli: Any, folder: Path) -> None:
    for option in ("--weights=1e-3", "--states=1e-3"):
        found = cli("verify", str(folder / "contract.yaml"), "--chain", option)
        assert found.code == 2
        assert "KC475" in found.stderr


def test_file_outside_the_folder_is_refused(cli: Any, folder: Path) -> None:
    found = run(cli, folder, later(folder), "-o", str(folder / "elsewhere.json"))
    assert found.code == 2
    assert "KC665" in found.stderr
