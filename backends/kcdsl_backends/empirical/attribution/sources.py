"""The sources of drift, and kernels with some sources of infer and the others of train.

The paper splits drift into operator, precision, batch and routing. The quantisation of weights and
of activations is chosen independently of the compute format, so `precision` has three sources here;
the four terms are formed from the same runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import preset_of
from kcdsl.model.numerics import Activations, Numerics, Weights, plain_weights
from kcdsl.model.presets import resolve

OPERATOR = "operator"
PRECISION = "precision"
WEIGHTS = "weights"
ACTIVATIONS = "activations"
BATCH = "batch"
ROUTING = "routing"
SOURCES = (OPERATOR, PRECISION, WEIGHTS, ACTIVATIONS, BATCH, ROUTING)
"""In the order in which they are shown."""

TERMS = {
    OPERATOR: OPERATOR,
    PRECISION: PRECISION,
    WEIGHTS: PRECISION,
    ACTIVATIONS: PRECISION,
    BATCH: BATCH,
    ROUTING: ROUTING,
}
"""The term of the paper that each source belongs to."""


@dataclass(frozen=True, slots=True)
class SourceSetting:
    """The setting of one source on each side, in words."""

    source: str
    train: str
    infer: str


def settings(train: KernelRef, infer: KernelRef) -> tuple[SourceSetting, ...]:
    """Return the settings of the kernels' own sources on both sides, equal ones included.

    Raises Refusal (KC463) for numerics that cannot be resolved.
    """
    a, b = resolve(train), resolve(infer)
    return (
        SourceSetting(OPERATOR, train.run, infer.run),
        SourceSetting(PRECISION, _precision(a), _precision(b)),
        SourceSetting(WEIGHTS, _weights(a), _weights(b)),
        SourceSetting(ACTIVATIONS, _activations(a), _activations(b)),
    )


def different(train: KernelRef, infer: KernelRef) -> tuple[str, ...]:
    """Return the kernels' own sources that are not equal on both sides.

    `casts`, and the claims of an attention program that both sides run, are no source: they are
    claims and do not change the program.
    """
    a, b = resolve(train), resolve(infer)
    formats = [(n.compute, n.accumulate, n.results, n.tensor_core) for n in (a, b)]
    unequal = {
        OPERATOR: (train.run, train.folder) != (infer.run, infer.folder),
        PRECISION: formats[0] != formats[1],
        WEIGHTS: stored(a) != stored(b)
        or _override_sections(a, WEIGHTS) != _override_sections(b, WEIGHTS),
        ACTIVATIONS: a.activations != b.activations
        or _override_sections(a, ACTIVATIONS) != _override_sections(b, ACTIVATIONS),
    }
    return tuple(source for source, differs in unequal.items() if differs)


def stored(numerics: Numerics) -> Weights | None:
    """Return how weights are quantised; None where they are cast to the compute format alone."""
    return None if numerics.weights in plain_weights(numerics) else numerics.weights


def _override_sections(numerics: Numerics, source: str) -> dict[str, Weights | Activations]:
    """Return the weights or activations of overrides, by pattern; none if all equal those of the
    kernel."""
    own = numerics.weights if source == WEIGHTS else numerics.activations
    found = {
        each.pattern: each.weights if source == WEIGHTS else each.activations
        for each in numerics.overrides
    }
    return found if any(section != own for section in found.values()) else {}


def mixed(train: KernelRef, infer: KernelRef, taken: Collection[str]) -> KernelRef:
    """Return the kernel that has the sources `taken` from infer and all others from train.

    If its program and its formats come from different sides, attention stores what that program
    stores in these formats, and `casts` is the weaker of both claims: the mixed kernel satisfies
    both. Raises Refusal (KC463) for a combination without a meaning.
    """
    own = different(train, infer)
    chosen = frozenset(taken) & frozenset(own)
    if not chosen:
        return train
    if chosen == frozenset(own):
        return infer
    side = {source: infer if source in chosen else train for source in SOURCES}
    a, b = resolve(train), resolve(infer)
    of = {source: b if source in chosen else a for source in SOURCES}
    program, formats = side[OPERATOR], of[PRECISION]
    if OPERATOR not in own:
        program = side[PRECISION]
    together = (
        PRECISION not in own
        or OPERATOR not in own
        or ((OPERATOR in chosen) == (PRECISION in chosen))
    )
    record: dict[str, Any] = {
        "preset": dict(program.numerics).get("preset") or preset_of(program.run),
        "compute": formats.compute,
        "accumulate": formats.accumulate,
        "casts": _casts(a, b),
        "results": dict(formats.results),
        "tensor_core": "none" if formats.tensor_core is None else formats.tensor_core.to_json(),
        "sigmoid": of[OPERATOR].sigmoid,
        "products": formats.products,
        "shards": of[OPERATOR].shards,
        "byte_sums": _byte_sums(of[OPERATOR], of[WEIGHTS], of[ACTIVATIONS]),
        "activations": of[ACTIVATIONS].activations.to_json(),
        "weights": (stored(of[WEIGHTS]) or Weights(formats.compute)).to_json(),
        "overrides": _overrides(of[WEIGHTS], of[ACTIVATIONS], formats.compute),
    }
    if together:
        held = of[PRECISION if OPERATOR not in own else OPERATOR].to_json()["attention"]
        record["attention"] = held
    else:
        record["preset"] = preset_of(program.run) or record["preset"]
    return replace(program, numerics=tuple(sorted(record.items())))


def _overrides(weights: Numerics, activations: Numerics, compute: str) -> dict[str, Any]:
    """Return overrides with the weights of one side and the activations of the other.

    Raises Refusal (KC463) where the sides name different linears.
    """
    stored, entering = (
        _override_sections(weights, WEIGHTS),
        _override_sections(activations, ACTIVATIONS),
    )
    if stored and entering and stored.keys() != entering.keys():
        raise refuse(
            codes.NUMERICS,
            "the weights of one kernel cannot be taken with the activations of the other: their"
            " `overrides` name different linears",
            help="write the same names in the overrides of both kernels",
        )
    found: dict[str, Any] = {}
    for pattern in stored or entering:
        own = stored.get(pattern, weights.weights)
        held = Weights(compute) if own in plain_weights(weights) else own
        found[pattern] = {
            "weights": held.to_json(),
            "activations": entering.get(pattern, activations.activations).to_json(),
        }
    return found


def _byte_sums(program: Numerics, weights: Numerics, activations: Numerics) -> str:
    """Return the byte sums of the program if weights and activations are its own, else "wide"."""
    known = program.weights == weights.weights and program.activations == activations.activations
    known = known and program.overrides == weights.overrides == activations.overrides
    return program.byte_sums if known else "wide"


def _casts(a: Numerics, b: Numerics) -> str:
    return a.casts if a.casts == b.casts else "any"


def _precision(numerics: Numerics) -> str:
    words = numerics.compute
    if numerics.accumulate != "float32" and numerics.accumulate != numerics.compute:
        words += f", sums in {numerics.accumulate}"
    if numerics.results:
        words += ", " + ", ".join(f"{name} {format}" for name, format in numerics.results)
    return words + ("" if numerics.tensor_core is None else ", matrix unit")


def _weights(numerics: Numerics) -> str:
    found = stored(numerics)
    if found is None:
        return "as computed" + _override_count(numerics, WEIGHTS)
    words = found.format if found.scale == "none" else f"{found.format} {found.scale}"
    return words + _override_count(numerics, WEIGHTS)


def _activations(numerics: Numerics) -> str:
    found = numerics.activations
    words = "as computed" if found.format == "none" else f"{found.format} {found.scale}"
    return words + _override_count(numerics, ACTIVATIONS)


def _override_count(numerics: Numerics, source: str) -> str:
    """Return, in words, how many overrides differ from the kernel's own setting."""
    own = numerics.weights if source == WEIGHTS else numerics.activations
    count = sum(section != own for section in _override_sections(numerics, source).values())
    return f", {count} override{'s' * (count > 1)}" if count else ""
