"""How many quantisation errors of QEBVerif's benchmark are decided, beside its published table.

Networks on MNIST with weights and hidden values in fixed point of Q bits, against the same networks
without quantisation; every pixel ± 3. Is |quantised - original| < ε for the output of the image's
class, ε of 1, 2, 4, 6, 8? Published are the answers of its difference analysis (DRA) and of that
with a mixed-integer solver behind it (an hour for each, Gurobi), with the intervals of DRA.

Here the rounding of every hidden value is an input of the network with a box, `fixed_point` says
how; the bound is one of linear bounds, without splitting, and the checker derives it again. A
violation is an image of integers whose quantised run is exact in float64, and the checker replays
the difference in exact arithmetic.

    KCDSL_QEBVERIF=FOLDER python -m bench.peers --only qebverif

FOLDER holds `PTQ_mnist_*.h5` (github.com/S3L-official/QEBVerif, CAV 2023), `RQ_2.csv`
("Experimental Results" of github.com/QEBVerif/Data) and the test set of MNIST,
`t10k-images-idx3-ubyte.gz` and `t10k-labels-idx1-ubyte.gz`. Reading them takes the package h5py.
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
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.common import Better, Figure
from bench.neurodiff_splits import differences, ends_of
from kcdsl_backends.drift.linear.paired import OutputRows, PairedLayer, PairedNetwork
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds.constraints import replay
from kcdsl_certs.recheck.linear_bounds.splits import recheck_split

PIXELS = 3
NAMES = {
    "P1: 784_100_10": "PTQ_mnist_1blk_100_in_8_relu_0.h5",
    "P2: 784_100_100_10": "PTQ_mnist_2blk_100_100_in_8_relu_0.h5",
    "P4: 784_100_100_100_10": "PTQ_mnist_3blk_100_100_100_in_8_relu_0.h5",
}
WHOLE = b"\xff\xff"
"""The tree of a box that is not split."""

Layers = list[tuple[Tensor, Tensor]]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Published:
    """The answers to one network, one number of bits and one image, by ε; intervals of DRA."""

    network: str
    bits: int
    image: int
    interval: Interval | None
    solved: dict[int, bool | None]
    """Whether the error is below ε, by DRA and the solver in either mode; None: not decided."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Two networks with the same layers, f and g, and the box of their inputs.

    The inputs are pixels over 255, then one for each hidden value that can be rounded: half a step
    and what rounding adds to it.
    """

    f: Layers
    g: Layers
    low: list[Fraction]
    high: list[Fraction]
    rounded: list[Tensor]
    """The hidden values of each layer that can be rounded, as indices."""
    clipped: list[Tensor]
    """Those that can be clipped at the largest number of the format."""


def figures(folder: Path) -> list[Figure]:
    """Ask every question of the published table, and return the rows of each network."""
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
    """Return an interval of the error, and for each limit whether the error is below it.

    None: not decided, or the checker did not confirm the answer.
    """
    pair = fixed_point(layers, bits, *ends_of(image, PIXELS))
    interval = bounded(pair, label)
    largest, point = attacked(layers, bits, image, label, pair)
    answers = {
        limit: True if max(map(abs, interval)) < limit else False if largest >= limit else None
        for limit in limits
    }
    plain = [[(w.numpy(), b.numpy()) for w, b in one] for one in (pair.f, pair.g)]
    outputs, inputs = len(plain[0][-1][1]), len(pair.low)

    def facts(limit: int) -> list[Any]:
        unsafe = differences(outputs, inputs, Fraction(limit), label)
        return [[(c.inputs, c.first, c.second, c.limit) for c in group] for group in unsafe]

    below = [limit for limit, answer in answers.items() if answer]
    above = [limit for limit, answer in answers.items() if answer is False]
    if below:
        try:
            recheck_split(plain, pair.low, pair.high, facts(min(below)), WHOLE)
        except Rejected as rejected:
            print(f"the checker does not follow: {rejected}", file=sys.stderr)
            answers |= dict.fromkeys(below)
    if above and not replay(plain, pair.low, pair.high, facts(max(above)), point):
        print("the checker does not replay the violation", file=sys.stderr)
        answers |= dict.fromkeys(above)
    return interval, answers


def quantised(layers: Layers, bits: int) -> Layers:
    """Return weights with one bit before the point and biases with two, as float64."""
    return [(_nearest(w, bits, bits - 1), _nearest(b, bits, bits - 2)) for w, b in layers]


def _nearest(values: Tensor, bits: int, after: int) -> Tensor:
    """Return values of a fixed-point format, halves away from zero."""
    scaled = values.double() * 2.0**after
    whole = torch.sign(scaled) * (scaled.abs() + 0.5).floor()
    return whole.clamp(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) / 2.0**after


def hidden_format(bits: int) -> tuple[float, float]:
    """Return step and largest number of hidden values, which have two bits before the point."""
    return 2.0 ** -(bits - 2), (2.0**bits - 1) * 2.0 ** -(bits - 2)


def quantised_run(
    layers: Layers, bits: int, pixels: Tensor, rounds: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs [B, 10] of quantised layers for whole pixels [B, 784], and what rounding adds.

    Float64 holds every value exactly. Without `rounds` hidden values are only clipped.
    """
    step, most = hidden_format(bits)
    h, added = pixels / 256, []
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.T + bias
        if number < len(layers) - 1:
            clipped = h.clamp(0, most)
            h = ((clipped / step + 0.5).floor() * step).clamp(0, most) if rounds else clipped
            added.append(h - clipped)
    return h, added


def fixed_point(layers: Layers, bits: int, low: list[Fraction], high: list[Fraction]) -> FixedPoint:
    """Return the original network f and the quantised network g, with rounding as inputs.

    A hidden value of g is clip(z, 0, t) + e with |e| at most half a step: clipping and rounding are
    both monotone, and t is a number of the format. With two elements, z and z - t, the clip is
    relu(z) - relu(z - t); the second is left out where z stays below t. e + half a step is not
    negative, so it passes ReLU as it is. Where z stays below 0 nothing is rounded; where it stays
    below half a step, rounding only takes it away. f has the same elements and does not read those
    that it does not need.
    """
    half, most = hidden_format(bits)[0] / 2, hidden_format(bits)[1]
    pair = FixedPoint([], [], low, high, [], [])
    for number in range(len(layers)):
        pair = _widened(layers, bits, pair)
        if number == len(layers) - 1:
            break
        largest = _largest(pair)
        places = torch.nonzero(largest > 0).flatten()
        taken = [min(half, v) for v in largest[places].tolist()]
        pair = replace(
            pair,
            low=pair.low + [Fraction(half) - Fraction(v) for v in taken],
            high=pair.high + [Fraction(half) * (2 if v >= half else 1) for v in taken],
            rounded=[*pair.rounded, places],
            clipped=[*pair.clipped, torch.nonzero(largest > most).flatten()],
        )
    return pair


def _widened(layers: Layers, bits: int, pair: FixedPoint) -> FixedPoint:
    """Return the networks with one layer more than the hidden values that are known."""
    half, most = hidden_format(bits)[0] / 2, hidden_format(bits)[1]
    f: Layers = []
    g: Layers = []
    known = len(pair.rounded)
    served = quantised(layers[: known + 1], bits)
    for number, ((w, b), (v, c)) in enumerate(zip(layers, served, strict=False)):
        left = sum(len(one) for one in pair.rounded[number:])
        first, second = w.double(), v
        bias, shift = b.double(), c
        if number == 0:
            second = second * (255 / 256)
            none = 0
        else:
            folded, rounds = v[:, pair.clipped[number - 1]], v[:, pair.rounded[number - 1]]
            second = torch.cat([second, -folded, rounds], 1)
            shift = shift - half * rounds.sum(1)
            none = folded.shape[1] + rounds.shape[1]
        first = torch.cat([first, v.new_zeros(len(v), none + left)], 1)
        second = torch.cat([second, v.new_zeros(len(v), left)], 1)
        if number < known:
            over, zeros = pair.clipped[number], v.new_zeros(left)
            first = _with_passes(torch.cat([first, first[over]]), left)
            second = _with_passes(torch.cat([second, second[over]]), left)
            bias = torch.cat([bias, bias[over] - most, zeros])
            shift = torch.cat([shift, shift[over] - most, zeros])
        f.append((first, bias))
        g.append((second, shift))
    return replace(pair, f=f, g=g)


def _largest(pair: FixedPoint) -> Tensor:
    """Return an upper bound of every output of g."""
    eye = torch.eye(len(pair.g[-1][1]), dtype=torch.float64)
    return _above(pair, eye, eye)


def _above(pair: FixedPoint, first: Tensor, drift: Tensor) -> Tensor:
    """Bound functionals [M, outputs] of f and of g - f from above."""
    layers = tuple(PairedLayer.of(*both) for both in zip(pair.f, pair.g, strict=True))
    ends = [
        [math.nextafter(float(v), side * math.inf) for v in values]
        for side, values in ((-1, pair.low), (1, pair.high))
    ]
    low, high = torch.tensor(ends, dtype=torch.float64).unsqueeze(1)
    rows = OutputRows(first.new_zeros(len(first), len(pair.low)), first, drift)
    return PairedNetwork(layers).above(low, high, rows)[0][0]


def _with_passes(weight: Tensor, count: int) -> Tensor:
    """Append rows that pass the last elements on."""
    passed = weight.new_zeros(count, weight.shape[1])
    if count:
        passed[:, -count:] = torch.eye(count, dtype=weight.dtype)
    return torch.cat([weight, passed])


def bounded(pair: FixedPoint, label: int) -> Interval:
    """Return an interval of the difference of one output."""
    signs = torch.zeros(2, len(pair.f[-1][1]), dtype=torch.float64)
    signs[0, label], signs[1, label] = 1.0, -1.0
    above, below = _above(pair, torch.zeros_like(signs), signs).tolist()
    return -below, above


def attacked(
    layers: Layers, bits: int, image: list[int], label: int, pair: FixedPoint
) -> tuple[float, list[Fraction]]:
    """Return the largest |difference| of images that sign steps find, and its point of `pair`."""
    served, generator = quantised(layers, bits), torch.Generator().manual_seed(0)
    low, high = (torch.tensor(v).double() for v in _whole_ends(image))
    signs = torch.tensor([1.0, -1.0]).double().repeat(8)
    x = torch.where(torch.rand(len(signs), len(image), generator=generator) < 0.5, low, high)
    best, winner = -1.0, x[0]
    for _ in range(12):
        with torch.no_grad():
            size = (_difference(layers, served, bits, x)[:, label]).abs()
        if float(size.max()) > best:
            best, winner = float(size.max()), x[int(size.argmax())]
        y = x.clone().requires_grad_(True)
        value = (_difference(layers, served, bits, y, rounds=False)[:, label] * signs).sum()
        (slope,) = torch.autograd.grad(value, y)
        kept = torch.rand(x.shape, generator=generator) < 0.1
        x = torch.where(kept, x, torch.where(slope > 0, high, low))
    added = quantised_run(served, bits, winner.unsqueeze(0))[1]
    half = hidden_format(bits)[0] / 2
    point = [Fraction(int(v), 255) for v in winner.tolist()]
    for one, places in zip(added, pair.rounded, strict=True):
        point += [Fraction(v) + Fraction(half) for v in one[0, places].tolist()]
    return best, point


def _difference(
    layers: Layers, served: Layers, bits: int, pixels: Tensor, rounds: bool = True
) -> Tensor:
    h = pixels / 255
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.double().T + bias.double()
        h = h if number == len(layers) - 1 else h.clamp_min(0)
    return quantised_run(served, bits, pixels, rounds)[0] - h


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
    """Read the answers of the published table, one image after another in each setting."""
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
