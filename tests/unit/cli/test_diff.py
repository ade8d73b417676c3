"""`kcdsl diff`: output, exit codes and inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

HEAD = """\
kcdsl: 1
contract: pages
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices:
  all: {}
  long: {where: length > 128}
clauses:
"""
KL = "  N-KL: {require: p99(kl) <= 0.02, level: L2}\n"
TV = "  N-TV: {require: max(tv) <= 5%, level: L2}\n"
MAX = KL.replace("p99", "max")
LOOSE = "  N-KL: {require: p99(kl) <= 0.05, level: L2}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that contracts name."""
    (tmp_path / "requests.jsonl").touch()
    return tmp_path


Ask = Callable[..., Any]


@pytest.fixture
def diff(cli: Cli, folder: Path) -> Ask:
    """Return a function that compares two lists of clauses."""

    def ask(old: str, new: str, *options: str) -> Any:
        (folder / "old.yaml").write_text(HEAD + old, encoding="utf-8")
        (folder / "new.yaml").write_text(HEAD + new, encoding="utf-8")
        return cli("diff", "old.yaml", "new.yaml", *options, cwd=folder)

    return ask


@pytest.mark.parametrize(
    ("old", "new", "relation", "code"),
    [
        (KL, KL, "equal", 0),
        (KL, f"# moved\n{KL}", "equal", 0),
        (KL, KL.replace("0.02", "2e-2"), "equal", 0),
        (KL, KL + TV, "stricter", 0),
        (LOOSE, KL, "stricter", 0),
        (KL, LOOSE, "weaker", 1),
        (KL + TV, KL, "weaker", 1),
        (LOOSE + TV, KL, "incomparable", 1),
        (KL, KL.replace("L2", "L1"), "weaker", 1),
        (KL, KL.replace("L2", "L3"), "stricter", 0),
        (KL, KL.replace("p99(kl) <= 0.02", "max(kl) <= 0.02, budget: 1% of requests"), "equal", 0),
        (KL, KL.replace("p99(kl) <= 0.02", "max(kl) <= 0.02, budget: 2% of requests"), "weaker", 1),
        (KL, KL.replace("level", "slices: [long], level"), "incomparable", 1),
        (MAX, MAX.replace("level", "slices: [long], level"), "weaker", 1),
        (KL, KL.replace("level", "holdout: true, level"), "stricter", 0),
    ],
)  # fmt: skip
def test_relation_determines_the_exit_code(
    diff: Ask, old: str, new: str, relation: str, code: int
) -> None:
    ran = diff(old, new)
    assert ran.stdout.splitlines()[3].partition(":")[0] == relation, ran.stdout
    assert (ran.code, ran.stderr) == (code, "")


def test_diff_document_follows_its_schema(diff: Ask, follows: Callable[[Any], None]) -> None:
    for old, new in ((KL + TV, LOOSE), (KL, KL), (KL, KL.replace("N-KL", "N-TAIL"))):
        document = json.loads(diff(old, new, "--format", "json").stdout)
        follows(document)
    assert document["clauses"][0]["status"] == "renamed"
    document = json.loads(diff(KL + TV, LOOSE, "--format", "json").stdout)
    (changed, gone) = document["clauses"]
    assert changed["witness"] == {
        "accepts": "new",
        "refuses": "old",
        "clause": "N-KL",
        "extent": "contract",
        "of": "the slice all",
        "values": [{"what": "p99(kl) on all", "value": "0.05 nats", "exact": "1/20"}],
        "lacking": [],
        "flips": [],
        "request": None,
    }
    assert (gone["status"], gone["relation"], gone["witness"]["clause"]) == (
        "removed", "weaker", "N-TV",
    )  # fmt: skip


def test_removed_clause_that_others_imply(diff: Ask) -> None:
    ran = diff(KL, TV.replace("tv) <= 5%", "kl) <= 0.01"))
    assert ran.code == 0
    assert "N-KL: removed, equal\n" in ran.stdout
    assert "still implied by N-TV\n    because no percentile is above the maximum" in "".join(
        line + "\n" for line in ran.stdout.splitlines()
    ).replace("p99(kl) <= max(kl): ", "").replace("  still", "still")


def test_weaker_clause_is_named(diff: Ask) -> None:
    ran = diff(KL, LOOSE + KL.replace("N-KL", "N-MILD").replace("L2", "L1"))
    assert ran.code == 1
    assert "N-KL of NEW accepts and that of OLD refuses, on the slice all:" in ran.stdout
    assert "though N-MILD still demands it, with other consequences" in ran.stdout


def test_held_out_clauses_are_not_shown_as_reasons(diff: Ask) -> None:
    held, other = KL.replace("level", "holdout: true, level"), MAX.replace("N-KL", "N-MAX")
    assert diff(held, KL).code == 1
    assert diff(held, other).code == 1
    assert diff(held, other.replace("level", "holdout: true, level")).code == 0


def test_zero_time_limit_is_undecided(diff: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    from kcdsl_backends.smt.solver import Clock

    monkeypatch.setattr(Clock, "allowance", lambda self: 0)
    ran = diff(KL, LOOSE)
    assert ran.code == 3
    assert "undecided: " in ran.stdout


def test_changed_data_and_requests_are_reported(diff: Ask, cli: Cli, folder: Path) -> None:
    diff(KL, KL)
    moved = HEAD.replace("data: requests", "data: others") + KL
    (folder / "new.yaml").write_text(moved, encoding="utf-8")
    ran = cli("diff", "old.yaml", "new.yaml", cwd=folder)
    assert ran.code == 1
    told = "slice all  every request in requests.jsonl -> every request in others.jsonl"
    assert f"  {told}  (incomparable)\n" in ran.stdout


def test_stored_programs_are_compared(diff: Ask, cli: Cli, folder: Path) -> None:
    diff(KL, LOOSE)
    assert cli("compile", "old.yaml", "--emit", "ir", "-o", "old.ir.json", cwd=folder).code == 0
    ran = cli("diff", "old.ir.json", "new.yaml", cwd=folder)
    assert ran.code == 1
    assert "  require  p99(kl) <= 0.02 nats -> p99(kl) <= 0.05  (weaker)\n" in ran.stdout
    assert cli("diff", "old.ir.json", "old.yaml", cwd=folder).code == 0


def test_forged_program_is_refused(diff: Ask, cli: Cli, folder: Path) -> None:
    diff(KL, LOOSE)
    cli("compile", "old.yaml", "--emit", "ir", "-o", "old.ir.json", cwd=folder)
    stored = folder / "old.ir.json"
    stored.write_text(stored.read_text("utf-8").replace('"1/50"', '"1/20"'), encoding="utf-8")
    ran = cli("diff", "old.ir.json", "new.yaml", cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert "error[KC607]: old.ir.json: the digest does not belong to the program" in ran.stderr


def test_other_commands_explain_that_a_file_is_a_stored_program(
    diff: Ask, cli: Cli, folder: Path
) -> None:
    diff(KL, LOOSE)
    cli("compile", "old.yaml", "--emit", "ir", "-o", "old.ir.json", cwd=folder)
    for command in ("compile", "lint"):
        ran = cli(command, "old.ir.json", cwd=folder)
        assert ran.code == (1 if command == "lint" else 2), command
        said = ran.stdout + ran.stderr
        assert said.count("error[") == 1, said
        assert "error[KC607]: this is a document `kcdsl.ir/1`" in said


def test_contract_with_errors_is_refused(diff: Ask) -> None:
    ran = diff(KL, KL.replace("kl)", "klx)"))
    assert (ran.code, ran.stdout) == (2, "")
    assert "KC203" in ran.stderr


def test_what_a_contract_quotes_steers_no_terminal(cli: Cli, folder: Path) -> None:
    where = r'"task == \"a\e[2J\u009b31m\u202e <img src=x> | \""'
    old, new = (folder / name for name in ("old.yaml", "new.yaml"))
    old.write_text(HEAD + KL, encoding="utf-8")
    new.write_text(HEAD.replace("all: {}", f"all: {{where: {where}}}") + KL, encoding="utf-8")
    ran = cli("diff", "old.yaml", "new.yaml", cwd=folder)
    assert ran.code == 1, ran.stderr
    assert all(char == "\n" or char.isprintable() for char in ran.stdout), ran.stdout
    assert "task ==" in ran.stdout
