"""Single rules compared with arithmetic of 60 digits, at corners and inner points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Passes, Walk
from kcdsl_certs.recheck.affine.tape import Tape
from kcdsl_certs.recheck.graphs.graph import Block, Node
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.recheck.interval import box, sums
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    Rows,
    State,
    gamma,
    reduce,
    stored,
)
from kcdsl_certs.recheck.numerics.formats import FLOAT32, FLOAT64, FORMATS
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops import arithmetic, functions, leaves, norms, views
from kcdsl_certs.recheck.ops.attention import cache, context, probabilities, rope
from kcdsl_certs.recheck.ops.attention.softmax import softmax_interval
from kcdsl_certs.recheck.ops.linear import quantised_inputs, quantised_tensors

mp.dps = 60


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let numpy produce infinities and NaN without a warning, as the checker does."""
    with np.errstate(all="ignore"):
        yield


def kernel(compute: str = "float32", casts: str = "any", **other: Any) -> KernelNumerics:
    attention_part = {
        "style": "composed",
        "scores": compute,
        "probabilities": compute,
        "tile": 2,
        "exp_ulps": 2,
    }
    activations = other.pop("activations", ("none", "none"))
    accumulate = other.pop("accumulate", "float32")
    return parse_kernel(
        {
            "preset": "",
            "compute": compute,
            "accumulate": accumulate,
            "casts": casts,
            "weights": {"format": compute, "scale": "none"},
            "activations": {"format": activations[0], "scale": activations[1]},
            "attention": attention_part | other,
        },
        "numerics",
    )


def around(centre: np.ndarray, radius: float) -> Box:
    return Box(centre - radius, centre + radius)


def corner(rng: np.random.Generator, b: Box) -> np.ndarray:
    """Return a point of a box with most coordinates at an end."""
    inside = b.lo + (b.hi - b.lo) * rng.uniform(0, 1, b.shape)
    which = rng.integers(0, 5, b.shape)
    return np.where(which < 2, b.lo, np.where(which < 4, b.hi, np.clip(inside, b.lo, b.hi)))


def softmax(scores: list[Any]) -> list[Any]:
    e = [mp.exp(s) for s in scores]
    return [x / mp.fsum(e) for x in e]


SCALES = [
    (1.0, 1e-6, 1e-7),
    (1.0, 0.5, 0.3),
    (30.0, 1.0, 2.0),
    (400.0, 5.0, 900.0),
    (1.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("spread", "radius", "move"), SCALES)
def test_softmax_range_drift_and_variation(spread: float, radius: float, move: float) -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 5):
        centre = rng.standard_normal((1, n)) * spread
        scores, drift = around(centre, radius), around(rng.standard_normal((1, n)) * move, move / 2)
        allowed = np.ones((1, n), dtype=bool)
        p = probabilities.probabilities(scores, allowed)
        moved = probabilities.probability_drift(p, drift, allowed)
        variation = float(probabilities.total_variation(moved, drift, allowed)[0, 0])
        for b in (p, moved):
            box.checked(b, "it")
        assert p.lo.min() >= 0
        assert p.hi.max() <= 1
        for _ in range(60):
            s, d = corner(rng, scores)[0], corner(rng, drift)[0]
            before = softmax([mpf(v) for v in s])
            after = softmax([mpf(v) + mpf(w) for v, w in zip(s, d, strict=True)])
            for j in range(n):
                assert p.lo[0, j] <= before[j] <= p.hi[0, j]
                assert moved.lo[0, j] <= after[j] - before[j] <= moved.hi[0, j]
            half = mp.fsum(abs(a - b) for a, b in zip(after, before, strict=True)) / 2
            assert half <= variation


def test_softmax_ignores_masked_columns() -> None:
    scores = around(np.array([[0.0, 50.0, 1.0], [9.0, 2.0, 3.0]]), 0.1)
    allowed = np.array([[True, False, True], [False, True, False]])
    p = probabilities.probabilities(scores, allowed)
    assert p.hi[0, 1] == 0
    assert p.hi[0, 0] < 0.4
    assert (p.lo[1], p.hi[1]) == (pytest.approx([0, 1, 0]), pytest.approx([0, 1, 0]))
    moved = probabilities.probability_drift(p, around(np.ones((2, 3)), 0.5), allowed)
    assert not moved.lo[1].any()
    assert not moved.hi[1].any()
    assert moved.hi[0, 1] == 0


def test_small_probabilities_have_relative_precision() -> None:
    scores = box.exact(np.array([[0.0, -60.0]]))
    p = probabilities.probabilities(scores, np.ones((1, 2), dtype=bool))
    assert 0.99e-26 < p.lo[0, 1] / 0.875651 <= p.hi[0, 1] / 0.875651 < 1.01e-26
    drift = Box(np.full((1, 2), -1e-12), np.full((1, 2), 1e-12))
    moved = probabilities.probability_drift(p, drift, np.ones((1, 2), dtype=bool))
    assert moved.hi[0, 1] < 3e-38


def test_fused_row_sum_may_lose_small_columns() -> None:
    # 512 columns of e^-7 < 2^-10 round to zero in fp8_e4m3, but are a third of the sum
    scores = box.exact(np.concatenate([[0.0], np.full(511, -7.0)])[None])
    allowed = np.ones((1, 512), dtype=bool)
    p = probabilities.probabilities(scores, allowed)
    fused = kernel("float16", style="fused", probabilities="fp8_e4m3", scores="float32", tile=512)
    rounding = probabilities.softmax_rounding(fused, scores, p.hi, allowed)
    assert 1 - p.lo[0, 0] <= rounding[0, 0]


FUNCTIONS = [
    (functions.GELU, lambda x: x * mp.ncdf(x), lambda x: mp.ncdf(x) + x * mp.npdf(x)),
    (
        functions.SILU,
        lambda x: x / (1 + mp.exp(-x)),
        lambda x: 1 / (1 + mp.exp(-x)) + x * mp.exp(-x) / (1 + mp.exp(-x)) ** 2,
    ),
    (functions.TANH, mp.tanh, lambda x: mp.sech(x) ** 2),
]


@pytest.mark.parametrize(("function", "value", "slope"), FUNCTIONS)
def test_activation_functions_are_enclosed(function: Any, value: Any, slope: Any) -> None:
    rng = np.random.default_rng(4)
    turns = [t for t in (function.valley, *function.turns) if t is not None]
    centres = np.concatenate(
        [rng.standard_normal(40) * 3, turns, np.nextafter(turns, 9), [0, 30, -30]]
    )
    for radius in (0.0, 1e-9, 0.1, 4.0):
        x = around(centres, radius)
        y, dy = functions.image(function, x), functions.slopes(function, x)
        for at in range(len(centres)):
            inside = [t for t in turns if x.lo[at] <= t <= x.hi[at]]
            samples = [x.lo[at], x.hi[at], *rng.uniform(x.lo[at], x.hi[at], 5), *inside]
            for s in samples:
                assert y.lo[at] <= value(mpf(s)) <= y.hi[at]
                assert dy.lo[at] <= slope(mpf(s)) <= dy.hi[at]
        if radius == 0.0:
            wide = np.abs(centres) * 2.0**-46 + 2.0**-45
            assert (y.hi - y.lo <= wide).all()
            assert (dy.hi - dy.lo <= wide).all()


def normalised(x: list[Any], eps: float, centred: bool) -> list[Any]:
    n = len(x)
    mean = mp.fsum(x) / n if centred else mpf(0)
    c = [v - mean for v in x]
    r = 1 / mp.sqrt(mp.fsum(v * v for v in c) / n + mpf(eps))
    return [v * r for v in c]


@pytest.mark.sample(7)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("offset", "radius", "move"),
    [(0.0, 0.0, 1e-7), (0.0, 1e-3, 1e-3), (0.0, 0.5, 0.2), (100.0, 1e-6, 1e-5), (1.0, 3.0, 1.0)],
)
def test_norms_are_enclosed(centred: bool, offset: float, radius: float, move: float) -> None:
    rng = np.random.default_rng(6)
    for n in (2, 3, 8):
        x = around(rng.standard_normal((1, n)) + offset, radius)
        d = around(rng.standard_normal((1, n)) * move, move)
        state = reduce(x, box.add(x, d), d)
        t, i = (norms.side(side, 1e-5, centred) for side in (state.t, state.i))
        drift = norms._drift(t, i, norms._centred(d) if centred else d, n)
        assert t.y.hi.max() <= np.sqrt(n) * (1 + 1e-12)
        for _ in range(80):
            a, b = corner(rng, state.t)[0], corner(rng, d)[0]
            before = normalised([mpf(v) for v in a], 1e-5, centred)
            after = normalised([mpf(v) + mpf(w) for v, w in zip(a, b, strict=True)], 1e-5, centred)
            for j in range(n):
                assert t.y.lo[0, j] <= before[j] <= t.y.hi[0, j]
                assert drift.lo[0, j] <= after[j] - before[j] <= drift.hi[0, j]


def test_variance_without_lower_bound_is_refused() -> None:
    with pytest.raises(Rejected, match="variance"):
        norms.side(box.exact(np.zeros((1, 3))), 0.0, False)


@pytest.mark.parametrize("centred", [False, True])
def test_eps_beyond_float32_is_refused(centred: bool) -> None:
    # 1/sqrt(1e39) times 1e19 is 0.3; a float32 kernel divides by the root of infinity
    x = box.exact(np.array([[1e19, -1e19]]))
    with pytest.raises(Rejected, match="variance"):
        norms.side(x, 1e39, centred)
    x = box.exact(np.array([[1.0, -1.0]]))
    with pytest.raises(Rejected, match="variance"):
        norms.side(x, 1e39, centred)
    assert norms.side(x, 1e30, centred).y.hi.max() < 1e-14


def test_block_maximum_in_a_box_may_be_small() -> None:
    # x = (0, 0.99): amax 0.99, scale 2^-9, 0.99/2^-9 = 506.9 saturates at 448: 0.875, off by 0.115
    x = Box(np.array([[0.0, 0.99]]), np.array([[2.0, 0.99]]))
    q = quantised_inputs.quantisation(kernel(activations=("fp8_e4m3", "mx")), x)
    assert q[0, 1] >= 0.115
    point = box.exact(np.array([[2.0, 0.99]]))
    assert quantised_inputs.quantisation(kernel(activations=("fp8_e4m3", "mx")), point)[0, 1] < 0.07


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40),
    st.lists(st.floats(0, 1), min_size=40, max_size=40),
    st.sampled_from(["fp8_e4m3", "fp8_e5m2"]),
)
def test_mx_quantisation_of_points_is_enclosed(
    centre: list[float], shrink: list[float], kind: str
) -> None:
    import ml_dtypes

    full = np.array([centre], dtype=np.float32).astype(np.float64)
    x = Box(np.minimum(full, 0.0), np.maximum(full, 0.0))
    q = quantised_inputs.quantisation(kernel(activations=(kind, "mx")), x)
    values = (full * np.array(shrink)[: full.shape[1]]).astype(np.float32)
    dtype = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}[kind]
    largest, exponent = {"fp8_e4m3": (448, 8), "fp8_e5m2": (57344, 15)}[kind]
    for start in range(0, values.shape[1], 32):
        part = values[:, start : start + 32]
        amax = float(np.abs(part).max())
        if amax < 2.0**-100:
            continue
        s = np.float32(2.0 ** (np.floor(np.log2(amax)) - exponent))
        code = np.clip(part / s, -largest, largest).astype(dtype).astype(np.float32)
        assert (np.abs(code * s - part) <= q[:, start : start + 32]).all()


def test_unscaled_activations_may_overflow() -> None:
    x = box.exact(np.array([[449.0]]))
    with pytest.raises(Rejected, match="bound/overflow"):
        quantised_inputs.quantisation(kernel(activations=("fp8_e4m3", "none")), x)


def test_partial_sums_may_overflow_the_accumulator() -> None:
    half = kernel("float16", accumulate="float16")
    one = np.ones(1)
    assert sums.accumulated(half, np.array([60000.0]), one, 3, 2) > 0
    with pytest.raises(Rejected, match="partial sum"):
        sums.accumulated(half, np.array([65500.0]), one, 3, 2)
    with pytest.raises(Rejected, match="bound/not-finite"):
        sums.accumulated(half, one, one, 2046, 2)


def test_gamma_is_rounded_up() -> None:
    assert gamma(3, 2.0**-24) >= mpf(3) * mpf(2) ** -24 / (1 - mpf(3) * mpf(2) ** -24)
    assert gamma(2**24, 2.0**-24) == float("inf")


# --- storing --------------------------------------------------------------------------------------


def test_cast_of_a_point_is_exact() -> None:
    point = box.exact(np.array([1.001, 2.0]))
    value, wrong = stored(
        kernel("bfloat16", "nearest"), FORMATS["bfloat16"], point, np.zeros(2), FLOAT32
    )
    np.testing.assert_array_equal(value.lo, [1.0, 2.0])
    np.testing.assert_array_equal(value.hi, [1.0, 2.0])
    assert wrong.lo[0] <= 1 - 1.001 <= wrong.hi[0] < -0.0009
    assert (wrong.lo[1], wrong.hi[1]) == (0.0, 0.0)


def test_cast_across_a_step_is_enclosed() -> None:
    y = Box(np.array([1.0]), np.array([1.01]))
    form = FORMATS["bfloat16"]
    value, wrong = stored(kernel("bfloat16", "nearest"), form, y, np.full(1, 0.001), FLOAT32)
    assert value.lo[0] == 1.0
    assert value.hi[0] == 1.0078125
    assert wrong.hi[0] >= 1.011 * 2.0**-8 + 0.001


def test_nearest_float32_needs_no_second_cast() -> None:
    y, error = box.exact(np.array([1.0])), np.full(1, 2.0**-24)
    same, _ = stored(kernel("float32", "nearest"), FLOAT32, y, error, FLOAT32)
    assert (same.lo[0], same.hi[0]) == (1 - 2.0**-24, 1 + 2.0**-24)
    # arithmetic in float64 has not rounded to float32 yet
    third = box.exact(np.array([1 / 3]))
    finer, wrong = stored(kernel("float32", "nearest"), FLOAT32, third, np.zeros(1), FLOAT64)
    assert finer.lo[0] == finer.hi[0] == np.float32(1 / 3)
    assert wrong.lo[0] <= np.float64(np.float32(1 / 3)) - 1 / 3 <= wrong.hi[0]


@pytest.mark.parametrize("casts", ["any", "nearest"])
def test_overflow_names_its_node(casts: str) -> None:
    y = box.exact(np.array([[0.0, 65530.0]]))
    with pytest.raises(Rejected, match=r"bound/overflow.*\[0, 1\].*float16"):
        stored(kernel("float16", casts), FORMATS["float16"], y, np.zeros((1, 2)), FLOAT32)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_are_refused(bad: float) -> None:
    for casts in ("any", "nearest"):
        y = box.exact(np.array([bad]))
        with pytest.raises(Rejected) as found:
            stored(kernel("float64", casts), FLOAT64, y, np.zeros(1), FLOAT64)
        assert found.value.reason == "bound/not-finite"
        y = box.exact(np.zeros(1))
        with pytest.raises(Rejected):
            stored(kernel("float64", casts), FLOAT64, y, np.array([bad]), FLOAT64)


def test_contradictory_boxes_are_refused() -> None:
    one, two = box.exact(np.ones(1)), box.exact(np.full(1, 2.0))
    with pytest.raises(Rejected, match="bound/empty"):
        reduce(one, two, around(np.zeros(1), 0.5))


# --- whole rules ----------------------------------------------------------------------------------


def problem(train: KernelNumerics, infer: KernelNumerics) -> DriftProblem:
    """Return a problem for rules that read only the kernels."""
    nothing: Any = None
    block = Block("none", (), "", {}, None)
    return DriftProblem(block, train, infer, nothing, {}, frozenset(), None, None)


def node(op: str, shape: tuple[int, ...], attrs: dict[str, Any] | None = None) -> Node:
    return Node("x", op, (), shape, Reader(attrs or {}, "x"), "")


def test_input_has_the_shape_of_the_region_and_of_its_drift() -> None:
    """Documents with other shapes are refused before: numpy would broadcast them."""
    block = Block("none", (), "", {}, (2, 4))
    wide, narrow = np.zeros((2, 4)), np.zeros((1, 4))
    apart = box.exact(narrow)
    base = replace(problem(kernel(), kernel()), block=block, centre=wide, radius=wide)
    other, drifting = replace(base, centre=narrow), replace(base, drift=apart)

    def formed(of: DriftProblem) -> Walk:
        return Walk(of, of.train, Tape(wide), {}, frozenset(), Passes(None))

    read = node("input", (2, 4))
    assert leaves.source_interval(base, read, []).shape == (2, 4)
    assert leaves.source_affine(formed(base), read, []).shape == (2, 4)
    for wrong, what in ((other, "region"), (drifting, "drift")):
        if wrong is other:
            wrong = replace(wrong, radius=narrow)
        with pytest.raises(Rejected, match=rf"graph/shape.*the {what} does not have the input's"):
            leaves.source_interval(wrong, read, [])
        with pytest.raises(Rejected, match=rf"graph/shape.*the {what} does not have the input's"):
            leaves.source_affine(formed(wrong), read, [])


def test_codes_have_no_rule_at_any_length() -> None:
    """Graphs with them are refused before, as they have no marks of rows."""
    where = replace(problem(kernel(), kernel()), rows=Rows(9, {}, {}))
    still = State(box.zeros((1, 2)), box.zeros((1, 2)), box.zeros((1, 2)))
    with pytest.raises(Rejected, match=r"bound/not-finite.*a cache of sequences"):
        cache.cache_interval(where, node("cache", (1, 2), {"part": "keys", "source": ""}), [still])
    with pytest.raises(Rejected, match=r"bound/not-finite.*a quantised tensor of sequences"):
        quantised_tensors.tensor_interval(where, node("quantise", (1, 2), {"tensor": "t"}), [still])


def test_roundings_of_a_softmax_may_exceed_doubles() -> None:
    """The error before the cast to bfloat16 is just finite, and infinite with that of the cast."""
    coarse, allowed = kernel(probabilities="bfloat16"), np.ones((1, 2), dtype=bool)
    high = np.ones((1, 2))

    def theta(spread: float) -> float:
        scores = box.exact(np.array([[0.0, spread]]))
        return float(probabilities.relative_rounding(coarse, scores, allowed).max())

    finite, infinite = 1e9, 1e10
    with pytest.raises(Rejected, match=r"bound/not-finite.*the rounding of a softmax"):
        theta(infinite)
    while infinite - finite > 1.0:
        middle = (finite + infinite) / 2
        try:
            theta(middle)
        except Rejected:
            infinite = middle
        else:
            finite = middle
    scores = box.exact(np.array([[0.0, finite]]))
    with pytest.raises(Rejected, match=r"bound/not-finite.*the rounding of a softmax"):
        probabilities.softmax_rounding(coarse, scores, high, allowed)
    with pytest.raises(Rejected, match=r"bound/not-finite.*the rounding of a softmax"):
        context._misplaced(coarse, np.array([[theta(finite)]]), 1)
    scores = box.exact(np.array([[0.0, finite / 2]]))
    assert probabilities.softmax_rounding(coarse, scores, high, allowed).max() > 1


def test_relu_may_cut_off_a_part_of_a_drift() -> None:
    # both ends below zero: no drift; training below and inference above: a part of it
    t, d = Box(np.array([-1.0]), np.array([1.0])), box.exact(np.array([0.5]))
    state = reduce(t, box.add(t, d), d)
    found = views.relu_interval(problem(kernel(), kernel()), node("relu", (1,)), [state])
    assert (found.d.lo[0], found.d.hi[0]) == (0.0, 0.5)
    moved = State(box.neg(state.t), box.neg(state.i), box.neg(state.d))
    found = views.relu_interval(problem(kernel(), kernel()), node("relu", (1,)), [moved])
    assert (found.d.lo[0], found.d.hi[0]) == (-0.5, 0.0)


@pytest.mark.parametrize("divisor", [3.0, -7.0, 49.0])
def test_quotients_are_inside_their_box(divisor: float) -> None:
    at = np.array([1.0, 2.0, -5.0, 0.0, 10.0])
    found = arithmetic._divided(Box(at, at), divisor)
    for low, value, high in zip(found.lo, at, found.hi, strict=True):
        exact = Fraction(value) / Fraction(divisor)
        assert Fraction(low) <= exact <= Fraction(high)
        assert high - low <= 4 * np.spacing(abs(value / divisor))


def test_rope_tables_of_the_kernels_may_differ() -> None:
    known = [box.exact(np.array([v])) for v in ([3.0, 5.0], [0.5, 0.25], [0.75, 0.125])]
    x, one, two = known
    still = box.zeros((1, 2))
    point = State(x, x, still)
    same, other = State(one, one, still), State(one, two, box.sub(two, one))
    where = problem(kernel(), kernel())
    for cos, sin, drift in (
        (other, same, [3 * 0.25, 5 * -0.125]),
        (same, other, [-5 * 0.25, 3 * -0.125]),
    ):
        found = rope.rope_interval(where, node("rope", (1, 2)), [point, cos, sin])
        np.testing.assert_allclose(found.d.lo[0], drift, atol=1e-5)
        np.testing.assert_allclose(found.d.hi[0], drift, atol=1e-5)
        assert (found.d.lo[0] <= drift).all()
        assert (drift <= found.d.hi[0]).all()


def test_softmax_rounding_covers_the_argument_of_exp() -> None:
    scores = box.exact(np.array([[0.0, -60.0]]))
    allowed = np.ones((1, 2), dtype=bool)
    p = probabilities.probabilities(scores, allowed)
    found = probabilities.softmax_rounding(kernel(exp_ulps=2), scores, p.hi, allowed)
    u = mpf(2) ** -24
    off = mp.exp(mpf(-60) * (1 - u)) * (1 + 4 * u) - mp.exp(mpf(-60))
    assert off * (1 - mpf(10) ** -10) <= found[0, 1] < 10 * off


def test_softmax_rounding_covers_long_sums() -> None:
    n, u = 2000, mpf(2) ** -24
    scores = box.exact(np.zeros((1, n)))
    allowed = np.ones((1, n), dtype=bool)
    p = probabilities.probabilities(scores, allowed)
    found = probabilities.softmax_rounding(kernel(exp_ulps=2), scores, p.hi, allowed)
    total = mpf(0)
    for _ in range(n):
        total = (total + 1) * (1 + u)
    off = mpf(1) / n - 1 / total
    assert off <= found[0, 0] < 10 * off


@pytest.mark.parametrize("centred", [False, True])
def test_norm_rounding_covers_long_sums(centred: bool) -> None:
    # with a mean much larger than the variance, the sum of squares has an error of n·u of mean(x²)
    n, u = 64, mpf(2) ** -24
    x = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)[None] + (5.0 if centred else 0.0)
    side = norms.side(box.exact(x), 0.0, centred)
    one, zero = box.exact(np.ones(n)), box.zeros((n,))
    args = kernel(), box.exact(x), side, one, zero, centred
    found = norms._error(*args, None)
    squares = [mpf(v) ** 2 for v in x[0]]
    total = mpf(0)
    for square in squares:
        total = (total + square * (1 + u)) * (1 + u)
    mean = mp.fsum(mpf(v) for v in x[0]) / n if centred else mpf(0)
    variance = total / n - mean**2
    off = abs(1 - 1 / mp.sqrt(variance))
    assert off <= found.min()
    assert found.max() < 40 * off


def test_norm_weights_of_the_kernels_may_differ() -> None:
    x = np.array([[1.0, -1.0]])
    still = box.zeros((2,))
    weight = State(
        box.exact(np.array([1.0, 2.0])),
        box.exact(np.array([1.5, 2.0])),
        box.exact(np.array([0.5, 0])),
    )
    bias = State(box.exact(np.zeros(2)), box.exact(np.array([0.0, 0.25])), still)
    point = State(box.exact(x), box.exact(x), box.zeros((1, 2)))
    inputs: list[Any] = [point, weight, bias]
    attrs = {"eps": (0.0).hex()}
    where = problem(kernel(), kernel())
    found = norms.layer_norm_interval(where, node("layer_norm", (1, 2), attrs), inputs)
    np.testing.assert_allclose(found.d.lo[0], [0.5, 0.25], atol=1e-4)
    np.testing.assert_allclose(found.d.hi[0], [0.5, 0.25], atol=1e-4)
    assert found.d.lo[0, 0] <= 0.5 <= found.d.hi[0, 0]
    assert found.d.lo[0, 1] <= 0.25 <= found.d.hi[0, 1]


def test_context_of_perturbed_probabilities_is_enclosed() -> None:
    rng = np.random.default_rng(9)
    allowed = np.array([[[True, True, False], [True, True, True]]])
    s = around(rng.standard_normal((1, 2, 3)), 0.01)
    d = around(rng.standard_normal((1, 2, 3)) * 0.5, 0.1)
    state = reduce(s, box.add(s, d), d)
    v_t = around(rng.standard_normal((1, 3, 2)) + 5, 0.01)
    v_d = around(rng.standard_normal((1, 3, 2)) * 0.1, 0.01)
    v = reduce(v_t, box.add(v_t, v_d), v_d)
    where = problem(
        kernel("float64", accumulate="float64"), kernel("float64", accumulate="float64")
    )
    p = softmax_interval(where, node("softmax", (1, 2, 3)), [state, Mask(allowed)])
    found = context.context_interval(where, node("matmul", (1, 2, 2)), p, v)
    for _ in range(300):
        a, b = corner(rng, state.t), corner(rng, d)
        w, m = corner(rng, v.t), corner(rng, v_d)
        results = []
        for scores, values in ((a, w), (a + b, w + m)):
            e = np.where(allowed, np.exp(scores), 0.0)
            results.append(e / e.sum(axis=-1, keepdims=True) @ values)
        slack = 1e-13
        for part, value in (
            (found.t, results[0]),
            (found.i, results[1]),
            (found.d, results[1] - results[0]),
        ):
            assert (part.lo - slack <= value).all()
            assert (value <= part.hi + slack).all()


def test_probabilities_may_move_most_between_the_ends() -> None:
    p = Box(np.full((1, 2), 0.1), np.full((1, 2), 0.9))
    drift = box.exact(np.array([[1.0, 0.0]]))  # t = 1 and -1
    moved = probabilities.probability_drift(p, drift, np.ones((1, 2), dtype=bool))
    best = 1 / (1 + mp.exp(mpf(1) / 2))
    gain = best * (1 - best) * mp.expm1(1) / (1 + best * mp.expm1(1))
    for found in (moved.hi[0, 0], -moved.lo[0, 1]):
        assert gain <= found < gain + mpf(10) ** -9


def test_monotone_probabilities_are_enclosed() -> None:
    p = Box(np.full((1, 2), 0.1), np.full((1, 2), 0.2))
    moved = probabilities.probability_drift(
        p, box.exact(np.array([[1.0, 0.0]])), np.ones((1, 2), dtype=bool)
    )
    k = mp.expm1(-1)
    least = mpf(0.1) * (1 - mpf(0.1)) * k / (1 + mpf(0.1) * k)
    assert least <= moved.hi[0, 1] < least + mpf(10) ** -9


def test_context_includes_the_rounding_of_probabilities() -> None:
    ones = box.exact(np.ones((1, 1)))
    found = context._context_error(kernel(), ones, np.full((1, 1), 0.1), ones, ones)
    assert 0.1 <= found[0, 0] < 0.1001


def test_norm_rounding_covers_the_affine_map() -> None:
    x = box.exact(np.array([[1.0, -1.0]]))
    side = norms.side(x, 0.0, False)
    zero, one, big = (box.exact(np.full(2, value)) for value in (0.0, 1.0, 1000.0))
    plain = norms._error(kernel(), x, side, one, zero, False, None)
    shifted = norms._error(kernel(), x, side, one, big, False, None)
    assert (shifted - plain >= 999 * 2.0**-24).all()
    scaled = norms._error(kernel(), x, side, big, zero, False, None)
    assert (scaled >= 1000 * plain * (1 - 2.0**-20)).all()
