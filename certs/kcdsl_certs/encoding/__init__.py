"""Exact numbers, strict JSON, records and files: how every document is read."""
