"""Backward linear bounds on the difference graph (docs/difference-planes.md)."""
