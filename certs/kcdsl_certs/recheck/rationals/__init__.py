"""The rules that rational arithmetic can follow exactly (standard library alone)."""
