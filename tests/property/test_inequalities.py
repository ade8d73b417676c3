"""Every inequality compared with exact values, on random, adversarial and extremal pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.inequalities import (
    NAMES,
    abs_weight_error,
    bias_free_clip,
    bound,
    gradient_bias,
    reward,
    span_from_intervals,
    span_from_norm,
)

Array = np.ndarray
PAIRS = 100_000
QUANTITIES = ("tv", "kl", "kl_reverse", "jeffreys", "chi2", "js", "hellinger2", "abs_log_ratio")
_BOUND_OF = {"kl_reverse": "kl"}


def excess(d: Array) -> Array:
    """Return e^d - 1 - d without cancellation."""
    series = d * d / 2 + d**3 / 6 + d**4 / 24 + d**5 / 120 + d**6 / 720
    return np.where(np.abs(d) < 1e-3, series, np.expm1(d) - d)


def js_term(r: Array) -> Array:
    a = np.abs(r) / 2
    small = a * np.tanh(a) - np.log1p(2 * np.sinh(np.minimum(a, 2) / 2) ** 2)
    y = np.exp(-2 * a)
    return np.where(a < 1, small, math.log(2) - np.log1p(y) - 2 * a * y / (1 + y))


def measure(z: Array, u: Array) -> dict[str, Array]:
    """Return the exact quantities of p = softmax(z), q = softmax(z + u), rows [n, V]."""
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    p = np.exp(log_p)
    p /= p.sum(-1, keepdims=True)
    centre = np.take_along_axis(u, p.argmax(-1)[:, None], -1)
    shift = u - centre
    r = np.log1p((p * np.expm1(shift)).sum(-1, keepdims=True)) - shift  # ln(p/q)
    q = p * np.exp(-r)
    return {
        "s": u.max(-1) - u.min(-1),
        "tv": 0.5 * (q * np.abs(np.expm1(r))).sum(-1),
        "kl": (p * excess(-r)).sum(-1),
        "kl_reverse": (q * excess(r)).sum(-1),
        "jeffreys": (p * excess(-r)).sum(-1) + (q * excess(r)).sum(-1),
        "chi2": np.maximum((q * np.expm1(r) ** 2).sum(-1), (p * np.expm1(-r) ** 2).sum(-1)),
        "js": ((p + q) / 2 * js_term(r)).sum(-1),
        "hellinger2": 0.5 * (q * np.expm1(r / 2) ** 2).sum(-1),
        "abs_log_ratio": np.abs(r).max(-1),
        "w_log_w": (r * np.exp(r)).max(-1),
        "p": p,
        "q": q,
        "r": r,
    }


def pairs() -> Iterator[tuple[Array, Array, float]]:
    """Yield PAIRS rows of training logits, differences dz and a temperature, six families."""
    rng = np.random.default_rng(20240607)
    sizes = {2: 20_000, 3: 20_000, 5: 20_000, 17: 25_000, 64: 12_000, 257: 2_500, 1024: 500}
    assert sum(sizes.values()) == PAIRS
    for v, n in sizes.items():
        for family in range(6):
            m = n // 6 + (family < n % 6)
            temperature = float(rng.uniform(0.2, 3.0))
            z = rng.normal(size=(m, v)) * rng.choice([0.1, 1.0, 5.0, 20.0], size=(m, 1))
            scale = 10.0 ** rng.uniform(-5, 0.8, size=(m, 1))
            match family:
                case 0:
                    dz = rng.normal(size=(m, v))
                case 1:
                    dz = np.clip(rng.standard_cauchy(size=(m, v)), -8, 8)
                case 2:
                    dz = rng.choice([-1.0, 1.0], size=(m, v))
                case 3:
                    dz = np.where(rng.random((m, v)) < 1.5 / v, 1.0, 0.0)
                case 4:
                    dz = rng.normal(size=(m, v)) * 0.1 + rng.normal(size=(m, 1)) * 100
                case _:  # the top token of the training kernel changes
                    dz = rng.normal(size=(m, v)) * 0.01
                    dz[np.arange(m), z.argmax(-1)] += 1.0
            yield z, dz * scale, temperature


def bounds_of(name: str, s: Array) -> Array:
    return np.array([bound(name, value) for value in s.tolist()])


@pytest.fixture(scope="module")
def measured() -> dict[str, Array]:
    """Return every quantity of all random pairs, [PAIRS] each, with the norms of dz/T."""
    parts: dict[str, list[Array]] = {}
    for z, dz, temperature in pairs():
        u = dz / temperature
        row = measure(z / temperature, u)
        row["linf"] = np.abs(u).max(-1)
        row["l2"] = np.linalg.norm(u, axis=-1)
        row["l2_centred"] = np.linalg.norm(u - u.mean(-1, keepdims=True), axis=-1)
        for name, values in row.items():
            if values.ndim == 1:
                parts.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in parts.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*QUANTITIES, "w_log_w"])
def test_random_pairs_satisfy_every_bound(measured: dict[str, Array], name: str) -> None:
    limit = bounds_of(_BOUND_OF.get(name, name), measured["s"])
    assert len(limit) == PAIRS
    assert np.all(measured[name] <= limit * (1 + 1e-9) + 1e-12)


def test_effective_sample_size_satisfies_its_bound(measured: dict[str, Array]) -> None:
    ess = 1 / (1 + measured["chi2"])
    assert np.all(ess >= bounds_of("ess", measured["s"]) * (1 - 1e-9) - 1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "norm"), [("inf", "linf"), ("2", "l2"), ("2", "l2_centred")])
def test_conversions_of_norms_hold(measured: dict[str, Array], kind: str, norm: str) -> None:
    s = np.array([span_from_norm(kind, value) for value in measured[norm].tolist()])
    assert np.all(measured["s"] <= s * (1 + 1e-12) + 1e-12)


def test_quadratic_and_linear_forms_of_the_table_hold(measured: dict[str, Array]) -> None:
    linf, l2, slack = measured["linf"], measured["l2"], 1e-12
    assert np.all(measured["tv"] <= linf / 2 * (1 + 1e-9) + slack)
    assert np.all(measured["tv"] <= l2 / (2 * math.sqrt(2)) * (1 + 1e-9) + slack)
    for way in ("kl", "kl_reverse"):
        assert np.all(measured[way] <= linf**2 / 2 * (1 + 1e-9) + slack)
        assert np.all(measured[way] <= l2**2 / 4 * (1 + 1e-9) + slack)
    assert np.all(measured["jeffreys"] <= l2**2 / 2 * (1 + 1e-9) + slack)
    assert np.all(measured["js"] <= measured["s"] ** 2 / 32 * (1 + 1e-9) + slack)


def two_classes(s: float, points: int = 40_001) -> dict[str, Array]:
    """Return the quantities of two classes whose difference is s, over a grid of p."""
    logit = np.linspace(-s - 3, s + 3, points)
    z = np.stack([logit, np.zeros_like(logit)], axis=-1)
    u = np.broadcast_to(np.array([s, 0.0]), z.shape)
    return measure(z, u)


@pytest.mark.sample(12)
@pytest.mark.parametrize("s", [1e-2, 0.3, 1.0, 2.5, 8.0])
@pytest.mark.parametrize("name", QUANTITIES[:-1])
def test_two_classes_attain_every_bound(s: float, name: str) -> None:
    limit = bound(_BOUND_OF.get(name, name), s)
    best = float(two_classes(s)[name].max())
    assert best <= limit * (1 + 1e-9)
    assert best >= limit * (1 - 1e-6)


@pytest.mark.parametrize("s", [1e-3, 0.5, 4.0])
def test_rare_class_attains_the_log_ratio_bound_in_the_limit(s: float) -> None:
    z, u = np.array([[-40.0, 0.0]]), np.array([[s, 0.0]])
    assert measure(z, u)["abs_log_ratio"][0] == pytest.approx(bound("abs_log_ratio", s), rel=1e-6)
    assert measure(z, -u)["w_log_w"][0] == pytest.approx(bound("w_log_w", s), rel=1e-6)


@pytest.mark.full
def test_gradient_ascent_does_not_exceed_the_bounds() -> None:
    rng = np.random.default_rng(5)
    n, v, s = 400, 5, 2.0
    z, u = rng.normal(size=(n, v)), rng.uniform(0, s, size=(n, v))
    best = measure(z, u)["kl"]
    for step in range(300):
        width = 0.5 * 0.98**step
        trial_z = z + rng.normal(size=z.shape) * width
        trial_u = np.clip(u + rng.normal(size=u.shape) * width, 0, s)
        value = measure(trial_z, trial_u)["kl"]
        better = value > best
        z, u = np.where(better[:, None], trial_z, z), np.where(better[:, None], trial_u, u)
        best = np.maximum(best, value)
    assert best.max() <= bound("kl", s) * (1 + 1e-9)
    assert best.max() >= 0.98 * bound("kl", s)


# --- rewards, gradients, weights -----------------------------------------------------------------


def test_reward_and_gradient_bias_hold_and_are_attained() -> None:
    rng = np.random.default_rng(11)
    n, v, d = 3_000, 6, 4
    z, u = rng.normal(size=(n, v)), rng.normal(size=(n, v)) * 10.0 ** rng.uniform(-3, 0.5, (n, 1))
    row = measure(z, u)
    rewards = rng.uniform(-3, 5, size=(n, v))
    scores = rng.normal(size=(n, v, d))
    scores /= np.linalg.norm(scores, axis=-1, keepdims=True) / rng.uniform(0, 2, size=(n, v, 1))
    advantage = rng.uniform(-1.5, 1.5, size=(n, v))
    drift = np.abs(((row["p"] - row["q"]) * rewards).sum(-1))
    bias = np.linalg.norm((((row["q"] - row["p"]) * advantage)[..., None] * scores).sum(1), axis=-1)
    osc = rewards.max(-1) - rewards.min(-1)
    for i in range(n):
        s = float(row["s"][i])
        assert drift[i] <= reward(float(osc[i]), s) * (1 + 1e-9) + 1e-12
        assert bias[i] <= gradient_bias(1.5, 2.0, s) * (1 + 1e-9) + 1e-12
    s = 1.3
    z = np.array([[-s / 2, 0.0]])
    row = measure(z, np.array([[s, 0.0]]))
    gap = (row["q"] - row["p"])[0]
    assert abs(gap @ np.array([1.0, 0.0])) == pytest.approx(reward(1.0, s), rel=1e-6)
    assert abs(gap @ np.array([1.5 * 2, -1.5 * 2])) == pytest.approx(
        gradient_bias(1.5, 2.0, s), rel=1e-6
    )


def test_certified_clip_width_has_no_bias() -> None:
    rng = np.random.default_rng(12)
    z, u = rng.normal(size=(2_000, 7)), rng.normal(size=(2_000, 7))
    row = measure(z, u)
    w = np.exp(row["r"])
    for i in range(0, 2_000, 10):
        c = bias_free_clip(float(row["s"][i]))
        left = (row["q"][i] * np.abs(w[i] - np.clip(w[i], 1 - c, 1 + c))).sum()
        naive = (row["q"][i] * np.abs(w[i] - np.clip(w[i], 1.0, 1.0))).sum()
        assert left < 1e-12
        assert naive == pytest.approx(2 * row["tv"][i], rel=1e-9)
        assert naive <= abs_weight_error(float(row["s"][i])) * (1 + 1e-9)


# --- constants that must fail --------------------------------------------------------------------


def test_an_eighth_of_squared_norms_does_not_bound_kl() -> None:
    s = 1e-3
    z = np.zeros((1, 2))
    kl = measure(z, np.array([[s / 2, -s / 2]]))["kl"][0]  # l_inf = s/2, l_2 = s/sqrt(2)
    assert kl / ((s / 2) ** 2 / 8) == pytest.approx(4.0, rel=1e-5)
    assert kl / ((s / math.sqrt(2)) ** 2 / 8) == pytest.approx(2.0, rel=1e-5)
    assert bound("kl", span_from_norm("inf", s / 2)) >= kl
    assert bound("kl", span_from_norm("2", s / math.sqrt(2))) >= kl


# --- drifts class by class -----------------------------------------------------------------------

rows = st.lists(
    st.tuples(
        st.floats(-20, 20, allow_nan=False, width=32), st.floats(-5, 5, allow_nan=False, width=32)
    ),
    min_size=2,
    max_size=8,
)


@given(rows, st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(7, 3)]))
def test_rows_inside_intervals_satisfy_the_bounds(
    row: list[tuple[float, float]], t: Fraction
) -> None:
    drifts = [d for _, d in row]
    exact = measure(np.array([[a for a, _ in row]]) / float(t), np.array([drifts]) / float(t))
    norm = max(abs(d) for d in drifts)
    for s in (
        span_from_intervals([(d, d) for d in drifts], t),
        span_from_intervals([(min(d, 0.0), max(d, 0.0)) for d in drifts], t),
        span_from_norm("inf", norm, t),
    ):
        for name in (*QUANTITIES, "w_log_w"):
            limit = bound(_BOUND_OF.get(name, name), s)
            assert float(exact[name][0]) <= limit * (1 + 1e-9) + 1e-12


def test_every_bound_is_covered_here() -> None:
    covered = {_BOUND_OF.get(name, name) for name in QUANTITIES} | {"w_log_w", "ess"}
    assert covered == set(NAMES)
