"""What two contracts say around their clauses, and which clauses that changes the meaning of."""

from __future__ import annotations

from collections.abc import Iterator

from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.terms import Clause, KernelRef, Metric, NoFlip, Norm, Program
from kcdsl.metrics import find_metric
from kcdsl.verdict.difference import Change, Relation
from kcdsl_certs.reals import real_text

_WITHOUT_TEMPERATURE = ("logit_", "hidden_", "embedding_", "margin", "top1_", "top5_", "top10_")


def changes(old: Program, new: Program) -> tuple[Change, ...]:
    """Return what differs in models, kernels, constants and the user's metrics."""
    return tuple(_changes(old, new))


def _changes(old: Program, new: Program) -> Iterator[Change]:
    for name in ("checkpoint", "architecture", "module", "config", "tokenizer"):
        before, after = getattr(old.model, name), getattr(new.model, name)
        if before != after:
            yield _change(f"model {name}", before, after)
    yield from _kernel("kernel train", old.train, new.train)
    yield from _kernel("kernel infer", old.infer, new.infer)
    yield from _kernel("route guard", old.guard, new.guard)
    yield from _kernel("route fallback", old.fallback, new.fallback)
    for name in ("guard_from", "fallback_from"):
        before, after = getattr(old.escalation, name), getattr(new.escalation, name)
        if before != after:
            yield _change(f"health {name}", real_text(before), real_text(after))
    for name in ("temperature", "reward_range", "advantage_max", "score_norm_max"):
        before, after = getattr(old.constants, name), getattr(new.constants, name)
        if before != after:
            yield _change(
                name,
                None if before is None else real_text(before),
                None if after is None else real_text(after),
            )
    known = {metric.name: metric for metric in old.metrics}
    for metric in new.metrics:
        before = known.get(metric.name)
        if before is not None and before != metric:
            fields = [
                name
                for name in metric.__dataclass_fields__
                if getattr(metric, name) != getattr(before, name)
            ]
            yield Change(
                f"metric {metric.name}",
                ", ".join(f"{name} {getattr(before, name)}" for name in fields),
                ", ".join(f"{name} {getattr(metric, name)}" for name in fields),
                Relation.INCOMPARABLE,
            )


def _change(name: str, old: str | None, new: str | None) -> Change:
    return Change(name, old or "none", new or "none", Relation.INCOMPARABLE)


def _kernel(name: str, old: KernelRef | None, new: KernelRef | None) -> Iterator[Change]:
    before, after = (
        {} if kernel is None else {"run": kernel.run, **dict(_flat(kernel.numerics))}
        for kernel in (old, new)
    )
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            yield _change(f"{name} {key}", before.get(key), after.get(key))


def _flat(pairs: tuple[tuple[str, object], ...], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in pairs:
        if isinstance(value, tuple):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def apart(clause: Clause, found: tuple[Change, ...]) -> tuple[str, ...]:
    """Return the changes that make one clause speak of something else in the other contract.

    Runs that the numerics admit depend on the numerics and the model; measured values on the
    temperature and on how the user's metrics are defined.
    """
    names = [change.name for change in found]
    touched: list[str] = []
    admitted = any(isinstance(part, NoFlip) for part in walk(clause.require))
    for term in terms_of(clause.require):
        if isinstance(term, Norm) and not term.of.measured:
            admitted = True
        if isinstance(term, Metric):
            touched += [name for name in names if name == f"metric {term.name}"]
            if "temperature" in names and _has_temperature(term.name):
                touched.append("temperature")
    if admitted:
        touched += [name for name in names if name.startswith(("model ", "kernel "))]
    return tuple(dict.fromkeys(touched))


def _has_temperature(name: str) -> bool:
    definition = find_metric(name)
    if definition is None:
        return True
    needs = {"logits", "sampled"} & set(definition.needs)
    return bool(needs) and not definition.name.startswith(_WITHOUT_TEMPERATURE)
