"""The subject of a comparison, and its inputs: records of typed fields, never text.

A quantity is a tree of nodes, each with the fields that its kind has:

=============  ============================  ======================================================
kind           fields                        meaning
=============  ============================  ======================================================
`number`       `value`                       an exact constant
`metric`       `name`                        a measured metric of each unit
`statistic`    `name`, `of`, `q` (quantile)  mean, max, min, rate, quantile or aggregate of its part
`abs`          `of`                          the magnitude of its part
`arithmetic`   `name`, `of`                  + - * or / of its two parts
`norm`         `name`, `block`, `measured`   a norm (inf, 2, span) of the drift of a block, per row
`margin`       `block`, `k`                  how far the top k columns of a block stay above others
`share`        `fields`                      the share of trace records that carry the fields
=============  ============================  ======================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl_certs.encoding.reals import parse_real, real_text
from kcdsl_certs.encoding.records import COUNT, REAL, TEXT, Codec, Record, RecordField, one_of
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields

NORMS = ("inf", "2", "span")
REGIONS = ("points", "ball", "hull", "rows")
LONGEST = 2**20
"""The longest sequence of a region of rows."""
_FIELDS = {
    "number": ("value",),
    "metric": ("name",),
    "statistic": ("name", "of"),
    "abs": ("of",),
    "arithmetic": ("name", "of"),
    "norm": ("name", "block", "measured"),
    "margin": ("block", "k"),
    "share": ("fields",),
}
_NAMES = {
    "statistic": ("mean", "max", "min", "rate", "quantile", "aggregate"),
    "arithmetic": ("+", "-", "*", "/"),
    "norm": NORMS,
}
_PARTS = {"statistic": 1, "abs": 1, "arithmetic": 2}
_TIMED = frozenset({"latency", "throughput", "peak_memory", "determinism"})
OF_A_MACHINE = _TIMED | {"ttft", "tpot", "kv_memory"}
"""The metrics whose values depend on the machine; metrics of users do not, they read no clock."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One node of a quantity; fields that its kind does not have are at their defaults."""

    kind: str
    name: str = ""
    of: tuple[Quantity, ...] = ()
    value: Fraction | None = None
    q: Fraction | None = None
    block: str | None = None
    k: int | None = None
    measured: bool = False
    fields: tuple[str, ...] = ()

    @property
    def is_of_proofs(self) -> bool:
        """Return whether proof objects are about it: about every admissible run, not observed
        ones."""
        return self.kind == "margin" or (self.kind == "norm" and not self.measured)

    @property
    def is_of_every_run(self) -> bool:
        """Return whether any part of it is about every admissible run, so that no run shows it."""
        return any(node.is_of_proofs for node in self._nodes())

    @property
    def is_of_every_unit(self) -> bool:
        """Return whether it is about every unit, so that no sample bounds it."""
        if self.kind == "statistic":
            extreme = self.name in ("max", "min") or self.q in (0, 1)
            inner = (node for part in self.of for node in part._nodes())
            return extreme or any(
                node.kind in ("norm", "margin", "share")
                or (node.kind == "statistic" and node.is_of_every_unit)
                for node in inner
            )
        if self.kind in ("abs", "arithmetic"):
            return any(part.is_of_every_unit for part in self.of)
        return self.kind != "number"

    @property
    def is_of_a_machine(self) -> bool:
        """Return whether it depends on the machine: times, memory or repeated runs."""
        return not OF_A_MACHINE.isdisjoint(self._names())

    @property
    def is_timed(self) -> bool:
        """Return whether its unit is a timed run."""
        return not _TIMED.isdisjoint(self._names())

    def _nodes(self) -> Iterator[Quantity]:
        yield self
        for part in self.of:
            yield from part._nodes()

    def _names(self) -> Iterator[str]:
        for node in self._nodes():
            yield from (node.name,) if node.kind == "metric" else node.fields

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        record: dict[str, Any] = {"kind": self.kind}
        for name in _FIELDS[self.kind]:
            match getattr(self, name):
                case Fraction() as exact:
                    record[name] = real_text(exact)
                case tuple() as several:
                    record[name] = [p.to_json() if name == "of" else p for p in several]
                case plain:
                    record[name] = plain
        if self.q is not None:
            record["q"] = real_text(self.q)
        return record

    @staticmethod
    def from_json(value: Any, place: str) -> Quantity:
        """Read the record of `to_json`; raises Rejected `statement/malformed` for anything else."""
        fields = Fields.of(value, place)
        kind = fields.text("kind")
        if kind not in _FIELDS:
            raise Rejected("statement/malformed", f"{place}: there is no quantity {kind!r}")
        has = _FIELDS[kind]
        found = Quantity(
            kind,
            name=fields.text("name") if "name" in has else "",
            of=tuple(Quantity.from_json(part, f"{place}.of") for part in fields.items("of"))
            if "of" in has
            else (),
            value=parse_real(fields.text("value")) if "value" in has else None,
            q=parse_real(fields.text("q")) if "q" in fields.record else None,
            block=fields.text("block") if "block" in has else None,
            k=fields.integer("k") if "k" in has else None,
            measured=fields.boolean("measured") if "measured" in has else False,
            fields=fields.texts("fields") if "fields" in has else (),
        )
        fields.done()
        if (
            (kind in _NAMES and found.name not in _NAMES[kind])
            or len(found.of) != _PARTS.get(kind, 0)
            or (found.q is not None) != (found.name == "quantile" and kind == "statistic")
            or (found.q is not None and not 0 <= found.q <= 1)
            or found.k == 0
            or (kind == "share" and not found.fields)
        ):
            raise Rejected("statement/malformed", f"{place}: no {kind} is like this")
        return found

    def __str__(self) -> str:
        """Return the quantity in the syntax of contracts; `margin` and `share`, which have none,
        are written as those of `no_flip` and `has`."""
        parts = ", ".join(map(str, self.of))
        match self.kind:
            case "number" if self.value is not None:
                return real_text(self.value)
            case "statistic" if self.q is not None and (100 * self.q).denominator == 1:
                return f"p{100 * self.q}({parts})"
            case "statistic" if self.q is not None:
                return f"quantile({real_text(self.q)}, {parts})"
            case "statistic":
                return f"{self.name}({parts})"
            case "abs":
                return f"abs({parts})"
            case "arithmetic":
                return f"({self.of[0]} {self.name} {self.of[1]})"
            case "norm":
                drift = f"{'measured_' if self.measured else ''}drift({self.block}, x)"
                return f"{'span' if self.name == 'span' else f'norm_{self.name}'}({drift})"
            case "margin":
                return f"margin({self.block}, x, {self.k})"
            case "share":
                return f"share(has(trace, [{', '.join(map(json.dumps, self.fields))}]))"
            case _:
                return self.name


QUANTITY = Codec(Quantity.to_json, Quantity.from_json)


@dataclass(frozen=True, slots=True)
class Region:
    """The inputs that a proof ranges over: `points`, `ball`, `hull` or `rows` of a slice.

    `radius` is that of a ball, or the relative margin of a hull and of rows; `longest` is the
    number of rows of the longest sequence, only for `rows`.
    """

    kind: str
    slice: str
    radius: Fraction = Fraction(0)
    longest: int | None = None

    def __str__(self) -> str:
        """Return the region in the syntax of contracts."""
        longest = "" if self.longest is None else f", {self.longest}"
        radius = f", {real_text(self.radius)}" if self.radius or self.kind == "ball" else ""
        return f"{self.kind}({self.slice}{longest}{radius})"


def _region(**found: Any) -> Region:
    region = Region(**found)
    bounded = region.longest is not None and 0 < region.longest <= LONGEST
    if region.radius < 0 or not (bounded if region.kind == "rows" else region.longest is None):
        raise Rejected("statement/malformed", f"no region is like {region}")
    return region


REGION = Record(
    _region,
    RecordField("kind", one_of(REGIONS)),
    RecordField("slice", TEXT),
    RecordField("radius", REAL),
    RecordField("longest", COUNT, absent=None),
).codec
