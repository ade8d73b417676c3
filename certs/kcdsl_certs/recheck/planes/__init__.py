"""Planes on the difference graph, a second time (docs/difference-planes.md).

A forward walk derives every node's boxes by the interval rules and writes one entry per operation
on a tape; functionals of deviation and drift are pulled back over it. `derive` does it all.
"""

from kcdsl_certs.recheck.planes.derive import Derived, derive

__all__ = ["Derived", "derive"]
