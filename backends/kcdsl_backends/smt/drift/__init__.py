"""z3 on drift goals: the backend `z3` (docs/reference/z3.md)."""
