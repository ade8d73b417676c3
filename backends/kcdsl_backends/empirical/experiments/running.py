"""From the wishes of a command to an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kcdsl.ir.terms import Program
from kcdsl_backends.empirical.experiments.grid import Axes, run_grid
from kcdsl_backends.empirical.experiments.single import Prepare, Progress, run_single


def run_experiment(
    kind: str,
    prepare: Prepare,
    program: Program,
    base: Path,
    folder: Path,
    *,
    devices: Sequence[str] = (),
    only: Sequence[str] = (),
    lengths: Sequence[int] = (),
    batches: Sequence[int] = (),
    concurrency: Sequence[int] = (),
    seed: int = 0,
    seconds: float = 5.0,
    fresh: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Run E1 ("e1") or E2 ("e2"); what is not wished for is as `Axes` and `variants` have it."""
    if kind == "e1":
        return run_single(
            prepare,
            program,
            base,
            folder,
            device=devices[0] if devices else "cpu",
            only=only,
            seed=seed,
            seconds=seconds,
            fresh=fresh,
            progress=progress,
        )
    usual = Axes()
    axes = Axes(
        _sorted(devices) or usual.devices,
        _sorted(lengths) or usual.lengths,
        _sorted(batches) or usual.batches,
        _sorted(concurrency) or usual.concurrency,
    )
    return run_grid(
        prepare, program, base, folder, axes=axes, seed=seed, fresh=fresh, progress=progress
    )


def _sorted(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))
