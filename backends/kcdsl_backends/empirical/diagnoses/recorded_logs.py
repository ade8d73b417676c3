"""Explanations of recorded ln-ratios: a shift, a temperature, a filter, a mask, a swap of sides.

Recordings hold the ln-probabilities of sampled tokens, sometimes those of the likeliest ones, and
whole policies if the training kernel scored the tokens. More data give a surer explanation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.model import SIDES, SMALLEST, Repair
from kcdsl_backends.empirical.diagnoses.policies import WIDEST, minimise
from kcdsl_backends.empirical.sources.rollouts.record import Array, Policy, Rollout

_SHORTEST = 4
_FEWEST = 64
"""Fewest tokens on which a law is inferred from the shape of its ln-ratios alone."""
_SHAPED = 0.78
"""Largest share of mean |ln w| that a temperature inferred from the shape alone may leave."""
_FIT_TOKENS = 2**16
"""Number of tokens on which a temperature is fitted by its shape."""
_CONTRASTS = 24
"""Fewest shared positions for fitting a temperature: of fewer, one alone may determine it."""
_SAME_TEMPERATURE = 1e-3
"""|ln T| below which two temperatures count as equal."""
_DEEPEST = 256
"""Number of tokens of a rollout that are compared with others for shared positions."""
_ONE_SIDED = 0.5
"""Value of -sum ln w / sum |ln w| from which deviations count as one-sided."""
_LARGEST_LOG = 700.0
"""Slightly below ln of the largest float64."""
_FIRM = 5.0
"""Standard errors beyond which a mean ratio is not 1."""
_LISTED, _RELATIVE = 1e-3, 2.0**-8
"""Absolute and relative difference that rounding, to bfloat16 at worst, leaves between the
ln-probability of a token and its entry in a list."""
_ROUNDING = 1e-4
"""Mean |ln w| (nats), all of one sign, that the normaliser of a softmax in float32 may cause."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """ln p, ln q and their difference of all counted tokens of rollouts that have both sides."""

    train: Array
    infer: Array

    @property
    def delta(self) -> Array:
        """Return ln w."""
        return self.train - self.infer

    @property
    def one_sided(self) -> float:
        """Return -sum ln w / sum |ln w|: 1 if infer finds every token likelier."""
        whole = float(np.abs(self.delta).sum())
        return -float(self.delta.sum()) / whole if whole > 0 else 0.0

    def excess_of_mean(self, sign: int) -> float:
        """Return (mean of w^sign - 1) in standard errors."""
        values = np.exp(np.clip(sign * self.delta, -50.0, 50.0))
        error = float(values.std()) / math.sqrt(max(1, values.size))
        return (float(values.mean()) - 1) / (error + 1e-12)


def ratios_of(rollouts: Sequence[Rollout]) -> Ratios:
    """Return the ln-probabilities of both sides for counted tokens, finite ones only."""
    train, infer = [], []
    for r in rollouts:
        if r.train is not None and r.infer is not None:
            both = r.mask & np.isfinite(r.train.logs) & np.isfinite(r.infer.logs)
            train.append(r.train.logs[both])
            infer.append(r.infer.logs[both])
    if not train:
        return Ratios(np.zeros(0), np.zeros(0))
    return Ratios(np.concatenate(train), np.concatenate(infer))


# --- alignment -----------------------------------------------------------------------------------


def alignment(rollouts: Sequence[Rollout]) -> Repair:
    """Compare the arrays of both sides at the shifts -1, 0 and +1."""
    name = "alignment_shift"
    gaps: dict[int, list[Array]] = {-1: [], 0: [], 1: []}
    for r in rollouts:
        if r.train is None or r.infer is None or len(r.tokens) < _SHORTEST:
            continue
        inner = np.arange(1, len(r.tokens) - 1)
        counted = r.mask[inner - 1] & r.mask[inner] & r.mask[inner + 1]
        at = inner[counted]
        for shift, parts in gaps.items():
            parts.append(np.abs(r.train.logs[at] - r.infer.logs[at + shift]))
    means = {shift: _mean(parts) for shift, parts in gaps.items()}
    here = means[0]
    if here is None:
        alone = Repair(name, f"no rollout with {_SHORTEST} tokens in a row that count", None)
        return _unequal_list(rollouts) or alone
    known = {shift: gap for shift, gap in means.items() if gap is not None}
    shown = ", ".join(f"{shift:+d}: {gap:.3g}" for shift, gap in known.items())
    best = min(known, key=lambda shift: known[shift])
    left = known[best] / here if best != 0 and here > SMALLEST else 1.0
    where = {-1: "; infer fits one position earlier", 1: "; infer fits one position later"}
    detail = f"mean |ln w| at shift {shown}{where.get(best, '')}"
    moved = Repair(name, detail, left, float(best))
    return moved if moved.explains else _unequal_list(rollouts) or moved


def _unequal_list(rollouts: Sequence[Rollout]) -> Repair | None:
    """Find a side whose sampled tokens have another ln-probability in its own list of the likeliest
    tokens: of many tokens, its arrays belong to different positions."""
    for side in SIDES:
        differ = total = 0
        first = ""
        for r in rollouts:
            own = r.train if side == "train" else r.infer
            if own is None or own.top is None:
                continue
            here = own.top.ids == np.array(r.tokens, dtype=np.int64)[:, None]
            rows = here.any(axis=1) & r.mask & np.isfinite(own.logs)
            listed = np.where(here, own.top.logs, 0.0).sum(axis=1)
            gap = np.abs(listed - np.where(rows, own.logs, 0.0))
            found = np.flatnonzero(rows & (gap > _LISTED + _RELATIVE * np.abs(own.logs)))
            differ += found.size
            total += int(rows.sum())
            if found.size and not first:
                at = int(found[0])
                first = f"{r.place} at position {at}, {own.logs[at]:g} and {listed[at]:g} there"
        if differ:
            detail = (
                f"{side}: {differ} of {total} sampled tokens have another ln-probability in the "
                f"side's own list of the likeliest tokens; first {first}"
            )
            many = differ > _SHORTEST and 20 * differ > total
            return Repair("alignment_shift", detail, 0.0 if many else 1.0, seen=True)
    return None


def _mean(parts: Sequence[Array]) -> float | None:
    joined = np.concatenate(parts) if parts else np.zeros(0)
    joined = joined[np.isfinite(joined)]
    return float(joined.mean()) if joined.size else None


# --- temperature ---------------------------------------------------------------------------------


def temperature(rollouts: Sequence[Rollout], policies: Sequence[Policy], stated: float) -> Repair:
    """Fit the temperature of infer over that of train.

    Whole policies determine it exactly; so do several tokens at one position, since the normalisers
    cancel. Sampled tokens alone show it by the shape of their ln-ratios.
    """
    found = [_fit_to_policies(policies, stated)] if policies else []
    contrasts = _fit_to_contrasts(rollouts)
    if contrasts is not None:
        found.append(contrasts)
    for repair in found:
        if repair.explains:
            return repair
    shaped = _fit_to_shape(ratios_of(rollouts))
    if contrasts is None or not shaped.explains:
        return found[0] if found and not shaped.explains else shaped
    return contrasts


def _fit_to_policies(policies: Sequence[Policy], stated: float) -> Repair:
    """Fit the temperature at which the training logits give the inference kernel's
    ln-probabilities."""

    def gap(log_t: float) -> float:
        t = stated * math.exp(log_t)
        return float(torch.cat([(_logs(p, t) - p.infer_logs).abs() for p in policies]).mean())

    here = gap(0.0)
    best = minimise(gap, -WIDEST, WIDEST)
    left = gap(best) / here if here > SMALLEST and abs(best) > _SAME_TEMPERATURE else 1.0
    fitted = stated * math.exp(best)
    detail = f"T = {fitted:.3f} on train leaves {100 * left:.3g} % of the mean |ln w|"
    return Repair("temperature_fit", detail, left, fitted)


def _logs(policy: Policy, t: float) -> Tensor:
    return torch.log_softmax(policy.logits / t, -1).gather(-1, policy.tokens[:, None])[:, 0]


def _fit_to_contrasts(rollouts: Sequence[Rollout]) -> Repair | None:
    """Fit the temperature to differences between tokens of one position: those of ln q are 1/T
    times those of ln p. None with too few such positions."""
    groups = [*_listed_by_both(rollouts), *_after_equal_tokens(rollouts)]
    if len(groups) < _CONTRASTS:
        return None
    a = np.concatenate([p - p.mean() for p, _ in groups])
    b = np.concatenate([q - q.mean() for _, q in groups])
    if not float(a @ a) > 0 or not float(a @ b) > 0:
        return None
    slope = float(a @ b) / float(a @ a)
    before, after = float(np.abs(b - a).mean()), float(np.abs(b - slope * a).mean())
    other = before > SMALLEST and abs(math.log(slope)) > _SAME_TEMPERATURE
    left = after / before if other else 1.0
    detail = (
        f"tokens of one position at {len(groups)} positions: T = {1 / slope:.3f} on train leaves "
        f"{100 * left:.3g} % of how the sides differ"
    )
    return Repair("temperature_fit", detail, left / 2 if other else 1.0, 1 / slope)


def _listed_by_both(rollouts: Sequence[Rollout]) -> list[tuple[Array, Array]]:
    """Return ln p and ln q of the tokens that both sides list, for each counted position."""
    found = []
    for r in rollouts:
        if r.train is None or r.infer is None or r.train.top is None or r.infer.top is None:
            continue
        equal = r.train.top.ids[:, :, None] == r.infer.top.ids[:, None, :]
        for row in np.flatnonzero(r.mask):
            i, j = np.nonzero(equal[row])
            a, b = r.train.top.logs[row, i], r.infer.top.logs[row, j]
            good = np.isfinite(a) & np.isfinite(b)
            if int(good.sum()) >= 2:
                found.append((a[good], b[good]))
    return found


def _after_equal_tokens(rollouts: Sequence[Rollout]) -> list[tuple[Array, Array]]:
    """Return ln p and ln q of different tokens that were sampled after equal ones, as in a
    group."""
    after: dict[tuple[int, ...], dict[int, tuple[float, float]]] = {}
    for r in rollouts:
        if r.train is None or r.infer is None:
            continue
        for at, token in enumerate(r.tokens[:_DEEPEST]):
            both = float(r.train.logs[at]), float(r.infer.logs[at])
            if r.mask[at] and math.isfinite(both[0]) and math.isfinite(both[1]):
                after.setdefault(r.prompt + r.tokens[:at], {})[token] = both
    several = [np.array(list(logs.values())) for logs in after.values() if len(logs) > 1]
    return [(logs[:, 0], logs[:, 1]) for logs in several]


def _fit_to_shape(ratios: Ratios) -> Repair:
    """Fit the temperature to sampled tokens alone, by the shape of ln w as a function of ln q.

    With m other tokens that share the remaining mass equally, ln p = T ln q - ln(q^T + m^(1-T)
    (1-q)^T); rounding errors have no such shape.
    """
    name = "temperature_fit"
    delta = ratios.delta
    if delta.size < _FEWEST:
        return Repair(name, "too few ln-ratios to see their shape", None)
    if not float(np.abs(delta).mean()) > SMALLEST:
        return Repair(name, "the sides do not differ", 1.0)
    sides = [_best_shape(delta, ratios.infer), _best_shape(-delta, ratios.train)]
    left, log_t = min(sides)
    if left > _SHAPED or abs(ratios.one_sided) >= 0.9:
        return Repair(name, "ln w has not the shape of another temperature", 1.0)
    value = math.exp(sides[0][1])
    sharper = "infer" if value < 1 else "train"
    detail = (
        f"ln w has the shape of another temperature, which explains {100 * (1 - left):.3g} % of "
        f"its mean size: {sharper} is the sharper side, T is about {value:.2g}"
    )
    return Repair(name, detail, left / 4, value if abs(log_t) > 0 else None)


def _best_shape(delta: Array, logs: Array) -> tuple[float, float]:
    """Return the share of mean |ln w| that the best temperature leaves, and ln T. It is fitted on a
    subset of many tokens and evaluated on all."""
    here = float(np.abs(delta).mean())

    def gaps(some: Array, at: Array, others: int) -> Callable[[float], float]:
        rest = np.log(np.clip(-np.expm1(at), 1e-300, None))

        def gap(log_t: float) -> float:
            t = math.exp(log_t)
            whole = np.logaddexp(t * at, (1 - t) * math.log(others) + t * rest)
            return float(np.abs(some - (t * at - whole - at)).mean())

        return gap

    part = np.arange(delta.size)
    if delta.size > _FIT_TOKENS:
        part = np.random.default_rng(0).choice(delta.size, _FIT_TOKENS, replace=False)
    best = (math.inf, 0.0)
    for others in (1, 2, 4, 8, 32, 128):
        log_t = minimise(gaps(delta[part], logs[part], others), -WIDEST, WIDEST)
        best = min(best, (gaps(delta, logs, others)(log_t) / here, log_t))
    return best


# --- truncation ----------------------------------------------------------------------------------


def truncation(
    rollouts: Sequence[Rollout], policies: Sequence[Policy], stated: float, tempered: bool
) -> Repair:
    """Test whether one side was cut off and renormalised. Its ln-ratios then have one sign, and the
    mean of w is the remaining mass, not 1. `tempered`: another temperature explains them too,
    unless nearly all have one sign."""
    name = "truncation_mass"
    ratios = ratios_of(rollouts)
    delta = ratios.delta
    if delta.size < _FEWEST:
        return Repair(name, "too few tokens", None)
    side = 1 if float(delta.sum()) < 0 else 0
    one_sided = abs(ratios.one_sided)
    firm = ratios.excess_of_mean(1) < -_FIRM if side == 1 else ratios.excess_of_mean(1) > _FIRM
    if not firm or one_sided < (0.8 if tempered else _ONE_SIDED):
        return Repair(name, "ln-ratios have both signs, or their mean ratio is 1", 1.0)
    lost = float(np.abs(delta.mean()))
    if lost < _ROUNDING:
        return Repair(name, f"{lost:.3g} nats are what a softmax in float32 may be off by", 1.0)
    what = "" if side == 0 or not policies else _filter(policies, stated)
    detail = (
        f"{SIDES[side]} was cut off{what}: mean w {_mean_weight(delta)}, "
        f"{lost:.3g} nats of mass are lost on average; declare the filter in `logprobs` of "
        f"{SIDES[side]}, and record the tokens that it kept"
    )
    return Repair(name, detail, 0.05 + (1 - one_sided) / 4, lost)


def _mean_weight(delta: Array) -> str:
    """Return the mean of e^delta as "= x", or as "> e^n" if it exceeds float64."""
    log = float(np.logaddexp.reduce(delta)) - math.log(delta.size)
    return f"= {math.exp(log):.6g}" if log < _LARGEST_LOG else f"> e^{math.floor(log):,}"


def _filter(policies: Sequence[Policy], stated: float) -> str:
    """Name the filter whose removed mass is nearest to the ln-ratios."""
    ordered, gaps = [], []
    for p in policies:
        logs = torch.log_softmax(p.logits / stated, -1)
        ordered.append(logs.exp().sort(-1, descending=True).values)
        gaps.append(p.infer_logs - _logs(p, stated))
    shares, lost = torch.cat(ordered), torch.cat(gaps)
    sums = shares.cumsum(-1)
    best, name = float("inf"), ""
    for percent in (50, 60, 70, 75, 80, 85, 90, 92, 95, 97, 98, 99, 99.5, 99.9):
        at = (sums < percent / 100).sum(-1).clamp(max=sums.shape[1] - 1)
        rest = float((lost + sums.gather(-1, at[:, None])[:, 0].log()).abs().mean())
        if rest < best:
            best, name = rest, f" by about top_p {percent / 100:g}"
    for k in (1, 2, 3, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200):
        if k < sums.shape[1]:
            rest = float((lost + sums[:, k - 1].log()).abs().mean())
            if rest < best:
                best, name = rest, f" by about top_k {k}"
    return name if best < 0.5 * float(lost.abs().mean()) else ""


# --- swapped sides, masks ------------------------------------------------------------------------


def swapped(rollouts: Sequence[Rollout]) -> Repair:
    """Test whether the columns of the sides are exchanged: the mean of 1/w is 1, that of w is
    not."""
    name = "swapped_sides"
    ratios = ratios_of(rollouts)
    if ratios.delta.size < _FEWEST:
        return Repair(name, "too few tokens", None)
    now, then = ratios.excess_of_mean(1), ratios.excess_of_mean(-1)
    detail = f"mean w lies {now:.2g} standard errors above 1, mean 1/w {then:.2g}"
    good = now > _FIRM and abs(then) < 3
    return Repair(name, detail, min(0.2, abs(then) / now) if good else 1.0)


def masks(rollouts: Sequence[Rollout]) -> Repair:
    """Find deviating tokens that no kernel sampled: filled with 0, or one run."""
    filled = _filled(rollouts)
    return filled if filled.explains else _runs(rollouts)


def _filled(rollouts: Sequence[Rollout]) -> Repair:
    """Find counted tokens whose ln-probability is exactly 0 on one side and clearly not on the
    other: trainers write 0 for tokens of tools and for padding."""
    name = "mask_provenance"
    whole = rest = 0.0
    count, first = 0, ""
    for r in rollouts:
        if r.train is None or r.infer is None:
            continue
        a, b = r.train.logs, r.infer.logs
        off = r.mask & (((b == 0) & (a < -1e-2)) | ((a == 0) & (b < -1e-2)))
        gaps = np.abs(np.where(np.isfinite(a - b), a - b, 0.0))
        whole += float(gaps[r.mask].sum())
        rest += float(gaps[r.mask & ~off].sum())
        if bool(off.any()):
            count += int(off.sum())
            first = first or f"{r.place} ({r.key}), position {int(np.flatnonzero(off)[0])}"
    if count < 2:
        return Repair(name, "no counted token has a ln-probability of exactly 0", 1.0)
    detail = (
        f"{count} tokens that count have a ln-probability of exactly 0 on one side, first {first}: "
        "tokens of tools or padding inside the mask"
    )
    return Repair(name, detail, rest / whole if whole > SMALLEST else 1.0, float(count))


def _runs(rollouts: Sequence[Rollout]) -> Repair:
    """Find rollouts in which one run of tokens holds nearly all of the deviation."""
    name = "mask_provenance"
    gaps = [np.abs(d) for r in rollouts if (d := r.delta()) is not None and d.size >= 8]
    gaps = [np.where(np.isfinite(g), g, 0.0) for g in gaps]
    if not gaps:
        return Repair(name, "no rollout with eight tokens that count", None)
    whole = sum(float(g.sum()) for g in gaps)
    inside, found, first = 0.0, 0, ""
    for index, gap in enumerate(gaps):
        run = _run(gap)
        if run is not None:
            inside += float(gap[run].sum())
            found += 1
            place = f"{run.start} to {run.stop - 1}"
            first = first or f"; first rollout {index + 1}, counted tokens {place}"
    detail = f"{found} of {len(gaps)} rollouts have one run of tokens that deviate{first}"
    left = (whole - inside) / whole if found >= 2 and whole > SMALLEST else 1.0
    return Repair(name, detail, left, float(found))


def _run(gap: Array) -> slice | None:
    """Return the shortest run of positions with 95 % of the deviation; None if it has fewer than
    three tokens or its median is not far above the deviations outside."""
    sums = np.concatenate([[0.0], np.cumsum(gap)])
    if not sums[-1] > SMALLEST:
        return None
    ends = np.searchsorted(sums, sums[:-1] + 0.95 * sums[-1], side="left")
    lengths = np.where(ends < sums.size, ends - np.arange(gap.size), gap.size + 1)
    start = int(lengths.argmin())
    run = slice(start, start + int(lengths[start]))
    size = run.stop - run.start
    if size < 3 or size > 0.8 * gap.size:
        return None
    rest = np.delete(gap, np.arange(run.start, run.stop))
    usual = float(np.quantile(rest, 0.9)) + SMALLEST
    return run if float(np.median(gap[run])) > 20 * usual else None
