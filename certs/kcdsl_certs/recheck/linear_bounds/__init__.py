"""Linear bounds of deviation and drift on the difference graph
(docs/proofs/difference-planes.md)."""
