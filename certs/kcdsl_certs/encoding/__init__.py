"""Readers and writers of exact numbers, strict JSON, records and files."""
