"""Decisions about quantisation errors in QEBVerif's benchmark, compared with its published table.

Networks on MNIST with weights and hidden values in fixed point of Q bits, against the same networks
without quantisation; every pixel ± 3. The question is whether |quantised - original| < ε for the
output of the image's class, with ε of 1, 2, 4, 6, 8. Published are the intervals and answers of the
difference analysis (DRA), and its answers with a mixed-integer solver (Gurobi, an hour for each).

Our bound uses linear bounds with optimised slopes (bench/qebverif_bounds.py) and splits the levels
of hidden values where it is close to ε (bench/qebverif_splits.py). An independent program derives
it again (bench/qebverif_checker.py). A violation is an integer image that a search finds
(bench/qebverif_search.py). The checker replays its difference in exact arithmetic.

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

from bench.common import Better, Figure
from bench.neurodiff_splits import differences, ends_of
from bench.qebverif_bounds import THOROUGH, Assumed, FixedPointPair, Functionals, packed
from bench.qebverif_checker import LEAF, SlopeProof, recheck_fixed_point
from bench.qebverif_search import (
    LONG,
    OTHERS,
    PIXELS,
    SHORT,
    Layers,
    Search,
    hidden_format,
    quantised,
)
from bench.qebverif_splits import Splitting, Tree
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds.constraints import Grid, replay

NAMES = {
    "P1: 784_100_10": "PTQ_mnist_1blk_100_in_8_relu_0.h5",
    "P2: 784_100_100_10": "PTQ_mnist_2blk_100_100_in_8_relu_0.h5",
    "P4: 784_100_100_100_10": "PTQ_mnist_3blk_100_100_100_in_8_relu_0.h5",
}

REACH = 0.88
"""Limits that a search came so near to are searched again."""
NEAR = 0.82
"""Limits below this part of a bound are not worth a search for a better bound."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Limits of rounds and splits for one question.

    Args:
        near: limits below this part of a bound are not tried.
        rounds: rounds of bounds where the limit is reached, at most.
        close: limits below this part of a bound after the rounds are not tried with splits.
        parts: parts of a tree of splits at most.
    """

    near: float
    rounds: int
    close: float
    parts: int


SPLITS = {
    1: Splits(0.89, 0, 0.89, 60000),
    2: Splits(0.7, 24, 0.9, 1500),
    3: Splits(0.75, 16, 0.96, 256),
}
"""By the number of hidden layers."""

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
    largest, pixels = -1.0, image
    signs: tuple[float, ...] = (1.0, -1.0)
    for effort in (SHORT, LONG, *OTHERS):
        left = [limit for limit in limits if largest < limit <= size]
        if effort in OTHERS:
            left = [limit for limit in left if largest >= REACH * limit]
        if not left:
            break
        search = Search.of(layers, bits, image, label, effort)
        top, reached, sign = search.attacked(signs, max(left))
        signs = (sign,)
        if top > largest:
            largest, pixels = top, reached
    most = SPLITS[len(layers) - 1]
    near = min(NEAR, most.near)
    left = [limit for limit in limits if near * size <= limit <= size and limit > largest]
    least: float = math.nextafter(size, math.inf)
    if left:
        pair = FixedPointPair(networks, grid, low, high, THOROUGH)
        closer, proof_of_closer = bounded(pair, label)
        if max(map(abs, closer)) < size:
            interval, proof, size = closer, proof_of_closer, max(map(abs, closer))
            least = math.nextafter(size, math.inf)
        for limit in [limit for limit in left if size * most.near <= limit <= size]:
            found = shown(pair, label, limit, most)
            if found is not None:
                proof, least = found, limit
                break
    answers = {
        limit: True if least <= limit else False if largest >= limit else None for limit in limits
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


def shown(pair: FixedPointPair, label: int, limit: int, effort: Splits) -> SlopeProof | None:
    """Return a proof with rounds and splits that |difference| of one output is below a limit."""
    cuts, leaves, rounds = list[list[int]](), list[Any](), list[Any]()
    for sign in (1.0, -1.0):
        signs = torch.zeros(1, len(pair.networks[0][-1][1]), dtype=torch.float64)
        signs[0, label] = sign
        row, below = Functionals(-signs, signs), float(limit) * (1 - 2.0**-30)
        found, slopes = pair.bounded(row)
        own = pair.copied()
        reached = Assumed(slopes, float(found), [])
        own.assume(row, reached, below, effort.rounds)
        if reached.bound < below:
            tree = Tree([LEAF], packed(reached.slopes, 0))
        elif reached.bound * effort.close < below:
            split = Splitting(own, row, below).searched(reached.slopes, effort.parts)
            if split is None:
                return None
            tree = split
        else:
            return None
        cuts += tree.cuts
        leaves.append(tree.slopes)
        rounds.append(reached.rounds)
    return SlopeProof(pair.hidden, np.concatenate(leaves), np.array(cuts), rounds)


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
