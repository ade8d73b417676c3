"""`kcdsl fleet`: pairwise agreement of kernels under one contract, and their classes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.release.issue import issue, result_for
from kcdsl.release.requirements import required_clauses
from kcdsl.release.results import proof_reference
from kcdsl.verdict.studies.fleet import Direction, Fleet, FleetKernel, KernelPair
from kcdsl_certs.signatures import Algorithm, SigningKey, decode, generate, parse_bundle
from kcdsl_certs.statement import Evidence, Verdict, certificate_id
from tests.support.release_scenes import CONTRACT, NOW, evidence_of, results, stand_in, tiny

TRAIN = "{run: torch.eager, numerics: {preset: torch-eager, compute: %s}}"
KERNELS = {"a": "float32", "b": "bfloat16", "c": "float16"}
AT = ("--at", "2026-12-01T00:00:00Z")


def text_of(train: str, infer: str, contract: str = CONTRACT) -> str:
    """Return the contract of a pair of kernels."""
    head, _, rest = contract.partition("kernels:\n")
    tail = rest[rest.index("data:") :]
    sides = f"  train: {TRAIN % KERNELS[train]}\n  infer: {TRAIN % KERNELS[infer]}\n"
    return f"{head}kernels:\n{sides}{tail}"


class Scene:
    """A folder with contracts of kernel pairs, and their certificates."""

    def __init__(self, folder: Path) -> None:
        tiny(folder)
        self.folder, self.key = folder, generate(Algorithm.ED25519)
        (folder / "key.pub").write_bytes(self.key.public.pem)
        self.contracts: list[Path] = []
        self.certificates: list[Path] = []

    def pair(
        self,
        train: str,
        infer: str,
        spoil: Any = None,
        key: SigningKey | None = None,
        text: str = "",
        **fields: Any,
    ) -> Path:
        """Issue a certificate of a pair; `spoil` changes its results."""
        name = f"{train}{infer}"
        contract = self.folder / f"{name}.kc.yaml"
        contract.write_text(text or text_of(train, infer))
        program = load_program(contract)
        proof = stand_in(program, self.folder)
        found = results(program, self.folder, proof_reference("N-ATTN-0", proof))
        if spoil is not None:
            found = spoil(found)
        bundle = issue(
            program=program,
            base=self.folder,
            clauses=found,
            keys=[key or self.key],
            clock=lambda: NOW,
            evidence=evidence_of(program, self.folder / "out", found[1:]),
            **fields,
        )
        path = self.folder / f"{name}-{len(self.certificates)}.cert.json"
        path.write_bytes(bundle)
        if contract not in self.contracts:
            self.contracts.append(contract)
        self.certificates.append(path)
        return path

    def words(self, *certificates: Path) -> list[Any]:
        """Return the arguments of the command."""
        found: list[Any] = ["fleet", *(certificates or self.certificates), *AT]
        for contract in self.contracts:
            found += ["--contract", contract]
        return [*found, "--key", self.folder / "key.pub"]


def failed(found: list[Any]) -> list[Any]:
    """Return results in which p99(kl) failed."""
    return [
        replace(c, verdict=Verdict.FAILED, value=1, exceed=1) if c.id == "N-KL" else c
        for c in found
    ]


def undecided(found: list[Any]) -> list[Any]:
    """Return results in which p99(kl) is undecided."""
    return [
        replace(c, verdict=Verdict.INCONCLUSIVE, value=None, exceed=None, n=0)
        if c.id == "N-KL"
        else c
        for c in found
    ]


@pytest.fixture
def made(tmp_path: Path) -> Scene:
    """Return an empty problem."""
    return Scene(tmp_path)


@pytest.fixture
def ask(cli: Any, follows: Any) -> Callable[..., Any]:
    """Return a function that runs the command: exit code, document and terminal output."""

    def run(words: list[Any], code: int) -> tuple[dict[str, Any], str]:
        ran = cli(*words, "--format", "json")
        assert ran.code == code, ran.stdout + ran.stderr
        document = json.loads(ran.stdout)
        follows(document, "kcdsl.fleet/1")
        return document, cli(*words).stdout

    return run


def states(document: dict[str, Any]) -> dict[str, str]:
    return {pair["one"] + pair["two"]: pair["agreement"] for pair in document["pairs"]}


def test_mutually_agreeing_kernels_form_one_class(made: Scene, ask: Any) -> None:
    for one, two in itertools.permutations("abc", 2):
        made.pair(one, two)
    document, shown = ask(made.words(), 0)
    assert set(states(document).values()) == {"agree"}
    (only,) = document["classes"]
    assert only["members"] == ["K1", "K2", "K3"]
    assert len(set(only["certificates"])) == 6
    assert len(set(only["digests"])) == 3
    assert "class 1: K1, K2, K3 (6 certificates)" in shown


def test_disagreeing_pair_splits_the_fleet_into_overlapping_classes(made: Scene, ask: Any) -> None:
    for one, two in itertools.permutations("abc", 2):
        made.pair(one, two, failed if {one, two} == {"b", "c"} else None)
    document, shown = ask(made.words(), 1)
    assert states(document) == {"K1K2": "agree", "K1K3": "agree", "K2K3": "disagree"}
    assert [c["members"] for c in document["classes"]] == [["K1", "K2"], ["K1", "K3"]]
    assert "K3 against K2: N-KL on all is violated" in shown


def test_agreement_is_neither_transitive_nor_symmetric(made: Scene, ask: Any) -> None:
    for one, two in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("a", "c")):
        made.pair(one, two)
    document, shown = ask(made.words(), 3)
    assert states(document) == {"K1K2": "agree", "K2K3": "agree", "K1K3": "open"}
    assert [c["members"] for c in document["classes"]] == [["K1", "K2"], ["K2", "K3"]]
    assert "no certificate is about it" in shown


def test_partial_certificate_does_not_decide_a_pair(made: Scene, ask: Any) -> None:
    made.pair("a", "b", lambda found: [c for c in found if c.id != "R-LAT"])
    made.pair("b", "a")
    document, shown = ask(made.words(), 3)
    assert states(document) == {"K1K2": "open"}
    assert "R-LAT on all is inconclusive" in shown
    assert [c["members"] for c in document["classes"]] == [["K1"], ["K2"]]


def test_failed_certificate_outweighs_a_passed_one(made: Scene, ask: Any) -> None:
    made.pair("a", "b", failed)
    made.pair("a", "b")
    made.pair("b", "a")
    document, _ = ask(made.words(), 1)
    assert states(document) == {"K1K2": "disagree"}


def test_newer_non_pass_replaces_an_older_pass(made: Scene, ask: Any, cli: Any) -> None:
    made.pair("b", "a")
    old = made.pair("a", "b", sequence=1)
    for sequence in (1, 2):
        newer = made.pair("a", "b", undecided, sequence=sequence)
        document, _ = ask(made.words(*made.certificates[:2], newer), 3)
        assert states(document) == {"K1K2": "open"}
        assert [c["members"] for c in document["classes"]] == [["K1"], ["K2"]]
        told = f"sequence {sequence} of its triple and stage is INCONCLUSIVE"
        assert document["unused"] == {str(old): told}
    assert cli("keygen", "-o", made.folder / "class.key").code == 0
    classes = made.folder / "classes"
    cli(*made.words(), "--sign", made.folder / "class.key", "-o", classes)
    assert not list(classes.glob("*"))
    again = made.pair("a", "b", sequence=3)
    document, _ = ask(made.words(*made.certificates[:3], again), 0)
    assert states(document) == {"K1K2": "agree"}
    made.pair("a", "b", undecided, sequence=4, stage="shadow")
    document, _ = ask(made.words(*made.certificates[:3], *made.certificates[4:]), 0)


@pytest.mark.parametrize("spoil", [failed, undecided])
@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_non_pass_withdraws_older_passes_permanently(
    made: Scene, ask: Any, tmp_path: Path, how: str, spoil: Any
) -> None:
    """A failure outlasts the validity and the revocation of its certificate."""
    made.pair("b", "a")
    old = made.pair("a", "b", sequence=1)
    short: dict[str, Any] = {"lifetime": timedelta(hours=1)} if how == "expired" else {}
    newer = made.pair("a", "b", spoil, sequence=2, **short)
    more: list[Any] = []
    if how == "revoked":
        identity = certificate_id(decode(parse_bundle(newer.read_bytes())).payload)
        revoked = tmp_path / "revoked.toml"
        revoked.write_text(f'revoked-certificates = ["{identity}"]\n')
        more = ["--revocations", revoked]
    document, _ = ask([*made.words(), *more], 3)
    assert states(document) == {"K1K2": "open"}
    assert set(document["unused"]) == {str(old), str(newer)}
    assert how in document["unused"][str(newer)]
    made.pair("a", "b", sequence=3)
    document, _ = ask([*made.words(), *more], 0)
    assert states(document) == {"K1K2": "agree"}


def test_newer_undecided_result_does_not_hide_a_violation(made: Scene, ask: Any) -> None:
    made.pair("b", "a")
    made.pair("a", "b", failed, sequence=1)
    made.pair("a", "b", undecided, sequence=2)
    document, _ = ask(made.words(), 1)
    assert states(document) == {"K1K2": "disagree"}


def test_ignored_certificates_are_named(made: Scene, ask: Any, cli: Any) -> None:
    good = made.pair("a", "b")
    made.pair("b", "a")
    foreign = made.pair("a", "c", key=generate(Algorithm.ED25519))
    copy = good.with_name("copy.cert.json")
    copy.write_bytes(good.read_bytes())
    loose = text_of("a", "c").replace("<= 0.02", "<= 0.03")
    lax = made.pair("a", "c", text=loose)
    made.contracts = made.contracts[:2]
    document, _ = ask(made.words(*made.certificates, copy), 0)
    why = {Path(file).name: reason for file, reason in document["unused"].items()}
    assert set(why) == {foreign.name, copy.name, lax.name}
    assert "signature/none-trusted" in why[foreign.name]
    assert why[copy.name] == "it is named twice"
    assert why[lax.name].startswith("it is about another contract")
    ran = cli(*made.words(foreign))
    assert (ran.code, "signature/none-trusted" in ran.stderr) == (2, True)
    late = made.words(good)
    late[late.index(AT[1])] = "2030-01-01T00:00:00Z"
    ran = cli(*late)
    assert (ran.code, "validity/expired" in ran.stderr) == (2, True)


def test_certificates_of_another_metric_function_are_not_joined(made: Scene, ask: Any) -> None:
    """The contract names the function, and the certificate the file that computed the values."""
    module = (
        "from kcdsl import metric\n\n"
        '@metric(family="numerical", unit="nats", better="lower", counted="token", '
        'needs=["logits"])\n'
        'def gap(train_logits, infer_logits):\n    """Gap."""\n    return %s\n'
    )
    (made.folder / "kcdsl.toml").write_text('metrics = ["own.py"]\n')
    clause = "clauses:\n  N-GAP: {require: mean(gap) <= 1, slices: [all], level: L2}\n"

    def pair(train: str, infer: str, value: str) -> Path:
        (made.folder / "own.py").write_text(module % value)
        text = text_of(train, infer, CONTRACT.replace("clauses:\n", clause))

        def with_gap(found: list[Any]) -> list[Any]:
            program = load_program(made.folder / f"{train}{infer}.kc.yaml")
            (gap,) = (r for r in required_clauses(program, made.folder) if r.id == "N-GAP")
            more: dict[str, Any] = {
                "evidence": Evidence.CENSUS,
                "method": "census/1",
                "value": Fraction(1, 2),
            }
            kl = next(c for c in found if c.id == "N-KL")
            held = result_for(gap, verdict=Verdict.PASSED, n=kl.n, counted=kl.counted, **more)
            return [*found, held]

        return made.pair(train, infer, with_gap, text=text)

    old = pair("a", "b", "[0.0]")
    pair("b", "a", "[0.5]")
    document, _ = ask(made.words(), 3)
    assert document["unused"] == {str(old): "it is about another own.py"}
    (made.folder / "own.py").write_text(module % "[0.5]")
    new = pair("a", "b", "[0.5]")
    document, _ = ask(made.words(made.certificates[1], new), 0)
    assert states(document) == {"K1K2": "agree"}


def test_contract_without_a_certificate_is_undecided(made: Scene, ask: Any) -> None:
    """The matrix lists the kernels of certificates, so one may be missing there."""
    made.pair("a", "b")
    made.pair("b", "a")
    absent = made.folder / "ac.kc.yaml"
    absent.write_text(text_of("a", "c"))
    made.contracts.append(absent)
    foreign = made.pair("a", "c", failed, key=generate(Algorithm.ED25519))
    for certificates in (made.certificates[:2], made.certificates):
        document, shown = ask(made.words(*certificates), 3)
        assert document["without"] == [str(absent)]
        assert states(document) == {"K1K2": "agree"}
        assert f"{absent}: no certificate about it counts" in " ".join(shown.split())
    assert str(foreign) in document["unused"]


def test_contracts_may_differ_in_kernels_only(made: Scene, cli: Any) -> None:
    made.pair("a", "b")
    made.pair("b", "a", text=text_of("b", "a").replace("<= 0.02", "<= 0.03"))
    ran = cli(*made.words())
    assert ran.code == 2
    assert "differs from" in ran.stderr
    assert "in more than its kernels" in ran.stderr


def test_certificates_of_other_weights_are_refused(made: Scene, cli: Any) -> None:
    made.pair("a", "b")
    (made.folder / "model.safetensors").write_bytes(
        (made.folder / "model.safetensors").read_bytes()[:-4] + b"\0\0\0\x41"
    )
    made.pair("b", "a")
    ran = cli(*made.words())
    assert (ran.code, "2 checkpoints" in ran.stderr) == (2, True)


# --- classes --------------------------------------------------------------------------------------


def fleet(n: int, edges: set[frozenset[int]]) -> Fleet:
    """Return a fleet of n kernels whose pairs agree along these edges."""
    kernels = tuple(FleetKernel(f"K{i}", f"k{i}", str(i)) for i in range(1, n + 1))

    def direction(one: int, two: int) -> Direction:
        verdict = "held" if frozenset((one, two)) in edges else "violated"
        return Direction(f"K{one}", f"K{two}", verdict, (f"{one}{two}",), ())

    pairs = tuple(
        KernelPair(f"K{i}", f"K{j}", (direction(i, j), direction(j, i)))
        for i, j in itertools.combinations(range(1, n + 1), 2)
    )
    return Fleet({"name": "x", "version": "1"}, "0", kernels, pairs, {})


@pytest.mark.parametrize("seed", range(20))
def test_classes_are_the_maximal_cliques(seed: int) -> None:
    import random

    chance, n = random.Random(seed), 7
    every = [frozenset(pair) for pair in itertools.combinations(range(1, n + 1), 2)]
    edges = {pair for pair in every if chance.random() < 0.5}
    sets = [
        frozenset(members)
        for size in range(1, n + 1)
        for members in itertools.combinations(range(1, n + 1), size)
        if all(frozenset(p) in edges for p in itertools.combinations(members, 2))
    ]
    largest = {s for s in sets if not any(s < other for other in sets)}
    found = fleet(n, edges).classes
    assert {frozenset(int(m[1:]) for m in c.members) for c in found} == largest
    assert len(found) == len(largest)
    for one in found:
        size = len(one.members)
        assert len(one.certificates) == size * (size - 1)


# --- certificates of classes ----------------------------------------------------------------------


def signed_class(made: Scene, cli: Any) -> Path:
    """Return the certificate of the class of two kernels, signed by a separate key."""
    made.pair("a", "b")
    made.pair("b", "a")
    assert cli("keygen", "-o", made.folder / "class.key").code == 0
    ran = cli(*made.words(), "--sign", made.folder / "class.key", "-o", made.folder / "classes")
    assert ran.code == 0, ran.stderr
    (found,) = (made.folder / "classes").iterdir()
    return found


def policy(made: Scene, *roles: str) -> list[Any]:
    """Return the arguments of a policy in which the key of classes has these roles."""
    text = f'{{path = "class.key.pub", roles = {json.dumps(list(roles))}}}' if roles else ""
    path = made.folder / "policy.toml"
    path.write_text(f'trusted-keys = ["key.pub", {text or chr(34) + "class.key.pub" + chr(34)}]\n')
    return ["--policy", path]


def bare(made: Scene, *certificates: Path) -> list[Any]:
    return made.words(*certificates)[:-2]


def test_class_certificate_is_signed_and_rechecked(
    made: Scene, ask: Any, cli: Any, schemas: dict[str, Any]
) -> None:
    import base64

    import jsonschema

    file = signed_class(made, cli)
    document, shown = ask([*bare(made), *policy(made, "class"), "--class", file], 0)
    (checked,) = document["checked"]
    assert checked["accepted"] is True
    assert len(checked["members"]) == 2
    assert "accepted" in shown
    bundle = json.loads(file.read_bytes())
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    schema = json.loads(Path("certs/kcdsl_certs/kernel-class.schema.json").read_text())
    jsonschema.validate(payload, schema)
    assert payload["predicate"]["validUntil"] == "2027-02-28T12:00:00Z"


def test_class_with_invalid_key_or_certificates_is_refused(made: Scene, ask: Any, cli: Any) -> None:
    file = signed_class(made, cli)
    first, second = made.certificates

    def reason(words: list[Any]) -> str:
        document, _ = ask([*words, "--class", file], 4)
        return str(document["checked"][0]["reason"])

    assert reason([*bare(made), *policy(made)]) == "statement/key-not-allowed"
    assert reason(made.words()) == "signature/none-trusted"
    allowed = policy(made, "class")
    assert reason([*bare(made, first), *allowed]) == "class/certificate-missing"
    late = [*bare(made), *allowed]
    late[late.index(AT[1])] = "2026-11-30T12:00:00Z"
    assert reason(late) == "validity/outside"
    listed = made.folder / "policy.toml"
    whole = listed.read_text()
    listed.write_text(whole.replace("roles", 'stages = ["full"], roles'))
    assert reason([*bare(made), *allowed]) == "stage/key-not-allowed"
    listed.write_text(whole)
    refuting = made.pair("a", "b", failed)
    assert reason([*bare(made, first, second, refuting), *allowed]) == "class/pair-refuted"


def test_class_that_claims_more_than_its_certificates_is_refused(
    made: Scene, ask: Any, cli: Any
) -> None:
    from kcdsl_certs.encoding.strict import strict_load
    from kcdsl_certs.signatures import bundle_bytes, decode, load_private, parse_bundle, sign
    from kcdsl_certs.statement import ClassMember, class_bytes, parse_class, parse_statement

    file = signed_class(made, cli)
    for one, two in (("a", "c"), ("c", "a")):
        made.pair(one, two)
    key = load_private((made.folder / "class.key").read_bytes())
    statement = parse_statement(strict_load(decode(parse_bundle(file.read_bytes())).payload, 10**6))
    honest = parse_class(statement)
    document, _ = ask(made.words(), 3)
    third = next(k for k in document["kernels"] if k["label"] == "K3")
    everybody = sorted(
        c for pair in document["pairs"] for d in pair["directions"] for c in d["certificates"]
    )
    members = tuple(
        sorted((*honest.members, ClassMember("c", third["digest"])), key=lambda m: m.digest)
    )
    contracts = tuple(sorted(document_contracts(made)))
    forged = {
        "class/members": replace(honest, members=members),
        "class/pair-not-shown": replace(
            honest, members=members, certificates=tuple(everybody), contracts=contracts
        ),
        "class/contracts": replace(honest, contracts=contracts),
        "class/checkpoint": replace(honest, checkpoint="0" * 64),
        "class/stage": replace(honest, stage="full"),
        "class/validity": replace(
            honest, valid_until=honest.valid_until.replace(year=honest.valid_until.year + 1)
        ),
        "class/malformed": replace(honest, members=honest.members[:1]),
    }
    for reason, statement_of in forged.items():
        bundle = bundle_bytes(sign(class_bytes(statement_of), [key]), key.public.hint)
        file.write_bytes(bundle)
        words = [*bare(made), *policy(made, "class"), "--class", file]
        document, _ = ask(words, 4)
        assert document["checked"][0]["reason"] == reason


def document_contracts(made: Scene) -> list[str]:
    from kcdsl.ir.canonical import digest

    return [digest(load_program(path)) for path in made.contracts]
