"""Mistakes in recordings are diagnosed; correct recordings are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.diagnoses.recorded_logs import alignment, ratios_of, truncation
from kcdsl_backends.empirical.sources.rollouts.prompts import score
from kcdsl_backends.empirical.sources.rollouts.record import Law, Policy, Rollout, Semantics
from tests.support import recordings
from tests.support.recordings import BFLOAT16, FLOAT32, FP8, RAW, at, nucleus, unchanged

PROCESSED = Semantics("processed")
SDPA = ("torch.sdpa", (("compute", "float16"),))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prechecks(
    found: Sequence[Rollout],
    *,
    temperature: float = 1.0,
    scored: bool = False,
    semantics: tuple[Semantics | None, Semantics | None] = (RAW, RAW),
    recomputed: bool = False,
) -> dict[str, Precheck]:
    """Return the preconditions of a recording by name; `scored` runs the training kernel."""
    rollouts = tuple(found)
    policies: tuple[Policy, ...] = ()
    if scored:
        run = score(
            [replace(r, train=None) for r in found], recordings.program(FLOAT32), temperature
        )
        rollouts, policies = run.rollouts, run.policies
    checks = recorded_prechecks(
        Recorded(
            rollouts, temperature, {"all": 1}, *semantics, policies=policies, recomputed=recomputed
        )
    )
    return {check.name: check for check in checks}


def failed(checks: dict[str, Precheck]) -> set[str]:
    return {name for name, check in checks.items() if check.outcome == "failed"}


def blocked(checks: dict[str, Precheck]) -> bool:
    return any(check.blocking and check.outcome == "failed" for check in checks.values())


# --- clean recordings ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("infer", [BFLOAT16, FP8, SDPA], ids=["bfloat16", "fp8", "sdpa"])
@pytest.mark.parametrize("scored", [False, True])
def test_correct_recordings_pass(infer: recordings.Program, scored: bool) -> None:
    found = recordings.rollouts(infer=infer, top=0 if scored else 5)
    checks = prechecks(found, scored=scored)
    assert failed(checks) == set()
    assert {"logprob_semantics", "sampling_law", "support_check", "alignment_shift"} <= set(checks)


@pytest.mark.slow
def test_54_correct_recordings_have_no_diagnosis() -> None:
    """Three kernels, three temperatures on both sides, six recordings each."""
    accused = []
    for infer in (BFLOAT16, FP8, SDPA):
        for t in (1.0, 0.7, 1.2):
            said = Semantics("processed", t)
            whole = recordings.rollouts(
                infer=infer, sampled=at(t), train_law=at(t), group=12, seed=int(10 * t)
            )
            for part in (whole[i : i + 32] for i in range(0, len(whole), 32)):
                checks = prechecks(part, temperature=t, semantics=(said, said))
                accused += [(infer, t, name) for name in failed(checks)]
    assert accused == []


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_tokens_give_no_temperature_diagnosis(count: int) -> None:
    """An undetectable fault is not reported as absent."""
    few = recordings.rollouts()[:count]
    assert sum(r.counted for r in few) < 64
    assert prechecks(few)["temperature_fit"].outcome == "not_applicable"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "said",
    [
        Semantics("raw", temperature=0),
        Semantics("processed", temperature=0),
        Semantics("raw", top_k=1),
        Semantics("processed", top_k=1),
    ],
)
def test_greedy_tokens_are_not_a_sample(said: Semantics) -> None:
    checks = prechecks(recordings.rollouts(), semantics=(said, said))
    assert checks["sampling_law"].outcome == "failed"
    assert "no sample of any law" in checks["sampling_law"].detail
    assert "constants" not in checks["logprob_semantics"].detail


# --- planted in the numbers ----------------------------------------------------------------------

Plant = Callable[[], Sequence[Rollout]]


def _shifted(by: int) -> Plant:
    def plant() -> list[Rollout]:
        return [
            recordings.with_logs(r, "infer", np.roll(r.infer.logs, by))
            for r in recordings.rollouts()
            if r.infer is not None
        ]

    return plant


def _tools(fill: bool) -> Plant:
    """Some tokens came from a tool: unlikely, and not sampled.

    With `fill`, single tokens have a log-probability of 0; otherwise one run of tokens has true
    values.
    """
    at_ = np.array([3, 7, 8, 12, 16]) if fill else np.arange(6, 14)

    def plant() -> list[Rollout]:
        found = []
        for r in recordings.rollouts():
            assert r.train is not None
            assert r.infer is not None
            train, infer = r.train.logs.copy(), r.infer.logs.copy()
            train[at_] -= np.linspace(1, 3, at_.size)
            if fill:
                infer[at_] = 0.0
            changed = recordings.with_logs(r, "train", train)
            found.append(recordings.with_logs(changed, "infer", infer))
        return found

    return plant


def _swapped() -> list[Rollout]:
    """Exchange the sides, with a difference large enough to reveal the order."""
    rng = np.random.default_rng(7)
    found = []
    for i in range(200):
        q = rng.dirichlet(np.full(8, 1.0), size=30)
        p = q * np.exp(0.5 * rng.standard_normal(q.shape))
        p /= p.sum(axis=1, keepdims=True)
        drawn = np.array([rng.choice(8, p=row) for row in q])
        train, infer = (np.log(law[np.arange(30), drawn]) for law in (p, q))
        found.append(_of(f"s{i}", (i,), drawn, infer, train))
    return found


def _of(
    key: str, prompt: tuple[int, ...], tokens: np.ndarray, train: np.ndarray, infer: np.ndarray
) -> Rollout:
    from kcdsl_backends.empirical.sources.rollouts.record import Side

    mask = np.ones(len(tokens), dtype=bool)
    return Rollout(
        key, prompt, tuple(int(t) for t in tokens), mask, Side(train, RAW), Side(infer, RAW),
        place="row 1",
    )  # fmt: skip


PLANTED: dict[str, tuple[Plant, str, float | None]] = {
    "infer at 0.7": (lambda: recordings.rollouts(sampled=at(0.7)), "temperature_fit", 0.7),
    "infer at 0.9": (lambda: recordings.rollouts(sampled=at(0.9)), "temperature_fit", 0.9),
    "infer at 1.3": (lambda: recordings.rollouts(sampled=at(1.3)), "temperature_fit", 1.3),
    "train at 0.7": (
        lambda: recordings.rollouts(sampled=at(0.7), infer_law=unchanged, train_law=at(0.7)),
        "temperature_fit",
        None,
    ),
    "top_p 0.8": (lambda: recordings.rollouts(sampled=nucleus(0.8)), "truncation_mass", None),
    "top_p 0.95": (lambda: recordings.rollouts(sampled=nucleus(0.95)), "truncation_mass", None),
    "one late": (_shifted(1), "alignment_shift", 1.0),
    "one early": (_shifted(-1), "alignment_shift", -1.0),
    "tools filled with 0": (_tools(fill=True), "mask_provenance", None),
    "tools in the mask": (_tools(fill=False), "mask_provenance", None),
    "sides swapped": (_swapped, "swapped_sides", None),
}
_CAUSES = {
    *("temperature_fit", "truncation_mass", "alignment_shift", "mask_provenance"),
    "swapped_sides",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistake_in_a_recording_is_diagnosed(name: str) -> None:
    plant, expected, _ = PLANTED[name]
    checks = prechecks(plant())
    assert failed(checks) & _CAUSES == {expected}, checks
    assert blocked(checks)


SCORED = ("infer at 0.7", "infer at 1.3", "top_p 0.8", "top_p 0.95", "one late")


@pytest.mark.full
@pytest.mark.parametrize("name", SCORED)
def test_scoring_training_kernel_estimates_the_fault(name: str) -> None:
    plant, expected, value = PLANTED[name]
    checks = prechecks(plant(), scored=True)
    assert failed(checks) & _CAUSES == {expected}
    found = checks[expected]
    if value is not None:
        assert found.value == pytest.approx(value, abs=0.02)
    if expected == "truncation_mass":
        assert name in found.detail


@pytest.mark.full
@pytest.mark.parametrize("t", [0.7, 0.9, 1.3])
def test_top_k_lists_give_the_temperature(t: float) -> None:
    checks = prechecks(recordings.rollouts(sampled=at(t), top=5))
    assert failed(checks) & _CAUSES == {"temperature_fit"}
    assert checks["temperature_fit"].value == pytest.approx(t, abs=0.01)


def test_list_of_another_token_is_a_shift() -> None:
    found = []
    for r in recordings.rollouts(top=5):
        assert r.infer is not None
        assert r.infer.top is not None
        top = replace(r.infer.top, logs=np.roll(r.infer.top.logs, 1, axis=0))
        found.append(replace(r, infer=replace(r.infer, top=top)))
    assert "alignment_shift" in failed(prechecks(found))


@pytest.mark.parametrize("side", ["train", "infer"])
def test_one_token_with_another_value_in_its_list_is_reported(side: str) -> None:
    given = recordings.rollouts(top=5)
    assert "alignment_shift" not in failed(prechecks(given))
    at, r = next(
        (i, r) for i, r in enumerate(given) if r.train and r.train.top and 0 in _listed(r, side)
    )
    own: Any = getattr(r, side)
    logs = own.logs.copy()
    logs[0] -= 0.05 + 0.01 * abs(logs[0])
    found = [*given[:at], replace(r, **{side: replace(own, logs=logs)}), *given[at + 1 :]]
    checks = prechecks(found)
    assert checks["alignment_shift"].outcome == "failed"
    assert f"first {r.place} at position 0" in checks["alignment_shift"].detail
    assert blocked(checks)


def _listed(rollout: Rollout, side: str) -> set[int]:
    """Return the positions whose sampled token is in the list of a side."""
    top: Any = getattr(rollout, side).top
    return {i for i, token in enumerate(rollout.tokens) if token in top.ids[i]}


@pytest.mark.full
def test_tokens_sampled_at_a_higher_temperature_are_diagnosed() -> None:
    """Raw log-probabilities of both sides agree; only the policy reveals the other distribution."""
    found = recordings.rollouts(sampled=at(1.3), infer_law=unchanged)
    assert failed(prechecks(found)) == set()
    listed = prechecks(recordings.rollouts(sampled=at(2.0), infer_law=unchanged, top=5))
    assert "sampling_law" in failed(listed)
    assert blocked(listed)
    checks = prechecks(found, scored=True)
    assert "sampling_law" in failed(checks)
    assert "by a temperature of 1.25" in checks["sampling_law"].detail


@pytest.mark.full
def test_lists_supplement_policies_of_few_tokens() -> None:
    """With a large vocabulary, policies fit in memory for some tokens only; lists exist for all."""
    found = recordings.rollouts(sampled=at(2.5), infer_law=unchanged, top=5)
    run = score([replace(r, train=None) for r in found], recordings.program(FLOAT32), 1.0)
    first = run.policies[0]
    few = Policy(first.key, first.logits[:3], first.tokens[:3], first.infer_logs[:3])
    checks = recorded_prechecks(
        Recorded(run.rollouts, 1.0, {"all": 1}, PROCESSED, PROCESSED, policies=(few,))
    )
    named = {check.name: check for check in checks}
    assert named["sampling_law"].outcome == "failed"
    assert named["sampling_law"].blocking


# --- declared ------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("train", "infer", "temperature", "name", "word"),
    [
        (None, RAW, 1.0, "logprob_semantics", "of train are of"),
        (RAW, None, 1.0, "logprob_semantics", "of infer are of"),
        (RAW, Semantics("processed", 0.7), 1.0, "logprob_semantics", "different temperatures"),
        (RAW, Semantics("processed", top_p=0.9), 1.0, "logprob_semantics", "cut off differently"),
        (
            Semantics("processed", top_p=0.9), Semantics("processed", top_p=0.9), 1.0,
            "logprob_semantics", "both sides are cut off (top_p 0.9)",
        ),
        (
            Semantics("processed", 0.7), Semantics("processed", 0.7), 1.0,
            "logprob_semantics", "constants: {temperature: 0.7}",
        ),
        (RAW, Semantics("raw", 0.7), 1.0, "sampling_law", "drawn at temperature 0.7"),
        (RAW, Semantics("raw", top_k=40), 1.0, "sampling_law", "top_k 40"),
    ],
)  # fmt: skip
def test_declared_semantics_of_both_sides_are_compared(
    train: Semantics | None, infer: Semantics | None, temperature: float, name: str, word: str
) -> None:
    checks = prechecks(recordings.rollouts(), temperature=temperature, semantics=(train, infer))
    assert name in failed(checks)
    assert word in checks[name].detail
    assert blocked(checks)


def test_failed_checks_of_positions_and_mass_say_what_to_look_at() -> None:
    checks = prechecks(_shifted(1)())
    assert checks["alignment_shift"].detail.endswith("infer fits one position later")
    cut = recordings.rollouts(sampled=recordings.nucleus(0.5))
    checks = prechecks(cut)
    assert "declare the filter in `logprobs` of infer" in checks["truncation_mass"].detail
    lowered = [
        recordings.with_logs(r, "infer", r.infer.logs - 1)
        for r in recordings.rollouts()
        if r.infer is not None
    ]
    checks = prechecks(lowered)
    assert "look for a filter, wrong columns or a wrong mask" in checks["support_check"].detail


def test_semantics_are_described_in_words() -> None:
    assert str(Law(0.7, 0.9, 40, 0.05)) == "temperature 0.7, top_p 0.9, top_k 40, min_p 0.05"
    assert Semantics("raw", 0.7).law == Law()
    assert Semantics("raw", 0.7).drawn == Law(0.7)
    assert Semantics("processed", 0.7).law == Law(0.7)


# --- planted in the rows -------------------------------------------------------------------------


@pytest.mark.full
def test_identical_members_of_a_group_are_diagnosed() -> None:
    """One seed for a whole group repeats one answer; a likely answer may repeat by chance."""
    hot = recordings.rollouts(sampled=at(1.6), train_law=at(1.6))
    said = Semantics("processed", 1.6)
    assert failed(prechecks(hot, temperature=1.6, semantics=(said, said))) == set()
    first = next(r for r in hot if r.infer is not None and r.infer.logs.sum() < -25)
    clone = replace(first, key="clone", place="row 99")
    checks = prechecks([*hot, clone], temperature=1.6, semantics=(said, said))
    assert failed(checks) == {"cloned_rollouts"}
    assert "of one group" in checks["cloned_rollouts"].detail
    elsewhere = replace(clone, group="other")
    checks = prechecks([*hot, elsewhere], temperature=1.6, semantics=(said, said))
    assert "of different groups" in checks["cloned_rollouts"].detail


@pytest.mark.parametrize(("copied", "named"), [(10, False), (40, True)])
def test_side_copied_in_most_rollouts_is_not_evidence(copied: int, named: bool) -> None:
    found = [
        recordings.with_logs(r, "train", r.infer.logs) if i < copied and r.infer is not None else r
        for i, r in enumerate(recordings.rollouts())
    ]
    checks = prechecks(found)
    assert ("copied_side" in failed(checks)) == named
    assert blocked(checks) == named
    assert "copied_side" not in failed(prechecks(found, recomputed=True))
    if named:
        assert "800 of 1280 tokens" in checks["copied_side"].detail


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_of_probability_1_are_not_sampled(recomputed: bool) -> None:
    """At a temperature near 0 both sides agree everywhere, for any kernels."""
    found = []
    for r in recordings.rollouts(prompts=4):
        nothing = np.zeros(len(r.tokens))
        found.append(
            recordings.with_logs(recordings.with_logs(r, "infer", nothing), "train", nothing)
        )
    checks = prechecks(found, recomputed=recomputed)
    assert "sampling_law" in failed(checks)
    assert blocked(checks)
    assert "probability 1" in checks["sampling_law"].detail


def test_copied_side_is_not_evidence() -> None:
    copies = [replace(r, train=r.infer) for r in recordings.rollouts()]
    checks = prechecks(copies)
    assert failed(checks) == {"copied_side"}
    assert blocked(checks)
    assert failed(prechecks(copies, recomputed=True)) == set()


@pytest.mark.parametrize(
    ("versions", "word"),
    [
        ({"role:infer_version": "3", "role:train_version": "4"}, "sampled by 3, scored by 4"),
        ({"role:infer_version": "3", "role:infer_version_last": "5"}, "sampled by 3 to 5"),
    ],
)
def test_stale_policies_are_diagnosed(versions: dict[str, str], word: str) -> None:
    found = list(recordings.rollouts())
    fresh = [replace(r, fields={"role:infer_version": 3, "role:train_version": 3.0}) for r in found]
    assert failed(prechecks(fresh)) == set()
    fresh[5] = replace(fresh[5], fields=versions)
    checks = prechecks(fresh)
    assert failed(checks) == {"stale_policy"}
    assert word in checks["stale_policy"].detail
    assert blocked(checks)


def test_non_finite_ratios_block() -> None:
    found = list(recordings.rollouts())
    assert found[3].train is not None
    logs = found[3].train.logs.copy()
    logs[2] = -np.inf
    found[3] = recordings.with_logs(found[3], "train", logs)
    checks = prechecks(found)
    assert failed(checks) == {"finite"}
    assert "(r3)" in checks["finite"].detail
    assert blocked(checks)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("log", "said"), [(-400.0, "mean w = "), (-1e4, "mean w > e^9,99")])
def test_ratios_beyond_float64_are_reported(log: float, said: str) -> None:
    """Infer states a finite log-probability for an excluded token, at every second token."""
    found = []
    for r in recordings.rollouts():
        assert r.infer is not None
        gone = np.arange(len(r.infer.logs)) % 2 == 0
        found.append(recordings.with_logs(r, "infer", np.where(gone, log, r.infer.logs)))
    told = truncation(found, (), 1.0, False)
    assert told.left is not None
    assert told.left < 1
    assert said in told.detail


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_support_is_checked_beyond_float64() -> None:
    found = list(recordings.rollouts())
    assert found[3].infer is not None
    logs = found[3].infer.logs.copy()
    logs[2] = -1e4
    found[3] = recordings.with_logs(found[3], "infer", logs)
    checks = prechecks(found)
    assert "support_check" in failed(checks)
    assert checks["support_check"].detail == "the largest w is beyond float64"


def test_share_of_masked_tokens_is_reported() -> None:
    found = [replace(r, mask=np.arange(len(r.tokens)) % 4 != 0) for r in recordings.rollouts()]
    check = prechecks(found)["masked_share"]
    assert check.value == pytest.approx(0.25)
    assert check.outcome == "passed"


def test_shifts_are_compared_at_unmasked_tokens() -> None:
    found = [replace(r, mask=np.zeros(len(r.tokens), dtype=bool)) for r in recordings.rollouts()]
    assert alignment(found).left is None
    assert ratios_of(found).delta.size == 0


# --- scoring -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("t", [1.0, 0.7])
def test_rescoring_reproduces_the_recorded_values(t: float) -> None:
    """The training kernel recomputes its own recorded numbers, at the temperature of the policy.

    It also scores the other side's top-k tokens.
    """
    found = recordings.rollouts(sampled=at(t), train_law=at(t), top=4, prompts=4)
    run = score([replace(r, train=None) for r in found], recordings.program(FLOAT32), t)
    for known, again in zip(found, run.rollouts, strict=True):
        assert known.train is not None
        assert known.train.top is not None
        assert known.infer is not None
        assert known.infer.top is not None
        assert again.train is not None
        assert again.train.top is not None
        np.testing.assert_allclose(again.train.logs, known.train.logs, atol=1e-5)
        assert again.train.top.likeliest == 4
        assert (again.train.top.ids[:, :1] == known.train.top.ids[:, :1]).all()
        lists = zip(again.train.top.ids, known.infer.top.ids, strict=True)
        assert all(set(theirs) <= set(ours) for ours, theirs in lists)
    said = Semantics("processed", t)
    checks = prechecks(found, scored=True, temperature=t, semantics=(said, said))
    assert failed(checks) == set()


def test_rollout_without_a_prompt_is_not_scored() -> None:
    found = replace(recordings.rollouts(prompts=1)[0], prompt=(), train=None)
    with pytest.raises(Refusal, match="nothing precedes the first sampled token"):
        score([found], recordings.program(FLOAT32), 1.0)
