"""Relational intervals with structural caps, sound in floating point.

The rules are written down in docs/relational-interval.md; `certs/kcdsl_certs/recheck` implements
them a second time.
"""
