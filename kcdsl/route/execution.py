"""How a backend spreads its work, and what it may remember of earlier runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENGINES = ("processes", "ray")
"""Where cases run: processes of this machine, or whatever a ray cluster has."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How the cases of goals are worked on. No field changes a result, `threads` its last bits.

    Args:
        engine: one of `ENGINES`.
        jobs: how many cases at a time; 1 works in this process; None begins here and goes on in as
            many processes as cores and memory allow if there is much to do.
        threads: threads of one case; None divides the cores among the cases.
        cache: folder of what earlier runs found, None to find everything anew.
    """

    engine: str = "processes"
    jobs: int | None = None
    threads: int | None = None
    cache: Path | None = None
