"""Errors of storing the parts of a composed norm (relational-interval.md, section 6).

Both programs are compared with the formulas of the page, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.activations import SILU, activation_error
from kcdsl_backends.drift.ops.norms.written import written
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.ops.activations import sigmoid_stored
from kcdsl_certs.recheck.ops.norm_errors import Norm, losses
from tests.support import proofs
from tests.support.prover import block, numerics

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
ROUNDED: Mapping[tuple[str, float], float] = {
    ("float16", 0.3): 0.300048828125,
    ("bfloat16", 0.3): 0.30078125,
}
U, TINY, WIDTH = 2.0**-24, 2.0**-149, 6
SQUARES = ("square", "mean", "shift", "root", "normed")
CENTRED = ("mean", "centred", "square", "mean2", "shift", "root", "normed")
WAYS: dict[str, tuple[str, ...]] = {
    "rms_norm": SQUARES,
    "layer_norm": CENTRED,
    "rms_norm by a quotient": ("square", "mean", "shift", "sqrt", "quotient", "weighted"),
    "layer_norm by a quotient": (*CENTRED[:5], "sqrt", "quotient", "weighted", "biased"),
    "rms_norm by a reciprocal": (*SQUARES[:3], "sqrt", "reciprocal", "normed", "weighted"),
    "layer_norm of a variance": (
        *("mean", "centred", "variance", "shift", "root", "normed", "weighted", "biased"),
    ),
}


@dataclass(frozen=True)
class Input:
    """A row x, the distance of its readings, eps, gain and bias."""

    x: np.ndarray
    away: np.ndarray
    eps: float
    gain: np.ndarray
    bias: np.ndarray


def an_input(seed: int, size: float = 1.0, eps: float = 2.0**-17, away: float = 0.0) -> Input:
    rng = np.random.default_rng(seed)
    x = size * (rng.standard_normal((1, WIDTH)) + 0.5)
    apart = away * size * rng.uniform(0.5, 1.0, x.shape)
    return Input(x, apart, eps, 1 + rng.random(WIDTH), rng.standard_normal(WIDTH))


class Page:
    """The formulas of the page at one row; `sizes` bounds every part."""

    def __init__(self, op: str, parts: Mapping[str, str], casts: str, at: Input) -> None:
        self.parts, self.casts, n = parts, casts, WIDTH
        self.sizes: dict[str, float] = {}
        x, w = np.abs(at.x), at.away
        gamma = (n + 6) * U / (1 - (n + 6) * U)
        middle = at.x.mean() if op == "layer_norm" else 0.0
        c = np.abs(at.x - middle)
        v = float((c**2).mean() + at.eps)
        tau = math.sqrt(float((w**2).sum()) / (n * v))
        self.epsilon, alpha, beta = 0.0, 0.0, 0.0
        if op == "layer_norm":
            u, eta = self.cast("mean")
            self.epsilon = gamma * (x + w).mean() * (1 + u) + u * abs(middle) + eta
            self.epsilon += (n + 6) * TINY + w.mean()
            alpha, beta = self.alpha("centred", U), self.cast("centred")[1]
            self.sizes["mean"] = abs(middle) + self.epsilon
        whole = (c + w + self.epsilon) * (1 + alpha) + beta
        self.sizes["centred"] = float(whole.max())
        if "variance" in parts:
            kappa = (1 + 4 * gamma * ((x + w) ** 2).mean() / v) * (1 + tau) ** 2 - 1
            (again, b), first = self.cast("variance"), 0.0
        else:
            rho = self.epsilon**2 / v
            kappa = ((math.sqrt(1 + rho) + tau) * (1 + alpha) + beta / math.sqrt(v)) ** 2 - 1
            mean = "mean2" if op == "layer_norm" else "mean"
            first, again = self.alpha("square", 2 * U), self.alpha(mean, gamma)
            b = self.cast("square")[1] * (1 + again) + self.cast(mean)[1] + (n + 6) * TINY
            self.sizes["square"] = float((whole**2).max() * (1 + first) + self.cast("square")[1])
        averaged = (1 + kappa) * (1 + first) * (1 + again) + b / v
        name = next(p for p in ("variance", "mean2", "mean") if p in parts)
        self.sizes[name] = v * averaged
        u, eta = self.cast("shift")
        e = abs(ROUNDED.get((parts["shift"], at.eps), at.eps) - at.eps) + TINY
        kappa = averaged * (1 + self.alpha("shift", 2 * U)) + (e * (1 + u) + eta) / v - 1
        self.sizes["shift"] = v * (1 + kappa)
        by = "root" if "root" in parts else "sqrt"
        u, eta = self.cast(by)
        lost = u + eta / math.sqrt(v * (1 - kappa))
        self.sizes["sqrt"] = math.sqrt(v * (1 + kappa)) * (1 + u) + eta
        u, eta = (
            (0.0, 0.0) if "quotient" in parts else self.cast({"sqrt": "reciprocal"}.get(by, by))
        )
        self.theta = (1 + 10 * U) * (1 + u) / ((1 - lost) * math.sqrt(1 - kappa)) - 1
        self.theta += eta * math.sqrt(v)
        root = (1 + self.theta) / math.sqrt(v)
        self.sizes["root"] = max(root, self.sizes["sqrt"])  # a root and its reciprocal
        self.sizes["reciprocal"] = root
        last = "quotient" if "quotient" in parts else "normed"
        y = c / math.sqrt(v)
        size = y * (1 + self.theta) + self.epsilon * root
        s = alpha * size + beta * root
        self.centred = alpha, beta
        self.normed = self.alpha(last, 2 * U), self.cast(last)[1]
        own = s + self.normed[0] * (size + s) + self.normed[1]
        error = self.theta * y + self.epsilon * root + own
        self.sizes[last] = float((y + error).max())
        product = (y + error) * at.gain
        self.weighted = U, TINY
        if "weighted" in parts:
            self.weighted = self.alpha("weighted", U), self.cast("weighted")[1]
        w = self.weighted[0] * product + self.weighted[1]
        self.sizes["weighted"] = float((product + w).max())
        self.error = error * at.gain + w + U * (product + w + np.abs(at.bias)) + TINY

    @property
    def fits(self) -> bool:
        return all(
            size <= LARGEST[self.parts[name]]
            for name, size in self.sizes.items()
            if name in self.parts
        )

    def cast(self, part: str) -> tuple[float, float]:
        form = self.parts[part]
        exact = self.casts == "nearest" and form == "float32"
        if exact or part == list(self.parts)[-1]:
            return 0.0, TINY
        return UNIT[form], LEAST[form] + 2 * TINY

    def alpha(self, part: str, inside: float) -> float:
        return (1 + inside) * (1 + self.cast(part)[0]) - 1


def prover(
    op: str, parts: Mapping[str, str], casts: str, at: Input, folder: Path
) -> dict[str, Any]:
    """Return the prover's errors of a norm; `folder` is unused."""
    found = graph(op, parts, at)
    kernel = Rounding(numerics(proofs.numerics("float32", casts)))
    x, one = torch.from_numpy(at.x), torch.ones((1, 1), dtype=torch.float64)
    middle = x.mean() * one if op == "layer_norm" else 0 * one
    c = x - middle
    v = c.square().mean() * one + at.eps
    r, y, away = v.rsqrt(), c.abs() * v.rsqrt(), torch.from_numpy(at.away)
    node = block(found).node(found.output)
    loss = written(node, kernel, x.abs(), c.abs(), middle.abs(), v, v, away)
    root = r * (1 + loss.theta)
    error = loss.theta * y + loss.mean * root + loss.apart(y, root)
    gain, bias = torch.from_numpy(at.gain), torch.from_numpy(at.bias).abs()
    whole = loss.result("norm", y, error, error, gain, bias)
    return fields(loss) | {"error": whole.numpy()}


def checker(
    op: str, parts: Mapping[str, str], casts: str, at: Input, folder: Path
) -> dict[str, Any]:
    """Return the checker's errors of a norm."""
    scene = scene_of(graph(op, parts, at), proofs.numerics("float32", casts), at.x, folder)
    node = scene.block.nodes[-1]
    middle = np.full((1, 1), at.x.mean() if op == "layer_norm" else 0.0)
    c = np.abs(at.x - middle)
    v = (c**2).mean(axis=-1, keepdims=True) + at.eps
    norm = Norm(np.abs(at.x), c, np.abs(middle), v, v, at.away)
    loss = losses(node, scene.infer, at.eps, norm)
    y, root = c / np.sqrt(v), (1 + loss.theta) / np.sqrt(v)
    error = loss.theta * y + loss.mean * root + loss.elements(y, root)
    whole = error * at.gain + loss.last(y, error, at.gain, np.abs(at.bias))
    return fields(loss) | {"error": whole}


def fields(loss: Any) -> dict[str, Any]:
    return {
        "theta": float(loss.theta.max()),
        "epsilon": float(loss.mean.max()),
        "centred": loss.centred,
        "normed": loss.normed,
        "weighted": loss.weighted,
    }


def graph(op: str, parts: Mapping[str, str], at: Input) -> Any:
    found = proofs.Graph((1, WIDTH))
    inputs = [found.add("input", [], (1, WIDTH))]
    if "weighted" in parts:
        inputs.append(found.param("gain", at.gain))
    if "biased" in parts:
        inputs.append(found.param("bias", at.bias))
    named = [[name, form] for name, form in parts.items()]
    final = named[-1][1]
    found.add(op, inputs, (1, WIDTH), "", final, eps=at.eps, form="written", parts=named)
    return found


def scene_of(found: Any, record: Any, x: np.ndarray, folder: Path) -> Any:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, found.tensors)
    centre = x.astype(np.float32).astype(np.float64)
    proof = parse(proofs.dump(proofs.document(found, record, record, sha256, centre, 0.0)))
    return Derivation(proof, read(path).tensors).problem(proof.cases[0])


INPUTS = {
    "large": an_input(1, 50.0),
    "small, a large eps": an_input(2, 0.3, 0.3),
    "readings apart": an_input(3, 2.0, 2.0**-17, 1e-3),
    "subnormal": an_input(4, 2.0**-7),
    "far from 0": Input(
        np.array([[60.0, 61.0, 62.0, 59.0, 60.0, 63.0]]),
        *(np.zeros((1, WIDTH)), 2.0**-17, np.full(WIDTH, 2.0), np.full(WIDTH, 100.0)),
    ),
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("form", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_both_programs_bound_the_error_of_every_part(
    way: str, form: str, casts: str, tmp_path: Path
) -> None:
    op, refused = way.split(" ", 1)[0], 0
    mixed = ("float16", "float32", "bfloat16")
    plain = dict.fromkeys(WAYS[way], form)
    several = {name: mixed[(k + mixed.index(form)) % 3] for k, name in enumerate(WAYS[way])}
    for parts in (plain, several):
        for at in INPUTS.values():
            try:
                page = Page(op, parts, casts, at)
            except ValueError:  # the variance is lost: a root of a negative number
                page = None
            for program in (prover, checker):
                if page is None or not page.fits:
                    with pytest.raises((NoBound, Rejected)):
                        program(op, parts, casts, at, tmp_path)
                    refused += 1
                    continue
                for name, value in program(op, parts, casts, at, tmp_path).items():
                    wanted = np.asarray(getattr(page, name))
                    assert (np.asarray(value) >= wanted * (1 - 2.0**-26)).all(), name
                    assert (np.asarray(value) <= wanted * (1 + 2.0**-19)).all(), name
    assert refused < 4 * len(INPUTS)


BEYOND = [
    (way, part, False)
    for way, parts in WAYS.items()
    for part in parts[:-1]
    if part not in ("normed", "quotient")  # at most the root of the number of columns
] + [("rms_norm", "root", True)]


def stretched(part: str, by: float, *, up: bool) -> Input:
    """Return an input at which a part grows with `by`.

    Inverse roots are large where the input is small; `up` refers to the roots.
    """
    at = an_input(6)
    match part:
        case "weighted":
            return Input(at.x, at.away, at.eps, at.gain * by, at.bias)
        case "root" | "reciprocal" if not up:
            return Input(at.x / by, at.away, 2.0**-90, at.gain, at.bias)
        case "mean":  # far from 0, so that the mean is large beside the variance
            return Input((at.x + 8) * by, at.away, at.eps, at.gain, at.bias)
        case _:
            return Input(at.x * by, at.away, at.eps, at.gain, at.bias)


@pytest.mark.parametrize(("way", "part", "up"), BEYOND)
def test_part_beyond_its_format_has_no_bound(way: str, part: str, up: bool, tmp_path: Path) -> None:
    """One part is in float16, and so large that it just fits, or just overflows."""
    op = way.split(" ", 1)[0]
    parts = {name: "float16" if name == part else "float32" for name in WAYS[way]}
    low, high = 2.0**-20, 2.0**20

    def fits(by: float) -> bool:
        return Page(op, parts, "any", stretched(part, by, up=up)).fits

    if part == "root":
        low = 1.0
    assert fits(low)
    assert not fits(high)
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    within, beyond = (
        stretched(part, by, up=up) for by in (low * (1 - 2.0**-8), high * (1 + 2.0**-8))
    )
    prover(op, parts, "any", within, tmp_path)
    checker(op, parts, "any", within, tmp_path)
    with pytest.raises(NoBound):
        prover(op, parts, "any", beyond, tmp_path)
    with pytest.raises(Rejected, match="bound/overflow"):
        checker(op, parts, "any", beyond, tmp_path)


@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("form", ["float16", "bfloat16", "float32"])
def test_both_programs_bound_the_error_of_a_stored_sigmoid(
    form: str, casts: str, tmp_path: Path
) -> None:
    """(u|y| + η|x| + w|x|/4 + inner error) (1 + 2^-10), with w the distance of readings of x."""
    found, record = proofs.Graph((1, WIDTH)), proofs.numerics(form, casts)
    found.add("silu", [found.add("input", [], (1, WIDTH))], (1, WIDTH), form="written")
    for size, away in ((3.0, 0.0), (3.0, 1e-2), (2.0**-18, 0.0)):
        at = an_input(7, size, away=away)
        x, inside = np.abs(at.x), np.full(at.x.shape, 2.0**-30)
        y = np.abs(at.x / (1 + np.exp(-at.x)))
        turned = at.away * x / 4
        exact = casts == "nearest" and form == "float32"
        u, eta = (0.0, 0.0) if exact else (UNIT[form], LEAST[form])
        kernel = Rounding(numerics(record))
        whole = 16 * U * y + 2.0**-100
        many = activation_error(
            *(SILU, block(found).node(found.output), kernel),
            *(torch.from_numpy(one) for one in (x, y, at.away)),
        ).numpy()
        scene = scene_of(found, record, at.x, tmp_path)
        node, again = scene.block.nodes[-1], at.away if away else None
        added = sigmoid_stored(scene.infer, node, x, y, inside, again)
        more = 1.0 if exact else 1 + 2.0**-10
        stored = u * (y + turned) + eta * x + turned
        for value, wanted in (
            (many, (whole + stored) * more),
            (added, stored * more + (more - 1) * inside),
        ):
            assert (value >= wanted * (1 - 2.0**-26)).all()
            assert (value <= wanted * (1 + 2.0**-26) + 2.0**-98).all()
