"""Mutants, each determined by a number, so that the number is enough to reproduce it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.fuzz.plausible import PLAUSIBLE
from tests.fuzz.seeds import Seed, generated_seed, good_seeds, readable_seeds, seeds
from tests.fuzz.texts import BYTES, TOKENS
from tests.fuzz.trees import TREES

KINDS = {"bytes": BYTES, "tokens": TOKENS, "trees": TREES}
SIZE_LIMIT = 100_000
MILD = 0.5
"""The share of plausible mutants, as an author could have written."""
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged document, its seed, and the mutation."""

    number: int
    seed: Seed
    kind: str
    data: bytes


def mutant(campaign: int, number: int) -> Mutant:
    """Return one mutant of a campaign; kinds alternate."""
    random = Random(f"{campaign}:{number}")
    kind = list(KINDS)[number % len(KINDS)]
    mild = random.random() < MILD
    for _ in range(_TRIES):
        seed = _seed(kind, mild, random)
        data = _changed(kind, mild, seed.data, random)[:SIZE_LIMIT]
        if data != seed.data:
            break
    return Mutant(number, seed, kind, data)


def _seed(kind: str, mild: bool, random: Random) -> Seed:
    chance = random.random()
    if chance < 0.15:
        return generated_seed(random.randrange(10**6))
    if mild or chance < 0.8:
        return random.choice(good_seeds())
    return random.choice(_all(kind))


def _all(kind: str) -> tuple[Seed, ...]:
    return readable_seeds() if kind == "trees" else seeds()


def _changed(kind: str, mild: bool, data: bytes, random: Random) -> bytes:
    other = random.choice(good_seeds() if mild else _all(kind)).data
    changes = PLAUSIBLE[kind] if mild else KINDS[kind]
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5)) if kind != "trees" else 1):
        data = random.choice(changes)(data, other, random)
    if kind == "trees" and random.random() < 0.1:
        data = random.choice(PLAUSIBLE["tokens"] if mild else TOKENS)(data, other, random)
    return data
