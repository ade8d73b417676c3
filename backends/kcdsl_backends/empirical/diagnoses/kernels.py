"""The preconditions of two kernels in order, and the cause of a deviation.

First, faults that void evidence: other weights, other shapes, slices without rows, values that are
not finite. Then repairs of whole outputs; the one that leaves least deviation is the cause. Then
masks and padding, last blocks that err beyond their claims. After a cause is named, later checks
name none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.alignment import (
    alignment_shift,
    deviating_run,
    swapped_sides,
    token_equality,
    visibility,
    visible_padding,
)
from kcdsl_backends.empirical.diagnoses.model import (
    SMALLEST,
    Probe,
    Repair,
    RoundingNoise,
    all_finite,
    cause_of,
    deviation,
    empty_slice,
    finite,
    noise_of,
    not_applicable,
    precheck_of,
)
from kcdsl_backends.empirical.diagnoses.policies import (
    support_check,
    temperature_fit,
    truncation_mass,
)
from kcdsl_backends.empirical.diagnoses.probes import (
    batch_invariance,
    chosen,
    forwards,
    probe,
    self_determinism,
)
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.diagnoses.weights import (
    Localised,
    coarser_layer,
    localise,
    stale_weights,
    weights_checksum,
    whole_model,
)
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.table.evidence import Array, SamplingUnit
from kcdsl_backends.requests import Request


@dataclass(frozen=True, slots=True)
class Subject:
    """Two kernels to be diagnosed, with their requests, digests and reference.

    `checkpoints` holds weights digests by place, `slices` the number of rows of each slice,
    `nonfinite` the number of values of a request that are not finite. Without a `reference` the
    size of rounding errors is unknown, and checks that need it are not applicable.
    """

    train: Kernel
    infer: Kernel
    requests: tuple[Request, ...]
    encoder: bool
    temperature: float
    checkpoints: Mapping[str, str]
    slices: Mapping[str, int]
    nonfinite: Mapping[str, int]
    reference: Reference | None = None

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """Return train and infer."""
        return self.train, self.infer


def run_prechecks(subject: Subject, units: Sequence[SamplingUnit]) -> tuple[Precheck, ...]:
    """Return every precondition with its outcome, the named cause among those that failed."""
    s, encoder = subject, subject.encoder
    probed = [probe(r, s.train, s.infer, encoder, s.reference) for r in chosen(s.requests)]
    usable = [p for p in probed if p is not None]
    probes = [p for p in usable if p.train.shape == p.infer.shape and _defined(p)]
    noise = noise_of(probes, states=encoder)
    void = [
        weights_checksum(s.checkpoints),
        token_equality(units, usable),
        empty_slice(s.slices),
        finite(units, s.nonfinite),
    ]
    named = any(check.outcome == "failed" for check in void if check.name == "weights_checksum")
    repairs = _repairs(subject, probes, noise)
    cause = cause_of(repairs)
    outcomes = [precheck_of(repair, cause) for repair in repairs]
    shown = [repair.name for repair in repairs if repair is cause or repair.seen]
    known = shown[0] if shown else ("weights_checksum" if named else None)
    localised = None if known else _localised(subject, probes, noise)
    found = [
        *void,
        self_determinism(usable),
        batch_invariance(
            _pair(s.requests),
            forwards(s.train, s.infer, encoder),
            noise,
            encoder=encoder,
            padding=cause is None,
        ),
        *outcomes,
        coarser_layer(localised, known) if known is None else _explained("coarser_layer", known),
        stale_weights(noise, localised, known),
    ]
    if not encoder:
        found.append(support_check(_ratios(units)))
    if s.reference is not None:
        s.reference.release()
    return tuple(found)


def _repairs(
    subject: Subject, probes: Sequence[Probe], noise: RoundingNoise | None
) -> list[Repair]:
    sides = swapped_sides(noise)
    if subject.encoder:
        return [sides]
    t = subject.temperature
    simple = [alignment_shift(probes, t), temperature_fit(probes, t), truncation_mass(probes, t)]
    span = deviating_run(probes, noise, t)
    if cause_of([*simple, sides, span]) is None and not any(repair.seen for repair in simple):
        span = _masks(subject, probes, noise) or span
    return [*simple, span, sides]


def _masks(subject: Subject, probes: Sequence[Probe], noise: RoundingNoise | None) -> Repair | None:
    """Return the repair by masks or padding; None if there is no deviation to explain."""
    t = subject.temperature
    suspect = bool(noise.beyond) if noise is not None else deviation(probes, t) > SMALLEST
    if not probes or not suspect:
        return None
    kernels = forwards(subject.train, subject.infer, subject.encoder)
    longest = max(probes, key=lambda p: p.train.shape[0])
    padded = visible_padding(longest, kernels, t)
    if padded.explains:
        return padded
    train, infer = (getattr(kernel, "ref", None) for kernel in subject.kernels)
    claim = train is None or train.own_file is None, infer is None or infer.own_file is None
    return visibility(longest, kernels, t, claim=claim)


def _localised(
    subject: Subject, probes: Sequence[Probe], noise: RoundingNoise | None
) -> Localised | None:
    reference = subject.reference
    if reference is None or not probes or probes[0].gold is None:
        return None
    found = localise(probes[0], subject.kernels, reference)
    if noise is None or not noise.beyond or (found is not None and found.deviating):
        return found
    return whole_model(probes[0], noise.beyond, reference) or found


def _explained(name: str, cause: str) -> Precheck:
    return not_applicable(name, f"{cause} explains the deviation")


def _defined(p: Probe) -> bool:
    """Return whether both outputs are numbers; -inf is the logit of a token without mass."""
    return all(all_finite(o.clamp_min(-1e300)) for o in (p.train, p.infer))


def _pair(requests: Sequence[Request]) -> tuple[Request, Request] | None:
    long = [r for r in chosen(requests) if r.length >= 2]
    return (long[0], long[1]) if len(long) > 1 else None


def _ratios(units: Sequence[SamplingUnit]) -> list[Array]:
    name = "importance_ratio"
    return [u.values[name] for u in units if u.failure is None and name in u.values]
