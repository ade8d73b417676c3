"""The status of an attribution: "no drift" only where no request drifts."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from kcdsl.exits import Exit
from kcdsl.verdict.studies.attribution import Attribution, IntermediateKernel
from kcdsl.verdict.text.attribution import print_attribution
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.document import AttributionSubject, assemble
from kcdsl_backends.empirical.attribution.measurement import Coalition, MeasuredCoalitions
from kcdsl_backends.empirical.attribution.shapley import Array, Statistic, column
from tests.support.attributions import EAGER, ref

NOTHING = [np.zeros(4) for _ in range(40)]
RARE = [np.full(4, 1.0 if i == 7 else 0.0) for i in range(40)]
ALL = [np.full(4, 1.0 + i / 40) for i in range(40)]


def document(infer: list[Array], statistic: Statistic, *, differs: bool = True) -> Attribution:
    other = ref("torch.sdpa.math") if differs else EAGER
    frame = AttributionSubject(
        contract={"name": "c", "version": "1", "digest": "sha256:0"},
        kernels={"train": EAGER.run, "infer": other.run},
        slice=None,
        metric="kl",
        statistic=statistic,
        unit="nat",
        better="lower",
        batch=1,
        seed=0,
        settings=sources.settings(EAGER, other),
    )
    base, end = (column(values, "lower", "kl") for values in (NOTHING, infer))
    coalitions = {0: Coalition((), base)}
    if differs:
        coalitions[1] = Coalition(("operator",), end)
    players = ("operator",) if differs else ()
    return assemble(frame, MeasuredCoalitions(players, coalitions, {}, end, None), None, ())


@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "max"])
@pytest.mark.parametrize("differs", [True, False])
def test_status_without_any_drift(statistic: Statistic, differs: bool) -> None:
    found = document(NOTHING, statistic, differs=differs)
    assert (found.status, found.exit) == ("no_drift", Exit.HELD)


@pytest.mark.parametrize("statistic", ["p50", "p90"])
@pytest.mark.parametrize("differs", [True, False])
def test_percentile_without_drift_does_not_imply_no_drift(
    statistic: Statistic, differs: bool
) -> None:
    found = document(RARE, statistic, differs=differs)
    assert found.total.value == 0
    assert (found.status, found.exit) == ("inconclusive", Exit.INCONCLUSIVE)
    assert found.reason is not None
    assert "drift" in found.reason


def test_source_that_affects_all_requests_is_attributed() -> None:
    found = document(ALL, "mean")
    assert found.status == "attributed"
    assert found.sources[0].share == 1.0
    assert document(ALL, "max").status == "inconclusive"


def test_each_reason_for_missing_kernels_is_stated_once() -> None:
    found = document(ALL, "mean")
    lacking = (
        IntermediateKernel(("operator",), None, "no such kernel"),
        IntermediateKernel(("weights",), 1.0),
        IntermediateKernel(("operator", "batch"), None, "no such kernel"),
        IntermediateKernel(("weights", "batch"), None, "too large"),
    )
    source = replace(found.sources[0], reason="operator does not run: no such kernel")
    stream = StringIO()
    print_attribution(replace(found, between=lacking, sources=(source,)), stream)
    lines = [line for line in stream.getvalue().splitlines() if "not run" in line]
    assert lines == [
        "  operator, operator+batch do not run: no such kernel",
        "  weights+batch does not run: too large",
    ]
