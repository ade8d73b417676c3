"""Which tests know which modules of the checker, and which functions each of them calls.

A module is of the first group that names it; of the tests of a group those that know it best stand
first.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "certs" / "kcdsl_certs" / "recheck"

LENGTHS = ("sequences.py", "rules/sequence.py")
NEARBY = ("nearby.py", "rationals/nearby.py", "rules/parameters.py")
ROWS = ("affine/passes.py", "affine/ellipsoids.py", "affine/cases.py", "affine/spectrum.py")
CHANCE = ("affine/independent.py",)
HINTS = ("plane_hints.py",)
PLANES = ("planes/*.py", "planes/rules/*.py")
CHAINS = (
    "chain.py", "chain_document.py", "joining.py", "affine/handing.py", "affine/drifting.py",
)  # fmt: skip
EXACT = ("exact.py", "rationals/*.py")
MOVED = ("norms.py",)
READINGS = ("versions.py",)
CACHES = ("caching.py",)
WRITTEN = ("rules/written.py",)
INTERVAL = (
    "rules/*.py", "box.py", "functionals.py", "formats.py", "weights.py", "propagate.py",
    "staircase.py", "matrix_units.py", "spec.py",
)  # fmt: skip
AFFINE = ("affine/*.py", "affine/rules/*.py")
DOCUMENT = (
    "check.py", "document.py", "block.py", "strict.py", "safetensors.py", "inexact.py", "room.py",
    "errors.py",
)  # fmt: skip
TESTS: dict[tuple[str, ...], tuple[str, ...]] = {
    LENGTHS: (
        "tests/unit/certs/test_recheck_any_length.py",
        "tests/unit/interval/test_sequences.py",
        "tests/property/test_any_length.py",
        "tests/property/test_any_length_blocks.py",
        "tests/property/test_positions_of_long_tables.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    NEARBY: (
        "tests/property/test_weights_region.py",
        "tests/property/test_shared_weights.py",
        "tests/unit/interval/test_neighbourhood.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    ROWS: (
        "tests/property/test_affine_ellipsoids.py",
        "tests/property/test_affine_cases.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/property/test_affine_checker.py",
        "tests/property/test_affine_two_implementations.py",
        "tests/property/test_ball_runs.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
    CHANCE: (
        "tests/property/test_independent_roundings.py",
        "tests/property/test_affine_two_implementations.py",
    ),
    HINTS: ("tests/unit/certs/test_recheck_planes.py",),
    PLANES: (
        "tests/property/test_ball_planes.py",
        "tests/property/test_ball_projections.py",
        "tests/unit/certs/test_recheck_planes.py",
        "tests/property/test_planes_balls.py",
        "tests/property/test_planes_checker.py",
        "tests/property/test_planes_two_implementations.py",
        "tests/property/test_rounded_sums_of_planes.py",
    ),
    CHAINS: (
        "tests/unit/certs/test_recheck_joining.py",
        "tests/unit/certs/test_recheck_handing.py",
        "tests/unit/certs/test_chain_documents.py",
        "tests/property/test_chained_links.py",
        "tests/property/test_links_and_norms.py",
        "tests/property/test_inputs_of_links.py",
        "tests/unit/certifier/test_chaining.py",
    ),
    EXACT: (
        "tests/unit/certs/test_recheck_exact.py",
        "tests/unit/certs/test_recheck_weights.py",
        "tests/unit/certs/test_recheck_formats.py",
        "tests/unit/certs/test_recheck_box.py",
        "tests/unit/interval/test_quantisers.py",
        "tests/property/test_groups_of_channels.py",
        "tests/property/test_weights_region.py",
        "tests/property/test_chained_links.py",
    ),
    MOVED: ("tests/unit/cli/test_transfer.py",),
    READINGS: ("tests/property/test_readings.py", "tests/unit/certs/test_recheck_rules.py"),
    CACHES: (
        "tests/unit/model/test_caching.py",
        "tests/property/test_kv_caches.py",
    ),
    WRITTEN: (
        "tests/property/test_norms_written_out.py",
        "tests/property/test_formats_of_nodes.py",
    ),
    INTERVAL: (
        "tests/property/test_norms_written_out.py",
        "tests/property/test_casts_before_sums.py",
        "tests/property/test_ball_formulas.py",
        "tests/property/test_stored_exactly.py",
        "tests/unit/certs/test_recheck_rules.py",
        "tests/unit/certs/test_recheck_document.py",
        "tests/unit/certs/test_recheck_formats.py",
        "tests/unit/certs/test_recheck_weights.py",
        "tests/unit/certs/test_recheck_exact.py",
        "tests/unit/certs/test_recheck_box.py",
        "tests/unit/interval/test_matrix_units.py",
        "tests/unit/interval/test_quantisers.py",
        "tests/property/test_accumulation.py",
        "tests/property/test_ball_references.py",
        "tests/property/test_recheck_soundness.py",
        "tests/unit/certs/test_directed_casts.py",
        "tests/unit/certs/test_recheck_static.py",
        "tests/unit/interval/test_static_and_zero_points.py",
        "tests/property/test_groups_of_channels.py",
        "tests/property/test_online_softmax.py",
        "tests/property/test_softmax_drift.py",
        "tests/property/test_two_implementations.py",
        "tests/property/test_ball_runs.py",
    ),
    AFFINE: (
        "tests/property/test_ball_references.py",
        "tests/property/test_averages_of_any_errors.py",
        "tests/property/test_ball_functionals.py",
        "tests/property/test_ball_projections.py",
        "tests/property/test_drift_of_both.py",
        "tests/property/test_domains_meet.py",
        "tests/property/test_inputs_of_links.py",
        "tests/property/test_moves_of_functionals.py",
        "tests/property/test_casts_before_sums.py",
        "tests/property/test_shared_weights.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/property/test_affine_checker.py",
        "tests/property/test_affine_remainders.py",
        "tests/property/test_affine_two_implementations.py",
        "tests/unit/certs/test_recheck_order.py",
        "tests/property/test_affine_orders.py",
        "tests/property/test_affine_ellipsoids.py",
        "tests/property/test_affine_cases.py",
        "tests/property/test_groups_of_channels.py",
        "tests/property/test_independent_roundings.py",
        "tests/property/test_affine_output.py",
        "tests/property/test_ball_runs.py",
    ),
    DOCUMENT: (
        "tests/unit/certs/test_recheck_document.py",
        "tests/unit/certs/test_hostile_proofs.py",
        "tests/unit/certs/test_recheck_safetensors.py",
        "tests/unit/certs/test_recheck_affine.py",
        "tests/unit/certs/test_recheck_static.py",
        "tests/unit/certs/test_proof_fields.py",
    ),
}

Function = tuple[str, int]
"""A module and the line on which a function begins."""


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    """Return every module of a group with the tests of the group, once."""
    found: dict[Path, tuple[str, ...]] = {}
    for group, tests in TESTS.items():
        for pattern in group:
            for path in sorted(CHECKER.glob(pattern)):
                if path.name != "__init__.py":
                    found.setdefault(path, tests)
    return list(found.items())


def name_of(path: Path) -> str:
    """Return a module's name: its path inside the checker."""
    return str(path.relative_to(CHECKER))


@dataclass(frozen=True, slots=True)
class Known:
    """What a run without any defect showed: the seconds that each test took and the functions of
    the checker that it called; `seconds` of the process, `failed` a test that fails."""

    failed: str
    seconds: float
    tests: Mapping[str, tuple[float, frozenset[Function]]]

    @property
    def limit(self) -> int:
        """Return after how many seconds of its own a process with a defect is ended."""
        return int(60 + 4 * self.seconds)

    def of(self, function: Function | None) -> tuple[str, ...]:
        """Return the tests that call a function, quick ones first; those of one file together.

        Of a file that calls it, its other tests follow: they may read what a test before them made.
        None is what is executed when a module is imported, which every test reads.
        """
        files = list(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        near = [self._of_file(file, function) for file in files]
        return tuple(test for some, _ in near for test in some) + tuple(
            test for _, others in near for test in others
        )

    def _of_file(self, file: str, function: Function | None) -> tuple[list[str], list[str]]:
        some = [test for test in self.tests if test.partition("::")[0] == file]
        called = [t for t in some if function is None or function in self.tests[t][1]]
        others = [t for t in some if t not in called] if called else []
        return sorted(called, key=lambda test: self.tests[test][0]), others


@dataclass(slots=True, eq=False)
class Recorder:
    """A plugin of pytest that takes down what `Known` holds; `ran` counts the tests."""

    calls: bool
    failed: str = ""
    tests: dict[str, tuple[float, frozenset[Function]]] = field(default_factory=dict)
    _seen: set[CodeType] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Take down a test."""
        self._seen = set()
        began = time.process_time()
        if self.calls:
            sys.setprofile(self._called)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            found = frozenset(
                (code.co_filename[len(_BEGIN) :], code.co_firstlineno) for code in self._seen
            )
            self.tests[item.nodeid] = time.process_time() - began, found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down a failure."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take down a module that cannot be imported."""
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_BEGIN):
            self._seen.add(frame.f_code)


_BEGIN = f"{CHECKER}{os.sep}"


FIRST, SECOND = "not full and not slow and not gpu", "full and not slow and not gpu"
"""The two tiers of the suite, as pytest selects them."""


def run(tests: Sequence[str], tier: str = "", *, calls: bool) -> Known:
    """Run tests in this process until one fails; those of one tier where it is given."""
    recorder = Recorder(calls)
    options = ["-x", "-q", "-p", "no:cacheprovider", *(["-m", tier] if tier else [])]
    code = pytest.main([*options, *tests], plugins=[recorder])
    right = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failed = recorder.failed or ("" if code in right else f"exit {code}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Known(failed, used.ru_utime + used.ru_stime, recorder.tests)
