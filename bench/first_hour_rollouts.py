"""Time and memory to evaluate a recorded batch of reinforcement learning.

    python -m bench.first_hour_rollouts [REQUESTS] [TOKENS]

A batch of 512 requests of 2,000 sampled tokens is written as JSONL and as Parquet, and `kcdsl
evaluate` computes every metric of sampled tokens and of sequences on it in a separate process,
including those of the clauses N-RLHF-1 and N-RLHF-2. The differences of the log-probabilities have
a random level for each request and heavy tails.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common import Better, Figure, report
from kcdsl.metrics import METRICS

REQUESTS, TOKENS, GROUP = 512, 2000, 1
SECONDS, BYTES = 60.0, 4 * 10**9
_STATISTICS = {
    "mean": "mean({0})",
    "quantile": "p99({0})",
    "max": "max({0})",
    "aggregate": "{0}",
}


@dataclass(frozen=True, slots=True)
class CommandCost:
    """Processor seconds, wall seconds and peak resident bytes of one command."""

    processor: float
    wall: float
    peak: int
    code: int


def contract(data: str) -> str:
    """Return a contract with all metrics of a batch with advantages."""
    has = {"train_logs", "infer_logs", "tokens", "advantages"}
    lines = [
        "kcdsl: 1",
        "contract: batch",
        "version: 1.0.0",
        "model: {checkpoint: model.safetensors, architecture: llama}",
        "kernels:",
        "  train: {run: recorded, logprobs: {values: raw}, recomputed: true}",
        "  infer: {run: recorded, logprobs: {values: raw}}",
        f"data: {data}",
        "slices: {all: {}}",
        "clauses:",
        "  N-RLHF-1: {require: mean(abs(log_ratio)) <= 0.02, level: L2}",
        "  N-RLHF-2: {require: mean(w_log_w) <= 1e-2, level: L2}",
    ]
    for metric in METRICS.values():
        if metric.columns is None or not set(metric.columns) <= has:
            continue
        family = metric.family.value[0].upper()
        for statistic in sorted(metric.statistics & set(_STATISTICS)):
            term = _STATISTICS[statistic].format(metric.name)
            if metric.signed:
                term = (
                    f"abs({term})"
                    if statistic in ("mean", "aggregate")
                    else term.replace(metric.name, f"abs({metric.name})")
                )
            op, limit = ("<=", "1e9") if metric.high is None else ("<=", "0.999")
            if metric.better == "higher":
                op, limit = ">=", "0.001"
            name = f"{family}-{metric.name}-{statistic}".replace("_", "-").upper()
            lines.append(f"  {name}: {{require: '{term} {op} {limit}', level: L1}}")
    return "\n".join(lines) + "\n"


def batch(requests: int, tokens: int) -> dict[str, list[NDArray[np.float64]]]:
    """Return the columns of a batch, one array for each request."""
    generator = np.random.default_rng(0)
    found: dict[str, list[NDArray[np.float64]]] = {}
    for row in range(requests):
        infer = -0.5 - generator.exponential(0.6, size=tokens)
        level = 0.01 * np.exp(generator.normal() / 2)
        excess = np.clip(level * generator.standard_t(4, size=tokens), -0.39, 0.39)
        train = infer + np.log1p(excess)  # E w = 1
        cells = {
            "prompt": generator.integers(0, 32_000, size=200),
            "tokens": generator.integers(0, 32_000, size=tokens),
            "mask": np.ones(tokens, dtype=np.int64),
            "train_logs": train,
            "infer_logs": infer,
            "advantages": np.full(tokens, generator.normal()),
        }
        cells["prompt"][0] = row // GROUP % 32_000
        for name, cell in cells.items():
            found.setdefault(name, []).append(cell)
    return found


def write(folder: Path, requests: int, tokens: int) -> None:
    """Write the batch as JSONL and as Parquet, each with its contract."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = batch(requests, tokens)
    pq.write_table(pa.table(columns), folder / "batch.parquet")
    with (folder / "batch.jsonl").open("w") as stream:
        for row in range(requests):
            cells = {name: cells[row].tolist() for name, cells in columns.items()}
            stream.write(json.dumps({"id": str(row), **cells}) + "\n")
    for suffix in ("jsonl", "parquet"):
        (folder / f"{suffix}.kc.yaml").write_text(contract(f"batch.{suffix}"))


def cost(command: list[str], folder: Path) -> CommandCost:
    """Run a command on at most two cores and return its cost."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start, pid_times = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
            peak = max(peak, int(line.split()[1]) * 1024)
        except (OSError, StopIteration):
            pass
        time.sleep(0.05)
    wall = time.perf_counter() - start
    assert process.stderr is not None
    said = process.stderr.read().decode()
    if process.returncode not in (0, 1, 3):
        raise RuntimeError(f"{' '.join(command)}: {said}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - pid_times.ru_utime - pid_times.ru_stime
    return CommandCost(spent, wall, peak, process.returncode)


def figures(requests: int = REQUESTS, tokens: int = TOKENS) -> list[Figure]:
    """Evaluate the batch from both files and return seconds and memory."""
    found: list[Figure] = []
    where = f"{requests} requests of {tokens:,} tokens, every metric of sampled tokens, one thread"
    with tempfile.TemporaryDirectory(prefix="kcdsl-bench-") as name:
        folder = Path(name)
        write(folder, requests, tokens)
        for suffix in ("parquet", "jsonl"):
            command = [sys.executable, "-m", "kcdsl", "evaluate", f"{suffix}.kc.yaml"]
            spent = cost([*command, "-o", f"out-{suffix}"], folder)
            said = f"{where}, {suffix}"
            lower = Better.LOWER
            found += [
                Figure(f"seconds of processor, {suffix}", spent.processor, lower, SECONDS, said),
                Figure(f"seconds, {suffix}", spent.wall, lower, None, said),
                Figure(f"peak memory (GB), {suffix}", spent.peak / 1e9, lower, BYTES / 1e9, said),
            ]
    return found


def main() -> int:
    """Measure and report."""
    sizes = [int(a) for a in sys.argv[1:3]]
    return report("first_hour_rollouts", figures(*sizes))


if __name__ == "__main__":
    sys.exit(main())
