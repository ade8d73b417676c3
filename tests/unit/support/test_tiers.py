"""The cases of a sampled test that belong to the first tier."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.support.tiers import covering

pytest_plugins = ("pytester",)
AXES = {"rule": "abcde", "pair": "xyz", "radius": "012"}
CASES = [tuple(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def test_sampling_covers_all_values_first_and_then_pairs() -> None:
    few = [dict(CASES[k]) for k in covering(CASES, 5)]
    assert all({case[name] for case in few} == set(values) for name, values in AXES.items())
    some = [dict(CASES[k]) for k in covering(CASES, 20)]
    for one, other in combinations(AXES, 2):
        met = {(case[one], case[other]) for case in some}
        assert met == set(product(AXES[one], AXES[other]))


@pytest.mark.parametrize("count", [0, 1, 45, 100])
def test_sample_size_is_limited_by_request_and_cases(count: int) -> None:
    assert len(covering(CASES, count)) == min(count, len(CASES))
    assert covering([], count) == []


@pytest.mark.full
def test_unsampled_cases_are_marked_full(pytester: pytest.Pytester, repository: Path) -> None:
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(repository)!r})\n"
        "import pytest\nfrom tests.support.tiers import mark_tiers\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    mark_tiers(items)\n"
        "def pytest_configure(config):\n"
        "    for name in ('sample(n)', 'full', 'slow'):\n"
        "        config.addinivalue_line('markers', f'{name}: of the tiers')\n"
    )
    file = pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.sample(2)\n"
        "@pytest.mark.parametrize('x', [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3])\n"
        "def test_some(x):\n    pass\n"
        "def test_all():\n    pass\n"
    )
    first = "not full and not slow"
    pytester.inline_run("-m", first).assertoutcome(passed=3)
    pytester.inline_run().assertoutcome(passed=5)
    pytester.inline_run("-m", first, f"{file}::test_some[3]").assertoutcome(passed=1)
