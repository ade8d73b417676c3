"""Linear bounds of deviation and drift on the difference graph (docs/difference-planes.md)."""
