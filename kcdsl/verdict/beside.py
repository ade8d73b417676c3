"""What stands beside a clause: the spread of what was measured, its certified bound, and the noise
floor of the training kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measured:
    """Percentiles of the requests, each by its worst token; `worst` is the smallest where more is
    better."""

    p50: float
    p99: float
    worst: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: _number(getattr(self, name)) for name in ("p50", "p99", "worst")}


@dataclass(frozen=True, slots=True)
class Certified:
    """The statistic of the clause, formed from certified bounds of `requests` of `of` requests.

    `value` bounds the clause's own value, None with a `reason` where some requests have no bound;
    `partial` is formed from those that have one. `domains` say by what they were bounded.
    """

    value: float | None
    requests: int
    of: int
    partial: float | None = None
    reason: str | None = None
    domains: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "value": _number(self.value),
            "requests": self.requests,
            "of": self.of,
            "partial": _number(self.partial),
            "reason": self.reason,
            "domains": list(self.domains),
        }


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The statistic of the clause, formed from the drift of the training kernel from itself when
    `requests` requests are batched otherwise. `above` says that the threshold lies below it, so
    that no inference kernel can be expected to meet the clause."""

    value: float | None
    requests: int
    above: bool = False
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "value": _number(self.value),
            "requests": self.requests,
            "above": self.above,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Beside:
    """All that stands beside one clause on one slice.

    `narrow` says why its result may change with little: "few units" where there are fewer than 20,
    or one more or less beyond decides; "near the threshold" where it is within a tenth of it.
    """

    measured: Measured | None = None
    certified: Certified | None = None
    floor: NoiseFloor | None = None
    narrow: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "measured": None if self.measured is None else self.measured.to_json(),
            "certified": None if self.certified is None else self.certified.to_json(),
            "noise_floor": None if self.floor is None else self.floor.to_json(),
            "narrow": list(self.narrow),
        }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def domains_in_words(bounding: Mapping[str, Any]) -> str:
    """Return how many requests were bounded as a whole by what; empty where none was."""
    domains: Mapping[str, Any] = bounding.get("domains", {})
    return ", ".join(f"{len(keys)} by {words}" for words, keys in domains.items())
