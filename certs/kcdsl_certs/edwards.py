"""Points of the curve of Ed25519 (RFC 8032): which encodings a careful verifier accepts.

Signature libraries differ in what they accept here. A public key of small order makes one signature
valid for many messages, and a second spelling of a point makes one key look like two.
"""

from __future__ import annotations

from kcdsl_certs.rejected import Rejected

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
"""The order of the base point."""
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)
"""A square root of -1."""

_Point = tuple[int, int, int, int]
"""Extended coordinates X, Y, Z, T: x = X/Z, y = Y/Z, x*y = T/Z."""


def refuse_weak_key(encoding: bytes) -> None:
    """Raise Rejected unless the 32 bytes are the only spelling of a point of the large prime order.

    The eight points of small order are refused, and so are their sums with other points: no key
    that was generated is one of them.
    """
    point = _decode(encoding, "key")
    if _is_small(point):
        raise Rejected("key/small-order", "the public key is a point of small order")
    if not _is_zero(_times(_L, point)):
        raise Rejected("key/small-order", "the public key has a part of small order")


def is_strong_commitment(signature: bytes) -> bool:
    """Say whether R, the first half of a signature, is spelt canonically and not of small order."""
    try:
        return len(signature) == 64 and not _is_small(_decode(signature[:32], "signature"))
    except Rejected:
        return False


def _decode(encoding: bytes, what: str) -> _Point:
    if len(encoding) != 32:
        raise Rejected(f"{what}/encoding", f"{len(encoding)} bytes encode no point")
    whole = int.from_bytes(encoding, "little")
    y, odd = whole & (2**255 - 1), whole >> 255
    if y >= _P:
        raise Rejected(f"{what}/encoding", "the point is not spelt canonically")
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT % _P
    if x * x % _P != square:
        raise Rejected(f"{what}/encoding", "the bytes are no point of the curve")
    if x == 0 and odd:
        raise Rejected(f"{what}/encoding", "the point is not spelt canonically")
    if x & 1 != odd:
        x = _P - x
    return x, y, 1, x * y % _P


def _add(a: _Point, b: _Point) -> _Point:
    """Add two points; complete, so that it doubles too (RFC 8032, section 5.1.4)."""
    e = (a[1] - a[0]) * (b[1] - b[0]) % _P
    f = (a[1] + a[0]) * (b[1] + b[0]) % _P
    g = 2 * a[3] * b[3] * _D % _P
    h = 2 * a[2] * b[2] % _P
    i, j, k, m = f - e, h - g, h + g, f + e
    return i * j % _P, k * m % _P, j * k % _P, i * m % _P


def _times(factor: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = _add(total, point)
        point, factor = _add(point, point), factor >> 1
    return total


def _is_zero(point: _Point) -> bool:
    return point[0] % _P == 0 and (point[1] - point[2]) % _P == 0


def _is_small(point: _Point) -> bool:
    return _is_zero(_times(8, point))
