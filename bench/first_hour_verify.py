"""Cost of `kcdsl verify` at ordinary sizes: one case of attention, and of a whole layer.

Random weights of the usual initial size, float32 torch eager against bfloat16 flash attention with
free casts. The command runs as for users, without attacks, with the checker, on one thread. Both
processor and wall time are given, as machines are shared. Every row has a time limit; rows can be
run one by one:

    python -m bench.first_hour_verify --list
    python -m bench.first_hour_verify --row attn_0-1024-32 --seconds 300
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.common import Better, Figure
from bench.large_layer import CONFIG, layer

_CONTRACT = """\
kcdsl: 1
contract: ordinary-sizes
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}}
kernels:
  train: {{run: torch.eager, numerics: {{preset: torch-eager, compute: float32}}}}
  infer: {{run: torch.sdpa.flash, numerics: {{preset: torch-sdpa-flash, compute: bfloat16}}}}
data: prompts.jsonl
slices: {{some: {{where: "length > 0"}}}}
clauses:
  N: {{require: "forall x in points(some): norm_inf(drift({block}, x)) <= 1e9", level: L2}}
"""
_TEXT = "The quick brown fox jumps over the lazy dog near the big river bank. " * 8
_WHERE = "kcdsl verify --attack off --domains affine, bfloat16, casts any"


@dataclass(frozen=True, slots=True)
class Row:
    """A block, its width and tokens, and the limits of wall seconds and GB."""

    block: str
    width: int
    tokens: int
    seconds: float | None = None
    memory: float | None = None
    threads: int = 1

    @property
    def name(self) -> str:
        """Return the name of the row on the command line."""
        return f"{self.block}-{self.width}-{self.tokens}"


ROWS = (
    Row("attn_0", 1024, 128, 60.0, 4.0),
    Row("mlp_0", 1024, 8, 60.0, 4.0),
    Row("layer_0", 1024, 8, 60.0, 4.0),
)
"""The reported rows."""
MORE = (
    Row("attn_0", 1024, 32),
    Row("attn_0", 1024, 64),
    Row("attn_0", 4096, 128, 600.0, 12.0, threads=2),
)
"""Rows that run only on request: smaller ones, and one of a 7B-class layer."""
OPTIONS = ("--attack", "off", "--domains", "affine", "--jobs", "1", "--cache", "off")
"""Options of the command."""
_LOOK = 2.0
"""Seconds between two looks at the memory of all processes."""
LIMIT = 900.0
"""Limit of the wall seconds of a row."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run of the command; `bound` is None if the checker confirms none, `estimate`
    has the seconds that it predicted (None if it printed no estimate)."""

    cpu: float
    wall: float
    peak: float
    bound: float | None
    estimate: float | None
    ended: bool


def main(arguments: list[str]) -> int:
    """Run the named rows, each in its own process, and print their cost."""
    parser = argparse.ArgumentParser(prog="bench.first_hour_verify", description=__doc__)
    every = {row.name: row for row in (*ROWS, *MORE)}
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--row", action="append", choices=tuple(every), help="by default all")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="after which a row is ended")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print(*every, sep="\n")
        return 0
    for name in chosen.row or [row.name for row in ROWS]:
        _measured(every[name], chosen.seconds)
    return 0


def figures() -> list[Figure]:
    """Measure every row."""
    found = []
    for row in ROWS:
        name, cost = f"verify {row.block}, width {row.width}, {row.tokens} tokens", _measured(row)
        lower, where = Better.LOWER, f"{_WHERE}, {row.threads} thread"
        if cost.ended:
            where = f"{where}; ended after {LIMIT:.0f} s"
        found += [
            Figure(f"{name}: seconds", cost.wall, lower, row.seconds, where),
            Figure(f"{name}: processor seconds", cost.cpu, lower, None, where),
            Figure(f"{name}: peak GB", cost.peak / 1e9, lower, row.memory, where),
        ]
        if cost.estimate is not None:
            ratio = cost.estimate / cost.cpu
            found.append(Figure(f"{name}: seconds told / processor", ratio, lower, 3.0, where))
        bound = math.nan if cost.bound is None else cost.bound  # none is no result
        found.append(Figure(f"{name}: bound", bound, lower, None, "norm_inf of the drift"))
    return found


def write_case(folder: Path, row: Row) -> None:
    """Write the model, the prompt and the contract of a row into a folder."""
    config = dict(
        CONFIG,
        hidden_size=row.width,
        num_attention_heads=row.width // (128 if row.width >= 4096 else 64),
        intermediate_size=row.width * 11 // 4,
        vocab_size=320,
    )
    layer(folder, "cpu", config)
    request = {"id": "a", "text": _TEXT[: row.tokens]}
    (folder / "prompts.jsonl").write_text(json.dumps(request))
    (folder / "contract.yaml").write_text(_CONTRACT.format(block=row.block))


def _measured(row: Row, limit: float = LIMIT) -> Cost:
    """Measure the command on a row and print its cost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_case(folder, row)
        cost = _run(folder, row, limit)
    bound = "no bound" if cost.bound is None else f"bound {cost.bound:.4g}"
    estimate = (
        "" if cost.estimate is None else f", {cost.estimate / cost.cpu:.2f} of it told beforehand"
    )
    state = "ended, " if cost.ended else ""
    print(
        f"  {row.name}: {state}{cost.cpu:.1f} s of the processor{estimate}, {cost.wall:.1f} s, "
        f"{cost.peak / 1e9:.2f} GB, {bound}",
        file=sys.stderr,
        flush=True,
    )
    return cost


def _run(folder: Path, row: Row, limit: float) -> Cost:
    command = [
        *(
            sys.executable,
            "-m",
            "kcdsl",
            "verify",
            str(folder / "contract.yaml"),
            "--format=json",
        ),
        *OPTIONS,
        *("--threads", str(row.threads)),
    ]
    threads = {"OMP_NUM_THREADS": str(row.threads), "OPENBLAS_NUM_THREADS": str(row.threads)}
    started, told = time.perf_counter(), folder / "told"
    with (folder / "answer").open("w+") as answer, told.open("w") as notes:
        child = subprocess.Popen(
            command,
            stdout=answer,
            stderr=notes,
            env={**os.environ, **threads},
            start_new_session=True,
        )
        ended, status, used = _awaited(child, started + limit)
        wall = time.perf_counter() - started
        answer.seek(0)
        text = answer.read()
    if not ended and status not in (0, 3):  # 3: inconclusive, for example without a bound
        raise SystemExit(f"{row.name}: {text[-400:]}{told.read_text()[-400:]}")
    bound = None
    if not ended:
        (goal,) = json.loads(text)["goals"]
        if goal["evidence"]["confirmed"]:
            bound = float(goal["bound"])
        else:
            print(f"  {row.name}: {goal['reason']}", file=sys.stderr)
    estimate = _printed_estimate(told.read_text().splitlines())
    return Cost(used[0], wall, used[1], bound, estimate, ended)


def _awaited(child: subprocess.Popen[bytes], until: float) -> tuple[bool, int, tuple[float, float]]:
    """Wait for a process and kill it at a time; return whether it was killed, its exit code, its
    processor seconds and the peak bytes of it and the processes that it starts."""
    ended, peak, looked = False, 0.0, time.perf_counter()
    while True:
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            taken = used.ru_utime + used.ru_stime, max(peak, used.ru_maxrss * 1024.0)
            return ended, child.returncode, taken
        if time.perf_counter() > looked + _LOOK:
            peak, looked = max(peak, _held(child.pid)), time.perf_counter()
        if not ended and time.perf_counter() > until:
            os.killpg(child.pid, signal.SIGKILL)
            ended = True
        time.sleep(0.1)


def _held(session: int) -> float:
    """Return the bytes that the processes of a session hold; shared pages count once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, ProcessLookupError):  # it has ended
            continue
    return total * 1024.0


def _printed_estimate(lines: Iterable[str]) -> float | None:
    """Return the estimate in seconds that the command printed before its work."""
    for line in lines:
        found = re.search(r"about (\d+) (s|min) and", line)
        if found is not None:
            return float(found[1]) * (60 if found[2] == "min" else 1)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
