"""Mutants: each is made from a number alone, so that a number is all there is to record."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.fuzz.seeds import Seed, good_seeds, seeds
from tests.fuzz.texts import BYTES, TOKENS
from tests.fuzz.trees import TREES

KINDS = {"bytes": BYTES, "tokens": TOKENS, "trees": TREES}
SIZE_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged document, what it was made of, and how."""

    number: int
    seed: Seed
    kind: str
    data: bytes


def mutant(campaign: int, number: int) -> Mutant:
    """Return one mutant of a campaign; kinds take turns."""
    random = Random(f"{campaign}:{number}")
    seed, other = random.choice(good_seeds() if random.random() < 0.6 else seeds()), random.choice(seeds())
    kind = list(KINDS)[number % len(KINDS)]
    data = seed.data
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5)) if kind != "trees" else 1):
        data = random.choice(KINDS[kind])(data, other.data, random)
    if kind == "trees" and random.random() < 0.15:
        data = random.choice(TOKENS)(data, other.data, random)
    return Mutant(number, seed, kind, data[:SIZE_LIMIT])
