"""Groups of rollouts are joined exactly where their rows share a prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_backends.empirical.sources.rollouts.reader import joined
from kcdsl_backends.empirical.sources.rollouts.record import Rollout


def rollout(number: int, prompt: int, group: int | None) -> Rollout:
    """Return a rollout; prompt 0 means no prompt."""
    return Rollout(
        str(number),
        (prompt,) if prompt else (),
        (1,),
        np.ones(1, np.bool_),
        None,
        None,
        group=None if group is None else f"g{group}",
    )


def components(rows: list[tuple[int, int]]) -> list[int]:
    """Return the component of each row by relabelling to a fixed point: a second implementation."""
    label = list(range(len(rows)))
    changed = True
    while changed:
        changed = False
        for i, (prompt, group) in enumerate(rows):
            for j, (other, its) in enumerate(rows):
                linked = group == its or (prompt == other and prompt != 0)
                if linked and label[i] != label[j]:
                    label[i] = label[j] = min(label[i], label[j])
                    changed = True
    return label


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=14))
def test_units_are_components_linked_by_prompts_and_groups(rows: list[tuple[int, int]]) -> None:
    found, count = joined([rollout(i, *row) for i, row in enumerate(rows)])
    units = [r.unit for r in found]
    expected = components(rows)
    assert [units.index(u) for u in units] == [expected.index(label) for label in expected]
    assert count == len({group for _, group in rows}) - len(set(expected))
    assert [r.key for r in found] == [str(i) for i in range(len(rows))]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_prompts_alone_define_units_without_groups(prompts: list[int]) -> None:
    rows = [rollout(i, prompt, None) for i, prompt in enumerate(prompts)]
    found, count = joined(rows)
    assert found == tuple(rows)
    assert count == 0
    assert len({r.unit for r in found}) == len({p for p in prompts if p}) + prompts.count(0)
