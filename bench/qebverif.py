"""Decisions about quantisation errors in QEBVerif's benchmark, compared with its published table.

Networks on MNIST with weights and hidden values in fixed point of Q bits, against the same networks
without quantisation; every pixel ± 3. The question is whether |quantised - original| < ε for the
output of the image's class, with ε of 1, 2, 4, 6, 8. Published are the intervals and answers of the
difference analysis (DRA), and its answers with a mixed-integer solver (Gurobi, an hour for each).

Our bound uses linear bounds with optimised slopes, without splitting (bench/qebverif_bounds.py); an
independent program re-derives it (bench/qebverif_checker.py). A violation is an integer image found
by a local search; the checker replays its difference in exact arithmetic.

    KCDSL_QEBVERIF=FOLDER python -m bench.peers --only qebverif

FOLDER holds `PTQ_mnist_*.h5` (github.com/S3L-official/QEBVerif, CAV 2023), `RQ_2.csv`
("Experimental Results" of github.com/QEBVerif/Data) and the test set of MNIST,
`t10k-images-idx3-ubyte.gz` and `t10k-labels-idx1-ubyte.gz`. Reading them requires the package h5py.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.common import Better, Figure
from bench.neurodiff_splits import differences, ends_of
from bench.qebverif_bounds import FixedPointPair, Functionals
from bench.qebverif_checker import SlopeProof, recheck_fixed_point
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds.constraints import Grid, replay

PIXELS = 3
NAMES = {
    "P1: 784_100_10": "PTQ_mnist_1blk_100_in_8_relu_0.h5",
    "P2: 784_100_100_10": "PTQ_mnist_2blk_100_100_in_8_relu_0.h5",
    "P4: 784_100_100_100_10": "PTQ_mnist_3blk_100_100_100_in_8_relu_0.h5",
}

STARTS, SIGN_STEPS = 32, 12
CLIMBS, CLIMB_STEPS = 3, 60
MANY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""Numbers of pixels that a search step changes at once."""

Layers = list[tuple[Tensor, Tensor]]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Published:
    """The published answers for one network, number of bits and image, by ε; intervals of DRA."""

    network: str
    bits: int
    image: int
    interval: Interval | None
    solved: dict[int, bool | None]
    """Whether the error is below ε, by DRA and the solver in any mode; None: not decided."""


def figures(folder: Path) -> list[Figure]:
    """Decide every question of the published table; return the rows of each network."""
    torch.set_num_threads(1)
    pixels, labels = mnist(folder)
    table = [one for one in published(folder / "RQ_2.csv") if one.network in NAMES]
    rows: list[Figure] = []
    for network, file in NAMES.items():
        layers = read_h5(folder / file)
        ours, theirs, widths, started = Counter[str](), Counter[str](), [], time.process_time()
        for one in (one for one in table if one.network == network):
            image = [int(v) for v in pixels[one.image]]
            interval, answers = decided(
                layers, one.bits, image, int(labels[one.image]), list(one.solved)
            )
            for limit, answer in answers.items():
                if one.solved[limit] not in (None, answer) and answer is not None:
                    raise SystemExit(f"{network}, {one}: at {limit} the answer here is {answer}")
                ours[str(answer)] += 1
                theirs[str(one.solved[limit])] += 1
                theirs["DRA"] += one.interval is not None and max(map(abs, one.interval)) <= limit
            if one.interval is not None:
                widths.append((interval[1] - interval[0]) / (one.interval[1] - one.interval[0]))
            shown = ", ".join(f"{limit}: {answer}" for limit, answer in answers.items())
            print(f"{network}, {one.bits} bits, image {one.image}: {shown}", file=sys.stderr)
        spent = time.process_time() - started
        number = ours["True"] + ours["False"]
        how = (
            f"{ours['True']} below ε, {ours['False']} not, of {ours.total()}; published: DRA"
            f" {theirs['DRA']} below ε, with the solver {theirs['True']} and {theirs['False']} not;"
            f" {spent:.0f} s of processor, the checker's too"
        )
        rows.append(Figure(f"QEBVerif {network}: decided", number, Better.HIGHER, None, how))
        where = f"mean of {len(widths)} intervals"
        mean = sum(widths) / len(widths)
        rows.append(Figure(f"QEBVerif {network}: width / DRA's", mean, Better.LOWER, 1.0, where))
    return rows


def decided(
    layers: Layers, bits: int, image: list[int], label: int, limits: list[int]
) -> tuple[Interval, dict[int, bool | None]]:
    """Return an interval of the error and, for each limit, whether the error is below it.

    None: not decided, or not confirmed by the checker.
    """
    networks, grid = fixed_point(layers, bits)
    low, high = ends_of(image, PIXELS)
    outputs, inputs = len(layers[-1][1]), len(image)

    def facts(limit: int) -> list[Any]:
        unsafe = differences(outputs, inputs, Fraction(limit), label)
        return [[(c.inputs, c.first, c.second, c.limit) for c in group] for group in unsafe]

    interval, proof = bounded(FixedPointPair(networks, grid, low, high), label)
    size = max(map(abs, interval))
    left = [limit for limit in limits if limit <= size]
    largest, pixels = attacked(layers, bits, image, label, max(left)) if left else (-1.0, image)
    answers = {
        limit: True if size < limit else False if largest >= limit else None for limit in limits
    }
    plain = [[(w.numpy(), b.numpy()) for w, b in one] for one in networks]
    below = [limit for limit, answer in answers.items() if answer]
    above = [limit for limit, answer in answers.items() if answer is False]
    if below:
        try:
            recheck_fixed_point(plain, grid, low, high, facts(min(below)), proof)
        except Rejected as rejected:
            print(f"the checker does not follow: {rejected}", file=sys.stderr)
            answers |= dict.fromkeys(below)
    point = [Fraction(pixel, 255) for pixel in pixels]
    if above and not replay(plain, low, high, facts(max(above)), point, grid):
        print("the checker does not replay the violation", file=sys.stderr)
        answers |= dict.fromkeys(above)
    return interval, answers


def fixed_point(layers: Layers, bits: int) -> tuple[tuple[Layers, Layers], Grid]:
    """Return the original network and the quantised one, both of pixels over 255, and the grid.

    The quantised network reads pixels over 256; its first weights hold the factor 255/256.
    """
    step, most = hidden_format(bits)
    (weight, bias), *others = quantised(layers, bits)
    first = [(w.double(), b.double()) for w, b in layers]
    return (first, [(weight * (255 / 256), bias), *others]), Grid(step, round(most / step))


def bounded(pair: FixedPointPair, label: int) -> tuple[Interval, SlopeProof]:
    """Return an interval of the difference of one output, and its proof."""
    signs = torch.zeros(2, len(pair.networks[0][-1][1]), dtype=torch.float64)
    signs[0, label], signs[1, label] = 1.0, -1.0
    (above, below), slopes = pair.bounded(Functionals(-signs, signs))
    return (-float(below), float(above)), pair.proof(slopes)


def quantised(layers: Layers, bits: int) -> Layers:
    """Quantise weights with one integer bit and biases with two; return float64."""
    return [(_nearest(w, bits, bits - 1), _nearest(b, bits, bits - 2)) for w, b in layers]


def _nearest(values: Tensor, bits: int, after: int) -> Tensor:
    """Round values to a fixed-point format, halves away from zero."""
    scaled = values.double() * 2.0**after
    whole = torch.sign(scaled) * (scaled.abs() + 0.5).floor()
    return whole.clamp(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) / 2.0**after


def hidden_format(bits: int) -> tuple[float, float]:
    """Return step and largest number of hidden values, which have two integer bits."""
    return 2.0 ** -(bits - 2), (2.0**bits - 1) * 2.0 ** -(bits - 2)


def quantised_run(layers: Layers, bits: int, pixels: Tensor, rounds: bool = True) -> Tensor:
    """Return outputs [B, 10] of quantised layers for integer pixels [B, 784].

    All values are exact in float64. Without `rounds` hidden values are only clipped.
    """
    h = pixels / 256
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.T + bias
        if number < len(layers) - 1:
            h = hidden_values(h, bits, rounds)
    return h


def hidden_values(sums: Tensor, bits: int, rounds: bool = True) -> Tensor:
    """Clip sums to the hidden format, and round them to it."""
    step, most = hidden_format(bits)
    clipped = sums.clamp(0, most)
    return ((clipped / step + 0.5).floor() * step).clamp(0, most) if rounds else clipped


def attacked(
    layers: Layers, bits: int, image: list[int], label: int, enough: float
) -> tuple[float, list[int]]:
    """Return the largest |difference| of an output that a search over images finds, and its pixels.

    Sign steps start from random images and follow the gradient of the network without rounding;
    then changes of one or many pixels increase the difference of the rounded network. The search
    ends when the difference is large enough.
    """
    served, generator = quantised(layers, bits), torch.Generator().manual_seed(0)
    low, high = (torch.tensor(v).double() for v in _whole_ends(image))
    signs = torch.tensor([1.0, -1.0]).double().repeat(STARTS // 2)
    x = torch.where(torch.rand(STARTS, len(image), generator=generator) < 0.5, low, high)
    size, images = torch.full_like(signs, -math.inf), x.clone()
    for _ in range(SIGN_STEPS):
        found = _difference(layers, served, bits, x)[:, label] * signs
        images = torch.where((found > size).unsqueeze(1), x, images)
        size = torch.maximum(size, found)
        y = x.clone().requires_grad_(True)
        value = (_difference(layers, served, bits, y, rounds=False)[:, label] * signs).sum()
        (slope,) = torch.autograd.grad(value, y)
        kept = torch.rand(x.shape, generator=generator) < 0.1
        x = torch.where(kept, x, torch.where(slope > 0, high, low))
    best, pixels = float(size.max()), images[int(size.argmax())]
    for place in size.argsort(descending=True)[:CLIMBS].tolist():
        if best >= enough:
            break
        search = _Search(layers, served, bits, label, float(signs[place]), (low, high), generator)
        top, reached = search.from_image(images[place])
        if top > best:
            best, pixels = top, reached
    return best, [int(v) for v in pixels.tolist()]


@dataclass(frozen=True, slots=True)
class _Search:
    """A local search over integer pixels for the largest difference of one sign."""

    layers: Layers
    served: Layers
    bits: int
    label: int
    sign: float
    ends: tuple[Tensor, Tensor]
    generator: torch.Generator

    def from_image(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the largest difference found from a start image, and its image."""
        (weight, bias), (other, shift) = self.layers[0], self.served[0]
        weight, other = weight.double() / 255, other / 256
        low, high = self.ends
        best = float(self._differences(x @ weight.T + bias, x @ other.T + shift))
        for step in range(CLIMB_STEPS):
            share = torch.rand(len(x), generator=self.generator).double()
            share = share.round() if step % 2 == 0 else share
            change = (low + share * (high - low)).round() - x
            places = torch.nonzero(change).flatten()
            each = change[places].unsqueeze(1)
            z, served = x @ weight.T + bias, x @ other.T + shift
            found = self._differences(z + each * weight.T[places], served + each * other.T[places])
            order = places[found.argsort(descending=True)]
            rising = int((found > best).sum())
            many = [k for k in MANY if k <= rising]
            if not many:
                continue
            tried = x.repeat(len(many), 1)
            for row, count in zip(tried, many, strict=True):
                row[order[:count]] += change[order[:count]]
            found = self._differences(tried @ weight.T + bias, tried @ other.T + shift)
            if float(found.max()) > best:
                best, x = float(found.max()), tried[int(found.argmax())]
        found = _difference(self.layers, self.served, self.bits, x.unsqueeze(0))[0, self.label]
        return float(found) * self.sign, x

    def _differences(self, z: Tensor, served: Tensor) -> Tensor:
        """Return signed differences, given sums of the first layer [..., n] of both networks."""
        for (weight, bias), (other, shift) in zip(self.layers[1:], self.served[1:], strict=True):
            z = z.clamp_min(0) @ weight.double().T + bias.double()
            served = hidden_values(served, self.bits) @ other.T + shift
        return self.sign * (served - z)[..., self.label]


def _difference(
    layers: Layers, served: Layers, bits: int, pixels: Tensor, rounds: bool = True
) -> Tensor:
    h = pixels / 255
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.double().T + bias.double()
        h = h if number == len(layers) - 1 else h.clamp_min(0)
    return quantised_run(served, bits, pixels, rounds) - h


def _whole_ends(image: list[int]) -> tuple[list[int], list[int]]:
    return [max(v - PIXELS, 0) for v in image], [min(v + PIXELS, 255) for v in image]


def read_h5(path: Path) -> Layers:
    """Return weight [out, in] and bias of every dense layer of a Keras file, in order."""
    with importlib.import_module("h5py").File(path) as file:
        names = [name.decode() for name in file.attrs["layer_names"]]
        held = [file[name][name] for name in names if len(file[name])]
        return [
            (torch.tensor(one["kernel:0"][()].T), torch.tensor(one["bias:0"][()])) for one in held
        ]


def mnist(folder: Path) -> tuple[Any, Any]:
    """Return pixels [10000, 784] and labels of the test set."""
    images, labels = (
        gzip.decompress((folder / f"t10k-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28 * 28)
    return pixels, np.frombuffer(labels, np.uint8, offset=8)


def published(path: Path) -> Iterator[Published]:
    """Yield the answers of the published table, image by image for each setting."""
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines(keepends=True)))
    starts = [k for k, row in enumerate(rows) if len(row) > 2 and "Q bit:" in row[2]]
    for start, end in pairwise([*starts, len(rows)]):
        network, bits = rows[start][1].strip(), int(rows[start][2].rpartition(":")[2])
        answers = [row for row in rows[start + 3 : end] if len(row) > 4]
        for place, image in enumerate(rows[start + 1][3::3]):
            if not image.strip():
                continue
            interval, solved, limit = None, dict[int, bool | None](), 0
            for row in answers:
                limit = int(row[0].partition("=")[2]) if row[0].strip() else limit
                text, said = row[2 + 3 * place].strip(), row[3 + 3 * place].strip()
                numbers = re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)
                if len(numbers) == 2:
                    interval = float(numbers[0]), float(numbers[1])
                if solved.setdefault(limit) is None and said in ("True", "False"):
                    solved[limit] = said == "True"
            yield Published(network, bits, int(image), interval, solved)
