"""The preconditions of recorded tokens: one law on both sides, the same tokens, valid rows.

A mistake here looks like drift. Declarations are checked first; then the values are tested for a
shift, a temperature, a filter, a mask or a swap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses import recorded_logs
from kcdsl_backends.empirical.diagnoses.drawn_law import drawn_law, listed_law
from kcdsl_backends.empirical.diagnoses.model import (
    cause_of,
    empty_slice,
    not_applicable,
    outcome,
    precheck_of,
)
from kcdsl_backends.empirical.diagnoses.policies import support_check
from kcdsl_backends.empirical.sources.rollouts.record import Array, Law, Policy, Rollout, Semantics

_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rollouts to be diagnosed, with the ln-probabilities of both sides.

    `temperature` is that of the contract's policy, `slices` the number of units of each slice.
    `policies` are whole policies of the training kernel if it scored the tokens itself.
    """

    rollouts: tuple[Rollout, ...]
    temperature: float
    slices: Mapping[str, int]
    train: Semantics | None
    infer: Semantics | None
    policies: tuple[Policy, ...] = ()
    recomputed: bool = False
    compares: bool = True
    """Whether any clause compares ln-probabilities of both sides."""
    lists: bool = False
    """Whether any clause compares lists of the likeliest tokens of both sides."""
    left_out: int = 0
    """Number of rollouts of which no token counts."""
    counts_units: bool = True
    """Whether any clause needs to know which rows share a prompt."""
    kept: bool = False
    """Whether both sides are policies on the tokens that the sampler kept."""


def recorded_prechecks(subject: Recorded) -> tuple[Precheck, ...]:
    """Return every precondition of recorded tokens, the named cause among those that failed."""
    s = subject
    shared = [
        _masked(s),
        empty_slice(s.slices),
        stale_policy(s.rollouts),
        cloned_rollouts(s.rollouts),
        *([sampling_units(s.rollouts)] if s.counts_units else []),
    ]
    both = [r for r in s.rollouts if r.train is not None and r.infer is not None and r.counted]
    copied = not_applicable("copied_side", "the training kernel scored the tokens")
    if not s.policies and (s.compares or s.lists):
        copied = copied_side(both, s.recomputed, logs=s.compares, lists=s.lists)
    if not s.compares:
        return (*shared, copied) if s.lists else tuple(shared)
    declared = [logprob_semantics(s), sampling_law(s), _finite(both)]
    if not both:
        return (*declared, *shared)
    tempered = recorded_logs.temperature(both, s.policies, s.temperature)
    repairs = [
        recorded_logs.alignment(both),
        recorded_logs.masks(both),
        tempered,
        recorded_logs.truncation(both, s.policies, s.temperature, tempered.explains),
        recorded_logs.swapped(both),
    ]
    cause = cause_of(repairs)
    outcomes = [precheck_of(repair, cause) for repair in repairs]
    return (*declared, *shared, copied, *outcomes, support_check(_ratios(both)))


def _ratios(rollouts: Sequence[Rollout]) -> list[Array]:
    """Return w of the tokens of each sampling unit, infinite beyond float64."""
    units: dict[str, list[Array]] = {}
    for r in rollouts:
        delta = r.delta()
        if delta is not None and bool(np.isfinite(delta).all()):
            with np.errstate(over="ignore"):
                units.setdefault(r.unit, []).append(np.exp(delta))
    return [np.concatenate(parts) for parts in units.values()]


# --- declarations --------------------------------------------------------------------------------


def logprob_semantics(subject: Recorded) -> Precheck:
    """Check that both sides are declared to be of one law, that of the contract's policy."""
    name = "logprob_semantics"
    sides = {"train": subject.train, "infer": subject.infer}
    silent = [side for side, said in sides.items() if said is None]
    if silent:
        detail = (
            f"nothing states what the log-probabilities of {' and '.join(silent)} are of; write "
            "`logprobs: {values: raw}` or `{values: processed, temperature: T}` at the kernel"
        )
        return outcome(name, False, detail)
    assert subject.train is not None
    assert subject.infer is not None
    train, infer = subject.train.law, subject.infer.law
    whole = replace(infer, top_p=1.0, top_k=0, min_p=0.0) if subject.kept else infer
    told = any("infer_kept" in r.arrays for r in subject.rollouts)
    problem = _differ(train, infer, told) or _not_the_policy(whole, subject.temperature)
    shown = f"train: {subject.train.values}, {train}; infer: {subject.infer.values}, {infer}"
    if problem is not None:
        return outcome(name, False, f"{problem} ({shown})")
    return outcome(name, True, shown)


def _differ(train: Law, infer: Law, told: bool) -> str | None:
    """Return how the laws differ. `told`: the rows tell which tokens the sampler kept."""
    if abs(train.temperature - infer.temperature) > _NEAR:
        return "the sides are at different temperatures"
    if train.filters != infer.filters and told:
        return (
            "the sides are cut off differently, and nothing tells the mass that the training kernel"
            " gives to the tokens that were kept: record its lists of them (`train_top_ids`,"
            " `train_top_logs`), or let the training kernel score the tokens"
        )
    if train.filters != infer.filters:
        return (
            "the sides are cut off differently, and nothing tells which tokens the sampler kept:"
            " record them (`infer_kept`), or lists of all that were left"
        )
    return None


def _not_the_policy(law: Law, temperature: float) -> str | None:
    if law.temperature == 0:
        return "at temperature 0 the likeliest token has all the mass, and no policy is compared"
    if law.filters:
        return (
            f"both sides are cut off ({law.filters}): no ratio counts the mass that one of them cut"
        )
    if abs(law.temperature - temperature) > _NEAR:
        return (
            f"the contract's policy is at temperature {temperature:g}; write "
            f"`constants: {{temperature: {law.temperature:g}}}`"
        )
    return None


def sampling_units(rollouts: Sequence[Rollout]) -> Precheck:
    """Check that it is known which rollouts share a prompt, since those are dependent."""
    name = "sampling_units"
    apart = [r for r in rollouts if r.tokens and not r.prompt and r.group is None]
    detail = f"{len({r.unit for r in rollouts})} units of {len(rollouts)} rollouts"
    if apart:
        detail = (
            f"{len(apart)} of {len(rollouts)} rollouts have neither a prompt nor a group, so it is"
            f" not known which of them share a prompt; first {apart[0].place}: record `prompt`, or"
            " `group`, with a name of its own for each row if no two share one"
        )
    return outcome(name, not apart, detail, float(len(apart)))


def sampling_law(subject: Recorded) -> Precheck:
    """Check that tokens were drawn from the law of the log-probabilities.

    The declarations are compared with each other; with whole policies or lists of the likeliest
    tokens, the tokens are tested.
    """
    name = "sampling_law"
    said = subject.infer
    if said is None:
        return not_applicable(name, "nothing states how tokens were drawn")
    law, drawn = said.law, said.drawn
    if drawn.temperature == 0 or drawn.top_k == 1:
        detail = (
            f"tokens were drawn at {drawn}, which takes the likeliest: they are no sample of any "
            "law; draw at a temperature above 0 and without top_k 1"
        )
        return outcome(name, False, detail)
    if abs(law.temperature - drawn.temperature) > _NEAR or law.filters != drawn.filters:
        detail = (
            f"tokens were drawn at {drawn}, and the log-probabilities are raw: means over these "
            "tokens estimate nothing of the raw law; record processed ones"
        )
        return outcome(name, False, detail)
    sure = _all_certain(subject.rollouts)
    if sure is not None:
        return outcome(name, False, sure)
    asked = (  # policies are kept of some tokens only, where the vocabulary is large
        drawn_law(name, subject.policies, subject.temperature),
        listed_law(name, subject.rollouts, law.temperature),
    )
    found = sorted(
        (check for check in asked if check.outcome != "not_applicable"),
        key=lambda check: check.outcome != "failed",
    )
    return found[0] if found else outcome(name, True, f"declared: drawn at {drawn}")


# --- values and masks ----------------------------------------------------------------------------


def _finite(rollouts: Sequence[Rollout]) -> Precheck:
    """Check that the ratios of all counted tokens are finite."""
    name = "finite"
    bad = [r for r in rollouts if (d := r.delta()) is not None and not np.isfinite(d).all()]
    if not rollouts:
        detail = "no rollout has a token that counts with log-probabilities of both sides"
        return outcome(name, False, detail, blocking=True)
    detail = f"{len(bad)} of {len(rollouts)} rollouts have ln-ratios that are not finite"
    if bad:
        detail += f"; first {bad[0].place} ({bad[0].key})"
    return outcome(name, not bad, detail, len(bad) / len(rollouts), blocking=bool(bad))


def _masked(subject: Recorded) -> Precheck:
    """Report the share of sampled tokens that do not count; rollouts without any are left out."""
    tokens = sum(len(r.tokens) for r in subject.rollouts)
    counted = sum(r.counted for r in subject.rollouts)
    share = 1 - counted / tokens if tokens else 0.0
    out = f"; {subject.left_out} rollouts count no token" if subject.left_out else ""
    detail = f"{tokens - counted} of {tokens} sampled tokens are masked ({100 * share:.3g} %){out}"
    return outcome("masked_share", True, detail, share)


# --- copied, greedy and stale rows ------------------------------------------------------------

_BY_CHANCE = -20.0
"""ln of the probability above which equal samples of one prompt may be chance."""
_FEWEST = 16
"""Smallest number of tokens at which equal bits on both sides are not chance."""


def cloned_rollouts(rollouts: Sequence[Rollout]) -> Precheck:
    """Check that samples of one prompt with small probability differ.

    Equal samples come from a seed shared by a group or from rows written twice; they are not
    independent, and counting them overstates the sample size.
    """
    name = "cloned_rollouts"
    drawn = [r for r in rollouts if r.tokens]
    if not drawn:
        return not_applicable(name, "the recording holds no sampled tokens")
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], Rollout] = {}
    clones: list[tuple[Rollout, Rollout]] = []
    for r in drawn:
        first = seen.setdefault((r.prompt, r.tokens), r)
        if first is not r and _chance(r) < _BY_CHANCE:
            clones.append((first, r))
    if not clones:
        return outcome(name, True, f"{len(drawn)} rollouts, none written twice", 0.0)
    one, two = clones[0]
    same = one.unit == two.unit
    where = "of one group" if same else "of different groups"
    detail = (
        f"{len(clones)} of {len(drawn)} rollouts equal an earlier one, which chance does not do: "
        f"{two.place} ({two.key}) is {one.place} ({one.key}), {where}"
    )
    return outcome(name, False, detail, len(clones) / len(drawn))


def _chance(rollout: Rollout) -> float:
    """Return ln of the probability of sampling these tokens; 0 if it is not known."""
    if rollout.infer is None:
        return 0.0 if len(rollout.tokens) < _FEWEST else -math.inf
    logs = rollout.infer.logs
    return float(logs[np.isfinite(logs)].sum())


def copied_side(
    rollouts: Sequence[Rollout], recomputed: bool, *, logs: bool = True, lists: bool = False
) -> Precheck:
    """Check that the recorded sides are not one array written twice, in all or most rollouts.

    Trainers that skip recomputing write such copies. `logs` and `lists` say which arrays clauses
    compare: the ln-probabilities of the tokens, and the lists of the likeliest ones.

    `recomputed`: the contract states that both sides were computed, so that equal bits are a
    result.
    """
    both = [r for r in rollouts if r.train is not None and r.infer is not None and r.counted]
    equal = [(r, not bool(np.any(r.delta()))) for r in both]
    listed = [(r, alike) for r in both if (alike := _equal_lists(r)) is not None]
    reads = ((equal, logs), (listed, lists))
    found = [_copied(own, recomputed) for own, read in reads if read]
    return next((check for check in found if check.outcome == "failed"), found[0])


def _equal_lists(rollout: Rollout) -> bool | None:
    """Return whether both lists of the likeliest tokens are equal in all bits; None without
    them."""
    if rollout.train is None or rollout.infer is None:
        return None
    one, two, mask = rollout.train.top, rollout.infer.top, rollout.mask
    if one is None or two is None:
        return None
    return np.array_equal(one.ids[mask], two.ids[mask]) and np.array_equal(
        one.logs[mask], two.logs[mask]
    )


def _copied(found: Sequence[tuple[Rollout, bool]], recomputed: bool) -> Precheck:
    """Return the check of rollouts of which it is known whether their sides are equal."""
    name = "copied_side"
    tokens = sum(r.counted for r, _ in found)
    if tokens < _FEWEST:
        return not_applicable(name, "too few tokens with ln-probabilities of both sides")
    alike = [r for r, same in found if same]
    equal = sum(r.counted for r in alike)
    if len(alike) < len(found) and (2 * equal < tokens or equal < _FEWEST):
        detail = f"{tokens} tokens, both sides differ in {len(found) - len(alike)} rollouts"
        return outcome(name, True, detail, equal / tokens)
    shown = f"all {tokens}" if equal == tokens else f"{equal} of {tokens}"
    if recomputed:
        detail = f"{shown} tokens are in rollouts with equal bits, stated as recomputed"
        return outcome(name, True, detail, equal / tokens)
    detail = (
        f"{shown} tokens are in rollouts with equal bits on both sides: a trainer that skips"
        " recomputing copies one column (verl: bypass_mode); state `recomputed: true` if the"
        " training kernel ran"
    )
    return outcome(name, False, detail, equal / tokens)


def _all_certain(rollouts: Sequence[Rollout]) -> str | None:
    """Return a reason if all tokens have probability 1, as from greedy decoding, so that none was
    drawn. None if some token has less."""
    logs = [r.infer.logs[r.mask] for r in rollouts if r.infer is not None]
    tokens = sum(part.size for part in logs)
    if tokens < _FEWEST or any(bool(np.any(part)) for part in logs):
        return None
    return (
        f"the inference kernel gives each of {tokens} tokens the probability 1, as greedy decoding"
        " does: nothing was drawn, and no other law is seen"
    )


def stale_policy(rollouts: Sequence[Rollout]) -> Precheck:
    """Check that both sides are of one version of the policy, for all tokens of a rollout."""
    name = "stale_policy"
    known = [r for r in rollouts if "role:infer_version" in r.fields]
    if not known:
        return not_applicable(name, "no column names the version of the policy")
    late, torn = [], []
    for r in known:
        sampled = _version(r.fields["role:infer_version"])
        trained = _version(r.fields.get("role:train_version", sampled))
        last = _version(r.fields.get("role:infer_version_last", sampled))
        if trained != sampled:
            late.append((r, f"sampled by {sampled}, scored by {trained}"))
        elif last != sampled:
            torn.append((r, f"sampled by {sampled} to {last}"))
    found = late + torn
    if not found:
        return outcome(name, True, f"{len(known)} rollouts of one version each", 0.0)
    rollout, what = found[0]
    detail = f"{len(found)} of {len(known)} rollouts: {rollout.place} ({rollout.key}) was {what}"
    return outcome(name, False, detail, len(found) / len(known))


def _version(value: object) -> str:
    """Return a version as text; 3, 3.0 and "3" are one."""
    text = str(value)
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:g}" if math.isfinite(number) and abs(number) < 1e15 else text
