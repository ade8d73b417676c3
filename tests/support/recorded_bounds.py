"""Recorded bounds of small proofs, which reveal any change of a checker's rule.

The proofs are those of `mutation.bases`, and others of float64 kernels, whose bounds consist of the
checker's own rounding allowances, some of them near the smallest number. After an intended change
of a rule, record them again with .venv/bin/python -m tests.support.recorded_bounds
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support.mutation.bases import BASES, Base, N, proof_of
from tests.support.mutation.blocks import (
    cached,
    decoder,
    encoder,
    feed,
    gated,
    remaining_operations,
    wide,
)

RECORDED = Path(__file__).with_suffix(".json")
FAINT = 2.0**-1040
"""A size of inputs at which the smallest float64 numbers matter."""
ONE, OTHER = (
    N("float64", "nearest", accumulate="float64"),
    N("float64", "any", accumulate="float64", style="fused"),
)
CHANCE = {"alpha": "0.001", "functionals": 4096}

Bounds = dict[str, list[float]]
"""The claim and the sizes of value and drift at every node, by case."""


def float64_bases() -> Iterator[tuple[str, Base]]:
    """Return bases of float64 kernels by name."""
    for build in (decoder, encoder, gated, feed, remaining_operations, wide, cached):
        for domain in ("interval", "affine", "planes"):
            if build is cached and domain == "planes":
                continue  # not supported by the rules
            name = f"{build.__name__}, {domain}"
            yield name, Base(build, domain, "inf", "ball", ONE, OTHER, radius=2.0**-60)
            yield f"{name}, faint", Base(build, domain, "inf", "points", ONE, OTHER, spread=FAINT)
        by_chance = Base(build, "affine", "inf", "points", ONE, OTHER, chance=CHANCE)
        yield f"{build.__name__}, by chance", by_chance


PROOFS = {"coarse": BASES, "fine": dict(float64_bases())}


def bounds_of(base: Base, seed: int, folder: Path) -> Bounds:
    """Return the bounds that the checker derives for a base."""
    document, _, _ = proof_of(base, seed, folder)
    found = {}
    for case in document["cases"]:
        claim = case["claim"]
        numbers = [0.0 if claim == "held" else float.fromhex(claim)]
        for seen in case["witness"]:
            numbers += [float.fromhex(seen["value"]), float.fromhex(seen["drift"])]
        found[case["name"]] = [float(f"{number:.13g}") for number in numbers]
    return found


def derived(kind: str, names: Collection[str]) -> dict[str, Bounds]:
    """Return the bounds that the checker derives for bases of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: bounds_of(base, seed, Path(folder))
            for seed, (name, base) in enumerate(PROOFS[kind].items(), 1)
            if name in names
        }


def recorded(kind: str) -> dict[str, Bounds]:
    """Return the recorded bounds of every base of a kind."""
    found: dict[str, dict[str, Bounds]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found[kind]


def main() -> None:
    """Record all bounds again."""
    lines = []
    for kind in PROOFS:
        entries = [
            f"    {json.dumps(name)}: {json.dumps(bounds)}"
            for name, bounds in derived(kind, PROOFS[kind]).items()
        ]
        lines.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(entries) + "\n  }")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
