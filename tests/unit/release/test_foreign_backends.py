"""Answers of a foreign backend are accepted only as far as they can be verified."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import EvidenceKind
from kcdsl.release import foreign
from kcdsl.release.foreign import ForeignBackend
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_certs.encoding.rejected import Rejected
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0:
    require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= LIMIT"
    evidence: proof
    level: L2
"""
FOREIGN = """\
import base64, json, os, pickle, sys, time
from dataclasses import replace
from pathlib import Path
from kcdsl.ir.terms import EvidenceKind
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome

def right(program, base, goals, **wishes):
    way = f"right-{goals[0].threshold.denominator}-{wishes.get('chain')}"
    kept = Path(__file__).with_name(way)
    if kept.exists():
        return [replace(found, goal=goals[0]) for found in pickle.loads(kept.read_bytes())]
    from kcdsl_backends.certifier.backend import BACKEND
    found = list(BACKEND.decide(program, base, goals, **wishes))
    kept.write_bytes(pickle.dumps(found))
    return found

def empty(goals, **more):
    made = dict(evidence=Evidence(EvidenceKind.PROOF), backend="mine", cases=(), seconds=0.0,
                peak_bytes=0, verdict=Held())
    return [GoalOutcome(goal=goal, **{**made, **more}) for goal in goals]

CASES = tuple(CaseOutcome(f"p{i}", 5, 1e-9) for i in range(2))

def edited(found, change):
    document = json.loads(found.proof)
    change(document)
    return [replace(found, proof=json.dumps(document).encode())]

def still(case):
    centre = case["region"]["centre"]
    centre["data"] = base64.b64encode(bytes(len(base64.b64decode(centre["data"])))).decode()

class Mine:
    name = "mine"

    def decide(self, program, base, goals, **wishes):
        way = Path(__file__).with_name("way").read_text()
        wishes.pop("progress", None)
        if way in WITHOUT:
            return WITHOUT[way](goals)
        found = right(program, base, goals, **wishes)
        return WITH[way](found)

def hang(goals):
    while True:
        time.sleep(1)

WITHOUT = {
    "nothing at all": lambda goals: [],
    "held alone": lambda goals: empty(goals),
    "held with cases": lambda goals: empty(goals, cases=CASES),
    "no proof": lambda goals: empty(goals, cases=CASES, proof=b"{}"),
    "no document": lambda goals: empty(goals, cases=CASES, proof=b"trust me"),
    "a list": lambda goals: empty(goals, cases=CASES, proof=b"[]"),
    "deep": lambda goals: empty(goals, cases=CASES, proof=b"[" * 100000),
    "nan": lambda goals: empty(goals, cases=(CaseOutcome("p0", 5, float("nan")),), proof=b"{}"),
    "negative": lambda goals: empty(goals, cases=(CaseOutcome("p0", 5, -1.0),), proof=b"{}"),
    "nan attack": lambda goals: empty(
        goals, cases=(CaseOutcome("p0", 5, 0.0, float("nan")),), proof=b"{}"
    ),
    "census": lambda goals: empty(
        goals, cases=CASES, proof=b"{}", evidence=Evidence(EvidenceKind.CENSUS)
    ),
    "real": lambda goals: empty(
        goals, cases=CASES, proof=b"{}", evidence=Evidence(EvidenceKind.PROOF_REAL)
    ),
    "violated alone": lambda goals: empty(goals, verdict=Violated({"value": "9"})),
    "violated without values": lambda goals: empty(goals, verdict=Violated()),
    "violated by nothing": lambda goals: empty(
        goals, verdict=Violated({"value": "9"}), counterexample=b"{}"
    ),
    "another word": lambda goals: empty(goals, verdict=True),
    "raises": lambda goals: 1 / 0,
    "exits": lambda goals: os._exit(0),
    "leaves": lambda goals: sys.exit(0),
    "hangs": hang,
    "no list": lambda goals: None,
    "strings": lambda goals: ["held"],
    "twice": lambda goals: empty(goals) * 2,
    "another goal": lambda goals: empty([replace(goals[0], block="mlp_0")]),
    "another slice": lambda goals: empty(
        [replace(goals[0], region=replace(goals[0].region, slice="short"))]
    ),
}
WITH = {
    "right": lambda found: found,
    "prints": lambda found: print('{"schema": "kcdsl.verify/2"}') or found,
    "one case": lambda found: edited(found[0], lambda d: d["cases"].pop()),
    "one case, said": lambda found: [
        replace(edited(found[0], lambda d: d["cases"].pop())[0], cases=found[0].cases[:1])
    ],
    "one case twice": lambda found: edited(
        found[0], lambda d: d["cases"].__setitem__(1, {**d["cases"][0], "name": "p1"})
    ),
    "lower claims": lambda found: edited(
        found[0], lambda d: [c.update(claim=(0.0).hex()) for c in d["cases"]]
    ),
    "other states": lambda found: edited(found[0], lambda d: [still(c) for c in d["cases"]]),
    "another block": lambda found: edited(found[0], lambda d: d.update(block="mlp_0")),
    "lower bounds": lambda found: [
        replace(found[0], cases=tuple(replace(c, bound=0.0, attack=None) for c in found[0].cases))
    ],
}
BACKEND = Mine()
"""
MINE = BackendSpec(
    "mine", "foreign_backend:BACKEND", frozenset({Fragment.UNIVERSAL_DRIFT}), rank=90
)
Ask = Callable[..., GoalOutcome]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and its rows, with the backend installed beside it."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "installed").mkdir()
    (folder / "installed" / "foreign_backend.py").write_text(FOREIGN)
    rows = [{"id": f"p{i}", "text": text} for i, text in enumerate(("hello", "a b"))]
    write_model(folder, rows=rows)
    return folder


@pytest.fixture
def prepare(work: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that makes the backend answer in a given way about a contract."""
    monkeypatch.syspath_prepend(str(work / "installed"))

    def ready(way: str, limit: str = "0.01") -> Path:
        (work / "installed" / "way").write_text(way)
        (work / "contract.yaml").write_text(CONTRACT.replace("LIMIT", limit))
        return work

    return ready


@pytest.fixture
def ask(prepare: Callable[[str, str], Path]) -> Ask:
    """Return a function that runs the foreign backend, which answers in a given way."""

    def run(way: str, limit: str = "0.01", seconds: float = 300.0) -> GoalOutcome:
        folder = prepare(way, limit)
        program = load_program(folder / "contract.yaml")
        (found,) = ForeignBackend(MINE, seconds).decide(program, folder, goals(program))
        return found

    return run


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the backend, which can chain, to the catalogue."""
    specs = (*catalogue(), replace(MINE, chains=True))
    monkeypatch.setattr("kcdsl.route.catalogue.catalogue", lambda: specs)
    monkeypatch.setattr("kcdsl.api.backends.catalogue", lambda: specs)


@pytest.mark.full
@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("limit", "code", "verdict"), [("0.01", 0, "held"), ("1e-9", 1, "violated")]
)
def test_verifiable_answers_are_accepted(
    limit: str, code: int, verdict: str, prepare: Callable[[str, str], Path], cli: Any
) -> None:
    """Through the command; output of the backend does not appear on stdout."""
    ran = cli("verify", "--backend", "mine", "--format", "json", cwd=prepare("prints", limit))
    (goal,) = json.loads(ran.stdout)["goals"]
    assert (ran.code, goal["verdict"], goal["backend"]) == (code, verdict, "mine"), ran
    assert goal["evidence"]["confirmed"] is (verdict == "held")


@pytest.mark.full
@pytest.mark.usefixtures("known")
def test_proof_of_a_chain_is_accepted(prepare: Callable[[str, str], Path], cli: Any) -> None:
    folder = prepare("right", "0.01")
    contract = folder / "contract.yaml"
    contract.write_text(contract.read_text().replace("attn_0", "layer_0"))
    ran = cli("verify", "--backend", "mine", "--chain", "--format", "json", cwd=folder)
    (goal,) = json.loads(ran.stdout)["goals"]
    assert (ran.code, goal["verdict"], goal["backend"]) == (0, "held", "mine"), ran
    proof = json.loads((folder / "out" / "N-0.proof.json").read_bytes())
    assert proof["schema"].startswith("kcdsl.chain-proof/")
    assert goal["evidence"]["confirmed"] is True


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("held alone", "it names no case"),
        ("held with cases", "it has no proof object"),
        ("no proof", "its proof does not show the clause"),
        ("no document", "its proof is no document"),
        ("a list", "its proof does not show the clause"),
        ("deep", "its proof is no document"),
        ("nan", "no bound that settles the goal"),
        ("negative", "no bound that settles the goal"),
        ("census", "is not shown by census"),
        ("real", "the clause demands proof"),
        ("violated alone", "it brings no run"),
        ("violated without values", "it brings no run"),
        ("violated by nothing", "its counterexample"),
        ("one case", "its proof"),
        ("one case, said", "recount/rows-missing"),
        ("one case twice", "recount/case"),
        ("lower claims", "its proof is not confirmed"),
        ("other states", "its proof is about something else: p0: a state"),
        ("another block", "proof/"),
        ("lower bounds", "proof/bound-not-confirmed"),
    ],
)
def test_unproved_answers_are_inconclusive(way: str, words: str, ask: Ask) -> None:
    found = ask(way)
    assert isinstance(found.verdict, Inconclusive), found
    assert words in found.verdict.reason
    assert "backend 'mine' is not believed" in found.verdict.reason
    assert (found.proof, found.counterexample, found.confirmed) == (None, None, False)


@pytest.mark.parametrize("way", ["nan attack", "another word"])
def test_impossible_runs_are_invalid(way: str, ask: Ask) -> None:
    assert isinstance(ask(way).verdict, InvalidEvidence)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("nothing at all", "1 goals were sent, in order; it answers []"),
        ("twice", "it answers [0, 0]"),
        ("another goal", "it answers [another goal]"),
        ("another slice", "it answers [another goal]"),
        ("raises", "ZeroDivisionError"),
        ("exits", "its process ended with exit code 0"),
        ("leaves", "SystemExit"),
        ("no list", "TypeError"),
        ("strings", "AttributeError"),
    ],
)
def test_answers_about_another_subject_are_refused(way: str, words: str, ask: Ask) -> None:
    with pytest.raises(Refusal) as refused:
        ask(way)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.id == "KC402"
    assert diagnostic.message.startswith("backend 'mine' gave no usable answer: ")
    assert words in diagnostic.message


@pytest.mark.full
def test_hanging_backend_is_terminated(ask: Ask) -> None:
    started = time.monotonic()
    found = ask("hangs", seconds=3)
    assert time.monotonic() - started < 60
    assert isinstance(found.verdict, Inconclusive)
    assert "gave no answer within 3 s" in found.verdict.reason


def test_case_without_a_bound_is_refused() -> None:
    """A backend may write its answer itself."""
    case = {
        "name": "p0", "length": 5, "bound": None, "attack": None, "reason": None, "stable": None,
        "margin": None,
    }  # fmt: skip
    told = {
        "goal": 0, "verdict": "Held", "reason": "", "counterexample": None, "evidence": "proof",
        "assumptions": [], "cases": [case], "proof": "e30=", "run": None, "notes": [],
    }  # fmt: skip
    goal: Any = object()
    with pytest.raises(Rejected, match="answer/number: a case without a bound"):
        foreign._answers({"outcomes": [told]}, [goal], "mine", 1.0)
    case["bound"] = (0.5).hex()
    (found,) = foreign._answers({"outcomes": [told]}, [goal], "mine", 1.0)
    assert found.cases[0].bound == 0.5


def engine(missing: tuple[str, ...] = (), refutes: bool = False) -> Any:
    """Return a stand-in for the built-in backend, which repeats counterexamples."""
    own = SimpleNamespace(replay=lambda *given, **wishes: SimpleNamespace(refutes=refutes))
    target = next(spec.target for spec in catalogue() if spec.domains)
    return SimpleNamespace(
        target=target, domains=("interval",), missing=lambda: missing, load=lambda: own
    )


@pytest.mark.parametrize(
    ("engines", "run", "words"),
    [
        ((), b'{"clause": "N-0"}', "nothing is installed that runs its counterexample again"),
        ((MINE,), b'{"clause": "N-0"}', "nothing is installed"),
        ((engine(("torch",), True),), b'{"clause": "N-0"}', "nothing is installed"),
        ((engine(refutes=False),), b'{"clause": "N-0"}', "does not break the clause"),
        ((engine(refutes=True),), b'{"clause": "N-1"}', "is about another clause"),
        ((engine(refutes=True),), b"[]", "is no document"),
        ((engine(refutes=True),), b'{"clause": "N-0"}', None),
    ],
)
def test_violation_needs_a_run_that_breaks_the_clause_again(
    prepare: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    engines: tuple[Any, ...],
    run: bytes,
    words: str | None,
) -> None:
    folder = prepare("no way", "0.01")
    program = load_program(folder / "contract.yaml")
    (goal,) = goals(program)
    claimed = GoalOutcome(
        goal, Violated({"value": "9"}), Evidence(EvidenceKind.PROOF), "mine", (), 0.0, 0,
        proof=b"{}", counterexample=run,
    )  # fmt: skip
    monkeypatch.setattr(foreign, "catalogue", lambda: engines)
    found = foreign.verified_outcome(program, folder, claimed, "cpu")
    if words is None:
        assert (found.verdict, found.proof, found.counterexample) == (claimed.verdict, None, run)
        return
    assert isinstance(found.verdict, Inconclusive)
    assert words in found.verdict.reason
    assert (found.proof, found.counterexample) == (None, None)


@pytest.mark.parametrize("objection", [None, "its proof is no document"])
def test_held_answer_is_confirmed_by_its_proof_alone(
    prepare: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, objection: str | None
) -> None:
    folder = prepare("no way", "0.01")
    program = load_program(folder / "contract.yaml")
    (goal,) = goals(program)
    claimed = GoalOutcome(
        goal, Held(), Evidence(EvidenceKind.PROOF), "mine", (CaseOutcome("p0", 5, 1e-9),), 0.0, 0,
        proof=b"{}", counterexample=b"{}",
    )  # fmt: skip
    monkeypatch.setattr(foreign, "_unproved", lambda *given: objection)
    found = foreign.verified_outcome(program, folder, claimed, "cpu")
    assert found.confirmed is (objection is None)
    assert isinstance(found.verdict, Held if objection is None else Inconclusive)
    assert (found.proof is None, found.counterexample) == (objection is not None, None)


MEASURING = """\
from kcdsl.route.catalogue import BackendSpec, Fragment
CATALOGUE = (
    BackendSpec(
        "theirs", "their_engine:BACKEND", frozenset(Fragment), rank=-1,
        planner="their_engine:BACKEND", attributor="their_engine:BACKEND",
    ),
)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution whose backend claims every fragment with the lowest rank.

    Its import creates a file; return the path of this file.
    """
    place, mark = tmp_path / "site", tmp_path / "imported"
    (place / "theirs-1.dist-info").mkdir(parents=True)
    (place / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (place / "theirs-1.dist-info" / "entry_points.txt").write_text(
        "[kcdsl.backends]\ntheirs = their_catalogue:CATALOGUE\n"
    )
    (place / "their_catalogue.py").write_text(MEASURING)
    (place / "their_engine.py").write_text(f"open({str(mark)!r}, 'w').close()\nBACKEND = None\n")
    monkeypatch.syspath_prepend(str(place))
    return mark


@pytest.mark.full
def test_only_the_built_in_backend_measures_plans_and_attributes(
    installed: Path, tmp_path: Path, cli: Any
) -> None:
    (found,) = (spec for spec in catalogue() if spec.name == "theirs")
    assert found.fragments == {Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP}
    folder = tmp_path / "work"
    folder.mkdir()
    write_model(folder, rows=[{"id": "p0", "text": "hello"}])
    head, _, _ = CONTRACT.partition("clauses:")
    clause = "clauses:\n  S-KL: {require: p99(kl) <= 1, level: L2}\n"
    (folder / "contract.yaml").write_text(head + clause)
    for words in (["evaluate"], ["plan"], ["attribute"]):
        ran = cli(*words, cwd=folder)
        assert ran.code in (0, 3), (words, ran)  # one request is too few for some
    assert not installed.exists()
