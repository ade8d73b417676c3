"""Readers of recordings: JSONL, Parquet and safetensors files as tables of rows."""

from kcdsl_backends.empirical.rollouts.readers.files import SUFFIXES, read_rows
from kcdsl_backends.empirical.rollouts.readers.rows import Rows

__all__ = ["SUFFIXES", "Rows", "read_rows"]
