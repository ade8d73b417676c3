"""Attacks on certificates, signing, policies, readers and look-alike models.

    make bench-trust
    python -m bench.trust --mutants 50000

Every row of the table is one attack and its outcome on this tree. `keys` are attacks through the
command line, along with honest uses, which must be accepted. `foreign code` runs every command in a
folder of modules that record their import. `hostile input` gives every reading command files that
are expensive to read; its seconds are processor time of a separate process. `tests` are attacks
that need a second thread, a fault or a link and are written as tests; a failing test is a
successful attack. `mutants` are changes of statements, proofs, run checkpoints, traces and paths.
"""

from __future__ import annotations

import argparse
import queue
import re
import resource
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import trust_mutants
from bench.common import Better, Figure, report
from tests.support import foreign, hostile, trust_attacks
from tests.support.commands import run_here
from tests.support.foreign import Outcome, attempt

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 5.0
"""Seconds after which a reading command counts as hanging."""
TESTS = (
    "tests/unit/release/test_loaded_files.py",
    "tests/unit/release/test_foreign_backends.py",
    "tests/unit/cli/test_planted_links.py",
    "tests/unit/cli/test_hostile_rows.py",
    "tests/unit/release/test_status.py",
    "tests/unit/certs/test_cert_manifest_attacks.py",
    "tests/unit/empirical/test_run_checkpoint.py",
    "tests/unit/model/test_families.py",
    "tests/servers/test_network.py",
)


OF_CONTRACTS: tuple[tuple[str, ...], ...] = (
    ("lint", "contract.yaml"),
    ("lint", "--fix", "--unsafe-fixes", "contract.yaml"),
    ("lint", "--diff", "contract.yaml"),
    ("compile", "contract.yaml"),
    ("fmt", "--check", "contract.yaml"),
    ("fmt", "contract.yaml"),
    ("diff", "contract.yaml", "contract.yaml"),
)
"""The commands that read a hostile contract."""
EDITORS = frozenset({"lint", "fmt"})
"""Commands that need not refuse a contract with errors: they display, fix or format it, without a
verdict."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: its group, its name, whether it succeeded, and its outcome in a word."""

    group: str
    attack: str
    succeeded: bool
    outcome: str
    seconds: float | None = None


def keys(root: Path) -> Iterator[Row]:
    """Attack keys, policies and signing, with honest uses as controls."""
    for control in trust_attacks.CONTROLS:
        found = control(trust_attacks.scene(root / control.__name__, run_here))
        word = "accepted, as it must be" if found.accepted else "REFUSED"
        yield Row("honest use", _words(control.__name__), not found.accepted, word)
    for name, found in trust_attacks.outcomes(root, run_here).items():
        word = "ACCEPTED" if found.accepted else f"refused, exit {found.code}"
        yield Row("keys", _words(name), found.accepted, word)


def foreign_code(root: Path) -> Iterator[Row]:
    """Run every command in a folder where every importable name is a trap."""
    commands = {**foreign.READING, **foreign.RUNNING}
    for name, words in commands.items():
        folder = _trapped(root / name)
        found = attempt(foreign.kcdsl(*words), folder)
        yield _ran("foreign code", f"kcdsl {name}", found)
    foreign.used_contract(root / "used")
    for name, (words, _) in foreign.OF_USED.items():
        found = attempt(foreign.kcdsl(*words, safe=True), root / "used")
        yield _ran("foreign code", f"kcdsl {name}, on real documents", found)
    folder = _trapped(root / "lsp")
    executed = foreign.editor_session(folder)
    word = f"EXECUTED {', '.join(executed)}" if executed else "nothing was run"
    yield Row("foreign code", "kcdsl lsp", bool(executed), word)
    folder = _trapped(root / "checker")
    checker = ["-m", "kcdsl_certs", "check", "certificate.json", "--key", "k.pub"]
    command = [sys.executable, "-I", *checker]
    yield _ran("foreign code", "python -I -m kcdsl_certs check", attempt(command, folder))
    # Without -I, Python itself looks for the package in the working folder first (SECURITY.md).
    (folder / "kcdsl_certs.py").unlink()
    command = [sys.executable, *checker]
    yield _ran("foreign code", "python -m kcdsl_certs check", attempt(command, folder))


def _trapped(folder: Path) -> Path:
    folder.mkdir(parents=True)
    foreign.hostile_contract(folder)
    own = {"trapped_model", "trapped_metrics", "own_metrics"}
    foreign.set_traps(folder, set(foreign.packages()) - own)
    return folder


def _ran(group: str, name: str, found: foreign.Attempt) -> Row:
    bad = found.outcome in (Outcome.EXECUTED, Outcome.HUNG, Outcome.CRASHED)
    word = (
        f"{found.outcome.value.upper()} {', '.join(found.executed)}" if bad else "nothing was run"
    )
    return Row(group, name, bad, word, found.seconds)


def hostile_input(root: Path) -> Iterator[Row]:
    """Give files that are expensive to read to the commands that read them."""
    check = ("check", "j.json", "--contract", "contract.yaml", "--key", "own.key.pub")
    for name, text in hostile.CONTRACTS.items():
        for words in OF_CONTRACTS:
            yield _read(root, f"contract, {name}", {"contract.yaml": text.encode()}, words)
        yield _asked(root, f"contract, {name}", text)
    for name, text in hostile.CONFIGURATIONS.items():
        files = {"kcdsl.toml": text.encode()}
        yield _read(root, f"configuration, {name}", files, ("lint", "contract.yaml"))
    for name, text in hostile.MODULES.items():
        files = {"own.py": text.encode(), "kcdsl.toml": b'metrics = ["own.py"]'}
        yield _read(root, f"metric module, {name}", files, ("lint", "contract.yaml"))
    for name, data in hostile.DATA.items():
        yield _read(root, f"data, {name}", {"prompts.jsonl": data}, ("plan",))
    documents: tuple[tuple[str, ...], ...] = (check, ("report", "j.json"), ("sign", "j.json"))
    for name, data in hostile.DOCUMENTS.items():
        for words in documents:
            yield _read(root, f"document, {name}", {"j.json": data}, words)
    for name, data in hostile.CHECKPOINTS.items():
        yield _read(root, f"checkpoint, {name}", {"model.safetensors": data}, check)
    readers: tuple[tuple[str, ...], ...] = (("plan",), check)
    for name in ("/dev/zero", "/proc/self/environ", "../outside.jsonl"):
        text = (hostile.HEAD + hostile.CLAUSE).replace("prompts.jsonl", f'"{name}"')
        for words in readers:
            yield _read(root, f"data: {name!r}", {"contract.yaml": text.encode()}, words)
    for name, text in hostile.ZEROS.items():
        for words in (*hostile.READERS, check):
            yield _said(root, f"zero byte, {name}", {"contract.yaml": text}, words)
    for name, text in hostile.ZEROS_OF_CONFIGURATIONS.items():
        for words in (*hostile.READERS_OF_CONFIGURATIONS, check):
            yield _said(root, f"zero byte, {name}", {"kcdsl.toml": text}, words)


def _said(root: Path, name: str, files: dict[str, str], words: tuple[str, ...]) -> Row:
    """Run one command in this process on files that it must refuse with an error and its place; the
    attack succeeds otherwise."""
    folder = root / f"{len(list(root.iterdir()))}"
    folder.mkdir()
    known = {
        "contract.yaml": hostile.HEAD + hostile.CLAUSE,
        "lib.yaml": hostile.LIBRARY,
        "j.json": "{}",
    }
    for file, text in {**known, **files}.items():
        (folder / file).write_text(text)
    assert run_here("keygen", "-o", "own.key", cwd=folder).code == 0
    ran = run_here(*words, cwd=folder)
    said = ran.stdout + ran.stderr
    error = re.search(r"error\[(KC\d+)\]", said)
    placed = any(f"{file}:" in said for file in files)
    refused = ran.code != 0 and error is not None and error[1] != "KC999" and placed
    word = f"refused, {error[1]}" if refused and error is not None else "NOT REFUSED"
    return Row("hostile input", f"{name}: kcdsl {_shown(words)}", not refused, word)


def _shown(words: tuple[str, ...]) -> str:
    return " ".join(word for word in words if word == words[0] or word.startswith("--"))


def _read(root: Path, name: str, files: dict[str, bytes], words: tuple[str, ...]) -> Row:
    """Run one command on hostile files; the attack succeeds if it hangs, crashes or accepts."""
    folder = root / f"{len(list(root.iterdir()))}"
    folder.mkdir()
    known = {
        "contract.yaml": (hostile.HEAD + hostile.CLAUSE).encode(),
        "config.json": b"{}",
        "model.safetensors": hostile.CHECKPOINT,
        "prompts.jsonl": b'{"id": "a", "tokens": [0, 1]}\n',
        "j.json": b"{}",
    }
    for file, data in {**known, **files}.items():
        (folder / file).write_bytes(data)
    assert run_here("keygen", "-o", "own.key", cwd=folder).code == 0
    before = _processor_seconds()
    found = attempt(foreign.kcdsl(*words), folder, seconds=60.0)
    took = _processor_seconds() - before
    outcome = Outcome.HUNG if took > SECONDS else found.outcome
    quoted = "PATH=" in found.stdout + found.stderr
    harmless = outcome is Outcome.REFUSED or (outcome is Outcome.ACCEPTED and words[0] in EDITORS)
    word = outcome.value if harmless else outcome.value.upper()
    if quoted:
        word += ", THE ENVIRONMENT IS QUOTED"
    attack = f"{name}: kcdsl {_shown(words)}"
    return Row("hostile input", attack, quoted or not harmless, word, took)


def _asked(root: Path, name: str, text: str) -> Row:
    """Send a language server all requests about a hostile contract; the seconds are those of the
    slowest answer."""
    folder = root / f"{len(list(root.iterdir()))}"
    folder.mkdir()
    try:
        talk = foreign.with_server(folder, text)
    except (queue.Empty, BrokenPipeError):
        return Row("hostile input", f"{name}: kcdsl lsp", True, "HUNG or CRASHED")
    slowest = max(talk.seconds, key=lambda method: talk.seconds[method])
    took = talk.seconds[slowest]
    word = f"answered, slowest {slowest}"
    if talk.errors:
        word = f"CRASHED, {', '.join(talk.errors)}"
    elif took > SECONDS:
        word = f"HUNG, {slowest}"
    return Row(
        "hostile input", f"{name}: kcdsl lsp", bool(talk.errors) or took > SECONDS, word, took
    )


def _processor_seconds() -> float:
    """Return the processor time of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tests(root: Path) -> Iterator[Row]:
    """Run the attacks that are written as tests."""
    results = root / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    command += ["-m", "not programs and not gpu", f"--junitxml={results}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the tests of attacks could not run:\n{done.stdout}{done.stderr}")
    for case in ElementTree.parse(results).iter("testcase"):
        failed = any(part.tag in ("failure", "error") for part in case)
        skipped = case.find("skipped") is not None
        word = "SUCCEEDED" if failed else "NOT CARRIED OUT" if skipped else "held off"
        file = case.attrib["classname"].rpartition(".")[2].removeprefix("test_")
        name = f"{_words(file)}: {_words(case.attrib['name'].removeprefix('test_'))}"
        yield Row("tests", name, failed or skipped, word, float(case.attrib["time"]))


def _words(name: str) -> str:
    return name.replace("_", " ")


def main() -> int:
    """Run all attacks; return 1 if one succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows: list[Row] = []
    for group in (keys, foreign_code, hostile_input, tests):
        with tempfile.TemporaryDirectory(prefix="kcdsl-trust-") as place:
            for row in group(Path(place)):
                rows.append(row)
                took = "" if row.seconds is None else f"{row.seconds:6.2f} s  "
                print(f"{row.group:14} {took:10}{row.attack}: {row.outcome}", flush=True)
    found = trust_mutants.campaign(options.mutants, options.seed, options.jobs)
    print("mutants accepted although changed, with the reason:")
    for (kind, reason), number in sorted(found.accepted.items()):
        print(f"  {kind}: {number} x {reason}")
    for one in found.wrong:
        print(f"  WRONG {one.kind}: {one.what}")
    succeeded = Counter(row.group for row in rows if row.succeeded)
    hung = sum("HUNG" in row.outcome for row in rows)
    executed = sum("EXECUTED" in row.outcome for row in rows)
    figures = [
        Figure(f"{group}: carried out", float(count), Better.HIGHER, 1.0)
        for group, count in Counter(row.group for row in rows).items()
    ]
    figures += [
        Figure(f"{group}: succeeded", float(succeeded[group]), Better.LOWER, 0.0)
        for group in dict.fromkeys(row.group for row in rows)
    ]
    figures += [
        Figure("foreign executions", float(executed), Better.LOWER, 0.0),
        Figure(f"hangs over {SECONDS:g} s", float(hung), Better.LOWER, 0.0),
        Figure("mutants", float(found.tried.total()), Better.HIGHER, float(options.mutants)),
        Figure("mutants accepted wrongly", float(len(found.wrong)), Better.LOWER, 0.0),
        Figure("mutants accepted with a reason", float(found.accepted.total()), Better.LOWER),
    ]
    return report("trust", figures)


if __name__ == "__main__":
    sys.exit(main())
