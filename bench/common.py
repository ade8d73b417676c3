"""Common functions of benchmarks: figures, limits, the table, and the results file.

A benchmark is a module `bench/NAME.py`, run by `make bench-NAME`. It measures in that run, calls
`report(NAME, figures)`, and exits with the status that `report` returns. The results file
`bench/results/NAME.json` is `{"schema": "kcdsl.bench/1", "name", "machine", "figures": [{"name",
"value", "limit", "better", "conditions"}]}`. A figure that is not a finite number fails.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


class Better(StrEnum):
    """The direction of an improvement."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `limit` is None if there is no target."""

    name: str
    value: float
    better: Better
    limit: float | None = None
    conditions: str = ""

    @property
    def within(self) -> bool:
        """Return whether the value is a finite number on the right side of the limit."""
        if not math.isfinite(self.value):
            return False
        if self.limit is None:
            return True
        return self.value <= self.limit if self.better is Better.LOWER else self.value >= self.limit


def seconds(work: Callable[[], object], *, repeat: int = 5, warmup: int = 1) -> float:
    """Return the median wall time of `work()` in seconds over `repeat` calls after `warmup`."""
    if repeat < 1:
        raise ValueError("repeat must be at least 1")
    for _ in range(warmup):
        work()
    times: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def forget_peak() -> int:
    """Reset the peak of resident memory (Linux) and return the resident bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak resident memory since the last `forget_peak`, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that figures depend on (torch only if imported)."""
    described: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        described["torch"] = torch.__version__
        described["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            described["device"] = torch.cuda.get_device_name(0)
    return described


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def report(name: str, figures: Iterable[Figure], results: Path = RESULTS) -> int:
    """Print the table and write `results/NAME.json`; return 0, or 1 if a limit is missed.

    Raises ValueError if there are no figures or two of the same name.
    """
    rows = tuple(figures)
    names = [figure.name for figure in rows]
    if not rows:
        raise ValueError(f"benchmark {name} measured nothing")
    if len(set(names)) != len(names):
        raise ValueError(f"benchmark {name} has two figures of the same name")
    _write(results / f"{name}.json", name, rows)
    _print(name, rows)
    return 0 if all(figure.within for figure in rows) else 1


def show_in(page: str, name: str, table: str) -> None:
    """Put a table into docs/PAGE, between the marks of benchmark NAME.

    Raises ValueError if the page has no such marks.
    """
    path, (before, _, after) = RESULTS.parents[1] / "docs" / page, _around(page, name)
    path.write_text(f"{before}{table}{after}", encoding="utf-8")


def shown_in(page: str, name: str) -> str:
    """Return the table that `show_in` put into a page."""
    return _around(page, name)[1]


def _around(page: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- figures: written by bench/{name}.py -->\n", "<!-- end of figures -->"
    text = (RESULTS.parents[1] / "docs" / page).read_text(encoding="utf-8")
    before, mark, rest = text.partition(begin)
    table, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{page} has no place for the figures of {name}")
    return before + begin, table, end + after


def _write(path: Path, name: str, figures: Sequence[Figure]) -> None:
    document = {
        "schema": "kcdsl.bench/1",
        "name": name,
        "machine": machine(),
        "figures": [
            {**asdict(f), "value": f.value if math.isfinite(f.value) else None} for f in figures
        ],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _print(name: str, figures: Sequence[Figure]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {name}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("figure", "value", "limit", "", "conditions"):
        table.add_column(column, justify="right" if column in ("value", "limit") else "left")
    for figure in figures:
        table.add_row(
            figure.name,
            _shown(figure.value),
            _limit(figure),
            "ok" if figure.within else "MISSED",
            figure.conditions,
        )
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)


def _limit(figure: Figure) -> str:
    if figure.limit is None:
        return "-"
    return f"{'<=' if figure.better is Better.LOWER else '>='} {_shown(figure.limit)}"


def _shown(value: float) -> str:
    """Format a number with four digits, an integer with up to seven."""
    return f"{value:,.0f}" if 1e4 <= value < 1e7 and value == int(value) else f"{value:.4g}"
