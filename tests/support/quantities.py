"""Short constructors of the quantities of certificates."""

from __future__ import annotations

from fractions import Fraction

from kcdsl_certs.statement import Quantity


def metric(name: str) -> Quantity:
    """Return a metric per unit."""
    return Quantity("metric", name)


def statistic(name: str, of: str, q: str | None = None) -> Quantity:
    """Return a statistic of a metric; `q` is the order of a quantile."""
    rank = None if q is None else Fraction(q)
    return Quantity("statistic", name, (metric(of),), q=rank)


def norm(name: str, block: str, measured: bool = False) -> Quantity:
    """Return a norm of the drift of a block."""
    return Quantity("norm", name, block=block, measured=measured)


def margin(block: str, k: int = 1) -> Quantity:
    """Return the margin of the top k columns of a block."""
    return Quantity("margin", block=block, k=k)


def share(*fields: str) -> Quantity:
    """Return the share of records that have these fields."""
    return Quantity("share", fields=fields)
