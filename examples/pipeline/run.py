"""From a checkpoint to a canary that is rolled back: every command, and what it prints.

    python examples/pipeline/run.py [FOLDER]

The script makes a small model, releases it through the four stages, and then releases changed
weights, whose traffic has a regression that the pinned prompts do not show. What a serving program
would log is made here: a table of tokens for each window. It takes about a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from kcdsl.cli import main as kcdsl
from kcdsl.draft import example

HERE = Path(__file__).resolve().parent
REGISTER = ("--register", "releases.db", "--slot", "chat/production")
WINDOW = ("--window", "2s", "--requests", "400")
TRUST = ("--key", "release.key.pub")
REQUESTS = 1200


def step(title: str, *words: str, answers: int = 0, brief: bool = False) -> None:
    """Run a command, show it, and stop where it does not answer as it should.

    Of a `brief` one, whose report is long, the line with the verdict is shown.
    """
    if title:
        print(f"\n# {title}", flush=True)
    print(f"$ kcdsl {' '.join(words)}", flush=True)
    said = StringIO()
    with redirect_stdout(said if brief else sys.stdout):
        code = kcdsl(list(words))
    if brief:
        lines = said.getvalue().splitlines()
        print(next((line for line in lines if " health " in line), ""), flush=True)
    print(f"(exit code {code})", flush=True)
    if code != answers:
        raise SystemExit(f"expected exit code {answers}")


def make_inputs() -> None:
    """Write checkpoint, prompts and contract."""
    Path("config.json").write_text(example.config_text(), encoding="utf-8")
    Path("model.safetensors").write_bytes(example.weights())
    rows = [
        {"id": str(i), "text": f"prompt {i} of many", "surface": "code" if i % 2 else "chat"}
        for i in range(12)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("prompts.jsonl").write_text(lines, encoding="utf-8")
    Path("contract.yaml").write_bytes((HERE / "contract.yaml").read_bytes())


def change_weights() -> None:
    """Write weights of one more training step: another triple."""
    data = bytearray(example.weights())
    data[-4:] = bytes(4)
    Path("model.safetensors").write_bytes(data)


def log_traffic(name: str, drift: Callable[[Random, str], float]) -> tuple[str, str]:
    """Write what a serving program logged in a window; return when it began and ended."""
    start = datetime.now(UTC)
    time.sleep(4)  # long enough for whole seconds on both sides
    chance, columns = Random(name), dict[str, list[object]]()
    for number in range(REQUESTS):
        surface = "code" if number % 2 else "chat"
        kl = drift(chance, surface)
        row = {
            "request": f"{name}-{number}",
            "length": 12,
            "surface": surface,
            "kl": kl,
            "top1_overlap": 0.0 if kl > 0.1 else 1.0,
        }
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    pq.write_table(pa.table(columns), f"{name}.parquet")
    ended = datetime.now(UTC)
    first = datetime.fromtimestamp(int(start.timestamp()) + 1, UTC)
    return f"{first:%Y-%m-%dT%H:%M:%SZ}", f"{ended:%Y-%m-%dT%H:%M:%SZ}"


def good(chance: Random, surface: str) -> float:
    """Return a drift as a good kernel has it."""
    return chance.uniform(0, 0.001)


def regressed(chance: Random, surface: str) -> float:
    """Return a drift that is large for one request of code in ten."""
    return 0.5 if surface == "code" and chance.random() < 0.1 else good(chance, surface)


def pass_stage(
    stage: str, folder: str, drift: Callable[[Random, str], float] | None, answers: int = 0
) -> None:
    """Evaluate for a stage, aggregate a window of its traffic, and promote."""
    quick = ("--seconds", "0.2", "--bound-seconds", "0", "-o", folder)
    step(f"{stage}: measure and certify", "evaluate", "--stage", stage, "--sign", "release.key",
         *quick, brief=True)  # fmt: skip
    evidence = [f"{folder}/evaluate.cert.json"]
    if drift is not None:
        name = f"{folder}-traffic"
        start, end = log_traffic(name, drift)
        words = ("--contract", "contract.yaml", "--stage", stage, "--from", start, "--until", end)
        more = ("--kernels", f"{folder}/kernels.json", "-o", f"{name}.json")
        step(
            f"{stage}: count the traffic of a window",
            "aggregate",
            f"{name}.parquet",
            *words,
            *more,
            answers=0 if drift is good else 1,
            brief=True,
        )
        evidence += [f"{folder}/report.json", f"{name}.json"]
    step(f"{stage}: decide", "promote", *evidence, "--stage", stage, *REGISTER, *TRUST, *WINDOW,
         answers=answers)  # fmt: skip


def release() -> None:
    """Release a first triple, and roll back a second one."""
    make_inputs()
    step("a key and a register", "keygen", "-o", "release.key")
    step("", "register", "init", "--register", "releases.db")
    pass_stage("offline-ci", "first", None)
    pass_stage("shadow", "first-shadow", good)
    pass_stage("canary", "first-canary", good)
    step("may it serve everybody?", "gate", "--stage", "full", *REGISTER)
    change_weights()
    step("other weights are another triple", "gate", "--stage", "canary", *REGISTER, answers=3)
    pass_stage("offline-ci", "second", None)
    pass_stage("shadow", "second-shadow", good)
    step("the canary may begin", "gate", "--stage", "canary", *REGISTER)
    pass_stage("canary", "second-canary", regressed, answers=1)
    step("the canary must stop", "gate", "--stage", "canary", *REGISTER, answers=1)
    step("what is live, and why", "register", "slots", "--register", "releases.db")


def run() -> None:
    """Run in the folder that is named, or in a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with chdir(folder):
            release()


if __name__ == "__main__":
    run()
